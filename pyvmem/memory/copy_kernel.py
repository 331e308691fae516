# SPDX-License-Identifier: MIT
"""The Triton kernel that copies scattered pieces; importing this module requires Triton.

A piece consists of a source address, a destination address and a length. Addresses may be in plain
reservations, which CUDA's own copies reject, or in page-locked host memory. A few thread blocks are
enough: each keeps 32 KiB of loads in flight, and 8 of them saturate PCIe.
"""

# Triton evaluates annotations, so this module does not import `annotations` from __future__, and
# annotates only the constexpr parameters.
import triton
import triton.language as tl

__all__ = ["copy_pieces"]


# `count` differs in every transfer and must not cause recompilation.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def copy_pieces(  # type: ignore[no-untyped-def]
    pieces,
    count,
    STEP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Copies `count` pieces. `pieces` holds all sources, then destinations, then lengths in bytes.

    With WIDE, all of these must be multiples of 16, and the kernel copies pairs of 64-bit words.
    """
    piece = tl.program_id(0)
    lane = tl.arange(0, STEP)
    while piece < count:
        from_addr = tl.load(pieces + piece)
        to_addr = tl.load(pieces + count + piece)
        length = tl.load(pieces + 2 * count + piece)
        if WIDE:
            source = tl.multiple_of(from_addr.to(tl.pointer_type(tl.int64)), 16)
            target = tl.multiple_of(to_addr.to(tl.pointer_type(tl.int64)), 16)
            end = tl.multiple_of(length // 16 * 2, 2)  # both words of a pair have the same mask
        else:
            source = from_addr.to(tl.pointer_type(tl.int8))
            target = to_addr.to(tl.pointer_type(tl.int8))
            end = length
        for start in range(0, end, STEP):
            at = start + lane
            tl.store(target + at, tl.load(source + at, mask=at < end), mask=at < end)
        piece += tl.num_programs(0)
