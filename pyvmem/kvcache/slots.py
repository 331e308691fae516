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

`SlotIndex` finds slots without looking at each of them. It follows from the slots' attributes
alone: a slot is filed under what they say, and filing it again moves it. So a slot can be filed at
any time and any number of times, and an index that may be wrong is thrown away and made anew.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import count as count_up
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from pyvmem._native import Columns
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
    "Ordered",
    "Piece",
    "QuietTicket",
    "DoneTicket",
    "Slot",
    "SlotIndex",
    "SlotTable",
    "Slide",
]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Slot:
    """One request's place in every tensor; edits change it.

    Who changes what the index is made of puts the slot into `SlotTable.touched` first.

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
    """

    index: int
    addr: int = 0
    active: bool = False
    broken: bool = False
    writer: bool = False
    lost: bool = False
    kept: bool = False
    mapped: int = 0
    granted: int = 0
    whole: int = 0
    block: int = 0
    head: int = 0
    dirty: int = 0
    owner: int = 0
    events: list[Any] = field(default_factory=list)
    job: Any = None
    freed_at: int = 0
    freed_order: int = 0
    span: Span = EMPTY
    pins: list[Any] = field(default_factory=list)
    places: Places = NOWHERE

    @property
    def shared(self) -> int:
        """The end of the shared pages; where there are none, `head`."""
        return self.head + self.span.pages

    def shared_part(self, low: int, high: int) -> Span:
        """The shared pages in [low, high) of the slot."""
        return self.span.slice(low - self.head, high - self.head)

    @property
    def stale(self) -> bool:
        """True if an earlier owner's shared or moved pages are there, or its first ones missing."""
        granted = self.granted
        return (
            self.span.pages > granted
            or self.head > granted
            or (bool(self.places.noted) and self.places.away_end > granted)
        )

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

    The index is brought up to date when it is used, so a call that changes much pays for that once,
    and a call that an exception ended leaves at worst an index to be made anew.

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
        columns: what the slots say, for C; right where the index is.
        touched: slots that the index does not have as they are; not empty while there is no index.
    """

    lockstep: ClassVar[bool] = False

    def __init__(
        self, count: int, journal: Journal, base: int = 0, stride: int = 0, block: int = 0
    ) -> None:
        self.changes = 0
        self._journal = journal
        self.columns = Columns(count)
        self.touched: set[Slot] = set()
        self.slots = [Slot(i, base + i * stride, block=block) for i in range(count)]
        self._order = count_up(1)
        self._index: SlotIndex | None = SlotIndex(self.slots, self.columns)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    # ---- keeping the index -----------------------------------------------------------------------

    def rebuild(self) -> None:
        """Has the index made anew at its next use, since an undo has changed the slots."""
        self.touched.update(self.slots)
        self._index = None

    @property
    def index(self) -> SlotIndex:
        """The slots, filed as they are now."""
        index, touched = self._index, self.touched
        if index is None:
            self._index = index = SlotIndex(self.slots, self.columns)
            touched.clear()
        elif touched:
            self._index = None  # until it is whole again
            index.file_all(touched)
            self._index = index
            touched.clear()
        return index

    def check(self) -> list[str]:
        """Lists contradictions between the index and the slots, in words."""
        return self.index.differences(SlotIndex(self.slots, Columns(len(self.slots))))

    @property
    def free(self) -> Ordered:
        """The slots that a request may get, least recently used first."""
        return self.index.free

    def change(self, slot: Slot, **values: Any) -> None:
        """Sets attributes of a slot, and has it filed anew."""
        self.touched.add(slot)
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
        self.touched.add(slot)
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
        index = self.index
        for fits in (index.ready, index.losing):
            entries = fits.entries
            if entries:
                place = bisect_left(entries, (pages,))
                if place == len(entries):
                    place = bisect_left(entries, entries[-1][:1])
                return fits.at(place)
        return None

    def to_prepare(self, pages: int) -> Slot | None:
        """The free slot in which to map so many pages ahead; None: there is none.

        That with the fewest of those that have them, else that with the most of those without a
        batch in flight; of equal ones as `best_fit`, and no stale one.
        """
        index = self.index
        enough: list[tuple[int, ...]] = []
        for fits in (index.ready, index.losing):
            for place in range(bisect_left(fits.entries, (pages,)), len(fits)):
                if not fits.at(place).stale:
                    enough.append(fits.entries[place])
                    break
        if enough:
            return self.slots[min(enough)[-1]]
        entries = index.ready.entries
        high = len(entries)
        while high:
            low = bisect_left(entries, entries[high - 1][:1])
            for place in range(low, high):
                slot = index.ready.at(place)
                if slot.job is None:
                    return slot
            high = low
        return None

    def emptiest(self, count: int) -> list[Slot]:
        """The free slots that are soonest without a page; fewer when there are not so many."""
        index = self.index
        ready, losing = index.ready.entries, index.losing.entries
        empty = bisect_left(ready, (1,))
        found: list[Slot] = []
        for entries in (islice(ready, empty), merge(islice(ready, empty, None), losing)):
            later: list[Slot] = []
            for key in entries:
                if len(found) == count:
                    return found
                slot = self.slots[key[-1]]
                if slot.events:
                    slot.events = prune(slot.events)
                (later if slot.events else found).append(slot)
            found += later
        return found[:count]

    def victims(self, active: bool = True) -> Iterator[Slot]:
        """Slots with spare pages, in the order in which they should lose them.

        Free slots before active ones' leftovers; those whose GPU work is over before those that
        must wait for it; least recently used first. Slots with a batch in flight are left out.

        Args:
            active: go on with active slots.
        """
        index = self.index
        for slots in (index.cached, index.leftovers()) if active else (index.cached,):
            later: list[Slot] = []
            for slot in slots:
                if slot.job is not None:
                    continue
                if slot.events:
                    slot.events = prune(slot.events)
                if slot.events:
                    later.append(slot)
                else:
                    yield slot
            yield from (slot for slot in later if slot.job is None)


_LAST = itemgetter(-1)
_Key: TypeAlias = tuple[int, ...]


class Ordered:
    """Some of the slots, in the order of a key; iterating gives slots.

    Attributes:
        entries: the keys in order; the last number of each is the slot's.
    """

    __slots__ = ("_keys", "_slots", "entries")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._keys: dict[int, _Key] = {}
        self.entries: list[_Key] = []

    def put(self, index: int, key: _Key | None) -> None:
        """Gives a slot its place; None: it has none here."""
        before = self._keys.get(index)
        if before == key:
            return
        if before is not None:
            del self.entries[bisect_left(self.entries, before)]
            del self._keys[index]
        if key is not None:
            insort(self.entries, key)
            self._keys[index] = key

    def at(self, place: int) -> Slot:
        """The slot at a place of `entries`."""
        return self._slots[self.entries[place][-1]]

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, slot: Slot) -> bool:
        return slot.index in self._keys

    def __iter__(self) -> Iterator[Slot]:
        """The slots in their present order, whatever is filed meanwhile."""
        return map(self._slots.__getitem__, map(_LAST, self.entries[:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Ordered {self.entries!r:.200}>"


class _Entry(NamedTuple):
    """The keys that a slot is filed under: see `SlotIndex`."""

    free: _Key | None = None
    ready: _Key | None = None
    losing: _Key | None = None
    cached: _Key | None = None
    stale: _Key | None = None
    ahead: _Key | None = None
    spare: int = 0
    returning: int = 0


_NOTHING = _Entry()


class SlotIndex:
    """The slots, filed.

    A request's slot is *plain* where growing it takes a map call and nothing else (`file_all`
    tells): most are at most times, and these are in the columns alone, as are those that would be
    plain if their window were not sliding.

    Attributes:
        free: those that a request may get, least recently used first.
        ready: of these, those that can grow at once, by mapped pages, then as `free`.
        losing: the other free ones, likewise: growing them means waiting for a batch that unmaps.
        cached: those without an owner that have pages, least recently used first.
        stale: those whose pages must all go, taken or not, by number.
        ahead: active ones that are not plain, without a batch in flight, with pages that their
            owner was not granted.
        returning: pages per tensor on their way back.
        columns: what slots say, for C.
    """

    __slots__ = (
        *("_filed", "_slots", "_spare", "ahead", "cached", "columns", "free", "losing", "ready"),
        *("returning", "stale"),
    )

    def __init__(self, slots: Sequence[Slot], columns: Columns) -> None:
        self.free, self.ready, self.losing = Ordered(slots), Ordered(slots), Ordered(slots)
        self.cached, self.ahead, self.stale = Ordered(slots), Ordered(slots), Ordered(slots)
        self.columns = columns
        self.returning = self._spare = 0
        self._slots = slots
        self._filed: dict[int, _Entry] = {}
        columns.clear()
        columns.place.block = slots[0].block
        self.file_all(slots)

    @property
    def spare(self) -> int:
        """Pages per tensor that no request owns, and that are not on their way back.

        Of slots whose batch in flight maps something none are counted.
        """
        return self._spare + self.columns.surplus

    def leftovers(self) -> list[Slot]:
        """Active slots with pages that their owner was not granted, least recently used first."""
        columns, slots = self.columns, self._slots
        found = list(self.ahead)
        for index, plain in enumerate(columns.plain):
            if plain and columns.mapped[index] > columns.granted[index]:
                found.append(slots[index])
        return sorted(found, key=attrgetter("freed_order", "index"))

    def file_all(self, slots: Iterable[Slot]) -> None:
        """Files slots under what their attributes say now."""
        filed, fields = self._filed, []
        for slot in slots:
            index, granted, job = slot.index, slot.granted, slot.job
            plain = (
                slot.active
                and not slot.lost
                and slot.dirty <= granted
                and slot.span.pages <= granted
                and slot.head <= granted
                and not slot.places.noted
            )
            nothing = plain and (job is None or (type(job) is Slide and slot.mapped == granted))
            plain = plain and job is None
            whole = slot.whole
            fields.append((index, slot.mapped, granted, slot.head, whole, slot.active, plain))
            if not nothing:
                self._file(index, _entry(slot))
            elif index in filed:
                self._file(index, _NOTHING)
        self.columns.file(fields)

    def _file(self, index: int, new: _Entry) -> None:
        filed = self._filed
        old = filed.get(index, _NOTHING)
        if new == old:
            return
        if new.free != old.free:
            self.free.put(index, new.free)
        if new.ready != old.ready:
            self.ready.put(index, new.ready)
        if new.losing != old.losing:
            self.losing.put(index, new.losing)
        if new.cached != old.cached:
            self.cached.put(index, new.cached)
        if new.stale != old.stale:
            self.stale.put(index, new.stale)
        if new.ahead != old.ahead:
            self.ahead.put(index, new.ahead)
        self._spare += new.spare - old.spare
        self.returning += new.returning - old.returning
        if new == _NOTHING:
            del filed[index]
        else:
            filed[index] = new

    def differences(self, other: SlotIndex) -> list[str]:
        """Lists the differences of two indexes of the same slots, in words."""
        names = (*_Entry._fields[:-2], "spare", "returning")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        pairs += [
            (f"columns.{name}", getattr(self.columns, name), getattr(other.columns, name))
            for name in ("mapped", "granted", "head", "whole", "active", "plain")
        ]
        return [
            f"slots: {name} is {mine!r:.200}, made anew {anew!r:.200}"
            for name, mine, anew in pairs
            if mine != anew
        ]


def _entry(slot: Slot) -> _Entry:
    """The keys that follow from a slot's attributes."""
    index, mapped, order, job = slot.index, slot.mapped, slot.freed_order, slot.job
    taking = job is not None and job.takes_pages
    spare = returning = 0
    if taking and not isinstance(job, Slide):  # whose pages `Reclaimer.sliding` counts
        returning = job.pages
    shared, granted, noted = slot.head + slot.span.pages, slot.granted, slot.places.noted
    stale = bool(shared or noted) and (not slot.active or slot.stale)
    if (taking or job is None) and not slot.lost:
        if noted or (slot.whole > granted and slot.active):
            spare = slot.spare_beyond(0)
        else:
            spare = max(0, mapped - max(shared, granted))
    age = (order, index)
    if slot.active:
        left = mapped > slot.granted and not slot.lost and job is None
        return _Entry(
            ahead=age if left else None,
            stale=(index,) if stale and not slot.lost else None,
            spare=spare,
            returning=returning,
        )
    fit = None if slot.broken else (mapped, order, index)
    return _Entry(
        free=None if slot.broken else age,
        ready=None if stale or taking else fit,
        losing=fit if stale or taking else None,
        cached=age if mapped and not slot.lost else None,
        stale=(index,) if stale and not slot.lost else None,
        spare=spare,
        returning=returning,
    )


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
