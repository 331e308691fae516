# SPDX-License-Identifier: MIT
"""`pyvmem.engine`: requests, shortage, leases, namespaces, background calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    state,
)

from pyvmem import (
    BadHandle,
    Busy,
    Context,
    DriverError,
    FdEvent,
    Inject,
    InvalidArgument,
    KVCache,
    NotGpuWork,
    NotSupported,
)
from pyvmem.engine import INTERFACE, Request, RequestCache, Shortage, State, background
from pyvmem.engine.background import Background, CallFuture, _Queued
from pyvmem.kvcache import LayeredCache, LayerShape

TENSORS = 2 * LAYERS
PROMPT = list(range(100, 100 + 4 * ROWS))
WAIT = 60.0  # only keeps a broken build from hanging


@contextmanager
def requests(context: Context, **changes: Any) -> Iterator[RequestCache]:
    with small_cache(context, **changes) as cache, RequestCache(cache) as found:
        yield found


def kv(cache: RequestCache) -> KVCache:
    assert isinstance(cache.cache, KVCache)
    return cache.cache


def admitted(cache: RequestCache, prompt: list[int], **options: Any) -> Request:
    found = cache.admit(prompt, **options)
    assert isinstance(found, Request)
    return found


def computed(cache: RequestCache, prompt: list[int], tag: float = 1.0, **options: Any) -> Request:
    """Admits a request and computes its prompt; the rows after the prefix get one tag."""
    request = admitted(cache, prompt, **options)
    held = request.length
    assert cache.extend({request: len(prompt)}) is None
    stamp(kv(cache), request.slot, held, len(prompt), tag)
    return request


def memory(pages: int, context: Context) -> int:
    """Returns the memory limit for `pages` pages in every tensor."""
    return pages * TENSORS * context.info.granule


def test_the_interface_has_a_version() -> None:
    assert INTERFACE == (1, 2)


# ---- rows and pages ------------------------------------------------------------------------------


def test_extend_touches_the_requests_that_it_names(host: Context) -> None:
    with requests(host) as cache:
        one, two = computed(cache, PROMPT[:10]), computed(cache, PROMPT[:20], 2.0)
        assert cache.extend({two: 21}) is None
        assert (one.length, two.length) == (10, 21)
        assert rows_are(kv(cache), one.slot, 0, 10, 1.0)
        assert rows_are(kv(cache), two.slot, 0, 20, 2.0)
        assert rows_are_zero(kv(cache), two.slot, 20, 21)
        assert cache.extend({}) is None
        assert kv(cache).snapshot()[one.slot].seq_len == 10


def test_rows_are_independent_of_pages(host: Context) -> None:
    with requests(host, growth_fraction=0) as cache:
        request = computed(cache, PROMPT[:ROWS], room=0)
        assert cache.capacity(request) == ROWS
        assert cache.prepare({request: 3 * ROWS}) is None
        assert request.length == ROWS
        assert kv(cache).snapshot()[request.slot].seq_len == ROWS
        eventually(lambda: not any(slot.in_flight for slot in kv(cache).snapshot()))
        grown = kv(cache).stats().grown_pages
        assert cache.extend({request: 2 * ROWS}) is None
        assert kv(cache).stats().grown_pages == grown  # the pages were mapped already
        assert cache.capacity(request) == 3 * ROWS
        assert request.length == 2 * ROWS


def test_begin_gives_a_slot_but_reserves_no_memory(host: Context) -> None:
    with requests(host, max_batch=2, memory_limit=memory(2, host), growth_fraction=0) as cache:
        first, second = cache.begin(4 * ROWS), cache.begin(ROWS)
        assert isinstance(first, Request)
        assert isinstance(second, Request)
        assert (first.length, cache.capacity(first), kv(cache).stats().mapped_bytes) == (0, 0, 0)
        third = cache.begin(1)
        assert isinstance(third, Shortage)
        assert third.what == "slots"
        assert str(third).startswith("short of slots: 1 missing")
        assert cache.extend({first: 2 * ROWS}) is None
        short = cache.extend({second: 1})
        assert short is not None
        assert short.what == "memory"
        assert str(short).startswith(f"short of memory: {short.needed} bytes needed")
        assert str(short).endswith(f"{short.missing} missing")
        before = state(kv(cache))
        for wrong in (-1, 6 * ROWS + 1):
            with pytest.raises(InvalidArgument, match=f"seq_len {wrong}"):
                cache.begin(wrong)
        assert state(kv(cache)) == before


def test_begin_maps_the_cached_prefix(host: Context) -> None:
    with requests(host) as cache:
        space = cache.namespace("adapter")
        cache.release(computed(cache, PROMPT, namespace=space), tokens=PROMPT)
        with cache.match(PROMPT) as nothing:
            other = cache.begin(nothing)
        assert isinstance(other, Request)
        assert other.length == 0
        prefix = cache.match([*PROMPT, 1], space)
        request = cache.begin(prefix)
        assert isinstance(request, Request)
        assert (request.length, request.namespace) == (4 * ROWS, space)
        assert rows_are(kv(cache), request.slot, 0, 4 * ROWS, 1.0)
        space.close()
        with pytest.raises(BadHandle, match="closed"):
            cache.begin(1, space)
        assert len(cache.requests) == 2


@pytest.mark.parametrize("wrong", [9, -1, 6 * ROWS + 1])
def test_a_length_out_of_range_changes_nothing(host: Context, wrong: int) -> None:
    with requests(host) as cache:
        request, other = computed(cache, PROMPT[:10]), computed(cache, PROMPT[:10])
        before = state(kv(cache))
        for call in (cache.extend, cache.prepare):
            with pytest.raises(InvalidArgument, match=f"{wrong} tokens"):
                call({other: 11, request: wrong})
        assert state(kv(cache)) == before
        assert (request.length, other.length) == (10, 10)


def test_truncate_frees_rows(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        assert cache.truncate(request, 9) is None
        assert request.length == 9
        assert rows_are(kv(cache), request.slot, 0, 9, 1.0)
        assert cache.extend({request: 3 * ROWS}) is None
        assert rows_are_zero(kv(cache), request.slot, 2 * ROWS, 3 * ROWS)
        with pytest.raises(InvalidArgument, match="holds 24 tokens"):
            cache.truncate(request, 25)
        assert request.length == 3 * ROWS


# ---- identity ------------------------------------------------------------------------------------


def test_requests_compare_by_identity(host: Context) -> None:
    with requests(host) as cache:
        first = computed(cache, PROMPT)
        slot = first.slot
        cache.release(first)
        second = admitted(cache, PROMPT)
        assert second.slot == slot
        assert second.number != first.number
        assert first.state is State.ENDED
        for call in (
            lambda: cache.extend({first: 40}),
            lambda: cache.truncate(first, 0),
            lambda: cache.fork(first),
            lambda: cache.swap_out(first),
            lambda: cache.swap_in(first),
            lambda: cache.capacity(first),
            lambda: cache.record(first, PROMPT),
            lambda: cache.release(first),
            lambda: first.slot,
        ):
            with pytest.raises(BadHandle, match="ended"):
                call()
        assert cache.requests == [second]


def test_requests_of_another_cache_are_rejected(host: Context) -> None:
    with requests(host) as cache, requests(host) as other:
        request = computed(cache, PROMPT)
        with pytest.raises(InvalidArgument, match="belongs to another cache"):
            other.extend({request: 40})
        with pytest.raises(TypeError, match="expected a Request"):
            cache.extend({request.slot: 40})  # type: ignore[dict-item]
        wrong: Any = 3
        for text, call in (
            ("expected a Request, not 3", lambda: cache.fork(wrong)),
            ("expected a Request, not 3", lambda: cache.record(wrong, PROMPT)),
            ("expected a Request, not 3", lambda: cache.swap_in(wrong)),
            ("expected a Request, not 3", lambda: cache.truncate(wrong, 1)),
            ("lengths: expected tokens by Request, not ''", lambda: cache.extend("")),  # type: ignore[arg-type]
            (
                "lengths: expected tokens by Request, not <Request",
                lambda: cache.extend(request, 40),  # type: ignore[arg-type]
            ),
            ("lengths: expected tokens by Request, not <R", lambda: cache.prepare(request)),  # type: ignore[arg-type]
            ("expected a Namespace from", lambda: cache.admit(PROMPT, namespace=wrong)),
            ("cache: expected a KVCache, not 3", lambda: RequestCache(wrong)),
        ):
            with pytest.raises(TypeError, match=text):
                call()
        assert cache.requests == [request]


def test_closing_releases_running_requests(host: Context) -> None:
    with small_cache(host) as cache:
        with RequestCache(cache) as found:
            running, swapped = computed(found, PROMPT), computed(found, PROMPT)
            found.swap_out(swapped)
        assert running.state is swapped.state is State.ENDED
        assert cache.stats().active_slots == 0


# ---- shortage ------------------------------------------------------------------------------------


def test_a_shortage_reports_the_memory_needed(host: Context) -> None:
    page = host.info.granule
    with requests(host, memory_limit=memory(6, host), growth_fraction=0) as cache:
        one = computed(cache, PROMPT, room=0)  # four pages per tensor
        two = computed(cache, PROMPT[:ROWS], room=0)  # one page; one is left
        before = state(kv(cache))
        short = cache.extend({two: 3 * ROWS})
        assert isinstance(short, Shortage)
        assert state(kv(cache))[:5] == before[:5]
        assert two.length == ROWS
        assert short.what == "memory"
        assert short.needed == 2 * TENSORS * page
        assert short.available == TENSORS * page
        assert short.missing == TENSORS * page
        assert short.limit == 6 * TENSORS * page
        assert short.largest == 3 * TENSORS * page
        assert not short.never
        cache.release(one)
        assert cache.extend({two: 3 * ROWS}) is None


def test_a_truncation_without_memory_reports_what_its_copy_needs(host: Context) -> None:
    page = host.info.granule
    with requests(host, memory_limit=memory(4, host), growth_fraction=0) as cache:
        one = computed(cache, PROMPT[: 3 * ROWS], room=0)
        assert isinstance(cache.fork(one), list)
        last = computed(cache, [7] * ROWS, room=0)  # no page is left
        short = cache.truncate(one, ROWS + 1)
        assert isinstance(short, Shortage)
        assert (short.needed, short.available) == (TENSORS * page, 0)
        assert (short.what, short.missing) == ("memory", TENSORS * page)
        assert one.length == 3 * ROWS
        cache.release(last)
        assert cache.truncate(one, ROWS + 1) is None


def test_admission_checks_memory_before_it_allocates(host: Context) -> None:
    with requests(host, memory_limit=memory(5, host), growth_fraction=0) as cache:
        computed(cache, PROMPT[: 2 * ROWS], room=0)
        # Admission reserves the pages before the prompt is computed.
        second = admitted(cache, PROMPT[: 2 * ROWS], room=1)
        short = cache.admit(PROMPT[:ROWS], room=0)
        assert isinstance(short, Shortage)
        assert short.what == "memory"
        assert cache.requests[1:] == [second]
        assert cache.extend({second: 2 * ROWS + 1}) is None


def test_admission_without_its_pages_leaves_them_to_extend(host: Context) -> None:
    """A prompt may be computed in chunks: each chunk allocates its pages when it needs them."""
    with requests(host, memory_limit=memory(4, host), growth_fraction=0) as cache:
        one, two = (admitted(cache, PROMPT[: 3 * ROWS], room=0, reserve=False) for _ in "12")
        assert kv(cache).stats().active_pages == 0
        assert kv(cache).stats().steps_async == 0
        assert cache.extend({one: ROWS, two: ROWS}) is None
        assert kv(cache).stats().active_pages == 2 * TENSORS
        # A request that would not fit beside the two chunks is refused, and so are further chunks
        # when memory is short.
        short = cache.admit(PROMPT[: 3 * ROWS], room=0, reserve=False)
        assert isinstance(short, Shortage)
        assert cache.extend({one: 3 * ROWS, two: 2 * ROWS}) is not None
        cache.release(two)
        assert cache.extend({one: 3 * ROWS}) is None
        cache.release(one, tokens=PROMPT)
        assert admitted(cache, PROMPT, room=0, reserve=False).length == 3 * ROWS


def test_slots_may_be_short(host: Context) -> None:
    with requests(host) as cache:
        running = [admitted(cache, PROMPT[:3]) for _ in range(4)]
        short = cache.admit(PROMPT[:3])
        assert isinstance(short, Shortage)
        assert (short.what, short.slots, short.missing) == ("slots", 1, 0)
        forked = cache.fork(running[0], 2)
        assert isinstance(forked, Shortage)
        assert forked.slots == 2


def test_a_request_that_can_never_fit(host: Context) -> None:
    with requests(host, memory_limit=memory(2, host)) as cache:
        short = cache.admit(PROMPT)
        assert isinstance(short, Shortage)
        assert short.never
        assert short.slots == 0


def test_a_failed_admission_takes_no_slot(host: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with requests(host) as cache:

        def fails(*_: Any) -> int:
            raise DriverError("no", errno=5)

        monkeypatch.setattr(cache.cache, "step_async", fails)
        with pytest.raises(DriverError):
            cache.admit(PROMPT)
        assert kv(cache).stats().active_slots == 0
        assert cache.requests == []


def test_admission_rolls_back_if_memory_vanishes(
    host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If memory vanishes between the check and the allocation, the lease is restored."""
    with requests(host) as cache:
        cache.release(computed(cache, PROMPT), tokens=PROMPT)
        eventually(lambda: not any(slot.in_flight for slot in kv(cache).snapshot()))
        monkeypatch.setattr(cache.cache, "step_async", lambda *_: -1)
        with cache.match(PROMPT) as prefix:
            assert isinstance(cache.admit(prefix), Shortage)
            assert prefix.length == 3 * ROWS
            monkeypatch.undo()
            assert admitted(cache, prefix).length == 3 * ROWS
        # the request resumes in the slot into which the failed admission had mapped the prefix
        assert kv(cache).stats().prefix_resumed == 1


@pytest.mark.parametrize(
    ("prompt", "room", "text"),
    [(list(range(6 * ROWS + 1)), 1, "a slot holds 48"), ([1], -1, "room is -1")],
)
def test_bad_admissions(host: Context, prompt: list[int], room: int, text: str) -> None:
    with requests(host) as cache:
        with pytest.raises(InvalidArgument, match=text):
            cache.admit(prompt, room=room)
        assert kv(cache).stats().active_slots == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_fork_without_memory_reports_only_its_own_pages(host: Context, count: int) -> None:
    with requests(host, memory_limit=memory(3, host), growth_fraction=0) as cache:
        parent = computed(cache, PROMPT[: 2 * ROWS + 3], room=0)
        short = cache.fork(parent, count)
        assert isinstance(short, Shortage)
        assert short.what == "memory"
        assert short.missing == short.needed == count * memory(1, host)


# ---- prefixes ------------------------------------------------------------------------------------


def test_admission_maps_the_cached_prefix(host: Context) -> None:
    with requests(host) as cache:
        cache.release(computed(cache, PROMPT), tokens=PROMPT)
        request = admitted(cache, [*PROMPT, 7, 8])
        assert request.length == 4 * ROWS
        assert rows_are(kv(cache), request.slot, 0, 4 * ROWS, 1.0)
        running = computed(cache, [*PROMPT[:ROWS], 5, *PROMPT[:ROWS]], 3.0)
        assert cache.record(running, [*PROMPT[:ROWS], 5, *PROMPT[:ROWS]]) == 2 * ROWS


def test_a_lease_keeps_a_prefix_and_admission_counts_it(host: Context) -> None:
    with requests(host, memory_limit=memory(5, host), growth_fraction=0) as cache:
        cache.release(computed(cache, PROMPT, room=0), tokens=PROMPT)
        with cache.match([*PROMPT, 1]) as prefix:
            assert prefix.length == 4 * ROWS
            short = cache.admit([1] * (2 * ROWS), room=0)
            assert isinstance(short, Shortage)  # the leased pages cannot be evicted
            request = cache.admit(prefix)  # four of its five pages are cached
            assert isinstance(request, Request)
            assert request.length == 4 * ROWS
        cache.release(request)
        assert isinstance(cache.admit([1] * (2 * ROWS), room=0), Request)  # by evicting the prefix


def test_a_lost_lease_is_renewed(host: Context) -> None:
    with requests(host) as cache:
        cache.release(computed(cache, PROMPT), tokens=PROMPT)
        prefix = cache.match([*PROMPT, 1])
        kv(cache).trim(prefixes=True)
        request = admitted(cache, prefix)
        assert request.length == 0


def test_namespaces_keep_rows_separate(host: Context) -> None:
    with requests(host) as cache:
        french, plain = cache.namespace("french"), cache.match([*PROMPT, 1])
        assert cache.namespace("french") is french
        assert plain.length == 0
        done = computed(cache, PROMPT, namespace=french)
        assert done.namespace is french
        cache.release(done, tokens=PROMPT)
        assert cache.match([*PROMPT, 1]).length == 0
        assert cache.match([*PROMPT, 1], cache.namespace("german")).length == 0
        request = admitted(cache, [*PROMPT, 1], namespace=french)
        assert request.length == 4 * ROWS
        forked = cache.fork(request)
        assert isinstance(forked, list)
        assert forked[0].namespace is french


def test_a_closed_namespace_leaves_nothing_to_its_successor(host: Context) -> None:
    with requests(host) as cache:
        first = cache.namespace("adapter")
        cache.release(computed(cache, PROMPT, namespace=first), tokens=PROMPT)
        running = computed(cache, PROMPT[:9], namespace=first)
        waiting = cache.match([*PROMPT, 1], first)
        first.close()
        second = cache.namespace("adapter")
        assert second is not first
        assert cache.match([*PROMPT, 1], second).length == 0
        for call in (
            lambda: cache.match(PROMPT, first),
            lambda: cache.admit(PROMPT, first),
            lambda: cache.admit(waiting),
            lambda: cache.record(running, PROMPT),
        ):
            with pytest.raises(BadHandle, match="closed"):
                call()
        waiting.release()
        before = kv(cache).stats().prefix_tokens
        cache.release(running, tokens=PROMPT[:9])  # ends the request without recording it
        assert kv(cache).stats().prefix_tokens == before


def test_closed_namespaces_are_forgotten(host: Context) -> None:
    with requests(host) as cache:
        kept = cache.namespace("kept")
        made = [kept.generation]
        for number in range(500):
            one = cache.namespace(f"image {number}")
            made.append(one.generation)
            one.close()
        assert len(cache._spaces) < 50
        assert cache.namespace("kept") is kept
        assert len(set(made)) == len(made)


def test_a_call_is_dropped_if_no_thread_can_start(
    host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    with requests(host) as cache:
        request = computed(cache, PROMPT)
        before = state(kv(cache))
        with monkeypatch.context() as patch:
            patch.setattr(background, "start_new_thread", none)
            with pytest.raises(RuntimeError, match="start new thread"):
                cache.admit_async(PROMPT[1:])
            with pytest.raises(RuntimeError, match="start new thread"):
                cache.swap_out_async(request)
            assert request.state is State.RUNNING
            assert not cache._background.works_on(request)
            assert state(kv(cache)) == before
        # runs only this call, not the failed ones
        other = cache.admit_async(PROMPT).result(WAIT)
        assert isinstance(other, Request)
        assert [*cache.requests] == [request, other]
        assert request.state is State.RUNNING


def test_a_failed_call_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call must be removed from the queue even if another call was queued behind it."""
    calls, done = Background(), list[int]()

    def none(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "start_new_thread", none)
    for number in (1, 2):
        with pytest.raises(RuntimeError):
            calls.begin(partial(done.append, number))
    monkeypatch.undo()
    last = calls.begin(partial(done.append, 3))
    assert last.result(WAIT) is None
    calls.close()
    assert done == [3]
    assert not calls._queue


def test_close_needs_no_thread(host: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, done = Background(), list[int]()
    calls._queue.append(_Queued(lambda: done.append(1), CallFuture(), None))

    def none(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "start_new_thread", none)
    calls.close()
    assert done == [1]


def test_a_name_that_cannot_be_hashed(host: Context) -> None:
    with requests(host) as cache, pytest.raises(InvalidArgument, match="cannot be hashed"):
        cache.namespace([])  # type: ignore[arg-type]


@pytest.mark.parametrize("recorded", [False, True])
def test_every_stream_is_checked(host: Context, recorded: bool) -> None:
    """Checks that streams are validated even if no prefix is read, and even on `host`."""
    with requests(host) as cache:
        if recorded:
            cache.release(computed(cache, PROMPT), tokens=PROMPT)
            eventually(lambda: not any(slot.in_flight for slot in kv(cache).snapshot()))
        before = state(kv(cache))
        for wrong in ("nonsense", 7, object()):
            with cache.match(PROMPT) as prefix:
                for call in (
                    lambda given=wrong: cache.admit(PROMPT, stream=given),
                    lambda given=wrong: cache.admit_async(PROMPT, stream=given),
                    lambda given=wrong: cache.begin(8, stream=given),
                    lambda given=wrong, match=prefix: cache.begin(match, stream=given),
                    lambda given=wrong, match=prefix: cache.admit(match, stream=given),
                ):
                    with pytest.raises(NotGpuWork, match="does not name GPU work"):
                        call()
        assert cache.requests == []
        assert state(kv(cache)) == before


# ---- slots freed without the engine --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["extend", "release", "swap_out", "fork", "swap_out_async", "close"]
)
def test_a_request_ends_when_its_slot_is_freed(host: Context, name: str) -> None:
    """Simulates `ParallelKVCache.recover`: the slot now belongs to another request, which must keep
    it.
    """
    with requests(host, max_batch=1) as cache:
        first = computed(cache, PROMPT[:10])
        cache.cache.free_reqid(first.slot)
        other = kv(cache).alloc_reqid(5)
        assert other == first._slot
        calls = {
            "extend": lambda: cache.extend({first: 11}),
            "release": lambda: cache.release(first),
            "swap_out": lambda: cache.swap_out(first),
            "fork": lambda: cache.fork(first),
            "swap_out_async": lambda: cache.swap_out_async(first).result(WAIT),
        }
        if name == "close":
            cache.close()
        else:
            with pytest.raises(BadHandle, match="ended"):
                calls[name]()
        assert first.state is State.ENDED
        assert cache.requests == []
        assert kv(cache).slots.is_taken(other)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_cache_is_not_closed_under_requests(host: Context, swapped: bool) -> None:
    cache = RequestCache(KVCache(small_config(host.info.granule), host))
    request = computed(cache, PROMPT)
    if swapped:
        cache.swap_out(request)
    with pytest.raises(Busy, match=r"1 open request, such as <Request 0: "):
        kv(cache).close()
    assert cache.requests == [request]
    cache.close()
    assert request.state is State.ENDED
    assert cache.requests == []
    kv(cache).close()
    cache.close()


def test_a_cache_closed_before_its_request_cache_is_named_by_the_next_call(host: Context) -> None:
    cache = RequestCache(KVCache(small_config(host.info.granule), host))
    prefix = cache.match(PROMPT)
    kv(cache).close()
    calls: list[Callable[[], object]] = [
        lambda: cache.admit(PROMPT),
        lambda: cache.match(PROMPT),
        lambda: cache.begin(1),
        lambda: cache.extend({}),
        lambda: cache.prepare({}),
    ]
    for call in calls:
        with pytest.raises(BadHandle, match="the KVCache is closed"):
            call()
    prefix.release()
    cache.close()


def test_the_error_of_a_shrink_names_truncate(host: Context) -> None:
    with requests(host) as cache:
        one = computed(cache, PROMPT)
        for call in (cache.extend, cache.prepare):
            with pytest.raises(InvalidArgument, match=r"5 tokens: .*use truncate to remove rows"):
                call({one: 5})
        with pytest.raises(InvalidArgument, match="a slot holds at most"):
            cache.extend({one: 1 << 40})
        assert one.length == len(PROMPT)


def test_every_call_returns_a_shortage(host: Context) -> None:
    """Every call reports a shortage in the same way: its result is a `Shortage`."""
    with requests(host, memory_limit=memory(1, host)) as cache:
        one = computed(cache, PROMPT[:4])
        many = cache.max_seq_len
        assert cache.extend({one: 5}) is None
        short = [cache.extend({one: many}), cache.prepare({one: many}), cache.admit([1] * many)]
        short.append(cache.admit_async([1] * many).result(60))
        assert all(isinstance(result, Shortage) and result for result in short)


def test_hits_are_counted_at_admission(host: Context) -> None:
    """A repeatedly refused request does not count prefix tokens as hits."""
    with requests(host, memory_limit=memory(5, host)) as cache:
        first = computed(cache, PROMPT)
        cache.record(first, PROMPT)
        before = kv(cache).stats()
        for _ in range(5):
            assert isinstance(cache.admit([*PROMPT, *([1] * ROWS)]), Shortage)
        after = kv(cache).stats()
        assert after.prefix_hit_tokens == before.prefix_hit_tokens
        assert after.prefix_queries == before.prefix_queries
        cache.release(first)
        again = admitted(cache, PROMPT)
        taken = kv(cache).stats().prefix_hit_tokens - before.prefix_hit_tokens
        assert taken == again.length > 0


# ---- forks and swapping --------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_forks_share_the_rows_of_a_request(host: Context, background: bool) -> None:
    with requests(host) as cache:
        parent = computed(cache, PROMPT[:20])
        made = cache.fork_async(parent, 2).result(WAIT) if background else cache.fork(parent, 2)
        assert isinstance(made, list)
        assert parent.state is State.RUNNING
        for one in made:
            assert one.length == 20
            assert rows_are(kv(cache), one.slot, 0, 20, 1.0)
        short = cache.fork(parent, length=9)
        assert isinstance(short, list)
        assert short[0].length == 9


@pytest.mark.parametrize("background", [False, True])
def test_a_swapped_request_is_the_same_one_afterwards(host: Context, background: bool) -> None:
    with requests(host, memory_limit=memory(5, host), growth_fraction=0) as cache:
        request = computed(cache, PROMPT, room=0)
        if background:
            cache.swap_out_async(request).result(WAIT)
        else:
            cache.swap_out(request)
        assert (request.state, request.length) == (State.SWAPPED, 4 * ROWS)
        with pytest.raises(InvalidArgument, match="swapped"):
            cache.extend({request: 40})
        other = computed(cache, [9] * (2 * ROWS), 5.0, room=0)
        back = cache.swap_in_async(request).result(WAIT) if background else cache.swap_in(request)
        assert isinstance(back, Shortage)
        assert back.what == "memory"
        assert request.state is State.SWAPPED
        cache.release(other)
        back = cache.swap_in_async(request).result(WAIT) if background else cache.swap_in(request)
        assert back is None
        assert rows_are(kv(cache), request.slot, 0, 4 * ROWS, 1.0)
        with pytest.raises(InvalidArgument, match="running"):
            cache.swap_in(request)


def test_a_swapped_request_can_be_released(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        cache.swap_out(request)
        held = request.rows
        cache.release(request, tokens=PROMPT)
        assert held is not None
        assert not held.is_open
        assert cache.match(PROMPT).length == 0


# ---- the background ------------------------------------------------------------------------------


@contextmanager
def held_up(cache: RequestCache) -> Iterator[None]:
    """Holds up the background thread until the block ends."""
    gate = threading.Event()
    cache._background.begin(lambda: gate.wait(WAIT))
    try:
        yield
    finally:
        gate.set()


def test_a_request_is_busy_until_its_background_call_is_over(host: Context) -> None:
    with requests(host) as cache:
        request, other = computed(cache, PROMPT), computed(cache, PROMPT[:5])
        with held_up(cache):
            future = cache.swap_out_async(request)
            assert request.state is State.BUSY
            for call in (
                lambda: cache.extend({request: 40}),
                lambda: cache.release(request),
                lambda: cache.fork_async(request),
                lambda: cache.swap_in_async(request),
            ):
                with pytest.raises(Busy, match="background"):
                    call()
            assert cache.extend({other: 12}) is None  # other requests continue
            assert not future.done()
        assert future.result(WAIT) is None
        assert request.state is State.SWAPPED


def test_a_state_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background call completes after the state was read as busy; the error must still say
    busy.
    """
    looks = [State.RUNNING, State.BUSY]
    monkeypatch.setattr(Request, "state", property(lambda _: looks.pop()))
    with pytest.raises(Busy, match="request 3 of 0 tokens is busy, not running"):
        _ = Request(3).slot
    assert looks == [State.RUNNING]


def test_a_call_that_completes_during_the_check_still_reports_busy(
    host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        with held_up(cache):
            future = cache.swap_out_async(request)

            def works_on(key: object) -> bool:
                request.base_state, request.calls = State.SWAPPED, ()
                return True

            with monkeypatch.context() as patch:
                patch.setattr(cache._background, "works_on", works_on)
                with pytest.raises(Busy, match="is busy, not running"):
                    cache.swap_in(request)
            request.base_state = State.RUNNING
        assert future.result(WAIT) is None


@contextmanager
def while_it_runs(cache: RequestCache, name: str, call: Callable[[], Any]) -> Iterator[None]:
    """Runs a call in another thread, but holds it on entry to the cache's method `name` until the
    ``with`` block ends.

    Checks that the call succeeded.
    """
    inside, gate, results = threading.Event(), threading.Event(), list[Any]()
    make = getattr(cache.cache, name)

    def slow(*args: Any) -> Any:
        inside.set()
        assert gate.wait(WAIT)
        return make(*args)

    setattr(cache.cache, name, slow)
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    try:
        assert inside.wait(WAIT)
        yield
    finally:
        delattr(cache.cache, name)
        gate.set()
        thread.join(WAIT)
    assert results == [None]


def test_a_background_call_sees_the_effect_of_an_earlier_call(host: Context) -> None:
    """Makes the background call while another thread's call on the request is running."""
    with requests(host) as cache:
        free = kv(cache).slots.num_free
        request = computed(cache, PROMPT)
        futures: list[Future[Any]] = []
        with while_it_runs(cache, "swap_out", lambda: cache.swap_out(request)):
            futures.append(cache.swap_out_async(request))
        for future in futures:
            with pytest.raises(InvalidArgument, match="is swapped, not running"):
                future.result(WAIT)
        assert request.state is State.SWAPPED
        with while_it_runs(cache, "swap_in", lambda: cache.swap_in(request)):
            again = cache.swap_in_async(request)
        with pytest.raises(InvalidArgument, match="is running, not swapped"):
            again.result(WAIT)
        assert rows_are(kv(cache), request.slot, 0, len(PROMPT), 1.0)
        with while_it_runs(cache, "swap_out", lambda: cache.swap_out(request)):
            fork = cache.fork_async(request)
        with pytest.raises(InvalidArgument, match="is swapped, not running"):
            fork.result(WAIT)
        assert cache.swap_in(request) is None
        with while_it_runs(cache, "free_reqid", lambda: cache.release(request)):
            late = cache.swap_out_async(request)
        with pytest.raises(BadHandle, match="has ended"):
            late.result(WAIT)
        assert request.state is State.ENDED
        assert cache.requests == []
        assert kv(cache).slots.num_free == free


def test_a_state_is_never_older_than_the_end_of_a_call(host: Context) -> None:
    """A thread that sees the call as complete must also see its effect."""
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        for _ in range(300):
            future: Future[Any] = cache.swap_out_async(request)
            while (state := request.state) is State.BUSY:
                pass
            assert state is State.SWAPPED
            future = cache.swap_in_async(request)
            while (state := request.state) is State.BUSY:
                pass
            assert state is State.RUNNING
            assert request.slot >= 0
            assert future.result(WAIT) is None


def test_a_request_released_by_another_thread_has_ended(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)

        class Late(Request):
            """A request that another thread releases between two checks."""

            __slots__ = ()

            def require(self, state: State) -> None:
                Request.require(self, state)
                if self is late:
                    cache.release(request)
                    self.base_state, self._slot = request.base_state, request._slot

        late = Late(request.number, None, request.length, owner=request.owner, _slot=request._slot)
        with pytest.raises(BadHandle, match="has ended"):
            _ = late.slot


def test_a_queued_request_stays_busy_while_other_threads_read_it(
    host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reads the requests after the call is recorded, but before it is queued."""
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        begin = cache._background.begin

        def looked(*args: Any) -> Any:
            thread = threading.Thread(target=lambda: cache.requests)
            thread.start()
            thread.join(WAIT)
            return begin(*args)

        with held_up(cache):
            monkeypatch.setattr(cache._background, "begin", looked)
            future = cache.swap_out_async(request)
            assert request.state is State.BUSY
        assert future.result(WAIT) is None
        assert request.state is State.SWAPPED


def test_a_cancelled_call_is_over_before_its_callbacks(host: Context) -> None:
    """If `cancel` is interrupted, the callbacks may never run, so the call must end before them."""
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        seen: list[State] = []
        with held_up(cache):
            future = cache.swap_out_async(request)
            future._done_callbacks.insert(0, lambda _: seen.append(request.state))
            assert future.cancel()
        assert seen == [State.RUNNING]
        assert request.slot >= 0


def test_no_call_waits_for_the_lock_of_a_future(host: Context) -> None:
    """An exception from a signal handler may leave that lock held by a thread that polled the
    future.
    """
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        seen: list[object] = []

        def look() -> None:
            seen.append(request.state)
            with pytest.raises(Busy):
                _ = request.slot
            with pytest.raises(Busy):
                cache.capacity(request)
            seen.append(cache._background.works_on(request))

        with held_up(cache):
            future = cache.swap_out_async(request)
            thread = threading.Thread(target=look, daemon=True)
            with future._condition:
                thread.start()
                thread.join(WAIT)
                assert not thread.is_alive()
        assert future.result(WAIT) is None
        assert seen == [State.BUSY, True]


def test_a_background_call_leaves_no_garbage(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        gc.collect()
        gc.disable()
        try:
            good: Future[Any] = cache.fork_async(request)
            cache.release(good.result(WAIT)[0])
            bad = cache.fork_async(request, length=10**6)
            assert isinstance(bad.exception(WAIT), InvalidArgument)
            left = [weakref.ref(good), weakref.ref(bad)]
            del good, bad
            eventually(lambda: [one() for one in left] == [None, None])
        finally:
            gc.enable()


def test_concurrent_background_calls_are_serialized(host: Context) -> None:
    """Two threads may both have seen the request as idle."""
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        with held_up(cache):
            first = cache.swap_out_async(request)
            request.calls = ()  # as the second thread saw it, before the first call
            second = cache.swap_out_async(request)
        assert first.result(WAIT) is None
        with pytest.raises(InvalidArgument, match="is swapped, not running"):
            second.result(WAIT)
        assert request.state is State.SWAPPED
        with held_up(cache):
            late = cache.swap_in_async(request)
            assert request.state is State.BUSY
            assert late.cancel()
            assert request.state is State.SWAPPED
        assert cache.swap_in(request) is None
        assert rows_are(kv(cache), request.slot, 0, len(PROMPT), 1.0)


def test_admission_in_the_background(host: Context) -> None:
    with requests(host) as cache:
        cache.release(computed(cache, PROMPT), tokens=PROMPT)
        other = computed(cache, [3] * 5)
        with held_up(cache):
            future = cache.admit_async([*PROMPT, 1])
            assert cache.extend({other: 9}) is None
            assert not future.done()
        request = future.result(WAIT)
        assert isinstance(request, Request)
        assert rows_are(kv(cache), request.slot, 0, request.length, 1.0)
        with pytest.raises(InvalidArgument, match="a slot holds"):
            cache.admit_async([1] * 100).result(WAIT)


def test_the_callers_descriptor_may_be_closed_during_the_call(host: Context) -> None:
    """A call duplicates the descriptors that its background work waits on."""
    with requests(host) as cache:
        first, second = computed(cache, PROMPT), computed(cache, PROMPT[:5])
        third = computed(cache, PROMPT[:6])
        cache.swap_out(third)
        with held_up(cache), FdEvent.create() as event:
            event.set()
            futures: list[Any] = [
                cache.admit_async([7, 8], stream=event),
                cache.fork_async(first, stream=event),
                cache.swap_out_async(second, event),
                cache.swap_in_async(third, event),
            ]
        admitted, forked, *rest = [future.result(WAIT) for future in futures]
        assert isinstance(admitted, Request)
        assert len(forked) == 1
        assert rest == [None, None]


def test_a_failed_background_call_leaves_the_request_as_it_was(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        host.inject(Inject.MAP, count=1, error=5)
        future = cache.fork_async(request)
        with pytest.raises(DriverError):
            future.result(WAIT)
        assert request.state is State.RUNNING
        assert cache.extend({request: 40}) is None


def test_a_cancelled_call_leaves_the_request_as_it_was(host: Context) -> None:
    with requests(host) as cache:
        first, second = computed(cache, PROMPT), computed(cache, PROMPT)
        with held_up(cache):
            cache.swap_out_async(first)
            future = cache.swap_out_async(second)
            assert future.cancel()
            assert second.state is State.RUNNING
        cache.swap_out_async(second).result(WAIT)
        assert first.state is second.state is State.SWAPPED


def test_close_waits_for_the_background(host: Context) -> None:
    with requests(host) as cache:
        request = computed(cache, PROMPT)
        with held_up(cache):
            future = cache.fork_async(request)
        cache.close()
        made = future.result(0)
        assert isinstance(made, list)
        assert request.state is made[0].state is State.ENDED


# ---- unequal layers ------------------------------------------------------------------------------


def test_a_hybrid_model_has_the_same_interface(host: Context) -> None:
    page = host.info.granule
    layers = [LayerShape(2, 64), LayerShape(1, 64)]
    policy = {"dtype": "float32", "max_batch": 2, "max_seq_len": 64, "page_size": page}
    with LayeredCache(layers, host, memory_limit=16 * page, **policy) as whole:
        with RequestCache(whole) as cache:
            unit = whole.sharing_unit
            prompt = list(range(2 * unit))
            request = admitted(cache, prompt, room=0)
            assert cache.extend({request: len(prompt)}) is None
            assert cache.capacity(request) >= len(prompt)
            whole.k(0)[request.slot, : len(prompt)] = 3.0
            cache.release(request, tokens=prompt)
            again = admitted(cache, [*prompt, 1], room=0)
            assert again.length == len(prompt)
            assert whole.k(0)[again.slot, 0, 0, 0].item() == 3.0
            short = cache.admit([7] * 64, room=0)
            assert isinstance(short, Shortage)
            assert short.needed == 64 * 2 * 3 * 64 * 4
            assert short.missing > 0
            assert short.limit == 16 * page
        whole.check_integrity()


def test_ranks_have_no_background_calls(host: Context) -> None:
    class Ranked(KVCache):
        """Reports `lockstep`, as a rank's cache does."""

        lockstep = True  # type: ignore[assignment]

    with Ranked(small_config(host.info.granule), host) as cache, RequestCache(cache) as found:
        request = computed(found, PROMPT)
        for call in (
            lambda: found.admit_async(PROMPT),
            lambda: found.fork_async(request),
            lambda: found.swap_out_async(request),
        ):
            with pytest.raises(NotSupported, match="ranks"):
                call()
        assert request.state is State.RUNNING


def test_a_callback_that_exits_its_thread_stops_nothing_else() -> None:
    """`Future` lets exceptions that do not derive from `Exception` propagate into the thread that
    makes the calls.
    """

    def leave(_: Any) -> None:
        raise SystemExit(3)

    background, key = Background(), object()
    futures = [CallFuture[int]() for _ in range(8)]
    for future in futures:
        future.add_done_callback(leave)
        background.begin(lambda: 1, key, future)
    assert [future.result(WAIT) for future in futures] == [1] * 8
    eventually(lambda: not background.works_on(key))
    last = _Queued(lambda: 2, CallFuture(), key)
    last.future.add_done_callback(leave)
    background._queue.append(last)
    # close() runs the remaining call
    closing = threading.Thread(target=background.close, daemon=True)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
