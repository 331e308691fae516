# SPDX-License-Identifier: MIT
"""Tests tensor parallelism: each rank has a cache; all ranks return the same results, share one
budget and learn of each other's failures.

Ranks are processes that use gloo (parallel_ranks.py); tests that need only one rank use a group of
one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist
from interrupts_helpers import Handler, Interrupted, Interrupts
from kvcache_helpers import eventually, small_config, wrap_methods
from rank_runner import run_ranks

import pyvmem
from pyvmem import Caps, Inject, Reentered
from pyvmem.engine import Request, RequestCache, State
from pyvmem.kvcache import PrefixEvicted
from pyvmem.kvcache.cache import GroupView
from pyvmem.kvcache.distributed import (
    LockstepTable,
    ParallelKVCache,
    RankFailed,
    rank_config,
    shard_kv_heads,
)
from pyvmem.kvcache.facets import CacheMemory, CacheSlots

MANY = pytest.param(4, marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[2, MANY], ids="{} ranks".format)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return run_ranks("host", tmp_path_factory.mktemp("ranks"), request.param)


# ---- several ranks -----------------------------------------------------------------------------


@pytest.mark.long
def test_ten_thousand_random_calls_of_four_ranks(tmp_path: Path) -> None:
    assert run_ranks("host", tmp_path, 4, 10_000, seconds=1800)["soak"] > 10_000


def test_ranks_of_different_speed_give_the_same_answers(results: dict[str, Any]) -> None:
    played = results["same_answers"]
    assert len(played) == 4
    for answers in played:
        assert ["step", -1] in answers
        assert ["step", 0] in answers


def test_the_budget_is_the_smallest_and_is_kept(results: dict[str, Any]) -> None:
    assert results["least_budget"] == [7, 5, 0, -1, 0]


def test_a_failed_rank_poisons_all_until_they_recover(results: dict[str, Any]) -> None:
    out = results["one_rank_fails"]
    assert out[:2] == [0, 0]
    assert out[2:9] == ["RankFailed 1 EIO"] * 7
    assert out[9:14] == [12, [0, 1, 2, 3, None], 0, 0, "RankFailed 0 EIO"]
    assert out[14:17] == [1, 0, "invalid"]


def test_different_calls_are_detected(results: dict[str, Any]) -> None:
    assert results["ranks_differ"] == ["RanksDiffer  "] * 2 + [[0, 1]]


def test_different_arguments_are_detected(results: dict[str, Any]) -> None:
    found = results["ranks_ask_for_other_things"]
    assert len(found) == 9
    assert [name for name, said in found if said != "RanksDiffer  "] == []


def test_a_cache_that_one_rank_cannot_create(results: dict[str, Any]) -> None:
    assert results["init_fails"] == [
        "InvalidArgument  EINVAL",
        "RankFailed 1 EINVAL",
        "nothing",
        "RankFailed 0 EINVAL",
        "nothing",
    ]


def test_ranks_that_share_and_swap_give_the_same_answers(results: dict[str, Any]) -> None:
    """Each rank has checked its rows and memory against a model; this test checks that ranks ran
    short of memory and shared pages.
    """
    played = results["shared_pages"]
    assert len(played) == 4
    for answers in played:
        for name in ("step", "step_async"):
            assert {answer for call, answer in answers if call == name} == {0, -1}
        for name in ("fork", "alloc_prefix"):
            assert any(answer for call, answer in answers if call == name)
            assert any(answer is None for call, answer in answers if call == name)
        assert any(answer[1] for call, answer in answers if call == "alloc_prefix" and answer)
        assert any(isinstance(answer, int) for call, answer in answers if call == "swap_in")


def test_late_work_on_one_rank_evicts_no_more(results: dict[str, Any]) -> None:
    """A request needs 5 of the 6 pages, and a cached prefix holds the sixth; 3 of the 5 are in a
    slot whose work completes late.
    """
    assert results["held_back"] == [1, 0, 8]


def test_ranks_fill_their_memory_before_their_mappings(results: dict[str, Any]) -> None:
    answers, left, total = results["filled"]
    assert answers > 50
    assert left < 0.05 * total


def test_one_rank_without_mappings_rolls_the_step_back_on_all(results: dict[str, Any]) -> None:
    out = results["crowded"]
    assert out["steps"] == [0, 0, 0, -1, 0]
    assert out["caught"] == ["TooManyMappings  ENOSPC"] * 3
    assert out["later"] == ["RanksDiffer  ", 0]
    assert {0, -1} == set(out["played"])


def test_windows_slide_equally_on_all_ranks(results: dict[str, Any]) -> None:
    assert -1 in results["windows"]
    assert results["windows"].count(0) > 50


def test_ranks_share_windows_equally(results: dict[str, Any]) -> None:
    answers = [answer for answer in results["shared_windows"] if isinstance(answer, list)]
    begun = [taken[1] for what, taken in answers if what == "begin" and taken]
    assert 0 in begun
    assert max(begun) > 0
    assert any(what == "fork" and child is not None for what, child in answers)


def test_all_ranks_learn_of_a_failed_call(results: dict[str, Any]) -> None:
    failures = results["sharing_fails"]
    calls = ("fork", "record", "free", "alloc_prefix", "swap_out", "swap_in", "step")
    for name in calls:
        said = [(failing, what) for call, failing, what in failures if call == name]
        assert len(said) > 4
        for rank, what in said:
            assert what in (f"RankFailed {rank} EIO", "nothing")
        assert said[0][1] == "RankFailed 0 EIO"


def test_a_rank_without_host_memory_for_a_swap(results: dict[str, Any]) -> None:
    assert results["swap_without_memory"] == ["RankFailed 1 ENOMEM", 0, 0, 0, "BadHandle  EBADF"]


# ---- a single rank -----------------------------------------------------------------------------


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


def test_memory_is_allocated_at_once_and_freed(cache: ParallelKVCache, page: int) -> None:
    context = cache.context
    assert context.stats().free_bytes >= 8 * 4 * page
    assert cache.available_pages == 32
    # pages are zeroed in the background, unless the step zeroes them through an alias
    eventually(lambda: not context.stats().dirty_bytes)
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
    assert isinstance(cache._manager.groups[0].table, LockstepTable)
    assert [cache.alloc_reqid() for _ in range(4)] == [0, 1, 2, 3]
    assert cache.step([8, 1, 40, 1]) == 0
    for reqid in (2, 0, 3):
        cache.free_reqid(reqid)
    # Best fit would choose slot 2, which has 5 pages.
    assert [cache.alloc_reqid(40) for _ in range(3)] == [3, 0, 2]


def test_a_second_step_async_counts_what_requests_own(cache: ParallelKVCache) -> None:
    """Unowned pages in a slot that `step_async` is growing count as available, whether or not the
    growth has finished."""
    assert cache.alloc_reqid() == 0
    assert cache.step([48, 0, 0, 0]) == 0
    cache.free_reqid(0)
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    assert cache.step_async([8, 0, 0, 0]) == 0
    assert cache.step_async([8, 48, 0, 0]) == 0  # needs 7 of 8 pages, although slot 0 has 6 mapped
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


PROMPT = list(range(40))


def with_spare_pages(cache: ParallelKVCache) -> None:
    """Starts to grow request 0 by one page; six pages are already mapped in its slot."""
    assert cache.alloc_reqid() == 0
    assert cache.step([48, 0, 0, 0]) == 0
    cache.free_reqid(0)
    assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
    assert cache.step([0, 8, 0, 0]) == 0
    assert cache.step_async([8, 8, 0, 0]) == 0


def test_step_waits_for_growth_of_step_async(cache: ParallelKVCache) -> None:
    """Requests own 2 of 8 pages, so 6 are available, whether or not the growth has completed."""
    with_spare_pages(cache)
    assert cache.can_admit([48])
    assert not cache.can_admit([48, 1])
    cache.free_reqid(0)
    cache.free_reqid(1)
    cache.recover()
    with_spare_pages(cache)
    assert cache.fork_many(1, 2, 7) == [2, 3]  # one page each: 4 pages are left
    assert cache.available_pages == 4 * 4
    assert cache.step([40, 8, 7, 7]) == 0
    assert cache.step([40, 9, 7, 7]) == -1


def test_forks_and_prefixes_use_the_slots_freed_first(cache: ParallelKVCache) -> None:
    assert [cache.alloc_reqid() for _ in range(4)] == [0, 1, 2, 3]
    assert cache.step([9, 8, 8, 8]) == 0
    cache.free_reqid(2, tokens=PROMPT[:8])
    cache.free_reqid(3)
    cache.free_reqid(1)
    assert cache.alloc_prefix(PROMPT[:9]) == (2, 8)
    assert cache.fork(0) == 3
    assert cache.fork(0, into=1) == 1
    assert cache.fork(0) is None


def test_trimmed_memory_stays_with_the_cache(cache: ParallelKVCache) -> None:
    cache.alloc_reqid()
    assert cache.step([48, 0, 0, 0]) == 0
    cache.free_reqid(0, tokens=PROMPT)
    assert cache.trim() == 0
    assert cache.stats().mapped_bytes == 5 * 4 * cache.layout.page_size
    assert cache.trim(prefixes=True) == 0
    assert cache.stats().mapped_bytes == 0
    assert cache.context.stats().free_bytes >= 32 * cache.layout.page_size
    with pytest.raises(pyvmem.NotSupported, match="the ranks have agreed"):
        cache.memory.set_limit(16)


def test_a_driver_shortage_raises_an_error(cache: ParallelKVCache) -> None:
    """The other ranks would not return -1, so the call must raise an exception."""
    calls: list[Callable[[], Any]] = [
        lambda: cache.step([24, 0, 0, 0]),
        lambda: cache.fork(0),
        lambda: cache.alloc_prefix(PROMPT),
    ]
    for call in calls:
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step([9, 8, 0, 0]) == 0
        cache.free_reqid(1, tokens=PROMPT[:8])
        cache.trim()
        kinds = Inject.MAP | Inject.HEAP
        cache.context.inject(kinds, count=1 << 20, error=errno.ENOMEM)
        with pytest.raises(pyvmem.VMemError) as caught:
            call()
        cache.context.inject(kinds, count=0)
        assert caught.value.errno in (errno.ENOMEM, errno.ENOTRECOVERABLE)
        assert isinstance(cache.failed, RankFailed)
        cache.recover()


def test_recover_drops_prefixes_and_swapped_requests(cache: ParallelKVCache) -> None:
    for _ in range(3):
        cache.alloc_reqid()
    assert cache.step([8, 16, 24, 0]) == 0
    cache.free_reqid(0, tokens=PROMPT[:8])
    found, swapped = cache.match(PROMPT), cache.swap_out(1)
    assert found.length == 8
    cache.recover()
    assert not swapped.is_open
    assert cache.available_pages == 32
    assert cache.match(PROMPT).length == 0
    with pytest.raises(pyvmem.BadHandle):
        cache.swap_in(swapped)
    with pytest.raises(PrefixEvicted, match="has lost its lease"):
        cache.alloc_prefix(found)
    assert cache.failed is None


def test_a_request_that_lost_its_rows_costs_only_its_slot(cache: ParallelKVCache) -> None:
    if Caps.ONE_CALL in cache.context.info.caps:
        pytest.skip("a batch is one driver call: there is nothing to roll back")
    for skip in range(64):  # new mappings are created first, so a failure there loses nothing
        assert cache.alloc_reqid() == 0
        assert cache.step([20, 0, 0, 0]) == 0
        assert cache.record(0, PROMPT[:8]) == 8
        cache.context.inject(Inject.MAP, skip=skip, count=64)
        with pytest.raises((pyvmem.DriverError, pyvmem.NotRecoverable)) as failed:
            cache.fork(0)
        cache.context.inject(Inject.MAP, count=0)
        cache.recover()  # ends all requests
        if failed.type is pyvmem.NotRecoverable:
            break
    assert failed.match("reqid 0 has lost its rows")
    # slot 0's pages are quarantined
    assert [cache.alloc_reqid() for _ in range(4)] == [1, 2, 3, None]
    assert cache.step([0, 16, 16, 16]) == 0


def test_errors_are_compared(cache: ParallelKVCache) -> None:
    cache.alloc_reqid()
    before = cache.status()
    with pytest.raises(pyvmem.InvalidArgument, match="reqid 1 is not taken"):
        cache.fork(1)
    after = cache.status()
    assert before[0] == after[0] == 0, "nothing is poisoned"
    assert before[1] != after[1]
    with pytest.raises(TypeError):
        cache.swap_in(None)  # type: ignore[arg-type]
    assert cache.failed is None


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


def test_requests_of_a_poisoned_cache_end_when_theirs_is_closed(cache: ParallelKVCache) -> None:
    requests = RequestCache(cache)
    found = [requests.admit(list(range(8))) for _ in range(3)]
    running, swapped = found[0], found[1]
    assert all(isinstance(one, Request) for one in found)
    requests.swap_out(swapped)
    cache.context.inject(Inject.MAP)
    with pytest.raises(pyvmem.DriverError):
        requests.extend({running: 48})
    assert isinstance(cache.failed, RankFailed)
    with pytest.raises(RankFailed):
        requests.release(running)
    requests.close()
    assert not requests.requests
    assert {one.state for one in found} == {State.ENDED}
    cache.recover()
    assert cache.slots.num_free == 4
    assert cache.stats().active_pages == 0


def test_close_releases_what_it_can_before_it_raises(
    cache: ParallelKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = RequestCache(cache)
    found = [requests.admit(list(range(8))) for _ in range(3)]
    free = cache.free_reqid

    def fails(reqid: int, *args: Any) -> None:
        if reqid == found[0].slot:
            raise pyvmem.DriverError("no", errno=errno.EIO)
        free(reqid, *args)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "free_reqid", fails)
        with pytest.raises(pyvmem.DriverError, match="no"):
            requests.close()
    assert list(requests.requests) == found[:1], "it may be called again"
    requests.close()
    assert not requests.requests
    assert cache.slots.num_free == 4


def test_recover_retires_lost_slots(cache: ParallelKVCache) -> None:
    """A failed rollback costs a slot and its pages; all other slots remain usable."""
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
    """Simulates quarantine of all but 24 pages."""
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


def test_ranks_have_no_tiers(cache: ParallelKVCache) -> None:
    assert cache.alloc_reqid() == 0
    assert cache.step([48, 0, 0, 0]) == 0
    with pytest.raises(pyvmem.NotSupported, match="move: the ranks have agreed"):
        cache.move(0, "host")
    assert cache.failed is None


def test_ranks_have_no_prefixes_in_host_memory(backend: str, page: int, group: None) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match="host_prefixes is 5; it must be 0"):
        ParallelKVCache(small_config(page, host_prefixes=5), backend=backend)


def test_without_a_group(backend: str, page: int) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match="init_process_group"):
        ParallelKVCache(small_config(page), backend=backend)


@pytest.mark.parametrize(
    ("heads", "world", "want"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1), (3, 3, 1)]
)
def test_kv_heads_are_divided_or_replicated(heads: int, world: int, want: int) -> None:
    assert shard_kv_heads(heads, world) == want


@pytest.mark.parametrize(("heads", "world"), [(3, 2), (8, 12), (6, 4), (0, 1), (8, 0)])
def test_kv_heads_that_cannot_be_divided(heads: int, world: int) -> None:
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
    kinds = ["linear_attention", "full_attention"]
    hybrid = SimpleNamespace(**{**vars(model), "layer_types": kinds, "num_hidden_layers": 2})
    with pytest.raises(pyvmem.InvalidArgument, match="linear_attention, which store some"):
        rank_config(hybrid, 2)


# ---- asynchronous exceptions ---------------------------------------------------------------------


def state_of(cache: ParallelKVCache) -> Any:
    """Returns the state that must be the same on every rank that has not failed."""
    slots = [(one.state == "active", one.seq_len) for one in cache.snapshot()]
    return slots, cache.available_pages, cache.status()


def reset(cache: ParallelKVCache) -> None:
    cache.recover()
    assert cache.failed is None
    for _ in range(3):
        cache.alloc_reqid()
    assert cache.step([20, 16, 8, 0]) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.alloc_reqid(),
        lambda cache: cache.free_reqid(0),
        lambda cache: cache.fork(0),
        lambda cache: cache.truncate(0, 3),
        lambda cache: cache.step([21, 17, 9, 0]),
        lambda cache: cache.step([40, 40, 9, 0]),
        lambda cache: cache.swap_out(0),
    ],
    ids=["alloc", "free", "fork", "truncate", "step", "grow", "swap_out"],
)
def test_an_interrupted_call_is_complete_or_undone_or_fails_the_rank(
    cache: ParallelKVCache, call: Callable[[ParallelKVCache], Any]
) -> None:
    """Unless the rank has failed, its state is the one from before the call or from after it."""
    reset(cache)
    before = state_of(cache)
    call(cache)
    after = state_of(cache)
    failed = 0
    for at in range(1, 10_000, 3):
        reset(cache)
        try:
            Interrupts(at).run(lambda: call(cache))
            break
        except Interrupted:
            pass
        if cache.failed is None:
            assert state_of(cache) in (before, after), at
        failed += cache.failed is not None
    assert failed > 20


def test_an_interrupted_recovery_leaves_the_rank_failed(cache: ParallelKVCache) -> None:
    for at in range(1, 10_000, 5):
        reset(cache)
        taken = cache.snapshot()
        try:
            Interrupts(at).run(cache.recover)
            break
        except Interrupted:
            pass
        # the exception came before the recovery started or after it ended
        if cache.failed is None:
            now = [one.state == "active" for one in cache.snapshot()]
            assert now in ([one.state == "active" for one in taken], [False] * 4), at
    assert at > 100


def test_an_interrupted_rollback_leaves_the_rank_failed(cache: ParallelKVCache) -> None:
    for at in range(1, 10_000, 3):
        reset(cache)
        with no_mapping_left(cache), pytest.raises(pyvmem.TooManyMappings):
            cache.step([40, 16, 8, 0])
        try:
            Interrupts(at).run(cache.check_step)
        except Interrupted:
            assert cache.failed is not None or cache.status()[0], (
                "the rank must fail unless the rollback had not started"
            )
        except pyvmem.TooManyMappings:
            break
    assert at > 50
    assert cache.failed is None
    assert [one.seq_len for one in cache.snapshot()] == [20, 16, 8, 0]


@contextlib.contextmanager
def no_mapping_left(cache: ParallelKVCache) -> Iterator[None]:
    """Makes every step on this rank fail as if no mappings were left."""

    def step(*_: Any) -> int:
        raise pyvmem.TooManyMappings("none left", errno=errno.ENOSPC)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyvmem.KVCache, "step", step)
        yield


def lost(_: Any) -> list[int]:
    """Stands in for `Ranks.maxima` when another rank has exited."""
    raise RuntimeError("connection closed by peer")


def test_a_lost_group_fails_the_rank(
    cache: ParallelKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for collective in (cache.check_step, cache.recover):
        with monkeypatch.context() as patch:
            patch.setattr(cache._ranks, "maxima", lost)
            with pytest.raises(RuntimeError, match="connection closed"):
                collective()
        with pytest.raises(RankFailed):
            cache.alloc_reqid()
        cache.recover()


def test_exceptions_that_leave_a_block_of_together(cache: ParallelKVCache) -> None:
    """The other ranks learn of every error except those that the cache itself raises for invalid
    arguments.
    """
    with pytest.raises(RankFailed, match="a block of together"), cache.together():
        pyvmem.OpBatch(0)  # InvalidArgument, but only on this rank
    cache.recover()
    with pytest.raises(KeyboardInterrupt), cache.together():
        raise KeyboardInterrupt
    assert cache.failed is not None
    cache.recover()
    with pytest.raises(pyvmem.InvalidArgument, match="reqid 1 is not taken"), cache.together():
        cache.fork(1)
    assert cache.failed is None


def test_an_interrupted_block_of_together_without_other_ranks(
    cache: ParallelKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cache._ranks, "maxima", lost)
        with pytest.raises(KeyboardInterrupt), cache.together():
            raise KeyboardInterrupt
    assert cache.failed is not None
    cache.recover()


def test_an_invalid_stream_is_rejected_in_a_block_too(cache: ParallelKVCache) -> None:
    for call in (lambda: cache.trim(stream=1), lambda: cache.step([0, 0, 0, 0], object())):
        with pytest.raises(pyvmem.NotGpuWork), cache.together():
            call()
        assert cache.failed is None


def test_methods_that_are_wrapped_or_overridden(
    cache: ParallelKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wraps calls as tracers do."""

    wrap_methods(
        monkeypatch,
        pyvmem.KVCache,
        CacheMemory,
        CacheSlots,
        ParallelKVCache,
        GroupView,
        RequestCache,
    )
    assert cache.alloc_reqid() == 0
    assert cache.step_async([8, 0, 0, 0]) == 0
    assert cache.agreed_step([8, 0, 0, 0]) == 0
    assert cache.fork(0) == 1
    assert cache.swap_in(cache.swap_out(0)) == 0
    assert cache.stats().active_slots == 2
    assert cache.snapshot()[0].seq_len == 8
    assert cache.truncate(0, 4) == 0
    cache.free_reqid(0, tokens=PROMPT[:4])
    cache.check_integrity()
    cache.check_step()
    cache.recover()
    assert cache.failed is None
    requests = RequestCache(cache)
    one, two = (requests.admit([number] * 10) for number in (1, 2))
    assert isinstance(one, Request)
    assert isinstance(two, Request)
    assert requests.extend({one: 10, two: 10}) is None
    requests.swap_out(one)
    assert requests.swap_in(one) is None
    requests.release(two)
    assert len(requests.requests) == 1
    requests.close()
    assert cache.stats().active_slots == 0


def test_check_step_in_a_signal_handler_fails_nothing(
    cache: ParallelKVCache,
) -> None:
    refused = 0

    def handle() -> None:
        nonlocal refused
        with pytest.raises(Reentered):
            cache.check_step()
        refused += 1

    cache.alloc_reqid()
    assert Handler(60, handle).run(lambda: cache.step([30, 0, 0, 0])) == 0
    assert refused == 1
    assert cache.failed is None
    cache.check_step()
