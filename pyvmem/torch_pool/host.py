# SPDX-License-Identifier: MIT
"""Page-locked host memory for a paused `VMemPool`'s contents, reused by later pauses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import weakref
from typing import Any

from pyvmem import _native
from pyvmem.errors import VMemError
from pyvmem.torch_pool.primary import PrimaryContext

__all__ = ["HostBlock", "HostMemory"]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_HOST_REGISTER = ctypes.c_uint(1 | 2)  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP

log = logging.getLogger(__name__)


class HostBlock:
    """A range of host memory that lives as long as this object or any view of it.

    Args:
        size: size in bytes, a multiple of the system's page size.
        device: CUDA device that copies to and from the range, which is page-locked for it if
            possible; if None, the range is not page-locked.

    Raises:
        OutOfMemory: the range cannot be allocated.
    """

    def __init__(self, size: int, device: int | None) -> None:
        self._locked_by = 0  # id of the process that registered it with CUDA
        self._shown: Any = lambda: None  # weak reference to the buffer behind all views
        try:
            self.memory = mmap.mmap(-1, size, flags=_PRIVATE)
        except OSError:
            _native.fail(
                errno.ENOMEM, f"no host memory for {size} bytes of contents", op="pause", bytes=size
            )
        self.size = size
        self._window = ctypes.c_char * size
        self.address = ctypes.addressof(self._window.from_buffer(self.memory))
        with contextlib.suppress(OSError):  # if the kernel has no huge pages, small ones are locked
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._device = device
        if device is not None:
            try:
                self._locked_by = os.getpid()  # set early: `unlock` tolerates an unregistered range
                self._call(device, "cuMemHostRegister_v2", ctypes.c_size_t(size), _HOST_REGISTER)
            except VMemError as error:
                self._locked_by = 0
                text = "%d bytes of host memory cannot be page-locked (%s): copies are slow"
                # not `error` itself, whose traceback would keep the callers' tensors alive
                log.warning(text, size, str(error))

    @property
    def locked(self) -> bool:
        """True if the range is page-locked."""
        return bool(self._locked_by)

    @property
    def viewed(self) -> bool:
        """True while a view, or an object created from a view, is alive."""
        return self._shown() is not None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a view of part of the block. The view keeps the entire block alive."""
        window = self._shown()
        if window is None:
            window = self._window.from_buffer(self.memory)
            self._shown = weakref.ref(window)
        return memoryview(window).cast("B")[offset : offset + nbytes]

    def unlock(self) -> None:
        """Unregisters the range before it is freed, or CUDA would still consider it locked."""
        # A forked child has a copy of this object, but cannot use CUDA.
        if self._device is not None and self._locked_by == os.getpid():
            # fails if CUDA has shut down, which has already dropped all registrations
            with contextlib.suppress(VMemError):
                self._call(self._device, "cuMemHostUnregister")
        self._locked_by = 0

    def _call(self, device: int, function: str, *arguments: Any) -> None:
        with PrimaryContext(device) as primary:
            primary.call(function, ctypes.c_void_p(self.address), *arguments)

    def __del__(self) -> None:
        if getattr(self, "_locked_by", 0):
            self.unlock()


class HostMemory:
    """A pool's host blocks, both in use and spare. Not thread-safe on its own.

    Args:
        device: as for `HostBlock`.
    """

    def __init__(self, device: int | None) -> None:
        self._device = device
        self._used = weakref.WeakSet[HostBlock]()  # weak: an interrupted caller may lose a block
        self._spare: list[HostBlock] = []

    def take(self, size: int) -> HostBlock:
        """Returns a spare or new block of at least `size` bytes, which `give` takes back.

        There are never more blocks than the most that were in use at once, since a new block
        replaces a spare one.

        Raises:
            OutOfMemory: there is not enough host memory; spare blocks may have been freed.
        """
        fit = [block for block in self._spare if block.size >= size]
        if fit:
            block = min(fit, key=lambda one: one.size)
            self._spare.remove(block)
        else:
            if self._spare:
                self._spare.remove(max(self._spare, key=lambda one: one.size))
            block = HostBlock(size, self._device)
        self._used.add(block)
        return block

    def give(self, block: HostBlock) -> None:
        """Makes a block spare, unless views of it are alive; they then keep it alive."""
        if block.viewed:
            block.unlock()
        else:
            self._spare.append(block)
        self._used.discard(block)

    def drop(self) -> int:
        """Frees the spare blocks; returns their total size in bytes."""
        size = sum(block.size for block in self._spare)
        self._spare.clear()
        return size

    @property
    def bytes(self) -> int:
        """Total bytes of all blocks."""
        return sum(block.size for block in {*self._used, *self._spare})

    @property
    def locked_bytes(self) -> int:
        """Total bytes of the page-locked blocks."""
        return sum(block.size for block in {*self._used, *self._spare} if block.locked)
