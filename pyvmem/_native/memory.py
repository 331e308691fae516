# SPDX-License-Identifier: MIT
"""Mapping, batches, data access and the pool: one-to-one wrappers for functions of vmem.h."""

from __future__ import annotations

import errno as _errno
from typing import TYPE_CHECKING, Any

from pyvmem._native.boundary import call, last_error
from pyvmem._native.outcome import Outcome
from pyvmem._vmem import ffi, lib

if TYPE_CHECKING:
    from pyvmem._native.columns import Waits

__all__ = [
    "AFTER_NONE",
    "batch",
    "check",
    "compact",
    "copy",
    "fill",
    "inject",
    "join",
    "map",
    "new_after",
    "new_ops",
    "order",
    "read",
    "submit",
    "ticket_drop",
    "trim",
    "unmap",
    "wait",
    "warm",
    "write",
]

AFTER_NONE: tuple[Any, int] = (ffi.NULL, 0)


def map(vm: int, addr: int, size: int, handle: int, offset: int, flags: int) -> None:
    """Maps part of a handle's pages."""
    call(lib.vMemMap, vm, addr, size, handle, offset, flags)


def unmap(vm: int, addr: int, size: int) -> None:
    """Unmaps a range."""
    call(lib.vMemUnmap, vm, addr, size)


def new_ops(capacity: int) -> Any:
    """Returns a zeroed array of struct vmem_op."""
    return ffi.new("struct vmem_op[]", capacity)


def new_after(items: list[tuple[int, int]]) -> tuple[Any, int]:
    """Converts (kind, handle) pairs to an array of struct vmem_after; returns it and its length."""
    array = ffi.new("struct vmem_after[]", len(items))
    for entry, (kind, handle) in zip(array, items, strict=True):
        entry.kind = kind
        entry.handle = handle
    return array, len(items)


def batch(
    vm: int,
    ops: Any,
    count: int,
    after: tuple[Any, int] = AFTER_NONE,
    *,
    outcome: Outcome | None = None,
    waits: Waits | None = None,
) -> None:
    """Runs operations as one batch in the calling thread; adds the time taken to `waits`."""
    made = outcome or Outcome()
    if waits is not None:
        wait: Any = ffi.new("struct pyvmem_wait *")
        lib.pyvmem_wait_begin(wait, vm)
    code = lib.pyvmem_batch(made.cell, vm, ops, count, after[0], after[1], 0)
    error = last_error(code, "vmem_batch") if code else None  # read before the next C call
    if waits is not None:
        lib.pyvmem_wait_end(waits.struct, wait, vm)
    if error is not None:
        raise error


def submit(
    vm: int,
    ops: Any,
    count: int,
    after: tuple[Any, int] = AFTER_NONE,
    flags: int = 0,
    *,
    outcome: Outcome | None = None,
) -> int:
    """Queues a batch for the worker. Returns its ticket, which lives until `ticket_drop`."""
    made = outcome or Outcome()
    code = lib.pyvmem_submit(made.cell, vm, ops, count, after[0], after[1], flags)
    if code != 0:
        raise last_error(code, "vmem_submit")
    return int(made.cell.value)


def wait(vm: int, ticket: int, timeout_ns: int) -> bool:
    """Waits for a batch and raises its error, if any. Returns False if it times out."""
    code = lib.vmem_wait(vm, ticket, timeout_ns)
    if code == 0:
        return True
    if code == -_errno.ETIMEDOUT:
        return False
    raise last_error(code, "vmem_wait")


def ticket_drop(vm: int, ticket: int) -> None:
    """Drops a ticket and its batch's result; does nothing if the ticket was already dropped."""
    lib.vmem_ticket_drop(vm, ticket)


def order(vm: int, ticket: int, stream: int) -> None:
    """Makes a stream wait for the batch's fills."""
    call(lib.vmem_order, vm, ticket, stream)


def read(vm: int, buffer: Any, addr: int, size: int) -> None:
    """Copies from `addr` into a writable cdata buffer of at least `size` bytes."""
    call(lib.vmem_read, vm, buffer, addr, size)


def write(vm: int, addr: int, buffer: Any, size: int) -> None:
    """Copies from a cdata buffer of at least `size` bytes to `addr`."""
    call(lib.vmem_write, vm, addr, buffer, size)


def copy(vm: int, dst: int, src: int, size: int) -> None:
    """Copies between addresses of the context."""
    call(lib.vmem_copy, vm, dst, src, size)


def fill(vm: int, addr: int, size: int, value: int) -> None:
    """Sets every byte of a range to `value`."""
    call(lib.vmem_fill, vm, addr, size, value)


def warm(vm: int, size: int) -> None:
    """Allocates memory from the driver until the pool has `size` free bytes."""
    call(lib.vmem_warm, vm, size)


def trim(vm: int, keep: int) -> int:
    """Gives empty slabs back to the driver while at least `keep` free bytes remain.

    Returns the number of bytes given back.
    """
    out = ffi.new("uint64_t *")
    call(lib.vmem_trim, vm, keep, out)
    freed: int = out[0]
    return freed


def compact(vm: int, want: int, after: tuple[Any, int] = AFTER_NONE) -> int:
    """Gives at least `want` bytes back to the driver, if possible; moves pages out of sparse slabs.

    Returns the number of bytes given back.
    """
    out = ffi.new("uint64_t *")
    call(lib.vmem_compact, vm, want, after[0], after[1], 0, out)
    freed: int = out[0]
    return freed


def join(vm: int, addr: int, size: int) -> int:
    """Remaps each run as one mapping; returns the number of driver calls."""
    out = ffi.new("uint64_t *")
    call(lib.vmem_join, vm, addr, size, out)
    calls: int = out[0]
    return calls


def inject(vm: int, kinds: int, skip: int, count: int, error: int) -> None:
    """Makes later driver calls fail, for tests."""
    call(lib.vmem_inject, vm, kinds, skip, count, error)


def check(vm: int) -> None:
    """Checks every internal invariant."""
    call(lib.vmem_check, vm)
