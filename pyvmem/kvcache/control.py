# SPDX-License-Identifier: MIT
"""What plug-ins need beside an engine's calls: a particular slot, a new limit, idle pages back.

`KVCache` chooses slots itself and takes its limit when it is made; a program written for another
cache may name slots itself, or reserve memory after the tensors exist.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING

from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache.cache import KVCache

__all__ = ["claim", "reclaim_free", "set_limit"]


def claim(cache: KVCache, reqid: int) -> None:
    """Takes one particular free slot, as `KVCache.alloc_reqid` takes the one that fits best.

    Raises:
        InvalidArgument: no such slot, it is taken, or its addresses are lost.
    """
    with cache._lock:
        core = cache._open_core()
        core.reclaimer.poll()
        core.pager.poll()
        index, last = operator.index(reqid), len(core.table) - 1
        if not 0 <= index <= last:
            raise invalid(f"reqid {index} is not between 0 and {last}", limit=last)
        slot = core.table[index]
        if slot.active:
            raise invalid(f"reqid {index} is taken")
        if slot.broken:
            raise invalid(f"reqid {index} is broken: a failed batch could not be undone there")
        core.table.take(slot)
        core.prepare()


def set_limit(cache: KVCache, pages: int) -> None:
    """Changes the physical pages that the cache may have; nothing is mapped or unmapped.

    Raises:
        InvalidArgument: negative, less than what is behind the cache now, or than its floor.
    """
    with cache._lock:
        core = cache._open_core()
        core.reclaimer.poll()
        count, held = operator.index(pages), core.reclaimer.held
        if count < max(0, held):
            raise invalid(f"a limit of {count} pages: {held} are behind the cache", limit=held)
        floor = -(-core.config.memory_floor // core.layout.page_size)
        if count < floor:
            raise invalid(f"a limit of {count} pages: the floor is {floor}", limit=floor)
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
    with cache._lock:
        core = cache._open_core()
        reclaimer = core.reclaimer
        reclaimer.poll()
        for slot in list(core.table.free.values()):
            if slot.index in keep:
                continue
            if wait:
                core.pager.release(slot)
            if slot.mapped and slot.job is None and not reclaimer.try_cut(slot, 0) and wait:
                reclaimer.finish_all()  # the queue was full
                reclaimer.try_cut(slot, 0)
        if wait:
            reclaimer.finish_all()
            reclaimer.raise_errors()
