# SPDX-License-Identifier: MIT
"""Waits for GPU work and batches before a call takes the cache's lock.

A call that waits for GPU work must not block other requests' calls. So each such call first lists
its blockers under the lock and starts what it can (such as unmapping unowned pages). It then waits
for the blockers without the lock, and lists them again. Once there are none left, the call itself
runs in the same critical section as the last listing and does not block:

    list -> wait -> list -> wait -> ... -> list, call
    lock            lock                   lock

Requests do not change before the call runs, so an exception that interrupts a wait leaves nothing
to undo. Two kinds of waits remain inside the call: those for copies of a request's own rows and,
when memory is short, those for reclaimed pages.

Each `before_...` function lists the blockers of one call. For bad arguments it returns no blockers,
so that the call itself raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from pyvmem._native import Kind
from pyvmem.errors import VMemError
from pyvmem.kvcache.events import PriorWork, prune, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.prefix_alloc import empty_slots, kept_slots
from pyvmem.kvcache.requests import sync_free_slots
from pyvmem.kvcache.slots import Growth, QuietTicket, Slot
from pyvmem.kvcache.trim import begin_trim, can_compact, last_work
from pyvmem.kvcache.truncation import planned
from pyvmem.memory.streams import Work

__all__ = [
    "Blockers",
    "FindBlockers",
    "before_fork",
    "before_move",
    "before_promote",
    "before_prefix",
    "before_reclaim",
    "before_record",
    "before_swap_in",
    "before_swap_out",
    "before_trim",
    "before_truncate",
    "clear",
    "when_clear",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_blocks = attrgetter("reclaimer.shared.blocks")

Groups = Sequence[Group]
Blockers = list[Callable[[], Any]]
FindBlockers = Callable[[Groups], Blockers]


def when_clear(
    manager: Manager,
    find_blockers: Callable[Concatenate[Groups, _P], Blockers],
    call: Callable[Concatenate[Groups, _P], _T],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T:
    """Runs `call` once `find_blockers` reports no blockers; waits for blockers without the lock.

    Both are called with the groups, followed by the same arguments.

    Inside another call, which holds the lock (`RequestCache`, `ParallelKVCache`), `find_blockers`
    is skipped and `call` itself waits. It is also skipped with several ranks, whose results must
    not depend on it.
    """
    while True:
        with manager.lock, manager.journal as outermost:
            groups = manager.open()
            waits: Blockers = []
            if outermost and not groups[0].table.lockstep:
                try:
                    waits = find_blockers(groups, *args, **kwargs)
                except (VMemError, TypeError, IndexError):
                    waits = []  # `call` will raise the same error
            if not waits:
                return call(groups, *args, **kwargs)
        for wait in waits:
            wait()


def clear(manager: Manager, find_blockers: FindBlockers) -> None:
    """Waits, without the lock, until `find_blockers` reports no blockers."""
    when_clear(manager, find_blockers, lambda groups: None)


# ---- work in flight ------------------------------------------------------------------------------


def _work(events: list[Any]) -> Blockers:
    """Lists the GPU work marked by these events that may still be running."""
    return [partial(wait_for, event) for event in prune(events)]


def _job(slot: Slot) -> Blockers:
    """Lists the slot's in-flight batch and the earlier owners' work that a growth must wait for."""
    job = slot.job
    if job is None:
        return []
    each = [job.mapping, job.filling] if isinstance(job, Growth) else [job.ticket]
    waits: Blockers = [QuietTicket(one).wait for one in each if one is not None and not one.done()]
    if isinstance(job, Growth):
        waits += _work(job.handover)
    return waits


def _own(group: Group, slot: Slot) -> Blockers:
    """Lists the slot's in-flight batch and the copies of its move."""
    move = group.mover.moves.get(slot)
    if move is not None and move.ticket is not None and not move.done():
        return [*_job(slot), QuietTicket(move.ticket).wait]
    return _job(slot)


def _emptied(group: Group, slot: Slot) -> Blockers:
    """Starts unmapping a free slot; lists its batch in flight."""
    if not slot.active and slot.job is None and slot.mapped and not slot.broken:
        group.reclaimer.try_unmap(slot, 0)
    return _job(slot)


def _both(groups: Groups, reqid: int) -> list[tuple[Group, Slot]]:
    return [(group, group.slot(reqid)) for group in groups]


# ---- calls ---------------------------------------------------------------------------------------


def before_fork(
    groups: Groups,
    reqid: int,
    count: int,
    length: int | None,
    work: PriorWork,
    into: Sequence[int] | None,
) -> Blockers:
    """Lists the blockers of `KVCache.fork_many`; `work` is the parent's last GPU work."""
    waits: Blockers = []
    for group in groups:
        slot = group.table.slots[reqid]
        if slot.job is not None or group.mover.moves:
            waits += _own(group, slot)
        if not work.over:
            rows = group.pager.columns.held_rows[slot.index] if length is None else length
            shared = slot.head + slot.span.pages
            if group.layout.bytes_for(rows) > shared * group.layout.page_size:
                waits += work.pending()
    table = groups[0].table
    if into is None:  # the call prefers slots that have no pages in the first group
        into = table.columns.pick(Kind.FREE, Kind.LOSING | Kind.CACHED)[:count]
        if len(into) < count:
            into = list(map(attrgetter("index"), table.emptiest(count)))
    if len(into) == count:
        for group in groups:
            for index in into:
                slot = group.table.slots[index]
                if slot.job is not None or slot.mapped:
                    waits += _emptied(group, slot)
    return waits


def before_record(
    groups: Groups, reqid: int, tokens: Any, work: PriorWork, namespace: Hashable
) -> Blockers:
    """Lists the blockers of `KVCache.record`; `work` is the request's last GPU work."""
    waits, slot = before_swap_out(groups, reqid, work), groups[0].slot(reqid)
    # Look up the tokens only if there is something to wait for.
    return waits if waits and groups[0].prefixes.shares(slot, tokens, namespace) else []


def before_prefix(
    groups: Groups, tokens: Any, leave: int, reader: Work, namespace: Hashable
) -> Blockers:
    """Lists the blockers of `KVCache.alloc_prefix`.

    These are the GPU work that wrote the pages, if the CPU must wait for it, and whatever blocks
    loading from host memory.
    """
    prefixes, ordered = groups[0].prefixes, groups[0].device is not None and reader.is_stream
    if not any(map(attrgetter("events"), chain.from_iterable(map(_blocks, groups)))):
        ordered = True
    if ordered and not prefixes.host.limit:
        return []
    match = prefixes.wanted(tokens, leave, namespace)
    try:
        if match.in_host and not match.length:
            return before_swap_in(groups, match.asked, PriorWork(None, None))
        spans = []
        if match.length and not ordered:
            spans = [prefixes.span(group.place, match) for group in groups]
        if not spans or not (kept_slots(groups, spans, match.length) or empty_slots(groups)):
            return []  # the request will not share any pages
    finally:
        if match is not tokens:
            match.release()
    blocks = [block for span in spans for block, *_ in span.parts]
    return [wait for block in blocks for wait in _work(block.events)]


def before_swap_out(groups: Groups, reqid: int, work: PriorWork) -> Blockers:
    """Lists the blockers of `KVCache.swap_out`; `work` is the request's last GPU work."""
    waits = [wait for group, slot in _both(groups, reqid) for wait in _own(group, slot)]
    return waits + work.pending()


def before_swap_in(groups: Groups, length: int, work: PriorWork) -> Blockers:
    """Lists the blockers of `KVCache.swap_in`.

    `work` is the GPU work so far on the stream that will use the rows.
    """
    sync_free_slots(groups)
    found = groups[0].fit(length)
    if found is None:
        return []
    waits = work.pending()
    for group in groups:
        slot = group.table[found.index]
        waits += _job(slot)
        if slot.mapped:
            waits += _work(slot.events)
    return waits


def before_truncate(groups: Groups, reqid: int, length: int, work: PriorWork) -> Blockers:
    """Lists the blockers of `KVCache.truncate`; `work` is the last GPU work on the rows."""
    waits: Blockers = []
    blockers = [] if work.over else work.pending()
    for group in groups:
        slot = group.table.slots[reqid]
        if not 0 <= length < group.pager.columns.held_rows[slot.index]:
            return []
        if slot.job is not None:
            blockers += _job(slot)
        move = group.mover.moves.get(slot)
        if move is not None and not move.promotes:
            page = group.layout.bytes_for(length) // group.layout.page_size
            if move.ends_after(page):
                waits += _own(group, slot) + work.pending()
    if blockers and any(one.unmaps for one in planned(groups, reqid, length)):
        waits += blockers
    return waits


def before_promote(groups: Groups, reqid: int, work: PriorWork, *, wait: bool) -> Blockers:
    """Lists the blockers of `KVCache.promote`; `work` is the request's last GPU work."""
    if wait:
        return before_swap_out(groups, reqid, work)
    # If a promotion of the slot is in flight, the call only returns the promotion's size.
    both = _both(groups, reqid)
    return [wait for group, slot in both if slot not in group.mover.moves for wait in _job(slot)]


def before_move(groups: Groups, reqid: int, work: PriorWork, *, wait: bool) -> Blockers:
    """Lists the blockers of `KVCache.move`; `work` is the request's last GPU work."""
    if wait or any(slot in group.mover.moves for group, slot in _both(groups, reqid)):
        return before_swap_out(groups, reqid, work)
    return [wait for group, slot in _both(groups, reqid) for wait in _job(slot)]


def before_reclaim(groups: Groups, keep: Collection[int], *, wait: bool) -> Blockers:
    """Lists the blockers of `CacheMemory.reclaim_free`."""
    waits: Blockers = []
    for group in groups if wait else ():
        for slot in group.table.free:
            if slot.index not in keep:
                waits += _emptied(group, slot)
    return waits


def before_trim(
    groups: Groups, manager: Manager, prefixes: bool | str, compact: bool | None
) -> Blockers:
    """Lists the blockers of `KVCache.trim`."""
    waits: Blockers = []
    if any(group.reclaimer.errors for group in groups):
        return []
    if prefixes == "host":
        for block in chain.from_iterable(map(_blocks, groups)):
            waits += _work(block.events)
        if waits:
            return waits
    for group in groups:
        idle = [job.slots[0] for job in group.pager.growths if job.slots and not job.awaited]
        waits += chain.from_iterable(map(_job, idle))
        group.reclaimer.release_stale(kept=True)
    for group in groups:
        begin_trim(group, prefixes, leased=True)
        waits += [QuietTicket(one.ticket).wait for one in group.reclaimer.unmaps if not one.done()]
    if compact is None and can_compact(manager):
        waits += _work(last_work(groups))
    return waits
