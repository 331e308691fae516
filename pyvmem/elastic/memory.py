# SPDX-License-Identifier: MIT
"""The memory of a rank: KV tensors on reservations, and the pages behind them.

One reservation, in which the tensors of a class (`geometry`) are equally far apart: a run of pages
in all of them is one operation of a batch.

A page is unmapped only when no step scheduled before its release can touch it. The scheduler says
which step that is; steps are launched in order on one stream, so from the end of that step's launch
an event on the stream stands for all of them. Only libvmem's worker waits for the event.
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
    """Copies of blocks beside the engine's steps, which need the pages until they are done."""

    def events(self) -> tuple[Any, ...]:
        """Returns the events after which all that were started are done."""

    def fence(self, stream: Any) -> None:
        """Makes a stream wait for them."""

    def close(self) -> None:
        """No more of them."""


@dataclass(eq=False)
class _Unmap:
    """Runs to unmap after a step."""

    number: int
    runs: list[Run]
    after_step: int
    ticket: Ticket | None = None


def open_context(backend: str, device: int, page_size: int, reserve: int) -> Context:
    """The context of a rank. Empty slabs beyond `reserve` bytes of free pages go back at once.

    Raises:
        ValueError: the back end has no such pages.
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
    """Memory of a device in bytes; None: of the machine, or what its group may have."""
    if cuda_device is None:
        with Context("host") as context:
            return context.memory().total_bytes
    import torch

    return int(torch.cuda.mem_get_info(cuda_device)[1])


class KVMemory:
    """Tensors of `num_blocks` blocks whose memory comes and goes.

    `grow`, `release` and `finished` may be called by any thread; `step_begins` and `step_ends` by
    the thread that launches.

    Args:
        context: where pages come from; closed by `close`.
        num_blocks: of every tensor.
        sizes: bytes of each tensor.
        multiple: that the distance of two tensors of a class is of, in bytes.
        visible: CUDA's own copies must take the addresses.

    Raises:
        TooManyMappings: `visible` beyond the card's free memory.
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
        self._lock = reentrant_lock()  # a finalizer closes, in any thread
        self._parked: list[_Unmap] = []
        self._under_way: list[_Unmap] = []
        self._finished: dict[int, str] = {}
        self._launched = 0  # the last step all of whose work is on the stream
        self._stream: Any = None
        self.copies: Sequence[Copies] = ()  # that need the pages, beside the steps
        self._spans: list[int] = []
        self._begins: list[int] = []  # of the first tensor of each class
        self._closed = False
        self._users = 0  # calls under way that need the memory
        self.account: Account | None = None  # of the device, where the scheduler is elsewhere
        self.headroom = 0  # bytes of the device that are left for activations
        self.resting = False  # all that no request holds is to go
        self._rested = threading.Event()
        self._next = [0] * len(self.geometry.classes)
        # Where only kernels touch these addresses, they need not be visible to CUDA's copies: where
        # there is a choice, visible ones together must stay below the card's free memory.
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
        """The next tensor of so many bytes, as int8: each one of `sizes` once."""
        n = size // self.geometry.num_blocks
        kind = [one.block_bytes for one in self.geometry.classes].index(n)
        index = self._next[kind]
        if index >= self.geometry.classes[kind].tensors:
            raise ValueError(f"more than {index} KV tensors of {size} bytes")
        self._next[kind] = index + 1
        return self._reservation.tensor((size,), "int8", offset=self.begin(kind, index))

    def begin(self, kind: int, index: int) -> int:
        """Returns where the tensor of this index in a class begins, in `buffer`."""
        return self._begins[kind] + index * self._spans[kind]

    def span(self, kind: int) -> int:
        """Bytes from the beginning of one tensor of a class to that of the next."""
        return self._spans[kind]

    def buffer(self) -> Any:
        """The addresses of all tensors as one tensor of int8."""
        return self._reservation.tensor((self._reservation.nbytes,), "int8")

    def _each(self, runs: Sequence[Run]) -> Iterator[tuple[int, int, int, int]]:
        """Address, bytes, count and stride of each run's pieces."""
        page = self.geometry.page_size
        for kind, first, count in runs:
            addr = self._reservation.addr + self._begins[kind] + first * page
            yield addr, count * page, self.geometry.classes[kind].tensors, self._spans[kind]

    # ---- mapping ---------------------------------------------------------------------------------

    def grow(self, runs: Sequence[Run]) -> None:
        """Maps new pages, zeros, all or none; done when it returns.

        Raises:
            VMemError: what the driver refused; nothing changed.
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
        """Unmaps at once what `grow` mapped and no step has used."""
        if runs:
            self.context.batch(self._unmaps(runs))

    def _unmaps(self, runs: Sequence[Run]) -> OpBatch:
        ops = OpBatch(len(runs))
        for addr, size, count, stride in self._each(runs):
            # Holes: another rank may have done its part of a release that one rank could not do.
            ops.unmap(addr, size, count, stride, holes=True)
        return ops

    def release(self, number: int, runs: list[Run], after_step: int) -> None:
        """Unmaps pages in the background, once no step up to `after_step` can touch them."""
        with self._lock:
            self._parked.append(_Unmap(number, runs, after_step))
        self._unpark()

    def step_begins(self, stream: Any) -> None:
        """A step is launched from here on; `stream`: where, None on the CPU."""
        with self._lock:
            self._stream = stream

    def step_ends(self, step: int) -> None:
        """All work of a step is on the stream."""
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
        """Makes the steps, from here on, wait for the copies that were started."""
        for one in self.copies:
            one.fence(self._stream)

    def finished(self) -> dict[int, str]:
        """Releases that ended since the last call, and what failed, ``""`` where nothing did."""
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
        """Copies blocks in all tensors, after the work of all steps up to `step`.

        None may be launched meanwhile. A step that is launched later finds the copies made.

        Args:
            copies: pairs of blocks, from and to; both have memory, and none is in two pairs.
            step: the last one that was scheduled.

        Returns:
            False before that is launched, and once the memory is closed: nothing was done.
        """
        with self._in_use() as is_open:
            if not is_open or self._launched < step:
                return False
            self.copy(copies)
            return True

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks as `move` does, at this place of the step that is being launched.

        All their bytes: what vLLM copies is what the first of several layers at one place uses.
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
                        blocks = blocks.view(torch.int64)  # eight bytes at a time
                    blocks[place] = blocks[source]

    # ---- sleep -----------------------------------------------------------------------------------

    def rest(self, timeout: float) -> bool:
        """Waits until the scheduler, at its next `poll`, has given back all that no request holds.

        At once, where nothing is mapped but the null block. False: it did not answer in time.
        """
        if self.context.stats().mapped_bytes <= self.geometry.first_bytes(1):
            return True
        self._rested.clear()
        self.resting = True
        return self._rested.wait(timeout)

    def rested(self) -> None:
        """The scheduler has."""
        self.resting = False
        self._rested.set()

    # ---- warm-up ---------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Yields a function that maps blocks of vLLM until the ``with`` block ends.

        vLLM warms up with blocks that no scheduler has given out. Their pages are unmapped at the
        end, after the device's work.
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

    # ---- the rest --------------------------------------------------------------------------------

    def free(self) -> int | None:
        """Bytes that can be mapped now: the device's, those of the pool, less `headroom`.

        None on the CPU.
        """
        if self.context.cuda_device is None:
            return None
        import torch

        free = int(torch.cuda.mem_get_info(self.context.cuda_device)[0])
        return free + self.context.stats().free_bytes - self.headroom

    def fingerprint(self) -> str:
        """A digest of which pages of which tensors are mapped: equal for ranks with equal maps."""
        found = hashlib.sha256()
        at = 0
        while at < self._reservation.nbytes:
            info = self._reservation.query(at)
            if info.mapped:  # page by page: which pages are neighbours in a slab may differ
                pages = range(at, at + info.run_bytes, self.geometry.page_size)
                found.update(array("q", pages).tobytes())
            at += info.run_bytes
        return found.hexdigest()

    def total(self) -> int:
        """Memory of the device in bytes; on the CPU of the machine, or what its group may have."""
        return self.context.memory().total_bytes

    def compact(self, nbytes: int, step: int) -> int:
        """Empties slabs and gives them back; 0 before all steps up to `step` are launched.

        None may be launched meanwhile. 0 as well once the memory is closed.
        """
        with self._in_use() as is_open:
            if not is_open or self._launched < step:
                return 0
            with self._lock:
                after = self._event()
            return self.context.compact(nbytes, after=after)

    @contextmanager
    def _in_use(self) -> Iterator[bool]:
        """Keeps the memory until the block ends, though `close` is called; False: it was before."""
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
        """Gives all memory back; the addresses too, unless tensors over them live. Idempotent.

        The last of the calls under way does, if there are any: the scheduler's keeper lives longer
        than the worker, and may be copying.
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
            pass  # a batch is unfinished; the end of the context gives back what is left
        if not _closes(self.context):
            _unclosed.append(self.context)


_unclosed: list[Context] = []
"""Contexts with tensors that live in vLLM's layers longer than their engine."""


def _closes(context: Context) -> bool:
    """Closes a context, if nothing uses it any more."""
    try:
        context.close()
    except VMemError:
        return False
    return True
