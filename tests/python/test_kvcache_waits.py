# SPDX-License-Identifier: MIT
"""Checks that a cache's calls do not wait for GPU work on pages that they do not need.

An `FdEvent` stands in for an earlier owner's kernel that never completes: a call that waited for it
would not return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    lens,
    rows_are,
    small_cache,
    small_config,
    stamp,
    started,
)
from move_helpers import PART, UNIT, cache_over, in_pieces, in_slabs
from share_helpers import whole

from pyvmem import Context, FdEvent, InvalidArgument
from pyvmem.engine import Request, RequestCache
from pyvmem.kvcache import Budget, KVCache, LayeredCache, LayerShape, waits
from pyvmem.kvcache.events import is_over

TENSORS = 2 * LAYERS
PROMPT = list(range(1, 3 * ROWS))

T = TypeVar("T")


@pytest.fixture
def work() -> Iterator[FdEvent]:
    """Yields GPU work that completes no later than the end of the test."""
    with FdEvent.create() as event:
        yield event
        event.set()


def promptly(call: Callable[[], T], work: FdEvent) -> T:
    """Returns a call's result; fails if the call does not return while the work runs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(10)
    stuck = thread.is_alive()
    if stuck:
        work.set()
        thread.join(10)
    assert not stuck, "the call waits for an earlier owner's work"
    assert found, "the call raised an exception"
    return found[0]


def busy(cache: KVCache, work: FdEvent, tokens: list[int] | None = None) -> int:
    """Starts a request and frees it while its work is still running; returns its reqid."""
    reqid = started(cache, 2 * ROWS)
    cache.free_reqid(reqid, stream=work, tokens=tokens)
    return reqid


@pytest.mark.parametrize("zero_fill", [True, False])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_ahead_leaves_a_busy_slot_to_the_step(
    context: Context, work: FdEvent, zero_fill: bool, deferred: bool, recorded: bool
) -> None:
    tokens = PROMPT[: 2 * ROWS] if recorded else None
    with small_cache(context, max_batch=1, zero_fill=zero_fill, deferred_reclaim=deferred) as cache:
        busy(cache, work, tokens)
        reqid = promptly(cache.alloc_reqid, work)
        want = lens(cache, **{f"r{reqid}": 3 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        assert promptly(lambda: cache.step_async(want), work) == 0
        work.set()
        assert cache.step(want) == 0
        stamp(cache, reqid, 0, 3 * ROWS, 4.0)
        assert rows_are(cache, reqid, 0, 3 * ROWS, 4.0)
        cache.check_integrity()


def test_a_step_ahead_does_not_wait_for_pages_being_freed(context: Context, work: FdEvent) -> None:
    """Memory is short, and the freed request's work is still running."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, stream=work)
        want = lens(cache, **{f"r{other}": 4 * ROWS})
        for _ in range(2):
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert not cache.slots.is_ready(other, 4 * ROWS)
        work.set()
        eventually(lambda: cache.stats().free_pages == 3 * TENSORS)
        assert cache.step_async(want) == 0
        eventually(lambda: cache.slots.is_ready(other, 4 * ROWS))
        assert cache.step(want) == 0
        assert rows_are(cache, other, 0, ROWS, 1.0)
        want = lens(cache, **{f"r{other}": 6 * ROWS})
        assert cache.step_async(want) == -1


@pytest.mark.parametrize("begun", ["nothing", "reclaim_free", "a step ahead"])
def test_a_step_uses_idle_pages_before_busy_ones(
    context: Context, work: FdEvent, begun: str
) -> None:
    limit = 6 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, growth_fraction=0.0) as cache:
        one, other, stays = (started(cache, 2 * ROWS) for _ in range(3))
        cache.free_reqid(one, stream=work)
        if begun == "reclaim_free":
            cache.memory.reclaim_free()
        if begun == "a step ahead":
            assert cache.step_async(lens(cache, r1=2 * ROWS, r2=3 * ROWS)) == 0
        cache.free_reqid(other)
        want = lens(cache, **{f"r{stays}": 4 * ROWS})
        assert promptly(lambda: cache.step(want), work) == 0
        assert not is_over(work)
        assert rows_are(cache, stays, 0, 2 * ROWS, 1.0)
        work.set()


def test_a_step_uses_idle_pages_while_a_window_slides(context: Context, work: FdEvent) -> None:
    """Pages that leave the window wait for the work of the step that read them."""
    limit = 12 * TENSORS * context.info.granule
    policy = {"window": ROWS, "window_tile": 0, "growth_fraction": 0.0, "max_seq_len": 12 * ROWS}
    with small_cache(context, memory_limit=limit, **policy) as cache:
        slides, other, stays = (started(cache, rows * ROWS) for rows in (6, 4, 2))
        want = lens(cache, r0=6 * ROWS, r1=4 * ROWS, r2=2 * ROWS)
        want[slides] += 1
        cache.free_reqid(other)
        want[other] = 0
        assert promptly(lambda: cache.step(want, work), work) == 0
        want[stays] = 5 * ROWS
        assert promptly(lambda: cache.step(want), work) == 0
        assert not is_over(work)
        work.set()


def test_a_step_uses_surplus_pages_of_a_request(context: Context, work: FdEvent) -> None:
    """Pages beyond a request's rows are taken before the pages of a slot with running work."""
    limit = 8 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, growth_fraction=0.0) as cache:
        first = started(cache, 4 * ROWS)
        cache.free_reqid(first)
        spare = started(cache, 1)  # in a slot with three extra pages
        assert cache.snapshot()[spare].mapped_pages == 4
        gone, stays = started(cache, 2 * ROWS), started(cache, 2 * ROWS)
        cache.free_reqid(gone, stream=work)
        want = [slot.seq_len for slot in cache.snapshot()]
        want[gone], want[stays] = 0, 4 * ROWS
        assert promptly(lambda: cache.step(want), work) == 0
        assert not is_over(work)
        work.set()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("idle_first", [False, True])
def test_a_step_uses_idle_pages_of_another_cache(
    context: Context, work: FdEvent, begun: bool, idle_first: bool
) -> None:
    page = context.info.granule
    with Budget(context, 6 * TENSORS * page) as budget:
        config = small_config(page, memory_limit=0, growth_fraction=0.0)
        with KVCache(config, budget=budget) as one, KVCache(config, budget=budget) as two:
            busy, idle, stays = started(one, 2 * ROWS), started(one, 2 * ROWS), started(two, 16)
            for reqid in (idle, busy) if idle_first else (busy, idle):
                one.free_reqid(reqid, stream=work if reqid == busy else None)
                if begun and reqid == busy:
                    one.memory.reclaim_free()
            want = lens(two, **{f"r{stays}": 4 * ROWS})
            assert promptly(lambda: two.step(want), work) == 0
            assert not is_over(work)
            work.set()


@contextmanager
def part_unmapping(context: Context, work: FdEvent) -> Iterator[KVCache]:
    """Yields a cache in which a freed request's slot has 15 of 16 pages per tensor, a few of which
    are being unmapped for the low watermark.
    """
    pages = 16
    limit = pages * TENSORS * context.info.granule
    with small_cache(
        context, memory_limit=limit, low_watermark=0.2, max_seq_len=pages * ROWS
    ) as cache:
        cache.free_reqid(started(cache, (pages - 1) * ROWS), stream=work)
        yield cache


def test_a_step_ahead_does_not_wait_for_a_partial_unmap(context: Context, work: FdEvent) -> None:
    """The step needs more pages than the few that are being unmapped for the low watermark."""
    with part_unmapping(context, work) as cache:
        want = lens(cache, **{f"r{cache.alloc_reqid(8 * ROWS)}": 8 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        work.set()
        assert cache.step(want) == 0
        cache.check_integrity()


def test_pages_being_freed_are_promised_once(context: Context, work: FdEvent) -> None:
    with part_unmapping(context, work) as cache:
        one = cache.alloc_reqid(10 * ROWS)
        first = lens(cache, **{f"r{one}": 10 * ROWS})
        assert promptly(lambda: cache.step_async(first), work) == 0
        other = cache.alloc_reqid(10 * ROWS)
        second = lens(cache, **{f"r{other}": 10 * ROWS})
        assert promptly(lambda: cache.step_async(second), work) == -1
        few = lens(cache, **{f"r{other}": 5 * ROWS})
        assert promptly(lambda: cache.step_async(few), work) == 0
        work.set()
        assert cache.step(few) == 0
        assert cache.step(first) == 0
        cache.free_reqid(one)
        assert cache.step_async(second) == 0, "the promise ended with its request"
        assert cache.step(second) == 0
        cache.check_integrity()


def test_an_unmap_that_completes_while_others_start(
    context: Context, work: FdEvent, monkeypatch: Any
) -> None:
    """The unmap in flight completes just when the slot's other pages are about to be unmapped."""
    with part_unmapping(context, work) as cache:
        own = cache._groups[0].reclaimer
        want = lens(cache, **{f"r{cache.alloc_reqid(8 * ROWS)}": 8 * ROWS})
        assert own.unmaps

        def evict(pages: int) -> int:
            work.set()
            eventually(lambda: all(unmap.done() for unmap in own.unmaps))
            own.poll()
            return 0

        monkeypatch.setattr(own, "evict", evict)
        assert cache.step_async(want) == 0
        assert cache.step(want) == 0


def test_no_call_waits_for_a_promotion_in_flight(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        (one, _) = in_pieces(cache, PART)
        with FdEvent.create() as written, FdEvent.create() as later:
            assert cache.promote(one, stream=written) == 1
            assert promptly(lambda: cache.promote(one, stream=later), later) == 1
            written.set()
            later.set()
            cache.promote(one, wait=True)
        assert cache.snapshot()[one].large_pages == UNIT


def test_other_requests_grow_while_a_busy_slot_waits(context: Context, work: FdEvent) -> None:
    with small_cache(context, max_batch=2, deferred_reclaim=False) as cache:
        other = started(cache, ROWS)
        busy(cache, work)
        reqid = cache.alloc_reqid()
        want = lens(cache, **{f"r{other}": 3 * ROWS, f"r{reqid}": ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        alone = lens(cache, **{f"r{other}": 3 * ROWS})
        assert promptly(lambda: cache.step(alone), work) == 0
        stamp(cache, other, 0, 3 * ROWS, 5.0)
        work.set()
        assert cache.step(want) == 0
        cache.check_integrity()


def test_a_prefix_is_not_used_if_no_slot_is_empty(context: Context, work: FdEvent) -> None:
    with small_cache(context, max_batch=1) as cache:
        busy(cache, work, PROMPT[: 2 * ROWS])
        with cache.match(PROMPT) as match:
            assert match.length
            assert promptly(lambda: cache.alloc_prefix(match), work) == (0, 0)
            cache.free_reqid(0, stream=work)
            work.set()
            eventually(lambda: cache.alloc_prefix(match) == (0, match.length) or _again(cache))
            cache.free_reqid(0)
        cache.check_integrity()


def _again(cache: KVCache) -> bool:
    cache.free_reqid(0)
    return False


def test_admission_and_freeing_wait_for_nothing(context: Context, work: FdEvent) -> None:
    with small_cache(
        context, max_batch=3, memory_limit=6 * TENSORS * context.info.granule, eager_pages=2
    ) as cache:
        busy(cache, work)
        reqid = started(cache, ROWS)
        assert promptly(lambda: cache.can_admit([2 * ROWS, ROWS]), work)
        assert not promptly(lambda: cache.can_admit([3 * ROWS, 3 * ROWS]), work)
        promptly(lambda: cache.free_reqid(reqid, stream=work) is None, work)
        assert promptly(lambda: cache.alloc_reqid(ROWS), work) is not None
        cache.check_integrity()
        work.set()  # before close(), which waits for the work


def test_a_step_ahead_in_a_budget_does_not_wait_for_its_own_pages(
    context: Context, work: FdEvent
) -> None:
    limit = 5 * TENSORS * context.info.granule
    budget = Budget(context, limit)
    with KVCache(small_config(context.info.granule, memory_limit=0), budget=budget) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, stream=work)
        want = lens(cache, **{f"r{other}": 4 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        work.set()
        assert cache.step(want) == 0
        assert rows_are(cache, other, 0, ROWS, 1.0)
        assert cache.step_async(lens(cache, **{f"r{other}": 6 * ROWS})) == -1


def two_classes(context: Context, pages: int) -> tuple[int, LayeredCache]:
    """Returns the first group's rows per page, and a cache with two groups; the second group has
    twice as many rows per page.
    """
    page = context.info.granule
    rows = page // (2 * 64 * 4)
    return rows, LayeredCache(
        [LayerShape(num_kv_heads=2, head_dim=64), LayerShape(num_kv_heads=1, head_dim=64)],
        context,
        dtype="float32",
        max_batch=4,
        max_seq_len=8 * rows,
        page_size=page,
        memory_limit=2 * pages * page,
        low_watermark=0.0,
        growth_fraction=0.0,
    )


def test_a_step_ahead_of_groups_does_not_wait_for_their_pages(
    context: Context, work: FdEvent
) -> None:
    rows, made = two_classes(context, 9)
    with made as cache:
        one, other = cache.alloc_reqid(), cache.alloc_reqid()
        assert (
            cache.step(
                [4 * rows if slot == one else 2 * rows if slot == other else 0 for slot in range(4)]
            )
            == 0
        )
        cache.free_reqid(one, stream=work)
        want = [6 * rows if slot == other else 0 for slot in range(4)]
        for _ in range(2):
            assert promptly(lambda: cache.step_async(want), work) == 0
        assert not cache.slots.is_ready(other, 6 * rows)
        work.set()
        assert cache.step(want) == 0
        assert cache.step_async([8 * rows if slot == other else 0 for slot in range(4)]) == -1
        cache.check_integrity()


@contextmanager
def over_at_the_end(work: FdEvent) -> Iterator[None]:
    """Completes the work at the end, so that the cache can be closed even if the test fails."""
    try:
        yield
    finally:
        work.set()


@pytest.mark.parametrize("together", [True, False])
def test_decoding_does_not_wait_for_a_prompts_memory(
    context: Context, work: FdEvent, together: bool
) -> None:
    """Free memory goes to the requests that need the least; the prompt gets reclaimed memory."""
    limit = 8 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache, over_at_the_end(work):
        ended, one = started(cache, 4 * ROWS), started(cache, ROWS)
        prompt = cache.alloc_reqid()
        cache.free_reqid(ended, stream=work)
        long, short = {f"r{prompt}": 6 * ROWS}, {f"r{one}": 2 * ROWS}
        for want in [long | short] if together else [long, short]:
            assert promptly(lambda want=want: cache.step_async(lens(cache, **want)), work) == 0
        eventually(lambda: cache.slots.is_ready(one, 2 * ROWS))
        assert not cache.slots.is_ready(prompt, 6 * ROWS)
        assert promptly(lambda: cache.step(lens(cache, **short)), work) == 0
        work.set()
        assert cache.step(lens(cache, **long, **short)) == 0
        assert rows_are(cache, one, 0, ROWS, 1.0)
        cache.check_integrity()


def test_decoding_does_not_wait_in_any_group(context: Context, work: FdEvent) -> None:
    rows, made = two_classes(context, 12)
    with made as cache, over_at_the_end(work):
        ended, one, prompt = (cache.alloc_reqid() for _ in range(3))
        held = {f"r{ended}": 4 * rows, f"r{one}": 2 * rows}  # 6 and 3 of 12 pages per tensor
        assert cache.step(lens(cache, **held)) == 0
        cache.free_reqid(ended, stream=work)
        long, more = {f"r{prompt}": 4 * rows}, {f"r{one}": 4 * rows}
        assert promptly(lambda: cache.step_async(lens(cache, **long)), work) == 0
        assert promptly(lambda: cache.step_async(lens(cache, **more)), work) == 0
        eventually(lambda: cache.slots.is_ready(one, 4 * rows))
        assert not cache.slots.is_ready(prompt, 4 * rows)
        assert promptly(lambda: cache.step(lens(cache, **more)), work) == 0
        work.set()
        assert cache.step(lens(cache, **more, **long)) == 0
        cache.check_integrity()


# ---- pages to be reclaimed from others -----------------------------------------------------------


def test_a_step_ahead_does_not_wait_for_evictions(context: Context, work: FdEvent) -> None:
    """The prefix is mapped in the slot of a request whose work is still running."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, stream=work, tokens=list(range(3 * ROWS)))
        want = lens(cache, **{f"r{other}": 4 * ROWS})
        for _ in range(3):
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert not cache.slots.is_ready(other, 4 * ROWS)
            assert cache.stats().prefix_pages == TENSORS, "no more is evicted than needed"
            cache.check_integrity()
        more = lens(cache, **{f"r{other}": 6 * ROWS})
        assert promptly(lambda: cache.step_async(more), work) == -1
        work.set()
        assert cache.step(want) == 0
        assert rows_are(cache, other, 0, ROWS, 1.0)


def test_a_step_ahead_evicts_an_unused_prefix_and_grows(context: Context, work: FdEvent) -> None:
    """The freed request's prefix is no longer mapped in any slot."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, tokens=list(range(3 * ROWS)))
        cache.memory.reclaim_free(wait=True)
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        want = lens(cache, **{f"r{other}": 4 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        eventually(lambda: cache.step_async(want) == 0 and cache.slots.is_ready(other, 4 * ROWS))
        assert cache.stats().prefix_pages == TENSORS
        assert cache.step(want) == 0


def test_a_step_ahead_waits_for_neither_slots_nor_prefixes(context: Context, work: FdEvent) -> None:
    """Free slots' pages are reclaimed first; prefixes are evicted only to cover the rest."""
    limit = 8 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, max_seq_len=8 * ROWS) as cache:
        one, two, other = started(cache, 3 * ROWS), started(cache, 2 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, stream=work, tokens=list(range(3 * ROWS)))
        cache.free_reqid(two, stream=work)
        want = lens(cache, **{f"r{other}": 6 * ROWS})  # needs 5 more pages; 2 are free, 2 in a slot
        for _ in range(2):
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert cache.stats().prefix_pages == 2 * TENSORS
        work.set()
        assert cache.step(want) == 0
        assert cache.stats().prefix_pages == 2 * TENSORS
        assert rows_are(cache, other, 0, ROWS, 1.0)


def test_a_step_ahead_leaves_a_lease_alone(context: Context, work: FdEvent) -> None:
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        tokens = list(range(3 * ROWS))
        cache.free_reqid(one, stream=work, tokens=tokens)
        with cache.match(tokens, leave=0) as match:
            assert match.length == 3 * ROWS
            want = lens(cache, **{f"r{other}": 4 * ROWS})
            assert promptly(lambda: cache.step_async(want), work) == -1
            assert promptly(lambda: cache.step(want), work) == -1
        work.set()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_ahead_does_not_wait_for_another_cache(
    context: Context, work: FdEvent, recorded: bool
) -> None:
    page = context.info.granule
    budget = Budget(context, 5 * TENSORS * page)
    config = small_config(page, memory_limit=0)
    with KVCache(config, budget=budget) as cache, KVCache(config, budget=budget) as giver:
        tokens = list(range(3 * ROWS)) if recorded else None
        reqid = started(cache, ROWS)
        giver.free_reqid(started(giver, 3 * ROWS), stream=work, tokens=tokens)
        want = lens(cache, **{f"r{reqid}": 4 * ROWS})
        for _ in range(3):
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert not cache.slots.is_ready(reqid, 4 * ROWS)
            if recorded:
                assert giver.stats().prefix_pages == TENSORS
        more = lens(cache, **{f"r{reqid}": 6 * ROWS})
        assert promptly(lambda: cache.step_async(more), work) == -1
        work.set()
        eventually(lambda: cache.step_async(want) == 0 and cache.slots.is_ready(reqid, 4 * ROWS))
        assert cache.step(want) == 0
        assert rows_are(cache, reqid, 0, ROWS, 1.0)
        giver.check_integrity()
        cache.check_integrity()


def test_a_step_ahead_does_not_wait_for_promotions(backend: str, work: FdEvent) -> None:
    """The cancelled copies complete after the work on their request."""
    with in_slabs(backend) as context:
        limit = (3 * UNIT + 1) * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit) as cache:
            one, two = in_pieces(cache, PART)
            assert cache.promote(one, stream=work) == 1
            assert cache.stats().free_pages == TENSORS
            want = lens(cache, **{f"r{two}": PART + 3 * ROWS})
            for _ in range(2):
                assert promptly(lambda: cache.step_async(want), work) == 0
                assert not cache.slots.is_ready(two, PART + 3 * ROWS)
            work.set()
            eventually(
                lambda: cache.step_async(want) == 0 and cache.slots.is_ready(two, PART + 3 * ROWS)
            )
            assert cache.step(want) == 0
            assert whole(cache, one, PART)
            assert whole(cache, two, PART, 500)


def test_a_step_ahead_promises_a_busy_slot_only_available_pages(
    context: Context, work: FdEvent
) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, max_batch=2, memory_limit=limit, deferred_reclaim=False) as cache:
        other = started(cache, 2 * ROWS)
        busy(cache, work)
        reqid = cache.alloc_reqid()
        want = lens(cache, **{f"r{other}": 2 * ROWS, f"r{reqid}": 3 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == -1
        want[reqid or 0] = 2 * ROWS
        assert promptly(lambda: cache.step_async(want), work) == 0
        work.set()
        assert cache.step(want) == 0


@pytest.mark.parametrize("zero_fill", [True, False])
def test_growth_of_a_busy_slot_delays_no_other_request(
    context: Context, work: FdEvent, zero_fill: bool
) -> None:
    """Neither the other requests in the call nor the slot's next owner has to wait."""
    with small_cache(context, max_batch=2, zero_fill=zero_fill) as cache:
        other = started(cache, ROWS)
        busy(cache, work)
        reqid = promptly(cache.alloc_reqid, work)
        want = lens(cache, **{f"r{other}": 3 * ROWS, f"r{reqid}": ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        alone = lens(cache, **{f"r{other}": 3 * ROWS})
        assert promptly(lambda: cache.step(alone), work) == 0
        assert promptly(lambda: cache.free_reqid(reqid) is None, work)
        assert promptly(cache.alloc_reqid, work) == reqid
        with waiting(lambda: cache.step(want), work) as found:
            pass
        assert found == [0]


def test_a_budget_that_reclaims_waits_for_nothing(context: Context, work: FdEvent) -> None:
    """A cached prefix is mapped in the slot of a request whose work is still running."""
    page = context.info.granule
    budget = Budget(context, 5 * TENSORS * page)
    with KVCache(small_config(page, memory_limit=0), budget=budget) as cache:
        reqid = started(cache, 3 * ROWS)
        cache.free_reqid(reqid, stream=work, tokens=list(range(3 * ROWS)))
        promptly(lambda: budget.reclaim(0) is None, work)
        assert cache.stats().prefix_pages == 0
        cache.check_integrity()
        work.set()
        eventually(lambda: budget.reclaim(0) is None and not budget.stats().used_bytes)


# ---- a stalled driver ----------------------------------------------------------------------------


def test_a_slow_driver_call_delays_no_step_while_pages_are_mapped_ahead(
    context: Context, work: FdEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step_async` maps pages ahead, and then a map call hangs on the worker thread."""
    submit = context.submit

    def slow(ops: Any, after: Any = (), *rest: Any, **options: Any) -> Any:
        return submit(ops, [*after, work], *rest, **options)

    with small_cache(context) as cache:
        one, other = started(cache, ROWS), started(cache, ROWS)

        def both(rows: int) -> list[int]:
            return lens(cache, **{f"r{one}": rows, f"r{other}": rows})

        assert cache.step_async(both(3 * ROWS)) == 0
        eventually(lambda: cache.slots.is_ready(one, 3 * ROWS))
        monkeypatch.setattr(context, "submit", slow)
        for rows in range(ROWS + 1, 3 * ROWS + 1):
            assert promptly(lambda rows=rows: cache.step_async(both(rows + 3 * ROWS)), work) == 0
            assert promptly(lambda rows=rows: cache.step(both(rows)), work) == 0
            stamp(cache, one, rows - 1, rows, float(rows))
        assert not cache.slots.is_ready(one, 4 * ROWS), "the call has not returned"
        with waiting(lambda: cache.step(both(4 * ROWS)), work) as found:
            pass
        assert found == [0]
        assert rows_are(cache, one, 3 * ROWS - 1, 3 * ROWS, 3.0 * ROWS)


# ---- several threads -----------------------------------------------------------------------------


@contextmanager
def waiting(call: Callable[[], Any], work: FdEvent) -> Iterator[list[Any]]:
    """Makes a call in another thread, where it waits for the work; yields a list that receives its
    result.

    At the end of the block, the work completes and the call returns.
    """
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    try:
        thread.join(0.05)
        assert thread.is_alive(), "the call does not wait here, so there is nothing to test"
        yield found
        assert not found
    finally:
        work.set()
        thread.join(30)
    assert found, "the call raised an exception"


Call = Callable[[KVCache, int, FdEvent], Any]

SLOW: dict[str, tuple[dict[str, Any], Call]] = {
    "fork": ({}, lambda cache, reqid, work: cache.fork(reqid, stream=work)),
    "record": ({}, lambda cache, reqid, work: cache.record(reqid, PROMPT, work)),
    "swap_out": ({}, lambda cache, reqid, work: cache.swap_out(reqid, work)),
    "truncate": ({}, lambda cache, reqid, work: _truncate_shared(cache, reqid, work)),
    "move": (
        {"host_limit": 1 << 30},
        lambda cache, reqid, work: cache.move(reqid, "host", stream=work),
    ),
    "trim": ({}, lambda cache, reqid, work: cache.trim() or True),
    "reclaim_free": ({}, lambda cache, reqid, work: cache.memory.reclaim_free(wait=True) or True),
    "fork_into_a_busy_slot": ({}, lambda cache, reqid, work: cache.fork(reqid, into=3)),
    "alloc_prefix": ({}, lambda cache, reqid, work: cache.alloc_prefix(PROMPT)),
}


def _truncate_shared(cache: KVCache, reqid: int, work: FdEvent) -> bool:
    return cache.truncate(reqid, ROWS // 2, work) == 0


@pytest.mark.parametrize("name", SLOW)
def test_no_thread_waits_because_another_does(context: Context, work: FdEvent, name: str) -> None:
    changes, call = SLOW[name]
    if name == "alloc_prefix" and context.cuda_device is not None:
        pytest.skip("on a GPU the stream is ordered after the events, and no thread waits")
    with small_cache(context, max_batch=6, **changes) as cache:
        reqid = started(cache, 2 * ROWS, 2.0)
        other = started(cache, ROWS, 3.0)
        if name == "truncate":
            assert cache.fork(reqid) is not None
        if name in ("trim", "reclaim_free", "fork_into_a_busy_slot"):
            cache.slots.claim(3)
            assert cache.step(lens(cache, r3=ROWS)) == 0
            cache.free_reqid(3, stream=work)
        if name == "alloc_prefix":
            third = started(cache, 3 * ROWS, 4.0)
            cache.free_reqid(third, stream=work, tokens=[*PROMPT, 7])
        rows = cache.snapshot()[reqid].seq_len
        with waiting(lambda: call(cache, reqid, work), work):
            want = lens(cache, **{f"r{other}": 2 * ROWS})
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert promptly(lambda: cache.step(want), work) == 0
            new = promptly(lambda: cache.alloc_reqid(ROWS), work)
            assert new is not None
            assert promptly(lambda: cache.can_admit([ROWS]), work)
            assert promptly(lambda: cache.free_reqid(new) is None, work)
        assert rows_are(cache, other, 0, ROWS, 3.0)
        if cache.slots.is_taken(reqid) and cache.snapshot()[reqid].seq_len == rows:
            assert rows_are(cache, reqid, 0, rows, 2.0)
        cache.check_integrity()


def test_a_call_sees_changes_made_while_it_waits(context: Context, work: FdEvent) -> None:
    """While a swap-out waits, its request is freed."""
    with small_cache(context) as cache:
        reqid = started(cache, 2 * ROWS)

        def swap() -> str:
            try:
                cache.swap_out(reqid, work)
            except InvalidArgument as error:
                return str(error)
            return ""

        with waiting(swap, work) as found:
            promptly(lambda: cache.free_reqid(reqid) is None, work)
        assert found == [f"reqid {reqid} is not taken"]
        cache.check_integrity()


REQUESTS: dict[str, Callable[[RequestCache, Request, FdEvent], Any]] = {
    "fork": lambda cache, request, work: cache.fork(request, stream=work),
    "fork_async": lambda cache, request, work: cache.fork_async(request, stream=work).result(30),
    "swap_out": lambda cache, request, work: cache.swap_out(request, work) or True,
    "swap_out_async": lambda cache, request, work: (
        cache.swap_out_async(request, stream=work).result(30) or True
    ),
    "record": lambda cache, request, work: cache.record(request, PROMPT[: 2 * ROWS], work),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_other_requests_continue(context: Context, work: FdEvent, name: str) -> None:
    with small_cache(context) as memory, RequestCache(memory) as cache:
        request, other = cache.begin(2 * ROWS), cache.begin(ROWS)
        assert isinstance(request, Request)
        assert isinstance(other, Request)
        assert cache.extend({request: 2 * ROWS, other: ROWS}) is None
        with waiting(lambda: REQUESTS[name](cache, request, work), work):
            assert promptly(lambda: cache.extend({other: 3 * ROWS}) is None, work)
            new = promptly(lambda: cache.begin(ROWS), work)
            assert isinstance(new, Request)
            assert promptly(lambda: cache.release(new) is None, work)
        for one in list(cache.requests):
            cache.release(one)


def test_a_nested_call_does_not_check(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner call runs under the outer call's lock, so only the outer call checks for work."""
    looks: list[int] = []
    before_fork = waits.before_fork

    def look(*args: Any, **kwargs: Any) -> waits.Blockers:
        looks.append(1)
        return before_fork(*args, **kwargs)

    monkeypatch.setattr(waits, "before_fork", look)
    with small_cache(context) as memory, RequestCache(memory) as cache:
        request = cache.begin(ROWS)
        assert isinstance(request, Request)
        assert cache.extend({request: ROWS + 1}) is None
        assert isinstance(cache.fork(request), list)
        assert len(looks) == 1
        with memory.internals.lock, memory.internals.journal, FdEvent.create() as work:
            ending = threading.Timer(0.2, work.set)
            ending.start()
            child = memory.fork(request.slot, stream=work)
            assert is_over(work), "the call copied rows that were still being written"
            ending.join()
        assert len(looks) == 1
        assert child is not None
        memory.free_reqid(child)
        for one in list(cache.requests):
            cache.release(one)
        memory.check_integrity()
