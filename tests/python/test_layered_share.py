# SPDX-License-Identifier: MIT
"""Checks that a fork, prefix or swap takes effect in all of a cache's unequal layers or in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from share_helpers import ShareModel, read_rows
from test_kvcache_layers import holds, layered, state, uneven, write

from pyvmem import (
    BadHandle,
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    OutOfMemory,
    VMemError,
)
from pyvmem.kvcache import LayeredCache, LayerShape, PrefixEvicted, swap
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.sharing import Sharing

UNIT = 16  # tokens that fill whole pages in every group; the groups' own units are 4, 8, 16 and 16
PAGES = 4 * 4 + 2 * 2 + 3 + 1  # pages per unit: tensors times pages, summed over the groups
LONGEST = 5 * UNIT


def shared(context: Context, pages: int = 20 * PAGES, **changes: Any) -> LayeredCache:
    return layered(context, pages, **{"max_seq_len": LONGEST, **changes})


def started(cache: LayeredCache, rows: int, first: int = 1) -> tuple[int, list[int]]:
    """Starts a request of `rows` rows; returns its reqid and the rows' tags."""
    reqid = cache.alloc_reqid(rows)
    assert reqid is not None
    return reqid, grown(cache, reqid, [], [first + row for row in range(rows)])


def grown(cache: LayeredCache, reqid: int, tags: list[int], more: list[int]) -> list[int]:
    lens = [slot.seq_len for slot in cache.caches[0].snapshot()]
    lens[reqid] = len(tags) + len(more)
    assert cache.step(lens) == 0
    write(cache, reqid, len(tags), more)
    return tags + more


# ---- forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, UNIT - 3, UNIT, 2 * UNIT + 5])
def test_a_fork_has_the_rows_of_every_group(context: Context, rows: int) -> None:
    with shared(context) as cache:
        parent, tags = started(cache, rows)
        children = cache.fork_many(parent, 2)
        assert children is not None
        assert len({parent, *children}) == 3
        for child in children:
            assert holds(cache, child, tags)
            assert [one.snapshot()[child].seq_len for one in cache.caches] == [rows] * 4
        whole = [rows * one.layout.row_bytes // one.layout.page_size for one in cache.caches]
        assert [one.snapshot()[parent].shared_pages for one in cache.caches] == whole
        one, other = (
            grown(cache, child, tags, [1000 * child + 1000, 1000 * child + 1001])
            for child in children
        )
        assert holds(cache, parent, tags)
        cache.free_reqid(parent)
        assert holds(cache, children[0], one)
        assert holds(cache, children[1], other)
        cache.check_integrity()


def test_a_fork_at_a_length(context: Context) -> None:
    with shared(context) as cache:
        parent, tags = started(cache, 2 * UNIT)
        child = cache.fork(parent, length=UNIT + 3)
        assert child is not None
        assert holds(cache, child, tags[: UNIT + 3])
        empty = cache.fork(parent, length=0)
        assert empty is not None
        assert [one.snapshot()[empty].mapped_pages for one in cache.caches] == [0] * 4
        before = state(cache)
        for call, text in (
            (lambda: cache.fork(parent, length=99), "length 99: reqid .* holds 32"),
            (lambda: cache.fork(3), "reqid 3 is not taken"),
            (lambda: cache.fork_many(parent, 0), "fork of 0 requests"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                call()
        assert cache.fork_many(parent, 2) is None  # only one slot is free
        assert state(cache) == before
        cache.check_integrity()


def test_a_fork_for_which_one_group_is_short(context: Context) -> None:
    # One token past a unit, each child needs a page in all 8 tensors; only 7 pages are free.
    with shared(context, 2 * PAGES + 8 - 8 * 2 + 7) as cache:
        parent, tags = started(cache, UNIT + 1)
        before = state(cache)
        free = cache.stats().free_pages
        assert free == PAGES - 9
        forked = cache.fork_many(parent, 1)
        assert forked is not None
        cache.free_reqid(forked[0])
        assert cache.fork_many(parent, 2) is None
        assert state(cache) == before
        assert holds(cache, parent, tags)
        cache.check_integrity()
        cache.trim()
        assert cache.stats().free_pages == free
        grown(cache, parent, tags, [7])


Call = Callable[[LayeredCache, int], Any]


def record(cache: LayeredCache, parent: int) -> Any:
    return cache.record(parent, range(2 * UNIT))


def free_recorded(cache: LayeredCache, parent: int) -> Any:
    return cache.free_reqid(parent, tokens=range(2 * UNIT))


def fork_two(cache: LayeredCache, parent: int) -> Any:
    return cache.fork_many(parent, 2)


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("error", [OutOfMemory, DriverError])
def test_a_fork_that_fails_in_a_later_group_changes_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch, place: int, error: type[VMemError]
) -> None:
    with shared(context) as cache:
        parent, tags = started(cache, 2 * UNIT + 1)
        cache.record(parent, range(2 * UNIT))
        before, pages = state(cache), cache.stats().active_pages
        group = cache._groups[place]

        def broken(real: Any, owner: Any) -> Any:
            def call(self: Any, *args: Any, **more: Any) -> Any:
                if self is owner:
                    raise error("the driver has no more of it")
                return real(self, *args, **more)

            return call

        with monkeypatch.context() as patch:
            # maps the pages of a prefix
            patch.setattr(Group, "lend_edits", broken(Group.lend_edits, group))
            # maps the pages of a fork
            patch.setattr(Sharing, "map_at", broken(Sharing.map_at, group.sharing))
            if error is OutOfMemory:
                assert cache.fork(parent) is None
                assert cache.alloc_prefix(range(2 * UNIT)) is None
            else:
                for call in (cache.fork, lambda _: cache.alloc_prefix(range(2 * UNIT))):
                    with pytest.raises(error, match="no more of it"):
                        call(parent)
        assert state(cache) == before
        assert cache.stats().active_pages == pages
        assert holds(cache, parent, tags)
        cache.check_integrity()
        child = cache.fork(parent)
        assert child is not None
        assert holds(cache, child, tags)


@pytest.mark.parametrize("call", [fork_two, record, free_recorded])
def test_every_driver_call_may_fail(context: Context, call: Call) -> None:
    """Fails the first map or unmap of the call, then the second, and so on, until the call
    succeeds."""
    for kind in (Inject.MAP, Inject.UNMAP, Inject.HEAP):
        for skip in range(200):
            with shared(context) as cache:
                parent, tags = started(cache, 2 * UNIT + 1)
                before = state(cache)
                context.inject(kind, skip=skip, count=1)
                try:
                    done = call(cache, parent)
                    failed = call is fork_two and done is None
                except VMemError:
                    failed = True
                finally:
                    context.inject(kind, count=0)
                cache.check_integrity()
                if failed:
                    assert [list(map(tuple, one)) for one in state(cache)] == before
                    assert holds(cache, parent, tags)
                    assert cache.match(range(2 * UNIT), leave=0).length == 0
                    call(cache, parent)
                    cache.check_integrity()
                    continue
                break
        else:
            pytest.fail("the call never succeeded")


# ---- prefixes ------------------------------------------------------------------------------------


def test_the_sharing_unit_fills_whole_pages_in_every_group(context: Context) -> None:
    with shared(context) as cache:
        assert cache.sharing_unit == UNIT
        for one in cache.caches:
            assert UNIT * one.layout.row_bytes % one.layout.page_size == 0


def test_a_cached_prefix_is_mapped_in_every_group(context: Context) -> None:
    with shared(context) as cache:
        first, tags = started(cache, 2 * UNIT + 7)
        tokens = list(range(100, 100 + 2 * UNIT + 7))
        assert cache.match(tokens).length == 0
        assert cache.record(first, tokens) == 2 * UNIT
        assert cache.stats().prefix_tokens == 2 * UNIT
        assert cache.stats().prefix_pages == 2 * PAGES
        found = cache.alloc_prefix(tokens)
        assert found is not None
        reqid, length = found
        assert length == 2 * UNIT
        assert holds(cache, reqid, tags[:length])
        other = [*tokens[: UNIT + 3], 1, 2, 3]  # the run is split after its first unit
        found = cache.alloc_prefix(cache.match(other))
        assert found is not None
        assert found[1] == UNIT
        assert holds(cache, found[0], tags[:UNIT])
        own = grown(cache, found[0], tags[:UNIT], list(range(500, 500 + UNIT)))
        cache.free_reqid(found[0], tokens=[*tokens[:UNIT], *range(UNIT)])
        cache.check_integrity()
        found = cache.alloc_prefix([*tokens[:UNIT], *range(UNIT), 0])
        assert found is not None
        assert found[1] == 2 * UNIT
        assert holds(cache, found[0], own)
        assert holds(cache, first, tags)
        miss = cache.alloc_prefix([5, 6, 7])
        assert miss is not None
        assert miss[1] == 0
        assert cache.alloc_prefix(tokens) is None  # every slot is taken
        cache.check_integrity()


def test_prefixes_are_evicted_from_all_groups_when_memory_is_short(context: Context) -> None:
    with shared(context, 5 * PAGES) as cache:
        for turn in range(3):
            reqid, _ = started(cache, UNIT, first=10 * turn)
            cache.free_reqid(reqid, tokens=[turn] * UNIT)
        kept = cache.alloc_prefix([2] * UNIT, leave=0)
        assert kept is not None
        cache.trim()
        assert cache.stats().prefix_tokens == 3 * UNIT
        assert cache.can_admit([4 * UNIT])
        assert not cache.can_admit([4 * UNIT + 1])
        long, tags = started(cache, 4 * UNIT, first=1000)
        assert cache.match([2] * UNIT, leave=0).length == UNIT  # kept, because a request uses it
        assert cache.match([0] * UNIT, leave=0).length == 0
        assert holds(cache, long, tags)
        assert holds(cache, kept[0], [20 + row for row in range(UNIT)])
        cache.check_integrity()
        cache.free_reqid(long)
        cache.free_reqid(kept[0])
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0
        assert cache.budget.stats().used_bytes == 0
        cache.check_integrity()


def test_no_more_prefixes_are_evicted_than_needed(context: Context) -> None:
    with shared(context, 4 * PAGES) as cache:
        for turn in range(4):
            reqid, _ = started(cache, UNIT)
            cache.free_reqid(reqid, tokens=[turn] * UNIT)
        cache.trim()
        assert cache.stats().free_pages == 0
        started(cache, UNIT)
        assert [cache.match([turn] * UNIT, leave=0).length for turn in range(4)] == [
            *(0, UNIT, UNIT, UNIT)
        ]
        cache.check_integrity()


def test_a_match_that_was_evicted_since(context: Context) -> None:
    with shared(context) as cache:
        reqid, _ = started(cache, UNIT)
        cache.free_reqid(reqid, tokens=range(UNIT))
        match = cache.match(range(UNIT), leave=0)
        cache.trim(prefixes=True)
        before = state(cache)
        with pytest.raises(PrefixEvicted, match="has lost its lease"):
            cache.alloc_prefix(match)
        with pytest.raises(InvalidArgument, match="81 tokens; max_seq_len is 80"):
            cache.alloc_prefix(range(LONGEST + 1))
        assert state(cache) == before


def test_admission_and_namespaces_over_groups(context: Context) -> None:
    with shared(context, 4 * PAGES) as cache:
        for name in ("a", "b"):
            reqid, _ = started(cache, UNIT + 3)
            cache.free_reqid(reqid, tokens=range(UNIT + 4), namespace=name)
        assert cache.match(range(UNIT + 1)).length == 0
        with (
            cache.match(range(UNIT + 1), namespace="a") as one,
            cache.match(range(UNIT + 1), namespace="b") as other,
        ):
            assert one.length == other.length == UNIT
            assert not cache.can_admit([4 * UNIT])
            assert cache.can_admit([2 * UNIT, 2 * UNIT], [one, other])
            assert not cache.can_admit([2 * UNIT, 3 * UNIT], [one, other])
            cache.check_integrity()
        assert cache.can_admit([4 * UNIT])


# ---- swapping ------------------------------------------------------------------------------------


def test_a_swapped_request_is_restored_in_every_group(context: Context) -> None:
    with shared(context, 3 * PAGES) as cache:
        reqid, tags = started(cache, UNIT + 5)
        swapped = cache.swap_out(reqid)
        assert swapped.seq_len == UNIT + 5
        assert swapped.nbytes == sum(
            (UNIT + 5) * one.layout.row_bytes * one.layout.num_tensors for one in cache.caches
        )
        assert cache.stats().active_pages == 0
        other, others = started(cache, 2 * UNIT, first=500)
        before = state(cache)
        assert cache.swap_in(swapped) is None
        assert swapped.is_open
        assert state(cache) == before
        assert holds(cache, other, others)
        cache.check_integrity()
        cache.free_reqid(other)
        back = cache.swap_in(swapped)
        assert back is not None
        assert holds(cache, back, tags)
        with pytest.raises(BadHandle, match="swapped in before"):
            cache.swap_in(swapped)
        cache.check_integrity()
        with shared(context) as stranger:
            mine = stranger.swap_out(started(stranger, 3)[0])
            with pytest.raises(InvalidArgument, match="belongs to another cache"):
                cache.swap_in(mine)


def test_no_host_memory_for_a_later_group(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared(context) as cache:
        reqid, tags = started(cache, UNIT)
        before, taken = state(cache), []
        real = swap._host_memory

        def host_memory(size: int, device: int | None) -> memoryview:
            if len(taken) == 2:
                raise MemoryError
            taken.append(size)
            return real(size, device)

        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(swap, "_host_memory", host_memory)
            cache.swap_out(reqid)
        assert state(cache) == before
        assert holds(cache, reqid, tags)
        cache.check_integrity()


def test_a_swap_in_that_fails_in_a_later_group(context: Context) -> None:
    with shared(context) as cache:
        reqid, tags = started(cache, UNIT)
        swapped = cache.swap_out(reqid)
        cache.trim()
        before = state(cache)
        context.inject(Inject.MAP, skip=17, count=1)
        with pytest.raises(VMemError):
            for _ in range(30):  # back ends map different numbers of runs per call
                back = cache.swap_in(swapped)
                assert back is not None
                swapped = cache.swap_out(back)
                cache.trim()
        context.inject(Inject.MAP, count=0)
        assert state(cache) == before
        assert swapped.is_open
        cache.check_integrity()
        back = cache.swap_in(swapped)
        assert back is not None
        assert holds(cache, back, tags)


# ---- statistics and random engines ---------------------------------------------------------------


def test_stats_count_all_groups(context: Context) -> None:
    with shared(context) as cache:
        first, _ = started(cache, UNIT)
        second = cache.fork(first)
        assert second is not None
        now = cache.stats()
        each = [one.stats() for one in cache.caches]
        row = sum(one.layout.row_bytes * one.layout.num_tensors for one in cache.caches)
        assert now.total_pages == 20 * PAGES
        assert now.active_pages == now.shared_pages == PAGES
        assert now.used_bytes == UNIT * row == now.mapped_bytes
        assert now.wasted_bytes == 0
        assert now.free_pages == now.total_pages - PAGES - now.cached_pages
        assert now.active_slots == 2
        assert now.steps == each[0].steps == 1
        assert now.grown_pages == sum(one.grown_pages for one in each)
        assert now.driver_calls >= max(one.driver_calls for one in each[1:])
        assert now.critical_driver_ns + now.background_driver_ns == now.driver_ns
        lens = [0] * 4
        lens[first] = lens[second] = LONGEST
        while cache.step(lens) == 0:
            third = cache.alloc_reqid()
            if third is None:
                break
            lens[third] = LONGEST
        assert cache.stats().short == cache.caches[0].stats().short
    with pytest.raises(BadHandle, match="the LayeredCache is closed"):
        cache.stats()


def test_a_fork_has_all_rows_of_full_layers_and_the_window_of_others(context: Context) -> None:
    page = context.info.granule
    shapes = [*uneven(page), LayerShape(page // (8 * 64 * 4), 64, window=8)]
    options = {"dtype": "float32", "max_batch": 4, "max_seq_len": LONGEST, "page_size": page}
    with LayeredCache(shapes, context, memory_limit=400 * page, window_tile=4, **options) as cache:
        parent, tags = started(cache, UNIT)
        tags = grown(cache, parent, tags, [500 + row for row in range(3 * UNIT)])
        tags = grown(cache, parent, tags, [777])
        slides, *full = sorted(cache.caches, key=lambda one: -one.config.window)
        (first,) = slides.first_rows([parent])
        assert 0 < first <= len(tags) - 1 - 12
        child = cache.fork(parent)
        assert child is not None
        assert all(read_rows(one, child, 0, tags) for one in full)
        assert slides.first_rows([child]) == cache.slots.first_rows([child]) == [first]
        assert read_rows(slides, child, first, tags[first:])
        for one in cache.caches:
            whole = len(tags) * one.layout.row_bytes // page
            gone = one.first_rows([child])[0] * one.layout.row_bytes // page
            assert one.snapshot()[child].shared_pages == whole - gone
        with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
            cache.fork(parent, length=UNIT)
        cache.free_reqid(parent)
        grown(cache, child, tags, [888])
        assert all(read_rows(one, child, first, tags[first:]) for one in cache.caches)
        cache.check_integrity()


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"pages": 40 * PAGES},
    "short of memory": {"pages": 8 * PAGES},
    "nothing kept": {"pages": 12 * PAGES, "deferred_reclaim": False},
    "eager": {"pages": 12 * PAGES, "eager_pages": 2, "low_watermark": 0.2},
    "not zeroed": {"pages": 10 * PAGES, "zero_fill": False, "overread_rows": 3},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    """Random forks, records, matches, swaps and trims, compared with a plain model of every row."""
    with shared(context, **POLICIES[policy], max_batch=6) as cache:
        model = ShareModel(cache, seed)
        model.run(200)
        if policy == "plain":
            assert {"hit", "miss", "fork", "swap"} <= set(model.counts)
