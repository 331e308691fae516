# SPDX-License-Identifier: MIT
"""vLLM with a KV cache that takes and returns memory by pages: ``VMEM_VLLM=1 vllm serve ...``.

    plugin      vLLM's entry point: checks a configuration and sets its worker and scheduler
    versions    the known versions of vLLM, the evidence that they work, and what another one needs
    hooks       all that is used of vLLM, and why
    worker      KV tensors on reservations (memory), and the last step that uses each page
    allocation  how vLLM comes to use those tensors
    scheduler   vLLM's scheduler and block pool, over blocks that may have no memory
    demand      what vLLM is about to take, seen before it compares that with what is free
    engine      which blocks are backed, what for, and for how long
    mover       prefixes that go to other pages, so that theirs can be given back
    sleep       weights that sleep, by vLLM's interface for sleep back ends
    offload     KV offloading: which connectors work, and our spec in the place of vLLM's
                (offload_spec; what is held for it: offload_holds)
    metrics     the ledger's numbers on vLLM's /metrics
    reach       how the scheduler finds its ranks, on this machine and on others
    channel     calls from the scheduler to ranks in other processes
    remote      the accounts of the ranks' devices, of another machine's too

Blocks, pages and quota are `pyvmem.elastic`, which knows no engine. Nothing here is imported unless
vLLM asks for it.
"""

__all__: list[str] = []
