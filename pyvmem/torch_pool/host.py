# SPDX-License-Identifier: MIT
"""Host memory for the contents of a paused `VMemPool`: page-locked, and kept for the next pause."""

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
    """One range of host memory; it lives as long as this object or a view of it.

    Args:
        size: bytes, a multiple of the system's page size.
        device: the CUDA device whose copies it is locked for, if it can be; None: it is not.

    Raises:
        OutOfMemory: there is no such range.
    """

    def __init__(self, size: int, device: int | None) -> None:
        self._locked_by = 0  # the process whose CUDA knows of it
        self._shown: Any = lambda: None  # a weak reference to what all views are made of
        try:
            self.memory = mmap.mmap(-1, size, flags=_PRIVATE)
        except OSError:
            _native.fail(
                errno.ENOMEM, f"no host memory for {size} bytes of contents", op="pause", bytes=size
            )
        self.size = size
        self._window = ctypes.c_char * size
        self.address = ctypes.addressof(self._window.from_buffer(self.memory))
        with contextlib.suppress(OSError):  # a kernel without them: locked page by page
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._device = device
        if device is not None:
            try:
                self._locked_by = os.getpid()  # before it is: `unlock` may be called for nothing
                self._call(device, "cuMemHostRegister_v2", ctypes.c_size_t(size), _HOST_REGISTER)
            except VMemError as error:
                self._locked_by = 0
                text = "%d bytes of host memory cannot be page-locked (%s): copies are slow"
                log.warning(text, size, str(error))  # an error holds its callers' tensors

    @property
    def locked(self) -> bool:
        """Whether it is page-locked."""
        return bool(self._locked_by)

    @property
    def viewed(self) -> bool:
        """Whether a view of it, or an object made from one, is alive."""
        return self._shown() is not None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A part of it, which keeps all of it alive."""
        window = self._shown()
        if window is None:
            window = self._window.from_buffer(self.memory)
            self._shown = weakref.ref(window)
        return memoryview(window).cast("B")[offset : offset + nbytes]

    def unlock(self) -> None:
        """Ends the locking, before the range goes: CUDA would take what comes there for locked."""
        # A child of a fork has a copy of this object, and no CUDA.
        if self._device is not None and self._locked_by == os.getpid():
            with contextlib.suppress(VMemError):  # CUDA is gone, and what it knew
                self._call(self._device, "cuMemHostUnregister")
        self._locked_by = 0

    def _call(self, device: int, function: str, *arguments: Any) -> None:
        with PrimaryContext(device) as primary:
            primary.call(function, ctypes.c_void_p(self.address), *arguments)

    def __del__(self) -> None:
        if getattr(self, "_locked_by", 0):
            self.unlock()


class HostMemory:
    """The blocks of one pool: those with contents, and spare ones. Not thread-safe by itself.

    Args:
        device: as for `HostBlock`.
    """

    def __init__(self, device: int | None) -> None:
        self._device = device
        self._used = weakref.WeakSet[HostBlock]()  # an interrupted caller has lost its block
        self._spare: list[HostBlock] = []

    def take(self, size: int) -> HostBlock:
        """A block of so many bytes or more, a spare one if there is one; goes back by `give`.

        There are no more blocks than were in use at once: a new one replaces a spare one.

        Raises:
            OutOfMemory: there is no such memory; spare blocks may have gone.
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
        """Makes a block spare; one that is looked at is its viewers' from now on."""
        if block.viewed:
            block.unlock()
        else:
            self._spare.append(block)
        self._used.discard(block)

    def drop(self) -> int:
        """Gives spare blocks back to the system; returns their bytes."""
        size = sum(block.size for block in self._spare)
        self._spare.clear()
        return size

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(block.size for block in {*self._used, *self._spare})

    @property
    def locked_bytes(self) -> int:
        """Of those that are page-locked."""
        return sum(block.size for block in {*self._used, *self._spare} if block.locked)
