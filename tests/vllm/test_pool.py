# SPDX-License-Identifier: MIT
"""Counts mapped pages, moves and used blocks under vLLM's own scheduler and block pool.

The model and the clock are simulated. A step fails if it reads a block without the tokens that its
request computed (see pool_model).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pool_model import Open, Pool, open_pool

from pyvmem.ledger.accounts import Ledger
from vmem_bench.vllm.loads import Load, idle_footprint

__all__ = ["open_pool"]

PAGE, LARGE = 64 << 10, 2 << 20
BLOCK_BYTES = 36 * PAGE  # a block of 16 tokens in 36 layers, as in Qwen3-4B


def spread(pool: Pool) -> float:
    return pool.mapped() / pool.live()


def steady(count: int, length: int, tokens: int, most: int) -> Load:
    """Returns requests of equal length without common prefixes."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for _ in range(count)]
    return Load(prompts, [tokens] * count, [0.0] * count, most)


@pytest.mark.parametrize(("page", "most", "maps"), [(PAGE, 1.0, 500), (LARGE, 1.1, 100)])
def test_an_engine_that_becomes_idle(open_pool: Open, page: int, most: float, maps: int) -> None:
    """Under kvcached's workload with capped prefixes, new requests reuse evicted blocks.

    Pages are mapped for the peak, not for each of the 600 requests, which use 21,500 blocks in
    total.
    """
    cap = 1000
    with opened_for_idle(open_pool, page, cap) as pool:
        pool.run(idle_footprint(600, 1000, 96))
        assert pool.rank.maps < maps
        assert pool.rank.copies < 500
        pool.rest()
        assert pool.live() == (1 + cap) * BLOCK_BYTES
        assert spread(pool) <= most
        assert pool.rank.maps < maps
        assert pool.rank.unmaps < 20 * maps
        before = pool.rank.copies, pool.rank.unmaps
        pool.rest()
        assert (pool.rank.copies, pool.rank.unmaps) == before, "no work is left"
        assert pool.scheduler.reset_prefix_cache()
        pool.rest()
        assert pool.mapped() == 36 * page, "the null block's page"


def opened_for_idle(open_pool: Open, page: int, cap: int) -> Any:
    return open_pool(blocks=16_000, page=page, VMEM_PREFIX=str(cap * BLOCK_BYTES))


def test_a_steady_load_moves_nothing(open_pool: Open) -> None:
    """Starts counting after eight seconds, when the engine no longer remembers a large step."""
    with open_pool(blocks=8_000, page=LARGE, VMEM_PREFIX=str(500 * BLOCK_BYTES)) as pool:
        load = steady(600, 300, 60, 32)
        todo = list(zip(load.prompts, load.tokens, strict=True))

        def steps(count: int) -> None:
            for number in range(count):
                if pool.scheduler.get_num_unfinished_requests() < 32 and number % 3 == 0:
                    pool.add(*todo.pop())
                pool.step()

        steps(800)
        counts = pool.rank.copies, pool.rank.maps, pool.rank.unmaps
        pool.rank.asked.clear()
        steps(600)
        assert set(pool.rank.asked) == {("poll", False)}, "and no step waits for a rank"
        assert pool.elastic.used_blocks() > 300
        assert (pool.rank.copies, pool.rank.maps, pool.rank.unmaps) == counts


@pytest.mark.parametrize("heads", [8, 3], ids=["whole", "straddling"])
def test_moves_free_memory_for_another_engine(open_pool: Open, heads: int) -> None:
    """Prefixes are not evicted while other pages have room for them."""
    with open_pool(blocks=6_000, page=LARGE, heads=heads, VMEM_IDLE="3600") as pool:
        elastic = pool.elastic
        pool.run(idle_footprint(150, 1000, 32))
        cached = elastic._cached_bytes()
        hashes = len(elastic.pool.cached_block_hash_to_block)
        # Every other cached block is evicted, which leaves the pages half empty.
        with elastic.lock:
            some = [b.block_id for b in elastic._free() if b.block_hash is not None][::2]
            elastic.pool.evict_blocks(set(some))
            elastic._put_first(some)
        alone = elastic.backing.emptied_by(elastic.idle)
        loose = len(alone) * elastic.backing.geometry.block_bytes
        mapped, group = pool.mapped(), elastic.backing.geometry.group_bytes
        wanted = loose + 3 * group
        elastic.quota.limit = elastic.quota.used - wanted
        pool.rest(2)
        assert pool.mapped() <= mapped - wanted
        assert 0 < pool.rank.copies <= 3 * len(elastic.backing.geometry.touching(1))
        assert pool.rank.calls > 0
        assert len(elastic.pool.cached_block_hash_to_block) == hashes - len(some)
        assert elastic._cached_bytes() == cached - len(some) * elastic.backing.geometry.block_bytes
        # Now moves cannot free enough, so the least recently used prefixes are evicted.
        elastic.quota.limit = elastic.least
        pool.rest(8)
        assert pool.mapped() <= elastic.least
        assert len(elastic.pool.cached_block_hash_to_block) < hashes - len(some)


def test_moves_are_sent_with_steps(open_pool: Open) -> None:
    """Emptied pages are unmapped with a later step, because the copy must read them first."""
    with open_pool(blocks=6_000, page=LARGE, VMEM_IDLE="3600", VMEM_RESERVE="0") as pool:
        elastic = pool.elastic
        pool.run(idle_footprint(150, 1000, 32))
        elastic.pool.evict_blocks({b.block_id for b in list(elastic._free())[::2]})
        elastic._put_first(sorted(elastic.idle))
        for _ in range(4):
            pool.add([5] * 30, 200)
        pool.step()
        calls, mapped = pool.rank.calls, pool.mapped()
        alone = elastic.backing.emptied_by(elastic.idle)
        loose = len(alone) * elastic.backing.geometry.block_bytes
        wanted = loose + 4 * elastic.backing.geometry.group_bytes
        elastic.quota.limit = elastic.quota.used - wanted
        hashes = len(elastic.pool.cached_block_hash_to_block)
        for _ in range(150):
            pool.step()
        assert len(pool.scheduler.running) == 4
        assert (pool.rank.calls, pool.rank.copies > 0) == (calls, True)
        assert pool.mapped() <= mapped - wanted
        assert len(elastic.pool.cached_block_hash_to_block) >= hashes


@pytest.mark.parametrize("heads", [8, 3], ids=["whole", "straddling"])
@pytest.mark.parametrize("seed", range(2))
def test_moves_in_every_step(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch, heads: int, seed: int
) -> None:
    """Requests read the tokens that they computed, despite moves, shared prefixes and aborts."""
    from vllm.v1.request import RequestStatus

    draw = random.Random(seed)
    begin = [draw.randrange(3, 500) for _ in range(300)]
    limit = str(1100 * heads * 8192 * 4)
    with open_pool(
        blocks=3_000, page=LARGE // 4, heads=heads, layers=4, batched=256, VMEM_LIMIT=limit
    ) as pool:
        elastic, mover = pool.elastic, pool.elastic.mover
        monkeypatch.setattr(elastic.__class__, "_is_spread", lambda self, now: True)
        moved = 0
        for number in range(300):
            own = [draw.randrange(3, 500) for _ in range(draw.choice([1, 15, 16, 40, 200, 500]))]
            pool.add(begin[: draw.choice([0, 16, 100, 300])] + own, draw.randrange(1, 60))
            for _ in range(draw.randrange(1, 6)):
                mover.choose(draw.choice([0, 1, 4, 1000]))
                before = mover.moved
                pool.step()
                moved += mover.moved - before
                assert elastic.backing.check() == []
            if draw.random() < 0.1:
                running = [one.request_id for one in pool.scheduler.running]
                if running:
                    pool.scheduler.finish_requests(
                        [draw.choice(running)], RequestStatus.FINISHED_ABORTED
                    )
            if draw.random() < 0.1:
                with elastic.lock:
                    elastic._shrink(draw.choice([1, 10, 100]) << 20)
            assert free_queue(pool) == elastic.pool.free_block_queue.num_free_blocks, number
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()
        assert moved > 20
        assert elastic.hits > 0
        pool.rest()
        assert elastic.used_blocks() == 0


def free_queue(pool: Pool) -> int:
    """Returns the length of vLLM's free queue, after checking its links and its idle blocks."""
    queue = pool.elastic.pool.free_block_queue
    forward = list(pool.elastic._free())
    backward = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backward.append(block)
        block = block.prev_free_block
    assert forward == backward[::-1]
    idle = {one.block_id for one in forward if one.block_hash is None}
    assert idle == set(pool.elastic.idle)
    assert all(pool.elastic.backing.is_backed(one.block_id) for one in forward)
    return len(forward)


def test_a_rank_that_has_yet_to_launch_the_last_step(open_pool: Open) -> None:
    """Blocks move only once the rank has launched the last step."""
    with open_pool(blocks=4_000, page=LARGE, VMEM_PREFIX=str(300 * BLOCK_BYTES)) as pool:
        pool.run(idle_footprint(60, 1000, 24))
        launched, pool.rank.launched = pool.rank.launched, pool.rank.launched - 1
        copies = pool.rank.copies
        pool.rest()
        assert (pool.rank.copies, pool.elastic.mover.victims) == (copies, [])
        held = pool.mapped()
        pool.rank.launched = launched
        pool.rest()
        assert pool.rank.copies > copies
        assert pool.mapped() < held


def test_idle_blocks_of_the_fullest_pages_go_first(open_pool: Open) -> None:
    """A new request takes idle blocks in the pages that a long request already uses."""
    with open_pool(blocks=2_000, page=LARGE, prefixes=False, VMEM_IDLE="3600") as pool:
        pool.run(steady(16, 250, 40, 16))
        long = pool.add([5] * 40, 100)
        pool.step()
        (ids,) = pool.scheduler.kv_cache_manager.get_block_ids(long)
        pages = {one // 32 for one in ids}
        other = pool.add([7] * 40, 100)
        pool.step()
        (others,) = pool.scheduler.kv_cache_manager.get_block_ids(other)
        assert {one // 32 for one in others} <= pages


def test_a_request_that_vllm_postpones_maps_nothing(open_pool: Open) -> None:
    """To postpone a request, vLLM reports that it needs more blocks than the pool has."""
    with open_pool(blocks=2_000, page=PAGE, VMEM_RESERVE="0") as pool:
        demand, scheduler = pool.scheduler._demand, pool.scheduler
        count = demand._count_blocks
        demand._count_blocks = lambda *_, **__: demand.pool.num_gpu_blocks + 1
        pool.add([5] * 100, 4)
        before = pool.mapped()
        pool.step()
        assert (len(scheduler.running), len(scheduler.waiting)) == (0, 1)
        assert pool.mapped() == before
        demand._count_blocks = count
        pool.step()
        assert (len(scheduler.running), len(scheduler.waiting)) == (1, 0)


def test_a_request_for_memory_is_met_within_two_rounds(open_pool: Open, tmp_path: Path) -> None:
    """One round unmaps pages, and the next records it. A waiting engine retries every round."""
    capacity = 1_000 * BLOCK_BYTES
    env = {"VMEM_LEDGER": str(tmp_path), "VMEM_CAPACITY": str(capacity), "VMEM_RESERVE": "0"}
    with open_pool(blocks=2_000, page=PAGE, **env) as pool:
        elastic = pool.elastic
        with Ledger("host", folder=tmp_path) as ledger:
            other = ledger.join("other", floor=0, limit=capacity, least=0, virtual=capacity)
            pool.run(steady(12, 1000, 10, 4))
            pool.rest(0.2)

            def looks(count: int) -> None:
                for _ in range(count):
                    pool.clock.now += 0.01
                    assert elastic._keeper_round(woken=False)

            elastic.tick()  # the next check is due in 100 ms
            polls = len(pool.rank.asked)
            looks(3)
            assert len(pool.rank.asked) == polls, "no engine asks for memory"
            wanted = 900 * BLOCK_BYTES
            other.want(wanted)
            looks(2)
            assert other.take(wanted)
            other.end_pending(wanted)
            other.want(0)
            for number in range(10):
                pool.add([7 + number] * 1000, 200)
            excess = []
            for _ in range(6):  # evicting prefixes makes room for the first requests
                pool.step()
                excess.append(other.excess())
            assert max(excess) > 300 * BLOCK_BYTES, (
                "asked for the whole queue, though a step takes 128"
            )
            elastic._wake.clear()
            elastic._refused = pool.clock.now
            other.give(wanted)
            looks(1)
            assert elastic._refused < pool.clock.now - 1
            pool.clock.now += 1
            assert elastic._pause() == 0.01, "no step runs"
            while pool.scheduler.get_num_unfinished_requests():
                pool.step()
            elastic.tick()
            pool.add([3] * 1000, 20)
            pool.step()
            elastic._wake.clear()
            assert elastic._pause() > 0.03, "steps look instead"
            other.want(2 * wanted)
            pool.step()
            assert elastic._wake.is_set()
            while pool.scheduler.get_num_unfinished_requests():
                pool.step()
            other.close()


def test_an_engine_that_is_ordered_to_sleep(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running requests finish, prefixes are dropped, and no request is admitted until wake-up."""
    with open_pool(blocks=2_000, page=PAGE) as pool:
        elastic, scheduler = pool.elastic, pool.scheduler
        pool.run(steady(8, 100, 10, 4))
        running = pool.add([5] * 40, 30)
        pool.step()
        monkeypatch.setattr(type(elastic.quota), "asleep", True)
        pool.rest(1)
        pool.add([7] * 40, 4)
        while running in scheduler.requests:
            pool.step()
        assert elastic._keeper_round()
        assert (pool.mapped(), len(scheduler.waiting)) == (36 * PAGE, 1)
        for _ in range(20):
            pool.step()
        assert (pool.mapped(), len(scheduler.running)) == (36 * PAGE, 0)
        monkeypatch.setattr(type(elastic.quota), "asleep", False)
        pool.rest(1)
        while scheduler.get_num_unfinished_requests():
            pool.step()
        assert elastic.used_blocks() == 0
