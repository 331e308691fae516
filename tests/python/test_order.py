# SPDX-License-Identifier: MIT
"""Checks that a call is ordered after the stream or event passed to it, and after nothing else."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from gpu_stand_ins import CORE, CURRENT, DEFAULT, LEGACY, OTHER, TORCH, Gpu, gpu
from kvcache_helpers import ROWS, lens, small_cache, state

import pyvmem
from pyvmem import Context, CurrentStream, FdEvent, InvalidArgument, NotGpuWork, OpBatch
from pyvmem.kvcache import LayeredCache, LayerShape
from pyvmem.kvcache.events import (
    PriorWork,
    is_over,
    order_after,
    order_ticket,
    prune,
    record,
    wait_for,
)
from pyvmem.memory import streams
from pyvmem.memory.streams import Kind, work_of

__all__ = ["gpu"]


def given(gpu: Any, name: str) -> Any:
    made = gpu.made
    return {
        "none": lambda: None,
        "CurrentStream": lambda: CurrentStream,
        "torch": lambda: made.TorchStream(TORCH),
        "cuda.core": lambda: made.CoreStream(CORE),
        "protocol": lambda: made.Protocol(OTHER),
        "protocol, legacy": lambda: made.Protocol(LEGACY),
        "protocol, default": lambda: made.Protocol(DEFAULT),
        "torch event": lambda: made.TorchEvent(0xA1),
        "cuda.core event": lambda: made.CoreEvent(0xA2),
    }[name]()


STREAMS = {
    "none": CURRENT,
    "CurrentStream": CURRENT,
    "torch": TORCH,
    "cuda.core": CORE,
    "protocol": OTHER,
}
EVENTS = {"torch event": 0xA1, "cuda.core event": 0xA2}


# ---- every pair of stream kinds --------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("event", EVENTS)
def test_exactly_the_given_stream_waits(gpu: Gpu, event: str, stream: str) -> None:
    order_after(given(gpu, event), given(gpu, stream), 0)
    assert gpu.log == [(STREAMS[stream], "waits for", EVENTS[event])]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stream", ["protocol, legacy", "protocol, default"])
def test_the_default_stream_by_any_name(gpu: Gpu, event: str, stream: str) -> None:
    """In torch, the default stream's handle is 0; cuda.core treats 0 as no stream at all and uses
    1.
    """
    order_after(given(gpu, event), given(gpu, stream), 0)
    assert gpu.log == [(DEFAULT if event == "torch event" else LEGACY, "waits for", EVENTS[event])]


@pytest.mark.parametrize("other", EVENTS)
@pytest.mark.parametrize("event", EVENTS)
def test_given_an_event_the_cpu_waits(gpu: Gpu, event: str, other: str) -> None:
    order_after(given(gpu, event), given(gpu, other), 0)
    assert gpu.log == [("cpu", "waits for", EVENTS[event])]


@pytest.mark.parametrize("event", EVENTS)
def test_given_a_descriptor_the_cpu_waits(gpu: Gpu, event: str) -> None:
    with FdEvent.create() as other:
        order_after(given(gpu, event), other, 0)
    assert gpu.log == [("cpu", "waits for", EVENTS[event])]


@pytest.mark.parametrize("stream", [*STREAMS, *EVENTS])
def test_for_a_descriptor_the_cpu_waits(gpu: Gpu, stream: str) -> None:
    with FdEvent.create() as event:
        event.set()
        order_after(event, given(gpu, stream), 0)
    assert gpu.log == []


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("stream", [*STREAMS, *EVENTS])
def test_on_host_the_cpu_waits(gpu: Gpu, event: str, stream: str) -> None:
    order_after(given(gpu, event), given(gpu, stream), None)
    assert gpu.log == [("cpu", "waits for", EVENTS[event])]


def test_an_event_that_was_never_recorded_is_no_work(gpu: Any) -> None:
    order_after(gpu.made.TorchEvent(0), None, 0)
    assert gpu.log == []


@pytest.mark.parametrize("stream", STREAMS)
def test_the_given_streams_work_is_recorded(gpu: Gpu, stream: str) -> None:
    event = record(given(gpu, stream), 0)
    assert work_of(event).kind is Kind.EVENT
    assert work_of(event).handle == gpu.event_of(STREAMS[stream])
    assert record(given(gpu, stream), None) is None
    assert [is_over(event), len(prune([event]))] == [False, 1]
    gpu.over = True
    assert [is_over(event), len(prune([event]))] == [True, 0]
    wait_for(event)
    assert gpu.log == [("cpu", "waits for", gpu.event_of(STREAMS[stream]))]


def test_a_given_event_is_used_unchanged(gpu: Gpu) -> None:
    for name in EVENTS:
        event = given(gpu, name)
        assert record(event, 0) is event
    with FdEvent.create() as fd:
        held = record(fd, 0)
        fd.set()
    assert held.fd != fd.fd
    assert is_over(held)
    with pytest.raises(pyvmem.BadHandle, match=r"FdEvent\(\d+\): Bad file descriptor"):
        record(FdEvent(1 << 20), 0)


@pytest.mark.parametrize("stream", [*STREAMS, *EVENTS])
def test_prior_work_is_recorded_once_and_waited_for_once(gpu: Gpu, stream: str) -> None:
    work = PriorWork(given(gpu, stream), 0)
    assert PriorWork(work, 0) is work
    event = work.record()
    assert work.record() is event
    (wait,) = work.pending()
    assert gpu.log == []
    wait()
    assert work.over
    assert (work.record(), work.pending()) == (None, [])
    work.wait()
    handle = STREAMS[stream] + 0xE000 if stream in STREAMS else EVENTS[stream]
    assert gpu.log == [("cpu", "waits for", handle)]


def test_completed_prior_work_is_not_waited_for(gpu: Gpu) -> None:
    work = PriorWork(None, 0)
    gpu.over = True
    assert work.pending() == []
    work.wait()
    assert gpu.log == []


def test_on_host_prior_work_must_be_a_descriptor(gpu: Gpu) -> None:
    for name in [*STREAMS, *EVENTS]:
        work = PriorWork(given(gpu, name), None)
        assert work.over
        assert (work.record(), work.pending()) == (None, [])
    with FdEvent.create() as event:
        work = PriorWork(event, None)
        assert work.pending() == [work.wait]
        event.set()
        assert work.pending() == []
    assert gpu.log == []


def test_an_interrupted_wait_leaves_the_work_pending(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(event: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.made.TorchEvent, "synchronize", interrupted)
    work = PriorWork(None, 0)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.pending() == [work.wait]


@pytest.mark.parametrize("name", [*STREAMS, *EVENTS])
def test_a_ticket_is_ordered_before_streams_only(gpu: Gpu, name: str) -> None:
    asked: list[Any] = []
    ticket = types.SimpleNamespace(
        wait=lambda: asked.append("cpu"), order=lambda stream: asked.append(stream)
    )
    one = given(gpu, name)
    order_ticket(ticket, one, 0)
    assert asked == (["cpu"] if name in EVENTS else [one])
    order_ticket(ticket, one, None)
    assert asked[1:] == ["cpu"]


def test_cuda_core_is_enough(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works without torch."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", sys.modules.pop("cuda.core"))
    order_after(gpu.made.CoreEvent(0xA2), gpu.made.CoreStream(CORE), 0)
    order_after(gpu.made.CoreEvent(0xA2), gpu.made.Protocol(OTHER), 0)
    event = record(gpu.made.CoreStream(CORE), 0)
    assert event.handle == gpu.event_of(CORE)
    assert gpu.log == [(CORE, "waits for", 0xA2), (OTHER, "waits for", 0xA2)]


# ---- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_a_captured_stream_is_rejected(gpu: Gpu, stream: str) -> None:
    gpu.captured.add(STREAMS[stream])
    with pytest.raises(InvalidArgument, match="captured into a CUDA graph"):
        record(given(gpu, stream), 0)
    for event in EVENTS:
        with pytest.raises(InvalidArgument, match="captured into a CUDA graph"):
            order_after(given(gpu, event), given(gpu, stream), 0)
    assert gpu.log == []


@pytest.mark.parametrize("name", EVENTS)
def test_queries_do_not_break_a_capture(gpu: Gpu, name: str) -> None:
    event = given(gpu, name)
    is_over(event)
    wait_for(event)
    assert gpu.modes == [2, 2], "cuEventQuery and cuEventSynchronize in relaxed mode only"
    assert gpu.mode == 0, "the thread's own mode is back"


# ---- neither a stream nor an event ---------------------------------------------------------------


class Version1:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (1, 0x50)


class Attribute:
    __cuda_stream__ = (0, 0x50)


class Nonsense:
    def __cuda_stream__(self) -> str:
        return "0x50"


class Handle:
    """Stands in for a stream or an event that has the given handle."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = self.cuda_event = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)


WRONG = [
    Handle(-1),
    Handle(1 << 64),
    "nonsense",
    3,
    True,
    1.5,
    b"",
    object(),
    (0, 0x50),
    Attribute(),
    Version1(),
    Nonsense(),
    Version1,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("device", [None, 0])
def test_objects_that_name_no_work_are_rejected(wrong: Any, device: int | None, gpu: Gpu) -> None:
    calls = (
        lambda: work_of(wrong),
        lambda: record(wrong, device),
        lambda: order_after(given(gpu, "torch event"), wrong, device),
        lambda: streams.stream_handle(wrong, device),
        lambda: streams.after_items([wrong], device),
    )
    for call in calls:
        with pytest.raises(NotGpuWork, match="does not name GPU work: expected a torch") as caught:
            call()
        assert isinstance(caught.value, (TypeError, InvalidArgument))
    assert gpu.log == []


def test_the_error_names_what_was_wrong() -> None:
    with pytest.raises(NotGpuWork, match=r"stream: 'nonsense' does not name GPU work"):
        work_of("nonsense")
    with pytest.raises(NotGpuWork, match=r"__cuda_stream__\(\) is \(1, 80\), not \(0, handle\)"):
        work_of(Version1())
    with pytest.raises(NotGpuWork, match=r"after: None .* use CurrentStream"):
        streams.after_items([None], 0)
    with pytest.raises(InvalidArgument, match=r"FdEvent\(-1\) is negative"):
        work_of(FdEvent(-1))


def test_a_closed_event_names_no_descriptor() -> None:
    """Another file may have been given the closed descriptor's number by then."""
    with FdEvent.create() as event:
        assert event.fd >= 0
    with pytest.raises(InvalidArgument, match=r"FdEvent\(-1\) is negative"):
        work_of(event)


@pytest.mark.parametrize("wrong", ["nonsense", FdEvent(-1)], ids=["text", "descriptor"])
def test_every_call_of_a_cache_rejects_it(context: Context, wrong: Any) -> None:
    """Each call raises before it changes anything."""
    with small_cache(context) as cache:
        one, two = cache.alloc_reqid(), cache.alloc_reqid()
        assert (one, two) == (0, 1)
        assert cache.step(lens(cache, r0=2 * ROWS, r1=ROWS)) == 0
        ids = list(range(2 * ROWS))
        known = can_share(context)
        if known:
            cache.record(0, ids[:ROWS])
        swapped = cache.swap_out(1)
        want = lens(cache, r0=4 * ROWS)
        before = state(cache)
        calls = [
            lambda: cache.free_reqid(0, wrong),
            lambda: cache.free_reqid(0, wrong, ids),
            lambda: cache.step(want, wrong),
            lambda: cache.step(lens(cache, r0=ROWS), wrong),
            lambda: cache.step_async(want, wrong),
            lambda: cache.fork(0, stream=wrong),
            lambda: cache.fork_many(0, 2, stream=wrong),
            lambda: cache.record(0, ids, wrong),
            lambda: cache.alloc_prefix(ids, stream=wrong),
            lambda: cache.alloc_prefix([9], stream=wrong),
            lambda: cache.swap_out(0, wrong),
            lambda: cache.swap_in(swapped, wrong),
            lambda: cache.promote(0, stream=wrong),
            lambda: cache.move(0, "host", stream=wrong),
            lambda: cache.close(wrong),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument, match=r"FdEvent|name GPU work"):
                call()
            assert state(cache) == before
            assert swapped.is_open
        cache.check_integrity()
        swapped.close()


def test_every_call_over_several_groups_rejects_it(context: Context) -> None:
    with LayeredCache(
        [LayerShape(1, 64), LayerShape(2, 64)],
        context,
        max_batch=2,
        max_seq_len=64,
        memory_limit=32 << 20,
        page_size=context.info.granule,
    ) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([20, 0]) == 0
        swapped = cache.swap_out(0)
        assert cache.alloc_reqid() == 0
        assert cache.step([20, 0]) == 0
        before = [state(one) for one in cache.caches]
        calls = [
            lambda: cache.free_reqid(0, "nonsense"),
            lambda: cache.step([40, 0], "nonsense"),
            lambda: cache.step_async([40, 0], "nonsense"),
            lambda: cache.fork(0, stream="nonsense"),
            lambda: cache.record(0, range(20), "nonsense"),
            lambda: cache.alloc_prefix(range(20), stream="nonsense"),
            lambda: cache.swap_out(0, "nonsense"),
            lambda: cache.swap_in(swapped, "nonsense"),
            lambda: cache.close("nonsense"),
        ]
        for call in calls:
            with pytest.raises(NotGpuWork):
                call()
            assert [state(one) for one in cache.caches] == before
        swapped.close()


def can_share(context: Context) -> bool:
    caps = context.info.caps
    return pyvmem.Caps.ALIAS in caps and pyvmem.Caps.READONLY in caps


def test_every_call_of_a_context_rejects_it(context: Context, page: int) -> None:
    with context.reserve(page) as reservation:
        ops = OpBatch(1)
        ops.populate(reservation.addr, page)
        for call in (context.batch, context.submit):
            with pytest.raises(NotGpuWork, match="after: 'nonsense'"):
                call(ops, after=["nonsense"])
        assert context.stats().mapped_bytes == 0
        ticket = context.submit(OpBatch(1))
        with pytest.raises(NotGpuWork, match="stream: 'nonsense'"):
            ticket.order("nonsense")
        with FdEvent.create() as event:
            ticket.order(event)  # the CPU has already waited
        assert ticket.done()


def test_every_call_of_a_memory_resource_rejects_it(context: Context, page: int) -> None:
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    with VMemResource(context) as resource:
        with pytest.raises(NotGpuWork):
            resource.allocate(page, "nonsense")
        assert context.stats().reserved_bytes == 0
        buffer = resource.allocate(page)
        with pytest.raises(NotGpuWork):
            resource.deallocate(int(buffer.handle), page, "nonsense")
        assert resource.live_buffers == 1
        buffer.close()
