# SPDX-License-Identifier: MIT
"""Batches in flight, and what each leaves behind when it ends well or fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pyvmem.errors import Timeout, VMemError
from pyvmem.kvcache.places import Stretch, Tier
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import EMPTY, Span

if TYPE_CHECKING:
    from pyvmem.pages import Ticket
    from pyvmem.reservation import Reservation

__all__ = ["Cut", "Grant", "Growth", "Move", "Piece", "Quiet", "Ran"]

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
    nothing is filled. `large` holds the pieces that are large pages. The counts are of physical
    pages.
    """

    takes_pages: ClassVar[bool] = False

    slots: list[Slot]
    pieces: list[Piece] = field(default_factory=list)
    large: list[Piece] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    handover: list[Any] = field(default_factory=list)
    mapping: Any = None
    filling: Any = None
    granted: bool = False
    new_pages: int = 0
    reused_pages: int = 0
    zeroed_pages: int = 0

    @property
    def awaited(self) -> bool:
        """Whether an owner waits for it, who has not been freed since it began."""
        return not self.granted and any(slot.owner == owner for slot, owner, _ in self.grants)

    def done(self) -> bool:
        """Whether both batches are finished, well or not."""
        return (self.mapping is None or self.mapping.done()) and (
            self.filling is None or self.filling.done()
        )


@dataclass(slots=True, eq=False)
class Cut:
    """Pages [low, high) of a slot on their way back to the pool, after its last GPU work.

    `dirty`, `head` and `places` are what the slot's were before; `away` counts those of the pages
    that do not lie in the device and are the slot's alone. `slides`: the pages left the window of
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
    places: list[Stretch] = field(default_factory=list)
    away: dict[Tier, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Pages per tensor of the device that were the slot's alone."""
        return self.high - self.low - self.span.pages - sum(self.away.values())

    def done(self) -> bool:
        """Whether the batch is finished, well or not."""
        return bool(self.ticket.done())


class Ran:
    """Stands for the ticket of a batch that ran in the calling thread, and did not fail."""

    __slots__ = ()

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits for nothing."""


@dataclass(slots=True, eq=False)
class Move:
    """Pages of one slot on their way.

    Attributes:
        slot: whose.
        stretches: what becomes of which pages; nothing else of the slot changes.
        runs: stretches that are one physical run, and are only to be mapped in one piece.
        first: page that the scratch addresses begin with.
        stride: bytes between tensors there.
        addresses: scratch; None where nothing is copied.
        ticket: of the copies; None: they are over.
        promotes: it is for larger pages, and may be given up when memory is short.
    """

    slot: Slot
    stretches: list[Stretch]
    runs: list[tuple[int, int]] = field(default_factory=list)
    first: int = 0
    stride: int = 0
    addresses: Reservation | None = None
    ticket: Ticket | None = None
    promotes: bool = False

    def here(self) -> int:
        """New pages per tensor that lie in the device."""
        return sum(high - low for low, high, kind in self.stretches if not kind.away)

    def away(self) -> dict[Tier, int]:
        """New pages per tensor that do not, by tier."""
        found: dict[Tier, int] = {}
        for low, high, kind in self.stretches:
            if kind.away:
                found[kind.tier] = found.get(kind.tier, 0) + high - low
        return found

    def begins_before(self, page: int) -> bool:
        """Whether a page below this one is on its way."""
        starts = [low for low, *_ in self.runs] + [low for low, *_ in self.stretches]
        return min(starts, default=page) < page

    def ends_after(self, page: int) -> bool:
        """Whether this page or a later one is on its way."""
        ends = [high for _, high in self.runs] + [high for _, high, _ in self.stretches]
        return max(ends, default=0) > page

    def done(self) -> bool:
        """Whether the copies are over, well or not."""
        return self.ticket is None or self.ticket.done()


class Quiet:
    """A ticket whose failure matters to nobody any more."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def done(self) -> bool:
        """Whether the batch is finished, well or not."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        """As `Ticket.wait`, but raises `Timeout` alone."""
        try:
            self._ticket.wait(timeout)
        except Timeout:
            raise
        except VMemError:
            pass
