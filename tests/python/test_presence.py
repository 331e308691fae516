# SPDX-License-Identifier: MIT
"""Tests a pyvmem cache in the ledger: its row in `vmem top`, its limits and its exit."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
from kvcache_helpers import LAYERS, ROWS, eventually, lens, small_cache, small_config

import pyvmem
from pyvmem import Context, Inject, InvalidArgument, KVCache
from pyvmem.commands import cli
from pyvmem.kvcache import Budget
from pyvmem.ledger import orders
from pyvmem.ledger.accounts import EngineInfo, Ledger
from pyvmem.ledger.presence import Announced


def shown(folder: Path, context: Context) -> list[EngineInfo]:
    device = context.info.uuid or "host"
    with Ledger(device, folder=folder, create=False) as ledger:
        return ledger.engines()


def order(folder: Path, context: Context, name: str, limit: int) -> None:
    with Ledger(context.info.uuid or "host", folder=folder, create=False) as ledger:
        orders.order(ledger, name, limit=limit)


def test_the_ledger_agrees_with_the_cache(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder) as announced:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS + 1)) == 0
        assert announced.report()
        (one,) = shown(folder, context)
        stats, page = cache.stats(), cache.layout.page_size
        assert (one.name, one.used) == ("mine", stats.mapped_bytes)
        assert one.in_use == 3 * 2 * LAYERS * page
        assert one.limit == stats.total_pages * page
        assert one.maps > 0
    assert shown(folder, context) == []


def test_the_ledger_shows_prefixes_in_host_memory(context: Context, folder: Path) -> None:
    size = 4 * 2 * LAYERS * context.info.granule
    with (
        small_cache(context, host_prefixes=size) as cache,
        pyvmem.announce(cache, "mine", folder) as announced,
    ):
        reqid = cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        assert reqid == 0
        cache.free_reqid(reqid, tokens=range(2 * ROWS))
        cache.trim(prefixes="host")
        assert announced.report()
        (one,) = shown(folder, context)
        assert (one.host, one.host_cached) == (size, size // 2)


def test_no_cache_joins_by_default(
    context: Context, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMEM_LEDGER", str(folder))
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert list(folder.iterdir()) == []


def test_a_closed_cache_leaves(context: Context, folder: Path) -> None:
    cache = KVCache(small_config(context.info.granule), context)
    announced = pyvmem.announce(cache, "mine", folder)
    cache.close()
    assert not announced.report()
    announced.close()
    announced.close()
    assert shown(folder, context) == []


def test_the_ledger_does_not_keep_a_dropped_cache(context: Context, folder: Path) -> None:
    cache = KVCache(small_config(context.info.granule), context)
    announced: Announced = pyvmem.announce(cache, "mine", folder)
    cache.close()
    del cache
    gc.collect()
    assert announced._what() is None
    announced.close()


def test_a_limit_is_enforced_as_requests_end(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder) as announced:
        reqid = cache.alloc_reqid()
        assert reqid is not None
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        page = cache.layout.page_size
        new = 2 * LAYERS
        order(folder, context, "mine", new * page)
        assert announced.report()
        held = cache.stats().active_pages
        assert cache.stats().total_pages == held > new  # the request holds more, and cannot grow
        assert cache.step(lens(cache, r0=4 * ROWS)) == -1
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        cache.free_reqid(reqid)
        assert announced.report()
        assert cache.stats().total_pages == new


def test_a_cache_that_cannot_change_its_limit_reports_it_and_stays(
    host: Context, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dist = pytest.importorskip("torch.distributed")
    from pyvmem.kvcache.distributed import ParallelKVCache

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        page = host.info.granule
        with (
            ParallelKVCache(small_config(page, memory_limit=8 * 4 * page), backend="host") as cache,
            pyvmem.announce(cache, "rank", folder) as announced,
        ):
            before = shown(folder, host)[0].limit
            for pages in (16, 20):
                order(folder, host, "rank", pages * page)
                assert announced.report()
            assert [one.limit for one in shown(folder, host)] == [before]
            (text,) = [
                one.message for one in caplog.records if one.name == "pyvmem.ledger.presence"
            ]
            assert "rank keeps its limit" in text
            assert "the ranks have agreed on their limit" in text
    finally:
        dist.destroy_process_group()


def test_a_failure_to_free_memory_does_not_leave_the_ledger(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder) as announced:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        cache.free_reqid(0)
        least = 2 * LAYERS * cache.layout.page_size
        assert announced.report()
        assert shown(folder, context)[0].used > least
        context.inject(Inject.UNMAP)
        order(folder, context, "mine", least)  # fails on the cache's thread, which retries
        eventually(lambda: [one.used <= least for one in shown(folder, context)] == [True])
        assert announced.report()


def test_caches_of_a_budget_are_one_row(context: Context, folder: Path) -> None:
    page = context.info.granule
    column, total = 2 * LAYERS * page, 32 * 2 * LAYERS * page
    with Budget(context, total) as budget:
        config = small_config(page, memory_limit=0)
        with KVCache(config, budget=budget) as one, KVCache(config, budget=budget) as two:
            assert one.budget is two.budget is budget
            with pytest.raises(InvalidArgument, match="shares a Budget; announce the"):
                pyvmem.announce(one, "one", folder)
            assert list(folder.iterdir()) == []
            with pyvmem.announce(budget, "both", folder) as announced:
                reqids = [cache.alloc_reqid() for cache in (one, two)]
                assert reqids == [0, 0]
                assert one.step(lens(one, r0=3 * ROWS)) == 0
                assert two.step(lens(two, r0=2 * ROWS)) == 0
                assert announced.report()
                (row,) = shown(folder, context)
                assert (row.name, row.limit) == ("both", total)
                assert row.used == budget.stats().used_bytes
                assert row.in_use == 5 * column
                # The limit takes effect when requests end and their memory is freed.
                order(folder, context, "both", 4 * column)
                assert announced.report()
                assert budget.total_bytes == 5 * column  # no cache grows until then
                assert two.step(lens(two, r0=3 * ROWS)) == -1
                assert one.snapshot()[0].seq_len == 3 * ROWS
                one.free_reqid(0)
                eventually(lambda: announced.report() and budget.total_bytes == 4 * column)
                assert budget.stats().used_bytes <= 4 * column
                assert two.snapshot()[0].seq_len == 2 * ROWS
                two.free_reqid(0)
            assert shown(folder, context) == []


def test_a_budget_of_a_ledger_cannot_be_announced(folder: Path) -> None:
    with Context("host") as context:
        book = Ledger("host", folder=folder)
        with (
            Budget(context, 64 * context.info.granule, ledger=book, name="b") as budget,
            pytest.raises(InvalidArgument, match="the Budget is already in a ledger"),
        ):
            pyvmem.announce(budget, "again", folder)


def test_a_dropped_budget_leaves(context: Context, folder: Path) -> None:
    announced = pyvmem.announce(Budget(context, 8 * context.info.granule), "mine", folder)

    def gone() -> bool:
        gc.collect()
        return shown(folder, context) == []

    eventually(gone)
    assert not announced.report()


def test_a_name_is_unique(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder):
        with pytest.raises(InvalidArgument, match="'mine' is the name of process"):
            pyvmem.announce(cache, "mine", folder)
        assert len(shown(folder, context)) == 1


def test_a_limit_too_small_for_any_request_is_rejected(context: Context, folder: Path) -> None:
    """A request of one token needs a page in every tensor."""
    page = context.info.granule
    column = 2 * LAYERS * page
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder) as announced:
        with pytest.raises(InvalidArgument, match=rf"can run with is .*\({column} bytes\)"):
            order(folder, context, "mine", column - 1)
        order(folder, context, "mine", column)
        assert announced.report()
        assert cache.alloc_reqid() == 0
        assert cache.step(lens(cache, r0=1)) == 0
    with Budget(context, 32 * column) as budget, pyvmem.announce(budget, "two", folder) as both:
        config = small_config(page, memory_limit=0)
        with KVCache(config, budget=budget), KVCache(config, budget=budget):
            assert both.report()
            with pytest.raises(InvalidArgument, match=rf"can run with is .*\({2 * column} bytes\)"):
                order(folder, context, "two", 2 * column - 1)
            order(folder, context, "two", 2 * column)
        assert both.report()
        order(folder, context, "two", page)


def test_a_budget_of_a_ledger_reports_what_its_caches_need(folder: Path) -> None:
    page = 64 << 10
    column = 2 * LAYERS * page
    with (
        Context("host", granule=page) as context,
        Budget(context, 8 * column, ledger=Ledger("host", 0, folder), name="a") as budget,
        KVCache(small_config(page, memory_limit=0), budget=budget),
    ):
        eventually(lambda: shown(folder, context)[0].least == column)


def test_the_limit_in_the_documentation_is_accepted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs/operations/index.md").read_text(encoding="utf-8")
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text, re.S) if "announce" in one)
    (words,) = re.findall(r"`vmem (limit .*?)`", block)
    monkeypatch.setenv("VMEM_LEDGER", str(folder))
    code = block.replace("    pass", f"    statuses = [cli.main({words.split()!r})]")
    names: dict[str, Any] = {"cli": cli}
    exec(code, names)
    assert names["statuses"] == [0], capsys.readouterr().err
