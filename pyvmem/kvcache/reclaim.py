# SPDX-License-Identifier: MIT
"""Taking pages back: how many the cache may have, which slot loses some, and the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotRecoverable, OutOfMemory, Timeout, TooManyBatches, VMemError
from pyvmem.info import RangeFlags
from pyvmem.kvcache.jobs import Cut, Piece
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.slots import Slot, SlotTable
from pyvmem.kvcache.spans import EMPTY, SharedPages, Span
from pyvmem.kvcache.stats import Counters
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.context import Context

__all__ = ["Reclaimer"]

_SLICE_S = 0.0005  # how long one of several unfinished cuts is waited for before the next is asked


class Reclaimer:
    """Unmaps pages of no owner in the background, and waits for them when memory is short.

    Attributes:
        limit: physical pages that the cache may have.
        held: physical pages behind the cache, shared ones once, those on their way back included.
        shared: pages that several places may refer to.
        evict: takes recorded prefixes of so many pages per tensor out; set by who keeps them.
        unpin: lets go of a recorded prefix that was kept for a slot; likewise.
        cuts: unfinished batches.
        errors: failures of finished batches that no call has raised yet.
    """

    def __init__(
        self,
        context: Context,
        base: int,
        layout: Layout,
        table: SlotTable,
        limit: int,
        counters: Counters,
    ) -> None:
        self.context = context
        self.base = base
        self.layout = layout
        self.table = table
        self.limit = limit
        self.counters = counters
        self.held = 0
        self.shared = SharedPages(layout)
        self.evict: Callable[[int], int] = lambda pages: 0
        self.unpin: Callable[[Any], None] = lambda pin: None
        self.cuts: list[Cut] = []
        self.errors: list[VMemError] = []
        self._ops = OpBatch(1)

    @property
    def returning(self) -> int:
        """Physical pages in unfinished cuts."""
        return sum(cut.pages for cut in self.cuts) * self.layout.num_tensors

    def cut(self, slot: Slot, keep: int) -> None:
        """Unmaps a slot's pages from `keep` on, after its earlier owners' GPU work; does not wait.

        Of a stale slot all pages go, since what it shares cannot be kept for a next owner.

        Raises:
            TooManyBatches, OutOfMemory: the batch could not be queued; nothing changed.
        """
        layout = self.layout
        if slot.stale:
            keep = 0
        self._ops.clear()
        self._ops.unmap(
            self.base + layout.offset(slot.index, keep),
            (slot.mapped - keep) * layout.page_size,
            count=layout.num_tensors,
            stride=layout.tensor_bytes,
        )
        ticket = self.context.submit(self._ops, after=slot.events)
        slot.job = job = Cut(slot, keep, slot.mapped, slot.dirty, ticket)
        if slot.stale:
            job.span, job.pins = slot.span, slot.pins
            slot.span, slot.pins = EMPTY, []
        slot.mapped = keep
        slot.dirty = min(slot.dirty, keep)
        self.cuts.append(job)

    def try_cut(self, slot: Slot, keep: int) -> bool:
        """`cut`, or False where the queue is full: the pages stay cached; it is tried again."""
        try:
            self.cut(slot, keep)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

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

    def _finish(self, cut: Cut, timeout: float | None = 0.0) -> int:
        """Waits for a cut; returns the physical pages that came back, 0 when not finished."""
        slot, pages, before = cut.slot, cut.pages, self.held
        try:
            cut.ticket.wait(timeout)
        except Timeout:
            return 0
        except VMemError as error:
            self.errors.append(error)
            if isinstance(error, NotRecoverable):
                self.table.condemn(slot)  # and its pages count no longer
            else:  # undone: the pages are where they were
                slot.mapped = cut.high
                slot.dirty = cut.dirty
                if cut.span.pages:
                    slot.span, slot.pins = cut.span, cut.pins
                pages, cut.span, cut.pins = 0, EMPTY, []
        self.cuts.remove(cut)
        slot.job = None
        self._came_back(pages)
        for pin in cut.pins:
            self.unpin(pin)
        self.let_go(cut.span)
        return before - self.held

    def let_go(self, span: Span) -> None:
        """Takes a reference to shared pages back; those without another go to the pool."""
        self._came_back(self.shared.release(span))

    def _came_back(self, pages: int) -> None:
        """Counts pages per tensor that are no longer behind the cache."""
        back = pages * self.layout.num_tensors
        self.held -= back
        self.counters.reclaimed += back

    def condemn(self, pieces: list[Piece]) -> None:
        """Never hands a slot out again in whose new pages an undo failed."""
        layout = self.layout
        for slot, low, high in pieces:
            for tensor in range(layout.num_tensors):
                at = self.base + layout.offset(slot.index, low, tensor)
                end = at + (high - low) * layout.page_size
                while at < end and not slot.broken:
                    info = self.context.query(at)
                    if RangeFlags.QUARANTINED in info.flags:
                        self.table.condemn(slot)
                    at += info.run_bytes

    def make_room(self, pages: int, keep: Mapping[Slot, int]) -> bool:
        """Brings up to `pages` physical pages back and waits for them; False when none came.

        Pages of slots go before recorded prefixes: they save a driver call, those a computation.

        Args:
            pages: physical pages.
            keep: slots that are to have at least so many pages per tensor.
        """
        tensors = self.layout.num_tensors
        self.release_stale()
        pending = self.returning
        if pending < pages:
            for slot in self.table.victims():
                take = min(_spare(slot, keep), -(-(pages - pending) // tensors))
                if take <= 0:
                    continue
                if not self.try_cut(slot, slot.mapped - take):
                    break
                pending += take * tensors
                if pending >= pages:
                    break
        start = self.held
        if pending < pages:
            self.evict(-(-(pages - pending) // tensors))
        if self.cuts:
            with self.counters.waiting():
                self._wait_for_pages(pages - (start - self.held))
        missing = pages - (start - self.held)
        if missing > 0:  # a prefix may be nobody's only now that a cut is over
            self.evict(-(-missing // tensors))
        return self.held < start

    def _wait_for_pages(self, pages: int) -> None:
        """Waits until so many physical pages came back, or no cut is left."""
        while pages > 0 and self.cuts:
            # Their GPU work may end in any order, so none is waited for alone.
            for cut in list(self.cuts):
                pages -= self._finish(cut, None if len(self.cuts) == 1 else _SLICE_S)
                if pages <= 0:
                    break

    def obtainable(self, keep: Mapping[Slot, int]) -> int:
        """Physical pages that are free, on their way back, or could be taken back."""
        # What a slot keeps beyond a cut in flight can be had too, once that cut is over.
        slots = (s for s in self.table.slots if s.job is None or isinstance(s.job, Cut))
        spare = sum(max(0, _spare(slot, keep)) for slot in slots)
        spare += self.shared.pages - self.shared.used
        return self.limit - self.held + self.returning + spare * self.layout.num_tensors

    def release_below(self, free_pages: int) -> None:
        """Starts cuts of free slots until `free_pages` pages are free or on their way back."""
        missing = free_pages - (self.limit - self.held) - self.returning
        tensors = self.layout.num_tensors
        if missing <= 0:
            return
        for slot in self.table.victims():
            if slot.active:
                continue
            take = min(slot.spare, -(-missing // tensors))
            if not self.try_cut(slot, slot.mapped - take):
                return
            missing -= take * tensors
            if missing <= 0:
                return

    def release_before(self, step: int, prepared: Slot | None, keep: int) -> bool:
        """Starts cuts of slots that became free at `step` or before; False when some must wait.

        All their pages go, but `keep` per tensor of the slot that is prepared for the next request.
        """
        complete = True
        for slot in list(self.table.free.values()):
            rest = keep if slot is prepared and not slot.stale else 0
            if slot.freed_at <= step and slot.mapped > rest:
                complete &= slot.job is None and self.try_cut(slot, rest)
        return complete

    def release_stale(self) -> bool:
        """Starts cuts of free slots that still have shared pages; False when some must wait."""
        complete = True
        for slot in self.table.slots:
            if slot.stale and not slot.active and not slot.lost:
                complete &= slot.job is None and self.try_cut(slot, 0)
        return complete

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


def _spare(slot: Slot, keep: Mapping[Slot, int]) -> int:
    """Pages per tensor that the slot can do without; shared ones are counted elsewhere."""
    return slot.mapped - max(slot.shared, slot.granted, keep.get(slot, 0))
