# SPDX-License-Identifier: MIT
"""Giving memory back: when asked, and by a small thread when an engine is idle.

A large page that is not full is copied as far as it is, into small pages where that is not whole.

All rows are copied, also those in shared pages: a swapped request holds no page, and when it comes
back all its pages are its own.

    0 ......... length ......... granted ......... mapped
    | rows kept | given up      |                 |
    | pages kept   | nobody's from here on        |

Pages of the request's own stay mapped, as those of a freed slot do: the request may have them
again, zeroed, and whoever is short may take them. Pages that a request shares or that lie outside
the device cannot stay where nobody owns them. They are unmapped at once, and of a shared page that
is kept in part the request gets a copy of its own, since it may write behind its last row.

An idle engine makes no calls, so its calls cannot notice that it is: that takes a thread. It looks
a few times within `idle_seconds` whether a request was taken, given back or stepped, which costs
those calls nothing.
"""

from __future__ import annotations

import errno
import logging
import operator
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.errors import (
    BadHandle,
    NotRecoverable,
    NotSupported,
    OutOfMemory,
    TooManyMappings,
    VMemError,
)
from pyvmem.features.table import FORK, SWAP
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import prune, record, wait_for, wait_for_device
from pyvmem.kvcache.group import Core
from pyvmem.kvcache.growth import Source
from pyvmem.kvcache.slots import Growth, Slot
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Core
    from pyvmem.kvcache.pages import Span
    from pyvmem.kvcache.prefix_cache import PrefixMatch
    from pyvmem.kvcache.slots import Slot
    from pyvmem.reservation import Reservation

__all__ = [
    "fork_all",
    "IdleThread",
    "SwappedRequest",
    "begin_trim",
    "bring_back",
    "can_admit",
    "compact",
    "fork",
    "grow_all",
    "step",
    "step_all",
    "step_async",
    "step_async_all",
    "swap_in",
    "swap_out",
    "trim",
    "truncate",
    "unmap_idle",
]

_Want = list[tuple[Slot, int]]


def step(core: Core, seq_lens: Sequence[int], stream: Any) -> int:
    """See `KVCache.step`."""
    try:
        rows, total, want = _begin(core, seq_lens, stream)
        if want:
            if not _grow(core, want, background=False):
                core.counters.short += 1
                return -1
            _settle(core, rows, stream)
            core.keep_watermark()
    except TooManyMappings:
        if core.table.lockstep:  # the other ranks do not know
            raise
        _note_crowded([core])
        return -1
    _commit(core, rows, total, stream)
    return 0


def step_async(core: Core, seq_lens: Sequence[int]) -> int:
    """See `KVCache.step_async`."""
    short, want = _begin_async(core, seq_lens)
    if want and not _grow(core, want, background=True):
        core.counters.short += 1
        return -1
    if short:
        core.keep_watermark()
    core.counters.steps_async += 1
    return 0


def step_all(cores: Sequence[Core], seq_lens: Sequence[int], stream: Any) -> int:
    """`step` of several caches with the same requests: all of them or none."""
    try:
        begun = [(core, *_begin(core, seq_lens, stream)) for core in cores]
        if any(want for *_, want in begun):
            if not grow_all([(core, want) for core, *_, want in begun], background=False):
                _note_short(cores)
                return -1
            for core, rows, *_ in begun:
                _settle(core, rows, stream)
            for core in cores:
                core.keep_watermark()
    except TooManyMappings:
        _note_crowded(cores)
        return -1
    for core, rows, total, _ in begun:
        _commit(core, rows, total, stream)
    return 0


def step_async_all(cores: Sequence[Core], seq_lens: Sequence[int]) -> int:
    """`step_async` of several caches with the same requests: all of them or none."""
    begun = [(core, *_begin_async(core, seq_lens)) for core in cores]
    if not grow_all([(core, want) for core, _, want in begun], background=True):
        _note_short(cores)
        return -1
    for core, short, _ in begun:
        if short:
            core.keep_watermark()
        core.counters.steps_async += 1
    return 0


# ---- the parts of a step -------------------------------------------------------------------------


def _begin(core: Core, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, _Want]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and what pages are missing.
    """
    pager, reclaimer = core.pager, core.reclaimer
    rows, total, want = core.scan(seq_lens)
    core.counters.last_wait_ns = 0
    if pager.growths:
        _settle(core, rows, stream)
        if want:
            rows, total, want = core.scan(seq_lens)
    if core.mover.moves or core.mover.given_up:
        core.mover.step(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, want


def _settle(core: Core, rows: Sequence[int], stream: Any) -> None:
    """Waits for the growths that the step to `rows` needs; ranks wait for all, as one."""
    core.pager.settle(stream, lens=None if core.table.lockstep else rows)


def _begin_async(core: Core, seq_lens: Sequence[int]) -> tuple[bool, _Want]:
    """Whether slots are short, and what no growth under way will give them."""
    pager, reclaimer = core.pager, core.reclaimer
    _, _, want = core.scan(seq_lens)
    short = bool(want)
    if reclaimer.cuts:
        reclaimer.poll()
    if want and not core.table.lockstep:
        # What an earlier owner's GPU work holds up is left to `step`, which must wait for it.
        want = [(slot, pages) for slot, pages in want if not _is_left(core, slot)]
    if want and (pager.growths or reclaimer.cuts):
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return short, want


def _is_left(core: Core, slot: Slot) -> bool:
    """Whether a slot can only grow after a wait, be it for a map call that the request began."""
    job = slot.job
    if isinstance(job, Growth) and job.filling is None and not job.handover:
        mine = any(one is slot and owner == slot.owner for one, owner, _ in job.grants)
        return not mine and not job.done()
    return core.pager.is_held_up(slot)


def _grow(core: Core, want: _Want, *, background: bool, tentative: bool = False) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them."""
    pager, reclaimer = core.pager, core.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = sum([pages - slot.mapped for slot, pages in want if pages > slot.mapped])
    lacking *= core.layout.num_tensors
    if lacking > reclaimer.free and not pager.can_have(lacking, dict(want)):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative)


def grow_all(wants: Sequence[tuple[Core, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several caches their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another cache cannot take meanwhile.
    cut = [_cut_surplus(core, want) for core, want in wants]
    return any(cut) and _grow_each(wants, background)


def _note_short(cores: Sequence[Core]) -> None:
    for core in cores:
        core.counters.short += 1


def _note_crowded(cores: Sequence[Core]) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    _note_short(cores)
    for core in cores:
        core.pager.relieve()


def _grow_each(wants: Sequence[tuple[Core, _Want]], background: bool) -> bool:
    grown: list[tuple[Core, _Want]] = []

    def disown() -> None:
        for core, want in grown:
            _disown(core, want)

    try:
        for core, want in wants:
            if want:
                core.journal.on_abort(partial(_disown, core, want))
                if not _grow(core, want, background=background, tentative=True):
                    disown()
                    return False
                grown.append((core, want))
    except VMemError:
        disown()
        raise
    return True


def _cut_surplus(core: Core, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        core.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= core.reclaimer.try_cut(slot, keep)
    return found


def _disown(core: Core, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            core.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    core.pager.poll()


def _commit(core: Core, rows: array[int], total: int, stream: Any) -> None:
    """Notes what the slots hold from now on."""
    if core.window is not None:
        core.window.slide(rows, stream)
    if core.config.promote_tokens and core.promoter is not None:
        core.promoter.step(rows, stream)
    core.runs.step(stream)
    core.journal.keep(core, "used_tokens", "clock")
    core.journal.keep(core.pager.lengths, "held")
    core.pager.lengths.held = rows
    core.used_tokens = total
    core.note_peaks()
    core.counters.steps += 1
    core.clock += 1
    if core.table.lockstep:
        core.prefixes.leases.end_all()  # a collector must not decide when they end
    if core.untidy:
        core.tidy()


def fork(
    core: Core,
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing = core.layout, core.sharing
    sharing.require(FORK, "fork")
    parent = core.slot(reqid)
    held = core.rows[parent.index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {parent.index} holds {held} tokens", limit=held)
    if not 1 <= count <= len(core.table):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(core.table)}",
            limit=len(core.table),
        )
    chosen = None if into is None else _chosen(core, count, into)
    core.mover.finish(parent, stream)
    core.pager.release(parent)
    full = parent.places.floor(rows * layout.row_bytes // layout.page_size)
    pages = layout.pages_for(rows)
    try:
        slots = sharing.vacate(count, chosen)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    if slots is None:
        return None
    new_pages = (pages - full) * count * layout.num_tensors
    if not core.pager.can_have(new_pages, {}):
        return None
    if rows * layout.row_bytes > parent.shared * layout.page_size:
        wait_for(record(stream, core.device))
    sharing.share(parent, full)
    try:
        sharing.attach(slots, parent.span.cut(0, full), parent)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    try:
        if pages > full:
            tail = Source(
                core.pager.base + layout.offset(parent.index),
                layout.tensor_bytes,
                rows * layout.row_bytes,
            )
            want = [(slot, pages) for slot in slots]
            if not core.pager.grow(want, background=False, source=tail):
                sharing.detach(slots)
                return None
            core.pager.release(slots[0])  # of one growth for all; other requests' go on
    except VMemError:
        sharing.detach(slots)
        raise
    for slot in slots:
        if slot.shared:
            slot.pins = core.prefixes.pin_again(parent.pins)
        core.enter(slot, rows)
    core.note_peaks()
    return [slot.index for slot in slots]


def _chosen(core: Core, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [core.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots


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


def truncate(cores: Sequence[Core], reqid: int, length: int, stream: Any) -> int:
    """See `KVCache.truncate`; of several caches with the same requests, all or none."""
    slots = [core.slot(reqid) for core in cores]
    rows, held = operator.index(length), max(core.rows[slots[0].index] for core in cores)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {slots[0].index} holds {held} tokens", limit=held)
    for core, slot in zip(cores, slots, strict=True):
        if core.window is not None:
            core.window.check(slot, rows)
    if rows == held:
        return 0
    for core, slot in zip(cores, slots, strict=True):
        page = rows * core.layout.row_bytes // core.layout.page_size
        core.mover.shorten(slot, page, stream)
    each = [_Truncation.of(core, slot, rows) for core, slot in zip(cores, slots, strict=True)]
    if any(one.unmaps for one in each):
        for one in each:
            one.core.pager.release(one.slot)
        each = [_Truncation.of(one.core, one.slot, rows) for one in each]
        wait_for(record(stream, cores[0].device))
        if not _unmap_all(each, partial(_complete, cores, reqid, slots[0].owner, rows)):
            return -1
        stream = None  # the work on it is over
    _shorten(each, stream)
    return 0


def _shorten(each: Sequence[_Truncation], stream: Any) -> None:
    """Writes the truncation into the books, in every cache, then unmaps what policy does not keep.

    `stream`: of the last work on the rows.
    """
    disowned = [one for one in each if not one.unmaps and one.keep < one.slot.granted]
    event = record(stream, disowned[0].core.device) if disowned else None
    for one in disowned:
        core, slot = one.core, one.slot
        core.pager.shrink(slot, one.keep)
        core.reclaimer.own_away = None
        slot.events = [*prune(slot.events), *(() if event is None else (event,))]
    for one in each:
        core, slot = one.core, one.slot
        if core.promoter is not None:
            core.promoter.shorten(slot, one.first)
        core.prefixes.shorten(slot, one.rows)
        core.enter(slot, one.rows)
        core.table.changes += 1
    for one in disowned:
        if not one.core.config.deferred_reclaim and one.slot.job is None:
            one.core.reclaimer.try_cut(one.slot, one.keep)


def _complete(cores: Sequence[Core], reqid: int, owner: int, rows: int) -> None:
    """Does what is left of a truncation that an exception ended after pages had gone.

    Raises:
        NotRecoverable: it could not; the request has lost rows, and the text names it.
    """
    slots = [core.table[reqid] for core in cores]
    if slots[0].owner != owner or any(slot.lost for slot in slots):
        return
    try:
        done = truncate(cores, reqid, rows, None) == 0
    except VMemError as error:
        raise _lost(cores[0], slots[0], error) from error
    if not done:
        short = "memory is short for its last page"
        raise _lost(
            cores[0], slots[0], OutOfMemory(short, errno=errno.ENOMEM, op="KVCache.truncate")
        )
    _shorten(
        [_Truncation.of(core, slot, rows) for core, slot in zip(cores, slots, strict=True)], None
    )


@dataclass
class _Truncation:
    """What becomes of a slot's pages.

    Attributes:
        rows: tokens that are kept.
        first: the page that the first row given up begins in.
        keep: pages that the request keeps.
        shared: of these, shared ones.
        copied: end of the pages, from `shared` on, that copies take the place of.
        end: pages from here on go where pages are unmapped at once.
        unmaps: they are.
        addresses: where the copies are before they take their place.
    """

    core: Core
    slot: Slot
    rows: int
    first: int
    keep: int
    shared: int
    copied: int
    end: int
    unmaps: bool
    addresses: Reservation | None = None

    @classmethod
    def of(cls, core: Core, slot: Slot, rows: int) -> _Truncation:
        """The slot is the request's, without a move under way behind its rows."""
        layout, places = core.layout, slot.places
        first, cut = divmod(rows * layout.row_bytes, layout.page_size)
        keep = min(layout.pages_for(rows), slot.granted)
        shared = min(slot.shared, places.floor(first))
        copied = shared
        if shared < slot.shared:
            if cut or shared < first:
                copied = min(places.ceil(keep), slot.shared)
            else:
                keep = shared  # what a kernel may over-read comes with the next step
        unmaps = shared < slot.shared or places.away_end > keep
        end = max(places.ceil(keep), copied)
        return cls(core, slot, rows, first, keep, shared, copied, end, unmaps)

    @property
    def stride(self) -> int:
        """Bytes of the copies in each tensor."""
        return (self.copied - self.shared) * self.core.layout.page_size

    @property
    def new_pages(self) -> int:
        """Physical pages that the copies take."""
        return (self.copied - self.shared) * self.core.layout.num_tensors

    def copy(self) -> bool:
        """Copies what is kept of shared pages; False where memory is short.

        The work that the pages wait for is over, but for that of those who wrote them for others.
        """
        core, slot, layout = self.core, self.slot, self.core.layout
        if not self.new_pages:
            return True
        if not core.pager.have(self.new_pages):
            return False
        for block, *_ in slot.span.cut(self.shared, self.copied).parts:
            for event in prune(block.events):
                wait_for(event)
        nbytes = self.rows * layout.row_bytes - self.shared * layout.page_size
        ops = OpBatch(1)
        addresses = core.scratch.take(self.stride * layout.num_tensors)
        ops.populate(
            addresses.addr,
            self.stride,
            layout.num_tensors,
            self.stride,
            layout.page_size,
            copy_from=core.pager.base + layout.offset(slot.index, self.shared),
            copy_stride=layout.tensor_bytes,
            copy_bytes=nbytes,
        )
        try:
            with core.counters.waiting(), core.mapper.transaction() as change:
                core.reclaimer.held += self.new_pages
                change.run(ops)
        except VMemError as error:
            core.scratch.give(addresses)
            if core.sharing.is_shortage(error):
                return False
            raise
        self.addresses = addresses
        return True

    def give_up(self) -> None:
        """Undoes `copy`."""
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            self.core.scratch.give_mapped(addresses, self.stride * self.core.layout.num_tensors)
            self.core.reclaimer.held -= self.new_pages

    def unmap(self) -> None:
        """The copies take their place, and what is behind them goes: one batch, all or nothing."""
        core, slot, layout = self.core, self.slot, self.core.layout
        tensors, base = layout.num_tensors, core.pager.base
        ops = OpBatch(3)
        if self.addresses is not None:
            scratch, size = self.addresses.addr, self.stride
            ops.map(
                base + layout.offset(slot.index, self.shared),
                size,
                core.mapper.gather(scratch, size, tensors, size),
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
            )
            ops.unmap(scratch, size, tensors, size)
        if self.end < slot.mapped:
            ops.unmap(
                base + layout.offset(slot.index, self.end),
                (slot.mapped - self.end) * layout.page_size,
                tensors,
                layout.tensor_bytes,
            )
        try:
            with core.counters.waiting(), core.mapper.transaction() as change:
                tail = self._note()
                change.run(ops, slot.events)
        except NotRecoverable as error:
            raise _lost(core, slot, error) from error
        core.reclaimer.let_go(tail)
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            core.scratch.give(addresses)

    def _note(self) -> Span:
        """What `unmap` does, in the books; returns the shared pages that go."""
        core, slot, places = self.core, self.slot, self.slot.places
        core.table.changed(slot)
        own = max(self.end, slot.shared)
        away = places.away(own, slot.mapped)
        gone = max(0, slot.mapped - own) - sum(away.values())
        tail = slot.span.cut(self.shared, slot.shared)
        places.forget(self.shared, self.copied)
        places.forget(self.end, slot.mapped)
        mapped, granted = min(slot.mapped, self.end), max(self.keep, places.away_end)
        core.pager.replace(slot, slot.span.cut(0, self.shared), mapped, granted)
        core.reclaimer.shared.unuse(tail)
        core.reclaimer.came_back(gone, away)
        core.enter(slot, self.rows)
        return tail


def _unmap_all(each: Sequence[_Truncation], complete: Callable[[], None]) -> bool:
    """Unmaps what has to go at once, in every cache; False, with nothing changed: memory is short.

    `complete`: does the rest, if an exception from outside comes when a part has gone.

    Raises:
        NotRecoverable: the request has lost rows; the text names it. VMemError: nothing changed.
    """
    begun = [one for one in each if one.unmaps]
    done: list[_Truncation] = []
    try:
        if not all(one.copy() for one in begun):
            _give_up(begun)
            return False
        begun[0].core.journal.on_abort(complete)
        for one in begun:
            one.unmap()
            done.append(one)
    except VMemError as error:
        _give_up(begun)
        if done and not isinstance(error, NotRecoverable):
            raise _lost(begun[len(done)].core, begun[len(done)].slot, error) from error
        raise
    return True


def _give_up(begun: Sequence[_Truncation]) -> None:
    for one in begun:
        one.give_up()


def _lost(core: Core, slot: Slot, error: VMemError) -> NotRecoverable:
    """A request that has lost rows: its slot is used no more."""
    core.table.condemn(slot)
    slot.lost = True
    return NotRecoverable(
        f"reqid {slot.index} has lost its rows, free it: {error}",
        errno=errno.ENOTRECOVERABLE,
        op="KVCache",
    )


def can_admit(
    cores: Sequence[Core], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """See `KVCache.can_admit`; of several caches with the same requests, in all of them."""
    first = cores[0]
    lengths = [operator.index(length) for length in seq_lens]
    longest = first.config.max_seq_len
    for place, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_lens[{place}] is {length}; it must lie between 0 and {longest}",
                limit=longest,
            )
    found = _matches(first, lengths, matches)
    pages = [_pages(core, lengths, found) for core in cores]
    if len(lengths) > len(first.table.free):
        return False
    if not all(core.runs.fits([core.layout.pages_for(one) for one in lengths]) for core in cores):
        return False
    if not all(core.pager.could_have(need) for core, need in zip(cores, pages, strict=True)):
        return False
    return len(cores) == 1 or _fit_together(cores, pages)


def _matches(
    core: Core, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    if len(found) != len(lengths):
        raise invalid(f"{len(found)} matches for {len(lengths)} requests", limit=len(lengths))
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and core.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            core.prefixes.renew(match)
    return found


def _pages(core: Core, lengths: list[int], matches: Sequence[PrefixMatch | None]) -> int:
    """Physical pages that the requests need beside those of their prefixes."""
    pages = sum(map(core.layout.pages_for, lengths))
    pages -= sum(core.prefixes.kept_pages(match) for match in matches if match is not None)
    return pages * core.layout.num_tensors


def _fit_together(cores: Sequence[Core], pages: list[int]) -> bool:
    """Whether what each cache can have alone they can have at once, of their budget."""
    own = cores[0].reclaimer
    share = own.share
    assert share is not None
    need = sum(count * core.layout.page_size for core, count in zip(cores, pages, strict=True))
    column = own.layout.page_size * own.layout.num_tensors
    reach = share.within_reach() + own.returning * own.layout.page_size
    return need <= reach + own.spare({}) * column


_log = logging.getLogger("pyvmem.kvcache")
_LOOKS = 4  # within idle_seconds, so that what is idle is trimmed a quarter late at most


def begin_trim(core: Core, prefixes: bool, leased: bool = False) -> bool:
    """Begins to unmap all pages of no request; True when none is on its way any more."""
    core.pager.poll()
    core.reclaimer.poll()
    core.mover.sweep()
    if prefixes:
        core.prefixes.evict_all(leased)
    core.reclaimer.release_stale()
    for slot in core.table.victims():
        core.reclaimer.try_cut(slot, slot.granted)
    return not core.reclaimer.cuts


def trim(core: Core, prefixes: bool, compacting: bool = False, stream: Any = None) -> int:
    """See `KVCache.trim`."""
    before = core.context.stats().slab_bytes
    unmap_idle(core, prefixes)
    core.context.trim(0)
    if compacting:
        compact(core, stream)
    core.reclaimer.raise_errors()
    return max(0, before - core.context.stats().slab_bytes)


def compact(core: Core, stream: Any, *, owned: bool | None = None) -> int:
    """Empties slabs that are used in part; returns the bytes given back to the device.

    `owned`: whether all of the context's pages are the caller's; None: by the cache alone.

    Raises:
        NotSupported: the context is not the cache's own.
    """
    if not (core.parts.owns_context if owned is None else owned):
        raise NotSupported(
            "compact: the context is not the cache's own, and others may be using its pages; "
            "Context.compact is for who knows them all",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    with core.counters.waiting():
        wait_for_device(stream, core.device)
        return core.context.compact()


def unmap_idle(core: Core, prefixes: bool) -> None:
    """Unmaps all pages of no request, and waits for that; failures are in `Cuts.errors`."""
    core.pager.finish_idle()
    with core.counters.waiting():
        while not begin_trim(core, prefixes, leased=True):
            core.reclaimer.finish_all()
            if core.reclaimer.errors:
                break


class IdleThread(threading.Thread):
    """Trims a cache once for every time that it is idle for so long; ends with the cache.

    What is no failure of the cache's own, such as an error of torch for an event, is logged the
    first time; the next look tries again.

    Args:
        core: what is trimmed.
        lock: the cache's.
    """

    def __init__(self, core: Core, lock: AbstractContextManager[Any]) -> None:
        super().__init__(name="pyvmem-idle", daemon=True)
        self._core = weakref.ref(core)
        self._period = core.config.idle_seconds / _LOOKS
        self._lock = lock
        self._ended = threading.Event()
        self._seen: tuple[int, ...] | None = None
        self._quiet = 0  # looks in a row that saw the same
        self._trimmed = False
        self._failed = False

    def end(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._ended.set()

    def run(self) -> None:
        """Looks, and trims."""
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    _log.exception("an idle cache could not be trimmed; it will be tried again")
                self._failed = True

    def _look(self) -> None:
        """Trims when nothing happened in the last looks. Keeps no reference to the core."""
        core = self._core()
        if core is None:
            self.end()
            return
        now = core.activity()
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            self._trimmed = self._trim(core)

    def _trim(self, core: Core) -> bool:
        """One step of a trim that waits for nothing; True when it is complete."""
        with self._lock, core.journal:
            if self._ended.is_set() or not core.context.is_open:
                return True
            try:
                if not begin_trim(core, core.config.idle_prefixes):
                    return False
                core.context.trim(0)
                if core.config.idle_compact and core.parts.owns_context:
                    compact(core, None)
            except VMemError as error:
                core.reclaimer.errors.append(error)  # the next step raises it
            return True


def fork_all(
    cores: Sequence[Core], reqid: int, count: int, length: int | None, stream: Any
) -> list[int] | None:
    """`fork` of several caches with the same requests: all or none; the first one chooses."""
    for core in cores:
        core.sharing.require(FORK, "fork")
    done: list[Core] = []
    slots: list[int] | None = None

    def detach() -> None:
        for core in done:
            core.sharing.detach([core.table[index] for index in slots or ()])

    try:
        for core in cores:
            forked = fork(core, reqid, count, length, stream, slots)
            if forked is None:
                detach()
                return None
            slots = forked
            done.append(core)
    except VMemError:
        detach()
        raise
    return slots
