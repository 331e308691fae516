# SPDX-License-Identifier: MIT
"""Promotion: the full parts of a long request, which grew in small pages, become large.

A part is `KVCacheConfig.large_page_size` bytes of every tensor, at a multiple of that. When its
last row has been written it is only read, so it can change its pages. Where they are one physical
run (growing slots prefer 2 MiB of their own), they are mapped in one piece. Elsewhere they are
copied to a large page while the GPU goes on, and replaced at the step that finds the copies over.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from pyvmem.errors import OutOfMemory, TooManyBatches
from pyvmem.info import Caps
from pyvmem.kvcache.events import record
from pyvmem.kvcache.jobs import Move
from pyvmem.kvcache.places import DEVICE, PLAIN, Kind

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["Promoter"]

_NEVER = 1 << 62


class Promoter:
    """Finds what is to be promoted."""

    def __init__(self, core: Core) -> None:
        self._core = core
        layout = core.layout
        self._unit = layout.large_pages
        self._large = Kind(self._unit, DEVICE)
        self._kept = core.config.window_tile
        self._from = max(core.config.promote_tokens or _NEVER, self._kept)
        # By slot: the length at which a part more may be promoted.
        self._next = [self._from] * core.config.max_batch
        self._joined: dict[int, set[int]] = {}  # by slot: parts that are one piece already

    def forget(self, slot: Slot) -> None:
        """Ends a request."""
        self._core.journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        self._next[slot.index] = self._from
        self._core.journal.keep_dict(self._joined)
        self._joined.pop(slot.index, None)

    def shorten(self, slot: Slot, page: int) -> None:
        """Takes note that pages from this one on may be other ones from now on."""
        joined = self._joined.get(slot.index)
        if joined:
            self._core.journal.keep_dict(self._joined)
            self._joined[slot.index] = {low for low in joined if low + self._unit <= page}
        self._core.journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        rows = -(-page * self._core.layout.page_size // self._core.layout.row_bytes)
        self._next[slot.index] = min(self._next[slot.index], max(self._from, rows + self._kept))

    def step(self, lens: Sequence[int], stream: Any) -> None:
        """Begins to promote what is long enough, of requests that the step to `lens` lengthens.

        That a request grows says that the work for its rows so far was launched. The last of them
        may be taken back and written again (`KVCacheConfig.window_tile`); they are left alone.
        """
        core, old = self._core, self._core.rows
        for index in compress(core.indices, map(operator.ge, old, self._next)):
            slot = core.table[index]
            if lens[index] > old[index] and slot not in core.mover.moves:
                held = old[index] - self._kept
                self.promote(slot, held, stream, wait=False)
                rows = core.layout.row_bytes
                part = held * rows // (self._unit * core.layout.page_size) + 1
                end = -(-part * self._unit * core.layout.page_size // rows)
                self._next[index] = max(self._from, end + self._kept)

    def promote(self, slot: Slot, held: int, stream: Any, *, wait: bool) -> int:
        """See `KVCache.promote`; of the first `held` rows."""
        core = self._core
        if slot in core.mover.moves:
            move = core.mover.moves[slot]
            if wait:
                core.mover.finish(slot, stream)
            return len(move.runs) + sum(high - low for low, high, _ in move.stretches) // self._unit
        runs, copies = self._parts(slot, held)
        move = Move(slot, [(low, low + self._unit, self._large) for low in copies], promotes=True)
        move.runs = [(low, low + self._unit) for low in runs]
        if not move.stretches and not move.runs:
            return 0
        event = record(stream, core.device)
        try:
            core.mover.begin(move, [] if event is None else [event], background=True)
        except (OutOfMemory, TooManyBatches):  # they stay as they are
            move.stretches = []
            if not move.runs:
                return 0
            core.mover.begin(move, [], background=True)
        core.journal.keep_dict(self._joined)
        self._joined[slot.index] = self._joined.get(slot.index, set()) | set(runs)
        parts = len(move.runs) + len(move.stretches)
        core.counters.promoted += parts * self._unit * core.layout.num_tensors
        if wait:
            core.mover.finish(slot, stream)
        return parts

    def _parts(self, slot: Slot, held: int) -> tuple[list[int], list[int]]:
        """First pages of full parts of small pages: of those in one run, and of the others.

        Of the others only as many as there is memory for, beyond the watermark.
        """
        core, layout, unit = self._core, self._core.layout, self._unit
        joined = self._joined.get(slot.index, ())
        room = (core.reclaimer.free - core.low_pages) // (unit * layout.num_tensors)
        runs: list[int] = []
        copies: list[int] = []
        first = -(-max(slot.shared, slot.head) // unit)
        full = min(held * layout.row_bytes // layout.page_size, slot.granted)
        for low in range(first * unit, full // unit * unit, unit):
            if low in joined or list(slot.places.stretches(low, low + unit)) != [
                (low, low + unit, PLAIN)
            ]:
                continue
            if self._is_run(slot, low):
                if Caps.CONSOLIDATE in core.context.info.caps:
                    runs.append(low)
            elif len(copies) < room:
                copies.append(low)
        return runs, copies

    def _is_run(self, slot: Slot, low: int) -> bool:
        """Whether the pages of a part are neighbours, in every tensor."""
        layout, base = self._core.layout, self._core.pager.base
        size = self._unit * layout.page_size
        query = self._core.mapper.query
        return all(
            query(base + layout.offset(slot.index, low, tensor)).run_bytes >= size
            for tensor in range(layout.num_tensors)
        )
