# SPDX-License-Identifier: MIT
"""The feature table is correct: a feature works where the table says yes, and is
rejected elsewhere.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch.distributed as dist
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    has_tensors,
    lens,
    rows_are,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    started,
    state,
    without,
)
from share_helpers import read_rows, write_rows

from pyvmem import Caps, Context, InvalidArgument, KVCache, Location, NotSupported, ReadOnly, probe
from pyvmem.commands import cli
from pyvmem.features import FEATURES, Feature, Probed, about, require_page_size
from pyvmem.features.table import FORK, OVERREAD, PREFIXES, SPARSE
from pyvmem.kvcache import Budget, LayeredCache, LayerShape
from pyvmem.kvcache.distributed import ParallelKVCache
from pyvmem.layouts import SHAPES, advise, generate

KB, MB = 1 << 10, 1 << 20

# ---- each feature in brief -----------------------------------------------------------------


def use_demand(context: Context) -> None:
    with small_cache(context) as cache:
        reqid = started(cache, ROWS)
        assert cache.step_async(lens(cache, r0=ROWS + 1)) == 0
        assert cache.step(lens(cache, r0=ROWS + 1)) == 0
        assert cache.snapshot()[reqid].granted_pages == 2
        assert rows_are(cache, reqid, 0, ROWS, 1.0)
        assert rows_are_zero(cache, reqid, ROWS, ROWS + 1)
        cache.free_reqid(reqid)


def use_small_pages(context: Context) -> None:
    with KVCache(small_config(64 * KB), context) as cache:
        started(cache, 1)
        assert cache.stats().active_pages == 2 * LAYERS
        assert cache.stats().mapped_bytes == 2 * LAYERS * 64 * KB
        assert rows_are(cache, 0, 0, 1, 1.0)


def use_reclaim(context: Context) -> None:
    with small_cache(context, eager_pages=2) as cache:
        first = started(cache, ROWS)
        cache.free_reqid(first)
        second = cache.alloc_reqid(ROWS)
        assert second is not None
        want = lens(cache)
        want[second] = ROWS
        assert cache.step(want) == 0
        assert cache.stats().reused_pages
        assert rows_are_zero(cache, second, 0, ROWS)


def use_parallel(context: Context) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = small_config(context.info.granule, memory_limit=8 * LAYERS * context.info.granule)
        with ParallelKVCache(config, backend=context.info.backend) as cache:
            reqid = started(cache, ROWS)
            cache.check_step()
            assert rows_are(cache, reqid, 0, ROWS, 1.0)
            cache.free_reqid(reqid)
    finally:
        dist.destroy_process_group()


def use_aliases(context: Context) -> None:
    page = context.info.granule
    with context.reserve(2 * page) as reservation, context.create(page) as pages:
        reservation.map(0, pages)
        reservation.write(0, b"shared")
        again = context.retain(reservation.addr, page)
        reservation.map(page, again)
        again.drop()
        reservation.write(page + 6, b" pages")
        assert reservation.read(0, 12) == b"shared pages"
        reservation.unmap(0, page)
        assert reservation.read(page, 12) == b"shared pages"
        reservation.unmap(page, page)


def use_prefixes(context: Context) -> None:
    with small_cache(context) as cache:
        first = started(cache, 2 * ROWS)
        cache.free_reqid(first, tokens=range(2 * ROWS))
        found = cache.alloc_prefix([*range(2 * ROWS), 99])
        assert found is not None
        assert found[1] == 2 * ROWS
        assert rows_are(cache, found[0], 0, 2 * ROWS, 1.0)


def use_trim(context: Context) -> None:
    with small_cache(context) as cache:
        cache.free_reqid(started(cache, ROWS))
        assert cache.stats().mapped_bytes
        assert cache.trim()
        assert cache.stats().mapped_bytes == 0


def use_fork(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, ROWS + 1)
        child = cache.fork(parent)
        assert child is not None
        stamp(cache, parent, ROWS, ROWS + 1, 7.0)  # the last page is the parent's own
        assert rows_are(cache, child, 0, ROWS + 1, 1.0)
        assert cache.stats().shared_pages == 2 * LAYERS


def use_swap(context: Context) -> None:
    with small_cache(context) as cache:
        swapped = cache.swap_out(started(cache, ROWS + 1))
        assert cache.stats().active_pages == 0
        reqid = cache.swap_in(swapped)
        assert reqid is not None
        assert rows_are(cache, reqid, 0, ROWS + 1, 1.0)


def use_recompute(context: Context) -> None:
    limit = 2 * LAYERS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        reqid = started(cache, ROWS)
        assert not cache.can_admit([ROWS])
        cache.free_reqid(reqid)
        assert cache.can_admit([ROWS])
        assert rows_are(cache, started(cache, ROWS, 2.0), 0, ROWS, 2.0)


def use_layouts(context: Context) -> None:
    advice = advise(SHAPES["Llama-3-8B"], generate(4, seed=1), 40 << 30)
    assert advice.best
    with small_cache(context, group_size=LAYERS) as cache:
        assert cache.layout.num_tensors == 2
        assert rows_are(cache, started(cache, ROWS), 0, ROWS, 1.0)


def use_large_entries(context: Context) -> None:
    with (
        context.create(2 * MB, page_size=2 * MB) as large,
        context.create(64 * KB, page_size=64 * KB) as small,
        context.reserve(4 * MB) as reservation,
    ):
        reservation.map(0, large)
        reservation.map(2 * MB, small)
        reservation.write(2 * MB - 4, b"over the edge")
        assert reservation.read(2 * MB - 4, 13) == b"over the edge"
        reservation.unmap(0, 2 * MB + 64 * KB)
    # Nine 256 KiB rows per tensor exceed a 2 MiB block.
    options = {"page_size": 64 * KB, "num_kv_heads": 4 * KB // 4, "memory_limit": 0}
    with (
        Context(context.info.backend, granule=64 * KB, large_entries=True) as own,
        small_cache(own, max_batch=1, **options) as cache,
    ):
        reqid = started(cache, 9)
        assert cache.snapshot()[reqid].large_pages == 2 * MB // (64 * KB)
        assert cache.promote(reqid) == 0
        assert rows_are(cache, reqid, 0, 9, 1.0)


def use_pages_at(location: Location) -> Callable[[Context], None]:
    def use(context: Context) -> None:
        page, device = context.info.granule, context.info.devices[-1]
        with (
            context.create(page, location=location, device=device) as pages,
            context.reserve(page) as reservation,
        ):
            reservation.map(0, pages)
            reservation.write(0, b"elsewhere")
            assert reservation.read(0, 9) == b"elsewhere"
            reservation.unmap(0, page)
        peer = device if location is Location.PEER else None
        with small_cache(context) as cache:
            reqid = started(cache, 2 * ROWS)
            assert cache.move(reqid, location, peer).pages == 4 * LAYERS
            assert cache.snapshot()[reqid].away_pages == 2
            assert rows_are(cache, reqid, 0, 2 * ROWS, 1.0)
            assert cache.move(reqid, "device").pages == 4 * LAYERS
            assert rows_are(cache, reqid, 0, 2 * ROWS, 1.0)

    return use


def use_readonly(context: Context) -> None:
    page = context.info.granule
    with context.reserve(page) as reservation, context.create(page) as pages:
        reservation.map(0, pages, readonly=True)
        with pytest.raises(ReadOnly):
            reservation.write(0, b"x")
        assert reservation.read(0, 1) == b"\0"
        reservation.unmap(0, page)


def use_overread(context: Context) -> None:
    with small_cache(context, sparse=True) as cache:
        reqid = started(cache, ROWS)
        assert cache.reservation.sparse
        if not cache.safe_overread:
            OVERREAD.require(context.info, "reading past the end while memory grows")
        if has_tensors(cache):
            assert bool((cache.k(0)[reqid, ROWS : 3 * ROWS] == 0).all())
        assert rows_are(cache, reqid, 0, ROWS, 1.0)


def use_budget(context: Context) -> None:
    page = context.info.granule
    budget = Budget(context, 4 * LAYERS * page)
    config = small_config(page, memory_limit=0)
    with KVCache(config, budget=budget) as one, KVCache(config, budget=budget) as other:
        reqid = started(one, 2 * ROWS)
        taken = other.alloc_reqid()
        assert taken == 0
        assert other.step(lens(other, r0=ROWS)) == -1
        one.free_reqid(reqid)
        assert other.step(lens(other, r0=ROWS)) == 0
        assert rows_are_zero(other, 0, 0, ROWS)


def use_uneven(context: Context) -> None:
    page = context.info.granule
    shapes = [LayerShape(page // 2048, 64), LayerShape(2, page // 32, 0)]
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 16, "page_size": page}
    with LayeredCache(shapes, context, memory_limit=64 * page, **options) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([9, 0]) == 0
        assert [one.snapshot()[0].granted_pages for one in cache.caches] == [2, 3]
        for one in cache.caches:
            write_rows(one, 0, 0, list(range(1, 10)))
        assert all(read_rows(one, 0, 0, list(range(1, 10))) for one in cache.caches)
        cache.check_integrity()


def use_window(context: Context) -> None:
    with small_cache(context, window=ROWS, window_tile=0) as cache:
        reqid = started(cache, 4 * ROWS)
        assert cache.step(lens(cache, r0=4 * ROWS + 1)) == 0
        eventually(lambda: cache.snapshot()[reqid].mapped_pages == 2)
        assert rows_are(cache, reqid, 3 * ROWS, 4 * ROWS, 1.0)


USES: dict[str, Callable[[Context], None]] = {
    "demand": use_demand,
    "small_pages": use_small_pages,
    "reclaim": use_reclaim,
    "parallel": use_parallel,
    "aliases": use_aliases,
    "prefixes": use_prefixes,
    "trim": use_trim,
    "fork": use_fork,
    "swap": use_swap,
    "recompute": use_recompute,
    "layouts": use_layouts,
    "large_entries": use_large_entries,
    "host_pages": use_pages_at(Location.HOST),
    "peer_pages": use_pages_at(Location.PEER),
    "readonly": use_readonly,
    "overread": use_overread,
    "budget": use_budget,
    "uneven": use_uneven,
    "window": use_window,
}


def held(context: Context) -> tuple[int, ...]:
    """Returns the state that a rejected call must not change."""
    now = context.stats()
    return now.reserved_bytes, now.mapped_bytes, now.used_bytes, now.handles, now.reservations


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: one.key)
def test_the_table_holds(context: Context, feature: Feature) -> None:
    if feature.lacks_packages():
        pytest.skip(", ".join(feature.lacks_packages()))
    before = held(context)
    lacks = feature.lacks(context.info)
    if lacks:
        name = context.info.backend
        with pytest.raises((NotSupported, InvalidArgument), match=rf"\b{name}\b"):
            USES[feature.key](context)
    else:
        USES[feature.key](context)
    context.check()
    assert held(context) == before


def test_every_row_has_a_use_and_a_unique_name() -> None:
    keys = [one.key for one in FEATURES]
    assert keys == list(USES)
    assert len({one.name for one in FEATURES}) == len(keys)


# ---- rejection on a weaker back end -------------------------------------------------------------

PARENT = 2 * ROWS
TOKENS = range(PARENT)


def fork(cache: KVCache) -> object:
    return cache.fork(0)


def fork_many(cache: KVCache) -> object:
    return cache.fork_many(0, 2)


def record(cache: KVCache) -> object:
    return cache.record(0, TOKENS)


def record_last(cache: KVCache) -> object:
    return cache.free_reqid(0, tokens=TOKENS)


@pytest.mark.parametrize("call", [fork, fork_many, record, record_last])
@pytest.mark.parametrize("cap", [Caps.ALIAS, Caps.READONLY], ids=["alias", "readonly"])
def test_calls_without_the_capability_are_rejected(
    context: Context, call: Callable[[KVCache], object], cap: Caps
) -> None:
    feature = FORK if call in (fork, fork_many) else PREFIXES
    what = "fork" if feature is FORK else "record"
    with small_cache(context) as cache:
        started(cache, PARENT)
        whole = context.info
        without(context, cap)
        assert f"VMEM_CAP_{cap.name}" in feature.lacks(context.info)
        before = state(cache)
        text = rf"{what}: back end {context.info.backend} has no VMEM_CAP_{cap.name} \("
        with pytest.raises(NotSupported, match=text):
            call(cache)
        assert state(cache) == before
        assert rows_are(cache, 0, 0, PARENT, 1.0)
        context.info = whole
        if not feature.lacks(whole):
            call(cache)


def test_a_match_cannot_be_mapped_without_aliases(context: Context) -> None:
    if PREFIXES.lacks(context.info):
        pytest.skip("nothing can be recorded")
    with small_cache(context) as cache:
        cache.free_reqid(started(cache, PARENT), tokens=TOKENS)
        cache.trim()  # otherwise the slot would still have its pages, and nothing would be mapped
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        without(context, Caps.ALIAS)
        before = state(cache)
        with pytest.raises(NotSupported, match=r"alloc_prefix: back end .* VMEM_CAP_ALIAS"):
            cache.alloc_prefix([*TOKENS, 1])
        assert state(cache) == before


# ---- the table's rows ----------------------------------------------------------------------------


def test_errors_name_what_is_missing() -> None:
    info = Probed("poor", Caps.ALIAS, (2 * MB,), (0,))
    by_key = {one.key: one for one in FEATURES}
    assert by_key["demand"].lacks(info) == []
    assert by_key["small_pages"].lacks(info) == ["pages of 64 KB"]
    assert by_key["peer_pages"].lacks(info) == ["VMEM_CAP_PEER", "2 devices"]
    assert by_key["fork"].lacks(info) == ["VMEM_CAP_READONLY"]
    assert by_key["parallel"].needs() == ["package torch"]
    assert Feature("x", "", "", "", packages=("no_such_package",)).lacks_packages() == [
        "package no_such_package"
    ]
    text = "move: back end poor has no VMEM_CAP_PEER (pages in a peer device), no 2 devices"
    with pytest.raises(NotSupported) as caught:
        by_key["peer_pages"].require(info, "move")
    assert str(caught.value) == text
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(InvalidArgument, match=r"page_size must be one of .*, 2097152, not 4096"):
        require_page_size(info, 4096)
    sparse = Probed("rich", Caps.SPARSE, (), ())
    SPARSE.require(sparse, "sparse")
    with pytest.raises(
        NotSupported, match="over-read: back end rich has no VMEM_CAP_SPARSE_ATOMIC"
    ):
        OVERREAD.require(sparse, "over-read")


def test_a_record_agrees_with_the_context(context: Context) -> None:
    kept = Probed.of(json.loads(json.dumps(about(context.info))))
    info = context.info
    assert kept == Probed(info.backend, info.caps, info.page_sizes, info.devices)
    for one in FEATURES:
        assert one.lacks(kept) == one.lacks(info)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "features.json"
    assert cli.main(["features", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert (report["format"], report["tool"]) == (1, "vmem features")
    usable = {one.backend: one.usable for one in probe()}
    assert {one["backend"]: one["usable"] for one in report["backends"]} == usable
    for one in report["backends"]:
        if not one["usable"]:
            assert f"{one['backend']}: not usable here: {one['reason']}" in text
    assert [row["key"] for row in report["features"]] == [one.key for one in FEATURES]
    host = {row["key"]: row["lacks"]["host"] for row in report["features"]}
    assert host["fork"] == []
    assert host["host_pages"] == []
    assert host["peer_pages"] == ["VMEM_CAP_PEER", "2 devices"]
    assert "no: VMEM_CAP_PEER" in text
    with pytest.raises(SystemExit, match="2"):
        cli.main(["features", "--devices", "zero"])
    assert "'zero': expected a CUDA ordinal" in capsys.readouterr().err
