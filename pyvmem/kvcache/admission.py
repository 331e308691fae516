# SPDX-License-Identifier: MIT
"""Admission: whether new requests would fit, with the prefixes that they would begin with."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.leases import PrefixMatch

__all__ = ["can_admit"]


def can_admit(
    cores: Sequence[Core], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """See `KVCache.can_admit`; of several caches with the same requests, in all of them."""
    first = cores[0]
    lengths = [operator.index(length) for length in seq_lens]
    longest = first.config.max_seq_len
    for place, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_lens[{place}] is {length}; it must lie between 0 and {longest}",
                limit=longest,
            )
    found = _matches(first, lengths, matches)
    begun = [0 if match is None else match.length for match in found] or [0] * len(lengths)
    each = [list(map(core.layout.pages_for_step, begun, lengths)) for core in cores]
    pages = [_pages(core, one, found) for core, one in zip(cores, each, strict=True)]
    if len(lengths) > len(first.table.free):
        return False
    if not _find_mappings(cores, each):
        return False
    if not all(core.pager.could_have(need) for core, need in zip(cores, pages, strict=True)):
        return False
    return len(cores) == 1 or _fit_together(cores, pages)


def _matches(
    core: Core, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    if len(found) != len(lengths):
        raise invalid(f"{len(found)} matches for {len(lengths)} requests", limit=len(lengths))
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and core.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            core.prefixes.renew(match)
    return found


def _pages(core: Core, each: list[int], matches: Sequence[PrefixMatch | None]) -> int:
    """Physical pages that requests of so many each need beside those of their prefixes."""
    pages = sum(each)
    pages -= sum(core.prefixes.kept_pages(match) for match in matches if match is not None)
    return pages * core.layout.num_tensors


def _find_mappings(cores: Sequence[Core], each: list[list[int]]) -> bool:
    """Whether requests of so many pages in each cache find mappings of the context they share."""
    need = sum(core.runs.needed(pages) for core, pages in zip(cores, each, strict=True))
    runs = cores[0].runs
    if not need or (len(cores) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(core.runs.obtainable() for core in cores)


def _fit_together(cores: Sequence[Core], pages: list[int]) -> bool:
    """Whether what each cache can have alone they can have at once, of their budget."""
    own = cores[0].reclaimer
    share = own.share
    assert share is not None
    need = sum(count * core.layout.page_size for core, count in zip(cores, pages, strict=True))
    column = own.layout.page_size * own.layout.num_tensors
    reach = share.within_reach() + own.returning * own.layout.page_size
    return need <= reach + own.spare({}) * column
