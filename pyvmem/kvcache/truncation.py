# SPDX-License-Identifier: MIT
"""Requests cut back to fewer tokens, in all groups of layers or in none."""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyvmem.errors import NotRecoverable, OutOfMemory, VMemError
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import PriorWork, prune, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.slots import Slot
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.reservation import Reservation

__all__ = ["Truncation", "check_kept", "copied", "truncate"]


def check_kept(length: int, reqid: int, held: int) -> None:
    """Raises InvalidArgument unless a request that holds so many tokens can keep `length`."""
    if not 0 <= length <= held:
        raise invalid(f"length {length}: reqid {reqid} holds {held} tokens", limit=held)


def truncate(groups: Sequence[Group], reqid: int, length: int, work: PriorWork) -> int:
    """See `KVCache.truncate`; of several caches with the same requests, all or none."""
    slots = [group.slot(reqid) for group in groups]
    rows, held = operator.index(length), max(group.rows[slots[0].index] for group in groups)
    check_kept(rows, slots[0].index, held)
    for group, slot in zip(groups, slots, strict=True):
        group.check_back(slot, rows)
    if rows == held:
        _give_back_overread(list(zip(groups, slots, strict=True)), rows, work)
        return 0
    for group, slot in zip(groups, slots, strict=True):
        page = group.layout.bytes_for(rows) // group.layout.page_size
        group.mover.shorten(slot, page, work)
    each = [Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)]
    if any(one.unmaps for one in each):
        for one in each:
            one.group.pager.release(one.slot)
        each = [Truncation.of(one.group, one.slot, rows) for one in each]
        work.wait()
        if not _unmap_all(each, partial(_complete, groups, reqid, slots[0].owner, rows, work)):
            return -1
    _shorten(each, work)
    return 0


def copied(groups: Sequence[Group], reqid: int, length: int) -> int:
    """See `KVCache.copied_bytes`."""
    slots = [group.slot(reqid) for group in groups]
    check_kept(length, slots[0].index, max(group.rows[slots[0].index] for group in groups))
    each = [Truncation.of(group, slot, length) for group, slot in zip(groups, slots, strict=True)]
    return sum(one.new_pages for one in each) * groups[0].layout.page_size


def _shorten(each: Sequence[Truncation], work: PriorWork) -> None:
    """Notes the truncation in the records of every group, then unmaps what policy does not keep.

    `work`: the last work on the rows.
    """
    disowned = [one for one in each if not one.unmaps and one.keep < one.slot.granted]
    event = work.record() if disowned else None
    for one in disowned:
        group, slot = one.group, one.slot
        group.pager.shrink(slot, one.keep)
        group.reclaimer.own_away = None
        slot.events = [*prune(slot.events), *(() if event is None else (event,))]
    for one in each:
        group, slot = one.group, one.slot
        if group.promoter is not None:
            group.promoter.shorten(slot, one.first)
        group.prefixes.shorten(slot, one.rows)
        group.enter(slot, one.rows)
        group.table.changes += 1
    for one in disowned:
        if not one.group.config.deferred_reclaim and one.slot.job is None:
            one.group.reclaimer.try_unmap(one.slot, one.keep)


def _give_back_overread(both: Sequence[tuple[Group, Slot]], rows: int, work: PriorWork) -> None:
    """Takes back the pages that a prefill's kernel might read past the request's rows.

    They were never written, so the request may get them again as they are.
    """
    each = []
    for group, slot in both:
        places = slot.places
        keep = max(places.whole_away(group.layout.pages_for(rows)), places.away_end, slot.shared)
        if keep < slot.granted and slot not in group.mover.moves:
            each.append((group, slot, keep))
    event = work.record() if each else None
    for group, slot, keep in each:
        group.pager.shrink(slot, keep, written=False)
        group.reclaimer.own_away = None
        group.table.changes += 1
        if event is not None:
            slot.events = [*prune(slot.events), event]
        if not group.config.deferred_reclaim and slot.job is None:
            group.reclaimer.try_unmap(slot, keep)


def _complete(groups: Sequence[Group], reqid: int, owner: int, rows: int, work: PriorWork) -> None:
    """Completes a truncation that an exception ended after pages had been unmapped.

    Raises:
        NotRecoverable: it could not; the request has lost rows, and the text names it.
    """
    slots = [group.table[reqid] for group in groups]
    if slots[0].owner != owner or any(slot.lost for slot in slots):
        return
    try:
        done = truncate(groups, reqid, rows, work) == 0
    except VMemError as error:
        raise groups[0].table.lose(slots[0], error) from error
    if not done:
        short = "memory is short for its last page"
        raise groups[0].table.lose(
            slots[0], OutOfMemory(short, errno=errno.ENOMEM, op="KVCache.truncate")
        )
    _shorten(
        [Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)], work
    )


@dataclass
class Truncation:
    """The plan for a slot's pages.

        0 ......... length ......... granted ......... mapped
        | rows kept | dropped        |                 |
        | pages kept   | no owner from here on         |

    Pages of the request's own stay mapped, as those of a freed slot do: the request may have them
    again, zeroed, and whoever is short may take them. Pages that a request shares or that lie
    outside the device cannot stay without an owner. They are unmapped at once, and of a
    shared page that is kept in part the request gets a copy of its own, since it may write past
    its last row.

    Attributes:
        rows: tokens that are kept.
        first: the page that the first dropped row begins in.
        keep: pages that the request keeps; a large one outside the device as a whole.
        shared: of these, shared ones.
        copied: end of the pages, from `shared` on, that copies take the place of.
        end: pages from here on go where pages are unmapped at once.
        unmaps: they are.
        addresses: where the copies are before they take their place.
    """

    group: Group
    slot: Slot
    rows: int
    first: int
    keep: int
    shared: int
    copied: int
    end: int
    unmaps: bool
    addresses: Reservation | None = None

    @classmethod
    def of(cls, group: Group, slot: Slot, rows: int) -> Truncation:
        """The slot is the request's, without a move under way past its rows."""
        layout, places = group.layout, slot.places
        first, rest = divmod(layout.bytes_for(rows), layout.page_size)
        keep = min(places.whole_away(layout.pages_for(rows)), slot.granted)
        shared = min(slot.shared, places.floor(first))
        copied = shared
        if shared < slot.shared:
            if rest or shared < first:
                copied = min(places.ceil(keep), slot.shared)
            else:
                keep = shared  # what a kernel may over-read comes with the next step
        unmaps = shared < slot.shared or places.away_end > keep
        end = max(places.ceil(keep), copied)
        return cls(group, slot, rows, first, keep, shared, copied, end, unmaps)

    @property
    def stride(self) -> int:
        """Bytes of the copies in each tensor."""
        return (self.copied - self.shared) * self.group.layout.page_size

    @property
    def new_pages(self) -> int:
        """Physical pages that the copies take."""
        return (self.copied - self.shared) * self.group.layout.num_tensors

    def copy(self) -> bool:
        """Copies what is kept of shared pages; False where memory is short.

        The request's own work is over; that of others who wrote the shared pages may not be.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        if not self.new_pages:
            return True
        if not group.pager.have(self.new_pages):
            return False
        for block, *_ in slot.shared_part(self.shared, self.copied).parts:
            for event in prune(block.events):
                wait_for(event)
        nbytes = layout.bytes_for(self.rows) - self.shared * layout.page_size
        ops = OpBatch(1)
        addresses = group.scratch.take(self.stride * layout.num_tensors)
        ops.populate(
            addresses.addr,
            self.stride,
            layout.num_tensors,
            self.stride,
            layout.page_size,
            copy_from=slot.addr + self.shared * layout.page_size,
            copy_stride=layout.tensor_bytes,
            copy_bytes=nbytes,
        )
        try:
            with group.mapper.transaction() as change:
                group.reclaimer.held += self.new_pages
                change.run(ops, waits=group.counters.waits)
        except VMemError as error:
            group.scratch.give(addresses)
            if group.sharing.is_shortage(error):
                return False
            raise
        self.addresses = addresses
        group.counters.grown += self.new_pages
        return True

    def drop_copy(self) -> None:
        """Undoes `copy`."""
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            self.group.scratch.give_mapped(addresses, self.stride * self.group.layout.num_tensors)
            self.group.reclaimer.held -= self.new_pages
            self.group.counters.reclaimed += self.new_pages

    def unmap(self) -> None:
        """Maps the copies over shared pages, unmaps what follows: one batch, all or nothing."""
        group, slot, layout = self.group, self.slot, self.group.layout
        tensors = layout.num_tensors
        ops = OpBatch(3)
        if self.addresses is not None:
            scratch, size = self.addresses.addr, self.stride
            ops.map(
                slot.addr + self.shared * layout.page_size,
                size,
                group.mapper.gather(scratch, size, tensors, size),
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
            )
            ops.unmap(scratch, size, tensors, size)
        if self.end < slot.mapped:
            ops.unmap(
                slot.addr + self.end * layout.page_size,
                (slot.mapped - self.end) * layout.page_size,
                tensors,
                layout.tensor_bytes,
            )
        try:
            with group.mapper.transaction() as change:
                tail = self._note()
                change.run(ops, slot.events, group.counters.waits)
        except NotRecoverable as error:
            raise group.table.lose(slot, error) from error
        group.reclaimer.unref(tail)
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            group.scratch.give(addresses)

    def _note(self) -> Span:
        """What `unmap` does, in the records; returns the shared pages that go."""
        group, slot, places = self.group, self.slot, self.slot.places
        own = max(self.end, slot.shared)
        away = places.away(own, slot.mapped)
        gone = max(0, slot.mapped - own) - sum(away.values())
        tail = slot.shared_part(self.shared, slot.shared)
        places.forget(self.shared, self.copied)
        places.forget(self.end, slot.mapped)
        mapped, granted = min(slot.mapped, self.end), max(self.keep, places.away_end)
        group.pager.replace(slot, slot.shared_part(0, self.shared), mapped, granted)
        group.reclaimer.shared.use(tail, end=True)
        group.reclaimer.count_freed(gone, away)
        group.enter(slot, self.rows)
        return tail


def _unmap_all(each: Sequence[Truncation], complete: Callable[[], None]) -> bool:
    """Unmaps at once what cannot stay, in every group; False, and nothing changed: memory is short.

    `complete`: does the rest, if an exception from outside comes after the first unmap.

    Raises:
        NotRecoverable: the request has lost rows; the text names it. VMemError: nothing changed.
    """
    begun = [one for one in each if one.unmaps]
    done: list[Truncation] = []
    try:
        if not all(one.copy() for one in begun):
            _drop_copies(begun)
            return False
        begun[0].group.journal.on_abort(complete)
        for one in begun:
            one.unmap()
            done.append(one)
    except VMemError as error:
        _drop_copies(begun)
        if done and not isinstance(error, NotRecoverable):
            one = begun[len(done)]
            raise one.group.table.lose(one.slot, error) from error
        raise
    return True


def _drop_copies(begun: Sequence[Truncation]) -> None:
    for one in begun:
        one.drop_copy()
