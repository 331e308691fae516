# SPDX-License-Identifier: MIT
"""Truncates requests to fewer tokens, in all groups of layers or none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import reclaim_for
from pyvmem.kvcache.pages import Tier
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.ops import OpBatch

if TYPE_CHECKING:
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
    slots = []
    for group in groups:
        slots.append(slot := group.table.slots[index])
        group.check_back(slot, rows)
    if rows == held:
        _give_back_overread(list(zip(groups, slots, strict=True)), rows, work)
        return 0
    each = []
    for group, slot in zip(groups, slots, strict=True):
        if group.mover.moves:
            page = group.layout.bytes_for(rows) // group.layout.page_size
            group.mover.shorten(slot, page, work)
        each.append(Truncation.of(group, slot, rows))
    if any(map(attrgetter("unmaps"), each)):
        for place, one in enumerate(each):
            if one.slot.job is not None or one.slot.stale:
                one.group.pager.release(one.slot)
                each[place] = Truncation.of(one.group, one.slot, rows)
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
    """Plans a truncation in each group. Raises the errors of `kept_rows`."""
    index, rows, _ = kept_rows(groups, reqid, length)
    return [Truncation.of(group, group.table.slots[index], rows) for group in groups]


def _give_back_overread(both: Sequence[tuple[Group, Slot]], rows: int, work: PriorWork) -> None:
    """Disowns the pages that a prefill mapped past the rows for its kernel to read.

    They were never written, so the request can get them again without a fill.
    """
    each = []
    for group, slot in both:
        tier_map = slot.tier_map
        keep = max(group.layout.pages_for(rows), tier_map.off_device_end, slot.shared)
        if keep < slot.granted and slot not in group.mover.moves:
            each.append((group, slot, keep))
    event = work.record() if each else None
    for group, slot, keep in each:
        group.journal.change(group.disown_edits(slot, keep, event, written=False))
        group.table.changes += 1
        if not group.config.deferred_reclaim and slot.job is None:
            group.reclaimer.try_unmap(slot, keep)


@dataclass
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
        new_pages: number of physical pages that the copies take.
        end: first page to unmap if `unmaps` is True.
        unmaps: True if pages must be unmapped immediately.
        ownerless: True if pages stay mapped but become unowned.
        addresses: scratch addresses of the copies; None before the copies are made and after they
            are mapped in the slot.
    """

    group: Group
    slot: Slot
    rows: int
    nbytes: int
    keep: int
    shared: int
    copied: int
    stride: int
    new_pages: int
    end: int
    unmaps: bool
    ownerless: bool
    addresses: Reservation | None = None

    @classmethod
    def of(cls, group: Group, slot: Slot, rows: int) -> Truncation:
        """Plans a truncation to `rows`; no move may be in flight past these rows."""
        layout, tier_map = group.layout, slot.tier_map
        nbytes = layout.bytes_for(rows)
        first, rest = divmod(nbytes, layout.page_size)
        keep = min(layout.pages_for(rows), slot.granted)
        last = slot.head + slot.span.pages
        copied = shared = min(last, first)
        if shared < last:
            if rest:
                copied = min(keep, last)
            else:
                keep = shared  # the next step maps the rows that a kernel may over-read
        unmaps = shared < last or bool(tier_map.noted and tier_map.off_device_end > keep)
        pages = copied - shared
        stride, new_pages = pages * layout.page_size, pages * layout.num_tensors
        return cls(
            *(group, slot, rows, nbytes, keep, shared, copied, stride, new_pages),
            *(max(keep, copied), unmaps, not unmaps and keep < slot.granted),
        )

    def copy(self, ops: OpBatch) -> Reservation:
        """Adds a copy of the kept part of shared pages to `ops`; returns its scratch addresses.

        The request's own work must be complete. Waits for the work of other requests that wrote the
        pages it shares.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        for block, *_ in slot.span.parts:
            for event in block.events:
                wait_for(event)
        addresses = group.scratch.take(self.stride * layout.num_tensors)
        ops.populate(
            addresses.addr,
            self.stride,
            layout.num_tensors,
            self.stride,
            layout.page_size,
            copy_from=slot.addr + self.shared * layout.page_size,
            copy_stride=layout.tensor_bytes,
            copy_bytes=self.nbytes - self.shared * layout.page_size,
        )
        return addresses

    def drop_copy(self) -> None:
        """Undoes `copy` after the batch has run; may be called more than once."""
        if self.addresses is not None:
            edits = self.group.reclaimer.free_edits(self.copied - self.shared, {})
            nbytes = self.stride * self.group.layout.num_tensors
            self.group.scratch.give_mapped(
                self.addresses, nbytes, [*edits, [self, "addresses", None]]
            )

    def unmap(self, ops: OpBatch) -> list[list[Any]]:
        """Adds operations that map the copies over shared pages and unmap the pages after them.

        Returns:
            The edits that belong to these operations.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        tensors, edits = layout.num_tensors, self._unmap_edits()
        if self.addresses is not None:
            scratch, size = self.addresses.addr, self.stride
            copies = group.mapper.gather(scratch, size, tensors, size)
            edits += (
                [self, "addresses", None],
                [group.journal.unrecorded, copies, ...],
                # The batch consumes `copies`. Marking this handle as done prevents a false leak
                # report after an interruption.
                [copies, "_done", True],
                *group.scratch.give_edits(self.addresses),
            )
            ops.map(
                slot.addr + self.shared * layout.page_size,
                size,
                copies,
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
                split=True,
            )
            ops.unmap(scratch, size, tensors, size)
        if self.end < slot.mapped:
            ops.unmap(
                slot.addr + self.end * layout.page_size,
                (slot.mapped - self.end) * layout.page_size,
                tensors,
                layout.tensor_bytes,
                split=True,
            )
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

    def _unmap_edits(self) -> list[list[Any]]:
        """Returns the edits to the slot and to the counts that belong to `unmap`."""
        group, slot, tier_map = self.group, self.slot, self.slot.tier_map
        own, mapped = max(self.end, slot.head + slot.span.pages), min(slot.mapped, self.end)
        off_device: dict[Tier, int] = {}
        granted = self.keep
        if tier_map.noted:
            off_device = tier_map.off_device(own, slot.mapped)
            tier_map = tier_map.without(self.shared, self.copied).without(self.end, slot.mapped)
            granted = max(granted, tier_map.off_device_end)
        freed = max(0, slot.mapped - own) - sum(off_device.values())
        kept, gone = slot.span.part(self.shared - slot.head)
        return [
            [slot, "tier_map", tier_map],
            [slot, "span", kept],
            [slot, "mapped", mapped],
            [slot, "dirty", min(max(slot.dirty, slot.granted), mapped)],
            [slot, "large_end", slot.large_end_below(mapped)],
            *group.pager.grant_edits([(slot, granted)]),
            *group.reclaimer.shared.use_edits({gone: -1}, {gone: -1}),
            *group.reclaimer.free_edits(freed, off_device),
        ]


def _cut(each: Sequence[Truncation], work: PriorWork) -> bool:
    """Runs the unmaps of all groups as one batch, after a first batch that makes the copies.

    Returns:
        False if memory is short; nothing has changed.

    Raises:
        NotRecoverable: the request has lost rows; the message names it. VMemError: nothing has
            changed.
    """
    begun, copies = [], []
    after: list[Any] = []
    for one in each:
        if one.unmaps:
            begun.append(one)
            after += one.slot.events
        if one.new_pages:
            copies.append(one)
    if copies and not _copy_all(copies):
        return False
    first = each[0].group
    edits: list[list[Any]] = []
    try:
        for one in each:
            edits += one.edits(work)
        if not begun:
            first.journal.change(edits)
            return True
        ops = OpBatch(3 * len(begun))
        for one in begun:
            edits += one.unmap(ops)
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
    """Copies the kept parts of shared pages.

    Returns False, changing nothing, if memory is short.
    """
    if not reclaim_for([(one.group.pager, one.new_pages) for one in copies], {}):
        return False
    ops, first = OpBatch(len(copies)), copies[0].group
    edits: list[list[Any]] = []
    first.journal.on_abort(partial(_drop_copies, copies))
    try:
        for one in copies:
            reclaimer, counters = one.group.reclaimer, one.group.counters
            edits += (
                [one, "addresses", one.copy(ops)],
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
        one.drop_copy()


def _lost(begun: Sequence[Truncation], error: NotRecoverable) -> NotRecoverable:
    """Retires the slots of a request after a failed rollback; returns the error to raise."""
    for one in begun:
        one.group.reclaimer.mark_broken([(one.slot, one.shared, one.slot.mapped)])
    broken = [one for one in begun if one.slot.broken] or begun
    errors = [one.group.table.lose(one.slot, error) for one in broken]
    return errors[0]
