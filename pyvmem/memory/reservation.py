# SPDX-License-Identifier: MIT
"""Reservations: ranges of virtual addresses, and the tensors over them."""

from __future__ import annotations

import errno
import operator
import warnings
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem._native import Outcome
from pyvmem.errors import VMemError
from pyvmem.memory.array import VirtualArray, torch_tensor
from pyvmem.memory.info import RangeFlags, RangeInfo
from pyvmem.memory.pages import Pages
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.plumbing.validation import expect

if TYPE_CHECKING:
    from pyvmem.memory.context import Context

__all__ = ["PlainReservationWarning", "Reservation", "warn_plain"]

_UNMAP = _native.constant("VMEM_FREE_UNMAP")


class PlainReservationWarning(UserWarning):
    """Warns that a reservation is plain, because a visible one does not fit.

    CUDA's own copies reject plain addresses.
    """


def warn_plain(size: int) -> None:
    """Warns the caller of `Context.reserve` that the reservation is plain."""
    warnings.warn(
        f"{size} bytes were reserved plain: visible reservations together must stay below "
        "the card's free memory. CUDA's kernels, DLPack, index_copy_ and strided copies work; "
        "Triton's launcher rejects these addresses, and so does cudaMemcpy, which contiguous "
        "copy_, clone, .cpu() and .item() use: call Context.copy, read, write and fill instead, or "
        "reserve less.",
        PlainReservationWarning,
        stacklevel=3,
    )


class Reservation(Closable):
    """A range of virtual addresses, returned by `Context.reserve`.

    Offsets are in bytes from its start. Tensors, arrays and buffers over it keep it and its context
    alive, and `close` raises `Busy` while any of them is alive. At the end of a ``with`` block it
    is unmapped and closed. A reservation that is garbage-collected without `close` remains until
    the context is closed, and causes a ResourceWarning.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_closed",
        "_closing",
        "_context",
        "_ending",
        "_freed",
        "_info",
        "_outcome",
    )

    _info: RangeInfo

    addr: int = property(  # type: ignore[assignment]  # an attrgetter is fast; every step uses it
        attrgetter("_outcome.cell.value"),
        doc="The first address; 0 before the addresses are reserved.",
    )

    def __init__(self, context: Context, outcome: Outcome) -> None:
        # set first: `__del__` reads it even if the constructor is interrupted
        self._outcome = outcome
        self._ending = reentrant_lock()
        self._closed = self._closing = False
        self._context = context
        self._freed = Outcome()
        self._arrays = weakref.WeakValueDictionary[int, VirtualArray]()  # keyed by id

    @property
    def context(self) -> Context:
        """The context that the reservation belongs to."""
        return self._context

    @property
    def nbytes(self) -> int:
        """Length of the reservation in bytes."""
        return self._info.nbytes

    @property
    def visible(self) -> bool:
        """True if CUDA's own copies accept the addresses; False on ``host``."""
        return RangeFlags.VISIBLE in self._info.flags

    @property
    def sparse(self) -> bool:
        """True if unmapped parts read as zeros."""
        return RangeFlags.SPARSE in self._info.flags

    @property
    def is_open(self) -> bool:
        """True until the reservation or its context is closed."""
        return not self._closed and self._context.is_open

    @property
    def live_arrays(self) -> int:
        """The number of live arrays, tensors and buffers over the reservation."""
        # Not `len`: if an exception from a signal handler suppressed a weak reference's callback,
        # the dictionary still counts the dead array.
        return sum(one() is not None for one in self._arrays.valuerefs())

    def arrays(self) -> list[VirtualArray]:
        """Returns the live arrays, oldest first."""
        return [array for one in self._arrays.valuerefs() if (array := one()) is not None]

    def _at(self, offset: int, size: int, op: str) -> int:
        """Returns the address at `offset`; raises if `size` bytes from there are out of range."""
        if self._closed or self._closing:
            self._raise_closed(op)
        offset, size = operator.index(offset), operator.index(size)
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            _native.fail(
                errno.EINVAL,
                f"offset {offset} + {size} bytes: the reservation has {self.nbytes}",
                op=op,
                addr=self.addr,
                bytes=max(size, 0),
                limit=self.nbytes,
            )
        return self.addr + offset

    def _raise_closed(self, op: str) -> None:
        _native.fail(errno.EBADF, "the reservation is closed", op=op, addr=self.addr)

    # ---- mapping and contents, by offset -------------------------------------------------------

    def map(
        self,
        offset: int,
        pages: Pages,
        size: int | None = None,
        pages_offset: int = 0,
        *,
        readonly: bool = False,
    ) -> None:
        """Maps `pages`, or `size` bytes of them starting at `pages_offset`, at `offset`."""
        expect("pages", pages, Pages)
        length = pages.nbytes - pages_offset if size is None else size
        addr = self._at(offset, length, "vMemMap")
        self._context.map(addr, length, pages, pages_offset, readonly=readonly)

    def unmap(self, offset: int, size: int) -> None:
        """Unmaps a range, which must be fully mapped."""
        self._context.unmap(self._at(offset, size, "vMemUnmap"), size)

    def join(self, offset: int = 0, size: int | None = None) -> int:
        """Remaps each run that was mapped page by page, as a single mapping; see `Context.join`."""
        length = self.nbytes - offset if size is None else size
        return self._context.join(self._at(offset, length, "vmem_join"), length)

    def read(self, offset: int, size: int) -> bytes:
        """Returns a copy of the `size` bytes at `offset`."""
        return self._context.read(self._at(offset, size, "vmem_read"), size)

    def write(self, offset: int, data: Any) -> None:
        """Copies a bytes-like object to `offset`."""
        size = memoryview(data).nbytes
        self._context.write(self._at(offset, size, "vmem_write"), data)

    def fill(self, offset: int, size: int, value: int = 0) -> None:
        """Fills a range with the byte `value`."""
        self._context.fill(self._at(offset, size, "vmem_fill"), size, value)

    def query(self, offset: int = 0) -> RangeInfo:
        """Returns the state of the address at an offset."""
        return self._context.query(self._at(offset, 1, "vmem_range_query"))

    # ---- tensors -------------------------------------------------------------------------------

    def array(
        self,
        shape: Sequence[int],
        dtype: Any,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> VirtualArray:
        """Returns an array over the addresses, usable from any library (through DLPack, say).

        This call neither reads nor writes memory, which need not be mapped until elements are used.
        On the CPU, reading an unmapped element raises `NotMapped`, and writing to it kills the
        process; on a GPU, both break the CUDA context.

        Args:
            shape: elements along each dimension.
            dtype: a name (``"bfloat16"``), torch.dtype or numpy dtype.
            strides: in elements, as in torch; None = contiguous.
            offset: offset of the first element in bytes, a multiple of the element size.

        Raises:
            InvalidArgument: the array does not fit (the message gives both sizes) or is malformed.
            BadHandle: the reservation or its context is closed.
        """
        array = VirtualArray(self, shape, dtype, strides, offset)
        with self._context._lock:
            if self._closed or self._closing:
                self._raise_closed("tensor")
            if not self._context.is_open:
                _native.fail(errno.EBADF, "the context is closed", op="tensor", addr=self.addr)
            self._arrays[id(array)] = array
        return array

    def tensor(
        self,
        shape: Sequence[int],
        dtype: Any,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Any:
        """Returns a torch.Tensor over the addresses, on the CPU for ``host``, otherwise on CUDA.

        Takes the same arguments and raises the same errors as `array`. Requires torch.
        """
        # Import torch before creating the array: without numpy, torch keeps alive the frames that
        # first import it, and an array in their locals would live until the process exits.
        import torch  # noqa: F401

        return torch_tensor(self.array(shape, dtype, strides, offset))

    def buffer(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Returns a writable memoryview of the bytes. Works only on ``host``.

        Raises:
            NotSupported: the CPU cannot access this back end's memory.
        """
        length = self.nbytes - offset if nbytes is None else nbytes
        return self.array((length,), "uint8", None, offset).buffer()

    def _whole(self) -> VirtualArray:
        return self.array((self.nbytes,), "uint8")

    def __dlpack__(self, **options: Any) -> Any:
        """Exports the entire range as bytes; see `VirtualArray.__dlpack__`."""
        return self._whole().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's device type and index."""
        return self._whole().__dlpack_device__()

    # ---- end -----------------------------------------------------------------------------------

    def close(self, *, unmap: bool = False) -> None:
        """Frees the addresses. Does nothing if called again or if the context is closed.

        Waits if another thread is already closing the reservation.

        Args:
            unmap: unmap pages that are still mapped instead of raising Busy.

        Raises:
            Busy: arrays, tensors or mappings still exist; nothing changed.
        """
        outcome = self._freed
        with self._context._lock:
            self._closed = self._closed or outcome.happened
            if self._closed or self._context._closed:
                return
            if not self._context.is_open:
                self._context.stats()  # raises ForkedProcess
            live = self.live_arrays
            self._closing = not live  # from here on no tensor can be created
            live = live or self.live_arrays  # a signal handler may have created one in between
            if live:
                self._closing = False
                _native.fail(
                    errno.EBUSY,
                    f"tensors or buffers over this reservation are alive: {live}",
                    op="vMemFree",
                    addr=self.addr,
                    bytes=self.nbytes,
                    limit=live,
                )
        flags = _UNMAP if unmap else 0
        try:
            # Only one thread at a time may call `free`, since `outcome` tells it whether the
            # reservation is already freed.
            with self._ending:
                _native.free(self._context.handle, self.addr, flags, outcome=outcome)
        except VMemError:
            self._closing = False
            raise
        self._closed = True

    def leave(self) -> None:
        """Marks the reservation as closed; the context's `close` frees it."""
        self._closed = True

    def abandon(self) -> None:
        """Unmaps and closes the reservation, if it was created and is open."""
        if self._outcome.happened:
            self.close(unmap=True)
        self._closed = True

    def _leave(self) -> None:
        if self.is_open:
            self.close(unmap=True)

    def __del__(self, _warn: Any = warnings.warn) -> None:
        made = not getattr(self, "_closed", True) and self._outcome.happened
        if made and self._context.is_open:
            _warn(f"reservation never closed: {self!r}", ResourceWarning, source=self)

    def __repr__(self) -> str:
        known = hasattr(self, "_info")  # absent until the addresses are reserved
        length = f"{self.nbytes} bytes" if known else "length not known"
        return f"<Reservation {self.addr:#x}, {length}>"
