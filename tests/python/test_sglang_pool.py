# SPDX-License-Identifier: MIT
"""Tests the pages of an SGLang engine, without SGLang: memory, limits, events and records."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyvmem.elastic.geometry import Run, runs_of
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.elastic.quota import LocalQuota
from pyvmem.elastic.settings import Settings
from pyvmem.errors import OutOfMemory
from pyvmem.ledger.accounts import Account, Ledger
from pyvmem.sglang.pool import PagePool, join
from pyvmem.sglang.ranks import RankGroup, RoundState

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


@contextmanager
def beside(memory: KVMemory, folder: Path, **given: object) -> Iterator[tuple[PagePool, Account]]:
    """Yields a pool and another engine; together they may use ten granules in each of 4 tensors."""
    capacity = 4 * GRANULE * 10
    pool = open_pool(memory, ledger=str(folder), capacity=capacity, **given)
    with Ledger("host", folder=folder) as ledger:
        other = ledger.join("other", floor=0, limit=capacity, least=0, virtual=capacity)
        yield pool, other
        other.close()
    pool.quota.close()


class Later:
    """Page numbers on their way from the GPU: they arrive when the test releases them, or when a
    call waits for them.
    """

    def __init__(self, pages: list[int]) -> None:
        self._pages, self.count = pages, len(pages)
        self.here = self.waited = False

    def arrived(self) -> bool:
        return self.here

    def pages(self) -> list[int]:
        self.waited |= not self.here
        return self._pages


def settle(pool: PagePool) -> None:
    """Waits for the unmaps in flight."""
    end = time.monotonic() + 10
    while pool.backing.outbox or pool.backing.unconfirmed:
        pool._send()
        pool._collect()
        assert time.monotonic() < end


def test_four_pages_share_one_memory_page(memory: KVMemory) -> None:
    pool = open_pool(memory)
    assert pool.free == BLOCKS - 1
    assert pool.ready == 0
    taken = pool.take(3)
    assert sorted(taken or ()) == [1, 2, 3]
    # includes the memory page that holds page 0 in each tensor
    assert pool.backing.mapped_bytes == 4 * GRANULE
    assert pool.check([1, 2, 3]) == []


def test_events_are_waited_for_only_when_needed(memory: KVMemory) -> None:
    limit = 4 * GRANULE * 2  # 7 pages besides page 0
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


def test_unavailable_pages_are_reported_in_advance(memory: KVMemory) -> None:
    pool = open_pool(memory, limit=4 * GRANULE * 4)
    assert pool.most() == 12  # whole pages of memory; three more pages share page 0's memory page
    assert pool.obtainable() == 12
    assert pool.prepare(12)
    assert not pool.prepare(16)
    assert pool.take(16) is None
    assert pool.allocated == 0
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


def test_all_but_page_0_is_unmapped_when_everything_is_free(memory: KVMemory) -> None:
    pool = open_pool(memory)
    assert len(pool.take(40) or []) == 40
    pool.clear()
    assert pool.backing.mapped_bytes == memory.geometry.first_bytes(1)
    assert memory.context.stats().mapped_bytes == memory.geometry.first_bytes(1)
    assert pool.free == BLOCKS - 1
    assert pool.check([]) == []


def test_nothing_is_mapped_ahead_once_everything_was_cleared(memory: KVMemory) -> None:
    """Going to sleep clears the pool like this, shortly after the last step."""
    pool = open_pool(memory, reserve=32 * 1024, idle=600.0)
    pool.step_begins(None)
    pool.clear()
    for _ in range(3):
        pool._next = 0.0
        pool.tick(lambda: 0, lambda pages: None)
        pool._finish_growth()
    assert pool.backing.mapped_bytes == memory.geometry.first_bytes(1)


def test_memory_is_kept_under_load_and_freed_when_idle(memory: KVMemory) -> None:
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
    assert pool.backing.counters.growths == 2  # one for page 0, and one for all rounds
    end = time.monotonic() + 10
    while pool.backing.mapped_bytes > memory.geometry.first_bytes(1):
        tick()
        assert time.monotonic() < end
    assert pool.check([]) == []


def test_prefixes_are_evicted_when_another_engine_is_short(
    memory: KVMemory, tmp_path: Path
) -> None:
    with beside(memory, tmp_path, idle=600.0) as (pool, other):
        prefixes = pool.take(30) or []
        asked: list[int] = []

        def evict(pages: int) -> None:
            asked.append(pages)
            gone = [prefixes.pop() for _ in range(min(pages, len(prefixes)))]
            pool.give_later(Later(gone))

        other.want(4 * GRANULE * 6)
        pool._next = pool._reported = 0.0
        pool.tick(lambda: len(prefixes), evict)
        assert asked
        settle(pool)
        assert other.take(4 * GRANULE * 6)
        assert not pool.admits
        assert pool.check(prefixes) == []


def test_requested_memory_counts_free_memory(memory: KVMemory, tmp_path: Path) -> None:
    """Other engines free only the memory that is still missing."""
    with beside(memory, tmp_path) as (pool, other):
        assert other.take(4 * GRANULE * 6)
        assert pool.obtainable() == 12
        pool.ask(4)
        assert other.excess() >= 4 * GRANULE


def test_memory_for_a_queue_is_requested_together(memory: KVMemory, tmp_path: Path) -> None:
    """Otherwise each request in turn would have to wait for the other engine."""
    with beside(memory, tmp_path) as (pool, other):
        assert other.take(4 * GRANULE * 8)
        pool.ask(1)
        alone = other.excess()
        pool.count_waiting = lambda: pool.obtainable() + 21
        pool.ask(1)
        assert other.excess() >= 4 * GRANULE * 6 > alone >= GRANULE
        assert pool.tick(lambda: 0, lambda _: None), "a failed request may be retried"
        pool.count_waiting = lambda: -5
        pool.ask(1)
        assert other.excess() == alone


class Clock:
    """Replaces the module `time` in the pool."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("pyvmem.sglang.pool.time", found)
    monkeypatch.setattr("pyvmem.sglang.ranks.time", found)
    return found


def test_a_request_is_answered_within_two_checks(
    memory: KVMemory, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One check unmaps pages, and another records the unmap 10 ms later. If there is no request,
    checks run every 100 ms.
    """
    with beside(memory, tmp_path, idle=600.0) as (pool, other):
        prefixes = pool.take(30) or []
        checks: list[float] = []
        pressure = pool.quota.pressure
        monkeypatch.setattr(
            pool.quota, "pressure", lambda: (checks.append(clock.now), pressure())[1]
        )

        def evict(pages: int) -> None:
            pool.give([prefixes.pop() for _ in range(min(pages, len(prefixes)))])

        def rounds(count: int) -> None:
            """Ticks the pool `count` times, one millisecond apart."""
            for _ in range(count):
                clock.now += 0.001
                pool.tick(lambda: len(prefixes), evict)

        rounds(1000)
        assert 7 <= len(checks) <= 10
        while checks[-1] != clock.now:  # until a check has run, so that the next is due in 100 ms
            rounds(1)
        other.want(4 * GRANULE * 6)
        rounds(11)
        (release,) = memory._under_way
        assert release.ticket is not None
        release.ticket.wait(10)
        rounds(11)
        assert other.take(4 * GRANULE * 6)
        count = len(checks)
        other.give(4 * GRANULE * 5)  # memory is not short here
        for _ in range(20):
            other.want(4 * GRANULE)  # a smaller total request than before
            rounds(1)
        assert len(checks) == count
        assert pool.check(prefixes) == []


def test_freed_memory_is_used_immediately(memory: KVMemory, tmp_path: Path, clock: Clock) -> None:
    """An engine short of memory retries 10 ms after its last round, rather than 50 ms."""
    with beside(memory, tmp_path) as (pool, other):
        assert other.take(4 * GRANULE * 9)
        other.end_pending(4 * GRANULE * 9)
        assert not pool.prepare(4, ask=True)
        assert pool.tick(lambda: 0, lambda _: None)
        other.give(4 * GRANULE)
        clock.now += 0.009
        assert not pool.tick(lambda: 0, lambda _: None)
        clock.now += 0.002
        assert pool.tick(lambda: 0, lambda _: None)
        assert pool.prepare(4, ask=True)


def test_memory_mapped_ahead_is_requested(memory: KVMemory, tmp_path: Path) -> None:
    """The next requests will then find that memory available."""
    with beside(memory, tmp_path, reserve=1 << 20) as (pool, other):
        assert pool.reserve == 5, "an eighth of the limit"
        assert other.take(4 * GRANULE * 9)
        assert not pool.prepare(7, ask=True)
        lacks, most = 7 - pool.ready, pool.geometry.most_bytes
        assert other.excess() == most(lacks + 2) > most(lacks)


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


class Side(RankGroup):
    """A rank whose group consists of threads."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(None)
        self.rank, self._board, self._barrier = rank, board, barrier

    def _all(self, mine: Any) -> list[Any]:
        self._board[self.rank] = pickle.dumps(mine)
        self._barrier.wait(10)
        found = list(map(pickle.loads, self._board))
        self._barrier.wait(10)
        return found

    def least(self, *numbers: int) -> tuple[int, ...]:
        return tuple(min(column) for column in zip(*self._all(numbers), strict=True))

    def told(self, news: RoundState | None) -> RoundState | None:
        """Returns the state that rank 0 broadcasts."""
        found: RoundState | None = self._all(news)[0]
        return found


def on_two_ranks(work: Callable[[Side], Any]) -> list[Any]:
    """Runs `work` on two ranks; returns both results."""
    board, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: work(Side(rank, board, barrier)), range(2)))


@pytest.fixture
def opened() -> Iterator[Callable[..., KVMemory]]:
    """Yields a function that creates a rank's memory."""
    made: list[KVMemory] = []

    def make(granule: int = GRANULE) -> KVMemory:
        found = KVMemory(open_context("host", 0, granule, 0), BLOCKS, [BLOCKS * 1024] * 4)
        found.grow(runs_of([found.geometry.pages(0, 0)]))
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()


def test_ranks_with_pages_of_different_sizes(opened: Callable[..., KVMemory]) -> None:
    def work(side: Side) -> None:
        memory = opened(GRANULE << side.rank)
        PagePool(memory, LocalQuota(1 << 20), Settings(ledger=None), side)

    with pytest.raises(RuntimeError, match="the ranks differ in the KV tensors or VMEM_PAGE_SIZE"):
        on_two_ranks(work)


def test_ranks_on_one_device_share_a_name(opened: Callable[..., KVMemory], tmp_path: Path) -> None:
    """The first rank owns the name, even if it joins last."""
    settings = Settings(ledger=str(tmp_path / "ledger"), reserve=0)
    came = threading.Event()

    def work(side: Side) -> int:
        memory, first = opened(), side.rank == 0
        if first:
            came.wait(0.5)
        try:
            quota = join(
                memory,
                settings,
                "one",
                unique=True,
                ranks=side,
                first=first,
                identity=7 + side.rank,
            )
        finally:
            came.set()
        used = quota.used
        side.least(0)  # both have joined, and neither leaves before both have read the ledger
        with Ledger("host", folder=tmp_path / "ledger", create=False) as ledger:
            names = {one.identity: one.name for one in ledger.engines()}
        assert names == {7: "one", 8: "one-2"}
        side.least(0)
        return used

    assert on_two_ranks(work) == [0, 0]


def test_a_growth_that_one_rank_refuses(opened: Callable[..., KVMemory]) -> None:
    """Neither rank maps a page, and both know that the growth failed."""

    def work(side: Side) -> tuple[object, ...]:
        memory = opened()
        pool = PagePool(memory, LocalQuota(1 << 20), Settings(ledger=None, reserve=0), side)
        before = memory.context.stats().mapped_bytes
        stock = memory.grow

        def refuse(runs: Sequence[Run]) -> None:
            raise OutOfMemory("no memory", op="test")

        if side.rank:
            memory.grow = refuse  # type: ignore[method-assign]
        found = pool.take(8)
        assert memory.context.stats().mapped_bytes == before
        memory.grow = stock  # type: ignore[method-assign]
        side.receive(RoundState(time.monotonic(), 0, False))
        taken = pool.take(8) or []
        return found, taken, pool.backing.counters.failures, pool.check(taken)

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0] is None
    assert len(first[1]) == 8
    assert first[2:] == (1, [])


def test_ranks_decide_alike_despite_differences(opened: Callable[..., KVMemory]) -> None:
    """The ranks differ in limits, in driver failures, and in when copies and unmaps complete."""
    seed = random.randrange(1 << 30)
    print("seed", seed)

    def work(side: Side) -> list[object]:
        alike, own = random.Random(seed), random.Random(seed + 1 + side.rank)
        memory = opened()
        quota = LocalQuota(4 * GRANULE * 12)
        settings = Settings(ledger=None, reserve=16 * 1024, idle=0.05)
        pool = PagePool(memory, quota, settings, side)
        stock = memory.grow

        def grow(runs: Sequence[Run]) -> None:
            if own.random() < 0.1:
                raise OutOfMemory("no memory", op="test")
            stock(runs)

        ended, kept = memory.finished, dict[int, str]()

        def finished() -> dict[int, str]:
            """Reports some moves late, and some as busy."""
            kept.update(
                {one: "busy" if own.random() < 0.1 else why for one, why in ended().items()}
            )
            return {one: kept.pop(one) for one in list(kept) if own.random() < 0.5}

        memory.grow = grow  # type: ignore[method-assign]
        memory.finished = finished  # type: ignore[method-assign]
        held: list[int] = []
        seen: list[object] = []
        coming: list[Later] = []
        for _ in range(300):
            quota.limit = 4 * GRANULE * own.randrange(6, 14)
            for one in coming:
                one.here = one.here or own.random() < 0.3
            count, what = alike.randrange(1, 9), alike.randrange(5)
            if what == 0:
                seen.append(pool.prepare(count, ask=True))
            elif what == 1:
                found = pool.take(count) if pool.prepare(count) else None
                held += found or []
                seen.append(found)
            elif what == 2 and len(held) >= count:
                alike.shuffle(held)
                coming.append(Later([held.pop() for _ in range(count)]))
                pool.give_later(coming[-1])
            elif what == 3:
                pool.step_begins(None)
                pool.step_ends()
            else:
                if own.random() < 0.3:
                    time.sleep(0.01)
                if (news := side.told(pool.round_state())) is not None:
                    pool.receive(news)
                seen.append(pool.tick(lambda: 0, lambda pages: None))
            backing = pool.backing
            seen.append(
                (pool.ready, pool.free, pool.obtainable(), backing.mapped_bytes, quota.used)
            )
        pool.clear()
        assert pool.check([]) == []
        assert memory.context.stats().mapped_bytes == memory.geometry.first_bytes(1)
        return seen

    first, second = on_two_ranks(work)
    assert first == second
    assert any(isinstance(one, list) for one in first)


def test_ranks_answer_a_request_that_the_first_sees(
    opened: Callable[..., KVMemory], tmp_path: Path, clock: Clock
) -> None:
    """The other rank's device has its own ledger, in which no engine requests memory."""

    def work(side: Side) -> tuple[bool, bool, int]:
        memory, folder = opened(), tmp_path / str(side.rank)
        settings = Settings(capacity=4 * GRANULE * 10, reserve=0, idle=600.0)
        quota = join(memory, replace(settings, ledger=str(folder)), "one", unique=True)
        pool = PagePool(memory, quota, settings, side)
        prefixes = pool.take(30) or []

        def evict(pages: int) -> None:
            pool.give([prefixes.pop() for _ in range(min(pages, len(prefixes)))])

        def sent() -> bool:
            news = side.told(pool.round_state())
            if news is not None:
                pool.receive(news)
            pool.tick(lambda: len(prefixes), evict)
            return news is not None

        sent()
        side.least(0)
        if not side.rank:
            clock.now += 0.01
        side.least(0)
        calm = sent()
        if not side.rank:
            with Ledger("host", folder=folder) as ledger:
                other = ledger.join("other", floor=0, limit=1 << 20, least=0, virtual=1 << 20)
                other.want(4 * GRANULE * 6)
                called = sent()
                other.close()
        else:
            called = sent()
        pool.clear()
        pool.quota.close()
        return calm, called, len(prefixes)

    first, second = on_two_ranks(work)
    assert first == second
    assert first[:2] == (False, True)
    assert first[2] < 30


def test_a_thread_maps_ahead_of_need(memory: KVMemory) -> None:
    """The step that uses the pages must not wait."""
    pool = open_pool(memory, reserve=32 * 1024, idle=600.0)
    pool.step_begins(None)
    end = time.monotonic() + 10
    while pool.ready < 3:
        pool._next = 0.0
        pool.tick(lambda: 0, lambda pages: None)
        assert time.monotonic() < end
    assert pool.waits == 0
    taken = pool.take(3) or []
    assert len(taken) == 3
    assert pool.waits == 0
    assert pool.check(taken) == []
