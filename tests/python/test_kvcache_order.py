# SPDX-License-Identifier: MIT
"""Tests how a KVCache reuses pages between requests, and when it waits for GPU work.

On every back end, an FdEvent stands in for GPU work: no page that the work may access changes until
the event fires.
"""

from __future__ import annotations

from typing import Any

import pytest
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
    stamp,
)

from pyvmem import Context, FdEvent
from pyvmem.kvcache import KVCache, growth

needs_tensors = pytest.mark.needs_tensors
TENSORS = 2 * LAYERS
NAN = float("nan")


# ---- order relative to GPU work ------------------------------------------------------------------


@needs_tensors
def test_pages_are_not_unmapped_before_the_work_is_over(context: Context) -> None:
    with small_cache(context, deferred_reclaim=False) as cache, pending() as work:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        stamp(cache, 0, 0, 2 * ROWS, 4.0)
        free = cache.memory.num_free_pages
        cache.free_reqid(0, work)
        for _ in range(20):
            assert cache.step(lens(cache)) == 0
            assert rows_are(cache, 0, 0, 2 * ROWS, 4.0)
            assert cache.memory.num_free_pages == free
        cache.check_integrity()
        assert cache.snapshot()[0].in_flight
        work.set()
        eventually(lambda: cache.memory.num_free_pages == free + 2 * TENSORS)
        assert cache.snapshot()[0].state == "empty"
        assert not context.query(cache.reservation.addr).mapped


@needs_tensors
def test_pages_are_not_zeroed_before_the_work_is_over(context: Context) -> None:
    with small_cache(context, max_batch=1) as cache, pending() as work:
        cache.alloc_reqid()
        assert cache.step([2 * ROWS]) == 0
        stamp(cache, 0, 0, 2 * ROWS, 4.0)
        cache.free_reqid(0, work)
        assert cache.alloc_reqid() == 0
        assert cache.step_async([2 * ROWS]) == 0
        for _ in range(20):
            assert rows_are(cache, 0, 0, 2 * ROWS, 4.0)
        cache.check_integrity()
        with firing_later(work) as fired:
            assert cache.step([2 * ROWS]) == 0
            assert fired, "step returned before the pages could be zeroed"
        assert rows_are_zero(cache, 0, 0, 2 * ROWS)
        assert cache.stats().last_wait_ns > 0


@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_reused_slot_is_not_handed_over_before_the_work_is_over(
    context: Context, zero_fill: bool
) -> None:
    with (
        small_cache(context, max_batch=1, zero_fill=zero_fill) as cache,
        pending() as work,
    ):
        cache.alloc_reqid()
        assert cache.step([ROWS]) == 0
        stamp(cache, 0, 0, ROWS, 4.0)
        cache.free_reqid(0, work)
        assert cache.alloc_reqid() == 0
        with firing_later(work) as fired:
            assert cache.step([ROWS]) == 0
            assert fired
        assert rows_are_zero(cache, 0, 0, ROWS) == zero_fill
        assert rows_are(cache, 0, 0, ROWS, 4.0) != zero_fill


def test_growth_beyond_used_pages_need_not_wait(context: Context) -> None:
    """A slot's new pages have no earlier owner; only its reused pages must wait for the earlier
    owner's work.
    """
    with small_cache(context, max_batch=2) as cache, pending() as work:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=ROWS)) == 0
        cache.free_reqid(0, work)
        other = cache.alloc_reqid(6 * ROWS)
        assert other == 0
        fresh = cache.alloc_reqid()
        assert fresh == 1
        assert cache.step(lens(cache, r1=3 * ROWS)) == 0, "a step of another slot does not wait"
        assert rows_are_zero(cache, 1, 0, 3 * ROWS)
        work.set()
        assert cache.step(lens(cache, r0=2 * ROWS, r1=3 * ROWS)) == 0


@pytest.mark.needs_tensors
def test_only_steps_that_need_pages_mapped_ahead_wait_for_them(context: Context) -> None:
    with small_cache(context, max_batch=2) as cache, pending() as work:
        assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
        assert cache.step(lens(cache, r0=ROWS, r1=2 * ROWS)) == 0
        stamp(cache, 1, 0, 2 * ROWS, 4.0)
        cache.free_reqid(1, work)
        assert cache.alloc_reqid() == 1
        assert cache.step_async(lens(cache, r0=ROWS, r1=2 * ROWS)) == 0
        assert cache.step(lens(cache, r0=ROWS)) == 0, "its pages are mapped already"
        assert cache.snapshot()[1].in_flight
        assert rows_are(cache, 1, 0, 2 * ROWS, 4.0)
        with firing_later(work) as fired:
            assert cache.step(lens(cache, r0=ROWS, r1=1)) == 0
            assert fired, "step returned before the pages could be zeroed"
        assert rows_are_zero(cache, 1, 0, 2 * ROWS)


def test_a_step_that_maps_pages_does_not_wait_for_others(context: Context) -> None:
    with small_cache(context, max_batch=2) as cache, pending() as work:
        assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
        assert cache.step(lens(cache, r0=ROWS, r1=2 * ROWS)) == 0
        cache.free_reqid(1, work)
        assert cache.alloc_reqid() == 1
        assert cache.step_async(lens(cache, r0=ROWS, r1=2 * ROWS)) == 0
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        assert cache.snapshot()[0].granted_pages == 2
        assert cache.snapshot()[1].in_flight


def test_the_callers_event_may_be_closed_at_once(context: Context) -> None:
    with small_cache(context, max_batch=1, deferred_reclaim=False) as cache:
        for _ in range(3):
            cache.alloc_reqid()
            assert cache.step([ROWS]) == 0
            work = FdEvent.create()
            cache.free_reqid(0, work)
            work.set()
            work.close()
            eventually(lambda: cache.stats().mapped_bytes == 0)


def test_the_work_of_the_owner_before_last_still_counts(context: Context) -> None:
    """The first owner's work is still running even though the second owner's has completed."""
    with (
        small_cache(context, max_batch=1, zero_fill=False) as cache,
        pending() as first,
        pending() as second,
    ):
        cache.alloc_reqid()
        assert cache.step([ROWS]) == 0
        cache.free_reqid(0, first)
        cache.alloc_reqid()
        second.set()
        cache.free_reqid(0, second)
        cache.alloc_reqid()
        with firing_later(first) as fired:
            assert cache.step([ROWS]) == 0
            assert fired


def test_a_growth_finished_by_another_call_leaves_no_work_to_a_stream(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call is not given a stream, and the next step may use any stream."""
    devices = []
    monkeypatch.setattr(growth, "order_after", lambda event, stream, on: devices.append(on))
    with (
        small_cache(context, max_batch=1, zero_fill=False) as cache,
        pending() as first,
    ):
        cache.alloc_reqid()
        assert cache.step([ROWS]) == 0
        cache.free_reqid(0, first)
        cache.alloc_reqid()
        assert cache.step_async([ROWS]) == 0
        group = cache._groups[0]
        monkeypatch.setattr(group.mover, "device", 0)
        group.pager.release(group.slot(0))
        monkeypatch.undo()
        first.set()
        assert devices == [None]


def test_a_step_short_of_memory_waits_for_the_work_on_freed_pages(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache, pending() as work:
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3 * ROWS, r1=ROWS)) == 0
        cache.free_reqid(0, work)
        with firing_later(work) as fired:
            assert cache.step(lens(cache, r1=3 * ROWS)) == 0
            assert fired
        assert cache.stats().reclaimed_pages == 2 * TENSORS


def test_a_step_short_of_memory_uses_completed_slots_first(context: Context) -> None:
    """The slot freed first has work that never completes, but its pages are not needed."""
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache, pending() as endless:
        for _ in range(3):
            cache.alloc_reqid()
        assert cache.step(lens(cache, r0=ROWS, r1=2 * ROWS, r2=ROWS)) == 0
        cache.free_reqid(0, endless)
        cache.free_reqid(1)
        assert cache.step(lens(cache, r2=3 * ROWS)) == 0
        assert [slot.mapped_pages for slot in cache.snapshot()] == [1, 0, 3, 0]
        endless.set()


def test_reclaims_may_complete_in_any_order(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with (
        small_cache(context, memory_limit=limit, deferred_reclaim=False) as cache,
        pending() as endless,
        pending() as work,
    ):
        for _ in range(3):
            cache.alloc_reqid()
        assert cache.step(lens(cache, r0=ROWS, r1=2 * ROWS, r2=ROWS)) == 0
        cache.free_reqid(0, endless)
        cache.free_reqid(1, work)
        with firing_later(work) as fired:
            assert cache.step(lens(cache, r2=3 * ROWS)) == 0
            assert fired
        endless.set()


# ---- zeros --------------------------------------------------------------------------------------


def test_a_page_full_of_nan_is_zeroed_for_the_next_owner(context: Context) -> None:
    """Covers pages that are reused in their slot and pages that another slot gets from the pool."""
    limit = 3 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, max_batch=2) as cache:
        cache.alloc_reqid()
        assert cache.step([3 * ROWS, 0]) == 0
        stamp(cache, 0, 0, 3 * ROWS, NAN)
        cache.free_reqid(0)
        assert cache.alloc_reqid(3 * ROWS) == 0
        assert cache.step([ROWS, 0]) == 0
        assert rows_are_zero(cache, 0, 0, ROWS)
        assert not rows_are_zero(cache, 0, ROWS, 2 * ROWS), "rows not yet granted need not be zero"
        assert cache.step([ROWS + 1, 0]) == 0
        assert rows_are_zero(cache, 0, 0, 2 * ROWS)
        assert cache.alloc_reqid() == 1
        assert cache.step([ROWS + 1, ROWS]) == 0
        assert rows_are_zero(cache, 1, 0, ROWS)


def test_only_dirty_pages_are_zeroed(context: Context) -> None:
    with small_cache(context, max_batch=1) as cache:
        cache.alloc_reqid()
        assert cache.step([2 * ROWS]) == 0
        cache.free_reqid(0)
        cache.alloc_reqid()
        assert cache.step([ROWS]) == 0
        assert cache.stats().zeroed_pages == TENSORS
        assert cache.step([5 * ROWS]) == 0
        stats = cache.stats()
        assert stats.zeroed_pages == 2 * TENSORS
        assert stats.reused_pages == 2 * TENSORS
        assert stats.grown_pages == 5 * TENSORS
        cache.free_reqid(0)
        cache.alloc_reqid()
        cache.free_reqid(0)
        cache.alloc_reqid()
        assert cache.step([6 * ROWS]) == 0
        assert cache.stats().zeroed_pages == (2 + 5) * TENSORS


def test_growth_without_zero_fill_keeps_contents(context: Context) -> None:
    with small_cache(context, zero_fill=False) as cache:
        cache.alloc_reqid()
        for length in range(1, 6 * ROWS):
            assert cache.step(lens(cache, r0=length)) == 0
            stamp(cache, 0, length - 1, length, float(length))
        assert all(rows_are(cache, 0, n - 1, n, float(n)) for n in range(1, 6 * ROWS))
        assert cache.stats().zeroed_pages == 0


# ---- choice of slots and pages ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "best"),
    [(1, 1), (ROWS, 1), (ROWS + 1, 3), (3 * ROWS, 3), (4 * ROWS, 0), (5 * ROWS + 1, 0), (0, 1)],
)
def test_best_fit(context: Context, length: int, best: int) -> None:
    """Free slots have 5, 1, 0 and 3 pages: the smallest slot with enough pages is used, else the
    largest slot.
    """
    with small_cache(context) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([5 * ROWS, ROWS, 0, 3 * ROWS]) == 0
        for reqid in range(4):
            cache.free_reqid(reqid)
        assert cache.alloc_reqid(length) == best


def test_among_equal_fits_the_slot_freed_first_is_used(context: Context) -> None:
    """With this order, a reqid that an engine keeps by mistake is reused as late as possible."""
    with small_cache(context) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([ROWS] * 4) == 0
        for reqid in (2, 0, 3, 1):
            cache.free_reqid(reqid)
        assert [cache.alloc_reqid(ROWS) for _ in range(4)] == [2, 0, 3, 1]


def test_a_slot_with_enough_pages_maps_nothing(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0
        cache.free_reqid(0)
        grown = cache.stats().grown_pages
        assert cache.alloc_reqid(4 * ROWS) == 0
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0
        assert cache.stats().grown_pages == grown


def test_eager_pages_are_ready_for_the_next_request(context: Context) -> None:
    with small_cache(context, eager_pages=2) as cache:
        for expected in range(3):
            prepared = [slot.mapped_pages for slot in cache.snapshot() if slot.state != "active"]
            assert sorted(prepared)[-1] == 2, "one free slot has its pages mapped or in flight"
            eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
            reqid = cache.alloc_reqid()
            assert reqid == expected
            waits = cache.stats().waits
            want = [2 * ROWS if r <= expected else 0 for r in range(4)]
            assert cache.step(want) == 0
            assert cache.stats().waits == waits, "nothing had to be mapped"
            assert cache.snapshot()[reqid].granted_pages == 2
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        assert cache.stats().grown_pages == 4 * 2 * TENSORS


def test_eager_pages_are_mapped_after_pages_that_requests_wait_for(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, work, calls = context.submit, FdEvent.create(), 0

    def slow(ops: Any, after: Any = (), *rest: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return submit(ops, [*after, work], *rest, **options)

    def prepared(cache: KVCache) -> bool:
        return any(slot.mapped_pages == 2 for slot in cache.snapshot() if slot.state != "active")

    with small_cache(context, eager_pages=2) as cache:
        assert prepared(cache)
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        with monkeypatch.context() as patch:
            patch.setattr(context, "submit", slow)
            try:
                reqid = cache.alloc_reqid(3 * ROWS)
                assert reqid is not None
                assert cache.step_async(lens(cache, **{f"r{reqid}": 3 * ROWS})) == 0
                begun = calls
                assert begun > 0
                other = cache.alloc_reqid(ROWS)
                assert other is not None
                assert calls == begun, "only the request's own pages are in flight"
            finally:
                work.set()
        eventually(lambda: cache.slots.is_ready(reqid, 3 * ROWS))
        both = lens(cache, **{f"r{reqid}": 3 * ROWS, f"r{other}": ROWS})
        eventually(lambda: cache.step(both) == 0 and prepared(cache))


def test_eager_pages_are_reclaimed_for_requests(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, eager_pages=2, memory_limit=limit) as cache:
        reqid = cache.alloc_reqid()
        assert reqid == 0
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0
        assert cache.memory.num_free_pages == 0
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0


def test_eager_without_deferred_reclaim(context: Context) -> None:
    with small_cache(context, eager_pages=1, deferred_reclaim=False) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([3 * ROWS] * 4) == 0
        for reqid in range(4):
            cache.free_reqid(reqid)
        eventually(lambda: cache.stats().mapped_bytes == TENSORS * context.info.granule)
        assert sorted(slot.mapped_pages for slot in cache.snapshot()) == [0, 0, 0, 1]


def test_without_deferred_reclaim_pages_are_unmapped_immediately(context: Context) -> None:
    with small_cache(context, deferred_reclaim=False) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        cache.free_reqid(0)
        eventually(lambda: cache.stats().mapped_bytes == 0)
        assert context.stats().used_bytes == 0
        assert cache.stats().reclaimed_pages == 3 * TENSORS


def test_pages_in_flight_are_unmapped_later(context: Context) -> None:
    """Deferred reclaim is off, and the slot is freed before its promised pages are mapped."""
    with small_cache(context, deferred_reclaim=False, max_batch=1) as cache:
        for _ in range(20):
            cache.alloc_reqid()
            assert cache.step_async([6 * ROWS]) == 0
            cache.free_reqid(0)
            eventually(lambda: cache.step([0]) == 0 and cache.stats().mapped_bytes == 0)


def test_watermark(context: Context) -> None:
    """When fewer than 4 of 16 pages are free, pages of the slot freed first are unmapped."""
    limit = 16 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, low_watermark=0.25) as cache:
        for _ in range(4):
            cache.alloc_reqid()
        assert cache.step([4 * ROWS, 4 * ROWS, 4 * ROWS, 0]) == 0
        cache.free_reqid(1)
        cache.free_reqid(0)
        assert cache.memory.num_free_pages == 4 * TENSORS, "not below it yet"
        assert cache.step([0, 0, 4 * ROWS, 3 * ROWS]) == 0
        eventually(lambda: cache.memory.num_free_pages == 4 * TENSORS)
        assert [slot.mapped_pages for slot in cache.snapshot()] == [4, 1, 4, 3]


def test_watermark_when_the_last_pages_are_freed(context: Context) -> None:
    limit = 8 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, low_watermark=0.5) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=6 * ROWS)) == 0
        assert cache.memory.num_free_pages == 2 * TENSORS
        cache.free_reqid(0)
        eventually(lambda: cache.memory.num_free_pages == 4 * TENSORS)
        assert cache.snapshot()[0].mapped_pages == 4


def test_pages_of_old_free_slots_are_unmapped_by_age(context: Context) -> None:
    with small_cache(context, reclaim_steps=3) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        cache.free_reqid(0)
        for _ in range(2):
            assert cache.step(lens(cache)) == 0
            assert cache.snapshot()[0].mapped_pages == 2
        assert cache.step(lens(cache)) == 0
        assert cache.snapshot()[0].mapped_pages == 0
        eventually(lambda: cache.stats().mapped_bytes == 0)


def test_pages_beyond_an_unmap_in_flight_can_be_reclaimed_too(context: Context) -> None:
    """The watermark has started to unmap one page of a free slot; a step needs all four."""
    page = context.info.granule
    limit = 4 * TENSORS * page
    with (
        small_cache(context, memory_limit=limit, low_watermark=0.25) as cache,
        pending() as work,
    ):
        assert cache.alloc_reqid() == 0
        assert cache.step(lens(cache, r0=4 * ROWS)) == 0
        cache.free_reqid(0, work)
        assert cache.step(lens(cache)) == 0
        assert cache.snapshot()[0].in_flight
        other = cache.alloc_reqid(6 * ROWS)
        if other == 0:  # the slot that has pages is the best fit; take a different one
            other = cache.alloc_reqid()
            cache.free_reqid(0, work)
        with firing_later(work):
            assert cache.step(lens(cache, **{f"r{other}": 4 * ROWS})) == 0
        assert cache.snapshot()[other].granted_pages == 4
