# SPDX-License-Identifier: MIT
"""The KV memory of a rank: tensors on a reservation, and the pages that back them.

All tensors share one reservation. The tensors of a class (`geometry`) are equally spaced, so one
batch operation covers a run of pages in all of them.

A page is unmapped only after all steps scheduled before its release have finished, because they may
access it. The scheduler passes the number of the last such step. Steps are launched in order on one
stream, so an event recorded after that step's launch also covers the earlier steps. Only libvmem's
worker thread waits for the event.
"""

from __future__ import annotations

import hashlib
import math
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pyvmem.elastic.geometry import Geometry, Run, runs_of
from pyvmem.errors import BadHandle, NotSupported, VMemError
from pyvmem.ledger.accounts import Account
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket
from pyvmem.memory.reservation import Reservation
from pyvmem.plumbing.reentry import reentrant_lock

__all__ = ["Copies", "KVMemory", "device_total", "open_context"]

_ALIGN = 2 << 20


class Copies(Protocol):
    """Asynchronous copies that run outside the engine's steps.

    The pages that they access stay mapped until the copies complete.
    """

    def events(self) -> tuple[Any, ...]:
        """Returns events that complete when all started copies are done."""

    def fence(self, stream: Any) -> None:
        """Makes a stream wait for all started copies."""

    def close(self) -> None:
        """Waits for the started copies; no more copies may be started afterwards."""


@dataclass(eq=False)
class _Unmap:
    """A release: pages to unmap after step `after_step`; `ticket` is set once it is submitted."""

    number: int
    runs: list[Run]
    after_step: int
    ticket: Ticket | None = None


def open_context(backend: str, device: int, page_size: int, reserve: int) -> Context:
    """Creates the context of a rank.

    Args:
        backend: name of the back end, or ``"auto"``.
        device: index of the CUDA device.
        page_size: page size in bytes; 0 for the back end's smallest.
        reserve: bytes of free pages that the context keeps; empty slabs beyond this are returned to
            the device.

    Raises:
        ValueError: the back end does not support this page size.
    """
    _unclosed[:] = [one for one in _unclosed if not _closes(one)]
    try:
        return Context(backend, device=device, granule=page_size, pool_high=max(reserve, 1))
    except NotSupported as error:
        if not (page_size and error.bytes == page_size and error.limit):
            raise
        sizes = [1 << bit for bit in range(error.limit.bit_length()) if error.limit >> bit & 1]
        wanted = f"one of {', '.join(map(str, sizes))}" if sizes[1:] else f"{sizes[0]} or more"
        raise ValueError(
            f"VMEM_PAGE_SIZE={page_size}: expected {wanted}, with VMEM_BACKEND={backend}"
        ) from error


def device_total(cuda_device: int | None) -> int:
    """Returns a CUDA device's total memory in bytes.

    For None, returns the total host memory, capped at the cgroup limit.
    """
    if cuda_device is None:
        with Context("host") as context:
            return context.memory().total_bytes
    import torch

    return int(torch.cuda.mem_get_info(cuda_device)[1])


class KVMemory:
    """The KV tensors of a rank, whose pages are mapped and unmapped while the engine runs.

    Lives in the worker's process. Any thread may call `grow`, `release`, `finished`, `move` and
    `compact`; only the thread that launches steps may call `step_begins`, `step_ends`, `copy` and
    `fence`.

    Args:
        context: allocates the pages; closed by `close`.
        num_blocks: number of blocks in each tensor.
        sizes: size of each tensor in bytes.
        multiple: the distance between tensors of a class is a multiple of this many bytes.
        visible: whether to make the addresses usable by CUDA's own copies.

    Raises:
        TooManyMappings: `visible` is set and the tensors exceed the GPU's free memory.
    """

    def __init__(
        self,
        context: Context,
        num_blocks: int,
        sizes: Sequence[int],
        multiple: int = 1,
        visible: bool = False,
    ) -> None:
        self.context = context
        self.geometry = Geometry.of(num_blocks, context.info.granule, sizes)
        self._lock = reentrant_lock()  # reentrant: a finalizer may call close in any thread
        self._parked: list[_Unmap] = []
        self._under_way: list[_Unmap] = []
        self._finished: dict[int, str] = {}
        self._launched = 0  # the last step whose work is all on the stream
        self._stream: Any = None
        self.copies: Sequence[Copies] = ()  # the pages that these copies access must stay mapped
        self._spans: list[int] = []
        self._begins: list[int] = []  # offset of the first tensor of each class
        self._closed = False
        self._users = 0  # number of calls in progress that use the memory
        # the device's account; set if the scheduler is on another machine
        self.account: Account | None = None
        self.headroom = 0  # bytes of device memory reserved for activations
        self.draining = False  # `drain` is waiting for the scheduler
        self._drained = threading.Event()
        self._next = [0] * len(self.geometry.classes)
        # Addresses that only kernels access need not be visible to CUDA's copies. On back ends that
        # also have plain reservations, visible ones must fit in the GPU's free memory.
        on_gpu = context.cuda_device is not None
        plain = on_gpu and Caps.PLAIN in context.info.caps
        seen = True if visible and on_gpu else False if plain else None
        align, end = math.lcm(max(_ALIGN, context.info.granule), multiple), 0
        for kind in self.geometry.classes:
            span = -(-num_blocks * kind.block_bytes // align) * align
            self._spans.append(span)
            self._begins.append(end)
            end += span * kind.tensors
        self._reservation: Reservation = context.reserve(end, visible=seen)

    def tensor(self, size: int) -> Any:
        """Returns the next tensor of `size` bytes, as int8; each of `sizes` is returned once.

        Raises:
            ValueError: all tensors of this size have been returned.
        """
        n = size // self.geometry.num_blocks
        kind = [one.block_bytes for one in self.geometry.classes].index(n)
        index = self._next[kind]
        if index >= self.geometry.classes[kind].tensors:
            raise ValueError(f"more than {index} KV tensors of {size} bytes")
        self._next[kind] = index + 1
        return self._reservation.tensor((size,), "int8", offset=self.begin(kind, index))

    def begin(self, kind: int, index: int) -> int:
        """Returns the byte offset in `buffer` of tensor `index` of a class."""
        return self._begins[kind] + index * self._spans[kind]

    def span(self, kind: int) -> int:
        """Returns the distance in bytes between the starts of consecutive tensors of a class."""
        return self._spans[kind]

    def buffer(self) -> Any:
        """Returns an int8 tensor over the whole reservation, including gaps between tensors."""
        return self._reservation.tensor((self._reservation.nbytes,), "int8")

    def _each(self, runs: Sequence[Run]) -> Iterator[tuple[int, int, int, int]]:
        """Yields each run's address, size in bytes, repeat count and stride in bytes."""
        page = self.geometry.page_size
        for kind, first, count in runs:
            addr = self._reservation.addr + self._begins[kind] + first * page
            yield addr, count * page, self.geometry.classes[kind].tensors, self._spans[kind]

    # ---- mapping ---------------------------------------------------------------------------------

    def grow(self, runs: Sequence[Run]) -> None:
        """Maps new zeroed pages, all or none. Returns once they are mapped.

        Raises:
            BadHandle: the memory is closed.
            VMemError: the driver failed; nothing changed.
        """
        with self._in_use() as is_open:
            if not is_open:
                raise BadHandle("the memory of the KV tensors is closed")
            if runs:
                ops = OpBatch(len(runs))
                for addr, size, count, stride in self._each(runs):
                    ops.populate(addr, size, count, stride)
                self.context.batch(ops)

    def drop(self, runs: Sequence[Run]) -> None:
        """Unmaps pages that `grow` mapped and no step has used. Returns once they are unmapped."""
        if runs:
            self.context.batch(self._unmaps(runs))

    def _unmaps(self, runs: Sequence[Run]) -> OpBatch:
        ops = OpBatch(len(runs))
        for addr, size, count, stride in self._each(runs):
            # If a release fails on any rank, all ranks retry it, so there may be holes here.
            ops.unmap(addr, size, count, stride, holes=True)
        return ops

    def release(self, number: int, runs: list[Run], after_step: int) -> None:
        """Unmaps pages in the background once all steps up to `after_step` are done.

        Args:
            number: identifies the release in the result of `finished`.
            runs: the pages.
            after_step: number of the last step that may access the pages.
        """
        with self._lock:
            self._parked.append(_Unmap(number, runs, after_step))
        self._unpark()

    def step_begins(self, stream: Any) -> None:
        """Must be called before a step is launched on `stream` (None on the CPU)."""
        with self._lock:
            self._stream = stream

    def step_ends(self, step: int) -> None:
        """Must be called after a step's launch, once all its work is on the stream."""
        with self._lock:
            self._launched = max(self._launched, step)
            parked = bool(self._parked)
        if parked:
            self._unpark()

    def _unpark(self) -> None:
        with self._lock:
            ready = [one for one in self._parked if one.after_step <= self._launched]
            if not ready:
                return
            self._parked = [one for one in self._parked if one.after_step > self._launched]
            after = self._event()
            for one in ready:
                try:
                    one.ticket = self.context.submit(self._unmaps(one.runs), after=after)
                    self._under_way.append(one)
                except VMemError as error:
                    self._finished[one.number] = str(error)

    def _event(self) -> tuple[Any, ...]:
        copies = [event for one in self.copies for event in one.events()]
        if self._stream is None:
            return tuple(copies)
        import torch

        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return (event, *copies)

    def fence(self) -> None:
        """Makes subsequent steps wait for the started copies."""
        for one in self.copies:
            one.fence(self._stream)

    def finished(self) -> dict[int, str]:
        """Returns the releases that finished since the last call.

        Maps each release's number to its error message, or to ``""`` if it succeeded.
        """
        with self._lock:
            still = []
            for one in self._under_way:
                assert one.ticket is not None
                try:
                    if one.ticket.done():
                        one.ticket.wait(0)
                        self._finished[one.number] = ""
                    else:
                        still.append(one)
                except VMemError as error:
                    self._finished[one.number] = str(error)
            self._under_way = still
            found, self._finished = self._finished, {}
            return found

    def move(self, copies: Sequence[tuple[int, int]], step: int) -> bool:
        """Copies blocks in all tensors, ordered after step `step` and before the next step.

        No step may be launched during the call.

        Args:
            copies: (source, destination) pairs of backed blocks; no block is in more than one pair.
            step: the last scheduled step.

        Returns:
            False, with no effect, if that step has not been launched or the memory is closed.
        """
        with self._in_use() as is_open:
            if not is_open or self._launched < step:
                return False
            self.copy(copies)
            return True

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks like `move`, ordered before the step that is being launched.

        Unlike vLLM's own copy, this copies all bytes of a block. If several layers share a region,
        vLLM omits the bytes that the first of them does not use.
        """
        import torch

        stream = self._stream
        self.fence()
        source, place = torch.tensor(copies, dtype=torch.int64).reshape(-1, 2).unbind(1)
        with ExitStack() as on:
            if stream is not None:
                on.enter_context(torch.cuda.stream(stream))
                source, place = source.to(stream.device), place.to(stream.device)
            for kind, one in enumerate(self.geometry.classes):
                shape = (self.geometry.num_blocks, one.block_bytes)
                for index in range(one.tensors):
                    at = self.begin(kind, index)
                    blocks = self._reservation.tensor(shape, "int8", offset=at)
                    if one.block_bytes % 8 == 0:
                        blocks = blocks.view(torch.int64)  # copies eight bytes at a time
                    blocks[place] = blocks[source]

    # ---- sleep -----------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Waits until the scheduler has unmapped all pages that no request holds.

        The scheduler's next `poll` sees `draining`; `end_drain` is called once the pages are
        unmapped. Returns immediately if only the null block is mapped.

        Returns:
            False if the scheduler did not call `end_drain` within `timeout` seconds.
        """
        if self.context.stats().mapped_bytes <= self.geometry.first_bytes(1):
            return True
        self._drained.clear()
        self.draining = True
        return self._drained.wait(timeout)

    def end_drain(self) -> None:
        """Wakes up `drain`. Called on behalf of the scheduler once the pages are unmapped."""
        self.draining = False
        self._drained.set()

    # ---- warm-up ---------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Yields a function that maps the pages of given blocks until the ``with`` block ends.

        vLLM warms up with blocks that no scheduler has allocated. Their pages are unmapped when the
        ``with`` block ends, once the work on the stream is done.
        """
        mapped: list[set[int]] = [set() for _ in self.geometry.classes]
        null = [set(self.geometry.pages(kind, 0)) for kind in range(len(mapped))]

        def lend(blocks: Sequence[int]) -> None:
            new = [
                {page for block in blocks for page in self.geometry.pages(kind, block)}
                - mapped[kind]
                - null[kind]
                for kind in range(len(mapped))
            ]
            self.grow(runs_of(new))
            for kind, pages in enumerate(new):
                mapped[kind] |= pages

        try:
            yield lend
        finally:
            if self._stream is not None:
                self._stream.synchronize()
            self.drop(runs_of(mapped))

    # ---- the device's memory ---------------------------------------------------------------------

    def free(self) -> int | None:
        """Returns the number of bytes that can be mapped now, or None on the CPU.

        The result is the free memory of the device and of the context, minus `headroom`.
        """
        if self.context.cuda_device is None:
            return None
        import torch

        free = int(torch.cuda.mem_get_info(self.context.cuda_device)[0])
        return free + self.context.stats().free_bytes - self.headroom

    def fingerprint(self) -> str:
        """Returns a digest of the mapped pages, identical on ranks that map the same pages."""
        found = hashlib.sha256()
        at = 0
        while at < self._reservation.nbytes:
            info = self._reservation.query(at)
            if info.mapped:  # page by page: runs depend on slabs, which differ between ranks
                pages = range(at, at + info.run_bytes, self.geometry.page_size)
                found.update(array("q", pages).tobytes())
            at += info.run_bytes
        return found.hexdigest()

    def total(self) -> int:
        """Returns the device's total memory in bytes.

        On the CPU, this is the total host memory, capped at the cgroup limit.
        """
        return self.context.memory().total_bytes

    def compact(self, nbytes: int, step: int) -> int:
        """Moves pages out of nearly empty slabs and returns the slabs to the device.

        No step may be launched during the call.

        Args:
            nbytes: return at least this many bytes, if possible.
            step: the last scheduled step.

        Returns:
            The number of bytes returned; 0, with no effect, if that step has not been launched or
            the memory is closed.
        """
        with self._in_use() as is_open:
            if not is_open or self._launched < step:
                return 0
            with self._lock:
                after = self._event()
            return self.context.compact(nbytes, after=after)

    @contextmanager
    def _in_use(self) -> Iterator[bool]:
        """Defers `close` until the ``with`` block ends; yields false if the memory is closed."""
        with self._lock:
            is_open = not self._closed
            self._users += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._users -= is_open
                last = is_open and self._closed and not self._users
            if last:
                self._give_back()

    def close(self) -> None:
        """Unmaps all pages and frees the addresses unless tensors still use them. Idempotent.

        If other calls are in progress, the last one to return closes the memory: the scheduler's
        keeper thread outlives the worker and may still be copying.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            in_use = self._users > 0
        if not in_use:
            self._give_back()

    def _give_back(self) -> None:
        if self.account is not None:
            self.account.close()
        try:
            whole = [
                Run(kind, 0, self.geometry.num_pages(kind))
                for kind in range(len(self.geometry.classes))
            ]
            with self._lock:
                after, self._parked = self._event(), []
            self.context.batch(self._unmaps(whole), after=after)
            self.context.trim()
            for one in self.copies:
                one.close()
        except VMemError:
            pass  # a batch is unfinished; closing the context frees the memory
        if not _closes(self.context):
            _unclosed.append(self.context)


_unclosed: list[Context] = []
"""Contexts that could not be closed because vLLM's layers still hold their tensors."""


def _closes(context: Context) -> bool:
    """Closes a context; returns false if tensors still use it."""
    try:
        context.close()
    except VMemError:
        return False
    return True
