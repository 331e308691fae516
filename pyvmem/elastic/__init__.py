# SPDX-License-Identifier: MIT
"""Elastic KV memory for inference engines: the engine-independent parts.

    settings        parses the variables VMEM_*
    choice          chooses the page size for a model and a GPU
    geometry        maps blocks of the KV cache to physical pages
    memory          holds KV tensors on a reservation; maps and unmaps their pages
    backing         tracks which blocks have memory
    idle_blocks     chooses which idle block is handed out first
    quota           limits the bytes that the engine maps on each device
    peak            tracks the maximum over a sliding window
    metrics         adds the ledger's metrics to the engine's /metrics
    engine_source   checks an engine's source for the symbols that a plug-in uses
    versions        decides whether an engine's version is supported

`pyvmem.vllm` and `pyvmem.sglang` are built on this package.
"""

__all__: list[str] = []
