# SPDX-License-Identifier: MIT
"""SGLang with a KV cache that takes and returns memory by pages: ``VMEM_SGLANG=1``.

    plugin      SGLang's entry point: puts the hooks in place, and checks that they are
    versions    the known versions of SGLang, the evidence that they work, what another one needs
    hooks       all that is used of SGLang, and why
    reasons     what does not work with it, and why
    buffers     KV tensors on reservations
    allocator   SGLang's paged allocator, over pages that may have no memory
    pool        which pages have memory, what for, and for how long
    ranks       what the ranks of tensor parallelism agree on

Pages, their records and quota are `pyvmem.elastic`. Nothing here is imported unless SGLang asks for
it.
"""

__all__: list[str] = []
