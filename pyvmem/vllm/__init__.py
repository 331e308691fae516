# SPDX-License-Identifier: MIT
"""vLLM with a KV cache that takes and returns memory by pages: ``VMEM_VLLM=1 vllm serve ...``.

    plugin      vLLM's entry point: checks a configuration and sets its worker and scheduler
    versions    the known versions of vLLM, the evidence that they work, and what a new version
                needs
    hooks       everything of vLLM that the pool uses, and why
    worker      KV tensors on reservations (memory), and the last step that uses each page
    allocation  substitutes those tensors for vLLM's
    scheduler   vLLM's scheduler and block pool, over blocks that may have no memory
    demand      computes vLLM's demand before vLLM compares it with the free blocks
    engine      decides which blocks are backed, and for how long
    mover       moves prefixes to other pages, so that theirs can be freed
    sleep       weights that sleep, through vLLM's interface for sleep back ends
    offload     KV offloading: supported connectors, and our spec in place of vLLM's (offload_spec;
                with tiers below host memory: offload_tiers; blocks held for it: offload_holds)
    reach       finds the scheduler's ranks, on this machine and on others
    channel     calls from the scheduler to ranks in other processes
    remote      the ledger accounts of the ranks' devices, also on other machines

Blocks, pages and quotas live in `pyvmem.elastic`, which is independent of the engine. Nothing here
is imported unless vLLM asks for it.
"""

__all__: list[str] = []
