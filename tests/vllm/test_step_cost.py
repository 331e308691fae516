# SPDX-License-Identifier: MIT
"""A step's cost depends on what changes in it, not on the number of requests.

The tests do not measure time; they count calls and the lines of pyvmem that the scheduler's thread
runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from test_engine import Open, answer, elastic_of, expected, greedy, idle_becomes, prompts, stock

from pyvmem.ledger.accounts import Ledger

__all__ = ["expected", "stock"]

BLOCK = 32


def lines_of(call: Callable[[], Any]) -> int:
    """Returns how many lines of pyvmem/vllm and pyvmem/elastic a call runs in this thread."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        ours = ("/pyvmem/vllm/", "/pyvmem/elastic/")
        return line if any(one in frame.f_code.co_filename for one in ours) else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def decode(llm: Any, count: int, length: int, steps: int) -> list[tuple[int, int]]:
    """Decodes `count` requests; returns how many lines and new blocks each step takes."""
    elastic, engine = elastic_of(llm), llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    for number in range(count):
        ids = [3 + (7 * i + number) % 400 for i in range(length)]
        engine.add_request(str(number), {"prompt_token_ids": ids}, greedy(steps + 8))
    while len(scheduler.running) < count or any(r.is_prefill_chunk for r in scheduler.running):
        engine.step()
    assert idle_becomes(elastic, elastic._ahead - elastic._batch)
    engine.step()
    found = []
    for _ in range(steps):
        used = elastic.used_blocks()
        lines = lines_of(engine.step)
        found.append((lines, elastic.used_blocks() - used))
    while engine.has_unfinished_requests():
        engine.step()
    return found


OPTIONS: dict[str, Any] = {
    "VMEM_VLLM": "1",
    "VMEM_IDLE": "3600",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}


def test_a_step_that_takes_nothing(start: Open) -> None:
    """The number of lines is the same for 4 and 64 requests, and for short and long ones."""
    with start("llama", VMEM_RESERVE="8M", **OPTIONS) as llm:
        assert elastic_of(llm).reserve_blocks > 4 * 64
        least = [
            min(lines for lines, blocks in decode(llm, count, length, 8) if not blocks)
            for count, length in ((4, BLOCK + 1), (64, BLOCK + 1), (4, 8 * BLOCK + 1))
        ]
        # A step may wake the keeper, which takes a few more lines.
        assert max(least) - min(least) < 8
        assert 0 < least[0] < 150


def test_a_step_with_few_free_blocks(start: Open) -> None:
    """vLLM queries the number of free blocks for each request; each query runs a few lines."""
    with start("llama", VMEM_RESERVE="512K", **OPTIONS) as llm:
        assert 8 < elastic_of(llm).reserve_blocks < 64
        elastic_of(llm)._most_ahead = 0
        few, many = (
            min(lines for lines, blocks in decode(llm, count, BLOCK + 1, 8) if not blocks)
            for count in (4, 64)
        )
        assert many <= few + 4 * 64


def test_a_step_that_takes_blocks(start: Open) -> None:
    """Each block that a step takes costs a few lines, however many blocks it takes."""
    with start("llama", VMEM_RESERVE="8M", **OPTIONS) as llm:
        for count in (4, 64):
            found = decode(llm, count, BLOCK - 6, 12)
            base = min(lines for lines, _ in found)
            (taking,) = [one for one in found if one[1]]
            assert taking[1] == count
            # A step runs twice as many lines if a background mapping finishes during it.
            assert taking[0] <= base + 40 * (count + 1)


def test_at_the_limit_prefixes_are_evicted_without_asking_for_each(
    start: Open, expected: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a refusal, mapping is not retried for a while if eviction frees enough."""
    monkeypatch.setattr("pyvmem.vllm.engine._PATIENCE", 3600.0)
    wanted = expected("straddling")
    settings = {"VMEM_LIMIT": "768K", "VMEM_RESERVE": "64K", "VMEM_IDLE": "3600"}
    with start("straddling", VMEM_VLLM="1", **settings) as llm:
        elastic = elastic_of(llm)
        for seed in range(3):
            answer(llm, prompts(seed))
        # Otherwise, mapping might be retried once memory is freed.
        elastic._give_back = lambda long_idle: None
        counts, here = {"begin": 0, "take": 0}, threading.get_ident()

        def counted(owner: Any, name: str) -> None:
            call = getattr(owner, name)

            def instead(*args: Any) -> Any:
                counts[name] += threading.get_ident() == here  # excludes calls by the keeper
                return call(*args)

            setattr(owner, name, instead)

        counted(elastic.backing, "begin")
        counted(elastic, "take")
        assert answer(llm, prompts()) == wanted
        assert counts["take"] > 20
        assert counts["begin"] <= counts["take"] // 4


def test_statistics_do_not_lock_the_ledger(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with start("llama", VMEM_RESERVE="8M", disable_log_stats=False, **OPTIONS) as llm:
        locked, here, count = Ledger.locked, threading.get_ident(), 0

        def counting(self: Ledger) -> Any:
            nonlocal count
            count += threading.get_ident() == here
            return locked(self)

        engine = llm.llm_engine
        monkeypatch.setattr(Ledger, "locked", counting)
        engine.add_request("0", {"prompt_token_ids": [5] * 8}, greedy(20))
        engine.step()
        count = 0
        while engine.has_unfinished_requests():
            engine.step()
            assert elastic_of(llm).usage() >= 0
        assert count == 0


def test_patches_of_other_tools_stay(start: Open) -> None:
    """In every kind of step, a tool sees the calls that it would see without the pool."""
    with start("llama", VMEM_RESERVE="512K", **OPTIONS) as llm:
        engine = llm.llm_engine
        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        pool = manager.block_pool
        owners = (
            (manager, "allocate_slots"),
            (manager.coordinator, "get_num_blocks_to_allocate"),
            (pool, "get_num_free_blocks"),
        )
        seen = dict.fromkeys((name for _, name in owners), 0)

        def counted(owner: Any, name: str) -> Any:
            call = getattr(owner, name)

            def instead(*args: Any, **kwargs: Any) -> Any:
                seen[name] += 1
                return call(*args, **kwargs)

            return instead

        own = [dict(vars(owner)) for owner, _ in owners]
        steps = decode(llm, 40, BLOCK - 6, 12)
        assert any(blocks for _, blocks in steps)
        assert [dict(vars(owner)) for owner, _ in owners] == own
        put = [counted(owner, name) for owner, name in owners]
        for (owner, name), one in zip(owners, put, strict=True):
            setattr(owner, name, one)
        steps = decode(llm, 40, BLOCK - 6, 12)
        assert any(blocks for _, blocks in steps)
        assert [getattr(owner, name) for owner, name in owners] == put
        assert min(seen.values()) >= 40 * len(steps)
