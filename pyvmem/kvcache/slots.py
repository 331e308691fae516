# SPDX-License-Identifier: MIT
"""The slots of a cache and the choice among them. No memory is touched here.

Pages of one slot, counted per tensor (every tensor of a slot has the same):

    0 ... head ..... shared ..... granted ..... mapped ..... slot_pages
    | gone | owner's,  | owner's  | kept mapped, | addresses |
    |      | read-only | alone    | no owner     | alone     |

`dirty` marks how far earlier owners may have written: before pages below it are granted they are
filled with zeros. A free slot has granted == 0; what it has mapped is its cache. Pages between
granted and mapped have no owner, so they may be unmapped at any time once the earlier owners' GPU
work is over.

With a sliding window (migration.py) the first pages, below `head`, have been unmapped again, or
were never mapped, where a request began with what another's window held.

Shared pages (pages.py) are mapped read-only, but in a `writer`; others may have them too. A free
slot that has some is *stale*: all its pages are unmapped together before another request has a row.
So is a slot that slid, or that has pages outside the device. Unmapping usually begins at once. A
*kept* slot is an exception: all that it has mapped are recorded rows, so that the next turn of its
conversation can go on in it without a driver call.

Pages below `whole` may be mapped by entries of 2 MiB, in blocks of `block` pages. No part of such a
block can be unmapped while GPU work may read any of it. So what a running request has of the block
that its last page lies in is not spare, although it was not granted: `KVCache.step` cuts it off
where memory is short, after all work on the device.

`SlotTable` finds slots by a look at each of them, in C: there is no index that could be wrong, and
no other copy of what a slot says.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pyvmem._native import Columns, Kind, Row
from pyvmem.errors import NotRecoverable, Timeout, VMemError
from pyvmem.kvcache.events import prune
from pyvmem.kvcache.pages import DEVICE, EMPTY, NOWHERE, Places, Span, Stretch, Tier
from pyvmem.plumbing.logs import warn

if TYPE_CHECKING:
    from pyvmem.kvcache.journal import Journal
    from pyvmem.memory.pages import Ticket
    from pyvmem.memory.reservation import Reservation

__all__ = [
    "Unmap",
    "Grant",
    "Growth",
    "Move",
    "Piece",
    "QuietTicket",
    "DoneTicket",
    "Slot",
    "SlotTable",
    "Slide",
]

_log = logging.getLogger(__name__)


class Slot(Row):
    """One request's place in every tensor; edits change it, and so does the C call of a growth.

    Attributes:
        index: the reqid.
        addr: of page 0 in the first tensor.
        active: given to a request.
        broken: an undo failed in its addresses; never handed out again.
        writer: its owner may write the shared pages, which are read-only elsewhere.
        lost: pages in its middle could not be mapped again; all stay until the cache is closed.
        kept: free, with recorded rows mapped read-only for a request that begins with them.
        mapped: pages there, or promised by a growth in flight.
        granted: pages that the owner may use.
        whole: pages below this may be mapped by entries of 2 MiB; a multiple of `block`.
        block: pages in one; 0: there are none.
        head: pages below this are not there, since they left the window; 0 without a window.
        dirty: pages below this may hold what an earlier owner wrote.
        owner: counts owners, so that work begun for one is not credited to the next.
        events: earlier owners' last GPU work, as far as it is not known to be over.
        job: the one batch in flight over this slot's addresses.
        span: the shared pages, from `head` on.
        pins: nodes of the prefix tree that are kept for the request.
        places: which pages lie outside the device.
        freed_at: step at which it became free.
        freed_order: counts up with every slot that becomes free.
        stale: an earlier owner's shared or moved pages are there, or its first ones missing; C says
            so by the others.
    """

    __slots__ = ("events", "pins")

    span: Span
    places: Places

    def __init__(self, index: int, addr: int = 0, block: int = 0) -> None:
        self.index, self.addr, self.block = index, addr, block
        self.events: list[Any] = []
        self.pins: list[Any] = []
        self.job, self.span, self.places = None, EMPTY, NOWHERE

    @property
    def shared(self) -> int:
        """The end of the shared pages; where there are none, `head`."""
        return self.head + self.span.pages

    def shared_part(self, low: int, high: int) -> Span:
        """The shared pages in [low, high) of the slot."""
        return self.span.slice(low - self.head, high - self.head)

    def spare_beyond(self, keep: int) -> int:
        """Pages of the device that it can lose and still have `keep`; a stale one keeps none.

        Shared ones are counted elsewhere.
        """
        granted = self.granted
        if granted < self.whole and self.active:
            granted = self.firm
        return self.here_from(max(self.shared, granted, 0 if self.stale else keep))

    def loose_beyond(self, keep: int) -> int:
        """Pages that it can lose besides, once no GPU work is under way."""
        if not self.active or self.granted >= self.whole or self.lost:
            return 0
        if isinstance(self.job, Growth):
            return 0
        return self.here_from(max(self.shared, self.granted, keep)) - self.spare_beyond(keep)

    @property
    def firm(self) -> int:
        """The end of the pages that stay while the owner's work may run."""
        granted = self.granted
        return granted + -granted % self.block if granted < self.whole else granted

    def whole_with(self, low: int, high: int, whole: int) -> int:
        """`whole` once pages [low, high) are mapped: whole blocks may have large entries."""
        block = self.block
        if block and (low + -low % block) + block <= high:
            return max(whole, high - high % block)
        return whole

    def whole_below(self, page: int) -> int:
        """`whole` once pages from this one on are gone, or are to be."""
        return page - page % self.block if self.whole > page else self.whole

    @property
    def grows_from(self) -> int:
        """The page at which it grows; 0 if stale: its pages are unmapped first."""
        return 0 if self.stale else self.mapped

    def here_from(self, page: int) -> int:
        """Pages of the device from this one on."""
        if not self.places.noted:
            return max(0, self.mapped - page)
        return max(0, self.mapped - page - sum(self.places.away(page, self.mapped).values()))

    @property
    def spare(self) -> int:
        """Mapped pages that no request owns, and that can go; a kept slot's are the prefixes'."""
        if self.kept:
            return 0
        return self.mapped - max(self.firm, self.head)


class SlotTable:
    """All slots, and how to find one.

    Args:
        count: how many.
        journal: of the cache.
        base: address of the first slot.
        stride: bytes between slots.
        block: pages that an entry of 2 MiB maps.

    Attributes:
        lockstep: answers depend on the sequence of calls alone (`ParallelKVCache`), never on how
            far the background is. What else would be an answer, such as a driver that is out of
            memory, is an error then.
        changes: counts slots taken and given back.
        columns: the slots, for C.
    """

    lockstep: ClassVar[bool] = False

    def __init__(
        self, count: int, journal: Journal, base: int = 0, stride: int = 0, block: int = 0
    ) -> None:
        self.changes = 0
        self._journal = journal
        self.slots = [Slot(i, base + i * stride, block) for i in range(count)]
        self.columns = Columns(self.slots)
        self.columns.place.block = block
        self._order = count_up(1)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def pick(self, every: int, none: int = 0) -> list[Slot]:
        """The slots of which every `Kind` holds, and none of others; least recently used first."""
        return list(map(self.slots.__getitem__, self.columns.pick(every, none)))

    @property
    def free(self) -> list[Slot]:
        """The slots that a request may get, least recently used first."""
        return self.pick(Kind.FREE)

    @property
    def free_count(self) -> int:
        """How many these are."""
        return self.columns.count(Kind.FREE)

    @property
    def stale(self) -> list[Slot]:
        """The slots whose pages must all go, taken or not."""
        return self.pick(Kind.STALE, Kind.LOST)

    def change(self, slot: Slot, **values: Any) -> None:
        """Sets attributes of a slot."""
        self._journal.change([[slot, name, value] for name, value in values.items()])

    # ---- ownership -------------------------------------------------------------------------------

    def take(self, slot: Slot) -> None:
        """Gives a free slot to a new owner."""
        self.changes += 1
        self.change(slot, active=True, kept=False, owner=slot.owner + 1)

    def give_back(self, slot: Slot, event: Any, now: int, edits: Sequence[list[Any]] = ()) -> None:
        """Ends an ownership, with edits; what was granted is dirty from now on."""
        self.changes += 1
        events = prune(slot.events) if slot.events else []
        self._journal.change(
            [
                [slot, "active", False],
                [slot, "writer", False],
                [slot, "owner", slot.owner + 1],
                [slot, "dirty", max(slot.dirty, slot.granted)],
                [slot, "granted", 0],
                [slot, "freed_at", now],
                [slot, "freed_order", next(self._order)],
                [slot, "events", events if event is None else [*events, event]],
                *edits,
            ]
        )

    def mark_broken(self, slot: Slot) -> None:
        """Never hands this slot out again."""
        warn(_log, "slot", "reqid %d is retired: a failed batch was not rolled back", slot.index)
        self.change(slot, broken=True)

    def lose(self, slot: Slot, error: VMemError) -> NotRecoverable:
        """Retires the slot of a request whose rows are gone, and returns what to raise."""
        self.mark_broken(slot)
        self.change(slot, lost=True)
        return NotRecoverable(
            f"reqid {slot.index} has lost its rows, free it: {error}",
            errno=errno.ENOTRECOVERABLE,
            op="KVCache",
        )

    # ---- choosing --------------------------------------------------------------------------------

    def best_fit(self, pages: int) -> Slot | None:
        """The free slot with the fewest pages that are enough, else the one with the most.

        Of equal ones that which has been free for longest. Slots that are losing pages come last:
        growing them means waiting for that. None when no slot is free.
        """
        for losing in (Kind.LOSING, 0):
            found = self.columns.fit(pages, Kind.FREE, losing)
            if found is not None:
                return self.slots[found]
        return None

    def to_prepare(self, pages: int) -> Slot | None:
        """The free slot in which to map so many pages ahead; None: there is none.

        That with the fewest of those that have them, else that with the most of those without a
        batch in flight; of equal ones as `best_fit`, and no stale one.
        """
        for busy in (0, Kind.BUSY):
            found = self.columns.fit(pages, Kind.FREE, Kind.STALE | busy)
            if found is not None and (busy or self.slots[found].mapped >= pages):
                return self.slots[found]
        return None

    def emptiest(self, count: int) -> list[Slot]:
        """The free slots that are soonest without a page; fewer when there are not so many."""
        found: list[Slot] = []
        slots = empty = self.pick(Kind.FREE, Kind.LOSING | Kind.CACHED)
        while len(found) < count:
            later: list[Slot] = []
            for slot in slots:
                if len(found) == count:
                    return found
                if slot.events:
                    slot.events = prune(slot.events)
                (later if slot.events else found).append(slot)
            found += later
            if slots is not empty:
                break
            others = set(self.free).difference(empty)
            slots = sorted(others, key=attrgetter("mapped", "freed_order", "index"))
        return found[:count]

    def victims(self, active: bool = True) -> Iterator[Slot]:
        """Slots with spare pages, in the order in which they should lose them.

        Free slots before active ones' leftovers; those whose GPU work is over before those that
        must wait for it; least recently used first. Slots with a batch in flight are left out.

        Args:
            active: go on with active slots.
        """
        for kind in (Kind.CACHED, Kind.LEFT) if active else (Kind.CACHED,):
            later: list[Slot] = []
            for slot in self.pick(kind):
                if slot.job is not None:
                    continue
                if slot.events:
                    slot.events = prune(slot.events)
                if slot.events:
                    later.append(slot)
                else:
                    yield slot
            yield from (slot for slot in later if slot.job is None)


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
    nothing is filled. One that is `ahead` grants nothing: nobody asked for it. The failure of a
    `quiet` one is not raised: nobody asked for it, or another group's growth in the same batch
    raises it. The counts are of physical pages.
    """

    takes_pages: ClassVar[bool] = False

    slots: list[Slot]
    pieces: list[Piece] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    handover: list[Any] = field(default_factory=list)
    mapping: Any = None
    filling: Any = None
    granted: bool = False
    ahead: bool = False
    quiet: bool = False
    new_pages: int = 0
    reused_pages: int = 0
    zeroed_pages: int = 0
    filling_pages: int = 0

    @property
    def awaited(self) -> bool:
        """True if an owner that has not been freed since it began still waits for it."""
        return not self.granted and any(slot.owner == owner for slot, owner, _ in self.grants)

    def deserted(self) -> list[Slot]:
        """Its slots in which no owner waits for it: what they have can go when it is over."""
        if not self.awaited:
            return self.slots
        waiting = {slot for slot, owner, _ in self.grants if slot.owner == owner}
        return [slot for slot in self.slots if slot not in waiting]

    def done(self) -> bool:
        """True if both batches are finished, well or not."""
        return (self.mapping is None or self.mapping.done()) and (
            self.filling is None or self.filling.done()
        )


@dataclass(slots=True, eq=False)
class Unmap:
    """Pages [low, high) of a slot on their way back to the pool, after its last GPU work.

    `dirty`, `head` and `places` are what the slot's were before; `away` counts those of the pages
    that do not lie in the device and are the slot's alone. `span` names the shared pages among
    them, which come back when nothing else refers to them.
    """

    takes_pages: ClassVar[bool] = True

    slot: Slot
    low: int
    high: int
    dirty: int
    ticket: Any
    head: int = 0
    span: Span = EMPTY
    places: Places = NOWHERE
    away: dict[Tier, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Pages per tensor of the device that were the slot's alone."""
        return self.high - self.low - self.span.pages - sum(self.away.values())

    def done(self) -> bool:
        """True if the batch is finished, well or not."""
        return bool(self.ticket.done())


@dataclass(slots=True, eq=False)
class Slide:
    """Pages that left the windows of slots, on their way back to the pool: one batch for all.

    Slot ``slots[i]``, which `owners[i]` had, loses pages [`lows[i]`, `heads[i]`), and of them it
    shared `shares[i]`, the first ones; `span` names all of these. `places` is what slots noted of
    these pages, and `away` counts those that do not lie in the device and were not shared. The
    failure of a `quiet` one is reported by another group's.
    """

    takes_pages: ClassVar[bool] = True

    slots: list[Slot]
    owners: list[int]
    lows: list[int]
    heads: list[int]
    shares: list[Span]
    span: Span
    ticket: Any
    quiet: bool
    places: dict[Slot, Places]
    away: dict[Tier, int]

    @property
    def pages(self) -> int:
        """Pages per tensor of the device that were the slots' alone, of all together."""
        return sum(self.heads) - sum(self.lows) - self.span.pages - sum(self.away.values())

    def done(self) -> bool:
        """True if the batch is finished, well or not."""
        return bool(self.ticket.done())


class DoneTicket:
    """The ticket of a batch that ran in the calling thread and did not fail."""

    __slots__ = ()

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Waits for nothing."""


@dataclass(slots=True, eq=False)
class Move:
    """Pages of one slot that are being replaced or joined.

    Attributes:
        slot: whose.
        stretches: where which pages are to lie; nothing else of the slot changes.
        runs: pages that may be one physical run, and are only to be mapped in one piece.
        first: page that the scratch addresses begin with.
        stride: bytes between tensors there.
        addresses: scratch; None where nothing is copied.
        ticket: of the copies; None: they are over.
        promotes: it is for entries of 2 MiB, and may be cancelled when memory is short.
    """

    slot: Slot
    stretches: list[Stretch]
    runs: list[tuple[int, int]] = field(default_factory=list)
    first: int = 0
    stride: int = 0
    addresses: Reservation | None = None
    ticket: Ticket | None = None
    promotes: bool = False

    @property
    def pages(self) -> int:
        """Pages per tensor that it replaces or joins."""
        runs = sum(high - low for low, high in self.runs)
        return runs + sum(high - low for low, high, _ in self.stretches)

    def here(self) -> int:
        """New pages per tensor that lie in the device."""
        return sum(high - low for low, high, tier in self.stretches if tier == DEVICE)

    def away(self) -> dict[Tier, int]:
        """New pages per tensor that do not, by tier."""
        found: dict[Tier, int] = {}
        for low, high, tier in self.stretches:
            if tier != DEVICE:
                found[tier] = found.get(tier, 0) + high - low
        return found

    def begins_before(self, page: int) -> bool:
        """True if it changes a page below this one."""
        starts = [low for low, *_ in self.runs] + [low for low, *_ in self.stretches]
        return min(starts, default=page) < page

    def ends_after(self, page: int) -> bool:
        """True if it changes this page or a later one."""
        ends = [high for _, high in self.runs] + [high for _, high, _ in self.stretches]
        return max(ends, default=0) > page

    def done(self) -> bool:
        """True if the copies are over, well or not."""
        return self.ticket is None or self.ticket.done()


class QuietTicket:
    """A ticket whose failure is ignored."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def done(self) -> bool:
        """True if the batch is finished, well or not."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits like `Ticket.wait`, but raises `Timeout` alone."""
        try:
            self._ticket.wait(timeout)
        except Timeout:
            raise
        except VMemError:
            pass
