# SPDX-License-Identifier: MIT
"""Contexts, reservations and pages: one-to-one wrappers for functions of vmem.h."""

from __future__ import annotations

import errno as _errno
from collections.abc import Callable
from typing import Any

from pyvmem._native.boundary import call, constant, fail, sized, text_of
from pyvmem._native.outcome import Outcome, cell_of
from pyvmem._vmem import ffi, lib

__all__ = [
    "backend_names",
    "close",
    "create",
    "discard",
    "drop",
    "drop_range",
    "free",
    "gather",
    "get_stats",
    "handle_query",
    "memory_query",
    "open",
    "probe",
    "query",
    "range_query",
    "release",
    "reserve",
    "version",
]


def version() -> str:
    """Returns libvmem's version."""
    return text_of(lib.vmem_version())


def backend_names() -> tuple[str, ...]:
    """Returns the names of the back ends, in the order in which "auto" tries them."""
    names: list[str] = []
    while (name := lib.vmem_backend_name(len(names))) != ffi.NULL:
        names.append(text_of(name))
    return tuple(names)


def _name(backend: str) -> bytes:
    """Encodes a back end's name for a C string; escapes NUL bytes, which would end the string."""
    return backend.replace("\0", r"\0").encode(errors="backslashreplace")


def open(
    backend: str,
    flags: int,
    devices: tuple[int, ...],
    granule: int,
    slab_size: int,
    mem_limit: int,
    pool_low: int,
    pool_high: int,
    max_mappings: int,
    *,
    outcome: Outcome | None = None,
) -> int:
    """Opens a context and returns its handle; the caller closes it."""
    limit = constant("VMEM_MAX_DEVICES")
    if len(devices) > limit:
        fail(
            _errno.EINVAL,
            f"{len(devices)} devices; at most {limit}",
            op="vmem_open",
            bytes=len(devices),
            limit=limit,
        )
    name = ffi.new("char[]", _name(backend))  # must outlive opts, which only points to it
    opts = sized(
        "struct vmem_open_opts *",
        "vmem_open",
        backend=name,
        flags=flags,
        num_devices=len(devices),
        granule=granule,
        slab_size=slab_size,
        mem_limit=mem_limit,
        pool_low=pool_low,
        pool_high=pool_high,
        max_mappings=max_mappings,
    )
    try:
        opts.devices[0 : len(devices)] = devices
    except OverflowError:
        fail(_errno.EINVAL, f"devices = {devices}: out of range", op="vmem_open")
    made = outcome or Outcome()
    call(lib.pyvmem_open, made.cell, opts)
    return int(made.cell.value)


def close(vm: int, *, outcome: Outcome | None = None) -> None:
    """Closes a context."""
    call(lib.pyvmem_close, cell_of(outcome), vm)


discard: Callable[[int], int] = lib.vmem_close
"""Closes a context. This is the C function itself: no signal handler can raise before it runs."""


def query(vm: int) -> Any:
    """Returns a struct vmem_info."""
    info = sized("struct vmem_info *")
    call(lib.vmem_query, vm, info)
    return info


def probe(backend: str, device: int) -> Any:
    """Returns a struct vmem_probe_info."""
    info = sized("struct vmem_probe_info *")
    call(lib.vmem_probe, _name(backend), device, 0, info)
    return info


def get_stats(vm: int, into: Any = None) -> Any:
    """Returns a filled struct vmem_stats: `into` if given, otherwise a new one."""
    stats = sized("struct vmem_stats *") if into is None else into
    call(lib.vmem_get_stats, vm, stats)
    return stats


def memory_query(vm: int, location: int, device: int) -> Any:
    """Returns a struct vmem_memory_info."""
    info = sized("struct vmem_memory_info *")
    call(lib.vmem_memory_query, vm, location, device, info)
    return info


def reserve(vm: int, size: int, flags: int, align: int, *, outcome: Outcome | None = None) -> int:
    """Reserves an address range; returns its start address."""
    opts = sized("struct vmem_reserve_opts *", "vMemReserve", flags=flags, align=align)
    made = outcome or Outcome()
    call(lib.pyvmem_reserve, made.cell, vm, size, opts)
    return int(made.cell.value)


def free(vm: int, addr: int, flags: int, *, outcome: Outcome | None = None) -> None:
    """Frees a reservation."""
    call(lib.pyvmem_free, cell_of(outcome), vm, addr, flags)


def range_query(vm: int, addr: int) -> Any:
    """Returns a struct vmem_range_info."""
    info = sized("struct vmem_range_info *")
    call(lib.vmem_range_query, vm, addr, info)
    return info


def create(
    vm: int,
    size: int,
    page_size: int,
    location: int,
    device: int,
    flags: int,
    *,
    outcome: Outcome | None = None,
) -> int:
    """Creates pages and returns their handle."""
    opts = sized(
        "struct vmem_create_opts *",
        "vMemCreate",
        flags=flags,
        location=location,
        device=device,
        page_size=page_size,
    )
    made = outcome or Outcome()
    call(lib.pyvmem_create, made.cell, vm, size, opts)
    return int(made.cell.value)


def release(vm: int, handle: int) -> None:
    """Unmaps the handle's only mapping and drops the reference."""
    call(lib.vMemRelease, vm, handle)


def drop(vm: int, handle: int) -> None:
    """Drops the reference; mappings remain and keep their pages."""
    call(lib.vmem_drop, vm, handle)


def gather(vm: int, addr: int, size: int, count: int, stride: int, *, outcome: Outcome) -> None:
    """Creates a handle to the pages that back several ranges, in order; stores it in `outcome`."""
    call(lib.pyvmem_gather, outcome.cell, vm, addr, size, count, stride)


def drop_range(
    vm: int,
    handle: int,
    offset: int,
    size: int,
    count: int,
    stride: int,
    *,
    outcome: Outcome | None = None,
) -> None:
    """Drops the reference to part of a handle's pages."""
    call(lib.pyvmem_drop_range, cell_of(outcome), vm, handle, offset, size, count, stride)


def handle_query(vm: int, handle: int) -> Any:
    """Returns a struct vmem_handle_info."""
    info = sized("struct vmem_handle_info *")
    call(lib.vmem_handle_query, vm, handle, info)
    return info
