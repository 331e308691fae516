# SPDX-License-Identifier: MIT
"""Checks whether requests fit and how much memory is missing, without changing any pages."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import within_reach
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.plumbing.validation import expect

__all__ = ["can_admit", "free_pages", "is_ready", "lacking", "missing", "obtainable"]


def can_admit(
    groups: Sequence[Group], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """Implements `KVCache.can_admit`, for all groups."""
    first = groups[0]
    lengths = [operator.index(length) for length in seq_lens]
    longest = first.config.max_seq_len
    for place, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_lens[{place}] is {length}; it must be between 0 and {longest}", limit=longest
            )
    found = _matches(first, lengths, matches)
    begun = [0 if match is None else match.length for match in found] or [0] * len(lengths)
    each = [list(map(group.layout.pages_for_step, begun, lengths)) for group in groups]
    needs = []
    for group, pages in zip(groups, each, strict=True):
        kept = sum(group.prefixes.kept_pages(group.place, one) for one in found if one is not None)
        needs.append((group.pager, (sum(pages) - kept) * group.layout.num_tensors))
    if len(lengths) > first.table.free_count or not _find_mappings(groups, each):
        return False
    new = within_reach(needs, {})
    return new is not None and (new <= 0 or _context_has(first, new))


def _matches(
    group: Group, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """Validates the matches and renews their leases.

    Returns one match (or None) per length, or an empty list if `matches` is None.
    """
    if matches is None:
        return []
    found = list(matches)
    for place, one in enumerate(found):
        expect(f"matches[{place}]", one, PrefixMatch, optional=True)
    if len(found) != len(lengths):
        raise invalid(
            f"len(matches) is {len(found)}; it must be len(seq_lens), {len(lengths)}",
            limit=len(lengths),
        )
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and group.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            group.prefixes.renew(match)
    return found


def _find_mappings(groups: Sequence[Group], each: list[list[int]]) -> bool:
    """Returns whether the context has enough mappings left for new requests.

    `each` holds, for each group, the requests' page counts.
    """
    need = sum(group.pager.runs.needed(pages) for group, pages in zip(groups, each, strict=True))
    runs = groups[0].pager.runs
    if not need or (len(groups) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(group.pager.runs.obtainable() for group in groups)


def _context_has(group: Group, need: int) -> bool:
    """Returns whether the context's pool and its device can supply `need` bytes.

    `need` must already exclude what the groups' own idle pages cover; what other caches in the
    budget can give up is subtracted here.
    """
    share, context = group.reclaimer.share, group.context
    if share is not None:
        need -= share.within_reach() - share.beyond() - share.room() + share.unsettled()
    need -= context.stats().free_bytes
    return need <= 0 or need <= context.memory().free_bytes


def obtainable(groups: Sequence[Group]) -> tuple[int, int]:
    """Implements `CacheMemory.obtainable`."""
    for group in groups:
        group.reclaimer.poll()
    first, page = groups[0].reclaimer, groups[0].layout.page_size
    if len(groups) == 1:
        return first.obtainable({}) * page, first.limit * page
    share, own = first.share, first.idle({})  # pages being unmapped, and unowned pages
    assert share is not None
    return share.within_reach() + own * page, share.total()


def missing(
    groups: Sequence[Group], reqid: int | None, seq_len: int, match: PrefixMatch | None
) -> int:
    """Implements `CacheMemory.for_request`, but returns physical pages instead of bytes."""
    pages, length = 0, _length(groups[0], seq_len)
    for group in groups:
        held, have = 0, 0
        if reqid is not None:
            slot = group.slot(reqid)
            held, have = group.rows[slot.index], slot.granted
        elif match is not None:
            held, have = match.length, group.prefixes.kept_pages(group.place, match)
        need = group.layout.pages_for_step(held, length)
        pages += max(0, need - have) * group.layout.num_tensors
    return pages


def lacking(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """Implements `CacheMemory.for_step`."""
    pages = 0
    for group in groups:
        *_, short = group.pager.scan(seq_lens)
        wants = group.pager.wants(short)
        pages += sum([need - slot.granted for slot, need in wants]) * group.layout.num_tensors
    return pages * groups[0].layout.page_size


def is_ready(groups: Sequence[Group], reqid: int, seq_len: int) -> bool:
    """Implements `CacheSlots.is_ready`."""
    slots, length = [group.slot(reqid) for group in groups], _length(groups[0], seq_len)
    needs = [group.layout.pages_for_step(group.rows[slots[0].index], length) for group in groups]
    return all(
        slot.granted >= need or group.pager.is_mapped(slot, need)
        for group, slot, need in zip(groups, slots, needs, strict=True)
    )


def _length(group: Group, seq_len: int) -> int:
    """Validates `seq_len`; raises InvalidArgument unless a slot can hold that many tokens."""
    length, longest = operator.index(seq_len), group.config.max_seq_len
    if not 0 <= length <= longest:
        raise invalid(f"seq_len {length} is not between 0 and {longest}", limit=longest)
    return length


def free_pages(groups: Sequence[Group]) -> int:
    """Implements `CacheMemory.num_free_pages`.

    Simply adding up the groups would count the budget's room once per group.
    """
    for group in groups:
        group.reclaimer.poll()
    free = sum(group.reclaimer.free for group in groups)
    return min(groups[0].reclaimer.room // groups[0].layout.page_size, free)
