# SPDX-License-Identifier: MIT
"""Allocates requests that begin with a recorded prefix, in all groups of layers or none."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

from pyvmem.errors import NotSupported, OutOfMemory, TooManyMappings, VMemError
from pyvmem.features.table import PREFIXES
from pyvmem.kvcache.events import PriorWork, prune
from pyvmem.kvcache.group import Group, Loan, lend, prepare
from pyvmem.kvcache.growth import grow
from pyvmem.kvcache.host_prefixes import FAILURES
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.requests import alloc, release, sync_free_slots
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.streams import Work
from pyvmem.plumbing.logs import warn

__all__ = ["alloc_prefix", "empty_slots", "kept_slots", "withdraw"]

_log = logging.getLogger(__name__)


def alloc_prefix(
    groups: Sequence[Group], tokens: Any, leave: int, reader: Work, namespace: Hashable
) -> tuple[int, int] | None:
    """Implements `KVCache.alloc_prefix`."""
    sync_free_slots(groups)
    prefixes = groups[0].prefixes
    match = prefixes.wanted(tokens, leave, namespace)
    reqid = slots = resumed = None
    try:
        if match.length:
            spans = [prefixes.span(group.place, match) for group in groups]
            kept = kept_slots(groups, spans, match.length)
            if kept is None:
                groups[0].sharing.require(PREFIXES, "alloc_prefix")
            slots = kept or empty_slots(groups)
        if slots is None:
            reqid = alloc(groups, match.asked)
        else:
            for group, span in zip(groups, spans, strict=True):
                group.sharing.order_after_writers(span, reader)
            resumed = _begin_with(groups, match, spans, slots, kept is not None)
            if resumed is not None:
                reqid = slots[0].index
                prepare(groups)
    finally:
        if match is not tokens and (reqid is None or slots is None):
            match.release()
    if reqid is None:
        return None
    held = 0 if slots is None else match.length
    if match.in_host and held == match.length:
        begun = [group.table[reqid] for group in groups]
        try:
            held = _load(groups, begun, match)
        except FAILURES as error:
            warn(_log, "prefixes", "a prefix in host memory was lost: %s", error)
            release(groups, begun, None)
            prefixes.host.drop(prefixes.in_host(match))
            match.in_host = 0  # do not retry the load
            return alloc_prefix(groups, tokens, leave, reader, namespace)
    _count_prompt(groups[0], (match.asked, held, bool(resumed)), 1)
    return reqid, held


def _load(groups: Sequence[Group], slots: Sequence[Slot], match: PrefixMatch) -> int:
    """Loads the units that follow a match from host memory, and records them for other requests.

    Returns:
        The number of tokens that the request then holds: only those of the match if memory is short
        or the units have meanwhile left host memory.
    """
    prefixes, held, length = groups[0].prefixes, match.length, match.length + match.in_host
    both = list(zip(groups, slots, strict=True))
    for group, slot in both:
        group.pager.release(slot)
    want = [(group.pager, [(slot, group.layout.pages_for(length))]) for group, slot in both]
    if grow(want, background=False):
        for group in groups:
            group.pager.settle(on_cpu=True)  # rolls back a growth that ran out of memory
    keys = prefixes.in_host(match)  # evictions by `grow` may have replaced some of them
    length = held + len(keys) * prefixes.unit
    if not keys or any(slot.granted < group.layout.pages_for(length) for group, slot in both):
        return held
    prefixes.host.load(slots, held // prefixes.unit, keys)
    for group, slot in both:
        group.enter(slot, length)
        group.note_use()
    # If the rows cannot be recorded, the request keeps the pages for itself.
    with suppress(TooManyMappings, OutOfMemory, NotSupported):
        prefixes.record(slots[0], match.ids, PriorWork(None, None))
    return length


def _count_prompt(group: Group, prompt: tuple[int, int, bool], by: int) -> None:
    """Counts a prompt: its tokens, how many were recorded, and whether all were still mapped.

    Callers count the prompt last, and through the journal, so that an interrupted call is not
    counted.
    """
    counters, (asked, held, resumed) = group.counters, prompt
    counters.last_prompt = prompt
    group.journal.change(
        [
            [counters, "prefix_queries", counters.prefix_queries + by],
            [counters, "prefix_query_tokens", counters.prefix_query_tokens + asked * by],
            [counters, "prefix_hits", counters.prefix_hits + (held > 0) * by],
            [counters, "prefix_hit_tokens", counters.prefix_hit_tokens + held * by],
            [counters, "prefix_resumed", counters.prefix_resumed + resumed * by],
        ]
    )


def withdraw(groups: Sequence[Group]) -> None:
    """Implements `Internals.withdraw_prompt`."""
    counters = groups[0].counters
    if counters.last_prompt is not None:
        _count_prompt(groups[0], counters.last_prompt, -1)
        counters.last_prompt = None


def _begin_with(
    groups: Sequence[Group], match: PrefixMatch, spans: list[Span], slots: list[Slot], kept: bool
) -> bool | None:
    """Starts a request with a leased match, in all groups or none.

    Args:
        groups: groups of the cache.
        match: the match.
        spans: the match's pages in each group.
        slots: the request's slot in each group.
        kept: True if some or all of these pages are already mapped in the slots.

    Returns:
        True if all of the pages were still mapped; None if memory is short, with nothing changed.
    """
    resumed = True
    loans: list[Loan] = []
    try:
        for group, slot, span in zip(groups, slots, spans, strict=True):
            if not kept:
                group.sharing.empty(slot)
            resumed = resumed and slot.span.pages == span.pages
            loans.append(Loan(group, slot, span, group.layout.window_page(match.length)))
        lend(loans)
    except VMemError as error:
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    groups[0].prefixes.hand_over(match, slots[0])
    for group, slot, *_ in loans:
        group.enter(slot, match.length)
        group.note_use()
    return resumed


def kept_slots(groups: Sequence[Group], spans: Sequence[Span], length: int) -> list[Slot] | None:
    """Returns each group's record of the free kept slot that has the most prefix pages mapped.

    Returns None if no slot has any of the pages mapped.
    """
    best: list[Slot] | None = None
    for slot in groups[0].table.stale:
        if not slot.kept or (best is not None and slot.mapped <= best[0].mapped):
            continue
        each = []
        for group, span in zip(groups, spans, strict=True):
            one = group.table.slots[slot.index]
            if not group.sharing.begins(one, span, length):
                break
            each.append(one)
        else:
            best = each
    return best


def empty_slots(groups: Sequence[Group]) -> list[Slot] | None:
    """Returns each group's record of the free slot that can be emptied soonest.

    Returns None if no slot is free, or if emptying it would wait for an earlier owner's GPU work.
    With several ranks the slot is returned anyway, since the progress of that work may differ
    between them.
    """
    found = groups[0].table.emptiest(1)
    if not found:
        return None
    slots = [group.table.slots[found[0].index] for group in groups]
    for slot in () if groups[0].table.lockstep else slots:
        if (slot.job is not None or slot.mapped) and prune(slot.events):
            return None
    return slots
