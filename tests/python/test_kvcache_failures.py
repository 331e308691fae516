# SPDX-License-Identifier: MIT
"""Checks that a KVCache stays consistent, whichever driver call fails."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    full_queue,
    lens,
    pending,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    state,
)

from pyvmem import (
    Caps,
    Context,
    DriverError,
    Inject,
    KVCache,
    NotRecoverable,
    VMemError,
)

TENSORS = 2 * LAYERS
DRIVER = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL


def test_a_failed_step_changes_nothing(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        before = state(cache)
        context.inject(Inject.MAP, skip=1)
        with pytest.raises(DriverError):
            cache.step(lens(cache, r0=6 * ROWS))
        assert state(cache) == before
        cache.check_integrity()
        assert cache.step(lens(cache, r0=6 * ROWS)) == 0


def test_a_failure_in_the_background_surfaces_at_the_next_step(context: Context) -> None:
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        stamp(cache, 0, 0, 1, 2.0)
        before = state(cache)
        context.inject(Inject.MAP, skip=1)
        assert cache.step_async(lens(cache, r0=6 * ROWS)) == 0
        with pytest.raises(DriverError):
            cache.step(lens(cache, r0=6 * ROWS))
        assert state(cache) == before
        cache.check_integrity()
        assert cache.step(lens(cache, r0=6 * ROWS)) == 0
        assert rows_are(cache, 0, 0, 1, 2.0)
        assert rows_are_zero(cache, 0, 1, 6 * ROWS)


def test_a_failed_reclaim_surfaces_at_the_next_step(context: Context) -> None:
    with small_cache(context, deferred_reclaim=False) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        context.inject(Inject.UNMAP, skip=1)
        cache.free_reqid(0)
        eventually(lambda: not cache.snapshot()[0].in_flight)
        assert cache.snapshot()[0].mapped_pages == 2, "the rollback mapped it again"
        cache.check_integrity()
        with pytest.raises(DriverError):
            cache.step(lens(cache))
        assert cache.step(lens(cache)) == 0, "once"
        cache.alloc_reqid()
        cache.free_reqid(0)
        eventually(lambda: cache.stats().mapped_bytes == 0)


def test_a_failed_reclaim_for_a_step_is_an_error_not_shortage(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3 * ROWS, r1=1)) == 0
        cache.free_reqid(0)
        before = state(cache)
        for ahead in (False, True):
            context.inject(Inject.UNMAP)
            if ahead:  # a step ahead only starts the reclaim; the error surfaces in the step
                assert cache.step_async(lens(cache, r1=4 * ROWS)) == 0
            with pytest.raises(DriverError):
                cache.step(lens(cache, r1=4 * ROWS))
            context.inject(Inject.UNMAP, count=0)
            assert state(cache) == before
        assert cache.step(lens(cache, r1=4 * ROWS)) == 0


def test_a_reclaim_that_cannot_be_rolled_back_costs_only_its_slot(backend: str) -> None:
    with (
        open_context(backend) as context,
        small_cache(context, deferred_reclaim=False) as cache,
    ):
        if Caps.ONE_CALL in context.info.caps:
            pytest.skip("a batch is one driver call: there is nothing to undo")
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        context.inject(Inject.MAP | Inject.UNMAP, skip=1, count=8)
        cache.free_reqid(0)
        eventually(lambda: not cache.snapshot()[0].in_flight)
        context.inject(DRIVER, count=0)
        with pytest.raises(NotRecoverable):
            cache.step(lens(cache))
        assert cache.snapshot()[0].state == "broken"
        cache.check_integrity()
        _still_works(cache)


def test_a_failed_fill_hands_nothing_over(context: Context) -> None:
    for wait in (False, True):
        with small_cache(context, max_batch=1) as cache, pending() as work:
            cache.alloc_reqid()
            assert cache.step([2 * ROWS]) == 0
            stamp(cache, 0, 0, 2 * ROWS, 3.0)
            cache.free_reqid(0, work if wait else None)
            cache.alloc_reqid()
            context.inject(Inject.FILL)
            assert cache.step_async([4 * ROWS]) == 0
            work.set()
            with pytest.raises(DriverError):
                cache.step([4 * ROWS])
            assert cache.snapshot()[0].granted_pages == 0
            cache.check_integrity()
            context.inject(Inject.FILL, count=0)
            assert cache.step([4 * ROWS]) == 0
            assert rows_are_zero(cache, 0, 0, 4 * ROWS)


def _engine(cache: KVCache, calls: list[Callable[[], object]]) -> None:
    """Appends the calls of an engine that grows requests, reuses slots and reclaims pages, both in
    the calling thread and in the background.
    """
    calls += [
        lambda: cache.alloc_reqid(ROWS),
        lambda: cache.alloc_reqid(ROWS),
        lambda: cache.step(_now(cache, {0: 2 * ROWS, 1: 1})),
        lambda: cache.step_async(_now(cache, {0: 3 * ROWS, 1: ROWS + 1})),
        lambda: cache.step(_now(cache, {0: 3 * ROWS, 1: ROWS + 1})),
        lambda: cache.free_reqid(0),
        lambda: cache.alloc_reqid(4 * ROWS),
        lambda: cache.step(_now(cache, {0: 4 * ROWS, 1: 2 * ROWS})),
        lambda: cache.free_reqid(0),
        lambda: cache.step_async(_now(cache, {1: 5 * ROWS})),
        lambda: cache.step(_now(cache, {1: 5 * ROWS})),
        lambda: cache.alloc_reqid(1),
        lambda: cache.step(_now(cache, {0: 1, 1: 5 * ROWS})),
        lambda: cache.free_reqid(1),
        lambda: cache.step(_now(cache, {})),
    ]


def _now(cache: KVCache, want: dict[int, int]) -> list[int]:
    """Returns the lengths for a step: those in `want` for the slots that are in use, else 0."""
    taken = {slot.reqid for slot in cache.snapshot() if slot.state == "active"}
    return [want.get(reqid, 0) if reqid in taken else 0 for reqid in range(cache.config.max_batch)]


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_every_driver_call_fails_once(backend: str, deferred: bool, count: int) -> None:
    """Fails the nth driver call and, if `count` is 2, also the next one, made by the rollback."""
    survived = False
    skip = 0
    while not survived:
        with open_context(backend) as context:
            limit = 7 * TENSORS * context.info.granule
            options = {"memory_limit": limit, "deferred_reclaim": deferred, "eager_pages": 1}
            with small_cache(context, **options, low_watermark=0.2) as cache:
                calls: list[Callable[[], object]] = []
                _engine(cache, calls)
                context.inject(DRIVER, skip=skip, count=count)
                survived = True
                for call in calls:
                    survived &= _survives(call)
                    cache.check_integrity()
                context.inject(DRIVER, count=0)
                eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
                survived &= not cache._groups[0].reclaimer.errors
                for _ in range(3):  # a step also raises failures of background work
                    survived &= _survives(lambda: cache.step(_now(cache, {})))
                _still_works(cache)
            assert context.stats().used_bytes == context.stats().quarantined_bytes or count == 2
        skip += 1
    assert skip > 20, "the run makes more driver calls than that"


def _survives(call: Callable[[], object]) -> bool:
    try:
        return call() != -1
    except VMemError:
        return False


def _still_works(cache: KVCache) -> None:
    """Checks that every slot that is not retired can be filled and read."""
    for slot in cache.snapshot():
        if slot.state == "active":
            cache.free_reqid(slot.reqid)
    whole = sum(slot.state != "broken" for slot in cache.snapshot())
    for _ in range(whole):
        reqid = cache.alloc_reqid(2 * ROWS)
        assert reqid is not None
        numbers = [0] * cache.config.max_batch
        numbers[reqid] = 2 * ROWS
        assert cache.step(numbers) == 0
        assert rows_are_zero(cache, reqid, 0, 2 * ROWS)
        stamp(cache, reqid, 0, 2 * ROWS, 1.0)
        assert rows_are(cache, reqid, 0, 2 * ROWS, 1.0)
        cache.free_reqid(reqid)


def test_a_failed_rollback_costs_only_its_slot(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        if Caps.ONE_CALL in context.info.caps:
            pytest.skip("a batch is one driver call: there is nothing to undo")
        cache.alloc_reqid()
        context.inject(Inject.MAP | Inject.UNMAP, skip=1, count=8)
        with pytest.raises(NotRecoverable):
            cache.step(lens(cache, r0=2 * ROWS))
        context.inject(DRIVER, count=0)
        cache.check_integrity()
        cache.free_reqid(0)
        assert [slot.state for slot in cache.snapshot()].count("broken") == 1
        assert cache.stats().broken_slots == 1
        _still_works(cache)


@pytest.mark.parametrize("ahead", [False, True])
def test_every_allocation_of_the_library_fails(backend: str, ahead: bool) -> None:
    """If libvmem's own heap allocations fail, a step retries once, then reports a shortage and
    changes nothing.
    """
    assert not any(_step_without_heap(backend, ahead, skip, 1) for skip in range(12))
    assert sum(_step_without_heap(backend, ahead, skip, 100) for skip in range(12)) >= 2


def _step_without_heap(backend: str, ahead: bool, skip: int, count: int) -> bool:
    with open_context(backend) as context, small_cache(context) as cache:
        step = cache.step_async if ahead else cache.step
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=1)) == 0
        before = state(cache)
        context.inject(Inject.HEAP, skip=skip, count=count, error=errno.ENOMEM)
        short = step(lens(cache, r0=6 * ROWS)) == -1
        context.inject(Inject.HEAP, count=0)
        if short:
            assert state(cache) == before
        assert step(lens(cache, r0=6 * ROWS)) == 0
        assert cache.step(lens(cache, r0=6 * ROWS)) == 0
        return short


def test_a_close_that_waits_can_be_interrupted_and_repeated(backend: str) -> None:
    """Work that never completes keeps its pages, but cannot block the program: a signal interrupts
    the wait.
    """

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    with open_context(backend) as context, pending() as endless:
        cache = KVCache(small_config(context.info.granule), context)
        try:
            assert cache.alloc_reqid() == 0
            assert cache.step([ROWS, 0, 0, 0]) == 0
            cache.free_reqid(0, endless)
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                cache.close()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert context.query(cache.reservation.addr).mapped, (
            "the page must stay mapped while work may access it"
        )
        endless.set()
        cache.close()
        assert context.stats().mapped_bytes == 0


def test_a_full_queue_is_not_a_memory_shortage(context: Context) -> None:
    """If the queue has no room for a batch, the calling thread unmaps the memory that it needs."""
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, max_batch=3) as cache:
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3 * ROWS, r1=1)) == 0
        stamp(cache, 1, 0, 1, 2.0)
        cache.free_reqid(0)
        with full_queue(context):
            context.inject(Inject.UNMAP)
            with pytest.raises(DriverError):
                cache.step(lens(cache, r1=4 * ROWS))
            cache.check_integrity()
            assert cache.snapshot()[0].mapped_pages == 3, "undone"
            assert cache.step(lens(cache, r1=4 * ROWS)) == 0
            assert rows_are(cache, 1, 0, 1, 2.0)
            assert rows_are_zero(cache, 1, 1, 4 * ROWS)
            assert cache.step(lens(cache, r1=4 * ROWS + 1)) == -1, "this is"


def test_a_full_queue_is_not_a_slot_shortage(context: Context) -> None:
    if Caps.ALIAS | Caps.READONLY not in context.info.caps:
        pytest.skip("requests cannot share pages")
    with small_cache(context, max_batch=2) as cache:
        for reqid in range(2):
            assert cache.alloc_reqid() == reqid
        assert cache.step(lens(cache, r0=2 * ROWS, r1=3 * ROWS)) == 0
        stamp(cache, 0, 0, 2 * ROWS, 2.0)
        stamp(cache, 1, 0, 3 * ROWS, 3.0)
        cache.free_reqid(1)
        with full_queue(context):
            assert cache.fork(0, 2 * ROWS) == 1
            assert rows_are(cache, 1, 0, 2 * ROWS, 2.0)
            cache.check_integrity()
            cache.free_reqid(1)  # the queue has no room to unmap its shared pages
            assert cache.alloc_reqid() == 1
            assert cache.step(lens(cache, r0=2 * ROWS, r1=1)) == 0
            assert rows_are_zero(cache, 1, 0, 1)
