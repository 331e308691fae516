# SPDX-License-Identifier: MIT
"""A cuda.core MemoryResource over our pages: ``cuda.core`` Buffers of 64 KiB granularity.

Needs the package ``cuda-core`` (1.x, or 0.3 under its name ``cuda.core.experimental``). The
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
from pyvmem.plumbing.validation import unexpected

try:
    from cuda.core import Buffer, MemoryResource
except ImportError:  # before 1.0
    from cuda.core.experimental import Buffer, MemoryResource

if TYPE_CHECKING:
    from pyvmem.memory.array import VirtualArray
    from pyvmem.memory.context import Context

__all__ = ["VMemResource"]

# Reservations kept for the next buffer of their size; making one may cost a driver call.
_KEPT = 64
_UNKNOWN: Any = object()  # a stream whose work cannot be told: an exception came first


class _Block:
    """Addresses for one buffer after another of a size, and what lies there.

    Attributes:
        nbytes: their length.
        made: they are reserved, and known to be good.
        free: no buffer lies there, and no page.
        array: the buffer's.
        mapping, unmapping: its pages'; not sent before that begins.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        self.reservation = Reservation(context, Outcome())
        self.nbytes = nbytes
        self.made = False
        self.free = True
        self.array: VirtualArray | None = None

    def begin(self, context: Context) -> None:
        """Takes it for a buffer."""
        self.mapping, self.unmapping = Ticket(context), Ticket(context)
        self.free = False


def _address(ptr: Any) -> int:
    try:
        return int(ptr)
    except (TypeError, ValueError):
        raise unexpected("ptr", ptr, "an address") from None


def _succeeded(ticket: Ticket) -> bool:
    """Whether a batch was submitted, and made; waits for it."""
    try:
        if ticket.sent:
            ticket.wait()
    except VMemError:
        return False
    return ticket.sent


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

    Raises:
        InvalidArgument: the context has no pages of that size.
    """

    def __init__(self, context: Context, *, page_size: int = 0, dirty: bool = False) -> None:
        page_size = operator.index(page_size)
        if page_size:
            require_page_size(context.info, page_size, op="VMemResource")
        self._context = context
        self._page = page_size or context.info.granule
        self._dirty = dirty
        self._lock = reentrant_lock()
        self._blocks: set[_Block] = set()
        self._live: dict[int, _Block] = {}  # by address
        self._ended: deque[_Block | None] = deque()  # of `allocate` that failed or was interrupted
        self._left: deque[tuple[int, int, Any]] = deque()  # what `deallocate` could not end
        self._going: list[_Block] = []
        self._kept: defaultdict[int, list[_Block]] = defaultdict(list)  # the free ones, and others
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
            self._ended.append(block)  # whatever comes now, the next call takes it back
            if not amid:
                with self._lock, suppress(VMemError):
                    self._reap()
            raise

    def _amid_call(self) -> bool:
        """Whether a finalizer or signal handler has interrupted this thread in a call's records."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

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
            InvalidArgument, BadHandle: no buffer of this resource lies there, or `stream` names no
                GPU work or is closed; nothing changed.
            TypeError: `ptr` or `size` is no number; nothing changed.
            VMemError: not now; the next call takes them back.
        """
        try:
            ptr, size = _address(ptr), operator.index(size)
            check(stream)
            if self._amid_call():
                self._end_later(ptr, size, stream)
                return
            with self._lock:
                self._end_buffer(ptr, size, stream)
        # cuda.core forgets the buffer in any case, and keeps the error from its caller.
        except (InvalidArgument, BadHandle, TypeError):
            raise
        except VMemError:
            self._end_later(ptr, size, stream)
            raise
        except BaseException:
            with suppress(TypeError):  # it is no buffer
                self._left.append((_address(ptr), operator.index(size), _UNKNOWN))
            raise

    def _end_later(self, addr: int, size: int, stream: Any) -> None:
        """Has the next call take a buffer back, after the work that the stream has now."""
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
        """Begins to unmap a block's pages, once; after an exception it can be called again."""
        addr = block.reservation.addr
        if not block.unmapping.sent:
            block.unmapping = Ticket(self._context)
            batch = OpBatch(1)
            batch.unmap(addr, block.nbytes)
            self._context.submit(batch, after, block.unmapping)
        self._going.append(block)
        self._live.pop(addr, None)

    def _free_block(self, nbytes: int) -> _Block:
        """Addresses for a new buffer: those of an earlier one of the same size, or none yet."""
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
        """Takes back what ended calls have left, and notes blocks whose pages are unmapped by now.

        After an exception it can be called again: each step of it can be done twice.
        """
        while self._left:
            addr, size, stream = self._left[0]
            with suppress(InvalidArgument):  # it was ended, or called again
                try:
                    if stream is not _UNKNOWN:
                        self._end_buffer(addr, size, stream)
                        stream = None
                except BadHandle:  # its stream is gone, its work may still run
                    stream = _UNKNOWN
                if stream is _UNKNOWN:
                    wait_for_device(None, self._context.cuda_device)
                    with suppress(BadHandle):  # the context's
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
        """Whether a block's pages are unmapped; it is free then."""
        if not block.free and not block.unmapping.done():
            return False
        if not block.free:
            block.made = _succeeded(block.unmapping)
            self._give(block)
        return True

    def _give(self, block: _Block) -> None:
        """Keeps a block without pages for the next buffer of its size, or closes it."""
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
        """Waits for pages being unmapped, then frees the addresses. Idempotent.

        Raises:
            Busy: buffers live; nothing changed.
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
