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

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from itertools import count as count_up
from typing import TYPE_CHECKING, Any, ClassVar

from pyvmem.kvcache.events import prune
from pyvmem.kvcache.journal import Book
from pyvmem.kvcache.places import Places
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
    """All slots; `free` is ordered, least recently used first.

    Attributes:
        lockstep: answers depend on the sequence of calls alone (lockstep.py), never on how far the
            background is. What else would be an answer, such as a driver that is out of memory, is
            an error then.
        changes: counts slots taken and given back.
    """

    lockstep: ClassVar[bool] = False

    def __init__(self, count: int, journal: Journal) -> None:
        self.changes = 0
        self._undo = journal.undo
        self.slots = [Slot(journal.entries, i) for i in range(count)]
        self._order = count_up(1)
        self.free: dict[int, Slot] = {slot.index: slot for slot in self.slots}

    def rebuild(self) -> None:
        """Makes `free` again from the slots."""
        free = [slot for slot in self.slots if not slot.active and not slot.broken]
        self.free = {slot.index: slot for slot in sorted(free, key=lambda s: s.freed_order)}

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def best_fit(self, pages: int) -> Slot | None:
        """The free slot with the fewest pages that are enough, else the one with the most.

        Slots that are losing pages come last: to grow one means to wait for that. None when no slot
        is free.
        """
        if not self.free:
            return None
        return min(
            self.free.values(),
            key=lambda s: (
                s.stale or (s.job is not None and s.job.takes_pages),
                s.mapped < pages,
                s.mapped if s.mapped >= pages else -s.mapped,
            ),
        )

    def take(self, slot: Slot) -> None:
        """Gives a free slot to a new owner, with no page granted yet."""
        self._undo(self.rebuild)  # what is undone last: by then the slot is as it was
        del self.free[slot.index]
        self.changes += 1
        slot.active = True
        slot.owner += 1

    def give_back(self, slot: Slot, event: Any, now: int) -> None:
        """Ends an ownership; what was granted is dirty from now on."""
        self._undo(self.rebuild)
        self.changes += 1
        slot.active = slot.writer = False
        slot.owner += 1
        slot.dirty = max(slot.dirty, slot.granted)
        slot.granted = 0
        slot.freed_at = now
        slot.freed_order = next(self._order)
        slot.events = [*prune(slot.events), *(() if event is None else (event,))]
        if not slot.broken:
            self.free[slot.index] = slot

    def emptiest(self, count: int) -> list[Slot]:
        """The free slots that are soonest without a page; fewer when there are not so many."""
        for slot in self.free.values():
            slot.events = prune(slot.events)
        return sorted(
            self.free.values(),
            key=lambda s: (s.job is not None or bool(s.mapped), bool(s.events), s.mapped),
        )[:count]

    def condemn(self, slot: Slot) -> None:
        """Never hands this slot out again."""
        self._undo(self.rebuild)
        slot.broken = True
        if slot.index in self.free:
            del self.free[slot.index]

    def victims(self) -> list[Slot]:
        """Slots with spare pages, in the order in which they should lose them.

        Free slots before active ones' leftovers; those whose GPU work is over before those that
        must wait for it; least recently used first. Slots with a batch in flight are left out.
        """
        found: list[Slot] = []
        for slot in self.slots:
            if slot.job is None and slot.mapped > slot.granted and not slot.lost:
                slot.events = prune(slot.events)
                found.append(slot)
        return sorted(found, key=lambda s: (s.active, bool(s.events), s.freed_order))

    def spare_pages(self) -> int:
        """Pages per tensor, all slots together, that `victims` could ever give."""
        return sum(slot.mapped - slot.granted for slot in self.slots if not slot.broken)
