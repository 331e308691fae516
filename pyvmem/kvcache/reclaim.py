# SPDX-License-Identifier: MIT
"""Taking pages back: how many the cache may have, and which slot loses some."""

from __future__ import annotations

from collections.abc import Mapping

from pyvmem.errors import TooManyMappings
from pyvmem.kvcache.cuts import Cuts, wait_for_cuts
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
        return self.table.index.returning * self.layout.num_tensors

    def forget_crowding(self) -> None:
        """Drops what the background lacked mappings for: it was undone, and no request's."""
        if self.errors:
            self.errors = [one for one in self.errors if not isinstance(one, TooManyMappings)]

    def make_room(
        self, pages: int, keep: Mapping[Slot, int], own: int = 0, prefixes: bool = True
    ) -> bool:
        """Brings up to `pages` physical pages back and waits for them; False when none came.

        Pages of slots go before recorded prefixes: they save a driver call, those a computation.
        The cache's own of each go before those of other caches of its budget. A prefix goes only
        when the slots have given all that they have and it is back: so which ones are evicted is
        no matter of how far the background is.

        Args:
            pages: physical pages.
            keep: slots that are to have at least so many pages per tensor.
            own: of `pages`, those that must be the cache's own, since it is at its ceiling.
            prefixes: evict some where the slots do not have enough.
        """
        size, share = self.layout.page_size, self.share
        before = self._room()
        goal = before + pages * size
        lent = (pages - own) * size if share is not None else 0
        reclaimers = [self] if share is None else [self, *share.others()]
        failed = sum(len(one.errors) for one in reclaimers)
        while (missing := goal - self._room()) > 0:
            self._begin_cuts(-(-missing // size), keep)
            missing -= self.returning * size
            if share is not None and missing > 0 and lent > 0:
                share.begin_cuts(min(missing, lent))
                lent -= share.returning()  # all of it is back before the next turn
            if not any(one.cuts for one in reclaimers):
                break
            with self.counters.waiting():
                wait_for_cuts(reclaimers, lambda: self._room() >= goal)
            if sum(len(one.errors) for one in reclaimers) > failed:
                break  # what could not be unmapped would be tried for ever
        if prefixes and (missing := goal - self._room()) > 0:
            self.evict(-(-missing // (self.layout.num_tensors * size)))
        if prefixes and share is not None and (missing := min(goal - self._room(), lent)) > 0:
            share.evict(missing)
        return self._room() > before

    def _begin_cuts(self, pages: int, keep: Mapping[Slot, int]) -> None:
        """Begins to unmap until so many physical pages are on their way back."""
        tensors = self.layout.num_tensors
        self.release_stale(now=True)
        pending = self.returning
        for slot in self.table.victims():
            if pending >= pages:
                return
            take = min(_spare(slot, keep), -(-(pages - pending) // tensors))
            if take <= 0:
                continue
            if not self.try_cut(slot, slot.mapped - take, now=True):
                return
            pending += take * tensors

    def _room(self) -> int:
        """Bytes that rise by what comes back."""
        if self.share is None:
            return (self.limit - self.held) * self.layout.page_size
        return self.share.room()

    def spare(self, keep: Mapping[Slot, int]) -> int:
        """Pages per tensor of no request, without those on their way back."""
        # What a slot keeps beyond a cut in flight can be had too, once that cut is over.
        spare = self.table.index.spare
        for slot in keep:
            job = slot.job
            if slot.mapped == slot.granted or slot.lost or not (job is None or job.takes_pages):
                continue  # not counted
            spare += max(0, _spare(slot, keep)) - max(0, _spare(slot, {}))
        return spare + self.shared.pages - self.shared.used - self.leased()

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
        for slot in self.table.victims(active=False):
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
        for slot in self.table.index.cached:
            if slot.freed_at > step:  # so are all that follow
                break
            rest = keep if slot is prepared and not slot.stale else 0
            if slot.mapped > rest and not slot.broken:
                complete &= slot.job is None and self.try_cut(slot, rest)
        return complete

    def release_stale(self, now: bool = False) -> bool:
        """Starts cuts of free slots that still have shared pages; False when some must wait."""
        complete = True
        for slot in self.table.index.stale:
            complete &= slot.job is None and self.try_cut(slot, 0, now)
        return complete


def _spare(slot: Slot, keep: Mapping[Slot, int]) -> int:
    """Pages per tensor that the slot can do without; shared ones are counted elsewhere."""
    kept = max(slot.shared, slot.granted, slot.head, keep.get(slot, 0))
    return slot.mapped - slot.places.ceil(kept)
