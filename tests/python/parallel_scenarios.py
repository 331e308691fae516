# SPDX-License-Identifier: MIT
"""More scenarios for parallel_ranks.py: sharing, swapping and windows, and failures in them.

A `rank` is parallel_ranks.Rank.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from parallel_share import RankModel

import pyvmem
from pyvmem import FdEvent, Inject
from pyvmem.kvcache import swap
from pyvmem.kvcache.distributed import ParallelKVCache

__all__ = [
    "caught",
    "crowded",
    "filled",
    "held_back",
    "shared_pages",
    "shared_windows",
    "sharing_fails",
    "soak",
    "swap_without_memory",
    "windows",
]

SLOTS = 6
POLICIES: tuple[dict[str, Any], ...] = (
    {"pages": 13},
    {"pages": 11.5, "low_watermark": 0.4, "eager_pages": 2},
    {"pages": 9, "deferred_reclaim": False},
    {"pages": 16, "reclaim_steps": 2, "zero_fill": False},
)


def caught(call: Any, *args: Any) -> str:
    """Returns a description of a call's error that is the same on every rank."""
    try:
        call(*args)
    except pyvmem.VMemError as error:
        number = getattr(error, "rank", "")
        return f"{type(error).__name__} {number} {error.errno_name}"
    return "nothing"


def model_of(rank: Any, cache: ParallelKVCache, seed: int) -> RankModel:
    return RankModel(cache, (rank.index, rank.size), seed, rank.work, rank.dawdle)


def shared_pages(rank: Any) -> Any:
    """Runs random engines that use every function of a cache, usually with too little memory."""
    played = []
    for seed, policy in enumerate(POLICIES):
        with rank.cache(max_batch=SLOTS, **policy) as cache:
            played.append(model_of(rank, cache, seed).play(180))
    return played


def soak(rank: Any, calls: int, seed: int = 0) -> Any:
    """Makes about `calls` random calls, using one engine after another; returns the number of
    results.
    """
    count = 0
    for one in range(-(-calls // 500)):
        with rank.cache(max_batch=SLOTS, **POLICIES[one % len(POLICIES)]) as cache:
            model = model_of(rank, cache, 1000 * (seed + 1) + one)
            count += len(model.play(min(500, calls - 500 * one)))
    return count


def filled(rank: Any) -> Any:
    """Grows many requests until memory is full, using far fewer mappings than pages."""
    pace = random.Random(7)
    slots = 20
    mappings = 0 if rank.backend == "cuda" else 4 * 200  # each 2 MB page is a run of its own
    with rank.cache(pages=600, max_batch=slots, max_seq_len=2048, max_mappings=mappings) as cache:
        for _ in range(slots):
            cache.alloc_reqid()
        at = [0.0] * slots
        answers: list[Any] = []
        while not answers or answers[-1] == 0:
            rank.dawdle()
            at = [n + pace.uniform(0.3, 1) * 8 for n in at]
            lens = [int(n) + 1 for n in at]
            answers.append(cache.step_async(lens))
            if answers[-1] == 0:
                answers.append(cache.step(lens))
            cache.check_step()
        now = cache.stats()
        return [len(answers), cache.available_pages, now.total_pages]


@contextmanager
def taken(rank: Any, cache: ParallelKVCache, index: int) -> Iterator[None]:
    """Uses up all mappings of the cache's context on one rank."""
    context, page = cache.context, cache.layout.page_size
    with ExitStack() as stack:
        if rank.index == index:
            count = context.info.max_mappings
            addresses = stack.enter_context(context.reserve(2 * count * page))
            for place in range(count):
                pages = context.create(page)
                stack.callback(pages.release)  # also releases the mappings
                try:
                    addresses.map(2 * place * page, pages)
                except pyvmem.TooManyMappings:
                    break
        yield


def write(cache: ParallelKVCache, reqid: int, low: int, high: int) -> None:
    for layer in range(cache.config.num_layers):
        for row in range(low, high):
            cache.k(layer)[reqid, row] = 1000 * reqid + 100 * layer + row


def written(cache: ParallelKVCache, reqid: int, low: int, high: int) -> bool:
    return all(
        bool((cache.k(layer)[reqid, row] == 1000 * reqid + 100 * layer + row).all())
        for layer in range(cache.config.num_layers)
        for row in range(low, high)
    )


def together(cache: ParallelKVCache, lens: list[int]) -> None:
    with cache.together():
        cache.step(lens)


def agreeing(rank: Any, cache: ParallelKVCache) -> list[int]:
    """Makes random steps and checks that, when one returns -1, each request keeps its rows and only
    the pages for them.
    """
    same, lens, answers = random.Random(5), [0] * 4, []
    alive: set[int] = set()
    for _ in range(120):
        rank.dawdle()
        reqid = cache.alloc_reqid()
        if reqid is not None:
            alive.add(reqid)
        want = [
            min(48, lens[one] + same.choice((0, 1, 8, 9))) if one in alive else 0
            for one in range(4)
        ]
        if same.random() < 0.5:
            cache.step_async(want)
        answers.append(cache.agreed_step(want))
        if answers[-1] == 0:
            for one in alive:
                write(cache, one, lens[one], want[one])
            lens = want
        assert [slot.seq_len for slot in cache.snapshot()] == lens
        assert all(written(cache, one, 0, lens[one]) for one in alive)
        if answers[-1] == -1 or 48 in lens:
            longest = max(alive, key=lambda one: (lens[one], one))
            alive.remove(longest)
            lens[longest] = 0
            cache.free_reqid(longest, rank.work())
    cache.check_step()
    return answers


def crowded(rank: Any) -> Any:
    """Gives one rank fewer mappings than the others, which only that rank's `step` can notice."""
    if rank.backend == "cuda":
        return None  # no limit on mappings
    out: dict[str, Any] = {}
    policy: dict[str, Any] = {"growth_fraction": 0.0, "join_at": 0.0, "low_watermark": 0.0}
    with ExitStack() as stack:
        cache = stack.enter_context(rank.cache(pages=30, max_mappings=80, **policy))
        for _ in range(4):
            cache.alloc_reqid()
        lens, answers = [0] * 4, []
        for _ in range(3):
            want = [length + 8 for length in lens]
            answers.append(cache.agreed_step(want))
            for reqid in range(4):
                write(cache, reqid, lens[reqid], want[reqid])
            lens = want
        stack.enter_context(taken(rank, cache, 1))
        answers.append(cache.agreed_step([32] * 4))
        held = cache.snapshot()
        assert [slot.seq_len for slot in held] == [24] * 4
        assert [slot.granted_pages for slot in held] == [3] * 4
        caught_by = [caught(lambda: together(cache, [32] * 4))]
        own = caught(cache.step, [32] * 4)
        assert own == ("TooManyMappings  ENOSPC" if rank.index == 1 else "nothing")
        if rank.index == 1:
            assert caught(cache.stats) == own, "every other call must fail before check_step"
        caught_by.append(caught(cache.check_step))
        # The next step reports the background failure and takes part in the agreement.
        assert cache.step_async([32] * 4) == 0
        caught_by.append(caught(lambda: together(cache, [32] * 4)))
        out["caught"] = caught_by
        cache.free_reqid(3)
        answers.append(cache.agreed_step([32, 32, 32, 0]))
        out["steps"] = answers
        assert all(written(cache, reqid, 0, 24) for reqid in range(3))
        cache.check_integrity()
        # A rank that makes another call without check_step can no longer roll the step back.
        cache.alloc_reqid()
        if caught(cache.step, [32, 32, 32, 24]) == "nothing":
            cache.step([32, 32, 32, 24])
        out["later"] = [caught(cache.check_step)]
        cache.recover()
        out["later"].append(cache.available_pages - 30 * 4)
        out["played"] = agreeing(rank, cache)
    return out


def windows(rank: Any) -> Any:
    """Checks that pages that leave a window are counted in the call that drops them, not when their
    unmap completes.
    """
    same = random.Random(5)
    answers: list[Any] = []
    with rank.cache(pages=8, window=4, window_tile=4) as cache:
        lens = [0] * 4
        for _ in range(150):
            rank.dawdle()
            if same.random() < 0.2:
                reqid = cache.alloc_reqid()
                answers.append(reqid)
                if reqid is not None:
                    lens[reqid] = 1
            want = [n and min(n + same.choice((1, 3, 9)), 48) for n in lens]
            try:
                answers.append(cache.step(want, rank.work()))
            except pyvmem.InvalidArgument:
                answers.append("refused")
            answers.append(cache.available_pages)
            if answers[-2] == 0:
                lens = want
            if answers[-2] == -1 or 48 in lens:
                longest = lens.index(max(lens))
                cache.free_reqid(longest, rank.work())
                lens[longest] = 0
        cache.check_step()
    return answers


def shared_windows(rank: Any) -> Any:
    """Checks that sharing, caching and matching with a window are the same on all ranks, whether or
    not memory is short.
    """
    same = random.Random(6)
    answers: list[Any] = []
    with rank.cache(pages=12, window=4, window_tile=4, max_batch=SLOTS) as cache:
        lens = [0] * SLOTS
        for _ in range(200):
            rank.dawdle()
            running = [reqid for reqid, length in enumerate(lens) if length]
            pick = same.random()
            if pick < 0.3:
                taken = cache.alloc_prefix(range(same.randint(2, 40)), stream=rank.work())
                answers.append(("begin", taken))
                if taken is not None:
                    lens[taken[0]] = max(1, taken[1])
            elif pick < 0.45 and running:
                parent = same.choice(running)
                child = cache.fork(parent, stream=rank.work())
                answers.append(("fork", child))
                if child is not None:
                    lens[child] = lens[parent]
            elif pick < 0.65 and running:
                gone = same.choice(running)
                cache.free_reqid(gone, rank.work(), tokens=range(lens[gone]))
                lens[gone] = 0
            want = [n and min(n + same.choice((0, 1, 5)), 48) for n in lens]
            done = cache.step(want, rank.work())
            answers.append(("step", done))
            if done == 0:
                lens = want
            else:
                longest = lens.index(max(lens))
                cache.free_reqid(longest, rank.work())
                lens[longest] = 0
            answers.append(cache.available_pages)
        cache.check_step()
    return answers


def held_back(rank: Any) -> Any:
    """Completes GPU work before the step on rank 0, and while the step waits for it on the other
    ranks.
    """
    answers: list[Any] = []
    prompt = list(range(8))
    with rank.cache(pages=6, low_watermark=0.5) as cache, FdEvent.create() as work:
        cache.alloc_reqid()
        cache.step([8, 0, 0, 0])
        cache.free_reqid(0, tokens=prompt)
        cache.trim()
        assert [cache.alloc_reqid(), cache.alloc_reqid()] == [0, 1]
        cache.step([24, 0, 0, 0])
        timer = threading.Timer(0.05, work.set)
        if rank.index == 0:
            work.set()
        cache.free_reqid(0, work)  # the watermark reclaims one of three pages
        cache.free_reqid(1)
        while rank.index == 0 and any(slot.in_flight for slot in cache.snapshot()):
            time.sleep(0.001)
        timer.start()
        answers.append(cache.alloc_reqid())
        answers.append(cache.step([0, 40, 0, 0]))
        answers.append(cache.match(prompt, leave=0).length)
        timer.join()
        cache.check_step()
    return answers


# ---- failures ------------------------------------------------------------------------------------


def sharing_fails(rank: Any) -> Any:
    """Makes each driver call fail once, on one rank, in every call that shares or swaps."""
    kinds = Inject.MAP | Inject.UNMAP | Inject.FILL
    out = []
    prompt = list(range(30))
    with rank.cache(pages=14, max_batch=SLOTS) as cache:
        calls: dict[str, Any] = {
            "fork": lambda parent, _: cache.fork_many(parent, 2),
            "record": lambda parent, _: cache.record(parent, prompt[:20]),
            "free": lambda parent, _: cache.free_reqid(parent, rank.work(), prompt[:20]),
            "alloc_prefix": lambda *_: cache.alloc_prefix([7] * 9),
            "swap_out": lambda parent, _: cache.swap_out(parent),
            "swap_in": lambda _, swapped: cache.swap_in(swapped),
            "step": lambda parent, _: cache.step([48 * (i == parent) for i in range(SLOTS)]),
        }
        for name, call in calls.items():
            for skip in range(9):
                failing = skip % rank.size
                parent, swapped = prepared(cache, prompt)
                if rank.index == failing:
                    cache.context.inject(kinds, skip=skip)
                own = caught(call, parent, swapped)
                if own == "nothing":
                    own = caught(cache.trim)  # runs the call's background work
                cache.context.inject(kinds, count=0)
                assert own == "nothing" or rank.index == failing
                learnt = caught(cache.check_step)
                assert (learnt == "nothing") == (own == "nothing") or rank.index != failing
                out.append([name, failing, learnt])
                cache.recover()
                assert not swapped.is_open
                assert cache.match(prompt).length == 0
                assert cache.available_pages == cache.stats().total_pages
                if learnt == "nothing":
                    break
                model_of(rank, cache, skip).play(6)
                cache.recover()
    return out


def prepared(cache: ParallelKVCache, prompt: list[int]) -> tuple[int, Any]:
    """Allocates two requests, a cached prefix, a swapped request, and free slots with pages."""
    reqids = [cache.alloc_reqid() for _ in range(4)]
    assert reqids == [0, 1, 2, 3]
    assert cache.step([20, 20, 9, 9, 0, 0]) == 0
    cache.free_reqid(1, tokens=[7] * 20)
    swapped = cache.swap_out(2)
    cache.free_reqid(3)
    cache.check_step()
    return 0, swapped


def swap_without_memory(rank: Any) -> Any:
    """Swaps a request out while one rank has no host memory for it."""
    out: list[Any] = []
    real = swap._host_memory

    def none(*args: Any) -> Any:
        raise MemoryError

    with rank.cache() as cache:
        cache.alloc_reqid()
        cache.step([20, 0, 0, 0])
        if rank.index == 1:
            swap._host_memory = none  # type: ignore[assignment]
        try:
            cache.swap_out(0)
        except MemoryError:
            assert rank.index == 1
        else:
            assert rank.index != 1
        swap._host_memory = real
        out.append(caught(cache.check_step))
        cache.recover()
        out.append(cache.alloc_reqid())
        out.append(cache.step([48, 0, 0, 0]))
        with cache.together():
            swapped = cache.swap_out(0)
        with cache.together():
            out.append(cache.swap_in(swapped))
        # every rank raises the same error, so none is poisoned
        out.append(caught(cache.swap_in, swapped))
        cache.check_step()
    return out
