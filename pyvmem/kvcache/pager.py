# SPDX-License-Identifier: MIT
"""Giving pages to requests: one batch maps what a step lacks, another zeroes old pages."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any

from pyvmem.errors import NotRecoverable, OutOfMemory, VMemError
from pyvmem.kvcache.events import order_after, order_ticket
from pyvmem.kvcache.jobs import Cut, Growth, Piece
from pyvmem.kvcache.plan import Planner
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import Span

__all__ = ["Pager"]


class Pager:
    """Grows slots, in the calling thread or in the background.

    Attributes:
        capacity: per slot, the longest sequence that the granted pages are enough for; 0 for free
            slots.
        growths: batches that no `settle` has seen finished.
        active_pages: pages per tensor granted to requests, all slots together; shared ones are
            counted in `SharedPages.used`.
    """

    def __init__(self, reclaimer: Reclaimer, *, zero_fill: bool, device: int | None) -> None:
        self.reclaimer = reclaimer
        self.context = reclaimer.context
        self.base = reclaimer.base
        self.layout = reclaimer.layout
        self.counters = reclaimer.counters
        self.device = device
        slots = len(reclaimer.table)
        self.capacity = [0] * slots
        self.growths: list[Growth] = []
        self.active_pages = 0
        self._planner = Planner(self.base, self.layout, slots, zero_fill=zero_fill)

    # ---- requests ------------------------------------------------------------------------------

    def grow(
        self, want: Sequence[tuple[Slot, int]], *, background: bool, reclaim: bool = True
    ) -> bool:
        """Starts to give each slot so many pages per tensor; `settle` completes it.

        No slot may have a batch in flight. New pages are taken at once: in the background they are
        promised, else mapped, when this returns. Inactive slots get the pages mapped, not granted.

        Args:
            want: slots and the pages that each shall have.
            background: on the worker thread; else mapped when this returns.
            reclaim: unmap pages of no owner, and wait for that, when memory is short.

        Returns:
            False when memory is short; then nothing changed, except that reclaimed pages are free.
        """
        job = Growth([slot for slot, _ in want])
        after: list[Any] = []
        late = self._planner.plan(want, job, after)
        if len(self._planner.mapping):
            done, job.mapping = self._map(job, background, dict(want) if reclaim else None)
            if not done:
                return False
        for slot, _, high in job.pieces:
            slot.mapped = high
        for slot in job.slots:
            slot.job = job
        self.growths.append(job)
        counters, reclaimer = self.counters, self.reclaimer
        reclaimer.held += job.new_pages
        counters.grown += job.new_pages
        counters.reused += job.reused_pages
        counters.zeroed += job.zeroed_pages
        counters.peak_mapped = max(counters.peak_mapped, reclaimer.held)
        if late:
            try:
                job.filling = self._fill(late, after)
            except VMemError:
                job.grants.clear()  # the pages stay, without an owner
                raise
        return True

    def settle(self, stream: Any = None, whole: bool = False) -> None:
        """Returns when every growth begun so far is mapped, and filled or ordered before `stream`.

        `whole`: filled, and earlier owners' work is over, whatever stream comes next.

        Raises:
            VMemError: the first failure; what failed was undone, the rest is granted.
        """
        first: VMemError | None = None
        for job in list(self.growths):
            if job.done():
                error = self._complete(job, stream, whole)
            elif not job.grants:  # an eager allocation: nobody needs it yet
                continue
            else:
                with self.counters.waiting():
                    error = self._complete(job, stream, whole)
            first = first or error
        if first is not None:
            raise first

    def release(self, slot: Slot) -> None:
        """Waits until no batch is in flight over the slot's addresses, and it is not stale.

        Raises:
            VMemError: a batch failed, or the earlier owner's shared pages could not be unmapped.
        """
        if isinstance(slot.job, Cut):
            with self.counters.waiting():
                self.reclaimer.finish(slot.job)
        elif slot.job is not None:
            job = slot.job
            with self.counters.waiting():
                error = self._complete(job, None, whole=True)
            if error is not None:
                raise error
        if slot.stale:
            self.reclaimer.cut(slot, 0, now=True)
            with self.counters.waiting():
                self.reclaimer.finish(slot.job)
            if slot.stale:
                self.reclaimer.raise_errors()

    def finish_idle(self) -> None:
        """Waits for growths that no owner waits for, so that their pages can be taken back."""
        for job in [job for job in self.growths if job.granted or not job.grants]:
            with self.counters.waiting():
                error = self._complete(job, None, whole=True)
            if error is not None:
                self.reclaimer.errors.append(error)

    def can_have(self, pages: int, keep: Mapping[Slot, int]) -> bool:
        """Whether so many physical pages are obtainable, with the slots of `finish_idle` counted.

        Args:
            pages: physical pages.
            keep: slots that are to have at least so many pages per tensor.
        """
        self.finish_idle()
        if self.reclaimer.share is not None:
            self.reclaimer.share.finish_idle()
        return pages <= self.reclaimer.obtainable(keep)

    # ---- batches -------------------------------------------------------------------------------

    def _map(
        self, job: Growth, background: bool, keep: Mapping[Slot, int] | None
    ) -> tuple[bool, Any]:
        """Runs or submits the mapping batch: (whether memory was enough, the ticket)."""
        reclaimer, mapping, pages = self.reclaimer, self._planner.mapping, job.new_pages
        while True:
            missing = pages - reclaimer.free
            if missing <= 0:
                try:
                    if background:
                        return True, self.context.submit(mapping)
                    with self.counters.waiting():
                        self.context.batch(mapping)
                    return True, None
                except NotRecoverable:
                    self.reclaimer.condemn(job.pieces)
                    raise
                except OutOfMemory:  # of the device, or of a context shared with others
                    if self.reclaimer.table.lockstep:
                        raise
                    missing = pages
            if keep is None:
                return False, None
            if not self.can_have(pages, keep):
                return False, None
            own = max(0, pages - (reclaimer.limit - reclaimer.held))
            if not reclaimer.make_room(missing, keep, own):
                reclaimer.raise_errors()
                if self.reclaimer.table.lockstep:  # the other ranks have them
                    raise OutOfMemory(
                        f"{missing} pages that no request owns did not come back",
                        errno=errno.ENOMEM,
                        op="KVCache",
                        bytes=missing * self.layout.page_size,
                    )
                return False, None
            for slot in job.slots:
                if slot.job is not None:  # it lost pages beyond those it is to have
                    reclaimer.finish(slot.job)

    def _fill(self, pieces: list[Piece], after: list[Any]) -> Any:
        """Submits zero-fills that follow earlier owners' GPU work."""
        ticket = self.context.submit(self._planner.filling(pieces), after=after)
        pages = sum(high - low for _, low, high in pieces)
        self.counters.zeroed += pages * self.layout.num_tensors
        return ticket

    # ---- completion ----------------------------------------------------------------------------

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
        job.handover.clear()
        if not job.granted:
            job.granted = True
            for slot, owner, pages in job.grants:
                if slot.owner == owner:
                    self._grant(slot, pages)
        if job.done():
            self._retire(job)
        return None

    def poll(self) -> None:
        """Notes which growths that no owner waits for are finished."""
        for job in [job for job in self.growths if not job.grants and job.done()]:
            error = self._complete(job, None, whole=True)
            if error is not None:
                self.reclaimer.errors.append(error)

    def _grant(self, slot: Slot, pages: int) -> None:
        if pages <= slot.granted:
            return
        self.active_pages += pages - slot.granted
        slot.granted = pages
        self.capacity[slot.index] = self.layout.capacity(pages)

    def lend(self, slot: Slot, span: Span) -> None:
        """Grants an empty slot shared pages, which are mapped there."""
        slot.span = span
        slot.mapped = slot.granted = span.pages
        self.capacity[slot.index] = self.layout.capacity(span.pages)

    def revoke(self, slot: Slot) -> None:
        """Takes an owner's pages out of the counts, before the slot is freed."""
        self.active_pages -= max(0, slot.granted - slot.shared)
        self.capacity[slot.index] = 0

    def _retire(self, job: Growth) -> None:
        self.growths.remove(job)
        for slot in job.slots:
            slot.job = None

    def _undo(self, job: Growth, error: VMemError) -> None:
        """Takes a failed growth back into the books; libvmem has undone the mapping."""
        if job.filling is not None:
            _failed(job.filling)  # waited for alone: it touches pages that were there before
        if job.mapping is not None and _failed(job.mapping):
            for slot, low, _ in job.pieces:
                slot.mapped = low
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
