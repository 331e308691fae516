# SPDX-License-Identifier: MIT
"""Events that mark the GPU work that the caller had launched at the time of a call.

A stream may get more work after a `free_reqid`. Reclaiming must not wait for that work, so the call
records an event. An event (or an `FdEvent`) that the caller passes is used as is.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from typing import Any

from pyvmem.errors import BadHandle
from pyvmem.memory.streams import (
    FdEvent,
    Kind,
    Work,
    core_stream,
    has_cuda,
    refuse_captured,
    refuse_captured_handle,
    relaxed,
    torch_stream,
    wait_readable,
    work_of,
)

__all__ = [
    "PriorWork",
    "is_over",
    "order_after",
    "order_ticket",
    "prune",
    "record",
    "wait_for",
    "wait_for_device",
]


class _HeldFd(FdEvent):
    """A duplicate of the caller's file descriptor, so that the caller can close the original."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        try:
            super().__init__(os.dup(fd))
        except OSError as error:
            raise BadHandle(f"FdEvent({fd}): {error.strerror}", errno=errno.EBADF) from None
        self._own = True


def record(stream: Any, device: int | None) -> Any:
    """Returns an event for all work on `stream` so far, or None if there is none to wait for.

    Args:
        stream: an object that represents GPU work (streams.py); on the host, None and streams are
            ignored.
        device: the cache's CUDA ordinal; None on the host.

    Raises:
        NotGpuWork: `stream` does not represent GPU work. InvalidArgument: the stream is being
            captured. BadHandle: the file descriptor is closed.
    """
    return PriorWork(stream, device).record()


class PriorWork:
    """The GPU work that the caller launched before a call.

    The kind of work is determined when the call begins; the event is recorded once.

    Args:
        stream: an object that represents GPU work (streams.py); a `PriorWork` is returned
            unchanged.
        device: the cache's CUDA ordinal; None on the host.

    Attributes:
        over: True if the work is known to be complete; always True on the host, except for an
            `FdEvent`.

    Raises:
        NotGpuWork: `stream` does not represent GPU work.
    """

    __slots__ = ("_device", "_event", "_work", "over")

    _work: Work
    _device: int | None
    _event: Any
    over: bool

    def __new__(cls, stream: Any, device: int | None) -> PriorWork:
        """Returns `stream` itself if it is a `PriorWork`; otherwise, a new object.

        This way, nested calls share one object.
        """
        if isinstance(stream, cls):
            return stream
        self = super().__new__(cls)
        self._work, self._device, self._event = work_of(stream), device, None
        self.over = device is None and self._work.kind is not Kind.FD
        return self

    def record(self) -> Any:
        """Returns the event for the work (the same one every time), or None if it is complete.

        Raises:
            InvalidArgument: the stream is being captured. BadHandle: the file descriptor is closed.
        """
        if self.over or self._event is not None:
            return None if self.over else self._event
        work, device = self._work, self._device
        if work.kind is Kind.FD:
            self._event = _HeldFd(work.handle)
            return self._event
        assert device is not None, "host work is always complete"
        if work.kind is Kind.EVENT:
            self._event = work.source
        elif work.library == "cuda.core":
            refuse_captured(work.source, device)
            self._event = work.source.record()
        else:
            import torch

            if work.kind is Kind.CURRENT and not has_cuda(torch):
                self.over = True  # a CPU build of torch has no GPU work
                return None
            found = torch_stream(work, device)
            refuse_captured_handle(found.cuda_stream)
            self._event = found.record_event()
        return self._event

    def pending(self) -> list[Callable[[], None]]:
        """Returns functions that wait for the work; none if it is complete."""
        event = self.record()
        self.over = event is None or is_over(event)
        return [] if self.over else [self.wait]

    def wait(self) -> None:
        """Waits until the work is complete."""
        if not self.over:
            wait_for(self.record() if self._event is None else self._event)
            self.over = True


def is_over(event: Any) -> bool:
    """Returns whether the work marked by an event from `record` is complete."""
    if isinstance(event, FdEvent):
        poll = select.poll()
        poll.register(work_of(event, "event").handle, select.POLLIN)
        return bool(poll.poll(0))
    query = getattr(event, "query", None)  # torch's events have this method; cuda.core's do not
    return bool(relaxed(lambda: event.is_done) if query is None else relaxed(query))


def prune(events: list[Any]) -> list[Any]:
    """Returns the events whose work may still be running."""
    return [event for event in events if not is_over(event)] if events else events


def wait_for(event: Any) -> None:
    """Waits until the work marked by an event from `record` is complete."""
    if event is None:
        return
    if isinstance(event, FdEvent):
        wait_readable(work_of(event, "event").handle)
        return
    wait = getattr(event, "synchronize", None)  # torch calls it synchronize, cuda.core sync
    relaxed(event.sync if wait is None else wait)


def order_after(event: Any, stream: Any, device: int | None) -> None:
    """Makes `stream`, and no other stream, wait for the event before it runs further work.

    Only a stream can be made to wait, and only for CUDA events. If `stream` is an event, if `event`
    is an `FdEvent`, or on the host (`device` None), the CPU waits instead.

    Raises:
        NotGpuWork: `stream` does not represent GPU work. InvalidArgument: it is being captured.
    """
    work = work_of(stream)
    if device is None or not work.is_stream or isinstance(event, FdEvent):
        wait_for(event)
        return
    handle = getattr(event, "cuda_event", None)  # only torch's events have this attribute
    if handle is None:
        refuse_captured(stream, device)
        core_stream(work, device).wait(event)
    elif handle:  # 0: the event was never recorded
        found = torch_stream(work, device)
        refuse_captured_handle(found.cuda_stream)
        event.wait(found)


def order_ticket(ticket: Any, stream: Any, device: int | None) -> None:
    """Waits until a batch has mapped its pages, and makes `stream` wait for its fills.

    Raises the batch's error if it failed. Only a stream can be made to wait: if `stream` is an
    event, or on the host (`device` None), the CPU waits for the fills instead.
    """
    if device is None or not work_of(stream).is_stream:
        ticket.wait()
    else:
        ticket.order(stream)


def wait_for_device(stream: Any, device: int | None) -> None:
    """Waits for the work on `stream` and for all other work on the device (None: the host)."""
    wait_for(record(stream, device))
    if device is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize(device)
