# SPDX-License-Identifier: MIT
"""How growths end: their pages are granted, or they are undone in the books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyvmem._native import Lengths
from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.kvcache.events import order_after, order_ticket
from pyvmem.kvcache.jobs import Growth
from pyvmem.kvcache.journal import Book
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import Span

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Grants"]


class Grants(Book):
    """What requests own, and the growths that will give them more.

    Attributes:
        lengths: the rows that slots hold, and those that they may.
        capacity: per slot, the longest sequence that the granted pages are enough for; 0 for free
            slots.
        growths: batches that no `settle` has seen finished.
        active_pages: pages per tensor granted to requests, all slots together; shared ones are
            counted in `SharedPages.used`.
    """

    def __new__(cls, reclaimer: Reclaimer, *args: Any, **kwargs: Any) -> Self:
        """No page yet."""
        return cls._with(reclaimer.mapper.journal.entries)

    def __init__(self, reclaimer: Reclaimer, device: int | None) -> None:
        self.reclaimer = reclaimer
        self.journal = reclaimer.mapper.journal
        self.layout = reclaimer.layout
        self.counters = reclaimer.counters
        self.device = device
        self.lengths = Lengths(len(reclaimer.table))
        self.capacity = self.lengths.capacity
        self.growths: list[Growth] = []
        self.active_pages = 0

    def _complete(self, job: Growth, stream: Any, whole: bool = False) -> VMemError | None:
        """Waits for a growth, grants its pages or undoes it.

        `whole`: on the CPU, for its fills and for earlier owners' work too; no stream is known.
        """
        device = None if whole else self.device
        try:
            for ticket in (job.mapping, job.filling):
                if ticket is not None:
                    order_ticket(ticket, stream, device)
        except VMemError as error:
            self._undo(job, error)
            return error
        for event in job.handover:
            order_after(event, stream, device)
        self.journal.keep(job, "handover", "granted")
        job.handover = []
        if not job.granted:
            job.granted = True
            self._grant_all(job)
        if job.done():
            self._retire(job)
        return None

    def poll(self) -> None:
        """Notes which growths that no owner waits for are finished."""
        for job in [job for job in self.growths if not job.awaited and job.done()]:
            error = self._complete(job, None, whole=True)
            if error is not None:
                self.reclaimer.errors.append(error)

    def grant(self, slot: Slot, pages: int) -> None:
        """Makes pages that are mapped the owner's."""
        if pages <= slot.granted:
            return
        self.reclaimer.table.changed(slot)
        self.active_pages += pages - slot.granted
        slot.granted = pages
        self._set_capacity(slot, pages)

    def _grant_all(self, job: Growth) -> None:
        """`grant` to those owners of a growth that are still there."""
        found = [
            (slot, pages, pages - slot.granted)
            for slot, owner, pages in job.grants
            if slot.owner == owner and pages > slot.granted
        ]
        if not found:
            return
        slots, pages, added = zip(*found, strict=True)
        journal = self.journal
        self.reclaimer.table.all_changed(slots)
        self.active_pages += sum(added)
        journal.put_all(slots, "granted", pages)
        capacities = list(map(self.layout.capacity, pages))
        journal.put_items(self.capacity, [slot.index for slot in slots], capacities)

    def shrink(self, slot: Slot, pages: int) -> None:
        """Makes an owner's pages from this one on nobody's; they stay mapped, and are dirty."""
        self.reclaimer.table.changed(slot)
        before = max(0, slot.granted - slot.shared)
        slot.dirty = max(slot.dirty, slot.granted)
        slot.granted = pages
        self.active_pages += max(0, pages - slot.shared) - before
        self._set_capacity(slot, pages)

    def replace(self, slot: Slot, span: Span, mapped: int, granted: int) -> None:
        """What a slot has once pages at its end are gone, and shared ones are its own."""
        self.reclaimer.table.changed(slot)
        before = max(0, slot.granted - slot.shared)
        slot.dirty = min(max(slot.dirty, slot.granted), mapped)
        slot.span, slot.mapped, slot.granted = span, mapped, granted
        self.active_pages += max(0, granted - slot.shared) - before
        self._set_capacity(slot, granted)

    def lend(self, slot: Slot, span: Span) -> None:
        """Grants an empty slot shared pages, which are mapped there."""
        self.reclaimer.table.changed(slot)
        slot.span = span
        slot.mapped = slot.granted = span.pages
        slot.places.put_all(span.stretches())
        self._set_capacity(slot, span.pages)

    def revoke(self, slot: Slot) -> None:
        """Takes an owner's pages out of the counts, before the slot is freed."""
        self.active_pages -= max(0, slot.granted - slot.shared)
        self._set_capacity(slot, 0)

    def _set_capacity(self, slot: Slot, pages: int) -> None:
        capacity, index = self.capacity, slot.index
        self._log.append((capacity.__setitem__, index, capacity[index]))
        capacity[index] = self.layout.capacity(pages) if pages else 0

    def rebuild(self) -> None:
        """Counts again, by the slots, what is granted."""
        self.active_pages = 0
        for slot in self.reclaimer.table:
            self.capacity[slot.index] = self.layout.capacity(slot.granted) if slot.granted else 0
            self.active_pages += max(0, slot.granted - slot.shared)

    def _retire(self, job: Growth) -> None:
        self.reclaimer.table.all_changed(job.slots)
        self.journal.keep_list(self.growths)
        self.growths.remove(job)
        self.journal.put_all(job.slots, "job", [None] * len(job.slots))

    def _undo(self, job: Growth, error: VMemError) -> None:
        """Takes a failed growth back into the books; libvmem has undone the mapping."""
        if job.filling is not None:
            _failed(job.filling)  # waited for alone: it touches pages that were there before
        if job.mapping is not None and _failed(job.mapping):
            for slot, low, high in job.pieces:
                slot.mapped = low
                slot.places.forget(low, high)
            if isinstance(error, NotRecoverable):
                self.reclaimer.condemn(job.pieces)
            self.reclaimer.held -= job.new_pages
            self.counters.grown -= job.new_pages
        self._retire(job)


def _failed(ticket: Any) -> bool:
    """Waits for a batch and tells whether it failed."""
    try:
        ticket.wait()
    except VMemError:
        return True
    return False
