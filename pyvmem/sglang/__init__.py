# SPDX-License-Identifier: MIT
"""Elastic KV memory for SGLang: ``VMEM_SGLANG=1``.

    plugin      SGLang's entry point: registers hooks and checks that SGLang applied them
    versions    lists the tested versions of SGLang
    internals   lists the internals of SGLang that the plug-in uses
    reasons     finds configurations that the pool does not support
    buffers     creates the KV tensors on a reservation
    allocator   makes SGLang's paged allocator handle pages that may have no memory
    pool        decides which pages have memory, and for how long
    ranks       makes tensor-parallel ranks agree on all decisions

`pyvmem.elastic` contains the engine-independent parts. SGLang imports the modules of this package
only if the pool is enabled.
"""

__all__: list[str] = []
