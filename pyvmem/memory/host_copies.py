# SPDX-License-Identifier: MIT
"""Copies scattered pieces between a context's memory and host memory while an engine runs steps.

Used by vLLM's KV offloading on the pool and by `KVCache.swap_out`.

    StreamCopies   on a GPU: a Triton kernel on its own stream, which accepts plain addresses
    ThreadCopies   on the CPU: memcpy in its own thread

An object's copies run in the order they were started, after any steps launched before them. If the
kernel or the memcpy cannot be started, libvmem's staged copies are used instead; they are slow but
need no device memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from pyvmem.memory.context import Context
from pyvmem.memory.streams import has_cuda, relaxed

__all__ = [
    "Copies",
    "Copy",
    "HostMemory",
    "Pieces",
    "StreamCopies",
    "ThreadCopies",
    "copies_for",
    "copy_now",
    "has_kernel",
    "split",
]

THREAD_BLOCKS = 8  # as fast as 64 on an H100; leaves 124 multiprocessors for the model
_PART = 64 << 10  # maximum bytes that a thread block copies at a time
_REGISTERED = 64 << 30  # maximum bytes to page-lock per call; drivers limit the size
_PORTABLE_AND_MAPPED = 3

log = logging.getLogger(__name__)


class Pieces:
    """The pieces of one transfer.

    Args:
        device: addresses in KV tensors.
        host: addresses in host memory.
        sizes: size of each piece in bytes.
    """

    def __init__(self, device: Any, host: Any, sizes: Any) -> None:
        self.device, self.host, self.sizes = device, host, sizes

    @property
    def nbytes(self) -> int:
        """Total size of the pieces in bytes."""
        return int(self.sizes.sum())


def split(pieces: Pieces, part: int = _PART) -> Pieces:
    """Splits pieces into parts of at most `part` bytes, so that every thread block has work."""
    if not len(pieces.sizes) or pieces.sizes.max() <= part:
        return pieces
    counts = -(-pieces.sizes // part)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    at = (np.arange(len(first)) - first) * part
    sizes = np.minimum(np.repeat(pieces.sizes, counts) - at, part)
    return Pieces(np.repeat(pieces.device, counts) + at, np.repeat(pieces.host, counts) + at, sizes)


class HostMemory:
    """Anonymous host memory, which the system frees no matter how this process exits.

    Args:
        nbytes: size in bytes, greater than 0.
        locked: page-lock the memory, so that kernels on all CUDA devices can access it.
        memory: existing memory of `nbytes` bytes to use; None: allocate it.

    Raises:
        MemoryError: the memory cannot be allocated or page-locked.
    """

    def __init__(self, nbytes: int, locked: bool, memory: mmap.mmap | None = None) -> None:
        try:
            if memory is None:
                memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{nbytes} bytes of host memory for KV offloading: {error}") from None
        memory.madvise(mmap.MADV_DONTFORK)  # otherwise, fork could copy pages that the GPU maps
        view = ctypes.c_char.from_buffer(memory)
        self.addr, self.nbytes, self.memory = ctypes.addressof(view), nbytes, memory
        registered: list[int] = []
        self._end = weakref.finalize(self, _give_back, [view], memory, registered)
        for at in range(0, nbytes if locked else 0, _REGISTERED):
            size = min(_REGISTERED, nbytes - at)
            if failure := _register(self.addr + at, size):
                self.close()
                raise MemoryError(
                    f"{nbytes} bytes of host memory for KV offloading cannot be page-locked: "
                    f"{failure}; request less"
                )
            registered.append(self.addr + at)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._end()


def _register(addr: int, size: int) -> str:
    """Page-locks memory. Returns the error message, or "" on success."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(addr, size, _PORTABLE_AND_MAPPED)
    return "" if int(result) == 0 else f"cudaHostRegister: {result}"


def _give_back(view: list[Any], memory: mmap.mmap, registered: list[int]) -> None:
    if registered:
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for addr in registered:
            runtime.cudaHostUnregister(addr)
    view.clear()
    with contextlib.suppress(BufferError):  # raised if a view of the memory is still in use
        memory.close()


class Copy:
    """A transfer that has been started."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.error: BaseException | None = None

    def ready(self) -> bool:
        """Returns true if the transfer is complete."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits until the transfer is complete."""
        raise NotImplementedError

    def seconds(self) -> float:
        """Returns the duration of the transfer in seconds."""
        raise NotImplementedError


class Copies(Protocol):
    """Starts copies in one direction."""

    def now(self) -> Any:
        """Returns the work launched so far, to pass to `start`; None if no wait is needed."""

    def start(self, pieces: Pieces, after: Any = None) -> Copy:
        """Starts a copy that runs after all earlier copies and after the given work.

        Args:
            pieces: the pieces to copy.
            after: the work to wait for, as returned by `now`; None: the work launched so far.
        """

    def events(self) -> tuple[Any, ...]:
        """Returns events that later work must wait for. On the CPU, waits and returns no events."""

    def fence(self, stream: Any) -> None:
        """Makes a stream wait for the copies started so far."""

    def close(self) -> None:
        """Waits for all copies. Idempotent."""


def by_library(context: Context, pieces: Pieces, to_host: bool) -> None:
    """Copies synchronously with libvmem's staged copies.

    Raises:
        VMemError: a staged copy failed.
    """
    for device, host, size in zip(
        pieces.device.tolist(), pieces.host.tolist(), pieces.sizes.tolist(), strict=True
    ):
        if to_host:
            ctypes.memmove(host, context.read(device, size), size)
        else:
            context.write(device, (ctypes.c_char * size).from_address(host))


class _Threaded(Copy):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces.nbytes)
        self.pieces = pieces
        self.ended = threading.Event()
        self.took = 0.0

    def ready(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()

    def seconds(self) -> float:
        return self.took


class ThreadCopies:
    """Copies with memcpy in a thread.

    Copies need not wait for steps, since a step on the CPU is complete when it returns.

    Args:
        context: context of the KV tensors.
        to_host: True: copy to host memory; False: copy from it.
    """

    def __init__(self, context: Context, to_host: bool) -> None:
        self._context, self._to_host = context, to_host
        self._queue: SimpleQueue[_Threaded | None] = SimpleQueue()
        self._last: _Threaded | None = None
        self._thread = threading.Thread(target=self._run, name="vmem-offload", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """Returns None: steps are complete when they return."""

    def start(self, pieces: Pieces, after: Any = None) -> Copy:
        """Queues a copy for the thread."""
        self._last = copy = _Threaded(pieces)
        self._queue.put(copy)
        return copy

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            begin = time.perf_counter()
            try:
                try:
                    self._move(copy.pieces)
                except OSError as error:
                    log.warning("vmem: a copy failed; retrying it with libvmem: %s", str(error))
                    by_library(self._context, copy.pieces, self._to_host)
            except BaseException as error:
                copy.error = error
            copy.took = time.perf_counter() - begin
            copy.ended.set()

    def _move(self, pieces: Pieces) -> None:
        to, of = pieces.host, pieces.device
        if not self._to_host:
            to, of = of, to
        for target, source, size in zip(
            to.tolist(), of.tolist(), pieces.sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)

    def events(self) -> tuple[Any, ...]:
        """Waits for the copies; returns an empty tuple."""
        self.fence(None)
        return ()

    def fence(self, stream: Any) -> None:
        """Waits for the copies."""
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """Waits for the copies and stops the thread."""
        self._queue.put(None)
        self._thread.join()


class _Streamed(Copy):
    def __init__(self, nbytes: int, begin: Any, end: Any, kept: Any) -> None:
        super().__init__(nbytes)
        self._begin, self._end = begin, end
        self._kept = kept  # piece descriptors in pinned memory, copied to the device

    def ready(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


class StreamCopies:
    """Copies with a Triton kernel on its own stream.

    Args:
        context: context of the KV tensors.
        to_host: True: copy to host memory; False: copy from it.
        device: a torch device.
        thread_blocks: number of thread blocks per kernel launch.
        after_current: whether copies wait for the work on torch's current stream; False if the
            caller has already waited.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(
        self,
        context: Context,
        to_host: bool,
        device: Any,
        thread_blocks: int = THREAD_BLOCKS,
        after_current: bool = True,
    ) -> None:
        import torch

        from pyvmem.memory.copy_kernel import copy_pieces

        self._context, self._to_host, self._device = context, to_host, device
        self._kernel, self._blocks = copy_pieces, thread_blocks
        self._after_current = after_current
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self) -> None:
        """Compiles and loads the kernel before the first `start`; this may wait for the device."""
        nothing = np.empty(0, dtype=np.int64)
        for align in (16, 1):
            self._launch(Pieces(nothing, nothing, nothing), align)
        self.stream.synchronize()

    def now(self) -> Any:
        """Returns an event on torch's current stream; None if copies do not wait for it."""
        import torch

        if not self._after_current:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def start(self, pieces: Pieces, after: Any = None) -> Copy:
        """Launches a copy."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Copies to the device must also wait: a running step may still be reading the target
        # blocks.
        if (after := after or self.now()) is not None:
            self.stream.wait_event(after)
        begin.record(self.stream)
        kept: Any = None
        try:
            kept = self._launch(split(pieces), 16)
        except RuntimeError as error:  # includes torch's OutOfMemoryError
            log.warning("vmem: falling back to libvmem for a copy: %s", str(error))
            self.stream.synchronize()
            by_library(self._context, pieces, self._to_host)
        end.record(self.stream)
        return _Streamed(pieces.nbytes, begin, end, kept)

    def _launch(self, pieces: Pieces, align: int) -> Any:
        import torch

        source, target = pieces.device, pieces.host
        if not self._to_host:
            source, target = target, source
        count = len(pieces.sizes)
        rows = np.concatenate([source, target, pieces.sizes]).astype(np.int64, copy=False)
        wide = align == 16 and not int(np.bitwise_or.reduce(rows, initial=0)) & 15
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            kept = torch.from_numpy(rows if count else np.zeros(3, dtype=np.int64)).pin_memory()
            found = kept.to(self._device, non_blocking=True)
            grid = (max(1, min(self._blocks, count)),)
            if wide:
                self._kernel[grid](found, count, STEP=4096, WIDE=True, num_warps=16)
            else:
                self._kernel[grid](found, count, STEP=2048, WIDE=False, num_warps=16)
        return kept

    def events(self) -> tuple[Any, ...]:
        """Returns an event that completes after the copies started so far."""
        import torch

        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return (event,)

    def fence(self, stream: Any) -> None:
        """Makes a stream wait for the copies started so far."""
        stream.wait_stream(self.stream)

    def close(self) -> None:
        """Waits for the copies."""
        self.stream.synchronize()


def copies_for(context: Context, device: Any) -> Callable[[bool], Copies]:
    """Returns a function that creates a rank's `Copies` object for a given direction."""

    def streamed(to_host: bool) -> Copies:
        copies = StreamCopies(context, to_host, device)
        copies.load()
        return copies

    if device.type == "cuda":
        return streamed
    return lambda to_host: ThreadCopies(context, to_host)


def has_kernel(context: Context) -> bool:
    """Returns true if `copy_now` can use the kernel, provided that Triton is installed."""
    if context.cuda_device is None or find_spec("torch") is None:
        return False
    import torch

    return has_cuda(torch)


def copy_now(context: Context, to_host: bool, pieces: Pieces) -> bool:
    """Copies to or from page-locked memory with the kernel, synchronously.

    Returns false without copying if the kernel cannot run: the context is on the CPU, torch
    lacks CUDA, or Triton is missing.
    """
    number = context.cuda_device
    if number is None or not has_kernel(context):
        return False
    import torch

    device = torch.device("cuda", number)
    try:
        copies = StreamCopies(context, to_host, device, after_current=False)
    except ImportError:
        return False
    try:
        relaxed(lambda: copies.start(pieces))
    finally:  # wait even if interrupted: the caller may free the memory afterwards
        relaxed(copies.close)
    return True
