# SPDX-License-Identifier: MIT
"""Batches in flight, and what each leaves behind when it ends well or fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyvmem.kvcache.slots import Slot

__all__ = ["Cut", "Grant", "Growth", "Piece"]


class Piece(NamedTuple):
    """Pages [low, high) of a slot, in every tensor."""

    slot: Slot
    low: int
    high: int

    @property
    def pages(self) -> int:
        """Pages per tensor."""
        return self.high - self.low


class Grant(NamedTuple):
    """Pages that the owner gets when the growth is done, unless it is gone by then."""

    slot: Slot
    owner: int
    pages: int


@dataclass(slots=True, eq=False)
class Growth:
    """New pages and zero-fills of one `step`, or of an eager allocation.

    Two batches at most: `mapping` (new pages, and fills that need not wait), all or nothing, and
    `filling` (fills that come after earlier owners' GPU work). None: there was nothing to do, or it
    is done. `handover` holds earlier owners' work that the new owner's stream must follow where
    nothing is filled. The counts are of physical pages.
    """

    pieces: list[Piece] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    mapping: Any = None
    filling: Any = None
    handover: list[Any] = field(default_factory=list)
    granted: bool = False
    new_pages: int = 0
    reused_pages: int = 0
    zeroed_pages: int = 0

    def done(self) -> bool:
        """Whether both batches are finished, well or not."""
        return (self.mapping is None or self.mapping.done()) and (
            self.filling is None or self.filling.done()
        )


@dataclass(slots=True, eq=False)
class Cut:
    """Pages of one slot on their way back to the pool, after the slot's last GPU work."""

    piece: Piece
    dirty: int
    ticket: Any

    def done(self) -> bool:
        """Whether the batch is finished, well or not."""
        return bool(self.ticket.done())
