# SPDX-License-Identifier: MIT
"""Builds caches in which pages of running requests move, to test promotion and tiers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, eventually, small_cache
from share_helpers import grow

from pyvmem import Caps, Context, KVCache, NotSupported, OpBatch

TENSORS = 2 * LAYERS
UNIT = 4  # pages per block
PART = UNIT * ROWS
MIB2 = 2 << 20


def cache_over(context: Context, **changes: Any) -> Any:
    """Creates a cache whose slots hold up to eleven pages. In a context from `in_slabs`, one 2 MiB
    entry maps four pages.
    """
    changes.setdefault("max_seq_len", 11 * ROWS)
    return small_cache(context, **changes)


def with_tiers(backend: str, **options: Any) -> Context:
    """Opens a context that can place pages in host memory; skips the test if the back end has no
    host pages.
    """
    context = open_context(backend, **options)
    if Caps.HOST_PAGES not in context.info.caps:
        context.close()
        pytest.skip("no host pages")
    return context


def in_pieces(cache: KVCache, rows: int, by: int = ROWS) -> tuple[int, int]:
    """Grows two requests alternately, page by page, so that neither has adjacent pages."""
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    assert one is not None
    assert two is not None
    for low in range(0, rows, by):
        grow(cache, one, low, min(rows, low + by))
        grow(cache, two, low, min(rows, low + by), 500)
    for reqid in (one, two):
        scatter(cache, reqid)
    return one, two


def scatter(cache: KVCache, reqid: int, first: int = 0) -> None:
    """Moves the pages from `first` onward, behind the cache's back: first the even ones, then the
    odd ones.
    """
    layout, page = cache.layout, cache.layout.page_size
    pages = cache.snapshot()[reqid].mapped_pages - first
    order = [*range(0, pages, 2), *range(1, pages, 2)]
    ops = OpBatch(2 * pages)
    with cache.context.reserve(pages * page) as scratch:
        for tensor in range(layout.num_tensors):
            base = cache.reservation.addr + layout.offset(reqid, first, tensor)
            both = [(base + own * page, scratch.addr + at * page) for at, own in enumerate(order)]
            ops.clear()
            for own, other in both:
                ops.populate(other, page, copy_from=own)
            cache.context.batch(ops)
            ops.clear()
            for own, other in both:
                handle = cache.context.retain(other, page)
                ops.map(own, page, handle, consume=True, replace=True, split=True)
                ops.unmap(other, page, split=True)
            cache.context.batch(ops)


def in_slabs(backend: str, **options: Any) -> Context:
    """Opens a context with 2 MiB entries, each of which maps four pages."""
    try:
        context = Context(backend, granule=MIB2 // UNIT, large_entries=True, **options)
    except NotSupported:
        pytest.skip(f"{backend} has no large entries of small pages")
    if Caps.LARGE_ENTRIES not in context.info.caps:
        context.close()
        pytest.skip(f"{backend} has no pages below 2 MiB")
    return context


def lens(cache: KVCache) -> list[int]:
    """Returns the lengths of all slots."""
    return [slot.seq_len for slot in cache.snapshot()]


def settled(cache: KVCache, reqid: int) -> None:
    """Steps until a request has nothing in flight."""

    def over() -> bool:
        assert cache.step(lens(cache)) == 0
        return not cache.snapshot()[reqid].moving_pages

    eventually(over)
