# SPDX-License-Identifier: MIT
"""An idle engine frees its memory and later loads its prefixes from host memory."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import (
    Open,
    Tokens,
    answer,
    check,
    elastic_of,
    expected,
    greedy,
    memory_of,
    prompts,
    stock,
)
from test_server import wait_for

from pyvmem import Context, Inject
from pyvmem.elastic.geometry import Run
from pyvmem.elastic.memory import KVMemory
from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import Ledger
from pyvmem.memory.host_copies import HostMemory, ThreadCopies, copies_for
from pyvmem.vllm.offload_spec import DROPPED, HELD, Shared, Transferrer, VMemOffloadingSpec
from pyvmem.vllm.plugin import CannotWork

__all__ = ["expected", "stock"]

POOL = {"VMEM_VLLM": "1", "VMEM_IDLE": "0.1", "kv_offloading_size": 1 / 16}


def counters(llm: Any) -> Any:
    return elastic_of(llm).holds.counters


def idle(llm: Any) -> None:
    """Waits until only the null block's page is mapped."""
    elastic = elastic_of(llm)
    null = elastic.backing.geometry.first_bytes(1)
    end = time.monotonic() + 60
    while time.monotonic() < end and (elastic.backing.mapped_bytes > null or elastic.holds):
        time.sleep(0.05)
    check(llm)
    assert elastic.backing.mapped_bytes == null
    assert not elastic.holds


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        "llama",
        pytest.param("straddling", marks=pytest.mark.long),
        pytest.param("gemma", marks=pytest.mark.long),
    ],
)
def test_prefixes_come_back_from_host_memory(
    start: Open,
    expected: Callable[..., Tokens],
    monkeypatch: pytest.MonkeyPatch,
    ledger: Path,
    model: str,
) -> None:
    """Loads prefixes after an idle period, also when copies or maps fail."""
    wanted = expected(model)
    with start(model, **POOL, VMEM_HOST_LIMIT="64M") as llm:
        with Ledger("host", folder=ledger, create=False) as book:
            assert [one.host for one in book.engines()] == [64 << 20]
        assert answer(llm, prompts()) == wanted
        idle(llm)
        assert counters(llm).stored > 0
        with Ledger("host", folder=ledger, create=False) as book:
            kept = elastic_of(llm).holds.host_cached
            assert 0 < kept <= 64 << 20
            assert wait_for(lambda: book.engines()[0].host_cached == kept, 30)
        outputs = llm.generate(prompts(), greedy(), use_tqdm=False)
        assert [list(one.outputs[0].token_ids) for one in outputs] == wanted
        assert sum(one.num_cached_tokens for one in outputs) > 0
        loaded = counters(llm).loaded
        assert loaded > 0
        idle(llm)

        def refuse(self: Any, pieces: Any) -> None:
            raise OSError("no copy today")

        with monkeypatch.context() as patch:
            patch.setattr(ThreadCopies, "_move", refuse)
            asked = prompts() + prompts(seed=1, count=2)  # two new prompts, stored during the loads
            stored = counters(llm).stored
            first = answer(llm, asked)
            assert first[: len(wanted)] == wanted
            assert counters(llm).loaded > loaded
            assert counters(llm).stored > stored
            idle(llm)
        assert answer(llm, asked) == first

        failures, context = elastic_of(llm).backing.counters.failures, memory_of(llm).context
        for skip in (0, 1, 3):
            idle(llm)
            context.inject(Inject.MAP, skip=skip, count=3, error=12)
            assert answer(llm, prompts()) == wanted
            context.inject(Inject.MAP, count=0)
        assert elastic_of(llm).backing.counters.failures > failures


def test_aborts_and_trims_while_blocks_are_copied(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take a step or two, and would fault if a page were unmapped too early."""
    asked = prompts(3, 24)
    with start("llama") as llm:
        wanted = answer(llm, asked, 24)
    move, rng = ThreadCopies._move, random.Random(5)

    def slowly(self: Any, pieces: Any) -> None:
        time.sleep(rng.choice([0, 0.01, 0.03]))
        move(self, pieces)

    monkeypatch.setattr(ThreadCopies, "_move", slowly)
    with start("llama", **{**POOL, "VMEM_IDLE": "0.02"}) as llm:
        engine, elastic = llm.llm_engine, elastic_of(llm)
        aborted = 0
        for turn in range(3):
            todo, live = [(f"{turn}-{i}", i) for i in range(len(asked))], dict[str, int]()
            while todo or live:
                if todo and rng.random() < 0.6:
                    name, i = todo.pop()
                    engine.add_request(name, asked[i], greedy(rng.randrange(1, 24)))
                    live[name] = i
                for one in engine.step():
                    if one.finished:
                        got = list(one.outputs[0].token_ids)
                        assert got == wanted[live.pop(one.request_id)][: len(got)]
                if live and rng.random() < 0.15:
                    engine.abort_request([name := rng.choice(sorted(live))])
                    del live[name]
                    aborted += 1
                if rng.random() < 0.3:
                    with elastic.lock:
                        elastic._shrink(rng.choice([64 << 10, 1 << 20, 16 << 20]))
                        assert elastic.backing.check() == []
                if rng.random() < 0.05:
                    llm.reset_prefix_cache()
            idle(llm)
        assert aborted > 0
        assert counters(llm).loaded > 0
        assert counters(llm).stored > 0


def test_a_store_is_dropped_if_no_step_follows(start: Open) -> None:
    """The engine runs no steps after its last request, and freeing does not wait for the store."""
    asked = prompts(seed=7, count=4)
    with start("llama", **POOL) as llm:
        first = answer(llm, asked, 1)
        assert elastic_of(llm).holds, "the last step's stores have not started"
        idle(llm)
        dropped = counters(llm).dropped
        assert dropped > 0
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        assert connector.get_kv_connector_stats().reduce()[DROPPED] == dropped
        assert {DROPPED, HELD} <= set(VMemOffloadingSpec.build_metric_definitions({}))
        for _ in range(2):
            assert answer(llm, asked, 8) == answer(llm, asked, 8)
            assert [one[:1] for one in answer(llm, asked, 8)] == first
            idle(llm)
        assert counters(llm).loaded > 0


def test_layers_end_within_a_page(start: Open, expected: Callable[..., Tokens]) -> None:
    """The pool aligns layers to pages, yet rank and scheduler agree on the number of chunks."""
    block, blocks, chunks = 8 << 10, 100, 24
    assert blocks * block % (64 << 10)
    size = {"kv_offloading_size": chunks * 2 * block / 2**30, "num_gpu_blocks_override": blocks}
    wanted = expected("llama")
    with start("llama", **POOL | size) as llm:
        manager = elastic_of(llm).holds._manager
        assert manager._num_chunks == chunks
        for _ in range(2):
            assert answer(llm, prompts()) == wanted
            idle(llm)
        assert manager._num_allocated_chunks == chunks
        assert counters(llm).loaded > 0


@pytest.mark.long
def test_a_size_above_what_other_engines_leave_is_refused(start: Open, ledger: Path) -> None:
    other = Ledger("host", folder=ledger).join(
        "other", floor=0, limit=1, least=1, virtual=1, host=1 << 20
    )
    text = f"VMEM_HOST_LIMIT={64 << 20}: .* asks for {64 << 20} bytes .* have {1 << 20} already"
    with (
        pytest.raises(InvalidArgument, match=text),
        start("llama", **POOL, VMEM_HOST_LIMIT="64M"),
    ):
        pass
    other.close()


def test_a_size_above_host_memory_is_refused(start: Open) -> None:
    with (
        pytest.raises(CannotWork, match=r"kv_offloading_size of \d+ bytes, .* of host memory\)"),
        start("llama", **{**POOL, "kv_offloading_size": 1e6}),
    ):
        pass


# ---- a rank's part -------------------------------------------------------------------------------


def test_a_size_below_a_block_is_refused() -> None:
    config = SimpleNamespace(
        extra_config={"cpu_bytes_to_use": 4096.0},
        enable_kv_cache_events=False,
        groups=(),
        cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=SimpleNamespace(world_size=2, rank=0),
        worker_kv_bytes_per_block=64 << 10,
        replicated_layout=False,
        canonical_layout=False,
    )
    with pytest.raises(ValueError, match=r"4096 bytes, is below one block of all ranks, 131072"):
        VMemOffloadingSpec(config)


def described(memory: KVMemory, sizes: list[int], groups: list[list[int]]) -> Any:
    """Describes a memory's tensors and their groups as vLLM does."""
    tensors = [
        SimpleNamespace(tensor=memory.tensor(size).view(64, -1), page_size_bytes=size // 64)
        for size in sizes
    ]
    refs = [
        [SimpleNamespace(tensor_idx=i, page_size_bytes=sizes[i] // 64) for i in group]
        for group in groups
    ]
    return SimpleNamespace(tensors=tensors, group_data_refs=refs)


def spec(blocks: list[int], sizes: list[int], first: list[int]) -> Any:
    return SimpleNamespace(
        block_ids=np.array(blocks, dtype=np.int32), group_sizes=sizes, block_indices=first
    )


@pytest.mark.parametrize(("library", "second"), [(False, False), (True, False), (False, True)])
def test_blocks_are_stored_and_loaded(
    monkeypatch: pytest.MonkeyPatch, library: bool, second: bool
) -> None:
    """Uses two groups of layers and two blocks per chunk. One group starts mid-chunk.

    `second`: whether this is the second of two ranks that share host memory.
    """
    if library:
        monkeypatch.setattr(ThreadCopies, "_move", lambda *_: (_ for _ in ()).throw(OSError("no")))
    sizes = [64 * 4096, 64 * 4096, 64 * 1000]
    memory = KVMemory(Context("host"), 64, sizes)
    try:
        memory.grow([Run(kind, 0, memory.geometry.num_pages(kind)) for kind in (0, 1)])
        described_ = described(memory, sizes, [[0, 2], [1]])
        kv = [one.tensor for one in described_.tensors]
        chunk, shared, closed = 2 * (4096 + 4096 + 1000), None, []
        if second:
            whole = mmap.mmap(-1, 8 * 2 * chunk)
            shared = Shared(whole, 2 * chunk, chunk, lambda: closed.append(True))
        worker = Transferrer(described_, 2, 8, chunk, shared)
        copies = [copies_for(memory.context, torch.device("cpu"))(way) for way in (True, False)]
        worker.begin(*copies)
        for one in kv:
            one.random_(-128, 127)
        before = [one.clone() for one in kv]
        device = spec([5, 9, 60, 7, 1], [3, 2], [3, 0])
        host = SimpleNamespace(block_ids=np.array([6, 2, 4], dtype=np.int32))
        assert worker.submit_store(1, device, host)
        worker.wait({1})
        (result,) = worker.get_finished()
        assert (result.job_id, result.success) == (1, True)
        assert result.transfer_size == 3 * 5096 + 2 * 4096
        if second:
            rows = np.frombuffer(whole[:], dtype=np.int8).reshape(8, 2, chunk)
            assert not rows[:, 0].any(), "the first rank's"
            assert [bool(one.any()) for one in rows[:, 1]] == [n in (6, 2, 4) for n in range(8)]
        for one in kv:
            one.zero_()
        worker.dropped.add(2)
        assert worker.submit_store(2, device, host)  # would store zeros if it ran
        back = spec([11, 12, 13, 14, 15], [3, 2], [3, 0])
        assert worker.submit_load(3, host, back)
        worker.wait({2, 3})
        assert [one.job_id for one in worker.get_finished()] == [2, 3]
        for tensor, blocks in ((0, (5, 9, 60)), (2, (5, 9, 60)), (1, (7, 1))):
            places = range(11, 14) if tensor != 1 else range(14, 16)
            for block, place in zip(blocks, places, strict=True):
                assert torch.equal(kv[tensor][place], before[tensor][block])
                kv[tensor][place].zero_()
        assert not any(one.any() for one in kv), "something else was written"
        del kv, one, described_
        worker.shutdown()
        worker.shutdown()
        assert closed == [True] * second
    finally:
        memory.close()


def test_a_transfer_with_mismatched_chunks_is_refused() -> None:
    memory = KVMemory(Context("host"), 64, [64 * 4096])
    try:
        caches = described(memory, [64 * 4096], [[0]])
        worker = Transferrer(caches, 1, 4, 4096)
        host = SimpleNamespace(block_ids=np.array([0, 1], dtype=np.int32))
        with pytest.raises(ValueError, match="3 blocks and 2 chunks, of which 2 and 2 match"):
            worker.submit_store(1, spec([1, 2, 3], [2], [0]), host)
        with pytest.raises(ValueError, match="of chunk 4; host memory has 4"):
            worker.submit_store(1, spec([1], [1], [0]), SimpleNamespace(block_ids=np.array([4])))
        with pytest.raises(RuntimeError, match="before the engine's memory is known"):
            worker.submit_store(1, spec([1, 2], [2], [0]), host)
        with pytest.raises(ValueError, match="has 4096 bytes, vLLM counted 4095"):
            Transferrer(caches, 1, 4, 4095)
        worker.shutdown()
    finally:
        memory.close()


def test_host_memory_that_cannot_be_allocated() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes of host memory"):
        HostMemory(1 << 60, locked=False)


@pytest.mark.parametrize("begin", ["finished", "wait", "events", "fence"])
def test_stores_of_a_step_are_one_copy(monkeypatch: pytest.MonkeyPatch, begin: str) -> None:
    """The stores start when finished ones are polled for, or before a wait, event or fence."""
    started = []
    start = ThreadCopies.start

    def watched(self: ThreadCopies, pieces: Any, after: Any) -> Any:
        started.append(pieces.nbytes)
        return start(self, pieces, after)

    monkeypatch.setattr(ThreadCopies, "start", watched)
    memory = KVMemory(Context("host"), 64, [64 * 4096] * 2)
    try:
        memory.grow([Run(0, 0, memory.geometry.num_pages(0))])
        caches = described(memory, [64 * 4096] * 2, [[0, 1]])
        worker = Transferrer(caches, 1, 64, 2 * 4096)
        make = copies_for(memory.context, torch.device("cpu"))
        out, _ = worker.begin(make(True), make(False))
        kv = [one.tensor.random_(-128, 127) for one in caches.tensors]
        wanted = [one[32:48].clone() for one in kv]
        for job in range(16):
            host = SimpleNamespace(block_ids=np.array([job, 40 + job], dtype=np.int32))
            assert worker.submit_store(job, spec([job, 32 + job], [2], [0]), host)
        assert started == []
        if begin == "events":
            assert out.events() == ()
        elif begin == "fence":
            out.fence(None)
        elif begin == "wait":
            worker.wait({7})
        found = worker.get_finished()
        assert started == [16 * 2 * 2 * 4096]
        worker.wait({7})
        found += worker.get_finished()
        assert [one.job_id for one in found] == list(range(16))
        assert {one.transfer_size for one in found} == {2 * 2 * 4096}
        back = SimpleNamespace(block_ids=np.arange(40, 56, dtype=np.int32))
        assert worker.submit_load(16, back, spec(list(range(16)), [16], [0]))
        worker.wait({16})
        assert all(map(torch.equal, (one[:16] for one in kv), wanted))
        worker.shutdown()
    finally:
        memory.close()
