# SPDX-License-Identifier: MIT
"""Truncation: a request drops its last rows, and the pages that hold nothing else.

    0 ......... length ......... granted ......... mapped
    | rows kept | given up      |                 |
    | pages kept   | nobody's from here on        |

Pages of the request's own stay mapped, as those of a freed slot do: the request may have them
again, zeroed, and whoever is short may take them. Pages that a request shares or that lie outside
the device cannot stay where nobody owns them. They are unmapped at once, and of a shared page that
is kept in part the request gets a copy of its own, since it may write behind its last row.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotRecoverable, OutOfMemory, VMemError
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import prune, record, wait_for
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Group
    from pyvmem.kvcache.pages import Span
    from pyvmem.kvcache.slots import Slot
    from pyvmem.reservation import Reservation

__all__ = ["truncate"]


def truncate(groups: Sequence[Group], reqid: int, length: int, stream: Any) -> int:
    """See `KVCache.truncate`; of several caches with the same requests, all or none."""
    slots = [group.slot(reqid) for group in groups]
    rows, held = operator.index(length), max(group.rows[slots[0].index] for group in groups)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {slots[0].index} holds {held} tokens", limit=held)
    for group, slot in zip(groups, slots, strict=True):
        group.check_back(slot, rows)
    if rows == held:
        return 0
    for group, slot in zip(groups, slots, strict=True):
        page = group.layout.bytes_for(rows) // group.layout.page_size
        group.mover.shorten(slot, page, stream)
    each = [_Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)]
    if any(one.unmaps for one in each):
        for one in each:
            one.group.pager.release(one.slot)
        each = [_Truncation.of(one.group, one.slot, rows) for one in each]
        wait_for(record(stream, groups[0].device))
        if not _unmap_all(each, partial(_complete, groups, reqid, slots[0].owner, rows)):
            return -1
        stream = None  # the work on it is over
    _shorten(each, stream)
    return 0


def _shorten(each: Sequence[_Truncation], stream: Any) -> None:
    """Writes the truncation into the books, in every cache, then unmaps what policy does not keep.

    `stream`: of the last work on the rows.
    """
    disowned = [one for one in each if not one.unmaps and one.keep < one.slot.granted]
    event = record(stream, disowned[0].group.device) if disowned else None
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
            one.group.reclaimer.try_cut(one.slot, one.keep)


def _complete(groups: Sequence[Group], reqid: int, owner: int, rows: int) -> None:
    """Does what is left of a truncation that an exception ended after pages had gone.

    Raises:
        NotRecoverable: it could not; the request has lost rows, and the text names it.
    """
    slots = [group.table[reqid] for group in groups]
    if slots[0].owner != owner or any(slot.lost for slot in slots):
        return
    try:
        done = truncate(groups, reqid, rows, None) == 0
    except VMemError as error:
        raise _lost(groups[0], slots[0], error) from error
    if not done:
        short = "memory is short for its last page"
        raise _lost(
            groups[0], slots[0], OutOfMemory(short, errno=errno.ENOMEM, op="KVCache.truncate")
        )
    _shorten(
        [_Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)], None
    )


@dataclass
class _Truncation:
    """The plan for a slot's pages.

    Attributes:
        rows: tokens that are kept.
        first: the page that the first row given up begins in.
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
    def of(cls, group: Group, slot: Slot, rows: int) -> _Truncation:
        """The slot is the request's, without a move under way behind its rows."""
        layout, places = group.layout, slot.places
        first, cut = divmod(layout.bytes_for(rows), layout.page_size)
        keep = min(places.whole_away(layout.pages_for(rows)), slot.granted)
        shared = min(slot.shared, places.floor(first))
        copied = shared
        if shared < slot.shared:
            if cut or shared < first:
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

        The work that the pages wait for is over, but for that of those who wrote them for others.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        if not self.new_pages:
            return True
        if not group.pager.have(self.new_pages):
            return False
        for block, *_ in slot.span.cut(self.shared, self.copied).parts:
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
            copy_from=group.pager.base + layout.offset(slot.index, self.shared),
            copy_stride=layout.tensor_bytes,
            copy_bytes=nbytes,
        )
        try:
            with group.counters.waiting(), group.mapper.transaction() as change:
                group.reclaimer.held += self.new_pages
                change.run(ops)
        except VMemError as error:
            group.scratch.give(addresses)
            if group.sharing.is_shortage(error):
                return False
            raise
        self.addresses = addresses
        return True

    def give_up(self) -> None:
        """Undoes `copy`."""
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            self.group.scratch.give_mapped(addresses, self.stride * self.group.layout.num_tensors)
            self.group.reclaimer.held -= self.new_pages

    def unmap(self) -> None:
        """The copies take their place, and what is behind them goes: one batch, all or nothing."""
        group, slot, layout = self.group, self.slot, self.group.layout
        tensors, base = layout.num_tensors, group.pager.base
        ops = OpBatch(3)
        if self.addresses is not None:
            scratch, size = self.addresses.addr, self.stride
            ops.map(
                base + layout.offset(slot.index, self.shared),
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
                base + layout.offset(slot.index, self.end),
                (slot.mapped - self.end) * layout.page_size,
                tensors,
                layout.tensor_bytes,
            )
        try:
            with group.counters.waiting(), group.mapper.transaction() as change:
                tail = self._note()
                change.run(ops, slot.events)
        except NotRecoverable as error:
            raise _lost(group, slot, error) from error
        group.reclaimer.let_go(tail)
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            group.scratch.give(addresses)

    def _note(self) -> Span:
        """What `unmap` does, in the books; returns the shared pages that go."""
        group, slot, places = self.group, self.slot, self.slot.places
        own = max(self.end, slot.shared)
        away = places.away(own, slot.mapped)
        gone = max(0, slot.mapped - own) - sum(away.values())
        tail = slot.span.cut(self.shared, slot.shared)
        places.forget(self.shared, self.copied)
        places.forget(self.end, slot.mapped)
        mapped, granted = min(slot.mapped, self.end), max(self.keep, places.away_end)
        group.pager.replace(slot, slot.span.cut(0, self.shared), mapped, granted)
        group.reclaimer.shared.unuse(tail)
        group.reclaimer.came_back(gone, away)
        group.enter(slot, self.rows)
        return tail


def _unmap_all(each: Sequence[_Truncation], complete: Callable[[], None]) -> bool:
    """Unmaps what has to go at once, in every cache; False, with nothing changed: memory is short.

    `complete`: does the rest, if an exception from outside comes when a part has gone.

    Raises:
        NotRecoverable: the request has lost rows; the text names it. VMemError: nothing changed.
    """
    begun = [one for one in each if one.unmaps]
    done: list[_Truncation] = []
    try:
        if not all(one.copy() for one in begun):
            _give_up(begun)
            return False
        begun[0].group.journal.on_abort(complete)
        for one in begun:
            one.unmap()
            done.append(one)
    except VMemError as error:
        _give_up(begun)
        if done and not isinstance(error, NotRecoverable):
            raise _lost(begun[len(done)].group, begun[len(done)].slot, error) from error
        raise
    return True


def _give_up(begun: Sequence[_Truncation]) -> None:
    for one in begun:
        one.give_up()


def _lost(group: Group, slot: Slot, error: VMemError) -> NotRecoverable:
    """A request that has lost rows: its slot is used no more."""
    group.table.condemn(slot)
    slot.lost = True
    return NotRecoverable(
        f"reqid {slot.index} has lost its rows, free it: {error}",
        errno=errno.ENOTRECOVERABLE,
        op="KVCache",
    )
