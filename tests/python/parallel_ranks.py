# SPDX-License-Identifier: MIT
"""Runs one rank of test_parallel.py and tests/gpu/test_parallel_gpu.py in its own process.

    python parallel_ranks.py RANK RANKS STORE BACKEND [CALLS [SEED]]

runs all scenarios, or only one that makes CALLS random calls, and prints the results as one line of
JSON. With BACKEND ``host`` the ranks use gloo; otherwise they use NCCL, with one GPU per rank.
Ranks sleep for different lengths of time, and their GPU work completes at different times.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from parallel_scenarios import (
    caught,
    crowded,
    filled,
    held_back,
    shared_pages,
    shared_windows,
    sharing_fails,
    soak,
    swap_without_memory,
    windows,
)

import pyvmem
from pyvmem import FdEvent, Inject, KVCacheConfig
from pyvmem.kvcache import distributed
from pyvmem.kvcache.distributed import ParallelKVCache, RankFailed, RanksDiffer

LAYERS, ROWS = 2, 8
PAGE = 2 << 20 if sys.argv[4:5] == ["cuda"] else 64 << 10
TENSORS = 2 * LAYERS


class Rank:
    """This process's rank, passed to every scenario as its argument."""

    def __init__(self, index: int, size: int, backend: str) -> None:
        self.index, self.size = index, size
        self.backend = backend
        self.random = random.Random(1000 + index)  # each rank has its own random sequence

    def dawdle(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.004)

    @contextmanager
    def cache(self, pages: float = 12, **changes: Any) -> Iterator[ParallelKVCache]:
        """Yields a cache with a budget of `pages` pages per tensor, 8 rows per page and 6 pages per
        slot.
        """
        values: dict[str, Any] = {
            "num_layers": LAYERS,
            "num_kv_heads": PAGE // (ROWS * 64 * 4),
            "head_dim": 64,
            "dtype": "float32",
            "max_batch": 4,
            "max_seq_len": 6 * ROWS,
            "page_size": PAGE,
            "memory_limit": int(pages * TENSORS) * PAGE,
        }
        config = KVCacheConfig(**{**values, **changes})
        with ParallelKVCache(config, backend=self.backend) as cache:
            yield cache
            if cache.failed is None:
                cache.check_integrity()

    def work(self) -> FdEvent:
        """Starts GPU work, which sometimes completes so late that several calls find it unfinished.

        On rank 0, all other work is already complete on return.
        """
        event = FdEvent.create()
        slow = self.random.random() < 0.2
        delay = self.random.random() * (0.03 if slow else 0.005)
        if self.index == 0 and not slow:
            event.set()
            return event
        timer = threading.Timer(delay, event.set)
        timer.daemon = True
        timer.start()
        return event


def play(rank: Rank, cache: ParallelKVCache, seed: int, count: int) -> list[Any]:
    """Makes random calls, the same on every rank; checks that a step returns 0 if and only if the
    owned pages fit.
    """
    same = random.Random(seed)
    lens = [0] * 4
    owned = [0] * 4  # pages per tensor
    alive: set[int] = set()
    budget_pages = cache.stats().total_pages // TENSORS
    answers: list[Any] = []
    for _ in range(count):
        rank.dawdle()
        pick = same.random()
        if pick < 0.25:
            reqid = cache.alloc_reqid(same.randint(1, 48))
            answers.append(["alloc", reqid])
            assert (reqid is None) == (len(alive) == 4)
            if reqid is not None:
                alive.add(reqid)
        elif pick < 0.45 and alive:
            reqid = same.choice(sorted(alive))
            alive.remove(reqid)
            lens[reqid] = owned[reqid] = 0
            cache.free_reqid(reqid, rank.work() if same.random() < 0.7 else None)
        else:
            want = list(lens)
            for name in ("step_async",) * same.choice((0, 0, 1, 2)) + ("step",):
                for reqid in alive:
                    want[reqid] = min(want[reqid] + same.choice((0, 1, 7, 9, 20)), 48)
                pages = [max(o, -(-length // ROWS)) for o, length in zip(owned, want, strict=True)]
                answer = getattr(cache, name)(want)
                answers.append([name, answer])
                assert (answer == 0) == (sum(pages) <= budget_pages), (name, pages, budget_pages)
                if answer == -1:
                    break
                owned = pages
            if answer == 0:
                lens = want
                assert cache.available_pages == (budget_pages - sum(owned)) * TENSORS
            elif alive:
                reqid = max(alive, key=lambda one: (owned[one], one))
                alive.remove(reqid)
                lens[reqid] = owned[reqid] = 0
                cache.free_reqid(reqid, rank.work())
    for reqid in sorted(alive):
        cache.free_reqid(reqid)
    cache.check_step()
    return answers


def same_answers(rank: Rank) -> Any:
    policies: list[dict[str, Any]] = [
        {"low_watermark": 0.0},
        {"low_watermark": 0.4, "eager_pages": 2},
        {"deferred_reclaim": False},
        {"reclaim_steps": 2, "zero_fill": False, "low_watermark": 0.2},
    ]
    played = []
    for seed, policy in enumerate(policies):
        with rank.cache(**policy) as cache:
            played.append(play(rank, cache, seed, 250))
    return played


def least_budget(rank: Rank) -> Any:
    out = []
    with rank.cache(pages=7 if rank.index == 1 else 9) as cache:
        out.append(cache.stats().total_pages // TENSORS)
        assert cache.context.stats().slab_bytes >= 7 * TENSORS * PAGE
    available = (5 if rank.index == 0 else 8) * TENSORS * PAGE
    distributed.available_bytes = lambda context: available  # type: ignore[assignment]
    with rank.cache(memory_limit=0) as cache:
        out.append(cache.stats().total_pages // TENSORS)
        # From here on no call needs more memory from the driver.
        cache.context.inject(Inject.SLAB, count=1 << 30)
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        assert (first, second) == (0, 1)
        out.append(cache.step([4 * ROWS, ROWS, 0, 0]))
        out.append(cache.step([4 * ROWS, ROWS + 1, 0, 0]))
        cache.free_reqid(first, rank.work())
        out.append(cache.step([0, 5 * ROWS, 0, 0]))
        cache.context.inject(Inject.SLAB, count=0)
    return out


def one_rank_fails(rank: Rank) -> Any:
    with rank.cache() as cache:
        out: list[Any] = [cache.alloc_reqid(), cache.step([8, 0, 0, 0])]
        cache.check_step()
        if rank.index == 1:
            cache.context.inject(Inject.MAP)
        own = caught(cache.step, [40, 0, 0, 0])
        assert own == ("DriverError  EIO" if rank.index == 1 else "nothing")
        cache.context.inject(Inject.MAP, count=0)
        out.append(caught(cache.check_step))
        calls: list[tuple[Any, ...]] = [
            (cache.step, [8, 0, 0, 0]),
            (cache.step_async, [8, 0, 0, 0]),
            (cache.alloc_reqid,),
            (cache.free_reqid, 0),
            (cache.stats,),
            (cache.check_step,),
        ]
        for call in calls:
            out.append(caught(*call))
        cache.recover()
        out.append(cache.available_pages // TENSORS)
        out.append([cache.alloc_reqid() for _ in range(5)])
        out.append(cache.step([24, 24, 24, 24]))
        cache.check_step()
        # The next step reports the background failure, and the ranks agree on it through the
        # engine's own collective.
        if rank.index == 0:
            cache.context.inject(Inject.MAP)
        out.append(cache.step_async([24, 24, 24, 24]))
        cache.free_reqid(3)
        own = caught(cache.step_async, [40, 24, 24, 0])
        if rank.index != 0:
            assert own == "nothing"
        caught(cache.step, [40, 24, 24, 0])
        cache.context.inject(Inject.MAP, count=0)
        engine = torch.tensor([7, *cache.status()])
        if rank.backend != "host":
            engine = engine.cuda()
        dist.all_reduce(engine, op=dist.ReduceOp.MAX)
        out.append(caught(cache.agree, engine[1:].tolist()))
        cache.recover()
        # The engine itself raises an exception between the step and the model.
        try:
            with cache.together():
                cache.step([0, 0, 0, 0])
                if rank.index == 1:
                    raise KeyError("engine")
        except RankFailed as error:
            out.append(error.rank)
            assert ("KeyError" in str(error)) == (rank.index == 1)
        cache.recover()
        with cache.together():
            out.append(cache.alloc_reqid())
        try:
            with cache.together():  # every rank raises the same error, so none is poisoned
                cache.step([0, 99, 0, 0])
        except pyvmem.InvalidArgument:
            out.append("invalid")
        cache.check_step()
        out.extend(play(rank, cache, 77, 60) if cache.free_reqid(out[-2]) is None else [])
    return out


def ranks_differ(rank: Rank) -> Any:
    with rank.cache() as cache:
        cache.alloc_reqid()
        if rank.index == 1:
            cache.alloc_reqid()
        out = [caught(cache.check_step), caught(cache.alloc_reqid)]
        assert isinstance(cache.failed, RanksDiffer)
        cache.recover()
        out.append([cache.alloc_reqid(), cache.alloc_reqid()])
        cache.check_step()
    return out


def ranks_ask_for_other_things(rank: Rank) -> Any:
    """Makes each call with different arguments on each rank; all ranks must get equal results."""
    other = int(rank.index == 1)
    prompt = list(range(40))
    calls: dict[str, Callable[[ParallelKVCache], Any]] = {
        "step": lambda cache: cache.step([40, 40 + other, 0, 0]),
        "step_async": lambda cache: cache.step_async([40, 40 + other, 0, 0]),
        "free_reqid": lambda cache: cache.free_reqid(other),
        "free_reqid with tokens": lambda cache: cache.free_reqid(0, tokens=[other] * 40),
        "truncate": lambda cache: cache.truncate(0, 39 - other),
        "fork": lambda cache: cache.fork(0, length=39 - other),
        "record": lambda cache: cache.record(0, [other] * 40),
        "match": lambda cache: cache.match([other, *prompt]).release(),
        "alloc_prefix": lambda cache: cache.alloc_prefix([other, *prompt]),
    }
    out = []
    with rank.cache(pages=24) as cache:
        for name, call in calls.items():
            assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
            assert cache.step([40, 40, 0, 0]) == 0
            cache.check_step()
            call(cache)
            out.append([name, caught(cache.check_step)])
            cache.recover()
    return out


def init_fails(rank: Rank) -> Any:
    def make(**changes: Any) -> None:
        with rank.cache(**changes):
            pass

    out = [caught(lambda: make(max_seq_len=48 + rank.index))]
    real, rank.backend = rank.backend, "nonsense" if rank.index == 1 else rank.backend
    out.append(caught(make))
    rank.backend = real
    out.append(caught(lambda: make(page_size=0 if real == "host" else PAGE)))
    tiny = 3 * PAGE if rank.index == 0 else 12 * TENSORS * PAGE
    out.append(caught(lambda: make(memory_limit=tiny)))
    out.append(caught(make))
    return out


SCENARIOS = (
    same_answers,
    least_budget,
    one_rank_fails,
    ranks_differ,
    ranks_ask_for_other_things,
    init_fails,
    shared_pages,
    held_back,
    sharing_fails,
    swap_without_memory,
    windows,
    shared_windows,
    filled,
    crowded,
)


def main() -> None:
    index, size, store, backend, *calls = sys.argv[1:]
    rank = Rank(int(index), int(size), backend)
    on_gpu = backend != "host"
    if on_gpu:
        torch.cuda.set_device(rank.index)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank.index,
        world_size=rank.size,
    )
    if calls:
        results = {"soak": soak(rank, *map(int, calls))}
    else:
        results = {scenario.__name__: scenario(rank) for scenario in SCENARIOS}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
