# SPDX-License-Identifier: MIT
"""Grows requests: maps their new pages and completes the growth. runs.py chooses run lengths.

Callers must hold the cache's lock.
"""

from __future__ import annotations

import errno
import logging
import operator
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, TypeAlias

from pyvmem import _native
from pyvmem._native import Grown, Outcome
from pyvmem.errors import NotRecoverable, OutOfMemory, TooManyMappings, VMemError
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import is_over, order_after, order_ticket, prune
from pyvmem.kvcache.migration import Mover
from pyvmem.kvcache.reclaim import Reclaimer, Share
from pyvmem.kvcache.runs import SCARCE_AT, Runs
from pyvmem.kvcache.slots import Growth, Piece, Slot
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket

__all__ = [
    "OPS",
    "Needs",
    "Pager",
    "Want",
    "Wants",
    "reclaim_after",
    "can_reclaim_for",
    "extend",
    "fit",
    "grow",
    "needs_of",
    "reclaim_for",
    "within_reach",
]

OPS = 2
"""Maximum number of operations needed to grow one slot: one for new pages, one for a fill."""

Want: TypeAlias = list[tuple[Slot, int]]
"""Slots of a group, with the pages per tensor that each should have."""

_SPREAD = _native.constant("VMEM_OP_SPREAD")
_DIRTY = _native.constant("VMEM_OP_DIRTY")

_log = logging.getLogger(__name__)


class Pager:
    """Grows slots, in the calling thread or on the worker, and tracks the pages that requests own.

    Attributes:
        columns: the slot records for C code, including how many rows each slot holds and has pages
            for.
        capacity: for each slot, the number of rows that fit in its granted pages; 0 if free.
        growths: grow operations in flight, or finished but not yet completed by `settle`.
        granted_pages: pages per tensor granted to requests, summed over slots. A shared page
            counts once per slot; pages that left a window also count.
        runs: chooses run lengths.
        ahead: a request with pages for fewer than `ahead` more rows gets more pages in the
            background.
        ops: the batch that grows the slots of all groups.
        array: the C array of the operations in `ops`.
    """

    def __init__(
        self, reclaimer: Reclaimer, mover: Mover, config: KVCacheConfig, ops: OpBatch
    ) -> None:
        self.reclaimer = reclaimer
        self.mover = mover
        self.runs = Runs(reclaimer, mover, config)
        self.mapper = reclaimer.mapper
        self.journal = reclaimer.journal
        self.layout = reclaimer.layout
        self.counters = reclaimer.counters
        self.columns = columns = reclaimer.table.columns
        self.capacity = columns.capacity
        self.growths: list[Growth] = []
        self.granted_pages = 0
        self.ops, self.array = ops, ops.array
        self._zero_fill = config.zero_fill
        self.layout.describe(columns.place, reclaimer.table[0].addr)
        columns.place.op_flags = _SPREAD if config.zero_fill else _SPREAD | _DIRTY
        # Requests get pages ahead only once all their mapped pages are granted, so a step that
        # needs no other pages does not wait for growth in flight.
        most = self.layout.page_size // self.layout.row_bytes
        never = self.layout.state or reclaimer.table.lockstep
        self.ahead = 0 if never else min(config.ahead_tokens, most)

    @property
    def used_pages(self) -> int:
        """Number of pages per tensor that requests own, in any tier; shared pages count once."""
        reclaimer, shared = self.reclaimer, self.reclaimer.shared
        own = self.granted_pages - reclaimer.slid - shared.uses - shared.off_device_uses
        return own + shared.used

    # ---- callers' arguments ----------------------------------------------------------------------

    def scan(self, seq_lens: Sequence[int]) -> tuple[array[int], int, list[int]]:
        """Validates a step's lengths and finds the slots that need more pages.

        A length below the number of rows that a slot holds, such as 0, has no effect.

        Returns:
            The rows that each slot holds after the step, their sum, and the indices of slots that
            need more pages.

        Raises:
            InvalidArgument: a length exceeds what a slot can hold, or is above 0 for a free slot.
        """
        table = self.reclaimer.table
        try:
            lens = seq_lens if type(seq_lens) is list else list(seq_lens)
        except TypeError:
            kind = type(seq_lens).__name__
            raise invalid(
                f"seq_lens must be a sequence of whole numbers, not {seq_lens!r:.80} of type {kind}"
            ) from None
        count = len(table.slots)
        if len(lens) != count:
            raise invalid(
                f"len(seq_lens) is {len(lens)}; it must be max_batch, {count}", limit=count
            )
        found = self.columns.scan(lens)
        if isinstance(found, int):
            try:  # the lengths may be numpy or torch integers
                lens = [operator.index(value) for value in lens]
            except TypeError:
                raise invalid(f"seq_lens must hold whole numbers, not {lens!r:.80}") from None
            found = self.columns.scan(lens)
            if isinstance(found, int):
                index, longest = found % count, self.layout.max_rows
                length = lens[index]
                if 0 <= length <= longest:
                    raise invalid(
                        f"seq_lens[{index}] is {length}, but reqid {index} is not taken: "
                        "call alloc_reqid first"
                    )
                bound = "it must not be negative" if length < 0 else f"max_seq_len is {longest}"
                raise invalid(f"seq_lens[{index}] is {length}; {bound}", limit=longest)
        return found

    def wants(self, short: list[int]) -> Want:
        """Returns the given slots of the last `scan`, with the pages per tensor that each needs."""
        slots, pages_for = self.reclaimer.table.slots, self.layout.pages_for
        needs = self.columns.needs
        return [(slots[index], pages_for(needs[index])) for index in short]

    # ---- requests ------------------------------------------------------------------------------

    def grow_ahead(self) -> None:
        """Starts mapping more pages for requests that have almost used up theirs.

        Uses only free memory above the watermark, and only while mappings are not scarce; does not
        reclaim anything. A later step grants the pages, or they are reclaimed when another request
        is short of memory.
        """
        reclaimer, layout = self.reclaimer, self.layout
        free = min(reclaimer.free, reclaimer.projected_free) - reclaimer.low_pages
        room = free // layout.num_tensors
        if room <= 0:
            return
        near = self.columns.near(self.ahead, room)
        runs, calls = self.runs, len(near) * layout.num_tensors
        if not near or (runs.limit and runs.used + calls > runs.limit - runs.limit // SCARCE_AT):
            return
        try:
            extend([self], background=True, ahead=True)
        except VMemError as error:
            _log.debug("growth ahead: %s", str(error))

    def count(self, edits: list[list[Any]], added: int, reused: int) -> None:
        """Appends the counter edits for a grow operation.

        Args:
            edits: the list to add edits to; see `Outcome`.
            added: number of physical pages mapped.
            reused: number of physical pages granted that were already mapped.
        """
        reclaimer, counters = self.reclaimer, self.counters
        held = reclaimer.device_pages + added
        edits += (
            [reclaimer, "device_pages", held],
            [counters, "grown", counters.grown + added],
            [counters, "reused", counters.reused + reused],
            [counters, "peak_mapped", max(held, counters.peak_mapped)],
        )

    def begin(self, edits: list[list[Any]], job: Growth, *, wait: bool = True) -> None:
        """Appends edits that record `job` as in flight or, without `wait`, grant its pages."""
        if wait:
            growths = [*self.growths, job]
            edits += ([job.slots, "job", [job] * len(job.slots)], [self, "growths", growths])
        else:
            edits += self._grant_edits(job)
        if self.runs.limit:
            self.runs.grown(job.pieces)

    def plan(self, want: Want, goals: Sequence[int] | None) -> Growth:
        """Adds map operations for new pages, and fills of reused pages, to `ops`.

        Adds only those zero-fills that need not wait for GPU work. Returns the `Growth`, which is
        not recorded yet.

        Args:
            want: slots without a batch in flight, and how many pages per tensor each needs.
            goals: for each slot, the pages per tensor to map, at least as many as it needs; None:
                exactly as many as it needs.
        """
        ops, layout = self.ops, self.layout
        size, tensors, dirty = layout.page_size, layout.num_tensors, not self._zero_fill
        job = Growth([slot for slot, _ in want])
        for place, (slot, pages) in enumerate(want):
            low, granted = slot.mapped, slot.granted
            if pages > low:
                high = pages if goals is None else goals[place]
                job.pieces.append((slot, low, high))
                job.new_pages += (high - low) * tensors
                at, nbytes = slot.addr + low * size, (high - low) * size
                ops.populate(at, nbytes, tensors, layout.tensor_bytes, size, dirty, spread=True)
            if not slot.active:
                continue
            job.grants.append((slot, slot.owner, pages))
            job.reused_pages += max(0, min(pages, low) - granted) * tensors
            end = min(pages, low, slot.dirty)
            if end <= granted:
                continue
            slot.events = prune(slot.events)
            if not self._zero_fill:
                job.handover.extend(slot.events)
            elif slot.events:
                job.late.append((slot, granted, end))
            else:
                job.zeroed_pages += self.fill(ops, [(slot, granted, end)])
        return job

    def fill(self, ops: OpBatch, pieces: Sequence[Piece]) -> int:
        """Adds zero-fills to `ops`; returns the number of physical pages that they fill."""
        size, tensors, pages = self.layout.page_size, self.layout.num_tensors, 0
        for slot, low, high in pieces:
            pages += (high - low) * tensors
            at, nbytes = slot.addr + low * size, (high - low) * size
            ops.fill(at, nbytes, 0, tensors, self.layout.tensor_bytes)
        return pages

    def settle(
        self, stream: Any = None, on_cpu: bool = False, lens: Sequence[int] | None = None
    ) -> None:
        """Completes any growth in flight: waits for mappings and makes `stream` wait for fills.

        Args:
            stream: the stream that will use the pages.
            on_cpu: wait on the CPU for fills and for earlier owners' work, regardless of `stream`.
            lens: lengths of all slots; unfinished growth that no slot needs for its length is
                skipped.

        Raises:
            VMemError: the first failure. Failed growth was undone; all other new pages are granted.
        """
        first: VMemError | None = None
        for job in list(self.growths):
            needed, over = self._is_needed(job, lens), job.done()
            if not needed and not (over and all(map(is_over, job.handover))):
                continue
            with nullcontext() if over else self.counters.waiting():
                error = self._complete(job, stream, on_cpu)
            first = first or error
        if first is not None:
            raise first

    def _is_needed(self, job: Growth, lens: Sequence[int] | None) -> bool:
        """Returns whether an owner is waiting for the growth; False for eager pages."""
        if lens is None or job.granted:
            return bool(job.grants)
        capacity = self.capacity
        return any(
            slot.owner == owner and capacity[slot.index] < lens[slot.index]
            for slot, owner, _ in job.grants
        )

    def is_mapped(self, slot: Slot, pages: int) -> bool:
        """Returns whether finished growth has mapped `pages` pages for the slot's owner.

        The pages are not granted to the owner yet.
        """
        job = slot.job
        return (
            isinstance(job, Growth)
            and any(one is slot and o == slot.owner and n >= pages for one, o, n in job.grants)
            and job.done()
        )

    def release(self, slot: Slot) -> None:
        """Waits until no batch is in flight on the slot's addresses.

        If the slot is stale, this also unmaps its pages.

        Raises:
            VMemError: a batch failed, or the earlier owner's shared pages could not be unmapped.
        """
        job = slot.job
        if isinstance(job, Growth):
            with self.counters.waiting():
                error = self._complete(job)
            if error is not None:
                raise error
        elif job is not None:
            with self.counters.waiting():
                self.reclaimer.finish(job)
        if slot.stale:
            self.reclaimer.unmap(slot, 0, now=True)
            if slot.job is not None:  # otherwise, it ran in this thread and failed
                with self.counters.waiting():
                    self.reclaimer.finish(slot.job)
            if slot.stale:
                self.reclaimer.raise_errors()

    def is_slow(self, slot: Slot) -> bool:
        """Returns whether the slot's next pages must wait for an earlier owner's GPU work."""
        if slot.granted < min(slot.mapped, slot.dirty) and slot.events:
            slot.events = prune(slot.events)
            return bool(slot.events)
        return False

    def is_held_up(self, slot: Slot) -> bool:
        """Returns whether `release` would block; starts unmapping the slot if it is stale.

        `release` blocks on unfinished batches and may block on an earlier owner's GPU work.
        """
        job = slot.job
        if job is None:
            if slot.mapped > slot.granted and slot.stale:
                self.reclaimer.try_unmap(slot, 0)
                return True
            return False
        if not job.done():
            return True
        return isinstance(job, Growth) and not all(map(is_over, job.handover))

    def finish_idle(self) -> None:
        """Waits for growth that no owner is waiting for, so that its pages can be reclaimed."""
        for job in [job for job in self.growths if job.deserted()]:
            with self.counters.waiting():
                error = self._complete(job)
            if error is not None:
                self.reclaimer.errors.append(error)

    def unsettled(self, keep: Mapping[Slot, int], *, promoting: bool = True) -> int:
        """Returns how many pages become available once `can_reclaim_for` has waited.

        They come from growth that no owner is waiting for, and from copies.

        Args:
            keep: slots, and the pages per tensor that each must keep.
            promoting: also count promotions that could be cancelled, not only those already
                cancelled.
        """
        idle = [slot for job in self.growths for slot in job.deserted()]
        pages = sum(slot.spare_beyond(keep.get(slot, 0)) for slot in idle)
        pages += sum(move.here() for move in self.mover.cancelled)
        pages += self.mover.promoting() if promoting else 0
        return pages * self.layout.num_tensors

    def splittable(self, keep: Mapping[Slot, int]) -> int:
        """Returns how many physical pages a step can unmap by splitting 2 MiB entries."""
        if not self.layout.block:
            return 0
        pages = sum(slot.splittable_beyond(keep.get(slot, 0)) for slot in self.reclaimer.table)
        return pages * self.layout.num_tensors

    def fewer_mappings(self, pages: int, keep: Mapping[Slot, int] | None, background: bool) -> bool:
        """Frees mappings by joining runs or, failing that, by unmapping unowned pages.

        Returns False if it freed none.

        For `keep`, see `Reclaimer.make_room`; if it is None, nothing is unmapped. With
        `background`, runs are joined only if there are several ranks.
        """
        reclaimer = self.reclaimer
        if (reclaimer.table.lockstep or not background) and self.runs.relieve():
            return True
        # Which prefixes are evicted must not depend on one rank's mappings.
        evict = not reclaimer.table.lockstep
        if keep is None or not reclaimer.make_room(pages, keep, prefixes=evict):
            reclaimer.raise_errors()
            return False
        return True

    # ---- completing growth and granting pages ----------------------------------------------------

    def _complete(self, job: Growth, stream: Any = None, on_cpu: bool = True) -> VMemError | None:
        """Waits for `job`, then grants its pages or, if it failed, undoes it.

        With `on_cpu`, this also waits on the CPU for its fills and for earlier owners' work,
        because the stream that will use the pages is unknown.

        Returns the error that the caller must raise, if any. A shortage is ignored: background
        growth allocates late, so other users of the context may have taken the memory first, and a
        step that needs the pages retries the growth. With several ranks, a shortage is raised,
        because the other ranks did get their pages.
        """
        device = None if on_cpu else self.mover.device
        try:
            for ticket in (job.mapping, job.filling):
                if ticket is not None:
                    order_ticket(ticket, stream, device)
        except VMemError as error:
            self._undo(job, error)
            short = isinstance(error, (OutOfMemory, TooManyMappings))
            ignored = job.quiet or (short and not self.reclaimer.table.lockstep)
            return None if ignored else error
        # If no owner is waiting, the slot keeps the events for its next owner.
        for event in job.handover if job.awaited else ():
            order_after(event, stream, device)
        edits = [] if job.granted else self._grant_edits(job)
        edits += ([job, "handover", []], [job, "granted", True])
        if job.done():
            edits += self._retire_edits(job)
        self.journal.change(edits)
        return None

    def poll(self) -> None:
        """Completes growth whose batches have finished and that no owner is waiting for."""
        for job in [job for job in self.growths if not job.awaited and job.done()]:
            if (error := self._complete(job)) is not None:
                self.reclaimer.errors.append(error)

    def _grant_edits(self, job: Growth) -> list[list[Any]]:
        """Returns the edits that grant the new pages to owners that still have their slots."""
        grants = job.grants
        return self.grant_edits(
            [(one, n) for one, owner, n in grants if one.owner == owner and n > one.granted]
        )

    def grant_edits(self, grants: Sequence[tuple[Slot, int]]) -> list[list[Any]]:
        """Returns the edits that set the number of pages granted to the slots' owners."""
        edits: list[list[Any]] = []
        granted, capacity = self.granted_pages, self.layout.capacity
        for slot, pages in grants:
            granted += pages - slot.granted
            rows = capacity(pages) if pages else 0
            edits += ([slot, "granted", pages], [self.capacity, slot.index, rows])
        return [*edits, [self, "granted_pages", granted]]

    def _retire_edits(self, job: Growth) -> list[list[Any]]:
        growths = [one for one in self.growths if one is not job]
        return [[self, "growths", growths], [job.slots, "job", [None] * len(job.slots)]]

    def _undo(self, job: Growth, error: VMemError) -> None:
        """Rolls back the records of failed growth; libvmem has already rolled back the mapping."""
        reclaimer, counters, zeroed = self.reclaimer, self.counters, self.counters.zeroed
        edits = self._retire_edits(job)
        if job.filling is not None and _failed(job.filling):
            zeroed -= job.filling_pages  # fills of pages that were already mapped
        if job.mapping is not None and _failed(job.mapping):
            if isinstance(error, NotRecoverable):
                reclaimer.mark_broken(job.pieces)
            for slot, low, high in job.pieces:
                edits += (
                    [slot, "mapped", low],
                    [slot, "large_end", slot.large_end_below(low)],
                    [slot, "tier_map", slot.tier_map.without(low, high)],
                )
            zeroed -= job.zeroed_pages
            edits += (
                [reclaimer, "device_pages", reclaimer.device_pages - job.new_pages],
                [counters, "grown", counters.grown - job.new_pages],
                [counters, "reused", counters.reused - job.reused_pages],
            )
        self.journal.change([*edits, [counters, "zeroed", zeroed]])

    def under_way(self) -> tuple[int, int, int]:
        """Returns how many of the pages counted as grown, reused and zeroed may still fail."""
        jobs = [job for job in self.growths if not job.granted and _may_fail(job, job.mapping)]
        fills = [job for job in self.growths if _may_fail(job, job.filling)]
        return (
            sum(job.new_pages for job in jobs),
            sum(job.reused_pages for job in jobs),
            sum(job.zeroed_pages for job in jobs) + sum(job.filling_pages for job in fills),
        )


Wants: TypeAlias = Sequence[tuple[Pager, Want]]
"""The groups of a cache, each with the slots that it should grow."""
Needs: TypeAlias = Sequence[tuple[Pager, int]]
"""Groups that share a budget, with the physical pages that each must map."""


def extend(pagers: Sequence[Pager], *, background: bool, ahead: bool = False) -> bool:
    """The fast path of a step: grows slots by one map operation each, in one batch.

    The slots are those that the last scans found. C plans the growth of each group, then one C call
    runs or submits the batch and, on success, writes the records. With `background`, the batch is
    submitted but may not have finished when this returns.

    Args:
        pagers: pagers of groups that have the same requests.
        background: run on the worker thread.
        ahead: see `Pager.grow_ahead`.

    Returns:
        False if a slot needs more than one map operation, or if memory or mappings are short. In
        that case, nothing has changed, and the caller must call `grow`.
    """
    first = pagers[0]
    ops, array = first.ops, first.array
    context, share = first.mapper.context, first.reclaimer.share
    room = None if share is None else share.room()
    each: list[tuple[Pager, Grown]] = []
    written = 0
    for pager in pagers:
        pager.runs.read_free(room, pager.reclaimer.low_pages if ahead else 0)
        grown = pager.columns.plan(array + written)
        if grown is None:
            return False
        if grown.added and pager.runs.spreads:
            pager.runs.provide(grown.added * pager.layout.num_tensors)
        each.append((pager, grown))
        written += grown.ops
        if room is not None:
            room -= grown.added * pager.layout.page_bytes
    ticket = Ticket(context) if background and written else None
    edits: list[list[Any]] = []
    for pager, grown in each:
        tensors = pager.layout.num_tensors
        added, reused = grown.added * tensors, 0 if ahead else grown.reused * tensors
        pager.count(edits, added, reused)
        if ticket is None:  # C updates the slot records
            edits.append([pager, "granted_pages", pager.granted_pages + grown.granting])
            continue
        planned = pager.columns.planned
        slots = list(map(pager.reclaimer.table.slots.__getitem__, planned.slots))
        edits += ([slots, "mapped", planned.goals], [slots, "large_end", planned.large_end])
        pieces = list(zip(slots, planned.mapped, planned.goals, strict=True))
        owners = map(attrgetter("owner"), slots)
        job = Growth(
            slots,
            [piece for piece in pieces if piece[2] > piece[1]],
            grants=[] if ahead else list(zip(slots, owners, planned.pages, strict=True)),
            mapping=ticket,
            ahead=ahead,
            quiet=ahead or pager is not first,
            new_pages=added,
            reused_pages=reused,
        )
        pager.begin(edits, job)
    outcome = Outcome(edits) if ticket is None else ticket.outcome.of(edits)
    first.journal.entries.append(outcome)
    try:
        if ticket is None:
            columns, waits = list(map(attrgetter("columns"), pagers)), first.counters.waits
            _native.extend(context.handle, columns, array, written, outcome, waits)
        else:
            ops.wrote(written)
            context.submit(ops, (), ticket, late=True)
    except (OutOfMemory, TooManyMappings):
        return False
    except NotRecoverable:
        for pager in pagers:
            planned = pager.columns.planned
            whose = map(pager.reclaimer.table.__getitem__, planned.slots)
            pieces = list(zip(whose, planned.mapped, planned.goals, strict=True))
            pager.reclaimer.mark_broken(pieces)
        raise
    finally:
        outcome.edits = None
    return True


def grow(wants: Wants, *, background: bool, reclaim: bool = True) -> bool:
    """Grows slots to the given numbers of pages, in all groups or none; then call `settle`.

    One batch maps and zeroes pages for all groups. Pages that an earlier owner's GPU work may still
    touch are zeroed by a second batch after that work; no page is granted before the second batch
    is submitted. When this returns, the new pages are mapped or, in the background, recorded as
    mapped. The pages of free slots are mapped but not granted.

    Args:
        wants: per group of a cache, the slots and the pages per tensor that each should have.
        background: run on the worker thread.
        reclaim: if memory is short, unmap unowned pages and wait for that. If False, no batch may
            be in flight on the slots.

    Returns:
        False if memory or mappings are short; nothing has changed, except that reclaimed pages are
        free.

    Raises:
        VMemError: a batch failed; no request got pages.
    """
    first, keep = wants[0][0], {slot: pages for _, want in wants for slot, pages in want}
    if not keep:
        return True
    exact = False
    while True:
        for pager, want in wants:
            for slot, _ in want:
                # For any other slot, `release` has nothing to wait for.
                if slot.job is not None or slot.mapped > slot.granted:
                    pager.release(slot)
        needs = needs_of(wants)
        if not fit(needs):
            if not reclaim or not reclaim_for(needs, keep):
                return False
            continue  # count again: reclaiming may have unmapped surplus pages of these slots
        parts = []
        first.ops.clear()
        room, beyond = first.reclaimer.room, False
        for pager, want in wants:
            if not want:
                continue
            goals = None if exact else pager.runs.goals(want, room)
            beyond |= goals is not None
            job = pager.plan(want, goals)
            parts.append((pager, job))
            room -= job.new_pages * pager.layout.page_size
        error = _begin(parts, background=background)
        if error is None:
            return True
        if beyond:  # retry without surplus pages before reclaiming
            exact = True
        elif not reclaim_after(needs, keep if reclaim else None, error, background=background):
            if isinstance(error, TooManyMappings):
                first.runs.refused = str(error)
            return False


def _begin(parts: Sequence[tuple[Pager, Growth]], *, background: bool) -> VMemError | None:
    """Runs or submits the planned growth of all groups as one batch, and records it.

    Returns:
        None on success; the error, with nothing changed, if memory or mappings are short.
    """
    first = parts[0][0]
    ops, mapper = first.ops, first.mapper
    mapping = Ticket(mapper.context) if background and len(ops) else None
    late = [piece for _, job in parts for piece in job.late]
    wait = bool(mapping or late or any(job.handover for _, job in parts))
    filling, fills = Ticket(mapper.context), OpBatch(len(late) or 1)
    edits: list[list[Any]] = []
    filled: list[list[Any]] = []
    for pager, job in parts:
        if job.new_pages and pager.runs.spreads:
            pager.runs.provide(job.new_pages)
        job.mapping, job.quiet, counters = mapping, pager is not first, pager.counters
        zeroed = counters.zeroed + job.zeroed_pages
        slots, goals = [slot for slot, *_ in job.pieces], [high for *_, high in job.pieces]
        pager.count(edits, job.new_pages, job.reused_pages)
        edits.append([slots, "mapped", goals])
        edits.append([counters, "zeroed", zeroed])
        if pager.layout.block:
            ends = [one.large_end_with(low, high, one.large_end) for one, low, high in job.pieces]
            edits.append([slots, "large_end", ends])
        if late:
            pages = pager.fill(fills, job.late)
            filled += (
                [job, "grants", job.grants],
                [job, "filling", filling],
                [job, "filling_pages", pages],
                [counters, "zeroed", zeroed + pages],
            )
            job.grants = []
        pager.begin(edits, job, wait=wait)
    if len(ops):
        try:
            mapper.commit(edits, ops, ticket=mapping, late=True, waits=first.counters.waits)
        # another user of the context may have taken the memory
        except (OutOfMemory, TooManyMappings) as error:
            return error
        except NotRecoverable:
            for pager, job in parts:
                pager.reclaimer.mark_broken(job.pieces)
            raise
        edits = []
    if late:
        after = [event for slot, *_ in late for event in slot.events]
        mapper.commit(edits + filled, fills, after, ticket=filling)
    elif edits:
        first.journal.change(edits)
    return None


# ---- memory for several groups together ----------------------------------------------------------


def needs_of(wants: Wants) -> list[tuple[Pager, int]]:
    """Returns how many physical pages must be mapped, per group."""
    needs = []
    for pager, want in wants:
        pages = 0
        for slot, goal in want:  # a plain loop, for speed
            pages += max(0, goal - slot.grows_from)
        needs.append((pager, pages * pager.layout.num_tensors))
    return needs


def fit(needs: Needs) -> bool:
    """Returns whether the needed physical pages are free."""
    nbytes = 0
    for pager, pages in needs:
        reclaimer = pager.reclaimer
        if pages > reclaimer.limit - reclaimer.device_pages:
            return False
        nbytes += pages * pager.layout.page_size
    return not nbytes or nbytes <= needs[0][0].reclaimer.room


def within_reach(needs: Needs, keep: Mapping[Slot, int]) -> int | None:
    """Estimates without blocking whether `reclaim_for` could free the needed physical pages.

    Args:
        needs: physical pages per group.
        keep: slots, and the pages per tensor that each must keep.

    Returns:
        The number of bytes that must come from outside these groups; None if that is out of reach.
    """
    new, others = _beyond_own(needs, keep, later=True), _others(needs)
    if new is not None and others is not None:
        lacking = new - others.unsettled()
        if lacking > others.within_reach():
            others.ask(lacking)
            return None
    return new


def _beyond_own(needs: Needs, keep: Mapping[Slot, int], *, later: bool) -> int | None:
    """Returns how many bytes are needed in addition to the groups' idle pages.

    Returns None if the need exceeds a group's limit. With `later`, the pages that `reclaim_for`
    would wait for also count as idle.
    """
    new = 0
    for pager, pages in needs:
        reclaimer = pager.reclaimer
        pages -= reclaimer.idle(keep)
        if later:
            pages -= pager.unsettled(keep) + pager.splittable(keep)
        if pages > reclaimer.limit - reclaimer.device_pages:
            return None
        new += pages * pager.layout.page_size
    return new


def _others(needs: Needs) -> Share | None:
    """Returns a budget share whose `others` leaves out all of these groups.

    Returns None if there is no budget.
    """
    share = needs[0][0].reclaimer.share
    if share is None or len(needs) == 1:
        return share
    return share.excluding([pager.reclaimer for pager, _ in needs])


def can_reclaim_for(needs: Needs, keep: Mapping[Slot, int]) -> bool:
    """Returns whether the needed physical pages can be reclaimed.

    Unlike `within_reach`, first waits for idle growth and, if needed, cancels promotions.
    """
    others = _others(needs)
    for pager, _ in needs:
        if pager.growths:
            pager.finish_idle()
    if others is not None:
        others.finish_idle()
    new = None
    copies: list[Sequence[Mover | Share]] = [[], [pager.mover for pager, _ in needs]]
    if others is not None:
        copies.append([others])
    # Cancel promotions one set at a time, and only while memory is still short.
    for group in copies:
        stopped = [one.stop_promoting() for one in group]
        if stopped and True not in stopped:
            continue
        new = _beyond_own(needs, keep, later=False)
        if new is not None and (others is None or new <= others.within_reach()):
            return True
    if new is not None and others is not None:
        others.ask(new)
    return False


def reclaim_for(needs: Needs, keep: Mapping[Slot, int], *, more: bool = False) -> bool:
    """Reclaims unowned pages; returns whether the needed physical pages are free afterwards.

    With `more`, this reclaims even if the records say that enough is free, because the driver has
    less.

    Raises:
        VMemError: unowned pages could not be unmapped.
    """
    first = needs[0][0].reclaimer
    while more or not fit(needs):
        room = first.room
        if not can_reclaim_for(needs, keep):
            return False
        if first.room <= room and not _reclaim(needs, keep, more=more):
            for pager, _ in needs:
                pager.reclaimer.raise_errors()
            if first.table.lockstep:  # raise, because the other ranks did get their pages
                raise OutOfMemory(
                    "unowned pages could not be freed", errno=errno.ENOMEM, op="KVCache"
                )
            return False
        more = False
    return True


def reclaim_after(
    needs: Needs, keep: Mapping[Slot, int] | None, error: VMemError, *, background: bool = False
) -> bool:
    """Frees memory or mappings after a batch failed for lack of them.

    Args:
        needs: missing physical pages, per group.
        keep: see `Reclaimer.make_room`; None: unmap nothing.
        error: why the batch failed: `TooManyMappings` or a shortage of memory.
        background: see `Pager.fewer_mappings`.

    Returns:
        False if nothing was freed.

    Raises:
        VMemError: `error` itself, if nothing was freed and there are several ranks, because the
            other ranks did get their pages.
    """
    lockstep = needs[0][0].reclaimer.table.lockstep
    if isinstance(error, TooManyMappings):
        back = any(one.fewer_mappings(pages, keep, background) for one, pages in needs)
    else:
        back = keep is not None and not lockstep and reclaim_for(needs, keep, more=True)
    if lockstep and not back:
        raise error
    return back


def _reclaim(needs: Needs, keep: Mapping[Slot, int], *, more: bool) -> bool:
    """Reclaims what each group lacks, then what the groups together lack.

    Returns False if nothing was freed.
    """
    back, nbytes, first = False, 0, needs[0][0].reclaimer
    for pager, pages in needs:
        reclaimer = pager.reclaimer
        nbytes += pages * pager.layout.page_size
        if pages and (missing := pages if more else pages - reclaimer.free) > 0:
            own = max(0, pages - (reclaimer.limit - reclaimer.device_pages))
            back |= reclaimer.make_room(missing, keep, own)
    if (missing := nbytes - first.room) > 0 and len(needs) > 1:
        back |= first.make_room(-(-missing // first.layout.page_size), keep)
    return back


def _may_fail(job: Growth, ticket: Any) -> bool:
    """Returns whether a batch of `job` is unfinished, or has failed and not been undone."""
    return ticket is not None and (not job.done() or _failed(ticket))


def _failed(ticket: Any) -> bool:
    """Waits for a batch; returns whether it failed."""
    try:
        ticket.wait()
    except VMemError:
        return True
    return False
