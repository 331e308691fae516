# SPDX-License-Identifier: MIT
"""A cuda.core MemoryResource over our pages: ``cuda.core`` Buffers of 64 KiB granularity.

Needs the package ``cuda-core`` (1.x, or 0.3 under its name ``cuda.core.experimental``). The
interface is cuda.core's ``_memory/_buffer.pyi``: ``allocate(size, *, stream)``,
``deallocate(ptr, size, *, stream)``, ``Buffer.from_handle``.
"""

from __future__ import annotations

import errno
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem.closing import Closable
from pyvmem.info import Caps
from pyvmem.ops import OpBatch
from pyvmem.streams import check

try:
    from cuda.core import Buffer, MemoryResource
except ImportError:  # before 1.0
    from cuda.core.experimental import Buffer, MemoryResource

if TYPE_CHECKING:
    from pyvmem.array import VirtualArray
    from pyvmem.context import Context
    from pyvmem.pages import Ticket
    from pyvmem.reservation import Reservation

__all__ = ["VMemResource"]

# Reservations kept for the next buffer of their size; making one may cost a driver call.
_KEPT = 64


class VMemResource(MemoryResource, Closable):  # type: ignore[misc]  # Any without cuda-core
    """Allocates cuda.core Buffers out of a context's pages.

    A buffer lies in a reservation of its own, rounded up to the granule. Its pages appear before
    `allocate` returns and their zeroing is ordered before later work of the stream; they vanish
    after the work that the stream has at `deallocate`. A context manager; the context is the
    caller's and must outlive the resource. Thread-safe.

    Args:
        context: where pages come from. On ``host`` buffers are CPU memory and streams mean nothing.
        page_size: bytes of a page, 0 = the context's granule.
        dirty: do not zero pages; a buffer may show an earlier buffer's bytes.
    """

    def __init__(self, context: Context, *, page_size: int = 0, dirty: bool = False) -> None:
        self._context = context
        self._page = page_size or context.info.granule
        self._dirty = dirty
        self._lock = threading.Lock()
        self._live: dict[int, VirtualArray] = {}
        self._going: list[tuple[Ticket, Reservation]] = []
        self._kept: defaultdict[int, list[Reservation]] = defaultdict(list)
        self._closed = False

    # ---- properties that cuda.core asks for ----------------------------------------------------

    @property
    def is_device_accessible(self) -> bool:
        """Whether kernels may use the buffers."""
        return self._context.cuda_device is not None

    @property
    def is_host_accessible(self) -> bool:
        """Whether the CPU may use the buffers."""
        return Caps.CPU_ACCESS in self._context.info.caps

    @property
    def is_managed(self) -> bool:
        """Whether the buffers are CUDA managed memory (never)."""
        return False

    @property
    def device_id(self) -> int:
        """CUDA ordinal, -1 on ``host``."""
        device = self._context.cuda_device
        return -1 if device is None else device

    @property
    def live_buffers(self) -> int:
        """Buffers that are not deallocated."""
        return len(self._live)

    # ---- allocation ----------------------------------------------------------------------------

    def allocate(self, size: int, stream: Any = None) -> Any:
        """A Buffer of `size` bytes.

        Args:
            size: bytes; 0 gives a buffer with no memory.
            stream: cuda.core Stream that may use it at once, and that orders its deallocation.

        Raises:
            NotGpuWork: `stream` is no stream; nothing changed.
            OutOfMemory: not enough pages; nothing changed.
            BadHandle: the resource or the context is closed.
        """
        if self._closed:
            _native.fail(errno.EBADF, "the memory resource is closed", op="allocate", bytes=size)
        if size < 0:
            _native.fail(errno.EINVAL, f"size = {size}: negative", op="allocate")
        check(stream)
        if size == 0:
            return self._buffer(0, 0, stream)
        nbytes = -(-size // self._page) * self._page
        reservation = self._reservation(nbytes)
        batch = OpBatch(1)
        batch.populate(reservation.addr, nbytes, page_size=self._page, dirty=self._dirty)
        try:
            self._context.submit(batch).order(stream)
            array = reservation.array((size,), "uint8")
        except BaseException:
            with self._lock:
                self._kept[nbytes].append(reservation)
            raise
        with self._lock:
            self._live[reservation.addr] = array
        return self._buffer(reservation.addr, size, stream)

    def _buffer(self, addr: int, size: int, stream: Any) -> Any:
        if stream is not None and self.is_device_accessible:
            try:
                return Buffer.from_handle(addr, size, self, stream=stream)
            except TypeError:  # before cuda.core 1.1 the stream came with close() alone
                pass
        return Buffer.from_handle(addr, size, self)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Takes a buffer's pages back after the work that `stream` has now; called by Buffer.close.

        Args:
            ptr: the buffer's handle.
            size: its size.
            stream: None: no work uses the buffer any more.

        Raises:
            InvalidArgument: no buffer of this resource lies there, or `stream` names no GPU work;
                nothing changed.
        """
        check(stream)
        addr = int(ptr)
        if addr == 0 and size == 0:
            return
        with self._lock:
            array = self._live.get(addr)
            if array is None or array.shape != (size,):
                _native.fail(
                    errno.EINVAL,
                    f"no buffer of {size} bytes at {addr:#x}",
                    op="deallocate",
                    addr=addr,
                    bytes=size,
                )
            reservation = array.reservation
            batch = OpBatch(1)
            batch.unmap(addr, reservation.nbytes)
            wait = stream is not None and self.is_device_accessible
            ticket = self._context.submit(batch, after=[stream] if wait else ())
            del self._live[addr]
            self._going.append((ticket, reservation))

    def _reservation(self, nbytes: int) -> Reservation:
        """Addresses for a new buffer: those of an earlier one of the same size, or new ones."""
        with self._lock:
            self._reap()
            kept = self._kept[nbytes]
            if kept:
                return kept.pop()
        return self._context.reserve(nbytes, align=max(self._page, 2 << 20))

    def _reap(self) -> None:
        """Keeps the addresses of buffers whose pages are unmapped by now; closes the surplus."""
        waiting = []
        for ticket, reservation in self._going:
            if not ticket.done():
                waiting.append((ticket, reservation))
            elif sum(map(len, self._kept.values())) < _KEPT:
                self._kept[reservation.nbytes].append(reservation)
            else:
                reservation.close()
        self._going = waiting

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for pages being unmapped, then frees the addresses. Idempotent.

        Raises:
            Busy: buffers live; nothing changed.
        """
        with self._lock:
            if self._closed:
                return
            if self._live:
                _native.fail(
                    errno.EBUSY,
                    f"buffers of this memory resource are alive: {len(self._live)}",
                    op="close",
                    limit=len(self._live),
                )
            self._closed = True
        for ticket, _ in self._going:
            ticket.wait()
        self._reap()
        for kept in self._kept.values():
            for reservation in kept:
                reservation.close()
        self._kept.clear()
