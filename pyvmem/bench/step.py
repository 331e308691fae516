# SPDX-License-Identifier: MIT
"""Measures what a KV cache step costs the caller.

There are 256 requests of a model with 32 layers and 8 KV heads of 128 in bfloat16. A K and a V
tensor per layer make 64 tensors; each row is 2 KB, so a page of 64 KB holds 32 tokens. An *event*
is a step in which 8 of the requests need one more page in each tensor: 512 pages, no two of which
are adjacent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

from pyvmem.bench.native import Native
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import GB, Setting, label
from pyvmem.bench.timing import Deadline, interleave, quiet, time_each
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.memory.context import Context

__all__ = ["run"]

_KEEP_ALL = (1 << 64) - 1
_HEADS, _HEAD_DIM, _ITEM = 8, 128, 2
_ROW = _HEADS * _HEAD_DIM * _ITEM


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures steps with zeroing (the default) and without, and with one map call per page."""
    for zero_fill in (True, False):
        left = Deadline(deadline.left / (2 if zero_fill else 1))
        with setting.open(pool_high=_KEEP_ALL) as context:
            _one(setting, part, left, context, zero_fill=zero_fill)
    part.notes.append(
        "step/async is the caller's side; step/wait the following step, called immediately, which "
        "returns when the pages are mapped (and zeroed, or ordered before the stream)"
    )


def _one(
    setting: Setting, part: Part, deadline: Deadline, context: Context, *, zero_fill: bool
) -> None:
    n, book = Native(context), Book(part)
    page = 64 << 10 if 64 << 10 in context.info.page_sizes else min(context.info.page_sizes)
    layers, requests, needy = setting.count(32, 2), setting.count(256, 16), setting.count(8, 2)
    # Use fewer tensors if the back end limits mappings (host): each page adds two segments, one
    # mapped and one not, and closing the cache needs two more.
    limit = context.info.max_segments or context.info.max_mappings
    while limit and layers > 1 and 4 * requests * 2 * layers > 0.7 * limit:
        layers //= 2
    tensors = 2 * layers
    rows = page // _ROW
    max_pages = setting.count(32, 8)
    config = KVCacheConfig(
        num_layers=layers,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        dtype="bfloat16",
        max_batch=requests,
        max_seq_len=max_pages * rows,
        page_size=page,
        zero_fill=zero_fill,
        low_watermark=0.0,
        growth_fraction=0.0,  # surplus pages would make an event map more than 512
    )
    events = _events(setting, context, requests * tensors, needy * tensors)
    pages = requests * tensors + (2 * events + 1) * needy * tensors
    n.warm(min(pages * page, 12 * GB))
    with KVCache(config, context) as cache:
        for _ in range(requests):
            if cache.alloc_reqid() is None:
                raise RuntimeError("no free slot")
        fresh = [rows] * requests
        _must(cache.step(fresh))
        tail = "" if zero_fill else "_dirty"
        suffix = "" if zero_fill else ", not zeroed"

        def samples(name: str, what: str) -> list[list[float]]:
            return book.samples(
                f"{name}{tail}/{n.system}",
                what + suffix,
                n.system,
                note=f"{requests} requests, {tensors} tensors, pages of {label(page)}B",
            ).rounds

        turns: list[Callable[[], None]] = []
        if zero_fill:
            none = samples("none", "step, no request needs a page")
            turns.append(lambda: _time_none(setting, cache, lens, rows, none))
        what = f"{needy} of {requests} need a page in {tensors} tensors"
        growth = _growth(requests, needy, rows)
        lens = fresh
        asynchronous = samples("async", f"step_async, {what}: the caller's side")
        wait = samples("wait", f"the step after step_async, {what}")
        sync = samples("sync", f"step, {what}")

        def turn_async() -> None:
            nonlocal lens
            lens = next(growth)
            start = time.perf_counter_ns()
            _must(cache.step_async(lens))
            middle = time.perf_counter_ns()
            _must(cache.step(lens))
            end = time.perf_counter_ns()
            asynchronous.append([middle - start])
            wait.append([end - middle])

        def turn_sync() -> None:
            nonlocal lens
            lens = next(growth)
            start = time.perf_counter_ns()
            _must(cache.step(lens))
            sync.append([time.perf_counter_ns() - start])

        turns += [turn_async, turn_sync]
        single = _Singles(n, page, needy * tensors)
        maps = samples("maps512", f"{needy * tensors} calls of vMemMap, a page each")
        turns.append(lambda: maps.append([single.time()]))
        with quiet():
            interleave(turns, events + 1, deadline)
        part.notes.append(
            f"driver time in the background{suffix}: "
            f"{cache.stats().background_driver_ns / 1e6:.1f} ms, while callers waited: "
            f"{cache.stats().critical_driver_ns / 1e6:.1f} ms, over all events"
        )
        single.close()
    book.close()


def _events(setting: Setting, context: Context, base: int, each: int) -> int:
    """Returns the number of events of each kind to time, given the limit on mappings."""
    wanted = setting.count(100, 2)
    limit = context.info.max_segments or context.info.max_mappings
    if limit:
        wanted = min(wanted, int(limit * 0.8 - 4 * base - 2 * each) // (2 * each) - 1)
    return max(wanted, 2)


def _growth(requests: int, needy: int, rows: int) -> Iterator[list[int]]:
    """Yields the lengths for each `step`, in which the next `needy` requests start a new page."""
    lens = [rows] * requests
    for first in cycle(range(0, requests, needy)):
        lens = list(lens)
        for i in range(first, first + needy):
            lens[i] = -(-lens[i] // rows) * rows + 1
        yield lens


def _time_none(
    setting: Setting, cache: KVCache, lens: list[int], rows: int, into: list[list[float]]
) -> None:
    """Times steps in which every length grows within its last page."""
    calls = setting.count(20, 3)
    grown = [[min(n + k, -(-n // rows) * rows) for n in lens] for k in range(calls)]
    times: list[float] = []
    results = time_each(cache.step, [(g,) for g in grown], times)
    if any(results):
        raise RuntimeError("step reports a shortage")
    into.append(times)


def _must(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"step returned {result}: memory is short")


class _Singles:
    """Maps as many pages as an event does, with one call per page; no two pages are adjacent."""

    def __init__(self, n: Native, page: int, count: int) -> None:
        self.n, self.page = n, page
        self.base = n.reserve(2 * count * page)
        self.handles = [n.create(page, page) for _ in range(count)]
        self.args = [
            (n.vm, self.base + 2 * i * page, page, h, 0, 0) for i, h in enumerate(self.handles)
        ]

    def time(self) -> float:
        """Maps and unmaps the pages; returns the time of the map calls in nanoseconds."""
        n, each = self.n, list[float]()
        n.check("vMemMap", time_each(n.lib.vMemMap, self.args, each))
        for _, addr, size, *_ in self.args:
            n.unmap(addr, size)
        return sum(each)

    def close(self) -> None:
        for handle in self.handles:
            self.n.release(handle)
        self.n.free(self.base)
