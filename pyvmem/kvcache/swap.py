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

from pyvmem.closing import Closable
from pyvmem.errors import BadHandle, VMemError
from pyvmem.features.table import SWAP
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.manager import grow

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Group
    from pyvmem.kvcache.slots import Slot

__all__ = ["SwappedRequest", "bring_back", "swap_in", "swap_out"]


class SwappedRequest(Closable):
    """A swapped-out request; the cache's `swap_in` brings it back, once.

    Holds host memory (pinned where torch has CUDA) until it is swapped in or closed, whether its
    cache is open or not. A context manager.

    Attributes:
        seq_len: tokens of the request.
        nbytes: host memory that was taken.
    """

    def __init__(self, groups: Sequence[Group], seq_len: int, rows: Sequence[memoryview]) -> None:
        self.seq_len = seq_len
        self.nbytes = sum(one.nbytes for one in rows)
        self._groups = tuple(groups)
        self._rows: Sequence[memoryview] | None = rows

    @property
    def is_open(self) -> bool:
        """Whether it can still be swapped in."""
        return self._rows is not None

    def close(self) -> None:
        """Drops the request and its host memory. Idempotent."""
        self._rows = None

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


def _pieces(group: Group, slot: Slot, size: int) -> list[int]:
    """Where `size` bytes of rows begin, in every tensor."""
    layout = group.layout
    return [
        group.pager.base + layout.offset(slot.index, 0, tensor)
        for tensor in (range(layout.num_tensors) if size else ())
    ]


def swap_out(groups: Sequence[Group], reqid: int, stream: Any) -> SwappedRequest:
    """See `KVCache.swap_out`; of several caches with the same requests, all or none."""
    for group in groups:
        group.sharing.require(SWAP, "swap_out")
    slots = [group.slot(reqid) for group in groups]
    length = groups[0].rows[slots[0].index]
    for group, slot in zip(groups, slots, strict=True):
        group.pager.release(slot)
    sizes = [group.layout.bytes_for(length) for group in groups]
    rows = [
        _host_memory(size * group.layout.num_tensors, group.device)
        for group, size in zip(groups, sizes, strict=True)
    ]
    wait_for(record(stream, groups[0].device))
    for group, slot, size, held in zip(groups, slots, sizes, rows, strict=True):
        for tensor, address in enumerate(_pieces(group, slot, size)):
            group.context.read_into(address, held[tensor * size : (tensor + 1) * size])
    swapped = SwappedRequest(groups, length, rows)
    for group, slot in zip(groups, slots, strict=True):
        group.release(slot, None)  # the work is over
    groups[0].journal.on_abort(partial(bring_back, groups, swapped, slots[0].index))
    for group in groups:
        group.tidy()
    return swapped


def bring_back(groups: Sequence[Group], swapped: SwappedRequest, reqid: int) -> None:
    """Undoes a `swap_out` whose result nobody received. Idempotent."""
    slot = groups[0].table[reqid]
    if swapped.is_open and not slot.active:
        swap_in(groups, swapped, None, into=reqid)


def swap_in(
    groups: Sequence[Group], swapped: SwappedRequest, stream: Any, into: int | None = None
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
    if swapped._groups != tuple(groups):
        raise invalid(f"{swapped!r} is another cache's")
    length = swapped.seq_len
    found = groups[0].fit(length) if into is None else groups[0].table[into]
    if found is None:
        return None
    slots = [group.table[found.index] for group in groups]
    for group, slot in zip(groups, slots, strict=True):
        group.pager.release(slot)
    for group, slot in zip(groups, slots, strict=True):
        group.take(slot)

    def give_back() -> None:
        for group, slot in zip(groups, slots, strict=True):
            group.release(slot, None)

    try:
        want = [
            (group, [(slot, group.layout.pages_for(length))] if length else [])
            for group, slot in zip(groups, slots, strict=True)
        ]
        if not grow(want, background=False):
            give_back()
            return None
        for group in groups:
            group.pager.settle(stream)
        # Zero-fills, and earlier owners' work where nothing is filled.
        wait_for(record(stream, groups[0].device))
        for group, slot, rows in zip(groups, slots, swapped._rows, strict=True):
            size = group.layout.bytes_for(length)
            for tensor, address in enumerate(_pieces(group, slot, size)):
                group.context.write(address, rows[tensor * size : (tensor + 1) * size])
    except VMemError:
        give_back()
        raise
    for group, slot in zip(groups, slots, strict=True):
        group.enter(slot, length)
        group.note_peaks()
    groups[0].journal.keep(swapped, "_rows")
    swapped.close()
    return found.index
