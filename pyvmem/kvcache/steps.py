# SPDX-License-Identifier: MIT
"""The two calls of every iteration. Where no page is missing, they cost a few microseconds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyvmem.errors import TooManyMappings, VMemError
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.jobs import Growth
from pyvmem.kvcache.slots import Slot

__all__ = ["grow_all", "step", "step_all", "step_async", "step_async_all"]

_Want = list[tuple[Slot, int]]


def step(core: Core, seq_lens: Sequence[int], stream: Any) -> int:
    """See `KVCache.step`."""
    try:
        rows, total, want = _begin(core, seq_lens, stream)
        if want:
            if not _grow(core, want, background=False):
                core.counters.short += 1
                return -1
            _settle(core, rows, stream)
            core.keep_watermark()
    except TooManyMappings:
        if core.table.lockstep:  # the other ranks do not know
            raise
        _note_crowded([core])
        return -1
    _commit(core, rows, total, stream)
    return 0


def step_async(core: Core, seq_lens: Sequence[int]) -> int:
    """See `KVCache.step_async`."""
    short, want = _begin_async(core, seq_lens)
    if want and not _grow(core, want, background=True):
        core.counters.short += 1
        return -1
    if short:
        core.keep_watermark()
    core.counters.steps_async += 1
    return 0


def step_all(cores: Sequence[Core], seq_lens: Sequence[int], stream: Any) -> int:
    """`step` of several caches with the same requests: all of them or none."""
    try:
        begun = [(core, *_begin(core, seq_lens, stream)) for core in cores]
        if any(want for *_, want in begun):
            if not grow_all([(core, want) for core, *_, want in begun], background=False):
                _note_short(cores)
                return -1
            for core, rows, *_ in begun:
                _settle(core, rows, stream)
            for core in cores:
                core.keep_watermark()
    except TooManyMappings:
        _note_crowded(cores)
        return -1
    for core, rows, total, _ in begun:
        _commit(core, rows, total, stream)
    return 0


def step_async_all(cores: Sequence[Core], seq_lens: Sequence[int]) -> int:
    """`step_async` of several caches with the same requests: all of them or none."""
    begun = [(core, *_begin_async(core, seq_lens)) for core in cores]
    if not grow_all([(core, want) for core, _, want in begun], background=True):
        _note_short(cores)
        return -1
    for core, short, _ in begun:
        if short:
            core.keep_watermark()
        core.counters.steps_async += 1
    return 0


# ---- the parts of a step -------------------------------------------------------------------------


def _begin(core: Core, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, _Want]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and what pages are missing.
    """
    pager, reclaimer = core.pager, core.reclaimer
    rows, total, want = core.scan(seq_lens)
    core.counters.last_wait_ns = 0
    if pager.growths:
        _settle(core, rows, stream)
        if want:
            rows, total, want = core.scan(seq_lens)
    if core.mover.moves or core.mover.given_up:
        core.mover.step(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, want


def _settle(core: Core, rows: Sequence[int], stream: Any) -> None:
    """Waits for the growths that the step to `rows` needs; ranks wait for all, as one."""
    core.pager.settle(stream, lens=None if core.table.lockstep else rows)


def _begin_async(core: Core, seq_lens: Sequence[int]) -> tuple[bool, _Want]:
    """Whether slots are short, and what no growth under way will give them."""
    pager, reclaimer = core.pager, core.reclaimer
    _, _, want = core.scan(seq_lens)
    short = bool(want)
    if reclaimer.cuts:
        reclaimer.poll()
    if want and not core.table.lockstep:
        # What an earlier owner's GPU work holds up is left to `step`, which must wait for it.
        want = [(slot, pages) for slot, pages in want if not _is_left(core, slot)]
    if want and (pager.growths or reclaimer.cuts):
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return short, want


def _is_left(core: Core, slot: Slot) -> bool:
    """Whether a slot can only grow after a wait, be it for a map call that the request began."""
    job = slot.job
    if isinstance(job, Growth) and job.filling is None and not job.handover:
        mine = any(one is slot and owner == slot.owner for one, owner, _ in job.grants)
        return not mine and not job.done()
    return core.pager.is_held_up(slot)


def _grow(core: Core, want: _Want, *, background: bool) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them."""
    pager, reclaimer = core.pager, core.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = sum([pages - slot.mapped for slot, pages in want if pages > slot.mapped])
    lacking *= core.layout.num_tensors
    if lacking > reclaimer.free and not pager.can_have(lacking, dict(want)):
        return False  # known before anything is planned
    return pager.grow(want, background=background)


def grow_all(wants: Sequence[tuple[Core, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several caches their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another cache cannot take meanwhile.
    cut = [_cut_surplus(core, want) for core, want in wants]
    return any(cut) and _grow_each(wants, background)


def _note_short(cores: Sequence[Core]) -> None:
    for core in cores:
        core.counters.short += 1


def _note_crowded(cores: Sequence[Core]) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    _note_short(cores)
    for core in cores:
        core.pager.relieve()


def _grow_each(wants: Sequence[tuple[Core, _Want]], background: bool) -> bool:
    grown: list[tuple[Core, _Want]] = []

    def disown() -> None:
        for core, want in grown:
            _disown(core, want)

    try:
        for core, want in wants:
            if want:
                core.journal.on_abort(partial(_disown, core, want))
                if not _grow(core, want, background=background):
                    disown()
                    return False
                grown.append((core, want))
    except VMemError:
        disown()
        raise
    return True


def _cut_surplus(core: Core, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        core.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= core.reclaimer.try_cut(slot, keep)
    return found


def _disown(core: Core, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            core.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    core.pager.poll()


def _commit(core: Core, rows: array[int], total: int, stream: Any) -> None:
    """Notes what the slots hold from now on."""
    if core.window is not None:
        core.window.slide(rows, stream)
    if core.config.promote_tokens and core.promoter is not None:
        core.promoter.step(rows, stream)
    core.runs.step(stream)
    core.journal.keep(core, "used_tokens", "clock")
    core.journal.keep(core.pager.lengths, "held")
    core.pager.lengths.held = rows
    core.used_tokens = total
    core.note_peaks()
    core.counters.steps += 1
    core.clock += 1
    if core.table.lockstep:
        core.prefixes.leases.end_all()  # a collector must not decide when they end
    if core.untidy:
        core.tidy()
