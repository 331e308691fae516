# SPDX-License-Identifier: MIT
"""Steps: the pages that requests lack, in all groups of layers or in none.

Most steps take one path: `extend` (growth.py) maps what all groups lack in one batch. Where more
than a map call is needed, or memory is short, each group grows by a batch of its own.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

from pyvmem.errors import TooManyMappings, VMemError
from pyvmem.kvcache.events import wait_for_device
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import extend
from pyvmem.kvcache.mappings import warn_out_of_mappings, who_has_mappings
from pyvmem.kvcache.reclaim import Share
from pyvmem.kvcache.slots import Growth, Slot
from pyvmem.kvcache.window import slide

__all__ = ["grow", "step", "step_async"]

_log = logging.getLogger(__name__)

_Want: TypeAlias = list[tuple[Slot, int]]
"""Slots, and the pages per tensor that each is to have."""


def step(groups: Sequence[Group], seq_lens: Sequence[int], stream: Any) -> int:
    """`KVCache.step` of groups with the same requests: all of them or none."""
    begun, growing, cuts = [], [], 0
    try:
        for group in groups:
            rows, total, short = _begin(group, seq_lens, stream)
            begun.append((group, rows, total, short))
            cuts += group.layout.block
            if short:
                growing.append(group.pager)
        names = any(seq_lens)
        if names:
            groups[0].named = True
        if growing:
            done = extend(growing, background=False) or _grow_for(begun, stream)
            if not done and not (cuts and _grow_by_cutting(begun, stream)):
                _note_short(groups)
                return -1
            own = groups[0].reclaimer
            if own.share is not None or own.limit - own.held < own.watermark * own.limit:
                _keep_watermarks(groups)
    except TooManyMappings as error:
        if groups[0].table.lockstep:  # the other ranks do not know
            error.args = (f"{error}; {who_has_mappings(groups)}", *error.args[1:])
            raise
        _note_out_of_mappings(groups, error)
        return -1
    # What calls the context comes before or after the rows of all groups: an interruption after a
    # call in between would leave some groups with the new rows and some with the old.
    windows = []
    for group, rows, _, _ in begun:
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
        groups[0].rest(stream)
    for group, rows, total, _ in begun:
        _commit(group, rows, total)
    for group in groups:
        if names and group.pager.ahead:
            group.pager.grow_ahead()
        if group.table.lockstep:
            group.prefixes.leases.end_all()  # a collector must not decide when they end
        if group.reclaim_due:
            group.reclaim_idle()
        if group.unprepared:
            group.prepare()
    return 0


def step_async(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """`KVCache.step_async` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    for group in groups:
        _, _, short = group.pager.scan(seq_lens)
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
        if group.mover.cancelled:
            group.mover.sweep()
        begun.append((group, short))
        lacking = lacking or bool(short)
    if lacking and not _begin_growing(begun):
        _note_short(groups)
        return -1
    if lacking:
        _keep_watermarks(groups)
    for group in groups:
        group.counters.steps_async += 1
    return 0


def _begin(group: Group, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, list[int]]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and the slots that lack pages.
    """
    pager, reclaimer = group.pager, group.reclaimer
    rows, total, short = pager.scan(seq_lens)
    group.counters.waits.struct.last_ns = 0
    if pager.growths:
        _settle(group, stream)
        if short:
            rows, total, short = pager.scan(seq_lens)
    if group.mover.moves or group.mover.cancelled:
        group.mover.step(stream)
    if reclaimer.unmaps:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, short


def _keep_watermarks(groups: Sequence[Group]) -> None:
    """`Group.keep_watermark` of each, which have one budget."""
    share = groups[0].reclaimer.share
    room = 0 if share is None else share.room() + share.beyond()
    for group in groups:
        own = group.reclaimer
        left = own.limit - own.held
        if share is not None:
            left = min(left, room // group.layout.page_size)
        if left < own.watermark * own.limit:
            group.keep_watermark()


def _grow_for(begun: Sequence[tuple[Group, array[int], int, list[int]]], stream: Any) -> bool:
    """Gives slots that are short their pages, in all groups or in none."""
    wants = [(group, group.pager.wants(short)) for group, *_, short in begun]
    if not grow(wants, background=False):
        return False
    for group, _ in wants:
        _settle(group, stream)
    return True


def _grow_by_cutting(
    begun: Sequence[tuple[Group, array[int], int, list[int]]], stream: Any
) -> bool:
    """The same, with what requests have of entries of 2 MiB beyond their own pages.

    Nothing may be reading such an entry while it is split: waits for all work on the device. The
    largest parts go first, and no more of them than is needed.
    """
    found = []
    for group, _, _, short in begun:
        needs = dict(group.pager.wants(short))
        for slot in group.table if group.layout.block else ():
            keep = max(slot.granted, needs.get(slot, 0))
            if pages := slot.loose_beyond(keep):
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
    """Waits for the growths that the step needs; ranks wait for all of them."""
    group.pager.settle(stream, lens=None if group.table.lockstep else group.pager.columns.needs)


def _begin_growing(begun: Sequence[tuple[Group, list[int]]]) -> bool:
    """Begins to give slots that are short their pages, in all groups or in none."""
    for group, _ in begun:
        if group.pager.growths or group.left:
            break
    else:
        if extend([group.pager for group, short in begun if short], background=True):
            return True
    group = begun[0][0]
    wants = [(group, _not_promised(group, group.pager.wants(short))) for group, short in begun]
    if group.table.lockstep:
        return grow(wants, background=True)
    return _grow_or_leave(wants)


def _grow_or_leave(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """Maps what fits now and starts to reclaim memory for the rest. Never blocks.

    A later call maps the rest, or the `step` waits for it. False where even reclaiming would not
    free enough, as far as the records tell.
    """
    now: list[tuple[Group, _Want]] = []
    for group, want in wants:
        now.append((group, [one for one in want if not group.pager.is_held_up(one[0])]))
    before = [(group, _left_to_a_step(group, want)) for group, want in wants]
    ready = _joined(now, before)
    everything = _joined(wants, before)
    if not _fit(everything) and not (_reclaimable(everything) and _begin_to_reclaim(everything)):
        return False
    fits = _fit(ready)
    if not fits:  # the others have what comes back
        now = _select_fitting(now)
    if _grow_each(_by_speed(now, slow=False), True, wait=False):
        _grow_each(_by_speed(now, slow=True), True, wait=False)
    elif fits and _fit(ready):
        # The driver has less than the records say; perhaps enough comes back.
        first = wants[0][0].reclaimer
        if not _begin_to_reclaim(everything, more=first.room):
            return False
    for group, want in wants:
        group.pager.runs.refused = ""
        left = [(slot, (slot.owner, pages)) for slot, pages in want if slot.grows_from < pages]
        group.left.update(left)
    return True


def _joined(
    wants: Sequence[tuple[Group, _Want]], more: Sequence[tuple[Group, _Want]]
) -> list[tuple[Group, _Want]]:
    return [(group, want + others) for (group, want), (_, others) in zip(wants, more, strict=True)]


def _by_speed(wants: Sequence[tuple[Group, _Want]], *, slow: bool) -> list[tuple[Group, _Want]]:
    """Slots that must wait for an earlier owner's GPU work (`slow`), or those that need not.

    A growth completes as a whole, so the two get growths of their own.
    """
    return [
        (group, [one for one in want if group.pager.is_slow(one[0]) == slow])
        for group, want in wants
    ]


def _bytes_lacking(wants: Sequence[tuple[Group, _Want]]) -> int:
    return sum(_lacking(group, want) * group.layout.page_size for group, want in wants)


def _fit(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """True if all pages that are to be mapped are free."""
    return _bytes_lacking(wants) <= wants[0][0].reclaimer.room and all(
        _lacking(group, want) <= group.reclaimer.limit - group.reclaimer.held
        for group, want in wants
    )


def _select_fitting(wants: Sequence[tuple[Group, _Want]]) -> list[tuple[Group, _Want]]:
    """The slots whose pages are free, together and in all groups; those that lack least come first.

    So a request that decodes does not wait until there is memory for another one's prompt.
    """
    lacking: dict[int, int] = {}
    for group, want in wants:
        for slot, pages in want:
            more = max(0, pages - slot.grows_from) * group.page_bytes
            lacking[slot.index] = lacking.get(slot.index, 0) + more
    room = wants[0][0].reclaimer.room
    chosen = set[int]()
    for index in sorted(lacking, key=lacking.__getitem__):
        room -= lacking[index]
        if room < 0:
            break
        chosen.add(index)
    some = [(group, [one for one in want if one[0].index in chosen]) for group, want in wants]
    return some if _fit(some) else [(group, []) for group, _ in wants]  # a group is at its ceiling


def _reclaimable(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """True if all would fit once everything unowned has been reclaimed."""
    need, own = _bytes_lacking(wants), 0
    for group, want in wants:
        reclaimer, keep = group.reclaimer, dict(want)
        back = reclaimer.returning + reclaimer.spare(keep) * group.layout.num_tensors
        back += group.pager.unsettled(keep)
        if _lacking(group, want) > reclaimer.limit - reclaimer.held + back:
            return False
        own += back * group.layout.page_size
    first = wants[0][0].reclaimer
    if first.share is None or need <= first.room + own:
        return need <= first.room + own
    others = first.share.beside([group.reclaimer for group, _ in wants])
    if need <= others.within_reach() + others.unsettled() + own:
        return True
    first.share.ask(need - own)
    return False


def _begin_to_reclaim(wants: Sequence[tuple[Group, _Want]], more: int = 0) -> bool:
    """Begins what brings back pages that slots lack; waits for nothing.

    In the order of `Reclaimer.make_room`: pages of slots, then recorded prefixes, each the cache's
    own before those of others of its budget; then promotions are given up.

    Args:
        wants: the slots, and the pages per tensor that each is to have.
        more: bytes beside these.

    Returns:
        False where that is not enough, and nothing is under way that more can be begun after.
    """
    first = wants[0][0].reclaimer
    others = None if first.share is None else first.share.beside([g.reclaimer for g, _ in wants])
    givers = [group.reclaimer for group, _ in wants]
    givers += [] if others is None else others.others()
    while True:
        for group, _ in wants:
            group.pager.poll()
        if others is not None:
            others.poll()
        under_way = any(one.unmaps for one in givers)
        missing = _begin_what_comes_back(wants, others, more)
        if missing <= 0 or any(one.unmaps for one in givers):
            return True
        if not under_way:
            return False


def _begin_what_comes_back(
    wants: Sequence[tuple[Group, _Want]], others: Share | None, more: int
) -> int:
    """Begins what can be begun now; the bytes that are missing beyond that."""
    first = wants[0][0].reclaimer
    if others is not None:
        others.take(_bytes_lacking(wants) + more - first.room)
    for group, want in wants:
        own, size = group.reclaimer, group.layout.page_size
        rest = _missing(wants, more) + own.returning * size
        pages = max(_lacking(group, want) - (own.limit - own.held), -(-rest // size))
        if pages > 0:
            own.begin_unmaps(pages, dict(want), now=False)
    missing = _missing(wants, more)
    if others is not None and missing > 0:
        others.begin_unmaps(missing, now=False)
        missing -= others.returning() + others.leaving() + others.unsettled(promoting=False)
    for group, want in wants:
        own, size, tensors = group.reclaimer, group.layout.page_size, group.layout.num_tensors
        coming = own.leaving + group.pager.unsettled(dict(want), promoting=False)
        above = _lacking(group, want) - (own.limit - own.held) - own.returning - coming
        if group.layout.block:
            coming += group.pager.loose(dict(want))  # which a step splits
        missing -= coming * size
        if above > 0:
            missing -= own.evict(-(-above // tensors)) * tensors * size
    if missing > 0:
        column = wants[0][0].page_bytes
        missing -= first.evict(-(-missing // column)) * column
    if others is not None and missing > 0:
        missing -= others.evict(missing)
    if missing > 0:
        for group, _ in wants:
            missing -= group.mover.promoting() * group.page_bytes
            group.mover.stop_promoting(wait=False)
        if others is not None:
            missing -= others.unsettled() - others.unsettled(promoting=False)
            others.stop_promoting(wait=False)
    for group, _ in wants:
        group.reclaim_due = True
    return missing


def _missing(wants: Sequence[tuple[Group, _Want]], more: int) -> int:
    """Bytes that slots lack beyond those that are free or that slots of their cache give back."""
    back = sum(group.reclaimer.returning * group.layout.page_size for group, _ in wants)
    return _bytes_lacking(wants) + more - wants[0][0].reclaimer.room - back


def _left_to_a_step(group: Group, want: _Want) -> _Want:
    """Growth promised to other slots by earlier calls but not yet mapped."""
    if not group.left:
        return []
    for slot, (owner, pages) in list(group.left.items()):
        if slot.owner != owner or not slot.active or slot.grows_from >= pages:
            del group.left[slot]
    named = {slot for slot, _ in want}
    return [(slot, pages) for slot, (_, pages) in group.left.items() if slot not in named]


def _lacking(group: Group, want: _Want) -> int:
    """Physical pages that are to be mapped."""
    pages = sum([max(0, count - slot.grows_from) for slot, count in want])
    return pages * group.layout.num_tensors


def _not_promised(group: Group, want: _Want) -> _Want:
    """Wants not covered by in-flight growth."""
    pager = group.pager
    if want and pager.growths:
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return want


def _grow(
    group: Group, want: _Want, *, background: bool, tentative: bool = False, wait: bool = True
) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them.

    `wait`: for pages of no request, where it takes them. Without it nothing is in flight there.
    """
    pager, reclaimer = group.pager, group.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = _lacking(group, want)
    if lacking > reclaimer.free and not (wait and pager.can_have(lacking, dict(want))):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative, reclaim=wait)


def grow(wants: Sequence[tuple[Group, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several groups their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if len(wants) == 1:
        group, want = wants[0]
        return not want or _grow(group, want, background=background)
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another group cannot take meanwhile.
    found = [_unmap_surplus(group, want) for group, want in wants]
    return any(found) and _grow_each(wants, background)


def _note_short(groups: Sequence[Group]) -> None:
    for group in groups:  # in the journal: a call that is interrupted has not returned -1
        counters, short = group.counters, group.counters.short
        group.journal.entries.append((setattr, counters, "short", short))
        counters.short = short + 1
    if any(group.pager.runs.refused for group in groups):
        warn_out_of_mappings(groups)
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


def _note_out_of_mappings(groups: Sequence[Group], error: TooManyMappings) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    groups[0].pager.runs.refused = str(error)
    _note_short(groups)
    for group in groups:
        group.pager.runs.relieve()


def _grow_each(
    wants: Sequence[tuple[Group, _Want]], background: bool, *, wait: bool = True
) -> bool:
    grown: list[tuple[Group, _Want]] = []
    tentative = len(wants) > 1

    def disown() -> None:
        for group, want in grown:
            _disown(group, want)

    try:
        for group, want in wants:
            if want:
                group.journal.on_abort(partial(_disown, group, want))
                if not _grow(group, want, background=background, tentative=tentative, wait=wait):
                    disown()
                    return False
                grown.append((group, want))
    except VMemError:
        disown()
        raise
    return True


def _unmap_surplus(group: Group, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        group.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= group.reclaimer.try_unmap(slot, keep)
    return found


def _disown(group: Group, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            # The slot keeps the events of `handover` for its next owner.
            group.journal.change([[slot.job, "grants", []], [slot.job, "handover", []]])
    group.pager.poll()


def _commit(group: Group, rows: array[int], total: int) -> None:
    """Notes what the slots hold from now on."""
    columns, counters, reclaimer = group.pager.columns, group.counters, group.reclaimer
    group.journal.entries += (  # every step comes by here: an edit costs three times as much
        (setattr, group, "used_tokens", group.used_tokens),
        (setattr, group, "clock", group.clock),
        (setattr, columns, "held", columns.held),
    )
    columns.held = rows
    group.used_tokens = total
    group.clock += 1
    if reclaimer.shared.blocks or reclaimer.away or reclaimer.slid or group.layout.state:
        group.note_peaks()
    else:  # the same, where all pages of requests are their own, and here
        used = total * group.token_bytes
        wasted = group.pager.granted_pages * group.page_bytes - used
        if used > counters.peak_used:
            counters.peak_used = used
        if wasted > counters.peak_wasted:
            counters.peak_wasted = wasted
    counters.steps += 1
