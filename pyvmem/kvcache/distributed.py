# SPDX-License-Identifier: MIT
"""`ParallelKVCache`: one cache per rank; all ranks get identical results without communicating.

When the caches are created, the ranks agree on how many pages each cache has: the minimum that any
rank could allocate on its device. Every rank holds on to that memory. After that, each rank decides
on its own, and all ranks reach the same decisions because results depend only on the calls:

- slots are chosen by the order in which they were freed (`LockstepTable`), not by their pages;
- memory suffices if and only if the pages that requests own fit the budget. Which unowned pages are
  unmapped to make room, and when, may differ between ranks but never changes a result;
- recorded prefixes are evicted only when free slots have no pages left, in order of last use, which
  only calls change;
- calls that share, swap or admit first wait for any growth that a `step_async` started.

Driver mappings are an exception: their number depends on the physical placement of a request's
pages. A rank that runs out of them in a `step` raises TooManyMappings, and `check_step` undoes
the step on every rank; `agreed_step` does both.

`num_free_pages` and most of `stats` do depend on the progress of background batches: an engine that
admits requests based on free memory must use `available_pages` or `can_admit`.

A rank on which a call fails for any other reason (a driver error, or no host memory in `swap_out`)
is *poisoned*: the call raises there, and the other ranks learn of it in the engine's next
collective, through `check_step` or through `status` and `agree`.
"""

from __future__ import annotations

import errno
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from pyvmem.errors import (
    BadHandle,
    InvalidArgument,
    NotSupported,
    OutOfMemory,
    Reentered,
    TooManyMappings,
    VMemError,
)
from pyvmem.kvcache import integrity
from pyvmem.kvcache.budget import available_bytes
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import record
from pyvmem.kvcache.group import Group, open_context
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.prefix_cache import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds
from pyvmem.kvcache.slots import Slot, SlotTable
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.kvcache.tiers import Moved
from pyvmem.kvcache.trim import unmap_idle
from pyvmem.memory.context import Context
from pyvmem.memory.info import KEEP_ALL
from pyvmem.memory.streams import check, device_ordinal
from pyvmem.plumbing.reentry import call_part

__all__ = [
    "Failure",
    "LockstepTable",
    "ParallelKVCache",
    "RankFailed",
    "Ranks",
    "RanksDiffer",
    "agree_on_pages",
    "rank_config",
    "shard_kv_heads",
    "take_pages",
]

_ERRNOS = 4096  # a status is (rank + 1) * _ERRNOS + errno


class RankFailed(VMemError):
    """A rank failed in a call that other ranks may have completed; no rank's cache may be used.

    `VMemError.errno` is the errno of the failed rank, if it had one; on the failed rank, the
    message includes the failure itself.

    Attributes:
        rank: the failed rank's number in the group; the highest if several failed.
    """

    rank: int = -1


class RanksDiffer(VMemError):
    """The ranks made different calls or got different results; no rank's cache may be used.

    The ranks compare the calls' names and results, the row counts that they requested or left, and
    token ids.
    """


@dataclass(frozen=True)
class Failure:
    """Why a rank rejects calls. Not an exception, since a traceback would keep tensors alive.

    Attributes:
        rank: the failed rank; -1 if the ranks differ.
        code: the failed rank's errno; 0 if it has none.
        detail: description of the failure, on the failed rank only.
    """

    rank: int
    code: int = 0
    detail: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> Failure:
        """Creates a record of this rank's own failure."""
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        text = f" in {where}: {type(error).__name__}: {error}"
        return cls(rank, code % _ERRNOS if isinstance(code, int) else 0, text)

    @property
    def status(self) -> int:
        """The failure as a number; the maximum over the ranks identifies a failed rank."""
        return (self.rank + 1) * _ERRNOS + self.code

    @classmethod
    def from_status(cls, maximum: int) -> Failure:
        """Decodes the maximum of `status` over the ranks; 0: none failed, but they differ."""
        return cls(maximum // _ERRNOS - 1, maximum % _ERRNOS)

    def error(self) -> VMemError:
        """Returns a new exception for this failure."""
        if self.rank < 0:
            return RanksDiffer(
                "the ranks made different calls or got different results since the last recovery; "
                "call recover() or close() on every rank",
                op="ParallelKVCache",
            )
        name = errno.errorcode.get(self.code, "an error without errno")
        error = RankFailed(
            f"rank {self.rank} failed with {name}{self.detail}; "
            "call recover() or close() on every rank",
            errno=self.code,
            op="ParallelKVCache",
        )
        error.rank = self.rank
        return error


class Ranks:
    """Wraps a process group; the only collective is `maxima`.

    Args:
        group: the process group; None: the default group, which must be initialized.
        device: CUDA ordinal for NCCL's tensors; None: the current device.
    """

    def __init__(self, group: Any = None, device: int | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise invalid("torch.distributed is not initialized: call init_process_group first")
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise invalid("this process is not in the given group")
        self._device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            ordinal = torch.cuda.current_device() if device is None else device
            self._device = torch.device("cuda", ordinal)

    def __repr__(self) -> str:
        return f"<Ranks: rank {self.rank} of {self.size}>"

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Returns each number's maximum over the ranks, with one all_reduce."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor.tolist()]


class LockstepTable(SlotTable):
    """Chooses slots by the order in which they were freed, which depends only on the calls.

    `SlotTable` considers mapped pages, batches in flight and GPU work, which all depend on timing.
    The slot freed last is likely to still have pages, and the slot freed first to have lost them.
    """

    lockstep: ClassVar[bool] = True

    def best_fit(self, pages: int) -> Slot | None:
        """Returns the free slot that was freed last; `pages` is ignored."""
        free = self.free
        if not free:
            return None
        # Slots that were never allocated have freed_order 0 and are ordered by number.
        return free[-1] if free[-1].freed_order else free[0]

    def emptiest(self, count: int) -> list[Slot]:
        """Returns up to `count` free slots, in the order in which they were freed.

        Allocating one of them waits until it is empty.
        """
        return self.free[:count]

    def reset_order(self) -> None:
        """Forgets the order in which slots were freed. All usable slots must be free."""
        zeros = [0] * len(self.slots)
        self._journal.change([[self.slots, name, zeros[:]] for name in ("freed_order", "freed_at")])


_WARM_STEPS = 16  # memory is allocated in this many parts; if one fails, the earlier parts are kept


def shard_kv_heads(num_kv_heads: int, world_size: int) -> int:
    """Returns the number of key/value heads on each rank.

    As in most engines, the heads are divided evenly. With more ranks than heads, each rank has one
    head, and each head is on ``world_size / num_kv_heads`` ranks.

    Raises:
        InvalidArgument: a number is less than 1, or neither number divides the other.
    """
    if num_kv_heads < 1 or world_size < 1:
        raise invalid(f"{num_kv_heads} KV heads over {world_size} ranks: both must be at least 1")
    if num_kv_heads % world_size == 0:
        return num_kv_heads // world_size
    if world_size % num_kv_heads == 0:
        return 1
    raise invalid(
        f"{num_kv_heads} KV heads can neither be divided among {world_size} ranks nor replicated "
        f"evenly on them",
        limit=num_kv_heads,
    )


def rank_config(model: Any, world_size: int, **overrides: Any) -> KVCacheConfig:
    """Like `KVCacheConfig.from_hf`, but for one of `world_size` tensor-parallel ranks.

    Args:
        model: a transformers configuration.
        world_size: number of ranks that share the KV heads; see `shard_kv_heads`.
        **overrides: as for `from_hf`; `num_kv_heads` is for the whole model, `memory_limit` is per
            rank.

    Raises:
        InvalidArgument: as for `from_hf`, or the heads can neither be divided nor replicated.
    """
    whole = KVCacheConfig.from_hf(model, **overrides)
    return replace(whole, num_kv_heads=shard_kv_heads(whole.num_kv_heads, world_size))


def take_pages(context: Context, config: KVCacheConfig, page: int) -> int:
    """Allocates the cache's memory from the device; returns the number of pages.

    Raises:
        InvalidArgument, OutOfMemory: there is not enough memory for one page per tensor.
    """
    layout = Layout(config, page)
    everything = layout.slot_pages * layout.num_tensors * config.max_batch * page
    wanted = config.memory_limit or min(everything, available_bytes(context))
    wanted -= wanted % page
    with suppress(OutOfMemory):
        for part in range(1, _WARM_STEPS + 1):
            context.warm(wanted * part // _WARM_STEPS)
    taken = min(wanted, context.stats().free_bytes)
    if taken < layout.page_bytes:
        raise invalid(
            f"{taken} bytes are less than one page of {page} bytes in each of "
            f"{layout.num_tensors} tensors ({layout.page_bytes} bytes)",
            size=taken,
            limit=layout.page_bytes,
        )
    return taken // page


def _checked_maxima(ranks: Ranks, failure: Failure | None, values: list[int]) -> list[int]:
    """Returns each number's maximum over the ranks; raises RankFailed if any rank failed."""
    status, *found = ranks.maxima([failure.status if failure else 0, *values])
    if status:
        raise (failure or Failure.from_status(status)).error()
    return found


def agree_on_pages(
    ranks: Ranks, config: KVCacheConfig, page: int, pages: int, failure: Failure | None
) -> int:
    """Returns the minimum number of pages over the ranks. A collective.

    Raises:
        RankFailed: a rank failed.
        InvalidArgument: configurations or page sizes differ.
    """
    shape = zlib.crc32(repr(asdict(replace(config, memory_limit=0))).encode())
    found = _checked_maxima(ranks, failure, [shape, -shape, page, -page, -pages])
    if found[0] != -found[1]:
        raise invalid("the ranks' configurations differ in more than memory_limit")
    if found[2] != -found[3]:
        raise invalid(f"the ranks' page sizes differ: {-found[3]} to {found[2]} bytes")
    return -found[4]


def _too_many(text: str) -> TooManyMappings:
    return TooManyMappings(text, errno=errno.ENOSPC, op="ParallelKVCache")


def _not_supported(text: str, op: str = "ParallelKVCache") -> NotSupported:
    return NotSupported(text, errno=errno.EOPNOTSUPP, op=op)


def _is_refusal(error: BaseException) -> bool:
    """Returns whether the cache itself rejected an argument.

    A rejection by libvmem counts as a failure.
    """
    if isinstance(error, TypeError):  # such as NotGpuWork
        return True
    refusals = InvalidArgument, NotSupported, BadHandle
    return isinstance(error, refusals) and error.op.startswith("KVCache")


class RankManager(Manager):
    """One rank's groups of layers; rejects all calls once the rank has failed.

    Attributes:
        failure: why the rank rejects calls; None if it knows of no failure.
        out_of_mappings: the error message if the last `step` ran out of mappings and `check_step`
            has yet to undo it; otherwise "".
    """

    table = LockstepTable
    failure: Failure | None = None
    out_of_mappings = ""

    def open(self) -> tuple[Group, ...]:
        """Like `Manager.open`, but also raises if this rank must not make calls."""
        groups = super().open()
        if self.failure is not None:
            raise self.failure.error()
        if self.out_of_mappings:
            raise _too_many(f"{self.out_of_mappings}; call check_step, as the other ranks do")
        return groups


_OUT_OF_MAPPINGS = 1  # a status less than that of any `Failure`
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _compared(
    method: Callable[Concatenate[KVCache, _P], _T], *, settles: bool = True
) -> Callable[Concatenate[ParallelKVCache, _P], _T]:
    """Wraps a method whose results the ranks compare.

    For `settles`, see `ParallelKVCache._compare`.
    """

    @wraps(method)
    def compare(self: ParallelKVCache, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        call = partial(method, self, *args, **kwargs)
        return self._compare(method.__name__, call, settles=settles)

    return compare


class ParallelKVCache(KVCache):
    """A `KVCache` on every rank of a group.

    Every rank must make the same calls in the same order. Construction, `check_step`,
    `agreed_step`, `together` and `recover` are collectives; no other call communicates. An object
    that a call returns belongs to its rank: a `SwappedRequest`, for example, must be swapped in on
    every rank or closed on every rank.

    An invalid argument is rejected on every rank, before anything changes; this does not poison the
    rank, and rejections are compared like results. Every other exception *poisons* the rank: from
    then on every call raises it, until `recover`, and the other ranks learn of it in `check_step`.

    Only a shortage of mappings depends on where a rank's pages are in physical memory. If a `step`
    runs out of mappings on one rank, it raises TooManyMappings there; that rank must still call
    `check_step`, where every rank undoes the step.

    Args:
        config: the same on every rank, except for `memory_limit`. `num_kv_heads` is per rank
            (`rank_config`). A `memory_limit` of 0 means 90% of the device's free memory. The memory
            is allocated on construction and kept until `close`.
        group: the ranks' torch.distributed group; None: the default group.
        backend: back end of the context that the cache opens and owns.
        device: this rank's device; None: torch's current CUDA device, or 0 if there is none.

    Raises:
        InvalidArgument: there is no process group, or configurations or page sizes differ. Raised
            on every rank.
        RankFailed: a rank could not open its context or allocate a single page. Raised on every
            rank.
    """

    _manager: RankManager

    def __init__(
        self, config: KVCacheConfig, group: Any = None, backend: str = "auto", device: Any = None
    ) -> None:
        self._closed = True  # set to False once the groups exist
        self._digest = 0
        self._ahead = False  # True if a `step_async` returned 0 and no `step` has followed
        # the row counts before the last step, and that step's stream, for undoing the step
        self._before: tuple[Sequence[int], Any] | None = None
        self._swapped: weakref.WeakSet[SwappedRequest] = weakref.WeakSet()
        self._own: Context | None = None
        if getattr(config, "idle_seconds", 0):
            raise invalid("idle_seconds depends on the clock; it must be 0 with several ranks")
        if getattr(config, "host_prefixes", 0):
            raise invalid(
                f"host_prefixes is {config.host_prefixes}; it must be 0 with several ranks, whose "
                "host memory may keep different prefixes"
            )
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._ranks = ranks = Ranks(group, device_ordinal(device))
        page = pages = 0
        failure = None
        try:
            self._own = context = open_context(
                [config],
                backend,
                device=device,
                pool_high=KEEP_ALL,
                max_mappings=config.max_mappings,
            )
            context.remains.unclaimed = True  # reset by the cache's first call
            page = config.page_size or context.info.granule
            pages = take_pages(context, config, page)
        except Exception as error:
            failure = Failure.of(ranks.rank, error, "init")
        try:
            pages = agree_on_pages(ranks, config, page, pages, failure)
            try:
                context.trim(pages * page)  # frees what the other ranks could not match
                own = replace(config, page_size=page, memory_limit=pages * page, max_mappings=0)
                self._begin(RankManager("KVCache", own, context=context))
            except Exception as error:
                failure = Failure.of(ranks.rank, error, "init")
            _checked_maxima(ranks, failure, [])
        except BaseException:
            with suppress(VMemError):
                self.close()
            raise

    def __repr__(self) -> str:
        if not hasattr(self, "config"):  # construction failed
            return super().__repr__()
        text = f"<KVCache {self._about()}>"
        return f"<ParallelKVCache of rank {self._ranks.rank} of {self._ranks.size}: {text}>"

    # ---- comparing results, propagating failures -------------------------------------------------

    def _compare(
        self, name: str, call: Callable[[], _T], ids: TokenIds | None = None, settles: bool = True
    ) -> _T:
        """Makes a call and adds its result or rejection, and its tokens `ids`, to the digest.

        With `settles`, any growth that a `step_async` started is completed first. Pages promised by
        growth in flight have no owner yet, so whether memory is short would depend on its progress.
        """

        def section() -> _T:
            if settles and self._ahead:
                settle = self._open()[0].pager.settle
                self._answer("settle", partial(settle, None, True))
                self._ahead = False
            return self._answer(name, call, ids)

        return self._section(name, section)

    def _section(self, name: str, call: Callable[[], _T]) -> _T:
        """Runs calls as one section of the journal; an exception that ends it poisons the rank.

        This is necessary because the journal may undo a call that is already in the digest, or keep
        a call that is not. Rejected arguments do not poison the rank.
        """
        entered = False
        try:
            with self._lock, self._journal:
                entered = True
                return call()
        except BaseException as error:
            if entered and not (self._known or _is_refusal(error)):
                self._poison(error, name)
            raise

    def _answer(self, name: str, call: Callable[[], _T], ids: TokenIds | None = None) -> _T:
        reclaimer = self._open()[0].reclaimer
        if ids is not None:
            self._digest = zlib.crc32(ids.data, self._digest)
        try:
            reclaimer.drop_mapping_errors()
            result = call_part(call)  # a subclass may override the method
            reclaimer.drop_mapping_errors()
            reclaimer.raise_errors()  # errors of background batches, which may explain the result
        except BaseException as error:
            if isinstance(error, TooManyMappings) and name == "step":
                self._manager.out_of_mappings = str(error)
                self._note(name, 0)  # the same digest as on the ranks that succeeded
            elif _is_refusal(error):
                self._note(name, type(error).__name__)
            else:
                self._poison(error, name)
            raise
        self._note(name, result)
        return result

    def _note(self, name: str, answer: Any) -> None:
        """Adds to the digest a call's name and result, and the row counts it requested or left."""
        group = self._manager.groups[0]
        rows = group.pager.columns.needs if name in ("step", "step_async") else group.rows
        self._digest = zlib.crc32(rows, zlib.crc32(f"{name} {answer}".encode(), self._digest))

    def _poison(self, error: BaseException, where: str) -> None:
        self._manager.failure = Failure.of(self._ranks.rank, error, where)

    @property
    def _known(self) -> bool:
        """True if a failure is already recorded, so that the other ranks will learn of it."""
        return self._manager.failure is not None or bool(self._manager.out_of_mappings)

    @property
    def failed(self) -> VMemError | None:
        """The error that every call raises, or None if this rank knows of no failure."""
        failure = self._manager.failure
        return failure.error() if failure else None

    def status(self) -> list[int]:
        """Returns three integers for the engine's own all_reduce (MAX); pass its result to `agree`.

        Their magnitudes stay below 2**32 (with very many ranks, about 4096 times the number of
        ranks), so use int64 or float64.
        """
        with self._lock, self._journal:
            failure, lacking = self._manager.failure, bool(self._manager.out_of_mappings)
            own = failure.status if failure else _OUT_OF_MAPPINGS * lacking
            return [own, self._digest, -self._digest]

    def agree(self, maxima: Sequence[int]) -> None:
        """Evaluates the result of the all_reduce over `status`.

        Raises:
            TooManyMappings: a rank ran out of mappings in the last `step`; every rank has undone
                the step, as if it had returned -1, and unmapped all unowned pages.
            RankFailed: a rank failed; from now on every call raises this.
            RanksDiffer: the ranks' calls or results differ; from now on every call raises this.
        """
        status, digest, negative = (int(value) for value in maxima)
        with self._learning("agree"):
            self._agree(status, digest, negative)

    @contextmanager
    def _learning(self, where: str) -> Iterator[None]:
        """Poisons the rank if an unexpected exception ends the block: others may not see it."""
        try:
            yield
        except (VMemError, Reentered):  # an isinstance test below could be interrupted unnoticed
            raise
        except BaseException as error:
            if self._manager.failure is None:
                self._poison(error, where)
            raise

    def _agree(self, status: int, digest: int, negative: int) -> None:
        manager = self._manager
        with self._lock, self._journal:
            reason, manager.out_of_mappings = manager.out_of_mappings, ""
            if status == _OUT_OF_MAPPINGS:
                if digest == -negative:
                    # The rank stays poisoned until the step is undone.
                    self._poison(RuntimeError("interrupted"), "undoing a step")
                    self._take_back()
                    manager.failure = None
                    raise _too_many(
                        reason or "another rank ran out of mappings in the step, which was undone"
                    )
                status = 0
            if not status and digest == -negative:
                return
            failure = Failure.from_status(status)  # 0: the ranks' calls or results differ
            if manager.failure is None or manager.failure.status != failure.status:
                # A rank that failed itself keeps its own record, which has more detail.
                manager.failure = failure
            raise manager.failure.error()

    def check_step(self) -> None:
        """Reduces `status` over the ranks and passes the result to `agree`. A collective.

        Call it between an iteration's cache calls and the launch of the model, unless the engine
        reduces `status` itself.

        Raises:
            TooManyMappings, RankFailed, RanksDiffer: as for `agree`, on every rank.
        """
        with self._learning("check_step"):
            self._agree(*self._ranks.maxima(self.status()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends the block with `check_step` on every rank, even if the block raised.

            with cache.together():
                answer = cache.step(seq_lens)

        Any exception inside poisons the rank, except the cache's own `InvalidArgument` and
        `PrefixEvicted`: every rank raises these, so they propagate as is, without `check_step`.
        Ctrl-C and other exceptions that are not an `Exception` propagate after `check_step`, which
        blocks until the other ranks reach theirs or exit.

        Raises:
            TooManyMappings, RankFailed, RanksDiffer: as for `agree`, on every rank.
        """
        try:
            yield
        except BaseException as error:
            if not self._known:
                bad_argument = isinstance(error, InvalidArgument) and _is_refusal(error)
                if bad_argument or isinstance(error, PrefixEvicted):
                    raise
                self._poison(error, "a block of together()")
            if not isinstance(error, Exception):
                with suppress(Exception):
                    self.check_step()
                raise
        self.check_step()

    # ---- calls that every rank makes -----------------------------------------------------------

    alloc_reqid = _compared(KVCache.alloc_reqid, settles=False)
    """Like `KVCache.alloc_reqid`, but allocates the slot freed last; the result is the same on
    every rank."""

    truncate = _compared(KVCache.truncate)
    """See `KVCache.truncate`; the result is the same on every rank."""

    fork_many = _compared(KVCache.fork_many)
    """See `KVCache.fork_many`; the slots are those freed first."""

    swap_in = _compared(KVCache.swap_in)
    """See `KVCache.swap_in`; the slot is the one freed last."""

    can_admit = _compared(KVCache.can_admit)
    """See `KVCache.can_admit`; the result is the same on every rank."""

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """See `KVCache.free_reqid`."""
        ids = None if tokens is None else TokenIds.of(tokens, namespace)
        call = partial(super().free_reqid, reqid, stream, ids)
        self._compare("free_reqid", call, ids, settles=ids is not None)

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Like `KVCache.step`, with the same result on every rank.

        It completes all growth that a `step_async` started, even for requests whose length in this
        step is 0. It waits for the map calls and makes `stream` (or the CPU, without a stream) wait
        for the zero-fills, which follow the GPU work of the slots' earlier owners.
        `KVCacheConfig.ahead_tokens` has no effect.

        Raises:
            TooManyMappings: this rank is out of mappings. Call `check_step`, where the other ranks
                wait and every rank undoes the step. With a sliding window this is a failure.
            VMemError: this rank failed. It must also call `check_step`.
        """

        def call() -> int:
            self._before = (self._open()[0].rows[:], stream)
            answer = self._answer("step", partial(KVCache.step, self, seq_lens, stream))
            self._ahead = False
            return answer

        return self._section("step", call)

    def agreed_step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Runs `step` and `check_step`, with the same result on every rank. A collective.

        Also returns -1 if only some ranks are out of mappings. No other call can come between the
        two.

        Raises:
            RankFailed, RanksDiffer: as for `agree`, on every rank.
        """
        with suppress(TooManyMappings), self.together():
            return self.step(seq_lens, stream)
        return -1

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """Like `KVCache.step_async`. A second call before `step` first completes the earlier one.

        Unlike `KVCache.step_async`, this waits, since every rank must return the same result. It
        waits for growth that an earlier call started; for the GPU work of earlier owners of the
        slots that grow; and, when memory is short, for the GPU work of freed requests and for the
        copies of promotions, until enough pages are free.

        If this rank is out of mappings, nothing is started, and the next `step` raises.
        """

        def begin() -> int:
            answer = 0
            with suppress(TooManyMappings):
                answer = call_part(partial(KVCache.step_async, self, seq_lens, stream))
            self._ahead = answer == 0
            return answer

        return self._compare("step_async", begin)

    def _take_back(self) -> None:
        """Undoes the last step: every request goes back to its earlier rows and pages.

        Unmaps all unowned pages, including those of recorded prefixes: a rank that completed the
        step may have evicted prefixes that the failed rank still has.
        """
        assert self._before is not None
        rows, stream = self._before
        group = Manager.open(self._manager)[0]
        try:
            if group.window is not None:
                raise _not_supported(
                    "a rank ran out of mappings in a step that cannot be undone because a window "
                    "has moved"
                )
            event = record(stream, group.device)
            for slot in group.table:
                with suppress(TooManyMappings):  # `step_async` growth that failed and was undone
                    group.pager.release(slot)
            for slot in group.table:
                if slot.active:
                    group.disown_beyond(slot, rows[slot.index], event)
            unmap_idle([group], prefixes=True)
            group.reclaimer.drop_mapping_errors()
            group.reclaimer.raise_errors()
            group.pager.runs.relieve()
        except Exception as error:
            self._poison(error, "undoing a step")
            raise
        self._ahead, self._before = False, None

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """See `KVCache.record`."""
        ids = TokenIds.of(tokens, namespace)
        return self._compare("record", partial(super().record, reqid, ids, stream), ids)

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """See `KVCache.match`. Counts as a use of the prefix, so every rank must make this call.

        The lease ends with `alloc_prefix`, `PrefixMatch.release`, or the next `step` that returns
        0, whichever comes first. It does not end when the match is garbage-collected, since that
        happens at different times on different ranks. Every rank must release it at the same point.
        """
        ids = TokenIds.of(tokens, namespace)
        return self._compare("match", partial(super().match, ids, leave), ids, settles=False)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """See `KVCache.alloc_prefix`; the slot is the one freed first.

        If nothing matches, it is the one freed last, as for `alloc_reqid`.
        """
        ids = None
        if not isinstance(tokens, PrefixMatch):
            tokens = ids = TokenIds.of(tokens, namespace)
        return self._compare(
            "alloc_prefix", partial(super().alloc_prefix, tokens, leave, stream), ids
        )

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """See `KVCache.swap_out`.

        Raises:
            MemoryError: this rank's host is out of memory; only this rank failed. Call
                `check_step`.
        """

        def call() -> SwappedRequest:
            swapped = call_part(partial(KVCache.swap_out, self, reqid, stream))
            self._swapped.add(swapped)
            return swapped

        return self._compare("swap_out", call)

    def trim(
        self,
        prefixes: bool | Literal["host"] = False,
        compact: bool | None = None,
        stream: Any = None,
    ) -> int:
        """Unmaps all unowned pages, like `KVCache.trim`; returns 0.

        The context keeps the memory, since the ranks have agreed on its size, so `compact` has no
        effect.
        """
        check(stream)
        self._compare("trim", partial(unmap_idle, self._groups, prefixes))
        return 0

    def move(self, *args: Any, **kwargs: Any) -> Moved:
        """Raises NotSupported.

        Host or peer memory may be full on only one rank, so results would differ.
        """
        raise _not_supported(
            "move: the ranks have agreed only on how much device memory to use", op="KVCache.move"
        )

    @property
    def available_pages(self) -> int:
        """The number of physical pages that requests can still get; the same on every rank."""
        now = self.stats()
        return now.total_pages - now.active_pages

    # ---- failures ------------------------------------------------------------------------------

    def recover(self, stream: Any = None) -> None:
        """Frees everything and makes the ranks' caches identical again. A collective.

        Every request is freed and must be recomputed, swapped requests are closed, and all prefixes
        are dropped, since other ranks may have completed the call in which one rank failed. If a
        rank lost slots or pages to a failed rollback, every rank stops using the same slots and the
        same number of pages.

        Args:
            stream: the stream of the last work on the slots, as in `free_reqid`.

        Raises:
            RankFailed: a rank could not be reset; every rank stays poisoned.
        """
        check(stream)
        manager = self._manager
        group = manager.groups[0]
        with self._lock, self._journal:
            # The rank stays poisoned until every rank is reset.
            self._poison(RuntimeError("interrupted"), "recover")
            manager.out_of_mappings = ""
            try:
                status, have = 0, self._reset(stream)
            except Exception as error:
                self._poison(error, "recover")
                status, have = self.status()[0], [0] * (len(group.table) + 1)
            status, *least = self._ranks.maxima([status, *(-value for value in have)])
            self._agree(status, 0, 0)
            group.reclaimer.limit = -least[0]
            for slot, usable in zip(group.table, least[1:], strict=True):
                if not usable:
                    group.table.mark_broken(slot)
            manager.failure = None

    def _reset(self, stream: Any) -> list[int]:
        """Frees everything.

        Returns the number of usable pages, followed by 1 for each usable slot and 0 for any other.
        """
        (group,) = groups = Manager.open(self._manager)
        event = record(stream, group.device)
        for slot in group.table:
            with suppress(VMemError):  # the growth failed and was rolled back
                group.pager.release(slot)
            if slot.active:
                group.release(slot, event)
        for swapped in list(self._swapped):
            swapped.close()
        unmap_idle(groups, prefixes=True)
        for slot in group.table:
            if slot.rows_lost:
                group.reclaimer.salvage(slot)
        group.reclaimer.errors.clear()
        cast("LockstepTable", group.table).reset_order()
        self._digest, self._ahead = 0, False
        integrity.verify(groups)
        stats = group.context.stats()
        pages = (stats.slab_bytes - stats.quarantined_bytes) // group.layout.page_size
        return [min(group.reclaimer.limit, pages), *(int(not slot.broken) for slot in group.table)]

    # ---- end -----------------------------------------------------------------------------------

    def close(self, stream: Any = None) -> None:
        """Closes the cache on this rank, like `KVCache.close`, and then its context."""
        if not self._closed:
            super().close(stream)
        if self._own is not None:
            self._own.close()
