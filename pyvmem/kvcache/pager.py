# SPDX-License-Identifier: MIT
"""Giving pages to requests: one batch maps what a step lacks, another zeroes old pages."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyvmem.errors import NotRecoverable, OutOfMemory, TooManyMappings, VMemError
from pyvmem.kvcache.events import is_over, wait_for
from pyvmem.kvcache.grants import Grants
from pyvmem.kvcache.jobs import Cut, Growth, Piece
from pyvmem.kvcache.places import DEVICE, Kind
from pyvmem.kvcache.plan import Planner, Source
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Slot

__all__ = ["Pager"]


class Pager(Grants):
    """Grows slots, in the calling thread or in the background.

    Attributes:
        stop_promoting: gives up copies that are not needed, whether there were any; set by who
            makes them.
        promoting: pages per tensor that it would bring back.
        goals: chooses the pages to map beyond what is wanted; `grown` learns what became of it, and
            `relieve` makes fewer mappings of those there are, at a safe point (runs.py).
    """

    def __init__(self, reclaimer: Reclaimer, *, zero_fill: bool, device: int | None) -> None:
        super().__init__(reclaimer, device)
        self.mapper = reclaimer.mapper
        self.base = reclaimer.base
        slots = len(reclaimer.table)
        self._planner = Planner(self.base, self.layout, slots, zero_fill=zero_fill)
        self._large = Kind(self.layout.large_pages, DEVICE)
        self.stop_promoting: Callable[[], bool] = lambda: False
        self.promoting: Callable[[], int] = lambda: 0
        self.goals: Callable[[Sequence[tuple[Slot, int]]], list[int] | None] = lambda want: None
        self.grown: Callable[[Sequence[Piece]], None] = lambda pieces: None
        self.relieve: Callable[[], bool] = lambda: False

    # ---- requests ------------------------------------------------------------------------------

    def grow(
        self,
        want: Sequence[tuple[Slot, int]],
        *,
        background: bool,
        reclaim: bool = True,
        source: Source | None = None,
        after: Sequence[Any] = (),
    ) -> bool:
        """Starts to give each slot so many pages per tensor; `settle` completes it.

        No slot may have a batch in flight. New pages are taken at once: in the background they are
        promised, else mapped, when this returns. Inactive slots get the pages mapped, not granted.

        Args:
            want: slots and the pages that each shall have.
            background: on the worker thread; else mapped when this returns.
            reclaim: unmap pages of no owner, and wait for that, when memory is short.
            source: what the new pages begin with, in each slot.
            after: GPU work that writes it; waited for here.

        Returns:
            False when memory is short; then nothing changed, except that reclaimed pages are free.
        """
        goals = self.goals(want)
        while True:
            job = Growth([slot for slot, _ in want])
            writers: list[Any] = []
            late = self._planner.plan(want, job, writers, source=source, goals=goals)
            grants = job.grants
            if late:
                job.grants = []  # nobody's before its old contents are about to be zeroed
            if not len(self._planner.mapping):
                self._begin(job, granted=not (late or job.handover))
                break
            for event in after:
                wait_for(event)
            if self._map(job, want, background, reclaim, source, goals is not None, bool(late)):
                break
            if goals is None:
                return False
            goals = None
        self.grown(job.pieces)
        counters = self.counters
        counters.grown += job.new_pages
        counters.reused += job.reused_pages
        counters.zeroed += job.zeroed_pages
        counters.peak_mapped = max(counters.peak_mapped, self.reclaimer.held)
        if late:
            with self.mapper.transaction() as change:
                self.journal.keep(job, "grants", "filling")
                job.grants, job.filling = grants, change.ticket
                change.submit(self._planner.filling(late), writers)
            pages = sum(high - low for _, low, high in late)
            self.counters.zeroed += pages * self.layout.num_tensors
        return True

    def _begin(self, job: Growth, granted: bool = False) -> None:
        """Writes a growth into the books; `granted`: as one that is complete."""
        journal = self.journal
        self.reclaimer.table.all_changed(job.slots)
        if job.pieces:
            slots, _, mapped = zip(*job.pieces, strict=True)
            journal.put_all(slots, "mapped", mapped)
        for slot, low, high in job.large:
            slot.places.put(low, high, self._large)
        self.reclaimer.held += job.new_pages
        if granted:
            self._grant_all(job)
            return
        journal.put_all(job.slots, "job", [job] * len(job.slots))
        journal.keep_list(self.growths)
        self.growths.append(job)

    def settle(
        self, stream: Any = None, whole: bool = False, lens: Sequence[int] | None = None
    ) -> None:
        """Returns when every growth begun so far is mapped, and filled or ordered before `stream`.

        Args:
            stream: the work that comes next.
            whole: filled, and earlier owners' work is over, whatever stream comes next.
            lens: of all slots; what none of these lengths needs is not waited for.

        Raises:
            VMemError: the first failure; what failed was undone, the rest is granted.
        """
        first: VMemError | None = None
        for job in list(self.growths):
            if job.done():
                error = self._complete(job, stream, whole)
            elif not self._is_needed(job, lens):
                continue
            else:
                with self.counters.waiting():
                    error = self._complete(job, stream, whole)
            first = first or error
        if first is not None:
            raise first

    def _is_needed(self, job: Growth, lens: Sequence[int] | None) -> bool:
        """Whether an owner waits for a growth; for an eager allocation nobody does."""
        if lens is None or job.granted:
            return bool(job.grants)
        capacity = self.capacity
        return any(
            slot.owner == owner and capacity[slot.index] < lens[slot.index]
            for slot, owner, _ in job.grants
        )

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

    def is_held_up(self, slot: Slot) -> bool:
        """Whether `release` would wait; where that is for a slot that is stale, its cut is begun.

        What it would wait for may be an earlier owner's GPU work.
        """
        job = slot.job
        if job is None:
            if slot.mapped > slot.granted and slot.stale:
                self.reclaimer.try_cut(slot, 0)
                return True
            return False
        if not job.done():
            return True
        return isinstance(job, Growth) and not all(map(is_over, job.handover))

    def finish_idle(self) -> None:
        """Waits for growths that no owner waits for, so that their pages can be taken back."""
        for job in [job for job in self.growths if not job.awaited]:
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
        share = self.reclaimer.share
        self.finish_idle()
        if share is not None:
            share.finish_idle()
        if pages <= self.reclaimer.obtainable(keep):
            return True
        if self.stop_promoting() and pages <= self.reclaimer.obtainable(keep):
            return True
        stopped = share is not None and share.stop_promoting()
        return stopped and pages <= self.reclaimer.obtainable(keep)

    def could_have(self, pages: int) -> bool:
        """`can_have`, as far as it can be told without a wait."""
        reclaimer, more = self.reclaimer, self.unsettled
        if reclaimer.share is not None:
            more += reclaimer.share.unsettled() // self.layout.page_size
        return pages <= reclaimer.obtainable({}) + more

    @property
    def unsettled(self) -> int:
        """Physical pages that `can_have` would wait for: of idle growths, and copies given up."""
        idle = [slot for job in self.growths if not job.awaited for slot in job.slots]
        spare = sum(max(0, slot.mapped - max(slot.granted, slot.shared)) for slot in idle)
        return (spare + self.promoting()) * self.layout.num_tensors

    def have(self, pages: int) -> bool:
        """Whether so many physical pages are free, once what belongs to no request was reclaimed.

        Raises:
            VMemError: pages of no request could not be unmapped.
        """
        reclaimer = self.reclaimer
        while (missing := pages - reclaimer.free) > 0:
            free = reclaimer.free
            if not self.can_have(pages, {}):
                return False
            own = max(0, pages - (reclaimer.limit - reclaimer.held))
            if reclaimer.free == free and not reclaimer.make_room(missing, {}, own):
                reclaimer.raise_errors()
                return False
        return True

    # ---- batches -------------------------------------------------------------------------------

    def _map(
        self,
        job: Growth,
        want: Sequence[tuple[Slot, int]],
        background: bool,
        reclaim: bool,
        source: Source | None,
        more: bool,
        late: bool,
    ) -> bool:
        """Runs or submits the mapping batch, with the growth in the books; False: no memory.

        `more`: it maps more than is wanted, for which nothing is taken back. `late`: fills follow.
        """
        reclaimer, mapping, pages = self.reclaimer, self._planner.mapping, job.new_pages
        keep = dict(want) if reclaim else None
        while True:
            missing = pages - reclaimer.free
            if missing <= 0:
                try:
                    with self.mapper.transaction() as change:
                        job.mapping = change.ticket if background else None
                        self._begin(job, granted=not (background or late or job.handover))
                        if background:
                            change.submit(mapping)
                        else:
                            with self.counters.waiting():
                                change.run(mapping)
                    return True
                except NotRecoverable:
                    self.reclaimer.condemn(job.pieces)
                    raise
                except TooManyMappings:
                    if more:
                        return False
                    if self._fewer_mappings(job, keep, background):
                        continue
                    if self.reclaimer.table.lockstep:
                        raise
                    return False
                except OutOfMemory:  # of the device, or of a context shared with others
                    if more:
                        return False
                    if self.reclaimer.table.lockstep:
                        raise
                    if job.large:  # small pages may fit where no large one does
                        job.large.clear()
                        self._planner.plan(want, Growth(job.slots), [], False, source)
                        continue
                    missing = pages
            if keep is None or more:
                return False
            free = reclaimer.free
            if not self.can_have(pages, keep):
                return False
            if reclaimer.free > free:  # copies were given up
                continue
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
                return False
            for slot in job.slots:
                if slot.job is not None:  # it lost pages beyond those it is to have
                    reclaimer.finish(slot.job)

    def _fewer_mappings(
        self, job: Growth, keep: Mapping[Slot, int] | None, background: bool
    ) -> bool:
        """Brings mappings back: joins what can be joined, else unmaps pages of no request."""
        reclaimer = self.reclaimer
        if (reclaimer.table.lockstep or not background) and self.relieve():
            return True
        if keep is None or not reclaimer.make_room(job.new_pages, keep):
            reclaimer.raise_errors()
            return False
        for slot in job.slots:
            if slot.job is not None:  # it lost pages beyond those it is to have
                reclaimer.finish(slot.job)
        return True
