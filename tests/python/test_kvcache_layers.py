# SPDX-License-Identifier: MIT
"""Tests layers of unequal shapes, such as MLA's single tensor, that grow in the same step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import open_context
from kvcache_helpers import eventually
from move_helpers import in_slabs, with_tiers
from share_helpers import read_rows, write_rows

from pyvmem import (
    BadHandle,
    Busy,
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    OutOfMemory,
    VMemError,
)
from pyvmem.kvcache import Budget, IntegrityError, LayeredCache, LayerShape, StateShape
from pyvmem.models.shapes import classes_of


def units(page: int) -> int:
    """Returns the number of heads, of 64 float32 elements each, that fill an eighth of a page."""
    return page // (8 * 64 * 4)


def uneven(page: int) -> list[LayerShape]:
    """Returns layers that form four groups: wide, narrow, and one each for the keys and the
    narrower values of the last layer.
    """
    heads = units(page)
    return [
        LayerShape(2 * heads, 64),
        LayerShape(heads, 64),
        LayerShape(2 * heads, 64),
        LayerShape(heads, 96, 32),
    ]


def layered(context: Context, pages: int = 400, **changes: Any) -> LayeredCache:
    page = context.info.granule
    policy: dict[str, Any] = {
        "dtype": "float32",
        "max_batch": 4,
        "max_seq_len": 40,
        "page_size": page,
        "memory_limit": pages * page,
        "low_watermark": 0.0,
    }
    policy.update(changes)
    return LayeredCache(uneven(page), context, **policy)


def write(cache: LayeredCache, reqid: int, low: int, tags: list[int]) -> None:
    for one in cache.caches:
        write_rows(one, reqid, low, tags)


def holds(cache: LayeredCache, reqid: int, tags: list[int]) -> bool:
    return all(read_rows(one, reqid, 0, tags) for one in cache.caches)


def state(cache: LayeredCache) -> list[Any]:
    """Returns the slots' lengths and granted pages, which a failed call must not change."""
    return [
        [(slot.reqid, slot.seq_len, slot.granted_pages) for slot in one.snapshot()]
        for one in cache.caches
    ]


def note_ahead(
    cache: LayeredCache, owned: dict[int, list[int]], want: dict[int, list[int]]
) -> None:
    """Updates `owned` with the pages that `step_async` mapped before `step` ran short; checks that
    they are at most those in `want`.
    """
    for place, one in enumerate(cache.caches):
        for slot in one.snapshot():
            if slot.reqid in owned:
                now = slot.granted_pages * one.layout.num_tensors
                assert owned[slot.reqid][place] <= now <= want[slot.reqid][place]
                owned[slot.reqid][place] = now


# ---- one tensor per layer ------------------------------------------------------------------------


def test_a_layer_may_have_one_tensor(context: Context) -> None:
    page = context.info.granule
    config = KVCacheConfig(
        num_layers=3,
        num_kv_heads=1,
        head_dim=576,
        tensors_per_layer=1,
        dtype="bfloat16",
        max_batch=2,
        max_seq_len=3 * page // 1152 + 1,
        page_size=page,
        memory_limit=64 * page,
    )
    with KVCache(config, context) as cache:
        assert cache.layout.num_tensors == 3
        assert cache.layout.row_bytes == 1152
        reqid = cache.alloc_reqid()
        assert reqid == 0
        rows = page // 1152 + 1
        assert cache.step([rows, 0]) == 0
        assert cache.stats().active_pages == 2 * 3
        tags = [1 + row for row in range(rows)]
        write_rows(cache, reqid, 0, tags)
        assert read_rows(cache, reqid, 0, tags)
        with pytest.raises(
            InvalidArgument, match="layer 2 stores no values: tensors_per_layer is 1"
        ):
            cache.v(2)
        cache.check_integrity()


@pytest.mark.needs_tensors
def test_the_tensor_of_a_layer_with_one(context: Context) -> None:
    page = context.info.granule
    config = KVCacheConfig(4, 1, 64, tensors_per_layer=1, group_size=2, dtype="float32",
                           max_batch=2, max_seq_len=16, page_size=page)  # fmt: skip
    with KVCache(config, context) as cache:
        assert len(cache.tensors) == 2
        assert cache.k(3).shape == (2, 16, 1, 64)
        cache.alloc_reqid()
        assert cache.step([4, 0]) == 0
        for layer in range(4):
            cache.k(layer)[0, :4] = layer + 1.0
        for layer in range(4):
            assert bool((cache.k(layer)[0, :4] == layer + 1.0).all())


def test_tensors_per_layer_is_one_or_two() -> None:
    for value in (0, 3):
        with pytest.raises(InvalidArgument, match=f"tensors_per_layer is {value}; it must be"):
            KVCacheConfig(1, 1, 64, tensors_per_layer=value)


# ---- classes -------------------------------------------------------------------------------------


def test_equal_layers_share_a_group(context: Context) -> None:
    page = context.info.granule
    with layered(context) as cache:
        found = [
            (one.config.num_layers, one.config.tensors_per_layer, one.layout.row_bytes)
            for one in cache.caches
        ]
        row = units(page) * 4
        assert found == [
            (2, 2, 2 * row * 64),
            (1, 2, row * 64),
            (1, 1, row * 96),
            (1, 1, row * 32),
        ]


def test_every_group_gets_pages_for_its_own_rows(context: Context) -> None:
    with layered(context) as cache:
        reqid = cache.alloc_reqid(20)
        assert reqid is not None
        lens = [0] * 4
        lens[reqid] = 20
        assert cache.step_async(lens) == 0
        assert cache.step(lens) == 0
        pages = [one.snapshot()[reqid].granted_pages for one in cache.caches]
        assert pages == [5, 3, 4, 2]  # 4, 8, 5 1/3 and 16 rows per page
        tags = list(range(1, 21))
        write(cache, reqid, 0, tags)
        assert holds(cache, reqid, tags)
        cache.free_reqid(reqid)
        assert cache.trim() >= 0
        assert cache.budget.stats().used_bytes == 0
        cache.check_integrity()


def test_if_one_group_is_short_none_changes(context: Context) -> None:
    # 20 rows need 5 * 4 + 3 * 2 + 4 + 2 = 32 pages; each group would fit on its own.
    for pages, ahead in ((31, False), (31, True), (21, False), (27, True)):
        with layered(context, pages) as cache:
            assert not cache.can_admit([20])
            reqid = cache.alloc_reqid()
            assert reqid is not None
            lens = [0] * 4
            lens[reqid] = 4
            assert cache.step(lens) == 0
            write(cache, reqid, 0, [1, 2, 3, 4])
            before = state(cache)
            lens[reqid] = 20
            assert (cache.step_async(lens) if ahead else cache.step(lens)) == -1
            assert state(cache) == before
            cache.check_integrity()
            lens[reqid] = 8  # any request can use the pages that the first groups mapped
            assert cache.step(lens) == 0
            assert holds(cache, reqid, [1, 2, 3, 4])
            cache.check_integrity()
    with layered(context, 32) as cache:
        assert cache.can_admit([20])
        reqid = cache.alloc_reqid()
        assert reqid is not None
        lens = [0] * 4
        lens[reqid] = 20
        assert cache.step(lens) == 0


@pytest.mark.needs_tensors
def test_tensors_of_the_layers(context: Context) -> None:
    heads = units(context.info.granule)
    with layered(context) as cache:
        cache.alloc_reqid()
        assert cache.step([8, 0, 0, 0]) == 0
        assert cache.k(2).shape == (4, 40, 2 * heads, 64)
        assert cache.k(3).shape == (4, 40, heads, 96)
        assert cache.v(3).shape == (4, 40, heads, 32)
        for layer in range(4):
            cache.k(layer)[0, :8] = layer + 1.0
            cache.v(layer)[0, :8] = -layer - 1.0
        for layer in range(4):
            assert bool((cache.k(layer)[0, :8] == layer + 1.0).all())
            assert bool((cache.v(layer)[0, :8] == -layer - 1.0).all())
        kept = cache.k(0)
        with pytest.raises(Busy, match="live tensor"):
            cache.close()
        assert cache.step([9, 0, 0, 0]) == 0
        del kept


def test_a_budget_can_be_shared_with_another_cache(context: Context) -> None:
    page = context.info.granule
    budget = Budget(context, 40 * page)
    small = KVCacheConfig(1, units(page), 64, dtype="float32", max_batch=2, max_seq_len=40,
                          page_size=page, memory_floor=8 * page, low_watermark=0)  # fmt: skip
    with KVCache(small, budget=budget), layered(context, 0, memory_limit=0) as alone:
        assert alone.budget is not budget
    policy = {"dtype": "float32", "max_batch": 4, "max_seq_len": 40, "page_size": page}
    with (
        KVCache(small, budget=budget) as other,
        LayeredCache(uneven(page), budget=budget, **policy) as cache,
    ):
        cache.alloc_reqid()
        assert cache.can_admit([20])
        assert not cache.can_admit([24])
        assert cache.step([20, 0, 0, 0]) == 0
        assert other.memory.num_free_pages == 8


def test_its_own_context(backend: str) -> None:
    granule = 4096 if backend == "host" else 0
    cache = LayeredCache([LayerShape(1, 64)], backend=backend, page_size=granule, max_batch=1,
                         memory_limit=4 << 20)  # fmt: skip
    with cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([3]) == 0
    assert not cache.budget.context.is_open
    with pytest.raises(BadHandle, match="the LayeredCache is closed"):
        cache.step([3])


@pytest.mark.parametrize("number", [torch.tensor, np.array, np.int64])
def test_a_shape_has_plain_numbers(number: Any) -> None:
    """Equal layers form one group, regardless of the numeric types of their sizes."""
    shapes = [LayerShape(number(2), number(64), window=number(9)), LayerShape(2, 64, 64, 9)]
    assert repr(shapes[0]) == repr(shapes[1])
    assert len(classes_of(shapes)[0]) == 1
    states = [StateShape(conv=(number(3), number(4))), StateShape(conv=(3, 4))]
    assert repr(states[0]) == repr(states[1])


def test_bad_input(context: Context) -> None:
    page = context.info.granule
    for shape, text in (
        ((0, 64), "num_kv_heads is 0"),
        ((1, 0), "head_dim is 0"),
        ((1, 64, -1), "v_head_dim is -1"),
        ((1, 64, 64, -1), "window is -1"),
        ((1, 1.5), "head_dim must be a whole number, not 1.5"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            LayerShape(*shape)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least one layer"):
        LayeredCache([], context)
    with pytest.raises(InvalidArgument, match="layer 1 is 'full'; it must be a LayerShape, State"):
        LayeredCache([LayerShape(1, 8), "full"], context=context)  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="head_dim is set by the layers"):
        layered(context, head_dim=64)
    with pytest.raises(InvalidArgument, match="less than one page in every tensor"):
        layered(context, 7)
    with pytest.raises(InvalidArgument, match="group_size 2 does not divide num_layers 1"):
        layered(context, group_size=2)
    with pytest.raises(InvalidArgument, match="with a given budget"):
        LayeredCache(uneven(page), budget=Budget(context, 64 * page), memory_limit=64 * page)
    with layered(context) as cache:
        for call in (cache.k, cache.v):
            with pytest.raises(InvalidArgument, match="layer 4 is not between 0 and 3"):
                call(4)
        before = state(cache)
        for lens, text in (
            ([1, 0, 0, 0], "reqid 0 is not taken"),
            ([0] * 3, r"len\(seq_lens\) is 3; it must be max_batch, 4"),
            ([0, -1, 0, 0], "must not be negative"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                cache.step(lens)
        with pytest.raises(InvalidArgument, match="reqid 1 is not taken"):
            cache.free_reqid(1)
        assert state(cache) == before
    latent = LayeredCache([LayerShape(1, 576, 0)], context, max_batch=1, page_size=page)
    with latent, pytest.raises(InvalidArgument, match="layer 0 stores no values"):
        latent.v(0)


@pytest.mark.parametrize("policy", [{}, {"deferred_reclaim": False}, {"zero_fill": False}])
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: dict[str, Any], seed: int) -> None:
    """Compares rows and shortages with a plain count of the requests' pages in all groups."""
    total = 80
    choose = random.Random(seed)
    with layered(context, total, **policy) as cache:
        rows: dict[int, list[int]] = {}
        owned: dict[int, list[int]] = {}
        refused = 0
        for tag in range(1, 120):
            pick = choose.random()
            if pick < 0.3:
                reqid = cache.alloc_reqid(choose.randint(0, 40))
                assert (reqid is None) == (len(rows) == 4)
                if reqid is not None:
                    rows[reqid], owned[reqid] = [], [0] * 4
            elif pick < 0.8:
                lens = [0] * 4
                for reqid in rows:
                    lens[reqid] = min(40, len(rows[reqid]) + choose.choice((0, 1, 4, 11)))
                want = {
                    reqid: [
                        max(had, one.layout.pages_for(lens[reqid]) * one.layout.num_tensors)
                        for had, one in zip(owned[reqid], cache.caches, strict=True)
                    ]
                    for reqid in rows
                }
                fits = sum(map(sum, want.values())) <= total
                ahead = choose.random() < 0.4
                before = state(cache)
                begun = ahead and cache.step_async(lens) == 0
                done = begun == ahead and cache.step(lens) == 0
                assert done == fits
                if not done:
                    refused += 1
                    if begun:  # the step ran short after step_async had already mapped pages
                        note_ahead(cache, owned, want)
                    else:
                        assert state(cache) == before
                    gone = max(rows, key=lambda reqid: len(rows[reqid]))
                    cache.free_reqid(gone)
                    del rows[gone], owned[gone]
                    continue
                owned = want
                for reqid, held in rows.items():
                    more = [tag] * (lens[reqid] - len(held))
                    write(cache, reqid, len(held), more)
                    held.extend(more)
            elif rows:
                gone = choose.choice(list(rows))
                cache.free_reqid(gone)
                del rows[gone], owned[gone]
            if tag % 10 == 0:
                cache.check_integrity()
                assert all(holds(cache, reqid, held) for reqid, held in rows.items())
        assert refused


def test_integrity_compares_the_groups(context: Context) -> None:
    with layered(context) as cache:
        reqid = cache.alloc_reqid()
        assert reqid is not None
        lens = [0] * len(cache.caches[0].snapshot())
        lens[reqid] = 3
        assert cache.step(lens) == 0
        cache.check_integrity()
        group = cache._groups[1]
        group.pager.columns.held_rows[reqid] = group.used_tokens = 2  # consistent within this group
        with pytest.raises(IntegrityError, match=rf"slot {reqid}, by group: \[3, 2"):
            cache.check_integrity()
        group.pager.columns.held_rows[reqid] = group.used_tokens = 3
        cache.check_integrity()


# ---- pages that move under their requests --------------------------------------------------------

DRIVER = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL


def narrow_and_wide(context: Context, **changes: Any) -> LayeredCache:
    """Creates two groups, the smaller one first: eight and four rows per page."""
    page = context.info.granule
    policy: dict[str, Any] = {
        "dtype": "float32",
        "max_batch": 3,
        "max_seq_len": 64,
        "page_size": page,
        "memory_limit": 400 * page,
        "low_watermark": 0.0,
        "growth_fraction": 0,
    }
    heads = units(page)
    layers = [LayerShape(heads, 64), LayerShape(2 * heads, 64)]
    return LayeredCache(layers, context, **{**policy, **changes})


def begin(cache: LayeredCache, rows: int, by: int = 0) -> list[int]:
    """Starts request 0 with `rows` rows; returns their tags."""
    assert cache.alloc_reqid() == 0
    for end in [*range(by, rows, by), rows] if by else [rows]:
        assert cache.step([end, *[0] * (len(cache.caches[0].snapshot()) - 1)]) == 0
    tags = list(range(1, rows + 1))
    write(cache, 0, 0, tags)
    return tags


def away(cache: LayeredCache) -> list[int]:
    return [one.snapshot()[0].away_pages for one in cache.caches]


def at_rest(cache: LayeredCache, want: list[int]) -> bool:
    """Makes a step; returns true if nothing is in flight and, per group, `want` pages of request 0
    are off-device.
    """
    assert cache.step([slot.seq_len for slot in cache.caches[0].snapshot()]) == 0
    slots = [one.snapshot()[0] for one in cache.caches]
    return away(cache) == want and not any(slot.moving_pages or slot.in_flight for slot in slots)


@pytest.mark.parametrize("wait", [False, True])
def test_a_move_is_for_all_layers_or_none(backend: str, wait: bool) -> None:
    """The limit applies to all layers together, and is enough only for the narrow ones."""
    with with_tiers(backend) as context:
        page = context.info.granule
        with narrow_and_wide(context, host_limit=11 * page) as cache:
            tags = begin(cache, 16)  # two pages in each of two tensors, and four pages
            before = [one.snapshot() for one in cache.caches]
            held = cache.stats().mapped_bytes
            with pytest.raises(OutOfMemory, match=f"host has {7 * page} bytes") as caught:
                cache.move(0, "host", wait=wait)
            assert caught.value.limit == 7 * page
            # A step frees the copies' pages once the copies have completed.
            eventually(lambda: at_rest(cache, [0, 0]) and not cache.stats().host_pages)
            assert [one.snapshot() for one in cache.caches] == before
            assert cache.stats().mapped_bytes == held
            cache.check_integrity()
            assert holds(cache, 0, tags)
            assert cache.move(0, "host", tokens=(0, 8), wait=wait).pages == 2 + 4
            eventually(lambda: at_rest(cache, [1, 2]))
            assert holds(cache, 0, tags)
            cache.check_integrity()


@pytest.mark.parametrize("wait", [False, True])
def test_a_move_that_finds_no_memory_for_some_layers(backend: str, wait: bool) -> None:
    """There is only enough memory for the narrow layers' new pages."""
    with with_tiers(backend) as probe:
        slab = 4 * probe.info.granule
    with open_context(backend, slab_size=slab, mem_limit=5 * slab) as context:
        if context.info.slab_size != slab:
            pytest.skip("slabs are larger than requested")
        with narrow_and_wide(context) as cache:
            tags = begin(cache, 16)  # fills three slabs
            before, used = [one.snapshot() for one in cache.caches], context.stats().used_bytes
            with pytest.raises(OutOfMemory):
                cache.move(0, "host", wait=wait)
            # A step frees the copies' pages once the copies have completed.
            eventually(lambda: at_rest(cache, [0, 0]) and context.stats().used_bytes == used)
            assert [one.snapshot() for one in cache.caches] == before
            cache.check_integrity()
            assert holds(cache, 0, tags)
            cache.trim()
            assert cache.move(0, "host", tokens=(8, 16)).pages == 2 + 4
            assert holds(cache, 0, tags)


def test_every_driver_call_of_a_move_of_several_groups_fails_once(backend: str) -> None:
    """New pages are allocated in all groups or none, but they may be mapped in only one group."""
    seen, skip = set(), 0
    while True:
        with with_tiers(backend) as context, narrow_and_wide(context) as cache:
            tags = begin(cache, 16)
            context.inject(DRIVER, skip=skip, count=1)
            try:
                cache.move(0, "host")
                failed = False
            except VMemError:
                failed = True
            context.inject(DRIVER, count=0)
            seen.add((failed, *away(cache)))
            cache.check_integrity()
            assert holds(cache, 0, tags)
            cache.step([16, 0, 0])
            cache.move(0, "host")
            assert away(cache) == [2, 4]
            assert holds(cache, 0, tags)
            cache.check_integrity()
        if not failed:
            break
        skip += 1
    assert {(True, 0, 0), (False, 2, 4)} <= seen <= {(True, 0, 0), (True, 2, 0), (False, 2, 4)}


def test_a_promotion_of_several_classes(backend: str) -> None:
    """Each group's own blocks are promoted; if a driver call fails, no row is lost."""
    skip = 0
    while True:
        with in_slabs(backend) as context, narrow_and_wide(context) as cache:
            tags = begin(cache, 64, by=4)
            context.inject(DRIVER, skip=skip, count=1)
            try:
                parts = cache.promote(0, wait=True)
                failed = False
            except VMemError:
                failed = True
            context.inject(DRIVER, count=0)
            cache.check_integrity()
            assert holds(cache, 0, tags)
            if not failed:
                assert 0 < parts <= 2 + 4
                break
            eventually(lambda: at_rest(cache, [0, 0]))
            assert holds(cache, 0, tags)
        skip += 1
    assert skip, "no driver call failed"


def test_a_promotion_without_blocks_is_rejected(context: Context) -> None:
    with narrow_and_wide(context) as cache:
        begin(cache, 16)
        with pytest.raises(InvalidArgument, match="no slot has a block"):
            cache.promote(0)


def test_a_request_continues_after_one_group_lost_its_rows(context: Context) -> None:
    """The request's pages in the other group are freed when it ends."""
    with narrow_and_wide(context, deferred_reclaim=False) as cache:
        begin(cache, 16)
        request = 0
        sound = cache._groups[1].table[request]
        with cache._lock, cache._journal:
            cache._groups[0].table.lose(cache._groups[0].table[request], DriverError("lost"))
        other = cache.alloc_reqid()
        assert sound.active
        assert not sound.broken
        cache.free_reqid(request)
        assert sound.mapped == 0
        assert cache.fork_many(other, 2) is None
        assert sound.broken


def test_a_slot_retired_in_one_group_is_used_in_none(context: Context) -> None:
    """Each group has retired a different slot; neither slot is used."""
    with narrow_and_wide(context) as cache:
        with cache._lock, cache._journal:
            for index, group in enumerate(cache._groups):
                group.table.mark_broken(group.table[index])
        assert cache.alloc_reqid() == 2
        assert cache.fork(2) is None
        assert cache.alloc_reqid() is None
