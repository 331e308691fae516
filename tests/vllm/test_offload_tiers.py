# SPDX-License-Identifier: MIT
"""With vLLM's disk tier below host memory, prefixes outlive the engine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_engine import Open, Tokens, answer, elastic_of, expected, greedy, prompts, stock
from test_offload import idle
from test_server import wait_for

__all__ = ["expected", "stock"]

CHUNK = 2 * (8 << 10)  # a block of 32 tokens in two layers
POOL = {"VMEM_VLLM": "1", "VMEM_IDLE": "0.1"}


def tiers(root: Path, chunks: int) -> dict[str, Any]:
    """Returns the options of an engine with `chunks` chunks of host memory and a disk tier."""
    disk = {"type": "fs", "root_dir": str(root), "n_read_threads": 1, "n_write_threads": 1}
    extra = {
        "cpu_bytes_to_use": chunks * CHUNK,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [disk],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**POOL, "kv_transfer_config": transfer | {"kv_connector_extra_config": extra}}


def ask(llm: Any) -> tuple[Tokens, int]:
    """Returns the answers and the number of prompt tokens that were prefix hits."""
    outputs = llm.generate(prompts(), greedy(), use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    return tokens, sum(one.num_cached_tokens for one in outputs)


def has_no_name() -> bool:
    """Returns true if host memory's file is unlinked, so a killed engine leaves none behind."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = [line for line in maps if "/vllm_offload_" in line]
    return bool(found) and all(line.endswith("(deleted)") for line in found)


@pytest.mark.long
def test_prefixes_outlive_the_engine(
    start: Open, expected: Callable[..., Tokens], tmp_path: Path
) -> None:
    """Host memory holds two thirds of the prefixes, and is empty when the next engine starts."""
    wanted = expected("llama")
    for life in range(2):
        with start("llama", **tiers(tmp_path / "kv", 20)) as llm:
            assert has_no_name()
            tokens, cached = ask(llm)
            assert tokens == wanted
            if life:
                assert cached > 500, "they are loaded from the disk"
            idle(llm)
            assert 0 < elastic_of(llm).holds.host_cached <= 20 * CHUNK
            tokens, cached = ask(llm)
            assert tokens == wanted
            assert cached > 500
            idle(llm)
        files = list((tmp_path / "kv").rglob("*.bin"))
        assert len(files) > 20
        assert {one.stat().st_size for one in files} == {CHUNK}


@pytest.mark.long
def test_two_ranks(start: Open, expected: Callable[..., Tokens], tmp_path: Path) -> None:
    """The ranks share host memory, from which the scheduler's process writes to the disk."""
    wanted = expected("uneven")
    ways = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    for life in range(2):
        with start("uneven", **tiers(tmp_path / "kv", 3 * 20), **ways) as llm:
            assert has_no_name()
            for turn in range(2):
                tokens, cached = ask(llm)
                assert tokens == wanted
                if life or turn:
                    assert cached > 500
                backing = elastic_of(llm).backing
                null = backing.geometry.first_bytes(1)
                assert wait_for(lambda b=backing, n=null: b.mapped_bytes == n, 60)
            assert elastic_of(llm).holds.host_cached > 0
        sizes = {one.stat().st_size for one in (tmp_path / "kv").rglob("*.bin")}
        assert sizes == {2 * 3 * CHUNK // 2}, "a block of both ranks, in three layers"


@pytest.mark.long
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails(
    start: Open,
    expected: Callable[..., Tokens],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: int,
) -> None:
    """If the disk is full, is read-only or fails in operation, prefixes are recomputed."""
    from vllm.v1.kv_offload.tiering.fs import manager

    wanted = expected("llama")
    failed = 0

    def fail(*_: Any) -> None:
        nonlocal failed
        failed += 1
        raise OSError(error, os.strerror(error))

    with start("llama", **tiers(tmp_path / "kv", 20)) as llm:
        if error == errno.EIO:
            assert ask(llm)[0] == wanted
            idle(llm)
            monkeypatch.setattr(manager, "batch_load_block", fail)
        else:
            monkeypatch.setattr(manager, "batch_store_block", fail)
        for _ in range(3):
            assert answer(llm, prompts()) == wanted
            idle(llm)
        assert failed > 0
        stored = list((tmp_path / "kv").rglob("*.bin"))
        assert bool(stored) == (error == errno.EIO)
