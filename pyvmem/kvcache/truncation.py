# SPDX-License-Identifier: MIT
"""Truncates requests to fewer tokens, in all groups of layers or none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import reclaim_for
from pyvmem.kvcache.pages import Tier
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.reservation import Reservation

__all__ = ["copied", "kept_rows", "planned", "truncate"]


def kept_rows(groups: Sequence[Group], reqid: int, length: int | None) -> tuple[int, int, int]:
    """Returns a request's slot index, the number of tokens to keep, and the number it holds.

    Args:
        groups: groups of the cache.
        reqid: the request.
        length: number of tokens to keep; None: all.

    Raises:
        InvalidArgument: the slot is free, or holds fewer than `length` tokens.
    """
    index = groups[0].slot(reqid).index
    held = groups[0].pager.columns.held_rows[index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {index} holds {held} tokens", limit=held)
    return index, rows, held


def truncate(groups: Sequence[Group], reqid: int, length: int, work: PriorWork) -> int:
    """Implements `KVCache.truncate`, in all groups or none. Returns 0 or -1."""
    index, rows, held = kept_rows(groups, reqid, operator.index(length))
    both = []
    for group in groups:
        both.append((group, slot := group.table.slots[index]))
        group.check_back(slot, rows)
    if rows == held:
        _give_back_overread(both, rows, work)
        return 0
    each = []
    for group, slot in both:
        if group.mover.moves:
            page = group.layout.bytes_for(rows) // group.layout.page_size
            group.mover.shorten(slot, page, work)
        each.append(Truncation(group, slot, rows))
    if any(map(attrgetter("unmaps"), each)):
        for place, one in enumerate(each):
            if one.slot.job is not None or one.slot.stale:
                one.group.pager.release(one.slot)
                each[place] = Truncation(one.group, one.slot, rows)
        work.wait()
    if not _cut(each, work):
        return -1
    for one in each:
        if one.ownerless and not one.group.config.deferred_reclaim and one.slot.job is None:
            one.group.reclaimer.try_unmap(one.slot, one.keep)
    return 0


def copied(groups: Sequence[Group], reqid: int, length: int) -> int:
    """Implements `CacheMemory.for_truncate`."""
    each = planned(groups, reqid, length)
    return sum(one.new_pages for one in each) * groups[0].layout.page_size


def planned(groups: Sequence[Group], reqid: int, length: int) -> list[Truncation]:
    """Plans a truncation in each group. Raises the same errors as `kept_rows`."""
    index, rows, _ = kept_rows(groups, reqid, length)
    return [Truncation(group, group.table.slots[index], rows) for group in groups]


def _give_back_overread(both: Sequence[tuple[Group, Slot]], rows: int, work: PriorWork) -> None:
    """Disowns the pages that a prefill mapped past the rows for its kernel to read.

    They were never written, so the request can get them again without a fill.
    """
    for group, slot in both:
        keep = max(group.layout.pages_for(rows), slot.tier_map.off_device_end, slot.shared)
        if keep < slot.granted and slot not in group.mover.moves:
            group.journal.change(group.disown_edits(slot, keep, work.record(), written=False))
            group.table.changes += 1
            if not group.config.deferred_reclaim and slot.job is None:
                group.reclaimer.try_unmap(slot, keep)


class Truncation:
    """The plan for truncating a slot.

        0 ......... length ......... granted ......... mapped
        | rows kept | dropped        |                 |
        | pages kept   | unowned from here on          |

    The request's unshared dropped pages stay mapped, like those of a freed slot: the request may
    get them again, zeroed, and other requests that are short of memory may take them. Pages that
    are shared or off the device cannot stay without an owner. They are unmapped immediately, and a
    shared page that is kept in part is replaced with a copy, since the request may write past its
    last row.

    Attributes:
        rows: number of tokens kept.
        nbytes: size of these rows in one tensor.
        keep: number of pages that the request keeps.
        shared: pages below this stay shared.
        copied: pages [shared, copied) are replaced with copies.
        stride: size of the copies per tensor, in bytes.
        new_pages: number of physical pages that the copies need.
        end: first page to unmap if `unmaps` is True.
        unmaps: True if pages must be unmapped immediately.
        ownerless: True if pages stay mapped but become unowned.
        addresses: scratch addresses of the copies; None before the copies are made and after they
            are mapped in the slot.
    """

    def __init__(self, group: Group, slot: Slot, rows: int) -> None:
        """Plans a truncation to `rows`; no move may be in flight past these rows."""
        layout, tier_map = group.layout, slot.tier_map
        self.group, self.slot, self.rows = group, slot, rows
        self.nbytes = layout.bytes_for(rows)
        first, rest = divmod(self.nbytes, layout.page_size)
        keep = min(layout.pages_for(rows), slot.granted)
        last = slot.head + slot.span.pages
        self.copied = self.shared = min(last, first)
        if self.shared < last:
            if rest:
                self.copied = min(keep, last)
            else:
                keep = self.shared  # the next step maps the rows that a kernel may over-read
        self.keep, self.end = keep, max(keep, self.copied)
        self.unmaps = self.shared < last or bool(tier_map.noted and tier_map.off_device_end > keep)
        self.ownerless = not self.unmaps and keep < slot.granted
        self.stride = (self.copied - self.shared) * layout.page_size
        self.new_pages = (self.copied - self.shared) * layout.num_tensors
        self.addresses: Reservation | None = None

    def unmap(self, ops: OpBatch) -> list[list[Any]]:
        """Adds operations that map the copies over shared pages and unmap the pages after them.

        Returns:
            The edits that belong to these operations.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        own, mapped = max(self.end, slot.head + slot.span.pages), min(slot.mapped, self.end)
        tier_map, granted = slot.tier_map, self.keep
        off_device: dict[Tier, int] = {}
        if tier_map.noted:
            off_device = tier_map.off_device(own, slot.mapped)
            tier_map = tier_map.without(self.shared, self.copied).without(self.end, slot.mapped)
            granted = max(granted, tier_map.off_device_end)
        kept, gone = slot.span.part(self.shared - slot.head)
        edits = [
            [slot, "tier_map", tier_map],
            [slot, "span", kept],
            [slot, "mapped", mapped],
            [slot, "dirty", min(max(slot.dirty, slot.granted), mapped)],
            [slot, "large_end", slot.large_end_below(mapped)],
            *group.pager.grant_edits([(slot, granted)]),
            *group.reclaimer.shared.use_edits({gone: -1}, {gone: -1}),
            *group.reclaimer.free_edits(slot.here_from(own), off_device),
        ]
        if self.addresses is not None:
            scratch = self.addresses.addr, self.stride
            target = slot.addr + self.shared * layout.page_size, layout.tensor_bytes
            copies = group.mapper.relocate(ops, self.stride, layout.num_tensors, scratch, target)
            edits += (
                [self, "addresses", None],
                [group.journal.unrecorded, copies, ...],
                # The batch consumes `copies`. Marking this handle as done prevents a false leak
                # report after an interruption.
                [copies, "_done", True],
                *group.scratch.give_edits(self.addresses),
            )
        if self.end < slot.mapped:
            at, nbytes = self.end * layout.page_size, (slot.mapped - self.end) * layout.page_size
            ops.unmap(slot.addr + at, nbytes, layout.num_tensors, layout.tensor_bytes, split=True)
        return edits

    def edits(self, work: PriorWork) -> list[list[Any]]:
        """Returns all edits except those of `unmap`; `work` is the last work on the rows."""
        group, slot = self.group, self.slot
        edits = group.enter_edits(slot, self.rows)
        if slot.pins:
            edits += group.prefixes.shorten_edits(slot, self.rows)
        if self.ownerless:
            edits += group.disown_edits(slot, self.keep, work.record())
        if group.promoter is not None:
            edits += group.promoter.forget_edits(slot, self.nbytes // group.layout.page_size)
        return [*edits, [group.table, "changes", group.table.changes + 1]]


def _cut(each: Sequence[Truncation], work: PriorWork) -> bool:
    """Runs the unmaps of all groups as one batch, after a first batch that makes the copies.

    Returns:
        False if memory is short; nothing has changed.

    Raises:
        NotRecoverable: the request has lost rows; the message names it. VMemError: nothing has
            changed.
    """
    begun = list(filter(attrgetter("unmaps"), each))
    copies = list(filter(attrgetter("new_pages"), begun))
    if copies and not _copy_all(copies):
        return False
    first = each[0].group
    edits: list[list[Any]] = []
    after: list[Any] = []
    try:
        for one in each:
            edits += one.edits(work)
        if not begun:
            first.journal.change(edits)
            return True
        ops = OpBatch(3 * len(begun))
        for one in begun:
            edits += one.unmap(ops)
            after += one.slot.events
        first.mapper.commit(edits, ops, after, waits=first.counters.waits)
    except VMemError as error:
        _drop_copies(begun)
        if isinstance(error, NotRecoverable):
            raise _lost(begun, error) from error
        raise
    for one in begun:
        one.group.reclaimer.drop_unheld()
    return True


def _copy_all(copies: Sequence[Truncation]) -> bool:
    """Copies the kept parts of shared pages to scratch addresses.

    The request's own work must be complete. Waits for the work of other requests that wrote the
    pages it shares. Returns False, changing nothing, if memory is short.
    """
    if not reclaim_for([(one.group.pager, one.new_pages) for one in copies], {}):
        return False
    ops, first = OpBatch(len(copies)), copies[0].group
    edits: list[list[Any]] = []
    first.journal.on_abort(partial(_drop_copies, copies))
    try:
        for one in copies:
            layout, reclaimer, counters = one.group.layout, one.group.reclaimer, one.group.counters
            for block, *_ in one.slot.span.parts:
                for event in block.events:
                    wait_for(event)
            addresses = one.group.scratch.take(one.stride * layout.num_tensors)
            shared = one.shared * layout.page_size
            ops.populate(
                addresses.addr,
                one.stride,
                layout.num_tensors,
                one.stride,
                layout.page_size,
                copy_from=one.slot.addr + shared,
                copy_stride=layout.tensor_bytes,
                copy_bytes=one.nbytes - shared,
            )
            edits += (
                [one, "addresses", addresses],
                [reclaimer, "device_pages", reclaimer.device_pages + one.new_pages],
                [counters, "grown", counters.grown + one.new_pages],
            )
        first.mapper.commit(edits, ops, waits=first.counters.waits)
    except VMemError as error:
        if first.sharing.is_shortage(error):
            return False
        raise
    return True


def _drop_copies(copies: Sequence[Truncation]) -> None:
    """Undoes `_copy_all`; may be called more than once."""
    for one in copies:
        if one.addresses is not None:
            edits = one.group.reclaimer.free_edits(one.copied - one.shared, {})
            edits.append([one, "addresses", None])
            nbytes = one.stride * one.group.layout.num_tensors
            one.group.scratch.give_mapped(one.addresses, nbytes, edits)


def _lost(begun: Sequence[Truncation], error: NotRecoverable) -> NotRecoverable:
    """Retires the slots of a request after a failed rollback; returns the error to raise."""
    for one in begun:
        one.group.reclaimer.mark_broken([(one.slot, one.shared, one.slot.mapped)])
    broken = [one for one in begun if one.slot.broken] or begun
    errors = [one.group.table.lose(one.slot, error) for one in broken]
    return errors[0]
