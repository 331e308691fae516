# SPDX-License-Identifier: MIT
"""Tests `ahead_tokens`: a step starts mapping the pages that the next steps will need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    lens,
    pending,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    started,
)

from pyvmem import Context, FdEvent, Inject, OutOfMemory
from pyvmem.engine import Model, Policy
from pyvmem.engine.config import make_cache
from pyvmem.kvcache import Budget, KVCache, LayeredCache, LayerShape, StateShape

TENSORS = 2 * LAYERS
AHEAD = 3


@contextmanager
def stalling(context: Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FdEvent]]:
    """Delays each of the worker's batches until its event is set, like a stalled driver call."""
    calls: list[FdEvent] = []
    submit = context.submit

    def slow(ops: Any, after: Any = (), *rest: Any, **options: Any) -> Any:
        calls.append(FdEvent.create())
        return submit(ops, [*after, calls[-1]], *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(context, "submit", slow)
        try:
            yield calls
        finally:
            for call in calls:
                call.set()


def to(cache: KVCache, reqid: int, rows: int, tag: float = 1.0) -> None:
    """Decodes a request up to `rows` rows, one token per step; checks that each row is zero, then
    writes it.
    """
    low = cache.snapshot()[reqid].seq_len
    for row in range(low, rows):
        assert cache.step(lens(cache, **{f"r{reqid}": row + 1})) == 0
        assert rows_are_zero(cache, reqid, row, row + 1)
        stamp(cache, reqid, row, row + 1, tag)


def mapped(cache: KVCache, reqid: int) -> int:
    return cache.snapshot()[reqid].mapped_pages


def test_the_next_page_is_mapped_before_it_is_needed(context: Context) -> None:
    with small_cache(context, ahead_tokens=AHEAD, growth_fraction=0.0) as cache:
        reqid = started(cache, 1)
        to(cache, reqid, ROWS - AHEAD)
        assert mapped(cache, reqid) == 1
        assert cache.stats().ahead_pages == 0
        to(cache, reqid, ROWS - AHEAD + 1)
        assert mapped(cache, reqid) == 2
        assert cache.stats().ahead_pages == TENSORS
        assert cache.snapshot()[reqid].granted_pages == 1
        eventually(lambda: not cache.snapshot()[reqid].in_flight)
        cache.check_integrity()
        before, used = cache.stats(), cache.stats().active_pages
        to(cache, reqid, ROWS + 1)
        after = cache.stats()
        assert (after.waits, after.grown_pages) == (before.waits, before.grown_pages)
        assert after.reused_pages - before.reused_pages == TENSORS
        assert after.active_pages == used + TENSORS
        assert after.ahead_pages == 0
        assert rows_are(cache, reqid, 1, ROWS + 1, 1.0)


def test_by_default_nothing_is_mapped_ahead(context: Context) -> None:
    with small_cache(context, growth_fraction=0.0) as cache:
        reqid = started(cache, 1)
        to(cache, reqid, ROWS)
        assert mapped(cache, reqid) == 1
    assert Policy().ahead_tokens > 0
    shape = Model((LayerShape(num_kv_heads=1, head_dim=64),), "float32", 1024)
    with make_cache(shape, Policy(max_batch=2, memory=1 << 26), "host") as served:
        assert served.config.ahead_tokens == Policy().ahead_tokens


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_a_stalled_call_reaches_no_step_of_a_decode_run(
    context: Context, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Each of the worker's batches hangs for two steps. Without growth ahead, steps wait for the
    driver; with growth ahead, no step waits.
    """
    with small_cache(context, ahead_tokens=ahead, max_seq_len=20 * ROWS) as cache:
        one, two = started(cache, 1), started(cache, ROWS // 2)
        before = cache.stats()
        with stalling(context, monkeypatch) as calls:
            hung: list[list[FdEvent]] = [[], []]
            for row in range(1, 12 * ROWS):
                count = len(calls)
                want = {f"r{one}": row + 1, f"r{two}": row + ROWS // 2 + 1}
                assert cache.step(lens(cache, **want)) == 0
                assert rows_are_zero(cache, one, row, row + 1)
                stamp(cache, one, row, row + 1, 1.0)
                stamp(cache, two, row + ROWS // 2, row + ROWS // 2 + 1, 2.0)
                hung.append(calls[count:])
                for call in hung.pop(0):
                    call.set()
                eventually(
                    lambda: sum(slot.in_flight for slot in cache.snapshot()) <= sum(map(len, hung))
                )
            assert bool(calls) == bool(ahead)
        after = cache.stats()
        assert (after.waits == before.waits) == bool(ahead)
        assert after.grown_pages > before.grown_pages
        assert rows_are(cache, one, 1, 12 * ROWS, 1.0)


def test_a_step_waits_for_the_page_that_it_needs(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_cache(context, ahead_tokens=AHEAD, growth_fraction=0.0) as cache:
        reqid = started(cache, 1)
        with stalling(context, monkeypatch) as calls:
            to(cache, reqid, ROWS)
            (call,) = calls
            cache.check_integrity()
            waits = cache.stats().waits
            call.set()
            to(cache, reqid, ROWS + 1)
        assert cache.stats().waits in (waits, waits + 1)
        assert mapped(cache, reqid) == 2


def test_other_requests_are_not_held_up(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_cache(context, ahead_tokens=AHEAD) as cache:
        one, two = started(cache, 1), started(cache, 1)
        with stalling(context, monkeypatch) as calls:
            assert cache.step(lens(cache, **{f"r{one}": ROWS})) == 0
            assert len(calls) == 1
            assert cache.step(lens(cache, **{f"r{two}": 3 * ROWS})) == 0
            stamp(cache, two, 0, 3 * ROWS, 4.0)
        assert rows_are(cache, two, 0, 3 * ROWS, 4.0)


def test_only_requests_that_the_step_names_grow(context: Context) -> None:
    with small_cache(context, ahead_tokens=AHEAD, growth_fraction=0.0) as cache:
        one, two = started(cache, ROWS - AHEAD), started(cache, 1)
        assert cache.step(lens(cache, **{f"r{two}": 2})) == 0
        assert mapped(cache, one) == 1
        assert cache.step(lens(cache, **{f"r{one}": 1})) == 0
        assert mapped(cache, one) == 1, "its mapped page still has enough rows"
        assert cache.step(lens(cache, **{f"r{one}": ROWS - 1})) == 0
        assert cache.step(lens(cache, **{f"r{two}": 2})) == 0
        assert (mapped(cache, one), mapped(cache, two)) == (2, 1)


def test_nothing_is_mapped_past_the_longest_request(context: Context) -> None:
    with small_cache(context, ahead_tokens=ROWS, max_seq_len=2 * ROWS) as cache:
        reqid = started(cache, 2 * ROWS - 1)
        to(cache, reqid, 2 * ROWS)
        assert mapped(cache, reqid) == 2


@pytest.mark.parametrize("pages", [2, 3])
def test_growth_ahead_ignores_a_shortage_and_reclaims_nothing(context: Context, pages: int) -> None:
    """The free slot keeps its page until a step needs it."""
    limit = pages * TENSORS * context.info.granule
    with small_cache(context, ahead_tokens=AHEAD, memory_limit=limit, growth_fraction=0.0) as cache:
        other = started(cache, 1)
        reqid = started(cache, 1)
        cache.free_reqid(other)
        to(cache, reqid, ROWS)
        eventually(lambda: not cache.snapshot()[reqid].in_flight)
        assert cache.stats().reclaimed_pages == 0
        assert mapped(cache, reqid) == pages - 1
        assert cache.stats().short == 0
        to(cache, reqid, ROWS + 1)
        assert cache.step(lens(cache, **{f"r{reqid}": pages * ROWS})) == 0
        assert cache.step(lens(cache, **{f"r{reqid}": (pages + 1) * ROWS})) == -1


def test_the_watermark_is_kept(context: Context) -> None:
    limit = 8 * TENSORS * context.info.granule
    with small_cache(
        context, ahead_tokens=AHEAD, memory_limit=limit, low_watermark=0.5, growth_fraction=1.0
    ) as cache:
        one = started(cache, 3 * ROWS)
        want = lens(cache, **{f"r{one}": 3 * ROWS})
        assert cache.step(want) == 0
        eventually(lambda: not cache.snapshot()[one].in_flight)
        assert cache.stats().free_pages >= 4 * TENSORS


def test_another_request_gets_the_pages_when_memory_is_short(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, ahead_tokens=AHEAD, memory_limit=limit, growth_fraction=0.0) as cache:
        one, two = started(cache, ROWS, 1.0), started(cache, 1, 2.0)
        assert cache.step(lens(cache, **{f"r{one}": ROWS})) == 0
        assert mapped(cache, one) == 2
        assert cache.can_admit([2 * ROWS])
        assert cache.step(lens(cache, **{f"r{two}": 3 * ROWS})) == 0
        assert mapped(cache, one) == 1
        assert rows_are(cache, one, 0, ROWS, 1.0)
        assert cache.step(lens(cache, **{f"r{one}": ROWS + 1})) == -1


@pytest.mark.parametrize("kind", [Inject.MAP, Inject.SLAB])
def test_a_failure_ahead_is_not_reported(backend: str, kind: Inject) -> None:
    with (
        open_context(backend, pool_low=0) as context,
        small_cache(context, ahead_tokens=AHEAD, growth_fraction=0.0) as cache,
    ):
        reqid = started(cache, 1)
        context.inject(kind, count=1000, error=12)
        to(cache, reqid, ROWS)
        eventually(lambda: not cache.snapshot()[reqid].in_flight)
        context.inject(kind, count=0)
        to(cache, reqid, 2 * ROWS + 1)
        cache.check_integrity()


def test_a_full_queue_is_no_failure(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_cache(context, ahead_tokens=AHEAD) as cache:
        reqid = started(cache, 1)

        def full(*args: Any, **options: Any) -> Any:
            raise OutOfMemory("no room for another batch", errno=12, op="test")

        with monkeypatch.context() as patch:
            patch.setattr(context, "submit", full)
            to(cache, reqid, ROWS)
        assert mapped(cache, reqid) == 1
        to(cache, reqid, 3 * ROWS)


def test_a_request_freed_while_pages_are_in_flight(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_cache(context, ahead_tokens=AHEAD) as cache:
        reqid = started(cache, 1)
        with stalling(context, monkeypatch) as calls:
            to(cache, reqid, ROWS)
            assert calls
            cache.free_reqid(reqid)
            cache.check_integrity()
        again = started(cache, 3 * ROWS, 5.0)
        assert rows_are(cache, again, 0, 3 * ROWS, 5.0)


def test_windows_and_states(context: Context) -> None:
    """Sliding layers grow ahead too, but a state does not."""
    page = context.info.granule
    rows = page // (64 * 4)
    shapes = [
        LayerShape(num_kv_heads=1, head_dim=64),
        LayerShape(num_kv_heads=1, head_dim=64, window=rows),
        StateShape(conv=(40, 4), recurrent=(4, 20, 20)),
    ]
    with LayeredCache(
        shapes,
        context,
        dtype="float32",
        max_batch=2,
        max_seq_len=8 * rows,
        page_size=page,
        ahead_tokens=4,
        window_tile=1,
        growth_fraction=0.0,
        memory_limit=1 << 26,
    ) as cache:
        reqid = cache.alloc_reqid()
        assert reqid is not None
        for length in range(1, 6 * rows):
            want = lens(cache, **{f"r{reqid}": length})
            assert cache.step(want) == 0
            # A slot whose window is being unmapped does not grow ahead until the next step.
            for part in cache.caches:
                eventually(lambda part=part: not any(one.in_flight for one in part.snapshot()))
            if length % rows == rows - 1:
                for part in cache.caches:
                    if not part.config.state:
                        assert part.stats().ahead_pages == part.layout.num_tensors, length
                    else:
                        assert part.stats().ahead_pages == 0
        cache.check_integrity()


def test_growth_ahead_takes_nothing_from_other_caches(context: Context) -> None:
    page = context.info.granule
    budget = Budget(context, 4 * TENSORS * page)
    config = small_config(page, memory_limit=0, growth_fraction=0.0)
    eager = dataclasses.replace(config, ahead_tokens=AHEAD)
    with KVCache(eager, budget=budget) as cache, KVCache(config, budget=budget) as other:
        other.free_reqid(started(other, 2 * ROWS))
        reqid = started(cache, ROWS)
        assert cache.step(lens(cache, **{f"r{reqid}": ROWS})) == 0
        assert mapped(cache, reqid) == 2
        to(cache, reqid, 2 * ROWS)
        assert mapped(cache, reqid) == 2
        assert other.stats().reclaimed_pages == 0
        to(cache, reqid, 2 * ROWS + 1)
        assert other.stats().reclaimed_pages > 0


def test_step_async_with_growth_ahead(context: Context) -> None:
    with small_cache(context, ahead_tokens=AHEAD, max_seq_len=12 * ROWS) as cache, pending() as end:
        reqid = started(cache, 1)
        for row in range(1, 8 * ROWS):
            assert cache.step_async(lens(cache, **{f"r{reqid}": row + 4})) == 0
            to(cache, reqid, row + 1)
        end.set()
        assert rows_are(cache, reqid, 0, 8 * ROWS, 1.0)
