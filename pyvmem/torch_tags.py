# SPDX-License-Identifier: MIT
"""The tags of a `VMemPool`: what is paused together, and where contents lie meanwhile."""

from __future__ import annotations

import ctypes
import errno
import mmap
from dataclasses import dataclass, field
from typing import Any

from pyvmem import _native
from pyvmem._native import torch_alloc
from pyvmem.errors import TooManyBatches

__all__ = ["Tag", "TorchPoolStats"]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@dataclass(frozen=True)
class TorchPoolStats:
    """State of a `VMemPool`, of one tag or all, and counters of the whole pool.

    Attributes:
        blocks: segments that torch holds.
        mapped_bytes: of segments with memory.
        paused_bytes: of segments without.
        saved_bytes: the part of `paused_bytes` whose contents lie in host memory.
        mallocs, frees: segments that torch took and gave back so far.
        failures: calls of torch that could not be served.
        last_error: what the last of them failed with; torch itself only says "out of memory".
    """

    blocks: int
    mapped_bytes: int
    paused_bytes: int
    saved_bytes: int
    mallocs: int
    frees: int
    failures: int
    last_error: str

    @classmethod
    def of(cls, device: int, number: int = torch_alloc.ALL) -> TorchPoolStats:
        """Asks the allocator; `number`: of one tag."""
        now = torch_alloc.stats(device, number)
        return cls(
            now.blocks,
            now.mapped_bytes,
            now.paused_bytes,
            now.saved_bytes,
            now.mallocs,
            now.frees,
            now.failures,
            _native.text_of(now.error),
        )


@dataclass(slots=True, eq=False)
class Tag:
    """Segments that are paused and resumed as one; not thread-safe by itself.

    Attributes:
        name: the caller's.
        number: the same in C, never 0, which is a thread without a tag.
        device: of the pool.
        users: active `VMemPool.use` blocks.
        paused: since the last resume.
        pool: its torch.cuda.MemPool, once there is one.
        saved: contents of paused segments. C holds addresses in them, so they live until the
            segments are resumed.
    """

    name: str
    number: int
    device: int
    users: int = 0
    paused: bool = False
    pool: Any = None
    saved: list[mmap.mmap] = field(default_factory=list)

    def stats(self) -> TorchPoolStats:
        """The allocator's statistics for it."""
        return TorchPoolStats.of(self.device, self.number)

    def pause(self, keep: bool) -> None:
        """Unmaps all segments, or, where that raises, none; no GPU work may be unfinished."""
        while True:
            room = self.stats().mapped_bytes
            save = _host_memory(room) if keep and room else None
            try:
                torch_alloc.pause(self.device, self.number, save)
            except TooManyBatches:  # EAGAIN: torch added a segment since it was counted
                continue
            break
        if save is not None:
            self.saved.append(save)
        self.paused = True

    def view_of(self, at: int, nbytes: int) -> memoryview | None:
        """Saved contents by their address in host memory; None: they are not of this tag."""
        for memory in self.saved:
            offset = at - ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if 0 <= offset < len(memory):
                return memoryview(memory)[offset : offset + nbytes]
        return None

    def resume(self) -> int:
        """Maps all paused segments, or, where that raises, none; returns their bytes."""
        size = self.stats().paused_bytes
        torch_alloc.resume(self.device, self.number)
        self.paused = False
        self.saved.clear()
        return size


def _host_memory(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=_PRIVATE)
    except OSError:
        _native.fail(
            errno.ENOMEM, f"no host memory for {size} bytes of contents", op="pause", bytes=size
        )
