# SPDX-License-Identifier: MIT
"""The slots of a cache and the choice among them. No memory is touched here.

Pages of one slot, counted per tensor (every tensor of a slot has the same):

    0 ..... shared ..... granted ..... mapped ..... slot_pages
    | owner's,  | owner's  | kept mapped, | addresses |
    | read-only | alone    | no owner     | alone     |

`dirty` marks how far earlier owners may have written: before pages below it are granted they are
filled with zeros. A free slot has granted == 0; what it has mapped is its cache. Pages between
granted and mapped belong to nobody, so they may be taken away at any time once the earlier owners'
GPU work is over.

With a sliding window (window.py) the first pages, below `head`, have been unmapped again.

Shared pages (spans.py) are mapped read-only, but in a `writer`; others may have them too. A free
slot keeps none: all its pages are unmapped together, and until that has happened the slot is
*stale*; so is one that slid, or that has pages outside the device (places.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from heapq import merge
from itertools import count as count_up
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from pyvmem.kvcache.events import prune
from pyvmem.kvcache.journal import Book
from pyvmem.kvcache.places import Places
from pyvmem.kvcache.slot_index import Ordered, SlotIndex
from pyvmem.kvcache.spans import EMPTY, Span

if TYPE_CHECKING:
    from pyvmem.kvcache.journal import Journal

__all__ = ["Slot", "SlotTable"]


@dataclass(slots=True, eq=False)
class Slot(Book):
    """One request's place in every tensor; what changes it is journaled.

    Attributes:
        index: the reqid.
        active: given to a request.
        broken: an undo failed in its addresses; never handed out again.
        writer: its owner may write the shared pages, which are read-only elsewhere.
        lost: pages in its middle could not be mapped again; all stay until the cache is closed.
        mapped: pages there, or promised by a growth in flight.
        granted: pages that the owner may use.
        head: pages below this have left the owner's window and are not there; 0 without a window.
        dirty: pages below this may hold what an earlier owner wrote.
        owner: counts owners, so that work begun for one is not credited to the next.
        events: earlier owners' last GPU work, as far as it is not known to be over.
        job: the one batch in flight over this slot's addresses.
        span: the shared pages.
        pins: nodes of the prefix tree that are kept for the request.
        places: which pages are large, or outside the device.
        freed_at: step at which it became free.
        freed_order: counts up with every slot that becomes free.
    """

    log: InitVar[list[Any]]
    index: int
    active: bool = False
    broken: bool = False
    writer: bool = False
    lost: bool = False
    mapped: int = 0
    granted: int = 0
    head: int = 0
    dirty: int = 0
    owner: int = 0
    events: list[Any] = field(default_factory=list)
    job: Any = None
    freed_at: int = 0
    freed_order: int = 0
    span: Span = EMPTY
    pins: list[Any] = field(default_factory=list)
    places: Places = field(init=False)

    def __new__(cls, log: list[Any], *args: Any, **kwargs: Any) -> Slot:
        """A slot whose changes are noted in `log`."""
        return cls._with(log)

    def __post_init__(self, log: list[Any]) -> None:
        self.places = Places(log)

    @property
    def shared(self) -> int:
        """Shared pages, the first ones of the slot."""
        return self.span.pages

    @property
    def stale(self) -> bool:
        """Whether an earlier owner's shared or moved pages are there, or its first ones missing."""
        granted = self.granted
        return (
            self.span.pages > granted
            or self.head > granted
            or (bool(self.places) and self.places.away_end > granted)
        )

    @property
    def spare(self) -> int:
        """Mapped pages that no request owns, and that can go."""
        return self.mapped - self.places.ceil(max(self.granted, self.head))


class SlotTable:
    """All slots, and what is looked up among them.

    Whoever changes what a slot has says so, best before: `changed`. The index is brought up to date
    when it is asked, so that a call that changes much pays for it once, and one that was broken off
    by an exception leaves at worst an index that is made anew.

    Attributes:
        lockstep: answers depend on the sequence of calls alone (lockstep.py), never on how far the
            background is. What else would be an answer, such as a driver that is out of memory, is
            an error then.
        changes: counts slots taken and given back.
    """

    lockstep: ClassVar[bool] = False

    def __init__(self, count: int, journal: Journal) -> None:
        self.changes = 0
        self.slots = [Slot(journal.entries, i) for i in range(count)]
        self._order = count_up(1)
        self._touched: set[Slot] = set()
        self._index: SlotIndex | None = SlotIndex(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    # ---- keeping the index -----------------------------------------------------------------------

    def changed(self, slot: Slot) -> None:
        """Notes that attributes of a slot change, now or before the next look into the table.

        `Slot.events`, `Slot.dirty`, `Slot.owner` and `Slot.pins` need not be noted.
        """
        self._touched.add(slot)

    def all_changed(self, slots: Iterable[Slot]) -> None:
        """`changed` of several."""
        self._touched.update(slots)

    def rebuild(self) -> None:
        """Lets the next look make the index anew from the slots, which an undo has changed."""
        self._index = None

    @property
    def index(self) -> SlotIndex:
        """The slots, filed as they are now."""
        index, touched = self._index, self._touched
        if index is None:
            touched.clear()
            self._index = index = SlotIndex(self.slots)
        elif touched:
            self._index = None  # until it is whole again
            index.file_all(touched)
            touched.clear()
            self._index = index
        return index

    def check(self) -> list[str]:
        """What the index says that the slots do not, in words."""
        return self.index.differences(SlotIndex(self.slots))

    @property
    def free(self) -> Ordered:
        """The slots that a request may get, least recently used first."""
        return self.index.free

    # ---- ownership -------------------------------------------------------------------------------

    def take(self, slot: Slot) -> None:
        """Gives a free slot to a new owner, with no page granted yet."""
        self.changed(slot)
        self.changes += 1
        slot.active = True
        slot.owner += 1

    def give_back(self, slot: Slot, event: Any, now: int) -> None:
        """Ends an ownership; what was granted is dirty from now on."""
        self.changed(slot)
        self.changes += 1
        slot.active = slot.writer = False
        slot.owner += 1
        slot.dirty = max(slot.dirty, slot.granted)
        slot.granted = 0
        slot.freed_at = now
        slot.freed_order = next(self._order)
        slot.events = [*prune(slot.events), *(() if event is None else (event,))]

    def condemn(self, slot: Slot) -> None:
        """Never hands this slot out again."""
        self.changed(slot)
        slot.broken = True

    # ---- choosing --------------------------------------------------------------------------------

    def best_fit(self, pages: int) -> Slot | None:
        """The free slot with the fewest pages that are enough, else the one with the most.

        Of equal ones that which has been free for longest. Slots that are losing pages come last:
        to grow one means to wait for that. None when no slot is free.
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
        """The free slot that shall have so many pages; None: there is none that could.

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
        for slots in (index.cached, index.leftovers) if active else (index.cached,):
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
