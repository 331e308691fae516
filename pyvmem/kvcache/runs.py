# SPDX-License-Identifier: MIT
"""How long the runs are that requests grow by, so that no limit on mappings is met before memory.

A driver call makes one mapping of a physical run, and a context may have so many mappings
(`ContextInfo.max_mappings`): on ``stock`` 237,568, which in single pages of 64 KB are 15 GB. So a
request that lacks a page gets more than it needs:

    0 ................. granted ...... mapped
    | what it has       | surplus      |            mapped ends at a multiple of the run's length

The surplus is mapped and nobody's (slots.py): a later step grants it without a driver call, and
where memory is short it is unmapped like the pages of a free slot. Nothing fails for want of it.
How long a run is, as a power of two:

- a part of what the request has (`KVCacheConfig.growth_fraction`);
- once an eighth of the mappings is used, at least so much that those left, but for a quarter kept
  for forks and for pieces that the pool's holes make, are enough for twice the free memory;
- at most 2 MiB, and for all requests together no more than half of the free memory, or all of it
  in the second case.

Where that is not enough, requests are *joined* at a step: what was mapped in pieces and is one
physical run (growing slots prefer 2 MiB of their own) is mapped again in one piece. On ``stock``
the addresses have no memory for a moment, so the whole device is waited for first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.errors import Busy, NotRecoverable, VMemError
from pyvmem.info import Caps
from pyvmem.kvcache.events import wait_for_device
from pyvmem.kvcache.jobs import Piece

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["Runs"]

_RUN_BYTES = 2 << 20  # pages of the GPU's page tables: longer runs save little
_CROWDED = 8  # with a part of 1 / _CROWDED of the mappings used, runs get longer
_LOOKS = 64  # the count of mappings is read again after growth by 1 / _LOOKS of the limit
_JOINS = 512  # driver calls of one step that joins, unless it would have to say -1
_LEAST = 4  # calls of a tensor that joining is worth while for


class Runs:
    """Chooses lengths and joins; one for a cache.

    Attributes:
        limit: mappings that the context may have; 0: any number.
    """

    def __init__(self, core: Core) -> None:
        layout, config = core.layout, core.config
        self._core = core
        self.limit = core.context.info.max_mappings
        self._fraction = config.growth_fraction
        self._join_at = int(config.join_at * self.limit)
        self._joins = Caps.CONSOLIDATE in core.context.info.caps
        self._chunk = max(1, _RUN_BYTES // layout.page_size)
        # A large page cannot be given back in part: at most half of one is surplus.
        self._longest = min(self._chunk, layout.large_pages // 2 or self._chunk)
        self._used = self._seen = 0  # mappings, and pages grown when they were counted
        self._count()
        # Hints: an exception from outside may leave them wrong, and only choices hang on them.
        # By slot: map calls of each tensor since its pages were last one piece for each run.
        self._calls = [0] * config.max_batch
        self._joined = [0] * config.max_batch  # pages that are
        self._stream: Any = None

    @property
    def used(self) -> int:
        """Mappings of the context, or a few more: each page that has come since may be one."""
        grown = self._core.counters.grown - self._seen
        return self._used + grown if 0 <= grown * _LOOKS <= self.limit else self._count()

    def _count(self) -> int:
        """The mappings that there are."""
        self._seen = self._core.counters.grown
        self._used = self._core.context.stats().mappings
        return self._used

    # ---- growth ----------------------------------------------------------------------------------

    def goals(self, want: Sequence[tuple[Slot, int]]) -> list[int] | None:
        """Pages per tensor to map for each slot, at least what it shall have; None: just that."""
        core = self._core
        if self._longest == 1 or not self._fraction:
            return None
        tensors = core.layout.num_tensors
        reclaimer = core.reclaimer
        need = sum([pages - slot.mapped for slot, pages in want if pages > slot.mapped])
        if not need:
            return None
        free = reclaimer.free // tensors - need
        if free <= 0:
            return None
        active = len(core.table) - len(core.table.free)
        least = self._least(free)
        share = free // max(1, active)
        most = min(self._longest, _power(share if least > 1 else share // 2))
        if most == 1:
            return None
        last = core.layout.slot_pages
        goals = []
        longer = False
        fraction = self._fraction
        for slot, pages in want:  # of thousands: written without calls
            goal = pages
            if pages > slot.mapped and slot.active:
                run = 1 << int((pages - slot.head) * fraction).bit_length() >> 1
                if run < least:
                    run = least
                if run > most:
                    run = most
                if run > 1:
                    goal = -(-pages // run) * run
                    if goal > last:
                        goal = last
                    if goal - pages > free:
                        goal = pages
                    free -= goal - pages
                    longer |= goal > pages
            goals.append(goal)
        return goals if longer else None

    def _least(self, free: int) -> int:
        """Pages of a run with which the mappings left suffice for `free` pages in every tensor."""
        used = self.used if self.limit else 0
        if used * _CROWDED < self.limit or not self.limit:
            return 1
        left = max(1, self.limit * 3 // 4 - used)
        pages = -(-2 * free * self._core.layout.num_tensors // left)
        return 1 << (pages - 1).bit_length()

    def grown(self, pieces: Sequence[Piece]) -> None:
        """Notes new pages."""
        if self.limit:
            for slot, low, _ in pieces:
                self._calls[slot.index] = self._calls[slot.index] + 1 if low else 1
                self._joined[slot.index] = min(self._joined[slot.index], low)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether new requests of so many pages per tensor find mappings, as far as one can tell.

        Theirs are taken to be runs of 2 MiB, and one more each. Those of free slots can be had, and
        what joining gives.
        """
        core = self._core
        active = len(core.table) - len(core.table.free)
        if not self.limit or not active or core.table.lockstep:
            return True
        tensors = core.layout.num_tensors
        need = sum(-(-pages // self._chunk) + 1 for pages in lengths if pages) * tensors
        room = self.limit - self.used
        if need <= room:
            return True
        room = self.limit - self._count()
        for slot in core.table:
            calls = min(self._calls[slot.index], slot.mapped)
            if slot.active:
                calls = max(0, calls - self._pieces(slot)) if self._joins and self._join_at else 0
            room += calls * tensors
        return need <= room

    # ---- joining ---------------------------------------------------------------------------------

    def step(self, stream: Any) -> None:
        """Joins what makes the most room, where too many mappings are used; a part in each step."""
        self._stream = stream
        if self._join_at and self._joins and self.used > self._join_at < self._count():
            self._join(self._used - self._join_at + self.limit // 16, _JOINS)

    def relieve(self) -> bool:
        """Joins all that can be joined, now; whether there are fewer mappings."""
        if not self._join_at or not self._joins:
            return False
        before = self._count()
        self._join(before, before)
        return self._used < before

    def _join(self, spare: int, most: int) -> None:
        """Joins slots, most pieces first: for `spare` mappings fewer, in `most` calls or so."""
        core = self._core
        tensors = core.layout.num_tensors
        slots = [slot for slot in core.table if self._can_join(slot)]
        if not slots:
            return
        slots.sort(key=lambda slot: -self._calls[slot.index])
        self._wait()
        with core.counters.waiting():
            for slot in slots:
                if spare <= 0 or most <= 0:
                    break
                spare -= (self._calls[slot.index] - 1) * tensors
                try:
                    most -= self._join_slot(slot)
                except Busy:  # somebody reads the range
                    continue
                except VMemError as error:
                    if isinstance(error, NotRecoverable):
                        core.table.condemn(slot)
                        slot.lost = True
                    core.reclaimer.errors.append(error)
                    break
        self._count()

    def _can_join(self, slot: Slot) -> bool:
        return (
            slot.active
            and slot.job is None
            and not slot.lost
            and self._calls[slot.index] >= _LEAST
            and slot not in self._core.mover.moves
        )

    def _pieces(self, slot: Slot) -> int:
        """Runs of a slot's tensor that joining would leave, those that are joined left out."""
        return -(-(slot.mapped - self._first(slot)) // self._chunk)

    def _first(self, slot: Slot) -> int:
        """The first page to join: the 2 MiB that were joined last may go on."""
        joined = min(self._joined[slot.index], slot.mapped)
        return max(joined // self._chunk * self._chunk, slot.head, slot.shared)

    def _join_slot(self, slot: Slot) -> int:
        """Joins a slot's pages in every tensor; returns the driver calls."""
        core, layout = self._core, self._core.layout
        first = self._first(slot)
        calls = 0
        if first < slot.mapped:
            nbytes = (slot.mapped - first) * layout.page_size
            for tensor in range(layout.num_tensors):
                at = core.pager.base + layout.offset(slot.index, first, tensor)
                calls += core.mapper.consolidate(at, nbytes)
        self._calls[slot.index] = 1
        self._joined[slot.index] = slot.mapped
        return calls

    def _wait(self) -> None:
        """Waits for all work on the device, of whatever stream."""
        wait_for_device(self._stream, self._core.device)


def _power(number: int) -> int:
    """The greatest power of two up to a number, 1 at least."""
    return 1 << max(0, number.bit_length() - 1)
