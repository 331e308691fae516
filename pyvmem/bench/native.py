# SPDX-License-Identifier: MIT
"""Raw cffi calls with prepared arguments, for the timed loops.

The rest of the package calls C only through `pyvmem._native`. A benchmark that went through that
layer would also time its checks, which take several times as long as a call served from the pool.
So the loops here call the extension module directly and check the results afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyvmem import _native
from pyvmem._vmem import ffi, lib
from pyvmem.errors import error_class
from pyvmem.memory.context import Context

__all__ = ["DIRTY", "HOLES", "MAP", "POPULATE", "SPREAD", "Native", "UNMAP"]

MAP, POPULATE, UNMAP = (_native.constant(f"VMEM_OP_{k}") for k in ("MAP", "POPULATE", "UNMAP"))
DIRTY, HOLES, SPREAD = (_native.constant(f"VMEM_OP_{k}") for k in ("DIRTY", "HOLES", "SPREAD"))
_CREATE_DIRTY = _native.constant("VMEM_CREATE_DIRTY")
_FREE_UNMAP = _native.constant("VMEM_FREE_UNMAP")
_PLAIN = _native.constant("VMEM_RESERVE_PLAIN")


class Native:
    """Raw calls on an open Context, which the caller owns and closes."""

    def __init__(self, context: Context) -> None:
        self.ffi: Any = ffi
        self.lib: Any = lib
        self.context = context
        self.vm: int = context.handle
        self.system = context.info.backend
        self._handle = self.ffi.new("uint64_t *")

    # Arguments of the timed calls.

    def create_opts(self, page: int, *, dirty: bool = True) -> Any:
        """Returns options for vMemCreate; `dirty` pages are not zeroed."""
        opts = self.ffi.new("struct vmem_create_opts *")
        opts.size = self.ffi.sizeof("struct vmem_create_opts")
        opts.page_size = page
        opts.flags = _CREATE_DIRTY if dirty else 0
        return opts

    def reserve_opts(self, *, plain: bool = False) -> Any:
        """Returns options for vMemReserve."""
        opts = self.ffi.new("struct vmem_reserve_opts *")
        opts.size = self.ffi.sizeof("struct vmem_reserve_opts")
        opts.flags = _PLAIN if plain else 0
        return opts

    def handles(self, count: int) -> Any:
        """Allocates an array for `count` handles or addresses; `array + i` points to the i-th."""
        return self.ffi.new("uint64_t[]", count)

    def ops(self, wanted: Sequence[dict[str, int]]) -> Any:
        """Returns an array of struct vmem_op with the given fields set and all others 0."""
        array = self.ffi.new("struct vmem_op[]", len(wanted))
        for op, fields in zip(array, wanted, strict=True):
            for name, value in fields.items():
                setattr(op, name, value)
        return array

    def batch_args(self, ops: Any) -> tuple[Any, ...]:
        """Returns the arguments of a vmem_batch call that runs all of `ops`."""
        return (self.vm, ops, len(ops), self.ffi.NULL, 0, 0)

    # Results.

    def check(self, what: str, results: Iterable[int]) -> None:
        """Raises the VMemError of the first call that did not return 0.

        The error's text is the thread's last error, which belongs to this call unless a later call
        also failed.
        """
        for i, result in enumerate(results):
            if result != 0:
                text = self.ffi.string(self.lib.vmem_last_error()).decode(errors="replace")
                raise error_class(-result, what)(
                    f"call {i} of {what}: {text}", errno=-result, op=what
                )

    # Untimed calls.

    def reserve(self, nbytes: int, opts: Any = None) -> int:
        """Reserves addresses."""
        result = self.lib.vMemReserve(self.vm, nbytes, opts or self.ffi.NULL, self._handle)
        self.check("vMemReserve", [result])
        return int(self._handle[0])

    def free(self, addr: int, *, unmap: bool = False) -> None:
        """Frees a reservation; with `unmap`, unmaps the pages in it first."""
        self.check("vMemFree", [self.lib.vMemFree(self.vm, addr, _FREE_UNMAP if unmap else 0)])

    def create(self, nbytes: int, page: int, *, dirty: bool = True) -> int:
        """Creates pages; returns their handle."""
        opts = self.create_opts(page, dirty=dirty)
        result = self.lib.vMemCreate(self.vm, nbytes, opts, self._handle)
        self.check("vMemCreate", [result])
        return int(self._handle[0])

    def map(self, addr: int, nbytes: int, handle: int, offset: int = 0) -> None:
        """Maps a handle's pages at an address, starting at an offset into the handle."""
        self.check("vMemMap", [self.lib.vMemMap(self.vm, addr, nbytes, handle, offset, 0)])

    def unmap(self, addr: int, nbytes: int) -> None:
        """Unmaps a range."""
        self.check("vMemUnmap", [self.lib.vMemUnmap(self.vm, addr, nbytes)])

    def release(self, handle: int) -> None:
        """Unmaps the handle's mapping, if it has one, and drops the handle."""
        self.check("vMemRelease", [self.lib.vMemRelease(self.vm, handle)])

    def drop(self, handle: int) -> None:
        """Drops a handle; mappings keep the pages."""
        self.check("vmem_drop", [self.lib.vmem_drop(self.vm, handle)])

    def batch(self, ops: Any) -> None:
        """Runs `ops` as one batch."""
        self.check("vmem_batch", [self.lib.vmem_batch(*self.batch_args(ops))])

    def runs(self, handle: int) -> int:
        """Returns the number of physically contiguous runs that a handle's pages form."""
        info = self.ffi.new("struct vmem_handle_info *")
        info.size = self.ffi.sizeof("struct vmem_handle_info")
        self.check("vmem_handle_query", [self.lib.vmem_handle_query(self.vm, handle, info)])
        return int(info.runs)

    def warm(self, nbytes: int) -> None:
        """Fills the pool up to `nbytes` bytes."""
        self.check("vmem_warm", [self.lib.vmem_warm(self.vm, nbytes)])

    def trim(self) -> None:
        """Empties the pool."""
        self.check("vmem_trim", [self.lib.vmem_trim(self.vm, 0, self.ffi.NULL)])

    def join(self, addr: int, nbytes: int) -> int:
        """Joins the runs of a range; returns the number of driver calls."""
        result = self.lib.vmem_join(self.vm, addr, nbytes, self._handle)
        self.check("vmem_join", [result])
        return int(self._handle[0])

    def stats(self) -> dict[str, int]:
        """Returns the fields of vmem_stats by name."""
        stats = self.ffi.new("struct vmem_stats *")
        stats.size = self.ffi.sizeof("struct vmem_stats")
        self.check("vmem_get_stats", [self.lib.vmem_get_stats(self.vm, stats)])
        names = [name for name, _ in self.ffi.typeof("struct vmem_stats").fields]
        return {name: int(getattr(stats, name)) for name in names if name != "size"}
