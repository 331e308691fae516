# SPDX-License-Identifier: MIT
"""The boundary to C: the only module that calls libvmem, and the only one that raises its errors.

One function per function of vmem.h, with its name in snake case, plain integers for handles, and an
exception instead of a negative errno. cffi releases the GIL in every call. Structures come back as
they are (``Any``); the modules above turn them into typed objects.
"""

from __future__ import annotations

import errno as _errno
import os
from typing import Any, NoReturn

from pyvmem._vmem import ffi, lib
from pyvmem.errors import VMemError, error_class

__all__ = [
    "AFTER_NONE",
    "address_of",
    "backend_names",
    "batch",
    "buffer_at",
    "check",
    "close",
    "consolidate",
    "constant",
    "copy",
    "create",
    "dlpack_destructor",
    "dlpack_discard",
    "dlpack_new",
    "drop",
    "fail",
    "ffi",
    "fill",
    "free",
    "get_stats",
    "handle_query",
    "inject",
    "map",
    "new_after",
    "new_ops",
    "open",
    "order",
    "poll",
    "probe",
    "query",
    "range_query",
    "read",
    "release",
    "reserve",
    "retain",
    "submit",
    "trim",
    "unmap",
    "version",
    "wait",
    "warm",
    "write",
]

AFTER_NONE: tuple[Any, int] = (ffi.NULL, 0)


def fail(
    errno: int, text: str, *, op: str = "", addr: int = 0, bytes: int = 0, limit: int = 0
) -> NoReturn:
    """Raises the error class of `errno` for a condition that was found on this side of C."""
    raise error_class(errno, op)(text, errno=errno, op=op, addr=addr, bytes=bytes, limit=limit)


def _last_error(code: int, op: str) -> VMemError:
    """The calling thread's last error as an exception; `code` is what the function returned."""
    record = _sized("struct vmem_error *")
    if lib.vmem_get_error(record) != 0 or record.code != code:
        return error_class(-code, op)(f"{op}: {os.strerror(-code)}", errno=-code, op=op)
    name = _text(record.op) or op
    return error_class(-code, name)(
        _text(record.text) or os.strerror(-code),
        errno=-code,
        status=record.status,
        status_name=_text(record.status_name),
        op=name,
        addr=record.addr,
        bytes=record.bytes,
        limit=record.limit,
    )


def _call(function: Any, *args: Any) -> None:
    """Calls a function of vmem.h and raises what it reports."""
    try:
        code = function(*args)
    except OverflowError as error:
        fail(
            _errno.EINVAL,
            f"{function.__name__}: a number is negative or too large ({error}): "
            f"{[arg for arg in args if isinstance(arg, int)]}",
            op=function.__name__,
        )
    if code != 0:
        raise _last_error(code, function.__name__)


def _sized(declaration: str, op: str = "", **fields: Any) -> Any:
    """A zeroed structure with its size field set, as every structure of vmem.h wants it."""
    struct = ffi.new(declaration)
    struct.size = ffi.sizeof(struct[0])
    for name, value in fields.items():
        try:
            setattr(struct, name, value)
        except OverflowError:
            fail(_errno.EINVAL, f"{name} = {value}: negative or too large", op=op)
    return struct


def _text(chars: Any) -> str:
    """A C string; driver names need not be UTF-8."""
    text: str = ffi.string(chars).decode("utf-8", "replace")
    return text


def constant(name: str) -> int:
    """The value of a VMEM_ constant, as the compiler saw it."""
    value: int = getattr(lib, name)
    return value


def version() -> str:
    """libvmem's version."""
    return _text(lib.vmem_version())


def backend_names() -> tuple[str, ...]:
    """The back ends in the order of "auto"."""
    names: list[str] = []
    while (name := lib.vmem_backend_name(len(names))) != ffi.NULL:
        names.append(_text(name))
    return tuple(names)


# ---- contexts --------------------------------------------------------------------------------


def open(
    backend: str,
    flags: int,
    devices: tuple[int, ...],
    granule: int,
    slab_size: int,
    mem_limit: int,
    pool_low: int,
    pool_high: int,
) -> int:
    """Opens a context and returns it; the caller closes it."""
    limit = constant("VMEM_MAX_DEVICES")
    if len(devices) > limit:
        fail(
            _errno.EINVAL,
            f"{len(devices)} devices; at most {limit}",
            op="vmem_open",
            bytes=len(devices),
            limit=limit,
        )
    name = ffi.new("char[]", backend.encode())  # opts holds a borrowed pointer to it
    opts = _sized(
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
    )
    try:
        opts.devices[0 : len(devices)] = devices
    except OverflowError:
        fail(_errno.EINVAL, f"devices = {devices}: out of range", op="vmem_open")
    out = ffi.new("vmem_t *")
    _call(lib.vmem_open, opts, out)
    vm: int = out[0]
    return vm


def close(vm: int) -> None:
    """Ends a context."""
    _call(lib.vmem_close, vm)


def query(vm: int) -> Any:
    """A struct vmem_info."""
    info = _sized("struct vmem_info *")
    _call(lib.vmem_query, vm, info)
    return info


def probe(backend: str, device: int, flags: int) -> Any:
    """A struct vmem_probe_info."""
    info = _sized("struct vmem_probe_info *")
    _call(lib.vmem_probe, backend.encode(), device, flags, info)
    return info


def get_stats(vm: int) -> Any:
    """A struct vmem_stats."""
    stats = _sized("struct vmem_stats *")
    _call(lib.vmem_get_stats, vm, stats)
    return stats


# ---- reservations ----------------------------------------------------------------------------


def reserve(vm: int, size: int, flags: int, align: int) -> int:
    """The first address of a new reservation."""
    opts = _sized("struct vmem_reserve_opts *", "vMemReserve", flags=flags, align=align)
    out = ffi.new("uint64_t *")
    _call(lib.vMemReserve, vm, size, opts, out)
    addr: int = out[0]
    return addr


def free(vm: int, addr: int, flags: int) -> None:
    """Gives a reservation back."""
    _call(lib.vMemFree, vm, addr, flags)


def range_query(vm: int, addr: int) -> Any:
    """A struct vmem_range_info."""
    info = _sized("struct vmem_range_info *")
    _call(lib.vmem_range_query, vm, addr, info)
    return info


# ---- pages -----------------------------------------------------------------------------------


def create(vm: int, size: int, page_size: int, location: int, device: int, flags: int) -> int:
    """A handle to new pages."""
    opts = _sized(
        "struct vmem_create_opts *",
        "vMemCreate",
        flags=flags,
        location=location,
        device=device,
        page_size=page_size,
    )
    out = ffi.new("vmem_handle *")
    _call(lib.vMemCreate, vm, size, opts, out)
    handle: int = out[0]
    return handle


def release(vm: int, handle: int) -> None:
    """Unmaps the handle's one mapping and drops the reference."""
    _call(lib.vMemRelease, vm, handle)


def drop(vm: int, handle: int) -> None:
    """Drops the reference alone."""
    _call(lib.vmem_drop, vm, handle)


def retain(vm: int, addr: int, size: int) -> int:
    """A new handle to the pages behind a range."""
    out = ffi.new("vmem_handle *")
    _call(lib.vmem_retain, vm, addr, size, out)
    handle: int = out[0]
    return handle


def handle_query(vm: int, handle: int) -> Any:
    """A struct vmem_handle_info."""
    info = _sized("struct vmem_handle_info *")
    _call(lib.vmem_handle_query, vm, handle, info)
    return info


# ---- mapping ---------------------------------------------------------------------------------


def map(vm: int, addr: int, size: int, handle: int, offset: int, flags: int) -> None:
    """Maps a part of a handle."""
    _call(lib.vMemMap, vm, addr, size, handle, offset, flags)


def unmap(vm: int, addr: int, size: int) -> None:
    """Unmaps a range."""
    _call(lib.vMemUnmap, vm, addr, size)


def new_ops(capacity: int) -> Any:
    """A zeroed array of struct vmem_op."""
    return ffi.new("struct vmem_op[]", capacity)


def new_after(items: list[tuple[int, int]]) -> tuple[Any, int]:
    """An array of struct vmem_after and its length, from (kind, handle) pairs."""
    array = ffi.new("struct vmem_after[]", len(items))
    for entry, (kind, handle) in zip(array, items, strict=True):
        entry.kind = kind
        entry.handle = handle
    return array, len(items)


def batch(vm: int, ops: Any, count: int, after: tuple[Any, int] = AFTER_NONE) -> None:
    """Runs operations as one, in the calling thread."""
    _call(lib.vmem_batch, vm, ops, count, after[0], after[1])


def submit(vm: int, ops: Any, count: int, after: tuple[Any, int] = AFTER_NONE) -> int:
    """Gives operations to the worker; returns the ticket."""
    out = ffi.new("vmem_ticket *")
    code = lib.vmem_submit(vm, ops, count, after[0], after[1], out)
    if code != 0:
        raise _last_error(code, "vmem_submit")
    ticket: int = out[0]
    return ticket


def wait(vm: int, ticket: int, timeout_ns: int) -> bool:
    """Waits; raises the batch's error, returns False when it is not finished in time."""
    code = lib.vmem_wait(vm, ticket, timeout_ns)
    if code == 0:
        return True
    if code == -_errno.ETIMEDOUT:
        return False
    raise _last_error(code, "vmem_wait")


def poll(vm: int, ticket: int) -> bool:
    """Whether the batch is finished, with whatever result."""
    code: int = lib.vmem_wait(vm, ticket, 0)
    if code in (-_errno.EBADF, -_errno.ECHILD):
        raise _last_error(code, "vmem_wait")
    return code != -_errno.ETIMEDOUT


def order(vm: int, ticket: int, stream: int) -> None:
    """Lets a stream wait for the batch's fills."""
    _call(lib.vmem_order, vm, ticket, stream)


# ---- contents --------------------------------------------------------------------------------


def read(vm: int, buffer: Any, addr: int, size: int) -> None:
    """Copies from `addr` into a writable cdata buffer of at least `size` bytes."""
    _call(lib.vmem_read, vm, buffer, addr, size)


def write(vm: int, addr: int, buffer: Any, size: int) -> None:
    """Copies from a cdata buffer of at least `size` bytes to `addr`."""
    _call(lib.vmem_write, vm, addr, buffer, size)


def copy(vm: int, dst: int, src: int, size: int) -> None:
    """Copies between addresses of the context."""
    _call(lib.vmem_copy, vm, dst, src, size)


def fill(vm: int, addr: int, size: int, value: int) -> None:
    """Writes one byte all over a range."""
    _call(lib.vmem_fill, vm, addr, size, value)


# ---- arrays ----------------------------------------------------------------------------------


def dlpack_new(
    owner: object,
    addr: int,
    device_type: int,
    device_id: int,
    code: int,
    bits: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    versioned: bool,
) -> Any:
    """A DLManagedTensor (or the versioned one) that owns a reference to `owner`."""
    tensor = lib.pyvmem_dlpack_new(
        ffi.cast("void *", id(owner)), addr, device_type, device_id, code, bits, len(shape),
        ffi.new("int64_t[]", shape), ffi.new("int64_t[]", strides), versioned,
    )  # fmt: skip
    if tensor == ffi.NULL:
        raise MemoryError
    return tensor


def dlpack_destructor(versioned: bool) -> int:
    """Address of the destructor of a capsule with such a tensor."""
    address: int = lib.pyvmem_dlpack_destructor(versioned)
    return address


def dlpack_discard(tensor: Any, versioned: bool) -> None:
    """Frees a tensor that no capsule took over."""
    lib.pyvmem_dlpack_discard(tensor, versioned)


def address_of(pointer: Any) -> int:
    """A pointer as a number."""
    return int(ffi.cast("uintptr_t", pointer))


def buffer_at(addr: int, size: int, owner: object) -> memoryview:
    """A writable memoryview of memory that the CPU reaches; keeps `owner` alive."""
    # The destructor does nothing: that it refers to the owner is the point.
    pointer = ffi.gc(ffi.cast("char *", addr), lambda _, _owner=owner: None)
    return memoryview(ffi.buffer(pointer, size))


# ---- pool and tests --------------------------------------------------------------------------


def warm(vm: int, size: int) -> None:
    """Takes memory from the driver until so many bytes are free."""
    _call(lib.vmem_warm, vm, size)


def trim(vm: int, keep: int) -> int:
    """Gives empty slabs back; returns the bytes."""
    out = ffi.new("uint64_t *")
    _call(lib.vmem_trim, vm, keep, out)
    freed: int = out[0]
    return freed


def consolidate(vm: int, addr: int, size: int) -> int:
    """Maps runs again in one piece; returns the driver calls."""
    out = ffi.new("uint64_t *")
    _call(lib.vmem_consolidate, vm, addr, size, out)
    calls: int = out[0]
    return calls


def inject(vm: int, kinds: int, skip: int, count: int, error: int) -> None:
    """Makes coming driver calls fail."""
    _call(lib.vmem_inject, vm, kinds, skip, count, error)


def check(vm: int) -> None:
    """Checks every internal invariant."""
    _call(lib.vmem_check, vm)
