# SPDX-License-Identifier: MIT
"""Tensor parallelism: one cache a rank, the same answers, one budget, a failure that all learn of.

Two ranks are two processes with gloo (parallel_ranks.py); what needs only one is a group of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist
from kvcache_helpers import small_config
from rank_runner import run_ranks

import pyvmem
from pyvmem import Inject
from pyvmem.kvcache.lockstep import LockstepTable
from pyvmem.kvcache.parallel import (
    ParallelKVCache,
    RankFailed,
    rank_config,
    shard_kv_heads,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks("host", tmp_path_factory.mktemp("ranks"))


# ---- two ranks ---------------------------------------------------------------------------------


def test_ranks_of_different_speed_give_the_same_answers(results: dict[str, Any]) -> None:
    played = results["same_answers"]
    assert len(played) == 4
    for answers in played:
        assert ["step", -1] in answers
        assert ["step", 0] in answers


def test_the_budget_is_the_least_and_is_held(results: dict[str, Any]) -> None:
    assert results["least_budget"] == [7, 5, 0, -1, 0]


def test_a_failed_rank_poisons_all_until_they_recover(results: dict[str, Any]) -> None:
    out = results["one_rank_fails"]
    assert out[:2] == [0, 0]
    assert out[2:9] == ["RankFailed 1 EIO"] * 7
    assert out[9:14] == [12, [0, 1, 2, 3, None], 0, 0, "RankFailed 0 EIO"]
    assert out[14:17] == [1, 0, "invalid"]


def test_different_calls_are_found(results: dict[str, Any]) -> None:
    assert results["ranks_differ"] == ["RanksDiffer  "] * 2 + [[0, 1]]


def test_a_cache_that_one_rank_cannot_make(results: dict[str, Any]) -> None:
    assert results["init_fails"] == [
        "InvalidArgument  EINVAL",
        "RankFailed 1 EINVAL",
        "nothing",
        "RankFailed 0 EINVAL",
        "nothing",
    ]


# ---- one rank ----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def cache(backend: str, page: int, group: None) -> Iterator[ParallelKVCache]:
    config = small_config(page, memory_limit=8 * 4 * page)
    with ParallelKVCache(config, backend=backend) as one:
        yield one
        if one.context.is_open:
            one.check_integrity()


def test_memory_is_taken_at_once_and_given_back(cache: ParallelKVCache, page: int) -> None:
    context = cache.context
    assert context.stats().free_bytes >= 8 * 4 * page
    assert cache.available_pages == 32
    cache.context.inject(Inject.SLAB, count=1 << 30)
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    assert cache.step([48, 16, 0, 0]) == 0
    assert cache.available_pages == 0
    assert cache.step([48, 17, 0, 0]) == -1
    cache.context.inject(Inject.SLAB, count=0)
    cache.close()
    cache.close()
    assert not context.is_open
    with pytest.raises(pyvmem.BadHandle):
        cache.step([0] * 4)


def test_the_slot_freed_last_comes_first(cache: ParallelKVCache) -> None:
    assert isinstance(cache._core.table, LockstepTable)
    assert [cache.alloc_reqid() for _ in range(4)] == [0, 1, 2, 3]
    assert cache.step([8, 1, 40, 1]) == 0
    for reqid in (2, 0, 3):
        cache.free_reqid(reqid)
    # Best fit would take slot 2, which has 5 pages.
    assert [cache.alloc_reqid(40) for _ in range(3)] == [3, 0, 2]


def test_a_second_step_async_counts_what_requests_own(cache: ParallelKVCache) -> None:
    """Pages of no owner in a slot whose growth is in flight can be had, finished or not."""
    assert cache.alloc_reqid() == 0
    assert cache.step([48, 0, 0, 0]) == 0
    cache.free_reqid(0)
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    assert cache.step_async([8, 0, 0, 0]) == 0
    assert cache.step_async([8, 48, 0, 0]) == 0  # 7 pages of 8, though slot 0 has 6 mapped
    assert cache.step([8, 48, 0, 0]) == 0


def test_bad_arguments_poison_nothing(cache: ParallelKVCache) -> None:
    for call in (
        lambda: cache.step([0] * 3),
        lambda: cache.step_async([0, 1, 0, 0]),
        lambda: cache.free_reqid(2),
        lambda: cache.alloc_reqid(1000),
    ):
        with pytest.raises(pyvmem.InvalidArgument):
            call()
    assert cache.failed is None
    cache.check_step()


def test_what_depends_on_timing_is_refused_and_poisons_nothing(cache: ParallelKVCache) -> None:
    assert cache.alloc_reqid() == 0
    assert cache.step([8, 0, 0, 0]) == 0
    for call in (
        lambda: cache.fork(0),
        lambda: cache.fork_many(0, 2),
        lambda: cache.record(0, [1] * 8),
        lambda: cache.match([1] * 8),
        lambda: cache.alloc_prefix([1] * 8),
        lambda: cache.swap_out(0),
        lambda: cache.swap_in(None),
        lambda: cache.free_reqid(0, tokens=[1] * 8),
    ):
        with pytest.raises(pyvmem.NotSupported, match="could differ between ranks"):
            call()
    assert cache.failed is None
    cache.free_reqid(0)


def test_a_poisoned_cache_can_be_closed(backend: str, page: int, group: None) -> None:
    cache = ParallelKVCache(small_config(page), backend=backend)
    context = cache.context
    cache.alloc_reqid()
    cache.context.inject(Inject.MAP)
    with pytest.raises(pyvmem.DriverError):
        cache.step([8, 0, 0, 0])
    with pytest.raises(RankFailed, match=r"rank 0 failed with EIO in step: DriverError: .*recover"):
        cache.step([8, 0, 0, 0])
    assert isinstance(cache.failed, RankFailed)
    assert cache.failed.rank == 0
    cache.close()
    assert not context.is_open


def test_recover_gives_up_what_was_lost(cache: ParallelKVCache) -> None:
    """An undo that fails costs a slot and its pages; the rest can be used."""
    cache.alloc_reqid()
    cache.alloc_reqid()
    assert cache.step([0, 8, 0, 0]) == 0
    cache.context.inject(Inject.MAP | Inject.UNMAP, skip=1, count=2)
    with pytest.raises(pyvmem.VMemError) as caught:
        cache.step([16, 8, 0, 0])
    cache.context.inject(Inject.MAP, count=0)
    cache.recover()
    lost = isinstance(caught.value, pyvmem.NotRecoverable)
    reqids = [cache.alloc_reqid() for _ in range(4)]
    assert reqids == ([1, 2, 3, None] if lost else [0, 1, 2, 3])
    stats, page = cache.context.stats(), cache.layout.page_size
    assert (stats.quarantined_bytes > 0) == lost
    left = (stats.slab_bytes - stats.quarantined_bytes) // page
    assert cache.available_pages == min(32, left)
    assert cache.step([0, 48, 0, 0]) == 0


def test_the_budget_shrinks_by_lost_pages(cache: ParallelKVCache, monkeypatch: Any) -> None:
    """As if all but 24 pages were quarantined."""
    stats, page = cache.context.stats(), cache.layout.page_size
    fewer = dataclasses.replace(stats, quarantined_bytes=stats.slab_bytes - 24 * page)
    with monkeypatch.context() as patch:
        patch.setattr(type(cache.context), "stats", lambda self: fewer)
        patch.setattr(cache, "check_integrity", lambda: None)
        cache.recover()
    assert cache.available_pages == 24
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    assert cache.step([48, 0, 0, 0]) == 0
    assert cache.step([48, 1, 0, 0]) == -1


def test_without_a_group(backend: str, page: int) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match="init_process_group"):
        ParallelKVCache(small_config(page), backend=backend)


@pytest.mark.parametrize(
    ("heads", "world", "want"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1), (3, 3, 1)]
)
def test_kv_heads_are_divided_or_replicated(heads: int, world: int, want: int) -> None:
    assert shard_kv_heads(heads, world) == want


@pytest.mark.parametrize(("heads", "world"), [(3, 2), (8, 12), (6, 4), (0, 1), (8, 0)])
def test_kv_heads_that_cannot_be_shared_out(heads: int, world: int) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match=rf"{heads} KV heads .*{world} ranks"):
        shard_kv_heads(heads, world)


def test_rank_config() -> None:
    model = SimpleNamespace(
        num_hidden_layers=4,
        num_key_value_heads=8,
        num_attention_heads=32,
        hidden_size=4096,
        dtype="bfloat16",
        max_position_embeddings=8192,
    )
    config = rank_config(model, 2, max_batch=3)
    assert (config.num_kv_heads, config.head_dim, config.max_batch) == (4, 128, 3)
    assert rank_config(model, 2, num_kv_heads=2).num_kv_heads == 1
    with pytest.raises(pyvmem.InvalidArgument, match="8 KV heads"):
        rank_config(model, 3)
