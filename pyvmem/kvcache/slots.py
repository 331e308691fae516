# SPDX-License-Identifier: MIT
"""Slot records, and the choice of slots to allocate, grow or unmap. Does no mapping itself.

The pages of a slot, counted per tensor (they are the same in every tensor):

    0 ...... head ...... shared ..... granted ...... mapped ... slot_pages
    | not    | owner's,  | owner's,   | mapped,      | addresses |
    | mapped | read-only | unshared   | unowned      | only      |

`dirty` marks how far earlier owners may have written: pages below it are filled with zeros before
they are granted. A free slot has granted == 0; its mapped pages are cached for its next owner.
Pages between granted and mapped are unowned: they may be unmapped at any time once the earlier
owners' GPU work is complete.

With a sliding window (window.py) the pages below `head` have been unmapped, or were never mapped
because the request began with a recorded prefix whose window starts there.

Shared pages (pages.py) are mapped read-only, except in a `writer`; other slots may map them as
well. A free slot that maps shared pages is *stale*: all its pages must be unmapped before another
request uses it. A free slot whose window has slid, or that has off-device pages, is also stale.
Unmapping usually starts right away, except for a *kept* slot: all pages that it maps belong to a
recorded prefix, so the next turn of the conversation can continue in it without a driver call.

Pages below `large_end` may be mapped by 2 MiB entries, in blocks of `block` pages. No part of such
a block can be unmapped while GPU work may be reading any of it. A running request's pages between
`granted` and the end of the block are therefore not spare; `KVCache.step` unmaps them only when
memory is short, after waiting for all work on the device.

`SlotTable` finds slots by a linear scan in C over the slot records: there is no index to keep
consistent and no second copy of a slot's state.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

from pyvmem._native import Columns, Kind, Row
from pyvmem.errors import NotRecoverable, Timeout, VMemError
from pyvmem.kvcache.events import prune
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.pages import ALL_ON_DEVICE, DEVICE, EMPTY, Span, Stretch, Tier, TierMap
from pyvmem.memory.pages import Ticket
from pyvmem.memory.reservation import Reservation
from pyvmem.plumbing.logs import warn

__all__ = ["Growth", "Move", "Piece", "QuietTicket", "Slide", "Slot", "SlotTable", "Unmap"]

_log = logging.getLogger(__name__)


class Slot(Row):
    """The state of a request slot, which is the same in every tensor.

    The fields are written by journal edits and by C.

    Attributes:
        index: the reqid.
        addr: address of the slot's page 0 in the first tensor.
        active: True while a request owns the slot.
        broken: True if the slot was retired after a failed rollback on its addresses; it is never
            allocated again.
        writer: True if the owner may write the shared pages, which are read-only in other slots.
        rows_lost: True if some of its pages could not be mapped again; the others stay mapped until
            the cache is closed (or until `ParallelKVCache.recover`).
        kept: True if the slot is free and maps a recorded prefix, read-only, for a later request
            that begins with it.
        mapped: end of the pages that are mapped or that growth in flight will map.
        granted: end of the pages that the owner may use.
        large_end: pages below this may be mapped by 2 MiB entries; a multiple of `block`.
        block: pages per 2 MiB entry; 0: the cache has no such entries.
        head: pages below this are not mapped because they left the window; 0 if there is no window.
        dirty: pages below this may hold an earlier owner's data.
        owner: incremented whenever the owner changes, so that growth started for one owner is not
            granted to the next.
        events: the last GPU work of earlier owners, if it may still be running.
        job: the batch in flight on this slot's addresses (at most one): `Growth`, `Unmap`, `Slide`
            or None.
        span: the shared pages, from `head` on.
        pins: nodes of the prefix tree that cannot be evicted while the request runs.
        tier_map: the off-device pages.
        freed_at: step count at which the slot became free.
        freed_order: sequence number of the last time that the slot was freed; higher is later.
        stale: True if the slot must be unmapped before reuse, because an earlier owner's shared or
            off-device pages are mapped or its first pages are missing. Computed in C from the other
            fields.
    """

    __slots__ = ("events", "pins")

    span: Span
    tier_map: TierMap

    def __init__(self, index: int, addr: int = 0, block: int = 0) -> None:
        self.index, self.addr, self.block = index, addr, block
        self.events: list[Any] = []
        self.pins: list[Any] = []
        self.job, self.span, self.tier_map = None, EMPTY, ALL_ON_DEVICE

    @property
    def shared(self) -> int:
        """End of the shared pages; `head` if there are none."""
        return self.head + self.span.pages

    def shared_part(self, low: int, high: int) -> Span:
        """Returns the shared pages in [low, high), counted from page 0 of the slot."""
        return self.span.slice(low - self.head, high - self.head)

    def spare_beyond(self, keep: int) -> int:
        """Returns how many unshared device pages per tensor past `keep` can be unmapped now.

        A running owner keeps its granted pages and the whole 2 MiB block in which they end. A stale
        slot ignores `keep`.
        """
        granted = self.granted
        if granted < self.large_end and self.active:
            granted = self.busy_end
        return self.here_from(max(self.shared, granted, 0 if self.stale else keep))

    def splittable_beyond(self, keep: int) -> int:
        """Returns how many more pages could be unmapped if no GPU work used the slot."""
        if not self.active or self.granted >= self.large_end or self.rows_lost:
            return 0
        if isinstance(self.job, Growth):
            return 0
        return self.here_from(max(self.shared, self.granted, keep)) - self.spare_beyond(keep)

    @property
    def busy_end(self) -> int:
        """The end of the pages that must stay mapped while the owner's GPU work may run."""
        granted = self.granted
        return granted + -granted % self.block if granted < self.large_end else granted

    def large_end_with(self, low: int, high: int, large_end: int) -> int:
        """Returns `large_end` after mapping [low, high): full blocks may get 2 MiB entries."""
        block = self.block
        if block and (low + -low % block) + block <= high:
            return max(large_end, high - high % block)
        return large_end

    def large_end_below(self, page: int) -> int:
        """Returns `large_end` after unmapping the pages from `page` on."""
        return page - page % self.block if self.large_end > page else self.large_end

    @property
    def grows_from(self) -> int:
        """First page to map when the slot grows; 0 if stale, since all pages are unmapped first."""
        return 0 if self.stale else self.mapped

    def here_from(self, page: int) -> int:
        """Returns the number of device pages from `page` to `mapped`."""
        pages = self.mapped - page
        if self.tier_map.noted:
            pages -= self.tier_map.off_device(page, self.mapped).total()
        return max(0, pages)

    @property
    def spare(self) -> int:
        """Number of unowned pages that can be unmapped; 0 if kept, since a prefix owns them."""
        if self.kept:
            return 0
        return self.mapped - max(self.busy_end, self.head)


class SlotTable:
    """All slots of a group, and queries over them. The caller holds the cache's lock.

    Args:
        count: number of slots.
        journal: the cache's journal.
        base: address of the first slot.
        stride: distance between slots in bytes.
        block: pages per 2 MiB entry; 0: no such entries.

    Attributes:
        lockstep: return values depend only on the sequence of calls (`ParallelKVCache`), never on
            the progress of background batches. A condition that would otherwise change a
            return value, such as the driver being out of memory, raises instead.
        changes: incremented whenever a slot is allocated or freed.
        retired: True once any slot has been retired.
        columns: the slot records for C code.
    """

    lockstep: ClassVar[bool] = False

    def __init__(
        self, count: int, journal: Journal, base: int = 0, stride: int = 0, block: int = 0
    ) -> None:
        self.changes = 0
        self.retired = False
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
        """Returns slots with all `Kind` flags in `every` and none in `none`, longest free first."""
        return list(map(self.slots.__getitem__, self.columns.pick(every, none)))

    @property
    def free(self) -> list[Slot]:
        """Slots that can be allocated, least recently used first."""
        return self.pick(Kind.FREE)

    @property
    def free_count(self) -> int:
        """Number of `free` slots."""
        return self.columns.count(Kind.FREE)

    @property
    def stale(self) -> list[Slot]:
        """Stale slots, free or in use, except those that lost rows."""
        return self.pick(Kind.STALE, Kind.ROWS_LOST)

    def change(self, slot: Slot, **values: Any) -> None:
        """Sets attributes of a slot through the journal."""
        self._journal.change([[slot, name, value] for name, value in values.items()])

    # ---- ownership -------------------------------------------------------------------------------

    def take(self, slot: Slot) -> None:
        """Marks a free slot as owned by a new request."""
        self.changes += 1
        self.change(slot, active=True, kept=False, owner=slot.owner + 1)

    def give_back(self, slot: Slot, event: Any, now: int, edits: Sequence[list[Any]] = ()) -> None:
        """Frees a slot and applies `edits` in the same change; its granted pages become dirty.

        `event` is the owner's last GPU work, or None if that is complete; `now` is the cache's step
        count.
        """
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
        """Retires a slot: it is never allocated again."""
        self.retired = True
        warn(_log, "slot", "reqid %d is retired: a failed batch was not rolled back", slot.index)
        self.change(slot, broken=True)

    def lose(self, slot: Slot, error: VMemError) -> NotRecoverable:
        """Retires the slot of a request that has lost rows, and returns the error to raise."""
        self.mark_broken(slot)
        self.change(slot, rows_lost=True)
        return NotRecoverable(
            f"reqid {slot.index} has lost its rows, free it: {error}",
            errno=errno.ENOTRECOVERABLE,
            op="KVCache",
        )

    # ---- choosing --------------------------------------------------------------------------------

    def best_fit(self, pages: int) -> Slot | None:
        """Returns the free slot with the fewest mapped pages among those with at least `pages`.

        If no free slot has that many, returns the one with the most. Ties go to the slot that has
        been free longest. Slots with an unmap in flight are the last choice, since growing them
        means waiting for the unmap. Returns None if no slot is free.
        """
        for losing in (Kind.LOSING, 0):
            found = self.columns.fit(pages, Kind.FREE, losing)
            if found is not None:
                return self.slots[found]
        return None

    def to_prepare(self, pages: int) -> Slot | None:
        """Returns a free slot in which to map `pages` pages per tensor ahead, or None.

        Chooses the slot with the fewest mapped pages among those with at least `pages`; failing
        that, the slot with the most among those without a batch in flight. Ties are broken as in
        `best_fit`. A stale slot is never chosen.
        """
        for busy in (0, Kind.BUSY):
            found = self.columns.fit(pages, Kind.FREE, Kind.STALE | busy)
            if found is not None and (busy or self.slots[found].mapped >= pages):
                return self.slots[found]
        return None

    def emptiest(self, count: int) -> list[Slot]:
        """Returns up to `count` free slots, choosing those that will be empty soonest.

        Slots without pages come first.
        """
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
        """Yields slots with spare pages, in the order in which they should lose them.

        Free slots come before those of running requests, and slots without pending GPU work before
        others; among equals, the least recently used come first. Skips slots with a batch in
        flight.

        Args:
            active: include the surplus pages of running requests.
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


# A plain tuple, as in `Growth.grants`, since `step_async` creates dozens within microseconds.
Piece: TypeAlias = tuple[Slot, int, int]
"""Pages [low, high) of a slot, in every tensor."""


@dataclass(slots=True, eq=False)
class Growth:
    """New pages and zero-fills for a `step`, or for eager pages.

    It has at most two batches: `mapping` maps new pages and runs the fills that need not wait, all
    or nothing; `filling` runs the fills in `late`, which must follow earlier owners' GPU work. Each
    is None if there is no such batch or if it has already run. If pages are not zero-filled,
    `handover` holds the earlier owners' GPU work that the new owner's stream must wait for.
    With `ahead`, the pages are not granted, since no caller requested them. With `quiet`, a failure
    is not raised, since no caller requested the growth or another group in the same batch raises
    it. The counts are physical pages. `grants` holds slots, each with its owner number and the
    pages per tensor that this owner will have.
    """

    takes_pages: ClassVar[bool] = False

    slots: list[Slot]
    pieces: list[Piece] = field(default_factory=list)
    grants: list[tuple[Slot, int, int]] = field(default_factory=list)
    handover: list[Any] = field(default_factory=list)
    late: list[Piece] = field(default_factory=list)
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
        """True while the pages are not granted and an owner is still waiting for them."""
        return not self.granted and any(slot.owner == owner for slot, owner, _ in self.grants)

    def deserted(self) -> list[Slot]:
        """Returns the slots without an owner waiting for the growth; their new pages are spare."""
        if not self.awaited:
            return self.slots
        waiting = {slot for slot, owner, _ in self.grants if slot.owner == owner}
        return [slot for slot in self.slots if slot not in waiting]

    def done(self) -> bool:
        """True if both batches have finished, successfully or not."""
        return (self.mapping is None or self.mapping.done()) and (
            self.filling is None or self.filling.done()
        )


@dataclass(slots=True, eq=False)
class Unmap:
    """An in-flight unmap of pages [low, high) of a slot, ordered after the slot's last GPU work.

    `dirty`, `head` and `tier_map` restore the slot if the batch fails. `span` holds the shared
    pages in the range, whose references are dropped on completion. `off_device` counts unshared
    off-device pages, by tier. `ticket` is None if the batch ran in the calling thread.
    """

    takes_pages: ClassVar[bool] = True

    slot: Slot
    low: int
    high: int
    dirty: int
    ticket: Any
    head: int = 0
    span: Span = EMPTY
    tier_map: TierMap = ALL_ON_DEVICE
    off_device: dict[Tier, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """The number of unshared device pages per tensor in the range."""
        return self.high - self.low - self.span.pages - sum(self.off_device.values())

    def done(self) -> bool:
        """True if the batch has finished, successfully or not."""
        return self.ticket is None or bool(self.ticket.done())


@dataclass(slots=True, eq=False)
class Slide:
    """An in-flight unmap, in one batch, of pages that left the windows of several slots.

    Slot ``slots[i]``, whose owner number was `owners[i]`, loses pages [`lows[i]`, `heads[i]`). The
    first of these pages, `shares[i]`, were shared; `span` concatenates all shares. `tier_map`
    restores the slots if the batch fails; `off_device` counts unshared off-device pages, by tier.
    The failure of a `quiet` slide is reported by another group's slide.
    """

    takes_pages: ClassVar[bool] = True

    slots: list[Slot]
    owners: list[int]
    lows: list[int]
    heads: list[int]
    shares: list[Span]
    span: Span
    ticket: Ticket
    quiet: bool
    tier_map: dict[Slot, TierMap]
    off_device: dict[Tier, int]

    @property
    def pages(self) -> int:
        """The number of unshared device pages per tensor in all ranges."""
        return sum(self.heads) - sum(self.lows) - self.span.pages - sum(self.off_device.values())

    def done(self) -> bool:
        """True if the batch has finished, successfully or not."""
        return self.ticket.done()


@dataclass(slots=True, eq=False)
class Move:
    """Pages of a slot that are being replaced with copies, or remapped in larger runs.

    Attributes:
        slot: the slot.
        stretches: page ranges to copy, each with its destination tier.
        runs: page ranges that may already be physically contiguous, to be remapped without a copy.
        first: first page that the scratch addresses cover.
        stride: distance between tensors in the scratch addresses, in bytes.
        addresses: the scratch reservation; None if nothing is copied.
        ticket: the copies' ticket; None: they are complete.
        promotes: True for a promotion, which may be cancelled when memory is short.
    """

    slot: Slot
    stretches: list[Stretch]
    runs: list[Stretch] = field(default_factory=list)
    first: int = 0
    stride: int = 0
    addresses: Reservation | None = None
    ticket: Ticket | None = None
    promotes: bool = False

    @property
    def pages(self) -> int:
        """The number of pages per tensor that the move copies or remaps."""
        return sum(high - low for low, high, _ in (*self.runs, *self.stretches))

    def here(self) -> int:
        """Returns the number of new device pages per tensor."""
        return sum(high - low for low, high, tier in self.stretches if tier == DEVICE)

    def begins_before(self, page: int) -> bool:
        """True if the move changes a page below `page`."""
        return any(low < page for low, _, _ in (*self.runs, *self.stretches))

    def ends_after(self, page: int) -> bool:
        """True if the move changes `page` or a later page."""
        return any(high > page for _, high, _ in (*self.runs, *self.stretches))

    def done(self) -> bool:
        """True if the copies have finished, successfully or not."""
        return self.ticket is None or self.ticket.done()

    def wait(self) -> None:
        """Waits for the copies; raises their error if they failed."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None


class QuietTicket:
    """Wraps a ticket and ignores its failure."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def done(self) -> bool:
        """True if the batch has finished, successfully or not."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits like `Ticket.wait`; raises only `Timeout`."""
        try:
            self._ticket.wait(timeout)
        except Timeout:
            raise
        except VMemError:
            pass
