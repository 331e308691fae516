# SPDX-License-Identifier: MIT
"""The caller's GPU work as events that stay put.

A stream goes on after `free_reqid`, and reclaiming must not wait for that later work, so an event
of our own is recorded at once. An event (or an `FdEvent`) that the caller gives is kept as it is.
"""

from __future__ import annotations

import os
import select
from typing import Any

from pyvmem.streams import CurrentStream, FdEvent

__all__ = ["is_over", "order_after", "order_ticket", "prune", "record", "wait_for"]


class _HeldFd(FdEvent):
    """A duplicate of the caller's descriptor, which the caller may close at once."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        super().__init__(os.dup(fd))
        self._own = True

    def __del__(self) -> None:
        self.close()


def record(stream: Any, device: int | None) -> Any:
    """An event for all work so far on `stream`; None when there is no such work to wait for.

    Args:
        stream: None (torch's current stream; nothing on a host context), a torch or cuda.core
            stream or event, anything with ``__cuda_stream__``, or an `FdEvent`.
        device: CUDA ordinal of the cache, None on host.
    """
    if isinstance(stream, FdEvent):
        return _HeldFd(stream.fd)
    if device is None:
        return None  # the CPU's own work is over when it calls
    if stream is None or stream is CurrentStream:
        import torch

        if not torch.cuda.is_available():
            return None  # a torch for the CPU has no GPU work
        return torch.cuda.current_stream(device).record_event()
    if hasattr(stream, "record_event"):  # torch
        return stream.record_event()
    if hasattr(stream, "__cuda_stream__"):
        if hasattr(stream, "record"):  # cuda.core
            return stream.record()
        import torch

        handle = stream.__cuda_stream__()[1]
        return torch.cuda.ExternalStream(handle, device=device).record_event()  # type: ignore[no-untyped-call]
    return stream


def is_over(event: Any) -> bool:
    """Whether the work is known to be over; False when it cannot be asked."""
    if isinstance(event, FdEvent):
        poll = select.poll()
        poll.register(event.fd, select.POLLIN)
        return bool(poll.poll(0))
    query = getattr(event, "query", None)
    if callable(query):
        return bool(query())
    return bool(getattr(event, "is_done", False))


def prune(events: list[Any]) -> list[Any]:
    """The events that are not known to be over."""
    return [event for event in events if not is_over(event)] if events else events


def wait_for(event: Any) -> None:
    """Returns when the work is over."""
    if isinstance(event, FdEvent):
        poll = select.poll()
        poll.register(event.fd, select.POLLIN)
        poll.poll()
    elif event is not None:
        wait = getattr(event, "synchronize", None) or event.sync  # torch's, cuda.core's
        wait()


def order_after(event: Any, stream: Any, device: int | None) -> None:
    """Lets `stream` (None: torch's current one) run after the event; else waits here."""
    if device is None or not hasattr(event, "wait"):
        wait_for(event)
        return
    import torch

    if not torch.cuda.is_available():
        wait_for(event)
        return
    event.wait(
        stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.current_stream(device)
    )


def order_ticket(ticket: Any, stream: Any, device: int | None) -> None:
    """Returns when a batch is mapped, and filled or ordered before `stream`; raises its failure.

    Only a stream can be made to wait: given an event, and on host (`device` None), the CPU waits.
    """
    is_stream = stream in (None, CurrentStream) or any(
        hasattr(stream, name) for name in ("record_event", "__cuda_stream__")
    )
    if device is None or not is_stream:
        ticket.wait()
    else:
        ticket.order(stream)
