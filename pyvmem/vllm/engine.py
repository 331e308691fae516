# SPDX-License-Identifier: MIT
"""Decides which blocks of an engine are backed, in its scheduler's process.

A block is in one of four states:

    used           held by a request
    cached         free, with a prefix that a later request may hit    | in vLLM's free queue,
    idle           free, with no contents                              | idle blocks first
    unbacked       has no memory

vLLM gets idle blocks first; then unbacked blocks are backed; then vLLM evicts cached blocks. The
keeper thread backs blocks ahead of need so that steps seldom wait for the driver. It retires idle
blocks that have not been needed for a while; if the engine's limit falls or another engine on the
GPU is short of memory, it does so immediately. Prefixes are evicted last.

If blocks share pages, a page is freed once all its blocks are idle. So idle blocks of the fullest
pages are handed out first, and if another engine wants memory, prefixes are moved off nearly empty
pages (`Mover`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pyvmem.elastic.backing import Backing, Growth, Release
from pyvmem.elastic.geometry import Geometry
from pyvmem.elastic.idle_blocks import IdleBlocks
from pyvmem.elastic.metrics import identity_of
from pyvmem.elastic.peak import Peak
from pyvmem.elastic.quota import LedgerQuota, LocalQuota, Signals
from pyvmem.elastic.settings import Settings
from pyvmem.ledger.accounts import engine_name
from pyvmem.vllm.channel import RankLost, Ranks
from pyvmem.vllm.mover import Mover
from pyvmem.vllm.offload import host_bytes
from pyvmem.vllm.offload_holds import WORTH, Holds
from pyvmem.vllm.rank_discovery import connect
from pyvmem.vllm.remote import join_ledgers

__all__ = ["ElasticEngine"]

_TICK = 0.05  # seconds between scans for idle blocks
_LOOK = 0.01  # seconds between checks for finished unmaps and, if idle, other engines' signals
_PIECE = 64 << 20  # bytes of slabs compacted at a time, while steps wait
_REPORT = 0.1  # seconds between reports to the ledger, and between checks of a busy engine
_BACKOFF = 0.02  # seconds between attempts to grow while a request waits for memory
_PATIENCE = 0.25  # seconds between attempts to grow while no request waits for memory
_START_PATIENCE = 30.0  # seconds to wait for other engines to make room for the null block
_RESERVE = 256 << 20
_RECENT = 5.0  # seconds; the largest step in this time determines how much is backed ahead
_MOST_RESERVE = 1024  # blocks
# prefixes are moved if mapped/live bytes exceed this ratio for this many seconds
_SPREAD, _SPREAD_FOR = 1.25, 1.0
_ROUNDS = 4  # eviction passes per check of other engines' needs

log = logging.getLogger("vllm.vmem")


class ElasticEngine:
    """Manages the memory of one engine on behalf of its scheduler.

    Methods must be called with `lock` held unless they say otherwise.

    Args:
        config: the `VllmConfig`.
        kv_cache_config: the `KVCacheConfig`.
        pool: the scheduler's `BlockPool`, with no block in use yet.
        connector: the scheduler's KV connector, or None.

    Attributes:
        lock: held by the scheduler while it runs, and by the keeper.
        count_waiting: a function that returns how many blocks queued requests may take in a step.
        count_queued: a function that returns how many blocks all queued requests need.
        publish_events: a function that publishes the evictions since the last step as KV events.
        may_gather: whether a request has run since `gather` last freed blocks.
        asleep: whether `vmem` had ordered the engine to sleep as of the last check; a sleeping
            engine does not admit requests.

    Raises:
        ValueError: the limit is too small for one request, or exceeds the device's memory.
        MemoryError: other engines left no room for the null block.
    """

    def __init__(self, config: Any, kv_cache_config: Any, pool: Any, connector: Any = None) -> None:
        self.settings = Settings.read()
        self.lock = threading.RLock()
        self.pool = pool
        self.ranks = Ranks(connect(config, self.settings))
        geometry = self.ranks.geometry()
        if geometry.num_blocks != pool.num_gpu_blocks:
            raise RuntimeError(
                f"the workers have {geometry.num_blocks} blocks, the scheduler has "
                f"{pool.num_gpu_blocks}"
            )
        total = self.ranks.total()
        self.settings.check_device(total)
        virtual = min(geometry.most_bytes(geometry.num_blocks), total)
        limit = virtual if self.settings.limit is None else self.settings.limit
        least = self._least(config, kv_cache_config.kv_cache_groups, geometry)
        if limit < least:
            raise ValueError(
                f"VMEM_LIMIT={limit}: one request of max_model_len="
                f"{config.model_config.max_model_len} tokens needs {least} bytes; raise the limit "
                "or lower --max-model-len"
            )
        self.least = least
        self.quota = self._join(config, min(limit, virtual), virtual)
        self._limit = self.quota.limit  # the limit as of the keeper's last pass
        self.backing = Backing(geometry, self.quota)
        self.waits = self.hits = self.queries = 0
        reserve = self.settings.reserve if self.settings.reserve is not None else _RESERVE
        reserve = min(reserve, limit // 8)
        self.reserve_blocks = min(reserve // geometry.block_bytes, _MOST_RESERVE)
        self._most_ahead = min(limit // 8 // geometry.block_bytes, _MOST_RESERVE)
        self._ahead = self.reserve_blocks  # number of idle blocks that the keeper maintains
        self._batch = self.reserve_blocks // 2  # refill when this many idle blocks are missing
        # the number of blocks that the largest recent step took, and when it took them
        self._largest, self._largest_at = 0, 0.0
        # all three describe the step being scheduled
        self._taken, self._waited, self._lacked = 0, False, False
        self._denied = False  # a request for memory failed in this step
        self.may_gather, self.asleep = True, False
        self.idle = IdleBlocks(geometry.group_unit)
        self.holds = Holds(connector, len(self.ranks.ranks))
        self.mover = Mover(pool, self.backing, self.idle, self.holds)
        self._watch_pool()
        self.count_waiting: Callable[[], int] = lambda: 0
        self.count_queued: Callable[[], int] = lambda: 0
        self.publish_events: Callable[[], None] = lambda: None
        self._refused = -math.inf  # time of the last attempt to grow that fell short
        self._step = self._ended = 0
        self._peak = Peak(self.settings.idle)  # tracks the peak number of blocks with contents
        self._busy_until = 0.0
        self._background: Growth | None = None
        self._grown = threading.Event()
        self._wake = threading.Event()
        self._stopped = False
        self._tidy = self._short = self._paused = self._has_more = self._pressed = False
        self._next = self._reported = self._dense_at = 0.0
        self._signals = Signals(self.quota.signals)
        self._seen: tuple[int, ...] | None = None  # the state at the last idle check
        self._thread = threading.Thread(
            target=_run_keeper,
            args=(weakref.ref(self), self._wake),
            name="vmem-keeper",
            daemon=True,
        )
        self._take_over()

    @staticmethod
    def _least(config: Any, groups: Any, geometry: Geometry) -> int:
        """Returns the number of bytes that one request of `max_model_len` tokens needs."""
        blocks = 1
        for group in groups:
            spec = group.kv_cache_spec
            blocks += -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        return geometry.most_bytes(min(blocks, geometry.num_blocks))

    def _join(self, config: Any, limit: int, virtual: int) -> LocalQuota | LedgerQuota:
        settings = self.settings
        if settings.ledger is None:
            return LocalQuota(limit, self.ranks.free)
        model = str(config.model_config.served_model_name or config.model_config.model)
        name = settings.name or model.rstrip("/").rsplit("/", 1)[-1]
        replica = config.parallel_config.data_parallel_index
        if replica:
            name = engine_name(name, f"-dp{replica}")
        return join_ledgers(
            self.ranks.ranks,
            settings.folder,
            name,
            unique=bool(settings.name),
            # a floor above the limit would only withhold memory from other engines
            floor=min(settings.floor, limit),
            limit=limit,
            least=self.least,
            virtual=virtual,
            host=host_bytes(config) // len(self.ranks.ranks),
            host_limit=settings.host_limit,
            capacity=settings.capacity,
            identity=identity_of(config.instance_id, replica),
            free=self.ranks.free,
        )

    def _take_over(self) -> None:
        """Empties vLLM's free queue: at the start, only the null block is backed."""
        queue = self.pool.free_block_queue
        while queue.num_free_blocks:
            queue.popleft()
        self.backing.back_null(_START_PATIENCE)

    def _watch_pool(self) -> None:
        """Wraps methods of vLLM's block pool (this instance only) to record idle blocks."""
        pool = self.pool
        free, reset, evict = pool.free_blocks, pool.reset_prefix_cache, pool.evict_blocks

        def free_blocks(ordered_blocks: Any) -> None:
            blocks = list(ordered_blocks)
            free(blocks)
            self.holds.free(
                block.block_id for block in blocks if not block.ref_cnt and not block.is_null
            )
            self.idle.add(
                block.block_id
                for block in blocks
                if not block.ref_cnt
                and block.block_hash is None
                and not block.is_null
                and block.block_id not in self.holds
            )

        def reset_prefix_cache() -> bool:
            done = bool(reset())
            if done:
                self._find_idle()
            return done

        def evict_blocks(block_ids: Any) -> None:
            evict(block_ids)
            self._find_idle()

        pool.free_blocks, pool.reset_prefix_cache = free_blocks, reset_prefix_cache
        pool.evict_blocks = evict_blocks

    def _find_idle(self) -> None:
        """Adds free blocks without a prefix to the idle blocks after prefixes were dropped."""
        self.idle.add(
            block.block_id
            for block in self._free()
            if block.block_hash is None and block.block_id not in self.holds
        )

    def _free(self) -> Iterator[Any]:
        """Yields the blocks of vLLM's free queue in the order in which vLLM takes them."""
        queue = self.pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail:
            following = block.next_free_block
            yield block
            block = following

    def start(self) -> None:
        """Starts the keeper's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the keeper and leaves the ledgers; called without `lock`.

        Nothing is mapped or unmapped afterwards.
        """
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self.ranks.close()
        self.quota.close()

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> tuple[int, list[Release]]:
        """Numbers the step that was just scheduled; returns the number and the releases to send."""
        self._step += 1
        now = time.monotonic()
        self._busy_until = now + self.settings.idle
        if self._taken >= self._largest or now > self._largest_at + _RECENT:
            self._largest, self._largest_at = self._taken, now
        self._ahead, self._batch = self.reserve_blocks, self.reserve_blocks // 2
        if self._ahead and not self._pressed:
            self._batch = max(self._batch, self._largest // 4)
            self._ahead = max(self._ahead, min(self._largest + self._batch, self._most_ahead))
        self.waits += self._waited
        if self._short and not self._lacked:
            self._ask_others(0)
        self._taken, self._waited, self._lacked, self._denied = 0, False, False, False
        if not self._wake.is_set() and (
            self._may_back_ahead(now) or self._signals.arrived(self._short)
        ):
            self._wake.set()
        return self._step, self.backing.send()

    def end_step(self, step: int) -> None:
        """Records that the scheduler has processed the output of a step."""
        self._ended = step

    def order_transfers(self, metadata: Any) -> list[int]:
        """Records the KV transfers requested by the step that `begin_step` just numbered.

        Returns:
            Ids of stores that the workers must not start.
        """
        if self.holds.on:
            self._let_idle(self.holds.order(self._step, metadata))
        return self.holds.take_dropped()

    def end_transfers(self, output: Any) -> None:
        """Records the KV transfers that the ranks have finished, according to a step's output."""
        done = getattr(getattr(output, "kv_connector_worker_meta", None), "completed_jobs", None)
        if done:
            self._let_idle(self.holds.report(done))

    def _let_idle(self, blocks: Iterable[int]) -> None:
        """Marks blocks whose hold has ended as idle, unless they are used, cached or unbacked."""
        every = (self.pool.blocks[one] for one in blocks if self.backing.is_backed(one))
        self.idle.add(
            block.block_id
            for block in every
            if not block.ref_cnt and block.block_hash is None and not block.is_null
        )

    def set_paused(self, paused: bool) -> None:
        """Called when vLLM pauses or resumes; while paused, idle memory is freed immediately."""
        self._paused = paused
        self._wake.set()

    def give_back_when_paused(self) -> None:
        """Waits until a paused engine has freed all memory that no prefix uses.

        Does nothing if the engine is not paused or requests hold blocks. Called without `lock`.
        """
        with self.lock:
            if not self._paused or self.used_blocks():
                return
        try:
            self.settle()
        except TimeoutError as error:
            log.warning("vmem: a paused engine still has memory: %s", str(error))
        self._compact()

    def _let_go(self) -> None:
        """Frees all blocks except the null block, including prefixes, if no request holds a block.

        The keeper calls this, without `lock`, if the engine was ordered to sleep or a rank sleeps
        without the scheduler's knowledge. Stock vLLM also loses its KV cache in these cases.
        """
        try:
            with self.lock:
                has_more = self.backing.unbacked < self.backing.geometry.num_blocks - 1
                at_rest = has_more and not self.used_blocks() and self.pool.reset_prefix_cache()
            if at_rest:
                self.settle()
                self._compact()
        except TimeoutError as error:
            log.warning("vmem: a sleeping engine still has memory: %s", str(error))
        finally:
            if self.ranks.draining:
                self.ranks.end_drain()

    # ---- demand ----------------------------------------------------------------------------------

    def take(self, count: int) -> None:
        """Puts up to `count` idle blocks at the head of vLLM's free queue.

        Called just before vLLM takes `count` blocks from there.
        """
        self._taken += count
        self.prepare(count)
        self._put_first(self.idle.take(count))

    def prepare(self, count: int) -> None:
        """Backs blocks until `count` are idle, as far as memory allows; waits for the driver."""
        if len(self.idle) >= count:
            return
        if self._background is not None:
            self._waited |= not self._grown.is_set()
            self._grown.wait()
            self._finish_background()
        self._collect()
        # Retry growth less often if evicting prefixes is enough.
        evicting = self.pool.free_block_queue.num_free_blocks >= count
        patience = _PATIENCE if evicting else _BACKOFF
        if len(self.idle) < count and time.monotonic() >= self._refused + patience:
            wanted = max(count, self._count_next(count))
            if not self._back(wanted - len(self.idle)) and wanted > count:
                self._back(count - len(self.idle))
            if len(self.idle) < count and self.backing.unconfirmed:
                self.ranks.poll()  # pending releases may have finished
                self._collect()
                self._back(count - len(self.idle))
            if len(self.idle) < count:
                self._denied, self._refused = True, time.monotonic()
                lacks = max(count, self.count_waiting())
                if not evicting:  # ask once per shortage, not once per request and step
                    cached = int(self.pool.free_block_queue.num_free_blocks) - len(self.idle)
                    lacks = max(lacks, wanted, self.count_queued() - cached)
                self._ask_others(lacks - len(self.idle))
        self._lacked |= len(self.idle) < count

    def could_back(self, count: int) -> bool:
        """Returns true if `count` more blocks could be backed now.

        Nothing is reserved: if another engine takes the memory first, a request is preempted.
        """
        needed = self.backing.geometry.scattered_bytes(count)
        return self.backing.unbacked >= count and self.quota.room() >= needed

    def _back(self, count: int) -> bool:
        """Backs up to `count` blocks while the step waits; returns false if mapping failed."""
        growth = self.backing.begin(count)
        if growth is None:
            return True
        growth.run(self.ranks)
        self._enter(growth)
        self._waited = True
        return growth.failure is None

    def _count_next(self, count: int) -> int:
        """Returns how many blocks to back while a step waits, including some for later steps."""
        if not self._ahead or self._pressed:
            return 0
        return min(max(count + self._batch, self.count_waiting()), self._most_ahead)

    def gather(self, count: int) -> None:
        """Retires all free blocks if a refused request would then fit.

        Scattered blocks use only part of their pages. So the engine may have enough memory for the
        next request but too few usable blocks, and no running request that will free some.

        Args:
            count: number of blocks that the next request needs.
        """
        together = self.backing.geometry.first_bytes(1 + count)
        enough = together <= self.quota.used + self.quota.room()
        if self.may_gather and self._denied and enough and not self.used_blocks():
            self.may_gather = False
            self._evict(int(self.pool.free_block_queue.num_free_blocks))
            self._retire(list(self.idle))

    def _ask_others(self, blocks: int) -> None:
        """Posts to the ledger the bytes that `blocks` more blocks need, up to the limit."""
        need = self.backing.geometry.most_bytes(blocks) if blocks > 0 else 0
        need = min(need, max(0, self.quota.limit - self.quota.used))
        need -= need % max(1, self.backing.geometry.block_bytes)  # part of a block would not help
        if need or self._short:
            self.quota.want(need)
            self._short = need > 0

    def _put_first(self, blocks: Iterable[int]) -> None:
        """Moves free blocks to the head of vLLM's free queue, to be taken next."""
        queue, found = self.pool.free_block_queue, list(map(self.pool.blocks.__getitem__, blocks))
        for block in found:
            queue.remove(block)
        queue.prepend_n(found)

    def _enter(self, growth: Growth) -> None:
        blocks = self.backing.finish(growth)
        self.pool.free_block_queue.prepend_n([self.pool.blocks[one] for one in blocks])
        self.idle.add(blocks)
        self._refused = -math.inf
        if growth.failure is not None:
            self._refused = time.monotonic()
            log.warning("vmem: %d bytes cannot be mapped: %s", growth.nbytes, str(growth.failure))

    def _finish_background(self) -> None:
        growth, self._background = self._background, None
        if growth is not None:
            self._enter(growth)

    # ---- questions -------------------------------------------------------------------------------

    def backed_blocks(self) -> int:
        """Returns the number of backed blocks, including the null block."""
        growing = len(self._background.blocks) if self._background else 0
        return int(self.pool.num_gpu_blocks) - self.backing.unbacked - growing

    @property
    def has_more(self) -> bool:
        """True if, at the last check, another engine was waiting and this one exceeded its share.

        The engine then admits no more requests while others run. Otherwise an engine with a queue
        would never give memory back, since each finished request makes room for the next.
        """
        return self._has_more

    def used_blocks(self) -> int:
        """Returns the number of blocks that requests hold."""
        return self.backed_blocks() - 1 - int(self.pool.free_block_queue.num_free_blocks)

    def usage(self) -> float:
        """Returns the fraction of the engine's limit that requests hold, from 0 to 1."""
        size = max(1, self.backing.geometry.block_bytes)
        most = min(int(self.pool.num_gpu_blocks) - 1, self._limit // size)
        return min(1.0, self.used_blocks() / max(1, most))

    def live_bytes(self) -> int:
        """Returns the total size of the pages that hold used or cached blocks or the null block."""
        every = range(self.pool.num_gpu_blocks)
        return self.backing.live_bytes(
            b for b in every if self.backing.is_backed(b) and b not in self.idle
        )

    # ---- the keeper ------------------------------------------------------------------------------

    def _keeper_round(self, woken: bool = True) -> bool:
        """Runs a keeper pass if the keeper was woken, a pass is due or another engine requests it.

        Returns:
            False if the keeper must stop.
        """
        if self._stopped:
            return False
        try:
            called = self._signals.take(self._short)
            if not (woken or called or time.monotonic() >= self._next):
                return True
            self.tick(called=called)
            if self.ranks.draining or self.asleep:
                self._let_go()
        except RankLost as error:  # vLLM detects a lost rank itself, unless it stopped the rank
            log.debug("vmem: the keeper stops: %s", str(error))
            return False
        except Exception:
            log.exception("vmem: the keeper failed; memory is no longer returned")
            self._has_more = False
            return False
        return True

    def _pause(self) -> float:
        """Returns the seconds until the keeper's next pass; running steps wake it earlier."""
        now = time.monotonic()
        stepping = now < self._busy_until - self.settings.idle + _TICK
        return max(_LOOK, self._next - now) if stepping else _LOOK

    def tick(self, force: bool = False, called: bool = False) -> None:
        """Runs a keeper pass: frees idle memory and backs blocks ahead of need.

        Called without `lock`.

        Args:
            force: whether to free memory no matter how recently it was needed.
            called: whether another engine's signal has arrived.
        """
        due = called or time.monotonic() > self._reported + _REPORT
        if force or self.backing.unconfirmed or due:
            self.ranks.poll()  # without the lock, so that steps can continue
        with self.lock:
            self._collect()
            now = time.monotonic()
            # An engine that schedules ahead may never process the output of its last step.
            quiet = self._ended == self._step or force or now > self._busy_until
            at_rest = quiet and not self.used_blocks()
            long_idle = at_rest and (force or self._paused or now > self._busy_until)
            self._peak.note(now, self._live_blocks())
            if self.holds and at_rest and now > self._busy_until - self.settings.idle + WORTH:
                self._let_idle(self.holds.expire(self._ended))
            if due or at_rest or force:
                self._give_back(long_idle)
            if due:
                self._reported, self._limit = now, self.quota.limit
                self.asleep = self.quota.asleep
                self._report()
            if called:
                self._refused = -math.inf
            if self.mover.victims and quiet and (at_rest or now > self._busy_until):
                self._move_by_call()  # otherwise the next step moves the prefixes
            if quiet:
                self._send_by_call()
                self.publish_events()  # the next step may come much later
            growth = None if at_rest else self._begin_ahead(now)
            leaving = self.backing.unconfirmed or self.backing.outbox
            self._next = now + (_LOOK if leaving else _TICK)
            tidy = long_idle and not leaving
        if growth is not None:
            try:
                growth.run(self.ranks)
            finally:
                self._grown.set()
            with self.lock:
                if self._background is growth:
                    self._finish_background()
        elif tidy and self._tidy:
            self._compact()

    def _report(self) -> None:
        size = self.backing.geometry.block_bytes
        self.quota.report(
            in_use=self.used_blocks() * size,
            cached=self._cached_bytes(),
            host_cached=self.holds.host_cached,
            maps=self.backing.counters.growths,
            waits=self.waits,
            hits=self.hits,
            queries=self.queries,
            handles=self.ranks.mappings,
            sleeps=1,
        )

    def _live_blocks(self) -> int:
        """Returns the number of used and cached blocks, including the null block."""
        return self.backed_blocks() - len(self.idle)

    def _give_back(self, long_idle: bool) -> None:
        # Evicted blocks stay backed as long as freed ones, since the next request will take them.
        most = self.settings.prefix
        if most is None and long_idle and self.holds.on:
            most = 0  # prefixes stored in host memory can be loaded again
        if most is not None:
            self._evict(self._count_for(self._cached_bytes() - most))
        excess, self._has_more = self.quota.pressure()
        self._pressed = self._has_more or excess > 0
        keep = 0 if long_idle else self._ahead + self._peak.most - self._live_blocks()
        spread = self._is_spread(time.monotonic())
        seen = (len(self.idle), self.backing.counters.grown_blocks, self.mover.moved)
        if not long_idle or seen != self._seen:
            if len(self.idle) - keep > (0 if long_idle else self.reserve_blocks // 2):
                self._retire_pages(len(self.idle) - keep)
            self.mover.forget()
            if long_idle or spread:
                surplus = (len(self.idle) - keep) * self.backing.geometry.block_bytes
                self.mover.choose(surplus // self.backing.geometry.group_bytes)
            self._seen = seen if long_idle and not self.mover.victims else None
        if owed := self.backing.owed(excess, time.monotonic(), long_idle, self.settings.floor):
            self._shrink(owed)

    def _is_spread(self, now: float) -> bool:
        """Returns true if mapped memory has exceeded live memory by over 25% for a second."""
        mapped = self.backing.mapped_bytes - self.backing.unmapping_bytes
        live = self._live_blocks() * self.backing.geometry.block_bytes
        if mapped <= _SPREAD * live:
            self._dense_at = now
        return now > self._dense_at + _SPREAD_FOR

    def _retire_pages(self, blocks: int, at_least: bool = False) -> int:
        """Frees the pages of up to `blocks` idle blocks; returns the bytes freed.

        Args:
            blocks: maximum number of blocks.
            at_least: as in `Backing.emptied_first`.
        """
        return self._retire(self.backing.emptied_first(self.idle, blocks, at_least=at_least))

    def _shrink(self, nbytes: int) -> None:
        """Frees about `nbytes` bytes: idle blocks, then least recently used prefixes.

        Evicts no prefix if moving prefixes frees enough.
        """
        unit = self.backing.geometry.group_bytes
        for _ in range(_ROUNDS):
            nbytes -= self._retire_pages(self._count_for(nbytes), at_least=True)
            expected = self.mover.choose(-(-nbytes // unit)) if nbytes > 0 else nbytes
            if expected >= nbytes or not self._evict(self._count_for(nbytes - expected)):
                return

    def _count_for(self, nbytes: int) -> int:
        return max(0, -(-nbytes // max(1, self.backing.geometry.block_bytes)))

    def _cached_bytes(self) -> int:
        cached = self.pool.free_block_queue.num_free_blocks - len(self.idle)
        return int(cached) * self.backing.geometry.block_bytes

    def _evict(self, count: int) -> int:
        """Evicts up to `count` cached blocks, least recently used first; returns how many.

        The evicted blocks become idle.
        """
        cached = (
            block
            for block in self._free()
            if block.block_hash is not None and block.block_id not in self.holds
        )
        batch = list(islice(cached, max(0, count)))
        for block in batch:
            self.pool._maybe_evict_cached_block(block)
        found = [int(block.block_id) for block in batch]
        self._put_first(found)
        self.idle.add(found)
        return len(found)

    def _retire(self, blocks: list[int]) -> int:
        """Removes idle blocks from vLLM's free queue; returns the number of bytes freed."""
        self.idle.remove(blocks)
        self.holds.overwrite(blocks)
        for one in blocks:
            self.pool.free_block_queue.remove(self.pool.blocks[one])
        self._tidy = self._tidy or bool(blocks)
        return self.backing.retire(blocks) if blocks else 0

    # ---- moving ----------------------------------------------------------------------------------

    def moves(self) -> list[tuple[int, int]]:
        """Returns the copies to make before the last numbered step, as (source, destination) pairs.

        The emptied pages are freed with the next step at the earliest.
        """
        found = self.mover.pick() if self.mover.victims else []
        self.mover.done(found)
        return found

    def _move_by_call(self) -> None:
        """Moves prefixes by calling the ranks, since the next step may come much later."""
        found = self.mover.pick()
        if self.ranks.move(found, self._step):
            self.mover.done(found)
            self._wake.set()  # wake the keeper to make the remaining copies and free the pages
        else:
            self.mover.undo(found)

    def _send_by_call(self) -> None:
        """Sends releases by calling the ranks, since the next step may come much later.

        The ranks unmap the pages after the last step.
        """
        for one in self.backing.send():
            self.ranks.release(one.number, one.runs, self._step)

    def _collect(self) -> None:
        if self.backing.unconfirmed:
            for number, failure in self.ranks.finished().items():
                self.backing.confirm(number, failure)
                if failure is None:
                    self._refused = -math.inf
                else:
                    log.warning("vmem: pages cannot be unmapped, will retry: %s", str(failure))

    def _may_back_ahead(self, now: float) -> bool:
        """Returns true if too few blocks are idle and no attempt to grow has failed recently."""
        if self._background is not None or now < self._refused + _PATIENCE:
            return False
        return len(self.idle) < self._ahead - self._batch

    def _begin_ahead(self, now: float) -> Growth | None:
        if not self._may_back_ahead(now):
            return None
        growth = self.backing.begin(self._ahead - len(self.idle))
        if growth is None:
            self._refused = now
            return None
        self._grown.clear()
        self._background = growth
        return growth

    def _compact(self) -> None:
        """Compacts and frees nearly empty slabs, a piece at a time, while the engine is idle."""
        while True:
            with self.lock:
                under_way = self._ended != self._step and time.monotonic() < self._busy_until
                if under_way or self.used_blocks() or self.holds or self._stopped:
                    return
                if not self.ranks.compact(_PIECE, self._step):
                    self._tidy = False
                    return
            time.sleep(0.001)  # lets a waiting scheduler take the lock

    def settle(self, timeout: float = 30.0) -> None:
        """Frees all idle memory and waits until it is unmapped; called without `lock`.

        Raises:
            TimeoutError: pages were not unmapped within `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            self.tick(force=True)
            with self.lock:
                left = (
                    self.backing.emptied_by(self.idle)
                    or self.mover.victims
                    or self.backing.outbox
                    or self.holds
                )
                if not (left or self.backing.unconfirmed):
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"pages were not unmapped within {timeout} s")
            time.sleep(0.005)


def _run_keeper(engine: weakref.ref[ElasticEngine], wake: threading.Event) -> None:
    """Runs the keeper's thread until the engine stops or is garbage-collected."""
    pause = _LOOK
    while True:
        woken = wake.wait(pause)
        wake.clear()
        found = engine()
        if found is None or not found._keeper_round(woken):
            return
        pause = found._pause()
        del found
