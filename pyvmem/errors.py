# SPDX-License-Identifier: MIT
"""Exceptions: a class for each kind of libvmem error (see the list at the top of vmem.h).

All except `Reentered` derive from `VMemError` and, where Python has a matching built-in class
(`ValueError`, `MemoryError`, `TimeoutError`, ...), also from that class. A call that raises has
changed nothing, unless it raises `NotRecoverable`, whose message says what was lost.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, Final

__all__ = [
    "AccessDenied",
    "AddressOverflow",
    "AlreadyMapped",
    "BackendUnavailable",
    "BadHandle",
    "Busy",
    "DriverError",
    "ForkedProcess",
    "InvalidArgument",
    "NotGpuWork",
    "NotMapped",
    "NotRecoverable",
    "NotReserved",
    "NotSupported",
    "OutOfMemory",
    "OutOfRange",
    "ReadOnly",
    "Reentered",
    "Suspended",
    "Timeout",
    "TooManyBatches",
    "TooManyMappings",
    "TooManyTickets",
    "VMemError",
    "error_class",
]


class VMemError(Exception):
    """An error reported by libvmem or this package.

    Attributes:
        errno: positive errno, as defined in vmem.h; 0 if there is none.
        errno_name: the symbol of `errno`, for example ``"ENOMEM"``.
        status: the driver's own status (CUresult or RM status); 0 if there is none.
        status_name: the symbol of `status`, for example ``"NV_ERR_NO_MEMORY"``, or ``""``.
        op: the function that failed, for example ``"vMemMap"``.
        addr: first address of the range in question, or 0.
        bytes: length of that range, or the size in question.
        limit: the limit that was exceeded, or 0.
    """

    errno: int
    errno_name: str
    status: int
    status_name: str
    op: str
    addr: int
    bytes: int
    limit: int

    def __init__(
        self,
        text: str = "",
        *,
        errno: int = 0,
        status: int = 0,
        status_name: str = "",
        op: str = "",
        addr: int = 0,
        bytes: int = 0,
        limit: int = 0,
    ) -> None:
        super().__init__(text)
        self.errno = errno
        self.errno_name = _errno.errorcode.get(errno, "")
        self.status = status
        self.status_name = status_name
        self.op = op
        self.addr = addr
        self.bytes = bytes
        self.limit = limit

    def __str__(self) -> str:
        # Overridden because OSError formats its arguments differently.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = ("status", "status_name", "op", "addr", "bytes", "limit")
        state = {name: getattr(self, name) for name in fields}
        return _rebuild, (type(self), str(self), self.errno, state)


def _rebuild(cls: type[VMemError], text: str, errno: int, state: dict[str, Any]) -> VMemError:
    """Recreates a pickled error, because pickle itself does not pass keyword arguments."""
    return cls(text, errno=errno, **state)


class InvalidArgument(VMemError, ValueError):
    """EINVAL: a malformed argument, such as size 0, an unaligned address or an unknown flag."""


class NotGpuWork(InvalidArgument, TypeError):
    """EINVAL: a stream or an event is expected, but the object is neither."""


class AddressOverflow(VMemError, OverflowError):
    """EOVERFLOW: address + size, or count x stride, overflows 64 bits."""


class NotSupported(VMemError):
    """EOPNOTSUPP: the back end lacks a feature (a page size, sparse, read-only, a location)."""


class BadHandle(VMemError):
    """EBADF: an object is closed, freed or part of another context, or a ticket was dropped."""


class ForkedProcess(VMemError):
    """ECHILD: the context belongs to the parent of this forked process."""


class NotReserved(VMemError):
    """ENXIO: the address is not inside a reservation of this context."""


class AlreadyMapped(VMemError):
    """EEXIST: part of the range is already mapped."""


class NotMapped(VMemError):
    """EFAULT: the address to unmap or access is not mapped."""


class AccessDenied(VMemError, PermissionError):  # type: ignore[misc]  # errno is int in both
    """EACCES: the user lacks permission to open a device node."""


class ReadOnly(AccessDenied):
    """EACCES: the range to write is mapped read-only."""


class OutOfRange(VMemError):
    """ERANGE: the offset or size is beyond the end of the handle."""


class Busy(VMemError):
    """EBUSY: mappings or tensors are live, or another call is changing the range."""


class OutOfMemory(VMemError, MemoryError):
    """ENOMEM: device or heap memory is exhausted, or the context's limit is reached."""


class TooManyMappings(VMemError):
    """ENOSPC: too many mappings, or visible reservations exceed the card's free memory."""


class TooManyBatches(VMemError):
    """EAGAIN: too many batches are unfinished."""


class TooManyTickets(TooManyBatches):
    """ENOBUFS: too many tickets are outstanding; the message names the oldest finished ticket."""


class Suspended(VMemError):
    """EAGAIN: the driver stayed suspended for a minute (system sleep); call again."""


class Timeout(VMemError, TimeoutError):  # type: ignore[misc]  # errno is int in both
    """ETIMEDOUT: a batch did not finish in time."""


class BackendUnavailable(VMemError):
    """ENODEV: the back end cannot be used on this machine; the message says why."""


class DriverError(VMemError):
    """EIO: the driver rejected a valid request; see `VMemError.status_name`."""


class NotRecoverable(VMemError):
    """ENOTRECOVERABLE: rolling back a failed batch failed; its range is unusable until close."""


class Reentered(RuntimeError):
    """A signal handler, log handler or finalizer called a cache during another call on it.

    Nothing changed. This is not a `VMemError`, since the interrupted call has not failed. If the
    error propagates out of a signal handler, it aborts the interrupted call, as Ctrl-C would.

    Attributes:
        op: the function that was called.
        interrupted: the function that was running.
    """

    def __init__(self, op: str = "", interrupted: str = "") -> None:
        super().__init__(
            f"{op}: called during {interrupted} of the same cache or budget, by a signal "
            "handler, a finalizer or a log handler; let another thread call it, or set a flag"
        )
        self.op = op
        self.interrupted = interrupted

    def __reduce__(self) -> tuple[Any, ...]:
        return Reentered, (self.op, self.interrupted)


_CLASSES: Final[dict[int, type[VMemError]]] = {
    _errno.EINVAL: InvalidArgument,
    _errno.EOVERFLOW: AddressOverflow,
    _errno.EOPNOTSUPP: NotSupported,
    _errno.EBADF: BadHandle,
    _errno.ECHILD: ForkedProcess,
    _errno.ENXIO: NotReserved,
    _errno.EEXIST: AlreadyMapped,
    _errno.EFAULT: NotMapped,
    _errno.EACCES: ReadOnly,
    _errno.ERANGE: OutOfRange,
    _errno.EBUSY: Busy,
    _errno.ENOMEM: OutOfMemory,
    _errno.ENOSPC: TooManyMappings,
    _errno.EAGAIN: TooManyBatches,
    _errno.ENOBUFS: TooManyTickets,
    _errno.ETIMEDOUT: Timeout,
    _errno.ENODEV: BackendUnavailable,
    _errno.EIO: DriverError,
    _errno.ENOTRECOVERABLE: NotRecoverable,
}


def error_class(errno: int, op: str = "") -> type[VMemError]:
    """Returns the class for a positive errno.

    Two errnos each have two meanings in vmem.h, and `op` tells them apart: only opening and probing
    open a device node (EACCES), and only submitting can hit the batch limit (EAGAIN).
    """
    if errno == _errno.EAGAIN and op.startswith(("vMem", "vmem_")) and op != "vmem_submit":
        return Suspended
    if errno == _errno.EACCES and op in ("vmem_open", "vmem_probe"):
        return AccessDenied
    return _CLASSES.get(errno, VMemError)
