# SPDX-License-Identifier: MIT
"""Converts other libraries' streams, events and devices for libvmem.

Objects that name GPU work, accepted as ``stream`` and ``after`` arguments:

    torch.cuda.Stream, cuda.core Stream, anything with __cuda_stream__    the stream's work so far
    None, CurrentStream                                  the work of torch's current stream so far
    torch.cuda.Event, cuda.core Event                    the work before the event was recorded
    FdEvent                                              work until its descriptor polls readable

Only `work_of` classifies these objects; it rejects all others. The caller must not record an event
again before its work is complete, because the event would then represent other work.

CUDA graphs: a stream that is being captured has no work to wait for, and cannot be made to wait for
work outside the capture. Calls that would need either are rejected (InvalidArgument), and the
capture continues. So call a cache before or after a capture, not during one. Querying whether
work is complete is allowed during a capture in any thread and mode (`relaxed`).

This module does not import torch or cuda.core: callers that pass their objects have imported them.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import operator
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pyvmem import _native
from pyvmem.errors import InvalidArgument, NotGpuWork
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.reentry import reentrant_lock

if TYPE_CHECKING:
    from pyvmem.memory.pages import Ticket

__all__ = [
    "CurrentStream",
    "FdEvent",
    "KeptEvents",
    "Kind",
    "Work",
    "after_items",
    "check",
    "core_stream",
    "device_ordinal",
    "has_cuda",
    "refuse_captured",
    "refuse_captured_handle",
    "relaxed",
    "stream_handle",
    "torch_stream",
    "wait_after",
    "wait_readable",
    "work_of",
]

_T = TypeVar("_T")

_STREAM: Final = _native.constant("VMEM_AFTER_STREAM")
_EVENT: Final = _native.constant("VMEM_AFTER_EVENT")
_FD: Final = _native.constant("VMEM_AFTER_FD")


class FdEvent(Closable):
    """Represents work that is finished once a descriptor (eventfd, sync_file, pipe) polls readable.

    It works on every back end, and stands in for GPU work on ``host``. The caller owns the
    descriptor; libvmem duplicates it before waiting, so it may be closed right after a call.
    """

    __slots__ = ("_own", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = operator.index(fd)
        self._own = False

    @classmethod
    def create(cls) -> FdEvent:
        """Creates an eventfd that polls readable after `set`. The object owns and closes it."""
        event = cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        event._own = True
        return event

    def set(self) -> None:
        """Marks the work as finished (writes to the eventfd)."""
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Closes the descriptor if `create` opened it. Idempotent."""
        if self._own:
            self._own, fd, self.fd = False, self.fd, -1  # clear it first: its number may be reused
            os.close(fd)

    def __del__(self, _close: Any = os.close) -> None:
        if getattr(self, "_own", False):
            _close(self.fd)

    def __repr__(self) -> str:
        return f"FdEvent({self.fd})"


class _CurrentStream:
    __slots__ = ()

    def __repr__(self) -> str:
        return "CurrentStream"


CurrentStream: Final = _CurrentStream()
"""Stands for torch's current stream on the context's device at the time of the call.

It is ignored on ``host``.
"""


class KeptEvents:
    """Keeps events alive until the batches that wait for them have finished, as vmem.h requires."""

    def __init__(self) -> None:
        self._lock = reentrant_lock()
        self._kept: deque[tuple[Ticket, list[Any]]] = deque()

    def keep(self, ticket: Ticket, events: list[Any]) -> None:
        """Keeps the events from `after_items` for a batch that will be submitted with `ticket`.

        Drops entries of finished batches. Also keeps the ticket, since only libvmem's ticket can
        tell whether the batch has finished.
        """
        with self._lock:
            kept = self._kept
            # Check two entries per new entry, round-robin, so that a batch that never finishes does
            # not block the others.
            for one in list(islice(kept, 2)):
                if one[0]._over():
                    with suppress(ValueError):  # a finalizer's `keep` may have removed it
                        kept.remove(one)
                else:
                    kept.rotate(-1)
            ticket._held = True
            kept.append((ticket, events))

    def clear(self) -> None:
        """Drops all events. All batches must have finished."""
        with self._lock:
            self._kept.clear()


def device_ordinal(device: Any) -> int:
    """Returns the CUDA ordinal for an int, a torch.device (or its string) or a cuda.core Device.

    A device without an index (``"cuda"``) is torch's current device; ``"cpu"`` is 0, for ``host``.

    Raises:
        TypeError: `device` is of another type.
        InvalidArgument: the string does not name a CUDA device.
    """
    if isinstance(device, int):
        if device < 0:
            raise InvalidArgument(
                f"device = {device}: expected a CUDA ordinal, 0 or more", errno=errno.EINVAL
            )
        return device
    if isinstance(device, str):
        name, _, number = device.partition(":")
        if name in ("cuda", "cpu") and (not number or number.isdigit()):
            return int(number) if number else _current_device(name)
        raise InvalidArgument(
            f"device = {device!r}: expected 'cuda', 'cuda:N' or 'cpu'", errno=errno.EINVAL
        )
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


# ---- GPU work --------------------------------------------------------------------------------


class Kind(enum.Enum):
    """The kinds of objects that name GPU work."""

    CURRENT = enum.auto()
    STREAM = enum.auto()
    EVENT = enum.auto()
    FD = enum.auto()


class Work(NamedTuple):
    """A classified object that names GPU work.

    Attributes:
        kind: stream, event or descriptor.
        library: ``"torch"``, ``"cuda.core"``, or ``""`` for another library's stream.
        handle: CUstream, CUevent (0 if never recorded) or descriptor; 0 for the current stream.
        source: the object itself.
    """

    kind: Kind
    library: str
    handle: int
    source: Any

    @property
    def is_stream(self) -> bool:
        """True if the object can wait for other work."""
        return self.kind in (Kind.CURRENT, Kind.STREAM)


_CURRENT: Final = Work(Kind.CURRENT, "torch", 0, CurrentStream)
_SLICE_MS: Final = 100  # interval between checks during a wait
_LEGACY: Final = 1  # CU_STREAM_LEGACY, another name for stream 0


def work_of(given: Any, what: str = "stream") -> Work:
    """Classifies an object that names GPU work, without calling the driver.

    Args:
        given: an object listed at the top of this module, or an earlier result of this function.
        what: the name of the caller's argument, for the error.

    Raises:
        NotGpuWork: the object is not in that list. This is also checked on ``host``.
        InvalidArgument: the descriptor of an `FdEvent` is negative or too large.
    """
    if given is None or given is CurrentStream:
        return _CURRENT
    if isinstance(given, Work):
        return given
    if isinstance(given, FdEvent):
        if not 0 <= given.fd < 1 << 31:
            size = "negative" if given.fd < 0 else "too large"
            _native.fail(errno.EINVAL, f"{what}: the descriptor of {given!r} is {size}")
        return Work(Kind.FD, "", given.fd, given)
    if not isinstance(given, type):
        stream: Any = getattr(given, "cuda_stream", None)
        if _is_handle(stream):
            return Work(Kind.STREAM, "torch", int(stream), given)
        event: Any = getattr(given, "cuda_event", None)
        if _is_handle(event):
            return Work(Kind.EVENT, "torch", int(event), given)
        library = "cuda.core" if _is_core(given) else ""
        if library and type(given).__name__ == "Event":
            return Work(Kind.EVENT, library, int(given.handle), given)
        protocol = getattr(given, "__cuda_stream__", None)
        if callable(protocol):
            return Work(Kind.STREAM, library, _protocol_handle(given, protocol(), what), given)
    raise _refusal(given, what)


def check(stream: Any) -> None:
    """Validates a stream, for calls that change state before they use it."""
    if stream is not None:
        work_of(stream)


def _is_handle(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _is_core(given: Any) -> bool:
    return any(base.__module__.startswith("cuda.core") for base in type(given).__mro__)


def _protocol_handle(given: Any, answer: Any, what: str) -> int:
    """Returns the CUstream from the pair (protocol version, handle) of ``__cuda_stream__``."""
    if isinstance(answer, tuple) and len(answer) >= 2 and answer[0] == 0 and _is_handle(answer[1]):
        return int(answer[1])
    raise _refusal(given, what, f"; its __cuda_stream__() is {answer!r:.60}, not (0, handle)")


def _refusal(given: Any, what: str, more: str = "") -> NotGpuWork:
    return NotGpuWork(
        f"{what}: {given!r:.120} does not name GPU work: expected a torch.cuda.Stream or Event, a "
        f"cuda.core Stream or Event, anything with __cuda_stream__, CurrentStream, FdEvent{more}",
        errno=errno.EINVAL,
    )


def stream_handle(stream: Any, device: int | None) -> int:
    """Returns the CUstream of a stream object, or of the current stream.

    Args:
        stream: a torch.cuda.Stream, a cuda.core Stream or anything with ``__cuda_stream__``;
            `CurrentStream` or None: the current stream.
        device: CUDA ordinal of the device whose current stream is meant; None on ``host``, where
            the handle is always 0.

    Raises:
        NotGpuWork: `stream` is not a stream (events are rejected).
    """
    work = work_of(stream)
    if not work.is_stream:
        raise _refusal(stream, "stream", "; an event cannot be made to wait")
    if device is None:
        return 0
    if work.kind is Kind.STREAM:
        return work.handle
    torch = sys.modules.get("torch")
    # Without torch, or with a CPU-only build of it, the current stream is CUDA's default stream.
    if torch is None or not has_cuda(torch):
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


# The torch module, once it is known to have CUDA: is_available() queries the driver on each call.
_with_cuda: Any = None


def has_cuda(torch: Any) -> bool:
    """Returns true if torch can use a GPU; a positive result is cached."""
    global _with_cuda
    if torch is _with_cuda:
        return True
    if not torch.cuda.is_available():
        return False
    _with_cuda = torch
    return True


def torch_stream(work: Work, device: int) -> Any:
    """Returns a stream as a torch.cuda.Stream. torch must be loaded and have CUDA."""
    torch = sys.modules["torch"]
    if work.kind is Kind.CURRENT:
        return torch.cuda.current_stream(device)
    if work.library == "torch":
        return work.source
    if work.handle in (0, _LEGACY):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(work.handle, device=device)


def core_stream(work: Work, device: int) -> Any:
    """Returns a cuda.core Stream, valid while `work` is alive. cuda.core must be loaded."""
    if work.library == "cuda.core":
        return work.source
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        with torch.cuda.device(device):  # default streams belong to the current CUDA context,
            torch.cuda.is_current_stream_capturing()  # created by each thread's first call
    core: Any = sys.modules.get("cuda.core") or sys.modules["cuda.core.experimental"]
    return core.Stream.from_handle(stream_handle(work.source, device) or _LEGACY)


# ---- CUDA graphs ---------------------------------------------------------------------------------


@functools.cache
def _driver() -> Any:
    """Returns libcuda, or None if it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def relaxed(ask: Callable[[], _T]) -> _T:
    """Calls `ask` in a capture mode that allows event queries while any thread is capturing.

    In CUDA's default capture mode, cuEventQuery and cuEventSynchronize would break the capture.
    """
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is None:
        return ask()
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; replaced by the previous mode
    changed = exchange(ctypes.byref(mode)) == 0
    try:
        return ask()
    finally:
        if changed:
            exchange(ctypes.byref(mode))


def refuse_captured(stream: Any, device: int) -> None:
    """Raises InvalidArgument if a stream is being captured into a CUDA graph."""
    if _driver() is not None:
        refuse_captured_handle(stream_handle(stream, device))


def refuse_captured_handle(handle: int) -> None:
    """Like `refuse_captured`, but takes a CUstream handle."""
    is_capturing = getattr(_driver(), "cuStreamIsCapturing", None)
    if is_capturing is None:
        return
    status = ctypes.c_int(0)
    code = is_capturing(ctypes.c_void_p(handle), ctypes.byref(status))
    if (code == 0 and status.value) or code == 906:  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        raise InvalidArgument(
            "the stream is being captured into a CUDA graph: pass one that is not",
            errno=errno.EINVAL,
        )


# ---- for libvmem ---------------------------------------------------------------------------------


def wait_readable(fd: int, wanted: Callable[[], bool] = lambda: True) -> None:
    """Waits until a descriptor polls readable or fails, or until a signal handler raises.

    Args:
        fd: the descriptor.
        wanted: called ten times per second; the wait also stops when it returns false.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while wanted() and not poll.poll(_SLICE_MS):
        pass


def wait_after(after: Iterable[Any], wanted: Callable[[], bool]) -> None:
    """Waits for the descriptors in an ``after`` argument, so that the next C call need not.

    Unlike this function, the C call cannot be interrupted by a signal. `wanted` is as for
    `wait_readable`.
    """
    works = [work_of(item, "after") for item in after]
    for work in works:
        if work.kind is Kind.FD:
            wait_readable(work.handle, wanted)


def after_items(after: Iterable[Any], device: int | None) -> tuple[tuple[Any, int], list[Any]]:
    """Converts an ``after`` argument for `_native.batch` and `_native.submit`.

    Args:
        after: FdEvent, CurrentStream, torch.cuda.Stream or Event, cuda.core Stream or Event, or
            anything with ``__cuda_stream__``.
        device: as for `stream_handle`.

    Returns:
        The C array with its length, and the event objects that must live until the batch is
        finished (unlike streams, whose work so far is recorded immediately).

    Raises:
        NotGpuWork: an item is of another type.
    """
    items: list[tuple[int, int]] = []
    keep: list[Any] = []
    for item in after:
        if item is None:
            raise _refusal(item, "after", "; use CurrentStream for the current stream")
        work = work_of(item, "after")
        if work.kind is Kind.FD:
            items.append((_FD, work.handle))
        elif work.kind is Kind.EVENT:
            if work.handle:  # 0: never recorded, so there is no work to wait for
                items.append((_EVENT, work.handle))
                keep.append(item)
        elif work.kind is Kind.STREAM:
            items.append((_STREAM, work.handle))
        elif device is not None:
            items.append((_STREAM, stream_handle(item, device)))
    return (_native.new_after(items) if items else _native.AFTER_NONE), keep
