# SPDX-License-Identifier: MIT
"""KV memory that an engine's scheduler takes and returns by pages; knows no engine.

    settings    the variables VMEM_*
    choice      the page size that suits the model and the card
    geometry    which physical pages a block of the KV cache lies on
    memory      KV tensors on reservations: pages mapped, and unmapped after the last step on them
    backing     the records: which blocks have memory
    idle        blocks with memory and without contents, by the pages that they share
    hooks       what a plug-in uses of its engine, looked for in the source
    quota       what the engine may have of each device: its limit, and the ledger
    metrics     the ledger's numbers on the engine's own /metrics

`pyvmem.vllm` and `pyvmem.sglang` are built on it.
"""

__all__: list[str] = []
