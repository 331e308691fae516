# SPDX-License-Identifier: MIT
"""Tests preemption by swapping, admission, memory release and sparse caches."""

from __future__ import annotations

import errno
import gc
import time
import warnings
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    lens,
    pending,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    started,
    state,
    without,
)

from pyvmem import (
    BadHandle,
    Caps,
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    KVCache,
    NotMapped,
    NotSupported,
)
from pyvmem.kvcache import SwappedRequest, idle

TENSORS = 2 * LAYERS


# ---- swapping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, ROWS, 2 * ROWS + 3])
def test_a_swapped_request_is_fully_restored(context: Context, rows: int) -> None:
    with small_cache(context, max_batch=2, deferred_reclaim=False) as cache:
        first, other = started(cache, rows, 3.0), started(cache, ROWS, 5.0)
        swapped = cache.swap_out(first)
        assert swapped.is_open
        assert swapped.seq_len == rows
        assert swapped.nbytes == rows * TENSORS * cache.layout.row_bytes
        assert cache.stats().active_pages == TENSORS
        eventually(lambda: cache.stats().cached_pages == 0)
        assert started(cache, 3 * ROWS, 7.0) == first, "another request has its slot now"
        assert cache.swap_in(swapped) is None, "no slot is free"
        assert swapped.is_open
        cache.free_reqid(other)
        back = cache.swap_in(swapped)
        assert back == other
        assert not swapped.is_open
        assert cache.snapshot()[back].seq_len == rows
        assert rows_are(cache, back, 0, rows, 3.0)
        assert rows_are(cache, first, 0, 3 * ROWS, 7.0)
        want = lens(cache, **{f"r{first}": 3 * ROWS, f"r{back}": rows + 2})
        assert cache.step(want) == 0
        assert rows_are_zero(cache, back, rows, rows + 2), (
            "the earlier owner's data must not be visible"
        )


@pytest.mark.parametrize("rows", [1, 2 * ROWS + 3])
def test_the_kernel_gets_the_addresses_of_each_tensor(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Threads copy the same pieces in the kernel's place."""
    pytest.importorskip("numpy")
    from pyvmem.memory import host_copies

    ways = []

    def by_thread(context: Context, to_host: bool, pieces: host_copies.Pieces) -> bool:
        copies = host_copies.ThreadCopies(context, to_host)
        copy = copies.start(pieces)
        copies.close()
        assert copy.ready()
        assert copy.error is None
        ways.append((to_host, copy.nbytes, len(pieces.sizes)))
        return True

    with open_context("host") as context, small_cache(context, max_batch=2) as cache:
        assert not host_copies.copy_now(context, True, host_copies.Pieces([], [], []))
        monkeypatch.setattr(host_copies, "copy_now", by_thread)
        started(cache, ROWS, 5.0)
        reqid = started(cache, rows, 3.0)
        swapped = cache.swap_out(reqid)
        assert started(cache, rows, 7.0) == reqid, "other rows are there now"
        cache.free_reqid(reqid)
        assert cache.swap_in(swapped) == reqid
        assert rows_are(cache, reqid, 0, rows, 3.0)
        assert rows_are(cache, 1 - reqid, 0, ROWS, 5.0)
        assert ways == [(way, swapped.nbytes, TENSORS) for way in (True, False)]


def test_a_swapped_fork_frees_its_pages_and_returns_unshared(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, 2 * ROWS)
        child = cache.fork(parent)
        assert child is not None
        swapped = cache.swap_out(child)
        cache.free_reqid(parent)
        cache.trim()
        assert cache.stats().mapped_bytes == 0
        back = cache.swap_in(swapped)
        assert back is not None
        assert cache.snapshot()[back].shared_pages == 0
        assert rows_are(cache, back, 0, 2 * ROWS, 1.0)


def test_swap_in_without_memory(context: Context) -> None:
    limit = 3 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        swapped = cache.swap_out(started(cache, 2 * ROWS))
        other = started(cache, 2 * ROWS, 6.0)
        free = cache.memory.num_free_pages
        assert not cache.can_admit([swapped.seq_len])
        assert cache.swap_in(swapped) is None
        assert swapped.is_open
        assert cache.memory.num_free_pages == free
        assert cache.stats().active_slots == 1
        cache.free_reqid(other)
        assert cache.can_admit([swapped.seq_len])
        back = cache.swap_in(swapped)
        assert back is not None
        assert rows_are(cache, back, 0, 2 * ROWS, 1.0)


def test_swap_out_waits_for_the_work(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        reqid = started(cache, 1)
        with firing_later(work) as fired:
            cache.swap_out(reqid, work)
            assert fired


def test_bad_swaps(context: Context) -> None:
    with small_cache(context) as cache, small_cache(context) as another:
        with pytest.raises(InvalidArgument, match="not taken"):
            cache.swap_out(0)
        swapped = cache.swap_out(started(cache, ROWS))
        before = state(another)
        with pytest.raises(InvalidArgument, match="belongs to another cache"):
            another.swap_in(swapped)
        assert state(another) == before
        with pytest.raises(TypeError, match="SwappedRequest"):
            cache.swap_in(None)  # type: ignore[arg-type]
        assert cache.swap_in(swapped) is not None
        with pytest.raises(BadHandle, match="swapped in before"):
            cache.swap_in(swapped)
        with cache.swap_out(0) as second:
            assert isinstance(second, SwappedRequest)
        second.close()
        with pytest.raises(BadHandle, match="closed"):
            cache.swap_in(second)
        last = cache.swap_out(started(cache, 1))
    with pytest.raises(BadHandle, match="the KVCache is closed"):
        cache.swap_in(last)
    last.close()


def test_a_failed_swap_in_leaves_the_request_unchanged(context: Context) -> None:
    with small_cache(context) as cache:
        swapped = cache.swap_out(started(cache, 2 * ROWS))
        cache.trim()
        context.inject(Inject.MAP, skip=1)
        with pytest.raises(DriverError):
            cache.swap_in(swapped)
        context.inject(Inject.MAP, count=0)
        cache.check_integrity()
        assert cache.stats().active_slots == 0
        assert swapped.is_open
        back = cache.swap_in(swapped)
        assert back is not None
        assert rows_are(cache, back, 0, 2 * ROWS, 1.0)


# ---- admission -----------------------------------------------------------------------------------


def test_admission_counts_slots_and_all_that_can_be_reclaimed(context: Context) -> None:
    limit = 6 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        assert cache.can_admit([])
        assert cache.can_admit([6 * ROWS])
        assert cache.can_admit([3 * ROWS, 2 * ROWS, 1])
        assert not cache.can_admit([3 * ROWS, 3 * ROWS, 1])
        assert not cache.can_admit([0] * 5), "there are only four slots"
        cache.free_reqid(started(cache, 2 * ROWS), tokens=range(2 * ROWS))
        cache.free_reqid(started(cache, 2 * ROWS))
        started(cache, ROWS)
        assert cache.can_admit([5 * ROWS])
        assert not cache.can_admit([5 * ROWS + 1])
        started(cache, 5 * ROWS)
        assert cache.can_admit([0])
        assert not cache.can_admit([1])
        for bad in (-1, 6 * ROWS + 1):
            with pytest.raises(InvalidArgument, match=rf"seq_lens\[1\] is {bad}"):
                cache.can_admit([0, bad])


# ---- releasing memory ----------------------------------------------------------------------------


def test_trim_returns_memory_to_the_device(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        keep = started(cache, ROWS, 4.0)
        cache.free_reqid(started(cache, 3 * ROWS), tokens=range(ROWS))
        cache.free_reqid(started(cache, 2 * ROWS))
        assert cache.trim() >= 0
        now = cache.stats()
        assert now.mapped_bytes == 2 * TENSORS * cache.layout.page_size
        assert context.stats().free_bytes < context.info.slab_size
        assert cache.match([*range(ROWS), 0]).length == ROWS
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == TENSORS * cache.layout.page_size
        assert cache.match([*range(ROWS), 0]).length == 0
        assert rows_are(cache, keep, 0, ROWS, 4.0)
        cache.free_reqid(keep)
        held = context.stats().slab_bytes
        assert cache.trim() == held
        assert context.stats().slab_bytes == 0


def test_trim_waits_for_work_on_freed_slots(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        cache.free_reqid(started(cache, ROWS), work)
        with firing_later(work) as fired:
            cache.trim()
            assert fired
        assert cache.stats().mapped_bytes == 0


def test_a_failed_trim_raises_and_can_be_repeated(context: Context) -> None:
    with small_cache(context) as cache:
        cache.free_reqid(started(cache, ROWS))
        context.inject(Inject.UNMAP)
        with pytest.raises(DriverError):
            cache.trim()
        context.inject(Inject.UNMAP, count=0)
        cache.check_integrity()
        cache.trim()
        assert cache.stats().mapped_bytes == 0


@pytest.mark.parametrize("prefixes", [False, True])
def test_an_idle_cache_returns_memory_automatically(backend: str, prefixes: bool) -> None:
    with (
        open_context(backend) as context,
        small_cache(context, idle_seconds=0.1, idle_prefixes=prefixes) as cache,
    ):
        keep = started(cache, ROWS, 4.0)
        cache.free_reqid(started(cache, 2 * ROWS), tokens=range(ROWS))
        pages = 1 if prefixes else 2
        size = cache.layout.page_size
        eventually(lambda: cache.stats().mapped_bytes == pages * TENSORS * size)
        assert cache.stats().prefix_pages == (0 if prefixes else TENSORS)
        assert rows_are(cache, keep, 0, ROWS, 4.0)
        cache.free_reqid(started(cache, ROWS), None)
        eventually(lambda: cache.stats().mapped_bytes == pages * TENSORS * size)


def test_a_failure_while_idle_is_raised_by_the_next_step(context: Context) -> None:
    with small_cache(context, idle_seconds=0.05) as cache:
        reqid = started(cache, ROWS)
        context.inject(Inject.UNMAP)
        cache.free_reqid(reqid)
        eventually(
            lambda: bool(cache._groups[0].reclaimer.errors) or cache.memory.num_free_pages < 0
        )
        context.inject(Inject.UNMAP, count=0)
        with pytest.raises(DriverError):
            cache.step(lens(cache))


def test_the_idle_thread_ends_with_its_cache(host: Context) -> None:
    cache = KVCache(small_config(4096, idle_seconds=0.05), host)
    thread = cache._idle
    assert thread is not None
    assert thread.running
    cache.close()
    eventually(lambda: not thread.running)
    cache = KVCache(small_config(4096, idle_seconds=0.05), host)
    thread = cache._idle
    assert thread is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del cache
        gc.collect()
    eventually(lambda: not thread.running)  # the cache was garbage-collected, not closed


def test_an_idle_thread_survives_an_error_that_is_not_the_caches(
    host: Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, torch raises such an error for an event of a destroyed context."""
    calls: list[int] = []
    real = idle.begin_trim

    def failing(*args: Any, **options: Any) -> bool:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(*args, **options)

    monkeypatch.setattr(idle, "begin_trim", failing)
    with small_cache(host, idle_seconds=0.02) as cache:
        cache.free_reqid(started(cache, ROWS))
        eventually(lambda: cache.stats().mapped_bytes == 0)
    logged = [one for one in caplog.records if one.name == "pyvmem.kvcache.idle"]
    assert len(logged) == 1
    assert logged[0].exc_info is not None


def test_without_idle_seconds_nothing_is_unmapped(host: Context) -> None:
    with small_cache(host) as cache:
        assert cache._idle is None
        cache.free_reqid(started(cache, ROWS))
        time.sleep(0.05)
        assert cache.stats().mapped_bytes > 0


@pytest.mark.parametrize("value", [-1, float("nan"), "x"])
def test_bad_idle_seconds(value: object) -> None:
    with pytest.raises(InvalidArgument, match="idle_seconds"):
        small_config(4096, idle_seconds=value)


# ---- over-read -----------------------------------------------------------------------------------


def test_a_sparse_cache_reads_zeros_past_the_mapped_rows(host: Context) -> None:
    with small_cache(host, sparse=True) as cache:
        started(cache, 1)
        assert cache.reservation.sparse
        memory = cache.reservation.buffer()
        for page in range(1, 6):
            at = cache.layout.offset(0, page)
            assert not any(memory[at : at + cache.layout.page_size])
        assert rows_are(cache, 0, 0, 1, 1.0)
        del memory
        reqid = cache.fork(0)
        assert reqid is not None
        cache.free_reqid(reqid)
        cache.trim()
        with pytest.raises(NotMapped):
            cache.reservation.read(cache.layout.offset(reqid), 1)


def test_sparse_without_support(context: Context) -> None:
    if Caps.SPARSE in context.info.caps:
        with small_cache(context, sparse=True) as cache:
            assert cache.reservation.sparse
        without(context, Caps.SPARSE)
    before = context.stats().reserved_bytes
    with pytest.raises(
        NotSupported, match=r"sparse, with .*: back end .* VMEM_CAP_SPARSE"
    ) as caught:
        KVCache(small_config(context.info.granule, sparse=True), context)
    assert caught.value.errno == errno.EOPNOTSUPP
    assert context.stats().reserved_bytes == before
