# SPDX-License-Identifier: MIT
"""Small caches for tests, and a plain Python model of a cache's behavior."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch

import pyvmem
from pyvmem import FdEvent, KVCache, KVCacheConfig

ROWS = 8  # rows per page of `small_config`
LAYERS = 2


def small_config(page: int, **changes: Any) -> KVCacheConfig:
    """Returns a configuration with two layers, four slots of up to six pages each, and eight
    float32 rows per page, whatever the page size.
    """
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": page // (ROWS * 64 * 4),
        "head_dim": 64,
        "dtype": "float32",
        "max_batch": 4,
        "max_seq_len": 6 * ROWS,
        "page_size": page,
        "memory_limit": 64 * 2 * LAYERS * page,
        "low_watermark": 0.0,
    }
    values.update(changes)
    return KVCacheConfig(**values)


@contextlib.contextmanager
def small_cache(context: pyvmem.Context, **changes: Any) -> Iterator[KVCache]:
    """Yields a cache over `context`; checks its integrity before closing it."""
    with KVCache(small_config(context.info.granule, **changes), context) as cache:
        yield cache
        cache.check_integrity()


def policy_cache(
    context: pyvmem.Context, policy: dict[str, Any], limit: int, **changes: Any
) -> KVCache:
    """Returns a cache for random engines, limited to `limit` pages per tensor unless the policy
    sets its own `limit`.
    """
    page, options = context.info.granule, {"limit": limit, **policy, **changes}
    options["memory_limit"] = options.pop("limit") * 2 * LAYERS * page
    return KVCache(small_config(page, **options), context)


def lens(cache: KVCache, **by_reqid: int) -> list[int]:
    """Returns lengths by reqid, from keywords r0=..., r2=..."""
    out = [0] * cache.config.max_batch
    for name, value in by_reqid.items():
        out[int(name[1:])] = value
    return out


def has_tensors(cache: KVCache) -> bool:
    """Returns true if torch can access the cache's memory; otherwise tests access rows as bytes."""
    return cache.context.cuda_device is None or torch.cuda.is_available()


def _rows(cache: KVCache, layer: int, which: int, reqid: int, low: int, high: int) -> Iterator[int]:
    """Yields the offset of each row of K (`which` 0) or V (1) in the reservation."""
    layout = cache.layout
    group, member = divmod(layer, cache.config.group_size)
    start = layout.offset(reqid, 0, 2 * group + which) + member * layout.head_row_bytes
    for row in range(low, high):
        yield start + row * layout.row_bytes


def _row(cache: KVCache, value: float) -> bytes:
    assert str(cache.config.dtype) == "float32"
    return array.array("f", [value]).tobytes() * (cache.layout.head_row_bytes // 4)


def _put(cache: KVCache, layer: int, which: int, reqid: int, rows: range, value: float) -> None:
    if has_tensors(cache):
        view = cache.v(layer) if which else cache.k(layer)
        view[reqid, rows.start : rows.stop] = value
        return
    for offset in _rows(cache, layer, which, reqid, rows.start, rows.stop):
        cache.reservation.write(offset, _row(cache, value))


def _are(cache: KVCache, layer: int, which: int, reqid: int, rows: range, value: float) -> bool:
    if has_tensors(cache):
        view = cache.v(layer) if which else cache.k(layer)
        return bool((view[reqid, rows.start : rows.stop] == value).all())
    size = cache.layout.head_row_bytes
    return all(
        cache.reservation.read(offset, size) == _row(cache, value)
        for offset in _rows(cache, layer, which, reqid, rows.start, rows.stop)
    )


def stamp(cache: KVCache, reqid: int, low: int, high: int, tag: float) -> None:
    """Writes rows [low, high) of a slot in every layer, with different values in each.

    The write has completed on return, because tests that free a slot with an `FdEvent` wait only
    for that event.
    """
    for layer in range(cache.config.num_layers):
        _put(cache, layer, 0, reqid, range(low, high), tag + layer / 16)
        _put(cache, layer, 1, reqid, range(low, high), -tag - layer / 16)
    if cache.context.cuda_device is not None and torch.cuda.is_available():
        torch.cuda.synchronize(cache.context.cuda_device)


def rows_are(cache: KVCache, reqid: int, low: int, high: int, tag: float) -> bool:
    """Returns true if every element of the rows that `stamp` wrote is intact."""
    return all(
        _are(cache, layer, 0, reqid, range(low, high), tag + layer / 16)
        and _are(cache, layer, 1, reqid, range(low, high), -tag - layer / 16)
        for layer in range(cache.config.num_layers)
    )


def rows_are_zero(cache: KVCache, reqid: int, low: int, high: int) -> bool:
    """Returns true if every element of the rows is zero (NaN is not)."""
    return all(
        _are(cache, layer, which, reqid, range(low, high), 0.0)
        for layer in range(cache.config.num_layers)
        for which in (0, 1)
    )


def without(context: pyvmem.Context, caps: pyvmem.Caps) -> None:
    """Makes a context report fewer capabilities, the only way for tests to get a weaker back end.

    The cache uses only the reported capabilities; libvmem still uses all that the back end has.
    """
    context.info = dataclasses.replace(context.info, caps=context.info.caps & ~caps)


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; the time limit only keeps a broken build from hanging."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "the condition never held"
        time.sleep(0.001)


def wrap_methods(monkeypatch: pytest.MonkeyPatch, *owners: type) -> None:
    """Wraps all public methods of the classes, as tracers do."""

    def traced(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call

    for owner in owners:
        for name, method in list(vars(owner).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                monkeypatch.setattr(owner, name, traced(method))


def at_the_gate(turns: Any) -> bool:
    """Returns true if another thread is waiting for a budget's lock."""
    if turns._gate.acquire(blocking=False):
        turns._gate.release()
        return False
    return True


@contextlib.contextmanager
def pending() -> Iterator[FdEvent]:
    """Yields an event that stands for GPU work; it is signaled no later than the end of the block.

    Use it inside the cache's ``with`` block, so that the work completes before the cache is closed
    even if the test fails; otherwise `close` would hang.
    """
    with FdEvent.create() as event:
        try:
            yield event
        finally:
            event.set()


@contextlib.contextmanager
def firing_later(event: FdEvent) -> Iterator[list[bool]]:
    """Sets the event from another thread, appending True to the yielded list just before."""
    fired: list[bool] = []

    def fire() -> None:
        fired.append(True)
        event.set()

    timer = threading.Timer(0.05, fire)
    timer.start()
    try:
        yield fired
    finally:
        timer.join()


def _allow_descriptors(count: int) -> None:
    """Raises this process's limit on file descriptors; skips the test if that is not allowed."""
    limit = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    more = hard if hard == resource.RLIM_INFINITY else max(hard, count)
    try:
        resource.setrlimit(limit, (count, more))
    except (ValueError, OSError):
        pytest.skip(f"a process may have {hard} file descriptors; the test needs {count}")


@contextlib.contextmanager
def full_queue(context: pyvmem.Context) -> Iterator[None]:
    """Fills a context with as many unfinished batches as it can hold."""
    nothing = pyvmem.OpBatch(1)
    _allow_descriptors(8192)  # each batch has its own descriptor
    with FdEvent.create() as gate:
        waiting = [context.submit(nothing, after=[gate]) for _ in range(4096)]
        try:
            with pytest.raises(pyvmem.TooManyBatches):
                context.submit(nothing)
            yield
        finally:
            gate.set()
            for ticket in waiting:
                ticket.wait(60)


def state(cache: KVCache) -> tuple[Any, ...]:
    """Returns the state that a failed call must leave unchanged."""
    now = cache.stats()
    return (
        cache.snapshot(),
        now.free_pages,
        now.cached_pages,
        now.active_pages,
        now.used_bytes,
        now.segments,
        now.grown_pages,
        now.reclaimed_pages,
        now.steps,
    )


class Model:
    """Drives a cache and keeps track of the expected contents of every row.

    Every new row must read as zero before it is written. When the cache returns -1 because memory
    is short, its state must be unchanged; the model then frees a request.
    """

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.rows: dict[int, list[float]] = {}
        self.written: dict[int, int] = {}  # the largest number of rows that the slot has ever had
        self.events: list[FdEvent] = []
        self.tag = 0.0

    def lengths(self) -> list[int]:
        out = [0] * self.cache.config.max_batch
        for reqid, rows in self.rows.items():
            out[reqid] = len(rows)
        return out

    def alloc(self, length: int) -> None:
        reqid = self.cache.alloc_reqid(length)
        if reqid is None:
            assert len(self.rows) == self.cache.config.max_batch
            return
        assert reqid not in self.rows
        self.rows[reqid] = []
        self.grow({reqid: length}, ahead=False)

    def grow(self, more: dict[int, int], ahead: bool) -> None:
        """Grows requests; unfinished GPU work completes during the call."""
        if not self.events:
            self.grow_now(more, ahead)
            return
        timer = threading.Timer(0.001, self.fire)
        timer.start()
        try:
            self.grow_now(more, ahead)
        finally:
            timer.join()

    def grow_now(self, more: dict[int, int], ahead: bool) -> None:
        """Grows some requests and writes the new rows."""
        want = self.lengths()
        for reqid, count in more.items():
            want[reqid] = min(want[reqid] + count, self.cache.config.max_seq_len)
        if ahead and self.cache.step_async(want) == -1:
            self.give_up()
            return
        before = state(self.cache)
        if self.cache.step(want) == -1:
            assert not ahead, "step must succeed after step_async reserved the pages"
            after = state(self.cache)
            # The state is unchanged unless pages were reclaimed or in-flight work has completed
            # since then.
            assert (
                after[0] == before[0]
                or after[7] > before[7]
                or any(slot.in_flight for slot in before[0])
            )
            assert after[4] == before[4]
            self.give_up()
            return
        for reqid, length in enumerate(want):
            rows = self.rows.get(reqid, [])
            if length > len(rows):
                self.write(reqid, length)

    def write(self, reqid: int, length: int) -> None:
        rows = self.rows[reqid]
        low = len(rows)
        assert rows_are_zero(self.cache, reqid, max(low, self.written.get(reqid, 0)), length)
        self.written[reqid] = max(length, self.written.get(reqid, 0))
        self.tag += 1
        stamp(self.cache, reqid, low, length, self.tag)
        rows.extend([self.tag] * (length - low))

    def give_up(self) -> None:
        """Frees the longest request, as an engine does when it preempts."""
        if self.rows:
            self.free(max(self.rows, key=lambda reqid: len(self.rows[reqid])), wait=False)

    def free(self, reqid: int, wait: bool) -> None:
        """Frees a request; if `wait` is true, its GPU work is still unfinished."""
        event = None
        if wait:
            event = FdEvent.create()
            self.events.append(event)
        self.cache.free_reqid(reqid, event)
        del self.rows[reqid]
        self.written.pop(reqid, None)

    def truncate(self, reqid: int) -> None:
        """Truncates a request, with or without unfinished GPU work on its rows."""
        rows = self.rows[reqid]
        event = None
        if self.random.random() < 0.5:
            event = FdEvent.create()
            self.events.append(event)
        length = self.random.randint(0, min(len(rows), self.cache.snapshot()[reqid].seq_len))
        assert self.cache.truncate(reqid, length, event) == 0
        del rows[length:]

    def fire(self) -> None:
        """Completes all GPU work."""
        if self.cache.context.cuda_device is not None:
            torch.cuda.synchronize()  # the events stand for the writes so far
        while self.events:
            event = self.events.pop()
            event.set()
            event.close()

    def check(self) -> None:
        self.cache.check_integrity()
        for reqid, rows in self.rows.items():
            want = torch.tensor(rows)[:, None, None]
            for layer in range(self.cache.config.num_layers):
                view = self.cache.k(layer)[reqid, : len(rows)].cpu()
                assert bool((view == want + layer / 16).all()), f"K of reqid {reqid}, layer {layer}"
                view = self.cache.v(layer)[reqid, : len(rows)].cpu()
                assert bool((view == -want - layer / 16).all()), (
                    f"V of reqid {reqid}, layer {layer}"
                )
        used = sum(map(len, self.rows.values()))
        assert self.cache.stats().used_bytes <= used * 2 * self.cache.layout.row_bytes * (
            self.cache.layout.num_tensors // 2
        )

    def any_step(self) -> None:
        """Makes one random call that an engine might make."""
        pick = self.random.random()
        longest = self.cache.config.max_seq_len
        if pick < 0.2:
            self.alloc(self.random.randint(1, longest))
        elif pick < 0.75:
            more = {reqid: self.random.choice((0, 1, 1, 2, 9)) for reqid in self.rows}
            self.grow(more, ahead=self.random.random() < 0.5)
        elif pick < 0.8 and self.rows:
            self.truncate(self.random.choice(list(self.rows)))
        elif pick < 0.95 and self.rows:
            self.free(self.random.choice(list(self.rows)), wait=self.random.random() < 0.5)
        else:
            self.fire()


def started(cache: KVCache, rows: int, tag: float = 1.0) -> int:
    """Allocates a request of `rows` rows, all with the same tag."""
    reqid = cache.alloc_reqid(rows)
    assert reqid is not None
    grown(cache, reqid, 0, rows, tag)
    return reqid


def grown(cache: KVCache, reqid: int, low: int, rows: int, tag: float) -> None:
    """Grows a request to `rows` rows and writes this tag to the rows from `low` onward."""
    want = [slot.seq_len for slot in cache.snapshot()]
    want[reqid] = rows
    assert cache.step(want) == 0
    stamp(cache, reqid, low, rows, tag)
