# SPDX-License-Identifier: MIT
"""The tags of a `VMemPool`: segments that are paused together, and their saved contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyvmem import _native
from pyvmem._native import Outcome, torch_alloc
from pyvmem.errors import TooManyBatches
from pyvmem.torch_pool.host import HostBlock, HostMemory

__all__ = ["Tag", "TorchPoolStats"]


@dataclass(frozen=True)
class TorchPoolStats:
    """The state of one or all tags of a `VMemPool`, and counters for the entire pool.

    Attributes:
        blocks: number of segments that torch holds.
        mapped_bytes: total bytes of segments with memory.
        paused_bytes: total bytes of segments without memory.
        saved_bytes: the part of `paused_bytes` whose contents are in host memory.
        mallocs, frees: number of segments that torch has allocated and freed so far.
        failures: number of failed calls from torch.
        last_error: the error from the latest failure; torch itself only reports "out of memory".
        host_bytes: host memory of the entire pool, including memory kept for the next pause.
        locked_bytes: the part of `host_bytes` that is page-locked.
    """

    blocks: int
    mapped_bytes: int
    paused_bytes: int
    saved_bytes: int
    mallocs: int
    frees: int
    failures: int
    last_error: str
    host_bytes: int
    locked_bytes: int

    @classmethod
    def of(cls, device: int, host: HostMemory, number: int = torch_alloc.ALL) -> TorchPoolStats:
        """Returns the current state of a tag, or of all tags if none is given."""
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
            host.bytes,
            host.locked_bytes,
        )


@dataclass(slots=True, eq=False)
class Tag:
    """Segments that are paused and resumed together. Not thread-safe on its own.

    Attributes:
        name: the caller's name for the tag.
        number: the tag's number in C, where 0 means a thread without a tag.
        device: the pool's device.
        host: the pool's host memory.
        users: an object for each active `VMemPool.use` block.
        paused: true if the tag has been paused and not resumed since.
        pool: the tag's torch.cuda.MemPool, once created.
        saved: contents of paused segments. C holds pointers into them, so they must live until the
            segments are resumed.
    """

    name: str
    number: int
    device: int
    host: HostMemory
    users: set[object] = field(default_factory=set)
    paused: bool = False
    pool: Any = None
    saved: list[HostBlock] = field(default_factory=list)

    def stats(self) -> TorchPoolStats:
        """Returns the allocator's statistics for the tag."""
        return TorchPoolStats.of(self.device, self.host, self.number)

    def pause(self, keep: bool) -> None:
        """Unmaps all segments, or none if it raises an error. The GPU must be idle."""
        before = self.paused
        while True:
            room = self.stats().mapped_bytes
            save = self.host.take(room) if keep and room else None
            outcome = Outcome()
            try:
                if save is not None:
                    self.saved.append(save)  # before the call, after which C holds its address
                self.paused = True
                memory = None if save is None else save.memory
                torch_alloc.pause(self.device, self.number, memory, outcome)
                return
            except BaseException as error:
                if not outcome.happened:
                    self.paused = before
                    if save is not None:
                        if save in self.saved:
                            self.saved.remove(save)
                        self.host.give(save)
                if not isinstance(error, TooManyBatches):
                    raise  # otherwise, torch has added a segment in the meantime: retry

    def view_of(self, at: int, nbytes: int) -> memoryview | None:
        """Returns the saved contents at a host address, or None if this tag did not save them."""
        for block in self.saved:
            if 0 <= at - block.address < block.size:
                return block.view(at - block.address, nbytes)
        return None

    def resume(self) -> int:
        """Maps all paused segments, or none if it raises an error. Returns their size in bytes."""
        size = self.stats().paused_bytes
        torch_alloc.resume(self.device, self.number)
        self.paused = False
        self.forget()
        return size

    def forget(self) -> None:
        """Drops the saved contents."""
        while self.saved:
            self.host.give(self.saved.pop())
