# SPDX-License-Identifier: MIT
"""Requests that begin with the rows of a running one, in all groups of layers or in none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from pyvmem.errors import (
    NotRecoverable,
    OutOfMemory,
    TooManyBatches,
    TooManyMappings,
    VMemError,
)
from pyvmem.features.table import FORK
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.requests import have_pages, sync_free_slots
from pyvmem.kvcache.sharing import Held
from pyvmem.kvcache.slots import Growth, Slot
from pyvmem.kvcache.truncation import check_kept
from pyvmem.memory.ops import OpBatch

__all__ = ["fork_all", "forked"]

_FEW_PARTS = 4


@dataclass(slots=True)
class _Fork:
    """A group's part of a fork: free slots that begin with the rows of a request.

    None of them has what left the parent's window.

    Attributes:
        group: the group.
        parent: a request without a batch in flight over its slot.
        low: the end of what it shares already.
        new_pages: physical pages that the rows after the shared pages need.
        nbytes: of the rows, per tensor, that each slot begins with.
        full: the parent's pages up to here are shared from now on.
        pages: where each slot's pages end.
        slots: without a page.
        own: handles to the parent's pages that become shared.
        whole: handles to all pages that are shared, where they would be many parts.
        goals: where the pages that are mapped end; see `Runs`.
        job: counts the new pages.
    """

    group: Group
    parent: Slot
    low: int
    new_pages: int
    nbytes: int
    full: int
    pages: int
    slots: list[Slot] = field(default_factory=list)
    own: list[Held] = field(default_factory=list)
    whole: list[Held] = field(default_factory=list)
    goals: list[int] = field(default_factory=list)
    job: Growth | None = None

    def gather(self) -> int:
        """Takes handles to what is mapped in the slots; the operations that `add` needs."""
        parent, sharing = self.parent, self.group.sharing
        self.own = sharing.handles(parent, self.low, self.full)
        # A request that was forked at many lengths has as many parts; one handle covers all.
        many = len(parent.span.parts) + len(self.own) > _FEW_PARTS
        self.whole = sharing.handles(parent, parent.head, self.full) if many else []
        return len(self.own) + len(self.slots) * (max(_FEW_PARTS, len(self.whole)) + 3)

    def add(self, ops: OpBatch, room: int | None, *, ahead: bool) -> None:
        """Adds to a batch, and writes what it changes into the records.

        The batch makes the parent's full pages read-only, maps them in each slot, and copies the
        rows after them to new pages.

        Args:
            ops: the batch.
            room: bytes that are free in the budget, if that is known.
            ahead: map more pages than these rows need, where requests grow by runs.
        """
        group, parent, slots = self.group, self.parent, self.slots
        full, pages, head, low = self.full, self.pages, parent.head, self.low
        sharing, pager = group.sharing, group.pager
        sharing.map_pieces(ops, parent, self.own, replace=True)
        self.goals = [pages] * len(slots)
        if ahead and pages > full:
            self.goals = pager.runs.ahead(len(slots), pages, full, head, room)
        self.job = Growth(slots)
        if self.own:
            sharing.adopt(parent, self.own, [], group.prefixes.unit_pages[group.place])
        span = parent.span if self.own or full == low else parent.shared_part(head, full)
        for slot, goal in zip(slots, self.goals, strict=True):
            pager.assign(slot, span, pages, goal, head)
            if self.whole:
                sharing.map_pieces(ops, slot, self.whole)
            else:
                sharing.map_span(ops, slot, span, head)
        if group.window is not None:
            group.window.follow(slots, parent)
        if pages > full:
            pager.copy_tail(ops, self.job, full, self.goals, parent, self.nbytes)

    def mark_broken(self, error: NotRecoverable) -> NotRecoverable:
        """Retires the slots whose undo failed; returns what to raise."""
        group, head, low = self.group, self.parent.head, self.low
        pieces = [(slot, head, goal) for slot, goal in zip(self.slots, self.goals, strict=True)]
        group.reclaimer.mark_broken([*pieces, (self.parent, low, self.full)])
        if self.parent.broken:
            return group.table.lose(self.parent, error)
        return error


def fork_all(
    groups: Sequence[Group],
    reqid: int,
    count: int,
    length: int | None,
    work: PriorWork,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`: in one batch for all groups.

    The first group chooses the slots, unless `into` does.
    """
    sync_free_slots(groups)
    for group in groups:
        group.sharing.require(FORK, "fork")
        if length is not None:
            slot = group.slot(reqid)
            check_kept(operator.index(length), reqid, group.rows[slot.index])
            group.check_back(slot, operator.index(length))
    parts: list[_Fork] = []
    rows = 0
    for group in groups:
        parent = group.slot(reqid)
        held = group.pager.columns.held
        rows = held[parent.index] if length is None else operator.index(length)
        if not 1 <= count <= len(group.table.slots):
            raise invalid(
                f"fork of {count} requests; it must lie between 1 and {len(group.table)}",
                limit=len(group.table),
            )
        if into is not None:
            _chosen(group, count, into)
        if group.mover.moves:
            group.mover.finish(parent, work)
        if parent.job is not None or parent.mapped > parent.granted:
            group.pager.release(parent)
        nbytes, full, pages = _forked(group, parent, rows)
        new_pages = (pages - full) * count * group.layout.num_tensors
        low = parent.head + parent.span.pages
        parts.append(_Fork(group, parent, low, new_pages, nbytes, full, pages))
    try:
        for part in parts:
            chosen = None if into is None else _chosen(part.group, count, into)
            slots = part.group.sharing.make_empty(count, chosen)
            if slots is None:
                return None
            part.slots = list(slots)
            into = list(map(attrgetter("index"), slots))
    except VMemError as error:
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    short = len(parts) > 1 or parts[0].new_pages > parts[0].group.reclaimer.free
    if short and not have_pages([(part.group, part.new_pages) for part in parts]):
        return None
    for part in () if work.over else parts:
        if part.nbytes > part.low * part.group.layout.page_size:
            work.wait()
    if not _fork(parts):
        return None
    for part in parts:
        group, pins = part.group, part.parent.pins
        for slot in part.slots:
            if pins and slot.span.pages:
                slot.pins = group.prefixes.pin_again(pins)
            group.enter(slot, rows)
        group.note_peaks()
    for group in groups:
        group.prepare()
    return list(into or ())


def _fork(parts: Sequence[_Fork]) -> bool:
    """Runs the batch, with less than it would map at best where it must; False: memory is short."""
    ahead = True
    while True:
        try:
            _run(parts, ahead=ahead)
            return True
        except (OutOfMemory, TooManyBatches, TooManyMappings) as error:
            if ahead:  # perhaps it wanted more than it must have
                ahead = False
                continue
            if parts[0].group.table.lockstep:
                raise
            out_of_mappings = isinstance(error, TooManyMappings)
            made = [_make_room(part, out_of_mappings=out_of_mappings) for part in parts]
            if not any(made):
                for part in parts:
                    part.group.reclaimer.raise_errors()
                return False


def _make_room(part: _Fork, *, out_of_mappings: bool) -> bool:
    """Brings pages or mappings back for a group's new pages; whether some came."""
    pages, group = part.new_pages, part.group
    if out_of_mappings:
        return group.pager.fewer_mappings(pages, {})
    return pages > 0 and group.reclaimer.make_room(pages, {})


def _run(parts: Sequence[_Fork], *, ahead: bool) -> None:
    """Takes the slots and runs the batch; on failure nothing changed.

    Raises:
        NotRecoverable: an undo failed; if the parent has lost rows, the text says so.
    """
    first = parts[0].group
    ops = first.sharing.batch(sum(map(_Fork.gather, parts)))
    share = first.reclaimer.share
    room = None if share is None else share.room()
    for part in parts:
        part.group.free_on_abort(part.slots)
    try:
        with first.mapper.transaction() as change:
            for part in parts:
                part.add(ops, room, ahead=ahead)
                if room is not None and part.job is not None:
                    room -= part.job.new_pages * part.group.layout.page_size
            if parts[0].pages:
                change.run(ops, waits=first.counters.waits)
    except NotRecoverable as error:
        found = [part.mark_broken(error) for part in parts]
        raise next((one for one in found if one is not error), error) from error
    for part in parts:
        if part.job is not None:
            part.group.pager.note_growth(part.job)


def _forked(group: Group, parent: Slot, rows: int) -> tuple[int, int, int]:
    """Of a fork with so many rows, per tensor: bytes, pages that it shares, and all its pages."""
    layout = group.layout
    nbytes = layout.bytes_for(rows)
    # A state is written again with every token, and cannot be shared.
    full = 0 if layout.state else nbytes // layout.page_size
    return nbytes, full, layout.pages_for(rows)


def forked(groups: Sequence[Group], reqid: int, count: int, length: int) -> int:
    """See `KVCache.forked_bytes`."""
    slot = groups[0].slot(reqid)
    check_kept(length, slot.index, max(group.rows[slot.index] for group in groups))
    if count < 0:
        raise invalid(f"count is {count}; it must not be negative")
    found = 0
    for group in groups:
        _, full, pages = _forked(group, group.slot(reqid), length)
        found += (pages - full) * count * group.page_bytes
    return found


def _chosen(group: Group, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [group.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots
