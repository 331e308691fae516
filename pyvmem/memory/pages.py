# SPDX-License-Identifier: MIT
"""Handles to physical pages, and tickets for submitted batches."""

from __future__ import annotations

import copy
import errno
import warnings
from collections import deque
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem._native import Outcome
from pyvmem.errors import BadHandle, VMemError
from pyvmem.memory.info import PagesInfo
from pyvmem.memory.streams import stream_handle, work_of
from pyvmem.plumbing.closing import Scoped

if TYPE_CHECKING:
    from pyvmem.memory.context import Context

__all__ = ["Pages", "Ticket", "drop_forgotten"]

# Unbounded waits return to Python at this interval, so that signals (Ctrl-C) are handled.
_SLICE_NS = 200_000_000


class Pages(Scoped):
    """A reference to physical pages, returned by `Context.create` or `Context.retain`.

    The pages live as long as a handle or a mapping refers to them. Give up the reference with
    `release` or `drop`; leaving a ``with`` block calls `release`. A reference that is never given
    up keeps its pages until the context is closed, and causes a ResourceWarning.
    """

    __slots__ = ("_context", "_done", "_nbytes", "_outcome")

    def __init__(self, context: Context, outcome: Outcome, nbytes: int) -> None:
        self._context = context
        self._outcome = outcome
        self._nbytes = nbytes
        self._done = False

    handle: int = property(  # type: ignore[assignment]
        attrgetter("_outcome.cell.value"),
        doc="libvmem's handle; 0: the call that creates it has not returned.",
    )

    @property
    def nbytes(self) -> int:
        """Total size of the pages in bytes."""
        return self._nbytes

    @property
    def context(self) -> Context:
        """The context that the pages belong to."""
        return self._context

    @property
    def info(self) -> PagesInfo:
        """Page size, runs, mappings and location of the pages.

        Raises:
            BadHandle: the handle was released, dropped or consumed by a batch, or the context is
                closed.
        """
        return PagesInfo._from_c(_native.handle_query(self._context.handle, self.handle))

    def release(self) -> None:
        """Unmaps the handle's mapping, if it has one, and drops the reference.

        Raises:
            Busy: there is more than one mapping; nothing changed. Use `Context.unmap`.
            BadHandle: the handle was already released, dropped or consumed.
        """
        _native.release(self._context.handle, self.handle)
        self._done = True

    def drop(self) -> None:
        """Drops only the reference: mappings remain and keep their pages.

        Raises:
            BadHandle: the handle was already released, dropped or consumed.
        """
        _native.drop(self._context.handle, self.handle)
        self._done = True

    def abandon(self) -> None:
        """Drops the reference, unless it was already dropped or consumed, or never created."""
        if not self._done:
            if self._outcome.happened:
                with suppress(BadHandle):
                    _native.drop(self._context.handle, self.handle)
            self._done = True

    def drop_range(
        self,
        offset: int,
        size: int,
        count: int = 1,
        stride: int = 0,
        outcome: Outcome | None = None,
    ) -> None:
        """Drops the reference to part of the pages: `count` pieces, the first at `offset`.

        Pages without other references return to the pool; the remaining pages keep their offsets.
        The handle itself remains valid until it is dropped.

        Args:
            offset: offset of the first piece; like `size` and `stride`, a multiple of the page
                size.
            size: bytes per piece.
            count: number of pieces.
            stride: bytes between the starts of pieces.
            outcome: records the result even if an exception interrupts this call.

        Raises:
            OutOfRange: a piece extends past the end or was already dropped; nothing changed.
            BadHandle: the handle was already released, dropped or consumed.
        """
        _native.drop_range(
            self._context.handle, self.handle, offset, size, count, stride, outcome=outcome
        )

    def _leave(self) -> None:
        if not self._done:
            self.release()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        # An object whose constructor failed has no `_done`.
        made = not getattr(self, "_done", True) and self._outcome.happened
        if made and self._context.is_open:
            _warn(f"pages never released: {self!r}", ResourceWarning, source=self)

    def __repr__(self) -> str:
        return f"<Pages {self.handle:#x}, {self._nbytes} bytes>"


class Ticket:
    """A batch submitted to the worker thread.

    The result remains available regardless of later batches: libvmem keeps it until this object has
    read it. `wait` and `done` may be called repeatedly and from multiple threads; an exception
    during a call, such as KeyboardInterrupt, has no effect on later calls. Closing or
    garbage-collecting the object does not cancel its batch.

    Attributes:
        outcome: progress of the submitting call, valid even if an exception interrupted it.
    """

    # _result: None if unknown, True on success, else the batch's error. Set before libvmem's ticket
    # is dropped, so that a thread that finds the ticket dropped can read the result here.
    __slots__ = (
        "__weakref__", "_consumed", "_context", "_dropped", "_held", "_result", "outcome",
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        self._context = context
        self.outcome = Outcome()
        self._consumed: list[Pages] = []
        self._result: VMemError | bool | None = None
        self._held = False  # True if the context keeps the batch's events alive
        self._dropped = False

    @property
    def handle(self) -> int:
        """libvmem's ticket; 0 if the batch has not been submitted."""
        handle: int = self.outcome.cell.value
        return handle

    @property
    def sent(self) -> bool:
        """True if the batch was submitted."""
        return self.outcome.happened

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the batch has finished, including its fills.

        Args:
            timeout: maximum time in seconds; None: no limit; 0 or less: polls once.

        Raises:
            Timeout: the batch did not finish in time.
            BadHandle: the context is closed, or `close` was called, before the result was known.
            VMemError: the batch's error; the entire batch was undone.
        """
        left = _SLICE_NS if timeout is None else max(0, int(timeout * 1e9))
        while not self._ask(min(left, _SLICE_NS)):
            if timeout is None:
                continue
            if left <= _SLICE_NS:
                _native.fail(
                    errno.ETIMEDOUT,
                    f"the batch did not finish within {timeout} s",
                    op="vmem_wait",
                )
            left -= _SLICE_NS
        if isinstance(self._result, VMemError):
            raise copy.copy(self._result)  # a copy, since each raise extends the traceback

    def _ask(self, timeout_ns: int) -> bool:
        """Waits up to `timeout_ns`; returns true if the result is known.

        May be called again if an exception interrupted it.
        """
        if self._result is None:
            try:
                if not _native.wait(self._context.handle, self.handle, timeout_ns):
                    return False
                self._result = True
            except VMemError as error:
                if error.errno not in (errno.EBADF, errno.ECHILD):
                    # The batch was rolled back, so the caller owns the consumed references again.
                    for pages in self._consumed:
                        pages._done = False
                    self._result = error.with_traceback(None)
                elif self._result is None:  # otherwise, another thread has read the result
                    raise
        if not self._dropped:
            self._drop()
        return True

    def _drop(self) -> None:
        _native.ticket_drop(self._context.handle, self.handle)
        self._dropped = True

    def done(self) -> bool:
        """Returns true if the batch has finished or failed; does not wait.

        Raises:
            BadHandle: as for `wait`.
        """
        return self._ask(0)

    def _over(self) -> bool:
        """Returns true if libvmem no longer needs the batch's events."""
        return self.done() if self.sent else bool(self.outcome.cell.called)

    def order(self, stream: Any = None) -> None:
        """Waits until the mappings are done, then makes `stream` wait for the fills.

        Args:
            stream: a stream as in ``after``; None: the current stream. For an event (which cannot
                wait) and on ``host``, this method is equivalent to `wait`.

        Raises:
            NotGpuWork: `stream` is neither a stream nor an event.
            InvalidArgument: the stream is being captured.
            VMemError: the batch's error.
        """
        device = self._context.cuda_device
        stream_like = work_of(stream).is_stream
        if stream_like and device is not None and self._result is None:
            try:
                _native.order(self._context.handle, self.handle, stream_handle(stream, device))
                return
            except VMemError:
                if self._result is None:
                    raise
        self.wait()

    def close(self) -> None:
        """Discards the result if it is not known yet; the batch continues to run. Idempotent."""
        if self.sent and not self._dropped and not self._held:
            self._drop()

    def __del__(self) -> None:
        # Makes no C call: this may run between a failed call and the query of its error.
        if not getattr(self, "_dropped", True) and self.sent:
            self._context._forgotten.append(self.handle)

    def __repr__(self) -> str:
        return f"<Ticket {self.handle:#x}>"


def drop_forgotten(vm: int, numbers: deque[int]) -> None:
    """Drops tickets whose objects were garbage-collected before the result was known."""
    while numbers:
        # Several threads may run this loop concurrently. A number is removed only after its ticket
        # is dropped, so no ticket is missed.
        try:
            number = numbers[0]
            _native.ticket_drop(vm, number)
            numbers.remove(number)
        except (IndexError, ValueError):
            pass
