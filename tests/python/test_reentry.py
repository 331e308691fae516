# SPDX-License-Identifier: MIT
"""Tests re-entrant calls, made by finalizers and signal handlers during another call."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupts_helpers import Handler, Interrupted, Interrupts
from kvcache_helpers import eventually, small_config, wrap_methods

from pyvmem import (
    BadHandle,
    Context,
    FdEvent,
    ForkedProcess,
    InvalidArgument,
    KVCache,
    Reentered,
    VMemError,
)
from pyvmem.engine import RequestCache
from pyvmem.kvcache import Budget
from pyvmem.kvcache.cache import GroupView
from pyvmem.kvcache.facets import CacheMemory, CacheSlots
from pyvmem.memory.streams import KeptEvents
from pyvmem.plumbing.reentry import reentrant_lock, when_collected
from pyvmem.telemetry import Telemetry

PAGE = 4096


def each_point(case: Callable[[int], bool], stride: int) -> None:
    """Runs a case at every `stride`-th point; the case returns false when there are no more
    points.
    """
    at = 1
    while case(at):
        at += stride
    assert at > 20, "there were hardly any points"


# ---- a cache -----------------------------------------------------------------------------------


def filled(context: Context, budget: Budget | None = None) -> KVCache:
    """Creates a cache with a request of ten rows of ones."""
    cache = KVCache(small_config(PAGE, max_batch=4, max_seq_len=96), context, budget=budget)
    assert cache.alloc_reqid() == 0
    assert cache.step([10, 0, 0, 0]) == 0
    cache.k(0)[0, :10] = 1.0
    return cache


@pytest.mark.parametrize("handler", ["swallows", "raises"])
@pytest.mark.parametrize("called", ["stats", "step", "close"])
def test_a_handler_that_calls_the_cache_gets_an_error(called: str, handler: str) -> None:
    refused = 0

    def case(at: int) -> bool:
        nonlocal refused
        with Context("host", granule=PAGE) as context, filled(context) as cache:
            calls: dict[str, Callable[[], Any]] = {
                "stats": cache.stats,
                "step": lambda: cache.step([11, 0, 0, 0]),
                "close": cache.close,
            }

            def handle() -> None:
                nonlocal refused
                try:
                    calls[called]()
                except Reentered as error:
                    refused += 1
                    assert error.op == called
                    assert called in str(error)
                    assert error.interrupted in str(error)
                    if handler == "raises":
                        raise

            calling = Handler(at, handle)
            try:
                # Before the section starts, the handler's call is an ordinary call and may close
                # the cache.
                done = calling.run(lambda: cache.step([90, 0, 0, 0]))
            except (Reentered, BadHandle) as error:
                assert handler == "raises" or cache.is_closed, error
            else:
                assert done == 0
            if not cache.is_closed:
                cache.check_integrity()
                assert cache.step([90, 0, 0, 0]) == 0
                assert bool((cache.k(0)[0, :10] == 1.0).all())
                cache.k(0)[0, 10:90] = 2.0
        return calling.came

    each_point(case, stride=1)
    assert refused > 5


def test_a_section_may_call_through_other_functions() -> None:
    """Any call inside a section belongs to it, even if made through another function."""
    with Context("host", granule=PAGE) as context, filled(context) as cache:

        @contextlib.contextmanager
        def called() -> Any:
            yield cache.stats()

        with cache.internals.lock, cache.internals.journal:
            assert cache.step([20, 0, 0, 0]) == 0
            with called() as stats:
                assert stats.active_slots == 1
            with cache.internals.lock, cache.internals.journal:
                assert [cache.step([n, 0, 0, 0]) for n in (21, 22)] == [0, 0]
        cache.check_integrity()


@pytest.mark.parametrize("again", [0, 1, 5, 9])
def test_the_rollback_of_a_section_may_call_the_cache(again: int) -> None:
    """Covers a rollback that is itself interrupted, so that the next call completes it."""
    with Context("host", granule=PAGE) as context, filled(context) as cache:
        second = cache.alloc_reqid()
        assert second is not None
        left = again

        def settle() -> None:
            nonlocal left
            assert cache.stats().active_slots >= 1
            if left:
                left -= 1
                raise KeyboardInterrupt
            if cache.slots.owner(second) is not None:
                cache.free_reqid(second)

        with pytest.raises(KeyboardInterrupt), cache.internals.lock, cache.internals.journal:
            cache.internals.journal.on_abort(settle)
            assert cache.step([20, 20, 0, 0]) == 0
            raise KeyboardInterrupt
        for _ in range(again - 1):
            with pytest.raises(KeyboardInterrupt):
                cache.stats()
        assert cache.stats().active_slots == 1
        cache.check_integrity()


def test_a_handler_during_the_rollback_after_two_exceptions() -> None:
    """The first rollback is also interrupted; the next call completes it."""
    refused = unsettled = 0

    def case(first: int, second: int, at: int) -> bool:
        nonlocal refused, unsettled
        with Context("host", granule=PAGE) as context, filled(context) as cache:
            with contextlib.suppress(Interrupted):
                Interrupts(first, second).run(lambda: cache.step([90, 0, 0, 0]))
            if cache.internals.journal._caller is None:
                return False
            unsettled += 1

            def handle() -> None:
                nonlocal refused
                try:
                    cache.step([40, 0, 0, 0])
                except Reentered:
                    refused += 1

            calling = Handler(at, handle)
            calling.run(cache.stats)
            cache.check_integrity()
            assert cache.step([90, 0, 0, 0]) == 0
            return calling.came

    for first in range(20, 70, 10):
        for second in range(2, 30, 9):
            at = 1
            while case(first, second, at):
                at += 23
    assert unsettled > 20
    assert refused > 20


@pytest.mark.parametrize("called", ["requests", "release", "truncate"])
def test_a_handler_that_calls_the_engine_gets_an_error(called: str) -> None:
    """Includes points between the cache's call and the engine's record of it."""
    refused = 0

    def case(at: int) -> bool:
        nonlocal refused
        with Context("host", granule=PAGE) as context, filled(context) as cache:
            requests = RequestCache(cache)
            one = requests.admit([1] * 10)
            assert requests.extend({one: 10}) is None
            calls: dict[str, Callable[[], Any]] = {
                "requests": lambda: requests.requests,
                "release": lambda: requests.release(one),
                "truncate": lambda: requests.truncate(one, 5),
            }

            def handle() -> None:
                nonlocal refused
                try:
                    calls[called]()
                except Reentered:
                    refused += 1
                except VMemError:
                    pass  # before or after the engine's call, this is an ordinary call

            calling = Handler(at, handle)
            with contextlib.suppress(VMemError):
                calling.run(lambda: requests.swap_out(one))
            if one in requests.requests:
                assert one.length in (5, 10)
                with contextlib.suppress(VMemError):
                    assert requests.swap_in(one) is None
                assert requests.extend({one: 20}) is None
                requests.release(one)
            assert cache.stats().active_slots == 1, "the first request's"
            cache.check_integrity()
            requests.close()
        return calling.came

    each_point(case, stride=3)
    assert refused > 20


def test_an_overridden_method_is_not_an_interruption() -> None:
    class Mine(KVCache):
        def free_reqid(self, *args: Any, **kwargs: Any) -> None:
            self.stats()
            super().free_reqid(*args, **kwargs)

    class MyRequests(RequestCache):
        def release(self, *args: Any, **kwargs: Any) -> None:
            assert self.requests
            super().release(*args, **kwargs)

    config = small_config(PAGE, max_batch=4, max_seq_len=96)
    with Context("host", granule=PAGE) as context, Mine(config, context) as cache:
        requests = MyRequests(cache)
        one, _two = requests.admit([1] * 10), requests.admit([2] * 10)
        requests.release(one)
        assert cache.stats().active_slots == 1
        requests.close()
        assert cache.stats().active_slots == 0


def test_wrapped_methods_are_not_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wraps calls as tracers do."""

    wrap_methods(monkeypatch, KVCache, CacheMemory, CacheSlots, GroupView, RequestCache, Budget)
    with Context("host", granule=PAGE) as context, Budget(context, 64 * PAGE) as budget:
        config = small_config(PAGE, max_batch=4, max_seq_len=96, memory_limit=0)
        with KVCache(config, context, budget=budget) as cache, filled(context, budget):
            requests = RequestCache(cache)
            one, two = (requests.admit([number] * 10) for number in (1, 2))
            assert requests.extend({one: 10, two: 10}) is None
            (fork,) = requests.fork(one)
            assert requests.swap_out_async(one).result(20) is None
            assert requests.swap_in(one) is None
            requests.truncate(two, 5)
            requests.release(two)
            assert cache.snapshot()[fork.slot].seq_len == 10
            assert cache.step_async([40 * (one.state == "active") for one in cache.snapshot()]) == 0
            assert cache.step([40 * (one.state == "active") for one in cache.snapshot()]) == 0
            cache.check_integrity()
            cache.trim(prefixes=True)
            requests.close()
            assert cache.stats().active_slots == 0


def test_a_dropped_transformers_cache_is_closed_during_another_caches_call() -> None:
    """The dropped cache is garbage-collected during a call to another cache in the same budget."""
    transformers = pytest.importorskip("transformers")
    from pyvmem.hf import VMemCache

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        vocab_size=32,
    )

    def put(cache: Any, tokens: int, value: float) -> None:
        states = torch.full((1, 2, tokens, 64), value)
        for layer in range(2):
            cache.update(states, states, layer)

    def case(at: int) -> bool:
        with Context("host", granule=PAGE) as context:
            budget = Budget(context, PAGE * 120)
            lives = VMemCache(config, 2, 96, context=context, budget=budget, page_size=PAGE)
            dropped = VMemCache(config, 2, 96, context=context, budget=budget, page_size=PAGE)
            put(lives, 8, 1.0)
            put(dropped, 40, 2.0)
            dropped.itself = dropped  # only the garbage collector can free it
            del dropped
            calling = Handler(at, lambda: (gc.collect(), None)[1])
            calling.run(lambda: put(lives, 40, 1.0))
            gc.collect()
            eventually(lambda: len(budget.stats().caches) == 1)
            lives.kvcache.check_integrity()
            keys = lives.layers[0].keys
            assert keys.shape[2] == 48
            assert bool((keys == 1.0).all())
            del keys
            lives.close()
            assert context.stats().mapped_bytes == 0
        return calling.came

    each_point(case, stride=67)


# ---- objects whose life ends with their owner's
# ---------------------------------------------------------


class Owner:
    pass


def test_an_end_outside_of_calls_runs_immediately() -> None:
    ended: list[int] = []
    owner = Owner()
    when_collected(owner, lambda: ended.append(threading.get_ident()))
    del owner
    assert ended == [threading.get_ident()]


def test_an_end_during_a_call_runs_in_another_thread() -> None:
    ended: list[int] = []
    owners = [Owner()]
    when_collected(owners[0], lambda: ended.append(threading.get_ident()))
    with Context("host", granule=PAGE) as context:
        calling = Handler(1, owners.clear)
        calling.run(context.stats)
        assert calling.came
        eventually(lambda: bool(ended))
    assert ended != [threading.get_ident()]


def test_a_detached_end_does_not_run() -> None:
    ended: list[int] = []
    owner = Owner()
    assert when_collected(owner, lambda: ended.append(1)).detach() is not None
    del owner
    assert not ended


def test_an_end_without_a_thread_waits_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[int] = []
    owners, more = [Owner()], Owner()
    when_collected(owners[0], lambda: ended.append(1))
    with Context("host", granule=PAGE) as context:
        with monkeypatch.context() as patch:
            patch.setattr("pyvmem.plumbing.reentry.start_new_thread", fails)
            Handler(1, owners.clear).run(context.stats)
        assert not ended
        when_collected(more, lambda: None)
        eventually(lambda: ended == [1])


# ---- locks -------------------------------------------------------------------------------------


def test_reservations_change_during_a_call_on_another() -> None:
    def case(at: int) -> bool:
        with Context("host", granule=PAGE) as context:
            other = context.reserve(PAGE)
            made: list[Any] = []

            def handle() -> None:
                other.close()
                made.append(context.reserve(PAGE))
                made[0].array((PAGE,), "uint8")

            def call() -> None:
                with context.reserve(PAGE) as one:
                    one.array((PAGE,), "uint8")

            calling = Handler(at, handle)
            calling.run(call)
            if not calling.came:
                handle()
            assert set(context.reservations()) == set(made)
            for one in made:
                one.close()
        return calling.came

    each_point(case, stride=3)


@contextlib.contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        yield
    finally:
        go.set()
        thread.join()


def test_a_lock_that_another_thread_held_is_free_in_a_child() -> None:
    lock = reentrant_lock()
    with held_by_another_thread(lock):
        pid = os.fork()
        if not pid:
            os._exit(0 if lock.acquire(timeout=10) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_context_whose_lock_was_held_raises_in_a_child() -> None:
    with Context("host", granule=PAGE) as context, held_by_another_thread(context._lock):
        pid = os.fork()
        if not pid:
            threading.Timer(10, os._exit, (2,)).start()
            try:
                context.close()
            except ForkedProcess:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_statistics_read_by_a_handler_during_the_same_call() -> None:
    refused = 0
    with Context("host", granule=PAGE) as context, filled(context) as cache:
        telemetry = Telemetry()
        telemetry.add(cache)

        def handle() -> None:
            nonlocal refused
            try:
                assert "pyvmem" in telemetry.text()
            except Reentered:
                refused += 1

        def case(at: int) -> bool:
            calling = Handler(at, handle)
            assert calling.run(telemetry.text).splitlines()[-1].startswith("pyvmem")
            return calling.came

        each_point(case, stride=41)
        assert refused
        with pytest.raises(InvalidArgument, match="already been added"):
            telemetry.add(cache)


def test_events_are_kept_during_a_keep_of_others() -> None:
    class Batch:
        def __init__(self, over: bool, then: Callable[[], None] = lambda: None) -> None:
            self.over, self.then, self._held = over, then, False

        def _over(self) -> bool:
            then, self.then = self.then, lambda: None
            then()
            return self.over

    kept: Any = KeptEvents()
    late = Batch(False)
    # A finalizer makes its call while the first of two completed batches is checked.
    first = Batch(True, lambda: kept.keep(Batch(True), ["nested"]))
    kept.keep(late, ["late"])
    kept.keep(first, ["first"])
    kept.keep(Batch(True), ["second"])
    for _ in range(8):
        kept.keep(Batch(True), ["more"])
    assert any(events == ["late"] for _, events in kept._kept), (
        "events of unfinished batches are kept"
    )
    assert not any(events == ["first"] for _, events in kept._kept)


def test_a_buffer_collected_during_a_call_of_its_resource() -> None:
    """cuda.core closes a buffer that is garbage-collected."""
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    refused = 0

    def case(at: int) -> bool:
        nonlocal refused
        with Context("host", granule=PAGE) as context, VMemResource(context) as resource:
            ends, made = resource.allocate(PAGE), []

            def handle() -> None:
                nonlocal refused
                ends.close()
                made.append(resource.allocate(2 * PAGE))
                try:
                    resource.close()
                except Reentered:
                    refused += 1
                except Exception as error:
                    assert "alive" in str(error)

            calling = Handler(at, handle)
            found = [calling.run(lambda: resource.allocate(2 * PAGE))]
            found += made
            assert len({int(one.handle) for one in found}) == len(found)
            for one in found:
                one.close()
            if not calling.came:
                ends.close()
            resource.allocate(PAGE).close()
            assert resource.live_buffers == 0
        return calling.came

    each_point(case, stride=3)
    assert refused > 5


def test_a_buffer_collected_before_its_stream() -> None:
    """The next call waits for the work on that stream."""
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    class Resource(VMemResource):
        is_device_accessible = True  # makes the resource honor streams

        def _buffer(self, addr: int, size: int, stream: Any) -> Any:
            return addr, size

    def case(at: int) -> bool:
        with Context("host", granule=PAGE) as context, Resource(context) as resource:
            buffer, work = resource.allocate(PAGE), FdEvent.create()
            calling = Handler(at, lambda: resource.deallocate(*buffer, work))
            other = calling.run(lambda: resource.allocate(PAGE))
            work.set()
            work.close()
            if not calling.came:
                resource.deallocate(*buffer)
            resource.deallocate(*other)
            resource.deallocate(*resource.allocate(PAGE))
            assert resource.live_buffers == 0
        return calling.came

    each_point(case, stride=3)


def test_a_buffer_whose_stream_was_closed_before_its_free() -> None:
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    with Context("host", granule=PAGE) as context, VMemResource(context) as resource:
        buffer = resource.allocate(PAGE)
        unmap, given = resource._unmap, []

        def fails(block: Any, after: Any = ()) -> None:
            given.append(after)
            if len(given) == 1:
                raise BadHandle("the stream is closed")
            unmap(block, after)

        resource._unmap = fails
        resource._left.append((buffer.handle, PAGE, FdEvent.create()))
        resource._reap()
        del resource._unmap
        assert len(given) == 2
        assert resource.live_buffers == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffer.close()  # a second attempt


# ---- callbacks on futures ----------------------------------------------------------------------


def test_a_callback_closes_the_requests_of_a_cache() -> None:
    """close() runs the calls that are queued behind the one whose callback calls it."""
    with Context("host", granule=PAGE) as context, filled(context) as cache:
        requests = RequestCache(cache)
        one, two = requests.admit([1] * 10), requests.admit([2] * 10)
        assert requests.extend({one: 10, two: 10}) is None
        closed = threading.Event()
        begin = threading.Event()
        slow = requests._background.begin(lambda: begin.wait(20))
        first = requests.swap_out_async(one)
        second = requests.swap_out_async(two)

        def close(_: Any) -> None:
            assert not second.done()
            requests.close()
            assert second.done()
            closed.set()

        first.add_done_callback(close)
        begin.set()
        assert closed.wait(20)
        assert slow.result()
        assert not requests.requests
        requests.close()


def test_a_call_in_the_background_cannot_wait_for_itself() -> None:
    with Context("host", granule=PAGE) as context, filled(context) as cache:
        requests = RequestCache(cache)
        with pytest.raises(Reentered, match="close"):
            requests._background.begin(requests.close).result(20)
        assert not cache.is_closed
        requests.close()
