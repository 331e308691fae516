# SPDX-License-Identifier: MIT
"""Preempts requests: copies a request's rows to host memory, and back."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyvmem.errors import BadHandle, OutOfMemory, VMemError
from pyvmem.features.table import SWAP
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork, record, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import can_reclaim_for, grow
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.requests import release, sync_free_slots
from pyvmem.kvcache.slots import Slot
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.units import counted

__all__ = ["SwappedRequest", "bring_back", "swap_in", "swap_out"]


class SwappedRequest(Closable):
    """A swapped-out request; the cache's `swap_in` restores it, at most once.

    Owns no device pages: all mapped rows were copied, including those in shared pages, and after
    `swap_in` all its pages are unshared. Rows that had left a window come back as zeros, and
    are unmapped again.

    Holds host memory (pinned if torch has CUDA) until it is swapped in or closed, even after its
    cache is closed. Usable as a context manager.

    Attributes:
        seq_len: number of tokens in the request.
        nbytes: size of the host memory in bytes.
    """

    def __init__(
        self, groups: Sequence[Group], seq_len: int, rows: list[memoryview], heads: list[int]
    ) -> None:
        self.seq_len = seq_len
        self.nbytes = sum(one.nbytes for one in rows)
        self._groups = tuple(groups)
        self._heads = heads  # for each group, how many pages had left the window
        self._rows: list[memoryview] | None = rows

    @property
    def is_open(self) -> bool:
        """True while the request can be swapped in."""
        return self._rows is not None

    def close(self, journal: Journal | None = None) -> None:
        """Drops the request and its host memory. Idempotent.

        Pass `Internals.journal` as `journal` to undo the close if the call in progress is undone.
        """
        if journal is not None:
            journal.change([[self, "_rows", None]])
        self._rows = None

    def __repr__(self) -> str:
        state = f"{self.nbytes} bytes" if self.is_open else "closed"
        return f"<SwappedRequest: {counted(self.seq_len, 'token')}, {state}>"


def _host_memory(size: int, device: int | None) -> memoryview:
    """Allocates host memory, pinned if there is a GPU."""
    if device is not None and size:
        import torch

        if torch.cuda.is_available():
            pinned: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return memoryview(pinned)
    return memoryview(bytearray(size))


def _pieces(group: Group, slot: Slot, head: int, length: int) -> tuple[int, list[int]]:
    """Returns the size per tensor, and the address in each tensor, of a request's mapped rows.

    These are the first `length` rows, except rows in the pages before `head`.
    """
    layout = group.layout
    size = max(0, layout.bytes_for(length) - head * layout.page_size)
    tensors = range(layout.num_tensors if size else 0)
    return size, [slot.addr + layout.offset(0, head, one) for one in tensors]


def swap_out(groups: Sequence[Group], reqid: int, work: PriorWork) -> SwappedRequest:
    """Implements `KVCache.swap_out`, in all groups or none."""
    groups[0].sharing.require(SWAP, "swap_out")
    slots = [group.slot(reqid) for group in groups]
    length = groups[0].rows[slots[0].index]
    for group, slot in zip(groups, slots, strict=True):
        group.pager.release(slot)
    heads = [slot.head for slot in slots]
    if any(heads):
        _check_return(groups, slots, length)
    copies = []
    for group, slot in zip(groups, slots, strict=True):
        size, addresses = _pieces(group, slot, slot.head, length)
        rows = _host_memory(size * len(addresses), group.device)
        copies.append((group.mapper, size, addresses, rows))
    work.wait()
    for mapper, size, addresses, rows in copies:
        mapper.copy(size, addresses, [rows], out=True)
    swapped = SwappedRequest(groups, length, [rows for *_, rows in copies], heads)
    release(groups, slots, None)  # None: the GPU work is complete
    groups[0].journal.on_abort(partial(bring_back, groups, swapped, slots[0].index))
    for group in groups:
        group.reclaim_idle()
    return swapped


def _check_return(groups: Sequence[Group], slots: Sequence[Slot], length: int) -> None:
    """Raises OutOfMemory if the request could never be swapped back in.

    Swapping in needs all of the request's pages at the same time.
    """
    needed = held = 0  # held: pages that only this request uses, so swapping it out frees them
    for group, slot in zip(groups, slots, strict=True):
        tensors = group.layout.num_tensors
        away = sum(slot.tier_map.off_device(slot.shared, slot.granted).values())
        own = slot.granted - slot.shared - away
        needed += group.layout.pages_for(length) * tensors
        held += (own + group.reclaimer.shared.idle(slot.span, users=1)) * tensors
    if not can_reclaim_for([(groups[0].pager, needed - held)], {}):
        reclaimer = groups[0].reclaimer
        room = held + reclaimer.obtainable({})
        raise OutOfMemory(
            f"reqid {slots[0].index} has {held} unshared pages, but swapping in its {length} "
            f"tokens temporarily needs {needed}, and only {room} are obtainable; free it and "
            "recompute it",
            errno=errno.ENOMEM,
            op="KVCache.swap_out",
            limit=room,
        )


def bring_back(groups: Sequence[Group], swapped: SwappedRequest, reqid: int) -> None:
    """Undoes a `swap_out` whose caller never got the result. Idempotent."""
    if swapped.is_open and not groups[0].table[reqid].active:
        swap_in(groups, swapped, None, into=reqid)


def swap_in(
    groups: Sequence[Group], swapped: SwappedRequest, stream: Any, into: int | None = None
) -> int | None:
    """Implements `KVCache.swap_in`, in all groups or none.

    `into` is the free reqid to use, or None for any.
    """
    if not isinstance(swapped, SwappedRequest):
        raise TypeError(f"expected a SwappedRequest, not {swapped!r:.80}")
    if swapped._rows is None:
        raise BadHandle(
            f"{swapped!r} was closed or swapped in before", errno=errno.EBADF, op="KVCache.swap_in"
        )
    if swapped._groups != tuple(groups):
        raise invalid(f"{swapped!r} belongs to another cache")
    length = swapped.seq_len
    if into is None:
        sync_free_slots(groups)
        found = groups[0].fit(length)
    else:
        found = groups[0].table[into]
    if found is None:
        return None
    slots = [group.table[found.index] for group in groups]
    each = list(zip(groups, slots, swapped._heads, swapped._rows, strict=True))
    for group, slot, *_ in each:
        group.pager.release(slot)
    for group, slot, *_ in each:
        group.take(slot)

    try:
        want = [
            (group.pager, [(slot, group.layout.pages_for(length))] if length else [])
            for group, slot, *_ in each
        ]
        if not grow(want, background=False):
            release(groups, slots, None)
            return None
        for group in groups:
            group.pager.settle(stream)
        # Wait for zero-fills and earlier owners' work, which `stream` was made to wait for.
        wait_for(record(stream, groups[0].device))
        for group, slot, head, rows in each:
            size, addresses = _pieces(group, slot, head, length)
            group.mapper.copy(size, addresses, [rows], out=False)
    except VMemError:
        release(groups, slots, None)
        raise
    for group, slot, head, _ in each:
        group.enter(slot, length)
        if group.window is not None and head:
            group.window.resume(slot, head)
        group.note_use()
    swapped.close(groups[0].journal)
    return found.index
