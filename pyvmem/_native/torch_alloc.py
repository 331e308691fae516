# SPDX-License-Identifier: MIT
"""torch's allocator interface: one-to-one wrappers for the functions of _torch_alloc.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pyvmem._native.boundary import call, constant
from pyvmem._native.outcome import Outcome, cell_of
from pyvmem._vmem import ffi, lib

__all__ = ["ALL", "close", "open", "owns", "pause", "resume", "saved", "set_tag", "stats", "tag"]

ALL = constant("PYVMEM_TORCH_ALL")


class Primary(Protocol):
    """Properties of a device's primary context, for `open`."""

    @property
    def handle(self) -> int:
        """The CUcontext."""

    def address(self, function: str) -> int:
        """Returns the address of a libcuda function."""


def open(
    device: int,
    vm: int,
    page: int,
    reserve_flags: int,
    primary: Primary | None,
    outcome: Outcome | None = None,
) -> None:
    """Makes `vm` the context for torch's allocations on a device.

    Every free waits for GPU work in `primary`, which must live until `close`; None: frees do not
    wait.
    """
    gpu = ffi.NULL
    if primary is not None:
        gpu = ffi.new("struct pyvmem_torch_gpu *")
        gpu.context = primary.handle
        gpu.push = primary.address("cuCtxPushCurrent_v2")
        gpu.synchronize = primary.address("cuCtxSynchronize")
        gpu.pop = primary.address("cuCtxPopCurrent_v2")
    call(lib.pyvmem_torch_open, cell_of(outcome), device, vm, page, reserve_flags, gpu)


def close(device: int, outcome: Outcome | None = None) -> None:
    """Unregisters a device's context; raises Busy while torch holds blocks."""
    call(lib.pyvmem_torch_close, cell_of(outcome), device)


tag: Callable[[], int] = lib.pyvmem_torch_tag_now
"""Returns the tag of the calling thread's allocations."""

set_tag: Callable[[int], int] = lib.pyvmem_torch_tag
"""Sets the calling thread's tag and returns the old one. Atomic, because it is a C function."""


def pause(device: int, tag: int, save: Any, outcome: Outcome | None = None) -> None:
    """Unmaps a tag's blocks.

    Saves the blocks' contents to the writable buffer `save`, unless it is None.
    """
    if save is None:
        call(lib.pyvmem_torch_pause, cell_of(outcome), device, tag, ffi.NULL, 0)
    else:
        buffer = ffi.from_buffer(save, require_writable=True)
        call(lib.pyvmem_torch_pause, cell_of(outcome), device, tag, buffer, len(buffer))


def resume(device: int, tag: int) -> None:
    """Remaps a tag's paused blocks."""
    call(lib.pyvmem_torch_resume, device, tag)


def owns(device: int, addr: int, size: int) -> bool:
    """Returns true if a range is within one block."""
    return bool(lib.pyvmem_torch_owns(device, addr, size))


def saved(device: int, addr: int, size: int) -> int:
    """Returns the address of a range's saved contents, or 0 if they were not saved.

    The range must be in a paused block.
    """
    return int(lib.pyvmem_torch_saved(device, addr, size))


def stats(device: int, tag: int) -> Any:
    """Returns a tag's counters as a ``struct pyvmem_torch_stats``.

    For the tag `ALL`, returns the totals of all tags.
    """
    out = ffi.new("struct pyvmem_torch_stats *")
    call(lib.pyvmem_torch_stats, device, tag, out)
    return out
