# SPDX-License-Identifier: MIT
"""Description: a cache of pyvmem in the ledger: what `vmem top` shows, limits, ends."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from kvcache_helpers import LAYERS, ROWS, lens, small_cache, small_config

import pyvmem
from pyvmem import Context, InvalidArgument, KVCache
from pyvmem.ledger import EngineInfo, Ledger
from pyvmem.presence import Announced


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ledger"
    path.mkdir(mode=0o700)
    return path


def shown(folder: Path, context: Context) -> list[EngineInfo]:
    device = context.info.uuid or "host"
    with Ledger(device, folder=folder, create=False) as ledger:
        return ledger.engines()


def order(folder: Path, context: Context, name: str, limit: int) -> None:
    with Ledger(context.info.uuid or "host", folder=folder, create=False) as ledger:
        ledger.order_limit(name, limit)


def test_the_ledger_shows_what_the_cache_says(context: Context, folder: Path) -> None:
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


def test_nothing_joins_unasked(
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


def test_a_cache_that_is_forgotten_is_not_kept(context: Context, folder: Path) -> None:
    cache = KVCache(small_config(context.info.granule), context)
    announced: Announced = pyvmem.announce(cache, "mine", folder)
    cache.close()
    del cache
    gc.collect()
    assert announced._cache() is None
    announced.close()


def test_a_limit_is_followed_as_requests_end(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder) as announced:
        reqid = cache.alloc_reqid()
        assert reqid is not None
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        page = cache.layout.page_size
        before, new = cache.stats().total_pages, 2 * LAYERS
        order(folder, context, "mine", new * page)
        assert announced.report()
        assert cache.stats().total_pages == before  # the request holds more
        cache.free_reqid(reqid)
        assert announced.report()
        assert cache.stats().total_pages == new


def test_a_name_is_taken_once(context: Context, folder: Path) -> None:
    with small_cache(context) as cache, pyvmem.announce(cache, "mine", folder):
        with pytest.raises(InvalidArgument, match="'mine' is the name of process"):
            pyvmem.announce(cache, "mine", folder)
        assert len(shown(folder, context)) == 1
