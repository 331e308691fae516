# SPDX-License-Identifier: MIT
"""Tests requests whose slot still has pages of an earlier request: pages that are shared, that have
left the window, or that are off the device.

These pages are unmapped before the request's first row is granted. Until then, no call may treat
them as the request's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    full_queue,
    pending,
    small_cache,
)
from share_helpers import grow, is_zero, start, whole, write_rows

from pyvmem import Caps, DriverError, FdEvent, Inject, KVCache, NotRecoverable

TENSORS = 2 * LAYERS
PROMPT = range(1, 5 * ROWS + 4)
WINDOW = {"window": 8, "window_tile": 4, "max_seq_len": 12 * ROWS}


def lens(cache: KVCache, **by_reqid: int) -> list[int]:
    """Returns the lengths of all slots, overridden by keywords such as r0 and r2."""
    held = [slot.seq_len for slot in cache.snapshot()]
    for name, rows in by_reqid.items():
        held[int(name[1:])] = rows
    return held


def slide(cache: KVCache, event: FdEvent) -> None:
    assert cache.step(lens(cache, r0=3 * ROWS + 1), event) == 0
    assert cache.snapshot()[0].in_flight
    cache.free_reqid(0)


def sliding(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with pages that are being unmapped because they left the window."""
    start(cache, 3 * ROWS)
    slide(cache, event)


def sliding_shared(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with recorded pages that are being unmapped because they left the window."""
    start(cache, 3 * ROWS)
    assert cache.record(0, PROMPT[: 3 * ROWS]) == 3 * ROWS
    slide(cache, event)


def sliding_fork(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with pages that left the window and are shared with another request."""
    start(cache, 3 * ROWS)
    assert cache.fork(0) == 1
    slide(cache, event)


def kept(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with recorded rows that stay mapped for a next turn."""
    start(cache, 1)
    for row in range(1, len(PROMPT)):
        grow(cache, 0, row, row + 1)
    eventually(lambda: not cache.snapshot()[0].in_flight)
    cache.free_reqid(0, tokens=PROMPT)
    eventually(lambda: not cache.snapshot()[0].in_flight)
    assert cache._groups[0].table[0].kept


def shared(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with shared pages, because the queue has no room to unmap them."""
    start(cache, 3 * ROWS + 2)
    assert cache.fork(0) == 1
    with full_queue(cache.context):
        cache.free_reqid(0)
        assert cache.snapshot()[0].shared_pages
        cache.slots.claim(0)


def away(cache: KVCache, event: FdEvent) -> None:
    """Leaves slot 0 with pages in host memory, because the queue has no room to unmap them."""
    start(cache, 3 * ROWS + 2)
    assert cache.move(0, "host").pages == 4 * TENSORS
    with full_queue(cache.context):
        cache.free_reqid(0)
        assert cache.snapshot()[0].away_pages
        cache.slots.claim(0)


WAYS = {
    "sliding": (sliding, WINDOW),
    "sliding, shared": (sliding_shared, WINDOW),
    "sliding, fork": (sliding_fork, WINDOW),
    "kept": (kept, {}),
    "kept, window": (kept, WINDOW),
    "shared": (shared, {}),
    "away": (away, {}),
}


@contextmanager
def stale(backend: str, way: str) -> Iterator[tuple[KVCache, FdEvent]]:
    """Yields a cache whose slot 0 has just been taken and still has its previous owner's pages."""
    make, options = WAYS[way]
    with ExitStack() as stack:
        context = stack.enter_context(open_context(backend))
        if make is away and Caps.HOST_PAGES not in context.info.caps:
            pytest.skip("no host pages")
        cache = stack.enter_context(small_cache(context, **options))
        event = stack.enter_context(pending())
        make(cache, event)
        if not cache.slots.is_taken(0):
            cache.slots.claim(0)
        assert cache._groups[0].table[0].stale
        cache.check_integrity()
        yield cache, event


def look(cache: KVCache) -> None:
    slot, stats = cache.snapshot()[0], cache.stats()
    assert (slot.state, slot.seq_len, slot.granted_pages) == ("active", 0, 0)
    assert cache.slots.first_rows([0]) == [0]
    assert cache.slots.readable_rows([0]) == [0]
    assert cache.slots.capacity(0) == 0
    assert cache.seq_len(0) == 0
    assert stats.ahead_pages <= stats.cached_pages
    assert cache.memory.for_request(0, ROWS) // cache.layout.page_size == TENSORS
    assert not cache.slots.is_ready(0, 1)
    assert cache.slots.is_ready(0, 0)


def fork(cache: KVCache) -> None:
    child = cache.fork(0)
    assert child is not None
    assert cache.slots.first_rows([child]) == [0]
    grow(cache, child, 0, 2 * ROWS, 50)
    assert whole(cache, child, 2 * ROWS, 50)


def swap(cache: KVCache) -> None:
    back = cache.swap_in(cache.swap_out(0))
    assert back is not None
    if back:
        cache.free_reqid(back)
        cache.slots.claim(0)


def swap_out(cache: KVCache) -> None:
    cache.swap_out(0).close()


def move(cache: KVCache) -> None:
    if Caps.HOST_PAGES in cache.context.info.caps:
        assert tuple(cache.move(0, "host")) == (0, 0)
        assert tuple(cache.move(0, "device")) == (0, 0)


def record(cache: KVCache) -> None:
    assert cache.record(0, []) == 0


def truncate(cache: KVCache) -> None:
    assert cache.truncate(0, 0) == 0


def free(cache: KVCache) -> None:
    cache.free_reqid(0)


def free_recorded(cache: KVCache) -> None:
    cache.free_reqid(0, tokens=PROMPT)


def next_turn(cache: KVCache) -> None:
    """Starts another request with the same prefix."""
    found = cache.alloc_prefix([*PROMPT, 7])
    assert found is not None
    reqid, rows = found
    assert reqid
    grow(cache, reqid, rows, len(PROMPT) + 2)
    cache.free_reqid(reqid)


def admit(cache: KVCache) -> None:
    assert cache.can_admit([ROWS])
    assert cache.can_admit([0])


def trim(cache: KVCache) -> None:
    cache.trim(prefixes=True)


def reclaim(cache: KVCache) -> None:
    cache.memory.reclaim_free(wait=True)


def nothing(cache: KVCache) -> None:
    assert cache.step(lens(cache)) == 0
    assert cache.step_async(lens(cache)) == 0


def ahead(cache: KVCache) -> None:
    assert cache.step_async(lens(cache, r0=2 * ROWS)) == 0


CALLS = [
    look, fork, swap, swap_out, move, record, truncate, free, free_recorded, next_turn, admit, trim,
    reclaim, nothing, ahead,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_no_call_mistakes_earlier_pages_for_the_requests(
    backend: str, way: str, call: Callable[[KVCache], None]
) -> None:
    with stale(backend, way) as (cache, event):
        with firing_later(event):
            call(cache)
            cache.check_integrity()
        if not cache.slots.is_taken(0):
            cache.slots.claim(0)
        cache.check_integrity()
        assert cache.step(lens(cache, r0=2 * ROWS + 1)) == 0
        assert cache.slots.first_rows([0]) == [0]
        assert is_zero(cache, 0, 0, 2 * ROWS + 1)
        write_rows(cache, 0, 0, list(range(70, 70 + 2 * ROWS + 1)))
        assert whole(cache, 0, 2 * ROWS + 1, 70)
        cache.check_integrity()
        cache.free_reqid(0)
        cache.step(lens(cache))
        cache.trim(prefixes=True)
        eventually(lambda: cache.trim(prefixes=True) == 0)
        left = sum(slot.seq_len for slot in cache.snapshot())
        assert bool(cache.stats().mapped_bytes) == bool(left)


@pytest.mark.parametrize("way", WAYS)
def test_pages_of_the_earlier_owner_can_be_reclaimed(backend: str, way: str) -> None:
    """A request that is short of memory can get all memory that other requests do not own."""
    with stale(backend, way) as (cache, event), firing_later(event):
        page, stats = cache.layout.page_size, cache.stats()
        cache.memory.set_limit(max(stats.active_pages + 6 * TENSORS, stats.mapped_bytes // page))
        other = next(slot.reqid for slot in cache.snapshot() if slot.state != "active")
        cache.slots.claim(other)
        want = lens(cache)
        want[other] = 6 * ROWS
        assert cache.can_admit([6 * ROWS])
        assert cache.step(want) == 0
        cache.check_integrity()


@pytest.mark.parametrize("pages", range(1, 7))
@pytest.mark.parametrize("way", WAYS)
def test_leftover_pages_do_not_count_as_mapped(backend: str, way: str, pages: int) -> None:
    """`step` keeps the promise that `step_async` made, even if other requests keep the earlier
    owner's pages.
    """
    with stale(backend, way) as (cache, event), cache.match([*PROMPT, 7]):
        mapped = cache.stats().mapped_bytes // cache.layout.page_size
        cache.memory.set_limit(mapped + TENSORS)
        want = lens(cache, r0=pages * ROWS)
        promised = cache.step_async(want)
        with firing_later(event):
            assert cache.step(want) == promised
        cache.check_integrity()


@pytest.mark.parametrize("pages", range(1, 7))
@pytest.mark.parametrize("way", WAYS)
def test_pages_that_will_not_be_freed_do_not_count(backend: str, way: str, pages: int) -> None:
    """`can_admit` predicts whether another request's step succeeds: shared and off-device pages do
    not count as freed.
    """
    with stale(backend, way) as (cache, event), cache.match([*PROMPT, 7]):
        mapped = cache.stats().mapped_bytes // cache.layout.page_size
        cache.memory.set_limit(mapped + TENSORS)
        other = cache.alloc_reqid()
        fits = cache.can_admit([pages * ROWS])
        want = lens(cache)
        want[other] = pages * ROWS
        with firing_later(event):
            assert (cache.step(want) == 0) == fits
        cache.check_integrity()


@pytest.mark.parametrize("pages", range(1, 7))
def test_a_freed_slot_after_another_requests_growth(backend: str, pages: int) -> None:
    """Shared pages are released once the growth, which waits for GPU work, has completed."""
    with ExitStack() as stack:
        context = stack.enter_context(open_context(backend))
        cache = stack.enter_context(small_cache(context))
        event = stack.enter_context(pending())
        cache.free_reqid(start(cache, 3 * ROWS), tokens=PROMPT[: 3 * ROWS])
        cache.trim()
        taken, other = cache.alloc_prefix([*PROMPT[: 3 * ROWS], 7]), start(cache, 3 * ROWS)
        assert taken is not None
        one = taken[0]
        grow(cache, one, 3 * ROWS, 5 * ROWS)
        for reqid, rows in ((one, 3 * ROWS), (other, ROWS)):
            assert cache.truncate(reqid, rows, event) == 0
        want = lens(cache)
        want[one], want[other] = 5 * ROWS, 3 * ROWS
        assert cache.step_async(want) == 0  # zeroes pages that the event's work may be writing
        cache.free_reqid(one)
        cache.memory.set_limit(cache.stats().mapped_bytes // cache.layout.page_size)
        last = cache.alloc_reqid()
        fits = cache.can_admit([pages * ROWS])
        want = lens(cache)
        want[last] = pages * ROWS
        promised = cache.step_async(want)
        assert fits == (promised == 0) == (pages <= 5)
        with firing_later(event):
            assert cache.step(want) == promised
        cache.check_integrity()


def test_an_unmap_that_fails_while_the_queue_is_full_is_raised(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        start(cache, 3 * ROWS + 2)
        assert cache.fork(0) == 1
        with full_queue(context):
            cache.free_reqid(0)
            cache.slots.claim(0)
            context.inject(Inject.UNMAP)
            with pytest.raises(DriverError):
                cache.step(lens(cache, r0=1))
            context.inject(Inject.UNMAP, count=0)
            cache.check_integrity()
            assert cache.step(lens(cache, r0=1)) == 0
        assert is_zero(cache, 0, 0, 1)


def test_a_lost_unmap_while_the_queue_is_full_costs_only_its_slot(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        if Caps.ONE_CALL in context.info.caps:
            pytest.skip("a batch is one driver call: there is nothing to undo")
        start(cache, 3 * ROWS + 2)
        assert cache.fork(0) == 1
        with full_queue(context):
            cache.free_reqid(0)
            cache.slots.claim(0)
            context.inject(Inject.MAP | Inject.UNMAP, skip=1, count=8)
            with pytest.raises(NotRecoverable):
                cache.step(lens(cache, r0=1))
            context.inject(Inject.MAP | Inject.UNMAP, count=0)
            cache.check_integrity()
            cache.free_reqid(0)
        with pytest.raises(NotRecoverable):  # the unmap itself; the step raised the refused growth
            cache.step(lens(cache))
        assert cache.step(lens(cache, r1=3 * ROWS + 3)) == 0
        assert cache.snapshot()[0].state == "broken"
        cache.check_integrity()
