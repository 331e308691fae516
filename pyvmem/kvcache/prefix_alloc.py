# SPDX-License-Identifier: MIT
"""Requests that begin with a recorded prefix, in all groups of layers or in none."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from pyvmem.errors import VMemError
from pyvmem.kvcache.events import prune
from pyvmem.kvcache.group import Group, Loan, lend
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.requests import alloc, sync_free_slots
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.streams import Work

__all__ = ["alloc_prefix", "empty_slots", "kept_slots", "withdraw"]


def alloc_prefix(
    groups: Sequence[Group], tokens: Any, leave: int, reader: Work, namespace: Hashable
) -> tuple[int, int] | None:
    """See `KVCache.alloc_prefix`."""
    sync_free_slots(groups)
    prefixes = groups[0].prefixes
    match, length = prefixes.wanted(tokens, leave, namespace)
    reqid = slots = resumed = None
    try:
        if match.length:
            spans = [prefixes.span(group.place, match) for group in groups]
            kept = kept_slots(groups, spans, match.length)
            if kept is None:
                prefixes.require("alloc_prefix")
            slots = kept or empty_slots(groups)
        if slots is None:
            reqid = alloc(groups, length)
        else:
            resumed = _begin_with(groups, match, spans, slots, reader, kept=kept is not None)
            if resumed is not None:
                reqid = slots[0].index
                for group in groups:
                    group.prepare()
    finally:
        if match is not tokens and (reqid is None or slots is None):
            match.release()
    if reqid is None:
        return None
    held = 0 if slots is None else match.length
    _count_prompt(groups[0], (length, held, bool(resumed)), 1)
    return reqid, held


def _count_prompt(group: Group, prompt: tuple[int, int, bool], by: int) -> None:
    """Counts a prompt: its tokens, those found recorded, and whether they were still mapped.

    Last of all, and in the journal: a call that is interrupted counts nothing.
    """
    counters, (asked, held, resumed) = group.counters, prompt
    counters.last_prompt = prompt
    counters.count(
        group.journal.entries,
        queries=by,
        query_tokens=asked * by,
        hits=(held > 0) * by,
        hit_tokens=held * by,
        resumed=resumed * by,
    )


def withdraw(groups: Sequence[Group]) -> None:
    """See `KVCache.withdraw_prompt`."""
    counters = groups[0].counters
    if counters.last_prompt is not None:
        _count_prompt(groups[0], counters.last_prompt, -1)
        counters.last_prompt = None


def _begin_with(
    groups: Sequence[Group],
    match: PrefixMatch,
    spans: Sequence[Span],
    slots: Sequence[Slot],
    reader: Work,
    *,
    kept: bool,
) -> bool | None:
    """Lets a request begin with a match, which is leased, in every group or in none.

    Args:
        groups: of the cache.
        match: the match.
        spans: its pages in each group.
        slots: those that the request gets in each.
        reader: the work that will read the pages.
        kept: the slots have the first of these pages, or all.

    Returns:
        Whether all of the pages were still mapped there. None where memory is short; nothing
        changed.
    """
    prefixes, resumed = groups[0].prefixes, kept
    loans: list[Loan] = []
    try:
        for group, slot, span in zip(groups, slots, spans, strict=True):
            group.sharing.order_after_writers(span, reader)
            if kept:
                resumed = resumed and slot.span.pages == span.pages
                loans.append(Loan(group, slot, span, slot.head))
                continue
            group.sharing.make_empty(1, [slot])
            loans.append(Loan(group, slot, span, group.layout.window_page(match.length)))
        lend(loans)
    except VMemError as error:
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    prefixes.hand_over(match, slots[0])
    for group, slot, *_ in loans:
        group.enter(slot, match.length)
        group.note_peaks()
    return resumed


def kept_slots(groups: Sequence[Group], spans: Sequence[Span], length: int) -> list[Slot] | None:
    """The free slot that has the most of a prefix mapped, in every group; None: there is none."""
    stale = groups[0].table.index.stale
    if not stale.entries:
        return None
    heads = [group.layout.window_page(length) for group in groups]
    best: list[Slot] | None = None
    for slot in stale:
        if not slot.kept or (best is not None and slot.mapped <= best[0].mapped):
            continue
        each = []
        for group, span, head in zip(groups, spans, heads, strict=True):
            one = group.table.slots[slot.index]
            if not group.sharing.begins(one, span, head):
                break
            each.append(one)
        else:
            best = each
    return best


def empty_slots(groups: Sequence[Group]) -> list[Slot] | None:
    """The free slot that is soonest without a page, in every group; None: there is none.

    None, too, where it would have to wait for an earlier owner's GPU work. Ranks do wait, since the
    progress of that work may differ between them.
    """
    found = groups[0].table.emptiest(1)
    if not found:
        return None
    slots = [group.table.slots[found[0].index] for group in groups]
    if not groups[0].table.lockstep:
        for slot in slots:
            if (slot.job is not None or slot.mapped) and prune(slot.events):
                return None
    return slots
