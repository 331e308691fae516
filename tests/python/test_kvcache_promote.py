# SPDX-License-Identifier: MIT
"""Checks that the full blocks of a running request get 2 MiB entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from kvcache_helpers import ROWS, eventually, firing_later, pending, small_cache, small_config
from move_helpers import (
    PART,
    TENSORS,
    UNIT,
    cache_over,
    in_pieces,
    in_slabs,
    lens,
    settled,
)
from share_helpers import grow, is_zero, start, whole

from pyvmem import Caps, Context, DriverError, FdEvent, Inject, KVCache, OpBatch
from pyvmem.kvcache import Budget, migration


@pytest.mark.parametrize("wait", [False, True])
def test_full_parts_get_large_entries(backend: str, wait: bool) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        rows = 2 * PART + 3
        one, two = in_pieces(cache, rows)
        assert cache.snapshot()[one].large_pages == 0
        held = cache.stats().mapped_bytes
        assert cache.promote(one, wait=wait) == 2
        if not wait:
            assert cache.snapshot()[one].moving_pages == 2 * UNIT
            assert cache.stats().moving_pages == 2 * UNIT * TENSORS
            assert cache.promote(one) == 2, "under way"
            cache.check_integrity()
            grow(cache, one, rows, rows + ROWS)
            settled(cache, one)
        assert cache.snapshot()[one].large_pages == 2 * UNIT
        assert cache.stats().promoted_pages == cache.stats().moved_pages == 2 * UNIT * TENSORS
        cache.check_integrity()
        assert whole(cache, one, rows)
        assert whole(cache, two, rows, 500)
        cache.step(lens(cache))
        size = cache.layout.page_size * TENSORS
        assert cache.stats().mapped_bytes == held + (0 if wait else size)
        assert cache.promote(one) == 0
        grow(cache, one, rows, rows + 2 * ROWS)
        assert whole(cache, one, rows)


def test_a_promotion_follows_the_writers_and_is_swapped_after_the_readers(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context) as cache,
        FdEvent.create() as writers,
        FdEvent.create() as readers,
    ):
        one, _ = in_pieces(cache, PART)
        assert cache.promote(one, stream=writers) == 1
        for _ in range(3):
            assert cache.step(lens(cache)) == 0, "promote does not wait for copies"
        assert cache.snapshot()[one].moving_pages == UNIT
        writers.set()
        eventually(lambda: cache._groups[0].mover.moves[cache._groups[0].table[one]].done())
        with firing_later(readers) as fired:
            assert cache.step(lens(cache), readers) == 0
            assert fired, "the pages were replaced under running work"
        assert cache.snapshot()[one].large_pages == UNIT
        assert whole(cache, one, PART)


def test_a_run_is_joined(backend: str) -> None:
    """Pages mapped one at a time are placed so that a join needs no copy."""
    with in_slabs(backend) as context, cache_over(context) as cache:
        reqid = start(cache, 2 * PART, by=ROWS)
        assert cache.snapshot()[reqid].large_pages == 0
        assert cache.promote(reqid) == 2
        assert cache.snapshot()[reqid].large_pages == 0, "at the next step"
        assert cache.stats().moving_pages == 0, "no page is copied"
        calls = context.stats().map_calls
        assert cache.step(lens(cache)) == 0
        assert context.stats().map_calls - calls == 2 * TENSORS
        assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        assert cache.stats().large_entries == 2 * TENSORS
        assert cache.stats().promoted_pages == 2 * UNIT * TENSORS
        assert cache.stats().moved_pages == 0
        assert cache.promote(reqid) == 0, "once"
        assert whole(cache, reqid, 2 * PART)


def test_a_misaligned_run_is_copied(backend: str) -> None:
    """The pages are adjacent, but not aligned to 2 MiB: a join cannot succeed, so they are
    copied.
    """
    with in_slabs(backend) as context, cache_over(context) as cache:
        reqid = start(cache, PART, by=ROWS)
        layout, size = cache.layout, UNIT * cache.layout.page_size
        with context.reserve(2 * size) as scratch:
            for tensor in range(TENSORS):
                ops = OpBatch(2)
                at = cache.reservation.addr + layout.offset(reqid, 0, tensor)
                other = scratch.addr + layout.page_size
                ops.populate(other, size, copy_from=at)
                context.batch(ops)
                ops.clear()
                ops.map(at, size, context.retain(other, size), consume=True, replace=True)
                ops.unmap(other, size)
                context.batch(ops)
        assert cache.promote(reqid, wait=True) == 1
        assert cache.snapshot()[reqid].large_pages == UNIT
        assert cache.stats().moved_pages == UNIT * TENSORS
        assert whole(cache, reqid, PART)


def test_a_run_whose_promotion_was_cancelled_is_joined_later(backend: str) -> None:
    with in_slabs(backend) as context:
        limit = (2 * UNIT + 1) * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit) as cache:
            reqid, other = start(cache, 2 * PART, by=ROWS), start(cache, 3, 500)
            assert cache.promote(reqid) == 2
            assert cache.fork(other) is None, (
                "the fork must cancel the promotion and still find no page"
            )
            assert cache.step(lens(cache)) == 0
            assert cache.stats().promoted_pages == 0
            assert cache.promote(reqid, wait=True) == 2
            assert cache.stats().promoted_pages == 2 * UNIT * TENSORS
            assert cache.promote(reqid) == 0, "once"


def test_pages_back_from_the_host_are_checked_again() -> None:
    with in_slabs("host") as context, cache_over(context) as cache:
        reqid = start(cache, PART, by=ROWS)
        assert cache.promote(reqid, wait=True) == 1
        assert cache.promote(reqid) == 0, "once"
        assert cache.move(reqid, "host").pages == UNIT * TENSORS
        assert cache.promote(reqid) == 0, "it is at another place"
        assert cache.move(reqid, "device").pages == UNIT * TENSORS
        cache.promote(reqid, wait=True)
        assert cache.snapshot()[reqid].large_pages == UNIT
        assert whole(cache, reqid, PART)


@pytest.mark.parametrize("what", [Inject.MAP, Inject.UNMAP])
def test_every_driver_call_of_a_join_fails_once(backend: str, what: Inject) -> None:
    """A failure leaves the pages unchanged; the next `promote` gives them large entries."""
    failed = 0
    for skip in range(20):
        with in_slabs(backend) as context, cache_over(context) as cache:
            reqid = start(cache, 2 * PART, by=ROWS)
            assert cache.promote(reqid) == 2
            context.inject(what, skip)
            with suppress(DriverError):
                cache.step(lens(cache))
            context.inject(what, count=0)
            done = cache.snapshot()[reqid].large_pages
            assert done in (0, 2 * UNIT), "either all pages or none must be joined"
            assert cache.step(lens(cache)) == 0
            cache.check_integrity()
            assert whole(cache, reqid, 2 * PART)
            failed += not done
            cache.promote(reqid, wait=True)
            assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        if done:
            break
    assert done
    assert failed >= (2 * TENSORS if what == Inject.MAP else 0)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the minimum size, as if the cache were large."""
    monkeypatch.setattr(migration, "REACH", 0)


def test_a_small_cache_joins_nothing_by_itself(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context, window_tile=0) as cache:
        reqid = start(cache, 2 * PART + ROWS, by=ROWS)
        settled(cache, reqid)
        assert cache.stats().large_entries == 0


@pytest.mark.usefixtures("everywhere")
def test_blocks_are_joined_as_they_fill(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context, window_tile=0) as cache:
        reqid = start(cache, 2, 1)
        for low in range(2, 2 * PART + 3):
            grow(cache, reqid, low, low + 1)
        assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        assert context.stats().joins == 2 * TENSORS
        assert cache.stats().moved_pages == 0
        assert whole(cache, reqid, 2 * PART + 3)


@contextmanager
def cold_pool(slots: int) -> Iterator[KVCache]:
    """Yields a cache with 4 blocks per slot and tensor, whose pool has no memory yet."""
    page, tensors = 64 << 10, 8
    pages = 4 * (2 << 20) // page
    limit = slots * pages * tensors * page * 7 // 8
    changes = {"max_batch": slots, "max_seq_len": ROWS * pages, "memory_limit": limit}
    with (
        Context("host", granule=page, large_entries=True) as context,
        small_cache(context, num_layers=4, growth_fraction=0.0, window_tile=0, **changes) as cache,
    ):
        for _ in range(slots):
            cache.alloc_reqid()
        yield cache


@pytest.mark.usefixtures("everywhere")
def test_growth_in_a_cold_pool_fills_blocks() -> None:
    """As long as the limit allows, the pool allocates memory rather than letting a request grow
    into other requests' chunks."""
    slots, pages = 5, 3 * 32 + 1
    with cold_pool(slots) as cache:
        for rows in range(ROWS, ROWS * pages + 1, ROWS):
            assert cache.step([rows] * slots) == 0
            assert cache.context.stats().slab_bytes <= cache.config.memory_limit + (64 << 20)
        assert cache.step([ROWS * pages] * slots) == 0
        now = cache.stats()
        assert now.moved_pages == 0
        assert now.large_entries == 3 * slots * cache.layout.num_tensors
        cache.check_integrity()


def test_the_pool_of_a_small_cache_allocates_only_missing_pages() -> None:
    slots = 5
    with cold_pool(slots) as cache:
        assert cache.step([ROWS] * slots) == 0
        assert cache.context.stats().slab_bytes == 64 << 20


@pytest.mark.usefixtures("everywhere")
def test_blocks_are_not_copied_repeatedly() -> None:
    """Memory allocated page by page is fragmented, so not every copy gets a 2 MiB chunk."""
    slots, pages, page = 5, 128, 64 << 10
    with cold_pool(slots) as cache:
        cache._groups[0].pager.runs.spreads = False  # as if the pool could get no more memory
        for rows in range(ROWS, ROWS * pages * 3 // 4 + 1, ROWS):
            assert cache.step([rows] * slots) == 0
            for move in cache._groups[0].mover.moves.values():
                eventually(move.done)
        now = cache.stats()
        assert 0 < now.moved_pages <= 2 * now.mapped_bytes // page
        assert now.large_entries > 0


@pytest.mark.usefixtures("everywhere")
def test_long_requests_are_promoted_automatically(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, window_tile=0) as cache,
    ):
        one, two = in_pieces(cache, PART + ROWS)
        assert cache.stats().moving_pages == 0
        grow(cache, one, PART + ROWS, PART + ROWS + 1)
        assert cache.stats().moving_pages == UNIT * TENSORS
        settled(cache, one)
        assert cache.snapshot()[one].large_pages == UNIT
        assert cache.snapshot()[two].large_pages == 0, "a request that does not grow"
        for low in range(PART + ROWS + 1, 2 * PART + 2 * ROWS):
            grow(cache, one, low, low + 1)
        settled(cache, one)
        assert cache.snapshot()[one].large_pages == 2 * UNIT
        assert whole(cache, one, 2 * PART)


@pytest.mark.usefixtures("everywhere")
def test_rows_that_may_be_rolled_back_are_not_promoted(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, window_tile=5) as cache,
    ):
        one, _ = in_pieces(cache, PART)
        for low in range(PART, PART + 6):
            assert cache.snapshot()[one].moving_pages == 0
            grow(cache, one, low, low + 1)
        assert cache.snapshot()[one].moving_pages == UNIT


def test_promotion_uses_the_memory_that_is_free(backend: str) -> None:
    with in_slabs(backend) as context:
        limit = (2 * 2 * UNIT + UNIT) * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit) as cache:
            one, two = in_pieces(cache, 2 * PART)
            assert cache.promote(one, wait=True) == 1, "there is memory for one part at a time"
            assert cache.promote(one, wait=True) == 1
            assert cache.promote(two) == 1
            assert cache.memory.num_free_pages == 0
            grow(cache, one, 2 * PART, 2 * PART + 1)
            assert cache.snapshot()[two].moving_pages == 0, "cancelled for a request that grows"
            assert cache.stats().moving_pages == 0
            assert whole(cache, two, 2 * PART, 500)
            assert whole(cache, one, 2 * PART + 1)


@pytest.mark.usefixtures("everywhere")
def test_a_promotion_without_memory_is_retried(backend: str) -> None:
    """Once there is memory, the request is promoted even though it never fills another block."""
    with in_slabs(backend) as context:
        limit = (2 * UNIT + 4) * TENSORS * context.info.granule
        options = {"window_tile": 0, "memory_limit": limit}
        with cache_over(context, **options) as cache:
            one, two = in_pieces(cache, PART)
            grow(cache, one, PART, PART + 1)
            assert cache.stats().moving_pages == 0, "there is no memory for a copy"
            cache.free_reqid(two)
            cache.trim()
            for low in range(PART + 1, PART + 2 * ROWS):
                grow(cache, one, low, low + 1)
            settled(cache, one)
            assert cache.snapshot()[one].large_pages == UNIT
            assert whole(cache, one, PART + 2 * ROWS)


@pytest.mark.usefixtures("everywhere")
def test_a_cancelled_promotion_is_retried(backend: str) -> None:
    with in_slabs(backend) as context:
        limit = (3 * UNIT + 1) * TENSORS * context.info.granule
        options = {"window_tile": 0, "memory_limit": limit}
        with cache_over(context, **options) as cache:
            one, two = in_pieces(cache, PART)
            grow(cache, one, PART, PART + 1)
            assert cache.stats().moving_pages == UNIT * TENSORS
            fork = cache.fork(two, PART - 1)
            assert fork is not None
            assert cache.stats().moving_pages == 0, "cancelled for the fork's page"
            for reqid in (two, fork):
                cache.free_reqid(reqid)
            cache.trim()
            for low in range(PART + 1, PART + 2 * ROWS):
                grow(cache, one, low, low + 1)
            settled(cache, one)
            assert cache.snapshot()[one].large_pages == UNIT
            assert whole(cache, one, PART + 2 * ROWS)


def _fork(cache: KVCache, reqid: int) -> int | None:
    return cache.fork(reqid)


def _record(cache: KVCache, reqid: int) -> int | None:
    assert cache.record(reqid, range(2 * PART)) == 2 * PART
    return reqid


def _swap(cache: KVCache, reqid: int) -> int | None:
    return cache.swap_in(cache.swap_out(reqid))


def _free(cache: KVCache, reqid: int) -> int | None:
    cache.free_reqid(reqid, tokens=range(2 * PART))
    taken = cache.alloc_prefix([*range(2 * PART), 1])
    assert taken is not None
    return taken[0]


def _move(cache: KVCache, reqid: int) -> int | None:
    cache.move(reqid, "device")
    return reqid


@pytest.mark.parametrize("what", [_fork, _record, _swap, _free, _move])
@pytest.mark.parametrize("kind", ["promote", "move"])
def test_promotions_in_flight_are_finished_first(
    backend: str, kind: str, what: Callable[[KVCache, int], int | None]
) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        one, two = in_pieces(cache, 2 * PART)
        if kind == "promote":
            assert cache.promote(one) == 2
        elif Caps.HOST_PAGES in context.info.caps:
            assert cache.move(one, "host", wait=False).pages == 2 * UNIT * TENSORS
        got = what(cache, one)
        assert got is not None
        cache.check_integrity()
        assert whole(cache, got, 2 * PART)
        assert whole(cache, two, 2 * PART, 500)
        for _ in range(3):
            cache.step(lens(cache))
        cache.check_integrity()


def test_a_slot_freed_in_the_middle_is_safe_for_the_next_owner(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, max_batch=2, deferred_reclaim=False) as cache,
        FdEvent.create() as work,
    ):
        one, two = in_pieces(cache, 2 * PART)
        assert cache.promote(one, stream=work) == 2
        cache.free_reqid(one)
        assert cache.snapshot()[one].in_flight, "its pages must still be in flight"
        cache.check_integrity()
        again = cache.alloc_reqid(PART)
        assert again == one
        with firing_later(work) as fired:
            want = lens(cache)
            want[again] = PART
            assert cache.step(want) == 0
            assert fired
        assert is_zero(cache, again, 0, PART)
        cache.step(want)
        assert cache.stats().moving_pages == 0
        assert whole(cache, two, 2 * PART, 500)


def test_a_request_grows_into_the_memory_of_its_cancelled_promotion(backend: str) -> None:
    """Any other request has to wait until the pages are zeroed."""
    with in_slabs(backend) as context:
        limit = (3 * UNIT + 1) * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit, max_batch=3) as cache, pending() as work:
            one, _ = in_pieces(cache, PART)
            third = start(cache, 1)
            cache.free_reqid(third, work)
            assert cache.alloc_reqid() == third
            assert cache.promote(one) == 1
            assert cache.memory.num_free_pages == 0
            want = lens(cache)
            want[one], want[third] = PART + ROWS, 1
            eventually(
                lambda: cache.step_async(want) == 0 and cache.slots.is_ready(one, PART + ROWS)
            )
            cache.check_integrity()
            assert cache.memory.num_free_pages == (UNIT - 1) * TENSORS
            assert cache.slots.is_ready(one, PART + ROWS), (
                "the growth failed after the promotion was cancelled"
            )
            assert not cache.slots.is_ready(third, 1)
            work.set()
            assert cache.step(want) == 0
            assert whole(cache, one, PART)
            assert is_zero(cache, one, PART, ROWS)


def test_another_cache_of_the_budget_cancels_its_copies(backend: str) -> None:
    with in_slabs(backend) as context:
        page = context.info.granule
        budget = Budget(context, 3 * UNIT * TENSORS * page)
        large = small_config(page, max_seq_len=11 * ROWS)
        with KVCache(large, budget=budget) as cache, KVCache(large, budget=budget) as other:
            one, two = in_pieces(cache, PART)
            assert cache.promote(one) == 1
            assert budget.stats().free_bytes == 0
            assert other.can_admit([ROWS, 0, 0, 0])
            third = start(other, ROWS)
            assert cache.stats().moving_pages == 0
            assert whole(cache, one, PART)
            assert whole(cache, two, PART, 500)
            assert whole(other, third, ROWS)
            cache.check_integrity()
            other.check_integrity()


def test_a_cache_is_closed_while_copies_are_in_flight(backend: str) -> None:
    with in_slabs(backend) as context:
        page = context.info.granule
        config = small_config(page, max_seq_len=11 * ROWS)
        with KVCache(config, context) as cache, pending() as writers:
            one, two = in_pieces(cache, PART)
            assert cache.promote(one, stream=writers) == 1
            assert cache.promote(two, stream=writers) == 1
            cache.free_reqid(two)
            cache.check_integrity()
            with firing_later(writers) as fired:
                cache.close()
                assert fired, "the copies read pages that were freed"
        context.check()
        assert context.stats().used_bytes == 0
