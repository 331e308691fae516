# SPDX-License-Identifier: MIT
"""What plug-ins need beside an engine's calls: a particular slot, a new limit, idle pages back.

`KVCache` chooses slots itself and takes its limit when it is made; a program written for another
cache may name slots itself, or reserve memory after the tensors exist.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Collection
from typing import TYPE_CHECKING

from pyvmem.errors import NotSupported
from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache.cache import KVCache

__all__ = [
    "capacity",
    "claim",
    "missing_pages",
    "obtainable_pages",
    "reclaim_free",
    "set_limit",
]


def claim(cache: KVCache, reqid: int) -> None:
    """Takes one particular free slot, as `KVCache.alloc_reqid` takes the one that fits best.

    Raises:
        InvalidArgument: no such slot, it is taken, or its addresses are lost.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        core.reclaimer.poll()
        core.pager.poll()
        core.take(core.free_slot(reqid))
        core.prepare()


def set_limit(cache: KVCache, pages: int) -> None:
    """Changes the physical pages that the cache may have; nothing is mapped or unmapped.

    Raises:
        InvalidArgument: negative, less than what is behind the cache now, or than its floor.
        NotSupported: the ranks of a `ParallelKVCache` have agreed on their limit.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        if core.table.lockstep:
            raise NotSupported(
                "set_limit: the ranks have agreed on their limit",
                errno=errno.EOPNOTSUPP,
                op="KVCache",
            )
        core.reclaimer.poll()
        count, held = operator.index(pages), core.reclaimer.held
        if count < max(0, held):
            raise invalid(f"a limit of {count} pages: {held} are behind the cache", limit=held)
        floor = -(-core.config.memory_floor // core.layout.page_size)
        if count < floor:
            raise invalid(f"a limit of {count} pages: the floor is {floor}", limit=floor)
        core.journal.keep(core, "_low_pages")
        core.reclaimer.limit = count
        core._low_pages = int(core.config.low_watermark * count)


def reclaim_free(cache: KVCache, keep: Collection[int] = (), *, wait: bool = False) -> None:
    """Unmaps the pages of free slots in the background, each after its owners' last GPU work.

    Args:
        keep: reqids whose pages stay.
        wait: return when it is done. Otherwise slots with a batch in flight are left as they are.

    Raises:
        VMemError: a background batch failed (`wait` alone); the cache is consistent.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        reclaimer = core.reclaimer
        reclaimer.poll()
        for slot in core.table.free:
            if slot.index in keep:
                continue
            if wait:
                core.pager.release(slot)
            if slot.mapped and slot.job is None:
                reclaimer.try_cut(slot, 0, now=wait)
        if wait:
            reclaimer.finish_all()
            reclaimer.raise_errors()


def capacity(cache: KVCache, reqid: int) -> int:
    """Tokens that a taken slot has pages for; a `KVCache.step` up to there maps nothing.

    Raises:
        InvalidArgument: no such reqid, or it is not taken.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        return core.pager.capacity[core.slot(reqid).index]


def missing_pages(cache: KVCache, reqid: int | None, seq_len: int) -> int:
    """Physical pages, in all tensors together, that a request lacks to hold `seq_len` tokens.

    Args:
        reqid: a taken slot; None: a request that has none yet.
        seq_len: tokens.

    Raises:
        InvalidArgument: no such reqid, not taken, or a length out of range.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        length, longest = operator.index(seq_len), core.config.max_seq_len
        if not 0 <= length <= longest:
            raise invalid(f"seq_len {length} is not between 0 and {longest}", limit=longest)
        held, have = 0, 0
        if reqid is not None:
            slot = core.slot(reqid)
            held, have = core.rows[slot.index], slot.granted
        need = core.layout.pages_for_step(held, length)
        return max(0, need - have) * core.layout.num_tensors


def obtainable_pages(cache: KVCache) -> tuple[int, int]:
    """Physical pages that requests could still get, and all that the cache may have.

    The first number counts what is free and what could be reclaimed, recorded prefixes that no
    request uses included.
    """
    with cache._lock, cache._journal:
        core = cache._open_core()
        core.reclaimer.poll()
        return core.reclaimer.obtainable({}), core.reclaimer.limit
