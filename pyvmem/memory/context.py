# SPDX-License-Identifier: MIT
"""A context: one back end opened on one or more devices.

Arguments are passed to C unchecked: libvmem checks every argument, is thread-safe, and changes
nothing when a call fails. This layer adds objects, lifetimes and warnings.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pyvmem import _native
from pyvmem._native import Outcome, Waits
from pyvmem.memory.info import Caps, ContextInfo, Location, MemoryInfo, RangeInfo, Stats
from pyvmem.memory.ops import OP_BYTES, OpBatch
from pyvmem.memory.pages import Pages, Ticket, drop_forgotten
from pyvmem.memory.reservation import PlainReservationWarning, Reservation, warn_plain
from pyvmem.memory.space import AddressSpace
from pyvmem.memory.streams import KeptEvents, after_items, device_ordinal, wait_after
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.logs import warn
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.plumbing.remains import Remains, end_lost, forget_all
from pyvmem.plumbing.validation import expect, unexpected, whole

__all__ = ["Context", "PlainReservationWarning"]

_LARGE_ENTRIES = _native.constant("VMEM_OPEN_LARGE_ENTRIES")
_VISIBLE = _native.constant("VMEM_RESERVE_VISIBLE")
_PLAIN = _native.constant("VMEM_RESERVE_PLAIN")
_SPARSE = _native.constant("VMEM_RESERVE_SPARSE")
_RESERVE_FORCE = _native.constant("VMEM_RESERVE_FORCE")
_LARGE = _native.constant("VMEM_RESERVE_LARGE")
_DIRTY = _native.constant("VMEM_CREATE_DIRTY")
_LATE = _native.constant("VMEM_SUBMIT_LATE")

_log = logging.getLogger(__name__)

_opened: weakref.WeakSet[Context] = weakref.WeakSet()


def find_reservation(addr: int) -> Reservation | None:
    """Returns this process's open reservation that begins at `addr`, or None."""
    for context in list(_opened):
        for one in list(context._reservations) if context.is_open else ():
            if one.addr == addr and one.is_open:
                return one
    return None


def _forked() -> None:
    """Marks all contexts as closed in a forked child: they belong to the parent."""
    forget_all()
    for context in list(_opened):
        context.is_open = False


os.register_at_fork(after_in_child=_forked)


class ContextRemains(Remains):
    """Closes a context whose owner was lost.

    Attributes:
        unclaimed: true if no caller holds anything in the context, so that it may be closed with
            its contents. An object that owns its context keeps this set until its first use.
    """

    def __init__(self, owner: Context, made: Outcome) -> None:
        self.unclaimed = False
        self._made = made
        super().__init__(owner)

    def end(self) -> None:
        if self._made.happened:
            vm = self._made.value
            now = Stats._from_c(_native.get_stats(vm))
            if self.unclaimed or not (now.reservations or now.handles or now.pending):
                _native.discard(vm)


class Context(AddressSpace, Closable):
    """An open back end. Leaving a ``with`` block closes it.

    Every method is thread-safe and raises `BadHandle` after `close` and `ForkedProcess` in a forked
    child. A context that is garbage-collected without `close` causes a ResourceWarning and keeps
    its memory until the process exits; if it has no reservations and no pages, opening another
    context closes it.

    Args:
        backend: ``"host"``, ``"cuda"``, ``"stock"``, ``"uvm"``; ``"auto"``: the first usable of
            uvm, stock, cuda, host.
        device: the device that holds the pages: a CUDA ordinal in this process, a torch.device or a
            cuda.core Device.
        devices: all devices on which to create mappings; the first device holds the pages. Replaces
            `device`.
        granule: smallest page in bytes, a power of two; 0 = 64 KiB.
        slab_size: bytes per allocation from the driver, a power of two; 0 = the back end's choice.
        mem_limit: maximum bytes allocated from the driver; 0 = no limit.
        pool_low: minimum number of free bytes that the worker thread keeps in the pool.
        pool_high: free bytes above this are returned to the driver immediately. 0 = the back end's
            default: 0 on ``host``; elsewhere 1 GiB, plus memory that was needed in the last half
            second. `pyvmem.KEEP_ALL` = only `trim` returns memory.
        max_mappings: maximum number of driver mappings (`Stats.mappings`). 0 = no limit, except on
            ``stock``: there it means 237,568 divided by the number of `devices`, and up to twice
            that is accepted.
        large_entries: use page-table entries of 2 MiB for small pages wherever a block of 2 MiB is
            fully mapped (`Caps.LARGE_ENTRIES`). No part of such an entry can be unmapped or
            replaced: `OpBatch.unmap` and `OpBatch.map` split it with ``split=True``; `join` and
            `OpBatch.join` restore it. No effect if the granule is 2 MiB (cuda), nor in sparse
            reservations of ``uvm``.

    Raises:
        BackendUnavailable: the back end cannot be used on this machine; the message says why.
        AccessDenied: the user lacks permission to open a device node.
        InvalidArgument: the back end's name is unknown, or a size is not a power of two.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        device: Any = 0,
        devices: Sequence[Any] | None = None,
        granule: int = 0,
        slab_size: int = 0,
        mem_limit: int = 0,
        pool_low: int = 0,
        pool_high: int = 0,
        max_mappings: int = 0,
        large_entries: bool = False,
    ) -> None:
        self._closed = True
        self.is_open = False
        expect("backend", backend, str)
        if devices is not None and not devices:
            _native.fail(errno.EINVAL, "devices: an empty sequence names no device", op="vmem_open")
        ordinals = tuple(device_ordinal(one) for one in (devices or (device,)))
        flags = _LARGE_ENTRIES if large_entries else 0
        sizes = [
            whole("granule", granule),
            whole("slab_size", slab_size),
            mem_limit := whole("mem_limit", mem_limit),
            whole("pool_low", pool_low),
            whole("pool_high", pool_high),
            whole("max_mappings", max_mappings),
        ]
        self.mem_limit = mem_limit
        self._pid = os.getpid()
        self._lock = reentrant_lock()
        self._reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
        self._events = KeptEvents()
        # Tickets that were garbage-collected before their batches finished.
        self._forgotten: deque[int] = deque()
        self._warned = False
        end_lost()
        made = Outcome()
        self.remains = ContextRemains(self, made)
        try:
            self.handle = _native.open(backend, flags, ordinals, *sizes, outcome=made)
            self.info = ContextInfo._from_c(_native.query(self.handle), ordinals)
            host = self.info.backend == "host"
            self.cuda_device: int | None = None if host else ordinals[0]
            _log_opened(backend, self.info)
            _opened.add(self)
            self._closed, self.is_open = False, True
        except BaseException:
            cell = made.cell
            if cell.called and not cell.code:
                _native.discard(cell.value)
            raise

    is_open: bool
    """True if the context is neither closed nor inherited through fork.

    Set only by the context itself.
    """

    cuda_device: int | None
    """CUDA ordinal of the device that holds the pages; None on ``host``."""

    info: ContextInfo
    """Properties of the context, also available after `close`."""

    mem_limit: int
    """Maximum bytes allocated from the driver; 0: no limit."""

    remains: ContextRemains
    """Cleans up the context if its owner is lost."""

    def stats(self) -> Stats:
        """Returns the context's counters and current state."""
        return Stats._from_c(_native.get_stats(self.handle))

    def memory(self, location: Location = Location.DEVICE, device: Any = 0) -> MemoryInfo:
        """Returns how much physical memory the context can still allocate, and the total.

        For host memory, including back end "host", this is the machine's available memory, limited
        by the remaining memory of this process's control group and of each of its parents (cgroup
        version 1 or 2; see `vmem_memory_query` in the manual). The result is not cached.

        Args:
            location: as for `create`.
            device: for `Location.PEER`, one of the context's devices.

        Raises:
            NotSupported: the back end cannot allocate pages there.
            InvalidArgument: `device` is not one of the context's devices.
        """
        info = _native.memory_query(self.handle, operator.index(location), device_ordinal(device))
        return MemoryInfo(info.free_bytes, info.total_bytes)

    # ---- reservations and pages ----------------------------------------------------------------

    def reserve(
        self,
        size: int,
        *,
        visible: bool | None = None,
        sparse: bool = False,
        align: int = 0,
        force: bool = False,
        large: bool = False,
        into: Reservation | None = None,
    ) -> Reservation:
        """Reserves `size` bytes of address space, without backing memory.

        Args:
            size: a multiple of the granule.
            visible: True: CUDA's own copies can use the addresses; False: only kernels can; None:
                visible if that fits, else plain, with a `PlainReservationWarning`.
            sparse: unmapped parts read as zeros.
            align: a power of two; 0 = 2 MiB, or the granule if larger.
            force: make it visible even if it exceeds the GPU's free memory.
            large: 2 MiB pages will be mapped in the reservation, in addition to smaller pages.
            into: the object to initialize as the reservation, for a caller that needs a reference
                before the call; None: create one.

        Raises:
            InvalidArgument: the size is 0, unaligned or absurdly large.
            TooManyMappings: `visible` is set, and the size exceeds the GPU's free memory.
            NotSupported: the back end does not support such reservations.
        """
        kind = 0 if visible is None else _VISIBLE if visible else _PLAIN
        flags = kind | (_SPARSE if sparse else 0) | (_RESERVE_FORCE if force else 0)
        flags |= _LARGE if large else 0
        reservation = into or Reservation(self, Outcome())
        size, align = whole("size", size), whole("align", align)
        addr = _native.reserve(self.handle, size, flags, align, outcome=reservation._outcome)
        reservation._info = RangeInfo._from_c(_native.range_query(self.handle, addr))
        with self._lock:
            self._reservations.add(reservation)
            warn = visible is None and Caps.VISIBLE in self.info.caps
            warn = warn and not (self._warned or reservation.visible)
            self._warned = self._warned or warn
        if warn:
            warn_plain(size)
        return reservation

    def create(
        self,
        size: int,
        *,
        page_size: int = 0,
        location: Location = Location.DEVICE,
        device: Any = 0,
        dirty: bool = False,
    ) -> Pages:
        """Allocates physical pages from the pool, in as few runs as possible.

        Args:
            size: a multiple of the page size.
            page_size: one of ``info.page_sizes``; 0 = the granule.
            location: where to allocate the pages.
            device: for `Location.PEER`, one of the context's devices.
            dirty: do not zero the pages; they may hold data from earlier use in this context.

        Raises:
            OutOfMemory: the device's memory or the context's limit is exhausted.
            NotSupported: the back end does not support this page size or location.
        """
        size = whole("size", size)
        pages = Pages(self, Outcome(), size)
        _native.create(
            self.handle,
            size,
            whole("page_size", page_size),
            operator.index(location),
            device_ordinal(device),
            _DIRTY if dirty else 0,
            outcome=pages._outcome,
        )
        return pages

    def retain(self, addr: int, size: int) -> Pages:
        """Returns a new handle to the pages mapped in a range, which must be fully mapped."""
        return self.gather(addr, size, 1, 0)

    def gather(
        self, addr: int, size: int, count: int, stride: int, pages: Pages | None = None
    ) -> Pages:
        """Retains the pages of `count` ranges, whose starts are `stride` apart, in one handle.

        Range i begins ``i * size`` bytes into the handle, so one `OpBatch.map` of `count` pieces
        can map all ranges elsewhere. `pages` is the object to initialize as the handle, for a
        caller that needs a reference before the call; None: create one.
        """
        size, count, stride = map(operator.index, (size, count, stride))
        pages = pages or Pages(self, Outcome(), size * count)
        _native.gather(self.handle, addr, size, count, stride, outcome=pages._outcome)
        return pages

    # ---- batches -------------------------------------------------------------------------------

    def _ready(self, after: Iterable[Any]) -> tuple[tuple[Any, int], Sequence[Any]]:
        """Waits for the descriptors in `after`, and converts it as `after_items` does.

        Used for blocking C calls. The second result must be kept alive until the call returns.
        """
        if not after:
            return _native.AFTER_NONE, ()
        after = [*after]
        items, keep = after_items(after, self.cuda_device)
        wait_after(after, lambda: self.is_open)  # the C call reports a closed context
        return items, [keep, after]

    def batch(
        self,
        ops: OpBatch,
        after: Iterable[Any] = (),
        outcome: Outcome | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Runs the operations atomically, after the work in `after`.

        Maps run first, then fills, then unmaps.

        Args:
            ops: the operations; they are not modified and can be reused.
            after: GPU work to wait for first, in this thread (see `pyvmem.memory.streams`).
            outcome: records the result even if an exception interrupts this call.
            waits: the counter that records how long this call waits.

        Raises:
            NotGpuWork: an item of `after` does not name GPU work.
            VMemError: an operation failed. Maps and unmaps were undone; bytes written by fills
                remain.
        """
        if not isinstance(ops, OpBatch):
            raise unexpected("ops", ops, "OpBatch")
        items, _keep = self._ready(after) if after else (_native.AFTER_NONE, ())
        count = ops._end // OP_BYTES
        _native.batch(self.handle, ops._array, count, items, outcome=outcome, waits=waits)
        for pages in ops._consumed:
            pages._done = True

    def submit(
        self,
        ops: OpBatch,
        after: Iterable[Any] = (),
        ticket: Ticket | None = None,
        late: bool = False,
    ) -> Ticket:
        """Runs a batch on the worker thread, which waits for `after`; this call does not block.

        Everything is checked and the pages are allocated before it returns. Until the batch is
        finished, other calls on its ranges raise Busy.

        Args:
            ops: may be changed as soon as this call returns.
            after: as for `batch`.
            ticket: an unused ticket of this context (``Ticket(context)``), for a caller that needs
                a reference before the batch starts; None: create one.
            late: let the worker also allocate the pages, if the pool has enough, so that the cost
                of this call does not depend on their number. The call checks only the arguments; if
                the worker finds conflicts or runs out of pages, the ticket fails.

        Raises:
            OutOfMemory: too few pages; with `late`, the ticket fails instead.
            TooManyBatches: too many batches are unfinished.
            TooManyTickets: there are too many live tickets that have never been waited for.
            NotGpuWork: an item of `after` does not name GPU work.
            InvalidArgument: the ticket is already used, or belongs to another context.
            VMemError: an operation is invalid; nothing changed.
        """
        if not isinstance(ops, OpBatch):
            raise unexpected("ops", ops, "OpBatch")
        if not (ticket is None or isinstance(ticket, Ticket)):
            raise unexpected("ticket", ticket, "Ticket or None")
        if self._forgotten:
            drop_forgotten(self.handle, self._forgotten)
        if ticket is None:
            ticket = Ticket(self)
        elif ticket._context is not self or ticket.outcome.cell.value:
            whose = "used already" if ticket._context is self else "another context's"
            _native.fail(errno.EINVAL, f"ticket: {ticket!r:.80} is {whose}", op="vmem_submit")
        items = _native.AFTER_NONE
        keep: list[Any] = []
        if after:
            after = [*after]  # an iterator might close its events before libvmem has read them
            items, keep = after_items(after, self.cuda_device)
        ticket._consumed = consumed = list(ops._consumed)
        if keep:
            self._events.keep(ticket, keep)
        flags = _LATE if late else 0
        count = ops._end // OP_BYTES
        _native.submit(self.handle, ops._array, count, items, flags, outcome=ticket.outcome)
        for pages in consumed:
            pages._done = True
        return ticket

    # ---- pool ----------------------------------------------------------------------------------

    def compact(self, nbytes: int | None = None, after: Iterable[Any] = ()) -> int:
        """Returns memory to the driver: empty slabs first, then slabs that are at most half used.

        Pages of partly used slabs are copied to free pages of fuller slabs, which replace them at
        every address and in every `Pages`. Call it only at a safe point: from the end of the work
        in `after` until this method returns, GPU work must not access any mapping of the context.
        Slabs that an unfinished batch uses are skipped.

        Args:
            nbytes: minimum bytes to return, if possible; None: as many as possible.
            after: GPU work to wait for first, in this thread (see `after_items`).

        Returns:
            The number of bytes returned to the driver.

        Raises:
            VMemError: a copy or a driver call failed; each slab is either returned or unchanged.
        """
        items, _keep = self._ready(after)
        want = _native.constant("VMEM_KEEP_ALL") if nbytes is None else whole("nbytes", nbytes)
        return _native.compact(self.handle, want, items)

    def reservations(self) -> list[Reservation]:
        """Returns the context's open reservations."""
        with self._lock:
            return [one for one in self._known() if one.is_open]

    def _known(self) -> list[Reservation]:
        while True:
            with suppress(RuntimeError):  # a finalizer or signal handler may change the set
                return list(self._reservations)

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Completes or cancels unfinished batches and releases everything. Idempotent.

        Raises:
            Busy: arrays or tensors over the context's reservations still exist; nothing changed.
            ForkedProcess: the context belongs to the parent.
        """
        outcome, before = Outcome(), None
        try:
            with self._lock:
                if self._closed:
                    return
                if self._pid != os.getpid():
                    self.stats()  # raises ForkedProcess
                live = sum(one.live_arrays for one in self._known())
                if not live:
                    before = self.is_open
                    self._closed, self.is_open = True, False  # no tensor can be created after this
                    live = sum(one.live_arrays for one in self._known())  # recount: some may be new
                if live:
                    _native.fail(
                        errno.EBUSY,
                        f"tensors or buffers over this context's reservations are alive: {live}",
                        op="vmem_close",
                        bytes=live,
                    )
            _native.close(self.handle, outcome=outcome)
        except BaseException:
            if before is not None:
                cell = outcome.cell  # avoid a Python call here: an interrupt could follow it
                self._closed = cell.called == 1 and cell.code == 0
                self.is_open = before and not self._closed
            raise
        self._events.clear()

    def abandon(self) -> None:
        """Closes the context if it is open."""
        self.close()

    def _leave(self) -> None:
        if self._closed or self._pid == os.getpid():
            self.close()  # not in a forked child, which does not own the context

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            _warn(f"context never closed: {self!r}", ResourceWarning, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Context {self.info.backend}, granule {self.info.granule}, {state}>"


def _log_opened(asked: str, info: ContextInfo) -> None:
    if info.warning:
        warn(_log, "driver", "%s", info.warning)
    if not _log.isEnabledFor(logging.INFO):
        return
    sizes = ", ".join(f"{size >> 10}" for size in info.page_sizes)
    where = ", ".join(part for part in (info.device_name, info.driver) if part)
    _log.info(
        "back end %s (%s requested)%s: pages of %s KiB, granule %d KiB, %s%s",
        info.backend,
        asked,
        f" on {where}" if where else "",
        sizes,
        info.granule >> 10,
        f"at most {info.max_mappings} mappings" if info.max_mappings else "mappings without limit",
        f"; passed over: {info.why}" if info.why else "",
    )
