# SPDX-License-Identifier: MIT
"""The two calls of every iteration. Where no page is missing, they cost a few microseconds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

from pyvmem.kvcache.core import Core

__all__ = ["step", "step_async"]


def step(core: Core, seq_lens: Sequence[int], stream: Any) -> int:
    """See `KVCache.step`."""
    pager, reclaimer, counters = core.pager, core.reclaimer, core.counters
    lens, total = core.validate(seq_lens)
    counters.last_wait_ns = 0
    if pager.growths:
        pager.settle(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    # Capacity is 0 for free slots, so whatever is wrong with a single number shows up here too.
    short = list(compress(core.indices, map(operator.gt, lens, pager.capacity)))
    if short:
        want = core.want(lens, short)
        for slot, _ in want:
            pager.release(slot)
        if not pager.grow(want, background=False):
            counters.short += 1
            return -1
        pager.settle(stream)
        core.keep_watermark()
    core.seq_lens = lens[:]
    core.used_tokens = total
    core.note_peaks()
    counters.steps += 1
    core.clock += 1
    if core.untidy:
        core.tidy()
    return 0


def step_async(core: Core, seq_lens: Sequence[int]) -> int:
    """See `KVCache.step_async`."""
    pager, reclaimer, counters = core.pager, core.reclaimer, core.counters
    lens, _ = core.validate(seq_lens)
    if reclaimer.cuts:
        reclaimer.poll()
    short = list(compress(core.indices, map(operator.gt, lens, pager.capacity)))
    if short:
        want = core.want(lens, short)
        if pager.growths or reclaimer.cuts:
            want = core.unpromised(want)
            for slot, _ in want:
                pager.release(slot)
        if want and not pager.grow(want, background=True):
            counters.short += 1
            return -1
        core.keep_watermark()
    counters.steps_async += 1
    return 0
