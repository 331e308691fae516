# SPDX-License-Identifier: MIT
"""Elastic KV memory for SGLang: ``VMEM_SGLANG=1``.

    plugin      SGLang's entry point: registers hooks, and checks that SGLang applied them
    versions    the tested versions of SGLang
    internals   the internals of SGLang that the plug-in uses
    reasons     configurations that exclude the pool
    buffers     creates the KV tensors on a reservation
    allocator   SGLang's paged allocator, over pages that may have no memory
    pool        decides which pages have memory, and for how long
    ranks       agreement between the ranks of tensor parallelism

`pyvmem.elastic` has the parts that depend on no engine. SGLang imports a module of this package
only if the pool is enabled.
"""

__all__: list[str] = []
