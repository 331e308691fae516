# SPDX-License-Identifier: MIT
"""A cuda.core MemoryResource over vmem pages: ``cuda.core`` Buffers with 64 KiB granularity.

Needs the package ``cuda-core`` (1.x, or 0.3, where it is named ``cuda.core.experimental``). The
interface is cuda.core's ``_memory/_buffer.pyi``: ``allocate(size, *, stream)``,
``deallocate(ptr, size, *, stream)``, ``Buffer.from_handle``.
"""

from __future__ import annotations

import errno
import operator
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem._native import Outcome
from pyvmem.errors import BadHandle, InvalidArgument, Reentered, VMemError
from pyvmem.features import require_page_size
from pyvmem.kvcache.events import record, wait_for_device
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket
from pyvmem.memory.reservation import Reservation
from pyvmem.memory.streams import check
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.plumbing.units import counted, format_bytes
from pyvmem.plumbing.validation import unexpected, whole

try:
    from cuda.core import Buffer, MemoryResource
except ImportError:  # cuda-core before 1.0
    from cuda.core.experimental import Buffer, MemoryResource

if TYPE_CHECKING:
    from pyvmem.memory.array import VirtualArray
    from pyvmem.memory.context import Context

__all__ = ["VMemResource"]

# Maximum number of reservations, of all sizes, kept for reuse: a new one may cost a driver call.
_KEPT = 64
_UNKNOWN: Any = object()  # GPU work is unknown: an exception prevented recording an event


class _Block:
    """A reservation that buffers of the same size reuse, and its current contents.

    Attributes:
        nbytes: length of the reservation.
        made: true if the reservation is complete and usable.
        free: true if it holds neither a buffer nor pages.
        array: the current buffer's array.
        mapping, unmapping: tickets of the batches that map and unmap its pages, initially not
            submitted.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        self.reservation = Reservation(context, Outcome())
        self.nbytes = nbytes
        self.made = False
        self.free = True
        self.array: VirtualArray | None = None

    def begin(self, context: Context) -> None:
        """Claims the block for a buffer."""
        self.mapping, self.unmapping = Ticket(context), Ticket(context)
        self.free = False


def _address(ptr: Any) -> int:
    try:
        return int(ptr)
    except (TypeError, ValueError):
        raise unexpected("ptr", ptr, "an address") from None


def _succeeded(ticket: Ticket) -> bool:
    """Waits for a batch. Returns true if it was submitted and succeeded."""
    try:
        if ticket.sent:
            ticket.wait()
    except VMemError:
        return False
    return ticket.sent


class VMemResource(MemoryResource, Closable):  # type: ignore[misc]  # Any without cuda-core
    """Allocates cuda.core Buffers from a context's pages.

    Each buffer has its own reservation, rounded up to whole pages. The pages are mapped by the time
    `allocate` returns, and zeroed before any later work on the stream runs; they are unmapped once
    the work submitted to the stream before `deallocate` has finished. Usable as a context manager.
    The caller owns the context, which must outlive the resource. Thread-safe.

    Args:
        context: allocates the pages. On ``host``, buffers are CPU memory and streams are ignored.
        page_size: bytes per page; 0 means the context's granule.
        dirty: do not zero pages; a buffer may then contain an earlier buffer's data.

    Raises:
        InvalidArgument: the context does not support pages of that size.
    """

    def __init__(self, context: Context, *, page_size: int = 0, dirty: bool = False) -> None:
        page_size = whole("page_size", page_size)
        if page_size:
            require_page_size(context.info, page_size, op="VMemResource")
        self._context = context
        self._page = page_size or context.info.granule
        self._dirty = dirty
        self._lock = reentrant_lock()
        self._blocks: set[_Block] = set()
        self._live: dict[int, _Block] = {}  # blocks in use, by address
        self._ended: deque[_Block | None] = deque()  # left by a failed or interrupted `allocate`
        self._left: deque[tuple[int, int, Any]] = deque()  # left by a failed `deallocate`
        self._going: list[_Block] = []
        # free blocks by size; may also contain blocks in use
        self._kept: defaultdict[int, list[_Block]] = defaultdict(list)
        self._closed = False

    def __repr__(self) -> str:
        pages, state = format_bytes(self._page), "closed" if self._closed else "open"
        return (
            f"<VMemResource on {self._context.info.backend}: pages of {pages}, "
            f"{counted(len(self._live), 'buffer')}, {state}>"
        )

    # ---- properties that cuda.core requires ----------------------------------------------------

    @property
    def is_device_accessible(self) -> bool:
        """True if kernels may use the buffers."""
        return self._context.cuda_device is not None

    @property
    def is_host_accessible(self) -> bool:
        """True if the CPU may use the buffers."""
        return Caps.CPU_ACCESS in self._context.info.caps

    @property
    def is_managed(self) -> bool:
        """True if the buffers are CUDA managed memory (never)."""
        return False

    @property
    def device_id(self) -> int:
        """CUDA ordinal; -1 on ``host``."""
        device = self._context.cuda_device
        return -1 if device is None else device

    @property
    def live_buffers(self) -> int:
        """The number of buffers not yet deallocated."""
        return len(self._live)

    # ---- allocation ----------------------------------------------------------------------------

    def allocate(self, size: int, stream: Any = None) -> Any:
        """Returns a Buffer of `size` bytes.

        Args:
            size: size in bytes; 0 returns a buffer without memory.
            stream: the cuda.core Stream on which the buffer may be used immediately, and which
                orders its deallocation.

        Raises:
            NotGpuWork: `stream` is not a stream; nothing changed.
            OutOfMemory: there are not enough free pages; nothing changed.
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
        block = None
        amid = self._amid_call()
        try:
            with self._lock:
                if not amid:
                    self._reap()
                block = self._new_block(nbytes) if amid else self._free_block(nbytes)
                block.begin(self._context)
            reservation = block.reservation
            if not block.made:
                align = max(self._page, 2 << 20)
                self._context.reserve(nbytes, align=align, into=reservation)
                block.made = True
            block.array = reservation.array((size,), "uint8")
            with self._lock:
                self._live[reservation.addr] = block
            batch = OpBatch(1)
            batch.populate(reservation.addr, nbytes, page_size=self._page, dirty=self._dirty)
            self._context.submit(batch, ticket=block.mapping).order(stream)
            return self._buffer(reservation.addr, size, stream)
        except BaseException:
            self._ended.append(block)  # the next call frees it if this call is interrupted
            if not amid:
                with self._lock, suppress(VMemError):
                    self._reap()
            raise

    def _amid_call(self) -> bool:
        """Returns true inside a finalizer or signal handler that interrupted this thread's call."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _buffer(self, addr: int, size: int, stream: Any) -> Any:
        if stream is not None and self.is_device_accessible:
            try:
                return Buffer.from_handle(addr, size, self, stream=stream)
            except TypeError:  # before cuda.core 1.1, only close() took a stream
                pass
        return Buffer.from_handle(addr, size, self)

    def deallocate(self, ptr: Any, size: int, stream: Any = None) -> None:
        """Frees a buffer's pages once the work on `stream` is done. Buffer.close calls this.

        Args:
            ptr: the buffer's handle.
            size: the buffer's size.
            stream: the stream to wait for; None if no pending work uses the buffer.

        Raises:
            InvalidArgument, BadHandle: `ptr` is not a buffer of this resource, or `stream` is not
                GPU work or is closed; nothing changed.
            TypeError: `ptr` or `size` is not a number; nothing changed.
            VMemError: the unmap failed; the next call retries it.
        """
        try:
            ptr, size = _address(ptr), operator.index(size)
            check(stream)
            if self._amid_call():
                self._end_later(ptr, size, stream)
                return
            with self._lock:
                self._end_buffer(ptr, size, stream)
        # On any error, cuda.core drops the buffer and hides the error from its caller.
        except (InvalidArgument, BadHandle, TypeError):
            raise
        except VMemError:
            self._end_later(ptr, size, stream)
            raise
        except BaseException:
            with suppress(TypeError):  # not a buffer
                self._left.append((_address(ptr), operator.index(size), _UNKNOWN))
            raise

    def _end_later(self, addr: int, size: int, stream: Any) -> None:
        """Leaves a buffer for the next call to free, after the stream's current work."""
        try:
            work = None if stream is None else record(stream, self._context.cuda_device)
        except BaseException:
            self._left.append((addr, size, _UNKNOWN))
            raise
        self._left.append((addr, size, work))

    def _end_buffer(self, addr: int, size: int, stream: Any) -> None:
        if addr == 0 and size == 0:
            return
        block = self._live.get(addr)
        if block is None or block.array is None or block.array.shape != (size,):
            _native.fail(
                errno.EINVAL,
                f"no buffer of {size} bytes at {addr:#x}",
                op="deallocate",
                addr=addr,
                bytes=size,
            )
        wait = stream is not None and self.is_device_accessible
        self._unmap(block, [stream] if wait else ())

    def _unmap(self, block: _Block, after: Sequence[Any] = ()) -> None:
        """Starts unmapping a block's pages. Idempotent; may be called again after an exception."""
        addr = block.reservation.addr
        if not block.unmapping.sent:
            block.unmapping = Ticket(self._context)
            batch = OpBatch(1)
            batch.unmap(addr, block.nbytes)
            self._context.submit(batch, after, block.unmapping)
        self._going.append(block)
        self._live.pop(addr, None)

    def _free_block(self, nbytes: int) -> _Block:
        """Returns a free block of this size, or a new block that has no addresses yet."""
        kept = self._kept[nbytes]
        while kept:
            if kept[-1].free:
                return kept[-1]
            kept.pop()
        return self._new_block(nbytes)

    def _new_block(self, nbytes: int) -> _Block:
        block = _Block(self._context, nbytes)
        self._blocks.add(block)
        return block

    def _reap(self) -> None:
        """Cleans up after interrupted calls and marks blocks whose pages are unmapped as free.

        May be called again after an exception: every step is idempotent.
        """
        while self._left:
            addr, size, stream = self._left[0]
            with suppress(InvalidArgument):  # the buffer has already been freed
                try:
                    if stream is not _UNKNOWN:
                        self._end_buffer(addr, size, stream)
                        stream = None
                except BadHandle:  # the stream was destroyed, but its work may still be running
                    stream = _UNKNOWN
                if stream is _UNKNOWN:
                    wait_for_device(None, self._context.cuda_device)
                    with suppress(BadHandle):  # the context is closed
                        self._end_buffer(addr, size, None)
            self._left.popleft()
        while self._ended:
            block = self._ended[0]
            if block is not None and not (block.free or block.unmapping.sent):
                if _succeeded(block.mapping):
                    self._unmap(block)
                else:
                    self._give(block)
            self._ended.popleft()
        self._going = [block for block in self._going if not self._is_over(block)]

    def _is_over(self, block: _Block) -> bool:
        """Returns whether the block's pages are unmapped; if so, marks the block as free."""
        if not block.free and not block.unmapping.done():
            return False
        if not block.free:
            block.made = _succeeded(block.unmapping)
            self._give(block)
        return True

    def _give(self, block: _Block) -> None:
        """Caches an empty block for the next buffer of its size, or closes it."""
        self._live.pop(block.reservation.addr, None)
        block.array = None
        kept = sum(map(len, self._kept.values()))
        if block.made and kept < _KEPT:
            self._kept[block.nbytes].append(block)
            block.free = True
        else:
            block.reservation.abandon()
            self._blocks.discard(block)

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits until all pages are unmapped, then frees the addresses. Idempotent.

        Raises:
            Busy: buffers are alive; nothing changed.
            Reentered: called by a finalizer or signal handler that interrupted another call.
        """
        if self._amid_call():
            raise Reentered("close", "another call")
        with self._lock:
            self._reap()
            if self._live:
                _native.fail(
                    errno.EBUSY,
                    f"buffers of this memory resource are alive: {len(self._live)}",
                    op="close",
                    limit=len(self._live),
                )
            self._closed = True
            for block in self._going:
                _succeeded(block.unmapping)
            self._reap()
            for block in list(self._blocks):
                block.reservation.abandon()
                self._blocks.discard(block)
