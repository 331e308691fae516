# SPDX-License-Identifier: MIT
"""A prompt is admitted only if all of it fits, and is then mapped chunk by chunk."""

from __future__ import annotations

from pool_model import BLOCK, Open, open_pool

__all__ = ["open_pool"]

PAGE = 64 << 10
BLOCK_BYTES = 36 * PAGE


def test_a_long_prompt_is_mapped_chunk_by_chunk(open_pool: Open) -> None:
    with open_pool(blocks=2_000, page=PAGE, batched=128, VMEM_RESERVE="0") as pool:
        pool.add([5 + i % 400 for i in range(1200)], 4)
        held = []
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()
            held.append(pool.mapped() // BLOCK_BYTES - 1)
        chunk = 128 // BLOCK
        assert held[:9] == [chunk * (i + 1) for i in range(9)]


def test_a_prompt_is_admitted_only_if_all_of_it_fits(open_pool: Open) -> None:
    """The prompt needs 75 blocks, but at first the quota has room for only 74."""
    with open_pool(blocks=2_000, page=PAGE, batched=128, VMEM_RESERVE="0") as pool:
        elastic = pool.elastic
        elastic.quota.limit = elastic.quota.used + 74 * BLOCK_BYTES
        pool.add([5 + i % 400 for i in range(75 * BLOCK)], 4)
        for _ in range(20):
            pool.step()
        assert not pool.scheduler.running
        elastic.quota.limit += 2 * BLOCK_BYTES
        pool.rest(0.5)
        pool.step()
        assert len(pool.scheduler.running) == 1
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()


def test_hits_are_counted_when_a_request_is_admitted(open_pool: Open) -> None:
    """A request that waits for memory is looked up on every step but gets no blocks."""
    with open_pool(blocks=2_000, page=PAGE, VMEM_RESERVE="0", VMEM_IDLE="3600") as pool:
        elastic = pool.elastic
        begin = [5 + i % 400 for i in range(20 * BLOCK)]
        pool.add(begin, 1)
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()
        assert (elastic.hits, elastic.queries) == (0, 20 * BLOCK)
        elastic.quota.limit = elastic.quota.used + 30 * BLOCK_BYTES
        pool.add([*begin, *([7] * 60 * BLOCK)], 4)
        for _ in range(20):
            pool.step()
        assert not pool.scheduler.running
        assert (elastic.hits, elastic.queries) == (0, 20 * BLOCK)
        elastic.quota.limit += 60 * BLOCK_BYTES
        pool.rest(0.5)
        pool.step()
        assert len(pool.scheduler.running) == 1
        assert (elastic.hits, elastic.queries) == (20 * BLOCK, 100 * BLOCK)
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()


def test_a_preempted_request_is_counted_once(open_pool: Open) -> None:
    """A resumed request finds its own prefix, which does not count as a hit."""
    with open_pool(blocks=2_000, page=PAGE, VMEM_RESERVE="0", VMEM_IDLE="3600") as pool:
        elastic = pool.elastic
        elastic.quota.limit = elastic.quota.used + 50 * BLOCK_BYTES
        for first in (5, 9):
            pool.add([first, *range(10, 9 + 20 * BLOCK)], 10 * BLOCK)
        preempted = 0
        while pool.scheduler.get_num_unfinished_requests():
            pool.step()
            preempted += sum(one.num_preemptions for one in pool.scheduler.requests.values())
        assert preempted
        assert (elastic.hits, elastic.queries) == (0, 40 * BLOCK)
