# SPDX-License-Identifier: MIT
"""Tests caches of different shapes that share a budget: floors, ceilings and reclaiming."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import at_the_gate, eventually, firing_later, pending, small_config, state
from share_helpers import read_rows, write_rows

from pyvmem import Caps, Context, FdEvent, InvalidArgument, KVCache, OutOfMemory
from pyvmem.kvcache import Budget

# Cache a has 4 tensors and 8 rows per page, cache b 2 tensors and 4 rows per page; slots have 6
# pages.
ROWS = {"a": 8, "b": 4}
TENSORS = {"a": 4, "b": 2}


def config(page: int, which: str, floor: int = 0, ceiling: int = 64, **changes: Any) -> Any:
    """Returns a cache's configuration; `floor` and `ceiling` are in pages."""
    rows = ROWS[which]
    return small_config(
        page,
        num_layers=TENSORS[which] // 2,
        num_kv_heads=page // (rows * 64 * 4),
        max_seq_len=6 * rows,
        memory_floor=floor * page,
        memory_limit=ceiling * page,
        **changes,
    )


@contextlib.contextmanager
def two(
    context: Context, total: int, a: dict[str, Any], b: dict[str, Any]
) -> Iterator[tuple[Budget, KVCache, KVCache]]:
    """Yields a budget of `total` pages and its caches a and b."""
    page = context.info.granule
    budget = Budget(context, total * page)
    with (
        KVCache(config(page, "a", **a), budget=budget) as one,
        KVCache(config(page, "b", **b), budget=budget) as other,
    ):
        yield budget, one, other
        one.check_integrity()
        other.check_integrity()


def hold(cache: KVCache, pages: int) -> int:
    """Starts a request with `pages` pages in each tensor."""
    reqid = cache.alloc_reqid()
    assert reqid is not None
    assert cache.step(longer(cache, reqid, pages)) == 0
    return reqid


def longer(cache: KVCache, reqid: int, pages: int) -> list[int]:
    """Returns the current lengths, with one request's length set to what `pages` pages hold."""
    lens = [slot.seq_len for slot in cache.snapshot()]
    lens[reqid] = cache.layout.capacity(pages)
    return lens


def test_a_cache_grows_up_to_its_ceiling(context: Context) -> None:
    with two(context, 64, {"ceiling": 12}, {}) as (_, a, _b):
        assert a.memory.num_free_pages == 12
        reqid = hold(a, 3)
        assert a.memory.num_free_pages == 0
        before = state(a)
        assert a.step(longer(a, reqid, 4)) == -1
        assert state(a) == before


def test_floors_of_other_caches_are_not_available(context: Context) -> None:
    with two(context, 16, {}, {"floor": 6}) as (budget, a, b):
        assert a.memory.num_free_pages == 10
        assert b.memory.num_free_pages == 16
        reqid = hold(a, 2)
        assert not a.can_admit([8])
        assert a.step(longer(a, reqid, 3)) == -1
        other = hold(b, 3)  # its floor is reserved for it, and two more pages are free
        assert b.step(longer(b, other, 4)) == 0
        assert b.step(longer(b, other, 5)) == -1
        now, page = budget.stats(), context.info.granule
        assert (now.total_bytes, now.used_bytes, now.free_bytes) == (16 * page, 16 * page, 0)
        assert [one.used_bytes // page for one in now.caches] == [8, 8]
        assert [one.floor_bytes // page for one in now.caches] == [0, 6]


def test_pages_of_other_free_slots_are_reclaimed_down_to_the_floor(context: Context) -> None:
    with two(context, 16, {}, {"floor": 4}) as (_, a, b):
        for reqid in [hold(b, 4), hold(b, 4)]:
            b.free_reqid(reqid)
        assert b.stats().cached_pages == 16
        assert a.memory.num_free_pages == 0
        assert a.can_admit([ROWS["a"] * 3])
        assert not a.can_admit([ROWS["a"] * 4])
        reqid = hold(a, 2)
        assert b.stats().cached_pages == 8
        assert a.step(longer(a, reqid, 4)) == -1
        assert a.step(longer(a, reqid, 3)) == 0
        assert b.stats().cached_pages == 4


def test_pages_owned_by_requests_are_never_reclaimed(context: Context) -> None:
    with two(context, 12, {}, {}) as (_, a, b):
        reqid = hold(b, 4)
        tags = [1 + row for row in range(16)]
        write_rows(b, reqid, 0, tags)
        one = hold(a, 1)
        before = state(b)
        assert a.step(longer(a, one, 2)) == -1
        assert state(b) == before
        assert read_rows(b, reqid, 0, tags)


def test_own_free_slots_are_reclaimed_before_those_of_others(context: Context) -> None:
    with two(context, 16, {}, {}) as (_, a, b):
        for cache, pages in ((a, 2), (b, 4)):
            cache.free_reqid(hold(cache, pages))
        a.step([0] * 4)
        first = a.alloc_reqid(16)
        second = a.alloc_reqid(8)
        assert first is not None
        assert second is not None
        lens = [0] * 4
        lens[second] = 16  # the mapped pages are in the other slot
        assert a.step(lens) == 0
        assert b.stats().cached_pages == 8


def test_prefixes_of_others_are_evicted_last(context: Context) -> None:
    if Caps.ALIAS | Caps.READONLY not in context.info.caps:
        pytest.skip("the back end shares no pages")
    with two(context, 16, {}, {"floor": 2}) as (_, a, b):
        recorded = hold(b, 3)
        b.free_reqid(recorded, tokens=range(12))
        b.free_reqid(hold(b, 3))
        reqid = hold(a, 2)
        assert b.match(range(12), leave=0).length == 12
        assert a.step(longer(a, reqid, 3)) == 0
        assert b.match(range(12), leave=0).length < 12
        assert b.stats().mapped_bytes >= 2 * context.info.granule


def test_reclaiming_waits_for_gpu_work_on_the_pages(context: Context) -> None:
    with two(context, 8, {}, {}) as (_, a, b):
        event = FdEvent.create()
        b.free_reqid(hold(b, 4), event)
        with firing_later(event) as fired:
            hold(a, 2)
            assert fired
        event.close()
        assert b.stats().mapped_bytes == 0


def test_eager_pages_are_reclaimed(context: Context) -> None:
    with two(context, 10, {}, {"eager_pages": 4}) as (_, a, b):
        hold(a, 2)
        assert b.stats().mapped_bytes <= 2 * context.info.granule


def test_a_closed_cache_leaves_the_budget(context: Context) -> None:
    page = context.info.granule
    budget = Budget(context, 16 * page)
    with KVCache(config(page, "a", floor=4), budget=budget) as a:
        with KVCache(config(page, "b", floor=8), budget=budget) as b:
            hold(b, 4)
            assert a.memory.num_free_pages == 8
        assert a.memory.num_free_pages == 16
        assert len(budget.stats().caches) == 1
    assert budget.stats().caches == ()


def test_memory_is_freed_for_a_new_floor(context: Context) -> None:
    page = context.info.granule
    budget = Budget(context, 16 * page)
    with KVCache(config(page, "a"), budget=budget) as a:
        kept = hold(a, 1)
        a.free_reqid(hold(a, 3))
        with KVCache(config(page, "b", floor=6), budget=budget) as b:
            assert budget.stats().used_bytes <= 10 * page
            b.check_integrity()
        assert a.step(longer(a, kept, 3)) == 0
        before = budget.stats()
        with pytest.raises(OutOfMemory, match=f"memory_floor {6 * page}: requests of the other"):
            KVCache(config(page, "b", floor=6), budget=budget)
        assert budget.stats() == before


def test_a_cache_whose_creation_failed_has_no_floor(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes after the budget has admitted the cache, but before anything is mapped
    for it.
    """

    def interrupted(groups: object) -> None:
        raise KeyboardInterrupt

    page = context.info.granule
    budget = Budget(context, 64 * page)
    with KVCache(config(page, "a", floor=8), budget=budget) as other:
        hold(other, 2)
        before, reservations = budget.stats(), context.stats().reservations
        with monkeypatch.context() as patched:
            patched.setattr("pyvmem.kvcache.manager.prepare", interrupted)
            with pytest.raises(KeyboardInterrupt):
                KVCache(config(page, "b", floor=32), budget=budget)
        assert budget.stats() == before
        assert context.stats().reservations == reservations
        with KVCache(config(page, "b", floor=56), budget=budget) as whole:
            whole.check_integrity()
        other.check_integrity()
    budget.close()


def test_bad_input(context: Context) -> None:
    page = context.info.granule
    with pytest.raises(InvalidArgument, match=f"a budget of {page - 1} bytes"):
        Budget(context, page - 1)
    with pytest.raises(InvalidArgument, match="total_bytes is -1; it must be between 0 and"):
        Budget(context, -1)
    budget = Budget(context, 16 * page)
    with pytest.raises(InvalidArgument, match="the cache has no budget"):
        KVCache(config(page, "a", floor=1), context)
    with pytest.raises(InvalidArgument, match=f"memory_floor {5 * page} is more than memory_limit"):
        config(page, "a", floor=5, ceiling=4)
    other = open_context(context.info.backend)
    with other, pytest.raises(InvalidArgument, match="is not the budget's context"):
        KVCache(config(page, "a"), other, budget=budget)
    with KVCache(config(page, "a", floor=10), budget=budget) as cache:
        with pytest.raises(InvalidArgument, match=f"floors of other caches keep {10 * page}"):
            KVCache(config(page, "b", floor=7), budget=budget)
        with pytest.raises(InvalidArgument, match="a limit of 9 pages: the floor is 10"):
            cache.memory.set_limit(9)
        assert len(budget.stats().caches) == 1


def test_a_budget_without_a_total_takes_what_is_free(context: Context) -> None:
    assert Budget(context).total_bytes > 0


def test_steps_of_both_caches_in_two_threads(context: Context) -> None:
    """Each cache keeps taking pages from the other; there is no deadlock, and no row is lost."""
    with two(context, 14, {"floor": 4}, {"floor": 4}) as (_, *caches):
        failures: list[BaseException] = []

        def engine(cache: KVCache, seed: int) -> None:
            try:
                choose = random.Random(seed)
                for tag in range(60):
                    reqid = cache.alloc_reqid()
                    assert reqid is not None
                    lens = longer(cache, reqid, choose.randint(1, 3))
                    ahead = choose.random() < 0.5 and cache.step_async(lens) == 0
                    if cache.step(lens) == 0:
                        write_rows(cache, reqid, 0, [tag + 1] * lens[reqid])
                        assert read_rows(cache, reqid, 0, [tag + 1] * lens[reqid])
                    else:
                        assert not ahead
                    cache.free_reqid(reqid)
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=engine, args=(cache, seed), daemon=True)
            for seed, cache in enumerate(caches)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "the threads are deadlocked"
        assert not failures, failures


def test_a_busy_cache_lets_others_take_a_turn(context: Context) -> None:
    """A call to cache b waits while cache a waits for GPU work on b's slot; it then runs before a's
    next call, and there is no deadlock.
    """
    with two(context, 8, {}, {}) as (_, a, b), pending() as work:
        b.free_reqid(hold(b, 4), work)
        order: list[str] = []

        def busy() -> None:
            hold(a, 2)  # needs all pages, so it waits for the work on b's slot
            with a.internals.lock:
                order.append("a again")

        def other() -> None:
            with b.internals.lock:
                order.append("b")
            assert b.step([0] * 4) == 0

        threads = [threading.Thread(target=one, daemon=True) for one in (busy, other)]
        threads[0].start()
        eventually(lambda: bool(b._groups[0].reclaimer.unmaps))
        threads[1].start()
        eventually(lambda: at_the_gate(b.internals.lock))
        work.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert order == ["b", "a again"]


class BudgetModel:
    """Two caches and a plain count of their requests' pages, which predicts how many more pages
    each cache can get.
    """

    def __init__(self, caches: dict[str, KVCache], total: int, seed: int) -> None:
        self.caches = caches
        self.total = total
        self.random = random.Random(seed)
        self.rows: dict[tuple[str, int], list[int]] = {}
        self.pages: dict[tuple[str, int], int] = {}
        self.refused = self.tag = 0

    def active(self, which: str) -> int:
        return sum(pages for key, pages in self.pages.items() if key[0] == which)

    def fits(self, which: str, pages: int) -> bool:
        """Returns true if the requests of a cache can hold `pages` pages in total."""
        page = self.caches[which].layout.page_size
        kept = sum(
            max(self.active(other), cache.config.memory_floor // page)
            for other, cache in self.caches.items()
            if other != which
        )
        return pages <= min(self.caches[which].config.memory_limit // page, self.total - kept)

    def grow(self, which: str) -> None:
        cache = self.caches[which]
        lens = [len(self.rows.get((which, i), ())) for i in range(cache.config.max_batch)]
        for name, reqid in self.rows:
            if name == which:
                more = self.random.choice((0, 1, 3, 9))
                lens[reqid] = min(lens[reqid] + more, cache.config.max_seq_len)
        pages = {
            key: max(had, cache.layout.pages_for(lens[key[1]]) * TENSORS[which])
            for key, had in self.pages.items()
            if key[0] == which
        }
        ahead = self.random.random() < 0.4
        fits = self.fits(which, sum(pages.values()))
        done = (not ahead or cache.step_async(lens) == 0) and cache.step(lens) == 0
        assert done == fits
        if not done:
            self.refused += 1
            self.free(max(pages, key=lambda key: pages[key]))
            return
        self.pages.update(pages)
        for key in pages:
            rows = self.rows[key]
            low, count = len(rows), lens[key[1]] - len(rows)
            self.tag += 1
            rows.extend([self.tag] * count)
            write_rows(cache, key[1], low, rows[low:])

    def alloc(self, which: str) -> None:
        reqid = self.caches[which].alloc_reqid(self.random.randint(0, 20))
        if reqid is not None:
            self.rows[which, reqid] = []
            self.pages[which, reqid] = 0

    def free(self, key: tuple[str, int]) -> None:
        self.caches[key[0]].free_reqid(key[1])
        del self.rows[key], self.pages[key]

    def any_step(self) -> None:
        which = self.random.choice("ab")
        pick = self.random.random()
        if pick < 0.25:
            self.alloc(which)
        elif pick < 0.8:
            self.grow(which)
        elif self.rows:
            self.free(self.random.choice(list(self.rows)))

    def check(self) -> None:
        for cache in self.caches.values():
            cache.check_integrity()
        for (which, reqid), rows in self.rows.items():
            assert read_rows(self.caches[which], reqid, 0, rows), f"reqid {reqid} of cache {which}"


def test_a_budgets_total_is_changed(context: Context) -> None:
    page = context.info.granule
    with two(context, 40, {"floor": 4}, {"floor": 8}) as (budget, one, other):
        hold(one, 3)  # 12 pages
        for pages in (0, 19):
            with pytest.raises(InvalidArgument, match=f"a budget of {pages * page} bytes: "):
                budget.set_limit(pages * page)
        assert budget.total_bytes == 40 * page
        budget.set_limit(20 * page)
        budget.set_limit(20 * page)
        assert budget.stats().total_bytes == 20 * page
        second = one.alloc_reqid()
        assert second is not None
        assert one.step(longer(one, second, 1)) == -1  # the rest is the other cache's floor
        budget.set_limit(24 * page)
        assert one.step(longer(one, second, 1)) == 0
        hold(other, 4)


def test_idle_memory_is_released(context: Context) -> None:
    page = context.info.granule
    with two(context, 40, {}, {"floor": 4}) as (budget, one, other):
        kept = hold(one, 2)
        for cache in (one, other):
            cache.free_reqid(hold(cache, 3))
        assert budget.stats().used_bytes > 12 * page
        budget.reclaim(12 * page)  # 8 pages belong to a request, 4 to the floor
        eventually(lambda: budget.stats().used_bytes <= 12 * page)
        assert one.step(longer(one, kept, 2)) == 0
        assert other.stats().mapped_bytes <= 6 * page


@pytest.mark.parametrize(
    ("total", "a", "b"),
    [
        (40, {}, {}),
        (40, {"floor": 8, "ceiling": 32}, {"floor": 12}),
        (24, {"floor": 12, "deferred_reclaim": False}, {"floor": 4, "ceiling": 14}),
        (32, {"floor": 4, "low_watermark": 0.3}, {"floor": 8, "zero_fill": False}),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_random_engines(
    context: Context, total: int, a: dict[str, Any], b: dict[str, Any], seed: int
) -> None:
    with two(context, total, a, b) as (_, one, other):
        model = BudgetModel({"a": one, "b": other}, total, seed)
        for count in range(150):
            model.any_step()
            if count % 10 == 0:
                model.check()
        model.check()
        assert model.refused
