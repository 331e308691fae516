# SPDX-License-Identifier: MIT
"""Tests budgets in a ledger: an engine short of memory gets other engines' idle memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcache_helpers import ROWS, eventually, small_config

from pyvmem import BadHandle, Busy, Context, InvalidArgument, KVCache, NotSupported, announce
from pyvmem.kvcache import Budget
from pyvmem.ledger.accounts import Account, EngineInfo, Ledger
from pyvmem.ledger.orders import order

PAGE = 4096
COLUMN = 4  # pages per column: one in each tensor of a cache


@pytest.fixture
def host() -> Iterator[Context]:
    with Context("host", granule=PAGE) as one:
        yield one


def ledger(folder: Path, columns: int = 16) -> Ledger:
    return Ledger("host", columns * COLUMN * PAGE, folder)


def engines(folder: Path) -> dict[str, EngineInfo]:
    with Ledger("host", folder=folder, create=False) as one:
        return {engine.name: engine for engine in one.engines()}


@contextlib.contextmanager
def engine(folder: Path, name: str, total: int = 16, **values: Any) -> Iterator[KVCache]:
    """Yields a cache with its own budget, as in a separate process; `total` is in columns."""
    floor = values.pop("floor_bytes", 0)
    with (
        Context("host", granule=PAGE) as context,
        Budget(
            context, total * COLUMN * PAGE, ledger=ledger(folder), name=name, floor_bytes=floor
        ) as budget,
        KVCache(small_config(PAGE, memory_limit=0, **values), budget=budget) as cache,
    ):
        yield cache
        cache.check_integrity()


def other(folder: Path, floor: int = 0) -> Account:
    """Joins the ledger as an engine without a KVCache, such as vLLM."""
    most = 16 * COLUMN * PAGE
    return ledger(folder).join("other", floor=floor, limit=most, least=1, virtual=most)


def grow(cache: KVCache, reqid: int, columns: int) -> int:
    """Grows a request to `columns` pages in each tensor, in one step."""
    lens = [slot.seq_len for slot in cache.snapshot()]
    lens[reqid] = columns * ROWS
    return cache.step(lens)


def start(cache: KVCache, columns: int) -> int:
    reqid = cache.alloc_reqid()
    assert reqid is not None
    assert grow(cache, reqid, columns) == 0
    return reqid


def test_a_cache_gets_an_idle_caches_memory(folder: Path) -> None:
    with engine(folder, "a") as a, engine(folder, "b") as b:
        running = start(a, 2)
        for reqid in [start(a, 6), start(a, 5)]:
            a.free_reqid(reqid)
        assert engines(folder)["a"].used >= 13 * COLUMN * PAGE
        reqid = start(b, 1)
        assert grow(b, reqid, 6) == -1  # the ledger records the shortage
        assert engines(folder)["b"].want > 0
        eventually(lambda: grow(b, reqid, 6) == 0)
        two = b.alloc_reqid()
        assert two is not None
        eventually(lambda: grow(b, two, 6) == 0)
        now = engines(folder)
        assert now["a"].used + now["b"].used <= 16 * COLUMN * PAGE
        assert now["b"].used >= 12 * COLUMN * PAGE
        assert a.snapshot()[running].seq_len == 2 * ROWS
        assert a.stats().active_pages == 2 * COLUMN
        eventually(lambda: engines(folder)["b"].want == 0)


def test_memory_owned_by_requests_stays(folder: Path) -> None:
    with engine(folder, "a") as a:
        ids = [start(a, 6), start(a, 6)]
        account = other(folder)

        def all_but_requests() -> bool:
            account.want(16 * COLUMN * PAGE)
            return engines(folder)["a"].used == 12 * COLUMN * PAGE

        eventually(all_but_requests)
        assert a.stats().active_pages == 12 * COLUMN
        a.free_reqid(ids[0])

        def take() -> bool:
            account.want(10 * COLUMN * PAGE)
            return account.take(10 * COLUMN * PAGE)

        eventually(take)
        assert a.stats().active_pages == 6 * COLUMN
        assert grow(a, ids[1], 6) == 0
        account.close()


def test_prefixes_are_evicted_last(folder: Path) -> None:
    with engine(folder, "a", 8) as a:
        tokens = list(range(3 * ROWS))
        recorded = start(a, 3)
        a.free_reqid(recorded, tokens=tokens)
        a.free_reqid(start(a, 3))
        account = other(folder)

        def take(columns: int) -> bool:
            account.want(columns * COLUMN * PAGE)
            return account.take(columns * COLUMN * PAGE)

        eventually(lambda: take(12))
        account.want(0)
        assert a.match(tokens, leave=0).length == 3 * ROWS
        eventually(lambda: take(3))
        assert a.match(tokens, leave=0).length < 3 * ROWS
        account.close()


def test_a_floor_stays_with_its_engine(folder: Path) -> None:
    floor = 6 * COLUMN * PAGE
    with engine(folder, "a", floor_bytes=floor) as a:
        a.free_reqid(start(a, 6))
        account = other(folder)
        assert account.room() == 16 * COLUMN * PAGE - max(engines(folder)["a"].used, floor)

        def down_to_the_floor() -> bool:
            account.want(16 * COLUMN * PAGE)
            return engines(folder)["a"].used <= floor

        eventually(down_to_the_floor)
        assert account.room() == 10 * COLUMN * PAGE
        assert a.stats().mapped_bytes == floor
        account.close()


def test_another_engines_floor_is_left_to_it(folder: Path) -> None:
    account = other(folder, floor=10 * COLUMN * PAGE)
    with engine(folder, "a") as a:
        reqid = start(a, 6)
        assert not a.can_admit([ROWS])
        second = a.alloc_reqid()
        assert second is not None
        assert grow(a, second, 1) == -1
        account.close()
        assert a.can_admit([ROWS])
        assert grow(a, second, 1) == 0
        a.free_reqid(reqid)


def test_a_lowered_limit_is_enforced(folder: Path) -> None:
    with engine(folder, "a") as a:
        running = start(a, 2)
        a.free_reqid(start(a, 6))
        with Ledger("host", folder=folder, create=False) as book:
            order(book, "a", limit=4 * COLUMN * PAGE)
        eventually(lambda: engines(folder)["a"].used <= 4 * COLUMN * PAGE)
        eventually(lambda: a.stats().mapped_bytes <= 4 * COLUMN * PAGE)
        assert grow(a, running, 4) == 0
        assert grow(a, running, 5) == -1


def test_what_top_shows(folder: Path) -> None:
    with engine(folder, "a") as a:
        start(a, 2)
        a.free_reqid(start(a, 3))

        def shown() -> bool:
            one = engines(folder)["a"]
            now = one.in_use, one.cached, one.limit
            return now == tuple(n * COLUMN * PAGE for n in (2, 3, 16)) and one.maps > 0

        eventually(shown)
        eventually(lambda: engines(folder)["a"].pending < engines(folder)["a"].used)


def test_two_caches_of_one_budget_are_one_engine(folder: Path, host: Context) -> None:
    total = 16 * COLUMN * PAGE
    with Budget(host, total, ledger=ledger(folder), name="both") as budget:
        config = small_config(PAGE, memory_limit=0, memory_floor=4 * COLUMN * PAGE)
        with KVCache(config, budget=budget) as a, KVCache(config, budget=budget) as b:
            assert budget.granted_bytes >= 8 * COLUMN * PAGE  # the floors are reserved for them
            start(a, 6)
            start(b, 6)
            assert list(engines(folder)) == ["both"]
            assert budget.stats().used_bytes == 12 * COLUMN * PAGE <= budget.granted_bytes
            a.check_integrity()


def test_close(folder: Path, host: Context) -> None:
    budget = Budget(host, 16 * COLUMN * PAGE, ledger=ledger(folder), name="a")
    cache = KVCache(small_config(PAGE, memory_limit=0), budget=budget)
    with pytest.raises(Busy, match="the budget has 1 open cache; close"):
        budget.close()
    start(cache, 1)
    cache.close()
    budget.close()
    budget.close()
    assert engines(folder) == {}
    with pytest.raises(BadHandle, match="the Budget is closed"):
        KVCache(small_config(PAGE, memory_limit=0), budget=budget)


def test_a_forgotten_budget_leaves_the_ledger(folder: Path, host: Context) -> None:
    budget = Budget(host, 16 * COLUMN * PAGE, ledger=ledger(folder), name="a")
    gone = weakref.ref(budget)
    del budget

    def forgotten() -> bool:
        gc.collect()  # the budget's thread may still be using the cache
        return gone() is None and engines(folder) == {}

    eventually(forgotten)


def test_a_gpu_in_mig_mode_is_rejected(
    folder: Path, host: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    with KVCache(small_config(PAGE)) as cache, ledger(folder) as book:
        for context in (host, cache.context):
            monkeypatch.setattr(
                context, "info", dataclasses.replace(context.info, device_name=name)
            )
        with pytest.raises(NotSupported, match=f"^{name}: the GPU is in MIG mode"):
            Budget(host, 1 << 20, ledger=book)
        assert not book.closed
        with pytest.raises(NotSupported, match=f"^{name}: the GPU is in MIG mode"):
            announce(cache, "a", folder=folder)
        monkeypatch.undo()
    assert engines(folder) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"floor_bytes": 1 << 40},
        {"total_bytes": -1},
        {"name": 7},
        {"name": "x" * 99},
        {"floor_bytes": "1"},
        {"context": None},
    ],
)
def test_a_failed_budget_leaves_no_descriptor(
    folder: Path, host: Context, wrong: dict[str, Any]
) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    ledger(folder).close()
    before = descriptors()
    with pytest.raises((InvalidArgument, TypeError)):
        Budget(**{"context": host, "ledger": ledger(folder), **wrong})
    assert descriptors() == before


def test_bad_input(folder: Path, host: Context) -> None:
    total = 16 * COLUMN * PAGE
    with pytest.raises(InvalidArgument, match=r"a pyvmem\.ledger\.Ledger, not '/tmp'"):
        Budget(host, total, ledger="/tmp")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument, match="floor_bytes 1: must be 0 to 0, the total with a ledger"
    ):
        Budget(host, total, floor_bytes=1)
    with ledger(folder) as book:
        with pytest.raises(InvalidArgument, match=f"floor_bytes {total + 1}: must be 0 to {total}"):
            Budget(host, total, ledger=book, floor_bytes=total + 1)
        assert not book.closed
    with Budget(host, total, ledger=ledger(folder), name="a"):
        book = ledger(folder)
        with pytest.raises(InvalidArgument, match="'a' is the name of process"):
            Budget(host, total, ledger=book, name="a")
        assert book.closed
    assert engines(folder) == {}
