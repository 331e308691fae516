# SPDX-License-Identifier: MIT
"""Preemption by swapping: a request's rows in host memory, while others have its pages.

All rows are copied, also those in shared pages: a swapped request holds no page, and when it comes
back all its pages are its own.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from pyvmem.errors import BadHandle
from pyvmem.features.table import SWAP
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["SwappedRequest", "swap_in", "swap_out"]


class SwappedRequest:
    """A request that `KVCache.swap_out` made; `KVCache.swap_in` takes it back, once.

    Holds host memory (pinned where torch has CUDA) until it is swapped in or closed, whether its
    cache is open or not. A context manager.

    Attributes:
        seq_len: tokens of the request.
        nbytes: host memory that was taken.
    """

    def __init__(self, core: Core, seq_len: int, rows: memoryview) -> None:
        self.seq_len = seq_len
        self.nbytes = rows.nbytes
        self._core = core
        self._rows: memoryview | None = rows

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


def swap_out(core: Core, reqid: int, stream: Any) -> SwappedRequest:
    """See `KVCache.swap_out`."""
    core.sharing.require(SWAP, "swap_out")
    slot = core.slot(reqid)
    length = core.seq_lens[slot.index]
    core.pager.release(slot)
    size = length * core.layout.row_bytes
    rows = _host_memory(size * core.layout.num_tensors, core.device)
    event = record(stream, core.device)
    wait_for(event)
    for tensor, address in enumerate(_pieces(core, slot, size)):
        core.context.read_into(address, rows[tensor * size : (tensor + 1) * size])
    core.release(slot, None)  # the work is over
    return SwappedRequest(core, length, rows)


def swap_in(core: Core, swapped: SwappedRequest, stream: Any) -> int | None:
    """See `KVCache.swap_in`."""
    if not isinstance(swapped, SwappedRequest):
        raise TypeError(f"expected a SwappedRequest, not {swapped!r:.80}")
    if swapped._rows is None:
        raise BadHandle(
            f"{swapped!r} was closed or swapped in before", errno=errno.EBADF, op="KVCache.swap_in"
        )
    if swapped._core is not core:
        raise invalid(f"{swapped!r} is another cache's")
    slot = core.fit(swapped.seq_len)
    if slot is None:
        return None
    pages = core.layout.pages_for(swapped.seq_len)
    core.pager.release(slot)
    core.table.take(slot)
    try:
        if pages and not core.pager.grow([(slot, pages)], background=False):
            core.release(slot, None)
            return None
        core.pager.settle(stream)
        event = record(stream, core.device)
        wait_for(event)  # zero-fills, and earlier owners' work where nothing is filled
        size = swapped.seq_len * core.layout.row_bytes
        for tensor, address in enumerate(_pieces(core, slot, size)):
            core.context.write(address, swapped._rows[tensor * size : (tensor + 1) * size])
    except BaseException:
        core.release(slot, None)
        raise
    core.enter(slot, swapped.seq_len)
    core.note_peaks()
    swapped.close()
    return slot.index
