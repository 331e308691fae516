# SPDX-License-Identifier: MIT
"""Description: the pages of an SGLang engine, without SGLang: memory, limits, arrivals, records."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvmem.elastic.geometry import runs_of
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.elastic.settings import Settings
from pyvmem.ledger.accounts import Ledger
from pyvmem.sglang.pool import PagePool, join

GRANULE = 4096
BLOCKS = 65


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    context = open_context("host", 0, GRANULE, 0)
    found = KVMemory(context, BLOCKS, [BLOCKS * 1024] * 4)
    found.grow(runs_of([found.geometry.pages(0, 0)]))
    yield found
    found.close()


def open_pool(memory: KVMemory, **given: object) -> PagePool:
    settings = Settings(**{"ledger": None, "reserve": 0, **given})  # type: ignore[arg-type]
    return PagePool(memory, join(memory, settings, "one", unique=True), settings)


class Later:
    """Numbers that arrive when the test says so, or when somebody waits."""

    def __init__(self, pages: list[int]) -> None:
        self._pages, self.count = pages, len(pages)
        self.here = self.waited = False

    def arrived(self) -> bool:
        return self.here

    def pages(self) -> list[int]:
        self.waited |= not self.here
        return self._pages


def settle(pool: PagePool) -> None:
    """Lets what is leaving leave."""
    end = time.monotonic() + 10
    while pool.backing.outbox or pool.backing.unconfirmed:
        pool._send()
        pool._collect()
        assert time.monotonic() < end


def test_four_pages_share_one_of_memory(memory: KVMemory) -> None:
    pool = open_pool(memory)
    assert pool.free == BLOCKS - 1
    assert pool.ready == 0
    taken = pool.take(3)
    assert sorted(taken or ()) == [1, 2, 3]
    assert pool.backing.mapped_bytes == 4 * GRANULE  # in each tensor the page that 0 is on, too
    assert pool.check([1, 2, 3]) == []


def test_arrivals_are_waited_for_only_where_they_are_needed(memory: KVMemory) -> None:
    limit = 4 * GRANULE * 2  # 7 pages beside page 0
    pool = open_pool(memory, limit=limit)
    taken = pool.take(7) or []
    assert sorted(taken) == list(range(1, 8))
    later = Later(taken[:4])
    pool.give(taken[4:])
    pool.give_later(later)
    assert (pool.ready, pool.free) == (7, BLOCKS - 1)
    assert len(pool.take(2) or []) == 2
    assert not later.waited
    assert len(pool.take(3) or []) == 3
    assert later.waited
    assert pool.take(9) is None


def test_what_cannot_be_had_is_said_before(memory: KVMemory) -> None:
    pool = open_pool(memory, limit=4 * GRANULE * 4)
    assert pool.most() == 12  # whole pages of memory; three more share that of page 0
    assert pool.obtainable() == 12
    assert pool.prepare(12)
    assert not pool.prepare(16)
    assert pool.take(16) is None
    assert pool.held == 0
    assert pool.take(15) is not None


def test_a_page_that_is_freed_twice(memory: KVMemory) -> None:
    pool = open_pool(memory)
    (page,) = pool.take(1) or []
    pool.give([page])
    with pytest.raises(AssertionError, match=f"page {page} was freed twice"):
        pool.give([page])
    with pytest.raises(AssertionError, match="page 60 was freed twice, or was never handed out"):
        pool.give([60])


def test_a_limit_below_a_page(memory: KVMemory) -> None:
    with pytest.raises(ValueError, match=f"VMEM_LIMIT={GRANULE}: page 0 and one page need"):
        open_pool(memory, limit=GRANULE)


def test_all_but_page_0_goes_when_everything_is_free(memory: KVMemory) -> None:
    pool = open_pool(memory)
    assert len(pool.take(40) or []) == 40
    pool.clear()
    assert pool.backing.mapped_bytes == memory.geometry.first_bytes(1)
    assert memory.context.stats().mapped_bytes == memory.geometry.first_bytes(1)
    assert pool.free == BLOCKS - 1
    assert pool.check([]) == []


def test_a_load_keeps_its_memory_and_rest_gives_it_back(memory: KVMemory) -> None:
    pool = open_pool(memory, idle=0.3)

    def tick() -> None:
        pool._next = 0.0
        pool.tick(lambda: 0, lambda pages: None)

    for _ in range(20):
        pool.step_begins(None)
        taken = pool.take(20) or []
        pool.step_ends()
        tick()
        pool.give(taken)
        tick()
    assert pool.backing.counters.growths == 2  # page 0, and one for all rounds
    end = time.monotonic() + 10
    while pool.backing.mapped_bytes > memory.geometry.first_bytes(1):
        tick()
        assert time.monotonic() < end
    assert pool.check([]) == []


def test_prefixes_go_when_another_engine_is_short(memory: KVMemory, tmp_path: Path) -> None:
    capacity = 4 * GRANULE * 10
    pool = open_pool(memory, ledger=str(tmp_path), capacity=capacity, idle=600.0)
    prefixes = pool.take(30) or []
    asked: list[int] = []

    def evict(pages: int) -> None:
        asked.append(pages)
        gone = [prefixes.pop() for _ in range(min(pages, len(prefixes)))]
        pool.give_later(Later(gone))

    with Ledger("host", folder=tmp_path) as ledger:
        other = ledger.join("other", floor=0, limit=capacity, least=0, virtual=capacity)
        other.want(4 * GRANULE * 6)
        pool._next = pool._reported = 0.0
        pool.tick(lambda: len(prefixes), evict)
        assert asked
        settle(pool)
        assert other.take(4 * GRANULE * 6)
        assert not pool.admits
        other.close()
    assert pool.check(prefixes) == []
    pool.quota.close()


def test_what_is_wanted_counts_the_room_that_there_is(memory: KVMemory, tmp_path: Path) -> None:
    """Others give back what lacks beside it."""
    capacity = 4 * GRANULE * 10
    pool = open_pool(memory, ledger=str(tmp_path), capacity=capacity)
    with Ledger("host", folder=tmp_path) as ledger:
        other = ledger.join("other", floor=0, limit=capacity, least=0, virtual=capacity)
        assert other.take(4 * GRANULE * 6)
        assert pool.obtainable() == 12
        pool.ask(4)
        assert other.excess() >= 4 * GRANULE
        other.close()
    pool.quota.close()


def test_the_records_after_random_calls(memory: KVMemory) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    pool = open_pool(memory, limit=4 * GRANULE * 9, idle=0.0)
    held: list[int] = []
    coming: list[Later] = []
    for _ in range(300):
        count = chance.randrange(1, 9)
        what = chance.randrange(5)
        if what < 2:
            found = pool.take(count)
            assert found is not None or pool.ready < count
            held += found or []
        elif what == 2 and len(held) >= count:
            chance.shuffle(held)
            gone = [held.pop() for _ in range(count)]
            if chance.random() < 0.5:
                pool.give(gone)
            else:
                coming.append(Later(gone))
                pool.give_later(coming[-1])
        elif what == 3:
            for one in coming[: chance.randrange(3)]:
                one.here = True
        else:
            pool._next = 0.0
            pool.tick(lambda: 0, lambda pages: None)
        assert pool.backing.mapped_bytes <= pool.quota.limit
        if chance.random() < 0.1:
            assert pool.check(held) == []
    assert pool.check(held) == []
