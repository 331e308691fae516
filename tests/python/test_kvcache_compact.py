# SPDX-License-Identifier: MIT
"""Description: memory that requests have freed is the device's again, also between living pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvcache_helpers import eventually, has_tensors

from pyvmem import Context, NotSupported
from pyvmem.kvcache import KVCache, KVCacheConfig, LayeredCache, LayerShape

SLAB = 64 << 20
PAGE = 64 << 10
REQUESTS = 160
LAYERS = 4
ROW = 8 * 128 * 2  # bytes: 32 rows fill a page
ROWS = PAGE // ROW


def config(**changes: object) -> KVCacheConfig:
    fields: dict[str, object] = {
        "num_layers": LAYERS,
        "num_kv_heads": 8,
        "head_dim": 128,
        "dtype": "float16",
        "max_batch": REQUESTS,
        "max_seq_len": 8 * ROWS,
        "page_size": PAGE,
        "growth_fraction": 0.0,
    }
    return KVCacheConfig(**{**fields, **changes})  # type: ignore[arg-type]


@contextmanager
def fragmented(backend: str, **changes: object) -> Iterator[tuple[KVCache, dict[int, int]]]:
    """A cache of which nine tenths were freed, all over; the living requests and their marks."""
    with KVCache(config(**changes), backend=backend) as cache:
        if cache.context.info.granule != PAGE:
            pytest.skip("pages of this back end are their own slabs")
        lens = [0] * REQUESTS
        chance = random.Random(5)
        for _ in range(REQUESTS):
            assert cache.alloc_reqid() is not None
        for rows in range(ROWS, 9 * ROWS, ROWS):
            for reqid in chance.sample(range(REQUESTS), REQUESTS):
                lens[reqid] = rows
                assert cache.step(lens) == 0
        marks = {reqid: reqid + 1 for reqid in chance.sample(range(REQUESTS), REQUESTS // 10)}
        for reqid, mark in marks.items():
            write(cache, reqid, mark)
        for reqid in range(REQUESTS):
            if reqid not in marks:
                cache.free_reqid(reqid)
        yield cache, marks
        for reqid, mark in marks.items():
            assert holds(cache, reqid, mark), f"rows of reqid {reqid}"
        cache.check_integrity()


def _ranges(cache: KVCache, reqid: int) -> list[int]:
    base, layout = cache.reservation.addr, cache.layout
    return [base + layout.offset(reqid, 0, tensor) for tensor in range(layout.num_tensors)]


def write(cache: KVCache, reqid: int, mark: int) -> None:
    for tensor, at in enumerate(_ranges(cache, reqid)):
        cache.context.fill(at, 8 * PAGE, (mark + tensor) % 256)


def holds(cache: KVCache, reqid: int, mark: int) -> bool:
    return all(
        cache.context.read(at, 8 * PAGE) == bytes([(mark + tensor) % 256]) * (8 * PAGE)
        for tensor, at in enumerate(_ranges(cache, reqid))
    )


def is_compact(cache: KVCache) -> bool:
    stats = cache.context.stats()
    return stats.slab_bytes <= stats.used_bytes * 1.1 + SLAB


def test_trim_moves_pages_together(backend: str) -> None:
    with fragmented(backend) as (cache, _):
        cache.trim()
        assert not is_compact(cache), "there is nothing to be shown"
        before = cache.context.stats().slab_bytes
        given = cache.trim(compact=True)
        assert is_compact(cache)
        assert given == before - cache.context.stats().slab_bytes


def test_an_idle_cache_is_compacted_where_its_engine_says_so(backend: str) -> None:
    with fragmented(backend, idle_seconds=0.2, idle_compact=True) as (cache, _):
        eventually(lambda: is_compact(cache))
    with fragmented(backend, idle_seconds=0.2) as (cache, marks):
        live = len(marks) * 2 * LAYERS * 8 * PAGE
        eventually(lambda: cache.context.stats().used_bytes == live)
        assert not is_compact(cache)


def test_requests_go_on_after_it(backend: str) -> None:
    with fragmented(backend) as (cache, marks):
        cache.trim(compact=True)
        lens = [slot.seq_len for slot in cache.snapshot()]
        reqid = cache.alloc_reqid()
        assert reqid is not None
        lens[reqid] = 8 * ROWS
        assert cache.step(lens) == 0
        write(cache, reqid, 77)
        marks[reqid] = 77
        if has_tensors(cache):
            assert cache.k(0)[reqid].shape[0] == 8 * ROWS


def test_not_in_a_context_of_others(context: Context) -> None:
    page = context.info.granule
    with KVCache(config(page_size=page, max_batch=2), context) as cache:
        with pytest.raises(NotSupported, match="not the cache's own"):
            cache.trim(compact=True)
        cache.check_integrity()


def test_all_classes_of_layers(backend: str) -> None:
    shapes = [LayerShape(num_kv_heads=8, head_dim=128), LayerShape(num_kv_heads=4, head_dim=128)]
    with LayeredCache(shapes, backend=backend, dtype="float16", max_batch=2, max_seq_len=64) as one:
        assert one.alloc_reqid() == 0
        assert one.step([64, 0]) == 0
        assert one.trim(compact=True) >= 0
        one.check_integrity()
