# SPDX-License-Identifier: MIT
"""`KVCache`: what an engine calls, with requests.py. Pages move in pager.py and reclaim.py."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from pyvmem.context import Context
from pyvmem.errors import VMemError
from pyvmem.info import Caps
from pyvmem.kvcache import report, setup, steps, truncate
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.events import record
from pyvmem.kvcache.idle import IdleThread
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.placing import PlaceCalls
from pyvmem.kvcache.report import IntegrityError
from pyvmem.kvcache.requests import RequestCalls
from pyvmem.kvcache.slots import SlotTable
from pyvmem.kvcache.stats import CacheStats, SlotInfo
from pyvmem.kvcache.views import Views
from pyvmem.reservation import Reservation
from pyvmem.streams import check

if TYPE_CHECKING:
    import torch

__all__ = ["KVCache"]


class KVCache(RequestCalls, PlaceCalls):
    """Keys and values of many requests, contiguous in virtual memory, mapped as they grow.

    Every request has a slot (its reqid) in every tensor. `step` tells how many tokens each slot
    must hold and maps what is missing; who is not in this step has 0 there. What a request holds,
    it keeps until `truncate`, `free_reqid` or `swap_out`. An engine's loop:

        reqid = cache.alloc_reqid(len(prompt))
        if cache.step(seq_lens) == -1: ...     # preempt a request and try again
        ...                                    # run the model over cache.k(layer), cache.v(layer)
        cache.step_async(next_seq_lens)        # maps while the model runs
        cache.free_reqid(reqid)

    Requests may share pages, read-only: `fork`, `record`, `alloc_prefix`. Where memory is short, an
    engine preempts one, by `free_reqid` or `swap_out`; `can_admit` tells before. What a running
    request's pages are may change under its addresses: `promote`, `move`.

    Thread-safe; calls take turns. The cache owns its reservation, and the context unless one was
    given. A context manager.

    Args:
        config: shape, limits and policy.
        context: a context to share; it must outlive the cache. None: one is opened and owned.
        backend: of the owned context.
        device: of the owned context: CUDA ordinal, torch or cuda.core device.
        budget: memory to share with other caches of its context, which is the cache's, too.

    Raises:
        InvalidArgument: a value that the context cannot serve, such as the page size.
        VMemError: the context or the reservation could not be made.
    """

    _table: ClassVar[type[SlotTable]] = SlotTable

    def __init__(
        self,
        config: KVCacheConfig,
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
    ) -> None:
        self._closed = True  # until the core is made
        self._closing = False  # and some of it is gone already
        self._budget = budget
        self._lock: AbstractContextManager[Any] = (
            threading.RLock() if budget is None else budget.lock
        )
        self._idle: IdleThread | None = None
        self.config = config
        self._journal = Journal() if budget is None else budget.journal
        with self._lock, self._journal:
            parts = setup.make(config, context, backend, device, self._journal, budget)
            self._core = core = Core(config, parts, self._journal, self._table)
            self._views = Views(core.layout, parts.reservation)
            self._journal.on_abort(self._shut)
            try:
                if budget is not None:
                    budget.join(core)
                core.prepare()
            except VMemError:
                self._shut()
                raise
            self._closed = False
        if config.idle_seconds:
            self._idle = IdleThread(self._core, self._lock)
            self._idle.start()

    # ---- requests ------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """Takes a free slot for a request of `seq_len` tokens (0: not known yet).

        Best fit: the free slot with the fewest mapped pages that are enough, else the one with the
        most; of equal ones that which has been free for longest. Nothing is mapped by this call;
        with `eager_pages`, the next slot is prepared in the background.

        Returns:
            The reqid, an index into `step`'s list; None when every slot is taken.

        Raises:
            InvalidArgument: `seq_len` is negative or above `max_seq_len`.
        """
        with self._lock, self._journal:
            return self._open_core().alloc(seq_len)

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """Gives a slot back, together with what it holds.

        The pages stay mapped for the next request, or are unmapped in the background, after the GPU
        work on `stream` so far. Waits only for a move's copies beside another batch of the slot.

        Args:
            reqid: as `alloc_reqid` returned it.
            stream: the stream (torch, cuda.core, ``__cuda_stream__``) of the slot's last work, an
                event recorded after it, or an `FdEvent`; None: torch's current stream, on host
                nothing. What else it may be, and what holds beside CUDA graphs: `pyvmem.streams`.
            tokens: record the request's rows under these ids, as `record` does, for requests that
                begin with them; None: record nothing. They may be more than its rows: the last
                token that was sampled has none yet.
            namespace: as in `record`.

        Raises:
            InvalidArgument: no such reqid, or it is not taken; bad tokens or namespace; the stream
                is being captured into a CUDA graph, or (`NotGpuWork`) is none.
            VMemError: it could not be recorded; it was not freed.
        """
        with self._lock, self._journal:
            core = self._open_core()
            slot = core.slot(reqid)
            event = record(stream, core.device)
            if tokens is not None:
                core.prefixes.record_last(slot, tokens, event, namespace)
            core.release(slot, event)
            core.prepare()
            core.tidy()

    def truncate(self, reqid: int, length: int, stream: Any = None) -> int:
        """Gives a request's rows from `length` on up, and the pages that hold nothing else.

        For tokens that were not accepted (speculative decoding), and for a request that goes back.
        The only way in which a running request gets shorter: a smaller number in `step` takes
        nothing away.

        Pages of the request's own stay mapped and belong to nobody: the request has them again
        when it grows, others when they need them, after the GPU work on `stream` so far. Nothing
        waits. Shared pages lose the request's reference, and pages outside the device go back; that
        waits for the work on `stream`. A page shared with others that `length` lies within is
        copied, since the request may write behind its last row.

        Rows that the request gets again by a `step` hold what it wrote there before where their
        page was kept, which is the one that row ``length - 1`` ends in, or was promised to it by a
        `step_async`; all others are zero, or, without `KVCacheConfig.zero_fill`, anything.

        Args:
            reqid: the request.
            length: tokens that it keeps, at most as many as it holds.
            stream: the stream (or event) of the last work on these rows, as in `free_reqid`.

        Returns:
            0; or -1, with nothing changed but that pages of no request may have been reclaimed:
            memory is short for the copy of a shared page.

        Raises:
            InvalidArgument: no such reqid, not taken, a length out of range, or one whose sliding
                window begins in rows that are gone (`KVCacheConfig.window_tile` can be taken back).
            NotRecoverable: undoing failed, and the text names the reqid that must be freed.
            VMemError: the driver failed; nothing changed.
        """
        with self._lock, self._journal:
            return truncate.truncate([self._open_core()], reqid, length, stream)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Makes every slot hold its tokens, for the work that the caller is about to launch.

        Args:
            seq_lens: for every reqid the tokens that the slot must hold, 0 for free slots. A
                request keeps its rows: 0, or a number below the rows that it holds, asks for
                nothing more in this step and takes nothing away (`truncate` does).
            stream: the stream that will use the pages (None: torch's current one). Fills may still
                run when this returns; the stream waits for them. Given an event, and on host, the
                CPU does. Where pages that `promote` or `move` have copied take their places, the
                call waits for the work on it so far.

        Returns:
            0, with everything mapped; or -1, with nothing changed, when memory, or the context's
            number of mappings, is short although all that belongs to no request was reclaimed.
            Finishes what `step_async` began; how long that took is in `stats`.

        Raises:
            InvalidArgument: wrong length, a negative or too large number, or a number for a free
            slot. VMemError: the driver failed, now or in a batch that an earlier call began in the
                background; that was undone, the cache is consistent, and the call may be repeated.
        """
        check(stream)
        with self._lock, self._journal:
            return steps.step(self._open_core(), seq_lens, stream)

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Begins to map, in the background, what `step` will ask for with the same numbers.

        The physical pages are taken before this returns, so shortage is known at once. Waits only
        where memory is short and pages of no owner must come back first. A slot that GPU work of an
        earlier owner holds up is left to the `step`.

        Args:
            seq_lens: as in `step`. They may be some tokens ahead of the next `step`'s, which does
                not wait for what it does not need: so even a slow call of the driver is hidden.
            stream: accepted for symmetry; the `step` that follows orders its own stream.

        Returns:
            0, or -1 with nothing changed, as `step`.

        Raises:
            InvalidArgument: as in `step`. A failure in the background is raised by the next `step`.
        """
        check(stream)
        with self._lock, self._journal:
            return steps.step_async(self._open_core(), seq_lens)

    # ---- tensors -------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """K and V of every group, in turn; with `tensors_per_layer` 1, the one of each.

        Each is ``[max_batch, max_seq_len, group_size, num_kv_heads, head_dim]``. Only mapped rows
        may be touched. A living tensor keeps the cache from closing.
        """
        with self._lock, self._journal:
            self._open_core()
            return self._views.tensors()

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, a view ``[max_batch, max_seq_len, num_kv_heads, head_dim]``.

        Rows are ``group_size`` layers apart. Raises InvalidArgument for a layer that does not
        exist.
        """
        with self._lock, self._journal:
            self._open_core()
            return self._views.layer(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer; see `k`. InvalidArgument where `tensors_per_layer` is 1."""
        with self._lock, self._journal:
            self._open_core()
            return self._views.layer(layer, 1)

    # ---- reports -------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        """Physical pages that the cache could take without reclaiming any.

        A request can have these and `CacheStats.cached_pages` too: those are reclaimed when needed.
        Of a budget: as far as the other caches leave it now.
        """
        with self._lock, self._journal:
            reclaimer = self._open_core().reclaimer
            reclaimer.poll()
            return reclaimer.free

    @property
    def layout(self) -> Layout:
        """The sizes and offsets of the cache, for those who plan or draw."""
        return self._core.layout

    @property
    def context(self) -> Context:
        """The context that the pages are of."""
        return self._core.context

    @property
    def reservation(self) -> Reservation:
        """The addresses of all tensors; `layout` tells what lies where. The cache's own."""
        return self._core.parts.reservation

    @property
    def safe_overread(self) -> bool:
        """Whether rows without memory read as zeros, also while memory grows beside the reader.

        With `KVCacheConfig.sparse` and a back end on which a page takes the place of the zeros in
        one step (`pyvmem.Caps.SPARSE_ATOMIC`); not on ``stock``. With large pages on ``uvm`` alone,
        where they take the place of small ones in one step, too.
        """
        caps = self.context.info.caps
        small = self.layout.page_size < 2 << 20 and not self.layout.large_pages
        one_step = small or Caps.ONE_CALL in caps
        return self.config.sparse and Caps.SPARSE_ATOMIC in caps and one_step

    def readable_rows(self, reqids: Sequence[int]) -> list[int]:
        """For each reqid, how many rows, from the first on, have memory; 0 for free slots.

        Raises InvalidArgument for a reqid that does not exist.
        """
        with self._lock:
            core = self._open_core()
            size, row, most = core.layout.page_size, core.layout.row_bytes, core.layout.max_rows
            last = len(core.table) - 1
            for reqid in reqids:
                if not 0 <= reqid <= last:
                    raise invalid(f"reqid {reqid} is not between 0 and {last}", limit=last)
            return [min(core.table[reqid].granted * size // row, most) for reqid in reqids]

    def stats(self) -> CacheStats:
        """The present state and the counters."""
        with self._lock, self._journal:
            self._open_core().reclaimer.poll()
            return report.stats(self._core)

    def snapshot(self) -> list[SlotInfo]:
        """Every slot's pages as they are now."""
        with self._lock, self._journal:
            self._open_core().reclaimer.poll()
            return report.snapshot(self._core)

    def check_integrity(self) -> None:
        """Compares the cache's books with each other and, page by page, with the context's.

        Cost: one query per run of pages. What a batch in flight is changing is left out; with none
        in flight, the context's own check runs too.

        Raises:
            IntegrityError: with every contradiction found.
        """
        with self._lock, self._journal:
            core = self._open_core()
            core.reclaimer.poll()
            found = report.check(core)
            if found:
                raise IntegrityError(found)
            if not (core.pager.growths or core.reclaimer.cuts or core.mover.moves):
                core.context.check()

    # ---- end -----------------------------------------------------------------------------------

    def close(self, stream: Any = None) -> None:
        """Waits for what is in flight and for GPU work on freed slots, then gives everything back.

        Pages that the GPU may touch cannot be taken away, so work that never ends is waited for
        until a signal ends the wait (Ctrl-C); the call may then be repeated.

        Args:
            stream: the last work on slots that are still taken, as in `free_reqid`.

        Raises:
            Busy: tensors of the cache live; nothing changed, and the cache can still be used.
        """
        check(stream)
        with self._lock, self._journal:
            if self._closed:
                return
            self._shut(stream)
            self._closed = True
            if self._idle is not None:
                self._idle.end()

    def _shut(self, stream: Any = None) -> None:
        self._views.drop()
        if self.context.is_open:  # else everything went with it, or is the parent's
            self._core.check_no_tensors()
            self._closing = True
            self._core.close(stream)
        if self._budget is not None:
            self._budget.leave(self._core)
