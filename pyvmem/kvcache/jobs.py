# SPDX-License-Identifier: MIT
"""Batches in flight, and what each leaves behind when it ends well or fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from pyvmem.errors import VMemError
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import EMPTY, Span

__all__ = ["Cut", "Grant", "Growth", "Piece", "Ran"]

# Plain tuples: dozens are made in a `step_async` that must take microseconds.
Piece: TypeAlias = tuple[Slot, int, int]
"""Pages [low, high) of a slot, in every tensor."""
Grant: TypeAlias = tuple[Slot, int, int]
"""Slot, its owner's number, and the pages that this owner gets when the growth is done."""


@dataclass(slots=True, eq=False)
class Growth:
    """New pages and zero-fills of one `step`, or of an eager allocation.

    Two batches at most: `mapping` (new pages, and fills that need not wait), all or nothing, and
    `filling` (fills that come after earlier owners' GPU work). None: there was nothing to do, or it
    is done. `handover` holds earlier owners' work that the new owner's stream must follow where
    nothing is filled. The counts are of physical pages.
    """

    takes_pages: ClassVar[bool] = False

    slots: list[Slot]
    pieces: list[Piece] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    handover: list[Any] = field(default_factory=list)
    mapping: Any = None
    filling: Any = None
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
    """Pages [low, high) of a slot on their way back to the pool, after its last GPU work.

    `dirty` and `head` are what the slot's were before. `slides`: the pages left the window of
    `owner`, and the slot keeps what lies behind them. `span` names the shared pages among them,
    which come back when nobody else refers to them.
    """

    takes_pages: ClassVar[bool] = True

    slot: Slot
    low: int
    high: int
    dirty: int
    ticket: Any
    head: int = 0
    owner: int = 0
    slides: bool = False
    span: Span = EMPTY

    @property
    def pages(self) -> int:
        """Pages per tensor that were the slot's alone."""
        return self.high - self.low - self.span.pages

    def done(self) -> bool:
        """Whether the batch is finished, well or not."""
        return bool(self.ticket.done())


@dataclass(slots=True)
class Ran:
    """Stands for the ticket of a batch that ran in the calling thread."""

    error: VMemError | None = None

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Raises what the batch failed with."""
        if self.error is not None:
            raise self.error
