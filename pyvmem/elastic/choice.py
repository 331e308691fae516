# SPDX-License-Identifier: MIT
"""Chooses the page size of the pool.

Small pages slow down attention if a lot of memory is mapped; large pages waste memory if not:

                                       64 KB entries               2 MB entries
    attention, up to 8 GiB mapped      1.00 of cudaMalloc's time   1.00
    above, one tensor per layer        1.01 to 1.07                1.00
    above, one tensor for all layers   3.4 to 6.3                  1.00
    memory held when idle              live data                   + two pages per tensor

The times were measured on an H100 and an H200 (benchmarks/kernels). They start to differ
between 8 and 16 GiB, so the threshold is 8 GiB.

Since vLLM 0.32, all layers of a block can be contiguous (VLLM_KV_CACHE_LAYOUT=BLHNC or BLNHC). If
the size of such a block is a multiple of 2 MB, it shares no large page with other blocks: prefixes
never have to move, and one call maps the block. The pool does not request this layout because, on a
full H100, each decode step then takes 1.2 to 1.4% longer, even in stock vLLM
(results/logs/h100-vllm-layouts.log).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyvmem.elastic.geometry import Geometry
from pyvmem.plumbing.units import format_bytes

__all__ = ["LARGE", "SMALL", "choose_page"]

SMALL, LARGE = 64 << 10, 2 << 20
_FAST = 8 << 30  # up to this many mapped bytes, small pages cost no extra time
_PART = 32  # two large pages per tensor may cost at most 1/32 of the memory that can be mapped


def choose_page(
    num_blocks: int, sizes: Sequence[int], most: int, asked: int, limit: int | None
) -> tuple[int, str]:
    """Returns the page size for the KV tensors in bytes, and the reason for it, to be logged.

    Args:
        num_blocks: number of blocks in each tensor.
        sizes: size of each tensor in bytes.
        most: maximum number of bytes that can be mapped at once.
        asked: ``VMEM_PAGE_SIZE`` in bytes; 0 if unset.
        limit: ``VMEM_LIMIT`` in bytes; None if unset.

    Raises:
        ValueError: a page of `asked` bytes in each tensor adds up to more than the limit.
    """
    if asked:
        together = asked * len(sizes)
        if limit is not None and together > limit:
            raise ValueError(
                f"VMEM_PAGE_SIZE={asked}: a page in each of {len(sizes)} KV tensors is {together} "
                f"bytes, which is more than VMEM_LIMIT={limit}"
            )
        return asked, "VMEM_PAGE_SIZE says so"
    large = Geometry.of(num_blocks, LARGE, sizes)
    if all(one.block_bytes % LARGE == 0 for one in large.classes):
        return LARGE, "a block fills them"
    pages = sum(large.page_bytes(kind) for kind in range(len(large.classes)))
    text = f"up to {format_bytes(most)} can be mapped"
    if most <= _FAST:
        return SMALL, f"{text}, and up to {format_bytes(_FAST)} small pages cost no time"
    if 2 * pages * _PART > most:
        return SMALL, f"{text}, of which a page of 2 MB in every tensor is {format_bytes(pages)}"
    cost = "3.4 to 6.3 times" if len(sizes) == 1 else "up to 1.07 times"
    return LARGE, f"{text}, and pages of 64 KB would make attention take {cost} as long"
