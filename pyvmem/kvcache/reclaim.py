# SPDX-License-Identifier: MIT
"""Taking pages back: how many the cache may have, and which slot loses some."""

from __future__ import annotations

from collections.abc import Mapping

from pyvmem.kvcache.cuts import Cuts, wait_for_cuts
from pyvmem.kvcache.jobs import Cut
from pyvmem.kvcache.slots import Slot

__all__ = ["Reclaimer"]


class Reclaimer(Cuts):
    """Chooses what to unmap, and waits for it when memory is short."""

    @property
    def free(self) -> int:
        """Physical pages that the cache could take now."""
        own = self.limit - self.held
        if self.share is None:
            return own
        return min(own, self.share.room() // self.layout.page_size)

    @property
    def returning(self) -> int:
        """Physical pages in unfinished cuts."""
        return sum(cut.pages for cut in self.cuts) * self.layout.num_tensors

    def make_room(self, pages: int, keep: Mapping[Slot, int], own: int = 0) -> bool:
        """Brings up to `pages` physical pages back and waits for them; False when none came.

        Pages of slots go before recorded prefixes: they save a driver call, those a computation.
        The cache's own of each go before those of other caches of its budget.

        Args:
            pages: physical pages.
            keep: slots that are to have at least so many pages per tensor.
            own: of `pages`, those that must be the cache's own, since it is at its ceiling.
        """
        tensors, size, share = self.layout.num_tensors, self.layout.page_size, self.share
        before = self._room()
        lent = (pages - own) * size if share is not None else 0
        self.release_stale(now=True)
        pending = self.returning
        if pending < pages:
            for slot in self.table.victims():
                take = min(_spare(slot, keep), -(-(pages - pending) // tensors))
                if take <= 0:
                    continue
                if not self.try_cut(slot, slot.mapped - take, now=True):
                    break
                pending += take * tensors
                if pending >= pages:
                    break
        if share is not None and pending < pages and lent > 0:
            share.begin_cuts(min((pages - pending) * size, lent))
            pending += share.returning() // size
        if pending < pages:
            pending += self.evict(-(-(pages - pending) // tensors)) * tensors
        if share is not None and pending < pages and lent > 0:
            share.evict(min((pages - pending) * size, lent))
        reclaimers = [self] if share is None else [self, *share.others()]
        goal = before + pages * size
        if any(one.cuts for one in reclaimers):
            with self.counters.waiting():
                wait_for_cuts(reclaimers, lambda: self._room() >= goal)
        missing = goal - self._room()
        if missing > 0:  # a prefix may be nobody's only now that a cut is over
            self.evict(-(-missing // (tensors * size)))
            if share is not None:
                share.evict(min(missing, lent))
        return self._room() > before

    def _room(self) -> int:
        """Bytes that rise by what comes back."""
        if self.share is None:
            return (self.limit - self.held) * self.layout.page_size
        return self.share.room()

    def spare(self, keep: Mapping[Slot, int]) -> int:
        """Pages per tensor of no request, without those on their way back."""
        # What a slot keeps beyond a cut in flight can be had too, once that cut is over.
        slots = (s for s in self.table.slots if s.job is None or isinstance(s.job, Cut))
        spare = sum(max(0, _spare(slot, keep)) for slot in slots)
        return spare + self.shared.pages - self.shared.used

    def obtainable(self, keep: Mapping[Slot, int]) -> int:
        """Physical pages that are free, on their way back, or could be taken back."""
        free = self.limit - self.held
        if self.share is not None:
            free = min(free, self.share.within_reach() // self.layout.page_size)
        return free + self.returning + self.spare(keep) * self.layout.num_tensors

    def release_below(self, free_pages: int) -> None:
        """Starts cuts of free slots until `free_pages` pages are free or on their way back."""
        missing = free_pages - self.free - self.returning
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

    def release_stale(self, now: bool = False) -> bool:
        """Starts cuts of free slots that still have shared pages; False when some must wait."""
        complete = True
        for slot in self.table.slots:
            if slot.stale and not slot.active and not slot.lost:
                complete &= slot.job is None and self.try_cut(slot, 0, now)
        return complete


def _spare(slot: Slot, keep: Mapping[Slot, int]) -> int:
    """Pages per tensor that the slot can do without; shared ones are counted elsewhere."""
    return slot.mapped - max(slot.shared, slot.granted, slot.head, keep.get(slot, 0))
