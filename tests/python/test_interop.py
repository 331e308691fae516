# SPDX-License-Identifier: MIT
"""Tests the use of other libraries' devices, streams and memory interfaces."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import pyvmem
from pyvmem import _native
from pyvmem.memory.streams import after_items, device_ordinal, stream_handle


@pytest.fixture
def resource(context: pyvmem.Context) -> Iterator[Any]:
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    with VMemResource(context) as made:
        yield made


def stream_of(context: pyvmem.Context) -> Any:
    """Returns a real stream on a GPU, None on host."""
    if context.cuda_device is None:
        return None
    from cuda.core import Device

    device = Device(context.cuda_device)
    device.set_current()
    return device.create_stream()


# ---- cuda.core memory resource -----------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 3, 1 << 70])
def test_a_resource_with_an_unsupported_page_size(context: pyvmem.Context, size: int) -> None:
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    with pytest.raises(pyvmem.InvalidArgument, match=f"page_size must be one of .*, not {size}"):
        VMemResource(context, page_size=size)


def test_resource_is_a_memory_resource(context: pyvmem.Context, resource: Any) -> None:
    from cuda.core import MemoryResource

    assert isinstance(resource, MemoryResource)
    host = context.cuda_device is None
    assert resource.is_device_accessible is not host
    assert resource.is_host_accessible is (pyvmem.Caps.CPU_ACCESS in context.info.caps)
    assert resource.device_id == (-1 if host else context.cuda_device)
    assert resource.is_managed is False


def test_a_buffer_whose_free_failed_is_freed_by_the_next_call(
    context: pyvmem.Context, resource: Any, page: int
) -> None:
    """cuda.core considers the buffer freed even if the free failed, so the resource must retry."""
    kept, lost = (resource.allocate(page) for _ in range(2))
    context.inject(pyvmem.Inject.HEAP, count=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost.close()
    context.inject(pyvmem.Inject.HEAP, count=0)
    assert resource.live_buffers == 2, "the close must have failed"
    kept.close()
    resource.allocate(page).close()
    assert resource.live_buffers == 0


def test_buffer_of_our_pages(context: pyvmem.Context, resource: Any, page: int) -> None:
    stream = stream_of(context)
    buffer = resource.allocate(page + 100, stream=stream)
    assert buffer.size == page + 100
    assert buffer.memory_resource is resource
    addr = int(buffer.handle)
    assert context.query(addr).mapped
    assert context.stats().mapped_bytes == 2 * page
    assert context.read(addr, page + 100) == bytes(page + 100)
    context.write(addr, b"hello")
    if context.cuda_device is None:
        assert ctypes.string_at(addr, 5) == b"hello"
    assert resource.live_buffers == 1
    with pytest.raises(pyvmem.Busy, match="1"):
        context.close()
    with pytest.raises(pyvmem.Busy, match="1"):
        resource.close()
    buffer.close()
    assert resource.live_buffers == 0
    again = resource.allocate(page + 50, stream=stream)
    assert context.read(int(again.handle), 5) == bytes(5)
    again.close()
    resource.close()
    stats = context.stats()
    assert (stats.mapped_bytes, stats.used_bytes, stats.reserved_bytes) == (0, 0, 0)


def test_buffer_is_freed_with_its_last_reference(
    context: pyvmem.Context, resource: Any, page: int
) -> None:
    buffer = resource.allocate(page, stream=stream_of(context))
    del buffer
    assert resource.live_buffers == 0


def test_bad_calls_of_a_resource(context: pyvmem.Context, resource: Any, page: int) -> None:
    with pytest.raises(pyvmem.InvalidArgument):
        resource.allocate(-1)
    with pytest.raises(pyvmem.InvalidArgument):
        resource.deallocate(4096, 4096)
    with warnings.catch_warnings():
        # On back ends that have two kinds of reservations, a size this large gets only a plain one.
        warnings.simplefilter("ignore", pyvmem.PlainReservationWarning)
        with pytest.raises(pyvmem.OutOfMemory):
            resource.allocate(1 << 44, stream=stream_of(context))
    assert context.stats().mapped_bytes == 0
    empty = resource.allocate(0)
    assert empty.size == 0
    empty.close()
    resource.close()
    with pytest.raises(pyvmem.BadHandle):
        resource.allocate(page)


@pytest.mark.parametrize(("ptr", "size"), [(None, 5), ("x", 1), (5, 1.5), (5, "x"), (1 << 70, 5)])
def test_an_invalid_buffer(resource: Any, page: int, ptr: Any, size: Any) -> None:
    with pytest.raises((TypeError, pyvmem.InvalidArgument)):
        resource.deallocate(ptr, size)
    resource.allocate(page).close()
    assert resource.live_buffers == 0


def test_a_stream_without_a_handle(resource: Any, page: int) -> None:
    """The stream is unknown, so the buffer is freed after all of the device's work."""

    class Broken:
        def __cuda_stream__(self) -> Any:
            raise RuntimeError("broken")

    buffer = resource.allocate(page)
    with pytest.raises(RuntimeError, match="broken"):
        resource.deallocate(buffer.handle, page, Broken())
    assert resource.live_buffers == 1
    resource.allocate(page).close()
    assert resource.live_buffers == 0


def test_a_buffer_whose_free_was_interrupted_is_freed_later(
    context: pyvmem.Context, resource: Any, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda.core drops both the buffer and the exception, so the resource must free the memory."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    buffer = resource.allocate(page, stream=stream_of(context))
    with monkeypatch.context() as patch:
        patch.setattr(pyvmem.Context, "submit", interrupted)
        patch.setattr(sys, "unraisablehook", lambda _: None)
        buffer.close()
    assert resource.live_buffers == 1
    again = resource.allocate(page, stream=stream_of(context))
    assert resource.live_buffers == 1
    again.close()
    resource.close()
    assert context.stats().reserved_bytes == 0


# ---- streams and devices -----------------------------------------------------------------------


class Event:
    """Mimics the parts of cuda.core's Event that after_items reads: its module name and handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


Event.__module__ = "cuda.core._event"


class TorchEvent:
    """Mimics the part of torch.cuda.Event that after_items reads: `cuda_event`, which is 0 before
    the event is recorded.
    """

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


class TorchStream:
    cuda_stream = 0x1234


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x5678)


def test_after_items() -> None:
    c = _native.constant
    recorded, never, core = TorchEvent(0xE1), TorchEvent(0), Event(0xE2)
    (array, n), keep = after_items(
        [pyvmem.FdEvent(5), recorded, never, core, TorchStream(), ProtocolStream()], 0
    )
    assert [(array[k].kind, array[k].handle) for k in range(n)] == [
        (c("VMEM_AFTER_FD"), 5),
        (c("VMEM_AFTER_EVENT"), 0xE1),
        (c("VMEM_AFTER_EVENT"), 0xE2),
        (c("VMEM_AFTER_STREAM"), 0x1234),
        (c("VMEM_AFTER_STREAM"), 0x5678),
    ]
    assert keep == [recorded, core]  # an event must live until its batch has completed
    assert after_items([pyvmem.CurrentStream], None)[0] == _native.AFTER_NONE
    assert after_items([], 0)[0] == _native.AFTER_NONE


def test_stream_handle() -> None:
    assert stream_handle(TorchStream(), None) == 0  # on host, streams have no meaning
    assert stream_handle(TorchStream(), 0) == 0x1234
    assert stream_handle(ProtocolStream(), 0) == 0x5678
    with pytest.raises(TypeError):
        stream_handle("stream", 0)


def test_device_ordinal() -> None:
    class CoreDevice:
        device_id = 3

    assert device_ordinal(2) == 2
    assert device_ordinal(CoreDevice()) == 3
    assert device_ordinal("cuda:4") == 4
    assert device_ordinal("cpu") == 0
    for wrong in ("cuda:-1", "cuda:1x", "tpu"):
        with pytest.raises(ValueError, match="cuda:N"):
            device_ordinal(wrong)
    with pytest.raises(TypeError):
        device_ordinal(1.0)


def test_torch_device() -> None:
    torch = pytest.importorskip("torch")
    assert device_ordinal(torch.device("cuda:2")) == 2
    assert device_ordinal(torch.device("cpu")) == 0


def test_events_live_until_their_batch_has_completed(host: pyvmem.Context) -> None:
    """The list of kept events shrinks when a batch has completed."""
    empty = pyvmem.OpBatch(1)
    with pyvmem.FdEvent.create() as gate:
        first = host.submit(empty, after=[gate])
        host._events.keep(first, ["event of the first"])
        for _ in range(10):
            ticket = host.submit(empty)
            ticket.wait(60)
            host._events.keep(ticket, ["another"])
        assert "event of the first" in [event for _, (event,) in host._events._kept]
        gate.set()
        first.wait(60)
    for _ in range(12):
        ticket = host.submit(empty)
        ticket.wait(60)
        host._events.keep(ticket, ["another"])
    assert len(host._events._kept) <= 2


def test_real_torch_streams(context: pyvmem.Context, page: int) -> None:
    torch = pytest.importorskip("torch")
    if context.cuda_device is None:
        pytest.skip("host has no streams")
    batch = pyvmem.OpBatch(1)
    with context.reserve(page) as reservation:
        batch.populate(reservation.addr, page)
        stream = torch.cuda.Stream()
        event = torch.cuda.Event()
        event.record(stream)
        ticket = context.submit(batch, after=[stream, event, torch.cuda.current_stream()])
        ticket.order(stream)
        ticket.wait(60)
        # an event that was never recorded
        context.batch(pyvmem.OpBatch(1), after=[torch.cuda.Event()])
