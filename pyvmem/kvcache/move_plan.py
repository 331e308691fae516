# SPDX-License-Identifier: MIT
"""What the phases of a move do, written as libvmem's operations: nothing changes here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.jobs import Move
    from pyvmem.reservation import Reservation

__all__ = ["MovePlanner"]


class MovePlanner:
    """Writes the batches of a `Move`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._layout = core.layout

    def place(self, move: Move) -> int:
        """Settles where in scratch addresses the pages go; returns the bytes that they need."""
        layout = self._layout
        unit = max(1, layout.large_pages)
        move.first = move.stretches[0][0] // unit * unit
        pages = -(-move.stretches[-1][1] // unit) * unit - move.first
        move.stride = pages * layout.page_size
        return move.stride * layout.num_tensors

    def copies(self, move: Move) -> OpBatch:
        """New pages at the scratch addresses, with what the slot has."""
        layout, ops = self._layout, OpBatch(len(move.stretches))
        for low, high, kind in move.stretches:
            ops.populate(
                self._scratch(move, low),
                (high - low) * layout.page_size,
                layout.num_tensors,
                move.stride,
                kind.unit * layout.page_size,
                location=int(kind.tier.location),
                device=kind.tier.device,
                copy_from=self._own(move, low),
                copy_stride=layout.tensor_bytes,
            )
        return ops

    def swap(self, move: Move) -> OpBatch:
        """The new pages replace the old ones, and the scratch addresses are empty again.

        The copies are over. A handle is made for each stretch, which the batch consumes.
        """
        layout, ops = self._layout, OpBatch(2 * len(move.stretches))
        tensors = layout.num_tensors
        for low, high, _ in move.stretches:
            scratch, nbytes = self._scratch(move, low), (high - low) * layout.page_size
            handle = self._core.mapper.gather(scratch, nbytes, tensors, move.stride)
            ops.map(
                self._own(move, low),
                nbytes,
                handle,
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
            )
            ops.unmap(scratch, nbytes, tensors, move.stride)
        return ops

    def unmaps(self, move: Move, addresses: Reservation) -> OpBatch:
        """The scratch addresses of a move are empty again."""
        layout, ops = self._layout, OpBatch(len(move.stretches))
        for low, high, _ in move.stretches:
            nbytes = (high - low) * layout.page_size
            at = addresses.addr + (low - move.first) * layout.page_size
            ops.unmap(at, nbytes, layout.num_tensors, move.stride, holes=True)
        return ops

    def _own(self, move: Move, page: int) -> int:
        """A page's address in tensor 0."""
        return self._core.pager.base + self._layout.offset(move.slot.index, page)

    def _scratch(self, move: Move, page: int) -> int:
        """Where its successor lies."""
        assert move.addresses is not None
        return move.addresses.addr + (page - move.first) * self._layout.page_size
