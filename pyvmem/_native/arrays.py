# SPDX-License-Identifier: MIT
"""Tensors and buffers over raw addresses (_dlpack.c)."""

from __future__ import annotations

import ctypes
from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["buffer_at", "dlpack_capsule"]

# ctypes makes the call with the GIL held, and the returned reference always has an owner: if the
# caller is interrupted, the capsule is dropped, which deletes the tensor.
_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object,
    *(ctypes.py_object, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint8),
    *(ctypes.c_uint8, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
)(int(ffi.cast("uintptr_t", ffi.addressof(lib, "pyvmem_dlpack_capsule"))))


def dlpack_capsule(
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
    """Returns a capsule with a DLManagedTensor(Versioned) that keeps `owner` alive."""
    dims = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
    first = ctypes.addressof(dims)
    return _capsule(
        owner, addr, device_type, device_id, code, bits, len(shape), first,
        first + 8 * len(shape), versioned,
    )  # fmt: skip


def buffer_at(addr: int, size: int, owner: object) -> memoryview:
    """Returns a writable memoryview of memory that the CPU can access; keeps `owner` alive."""
    # The destructor does nothing; it only keeps a reference to the owner.
    pointer = ffi.gc(ffi.cast("char *", addr), lambda _, _owner=owner: None)
    return memoryview(ffi.buffer(pointer, size))
