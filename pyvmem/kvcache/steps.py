# SPDX-License-Identifier: MIT
"""Maps the pages that requests need for a step, in all groups of layers or none.

One batch maps the pages of all groups. Usually `extend` (growth.py) runs it; `grow` takes over if a
slot needs more than one map operation or memory is short. The caller holds the cache's lock.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from pyvmem.errors import TooManyMappings
from pyvmem.kvcache.events import wait_for_device
from pyvmem.kvcache.group import Group, prepare
from pyvmem.kvcache.growth import Pager, Want, Wants, extend, fit, grow, needs_of, within_reach
from pyvmem.kvcache.mappings import warn_out_of_mappings, who_has_mappings
from pyvmem.kvcache.reclaim import Share
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.window import slide

__all__ = ["step", "step_async"]

_log = logging.getLogger(__name__)

_Begun: TypeAlias = tuple[Group, "array[int]", int, list[int]]
"""A group, the rows held after the step, their sum, and the slots that need more pages."""


def step(groups: Sequence[Group], seq_lens: Sequence[int], stream: Any) -> int:
    """Implements `KVCache.step`, in all groups or none. Returns 0 or -1."""
    begun, growing = [], []
    try:
        for group in groups:
            pager, reclaimer, mover = group.pager, group.reclaimer, group.mover
            rows, total, short = pager.scan(seq_lens)
            group.counters.waits.struct.last_ns = 0
            if pager.growths:
                _settle(group, stream)
                if short:
                    rows, total, short = pager.scan(seq_lens)
            if mover.moves or mover.cancelled:
                mover.step(stream)
            if reclaimer.unmaps:
                reclaimer.poll()
            if reclaimer.errors:
                reclaimer.raise_errors()
            begun.append((group, rows, total, short))
            if short:
                growing.append(pager)
        names = any(seq_lens)
        if names:
            groups[0].named = True
        if growing:
            done = extend(growing, background=False) or _grow_for(begun, stream)
            if not done and not _grow_by_cutting(begun, stream):
                _note_short(groups)
                return -1
            own = groups[0].reclaimer
            if own.share is not None or own.limit - own.device_pages < own.watermark * own.limit:
                _keep_watermarks(groups)
    except TooManyMappings as error:
        if groups[0].table.lockstep:  # raise, since other ranks may not have failed
            error.args = (f"{error}; {who_has_mappings(groups)}", *error.args[1:])
            raise
        groups[0].pager.runs.refused = str(error)
        _note_short(groups)
        for group in groups:  # the growth was already rolled back
            group.pager.runs.relieve()
        return -1
    # Do not call into the context between the row updates of two groups: recovery stops at such a
    # call, so an interruption would leave some groups with new rows and others with old ones.
    windows = []
    for group, rows, *_ in begun:
        if group.window is not None:
            windows.append((group.window, rows))
        if group.promoter is not None:
            group.promoter.step(rows, stream)
        runs = group.pager.runs
        if runs.joins and runs.used > runs.join_at:
            runs.join(stream)
    if windows:
        slide(windows, stream)
    if not names and groups[0].named:
        groups[0].record_idle_step(stream)
    entries = groups[0].journal.entries
    for group, rows, total, _ in begun:
        columns, counters, reclaimer = group.pager.columns, group.counters, group.reclaimer
        entries += (  # every step runs this, and edits would cost three times as much
            (setattr, group, "used_tokens", group.used_tokens),
            (setattr, group, "clock", group.clock),
            (setattr, columns, "held_rows", columns.held_rows),
        )
        columns.held_rows = rows
        group.used_tokens = total
        group.clock += 1
        if reclaimer.shared.blocks or reclaimer.off_device or reclaimer.slid or group.layout.state:
            group.note_use()
        else:  # a shortcut, since all pages that requests own are unshared device pages
            used = total * group.token_bytes
            wasted = group.pager.granted_pages * group.page_bytes - used
            if used > counters.peak_used:
                counters.peak_used = used
            if wasted > counters.peak_wasted:
                counters.peak_wasted = wasted
        counters.steps += 1
    unprepared = []
    for group in groups:
        if names and group.pager.ahead:
            group.pager.grow_ahead()
        if group.table.lockstep:
            # End all leases here: garbage collection would end them at different times on
            # different ranks.
            group.prefixes.leases.end_all()
        if group.reclaim_due:
            group.reclaim_idle()
        if group.unprepared:
            unprepared.append(group)
    if unprepared:
        prepare(unprepared)
    return 0


def step_async(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """Implements `KVCache.step_async`, in all groups or none. Returns 0 or -1."""
    begun = []
    for group in groups:
        *_, short = group.pager.scan(seq_lens)
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
        if group.mover.cancelled:
            group.mover.sweep()
        begun.append((group, short))
    if any(map(itemgetter(1), begun)):
        if not _begin_growing(begun):
            _note_short(groups)
            return -1
        _keep_watermarks(groups)
    for group in groups:
        group.counters.steps_async += 1
    return 0


def _keep_watermarks(groups: Sequence[Group]) -> None:
    """Calls `Reclaimer.keep_watermark` for each group below its watermark.

    If there is a budget, the groups share it.
    """
    first = groups[0].reclaimer
    room = first.room if first.share is None else first.share.room() + first.share.beyond()
    for group in groups:
        own = group.reclaimer
        left = min(own.limit - own.device_pages, room // group.layout.page_size)
        if left < own.watermark * own.limit:
            own.keep_watermark()


def _grow_for(begun: Sequence[_Begun], stream: Any) -> bool:
    """Maps the pages that slots need, in all groups or none; returns whether it succeeded."""
    wants = [(group.pager, group.pager.wants(short)) for group, *_, short in begun]
    if not grow(wants, background=False):
        return False
    for group, *_ in begun:
        _settle(group, stream)
    return True


def _grow_by_cutting(begun: Sequence[_Begun], stream: Any) -> bool:
    """Like `_grow_for`, but also splits requests' 2 MiB entries to unmap their surplus pages.

    No GPU work may read such an entry while it is split, so this waits for all work on the device.
    Starts with the slot that has the largest surplus, and stops once the step's pages are mapped.
    """
    found = []
    for group, *_, short in begun:
        if not group.layout.block:
            continue
        needs = dict(group.pager.wants(short))
        for slot in group.table:
            keep = max(slot.granted, needs.get(slot, 0))
            if pages := slot.splittable_beyond(keep):
                found.append((-pages * group.page_bytes, slot.index, group, keep))
    if found:
        wait_for_device(stream, begun[0][0].device)
    for _, index, group, keep in sorted(found, key=itemgetter(0, 1)):
        group.reclaimer.cut(group.table[index], keep)
        group.reclaimer.raise_errors()
        if _grow_for(begun, stream):
            return True
    return False


def _settle(group: Group, stream: Any) -> None:
    """Waits for the growth that the step needs or, with several ranks, for all growth."""
    group.pager.settle(stream, lens=None if group.table.lockstep else group.pager.columns.needs)


def _begin_growing(begun: Sequence[tuple[Group, list[int]]]) -> bool:
    """Starts mapping the pages that slots need, in all groups or none.

    Returns False if memory or mappings are short.
    """
    for group, _ in begun:
        if group.pager.growths or group.left:
            break
    else:
        if extend([group.pager for group, short in begun if short], background=True):
            return True
    wants = [(group.pager, _not_promised(group, short)) for group, short in begun]
    if begun[0][0].table.lockstep:
        return grow(wants, background=True)
    return _grow_or_leave([group for group, _ in begun], wants)


def _not_promised(group: Group, short: list[int]) -> Want:
    """Returns the slots that need more pages than growth in flight will grant."""
    promised = {
        (slot, owner): pages for job in group.pager.growths for slot, owner, pages in job.grants
    }
    return [
        (slot, pages)
        for slot, pages in group.pager.wants(short)
        if promised.get((slot, slot.owner), 0) < pages
    ]


def _grow_or_leave(groups: Sequence[Group], wants: Wants) -> bool:
    """Maps what fits now and starts reclaiming memory for the rest. Never blocks.

    A later call maps the remaining pages, or the next `step` waits for them. Returns False if,
    according to the records, even reclaiming would not free enough. A `Growth` completes as a
    whole, so slots that must wait for an earlier owner's GPU work get a separate one.
    """
    now, ready, everything = [], [], []
    for group, (pager, want) in zip(groups, wants, strict=True):
        before = _left_to_a_step(group, want)
        some = [one for one in want if not pager.is_held_up(one[0])]
        now.append((pager, some))
        ready.append((pager, some + before))
        everything.append((pager, want + before))
    needs = needs_of(everything)
    if not fit(needs) and not (
        within_reach(needs, _keep(everything)) is not None and _begin_to_reclaim(groups, everything)
    ):
        return False
    fits = fit(needs_of(ready))
    if not fits:  # grow some slots now; the others get their pages later
        now = _select_fitting(now)
    slow = {slot for pager, want in now for slot, _ in want if pager.is_slow(slot)}
    first = [(pager, [one for one in want if one[0] not in slow]) for pager, want in now]
    second = [(pager, [one for one in want if one[0] in slow]) for pager, want in now]
    if grow(first, background=True, reclaim=False):
        grow(second, background=True, reclaim=False)
    elif (
        fits
        and fit(needs_of(ready))
        # The driver has less memory than the records say; reclaiming may still free enough.
        and not _begin_to_reclaim(groups, everything, more=groups[0].reclaimer.room)
    ):
        return False
    for group, (_, want) in zip(groups, wants, strict=True):
        group.pager.runs.refused = ""
        left = {slot: (slot.owner, pages) for slot, pages in want if slot.grows_from < pages}
        group.left.update(left)
    return True


def _left_to_a_step(group: Group, want: Want) -> Want:
    """Returns the pages that earlier calls promised to other slots and that no batch maps yet."""
    named, found = dict(want), []
    for slot, (owner, pages) in list(group.left.items()):
        if slot.owner != owner or not slot.active or slot.grows_from >= pages:
            del group.left[slot]
        elif slot not in named:
            found.append((slot, pages))
    return found


def _keep(wants: Wants) -> dict[Slot, int]:
    return {slot: pages for _, want in wants for slot, pages in want}


def _select_fitting(wants: Wants) -> list[tuple[Pager, Want]]:
    """Returns the slots with the smallest needs, as many as fit in the free memory in all groups.

    This way, a decoding request need not wait for memory that another request's prompt needs.
    """
    lacking: Counter[int] = Counter()
    for pager, want in wants:
        for slot, pages in want:
            lacking[slot.index] += max(0, pages - slot.grows_from) * pager.layout.page_bytes
    room = wants[0][0].reclaimer.room
    chosen = set[int]()
    for index in sorted(lacking, key=lacking.__getitem__):
        room -= lacking[index]
        if room < 0:
            break
        chosen.add(index)
    some = [(pager, [one for one in want if one[0].index in chosen]) for pager, want in wants]
    if fit(needs_of(some)):
        return some
    return [(pager, []) for pager, _ in wants]  # a group is at its limit


def _begin_to_reclaim(groups: Sequence[Group], wants: Wants, more: int = 0) -> bool:
    """Starts reclaiming the pages that slots need. Never blocks.

    Reclaims in the same order as `Reclaimer.make_room`: first pages of slots, then recorded
    prefixes, in both cases from this cache before the other caches of its budget. Cancels
    promotions last.

    Args:
        groups: groups of the cache.
        wants: the slots, with the pages per tensor that each should have.
        more: number of additional bytes to reclaim.

    Returns:
        False if that is not enough and no unmap is in flight that would free more later.
    """
    givers = [group.reclaimer for group in groups]
    share = givers[0].share
    others = None if share is None else share.excluding(givers[:])
    givers += [] if others is None else others.others()
    while True:
        for group in groups:
            group.pager.poll()
        if others is not None:
            others.poll()
        under_way = any(one.unmaps for one in givers)
        missing = _begin_what_comes_back(groups, wants, others, more)
        if missing <= 0 or any(one.unmaps for one in givers):
            return True
        if not under_way:
            return False


def _begin_what_comes_back(
    groups: Sequence[Group], wants: Wants, others: Share | None, more: int
) -> int:
    """Runs one pass of `_begin_to_reclaim`; returns how many bytes are still missing."""
    first, keep, needs = groups[0].reclaimer, _keep(wants), needs_of(wants)
    need = more + sum(pages * pager.layout.page_size for pager, pages in needs)

    def lacking() -> int:
        """Returns how many bytes are needed beyond what is free or being unmapped by this cache."""
        back = sum(group.reclaimer.returning * group.layout.page_size for group in groups)
        return need - first.room - back

    if others is not None:
        others.take(need - first.room)
    for pager, count in needs:
        own, size = pager.reclaimer, pager.layout.page_size
        rest = lacking() + own.returning * size
        pages = max(count - (own.limit - own.device_pages), -(-rest // size))
        if pages > 0:
            own.begin_unmaps(pages, keep, now=False)
    missing = lacking()
    if others is not None and missing > 0:
        others.begin_unmaps(missing, keep, now=False)
        missing -= others.returning() + others.leaving() + others.unsettled(promoting=False)
    for pager, count in needs:
        own, size, tensors = pager.reclaimer, pager.layout.page_size, pager.layout.num_tensors
        coming = own.leaving + pager.unsettled(keep, promoting=False)
        above = count - (own.limit - own.device_pages) - own.returning - coming
        coming += pager.splittable(keep)  # a step can split entries to free these
        missing -= coming * size
        if above > 0:
            missing -= own.evict(-(-above // tensors)) * tensors * size
    if missing > 0:
        column = groups[0].page_bytes
        missing -= first.evict(-(-missing // column)) * column
    if others is not None and missing > 0:
        missing -= others.evict(missing)
    if missing > 0:
        for group in groups:
            missing -= group.mover.promoting() * group.page_bytes
            group.mover.stop_promoting(wait=False)
        if others is not None:
            missing -= others.unsettled() - others.unsettled(promoting=False)
            others.stop_promoting(wait=False)
    for group in groups:
        group.reclaim_due = True
    return missing


def _note_short(groups: Sequence[Group]) -> None:
    edits = [[group.counters, "short", group.counters.short + 1] for group in groups]
    groups[0].journal.change(edits)  # not counted if interrupted before the call returns -1
    refused = [group.pager.runs.refused for group in groups if group.pager.runs.refused]
    if refused:
        warn_out_of_mappings(groups, refused[0])
    if _log.isEnabledFor(logging.DEBUG):
        for group in groups:
            reclaimer = group.reclaimer
            _log.debug(
                "short: -1 with %d of %d pages free, %d more obtainable, %d requests running",
                reclaimer.free,
                reclaimer.limit,
                reclaimer.obtainable({}) - reclaimer.free,
                len(group.table) - group.table.free_count,
            )
