# SPDX-License-Identifier: MIT
"""Exceptions: a class for each kind of error of libvmem (see the list at the top of vmem.h).

All except `Reentered` derive from `VMemError`; if Python has a class for such an error
(`ValueError`, `MemoryError`, `TimeoutError`, ...), the class derives from that too. A call that
raises has changed nothing, except with `NotRecoverable`, whose text says what was lost.
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
        errno_name: its symbol, for example ``"ENOMEM"``.
        status: the driver's own status (CUresult or RM status), 0 if there is none.
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
    """Unpickles an error: pickle itself does not pass keyword arguments."""
    return cls(text, errno=errno, **state)


class InvalidArgument(VMemError, ValueError):
    """EINVAL: a malformed argument, such as size 0, an unaligned address or an unknown flag."""


class NotGpuWork(InvalidArgument, TypeError):
    """EINVAL: an object that is neither a stream nor an event, where one is expected."""


class AddressOverflow(VMemError, OverflowError):
    """EOVERFLOW: address + size, or count x stride, overflows 64 bits."""


class NotSupported(VMemError):
    """EOPNOTSUPP: this back end does not support it (page size, sparse, read-only, location)."""


class BadHandle(VMemError):
    """EBADF: a closed or freed object, an object of another context, or a dropped ticket."""


class ForkedProcess(VMemError):
    """ECHILD: the context belongs to the parent of this forked process."""


class NotReserved(VMemError):
    """ENXIO: the address is not inside a reservation of this context."""


class AlreadyMapped(VMemError):
    """EEXIST: map over a live mapping."""


class NotMapped(VMemError):
    """EFAULT: an unmap of, or access to, an address that is not mapped."""


class AccessDenied(VMemError, PermissionError):  # type: ignore[misc]  # errno is int in both
    """EACCES: this user may not open a device node."""


class ReadOnly(AccessDenied):
    """EACCES: a write to a read-only mapping."""


class OutOfRange(VMemError):
    """ERANGE: beyond the end of the handle."""


class Busy(VMemError):
    """EBUSY: live mappings, live tensors, or a range that another call is changing."""


class OutOfMemory(VMemError, MemoryError):
    """ENOMEM: out of device or heap memory, or the context's limit is reached."""


class TooManyMappings(VMemError):
    """ENOSPC: too many mappings, or visible reservations exceed the card's free memory."""


class TooManyBatches(VMemError):
    """EAGAIN: too many unfinished batches."""


class TooManyTickets(TooManyBatches):
    """ENOBUFS: too many tickets are outstanding; the text names the oldest finished one."""


class Suspended(VMemError):
    """EAGAIN: the driver stayed suspended for a minute (system sleep); call again."""


class Timeout(VMemError, TimeoutError):  # type: ignore[misc]  # errno is int in both
    """ETIMEDOUT: a batch did not finish in time."""


class BackendUnavailable(VMemError):
    """ENODEV: the back end cannot be used on this machine; the text says why."""


class DriverError(VMemError):
    """EIO: the driver refused a valid request; see `VMemError.status_name`."""


class NotRecoverable(VMemError):
    """ENOTRECOVERABLE: rollback of a failed batch failed; its range is unusable until close."""


class Reentered(RuntimeError):
    """A signal, log or finalizer callback called a cache while a call on it was running.

    Nothing changed. Not a `VMemError`: the interrupted call has not failed. If it propagates from a
    signal handler, it aborts that call as Ctrl-C does.

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

    Two errnos have two meanings in vmem.h, which `op` distinguishes: only opening and probing open
    a device node (EACCES), and only submitting can hit the batch limit (EAGAIN).
    """
    if errno == _errno.EAGAIN and op.startswith(("vMem", "vmem_")) and op != "vmem_submit":
        return Suspended
    if errno == _errno.EACCES and op in ("vmem_open", "vmem_probe"):
        return AccessDenied
    return _CLASSES.get(errno, VMemError)
