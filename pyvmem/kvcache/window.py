# SPDX-License-Identifier: MIT
"""Sliding windows: unmaps pages of a running request that no later token attends to.

A step from `old` to `new` tokens computes the tokens from `old` on. The first of these attends to
rows from ``old - window + 1`` on, and its kernel reads the whole tile that contains that row:

    0 ............... head ..... old - window - window_tile ..... old - window ..... old .... new
    | unmapped, pages | slack    | kernel's tile                 | attended to      | computed |

So when a step grows a request to `new`, pages entirely below ``old - window - window_tile`` are
unmapped after the work launched so far, which is the last to read them. A prefill longer than
the window keeps all of its tokens mapped until the next step.

`old` is first rounded down to a multiple of the sharing unit (prefix_cache.py): the rows up to
there can be recorded, and a request that begins with them needs the window before that point.
"""

from __future__ import annotations

import errno
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any, TypeAlias

from pyvmem.errors import OutOfMemory, TooManyBatches
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import prune, record
from pyvmem.kvcache.migration import Mover
from pyvmem.kvcache.pages import EMPTY, Part, Span, Tier, TierMap
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Slide, Slot
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket

__all__ = ["Window", "slide"]

_Due: TypeAlias = tuple[Slot, int, int, int]
"""A slot, the first page to keep, and the values of `_next` and `_least` after the unmap."""


class Window:
    """Decides which pages have left the window. The caller holds the cache's lock.

    Args:
        reclaimer: tracks the unmaps.
        mover: tracks the moves in flight.
        config: the group's configuration, which sets the window.
        unit: tokens per sharing unit; 1 if rows cannot be recorded.
        release: waits until no batch is in flight on a slot's addresses.
        ops: the batch that all groups of the cache build in a step.
    """

    def __init__(
        self,
        reclaimer: Reclaimer,
        mover: Mover,
        config: KVCacheConfig,
        unit: int,
        release: Callable[[Slot], None],
        ops: OpBatch,
    ) -> None:
        self.ops = ops
        self._release = release
        self._unit = unit
        self._mover, self.device = mover, mover.device
        self.reclaimer = reclaimer
        self._journal = reclaimer.mapper.journal
        self._size, self._row = reclaimer.layout.page_size, reclaimer.layout.row_bytes
        self._window = config.window
        self._kept = config.window + config.window_tile
        self._first = self._goes_at(1)
        # For each slot, the length at which the next page leaves the window, and the smallest
        # length that a truncation can keep.
        self._next = [self._first] * config.max_batch
        self._least = [0] * config.max_batch

    def _rows(self, pages: int) -> int:
        """Returns the number of rows that are at least partly in the first `pages` pages."""
        return -(-pages * self._size // self._row)

    def _goes_at(self, pages: int) -> int:
        """Returns the length at which the first `pages` pages have left the window."""
        rows = self._kept + self._rows(pages)
        return rows + -rows % self._unit

    def first_page(self, slot: Slot) -> int:
        """Returns the first page whose rows the request still holds."""
        least = self._least[slot.index]
        gone = max(0, least - self._window) * self._row // self._size
        return max(slot.head, gone)

    def check(self, slot: Slot, length: int) -> None:
        """Raises InvalidArgument if rows in the window before `length` have been unmapped."""
        least = self._least[slot.index]
        # An interrupted step may have unmapped pages without updating `_least`.
        if slot.head and not slot.stale:
            least = max(least, self._window + self._rows(slot.head))
        if length < least:
            raise invalid(
                f"length {length}: with fewer than {least} tokens the window of "
                f"{self._window} of reqid {slot.index} begins in unmapped rows",
                limit=least,
            )

    def due(self, lens: Sequence[int]) -> list[_Due]:
        """Returns the unmaps that the step to `lens` allows, one per slot whose window has moved.

        Returns:
            For each slot, the first page to keep, and the values of `_next` and `_least` after the
            unmap.
        """
        table, mover, size, row = self.reclaimer.table, self._mover, self._size, self._row
        old = table.columns.held_rows
        found: list[_Due] = []
        for index in compress(range(len(old)), map(operator.ge, old, self._next)):
            slot = table.slots[index]
            held = old[index]
            if lens[index] <= held:
                continue  # the slot does not grow, so work on its rows may still be launched
            if slot.job is not None:
                if not table.lockstep:
                    continue  # the next step unmaps its pages
                self._release(slot)
            head = (held - held % self._unit - self._kept) * row // size
            if mover.moves and not mover.make_way(slot, head):
                continue
            head, end = self._parted(slot, head) if head < slot.large_end else (head, head + 1)
            later = self._kept - end * -size // row  # inlined `_goes_at`
            later += -later % self._unit
            least = self._window - head * -size // row
            if head > slot.head:
                found.append((slot, head, later, least))
            else:
                least = max(least, self._least[index])
                self._journal.change(self._set_edits(index, later, least))
        return found

    def _parted(self, slot: Slot, head: int) -> tuple[int, int]:
        """Returns the last page up to `head` not inside a 2 MiB entry, and the next page to try."""
        if head < slot.large_end and head % slot.block:  # inside a 2 MiB entry
            head -= head % slot.block
            return head, head + slot.block
        return head, head + 1

    def edit(
        self, edits: list[list[Any]], due: list[_Due], ops: Any, ticket: Ticket, *, quiet: bool
    ) -> None:
        """Writes the unmaps of `due` into a batch, and appends the matching edits to `edits`.

        Args:
            edits: the list to add edits to; see `Outcome`.
            due: the result of `due` for this window.
            ops: where the unmap operations are written.
            ticket: the batch's ticket.
            quiet: another group reports the batch's failure.
        """
        reclaimer = self.reclaimer
        slots = [slot for slot, *_ in due]
        heads = [head for _, head, *_ in due]
        indexes, owners = [slot.index for slot in slots], [slot.owner for slot in slots]
        lows = [slot.head for slot in slots]
        # Spans are computed once for all slots that share the same pages.
        shares, parted = [], dict[tuple[tuple[Part, ...], int], tuple[Span, Span]]()
        count: Counter[Span] = Counter()
        keeping, kept = [], []
        tier_map: dict[Slot, TierMap] = {}
        off_device: Counter[Tier] = Counter()
        for slot, head, later, least in due:
            edits += ([self._next, slot.index, later], [self._least, slot.index, least])
            share = EMPTY
            if slot.span.pages:
                key = slot.span.parts, head - slot.head
                if key not in parted:
                    parted[key] = slot.span.part(head - slot.head)
                share, rest = parted[key]
                count[share] -= 1
                keeping.append(slot)
                kept.append(rest)
            shares.append(share)
            if slot.tier_map.noted:
                tier_map[slot] = slot.tier_map.within(slot.head, head)
                off_device.update(slot.tier_map.off_device(slot.head + share.pages, head))
                edits.append([slot, "tier_map", slot.tier_map.without(slot.head, head)])
        if keeping:
            edits.append([keeping, "span", kept])
            edits += reclaimer.shared.use_edits(count)
        reclaimer.table.columns.unmaps(indexes, lows, heads, ops)
        parts = chain.from_iterable(map(attrgetter("parts"), shares))
        span = Span(tuple(parts)) if keeping else EMPTY
        job = Slide(slots, owners, lows, heads, shares, span, ticket, quiet, tier_map, off_device)
        edits += (
            [slots, "head", heads[:]],
            [slots, "job", [job] * len(slots)],
            [reclaimer, "unmaps", [*reclaimer.unmaps, job]],
            [reclaimer, "slid", reclaimer.slid + sum(heads) - sum(lows)],
            [reclaimer, "coming", reclaimer.coming + job.pages],
            [reclaimer, "own_off_device", None],
        )

    def begin_edits(self, slot: Slot, head: int) -> list[list[Any]]:
        """Returns the edits for a request that begins with a prefix.

        The prefix's window starts at page `head`.
        """
        return self._set_edits(slot.index, self._goes_at(head + 1), self._window + self._rows(head))

    def follow_edits(self, slots: Sequence[Slot], parent: Slot) -> list[list[Any]]:
        """Returns the edits for requests that begin with another request's rows and window."""
        following, least, index = self._next, self._least, parent.index
        edits: list[list[Any]] = []
        for slot in slots:
            edits += [following, slot.index, following[index]], [least, slot.index, least[index]]
        return edits

    def resume(self, slot: Slot, head: int) -> None:
        """Starts unmapping the pages below `head` of a request that was swapped back in.

        Its rows in these pages had left the window. If the unmap cannot start now, the next step
        does it.
        """
        least = self._window + self._rows(head)
        self._journal.change(self._set_edits(slot.index, self._first, least))
        low, _ = self._parted(slot, head)
        if low > slot.head and slot.job is None:
            _begin([(self, [(slot, low, self._goes_at(low + 1), least)])], [])

    def forget_edits(self, slot: Slot) -> list[list[Any]]:
        """Returns the edits to make when a request ends, before its slot is freed."""
        slid = self.reclaimer.slid - (0 if slot.stale else slot.head)
        return [[self.reclaimer, "slid", slid], *self._set_edits(slot.index, self._first, 0)]

    def _set_edits(self, index: int, later: int, least: int) -> list[list[Any]]:
        return [[self._next, index, later], [self._least, index, least]]


def slide(windows: Sequence[tuple[Window, Sequence[int]]], stream: Any) -> None:
    """Starts unmapping pages that a step no longer needs, in one batch for all slots.

    Args:
        windows: the groups' windows, each with the step's lengths.
        stream: the stream of the work so far, which may still be reading the pages.
    """
    found = []
    for window, lens in windows:
        if due := window.due(lens):
            found.append((window, due))
    if not found:
        return
    first = found[0][0]
    event = record(stream, first.device)
    after = [] if event is None else [event]
    for _, due in found:
        for slot, *_ in due:
            if slot.events:
                after += prune(slot.events)
    # If this fails, the next step retries, except with several ranks, which must agree.
    if not _begin(found, after) and first.reclaimer.table.lockstep:
        for window, _ in found:
            window.reclaimer.finish_all()
        if not _begin(found, after):
            raise TooManyBatches(
                "pages before the window could not be unmapped", errno=errno.EAGAIN, op="KVCache"
            )


def _begin(found: Sequence[tuple[Window, list[_Due]]], after: Sequence[Any]) -> bool:
    """Submits one batch with all due unmaps.

    Returns False, changing nothing, if the queue is full or memory is short.
    """
    first = found[0][0]
    ops, mapper = first.ops, first.reclaimer.mapper
    ticket, count = Ticket(mapper.context), 0
    edits: list[list[Any]] = []
    for window, due in found:
        window.edit(edits, due, ops.array + count, ticket, quiet=window is not first)
        count += len(due)
    ops.wrote(count)
    try:
        mapper.commit(edits, ops, after, ticket=ticket)
    except (TooManyBatches, OutOfMemory):
        return False
    return True
