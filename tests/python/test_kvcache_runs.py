# SPDX-License-Identifier: MIT
"""Checks that requests grow in runs, so that memory fills up before mappings run out.

The context on ``host`` rejects mappings beyond `max_mappings`, as ``stock`` always does. The
proportions are those of GPUs with 80 and 141 GB: one pair of tensors stands in for 32.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvcache_helpers import eventually

import pyvmem
from pyvmem import Context, KVCache, KVCacheConfig
from pyvmem.kvcache import Budget, runs
from pyvmem.kvcache.layered_cache import LayeredCache
from pyvmem.ledger.accounts import Ledger, device_of
from pyvmem.ledger.participant import Participant
from pyvmem.models.shapes import LayerShape
from pyvmem.plumbing import logs

PAGE = 64 << 10
ROWS = 8  # per page
SHARE = 237_568 // 64  # mappings per tensor, with 64 tensors
CARDS = {"80 GB": 1_180_000 // 64, "141 GB": 2_150_000 // 64}  # pages per tensor


def config(slots: int, pages: int, **policy: object) -> KVCacheConfig:
    """Describes two tensors, with memory for `pages` pages of each."""
    values: dict[str, object] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": PAGE // ROWS // 2,
        "dtype": "float16",
        "max_batch": slots,
        "max_seq_len": 1 << 14,
        "page_size": PAGE,
        "memory_limit": 2 * pages * PAGE,
        **policy,
    }
    return KVCacheConfig(**values)  # type: ignore[arg-type]


@contextmanager
def cache_of(
    slots: int, pages: int, mappings: int, **policy: object
) -> Iterator[tuple[KVCache, list[int]]]:
    """Yields a cache on ``host`` with limited mappings and all slots taken, and zero lengths."""
    with (
        Context("host", granule=PAGE, max_mappings=mappings) as context,
        KVCache(config(slots, pages, **policy), context) as cache,
    ):
        ids = [cache.alloc_reqid() for _ in range(slots)]
        assert None not in ids
        yield cache, [0] * slots
        cache.check_integrity()
        context.check()


class Growing:
    """Requests that grow by at most one page's rows per step, each at its own pace."""

    def __init__(self, count: int, seed: int = 3) -> None:
        draw = random.Random(seed)
        self._at = [draw.uniform(0, 8 * ROWS) for _ in range(count)]
        self._pace = [draw.uniform(0.3, 1) * ROWS for _ in range(count)]

    def lens(self) -> list[int]:
        """Returns the lengths for the next step."""
        self._at = [at + pace for at, pace in zip(self._at, self._pace, strict=True)]
        return [int(at) + 1 for at in self._at]


def fill(cache: KVCache, count: int, ahead: bool = False) -> list[int]:
    """Steps until a step returns -1; returns the lengths of the last successful step."""
    growing = Growing(count)
    held = [0] * count
    while True:
        lens = growing.lens()
        if ahead and cache.step_async(lens):
            return held
        if cache.step(lens):
            return held
        held = lens


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "step_async"])
@pytest.mark.parametrize("count", [50, 128, 256])
@pytest.mark.parametrize("card", list(CARDS))
def test_default_settings_fill_the_gpu(card: str, count: int, ahead: bool) -> None:
    with cache_of(count, CARDS[card], 2 * SHARE) as (cache, _):
        fill(cache, count, ahead)
        now = cache.stats()
        assert now.active_pages >= 0.98 * now.total_pages
        assert now.short == 1
        assert cache.context.stats().mappings < 0.9 * 2 * SHARE


def test_page_by_page_mappings_run_out_first_without_an_error() -> None:
    with cache_of(64, CARDS["80 GB"], 2 * SHARE, growth_fraction=0, join_at=0) as (cache, _):
        held = fill(cache, 64)
        now = cache.stats()
        assert now.active_pages < 0.5 * now.total_pages
        assert now.short == 1
        assert cache.context.stats().mappings <= 2 * SHARE
        assert cache.step(held) == 0


def test_surplus_is_unowned_and_granted_without_a_driver_call() -> None:
    with cache_of(2, 4096, 0) as (cache, lens):
        lens[0] = 100 * ROWS
        assert cache.step(lens) == 0
        lens[0] += 1
        assert cache.step(lens) == 0
        calls = cache.context.stats().map_calls
        slot = cache.snapshot()[0]
        assert (slot.granted_pages, slot.mapped_pages) == (101, 104)
        now = cache.stats()
        assert now.active_pages == 2 * 101
        assert now.cached_pages == 2 * 3
        for pages in (102, 103, 104):
            lens[0] = pages * ROWS
            assert cache.step(lens) == 0
        assert cache.context.stats().map_calls == calls
        lens[0] = 104 * ROWS + 1
        assert cache.step(lens) == 0
        assert cache.context.stats().map_calls == calls + 2
        assert cache.snapshot()[0].mapped_pages == 108


@pytest.mark.parametrize("pages", [8, 40, 100, 1000])
def test_surplus_is_at_most_a_sixteenth(pages: int) -> None:
    with cache_of(1, 1 << 14, 0, max_seq_len=1 << 15) as (cache, lens):
        lens[0] = pages * ROWS
        assert cache.step(lens) == 0
        surplus = cache.snapshot()[0].mapped_pages - pages
        assert 0 <= surplus <= pages // 16
        assert surplus < 32


def test_surplus_is_reclaimed_for_another_request() -> None:
    with cache_of(2, 256, 0, low_watermark=0) as (cache, lens):
        lens[0] = 129 * ROWS
        assert cache.step(lens) == 0
        assert cache.snapshot()[0].mapped_pages > 129
        lens[1] = 127 * ROWS
        assert cache.step(lens) == 0
        assert [slot.mapped_pages for slot in cache.snapshot()] == [129, 127]
        assert cache.stats().free_pages == 0


def test_joining_keeps_the_rows_and_frees_mappings() -> None:
    with cache_of(4, 2000, 2 * 4 * 50, growth_fraction=0) as (cache, lens):
        cache.context.warm(2 * 2000 * PAGE)
        rows = cache.k(0)
        for length in range(1, 100 * ROWS, ROWS):
            lens[:] = [length] * 4
            assert cache.step(lens) == 0
            rows[:, length - 1, 0, 0] = length % 1000
        assert cache.context.stats().mappings <= 2 * 4 * 50
        assert (
            rows[:, 0 : 100 * ROWS : ROWS, 0, 0].tolist()
            == [[float(length % 1000) for length in range(1, 100 * ROWS, ROWS)]] * 4
        )
        del rows


def test_joining_waits_for_the_work_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 7))
    monkeypatch.setattr(runs, "wait_for_device", lambda stream, device: order.append(stream))
    original = Context.join

    def join(self: Context, addr: int, size: int) -> int:
        order.append("join")
        return original(self, addr, size)

    monkeypatch.setattr(Context, "join", join)
    with cache_of(1, 2000, 100, growth_fraction=0) as (cache, lens):
        cache.context.warm(2 * 2000 * PAGE)
        for length in range(1, 45 * ROWS, ROWS):
            lens[0] = length
            assert cache.step(lens, stream) == 0
        assert order[:3] == [stream, "join", "join"]
        assert order.count("join") == 2 * order.count(stream)


@pytest.mark.parametrize("refused", [1, 2])
def test_the_cache_continues_after_a_failed_join(refused: int) -> None:
    """After one failure the run is mapped again; after two, the request has lost its rows."""
    with cache_of(2, 2000, 100, growth_fraction=0) as (cache, lens):
        cache.context.warm(2 * 2000 * PAGE)
        for length in range(1, 18 * ROWS, ROWS):
            lens[:] = [length] * 2
            assert cache.step(lens) == 0
        cache.context.inject(pyvmem.Inject.MAP, skip=4, count=refused)
        lens[:] = [18 * ROWS + 1] * 2
        assert cache.step(lens) == 0
        with pytest.raises(pyvmem.VMemError) as told:
            cache.step(lens)
        cache.context.inject(0, count=0)
        if refused == 1:
            assert cache.step(lens) == 0
        else:
            assert isinstance(told.value, pyvmem.NotRecoverable)
            broken = [
                slot.reqid
                for slot in cache.snapshot()
                if cache._groups[0].table[slot.reqid].rows_lost
            ]
            assert len(broken) == 1
            cache.free_reqid(broken[0])
            lens[broken[0]] = 0
            assert cache.step(lens) == 0


def test_mappings_of_free_slots_are_reclaimed() -> None:
    with cache_of(3, 4000, 2 * 60, growth_fraction=0, join_at=0) as (cache, lens):
        for length in range(1, 25 * ROWS, ROWS):
            lens[:] = [length, length, 0]
            assert cache.step(lens) == 0
        cache.free_reqid(0)
        lens[0] = 0
        for length in range(1, 30 * ROWS, ROWS):
            lens[2] = length
            assert cache.step(lens) == 0
        assert cache.context.stats().mappings <= 2 * 60


def test_admission_counts_mappings() -> None:
    with cache_of(3, 4000, 2 * 60, growth_fraction=0, join_at=0) as (cache, lens):
        for reqid in (1, 2):
            cache.free_reqid(reqid)
        for length in range(1, 59 * ROWS, ROWS):
            lens[0] = length
            assert cache.step(lens) == 0
        assert cache.stats().free_pages > 1000
        assert not cache.can_admit([40 * ROWS])
        cache.free_reqid(0)
        assert cache.can_admit([40 * ROWS])


def test_admission_counts_the_mappings_of_all_groups_together() -> None:
    """There are enough mappings for either group's part of the request, but not for both."""
    shape = LayerShape(num_kv_heads=1, head_dim=PAGE // ROWS // 2)
    with (
        Context("host", granule=PAGE, max_mappings=211) as context,
        LayeredCache(
            [shape, replace(shape, head_dim=shape.head_dim // 2)],
            context,
            dtype="float16",
            max_batch=2,
            max_seq_len=1 << 14,
            page_size=PAGE,
            memory_limit=4000 * PAGE,
            growth_fraction=0,
            join_at=0,
        ) as cache,
    ):
        assert cache.alloc_reqid() == 0
        for length in range(1, 58 * ROWS, ROWS):
            assert cache.step([length, 0]) == 0
        assert context.stats().mappings == 203
        assert cache.stats().free_pages > 1000
        assert not cache.can_admit([40 * ROWS]), "6, 3 and 2 mappings, but only 8 are left"
        assert cache.can_admit([20 * ROWS]), "4, 2 and 2"
        cache.free_reqid(0)
        assert cache.can_admit([40 * ROWS])


def test_a_layered_cache_fills_memory_too() -> None:
    shape = LayerShape(num_kv_heads=1, head_dim=PAGE // ROWS // 2)
    other = replace(shape, head_dim=PAGE // ROWS // 4)
    pages = CARDS["80 GB"]
    with (
        Context("host", granule=PAGE, max_mappings=3 * SHARE) as context,
        LayeredCache(
            [shape, other],
            context,
            dtype="float16",
            max_batch=128,
            max_seq_len=1 << 14,
            page_size=PAGE,
            memory_limit=3 * pages * PAGE,
        ) as cache,
    ):
        for _ in range(128):
            cache.alloc_reqid()
        fill(cache, 128)
        now = cache.stats()
        assert now.active_pages >= 0.98 * now.total_pages
        cache.check_integrity()
        context.check()


@pytest.mark.parametrize("name", ["growth_fraction", "join_at"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), "much"])
def test_bad_fractions_are_rejected(name: str, value: object) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match=name):
        config(1, 64, **{name: value})


CALLS: dict[str, Callable[[KVCache], object]] = {
    "free_reqid": lambda cache: cache.free_reqid(1),
    "free_reqid with tokens": lambda cache: cache.free_reqid(1, tokens=list(range(ROWS))),
    "fork": lambda cache: cache.fork(1),
    "swap_out": lambda cache: cache.swap_out(1).close(),
    "truncate": lambda cache: cache.truncate(1, 3),
    "step_async": lambda cache: cache.step_async([ROWS, ROWS, 0, 0]),
    "step": lambda cache: cache.step([ROWS, ROWS, 0, 0]),
}


@pytest.mark.parametrize("call", CALLS)
def test_background_growth_without_mappings_fails_no_other_call(call: str) -> None:
    """Any of these calls may end the shortage; only a step that needs the pages runs short."""
    policy = {"growth_fraction": 0.0, "join_at": 0.0}
    with cache_of(4, 50, 1000, **policy) as (cache, _):
        assert cache.step([ROWS, ROWS, 0, 0]) == 0
        used = cache.context.stats().mappings
    with (
        Context("host", granule=PAGE, max_mappings=used + 1) as context,
        KVCache(config(4, 50, **policy), context) as cache,
    ):
        assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
        assert cache.step([ROWS, ROWS, 0, 0]) == 0
        assert cache.step_async([ROWS, 5 * ROWS, 0, 0]) == 0
        eventually(lambda: not context.stats().pending)
        answer = CALLS[call](cache)
        assert call not in ("step", "step_async", "truncate") or answer == 0
        assert call not in ("free_reqid", "free_reqid with tokens") or not cache.slots.is_taken(1)
        if cache.slots.is_taken(1):
            assert cache.step([ROWS, 5 * ROWS, 0, 0]) == -1
            cache.free_reqid(1)
        cache.check_integrity()


def test_the_log_names_the_holders_of_mappings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step returns -1 because mappings are short, the log names their holders: other caches
    and other engines.
    """
    monkeypatch.setattr(logs, "_last", {})
    with Context("host", granule=PAGE, max_mappings=30) as context:
        device = device_of(context.info.device_name, context.info.uuid)
        with (
            Budget(
                context, 200 * PAGE, ledger=Ledger(device, folder=tmp_path), name="mine"
            ) as budget,
            Participant(
                Ledger(device, folder=tmp_path),
                "other",
                floor=0,
                limit=100 * PAGE,
                least=PAGE,
                virtual=100 * PAGE,
            ) as other,
            KVCache(config(2, 50, growth_fraction=0.0, join_at=0.0), budget=budget) as big,
            KVCache(config(2, 50, growth_fraction=0.0, join_at=0.0), budget=budget) as small,
        ):
            other.account.take(PAGE, 17)
            for cache in (big, small):
                assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
            for rows in range(ROWS, 6 * ROWS, ROWS):
                assert big.step([rows, rows]) == 0
            fill(small, 2)
            small.check_integrity()
    warned = [
        one.getMessage() for one in caplog.records if "no mapping is left" in one.getMessage()
    ]
    assert len(warned) == 1
    assert "exceed the 30 that this context may have" in warned[0]
    assert "this cache has about" in warned[0]
    assert re.search(r"cache 1 of the budget has about [1-9]\d* for requests", warned[0])
    assert "engine 'other'" in warned[0]
    assert "has 17" in warned[0]


def test_the_log_says_if_no_holder_is_known(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_last", {})
    with cache_of(2, 60, 40, growth_fraction=0.0, join_at=0.0) as (cache, _):
        fill(cache, 2)
    assert "no other holder is known" in caplog.text
