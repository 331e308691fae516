# SPDX-License-Identifier: MIT
"""Returns memory: unmaps pages that no request owns, and compacts partly used slabs."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any

from pyvmem.errors import NotSupported
from pyvmem.kvcache.events import prune, wait_for, wait_for_device
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.manager import Manager

__all__ = ["begin_trim", "can_compact", "last_work", "trim", "unmap_idle"]

_log = logging.getLogger(__name__)


def begin_trim(group: Group, prefixes: bool | str, leased: bool = False, kept: bool = True) -> bool:
    """Starts unmapping all pages that no request owns; returns True if no unmap is in flight.

    With `prefixes`, prefixes are evicted first; "host" also copies their rows to host memory, if
    that is enabled. With `kept`, kept slots are also unmapped, which does not free memory by
    itself, since their pages are recorded.
    """
    group.pager.poll()
    group.reclaimer.poll()
    group.mover.sweep()
    if prefixes:
        group.prefixes.evict_all(leased, forget=prefixes != "host")
    group.reclaimer.release_stale(kept=kept)
    for slot in group.table.victims():
        if kept or not slot.kept:
            group.reclaimer.try_unmap(slot, slot.granted)
    return not group.reclaimer.unmaps


def trim(
    manager: Manager, prefixes: bool | str, compact: bool | None, stream: Any, before: int
) -> int:
    """Implements `KVCache.trim`.

    `before` is the size of the context's slabs in bytes when the call began.
    """
    groups, context = manager.groups, manager.context
    unmap_idle(groups, prefixes)
    context.trim(0)
    if compact and not manager.owns_context:
        raise NotSupported(
            "compact: the cache does not own the context, and others may be using its pages; "
            "only a caller that knows all users may call Context.compact",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    if compact or (compact is None and can_compact(manager)):
        with groups[0].counters.waiting():
            if compact:
                wait_for_device(stream, groups[0].device)
            else:
                for event in last_work(groups):
                    wait_for(event)
            context.compact()
    for group in groups:
        group.reclaimer.raise_errors()
    back = max(0, before - context.stats().slab_bytes)
    _log.debug("trim: %d of %d bytes given back to the device", back, before)
    return back


def can_compact(manager: Manager) -> bool:
    """Returns True if no GPU work can be using live pages once the work in `last_work` is complete.

    Compaction replaces the pages behind addresses, so no GPU work may touch them, but a cache does
    not see what an engine launches. It only knows which requests that work may use: those with a
    length above 0 in the last `step`. Returns False if others may be using the context: if the
    cache does not own it, or it has reservations that are not the cache's.
    """
    groups = manager.groups
    if not manager.owns_context:
        return False
    if groups[0].named and any(slot.active for slot in groups[0].table):
        return False
    return all(
        any(group.owns(found) for group in groups) for found in manager.context.reservations()
    )


def last_work(groups: Sequence[Group]) -> list[Any]:
    """Returns the events of GPU work that may not be complete.

    The result is valid only if all lengths in the last `step` were 0.
    """
    events: list[Any] = []
    for group in groups:
        group.idle_step_work = prune(group.idle_step_work)
        events += group.idle_step_work
        for one in (*group.table, *group.reclaimer.shared.blocks):
            one.events = prune(one.events)
            events += one.events
    return events


def unmap_idle(groups: Sequence[Group], prefixes: bool | str) -> None:
    """Unmaps all pages that no request owns, and waits for the unmaps to finish.

    Failures are appended to `Reclaimer.errors`.
    """
    for group in groups:
        group.pager.finish_idle()
        with group.counters.waiting():
            while not begin_trim(group, prefixes, leased=True):
                group.reclaimer.finish_all()
                if group.reclaimer.errors:
                    break
