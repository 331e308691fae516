# SPDX-License-Identifier: MIT
"""Chooses the run lengths by which requests grow.

Each driver call maps one physical run as one mapping, and a context's mappings are limited
(`ContextInfo.max_mappings`): on ``stock`` to 237,568, which cover 15 GB if each maps a 64 KB page.
So a request that needs a page gets more than it needs:

    0 ................. granted ...... mapped
    | granted           | surplus      |            mapped ends at a multiple of the run's length

The surplus is mapped but unowned (slots.py): a later step grants it without a driver call, and when
memory is short it is unmapped like the pages of a free slot. No call fails because of it.

The length of a run, a power of two, is:

- a fraction of the request's pages (`KVCacheConfig.growth_fraction`);
- once an eighth of the mappings is used, long enough for the remaining mappings to cover at least
  twice the free memory, with a quarter of the limit reserved for forks and for a fragmented pool;
- at most 2 MiB, and for all requests together at most half of the free memory, or all of it once an
  eighth of the mappings is used.

If that is not enough, a step *joins* requests: pages that were mapped in several pieces but are
physically contiguous (a growing slot prefers 2 MiB chunks that it does not share) are remapped as
one piece. On ``stock`` this unmaps the addresses briefly, so the step first waits for all work on
the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pyvmem.errors import Busy, NotRecoverable, VMemError
from pyvmem.kvcache import migration
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import wait_for_device
from pyvmem.kvcache.migration import Mover
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Piece, Slot
from pyvmem.memory.info import Caps

__all__ = ["SCARCE_AT", "Runs"]

_log = logging.getLogger(__name__)

_RUN_BYTES = 2 << 20  # one GPU page table entry covers this; longer runs save little
SCARCE_AT = 8  # once 1 / SCARCE_AT of the mappings is used, runs get longer
_LOOKS = 64  # mappings are recounted after growing by 1 / _LOOKS of the limit
_JOINS = 512  # maximum driver calls per step for joining, unless it would otherwise return -1
_LEAST = 4  # minimum number of map calls per tensor for joining to pay off


class Runs:
    """Chooses run lengths and joins runs; one per group. The caller holds the cache's lock.

    Attributes:
        limit: maximum number of mappings in the context; 0 if there is no limit.
        joins: True if steps must call `join` when more than `join_at` mappings are used.
        spreads: True if `provide` must be called before growth.
        refused: the error text if the last growth ran out of mappings; otherwise "".
    """

    def __init__(self, reclaimer: Reclaimer, mover: Mover, config: KVCacheConfig) -> None:
        self._reclaimer = reclaimer
        self._mover = mover
        self._context = reclaimer.mapper.context
        self._table = reclaimer.table
        self._layout = layout = reclaimer.layout
        self._counters = reclaimer.counters
        self.limit = self._context.info.max_mappings
        self.join_at = int(config.join_at * self.limit)
        self.joins = Caps.JOIN in self._context.info.caps and self.join_at > 0
        self._chunk = max(1, _RUN_BYTES // layout.page_size)
        self._used = self._seen = 0  # mappings, and pages grown, at the last count
        self._count()
        # For each slot, the number of map calls per tensor since its pages were last joined, and
        # the end of the joined pages. These are only hints: an asynchronous exception may leave
        # them wrong.
        self._columns = columns = self._table.columns
        self._calls, self._joined = columns.calls, columns.joined
        columns.runs.last, columns.runs.tensors = layout.slot_pages, layout.num_tensors
        columns.runs.longest = self._chunk if config.growth_fraction else 1
        columns.runs.fraction = config.growth_fraction
        # A small cache gains nothing from 2 MiB entries.
        large = reclaimer.limit * layout.page_size >= migration.REACH
        reclaimer.block = layout.block if large else 0
        self.spreads = reclaimer.block > 0
        self._spare = 0  # the pool's free pages when last read, minus pages mapped since
        self._stream: Any = None
        self.refused = ""

    @property
    def used(self) -> int:
        """Upper bound on the number of the context's mappings.

        Assumes one mapping per page mapped since the last count.
        """
        grown = self._counters.grown - self._seen
        return self._used + grown if 0 <= grown * _LOOKS <= self.limit else self._count()

    def _count(self) -> int:
        """Counts the context's mappings."""
        self._seen = self._counters.grown
        self._used = self._context.stats().mappings
        return self._used

    # ---- growth ----------------------------------------------------------------------------------

    def read_free(self, room: int | None, kept: int = 0) -> None:
        """Writes the free memory and mappings to `Columns.runs`.

        `Columns.plan` and `Columns.goals` use them.

        Args:
            room: bytes free in the budget; None: there is no budget.
            kept: physical pages that the growth must leave free.
        """
        runs, reclaimer = self._columns.runs, self._reclaimer
        free = reclaimer.limit - reclaimer.device_pages
        if room is not None:
            free = min(free, room // self._layout.page_size)
        runs.free = max(0, free - kept) // self._layout.num_tensors
        if runs.longest == 1:
            return
        used = self.used if self.limit else 0
        scarce = self.limit and used * SCARCE_AT >= self.limit
        runs.left = max(1, self.limit * 3 // 4 - used) if scarce else 0

    def provide(self, pages: int) -> None:
        """Makes the pool allocate memory before requests grow by `pages` physical pages.

        On its own, a pool allocates memory only when it is out of pages. If it has pages but no
        empty 2 MiB chunk, it would place the new pages in chunks that other requests grow into. So,
        within the cache's limit, the pool gets memory for the new pages plus one chunk per request
        and tensor.
        """
        table, layout, reclaimer = self._table, self._layout, self._reclaimer
        open_pages = (len(table) - table.free_count) * layout.num_tensors * layout.block
        self._spare -= pages
        if self._spare >= open_pages:
            return
        limit = reclaimer.free
        # Ask for a quarter more, so that the pool's statistics are rarely read.
        want = min(pages + open_pages * 5 // 4, limit)
        free = self._context.stats().free_bytes // layout.page_size
        if free < min(pages + open_pages, limit):
            try:
                self._context.warm(want * layout.page_size)
                free = want
            except VMemError as error:
                _log.debug("the pool could not grow: %s", str(error))
        self._spare = free - pages

    def goals(self, want: Sequence[tuple[Slot, int]], room: int) -> list[int] | None:
        """Returns how many pages per tensor to map for each slot, no fewer than it needs.

        Returns None to map exactly what the slots need. For `room`, see `read_free`.
        """
        runs = self._columns.runs
        if runs.longest == 1:
            return None
        self.read_free(room)
        # Only slots in use get surplus pages.
        used = [(slot, pages) for slot, pages in want if slot.active]
        idle = sum([max(0, pages - slot.mapped) for slot, pages in want if not slot.active])
        runs.free -= min(runs.free, idle)
        needs = [pages for _, pages in used]
        mapped, heads = [slot.mapped for slot, _ in used], [slot.head for slot, _ in used]
        found = self._columns.goals(needs, mapped, heads)
        if found == needs:
            return None
        goals = iter(found)
        return [next(goals) if slot.active else pages for slot, pages in want]

    def grown(self, pieces: Sequence[Piece]) -> None:
        """Records newly mapped pages; called only if mappings are limited."""
        for slot, low, _ in pieces:
            self._calls[slot.index] = self._calls[slot.index] + 1 if low else 1
            self._joined[slot.index] = min(self._joined[slot.index], low)

    def needed(self, lengths: Sequence[int]) -> int:
        """Estimates the number of mappings for new requests of `lengths` pages per tensor.

        Assumes runs of 2 MiB, plus one run per request. Returns 0 if mappings are not limited, if
        there are several ranks, or if all slots are free.
        """
        table = self._table
        if not self.limit or table.lockstep or table.free_count == len(table):
            return 0
        runs = sum(-(-pages // self._chunk) + 1 for pages in lengths if pages)
        return runs * self._layout.num_tensors

    def obtainable(self) -> int:
        """Returns the number of mappings that unmapping free slots and joining runs would free."""
        found = 0
        for slot in self._table:
            calls = min(self._calls[slot.index], slot.mapped)
            if slot.active:
                left = -(-(slot.mapped - self._first(slot)) // self._chunk)  # after joining
                calls = max(0, calls - left) if self.joins else 0
            found += calls
        return found * self._layout.num_tensors

    def holders(self) -> tuple[int, int]:
        """Estimates how many mappings running requests and free slots have, respectively."""
        found = [0, 0]
        for slot in self._table:
            calls = min(self._calls[slot.index], slot.mapped)
            found[not slot.active] += calls * self._layout.num_tensors
        return found[0], found[1]

    @property
    def left(self) -> int:
        """The number of mappings that the context can still make, freshly counted."""
        return self.limit - self._count()

    # ---- joining ---------------------------------------------------------------------------------

    def join(self, stream: Any) -> None:
        """Joins the slots that free the most mappings, within a limit on driver calls per step."""
        self._stream = stream
        if self._count() > self.join_at:
            self._join(self._used - self.join_at + self.limit // 16, _JOINS)

    def relieve(self) -> bool:
        """Joins all slots that can be joined; returns whether that freed mappings."""
        if not self.joins:
            return False
        before = self._count()
        self._join(before, before)
        return self._used < before

    def _join(self, spare: int, most: int) -> None:
        """Joins slots, starting with those in the most pieces.

        Stops after about `most` driver calls, or when about `spare` mappings are freed.
        """
        tensors = self._layout.num_tensors
        slots = [
            slot
            for slot in self._table
            if self._calls[slot.index] >= _LEAST
            and slot.active
            and not (slot.job or slot.rows_lost or slot in self._mover.moves)
        ]
        if not slots:
            return
        slots.sort(key=lambda slot: -self._calls[slot.index])
        wait_for_device(self._stream, self._mover.device)
        with self._counters.waiting():
            for slot in slots:
                if spare <= 0 or most <= 0:
                    break
                spare -= (self._calls[slot.index] - 1) * tensors
                try:
                    most -= self._join_slot(slot)
                except Busy:  # another call is reading the range
                    continue
                except VMemError as error:
                    if isinstance(error, NotRecoverable):
                        self._table.lose(slot, error)
                    self._reclaimer.errors.append(error)
                    break
        before = self._used
        _log.debug("joining: %d mappings, down from %d", self._count(), before)

    def _first(self, slot: Slot) -> int:
        """Returns the first page to join.

        The last 2 MiB run that was joined is included, since it may have grown.
        """
        joined = min(self._joined[slot.index], slot.mapped)
        return max(joined // self._chunk * self._chunk, slot.shared)

    def _join_slot(self, slot: Slot) -> int:
        """Joins a slot's pages in every tensor; returns the number of driver calls."""
        layout = self._layout
        first = self._first(slot)
        calls = 0
        if first < slot.mapped:
            large_end = slot.large_end_with(first, slot.mapped, slot.large_end)
            self._table.change(slot, large_end=large_end)
            nbytes = (slot.mapped - first) * layout.page_size
            for tensor in range(layout.num_tensors):
                at = slot.addr + layout.offset(0, first, tensor)
                calls += self._reclaimer.mapper.join(at, nbytes)
        self._calls[slot.index] = 1
        self._joined[slot.index] = slot.mapped
        return calls
