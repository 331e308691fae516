# SPDX-License-Identifier: MIT
"""Calls are ordered after the stream or event that they are given, with real kernels.

A kernel of about 100 ms precedes the work under test on the stream in question; torch's current
stream is a different, idle stream. The wrong order would not cause a fault, only wrong
contents, so the tests compare contents.

Needs a CUDA device, torch, and a back end (cuda, stock) that passes its probe; skipped otherwise.
Streams and events of cuda.core are tested if it is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

import pyvmem
from pyvmem import Context, CurrentStream, FdEvent, InvalidArgument, KVCache, OpBatch
from pyvmem.kvcache.events import is_over, record, wait_for

torch = pytest.importorskip("torch")
from gpu_helpers import LAYERS, ROWS, contexts, make, needs_gpu  # noqa: E402

pytestmark = needs_gpu()
context = contexts()

CYCLES = 200_000_000  # 100 ms at 2 GHz
STREAMS = ["none", "CurrentStream", "torch", "cuda.core", "protocol"]
EVENTS = ["torch event", "cuda.core event", "FdEvent"]


class Protocol:
    """A stream of another library, which only has a `__cuda_stream__` method."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class Lane:
    """A stream with work, and the object that identifies it in a call.

    Attributes:
        stream: the torch stream on which the work is launched.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._core: Any = None
        self._setters: list[tuple[threading.Thread, FdEvent]] = []
        if kind.startswith("cuda.core"):
            device = pytest.importorskip("cuda.core").Device(0)
            device.set_current()
            self._core = device.create_stream()
            self.stream: Any = torch.cuda.ExternalStream(int(self._core.handle))
        else:
            self.stream = torch.cuda.Stream()

    @property
    def is_stream(self) -> bool:
        return self.kind in STREAMS

    def current(self) -> AbstractContextManager[Any]:
        """Returns a context for the call that makes the lane torch's current stream if needed."""
        here = self.kind in ("none", "CurrentStream")
        return torch.cuda.stream(self.stream) if here else nullcontext()

    def name(self) -> Any:
        """Returns the object that identifies the work launched so far."""
        if self.kind == "none":
            return None
        if self.kind == "CurrentStream":
            return CurrentStream
        if self.kind == "torch":
            return self.stream
        if self.kind == "cuda.core":
            return self._core
        if self.kind == "protocol":
            return Protocol(self.stream.cuda_stream)
        if self.kind == "torch event":
            return self.stream.record_event()
        if self.kind == "cuda.core event":
            return self._core.record()
        fd, done = FdEvent.create(), self.stream.record_event()
        setter = threading.Thread(target=lambda: (done.synchronize(), fd.set()))
        setter.start()
        self._setters.append((setter, fd))
        return fd

    def close(self) -> None:
        self.stream.synchronize()
        for setter, fd in self._setters:
            setter.join()
            fd.close()


@pytest.fixture(params=STREAMS + EVENTS)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    one = Lane(request.param)
    yield one
    one.close()


@pytest.fixture(params=["torch", "cuda.core", "FdEvent"])
def earlier(request: pytest.FixtureRequest) -> Iterator[Lane]:
    """A lane for the work of a slot's previous owner, recorded as an event in each library."""
    one = Lane(request.param)
    yield one
    one.close()


def one_slot(context: Context, **changes: Any) -> KVCache:
    return make(context, **{"max_batch": 1, **changes})


def put(cache: KVCache, reqid: int, length: int, value: float) -> None:
    """Fills rows with `value` on the current stream."""
    for layer in range(LAYERS):
        cache.k(layer)[reqid, :length].fill_(value)
        cache.v(layer)[reqid, :length].fill_(value)


def room(cache: KVCache, length: int) -> Any:
    """Returns an output tensor for `late_read`, after running each of the tests' kernels once."""
    rows = cache.v(1)[0, :length]
    out = torch.full_like(rows, -1.0)
    torch.mul(rows, 1, out=out)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    return out


def late_read(lane: Lane, cache: KVCache, reqid: int, out: Any) -> None:
    """Queues a read of rows on the lane, after 100 ms of other work."""
    with torch.cuda.stream(lane.stream):
        torch.cuda._sleep(CYCLES)
        torch.mul(cache.v(1)[reqid, : out.shape[0]], 1, out=out)


def late_write(lane: Lane, cache: KVCache, reqid: int, length: int, value: float) -> None:
    """Queues a write of rows on the lane, after 100 ms of other work."""
    with torch.cuda.stream(lane.stream):
        torch.cuda._sleep(CYCLES)
        put(cache, reqid, length, value)


def started(cache: KVCache, length: int, value: float) -> None:
    """Starts request 0 with rows of `value`; returns once no work is in flight."""
    assert cache.alloc_reqid() == 0
    lens = [0] * cache.config.max_batch
    lens[0] = length
    assert cache.step(lens) == 0
    put(cache, 0, length, value)
    torch.cuda.synchronize()


def needs_sharing(context: Context) -> None:
    """Skips the test if the back end cannot map pages twice or cannot map them read-only."""
    for cap in (pyvmem.Caps.ALIAS, pyvmem.Caps.READONLY):
        if cap not in context.info.caps:
            pytest.skip(f"back end {context.info.backend} has no {cap.name}")


def all_are(rows: Any, value: float) -> bool:
    return bool((rows == value).all())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("zero_fill", [True, False])
def test_freed_pages_are_not_touched_before_the_named_work(
    context: Context, lane: Lane, zero_fill: bool, ahead: bool
) -> None:
    """Calls free_reqid with each kind of lane; the next owner writes on torch's current stream."""
    length = 4 * ROWS
    with one_slot(context, zero_fill=zero_fill) as cache:
        started(cache, length, 3.0)
        out = room(cache, length)
        late_read(lane, cache, 0, out)
        with lane.current():
            cache.free_reqid(0, lane.name())
        assert not lane.stream.query(), "free_reqid waited"
        assert cache.alloc_reqid() == 0
        if ahead:
            assert cache.step_async([length]) == 0
        assert cache.step([length]) == 0
        put(cache, 0, length, 5.0)
        torch.cuda.synchronize()
        assert all_are(out, 3.0)
        assert all_are(cache.v(1)[0, :length], 5.0)


@pytest.mark.parametrize("zero_fill", [True, False])
def test_the_named_stream_waits_for_the_slots_previous_owner(
    context: Context, earlier: Lane, lane: Lane, zero_fill: bool
) -> None:
    """Calls step with each kind of lane after each kind of event.

    The CPU waits if the lane is an event, or if the earlier event is an FdEvent.
    """
    length = 4 * ROWS
    with one_slot(context, zero_fill=zero_fill) as cache:
        started(cache, length, 3.0)
        out, seen = room(cache, length), room(cache, length)
        late_read(earlier, cache, 0, out)
        cache.free_reqid(0, earlier.name())
        assert cache.alloc_reqid() == 0
        with lane.current():
            assert cache.step([length], lane.name()) == 0
        if not lane.is_stream or earlier.kind == "FdEvent":
            assert earlier.stream.query(), "only a stream can wait, and only for CUDA's events"
        elif not zero_fill:
            assert not earlier.stream.query(), "the CPU waited although the stream could"
        with torch.cuda.stream(lane.stream):
            torch.mul(cache.v(1)[0, :length], 1, out=seen)
            put(cache, 0, length, 5.0)
        torch.cuda.synchronize()
        assert all_are(out, 3.0)
        assert all_are(seen, 0.0 if zero_fill else 3.0)


def test_a_fork_copies_what_the_named_work_writes(context: Context, lane: Lane) -> None:
    """The rows fill less than a page, so all of them are copied."""
    length = ROWS // 2
    needs_sharing(context)
    with make(context) as cache:
        started(cache, length, 3.0)
        room(cache, length)
        late_write(lane, cache, 0, length, 7.0)
        with lane.current():
            child = cache.fork(0, stream=lane.name())
        assert child == 1
        torch.cuda.synchronize()
        assert all_are(cache.k(0)[1, :length], 7.0)
        assert all_are(cache.v(1)[1, :length], 7.0)


def test_a_swap_saves_what_the_named_work_writes(context: Context, lane: Lane) -> None:
    length = 4 * ROWS
    with one_slot(context) as cache:
        started(cache, length, 3.0)
        room(cache, length)
        late_write(lane, cache, 0, length, 7.0)
        with lane.current():
            swapped = cache.swap_out(0, lane.name())
        assert cache.swap_in(swapped) == 0
        torch.cuda.synchronize()
        assert all_are(cache.v(1)[0, :length], 7.0)


@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_swap_in_overwrites_nothing_that_is_still_read(
    context: Context, lane: Lane, zero_fill: bool
) -> None:
    length = 4 * ROWS
    with one_slot(context, zero_fill=zero_fill) as cache:
        started(cache, length, 7.0)
        swapped = cache.swap_out(0)
        started(cache, length, 3.0)
        out = room(cache, length)
        late_read(lane, cache, 0, out)
        with lane.current():
            cache.free_reqid(0, lane.name())
        assert cache.swap_in(swapped) == 0
        torch.cuda.synchronize()
        assert all_are(out, 3.0)
        assert all_are(cache.v(1)[0, :length], 7.0)


def test_alloc_prefix_waits_for_the_writers(context: Context, earlier: Lane, lane: Lane) -> None:
    """Calls alloc_prefix with each kind of lane after each kind of event."""
    length = 4 * ROWS
    needs_sharing(context)
    with make(context) as cache:
        started(cache, length, 3.0)
        seen = room(cache, length)
        late_write(earlier, cache, 0, length, 7.0)
        tokens = list(range(length))
        cache.free_reqid(0, earlier.name(), tokens)
        with lane.current():
            found = cache.alloc_prefix(tokens, 0, lane.name())
        assert found is not None
        assert found[1] == length
        with torch.cuda.stream(lane.stream):
            torch.mul(cache.v(1)[found[0], :length], 1, out=seen)
        torch.cuda.synchronize()
        assert all_are(seen, 7.0)


def test_a_batch_runs_after_the_named_work(context: Context, lane: Lane) -> None:
    """Tests Context.submit and Context.batch, whose `after` cannot be None."""
    if lane.kind == "none":
        pytest.skip("after: None is refused")
    page = context.info.granule
    with context.reserve(page, visible=True) as reservation:
        ops = OpBatch(1)
        ops.populate(reservation.addr, page)
        context.batch(ops)
        rows = reservation.tensor((page,), "uint8")
        out = torch.zeros_like(rows)
        for run in (lambda ops, work: context.submit(ops, work).wait(60), context.batch):
            rows.fill_(3)
            torch.mul(rows, 1, out=out)
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            out.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(CYCLES)
                torch.mul(rows, 1, out=out)
            ops.clear()
            ops.fill(reservation.addr, page, 9)
            with lane.current():
                run(ops, [lane.name()])
            torch.cuda.synchronize()
            assert all_are(out, 3)
            assert all_are(rows, 9)
        del rows


@pytest.mark.parametrize("kind", STREAMS)
def test_calls_during_a_capture_neither_break_nor_join_it(context: Context, kind: str) -> None:
    """Makes calls during a capture; a call that is given the captured stream is refused."""
    lane, busy = Lane(kind), Lane("torch")
    with one_slot(context) as cache:
        started(cache, ROWS, 3.0)
        x = torch.zeros(8, device="cuda")
        room(cache, ROWS)
        event = record(busy.stream, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane.stream):
            x.add_(1)
            assert is_over(event) in (True, False)
            wait_for(event)
            cache.stats()
            with pytest.raises(InvalidArgument, match="captured"):
                cache.free_reqid(0, lane.name())
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert all_are(x, 2.0)
        assert cache.snapshot()[0].state == "active"
    lane.close()
    busy.close()
