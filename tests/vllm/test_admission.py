# SPDX-License-Identifier: MIT
"""Description: a prompt is admitted if all of it fits, and mapped as it is computed."""

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
    """Counted against what the quota would give; another engine has the rest."""
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
