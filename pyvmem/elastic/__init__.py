# SPDX-License-Identifier: MIT
"""Elastic KV memory for inference engines: the parts that depend on no engine.

    settings        parses the variables VMEM_*
    choice          chooses the page size for a model and a card
    geometry        maps blocks of the KV cache to physical pages
    memory          KV tensors on reservations; maps pages, and unmaps them after their last step
    backing         records which blocks have memory
    idle_blocks     chooses which idle block is handed out first
    quota           bytes that the engine may map on each device, by its limit and the ledger
    peak            a sliding maximum
    metrics         exports the ledger's numbers on the engine's /metrics
    engine_source   checks an engine's source for the symbols that a plug-in uses
    versions        decides whether a version of an engine is supported

`pyvmem.vllm` and `pyvmem.sglang` are built on it.
"""

__all__: list[str] = []
