# SPDX-License-Identifier: MIT
"""Tests evicted prefixes in host memory, and requests that start from them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    lens,
    pending,
    policy_cache,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    started,
    without,
)
from share_helpers import ShareModel, read_rows, start, write_rows
from test_kvcache_layers import layered

from pyvmem import Caps, Context, DriverError, Inject, InvalidArgument, KVCache
from pyvmem.engine import Request, RequestCache
from pyvmem.kvcache import Budget, LayeredCache, LayerShape
from pyvmem.kvcache.prefix_cache import PrefixCache
from pyvmem.memory import host_copies

pytest.importorskip("numpy")

TENSORS = 2 * LAYERS


def unit_bytes(context: Context) -> int:
    """Returns the size in bytes of a sharing unit in `small_cache`."""
    return TENSORS * context.info.granule


def recorded(cache: KVCache, rows: int, tag: float = 3.0, first: int = 0) -> list[int]:
    """Runs a request and records its rows when it is freed; returns its token ids."""
    ids = list(range(first, first + rows))
    cache.free_reqid(started(cache, rows, tag), tokens=ids)
    return ids


def begins(cache: KVCache, ids: list[int], rows: int, tag: float = 3.0) -> int:
    """Starts a request, and checks that exactly its first `rows` rows are found cached."""
    taken = cache.alloc_prefix([*ids, 7])
    assert taken is not None
    assert taken[1] == rows
    assert rows_are(cache, taken[0], 0, rows, tag)
    assert cache.seq_len(taken[0]) == rows
    return taken[0]


# ---- ways to host memory -------------------------------------------------------------------------


def by_trim(cache: KVCache) -> None:
    cache.trim(prefixes="host")


def by_pressure(cache: KVCache) -> None:
    """Evicts every prefix by running a request that needs all of the cache's memory."""
    cache.free_reqid(started(cache, 6 * ROWS, 9.0))


WAYS: dict[str, Callable[[KVCache], None]] = {"trim": by_trim, "pressure": by_pressure}


@pytest.mark.parametrize("way", WAYS)
def test_an_evicted_prefix_is_loaded_back(context: Context, way: str) -> None:
    unit = unit_bytes(context)
    with small_cache(context, memory_limit=6 * unit, host_prefixes=8 * unit) as cache:
        ids = recorded(cache, 2 * ROWS + 3)
        WAYS[way](cache)
        now = cache.stats()
        assert (now.prefix_pages, now.prefix_host_bytes) == (0, 2 * unit)
        assert (now.prefix_stored_bytes, now.prefix_loaded_bytes) == (2 * unit, 0)
        with cache.match([*ids, 7]) as match:
            assert (match.length, match.in_host) == (0, 2 * ROWS)
        reqid = begins(cache, ids, 2 * ROWS)
        now = cache.stats()
        assert now.prefix_loaded_bytes == 2 * unit
        assert (now.prefix_hits, now.prefix_hit_tokens) == (1, 2 * ROWS)
        assert now.prefix_tokens == 2 * ROWS, "others share the pages"
        another = begins(cache, ids, 2 * ROWS)
        assert cache.stats().active_pages == 2 * TENSORS
        assert cache.step(lens(cache, **{f"r{reqid}": 3 * ROWS, f"r{another}": 3 * ROWS})) == 0
        for one in (reqid, another):
            assert rows_are(cache, one, 0, 2 * ROWS, 3.0)
            cache.free_reqid(one)
        WAYS[way](cache)
        now = cache.stats()
        assert now.prefix_stored_bytes == 2 * unit, "its rows were there"
        assert now.prefix_dropped_bytes == 0
        begins(cache, ids, 2 * ROWS)


def test_an_idle_cache_stores_its_prefixes(backend: str) -> None:
    with open_context(backend) as context:
        unit, options = unit_bytes(context), {"idle_seconds": 0.05, "idle_prefixes": True}
        with small_cache(context, host_prefixes=8 * unit, **options) as cache:
            ids, others = recorded(cache, 2 * ROWS), recorded(cache, 3 * ROWS, 5.0, first=100)
            eventually(lambda: cache.stats().mapped_bytes == 0)
            assert cache.stats().prefix_host_bytes == 5 * unit
            begins(cache, ids, 2 * ROWS)
            begins(cache, others, 3 * ROWS, 5.0)


def test_another_cache_of_the_budget_takes_the_pages(context: Context) -> None:
    unit = unit_bytes(context)
    budget = Budget(context, 6 * unit)
    options: dict[str, Any] = {"memory_limit": 0, "low_watermark": 0.0}
    giver = KVCache(
        small_config(context.info.granule, host_prefixes=4 * unit, **options), budget=budget
    )
    taker = KVCache(small_config(context.info.granule, **options), budget=budget)
    with giver, taker:
        ids = recorded(giver, 2 * ROWS)
        reqid = started(taker, 6 * ROWS, 5.0)
        assert giver.stats().prefix_host_bytes == 2 * unit
        assert rows_are(taker, reqid, 0, 6 * ROWS, 5.0)
        giver.free_reqid(begins(giver, ids, 0))  # no page is free to load the rows into
        taker.free_reqid(reqid)
        begins(giver, ids, 2 * ROWS)
        giver.check_integrity()
        taker.check_integrity()


# ---- lookups and eviction ------------------------------------------------------------------------


def test_a_prefix_split_between_device_and_host(context: Context) -> None:
    unit = unit_bytes(context)
    with small_cache(context, memory_limit=6 * unit, host_prefixes=8 * unit) as cache:
        ids = recorded(cache, 4 * ROWS)
        cache.free_reqid(started(cache, 4 * ROWS, 9.0))
        with cache.match([*ids, 7]) as match:
            assert (match.length, match.in_host) == (2 * ROWS, 2 * ROWS)
            assert cache.can_admit([4 * ROWS + 1], [match])
            assert cache.can_admit([6 * ROWS], [match])
        begins(cache, ids, 4 * ROWS)


def test_a_prompt_that_branches_off_the_prefix(context: Context) -> None:
    """A request gets only the units that its prompt shares with a prefix in its own namespace."""
    unit = unit_bytes(context)
    with small_cache(context, host_prefixes=8 * unit) as cache:
        ids = recorded(cache, 3 * ROWS)
        cache.trim(prefixes="host")
        assert cache.match(ids, leave=ROWS).in_host == 2 * ROWS
        assert cache.match(ids).in_host == 2 * ROWS, "one token is computed"
        assert cache.match([*ids, 7], namespace="another").in_host == 0
        assert cache.match([9, *ids]).in_host == 0
        taken = cache.alloc_prefix([*ids[: ROWS + 3], *[999] * ROWS])
        assert taken is not None
        assert taken[1] == ROWS
        assert rows_are(cache, taken[0], 0, ROWS, 3.0)


def test_the_least_recently_used_is_evicted_from_host_memory(context: Context) -> None:
    unit = unit_bytes(context)
    with small_cache(context, host_prefixes=3 * unit) as cache:
        first = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        second = recorded(cache, 2 * ROWS, 5.0, first=100)
        cache.trim(prefixes="host")
        now = cache.stats()
        assert (now.prefix_host_bytes, now.prefix_dropped_bytes) == (3 * unit, unit)
        assert cache.match([*first, 7]).in_host == ROWS, "its end went first"
        assert cache.match([*second, 7]).in_host == 2 * ROWS
        cache.match([*first, 7]).release()
        third = recorded(cache, ROWS, 6.0, first=200)
        cache.trim(prefixes="host")
        assert cache.match([*first, 7]).in_host == ROWS
        assert cache.match([*second, 7]).in_host == ROWS
        begins(cache, third, ROWS, 6.0)
        begins(cache, second, ROWS, 5.0)
        begins(cache, first, ROWS)


def test_host_memory_keeps_the_last_used_prefixes(context: Context) -> None:
    unit = unit_bytes(context)
    with small_cache(context, host_prefixes=2 * unit) as cache:
        for number in range(4):
            recorded(cache, ROWS, number + 1.0, first=100 * number)
        cache.trim(prefixes="host")
        now = cache.stats()
        assert (now.prefix_host_bytes, now.prefix_dropped_bytes) == (2 * unit, 2 * unit)
        found = [cache.match([*range(100 * n, 100 * n + ROWS), 7]).in_host for n in range(4)]
        assert found == [0, 0, ROWS, ROWS]


def test_host_prefixes_are_dropped_when_weights_change(context: Context) -> None:
    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        ids = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        ids += recorded(cache, 2 * ROWS, first=2 * ROWS)
        match = cache.match([*ids, 7])
        cache.trim(prefixes=True)
        assert cache.match([*ids, 7]).in_host == 0
        assert cache.stats().prefix_host_bytes == 0
        taken = cache.alloc_prefix(match)
        assert taken is not None
        assert taken[1] == 0


def test_evicted_prefixes_are_lost_without_host_memory(context: Context) -> None:
    with small_cache(context) as cache:
        ids = recorded(cache, 2 * ROWS)
        with pytest.raises(InvalidArgument, match=r"prefixes is 'host'.*here 0"):
            cache.trim(prefixes="host")
        assert cache.match(ids).length == ROWS
        cache.trim(prefixes=True)
        assert cache.match([*ids, 7]).in_host == 0


def test_invalid_options(host: Context) -> None:
    page = host.info.granule
    unit = TENSORS * page
    for value, message in {
        unit - 1: rf"host_prefixes {unit - 1} is less than .* {unit} bytes",
        -1: "host_prefixes is -1",
    }.items():
        with pytest.raises(InvalidArgument, match=message):
            KVCache(small_config(page, host_prefixes=value), host)
    with pytest.raises(InvalidArgument, match="host_prefixes 5 with a window of 16"):
        small_config(page, host_prefixes=5, window=16)
    with pytest.raises(InvalidArgument, match="host_prefixes 5 with a state"):
        small_config(page, host_prefixes=5, state=True, tensors_per_layer=1)
    heads = page // (ROWS * 64 * 4)
    shapes = [LayerShape(heads, 64), LayerShape(heads, 64, window=8)]
    with pytest.raises(InvalidArgument, match="host_prefixes 5 with a window of 8"):
        LayeredCache(shapes, host, max_seq_len=64, host_prefixes=5)
    with small_cache(host, host_prefixes=unit) as cache:
        for bad in ("disk", ""):
            with pytest.raises(InvalidArgument, match=f"prefixes is '{bad}'"):
                cache.trim(prefixes=bad)  # type: ignore[arg-type]


def test_groups_of_layers(backend: str) -> None:
    """A unit contains the rows of all groups."""
    with open_context(backend) as context:
        page = context.info.granule
        with layered(context, host_prefixes=400 * page) as cache:
            rows = 2 * cache.sharing_unit
            tags, ids = list(range(1, rows + 1)), list(range(rows))
            reqid = cache.alloc_reqid(rows)
            assert reqid is not None
            assert cache.step(lens(cache, **{f"r{reqid}": rows})) == 0
            parts: list[Any] = list(cache.caches)
            for part in parts:
                write_rows(part, reqid, 0, tags)
            cache.free_reqid(reqid, tokens=ids)
            cache.trim(prefixes="host")
            now = cache.stats()
            assert now.mapped_bytes == 0
            assert now.prefix_host_bytes == now.prefix_stored_bytes > 0
            taken = cache.alloc_prefix([*ids, 7])
            assert taken is not None
            assert taken[1] == rows
            assert all(read_rows(part, taken[0], 0, tags) for part in parts)
            cache.check_integrity()


def test_an_engine_finds_host_prefixes(context: Context) -> None:
    """`RequestCache.admit` starts a request with the rows of the host prefix."""
    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        requests = RequestCache(cache)
        ids = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        with requests.match([*ids, 7]) as prefix:
            assert prefix.length == 2 * ROWS
            admitted = requests.admit(prefix)
        assert isinstance(admitted, Request)
        assert admitted.length == 2 * ROWS
        assert rows_are(cache, admitted.slot, 0, 2 * ROWS, 3.0)
        requests.release(admitted)


def test_requests_of_several_threads(host: Context) -> None:
    """Threads load, record and evict the same prefixes; each request gets its own rows."""
    with small_cache(host, host_prefixes=3 * unit_bytes(host), max_batch=8) as cache:
        prompts = {3.0: recorded(cache, 2 * ROWS), 5.0: recorded(cache, ROWS, 5.0, first=100)}
        failures: list[BaseException] = []
        loaded = cache.stats().prefix_loaded_bytes

        def engine(seed: int) -> None:
            chosen = random.Random(seed)
            try:
                for _ in range(60):
                    tag, ids = chosen.choice(list(prompts.items()))
                    taken = cache.alloc_prefix([*ids, 7])
                    assert taken is not None
                    assert taken[1] == len(ids)
                    assert rows_are(cache, taken[0], 0, len(ids), tag)
                    cache.free_reqid(taken[0], tokens=ids)
                    if chosen.random() < 0.5:
                        cache.trim(prefixes="host")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not failures, failures
        assert cache.stats().prefix_loaded_bytes > loaded


# ---- failures ------------------------------------------------------------------------------------


def test_rows_that_gpu_work_still_writes_are_not_stored(context: Context) -> None:
    """`trim` waits for the work, then stores the rows; an eviction to free pages drops them."""
    unit = unit_bytes(context)
    with small_cache(context, host_prefixes=4 * unit) as cache, pending() as work:
        ids = list(range(ROWS))
        cache.free_reqid(started(cache, ROWS, 3.0), work, tokens=ids)
        cache._groups[0].prefixes.evict(0, 1)
        now = cache.stats()
        assert (now.prefix_host_bytes, now.prefix_dropped_bytes) == (0, unit)
    with small_cache(context, host_prefixes=4 * unit) as cache, pending() as work:
        cache.free_reqid(started(cache, ROWS, 3.0), work, tokens=ids)
        with firing_later(work) as fired:
            cache.trim(prefixes="host")
            assert fired
        begins(cache, ids, ROWS)


@pytest.mark.parametrize("what", [Inject.MAP, Inject.HEAP])
def test_a_prefix_that_cannot_be_copied_is_lost(context: Context, what: Inject) -> None:
    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        ids = recorded(cache, 2 * ROWS)
        cache.trim()  # leaves no page of the prefix mapped
        context.inject(what)
        cache._groups[0].prefixes.evict(0, 2)
        context.inject(what, count=0)
        now = cache.stats()
        assert now.prefix_pages == 0
        assert now.prefix_host_bytes + now.prefix_dropped_bytes == 2 * unit_bytes(context)
        assert cache.match([*ids, 7]).in_host * unit_bytes(context) == (
            now.prefix_host_bytes * ROWS
        )
        cache.check_integrity()
        again = recorded(cache, 2 * ROWS, 5.0)
        cache.trim(prefixes="host")
        begins(cache, again, 2 * ROWS, 5.0 if not now.prefix_host_bytes else 3.0)


class Copies:
    """Stands in for the copy kernel and copies in threads; its n-th call fails."""

    def __init__(self, fails: int) -> None:
        self.left = fails

    def __call__(self, context: Context, to_host: bool, pieces: host_copies.Pieces) -> bool:
        self.left -= 1
        if not self.left:
            raise RuntimeError("CUDA error: unspecified launch failure")
        copies = host_copies.ThreadCopies(context, to_host)
        copy = copies.start(pieces)
        copies.close()
        assert copy.error is None
        return True


def test_the_kernel_gets_the_addresses_of_the_rows(
    host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "copy_now", Copies(0))
    with small_cache(host, host_prefixes=4 * unit_bytes(host)) as cache:
        ids = recorded(cache, 3 * ROWS)
        cache.trim(prefixes="host")
        begins(cache, ids[: 2 * ROWS], 2 * ROWS)
        begins(cache, ids, 3 * ROWS)


def test_a_copy_that_fails(host: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """First a store fails; then a load fails, and its request starts without the prefix."""
    unit = unit_bytes(host)
    with small_cache(host, host_prefixes=4 * unit) as cache:
        ids = recorded(cache, 2 * ROWS)
        monkeypatch.setattr(host_copies, "copy_now", Copies(1))
        cache.trim(prefixes="host")
        assert cache.stats().prefix_host_bytes == 0
        cache.check_integrity()
        recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        assert cache.stats().prefix_host_bytes == 2 * unit
        monkeypatch.setattr(host_copies, "copy_now", Copies(1))
        reqid = begins(cache, ids, 0)
        cache.check_integrity()
        assert cache.step(lens(cache, **{f"r{reqid}": 3 * ROWS})) == 0
        assert rows_are_zero(cache, reqid, 0, 3 * ROWS), "no part of the copy may be left"
        assert cache.stats().prefix_host_bytes == 0


def test_no_host_memory(host: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_bytes(host)
    with small_cache(host, host_prefixes=4 * unit) as cache:
        ids = recorded(cache, 2 * ROWS)

        def refuses(*_: Any) -> None:
            raise MemoryError("no")

        monkeypatch.setattr(host_copies, "HostMemory", refuses)
        cache.trim(prefixes="host")
        assert cache.stats().prefix_dropped_bytes == 2 * unit
        begins(cache, ids, 0)


def test_a_load_that_finds_no_memory(context: Context) -> None:
    unit = unit_bytes(context)
    with small_cache(context, memory_limit=6 * unit, host_prefixes=4 * unit) as cache:
        ids = recorded(cache, 3 * ROWS)
        other = started(cache, 5 * ROWS, 9.0)
        with cache.match([*ids, 7]) as match:
            assert (match.length, match.in_host) == (ROWS, 2 * ROWS)
        reqid = begins(cache, ids, ROWS)
        cache.check_integrity()
        assert cache.stats().prefix_loaded_bytes == 0
        cache.free_reqid(reqid)
        cache.free_reqid(other)
        begins(cache, ids, 3 * ROWS)


def test_a_load_whose_map_fails(context: Context) -> None:
    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        ids = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        context.inject(Inject.MAP)
        begins(cache, ids, 0)
        context.inject(Inject.MAP, count=0)
        cache.check_integrity()
        now = cache.stats()
        assert (now.active_slots, now.prefix_host_bytes) == (1, 0), "the prefix is lost"


def test_a_loaded_prefix_that_cannot_be_recorded(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request keeps the loaded rows as its own."""
    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        ids = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        match = cache.match([*ids, 7])
        without(context, Caps.READONLY)
        taken = cache.alloc_prefix(match)
        assert taken is not None
        assert taken[1] == 2 * ROWS
        assert rows_are(cache, taken[0], 0, 2 * ROWS, 3.0)
        assert cache.stats().prefix_tokens == 0


def test_a_loaded_prefix_whose_pages_cannot_be_shared(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the driver fails, the request starts without the prefix, and the load is not retried."""
    calls = []

    def fails(*_: Any) -> None:
        calls.append(1)
        raise DriverError("no")

    with small_cache(context, host_prefixes=4 * unit_bytes(context)) as cache:
        ids = recorded(cache, 2 * ROWS)
        cache.trim(prefixes="host")
        monkeypatch.setattr(PrefixCache, "record", fails)
        begins(cache, ids, 0)
        assert (len(calls), cache.stats().prefix_host_bytes) == (1, 0)


def test_close_frees_host_memory(host: Context) -> None:
    for closed_first in (False, True):
        context = open_context("host") if closed_first else host
        cache = KVCache(
            small_config(context.info.granule, host_prefixes=4 * unit_bytes(context)), context
        )
        cache.free_reqid(start(cache, 2 * ROWS), tokens=range(2 * ROWS))
        cache.trim(prefixes="host")
        kept = cache._groups[0].prefixes.host
        assert kept is not None
        (memory,) = kept._slabs
        if closed_first:
            context.close()
        cache.close()
        assert not kept._slabs
        assert not memory._end.alive


# ---- random engines ------------------------------------------------------------------------------


class HostModel(ShareModel):
    """A model that also checks the rows of prefixes that are loaded from host memory."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        super().__init__(cache, seed)
        self.recorded: list[list[int]] = []

    def prompt(self) -> list[int]:
        if not self.recorded or self.random.random() < 0.5:
            return super().prompt()
        return [*self.random.choice(self.recorded), 3][: self.first.config.max_seq_len]

    def free(self, reqid: int, record: bool) -> None:
        if record:
            self.recorded.append(self.tokens[reqid])
        super().free(reqid, record)

    def start(self) -> None:
        prompt = self.prompt()
        self.fire()
        ids, space = self.named(prompt)
        with self.cache.match(ids, namespace=space) as match:
            most = match.length + match.in_host
        taken = self.cache.alloc_prefix(ids, namespace=space)
        if taken is None:
            self.count("no slot")
            return
        reqid, length = taken
        assert length == 0 or match.length <= length <= most
        if match.in_host:
            self.count("loaded" if length > match.length else "not loaded")
        self.tokens[reqid] = prompt[:length]
        self.tags[reqid] = [self.tag(prompt[: n + 1]) for n in range(length)]
        assert self.holds(reqid)
        self.grow({reqid: prompt[length:]})

    def any_step(self) -> None:
        """Starts and ends many requests, so that many of them find prefixes recorded by others."""
        pick = self.random.random()
        if pick < 0.6:
            super().any_step()
        elif pick < 0.65:
            self.trim()
        elif len(self.tokens) < 3:
            self.start()
        else:
            self.free(self.random.choice(list(self.tokens)), record=True)

    def trim(self) -> None:
        self.fire()
        how = self.random.choice(("host", "host", "host", True, False))
        self.cache.trim(prefixes=how)  # type: ignore[arg-type]


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"units": 30},
    "little host memory": {"units": 3},
    "short of memory": {"limit": 14, "units": 8},
    "nothing kept": {"deferred_reclaim": False, "limit": 14, "units": 8},
    "not zeroed": {"zero_fill": False, "low_watermark": 0.3, "limit": 16, "units": 30},
    "one tensor, over-read": {"group_size": LAYERS, "overread_rows": 3, "limit": 24, "units": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    changes = dict(POLICIES[policy])
    changes["host_prefixes"] = changes.pop("units") * unit_bytes(context)
    with policy_cache(context, changes, 40, max_batch=6) as cache:
        model = HostModel(cache, seed)
        model.run(200)
        now = cache.stats()
        assert now.prefix_stored_bytes
        assert "loaded" in model.counts or policy == "little host memory"
        assert now.prefix_host_bytes <= cache.config.host_prefixes


@pytest.mark.slow
def test_random_engine_of_layers(context: Context) -> None:
    limit = 130 * context.info.granule
    with layered(context, 130, max_batch=6, max_seq_len=80, host_prefixes=limit) as cache:
        model = HostModel(cache, 1)
        model.more = 60
        model.run(200)
        assert "loaded" in model.counts
