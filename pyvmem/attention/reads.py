# SPDX-License-Identifier: MIT
"""Computes the rows of a slot that a kernel reads, and block numbers for slots viewed as pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["BLOCK", "EXACT", "Blocks", "Reads"]

BLOCK = 32
"""Rows per block in FlashAttention-3's paged call.

If the block size is not a multiple of its tile, it loads row by row up to ``seqused_k`` instead of
using TMA. Its tiles have more than 32 rows for every head size; some have 64.
"""


@dataclass(frozen=True)
class Reads:
    """The rows of a slot that a kernel may read, given a request's length.

    Attributes:
        block: the length is rounded up to a multiple of this many rows.
        tile: rows that may be read beyond the rounded length.
        before: rows that may be read before a window's first row, because whole tiles are loaded.
    """

    block: int = 1
    tile: int = 0
    before: int = 0

    @property
    def past(self) -> int:
        """The maximum number of rows read past a request's length."""
        return self.block - 1 + self.tile

    def end(self, length: int, longest: int) -> int:
        """Returns the exclusive end of the rows that may be read, at most the slot's `longest`."""
        return min(-(-length // self.block) * self.block + self.tile, longest)

    def first(self, length: int, new: int, window: int) -> int:
        """Returns the first row that the last `new` of `length` tokens may read.

        Returns 0 if `window` is 0, which means that a token attends to all earlier tokens.
        """
        return max(0, length - new - window + 1 - self.before) if window else 0


EXACT = Reads()


class Blocks(NamedTuple):
    """Views a tensor of slots as paged blocks, and computes each slot's block numbers.

    Consecutive blocks of the view start `unit` elements apart. If slots do not start on block
    boundaries, `unit` is smaller than a block: blocks overlap, and a slot uses only some of them.
    Block b of slot s has number ``s * slot + b * step``. A slot's last block may extend into the
    next slot, but those rows are always past the request's length.

    Attributes:
        rows: rows per block.
        unit: elements between the starts of consecutive blocks of the view.
        slot, step: units between consecutive slots, and between consecutive blocks of a slot.
        per_slot: number of blocks that cover a slot.
    """

    rows: int
    unit: int
    slot: int
    step: int
    per_slot: int

    @classmethod
    def of(cls, rows_per_slot: int, slot_stride: int, row_stride: int, rows: int = BLOCK) -> Blocks:
        """Computes the blocks for the given strides, which are in elements."""
        unit = math.gcd(slot_stride, rows * row_stride)
        step = rows * row_stride // unit
        return cls(rows, unit, slot_stride // unit, step, -(-rows_per_slot // rows))

    def last(self, slots: int) -> int:
        """Returns the largest block number."""
        return (slots - 1) * self.slot + (self.per_slot - 1) * self.step

    def wanted(self, length: int) -> int:
        """Returns a block table's width for a length: a power of two, but at most `per_slot`.

        Powers of two keep the number of different widths small.
        """
        needed = -(-length // self.rows)
        return min(1 << (needed - 1).bit_length(), self.per_slot)

    def view(self, tensor: Any) -> Any:
        """Views ``[slots, rows, heads, head_dim]`` as ``[blocks, rows, heads, head_dim]``."""
        slots, longest, heads, width = tensor.shape
        slot, row, head, one = tensor.stride()
        block = (self.rows - 1) * row + (heads - 1) * head + width
        elements = (slots - 1) * slot + (longest - 1) * row + (heads - 1) * head + width
        count = (elements - block) // self.unit + 1
        return tensor.as_strided((count, self.rows, heads, width), (self.unit, row, head, one))
