# SPDX-License-Identifier: MIT
"""`ParallelKVCache`: one cache a rank, the same answers on every rank, no communication per step.

What the ranks agree on, once, when the caches are made: how many pages each has (the least of what
the ranks could take from their devices; every rank holds that memory from then on). After that a
rank decides alone, and decides as the others do, because answers depend on the calls alone:

- a reqid is the slot freed last (`LockstepTable`), not the best fit;
- `step` returns 0 exactly when the pages that requests own fit into the budget. Which pages of no
  owner are unmapped for that, and when, may differ between ranks and never changes an answer.

`num_free_pages` and most of `stats` do depend on what the background has finished: an engine that
admits requests by memory asks `available_pages`.

A rank whose driver fails all the same is *poisoned*: the call raises there, and the others learn
of it in the engine's next collective, by `check_step` or by `status` and `agree`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, cast

import torch

from pyvmem.context import Context
from pyvmem.errors import InvalidArgument, VMemError
from pyvmem.info import KEEP_ALL
from pyvmem.kvcache.alone import WithoutSharing, refuse
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.events import record
from pyvmem.kvcache.lockstep import Failure, LockstepTable, RankFailed, Ranks, RanksDiffer
from pyvmem.kvcache.ranks import agree_on_pages, rank_config, shard_kv_heads, take_pages
from pyvmem.streams import device_ordinal

__all__ = ["ParallelKVCache", "RankFailed", "RanksDiffer", "rank_config", "shard_kv_heads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ParallelKVCache(WithoutSharing):
    """A `KVCache` on every rank of a group. Every rank makes the same calls in the same order.

    Forks, prefixes and swapping are refused with NotSupported: see `pyvmem.kvcache.alone`.

    Making one, `check_step`, `together` and `recover` are collectives; nothing else communicates.
    An `InvalidArgument` changes nothing and poisons nothing: every rank has it, for the same call.

    Args:
        config: the same on every rank, but for `memory_limit`. `num_kv_heads` is one rank's
            (`rank_config`). With `memory_limit` 0 the free memory of the device is taken: leave an
            engine its own. The memory is taken at once and kept until `close`.
        group: torch.distributed group of the ranks; None: the default group.
        backend: of the context that the cache opens, for itself alone.
        device: of this rank; None: torch's current CUDA device, 0 on ``host``.

    Raises:
        InvalidArgument: no process group; configurations or page sizes differ; on every rank.
        RankFailed: a rank could not open its context or take a single page; on every rank.
    """

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
        self._ahead = False
        self._own: Context | None = None
        if getattr(config, "idle_seconds", 0):
            raise invalid("idle_seconds depends on the clock; it must be 0 with several ranks")
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._ranks = ranks = Ranks(group, device_ordinal(device))
        page = pages = 0
        failure = None
        try:
            self._own = Context(
                backend, device=device, granule=config.page_size, pool_high=KEEP_ALL
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
        super().__init__(config, self._own)
        self._core.table.__class__ = LockstepTable

    # ---- calls that every rank makes -----------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """As `KVCache.alloc_reqid`, but the slot is the one freed last; the same on every rank."""
        return self._call(super().alloc_reqid, seq_len)

    def free_reqid(self, reqid: int, stream: Any = None, tokens: Any = None) -> None:
        """See `KVCache.free_reqid`; `tokens` must be None."""
        if tokens is not None:
            refuse("free_reqid with tokens")
        self._call(super().free_reqid, reqid, stream)

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step`; 0 or -1 on every rank alike.

        Raises:
            VMemError: this rank alone failed: go on to `check_step`, where the others wait.
        """
        with self._lock:
            answer = self._call(super().step, seq_lens, stream)
            self._ahead = False
            return answer

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step_async`. A second one before `step` first completes the one before."""
        with self._lock:
            if self._ahead:
                # What a growth in flight has promised is no page of an owner yet: memory would
                # be short, or not, as the background is slow or fast.
                self._call(self._open_core().pager.settle, stream)
            answer = self._call(super().step_async, seq_lens, stream)
            self._ahead = self._ahead or answer == 0
            return answer

    @property
    def available_pages(self) -> int:
        """Physical pages that requests can still have; the same on every rank."""
        now = self.stats()
        return now.total_pages - now.active_pages

    def _call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls, and keeps the answer for `agree`, or the failure."""
        with self._lock:
            self._open_core()
            try:
                result = method(*args, **kwargs)
            except BaseException as error:
                # Bad arguments are checked before anything changes, on every rank.
                if not (isinstance(error, InvalidArgument) and error.op == "KVCache"):
                    self._poison(error, method.__name__)
                raise
            self._digest = zlib.crc32(f"{method.__name__} {result}".encode(), self._digest)
            return result

    def _poison(self, error: BaseException, where: str) -> None:
        self._failure = Failure.of(self._ranks.rank, error, where)

    def _open_core(self) -> Core:
        if not self._closed and self._failure is not None:
            raise self._failure.error()
        return super()._open_core()

    # ---- failures ------------------------------------------------------------------------------

    @property
    def failed(self) -> VMemError | None:
        """Why no call can be made; None: all is well, as far as this rank knows."""
        return self._failure.error() if self._failure else None

    def status(self) -> list[int]:
        """Three whole numbers for an all_reduce (MAX) of the engine's own, then for `agree`.

        Below 2**32 in magnitude, or 4096 times the number of ranks: int64 or float64.
        """
        with self._lock:
            own = self._failure.status if self._failure else 0
            return [own, self._digest, -self._digest]

    def agree(self, maxima: Sequence[int]) -> None:
        """Reads what became of `status` in the all_reduce.

        Raises:
            RankFailed: a rank failed; from now on every call raises this.
            RanksDiffer: the calls or the answers of the ranks differ; likewise.
        """
        status, digest, negative = (int(value) for value in maxima)
        with self._lock:
            failure = Failure.from_status(status)
            if failure is None and digest != -negative:
                failure = Failure(-1)
            if failure is None:
                return
            if self._failure is None or self._failure.status != failure.status:
                self._failure = failure  # else the own one, which knows more
            raise self._failure.error()

    def check_step(self) -> None:
        """`status`, one all_reduce of three numbers, and `agree`. A collective.

        Between `step` and the launch of the model, unless the engine reduces `status` itself.

        Raises:
            RankFailed, RanksDiffer: as `agree`, on every rank.
        """
        self.agree(self._ranks.maxima(self.status()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends the block with `check_step` on every rank, also where the block raised.

            with cache.together():
                answer = cache.step(seq_lens)

        An exception inside, of whatever kind, fails the rank; only the cache's own
        `InvalidArgument`, which all ranks have alike, comes out as it is.

        Raises:
            RankFailed, RanksDiffer: as `agree`, on every rank.
        """
        try:
            yield
        except InvalidArgument:
            raise
        except Exception as error:
            if self._failure is None:
                self._poison(error, "a block of together()")
        self.check_step()

    def recover(self, stream: Any = None) -> None:
        """Frees every request and makes the ranks the same again. A collective.

        Requests are to be computed again. What failed undos cost one rank, every rank gives up: a
        slot that cannot be used, pages that are lost.

        Args:
            stream: the last work on the slots, as in `free_reqid`.

        Raises:
            RankFailed: a rank could not be made ready; every rank stays poisoned.
        """
        with self._lock:
            have = [0] * (len(self._core.table) + 1)
            self._failure = None
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
        core = super()._open_core()
        event = record(stream, core.device)
        for slot in core.table:
            with suppress(VMemError):  # undone: its pages are as before
                core.pager.release(slot)
            if slot.active:
                core.release(slot, event)
        core.reclaimer.finish_all()
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
