# SPDX-License-Identifier: MIT
"""Measures what KV cache calls cost the caller, by number of slots.

The caches have one K and one V tensor with 8 heads of 128 in float16 and pages of 64 KiB (32
tokens), so that the number of slots dominates. All but a few slots are in use, every request has
some tokens, and no page is shared. Calls are timed individually, alternating between the caches of
all sizes.

`step_async` is measured on its own cache, 8 requests over 64 tensors, since it does not depend on
the number of slots: *cold* is the first batch after a pause, *warm* a later one. The pool is warm
in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import Setting, label
from pyvmem.bench.timing import Deadline, interleave, quiet
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.memory.context import Context
from pyvmem.plumbing.closing import Closable

__all__ = ["SLOTS", "run"]

SLOTS = (256, 1024, 4096)
_KEEP_ALL = (1 << 64) - 1
_QUICK = (16, 64, 256)
_HEADS, _HEAD_DIM, _ITEM = 8, 128, 2
_ROW = _HEADS * _HEAD_DIM * _ITEM
_SPARE = 4  # slots kept free
_SEQ_PAGES = 64  # pages per tensor in a full slot
_PAUSE_S = 0.002


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures the calls for every number of slots, alternating between the caches."""
    book = Book(part)
    with ExitStack() as stack:
        context = stack.enter_context(setting.open(pool_high=_KEEP_ALL))
        turns: list[Callable[[], None]] = []
        for count in SLOTS if not setting.quick else _QUICK:
            slots = stack.enter_context(_Slots(setting, book, context, count))
            slots.fill()
            turns.append(slots.turn)
        turns.append(stack.enter_context(_Async(setting, book, context)).turn)
        with quiet():
            interleave(turns, setting.count(40, 2), deadline)
    book.close()
    part.notes.append(
        "grow: the step less the driver's time in it and less a step with nothing to do, for each "
        "request that grew; -1: memory is short, and no request has any to give back"
    )


def _page(context: Context) -> int:
    sizes = context.info.page_sizes
    return 64 << 10 if 64 << 10 in sizes else min(sizes)


def _config(context: Context, layers: int, slots: int, limit: int) -> KVCacheConfig:
    page = _page(context)
    return KVCacheConfig(
        num_layers=layers,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        dtype="float16",
        max_batch=slots,
        max_seq_len=_SEQ_PAGES * page // _ROW,
        page_size=page,
        memory_limit=limit * page,
        low_watermark=0.0,
    )


class _Slots(Closable):
    """A cache with nearly all slots in use; `turn` times its calls."""

    def __init__(self, setting: Setting, book: Book, context: Context, count: int) -> None:
        self.count = count
        self.needy = max(1, count // 32)
        self.calls = setting.count(10, 2)
        self.rows = _page(context) // _ROW
        system = setting.system
        note = f"{count} slots, 2 tensors, pages of {label(_page(context))}B"

        def samples(name: str, what: str) -> list[list[float]]:
            what = f"{what}, {count:,} slots"
            return book.samples(f"{name}/{system}/{count}", what, system, note=note).rounds

        self.alloc = samples("alloc", "alloc_reqid")
        self.free = samples("free", "free_reqid")
        self.admit = samples("can_admit", "can_admit")
        self.idle = samples("idle", "step, no request needs a page")
        self.grow = samples("grow", f"step, {self.needy} grow: per request")
        self.short = samples("short", "step, 1 needs a page: -1")
        self.many = samples("short_many", f"step, {self.needy} need a page: -1")
        # Each request needs a page per tensor; each request that grows needs another.
        pages = 2 * (count - _SPARE + self.needy)
        self.cache = KVCache(_config(context, 1, count, pages), context)

    def fill(self) -> None:
        """Allocates all but `_SPARE` slots."""
        self.ids = [_alloc(self.cache) for _ in range(self.count - _SPARE)]
        self.lens = [self.rows // 2] * len(self.ids) + [0] * _SPARE
        _must(self.cache.step(self.lens), 0)

    def close(self) -> None:
        """Frees all memory."""
        self.cache.close()

    def turn(self) -> None:
        """Makes some calls of each kind, then restores the cache's state."""
        cache, calls = self.cache, self.calls
        for into in (
            self.alloc,
            self.free,
            self.admit,
            self.idle,
            self.grow,
            self.short,
            self.many,
        ):
            into.append([])
        for _ in range(calls):
            start = time.perf_counter_ns()
            reqid = _alloc(cache, self.rows)
            middle = time.perf_counter_ns()
            cache.free_reqid(reqid)
            end = time.perf_counter_ns()
            cache.can_admit([100])
            last = time.perf_counter_ns()
            self.alloc[-1].append(middle - start)
            self.free[-1].append(end - middle)
            self.admit[-1].append(last - end)
        steady = list(self.lens)
        idle = self._steps(steady, self.idle[-1], 0)
        # The last requests grow, are freed, and are allocated again with one page.
        grown = list(self.lens)
        last_ids = self.ids[-self.needy :]
        for reqid in last_ids:
            grown[reqid] = self.rows + 1
        driver = cache.stats().driver_ns
        start = time.perf_counter_ns()
        _must(cache.step(grown), 0)
        whole = time.perf_counter_ns() - start
        driver = cache.stats().driver_ns - driver
        self.grow[-1].append(max(0.0, whole - driver - idle) / self.needy)
        for rounds, growing in ((self.short, 1), (self.many, self.needy)):
            more = list(grown)
            for reqid in self.ids[:growing]:
                more[reqid] = self.rows + 1
            self._steps(more, rounds[-1], -1)
        for reqid in last_ids:
            cache.free_reqid(reqid)
        cache.memory.reclaim_free(wait=True)
        self.ids = [*self.ids[: -self.needy], *(_alloc(cache) for _ in last_ids)]
        self.lens = [0] * self.count
        for reqid in self.ids:
            self.lens[reqid] = self.rows // 2
        _must(cache.step(self.lens), 0)

    def _steps(self, lens: list[int], into: list[float], result: int) -> float:
        """Times steps to these lengths; returns the shortest time."""
        for _ in range(self.calls):
            start = time.perf_counter_ns()
            done = self.cache.step(lens)
            into.append(time.perf_counter_ns() - start)
            _must(done, result)
        return min(into)


class _Async(Closable):
    """Times `step_async` on the caller's side: 8 requests over 64 tensors, all needing a page."""

    def __init__(self, setting: Setting, book: Book, context: Context) -> None:
        system, self.warm_calls = setting.system, setting.count(4, 1)
        layers, self.requests = setting.count(32, 2), setting.count(8, 2)
        pages = (self.warm_calls + 3) * self.requests * 2 * layers
        self.rows = _page(context) // _ROW
        what = f"step_async, {self.requests} requests x {2 * layers} tensors: the caller's side"
        self.cold = book.samples(f"async_cold/{system}", f"{what}, cold", system).rounds
        self.warm = book.samples(f"async_warm/{system}", f"{what}, warm", system).rounds
        self.cache = KVCache(_config(context, layers, self.requests, pages), context)

    def close(self) -> None:
        """Frees all memory."""
        self.cache.close()

    def turn(self) -> None:
        """Times one batch after a pause, then several without a pause; frees all pages."""
        cache = self.cache
        ids = [_alloc(cache) for _ in range(self.requests)]
        self.cold.append([])
        self.warm.append([])
        for number in range(1, self.warm_calls + 3):
            lens = [number * self.rows] * self.requests
            if number == 1:
                time.sleep(_PAUSE_S)
            start = time.perf_counter_ns()
            done = cache.step_async(lens)
            (self.cold if number == 1 else self.warm)[-1].append(time.perf_counter_ns() - start)
            _must(done, 0)
            _must(cache.step(lens), 0)
        for reqid in ids:
            cache.free_reqid(reqid)
        cache.memory.reclaim_free(wait=True)


def _alloc(cache: KVCache, seq_len: int = 0) -> int:
    reqid = cache.alloc_reqid(seq_len)
    if reqid is None:
        raise RuntimeError("no free slot")
    return reqid


def _must(result: int, expected: int) -> None:
    if result != expected:
        raise RuntimeError(f"a step returned {result}, not {expected}")
