# SPDX-License-Identifier: MIT
"""Decides which KV pages of an SGLang engine have memory, and for how long.

SGLang considers every page without a request or prefix to be free. A free page is one of:

    idle       backed
    arriving   backed; its id is still being copied from the device
    unbacked   has no memory

Only idle pages are handed out. Pages that SGLang is about to take are backed before it decides to
take them (`prepare`), since its scheduler crashes if an allocation fails.

Only SGLang's scheduler thread calls this module. `tick` unmaps pages that have not been
needed for a while and, immediately, pages above the limit or needed by another engine. To avoid
mapping and unmapping under a steady load, it keeps enough idle pages for the recent peak load, plus
`VMEM_RESERVE` bytes; the pool's own thread maps them while steps run.

With tensor parallelism, each rank has its own pool. All ranks make the same calls, and every
decision depends only on state that is the same on all of them (`ranks`).
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

_TICK = 0.05  # seconds between runs of `tick`
_LOOK = 0.01  # seconds between runs while another engine needs memory or pages are being unmapped
_REPORT = 0.1  # seconds between reports to the ledger and between regular checks of other engines
_START_PATIENCE = 30.0  # seconds to wait for other engines to make room for page 0
_LAST_PATIENCE = 2.0  # seconds to wait for room if no other request is running
_BACKOFF = 0.02  # seconds between attempts to grow after a failed attempt
_RESERVE = 256 << 20
_MOST_RESERVE = 1024  # pages
_PIECE = 64 << 20  # bytes of slabs emptied at a time

log = logging.getLogger("sglang.vmem")


class Arrival(Protocol):
    """A group of freed pages whose ids are being copied to the host.

    Attributes:
        count: number of pages.
    """

    count: int

    def arrived(self) -> bool:
        """Returns true if the copy is complete."""

    def pages(self) -> list[int]:
        """Waits for the copy and returns the ids."""


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
    """Opens a rank's account in its device's ledger; without a ledger, returns a `LocalQuota`.

    The first rank joins first, so it gets `name` even if other ranks are on the same device.

    Args:
        memory: the rank's memory.
        settings: the engine's settings.
        name: the engine's name in the ledger.
        unique: whether to fail if the name is taken, instead of appending a number to it.
        ranks: the engine's ranks; None for a single rank.
        first: true for the first rank.
        identity: the rank's identity in the ledger; 0 for a random identity.

    Raises:
        ValueError: the limit is too small or exceeds the device's memory.
        VMemError: `join_device` failed.
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
        floor=min(settings.floor, limit),  # a floor above the limit would waste memory
        limit=limit,
        least=least,
        virtual=virtual,
        identity=identity,
    )
    return LedgerQuota([(account, 1)], memory.free)


class PagePool:
    """The KV pages of a rank. An SGLang page is a block of `memory`; page 0 is always mapped.

    Args:
        memory: the KV tensors' memory, with page 0 mapped.
        quota: this rank's quota, which grants bytes before they are mapped.
        settings: the engine's settings.
        ranks: the engine's ranks; None for a single rank.

    Attributes:
        allocated: number of pages handed out.
        short: true if a request is short of memory and this is posted to the ledger.
        admits: true if requests may be admitted.
        waits: number of grow operations that steps have waited for.
        hits, queries: number of tokens found in the prefix cache, and number of tokens looked up.
        count_waiting: a function that returns how many pages queued requests need in addition to
            the evictable pages.

    Raises:
        RuntimeError: the ranks have different KV tensors or settings.
        MemoryError: other engines did not make room for page 0.
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
        self._growth: Growth | None = None  # the growth that the pool's thread is mapping
        self._mapping: Future[None] | None = None
        self._step = 0
        self._lacked = self._pressed = self._tidy = False
        self._refused = -math.inf
        self._next = self._ticked = self._reported = 0.0
        self._signals = Signals(self.quota.signals)
        self._busy_until = 0.0
        self._peak = Peak(settings.idle)  # peak of allocated plus requested pages
        self.backing.back_null(_START_PATIENCE)

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Number of pages not handed out, backed or not."""
        return self.geometry.num_blocks - 1 - self.allocated

    @property
    def ready(self) -> int:
        """Number of free pages that are backed and can be handed out now."""
        return len(self.idle) + self._arriving

    def obtainable(self) -> int:
        """Estimates the number of pages that can be made ready without eviction."""
        coming = 0 if self._growth is None else len(self._growth.blocks)
        return self.ready + coming + self._pages_in(self.quota.room(), self.backing.unbacked)

    def most(self) -> int:
        """Returns the number of pages that all requests together may use within the limit."""
        room = self.quota.limit - self.geometry.first_bytes(1)
        return self._pages_in(room, self.geometry.num_blocks - 1)

    def _pages_in(self, room: int, most: int) -> int:
        """Returns how many pages `room` bytes can back in the worst case, at most `most`."""
        if self._bytes_for(most) <= room:
            return most
        low, high = 0, most  # invariant: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._bytes_for(middle) <= room:
                low = middle
            else:
                high = middle
        return low

    def _bytes_for(self, count: int) -> int:
        """Returns the number of bytes that `count` unbacked pages need in the worst case."""
        geometry = self.geometry
        block, page = geometry.classes[0].block_bytes, geometry.page_size
        if geometry.classes[1:] or (block % page and page % block):
            return geometry.scattered_bytes(count)
        together = max(1, page // block)  # pages that share a physical page are backed together
        return geometry.first_bytes(-(-count // together) * together)

    def free_pages(self) -> list[int]:
        """Returns the ids of all free pages; waits for ids that the device is still copying."""
        self._arrive(wait=True)
        unbacked = (b for b in range(1, self.geometry.num_blocks) if not self.backing.is_backed(b))
        return sorted([*self.idle, *unbacked])

    # ---- demand ----------------------------------------------------------------------------------

    def prepare(self, count: int, *, ask: bool = False) -> bool:
        """Backs pages until `count` are ready. Returns false if memory runs out.

        Args:
            count: number of pages.
            ask: whether to post a memory shortage to the ledger.
        """
        now = self.ranks.now()
        self._peak.note(now, self.allocated + count)
        if self.ready < count:
            self._finish_growth()
            self._collect()
        lacks = count - self.ready
        if lacks > 0 and now >= self._refused + _BACKOFF:
            if not self.ranks.alone:
                self.quota.pressure()  # makes the ranks agree on current numbers
            # Back more than needed, so that the step's other requests do not each need a call.
            if not self._back(lacks + self._ahead):
                self._refused = now
        lacks = count - self.ready
        if lacks > 0 and ask:
            self.ask(lacks)
        return lacks <= 0

    @property
    def _ahead(self) -> int:
        """Number of pages to back in addition to those that a step waits for."""
        return 0 if self._pressed else self.reserve // 2

    def ask(self, count: int) -> None:
        """Tells other engines, through the ledger, that a request is short of `count` pages.

        The posted bytes also cover the requests queued behind it and the pages to map ahead;
        otherwise each request in turn would wait for other engines. They include the engine's
        room, since the ledger counts only bytes beyond the room as a shortage.
        """
        self._lacked = True
        count = max(count, self.count_waiting() - self.obtainable()) + self._ahead
        need = self.geometry.most_bytes(count) + self.quota.room()
        need = min(need, max(0, self.quota.limit - self.quota.used))
        if need or self.short:
            self.quota.want(need)
        self.short = need > 0

    def wait_for(self, count: int) -> bool:
        """Calls `prepare` until it succeeds, giving other engines 2 seconds to free memory."""
        for _ in range(int(_LAST_PATIENCE / _BACKOFF)):
            self._refused = -math.inf
            if self.prepare(count, ask=True):
                return True
            if not self.short:
                return False
            time.sleep(_BACKOFF)
        return False

    def take(self, count: int) -> list[int] | None:
        """Hands out `count` pages, from the fullest physical pages first.

        Returns:
            The pages, or None if memory runs out.
        """
        if not self.prepare(count):
            return None
        while len(self.idle) < count:
            self._arrive(wait=True)
        self.allocated += count
        return self.idle.take(count)

    def give(self, pages: Iterable[int]) -> None:
        """Frees pages that were handed out."""
        pages = list(pages)
        self.allocated -= len(pages)
        self._add(pages)

    def give_later(self, arrival: Arrival) -> None:
        """Frees pages whose ids are still being copied to the host."""
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
        """Backs `count` pages and waits for the driver; returns false if it backed fewer."""
        growth = self.backing.begin(count)
        if growth is None:
            return False
        growth.run(self)
        self.waits += bool(growth.runs)
        return self._finish(growth) >= count

    def _finish(self, growth: Growth) -> int:
        """Records a grow operation, as failed if any rank failed; returns its page count."""
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
        """Maps runs on this rank for `Growth.run`; returns the error message, or None."""
        try:
            self.memory.grow(runs)
        except VMemError as error:
            return str(error)
        return None

    def _begin_growth(self, count: int) -> None:
        """Makes the pool's thread map up to `count` pages ahead of need."""
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
        """Waits for the growth in the pool's thread, if any, and records it."""
        if self._growth is not None and self._mapping is not None:
            growth, self._growth = self._growth, None
            self._mapping.result()
            self._finish(growth)

    # ---- steps -----------------------------------------------------------------------------------

    def step_begins(self, stream: object) -> None:
        """Must be called before a step is launched on `stream` (None on the CPU)."""
        self._step += 1
        self._busy_until = self.ranks.now() + self._settings.idle
        self.memory.step_begins(stream)

    def step_ends(self) -> None:
        """Must be called after a step's launch, once all its work is on the stream."""
        self.memory.step_ends(self._step)

    # ---- releasing memory ------------------------------------------------------------------------

    def round_state(self) -> RoundState | None:
        """Returns the state that rank 0 sends before a `tick`; None if no `tick` is due yet."""
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
        """Applies rank 0's state, sent before a `tick`."""
        self.ranks.receive(state)
        self._may_arrive = state.arrived
        if state.mapped:
            self._finish_growth()
        if state.called:
            self._answer_call()

    def _is_called(self, now: float) -> bool:
        """Returns true if another engine needs memory, or freed some that this one needs."""
        return now >= self._ticked + _LOOK and self._signals.take(self.short)

    def _answer_call(self) -> None:
        """Makes the next `tick` run at once, check on other engines and try to grow."""
        self._next = self._reported = 0.0
        self._refused = -math.inf
        # keeps the request posted, since `tick` checks on other engines before it tries to grow
        self._lacked |= self.short

    def tick(self, count_cached: Callable[[], int], evict: Callable[[int], None]) -> bool:
        """Unmaps pages that are not needed and backs pages ahead of need.

        Runs at most once every 50 ms, or more often if another engine sends a signal or while pages
        are being unmapped.

        Args:
            count_cached: a function that returns the number of pages that only prefixes hold.
            evict: a function that evicts prefixes holding a given number of pages, which are then
                passed to `give` or `give_later`.

        Returns:
            True if a request that did not fit may be retried.
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
        ):  # not sooner, so that several pages are mapped at a time
            self._begin_growth(self.reserve // 2 - self.ready)
        self._send()
        if at_rest and self._tidy and not self.backing.unconfirmed:
            self._tidy = self.memory.compact(_PIECE, self._step) > 0
        self._next = now + (_LOOK if self.backing.unconfirmed else _TICK)
        return self.short

    def _check_others(
        self, now: float, at_rest: bool, used: int, cached: int, evict: Callable[[int], None]
    ) -> None:
        """Frees memory that other engines need and reports to the ledger."""
        if self.short and not self._lacked:
            self.quota.want(0)
            self.short = False
        self._lacked = False
        excess, has_more = self.quota.pressure()
        asleep = self.quota.asleep
        self._pressed = has_more or excess > 0
        # An engine with a queue that kept admitting requests would never free memory: each request
        # that finishes would be replaced by the next.
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
        """Unmaps about `nbytes` bytes: idle pages first, then least recently used prefixes."""
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
                log.warning("vmem: unmapping pages failed and will be retried: %s", failure)
            else:
                self._refused = -math.inf

    def clear(self, timeout: float = 30.0) -> None:
        """Frees all pages and waits until all except page 0 are unmapped.

        Raises:
            TimeoutError: pages are still mapped after `timeout` seconds.
        """
        self._finish_growth()
        self._arrive(wait=True)
        self.allocated, self._busy_until = 0, -math.inf  # -inf: nothing is mapped ahead
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
            held: ids of the pages handed out.
        """
        wrong = self.backing.check()
        free = self.free_pages()
        if sorted([*free, *held]) != list(range(1, self.geometry.num_blocks)):
            wrong.append("a page is neither free nor held, or both")
        if len(free) != self.free:
            wrong.append(f"{len(free)} pages are free, but the count is {self.free}")
        return wrong
