# SPDX-License-Identifier: MIT
"""What a growth does, written as libvmem's operations: nothing is mapped or changed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyvmem.kvcache.events import prune
from pyvmem.kvcache.jobs import Growth, Piece
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.slots import Slot
from pyvmem.ops import OpBatch

__all__ = ["Planner", "Source"]


class Source(NamedTuple):
    """Rows that new pages begin with, at the same places of their slot.

    Attributes:
        addr: where page 0 of the slot is, or would be, in tensor 0.
        stride: bytes between tensors.
        nbytes: from there to the end of the rows; what is beyond is zero.
    """

    addr: int
    stride: int
    nbytes: int


class Planner:
    """Writes the two batches of a `Growth`, each into memory that is used again and again.

    Args:
        base: address of the cache's reservation.
        layout: where everything lies.
        count: slots of the cache.
        zero_fill: pages that an earlier owner may have written are zeroed before they are granted.

    Attributes:
        mapping: what the last `plan` wrote.
    """

    def __init__(self, base: int, layout: Layout, count: int, *, zero_fill: bool) -> None:
        # Of a slot: small pages, large ones, small ones again, and a fill.
        self.mapping = OpBatch((4 if layout.large_pages else 2) * count)
        self._filling = OpBatch(count)
        self._base = base
        self._layout = layout
        self._zero_fill = zero_fill

    def plan(
        self,
        want: Sequence[tuple[Slot, int]],
        job: Growth,
        after: list[Any],
        large: bool = True,
        source: Source | None = None,
        goals: Sequence[int] | None = None,
    ) -> list[Piece]:
        """Writes `mapping`: new pages, and zero-fills of old ones that need not wait.

        Args:
            want: slots and the pages per tensor that each shall have.
            job: gets pieces, grants, handover and counts.
            after: gets the GPU work that the returned fills must follow.
            large: whether whole aligned parts become large pages, where the cache has them.
            source: what the new pages hold; None: zeros.
            goals: pages per tensor to map for each, what it shall have or more.

        Returns:
            The pieces for `filling`.
        """
        layout, ops = self._layout, self.mapping
        size, tensors, stride = layout.page_size, layout.num_tensors, layout.tensor_bytes
        base, slot_bytes, unclean = self._base, layout.slot_bytes, not self._zero_fill
        late: list[Piece] = []
        unit = layout.large_pages if large else 0
        new = reused = 0
        plain: list[tuple[int, int]] = []
        ops.clear()
        for place, (slot, pages) in enumerate(want):
            low = slot.mapped
            if pages > low:
                high = pages if goals is None else goals[place]
                job.pieces.append((slot, low, high))
                new += high - low
                if source is not None or (unit and high - low >= unit):
                    self._populate(slot, low, high, unit, source, job)
                else:
                    plain.append((base + slot.index * slot_bytes + low * size, (high - low) * size))
            if not slot.active:
                continue
            job.grants.append((slot, slot.owner, pages))
            granted = slot.granted
            if low <= granted:
                continue
            reused += min(pages, low) - granted
            dirty = min(pages, slot.dirty)
            if dirty <= granted:
                continue
            slot.events = prune(slot.events)
            if unclean:
                job.handover.extend(slot.events)
            elif slot.events:
                late.append((slot, granted, dirty))
                after.extend(slot.events)
            else:
                job.zeroed_pages += (dirty - granted) * tensors
                address = base + slot.index * slot_bytes + granted * size
                ops.fill(address, (dirty - granted) * size, 0, tensors, stride)
        if plain:
            ops.populate_each(plain, tensors, stride, size, unclean, spread=True)
        job.new_pages = new * tensors
        job.reused_pages = reused * tensors
        return late

    def _populate(
        self, slot: Slot, low: int, high: int, unit: int, source: Source | None, job: Growth
    ) -> None:
        """New pages [low, high): large ones for whole aligned parts, and with contents."""
        layout = self._layout
        size, first, last = layout.page_size, high, high
        if unit:
            first = min(-(-low // unit) * unit, high)
            last = max(high // unit * unit, first)
        for begin, end in ((low, first), (first, last), (last, high)):
            if begin == end:
                continue
            large = begin == first < last
            if large:
                job.large.append((slot, begin, end))
            copied = 0 if source is None else min(end * size, source.nbytes) - begin * size
            contents = {}
            if source is not None and copied > 0:
                contents = {
                    "copy_from": source.addr + begin * size,
                    "copy_stride": source.stride,
                    "copy_bytes": copied,
                }
            self.mapping.populate(
                self._base + layout.offset(slot.index, begin),
                (end - begin) * size,
                layout.num_tensors,
                layout.tensor_bytes,
                unit * size if large else size,
                not self._zero_fill and not contents,
                spread=not large,
                **contents,
            )

    def filling(self, pieces: Sequence[Piece]) -> OpBatch:
        """The zero-fills of pages that an earlier owner's GPU work may still touch."""
        layout, ops = self._layout, self._filling
        ops.clear()
        for slot, low, high in pieces:
            ops.fill(
                self._base + layout.offset(slot.index, low),
                (high - low) * layout.page_size,
                count=layout.num_tensors,
                stride=layout.tensor_bytes,
            )
        return ops
