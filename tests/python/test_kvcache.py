# SPDX-License-Identifier: MIT
"""Tests KVCache as an engine uses it: slots, steps, contents, limits, reports and closing."""

from __future__ import annotations

import array
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    lens,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    state,
)

import pyvmem
from pyvmem import BadHandle, Busy, Context, InvalidArgument, KVCache
from pyvmem.kvcache import IntegrityError
from pyvmem.kvcache.config import PREFILL_TOKENS

needs_tensors = pytest.mark.needs_tensors
TENSORS = 2 * LAYERS


# ---- contents -----------------------------------------------------------------------------------


def test_contents_survive_growth(context: Context) -> None:
    with small_cache(context) as cache:
        a, b = cache.alloc_reqid(3), cache.alloc_reqid(1)
        assert (a, b) == (0, 1)
        assert cache.step(lens(cache, r0=3, r1=1)) == 0
        assert rows_are_zero(cache, 0, 0, 3)
        stamp(cache, 0, 0, 3, 5.0)
        stamp(cache, 1, 0, 1, 9.0)
        for length in range(4, 6 * ROWS + 1):
            assert cache.step(lens(cache, r0=length, r1=1)) == 0
            assert rows_are_zero(cache, 0, length - 1, length)
            stamp(cache, 0, length - 1, length, float(length))
        assert rows_are(cache, 0, 0, 3, 5.0)
        assert all(rows_are(cache, 0, n - 1, n, float(n)) for n in range(4, 6 * ROWS + 1))
        assert rows_are(cache, 1, 0, 1, 9.0)
        assert cache.stats().active_pages == (6 + 1) * TENSORS


def _own_value(view: torch.Tensor, layer: int, reqid: int, sign: float) -> torch.Tensor:
    rows = torch.arange(view.shape[1], device=view.device)[:, None, None]
    elements = torch.arange(64, device=view.device)
    return sign * (rows + 1000 * layer + 10000 * reqid + elements / 64 + 1)


def _write_own(cache: KVCache, layer: int, reqid: int) -> None:
    cache.k(layer)[reqid] = _own_value(cache.k(layer), layer, reqid, 1.0)
    cache.v(layer)[reqid] = _own_value(cache.v(layer), layer, reqid, -1.0)


def _holds_own(cache: KVCache, layer: int, reqid: int) -> bool:
    k, v = cache.k(layer), cache.v(layer)
    return bool((k[reqid] == _own_value(k, layer, reqid, 1.0)).all()) and bool(
        (v[reqid] == _own_value(v, layer, reqid, -1.0)).all()
    )


@needs_tensors
@pytest.mark.parametrize("group_size", [1, 3, 6])
def test_every_layer_row_and_slot_has_its_own_place(context: Context, group_size: int) -> None:
    page = context.info.granule
    limit = 4096 * page
    with small_cache(context, num_layers=6, group_size=group_size, memory_limit=limit) as cache:
        longest, heads = cache.config.max_seq_len, cache.config.num_kv_heads
        assert len(cache.tensors) == 2 * (6 // group_size)
        assert all(tuple(one.shape) == (4, longest, group_size, heads, 64) for one in cache.tensors)
        assert tuple(cache.k(5).shape) == tuple(cache.v(0).shape) == (4, longest, heads, 64)
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([longest] * 4) == 0
        places = [(layer, reqid) for reqid in range(4) for layer in range(6)]
        for place in places:
            _write_own(cache, *place)
        assert all(_holds_own(cache, *place) for place in places)


@needs_tensors
def test_rows_that_do_not_divide_a_page(context: Context) -> None:
    """Uses SmolLM2's shape: three heads of 64 float16 elements, so that a row has 384 bytes."""
    page = context.info.granule
    shape: dict[str, Any] = {"num_kv_heads": 3, "head_dim": 64, "dtype": "float16"}
    per_page = page // 384
    with small_cache(context, **shape, max_seq_len=3 * per_page + 7) as cache:
        assert cache.layout.row_bytes == 384
        assert page % 384 != 0
        cache.alloc_reqid()
        edges = [pages * page // 384 for pages in (1, 2, 3)]
        done = 0
        for length in sorted({1, *(edge + d for edge in edges for d in (-1, 0, 1))}):
            assert cache.step(lens(cache, r0=length)) == 0
            assert cache.snapshot()[0].granted_pages == -(-length * 384 // page)
            assert rows_are_zero(cache, 0, done, length)
            stamp(cache, 0, done, length, float(length))
            done = length
        previous = 0
        for length in sorted({1, *(edge + d for edge in edges for d in (-1, 0, 1))}):
            assert rows_are(cache, 0, previous, length, float(length))
            previous = length


def test_every_page_size(context: Context) -> None:
    for size in context.info.page_sizes:
        if size > 64 << 20:  # models have no rows large enough to fill such a page
            continue
        heads = max(1, size // (ROWS * 256))
        limit = 64 * TENSORS * size
        shape = {"page_size": size, "num_kv_heads": heads, "memory_limit": limit}
        with small_cache(context, **shape) as cache:
            cache.alloc_reqid()
            assert cache.step(lens(cache, r0=ROWS)) == 0
            assert cache.stats().mapped_bytes == TENSORS * size * cache.snapshot()[0].mapped_pages
            stamp(cache, 0, 0, ROWS, 1.0)
            assert cache.step(lens(cache, r0=ROWS + 1)) == 0
            assert rows_are(cache, 0, 0, ROWS, 1.0)
            assert rows_are_zero(cache, 0, ROWS, ROWS + 1)


@needs_tensors
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", torch.float64])
def test_dtypes(context: Context, dtype: Any) -> None:
    with small_cache(context, dtype=dtype) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2)) == 0
        name = str(dtype).removeprefix("torch.")
        assert cache.k(0).dtype == cache.v(1).dtype == getattr(torch, name)
        cache.k(1)[0, :2] = torch.ones((), dtype=getattr(torch, name))
        assert float(cache.k(1)[0, 1, 0, 63].float()) == 1.0


@needs_tensors
def test_over_read_rows_are_mapped_and_finite(context: Context) -> None:
    with small_cache(context, overread_rows=ROWS + 3, overread_decode=True) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        assert cache.snapshot()[0].granted_pages == 2
        assert rows_are_zero(cache, 0, 0, 1 + ROWS + 3)
        assert cache.step(lens(cache, r0=5)) == 0
        assert cache.snapshot()[0].granted_pages == 2
        assert cache.step(lens(cache, r0=6)) == 0
        assert cache.snapshot()[0].granted_pages == 3
        assert cache.step(lens(cache, r0=cache.config.max_seq_len)) == 0
        assert cache.snapshot()[0].granted_pages == 6, "not beyond the slot's end"


@needs_tensors
@pytest.mark.parametrize("ahead", [False, True])
def test_growth_uses_the_overread_rows_of_a_prefill(context: Context, ahead: bool) -> None:
    with small_cache(context, overread_rows=ROWS + 3, growth_fraction=0.0) as cache:

        def step_to(*lengths: int) -> None:
            wanted = [*lengths, 0]
            assert not ahead or cache.step_async(wanted) == 0
            assert cache.step(wanted) == 0

        for _ in range(3):
            cache.alloc_reqid()
        prompt = 2 * ROWS + 2
        step_to(prompt, 0, PREFILL_TOKENS)
        one, _, short = cache.snapshot()[:3]
        assert (one.granted_pages, short.granted_pages) == (4, 2), (
            "a short prompt counts as decoding"
        )
        assert rows_are_zero(cache, 0, 0, prompt + ROWS + 3)
        now = cache.stats()
        rows = prompt + PREFILL_TOKENS
        assert now.wasted_bytes == (6 * ROWS - rows) * TENSORS * cache.layout.row_bytes
        for length in range(prompt + 1, 4 * ROWS + 1):
            step_to(length, 0, 0)
        assert cache.snapshot()[0].granted_pages == 4, "decoding needs no rows past the length"
        step_to(4 * ROWS + 1, 0, 0)
        assert cache.snapshot()[0].granted_pages == 5
        step_to(0, PREFILL_TOKENS + 1, 0)
        assert cache.snapshot()[1].granted_pages == 4, "17 tokens need 11 rows past them"
        step_to(0, cache.config.max_seq_len, 0)
        assert cache.snapshot()[1].granted_pages == 6, "not beyond the slot's end"


def test_a_chunk_needs_overread_rows(context: Context) -> None:
    with small_cache(context, overread_rows=20, growth_fraction=0.0) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=17)) == 0
        assert cache.snapshot()[0].granted_pages == 5
        assert cache.step(lens(cache, r0=34)) == 0
        assert cache.snapshot()[0].granted_pages == 6


def test_a_prefill_needs_memory_for_overread_rows(context: Context) -> None:
    page = context.info.granule
    limit = 5 * TENSORS * page
    with small_cache(context, overread_rows=ROWS, memory_limit=limit) as cache:
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=ROWS + 1)) == 0  # too short to need overread rows
        assert cache.can_admit([PREFILL_TOKENS])
        assert cache.step(lens(cache, r1=3 * ROWS - 3)) == -1, "3 pages and a tile"
        assert not cache.can_admit([3 * ROWS - 3])
        assert cache.step(lens(cache, r1=2 * ROWS)) == 0
        assert cache.step(lens(cache, r1=3 * ROWS)) == 0
        assert cache.snapshot()[1].granted_pages == 3
        cache.check_integrity()


# ---- out of memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_shortage_is_minus_one_and_changes_nothing(context: Context, ahead: bool) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=5 * TENSORS * page) as cache:
        step = cache.step_async if ahead else cache.step
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS, r1=2 * ROWS)) == 0
        assert cache.memory.num_free_pages == TENSORS
        before = state(cache)
        assert step(lens(cache, r0=3 * ROWS, r1=3 * ROWS)) == -1
        assert state(cache) == before
        assert cache.stats().short == 1
        assert step(lens(cache, r0=3 * ROWS, r1=2 * ROWS)) == 0
        assert cache.memory.num_free_pages == 0, "step_async reserves the pages immediately, too"
        assert cache.step(lens(cache, r0=3 * ROWS, r1=2 * ROWS)) == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_shortage_of_the_shared_context(backend: str, ahead: bool) -> None:
    """Hits the context's own limit, which pages outside the cache also count against."""
    with Context(backend) as context:
        page, slab = context.info.granule, context.info.slab_size
    limit = max(slab, 64 * page)
    with Context(backend, mem_limit=limit) as context:
        other = context.create(limit - 2 * TENSORS * page)
        with small_cache(context, memory_limit=limit) as cache:
            step = cache.step_async if ahead else cache.step
            cache.alloc_reqid()
            assert cache.step(lens(cache, r0=2 * ROWS)) == 0
            before = state(cache)
            assert step(lens(cache, r0=3 * ROWS)) == -1
            assert state(cache) == before
            other.release()
            assert step(lens(cache, r0=3 * ROWS)) == 0
            assert cache.step(lens(cache, r0=3 * ROWS)) == 0


def test_pages_of_free_slots_are_reclaimed_for_a_step(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=6 * TENSORS * page) as cache:
        for _ in range(3):
            cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS, r1=2 * ROWS, r2=2 * ROWS)) == 0
        cache.free_reqid(0)
        cache.free_reqid(1)
        assert cache.stats().cached_pages == 4 * TENSORS
        assert cache.step(lens(cache, r2=5 * ROWS)) == 0
        assert [slot.mapped_pages for slot in cache.snapshot()] == [0, 1, 5, 0], "oldest first"
        assert cache.stats().reclaimed_pages == 3 * TENSORS
        assert cache.step(lens(cache, r2=6 * ROWS)) == 0
        assert cache.memory.num_free_pages == 0


def test_leftovers_of_an_active_slot_are_reclaimed(context: Context) -> None:
    """A small request in a slot with many pages keeps only the pages that it owns."""
    page = context.info.granule
    with small_cache(context, memory_limit=6 * TENSORS * page, max_batch=2) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=5 * ROWS)) == 0
        cache.alloc_reqid()
        cache.free_reqid(0)
        assert cache.alloc_reqid(5 * ROWS) == 0
        assert cache.step(lens(cache, r0=ROWS, r1=3 * ROWS)) == 0
        assert [slot.mapped_pages for slot in cache.snapshot()] == [3, 3]
        assert [slot.granted_pages for slot in cache.snapshot()] == [1, 3]
        before = state(cache)
        assert cache.step(lens(cache, r0=ROWS, r1=6 * ROWS)) == -1
        assert state(cache) == before


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1, 0, 0], r"len\(seq_lens\) is 3; it must be max_batch, 4"),
        ([1, 0, 0, 0, 0], r"len\(seq_lens\) is 5; it must be max_batch, 4"),
        ([1, -2, 0, 0], r"seq_lens\[1\] is -2"),
        ([1, 0, 7, 0], r"seq_lens\[2\] is 7, but reqid 2 is not taken: call alloc_reqid"),
        ([6 * ROWS + 1, 0, 0, 0], rf"seq_lens\[0\] is {6 * ROWS + 1}; max_seq_len is {6 * ROWS}"),
        ([1.5, 0, 0, 0], "whole numbers"),
        (["1", 0, 0, 0], "whole numbers"),
        ([None, 0, 0, 0], "whole numbers"),
        ([1 << 70, 0, 0, 0], "max_seq_len"),
        (5, "must be a sequence of whole numbers, not 5 of type int"),
        (None, "must be a sequence of whole numbers, not None of type NoneType"),
    ],
)
def test_bad_lengths(context: Context, numbers: Any, text: str) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3)) == 0
        before = state(cache)
        for call in (cache.step, cache.step_async):
            with pytest.raises(InvalidArgument, match=text):
                call(numbers)
        assert state(cache) == before


@pytest.mark.parametrize("reqid", [-1, 4, 1 << 70])
def test_free_of_an_invalid_reqid(context: Context, reqid: int) -> None:
    with small_cache(context) as cache:
        before = state(cache)
        with pytest.raises(
            InvalidArgument, match=f"reqid {reqid} is not between 0 and 3"
        ) as caught:
            cache.free_reqid(reqid)
        assert caught.value.limit == 3
        assert caught.value.errno_name == "EINVAL"
        assert state(cache) == before


def test_double_free(context: Context) -> None:
    with small_cache(context) as cache:
        with pytest.raises(InvalidArgument, match="reqid 0 is not taken"):
            cache.free_reqid(0)
        cache.alloc_reqid()
        cache.free_reqid(0)
        with pytest.raises(InvalidArgument, match="reqid 0 is not taken"):
            cache.free_reqid(0)


@pytest.mark.parametrize("length", [-1, 6 * ROWS + 1])
def test_alloc_of_a_bad_length(context: Context, length: int) -> None:
    with small_cache(context) as cache:
        before = state(cache)
        with pytest.raises(
            InvalidArgument, match=f"seq_len {length} is not between 0 and max_seq_len"
        ):
            cache.alloc_reqid(length)
        assert state(cache) == before


def test_no_slot_is_free(context: Context) -> None:
    with small_cache(context) as cache:
        assert sorted(cache.alloc_reqid() for _ in range(4)) == [0, 1, 2, 3]
        assert cache.alloc_reqid() is None
        cache.free_reqid(2)
        assert cache.alloc_reqid() == 2


@needs_tensors
@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_does_not_exist(context: Context, layer: int) -> None:
    with small_cache(context) as cache:
        for view in (cache.k, cache.v):
            with pytest.raises(InvalidArgument, match=f"layer {layer} is not between 0 and 1"):
                view(layer)


def test_lengths_of_other_types(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        for pages, numbers in enumerate(
            [
                (ROWS, 0, 0, 0),
                array.array("q", [2 * ROWS, 0, 0, 0]),
                torch.tensor([3 * ROWS, 0, 0, 0]),
                [torch.tensor(4 * ROWS), 0, 0, 0],
            ],
            start=1,
        ):
            assert cache.step(numbers) == 0  # type: ignore[arg-type]
            assert cache.snapshot()[0].granted_pages == pages
            assert cache.snapshot()[0].seq_len == pages * ROWS


def test_the_callers_list_is_copied(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        numbers = lens(cache, r0=3)
        assert cache.step(numbers) == 0
        numbers[0] = 40
        assert cache.snapshot()[0].seq_len == 3
        cache.free_reqid(0)
        assert cache.stats().used_bytes == 0
        assert numbers[0] == 40


# ---- ahead of time ------------------------------------------------------------------------------


def test_step_async_maps_for_the_next_step(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        for length in range(1, 6 * ROWS, 5):
            assert cache.step_async(lens(cache, r0=length)) == 0
            pages = -(-length // ROWS)
            assert cache.snapshot()[0].mapped_pages == pages, "promised"
            assert cache.step(lens(cache, r0=length)) == 0
            assert cache.snapshot()[0].granted_pages == pages
            stamp(cache, 0, max(0, length - 5), length, float(length))
        stats = cache.stats()
        assert (stats.steps, stats.steps_async) == (10, 10)
        assert rows_are(cache, 0, 0, 1, 1.0)
        assert rows_are(cache, 0, 1, 6, 6.0)


def test_step_async_twice_and_more_than_promised(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step_async(lens(cache, r0=ROWS)) == 0
        assert cache.step_async(lens(cache, r0=ROWS)) == 0
        assert cache.snapshot()[0].mapped_pages == 1
        assert cache.stats().waits == 0, "step_async does not wait for promised pages"
        assert cache.step_async(lens(cache, r0=2 * ROWS)) == 0
        eventually(lambda: cache.slots.is_ready(0, ROWS))
        assert cache.step_async(lens(cache, r0=2 * ROWS)) == 0, (
            "pages that are not in flight are mapped later"
        )
        assert cache.snapshot()[0].mapped_pages == 2
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0
        assert cache.snapshot()[0].granted_pages == 4
        cache.alloc_reqid()
        assert cache.step_async(lens(cache, r0=5 * ROWS)) == 0
        assert cache.step_async(lens(cache, r0=5 * ROWS, r1=1)) == 0
        assert cache.step(lens(cache, r0=5 * ROWS, r1=1)) == 0
        assert [slot.granted_pages for slot in cache.snapshot()] == [5, 1, 0, 0]


def test_free_before_promised_pages_are_mapped(context: Context) -> None:
    with small_cache(context) as cache:
        for _ in range(20):
            cache.alloc_reqid(4 * ROWS)
            assert cache.step_async(lens(cache, r0=4 * ROWS)) == 0
            cache.free_reqid(0)
            assert cache.step(lens(cache)) == 0
            slot = cache.snapshot()[0]
            assert (slot.state, slot.mapped_pages, slot.granted_pages) == ("cached", 4, 0)
            assert cache.stats().active_pages == 0


def test_the_next_owner_does_not_get_promised_pages(context: Context) -> None:
    with small_cache(context, max_batch=1) as cache:
        cache.alloc_reqid()
        assert cache.step_async([4 * ROWS]) == 0
        cache.free_reqid(0)
        assert cache.alloc_reqid() == 0
        assert cache.step([1]) == 0
        assert cache.snapshot()[0].granted_pages == 1
        assert cache.stats().active_pages == TENSORS


def test_pages_mapped_one_by_one_join_into_runs(host: Context) -> None:
    """Requests grow in turn; each new page of a request is adjacent to its previous one."""
    with small_cache(host) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([1] * 4) == 0
        runs = cache.stats().segments
        for pages in range(2, 7):
            for reqid in range(4):
                numbers = [pages * ROWS if r <= reqid else (pages - 1) * ROWS for r in range(4)]
                assert cache.step(numbers) == 0
        assert cache.stats().active_pages == 4 * 6 * TENSORS
        assert cache.stats().segments <= runs


# ---- reports ------------------------------------------------------------------------------------


def test_stats(context: Context) -> None:
    page = context.info.granule
    with small_cache(context) as cache:
        row = cache.layout.row_bytes
        assert cache.stats().mapped_bytes == cache.stats().driver_calls == 0
        a = cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=ROWS + 1, r1=1)) == 0
        now = cache.stats()
        assert now.total_pages == 64 * TENSORS
        assert now.free_pages == cache.memory.num_free_pages == 61 * TENSORS
        assert (now.active_pages, now.cached_pages) == (3 * TENSORS, 0)
        assert now.mapped_bytes == now.peak_mapped_bytes == 3 * TENSORS * page
        assert now.used_bytes == now.peak_used_bytes == (ROWS + 2) * row * TENSORS
        assert now.wasted_bytes == now.mapped_bytes - now.used_bytes == now.peak_wasted_bytes
        assert now.segments >= TENSORS
        assert now.segments == context.query(cache.reservation.addr).segments
        assert (now.active_slots, now.cached_slots, now.empty_slots, now.broken_slots) == (
            2,
            0,
            2,
            0,
        )
        one_call = pyvmem.Caps.ONE_CALL in context.info.caps
        assert now.driver_calls >= (1 if one_call else TENSORS)
        assert now.driver_ns >= now.critical_driver_ns > 0
        assert now.background_driver_ns == now.driver_ns - now.critical_driver_ns
        assert now.waits == 1
        assert now.wait_ns == now.last_wait_ns >= now.critical_driver_ns
        assert a is not None
        cache.free_reqid(a)
        later = cache.stats()
        assert (later.active_pages, later.cached_pages) == (TENSORS, 2 * TENSORS)
        assert later.used_bytes == row * TENSORS
        assert later.peak_used_bytes == now.used_bytes
        assert (later.active_slots, later.cached_slots, later.empty_slots) == (1, 1, 2)
        assert cache.step(lens(cache, r1=2)) == 0
        assert cache.stats().last_wait_ns == 0, "nothing was missing"
        assert cache.stats().steps == 2


def test_time_in_the_background_is_not_critical(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step_async(lens(cache, r0=6 * ROWS)) == 0
        eventually(lambda: not cache.snapshot()[0].in_flight)
        assert cache.step(lens(cache, r0=6 * ROWS)) == 0
        stats = cache.stats()
        assert stats.waits == stats.wait_ns == stats.critical_driver_ns == 0
        assert stats.background_driver_ns == stats.driver_ns > 0


def test_snapshot(context: Context) -> None:
    with small_cache(context) as cache:
        for _ in range(3):
            cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1, r1=2 * ROWS)) == 0
        cache.free_reqid(1)
        now = cache.snapshot()
        assert [slot.reqid for slot in now] == [0, 1, 2, 3]
        assert [slot.state for slot in now] == ["active", "cached", "active", "empty"]
        assert [slot.seq_len for slot in now] == [1, 0, 0, 0]
        assert [slot.granted_pages for slot in now] == [1, 0, 0, 0]
        assert [slot.mapped_pages for slot in now] == [1, 2, 0, 0]


def test_integrity_check_finds_a_missing_page(context: Context) -> None:
    page = context.info.granule
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        address = cache.reservation.addr + cache.layout.offset(0, 1, 2)
        pages = context.retain(address, page)
        context.unmap(address, page)
        with pytest.raises(IntegrityError, match="page 1: expected mapped, found not"):
            cache.check_integrity()
        context.map(address, page, pages)
        pages.drop()
        cache.check_integrity()


def test_integrity_check_finds_an_extra_page(context: Context) -> None:
    page = context.info.granule
    with small_cache(context) as cache:
        address = cache.reservation.addr + cache.layout.offset(3, 2, 1)
        pages = context.create(page)
        context.map(address, page, pages)
        with pytest.raises(
            IntegrityError, match="page 2: expected not mapped, found mapped"
        ) as caught:
            cache.check_integrity()
        assert len(caught.value.found) == 1
        pages.release()


# ---- end ----------------------------------------------------------------------------------------


def test_memory_is_freed_by_close(context: Context) -> None:
    with small_cache(context) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([6 * ROWS] * 4) == 0
        cache.free_reqid(1)
        assert context.stats().used_bytes == 24 * TENSORS * context.info.granule
    stats = context.stats()
    assert stats.used_bytes == stats.mapped_bytes == stats.reserved_bytes == 0
    assert context.is_open


def test_an_owned_context_is_closed(backend: str) -> None:
    cache = KVCache(small_config(2 << 20), backend=backend)
    context = cache.context
    cache.alloc_reqid()
    assert cache.step(lens(cache, r0=1)) == 0
    assert cache.stats().mapped_bytes == TENSORS * (2 << 20)
    cache.close()
    cache.close()
    assert not context.is_open


def test_use_after_close(context: Context) -> None:
    cache = KVCache(small_config(context.info.granule), context)
    cache.close()
    for call in (
        lambda: cache.alloc_reqid(),
        lambda: cache.free_reqid(0),
        lambda: cache.step([0] * 4),
        lambda: cache.step_async([0] * 4),
        lambda: cache.k(0),
        lambda: cache.v(0),
        lambda: cache.tensors,
        lambda: cache.stats(),
        lambda: cache.snapshot(),
        lambda: cache.memory.num_free_pages,
        lambda: cache.check_integrity(),
    ):
        with pytest.raises(BadHandle, match="the KVCache is closed"):
            call()


def test_use_after_the_context_was_closed(backend: str) -> None:
    context = Context(backend)
    cache = KVCache(small_config(context.info.granule), context)
    context.close()
    with pytest.raises(BadHandle):
        cache.step([0] * 4)
    cache.close()


@needs_tensors
def test_close_with_a_live_tensor(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        stamp(cache, 0, 0, 1, 3.0)
        view = cache.k(0)[0, :1]
        before = state(cache)
        with pytest.raises(Busy, match="the cache has 1 live tensor: drop every"):
            cache.close()
        assert state(cache) == before
        assert rows_are(cache, 0, 0, 1, 3.0)
        assert cache.step(lens(cache, r0=ROWS + 1)) == 0
        del view
        gc.collect()


def _warnings_of(work: Callable[[], object]) -> list[str]:
    """Returns the warnings issued when the objects that `work` leaks are collected."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
        for _ in range(3):  # several passes, because a caught warning keeps its source alive
            gc.collect()
            texts.extend(str(one.message) for one in caught)
            caught.clear()
    return texts


@needs_tensors
def test_an_error_in_the_block_is_not_hidden_by_its_tensors(context: Context) -> None:
    def work() -> None:
        with small_cache(context) as cache:
            cache.alloc_reqid()
            assert cache.step(lens(cache, r0=1)) == 0
            view = cache.k(0)
            raise KeyError(view.shape)

    def fail() -> None:
        with pytest.raises(KeyError):
            work()

    assert "KVCache was not closed" in _warnings_of(fail)


def test_close_while_the_worker_maps(context: Context) -> None:
    for _ in range(10):
        cache = KVCache(small_config(context.info.granule), context)
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step_async([6 * ROWS] * 4) == 0
        cache.close()
        assert context.stats().used_bytes == 0


def test_an_engine_that_fails_between_step_and_forward(context: Context) -> None:
    """A request owns the pages that its step mapped; once it is freed, the next request reads
    zeros.
    """
    with small_cache(context) as cache:
        assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
        assert cache.step(lens(cache, r0=ROWS, r1=ROWS)) == 0
        stamp(cache, 1, 0, ROWS, 3.0)
        with pytest.raises(RuntimeError, match="of the engine"):
            cache.step(lens(cache, r0=3 * ROWS, r1=2 * ROWS))
            stamp(cache, 0, 0, 2 * ROWS, 5.0)
            cache.step_async(lens(cache, r0=4 * ROWS, r1=2 * ROWS))
            raise RuntimeError("of the engine")
        cache.check_integrity()
        cache.free_reqid(0)
        assert cache.step(lens(cache, r1=ROWS)) == 0, "the other request steps back and continues"
        assert rows_are(cache, 1, 0, ROWS, 3.0)
        assert cache.alloc_reqid(4 * ROWS) == 0
        assert cache.step(lens(cache, r0=4 * ROWS, r1=2 * ROWS)) == 0
        assert rows_are_zero(cache, 0, 0, 4 * ROWS)
        assert rows_are_zero(cache, 1, ROWS, 2 * ROWS)


def test_a_forgotten_cache_warns(context: Context) -> None:
    config = small_config(context.info.granule)
    assert "KVCache was not closed" in _warnings_of(lambda: KVCache(config, context).alloc_reqid())


def test_in_a_forked_child(context: Context) -> None:
    if context.info.backend != "host":
        pytest.skip("a process that uses CUDA cannot be forked")
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        child = os.fork()
        if child == 0:
            status = 1
            try:
                cache.step(lens(cache, r0=1))
            except pyvmem.ForkedProcess:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0


def test_a_cache_is_limited_by_its_context() -> None:
    page = 4096
    with (
        Context("host", granule=page, mem_limit=16 * page) as context,
        KVCache(small_config(page, memory_limit=0), context) as cache,
    ):
        assert context.mem_limit == 16 * page
        assert cache.stats().total_pages == 16
        assert cache.can_admit([4 * ROWS])
        assert not cache.can_admit([5 * ROWS])
        reqid = cache.alloc_reqid()
        assert cache.step_async(lens(cache, **{f"r{reqid}": 5 * ROWS})) == -1
        assert cache.step(lens(cache, **{f"r{reqid}": 4 * ROWS})) == 0
