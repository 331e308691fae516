# SPDX-License-Identifier: MIT
"""The methods of a context that map memory, access it, manage the pool and run checks."""

from __future__ import annotations

import errno
import operator
from typing import Any

from pyvmem import _native
from pyvmem.memory.info import Inject, RangeInfo
from pyvmem.memory.pages import Pages
from pyvmem.plumbing.validation import expect, whole

__all__ = ["AddressSpace"]

_MAP_READONLY = _native.constant("VMEM_MAP_READONLY")
# Above this size, read() checks that the range exists before allocating the copy.
_LARGE_READ = 64 << 20


class AddressSpace:
    """The methods of `Context` that need only libvmem's context handle."""

    handle: int
    """libvmem's context (vmem_t)."""

    def query(self, addr: int) -> RangeInfo:
        """Returns the reservation that contains an address, and the address's state."""
        return RangeInfo._from_c(_native.range_query(self.handle, addr))

    # ---- mapping -------------------------------------------------------------------------------

    def map(
        self, addr: int, size: int, pages: Pages, offset: int = 0, *, readonly: bool = False
    ) -> None:
        """Maps ``pages[offset:offset + size]`` at `addr`, on every device of the context.

        Raises:
            AlreadyMapped, NotReserved, OutOfRange, BadHandle, InvalidArgument: the pages cannot be
                mapped there; nothing changed.
        """
        expect("pages", pages, Pages)
        flags = _MAP_READONLY if readonly else 0
        _native.map(self.handle, addr, size, pages.handle, offset, flags)

    def unmap(self, addr: int, size: int) -> None:
        """Unmaps a range, which must be fully mapped.

        The range may cover part of a mapping, but not part of a large entry. No unfinished GPU work
        may access it; `batch` and `submit` can wait for such work.
        """
        _native.unmap(self.handle, addr, size)

    # ---- contents ------------------------------------------------------------------------------

    def read(self, addr: int, size: int) -> bytes:
        """Returns a copy of the `size` bytes at `addr`.

        Raises:
            NotMapped: part of the range is not mapped.
        """
        if size > _LARGE_READ:
            info = self.query(addr)
            if addr + size > info.base + info.nbytes:
                _native.fail(
                    errno.EFAULT,
                    f"read of {size} bytes at {addr:#x}: the reservation ends after "
                    f"{info.base + info.nbytes - addr}",
                    op="vmem_read",
                    addr=addr,
                    bytes=size,
                    limit=info.base + info.nbytes - addr,
                )
        buffer = _native.ffi.new("char[]", max(size, 1))
        _native.read(self.handle, buffer, addr, size)
        return bytes(_native.ffi.buffer(buffer, size))

    def read_into(self, addr: int, data: Any) -> None:
        """Fills the writable buffer `data` with the bytes at `addr`. Pinned host memory is allowed.

        Raises:
            NotMapped: part of the range is not mapped.
        """
        buffer = _native.ffi.from_buffer(data, require_writable=True)
        _native.read(self.handle, buffer, addr, len(buffer))

    def write(self, addr: int, data: Any) -> None:
        """Copies a bytes-like object to `addr`.

        Raises:
            NotMapped: part of the range is not mapped.
            ReadOnly: part of the range is mapped read-only.
        """
        buffer = _native.ffi.from_buffer(data)
        _native.write(self.handle, addr, buffer, len(buffer))

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copies `size` bytes within the context. The copy is complete on return."""
        _native.copy(self.handle, dst, src, size)

    def fill(self, addr: int, size: int, value: int = 0) -> None:
        """Fills a range with the byte `value` (0 to 255). The fill is complete on return."""
        _native.fill(self.handle, addr, size, value)

    # ---- pool ----------------------------------------------------------------------------------

    def warm(self, nbytes: int) -> None:
        """Allocates memory from the driver until the device pool has `nbytes` bytes free."""
        _native.warm(self.handle, whole("nbytes", nbytes))

    def trim(self, keep: int = 0) -> int:
        """Returns empty slabs to the driver while at least `keep` free bytes remain in the pool.

        Returns the number of bytes given back.
        """
        return _native.trim(self.handle, whole("keep", keep))

    def join(self, addr: int, size: int) -> int:
        """Remaps each run that was mapped page by page, as a single mapping.

        If the context has `large_entries`, each complete 2 MiB block is mapped by a large entry.
        Call it only at a safe point, when no GPU work is accessing the range. `OpBatch.join` does
        the same as part of a batch, ordered after other work.

        Returns:
            The number of driver calls.
        """
        return _native.join(self.handle, addr, operator.index(size))

    # ---- tests ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks every internal invariant. Slow.

        Raises:
            DriverError: an invariant is violated; the message describes the first violation.
        """
        _native.check(self.handle)

    def inject(
        self, kinds: Inject | int, skip: int = 0, count: int = 1, error: int = errno.EIO
    ) -> None:
        """Makes driver calls fail: lets `skip` calls of the given kinds pass, then fails `count`.

        Args:
            kinds: the kinds of calls to fail.
            skip: number of calls to let pass first.
            count: number of calls to fail; 0 stops the injection.
            error: positive errno of the injected failures.
        """
        _native.inject(self.handle, operator.index(kinds), skip, count, error)
