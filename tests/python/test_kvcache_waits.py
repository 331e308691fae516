# SPDX-License-Identifier: MIT
"""Description: calls of a cache do not wait for GPU work of requests that they do not need.

An `FdEvent` stands for a kernel of an earlier owner that does not end: a call that waited for it
would never come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from kvcache_helpers import LAYERS, ROWS, eventually, lens, rows_are, small_cache, stamp, started

from pyvmem import Context, FdEvent
from pyvmem.kvcache import KVCache

TENSORS = 2 * LAYERS
PROMPT = list(range(1, 3 * ROWS))

T = TypeVar("T")


@pytest.fixture
def work() -> Iterator[FdEvent]:
    """GPU work; over at the end of the test at the latest."""
    with FdEvent.create() as event:
        yield event
        event.set()


def promptly(call: Callable[[], T], work: FdEvent) -> T:
    """What a call returns; a failure where it does not come back while the work goes on."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(10)
    stuck = thread.is_alive()
    if stuck:
        work.set()
        thread.join(10)
    assert not stuck, "it waits for an earlier owner's work"
    assert found, "it raised"
    return found[0]


def busy(cache: KVCache, work: FdEvent, tokens: list[int] | None = None) -> int:
    """Frees a request whose work goes on; its slot is the only one."""
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


def test_a_step_ahead_waits_for_no_pages_that_come_back(context: Context, work: FdEvent) -> None:
    """Memory is short, and the work of the request that gives it goes on."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        one, other = started(cache, 3 * ROWS), started(cache, ROWS)
        cache.free_reqid(one, stream=work)
        want = lens(cache, **{f"r{other}": 4 * ROWS})
        for _ in range(2):
            assert promptly(lambda: cache.step_async(want), work) == 0
            assert not cache.is_ready(other, 4 * ROWS)
        work.set()
        eventually(lambda: cache.stats().free_pages == 3 * TENSORS)
        assert cache.step_async(want) == 0
        eventually(lambda: cache.is_ready(other, 4 * ROWS))
        assert cache.step(want) == 0
        assert rows_are(cache, other, 0, ROWS, 1.0)
        want = lens(cache, **{f"r{other}": 6 * ROWS})
        assert cache.step_async(want) == -1


@contextmanager
def part_unmapping(context: Context, work: FdEvent) -> Iterator[KVCache]:
    """15 of its 16 pages a tensor are a freed request's, of which the low watermark takes a few."""
    pages = 16
    limit = pages * TENSORS * context.info.granule
    with small_cache(
        context, memory_limit=limit, low_watermark=0.2, max_seq_len=pages * ROWS
    ) as cache:
        cache.free_reqid(started(cache, (pages - 1) * ROWS), stream=work)
        yield cache


def test_a_step_ahead_waits_for_no_unmapping_of_a_part(context: Context, work: FdEvent) -> None:
    """The only slot with pages has given up a few, for the low watermark; more is wanted."""
    with part_unmapping(context, work) as cache:
        want = lens(cache, **{f"r{cache.alloc_reqid(8 * ROWS)}": 8 * ROWS})
        assert promptly(lambda: cache.step_async(want), work) == 0
        work.set()
        assert cache.step(want) == 0
        cache.check_integrity()


def test_what_comes_back_is_promised_once(context: Context, work: FdEvent) -> None:
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
        assert cache.step_async(second) == 0, "the promise went with its request"
        assert cache.step(second) == 0
        cache.check_integrity()


def test_others_grow_meanwhile(context: Context, work: FdEvent) -> None:
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


def test_a_prefix_is_left_out_where_no_slot_is_empty(context: Context, work: FdEvent) -> None:
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
        work.set()  # before the cache is closed, which waits for it
