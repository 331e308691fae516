# SPDX-License-Identifier: MIT
"""The batches that unmap pages: how they are made, waited for, and undone in the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotRecoverable, OutOfMemory, Timeout, TooManyBatches, VMemError
from pyvmem.info import RangeFlags
from pyvmem.kvcache.jobs import Cut, Piece, Ran
from pyvmem.kvcache.journal import Book
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.places import Tier
from pyvmem.kvcache.shared import SharedPages
from pyvmem.kvcache.slots import Slot, SlotTable
from pyvmem.kvcache.spans import EMPTY, Span
from pyvmem.kvcache.stats import Counters
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from typing_extensions import Self

    from pyvmem.kvcache.budget import Share
    from pyvmem.kvcache.mapper import Mapper

__all__ = ["Cuts", "wait_for_cuts"]

_SLICE_S = 0.0005  # how long one of several unfinished cuts is waited for before the next is asked


class Cuts(Book):
    """Unmaps pages of no owner in the background, each batch after their owners' last GPU work.

    Attributes:
        limit: physical pages that the cache may have.
        held: physical pages behind the cache, shared ones once, those on their way back included.
        away: the same of pages that do not lie in the device, which `held` leaves out.
        own_away: what `Accounts.count_away` found; None: it may be another number now.
        shared: pages that several places may refer to.
        evict: takes recorded prefixes of so many pages per tensor out.
        leased: tells the pages per tensor that it cannot take out, though no request uses them.
        cuts: unfinished batches.
        errors: failures of finished batches that no call has raised yet.
        slid: pages per tensor that left the windows of running requests.
        share: the cache's part of a budget, None where it has its limit for itself.
    """

    def __new__(cls, mapper: Mapper, *args: Any, **kwargs: Any) -> Self:
        """No page yet."""
        return cls._with(mapper.journal.entries)

    def __init__(
        self,
        mapper: Mapper,
        base: int,
        layout: Layout,
        table: SlotTable,
        limit: int,
        counters: Counters,
        *,
        evict: Callable[[int], int],
        leased: Callable[[], int],
    ) -> None:
        self.mapper = mapper
        self.journal = mapper.journal
        self.base = base
        self.layout = layout
        self.table = table
        self.limit = limit
        self.counters = counters
        self.held = self.slid = 0
        self.away: Counter[Tier] = Counter()
        self.own_away: int | None = None
        self.shared = SharedPages(layout, mapper)
        self.evict, self.leased = evict, leased
        self.cuts: list[Cut] = []
        self.errors: list[VMemError] = []
        self.share: Share | None = None
        self._ops = OpBatch(1)

    def cut(self, slot: Slot, keep: int, now: bool = False) -> None:
        """Unmaps a slot's pages from `keep` on, after its earlier owners' GPU work; does not wait.

        Of a stale slot all pages go, since what it shares cannot be kept for a next owner. A large
        page that `keep` would cut goes too, unless its owner has a part of it.

        Args:
            slot: without a batch in flight.
            keep: pages per tensor.
            now: the caller waits for it: where the queue is full, it is done in this thread.

        Raises:
            TooManyBatches, OutOfMemory: the batch could not be queued; nothing changed.
        """
        layout = self.layout
        places = slot.places
        if slot.stale:
            keep = 0
        elif places:
            keep = max(places.floor(keep), places.ceil(slot.granted))
        low = max(keep, slot.head)
        if low >= slot.mapped:
            return
        self._ops.clear()
        self._ops.unmap(
            self.base + layout.offset(slot.index, low),
            (slot.mapped - low) * layout.page_size,
            count=layout.num_tensors,
            stride=layout.tensor_bytes,
        )
        try:
            with self.mapper.transaction() as change:
                self._begin(Cut(slot, low, slot.mapped, slot.dirty, change.ticket, slot.head), keep)
                change.submit(self._ops, slot.events)
        except TooManyBatches:
            if not now:
                raise
            self._run(slot, low, keep)

    def _begin(self, job: Cut, keep: int) -> None:
        """Writes a cut of all pages from `keep` on into the books."""
        slot, places = job.slot, job.slot.places
        slot.job = job
        if slot.stale:
            job.span, slot.span = slot.span, EMPTY
        if places:
            job.away = places.away(max(job.low, job.span.pages), slot.mapped)
            job.places = places.take(job.low, slot.mapped)
        slot.mapped = keep
        slot.head = min(slot.head, keep)
        slot.dirty = min(slot.dirty, keep)
        self.journal.keep_list(self.cuts)
        self.cuts.append(job)

    def _run(self, slot: Slot, low: int, keep: int) -> None:
        """The same in this thread; its failure is noted, as that of a cut which is waited for."""
        try:
            with self.mapper.transaction() as change:
                self._begin(Cut(slot, low, slot.mapped, slot.dirty, Ran(), slot.head), keep)
                change.run(self._ops, slot.events)
        except OutOfMemory:
            raise
        except VMemError as error:
            self.failed(slot, error)

    def try_cut(self, slot: Slot, keep: int, now: bool = False) -> bool:
        """`cut`, or False where it could not be queued: the pages stay; it is tried again."""
        try:
            self.cut(slot, keep, now)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def try_slide(self, slot: Slot, head: int, events: list[Any]) -> bool:
        """Unmaps a taken slot's pages below `head` after the GPU work; False: the queue is full.

        No batch may be in flight over the slot's addresses.
        """
        layout, low = self.layout, slot.head
        self._ops.clear()
        self._ops.unmap(
            self.base + layout.offset(slot.index, low),
            (head - low) * layout.page_size,
            count=layout.num_tensors,
            stride=layout.tensor_bytes,
        )
        try:
            with self.mapper.transaction() as change:
                slot.job = job = Cut(
                    slot, low, head, slot.dirty, change.ticket, low, slot.owner, True
                )
                if slot.places:
                    job.away = slot.places.away(low, head)
                    job.places = slot.places.take(low, head)
                slot.head = head
                self.own_away = None
                self.slid += head - low
                self.journal.keep_list(self.cuts)
                self.cuts.append(job)
                change.submit(self._ops, events)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def failed(self, slot: Slot, error: VMemError) -> None:
        """Notes that pages of a slot could not be unmapped."""
        self.errors.append(error)
        if isinstance(error, NotRecoverable):
            self.table.condemn(slot)  # and its pages count no longer

    def rebuild(self, moving: int, away: Mapping[Tier, int]) -> None:
        """Counts again, by the slots, the cuts and the shared pages, what is behind the cache.

        Args:
            moving: scratch pages per tensor of the device. away: of other tiers.
        """
        pages, self.slid, self.own_away = moving + self.shared.pages, 0, None
        others = Counter(away)
        others.update(self.shared.away())
        for slot in self.table:
            first = max(slot.shared, slot.head)
            outside = slot.places.away(first, slot.mapped)
            others.update(outside)
            pages += slot.mapped - slot.head - slot.shared - sum(outside.values())
            self.slid += slot.head if slot.active and not slot.stale else 0
        for cut in self.cuts:
            pages += cut.pages
            others.update(cut.away)
        tensors = self.layout.num_tensors
        self.held = pages * tensors
        self.away = Counter({tier: count * tensors for tier, count in others.items()})

    def poll(self) -> None:
        """Notes which cuts are finished."""
        for cut in [cut for cut in self.cuts if cut.done()]:
            self._finish(cut)

    def finish(self, cut: Cut) -> None:
        """Waits for one cut."""
        self._finish(cut, None)

    def finish_all(self) -> None:
        """Waits for every cut."""
        for cut in list(self.cuts):
            self._finish(cut, None)

    def _finish(self, cut: Cut, timeout: float | None = 0.0) -> None:
        """Waits for a cut, and notes what came back; nothing where it is not finished in time."""
        slot, pages = cut.slot, cut.pages
        try:
            cut.ticket.wait(timeout)
        except Timeout:
            return
        except VMemError as error:
            self.failed(slot, error)
            self.journal.keep(cut, "away", "span")
            if not isinstance(error, NotRecoverable):  # undone: the pages are where they were
                slot.head = cut.head
                slot.places.put_all(cut.places)
                cut.away = {}
                if not cut.slides:
                    slot.mapped = cut.high
                    slot.dirty = max(slot.dirty, cut.dirty)  # an owner may have ended since
                elif slot.owner == cut.owner:
                    self.slid -= cut.high - cut.low
                if cut.span.pages:
                    slot.span = cut.span
                pages, cut.span = 0, EMPTY
        self.journal.keep_list(self.cuts)
        self.cuts.remove(cut)
        slot.job = None
        self.came_back(pages, cut.away)
        self.let_go(cut.span)

    def let_go(self, span: Span) -> None:
        """Takes a reference to shared pages back; those without another go to the pool."""
        away: dict[Tier, int] = {}
        self.came_back(self.shared.release(span, away), away)

    def came_back(self, pages: int, away: Mapping[Tier, int], *, reclaimed: bool = True) -> None:
        """Counts pages per tensor that are no longer behind the cache: device's, then others'."""
        tensors = self.layout.num_tensors
        self.held -= pages * tensors
        self.own_away = None
        if away:
            self.away = self.away.copy()
        for tier, count in away.items():
            self.away[tier] -= count * tensors
        if reclaimed:
            self.counters.reclaimed += (pages + sum(away.values())) * tensors

    def condemn(self, pieces: list[Piece]) -> None:
        """Never hands a slot out again in whose new pages an undo failed."""
        layout = self.layout
        for slot, low, high in pieces:
            for tensor in range(layout.num_tensors):
                at = self.base + layout.offset(slot.index, low, tensor)
                end = at + (high - low) * layout.page_size
                while at < end and not slot.broken:
                    info = self.mapper.query(at)
                    if RangeFlags.QUARANTINED in info.flags:
                        self.table.condemn(slot)
                    at += info.run_bytes

    def salvage(self, slot: Slot) -> None:
        """Unmaps what is left of a freed request that lost its rows, after its GPU work.

        Raises:
            VMemError: it could not be unmapped; nothing changed.
        """
        layout = self.layout
        runs: list[tuple[int, int]] = []
        quarantined = False
        for tensor in range(layout.num_tensors):
            at = self.base + layout.offset(slot.index, 0, tensor)
            end = at + slot.mapped * layout.page_size
            while at < end:
                info = self.mapper.query(at)
                size = min(info.run_bytes, end - at)
                if info.mapped:
                    runs.append((at, size))
                quarantined |= RangeFlags.QUARANTINED in info.flags
                at += size
        ops = OpBatch(len(runs) or 1)
        for at, size in runs:
            ops.unmap(at, size)
        span, first = slot.span, max(slot.head, slot.shared)
        own, away = slot.mapped - first, slot.places.away(first, slot.mapped)
        with self.mapper.transaction() as change:
            slot.places.forget(0, slot.mapped)
            slot.span, slot.mapped, slot.head, slot.dirty = EMPTY, 0, 0, 0
            slot.lost, slot.broken = False, quarantined
            change.run(ops, slot.events)
        self.came_back(own - sum(away.values()), away)
        self.let_go(span)

    def raise_errors(self) -> None:
        """Raises the oldest failure of a background batch, with the others as notes."""
        if not self.errors:
            return
        first, *others = self.errors
        self.errors.clear()
        if others:
            first.args = (
                f"{first}; and {len(others)} more background batches failed",
                *first.args[1:],
            )
        raise first


def wait_for_cuts(reclaimers: Sequence[Cuts], enough: Callable[[], bool]) -> None:
    """Waits until it is enough, or no cut is left."""
    while not enough():
        cuts = [(one, cut) for one in reclaimers for cut in one.cuts]
        if not cuts:
            return
        # Their GPU work may end in any order, so none is waited for alone.
        for one, cut in cuts:
            one._finish(cut, None if len(cuts) == 1 else _SLICE_S)
            if enough():
                return
