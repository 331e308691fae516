# SPDX-License-Identifier: MIT
"""Caches whose pages change under their requests, for the tests of promotion and tiers."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, eventually, small_cache
from share_helpers import grow

from pyvmem import Caps, Context, KVCache, KVCacheConfig

TENSORS = 2 * LAYERS
UNIT = 4  # small pages of a large one
PART = UNIT * ROWS
MIB2 = 2 << 20


def cache_over(context: Context, **changes: Any) -> Any:
    """Slots of up to eleven pages, four of which are a large one."""
    changes.setdefault("max_seq_len", 11 * ROWS)
    changes.setdefault("large_page_size", UNIT * context.info.granule)
    if changes["large_page_size"] not in (0, *context.info.page_sizes):
        pytest.skip("no such page size")
    return small_cache(context, **changes)


def two_mebibytes(page: int, parts: int) -> KVCacheConfig:
    """Slots of three parts of 2 MiB, memory for so many; skipped where no page is smaller."""
    if page >= MIB2:
        pytest.skip("no smaller pages")
    return KVCacheConfig(
        num_layers=1,
        num_kv_heads=8,
        head_dim=128,
        dtype="float32",
        max_batch=2,
        max_seq_len=1536,
        page_size=page,
        large_page_size=MIB2,
        memory_limit=parts * MIB2,
        growth_fraction=0,
    )


def with_tiers(backend: str, **options: Any) -> Context:
    """A context that can have pages in host memory; skips the test where there is none."""
    context = open_context(backend, **options)
    if Caps.HOST_PAGES not in context.info.caps:
        context.close()
        pytest.skip("no host pages")
    return context


def in_pieces(cache: KVCache, rows: int, by: int = ROWS) -> tuple[int, int]:
    """Two requests that grew page by page in turn, so that no part of them is one run.

    The context's slabs must be small, or it prefers to keep each in a run.
    """
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    assert one is not None
    assert two is not None
    for low in range(0, rows, by):
        grow(cache, one, low, min(rows, low + by))
        grow(cache, two, low, min(rows, low + by), 500)
    at, part = cache.reservation.addr, UNIT * cache.layout.page_size
    if (
        by == ROWS
        and rows >= PART
        and cache.context.query(at + cache.layout.offset(one)).run_bytes >= part
    ):
        pytest.skip("the back end's slabs are larger than asked for: the pages are a run")
    return one, two


def in_slabs(backend: str) -> Context:
    """A context whose slabs are too small to keep the pages of a request together."""
    with open_context(backend) as probe:
        page = probe.info.granule
    return open_context(backend, slab_size=UNIT * page)


def lens(cache: KVCache) -> list[int]:
    """What every slot holds."""
    return [slot.seq_len for slot in cache.snapshot()]


def settled(cache: KVCache, reqid: int) -> None:
    """Steps until what is under way for a request is over."""

    def over() -> bool:
        assert cache.step(lens(cache)) == 0
        return not cache.snapshot()[reqid].moving_pages

    eventually(over)
