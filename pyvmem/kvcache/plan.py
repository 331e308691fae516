# SPDX-License-Identifier: MIT
"""What a growth does, written as libvmem's operations: nothing is mapped or changed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyvmem.kvcache.events import prune
from pyvmem.kvcache.jobs import Growth, Piece
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.slots import Slot
from pyvmem.ops import OpBatch

__all__ = ["Planner"]


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
        self.mapping = OpBatch(2 * count)
        self._filling = OpBatch(count)
        self._base = base
        self._layout = layout
        self._zero_fill = zero_fill

    def plan(self, want: Sequence[tuple[Slot, int]], job: Growth, after: list[Any]) -> list[Piece]:
        """Writes `mapping`: new pages, and zero-fills of old ones that need not wait.

        Args:
            want: slots and the pages per tensor that each shall have.
            job: gets pieces, grants, handover and counts.
            after: gets the GPU work that the returned fills must follow.

        Returns:
            The pieces for `filling`.
        """
        layout, ops = self._layout, self.mapping
        size, tensors, stride = layout.page_size, layout.num_tensors, layout.tensor_bytes
        base, slot_bytes, unclean = self._base, layout.slot_bytes, not self._zero_fill
        late: list[Piece] = []
        new = reused = 0
        ops.clear()
        for slot, pages in want:
            low = slot.mapped
            if pages > low:
                job.pieces.append((slot, low, pages))
                new += pages - low
                address = base + slot.index * slot_bytes + low * size
                ops.populate(
                    address, (pages - low) * size, tensors, stride, size, unclean, spread=True
                )
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
        job.new_pages = new * tensors
        job.reused_pages = reused * tensors
        return late

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
