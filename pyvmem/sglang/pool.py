# SPDX-License-Identifier: MIT
"""Decides which KV pages of an SGLang engine have memory, and for how long.

SGLang counts every page without a request or prefix as free. A free page is

    idle       backed
    arriving   backed; its id is being copied from the device
    unbacked       without memory

and only idle pages are handed out. Pages that SGLang is about to take are made idle before it
decides (`prepare`), since its scheduler crashes if an allocation fails.

Only the thread of SGLang's scheduler calls this module. `tick` unmaps pages that were not needed
for a while, and at once those above the limit or needed by another engine. To avoid mapping and
unmapping under a steady load, as many pages stay idle as the load took lately, and `VMEM_RESERVE`
bytes more; a thread of the pool maps these while steps run.

With tensor parallelism each rank has a pool. All ranks make the same calls, and every decision
depends only on state that is equal on all of them (`ranks`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from pyvmem.elastic.backing import Backing, Growth
from pyvmem.elastic.geometry import Run
from pyvmem.elastic.idle_blocks import IdleBlocks
from pyvmem.elastic.memory import KVMemory
from pyvmem.elastic.peak import Peak
from pyvmem.elastic.quota import LedgerQuota, LocalQuota, Signals, join_device
from pyvmem.elastic.settings import Settings
from pyvmem.errors import VMemError
from pyvmem.ledger.accounts import Ledger, device_of
from pyvmem.sglang.ranks import Quota, Ranks, RoundState, SingleRank

__all__ = ["Arrival", "PagePool", "join"]

_TICK = 0.05  # s between rounds of `tick`
_LOOK = 0.01  # s from a round to one that another engine's signal or an unmap calls for
_REPORT = 0.1  # s between reports to the ledger, and checks that no signal calls for
_START_PATIENCE = 30.0  # s for other engines to leave room for page 0
_LAST_PATIENCE = 2.0  # s for them to leave room for a request that runs alone
_BACKOFF = 0.02  # s between attempts to grow after a refusal
_RESERVE = 256 << 20
_MOST_RESERVE = 1024  # pages
_PIECE = 64 << 20  # bytes of slabs emptied at a time

log = logging.getLogger("sglang.vmem")


class Arrival(Protocol):
    """Freed pages whose ids are being copied to the host.

    Attributes:
        count: number of pages.
    """

    count: int

    def arrived(self) -> bool:
        """Returns true if the copy has ended."""

    def pages(self) -> list[int]:
        """Waits for the copy, and returns the ids."""


def join(
    memory: KVMemory,
    settings: Settings,
    name: str,
    *,
    unique: bool,
    ranks: Ranks | None = None,
    first: bool = True,
    identity: int = 0,
) -> Quota:
    """Opens a rank's account in the ledger of its device; without a ledger, returns a `LocalQuota`.

    The first rank joins before the others, which may be on the same device, and so gets `name`.

    Args:
        memory: memory of the rank.
        settings: settings of the engine.
        name: name of the engine in the ledger.
        unique: fail if the name is taken; otherwise a number is appended to it.
        ranks: ranks of the engine; None for a single one.
        first: this is the first rank.
        identity: identity in the ledger; 0 for a random one.

    Raises:
        ValueError: the limit is too small, or exceeds the device's memory.
        VMemError: from `join_device`.
    """
    ranks = ranks or SingleRank()
    if not first:
        ranks.least(0)
    quota = _join(memory, settings, name, unique=unique and first, identity=identity)
    if first:
        ranks.least(0)
    return quota


def _join(memory: KVMemory, settings: Settings, name: str, *, unique: bool, identity: int) -> Quota:
    geometry, total = memory.geometry, memory.total()
    settings.check_device(total)
    virtual = min(geometry.most_bytes(geometry.num_blocks), total)
    limit = virtual if settings.limit is None else min(settings.limit, virtual)
    least = geometry.most_bytes(2)
    if limit < least:
        raise ValueError(f"VMEM_LIMIT={limit}: page 0 and one page need {least} bytes")
    if settings.ledger is None:
        return LocalQuota(limit, memory.free)
    info = memory.context.info
    device, folder = device_of(info.device_name, info.uuid), settings.folder
    with Ledger(device, settings.capacity, folder) as ledger:
        limit = min(limit, ledger.capacity or limit)
    account = join_device(
        device,
        folder,
        name,
        unique=unique,
        capacity=settings.capacity,
        floor=min(settings.floor, limit),  # it cannot use more, others can
        limit=limit,
        least=least,
        virtual=virtual,
        identity=identity,
    )
    return LedgerQuota([(account, 1)], memory.free)


class PagePool:
    """The KV pages of one rank. An SGLang page is a block of `memory`; page 0 stays mapped.

    Args:
        memory: memory of the KV tensors, with page 0 mapped.
        quota: quota of this rank; grants bytes before they are mapped.
        settings: settings of the engine.
        ranks: ranks of the engine; None for a single one.

    Attributes:
        allocated: number of pages that were handed out.
        short: a request lacked memory, as of the last check.
        admits: requests may be admitted.
        waits: number of growths for which a step waited.
        hits, queries: tokens found in the prefix cache, and looked up.
        count_waiting: returns the pages that queued requests need beyond evictable ones.

    Raises:
        RuntimeError: the ranks have different KV tensors or settings.
        MemoryError: other engines leave no room for page 0.
    """

    def __init__(
        self, memory: KVMemory, quota: Quota, settings: Settings, ranks: Ranks | None = None
    ) -> None:
        self.ranks = ranks or SingleRank()
        self.ranks.same(memory.geometry, "the KV tensors or VMEM_PAGE_SIZE")
        self.ranks.same(settings, "the variables VMEM_*")
        self.memory, self.quota = memory, self.ranks.agree(quota)
        self.geometry = memory.geometry
        self.backing = Backing(self.geometry, self.quota)
        self.idle = IdleBlocks(self.geometry.group_unit)
        self.allocated = self.waits = self.hits = self.queries = 0
        self.short, self.admits = False, True
        self.count_waiting: Callable[[], int] = lambda: 0
        reserve = _RESERVE if settings.reserve is None else settings.reserve
        reserve = min(reserve, self.quota.limit // 8)
        self.reserve = min(reserve // self.geometry.block_bytes, _MOST_RESERVE)
        self._settings = settings
        self._arrivals: deque[Arrival] = deque()
        self._arriving = self._arrived = self._may_arrive = 0
        self._mapper = ThreadPoolExecutor(1, "vmem-map")
        self._growth: Growth | None = None  # being mapped by the thread
        self._mapping: Future[None] | None = None
        self._step = 0
        self._lacked = self._pressed = self._tidy = False
        self._refused = -math.inf
        self._next = self._ticked = self._reported = 0.0
        self._signals = Signals(self.quota.signals)
        self._busy_until = 0.0
        self._peak = Peak(settings.idle)  # of pages allocated and requested
        self.backing.back_null(_START_PATIENCE)

    # ---- questions -------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Number of pages that are not handed out, backed or not."""
        return self.geometry.num_blocks - 1 - self.allocated

    @property
    def ready(self) -> int:
        """Number of free pages that are backed: they can be taken now."""
        return len(self.idle) + self._arriving

    def obtainable(self) -> int:
        """Returns the number of pages that could be ready without eviction; an estimate."""
        coming = 0 if self._growth is None else len(self._growth.blocks)
        return self.ready + coming + self._pages_in(self.quota.room(), self.backing.unbacked)

    def most(self) -> int:
        """Returns the number of pages that the current limit allows all requests together."""
        room = self.quota.limit - self.geometry.first_bytes(1)
        return self._pages_in(room, self.geometry.num_blocks - 1)

    def _pages_in(self, room: int, most: int) -> int:
        """Returns how many unbacked pages, up to `most`, `room` bytes can back at worst."""
        if self._bytes_for(most) <= room:
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._bytes_for(middle) <= room:
                low = middle
            else:
                high = middle
        return low

    def _bytes_for(self, count: int) -> int:
        """Returns the bytes that `count` unbacked pages need in the worst case."""
        geometry = self.geometry
        block, page = geometry.classes[0].block_bytes, geometry.page_size
        if geometry.classes[1:] or (block % page and page % block):
            return geometry.scattered_bytes(count)
        together = max(1, page // block)  # SGLang pages on a physical page are backed together
        return geometry.first_bytes(-(-count // together) * together)

    def free_pages(self) -> list[int]:
        """Returns the ids of all free pages; waits for those that are arriving."""
        self._arrive(wait=True)
        unbacked = (b for b in range(1, self.geometry.num_blocks) if not self.backing.is_backed(b))
        return sorted([*self.idle, *unbacked])

    # ---- demand ----------------------------------------------------------------------------------

    def prepare(self, count: int, *, ask: bool = False) -> bool:
        """Backs pages until `count` are ready; returns false if memory allows fewer.

        Args:
            count: number of pages.
            ask: post missing pages to the ledger, for other engines to see.
        """
        now = self.ranks.now()
        self._peak.note(now, self.allocated + count)
        if self.ready < count:
            self._finish_growth()
            self._collect()
        lacks = count - self.ready
        if lacks > 0 and now >= self._refused + _BACKOFF:
            if not self.ranks.alone:
                self.quota.pressure()  # the ranks agree on current numbers
            # More than needed: other requests of this step would each wait for a call.
            if not self._back(lacks + self._ahead):
                self._refused = now
        lacks = count - self.ready
        if lacks > 0 and ask:
            self.ask(lacks)
        return lacks <= 0

    @property
    def _ahead(self) -> int:
        """Number of pages to back beyond those that a step waits for."""
        return 0 if self._pressed else self.reserve // 2

    def ask(self, count: int) -> None:
        """Posts to the ledger that a request lacks `count` pages, for other engines to see.

        Includes what the queue behind it lacks and what is mapped ahead, since each request would
        otherwise wait for other engines in turn. The ledger compares the sum with the engine's
        room, so that is added.
        """
        self._lacked = True
        count = max(count, self.count_waiting() - self.obtainable()) + self._ahead
        need = self.geometry.most_bytes(count) + self.quota.room()
        need = min(need, max(0, self.quota.limit - self.quota.used))
        if need or self.short:
            self.quota.want(need)
        self.short = need > 0

    def wait_for(self, count: int) -> bool:
        """Calls `prepare` until it succeeds or other engines had 2 seconds to give memory back."""
        for _ in range(int(_LAST_PATIENCE / _BACKOFF)):
            self._refused = -math.inf
            if self.prepare(count, ask=True):
                return True
            if not self.short:
                return False
            time.sleep(_BACKOFF)
        return False

    def take(self, count: int) -> list[int] | None:
        """Hands out `count` pages, of the fullest physical pages first; None if too few."""
        if not self.prepare(count):
            return None
        while len(self.idle) < count:
            self._arrive(wait=True)
        self.allocated += count
        return self.idle.take(count)

    def give(self, pages: Iterable[int]) -> None:
        """Takes back pages, which become free."""
        pages = list(pages)
        self.allocated -= len(pages)
        self._add(pages)

    def give_later(self, arrival: Arrival) -> None:
        """Takes back pages whose ids the host does not know yet."""
        self.allocated -= arrival.count
        self._arriving += arrival.count
        self._arrivals.append(arrival)

    def _add(self, pages: list[int]) -> None:
        for page in pages:
            if not self.backing.is_backed(page) or page in self.idle:
                raise AssertionError(f"page {page} was freed twice, or was never handed out")
        self.idle.add(pages)

    def _arrive(self, wait: bool = False) -> None:
        while self._arrivals and (wait or self._has_arrived()):
            arrival = self._arrivals.popleft()
            self._arriving -= arrival.count
            self._arrived += 1
            self._add(arrival.pages())

    def _has_arrived(self) -> bool:
        if self.ranks.alone:
            return self._arrivals[0].arrived()
        return self._arrived < self._may_arrive

    def _back(self, count: int) -> bool:
        """Backs up to `count` pages and waits for the driver; returns false if it backs fewer."""
        growth = self.backing.begin(count)
        if growth is None:
            return False
        growth.run(self)
        self.waits += bool(growth.runs)
        return self._finish(growth) >= count

    def _finish(self, growth: Growth) -> int:
        """Records a growth, as failed unless it succeeded on all ranks; returns the pages added."""
        if growth.runs and not self.ranks.alone:
            (every,) = self.ranks.least(growth.failure is None)
            if growth.failure is None and not every:
                self.memory.drop(growth.runs)
                growth.failure = "another rank failed"
        pages = self.backing.finish(growth)
        self.idle.add(pages)
        if growth.failure is not None:
            log.warning("vmem: %d bytes cannot be mapped: %s", growth.nbytes, growth.failure)
        return len(pages)

    def grow(self, runs: list[Run]) -> str | None:
        """Maps runs on this rank, and returns the error message or None; `Growth.run` calls it."""
        try:
            self.memory.grow(runs)
        except VMemError as error:
            return str(error)
        return None

    def _begin_growth(self, count: int) -> None:
        """Starts mapping memory for up to `count` pages in the thread, ahead of need."""
        if self._growth is not None or count <= 0 or self.ranks.now() < self._refused + _REPORT:
            return
        growth = self.backing.begin(count)
        if growth is None:
            self._refused = self.ranks.now()
        elif not growth.runs:
            self._finish(growth)
        else:
            self._growth, self._mapping = growth, self._mapper.submit(growth.run, self)

    def _finish_growth(self) -> None:
        """Waits for the thread's growth, if there is one, and records it."""
        if self._growth is not None and self._mapping is not None:
            growth, self._growth = self._growth, None
            self._mapping.result()
            self._finish(growth)

    # ---- steps -----------------------------------------------------------------------------------

    def step_begins(self, stream: object) -> None:
        """Called before the launch of a step on `stream`; None on the CPU."""
        self._step += 1
        self._busy_until = self.ranks.now() + self._settings.idle
        self.memory.step_begins(stream)

    def step_ends(self) -> None:
        """Called after the launch of a step: all its work is on the stream."""
        self.memory.step_ends(self._step)

    # ---- giving back -----------------------------------------------------------------------------

    def round_state(self) -> RoundState | None:
        """Returns the state that rank 0 sends before a `tick`; None if that is not due yet."""
        now = time.monotonic()
        called = self._is_called(now)
        if now < self._next and not called:
            return None
        arrived = next(
            (i for i, one in enumerate(self._arrivals) if not one.arrived()), len(self._arrivals)
        )
        mapped = self._mapping is not None and self._mapping.done()
        return RoundState(now, self._arrived + arrived, mapped, called)

    def receive(self, state: RoundState) -> None:
        """Takes over rank 0's state; the next `tick` is due."""
        self.ranks.receive(state)
        self._may_arrive = state.arrived
        if state.mapped:
            self._finish_growth()
        if state.called:
            self._answer_call()

    def _is_called(self, now: float) -> bool:
        """Returns true if another engine asked for memory, or gave some that this one lacks."""
        return now >= self._ticked + _LOOK and self._signals.take(self.short)

    def _answer_call(self) -> None:
        """Makes a round due, a check of other engines, and an attempt to grow."""
        self._next = self._reported = 0.0
        self._refused = -math.inf
        self._lacked |= self.short  # the attempt comes after the check

    def tick(self, count_cached: Callable[[], int], evict: Callable[[int], None]) -> bool:
        """Unmaps pages that are not needed, backs pages ahead.

        Does so every 50 ms, and sooner after another engine's signal and while pages are unmapped.

        Args:
            count_cached: returns the number of pages that only prefixes hold.
            evict: evicts prefixes of this many pages, and so calls `give`.

        Returns:
            True if a refused request may be tried again.
        """
        now = self.ranks.now()
        if self.ranks.alone and self._is_called(now):
            self._answer_call()
        if now < self._next:
            return False
        self._ticked = now
        if self.ranks.alone and self._mapping is not None and self._mapping.done():
            self._finish_growth()
        self._collect()
        cached = count_cached()
        used = self.allocated - cached
        self._peak.note(now, self.allocated)
        at_rest = not used and now > self._busy_until
        if self._settings.prefix is not None:
            evict(self._count(cached * self.geometry.block_bytes - self._settings.prefix))
        if now > self._reported + _REPORT:
            self._reported = now
            self._check_others(now, at_rest, used, cached, evict)
        keep = 0 if at_rest else self.reserve + self._peak.most - self.allocated
        surplus = len(self.idle) - max(0, keep)
        if surplus > (0 if at_rest else self.reserve // 2):
            self._retire(self.backing.emptied_first(self.idle, surplus))
        elif self.ready < self.reserve // 4 and not (
            at_rest or self._pressed or self.quota.asleep
        ):  # several at a time
            self._begin_growth(self.reserve // 2 - self.ready)
        self._send()
        if at_rest and self._tidy and not self.backing.unconfirmed:
            self._tidy = self.memory.compact(_PIECE, self._step) > 0
        self._next = now + (_LOOK if self.backing.unconfirmed else _TICK)
        return self.short

    def _check_others(
        self, now: float, at_rest: bool, used: int, cached: int, evict: Callable[[int], None]
    ) -> None:
        """Gives back what other engines need, and reports to the ledger."""
        if self.short and not self._lacked:
            self.quota.want(0)
            self.short = False
        self._lacked = False
        excess, has_more = self.quota.pressure()
        asleep = self.quota.asleep
        self._pressed = has_more or excess > 0
        # Otherwise an engine with a queue would never give memory back: each request that ends
        # makes room for the next.
        self.admits = not (has_more or asleep)
        owed = self.backing.owed(excess, now, at_rest, self._settings.floor)
        if asleep and not used:
            owed = self.backing.mapped_bytes
        if owed:
            self._shrink(owed, evict)
        size = self.geometry.block_bytes
        self.quota.report(
            in_use=used * size,
            cached=cached * size,
            maps=self.backing.counters.growths,
            waits=self.waits,
            hits=self.hits,
            queries=self.queries,
            handles=self.memory.context.stats().mappings,
            sleeps=1,
        )

    def _count(self, nbytes: int) -> int:
        return max(0, -(-nbytes // self.geometry.block_bytes))

    def _retire(self, pages: list[int]) -> int:
        if not pages:
            return 0
        self.idle.remove(pages)
        self._tidy = True
        return self.backing.retire(pages)

    def _shrink(self, nbytes: int, evict: Callable[[int], None]) -> None:
        """Unmaps about `nbytes` bytes: idle pages, then least recently used prefixes."""
        for _ in range(4):
            count = self._count(nbytes)
            nbytes -= self._retire(self.backing.emptied_first(self.idle, count, at_least=True))
            before = self.free
            if nbytes > 0:
                evict(self._count(nbytes))
                self._arrive(wait=True)
            if self.free == before:
                return

    def _send(self) -> None:
        """Unmaps released pages in the background, after the last launched step."""
        for one in self.backing.send():
            self.memory.release(one.number, one.runs, self._step)

    def _collect(self) -> None:
        self._arrive()
        if not self.backing.unconfirmed:
            return
        for number, failure in self.ranks.finished(self.memory.finished()).items():
            self.backing.confirm(number, failure or None)
            if failure:
                log.warning("vmem: pages cannot be unmapped, tried again: %s", failure)
            else:
                self._refused = -math.inf

    def clear(self, timeout: float = 30.0) -> None:
        """Makes all pages free, and waits until all but page 0 are unmapped.

        Raises:
            TimeoutError: pages are still mapped after `timeout` seconds.
        """
        self._finish_growth()
        self._arrive(wait=True)
        self.allocated, self._busy_until = 0, -math.inf  # nothing is to be mapped ahead
        every = range(1, self.geometry.num_blocks)
        self.idle.add(page for page in every if self.backing.is_backed(page))
        self._retire(list(self.idle))
        end = time.monotonic() + timeout
        while self.backing.outbox or self.backing.unconfirmed:
            self._send()
            self._collect()
            if time.monotonic() > end:
                raise TimeoutError(f"pages were not unmapped within {timeout} s")
            time.sleep(0.001)
        while self.memory.compact(_PIECE, self._step):
            pass
        self._tidy = False

    def check(self, held: Sequence[int]) -> list[str]:
        """Checks the records; returns a message for each inconsistency. Slow.

        Args:
            held: ids of the pages that are handed out.
        """
        wrong = self.backing.check()
        free = self.free_pages()
        if sorted([*free, *held]) != list(range(1, self.geometry.num_blocks)):
            wrong.append("a page is neither free nor held, or both")
        if len(free) != self.free:
            wrong.append(f"{len(free)} pages are free, the count says {self.free}")
        return wrong
