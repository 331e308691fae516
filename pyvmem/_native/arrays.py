# SPDX-License-Identifier: MIT
"""Tensors and buffers over addresses (_dlpack.c)."""

from __future__ import annotations

from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = [
    "address_of",
    "buffer_at",
    "dlpack_destructor",
    "dlpack_discard",
    "dlpack_new",
]


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
    """A new DLManagedTensor, or DLManagedTensorVersioned, that holds a reference to `owner`."""
    tensor = lib.pyvmem_dlpack_new(
        ffi.cast("void *", id(owner)), addr, device_type, device_id, code, bits, len(shape),
        ffi.new("int64_t[]", shape), ffi.new("int64_t[]", strides), versioned,
    )  # fmt: skip
    if tensor == ffi.NULL:
        raise MemoryError
    return tensor


def dlpack_destructor(versioned: bool) -> int:
    """The address of the destructor for a capsule that holds such a tensor."""
    address: int = lib.pyvmem_dlpack_destructor(versioned)
    return address


def dlpack_discard(tensor: Any, versioned: bool) -> None:
    """Frees a tensor that no capsule owns."""
    lib.pyvmem_dlpack_discard(tensor, versioned)


def address_of(pointer: Any) -> int:
    """A pointer as a number."""
    return int(ffi.cast("uintptr_t", pointer))


def buffer_at(addr: int, size: int, owner: object) -> memoryview:
    """A writable memoryview of memory that the CPU can access; keeps `owner` alive."""
    # The destructor does nothing; it is there for its reference to the owner.
    pointer = ffi.gc(ffi.cast("char *", addr), lambda _, _owner=owner: None)
    return memoryview(ffi.buffer(pointer, size))
