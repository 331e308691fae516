# SPDX-License-Identifier: MIT
"""Promotion and sliding windows: pages of a running request that are replaced or unmapped.

A part is `KVCacheConfig.large_page_size` bytes of every tensor, at a multiple of that. When its
last row has been written it is only read, so it can change its pages. Where they are one physical
run (growing slots prefer 2 MiB of their own), they are mapped in one piece, where that saves
mappings. Elsewhere they are copied to a large page while the GPU goes on, and replaced at the step
that finds the copies over: each part as a whole, after the work on the step's stream, since it may
be invalid for a moment. What lies beside it is not touched.

A step from `old` to `new` tokens computes the tokens from `old` on. The first of them attends to
rows from ``old - window + 1`` on, and its kernel reads the whole tile that this row lies in:

    0 ............... head ..... old - window - window_tile ..... old - window ..... old .... new
    | unmapped, pages | slack    | kernel's tile                 | attended to      | computed |

So when a step asks for `new`, pages wholly below ``old - window - window_tile`` go, after the work
that was launched before: that step's work is the last that read them. A prefill of more tokens than
the window has all of them mapped until the next step.
"""

from __future__ import annotations

import errno
import logging
import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

from pyvmem.errors import OutOfMemory, TooManyBatches
from pyvmem.info import Caps
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.events import record
from pyvmem.kvcache.growth import Pager
from pyvmem.kvcache.moves import Mover
from pyvmem.kvcache.pages import DEVICE, PLAIN, Kind
from pyvmem.kvcache.slots import Move, Slot

__all__ = ["Promoter", "Window"]

_NEVER = 1 << 62

_log = logging.getLogger(__name__)


class Promoter:
    """Finds what to promote."""

    def __init__(self, pager: Pager, mover: Mover, config: KVCacheConfig) -> None:
        reclaimer = pager.reclaimer
        self._pager = pager
        self._mover = mover
        self._reclaimer = reclaimer
        self._mapper = reclaimer.mapper
        self._journal = reclaimer.mapper.journal
        self._layout = layout = reclaimer.layout
        self._unit = layout.large_pages
        self._large = Kind(self._unit, DEVICE)
        self._kept = config.window_tile
        self._from = max(config.promote_tokens or _NEVER, self._kept)
        # By slot: the length at which a part more may be promoted.
        self._next = [self._from] * config.max_batch
        self._joined: dict[int, set[int]] = {}  # by slot: parts that are one piece already

    def forget(self, slot: Slot) -> None:
        """Ends a request."""
        self._journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        self._next[slot.index] = self._from
        self._journal.keep_dict(self._joined)
        self._joined.pop(slot.index, None)

    def shorten(self, slot: Slot, page: int) -> None:
        """Takes note that pages from this one on may be other ones from now on."""
        joined = self._joined.get(slot.index)
        if joined:
            self._journal.keep_dict(self._joined)
            self._joined[slot.index] = {low for low in joined if low + self._unit <= page}
        self._journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        rows = -(-page * self._layout.page_size // self._layout.row_bytes)
        self._next[slot.index] = min(self._next[slot.index], max(self._from, rows + self._kept))

    def step(self, lens: Sequence[int], stream: Any) -> None:
        """Begins to promote what is long enough, of requests that the step to `lens` lengthens.

        That a request grows says that the work for its rows so far was launched. The last of them
        may be taken back and written again (`KVCacheConfig.window_tile`); they are left alone.
        """
        table, old = self._reclaimer.table, self._pager.columns.held
        for index in compress(range(len(table)), map(operator.ge, old, self._next)):
            slot = table[index]
            if lens[index] > old[index] and slot not in self._mover.moves:
                held = old[index] - self._kept
                self.promote(slot, held, stream, wait=False)
                rows = self._layout.row_bytes
                part = held * rows // (self._unit * self._layout.page_size) + 1
                end = -(-part * self._unit * self._layout.page_size // rows)
                self._next[index] = max(self._from, end + self._kept)

    def promote(self, slot: Slot, held: int, stream: Any, *, wait: bool) -> int:
        """See `KVCache.promote`; of the first `held` rows."""
        if slot in self._mover.moves:
            move = self._mover.moves[slot]
            if wait:
                self._mover.finish(slot, stream)
            return len(move.runs) + sum(high - low for low, high, _ in move.stretches) // self._unit
        runs, copies = self._parts(slot, held)
        move = Move(slot, [(low, low + self._unit, self._large) for low in copies], promotes=True)
        move.runs = [(low, low + self._unit) for low in runs]
        if not move.stretches and not move.runs:
            return 0
        event = record(stream, self._pager.device)
        try:
            self._mover.begin(move, [] if event is None else [event], background=True)
        except (OutOfMemory, TooManyBatches):  # they stay as they are
            move.stretches = []
            if not move.runs:
                return 0
            self._mover.begin(move, [], background=True)
        self._journal.keep_dict(self._joined)
        self._joined[slot.index] = self._joined.get(slot.index, set()) | set(runs)
        parts = len(move.runs) + len(move.stretches)
        self._reclaimer.counters.promoted += parts * self._unit * self._layout.num_tensors
        _log.debug(
            "promotion of reqid %d: %d parts joined, %d copied",
            slot.index,
            len(runs),
            parts - len(runs),
        )
        if wait:
            self._mover.finish(slot, stream)
        return parts

    def _parts(self, slot: Slot, held: int) -> tuple[list[int], list[int]]:
        """First pages of full parts of small pages: of those in one run, and of the others.

        Of the others only as many as there is memory for, beyond the watermark.
        """
        layout, unit = self._layout, self._unit
        joined = self._joined.get(slot.index, ())
        room = (self._reclaimer.free - self._reclaimer.low_pages) // (unit * layout.num_tensors)
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
                if Caps.CONSOLIDATE in self._mapper.context.info.caps:
                    runs.append(low)
            elif len(copies) < room:
                copies.append(low)
        return runs, copies

    def _is_run(self, slot: Slot, low: int) -> bool:
        """Whether the pages of a part are neighbours, in every tensor."""
        layout, base = self._layout, self._reclaimer.base
        size = self._unit * layout.page_size
        query = self._mapper.query
        return all(
            query(base + layout.offset(slot.index, low, tensor)).run_bytes >= size
            for tensor in range(layout.num_tensors)
        )


class Window:
    """Decides which pages have left the window."""

    def __init__(self, pager: Pager, mover: Mover, config: KVCacheConfig) -> None:
        self._pager = pager
        self._mover = mover
        self._reclaimer = pager.reclaimer
        self._journal = pager.journal
        self._layout = pager.layout
        self._window = config.window
        self._kept = config.window + config.window_tile
        self._first = self._kept + self._rows(1)
        # By slot: the length at which the next page can go, and the least that may be asked for.
        self._next = [self._first] * config.max_batch
        self._least = [0] * config.max_batch

    def _rows(self, pages: int) -> int:
        """Rows that so many pages hold a byte of."""
        return -(-pages * self._layout.page_size // self._layout.row_bytes)

    def check(self, slot: Slot, length: int) -> None:
        """Raises InvalidArgument for a length whose window has been unmapped."""
        least = self._least[slot.index]
        if length < least:
            raise invalid(
                f"length {length}: with fewer than {least} tokens the window of "
                f"{self._window} of reqid {slot.index} begins in rows that are gone",
                limit=least,
            )

    def slide(self, lens: Sequence[int], stream: Any) -> None:
        """Begins to unmap what the step to `lens` no longer needs; does not wait."""
        table, old = self._reclaimer.table, self._pager.columns.held
        events: list[Any] | None = None
        for index in compress(range(len(table)), map(operator.ge, old, self._next)):
            slot = table[index]
            if lens[index] <= old[index]:
                continue  # the same length again: perhaps its work has not been launched yet
            if slot.job is not None:
                if not table.lockstep:
                    continue  # the next step is soon enough
                self._pager.release(slot)
            if events is None:
                event = record(stream, self._pager.device)
                events = [] if event is None else [event]
            layout = self._layout
            head = (old[index] - self._kept) * layout.row_bytes // layout.page_size
            places = slot.places
            if not self._mover.make_way(slot, head):
                continue
            if places and places.floor(head) != head:  # in the middle of a large page
                end, head = places.ceil(head), places.floor(head)
                if head <= slot.head:
                    self._set(index, self._kept + self._rows(end), self._least[index])
                    continue
            if head <= slot.head:  # they went in a step that an exception ended
                self._set(index, self._kept + self._rows(head + 1), self._window + self._rows(head))
                continue
            after = [*slot.events, *events]
            if not self._reclaimer.try_slide(slot, head, after):  # the queue is full
                if not table.lockstep:
                    return  # the next step tries again
                self._reclaimer.finish_all()
                if not self._reclaimer.try_slide(slot, head, after):
                    raise TooManyBatches(
                        "pages behind the window could not be unmapped",
                        errno=errno.EAGAIN,
                        op="KVCache",
                    )
            self._set(index, self._kept + self._rows(head + 1), self._window + self._rows(head))

    def forget(self, slot: Slot) -> None:
        """Ends a request; call it while the slot is still its own."""
        if not slot.stale:
            self._reclaimer.slid -= slot.head
        self._set(slot.index, self._first, 0)

    def _set(self, index: int, later: int, least: int) -> None:
        for numbers, value in ((self._next, later), (self._least, least)):
            self._journal.undo(numbers.__setitem__, index, numbers[index])
            numbers[index] = value
