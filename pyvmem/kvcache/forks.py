# SPDX-License-Identifier: MIT
"""Forks requests: new requests begin with a running request's rows, in all groups or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from pyvmem.errors import NotRecoverable, OutOfMemory, TooManyBatches, TooManyMappings, VMemError
from pyvmem.features.table import FORK
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group, free_on_abort, prepare
from pyvmem.kvcache.growth import Needs, fit, reclaim_after, reclaim_for
from pyvmem.kvcache.pages import Part, Span
from pyvmem.kvcache.requests import sync_free_slots
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.truncation import kept_rows
from pyvmem.memory.ops import OpBatch

__all__ = ["fork_all", "forked"]

_FEW_PARTS = 4


@dataclass(slots=True)
class _Fork:
    """One group's part of a fork: free slots that will begin with the parent's rows.

    Rows that have left the parent's window are also missing in the new slots.

    Attributes:
        group: the group.
        parent: slot of the forked request, without a batch in flight.
        rows: number of tokens that each new slot begins with.
        nbytes: size of these rows in one tensor.
        full: the parent's pages below this are shared from now on.
        pages: end of each new slot's granted pages.
        slots: the new slots, without pages.
        goals: end of each new slot's mapped pages; see `Runs`.
        new_pages: number of new physical pages.
    """

    group: Group
    parent: Slot
    rows: int
    nbytes: int
    full: int
    pages: int
    slots: list[Slot]
    goals: list[int] = field(default_factory=list)
    new_pages: int = 0

    def add(self, ops: OpBatch, edits: list[list[Any]], room: int, *, ahead: bool) -> None:
        """Adds this group's part to the batch and to the edits, which together make the fork.

        The batch makes the parent's full pages read-only, maps them in each slot, and copies the
        rows after them to new pages.

        Args:
            ops: the batch.
            edits: the list to add edits to; see `Outcome`.
            room: bytes free in the budget or, without a budget, below the cache's own limit.
            ahead: map more pages than these rows need, as for growing requests (runs.py).
        """
        group, parent, slots = self.group, self.parent, self.slots
        full, pages, head, count = self.full, self.pages, parent.head, len(slots)
        low = head + parent.span.pages
        sharing, pager, reclaimer = group.sharing, group.pager, group.reclaimer
        counters = group.counters
        layout, size, stride = group.layout, group.layout.page_size, group.layout.tensor_bytes
        span = parent.span
        own: tuple[Part, ...] = ()
        if full > low:
            own = sharing.gather(parent, low, full, holders=1 + count)
        elif full < low:
            span = parent.shared_part(head, full)
        goals = [pages] * count
        if ahead and pages > full:
            pager.runs.read_free(room)
            goals = pager.columns.goals(goals, [full] * count, [head] * count)
        self.goals = goals
        self.new_pages = (sum(goals) - full * count) * layout.num_tensors
        edits += reclaimer.shared.use_edits({span: count}, {span: count}, own)
        if own:
            at = parent.addr + low * size
            sharing.map_at(ops, at, stride, own, replace=True)
            span = Span(span.parts + own, sharing.unit_pages)
            edits.append([parent, "span", span])
        # A request that was forked at many lengths has many parts; a single handle for all of them
        # takes fewer map operations.
        many = len(parent.span.parts) + len(own) > _FEW_PARTS
        parts = sharing.gather(parent, head, full) if many else span.parts
        capacity, rows = layout.capacity(pages), pager.columns.held_rows
        owners = []
        for slot in slots:
            owners.append(slot.owner + 1)
            edits += ([pager.capacity, slot.index, capacity], [rows, slot.index, self.rows])
            sharing.map_at(ops, slot.addr + head * size, stride, parts)
        if pages > full:
            copied = self.nbytes - full * size
            source = parent.addr + full * size if copied else None
            dirty = not group.config.zero_fill and not copied
            for slot, goal in zip(slots, goals, strict=True):
                ops.populate(
                    slot.addr + full * size, (goal - full) * size, layout.num_tensors, stride,
                    size, dirty, spread=True,
                    copy_from=source, copy_stride=stride, copy_bytes=copied,
                )  # fmt: skip
        tier_map = parent.tier_map
        if tier_map.noted:
            tier_map = tier_map.within(head, full)
        held = reclaimer.device_pages + self.new_pages
        edits += (
            [slots, "active", [True] * count],
            [slots, "kept", [False] * count],
            [slots, "owner", owners],
            [slots, "span", [span] * count],
            [slots, "mapped", goals[:]],
            [slots, "granted", [pages] * count],
            [slots, "dirty", [0] * count],
            [slots, "head", [head] * count],
            [slots, "tier_map", [tier_map] * count],
            [pager, "granted_pages", pager.granted_pages + pages * count],
            [reclaimer, "device_pages", held],
            [reclaimer, "slid", reclaimer.slid + head * count],
            [reclaimer, "own_off_device", None],
            [counters, "grown", counters.grown + self.new_pages],
            [counters, "peak_mapped", max(held, counters.peak_mapped)],
            [group, "used_tokens", group.used_tokens + self.rows * count],
        )
        if group.window is not None:
            edits += group.window.follow_edits(slots, parent)
        if parent.pins and span.pages:
            edits += group.prefixes.tree.pin_edits(parent.pins * count, ())
            edits.append([slots, "pins", [parent.pins[:] for _ in slots]])
        if parent.block:
            large_ends = map(Slot.large_end_with, slots, repeat(head), goals, repeat(0))
            large_end = parent.large_end_with(low, full, parent.large_end)
            edits += ([slots, "large_end", list(large_ends)], [parent, "large_end", large_end])
        group.table.changes += count

    def mark_broken(self, error: NotRecoverable) -> NotRecoverable:
        """Retires the slots whose rollback failed; returns the error to raise."""
        group, head, low = self.group, self.parent.head, self.parent.shared
        # `goals` is still empty if the batch could not even be planned.
        pieces = [(slot, head, goal) for slot, goal in zip(self.slots, self.goals, strict=False)]
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
    """Implements `KVCache.fork_many`, in one batch for all groups.

    Returns None if there are too few slots or too little memory. The first group chooses the slots
    unless `into` names them.
    """
    sync_free_slots(groups)
    groups[0].sharing.require(FORK, "fork")
    index, rows, _ = kept_rows(groups, reqid, length)
    if length is not None:
        for group in groups:
            group.check_back(group.table.slots[index], rows)
    table = groups[0].table
    most = len(table.slots)
    if not 1 <= count <= most:
        raise invalid(f"fork of {count} requests; it must be between 1 and {most}", limit=most)
    named = None if into is None else _chosen(groups[0], count, into)
    for group in groups:
        parent = group.table.slots[index]
        if group.mover.moves:
            group.mover.finish(parent, work)
        if parent.job is not None or parent.mapped > parent.granted:
            group.pager.release(parent)
    chosen = table.emptiest(count) if named is None else named
    if len(chosen) < count:
        return None
    reqids = list(map(attrgetter("index"), chosen))
    parts: list[_Fork] = []
    needs = []
    for group in groups:
        parent, layout = group.table.slots[index], group.layout
        nbytes, pages = layout.bytes_for(rows), layout.pages_for(rows)
        # A state is rewritten with every token, so it cannot be shared.
        full = 0 if layout.state else nbytes // layout.page_size
        new_pages = (pages - full) * count * layout.num_tensors
        slots = list(map(group.table.slots.__getitem__, reqids))
        parts.append(_Fork(group, parent, rows, nbytes, full, pages, slots))
        needs.append((group.pager, new_pages))
    try:
        for part in parts:
            for slot in part.slots:
                if slot.job is not None or slot.mapped or slot.broken:
                    part.group.sharing.empty(slot)
    except VMemError as error:
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    if not (fit(needs) or reclaim_for(needs, {})):
        return None
    for part in () if work.over else parts:
        if part.nbytes > part.parent.shared * part.group.layout.page_size:
            work.wait()
    if not rows:
        for part in parts:
            for slot in part.slots:
                part.group.take(slot)
    elif not _fork(parts, needs):
        return None
    for part in parts:
        part.group.note_use()
    prepare(groups)
    return reqids


def _fork(parts: Sequence[_Fork], needs: Needs) -> bool:
    """Allocates the slots and runs the batch. Returns False, changing nothing, if memory is short.

    Tries with surplus pages first, then without them.

    Raises:
        NotRecoverable: a rollback failed; the message says whether the parent lost rows.
    """
    first, most = parts[0].group, 0
    taken: list[tuple[Group, Slot, int]] = []
    for part in parts:
        pieces = 1 + 2 * len(part.parent.tier_map.noted)
        most += pieces + len(part.slots) * (max(_FEW_PARTS, pieces) + 3)
        taken += zip(repeat(part.group), part.slots, map(attrgetter("owner"), part.slots))
    free_on_abort(taken)
    for ahead in chain((True, False), repeat(False)):
        room = first.reclaimer.room
        edits: list[list[Any]] = []
        ops = OpBatch(most)
        try:
            for part in parts:
                part.add(ops, edits, room, ahead=ahead)
                room -= part.new_pages * part.group.layout.page_size
            first.mapper.commit(edits, ops, waits=first.counters.waits)
            break
        except NotRecoverable as error:
            found = [part.mark_broken(error) for part in parts]
            raise next((one for one in found if one is not error), error) from error
        except (OutOfMemory, TooManyBatches, TooManyMappings) as error:
            if not ahead and not reclaim_after(needs, {}, error):  # else retry without surplus
                return False
    for part in parts:
        if part.new_pages and part.group.pager.runs.limit:
            part.group.pager.runs.grown(list(zip(part.slots, repeat(part.full), part.goals)))
    return True


def forked(groups: Sequence[Group], reqid: int, count: int, length: int) -> int:
    """See `CacheMemory.for_fork`."""
    kept_rows(groups, reqid, length)
    if count < 0:
        raise invalid(f"count is {count}; it must not be negative")
    found = 0
    for group in groups:
        layout = group.layout
        full = 0 if layout.state else layout.bytes_for(length) // layout.page_size
        found += (layout.pages_for(length) - full) * count * group.page_bytes
    return found


def _chosen(group: Group, count: int, into: Sequence[int]) -> list[Slot]:
    """Returns the free slots that the caller named."""
    slots = [group.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"len(into) is {len(slots)}; it must be count, {count}", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots
