# SPDX-License-Identifier: MIT
"""`ParallelKVCache`: one cache a rank, the same answers on every rank, no communication per step.

What the ranks agree on, once, when the caches are made: how many pages each has (the least of what
the ranks could take from their devices; every rank holds that memory from then on). After that a
rank decides alone, and decides as the others do, because answers depend on the calls alone:

- a slot is chosen by the order in which slots were freed (`LockstepTable`), not by its pages;
- there is memory exactly when the pages that requests own fit into the budget. Which pages of no
  owner are unmapped for that, and when, may differ between ranks and never changes an answer;
- recorded prefixes are evicted when all slots have given all that they have, and then in the order
  of their use, which calls alone change;
- what a `step_async` began is waited for by the calls that share, swap or admit.

The driver's mappings are no such matter: how many a request's pages take depends on where they lie.
A rank that has none left for a `step` raises TooManyMappings, and `check_step` takes the step back
on every rank, as `agreed_step` does by itself.

`num_free_pages` and most of `stats` do depend on what the background has finished: an engine that
admits requests by memory asks `available_pages` or `can_admit`.

A rank that fails all the same (its driver, or its host memory in `swap_out`) is *poisoned*: the
call raises there, and the others learn of it in the engine's next collective, by `check_step` or by
`status` and `agree` (agreed.py).
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import torch

from pyvmem.context import Context
from pyvmem.errors import NotSupported, TooManyMappings, VMemError
from pyvmem.info import KEEP_ALL
from pyvmem.kvcache import idle
from pyvmem.kvcache.agreed import AgreedCache
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.events import record
from pyvmem.kvcache.leases import PrefixMatch
from pyvmem.kvcache.lockstep import Failure, LockstepTable, RankFailed, Ranks, RanksDiffer
from pyvmem.kvcache.ranks import agree_on_pages, rank_config, shard_kv_heads, take_pages
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.streams import check, device_ordinal

__all__ = ["ParallelKVCache", "RankFailed", "RanksDiffer", "rank_config", "shard_kv_heads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ParallelKVCache(AgreedCache):
    """A `KVCache` on every rank of a group. Every rank makes the same calls in the same order.

    Making one, `check_step`, `together` and `recover` are collectives; nothing else communicates.
    Calls that share and swap are among these, and what they return is a rank's own: a
    `SwappedRequest` is swapped in on every rank, or closed on every rank. An `InvalidArgument`
    changes nothing and poisons nothing: every rank has it, for the same call.

    Args:
        config: the same on every rank, but for `memory_limit`. `num_kv_heads` is one rank's
            (`rank_config`). With `memory_limit` 0 that is 0.9 of the device's free memory. The
            memory is taken at once and kept until `close`.
        group: torch.distributed group of the ranks; None: the default group.
        backend: of the context that the cache opens, for itself alone.
        device: of this rank; None: torch's current CUDA device, 0 on ``host``.

    Raises:
        InvalidArgument: no process group; configurations or page sizes differ; on every rank.
        RankFailed: a rank could not open its context or take a single page; on every rank.
    """

    _table = LockstepTable

    def __init__(
        self,
        config: KVCacheConfig,
        group: Any = None,
        backend: str = "auto",
        device: Any = None,
    ) -> None:
        self._closed = True
        self._failure: Failure | None = None
        self._digest = 0
        self._crowded = ""
        self._ahead = False  # a `step_async` was answered with 0, and no `step` has followed
        self._before: tuple[Sequence[int], Any] | None = (
            None  # the last step's rows before, its stream
        )
        self._swapped: weakref.WeakSet[SwappedRequest] = weakref.WeakSet()
        self._own: Context | None = None
        if getattr(config, "idle_seconds", 0):
            raise invalid("idle_seconds depends on the clock; it must be 0 with several ranks")
        if getattr(config, "large_page_size", 0):
            raise invalid(
                "large_page_size: what a rank can reclaim of large pages depends on when its "
                "background is done; it must be 0 with several ranks"
            )
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._ranks = ranks = Ranks(group, device_ordinal(device))
        page = pages = 0
        failure = None
        try:
            self._own = Context(
                backend,
                device=device,
                granule=config.page_size,
                pool_high=KEEP_ALL,
                max_mappings=config.max_mappings,
            )
            page = config.page_size or self._own.info.granule
            pages = take_pages(self._own, config, page)
        except Exception as error:
            failure = Failure.of(ranks.rank, error, "init")
        try:
            pages = agree_on_pages(ranks, config, page, pages, failure)
            try:
                self._make(replace(config, page_size=page, memory_limit=pages * page))
            except Exception as error:
                failure = Failure.of(ranks.rank, error, "init")
            (status,) = ranks.maxima([failure.status if failure else 0])
            if failed := Failure.from_status(status):
                raise (failure or failed).error()
        except BaseException:
            with suppress(VMemError):
                self.close()
            raise

    def _make(self, config: KVCacheConfig) -> None:
        """Gives back what other ranks could not match, and makes the cache over the rest."""
        assert self._own is not None
        self._own.trim(config.memory_limit)
        super().__init__(replace(config, max_mappings=0), self._own)

    # ---- calls that every rank makes -----------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """As `KVCache.alloc_reqid`, but the slot is the one freed last; the same on every rank."""
        return self._call(super().alloc_reqid, seq_len)

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """See `KVCache.free_reqid`."""
        if tokens is None:
            self._call(super().free_reqid, reqid, stream)
        else:
            self._settled(super().free_reqid, reqid, stream, tokens, namespace)

    def truncate(self, reqid: int, length: int, stream: Any = None) -> int:
        """See `KVCache.truncate`; 0 or -1 on every rank alike."""
        return self._settled(super().truncate, reqid, length, stream)

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step`; 0 or -1 on every rank alike.

        Raises:
            TooManyMappings: this rank has none left: go on to `check_step`, where the others wait
                and every rank takes the step back. With a sliding window that is a failure.
            VMemError: this rank alone failed: go on to `check_step`, likewise.
        """
        with self._lock, self._journal:
            self._before = (self._open_core().rows[:], stream)
            answer = self._call(super().step, seq_lens, stream)
            self._ahead = False
            return answer

    def agreed_step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """`step` and `check_step` in one: a collective; 0 or -1 on every rank alike.

        -1 also where one rank alone has no mapping left. Nothing is called between the two.

        Raises:
            RankFailed, RanksDiffer: as `agree`, on every rank.
        """
        answer = -1
        try:
            with self.together():
                answer = self.step(seq_lens, stream)
        except TooManyMappings:
            return -1
        return answer

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step_async`. A second one before `step` first completes the one before.

        Where this rank has no mapping left, nothing is begun, and the `step` says so.
        """
        with self._lock, self._journal:
            answer = self._settled(self._begin_async, seq_lens, stream)
            self._ahead = answer == 0
            return answer

    def _begin_async(self, seq_lens: Sequence[int], stream: Any) -> int:
        try:
            return super().step_async(seq_lens, stream)
        except TooManyMappings:
            return 0

    def _take_back(self) -> None:
        """Makes the last step undone: requests have the rows, and the pages, of before.

        All that no request owns goes, recorded prefixes included: a rank that could step may have
        evicted some for it, and one that could not has not.
        """
        assert self._before is not None
        rows, stream = self._before
        core = self._open_core()
        try:
            if core.window is not None:
                raise _no_way_back()
            event = record(stream, core.device)
            for slot in core.table:
                with suppress(TooManyMappings):  # what a `step_async` began; it is undone
                    core.pager.release(slot)
            for slot in core.table:
                if slot.active:
                    core.disown_beyond(slot, rows[slot.index], event)
            idle.unmap_idle(core, prefixes=True)
            core.reclaimer.forget_crowding()
            core.reclaimer.raise_errors()
            core.runs.relieve()
        except Exception as error:
            self._poison(error, "taking a step back")
            raise
        self._ahead, self._before = False, None

    def fork_many(
        self,
        reqid: int,
        count: int,
        length: int | None = None,
        stream: Any = None,
        into: Sequence[int] | None = None,
    ) -> list[int] | None:
        """See `KVCache.fork_many`; the slots are those freed first."""
        return self._settled(super().fork_many, reqid, count, length, stream, into)

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """See `KVCache.record`."""
        return self._settled(super().record, reqid, tokens, stream, namespace)

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """See `KVCache.match`. A use of what matches: every rank makes this call, too.

        The lease ends with `alloc_prefix`, `PrefixMatch.release`, or the next `step` that answers
        0, whichever comes first, and not when the match is collected: ranks collect at their own
        times. Every rank releases alike.
        """
        return self._call(super().match, tokens, leave, namespace)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """See `KVCache.alloc_prefix`; the slot is the one freed first."""
        return self._settled(super().alloc_prefix, tokens, leave, stream, namespace)

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """See `KVCache.swap_out`.

        Raises:
            MemoryError: of this rank's host: it alone failed, as in `step`.
        """
        with self._lock, self._journal:
            swapped = self._settled(super().swap_out, reqid, stream)
            self._swapped.add(swapped)
            return swapped

    def swap_in(self, swapped: SwappedRequest, stream: Any = None) -> int | None:
        """See `KVCache.swap_in`; the slot is the one freed last."""
        return self._settled(super().swap_in, swapped, stream)

    def can_admit(
        self, seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None = None
    ) -> bool:
        """See `KVCache.can_admit`; the same on every rank."""
        return self._settled(super().can_admit, seq_lens, matches)

    def trim(self, prefixes: bool = False, compact: bool = False, stream: Any = None) -> int:
        """Unmaps all pages of no request, as `KVCache.trim`; returns 0.

        The memory stays the cache's, ready in its context: the ranks have agreed on it. So there is
        nothing for `compact` to do.
        """
        check(stream)
        return self._settled(self._trim, prefixes)

    def _trim(self, prefixes: bool) -> int:
        idle.unmap_idle(self._open_core(), prefixes)
        return 0

    def _settled(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """`_call`, when what a `step_async` began is done.

        What a growth in flight has promised is no page of an owner yet: memory would be short, or
        not, as the background is slow or fast.
        """
        with self._lock, self._journal:
            if self._ahead:
                self._call(self._open_core().pager.settle, None, True)
                self._ahead = False
            return self._call(method, *args, **kwargs)

    @property
    def available_pages(self) -> int:
        """Physical pages that requests can still have; the same on every rank."""
        now = self.stats()
        return now.total_pages - now.active_pages

    # ---- failures ------------------------------------------------------------------------------

    def recover(self, stream: Any = None) -> None:
        """Gives everything up and makes the ranks the same again. A collective.

        Every request is freed and to be computed again, swapped ones are closed, and no prefix is
        recorded: a call that one rank failed in the others may have done. What failed undos cost
        one rank, every rank gives up: a slot that cannot be used, pages that are lost.

        Args:
            stream: the last work on the slots, as in `free_reqid`.

        Raises:
            RankFailed: a rank could not be made ready; every rank stays poisoned.
        """
        check(stream)
        with self._lock, self._journal:
            have = [0] * (len(self._core.table) + 1)
            self._failure = None
            self._crowded = ""
            try:
                have = self._reset(stream)
            except Exception as error:
                self._poison(error, "recover")
            status, *least = self._ranks.maxima([self.status()[0], *(-value for value in have)])
            self.agree([status, 0, 0])
            core = self._core
            core.reclaimer.limit = -least[0]
            for slot, usable in zip(core.table, least[1:], strict=True):
                if not usable:
                    core.table.condemn(slot)

    def _reset(self, stream: Any) -> list[int]:
        """Frees everything; returns the pages that are left, and which slots can be used."""
        core = self._open_core()
        event = record(stream, core.device)
        for slot in core.table:
            with suppress(VMemError):  # undone: its pages are as before
                core.pager.release(slot)
            if slot.active:
                core.release(slot, event)
        for swapped in list(self._swapped):
            swapped.close()
        idle.unmap_idle(core, prefixes=True)
        for slot in core.table:
            if slot.lost:
                core.reclaimer.salvage(slot)
        core.reclaimer.errors.clear()
        cast(LockstepTable, core.table).reset_order()
        self._digest, self._ahead = 0, False
        self.check_integrity()
        stats = core.context.stats()
        pages = (stats.slab_bytes - stats.quarantined_bytes) // core.layout.page_size
        return [min(core.reclaimer.limit, pages), *(int(not slot.broken) for slot in core.table)]

    # ---- end -----------------------------------------------------------------------------------

    def close(self, stream: Any = None) -> None:
        """As `KVCache.close`, on this rank; the context goes too."""
        if not self._closed:
            super().close(stream)
        if self._own is not None:
            self._own.close()


def _no_way_back() -> NotSupported:
    return NotSupported(
        "a rank has no mapping left for a step, which cannot be taken back: a window has slid",
        errno=errno.EOPNOTSUPP,
        op="ParallelKVCache",
    )
