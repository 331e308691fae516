# SPDX-License-Identifier: MIT
"""`KVCache`: the interface that an engine calls.

Each method takes the lock, checks that the cache is open and calls a function of another module of
this package. The function acts on every group of layers: a `KVCache` has one, a `LayeredCache` has
several.

`KVCache` chooses slots itself, and its limit is set at creation. A program written for a different
KV cache may instead choose the slots (`CacheSlots.claim`) or set the limit once the tensors exist
(`CacheMemory.set_limit`).
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from pyvmem.errors import Busy
from pyvmem.kvcache import (
    admission,
    forks,
    integrity,
    prefix_alloc,
    requests,
    steps,
    swap,
    tiers,
    trim,
    truncation,
    waits,
)
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.checks import invalid, layer_index
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import PriorWork, wait_for_device
from pyvmem.kvcache.facets import CacheMemory, CacheSlots, Facet, Internals
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.idle import IDLE_SECONDS, IdleThread
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds
from pyvmem.kvcache.stats import CacheStats, SlotInfo, together
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.kvcache.tiers import Moved
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps, Location
from pyvmem.memory.reservation import Reservation
from pyvmem.memory.streams import check, work_of
from pyvmem.plumbing.closing import MustClose
from pyvmem.plumbing.reentry import call_part
from pyvmem.plumbing.units import counted

if TYPE_CHECKING:
    import torch


__all__ = ["GroupView", "KVCache"]


class GroupView(Facet):
    """One group of layers that have the same shape: its tensors, addresses and statistics.

    Requests span all groups of the cache. Raises BadHandle once the cache is closed.

    Attributes:
        config: configuration of these layers.
        layout: sizes and offsets, for planning or visualization.
        context: the context that the pages belong to.
        reservation: the addresses of all tensors; `layout` gives the offsets.
    """

    def __init__(self, manager: Manager, place: int) -> None:
        super().__init__(manager)
        self._place = place
        self._tensors: list[torch.Tensor] = []
        group = manager.groups[place]
        self.config, self.layout = group.config, group.layout
        self.context, self.reservation = group.context, group.reservation

    def __repr__(self) -> str:
        return f"<GroupView of {counted(self.config.num_layers, 'layer')}: {self.layout!r}>"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See `KVCache.tensors`."""
        with self._lock, self._journal:
            self._open()
            if not self._tensors:
                self._tensors = [self._make(index) for index in range(self.layout.num_tensors)]
            return list(self._tensors)

    def k(self, layer: int) -> torch.Tensor:
        """See `KVCache.k`; `layer` is the index within this group."""
        return self._layer(layer, 0)

    def v(self, layer: int) -> torch.Tensor:
        """See `KVCache.v`; `layer` is the index within this group."""
        return self._layer(layer, 1)

    @property
    def safe_overread(self) -> bool:
        """See `KVCache.safe_overread`."""
        caps = self.context.info.caps
        one_step = self.layout.page_size < 2 << 20 or Caps.ONE_CALL in caps
        return self.config.sparse and Caps.SPARSE_ATOMIC in caps and one_step

    def readable_rows(self, reqids: Sequence[int]) -> list[int]:
        """See `CacheSlots.readable_rows`."""
        with self._lock:
            return self._open()[self._place].readable_rows(reqids)

    def first_rows(self, reqids: Sequence[int]) -> list[int]:
        """See `CacheSlots.first_rows`."""
        with self._lock:
            return self._open()[self._place].first_rows(reqids)

    def stats(self) -> CacheStats:
        """See `KVCache.stats`."""
        with self._lock, self._journal:
            group = self._open()[self._place]
            group.reclaimer.poll()
            return integrity.stats(group)

    def snapshot(self) -> list[SlotInfo]:
        """See `KVCache.snapshot`."""
        with self._lock, self._journal:
            return integrity.snapshot(self._open()[self._place])

    def drop(self) -> None:
        """Drops the tensors, so that only the caller's own tensors keep the reservation alive."""
        self._tensors = []

    def _layer(self, layer: int, which: int) -> torch.Tensor:
        config = self.config
        index = layer_index(layer, config.num_layers)
        per_layer = config.tensors_per_layer
        if which >= per_layer:
            raise invalid(f"layer {index} stores no values: tensors_per_layer is {per_layer}")
        group, member = divmod(index, config.group_size)
        return self.tensors[per_layer * group + which][:, :, member]

    def _make(self, index: int) -> torch.Tensor:
        layout, config = self.layout, self.config
        heads, dim, item = config.num_kv_heads, config.head_dim, config.itemsize
        rows = 1 if config.state else config.max_seq_len
        shape = (config.max_batch, rows, config.group_size, heads, dim)
        strides = layout.slot_bytes, layout.row_bytes, layout.head_row_bytes
        elements = (*(stride // item for stride in strides), dim, 1)
        offset = layout.offset(0, 0, index)
        # Not stored in a local variable, because `Reservation.tensor` may import torch, which holds
        # on to this frame.
        return cast("torch.Tensor", self.reservation.tensor(shape, config.dtype, elements, offset))


class KVCache(MustClose):
    """The keys and values of requests, contiguous in virtual memory and mapped as they grow.

    Every request has a slot (its reqid) in every tensor. `step` takes the number of tokens that
    each slot must hold and maps the missing pages; 0 means that a request is not part of this step.
    A request keeps its rows until `truncate`, `free_reqid` or `swap_out`. An engine's loop:

        reqid = cache.alloc_reqid(len(prompt))
        if cache.step(seq_lens) == -1: ...     # preempt a request and retry
        ...                                    # run the model over cache.k(layer), cache.v(layer)
        cache.step_async(next_seq_lens)        # maps while the model runs
        cache.free_reqid(reqid)

    Requests may share pages, read-only: `fork`, `record`, `alloc_prefix`. When memory is short, an
    engine preempts a request with `free_reqid` or `swap_out`; `can_admit` checks in advance. The
    pages behind a running request's addresses can be replaced: `promote`, `move`.

    Thread-safe; calls run one at a time. The cache owns its reservation, and its context unless
    `context` or `budget` is given. Usable as a context manager. If a cache (or `LayeredCache`) is
    garbage-collected without `close`, it warns (ResourceWarning) and its memory and addresses stay
    allocated until the process exits or, if a context was passed in, until that context is closed.

    Args:
        config: shape, limits and policy.
        context: a context to share; must outlive the cache. None: the cache opens a context and
            owns it.
        backend: back end of the owned context.
        device: device of the owned context: a CUDA ordinal, or a torch or cuda.core device.
        budget: memory to share with other caches; the cache uses the budget's context.

    Raises:
        InvalidArgument: a value that the context does not support, such as the page size.
        VMemError: the context could not be opened, or addresses could not be reserved.
    """

    config: KVCacheConfig
    """The configuration; in a `LayeredCache`, that of the first group of layers."""

    caches: tuple[GroupView, ...]
    """The groups of layers of the same shape: one, or several in a `LayeredCache`, in the order in
    which its layers first use them. Each has its own tensors, layout and statistics."""

    memory: CacheMemory
    """Memory: how much calls need, how much is available, and the limit."""

    slots: CacheSlots
    """Calls for programs that choose slots themselves or keep their own records of slots."""

    internals: Internals
    """The cache's lock, journal and set of users, for code built on the cache."""

    context: Context
    """The context that the pages belong to."""

    budget: Budget | None
    """The budget shared with other caches, or None."""

    def __init__(
        self,
        config: KVCacheConfig,
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
    ) -> None:
        self._closed = True  # set to False once the groups exist
        self._begin(Manager("KVCache", config, None, context, backend, device, budget))

    def _begin(self, manager: Manager) -> None:
        """Creates the manager's groups and adopts its lock and journal."""
        self._manager = manager
        try:
            manager.make()
            self._open, self._groups = manager.open, manager.groups
            self._lock, self._journal = manager.lock, manager.journal
            self.context, self.budget = manager.context, manager.budget
            self.memory, self.slots = CacheMemory(manager), CacheSlots(manager)
            self.internals = Internals(manager)
            self.caches = tuple(GroupView(manager, place) for place in range(len(self._groups)))
            self.config = self.caches[0].config
            idle = self.config.idle_seconds
            if idle is None:
                idle = IDLE_SECONDS if manager.owns_context and not self.lockstep else 0.0
            self._idle = IdleThread(manager, idle) if idle else None
            if self._idle is not None:
                self._idle.start()
            self._closed = False
        except BaseException:
            manager.abandon()
            raise

    def __repr__(self) -> str:
        if not hasattr(self, "config"):  # construction failed
            return f"<{type(self).__name__}, closed>"
        return f"<{type(self).__name__} {self._about()}>"

    def _about(self) -> str:
        config, state = self.config, "closed" if self._closed else "open"
        layers = sum(view.config.num_layers for view in self.caches)
        return (
            f"on {self.context.info.backend}: {counted(layers, 'layer')}, "
            f"{counted(config.max_batch, 'slot')} of {config.max_seq_len} tokens, {state}"
        )

    def _gone(self) -> bool:
        return super()._gone() or not self.context.is_open

    # ---- requests ------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """Allocates a free slot for a request of `seq_len` tokens (0: not known yet).

        Chooses the best fit: the free slot with the fewest mapped pages that suffice or, if none
        has enough, the slot with the most. Ties go to the slot that has been free longest. The call
        itself does not map any pages; with `eager_pages`, the next slot is prepared in the
        background.

        Returns:
            The reqid, an index into the list passed to `step`; None if no slot is free.

        Raises:
            InvalidArgument: `seq_len` is negative or above `max_seq_len`.
        """
        with self._lock, self._journal:
            return requests.alloc(self._open(), seq_len)

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """Frees a slot and its rows.

        Reqids are reused: freeing a request twice may free the slot's next request. (A `Request` of
        `pyvmem.engine` is safe to release twice.)

        The pages stay mapped for the next request, or are unmapped in the background, after the GPU
        work on `stream` so far. Blocks only if a move's copies are still running while another
        batch on the slot is in flight.

        Args:
            reqid: the request's reqid, from `alloc_reqid`.
            stream: the stream (torch, cuda.core, ``__cuda_stream__``) of the slot's last work, an
                event recorded after it, or an `FdEvent`; None: torch's current stream (ignored on
                the host). For other accepted objects and the rules with CUDA graphs, see
                `pyvmem.memory.streams`.
            tokens: records the request's rows under these ids, as `record` does, for later requests
                that begin with them. The rows stay mapped in the slot, where the next turn
                continues (`KVCacheConfig.keep_mapped`). None: records nothing. There may be more
                tokens than rows, since the last sampled token has no row yet.
            namespace: as in `record`.

        Raises:
            InvalidArgument: no such reqid, or it is free; bad tokens or namespace; the stream is
                being captured into a CUDA graph, or is not a stream (`NotGpuWork`).
            VMemError: the rows could not be recorded; the request was not freed.
        """
        with self._lock, self._journal:
            requests.free(self._open(), reqid, stream, tokens, namespace)

    def truncate(self, reqid: int, length: int, stream: Any = None) -> int:
        """Drops a request's rows from `length` on, and the pages that held only these rows.

        If `length` is the request's current length, drops only the pages that a prefill mapped past
        the rows for its kernel to read (`KVCacheConfig.overread_rows`), so that other requests can
        use that memory once the prompt is computed.

        Use it for rejected tokens (speculative decoding), or to roll a request back. Only this call
        shortens a running request: passing a smaller number to `step` does not.

        The request's own pages stay mapped but unowned: the request uses them again when it grows,
        or other requests take them, after the GPU work on `stream` so far. This does not block.
        References to shared pages are dropped and off-device pages are freed; this waits for the
        work on `stream`. If `length` is within a shared page, the page is copied, since the request
        may write past its last row.

        If a later `step` grows the request again, rows still hold their earlier contents in pages
        that were kept: the page in which row ``length - 1`` ends, the pages that decoding reads
        past it (`KVCacheConfig.overread_decode`), and pages promised by a `step_async`. All other
        rows are zero, or undefined if `KVCacheConfig.zero_fill` is off.

        Args:
            reqid: the request.
            length: number of tokens to keep, at most the current number.
            stream: the stream (or event) of the last work on these rows, as in `free_reqid`.

        Returns:
            0, or -1 if there is too little memory to copy a shared page. After -1 nothing has
            changed, except that unowned pages may have been reclaimed.

        Raises:
            InvalidArgument: no such reqid, or it is free; a length out of range; a length,
                including 0, whose sliding window begins in unmapped rows (up to
                `KVCacheConfig.window_tile` tokens can be truncated; to start over, free the
                request); or a length other than 0 for a request with a state
                (`KVCacheConfig.state`), which cannot be rolled back.
            TooManyMappings: splitting a mapping needs one more, and the context has none left;
                nothing has changed. `free_reqid` does not need one.
            NotRecoverable: rollback failed; the message names the reqid that must be freed.
            VMemError: the driver failed; nothing has changed.
        """
        work = PriorWork(stream, self._groups[0].device)
        return waits.when_clear(
            self._manager, waits.before_truncate, truncation.truncate, reqid, length, work
        )

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Maps the pages that the slots need for the work that the caller is about to launch.

        Args:
            seq_lens: for every reqid, the number of tokens that the slot must hold; 0 for free
                slots. A number below the rows that a request holds, such as 0, has no effect
                (`truncate` removes rows).
            stream: the stream that will use the pages (None: torch's current stream). Fills may
                still be running when this returns; the stream waits for them. If an event is
                passed, or on the host, the call itself waits. When pages copied by `promote` or
                `move` replace the old pages, the call waits for the work on the stream so far.

        Returns:
            0 if everything is mapped; -1 if memory or mappings are short even after all unowned
            pages were reclaimed, in which case nothing has changed. Completes what `step_async`
            started; `stats` reports the time spent waiting.

        Raises:
            InvalidArgument: `seq_lens` has the wrong length, or a number in it is negative, too
                large, or above 0 for a free slot.
            VMemError: the driver failed, now or in a background batch of an earlier call. That
                batch was undone, the cache is consistent, and the call may be repeated.
        """
        if stream is not None:
            check(stream)
        with self._lock, self._journal:
            return steps.step(self._open(), seq_lens, stream)

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Starts mapping, in the background, the pages that `step` will need for these lengths.

        Does not wait for GPU work or map calls. Starts reclaiming the memory that the growth needs:
        unowned pages are unmapped after the GPU work on them, including in other caches of the
        budget; prefixes are evicted; copies for a promotion are cancelled. A later call uses that
        memory for the growth, or the `step` waits for it. The same applies if GPU work of an
        earlier owner delays a slot, or if an earlier call is still mapping pages of the request.

        A shortage is reported by this call, with one exception: memory that is not mapped yet when
        this returns may be taken by a call in between, such as a `fork`, or by another user of the
        context or the device; then the `step` returns -1.

        Args:
            seq_lens: as in `step`. They may run a few tokens ahead of the next `step`, which waits
                only for the pages that it needs. This hides even a slow driver call.
            stream: unused; accepted for symmetry with `step`, which orders its own stream.

        Returns:
            0, or -1 with nothing changed, as for `step`.

        Raises:
            InvalidArgument: as in `step`. A failure in the background is raised by the next `step`.
        """
        if stream is not None:
            check(stream)
        with self._lock, self._journal:
            return steps.step_async(self._open(), seq_lens)

    # ---- forks -----------------------------------------------------------------------------------

    def fork(
        self, reqid: int, length: int | None = None, stream: Any = None, into: int | None = None
    ) -> int | None:
        """Allocates a request that begins with the rows of another, for sampling or beam search.

        The two share the pages that rows below `length` fill completely; these are read-only from
        now on, and writing to them faults. Only the last, partly filled page is copied, in every
        tensor. So neither request may write rows below `length` again, but each may append
        independently. (To rewrite rows, `truncate` first.) A state (`KVCacheConfig.state`) is
        copied. In layers with a window, only the pages still in the window are shared.

        Waits for the GPU work on `stream` if pages were written since the last fork.

        Args:
            reqid: the parent, which continues.
            length: number of tokens that the new request begins with; None: all of the parent's.
            stream: the stream (or event) of the parent's last work, as in `free_reqid`.
            into: a free reqid for the new request; None: any.

        Returns:
            The new reqid, which holds `length` tokens; None if no slot is free or memory is short.
            Then nothing has changed, except that unowned pages may have been reclaimed and the
            parent's full pages may already be read-only.

        Raises:
            InvalidArgument: no such reqid, or it is free; it holds fewer tokens than `length`; it
                holds more and has a state, which cannot be rolled back; a window at `length`,
                including 0, would begin in unmapped rows; `into` is not free.
            NotSupported: the back end cannot map pages twice, or read-only.
            NotRecoverable: rollback failed; the message names the reqid that must be freed.
            VMemError: the driver failed; the cache is in the same state as after a return of None.
        """
        forked = self.fork_many(reqid, 1, length, stream, None if into is None else [into])
        return None if forked is None else forked[0]

    def fork_many(
        self,
        reqid: int,
        count: int,
        length: int | None = None,
        stream: Any = None,
        into: Sequence[int] | None = None,
    ) -> list[int] | None:
        """Forks `count` new requests in one batch: all of them or none. See `fork`.

        `into` gives `count` distinct free reqids for the new requests, which are returned in the
        same order.
        """
        work, number = PriorWork(stream, self._groups[0].device), operator.index(count)
        into, blockers = into if into is None else [*into], waits.before_fork
        return waits.when_clear(
            self._manager, blockers, forks.fork_all, reqid, number, length, work, into
        )

    # ---- prefixes --------------------------------------------------------------------------------

    @property
    def sharing_unit(self) -> int:
        """Number of tokens per unit in which prefixes are recorded and matched.

        It is the smallest number that fills whole pages, ``lcm(row_bytes, page_size) / row_bytes``:
        with fewer, a row that crosses a page boundary would have to be written into a shared page.
        """
        return self._groups[0].prefixes.unit

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """Records the rows of a running request under their tokens, for later requests to reuse.

        Their pages become read-only. For a finished request, `free_reqid` with `tokens` does the
        same without remapping. Recorded prefixes are evicted when memory is short or by `trim`:
        least recently used first, and only when free slots have no pages left.

        Waits for the GPU work on `stream` if something new is recorded.

        Args:
            reqid: the request.
            tokens: the ids whose keys and values its first rows hold (for accepted types see
                `TokenIds`). Tokens past its rows, such as a last token that is not computed yet,
                and tokens past the last full `sharing_unit` are ignored.
            stream: as in `free_reqid`.
            namespace: whatever the rows depend on besides the ids, such as an adapter, an image or
                a tenant; only a lookup with the same namespace finds them.

        Returns:
            The number of leading tokens that are recorded now; 0 if layers have a state
            (`KVCacheConfig.state`), which a recorded prefix cannot restore. If layers have a
            window, this counts up to the last place where a match can end (see `match`). If the
            request no longer holds the whole window before the end of the tokens, nothing new is
            recorded.

        Raises:
            InvalidArgument: bad tokens or namespace, or a free reqid.
            NotSupported: as for `fork`.
            TooManyMappings: read-only pages need more mappings than the context has left; nothing
                has changed. `free_reqid` with `tokens` does not need any.
            NotRecoverable, VMemError: as for `fork`.
        """
        work = PriorWork(stream, self._groups[0].device)
        return waits.when_clear(
            self._manager, waits.before_record, requests.record, reqid, tokens, work, namespace
        )

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """Looks up how much of a prompt is recorded, and leases that prefix so it is not evicted.

        If layers have a window, a match can end only where the whole window before its end is
        recorded: where a request was recorded, or where prompts diverged and a request recorded
        later still had the rows before that point. Otherwise the match is shorter, or empty.

        The lease ends when `alloc_prefix` has used the match, when the match is released or
        garbage-collected, or when `trim` evicts prefixes. Leased memory counts as unowned but
        cannot be reclaimed. A match counts as a use of the prefix. Rows in host memory that
        continue it are not leased; see `PrefixMatch.in_host`.

        Args:
            tokens: the prompt.
            leave: number of tokens at the end of the prompt to leave unmatched: an engine must
                compute at least the last token.
            namespace: as in `record`.

        Raises:
            InvalidArgument: bad tokens or namespace, or a negative `leave`.
        """
        with self._lock, self._journal:
            return self._open()[0].prefixes.match(TokenIds.of(tokens, namespace), leave)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """Allocates a slot for a prompt and maps its longest recorded prefix there, read-only.

        Args:
            tokens: the prompt, or its match from `match`.
            leave: as in `match`; ignored for a match.
            stream: the stream that will read the rows; it will wait for the work that wrote
                them.
            namespace: as in `record`; ignored for a match.

        Returns:
            The reqid and the number of tokens that it already holds, including those loaded from
            host memory, which this waits for. The number is 0 if nothing is recorded, or if no slot
            could be emptied without waiting for an earlier owner's GPU work. None, with nothing
            changed, if no slot is free or memory is short. After 0 or None, a match that was passed
            in keeps its lease.

        Raises:
            InvalidArgument: bad tokens or namespace, more tokens than `max_seq_len`, or a match
                from another cache.
            PrefixEvicted: the match has lost its lease, and the prefix was evicted.
            NotSupported: as for `fork`. VMemError: the driver failed; nothing has changed.
        """
        reader, blockers = work_of(stream), waits.before_prefix
        return waits.when_clear(
            self._manager, blockers, prefix_alloc.alloc_prefix, tokens, leave, reader, namespace
        )

    # ---- preemption and admission ----------------------------------------------------------------

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """Copies a request's rows to host memory and frees the request; `swap_in` restores it.

        Waits for the GPU work on `stream`, then for the copy. (To preempt by recomputation, just
        call `free_reqid`.)

        Args:
            reqid: the request; the call frees it.
            stream: as in `free_reqid`.

        Raises:
            InvalidArgument: no such reqid, or it is free.
            OutOfMemory: rows have left a window, and there is too little memory for the pages of
                all tokens, which `swap_in` needs temporarily; nothing has changed.
            MemoryError: host memory is short; nothing has changed.
            VMemError: as for `step`; nothing has changed.
        """
        work = PriorWork(stream, self._groups[0].device)
        return waits.when_clear(self._manager, waits.before_swap_out, swap.swap_out, reqid, work)

    def swap_in(self, swapped: SwappedRequest, stream: Any = None) -> int | None:
        """Restores a swapped-out request into any free slot.

        Args:
            swapped: a request that this cache swapped out; closed afterwards.
            stream: the stream that will use the rows. The call waits for its work and for the copy.

        Returns:
            The reqid, which holds the request's tokens. None if no slot is free, or memory is short
            even after all unowned pages were reclaimed; then `swapped` is unchanged.

        Raises:
            InvalidArgument: `swapped` belongs to another cache. BadHandle: it is closed or was
                already swapped in.
            VMemError: the driver failed; `swapped` is unchanged.
        """
        work = PriorWork(stream, self._groups[0].device)
        return waits.when_clear(
            self._manager,
            partial(waits.before_swap_in, length=getattr(swapped, "seq_len", 0), work=work),
            partial(swap.swap_in, swapped=swapped, stream=stream),
        )

    def can_admit(
        self, seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None = None
    ) -> bool:
        """Returns whether new requests of these lengths all fit alongside the current requests.

        Considers free slots, mappings that the context may still make, and all memory that is free
        or reclaimable. That includes recorded prefixes that no request uses and no match leases,
        and pages that batches in flight will free; the call does not wait for these. Memory that
        the context would have to allocate from its device counts only to the extent that it is free
        there now (`Context.memory`); another process may take it first.

        Args:
            seq_lens: tokens of each request, including its prefix.
            matches: for each request, the match that it will begin with, or None. Pages of a match
                are already allocated and not counted again. A lost lease is renewed. None: no
                request has a match. Pass the match that a request holds: otherwise its leased pages
                could make an idle cache reject the request forever.

        Raises:
            InvalidArgument: a length that is negative or above `max_seq_len`; a wrong number of
                matches; a match longer than its request, or from another cache.
            PrefixEvicted: as in `alloc_prefix`.
        """
        with self._lock, self._journal:
            return admission.can_admit(self._open(), seq_lens, matches)

    def trim(
        self,
        prefixes: bool | Literal["host"] = False,
        compact: bool | None = None,
        stream: Any = None,
    ) -> int:
        """Unmaps all unowned pages and returns the pool's free memory to the device.

        Waits for the GPU work on freed slots. An idle cache does the same automatically
        (`KVCacheConfig.idle_seconds`).

        Args:
            prefixes: True also evicts the recorded prefixes that no request uses and drops those in
                host memory; use it when the weights change. "host" evicts them too, but keeps them
                in host memory (`KVCacheConfig.host_prefixes`).
            compact: also moves pages of running requests and recorded prefixes together, so that
                the memory between them is returned (`Context.compact`). None: only if nothing can
                be using the pages that move, that is, if the cache owns its context and either no
                request is active or the last `step` had only zero lengths. True: always; this waits
                for all work on the device, and no work may be launched on the cache until it
                returns. False: never.
            stream: with `compact`, the stream of the last work on running requests, as in `step`.

        Returns:
            The number of bytes that the context returned to the device during the call.

        Raises:
            NotSupported: `compact` is True in a context that the cache does not own.
            VMemError: a batch failed; its pages are still mapped and the cache is consistent.
        """
        check(stream)
        if isinstance(prefixes, str) and (prefixes != "host" or not self.config.host_prefixes):
            raise invalid(
                f"prefixes is {prefixes!r}; it must be True, False or, with "
                f"KVCacheConfig.host_prefixes (here {self.config.host_prefixes}), 'host'"
            )
        owner = self._manager
        with self._lock, self._journal:
            self._open()
            before = self.context.stats().slab_bytes
        if compact:
            wait_for_device(stream, self._groups[0].device)

        def call(groups: Sequence[Group]) -> int:
            return trim.trim(owner, prefixes, compact, stream, before)

        blockers = partial(waits.before_trim, manager=owner, prefixes=prefixes, compact=compact)
        return waits.when_clear(owner, blockers, call)

    # ---- placement of pages ----------------------------------------------------------------------

    def promote(self, reqid: int, wait: bool = False, stream: Any = None) -> int:
        """Remaps a request's full 2 MiB blocks with page table entries of that size.

        Intended for requests that grew page by page. A prefill gets such entries from the start,
        and in a cache of more than 8 GiB every `step` promotes the requests that it lengthens.
        Addresses and rows stay the same. The next `step` joins blocks whose pages are physically
        contiguous. The other blocks are copied in the background by a later call, after the work on
        `stream` so far, while the GPU keeps reading the old pages; the `step` after that replaces
        the old pages. Such a `step` waits for the work on its stream, since no work may touch the
        pages while they are replaced. Shared pages, and blocks for which memory is short, are left
        unchanged.

        Args:
            reqid: the request. The work that writes its rows must have been launched, and no row of
                a full block may be written again while `SlotInfo.moving_pages` is not 0.
            wait: wait until the promotion is complete.
            stream: as in `free_reqid`.

        Returns:
            The number of blocks (2 MiB in every tensor) that are in progress or done.

        Raises:
            InvalidArgument: no such reqid, or it is free; or no slot can have such a block, because
                slots are shorter, the context has no large entries (`Caps.LARGE_ENTRIES`), or all
                layers have a window or a state.
            NotRecoverable: rollback failed; the message names the reqid that must be freed.
            VMemError: the driver failed; nothing has changed, except that in a `LayeredCache` some
                groups may have large entries now. A failure in the background is raised by the next
                `step`.
        """
        work = PriorWork(stream, self._groups[0].device)
        return waits.when_clear(
            self._manager, waits.before_promote, tiers.promote, reqid, work, wait=wait
        )

    def move(
        self,
        reqid: int,
        location: str | Location,
        device: Any = None,
        tokens: Sequence[int] | None = None,
        stream: Any = None,
        wait: bool = True,
    ) -> Moved:
        """Moves pages of a request to another tier; addresses and rows stay the same.

        Moves all of them or none. New pages of the request are always allocated in device memory,
        even after a move. Shared pages are not moved. Waits for moves and promotions of the request
        that are in progress (`SlotInfo.moving_pages`).

        Args:
            reqid: the request. The work that writes its rows must have been launched.
            location: "device", "host" or "peer", or a `pyvmem.Location`.
            device: the peer's device: a CUDA ordinal, or a torch or cuda.core device.
            tokens: a range, or a pair (first, last + 1); only pages that hold no other rows move.
                None: all tokens of the request.
            stream: the stream (or event) of the last work on the request; with `wait`, the call
                waits for it.
            wait: if False, full pages are copied in the background, after the work on `stream` so
                far, and the first `step` after that replaces them, as in `promote`; their rows must
                not be written until then.

        Returns:
            The number of pages that moved or are being moved, and the number that did not move
            because they are shared.

        Raises:
            InvalidArgument: no such reqid, or it is free; a token beyond its rows; an unknown
                location; or a device that is not a peer of the context.
            NotSupported: the back end cannot place pages in that memory.
            OutOfMemory: the memory is full (`host_limit`, `peer_limit`, the cache's own limit, or
                the machine's limit); nothing has changed, except that unowned pages may have been
                reclaimed.
            TooManyMappings: the move needs more mappings than the context has left; nothing has
                changed, except as for OutOfMemory.
            NotRecoverable: rollback failed; the message names the reqid that must be freed.
            VMemError: the driver failed; nothing has changed, except that in a `LayeredCache` the
                pages of some groups may have moved. A failure in the background is raised by the
                next `step`.
        """
        work = PriorWork(stream, self._groups[0].device)

        def call(groups: Sequence[Group], reqid: int, work: PriorWork, *, wait: bool) -> Moved:
            tier = tiers.tier_of(groups[0], location, device)
            return tiers.move(groups, reqid, tier, tokens, work, wait=wait)

        return waits.when_clear(self._manager, waits.before_move, call, reqid, work, wait=wait)

    # ---- for programs written for another cache --------------------------------------------------

    @property
    def lockstep(self) -> bool:
        """True if calls must return the same result on every rank (`ParallelKVCache`)."""
        return self._groups[0].table.lockstep

    def seq_len(self, reqid: int) -> int:
        """Returns the number of tokens whose rows a slot holds; 0 for a free slot.

        Raises InvalidArgument for a reqid that does not exist.
        """
        group = self._groups[0]
        return group.rows[group.slot(reqid, taken=False).index]

    # ---- tensors -------------------------------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors: K, then V, for every `group_size` layers.

        If `tensors_per_layer` is 1, there is one tensor instead of two.

        Every tensor is ``[max_batch, max_seq_len, group_size, num_kv_heads, head_dim]``. Only
        mapped rows may be touched. A live tensor keeps the cache from closing. A `LayeredCache`
        lists the tensors group by group.
        """
        return [tensor for view in self.caches for tensor in view.tensors]

    def k(self, layer: int) -> torch.Tensor:
        """Returns a layer's keys, a view ``[max_batch, max_seq_len, num_kv_heads, head_dim]``.

        Consecutive rows are ``group_size`` layers apart in memory. Raises InvalidArgument for a
        layer that does not exist.
        """
        return self.caches[0].k(layer)

    def v(self, layer: int) -> torch.Tensor:
        """Returns a layer's values; see `k`. Raises InvalidArgument if `tensors_per_layer` is 1."""
        return self.caches[0].v(layer)

    def layer_views(self) -> list[tuple[GroupView, GroupView | None] | None]:
        """Returns, for each layer, the groups whose tensors hold its keys and values.

        The entry is None for a layer that has neither; an MLA layer has None in place of values.
        """
        view = self.caches[0]
        values = view if view.config.tensors_per_layer == 2 else None
        return [(view, values)] * view.config.num_layers

    # ---- reports -------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The sizes and offsets of the cache, for planning or visualization.

        Raises NotSupported if the layers form several groups; `caches` has a layout for each.
        """
        return self._manager.only("layout").layout

    @property
    def reservation(self) -> Reservation:
        """The addresses of all tensors; `layout` gives the offsets. Owned by the cache.

        Raises NotSupported if the layers form several groups; `caches` has a reservation for each.
        """
        return self._manager.only("reservation").reservation

    @property
    def safe_overread(self) -> bool:
        """True if unmapped rows read as zeros, even while pages are being mapped.

        Requires `KVCacheConfig.sparse` and a back end that atomically replaces the zeros with a
        page (`pyvmem.Caps.SPARSE_ATOMIC`), which excludes ``stock``.
        """
        return all(view.safe_overread for view in self.caches)

    def stats(self) -> CacheStats:
        """Returns the current state and the counters, summed over groups of layers.

        Slots, steps and prefix tokens are the same in all groups and are not summed. Each peak is
        the sum of the groups' peaks.
        """
        with self._lock, self._journal:
            groups = self._open()
            room = admission.free_pages(groups)
            return together([integrity.stats(group) for group in groups], room)

    def snapshot(self) -> list[SlotInfo]:
        """Returns the current pages of every slot, summed over groups of layers."""
        with self._lock, self._journal:
            # A subclass's `snapshot` may call back into the cache, which `call_part` allows.
            each = [call_part(view.snapshot) for view in self.caches]
        return [slots[0].and_others(slots[1:]) for slots in zip(*each, strict=True)]

    def check_integrity(self) -> None:
        """Compares the cache's records with each other and, page by page, with the context's.

        Costs one query per run of pages. Skips pages that a batch in flight is changing; if no
        batch is in flight, the context's own check also runs.

        Raises:
            IntegrityError: lists every contradiction found.
        """
        with self._lock, self._journal:
            integrity.verify(self._open())

    # ---- end -----------------------------------------------------------------------------------

    def close(self, stream: Any = None) -> None:
        """Waits for batches in flight and for GPU work on freed slots, then frees everything.

        Pages that the GPU may touch cannot be unmapped, so if the work never finishes, this waits
        until a signal (Ctrl-C) interrupts it; the call may then be repeated.

        A `pyvmem.engine.RequestCache` without requests does not prevent closing; its next call
        raises BadHandle.

        Args:
            stream: the stream of the last work on slots still in use, as in `free_reqid`.

        Raises:
            Busy: tensors of the cache are still alive, or a `pyvmem.engine.RequestCache` has
                requests; nothing has changed, and the cache can still be used.
            BadHandle: the file descriptor of an `FdEvent` is closed; nothing has changed.
        """
        check(stream)
        with self._lock, self._journal:
            if self._closed:
                return
            living = [request for user in list(self.internals.users) for request in user.requests]
            if living:
                raise Busy(
                    f"a RequestCache has {counted(len(living), 'open request')}, such as "
                    f"{living[0]!r}; close it first",
                    errno=errno.EBUSY,
                    op="KVCache.close",
                )
            for view in self.caches:
                view.drop()
            self._manager.close(stream)
            if self._idle is not None:
                self._idle.end()
            self._closed = True
