# SPDX-License-Identifier: MIT
"""Batches of operations, packed directly into a reusable C array."""

from __future__ import annotations

import errno
import operator
import struct
from typing import Any, Final, NoReturn

from pyvmem import _native
from pyvmem.memory.info import Location
from pyvmem.memory.pages import Pages
from pyvmem.plumbing.validation import expect

__all__ = ["OpBatch"]

# Fields of struct vmem_op. A single pack_into is three times faster than assigning them through
# cffi. `_check_layout` compares this layout with the compiler's.
_FIELDS: Final = (
    *("op", "flags", "addr", "bytes", "count", "stride"),
    *("handle", "offset", "location", "device", "page_size", "value"),
    *("src", "src_stride", "src_bytes", "offset_stride"),
)
_LAYOUT: Final = struct.Struct("=IIQQQQQQIiQQQQQQ16x")  # 16x: the zeroed field `reserved`
_PACK: Final = _LAYOUT.pack_into
OP_BYTES: Final = _LAYOUT.size

_MAP: Final = _native.constant("VMEM_OP_MAP")
_POPULATE: Final = _native.constant("VMEM_OP_POPULATE")
_UNMAP: Final = _native.constant("VMEM_OP_UNMAP")
_FILL: Final = _native.constant("VMEM_OP_FILL")
_JOIN: Final = _native.constant("VMEM_OP_JOIN")
_READONLY: Final = _native.constant("VMEM_OP_READONLY")
_CONSUME: Final = _native.constant("VMEM_OP_CONSUME")
_DIRTY: Final = _native.constant("VMEM_OP_DIRTY")
_HOLES: Final = _native.constant("VMEM_OP_HOLES")
_SPREAD: Final = _native.constant("VMEM_OP_SPREAD")
_COPY: Final = _native.constant("VMEM_OP_COPY")
_REPLACE: Final = _native.constant("VMEM_OP_REPLACE")
_SPLIT: Final = _native.constant("VMEM_OP_SPLIT")
_DEVICE: Final = int(Location.DEVICE)


def _check_layout() -> None:
    """Compares `_LAYOUT` with the compiler's layout of struct vmem_op."""
    fields = _native.ffi.typeof("struct vmem_op").fields[: len(_FIELDS)]
    codes = _LAYOUT.format.lstrip("=").removesuffix("16x")
    offset = 0
    for code, name, (c_name, field) in zip(codes, _FIELDS, fields, strict=True):
        if name != c_name or offset != field.offset:
            raise ImportError(f"struct vmem_op: {c_name} at {field.offset}, expected {name}")
        offset += struct.calcsize("=" + code)
    if _native.ffi.sizeof("struct vmem_op") != OP_BYTES:
        raise ImportError("struct vmem_op: unexpected size")


_check_layout()


class OpBatch:
    """A reusable list of operations for `Context.batch` and `Context.submit`.

    Each operation works on `count` pieces of `size` bytes whose starts are `stride` apart, as in a
    2-D copy. Appending takes well under a microsecond; `clear` keeps the array. `Context.submit`
    copies the batch, so it may be changed right after the call. Not thread-safe.

    Args:
        capacity: maximum number of operations, at least 1.
    """

    __slots__ = ("_array", "_buffer", "_consumed", "_end", "_limit")

    def __init__(self, capacity: int) -> None:
        capacity = operator.index(capacity)
        if not 1 <= capacity <= 1 << 24:
            _native.fail(
                errno.EINVAL,
                f"OpBatch: capacity = {capacity}, expected 1 to {1 << 24}",
                bytes=max(capacity, 0),
                limit=1 << 24,
            )
        self._array: Any = _native.new_ops(capacity)
        self._buffer: Any = memoryview(_native.ffi.buffer(self._array)).cast("B")
        self._end = 0  # in bytes, for pack_into
        self._limit = capacity * OP_BYTES
        self._consumed: list[Pages] = []

    @property
    def capacity(self) -> int:
        """Maximum number of operations."""
        return self._limit // OP_BYTES

    def __len__(self) -> int:
        return self._end // OP_BYTES

    @property
    def array(self) -> Any:
        """The struct vmem_op[] of `capacity` items, for C code that fills it; see `wrote`."""
        return self._array

    def wrote(self, count: int) -> None:
        """Records that C wrote `count` operations to `array`, none of which may consume pages."""
        end = operator.index(count) * OP_BYTES
        if not 0 <= end <= self._limit:
            _native.fail(
                errno.EINVAL,
                f"OpBatch.wrote: count = {count}, expected 0 to {self.capacity}",
                limit=self.capacity,
            )
        self._end = end
        if self._consumed:
            self._consumed = []

    def clear(self) -> None:
        """Removes all operations."""
        self._end = 0
        if self._consumed:
            self._consumed = []

    def map(
        self,
        addr: int,
        size: int,
        pages: Pages,
        offset: int = 0,
        count: int = 1,
        stride: int = 0,
        readonly: bool = False,
        consume: bool = False,
        replace: bool = False,
        offset_stride: int = 0,
        split: bool = False,
    ) -> None:
        """Maps, for each i, the pages at ``offset + i * offset_stride`` at ``addr + i * stride``.

        Args:
            addr: first address; like `size` and `offset`, a multiple of the pages' page size.
            size: bytes per piece.
            pages: pages to map.
            offset: first byte within `pages`.
            count: number of pieces.
            stride: bytes between the starts of pieces.
            readonly: make writes through this mapping an error.
            consume: on success, drop the reference that `pages` holds; the mapping then owns the
                pages.
            replace: map over existing mappings, which must cover the whole range; their references
                are dropped. `pages` must have been mapped before. GPU work must not access the
                range during the batch, except on ``uvm`` if no large page is created or removed
                (`vmem.h`, VMEM_OP_REPLACE).
            offset_stride: bytes between the pieces' pages within `pages`; 0: `size`.
            split: with `replace`, split large entries that a piece partly covers. GPU work must not
                access any part of those entries' 2 MiB blocks until the batch is finished.
        """
        flags = (_READONLY if readonly else 0) | (_CONSUME if consume else 0)
        if replace:
            flags |= _REPLACE
        if split:
            flags |= _SPLIT
        end = self._end
        if end == self._limit:
            self._full()
        try:
            _PACK(
                self._buffer, end,
                _MAP, flags, addr, size, count, stride, pages.handle, offset, 0, 0, 0, 0, 0, 0, 0,
                offset_stride,
            )  # fmt: skip
        except AttributeError:
            expect("pages", pages, Pages)
            raise
        except struct.error as error:
            _bad_number(
                error, addr=addr, size=size, offset=offset, count=count, stride=stride,
                offset_stride=offset_stride,
            )  # fmt: skip
        self._end = end + OP_BYTES
        if consume:
            self._consumed.append(pages)

    def populate(
        self,
        addr: int,
        size: int,
        count: int = 1,
        stride: int = 0,
        page_size: int = 0,
        dirty: bool = False,
        spread: bool = False,
        location: int = _DEVICE,
        device: int = 0,
        copy_from: int | None = None,
        copy_stride: int = 0,
        copy_bytes: int = 0,
    ) -> None:
        """Maps new pages for every piece. Only the mapping owns them.

        Args:
            addr: first address; like `size`, a multiple of the page size.
            size: bytes per piece.
            count: number of pieces.
            stride: bytes between the starts of pieces.
            page_size: in bytes; 0 = the context's granule.
            dirty: do not zero the pages; they may hold data from earlier use in this context.
            spread: place each run in its own 2 MiB chunk, as long as there are empty chunks.
            location: a `Location`.
            device: CUDA ordinal for `Location.PEER`.
            copy_from: mapped address whose contents are copied to the new pages, which are
                otherwise zeroed; it need not be aligned. Unmapping it before the batch is finished
                raises `Busy`.
            copy_stride: bytes between the pieces' sources; 0: all pieces copy the same source.
            copy_bytes: bytes copied per piece; the remaining bytes are zeroed. 0: the entire piece.
        """
        flags = (_DIRTY if dirty else 0) | (_SPREAD if spread else 0)
        if copy_from is None:
            copy_from = 0
        else:
            flags |= _COPY
        end = self._end
        if end == self._limit:
            self._full()
        try:
            _PACK(
                self._buffer, end,
                _POPULATE, flags, addr, size, count, stride, 0, 0, location, device, page_size, 0,
                copy_from, copy_stride, copy_bytes, 0,
            )  # fmt: skip
        except struct.error as error:
            _bad_number(
                error, addr=addr, size=size, count=count, stride=stride, page_size=page_size,
                location=location, device=device, copy_from=copy_from, copy_stride=copy_stride,
                copy_bytes=copy_bytes,
            )  # fmt: skip
        self._end = end + OP_BYTES

    def unmap(
        self,
        addr: int,
        size: int,
        count: int = 1,
        stride: int = 0,
        holes: bool = False,
        split: bool = False,
    ) -> None:
        """Unmaps every piece. Unless `holes` is set, every piece must be fully mapped.

        With `split`, splits large entries that a piece partly covers: GPU work must not access any
        part of those entries' 2 MiB blocks until the batch is finished. Without `split`, such a
        piece raises `InvalidArgument`.
        """
        flags = (_HOLES if holes else 0) | (_SPLIT if split else 0)
        end = self._end
        if end == self._limit:
            self._full()
        try:
            _PACK(
                self._buffer, end,
                _UNMAP, flags, addr, size, count, stride, 0, 0, 0, 0, 0, 0,
                0, 0, 0, 0,
            )  # fmt: skip
        except struct.error as error:
            _bad_number(error, addr=addr, size=size, count=count, stride=stride)
        self._end = end + OP_BYTES

    def join(
        self, addr: int, size: int, count: int = 1, stride: int = 0, holes: bool = False
    ) -> None:
        """Remaps every piece with as few driver calls and entries as possible; see `Context.join`.

        Unless `holes` is set, every piece must be fully mapped before the batch. GPU work must not
        access the pieces until the batch is finished.
        """
        end = self._end
        if end == self._limit:
            self._full()
        try:
            _PACK(
                self._buffer, end,
                _JOIN, _HOLES if holes else 0, addr, size, count, stride, 0, 0, 0, 0, 0, 0,
                0, 0, 0, 0,
            )  # fmt: skip
        except struct.error as error:
            _bad_number(error, addr=addr, size=size, count=count, stride=stride)
        self._end = end + OP_BYTES

    def fill(
        self,
        addr: int,
        size: int,
        value: int = 0,
        count: int = 1,
        stride: int = 0,
        holes: bool = False,
    ) -> None:
        """Fills every piece with the byte `value` (0 to 255); `holes` skips unmapped parts."""
        end = self._end
        if end == self._limit:
            self._full()
        try:
            _PACK(
                self._buffer, end,
                _FILL, _HOLES if holes else 0, addr, size, count, stride, 0, 0, 0, 0, 0, value,
                0, 0, 0, 0,
            )  # fmt: skip
        except struct.error as error:
            _bad_number(error, addr=addr, size=size, count=count, stride=stride, value=value)
        self._end = end + OP_BYTES

    def _full(self) -> NoReturn:
        capacity = self.capacity
        _native.fail(
            errno.EINVAL,
            f"OpBatch: full at its capacity of {capacity} operations",
            bytes=capacity + 1,
            limit=capacity,
        )

    def __repr__(self) -> str:
        return f"<OpBatch {len(self)} of {self.capacity}>"


def _bad_number(error: Exception, **values: int) -> NoReturn:
    """Raises an error that names the first value that is not an unsigned 64-bit integer."""
    for name, value in values.items():
        if not isinstance(value, int):
            raise TypeError(f"{name}: expected int, not {value!r}") from error
        if not 0 <= value < 1 << 64:
            _native.fail(errno.EINVAL, f"{name} = {value}: expected 0 to 2**64 - 1")
    _native.fail(errno.EINVAL, f"{values}: {error}")
