# SPDX-License-Identifier: MIT
"""Checks that freed memory returns to the device, even if it lies between live pages."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import eventually, has_tensors

from pyvmem import Context, FdEvent, NotSupported
from pyvmem.kvcache import KVCache, KVCacheConfig, LayeredCache, LayerShape, idle

SLAB = 64 << 20
# allowance for the driver's own memory, such as page tables: 60 MB on an H100
DRIVERS = 64 << 20
PAGE = 64 << 10
REQUESTS = 160
LAYERS = 4
ROW = 8 * 128 * 2  # bytes per row; a page holds 32 rows
ROWS = PAGE // ROW
LIVE = REQUESTS // 10 * 2 * LAYERS * 8 * PAGE  # bytes held by the requests that are not freed
AN_HOUR = 3600.0  # keeps the cache's own thread from running during a test; see `looks`


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
    """Yields a cache in which a random nine tenths of the requests have been freed, and the marks
    in the remaining requests' rows, by reqid.
    """
    with open_context(backend) as context:
        if context.info.granule > PAGE:
            pytest.skip("on this back end each page is a slab")
    with KVCache(config(**changes), backend=backend) as cache:
        lens = [0] * REQUESTS
        chance = random.Random(5)
        for _ in range(REQUESTS):
            assert cache.alloc_reqid() is not None
        for rows in range(ROWS, 9 * ROWS, ROWS):
            for reqid in chance.sample(range(REQUESTS), REQUESTS):
                lens[reqid] = rows
                assert cache.step(lens) == 0
        marks = {reqid: reqid + 1 for reqid in chance.sample(range(REQUESTS), REQUESTS // 10)}
        assert cache.context.stats().slab_bytes > 4 * compact_bytes()
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


def compact_bytes() -> float:
    """Returns an upper bound on the device memory in use once live pages are compacted."""
    return LIVE * 1.1 + SLAB


def is_compact(cache: KVCache) -> bool:
    return cache.context.stats().slab_bytes <= compact_bytes()


def looks(cache: KVCache) -> None:
    """Does what the cache's own thread does once the cache has been idle for `idle_seconds`."""
    idle = cache._idle
    assert idle is not None
    idle._look()  # notices that calls were made since the last check

    def trimmed() -> bool:
        idle._look()
        return idle._trimmed

    eventually(trimmed)


def rest(cache: KVCache, stream: Any = None) -> None:
    assert cache.step([0] * REQUESTS, stream) == 0


def device_bytes(backend: str) -> int | None:
    """Returns the memory in use as reported by the system, not the library, or None if there is no
    figure for this process alone.
    """
    if backend != "host":
        import torch

        if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
            return None  # other workers also use the device's memory
        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    # the host back end keeps its memory in shared files
    with open(f"/proc/{os.getpid()}/status") as status:
        found = re.search(r"RssShmem:\s+(\d+) kB", status.read())
    assert found is not None
    return int(found[1]) << 10


def test_trim_moves_pages_together(backend: str) -> None:
    with fragmented(backend, idle_seconds=0) as (cache, _):
        cache.trim()
        assert not is_compact(cache), "pages of requests in the last step must not be moved"
        cache.trim(compact=False)
        rest(cache)
        cache.trim(compact=False)
        assert not is_compact(cache)
        before = cache.context.stats().slab_bytes
        given = cache.trim()
        assert is_compact(cache)
        assert given == before - cache.context.stats().slab_bytes


def test_trim_moves_pages_of_idle_requests_on_request(backend: str) -> None:
    with fragmented(backend, idle_seconds=0) as (cache, _):
        cache.trim(compact=True)
        assert is_compact(cache)


def test_an_idle_cache_is_compacted(backend: str) -> None:
    """Uses the default configuration, and also checks the memory use that the system reports."""
    before = device_bytes(backend)
    with fragmented(backend) as (cache, _):
        rest(cache)
        eventually(lambda: is_compact(cache))
        if before is not None:
            own = 0 if backend == "host" else DRIVERS

            def is_back() -> bool:  # a GPU's driver clears freed memory before it counts as free
                after = device_bytes(backend)
                return after is not None and after - before <= compact_bytes() + own

            eventually(is_back)


def test_an_idle_cache_of_prefixes_is_compacted(backend: str) -> None:
    """Only cached prefixes are left when the cache is compacted; each next turn finds its rows."""
    with fragmented(backend) as (cache, marks):
        tokens = {reqid: range(1000 * reqid, 1000 * reqid + 8 * ROWS) for reqid in marks}
        for reqid in marks:
            cache.free_reqid(reqid, tokens=tokens[reqid])
        assert cache.step([0] * REQUESTS) == 0
        eventually(lambda: is_compact(cache))
        found = {}
        for reqid, mark in marks.items():
            taken = cache.alloc_prefix(tokens[reqid], 0)
            assert taken is not None
            assert taken[1] == 8 * ROWS
            found[taken[0]] = mark
        marks.clear()
        marks.update(found)


def test_pages_of_running_requests_are_not_moved(backend: str) -> None:
    """The last step included the live requests, so their work may still be queued on the GPU."""
    with fragmented(backend, idle_seconds=AN_HOUR) as (cache, _):
        lens = [slot.seq_len for slot in cache.snapshot()]
        assert cache.step(lens) == 0
        looks(cache)
        assert cache.context.stats().used_bytes == LIVE
        assert not is_compact(cache)


def test_an_engine_may_promise_that_nothing_runs(backend: str) -> None:
    with fragmented(backend, idle_seconds=0.1, idle_compact=True) as (cache, _):
        eventually(lambda: is_compact(cache))


def test_compaction_can_be_disabled(backend: str) -> None:
    with fragmented(backend, idle_seconds=AN_HOUR, idle_compact=False) as (cache, _):
        rest(cache)
        looks(cache)
        assert cache.context.stats().used_bytes == LIVE
        assert not is_compact(cache)


def test_compaction_waits_for_the_last_work(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FdEvent.create() as work, fragmented(backend, idle_seconds=0.1) as (cache, _):
        before = cache.context.stats().slab_bytes
        rest(cache, work)
        looks: list[bool | None] = []
        compact = idle._compact
        monkeypatch.setattr(idle, "_compact", lambda one: looks.append(compact(one)) or looks[-1])
        eventually(lambda: len(looks) > 2)
        assert looks[:2] == [None, None]
        assert cache.context.stats().slab_bytes > before / 2
        work.set()
        eventually(lambda: is_compact(cache))


def test_nothing_is_compacted_while_others_have_pages_in_the_context(backend: str) -> None:
    with fragmented(backend, idle_seconds=AN_HOUR) as (cache, _):
        rest(cache)
        with cache.context.reserve(PAGE):
            looks(cache)
            cache.trim()
            assert not is_compact(cache)
        cache.trim()
        assert is_compact(cache)


def test_a_concurrent_call_waits_for_one_slab(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction proceeds one slab at a time; a step between two slabs stops it."""
    with fragmented(backend, idle_seconds=AN_HOUR, idle_compact=True) as (cache, _):
        began, stepping, stepped = threading.Event(), threading.Event(), threading.Event()
        pieces: list[int] = []
        compact, idle = cache.context.compact, cache._idle
        assert idle is not None

        def slow(nbytes: int | None = None, after: Any = ()) -> int:
            pieces.append(compact(nbytes))
            began.set()
            stepping.wait(60)
            return pieces[-1]

        def begun() -> bool:
            idle._look()
            return began.is_set()

        lens = [slot.seq_len for slot in cache.snapshot()]
        with monkeypatch.context() as patched:
            patched.setattr(cache.context, "compact", slow)
            patched.setattr(idle._ended, "wait", lambda pause: began.is_set() and stepped.wait(60))
            looking = threading.Thread(target=eventually, args=(begun,))
            looking.start()
            assert began.wait(60)
            threading.Timer(0.05, stepping.set).start()
            assert cache.step(lens) == 0
            assert stepping.is_set(), "the call waited for one slab"
            stepped.set()
            looking.join(60)
        assert len(pieces) == 1
        assert 0 < pieces[0] <= SLAB
        looks(cache)
        assert is_compact(cache)


def test_a_steady_load_is_not_compacted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fragmented(backend, idle_seconds=AN_HOUR, idle_compact=True) as (cache, _):
        lens = [slot.seq_len for slot in cache.snapshot()]
        pieces: list[int] = []
        monkeypatch.setattr(cache.context, "compact", lambda *args: pieces.append(1) or 0)
        idle = cache._idle
        assert idle is not None
        for _ in range(20):
            assert cache.step(lens) == 0
            idle._look()
        assert not pieces
        looks(cache)
        assert pieces


def test_requests_continue_after_compaction(backend: str) -> None:
    with fragmented(backend, idle_seconds=0) as (cache, marks):
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


def test_a_context_shared_with_others_is_not_compacted(context: Context) -> None:
    page = context.info.granule
    with KVCache(config(page_size=page, max_batch=2), context) as cache:
        with pytest.raises(NotSupported, match="does not own the context"):
            cache.trim(compact=True)
        assert cache._idle is None, "it must not release memory that others are about to use"
        assert cache.trim() >= 0
        cache.check_integrity()


def test_all_groups_of_layers(backend: str) -> None:
    shapes = [LayerShape(num_kv_heads=8, head_dim=128), LayerShape(num_kv_heads=4, head_dim=128)]
    with LayeredCache(shapes, backend=backend, dtype="float16", max_batch=2, max_seq_len=64) as one:
        assert one.alloc_reqid() == 0
        assert one.step([64, 0]) == 0
        assert one.trim(compact=True) >= 0
        one.check_integrity()
