# SPDX-License-Identifier: MIT
"""Preemption by swapping: a request's rows in host memory, while others have its pages.

All rows are copied, also those in shared pages: a swapped request holds no page, and when it comes
back all its pages are its own.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.errors import BadHandle, VMemError
from pyvmem.features.table import SWAP
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.manager import grow_all

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["SwappedRequest", "bring_back", "swap_in", "swap_out"]


class SwappedRequest:
    """A request that a cache's `swap_out` made; its `swap_in` takes it back, once.

    Holds host memory (pinned where torch has CUDA) until it is swapped in or closed, whether its
    cache is open or not. A context manager.

    Attributes:
        seq_len: tokens of the request.
        nbytes: host memory that was taken.
    """

    def __init__(self, cores: Sequence[Core], seq_len: int, rows: Sequence[memoryview]) -> None:
        self.seq_len = seq_len
        self.nbytes = sum(one.nbytes for one in rows)
        self._cores = tuple(cores)
        self._rows: Sequence[memoryview] | None = rows

    @property
    def is_open(self) -> bool:
        """Whether it can still be swapped in."""
        return self._rows is not None

    def close(self) -> None:
        """Gives the request up and its host memory back; again: nothing."""
        self._rows = None

    def __enter__(self) -> SwappedRequest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{self.nbytes} bytes" if self.is_open else "closed"
        return f"<SwappedRequest: {self.seq_len} tokens, {state}>"


def _host_memory(size: int, device: int | None) -> memoryview:
    """Host memory that a GPU copies to at full speed, where there is one."""
    if device is not None and size:
        import torch

        if torch.cuda.is_available():
            pinned: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return memoryview(pinned)
    return memoryview(bytearray(size))


def _pieces(core: Core, slot: Slot, size: int) -> list[int]:
    """Where `size` bytes of rows begin, in every tensor."""
    layout = core.layout
    return [
        core.pager.base + layout.offset(slot.index, 0, tensor)
        for tensor in (range(layout.num_tensors) if size else ())
    ]


def swap_out(cores: Sequence[Core], reqid: int, stream: Any) -> SwappedRequest:
    """See `KVCache.swap_out`; of several caches with the same requests, all or none."""
    for core in cores:
        core.sharing.require(SWAP, "swap_out")
    slots = [core.slot(reqid) for core in cores]
    length = cores[0].rows[slots[0].index]
    for core, slot in zip(cores, slots, strict=True):
        core.pager.release(slot)
    sizes = [length * core.layout.row_bytes for core in cores]
    rows = [
        _host_memory(size * core.layout.num_tensors, core.device)
        for core, size in zip(cores, sizes, strict=True)
    ]
    wait_for(record(stream, cores[0].device))
    for core, slot, size, held in zip(cores, slots, sizes, rows, strict=True):
        for tensor, address in enumerate(_pieces(core, slot, size)):
            core.context.read_into(address, held[tensor * size : (tensor + 1) * size])
    swapped = SwappedRequest(cores, length, rows)
    for core, slot in zip(cores, slots, strict=True):
        core.release(slot, None)  # the work is over
    cores[0].journal.on_abort(partial(bring_back, cores, swapped, slots[0].index))
    for core in cores:
        core.tidy()
    return swapped


def bring_back(cores: Sequence[Core], swapped: SwappedRequest, reqid: int) -> None:
    """Undoes a `swap_out` whose result nobody got; nothing, where that is done already."""
    slot = cores[0].table[reqid]
    if swapped.is_open and not slot.active:
        swap_in(cores, swapped, None, into=reqid)


def swap_in(
    cores: Sequence[Core], swapped: SwappedRequest, stream: Any, into: int | None = None
) -> int | None:
    """See `KVCache.swap_in`; into several caches with the same requests, all or none.

    `into`: the reqid that it shall have, which is free; None: any.
    """
    if not isinstance(swapped, SwappedRequest):
        raise TypeError(f"expected a SwappedRequest, not {swapped!r:.80}")
    if swapped._rows is None:
        raise BadHandle(
            f"{swapped!r} was closed or swapped in before", errno=errno.EBADF, op="KVCache.swap_in"
        )
    if swapped._cores != tuple(cores):
        raise invalid(f"{swapped!r} is another cache's")
    length = swapped.seq_len
    found = cores[0].fit(length) if into is None else cores[0].table[into]
    if found is None:
        return None
    slots = [core.table[found.index] for core in cores]
    for core, slot in zip(cores, slots, strict=True):
        core.pager.release(slot)
    for core, slot in zip(cores, slots, strict=True):
        core.take(slot)

    def give_back() -> None:
        for core, slot in zip(cores, slots, strict=True):
            core.release(slot, None)

    try:
        want = [
            (core, [(slot, core.layout.pages_for(length))] if length else [])
            for core, slot in zip(cores, slots, strict=True)
        ]
        if not grow_all(want, background=False):
            give_back()
            return None
        for core in cores:
            core.pager.settle(stream)
        # Zero-fills, and earlier owners' work where nothing is filled.
        wait_for(record(stream, cores[0].device))
        for core, slot, rows in zip(cores, slots, swapped._rows, strict=True):
            size = length * core.layout.row_bytes
            for tensor, address in enumerate(_pieces(core, slot, size)):
                core.context.write(address, rows[tensor * size : (tensor + 1) * size])
    except VMemError:
        give_back()
        raise
    for core, slot in zip(cores, slots, strict=True):
        core.enter(slot, length)
        core.note_peaks()
    cores[0].journal.keep(swapped, "_rows")
    swapped.close()
    return found.index
