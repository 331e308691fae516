# SPDX-License-Identifier: MIT
"""GPU work and devices of other libraries as libvmem takes them.

Nothing here imports torch or cuda.core: an object can only be theirs if they are loaded already.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from pyvmem import _native

if TYPE_CHECKING:
    from pyvmem.pages import Ticket

__all__ = [
    "CurrentStream",
    "FdEvent",
    "KeptEvents",
    "after_items",
    "device_ordinal",
    "stream_handle",
]

_STREAM: Final = _native.constant("VMEM_AFTER_STREAM")
_EVENT: Final = _native.constant("VMEM_AFTER_EVENT")
_FD: Final = _native.constant("VMEM_AFTER_FD")


class FdEvent:
    """Work that is over when a descriptor polls readable: an eventfd, a sync_file, a pipe.

    Works on every back end; on ``host`` it stands for GPU work. A descriptor given by the caller
    stays the caller's; libvmem duplicates what it waits for, so it may be closed at once.
    """

    __slots__ = ("_own", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._own = False

    @classmethod
    def create(cls) -> FdEvent:
        """A new eventfd, not readable until `set`; closed by `close`."""
        event = cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        event._own = True
        return event

    def set(self) -> None:
        """Marks the work as over (an eventfd's write)."""
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Closes the descriptor if `create` made it; again: nothing."""
        if self._own:
            self._own = False
            os.close(self.fd)

    def __enter__(self) -> FdEvent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FdEvent({self.fd})"


class _CurrentStream:
    __slots__ = ()

    def __repr__(self) -> str:
        return "CurrentStream"


CurrentStream: Final = _CurrentStream()
"""torch's current stream on the context's device at the time of the call; nothing on ``host``."""


class KeptEvents:
    """Events that live until the batches that wait for them are finished, as vmem.h asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[Ticket, list[Any]]] = deque()

    def keep(self, ticket: Ticket, events: list[Any]) -> None:
        """Keeps what `after_items` returned for a batch that will be submitted with `ticket`.

        Forgets what is no longer needed. The ticket is kept too: once libvmem's is dropped, nobody
        can ask whether the batch is finished.
        """
        with self._lock:
            kept = self._kept
            # Two for each new one, in turn: a batch that never ends does not hide those behind it.
            for _ in range(min(2, len(kept))):
                if kept[0][0]._over():
                    kept.popleft()
                else:
                    kept.rotate(-1)
            ticket._held = True
            kept.append((ticket, events))

    def clear(self) -> None:
        """Forgets all; no batch may be unfinished."""
        with self._lock:
            self._kept.clear()


def device_ordinal(device: Any) -> int:
    """The CUDA ordinal of an int, a ``torch.device`` (or its string) or a ``cuda.core`` Device.

    A device without an index (``"cuda"``) is torch's current one; ``"cpu"`` is 0, for ``host``.

    Raises:
        TypeError: none of these.
        ValueError: a string that names no CUDA device.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        name, _, number = device.partition(":")
        if name in ("cuda", "cpu") and (not number or number.isdigit()):
            return int(number) if number else _current_device(name)
        raise ValueError(f"device = {device!r}: expected 'cuda', 'cuda:N' or 'cpu'")
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind in ("cuda", "cpu"):  # torch.device
        return index if isinstance(index, int) else _current_device(kind)
    ordinal = getattr(device, "device_id", None)
    if isinstance(ordinal, int):  # cuda.core.Device
        return ordinal
    raise TypeError(f"device: expected int, torch.device or cuda.core.Device, not {device!r}")


def _current_device(kind: str) -> int:
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    return 0


def stream_handle(stream: Any, device: int | None) -> int:
    """The CUstream of a stream object, of `CurrentStream` or of None (the current stream).

    Args:
        stream: torch.cuda.Stream, cuda.core Stream, anything with ``__cuda_stream__``, None.
        device: CUDA ordinal whose current stream is meant; None: ``host``, every stream is 0.
    """
    if device is None:
        return 0
    if stream is None or stream is CurrentStream:
        torch = sys.modules.get("torch")
        # Without torch, or with one for the CPU, there is no current stream but CUDA's own default.
        if torch is None or not torch.cuda.is_available():
            return 0
        return int(torch.cuda.current_stream(device).cuda_stream)
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(f"not a stream: {stream!r}")
    return int(protocol()[1])


def after_items(after: Iterable[Any], device: int | None) -> tuple[tuple[Any, int], list[Any]]:
    """Converts an ``after`` argument for `_native.batch` and `_native.submit`.

    Args:
        after: FdEvent, CurrentStream, torch.cuda.Stream or Event, cuda.core Stream or Event, or
            anything with ``__cuda_stream__``.
        device: as for `stream_handle`.

    Returns:
        The C array with its length, and the event objects that must live until the batch is
        finished (streams need not: work so far is recorded at once).

    Raises:
        TypeError: an item is none of these.
    """
    items: list[tuple[int, int]] = []
    keep: list[Any] = []
    for item in after:
        if isinstance(item, FdEvent):
            if item.fd < 0:
                _native.fail(errno.EINVAL, f"FdEvent: descriptor {item.fd} is negative")
            items.append((_FD, item.fd))
        elif item is CurrentStream:
            if device is not None:
                items.append((_STREAM, stream_handle(item, device)))
        elif (event := _event_handle(item)) is not None:
            if event:  # 0: never recorded, hence no work to wait for
                items.append((_EVENT, event))
                keep.append(item)
        elif item is None:
            raise TypeError("after: None is no GPU work; say CurrentStream for the current stream")
        else:
            items.append((_STREAM, stream_handle(item, -1)))
    return (_native.new_after(items) if items else _native.AFTER_NONE), keep


def _event_handle(item: Any) -> int | None:
    """The CUevent of torch's or cuda.core's event, None for anything else."""
    handle = getattr(item, "cuda_event", None)
    if isinstance(handle, int):
        return handle
    if type(item).__name__ == "Event" and type(item).__module__.startswith("cuda.core"):
        return int(item.handle)
    return None
