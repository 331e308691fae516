# SPDX-License-Identifier: MIT
"""Requests that begin with the rows of a running one, in all groups of layers or in none."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter

from pyvmem.errors import OutOfMemory, TooManyBatches, TooManyMappings, VMemError
from pyvmem.features.table import FORK
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.requests import make_free_alike
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.truncation import check_kept

__all__ = ["fork", "fork_all", "forked"]


def fork(
    group: Group,
    reqid: int,
    count: int,
    length: int | None,
    work: PriorWork,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing, pager = group.layout, group.sharing, group.pager
    parent = group.slot(reqid)
    held = pager.columns.held[parent.index]
    rows = held if length is None else operator.index(length)
    if not 1 <= count <= len(group.table.slots):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(group.table)}",
            limit=len(group.table),
        )
    chosen = None if into is None else _chosen(group, count, into)
    if group.mover.moves:
        group.mover.finish(parent, work)
    if parent.job is not None or parent.mapped > parent.granted:
        pager.release(parent)
    nbytes, full, pages = _forked(group, parent, rows)
    new_pages = (pages - full) * count * layout.num_tensors
    try:
        slots = sharing.make_empty(count, chosen)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    if slots is None or not (new_pages <= group.reclaimer.free or pager.have(new_pages)):
        return None
    if not work.over and nbytes > (parent.head + parent.span.pages) * layout.page_size:
        work.wait()
    ahead, large = True, layout.large_pages > 0
    while True:
        try:
            group.fork(parent, slots, full, pages, nbytes, ahead=ahead, large=large)
            break
        except (OutOfMemory, TooManyBatches, TooManyMappings) as error:
            if ahead:  # perhaps it wanted more than it must have
                ahead = False
                continue
            if group.table.lockstep:
                raise
            if large and isinstance(error, OutOfMemory):
                large = False  # small pages may fit where no large one does
                continue
            if isinstance(error, TooManyMappings):
                more = pager.fewer_mappings(new_pages, {})
            else:
                more = new_pages > 0 and group.reclaimer.make_room(new_pages, {})
            if not more:
                group.reclaimer.raise_errors()
                return None
    pins = parent.pins
    for slot in slots:
        if pins and slot.span.pages:
            slot.pins = group.prefixes.pin_again(pins)
        group.enter(slot, rows)
    group.note_peaks()
    return list(map(attrgetter("index"), slots))


def _forked(group: Group, parent: Slot, rows: int) -> tuple[int, int, int]:
    """Of a fork with so many rows, per tensor: bytes, pages that it shares, and all its pages."""
    layout = group.layout
    nbytes = layout.bytes_for(rows)
    # A state is written again with every token, and cannot be shared.
    full = 0 if layout.state else nbytes // layout.page_size
    if parent.places.noted:
        full = parent.places.floor(full)
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


def fork_all(
    groups: Sequence[Group],
    reqid: int,
    count: int,
    length: int | None,
    work: PriorWork,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """`fork` in every group or in none; the first one chooses the slots, unless `into` does."""
    make_free_alike(groups)
    for group in groups:
        group.sharing.require(FORK, "fork")
        if length is not None:
            slot = group.slot(reqid)
            check_kept(operator.index(length), reqid, group.rows[slot.index])
            group.check_back(slot, operator.index(length))
    done: list[Group] = []
    forked: list[int] | None = None

    def detach() -> None:
        for group in done:
            group.detach([group.table[index] for index in into or ()])

    try:
        for group in groups:
            forked = fork(group, reqid, count, length, work, into)
            if forked is None:
                detach()
                break
            into = forked
            done.append(group)
    except VMemError:
        detach()
        raise
    for group in groups:
        group.prepare()
    return forked
