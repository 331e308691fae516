# SPDX-License-Identifier: MIT
"""Elastic KV memory for vLLM: ``VMEM_VLLM=1 vllm serve ...``.

Every process:

    plugin          vLLM's entry point: checks a configuration, sets its worker and scheduler
    versions        the tested versions of vLLM
    internals       the internals of vLLM that the plug-in uses

Worker processes:

    worker          vLLM's workers, with KV tensors on a reservation
    allocation      substitutes those tensors for vLLM's
    sleep           a sleep back end for the weights

The scheduler's process:

    scheduler       vLLM's schedulers, working on blocks that may have no memory
    demand          backs blocks before vLLM compares a request's demand with the free blocks
    engine          decides which blocks are backed, and for how long
    mover           moves prefixes between pages so that whole pages become free
    rank_discovery  connects the scheduler to its ranks, on this machine and on others
    channel         calls from the scheduler to ranks in other processes
    remote          ledger accounts of the ranks' devices, including those on other machines

KV offloading:

    offload         checks the connector; replaces vLLM's offloading spec with ours
    offload_spec    the spec for host memory, whose copies accept the pool's addresses
    offload_tiers   the spec for storage tiers below host memory
    offload_holds   blocks that stay mapped until they are stored; part of the scheduler

`pyvmem.elastic` contains the parts that do not depend on an engine. vLLM imports the modules of
this package only if the pool is enabled.
"""

__all__: list[str] = []
