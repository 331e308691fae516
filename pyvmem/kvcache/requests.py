# SPDX-License-Identifier: MIT
"""Allocates and releases requests' slots, in all groups of layers or none."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from operator import attrgetter
from typing import Any

from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group, prepare
from pyvmem.kvcache.slots import Slot

__all__ = ["alloc", "claim", "free", "reclaim_free", "record", "release", "sync_free_slots"]


def sync_free_slots(groups: Sequence[Group]) -> None:
    """Polls batches in flight, and retires a slot in all groups if it is retired in any."""
    for group in groups:
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
        if group.pager.growths:
            group.pager.poll()
    if len(groups) > 1 and any(map(attrgetter("table.retired"), groups)):
        broken = {slot.index for group in groups for slot in group.table if slot.broken}
        for group in groups:
            for index in broken:
                slot = group.table[index]
                # A slot in use is retired later, once its request has been freed.
                if not slot.broken and not slot.active:
                    group.table.mark_broken(slot)


def alloc(groups: Sequence[Group], seq_len: int) -> int | None:
    """Implements `KVCache.alloc_reqid`: the first group's best fit is used in all groups."""
    sync_free_slots(groups)
    found = groups[0].fit(seq_len)
    if found is None:
        return None
    for group in groups:
        group.take(group.table[found.index])
    prepare(groups)
    return found.index


def claim(groups: Sequence[Group], reqid: int) -> None:
    """Implements `CacheSlots.claim`."""
    sync_free_slots(groups)
    for group, slot in [(group, group.free_slot(reqid)) for group in groups]:
        group.take(slot)
    prepare(groups)


def free(
    groups: Sequence[Group], reqid: int, stream: Any, tokens: Any, namespace: Hashable
) -> None:
    """Implements `KVCache.free_reqid`."""
    slots, first = [], []
    for group in groups:
        slot = group.slot(reqid)
        slots.append(slot)
        first.append(slot.head + slot.span.pages)
    event = PriorWork(stream, groups[0].device).record()
    for group in groups:
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
    keeps = False
    if tokens is not None:
        owner = slots[0].owner

        # If the call is aborted, this frees the request, which must not write rows that may already
        # be recorded.
        def finish() -> None:
            if slots[0].active and slots[0].owner == owner:
                release(groups, slots, event)

        groups[0].journal.on_abort(finish)
        keeps = groups[0].prefixes.record_last(slots[0], tokens, event, namespace)
    release(groups, slots, event)
    if keeps:
        for group, slot, pages in zip(groups, slots, first, strict=True):
            group.keep(slot, pages)
    prepare(groups)
    for group in groups:
        group.reclaim_idle()


def record(
    groups: Sequence[Group], reqid: int, tokens: Any, work: PriorWork, namespace: Hashable
) -> int:
    """Implements `KVCache.record`."""
    return groups[0].prefixes.record(groups[0].slot(reqid), tokens, work, namespace)


def release(groups: Sequence[Group], slots: Sequence[Slot], event: Any) -> None:
    """Abandons the slots' moves in all groups, then calls `Group.release` in all groups."""
    for group, slot in zip(groups, slots, strict=True):
        if group.mover.moves:
            group.mover.abandon(slot)
    for group, slot in zip(groups, slots, strict=True):
        group.release(slot, event)


def reclaim_free(groups: Sequence[Group], keep: Collection[int], *, wait: bool) -> None:
    """Implements `CacheMemory.reclaim_free`."""
    for group in groups:
        group.reclaimer.poll()
        for slot in group.table.free:
            if slot.index in keep:
                continue
            if wait:
                group.pager.release(slot)
            if slot.mapped and slot.job is None:
                group.reclaimer.try_unmap(slot, 0, now=wait)
    if wait:
        for group in groups:
            group.reclaimer.finish_all()
        for group in groups:
            group.reclaimer.raise_errors()
