# SPDX-License-Identifier: MIT
"""The ranks of a ParallelKVCache, one per GPU, agree through NCCL.

Needs at least two CUDA devices, torch with NCCL, and a back end (cuda, stock) that passes its
probe.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "python"))
from gpu_helpers import BACKENDS, needs_gpu  # noqa: E402
from rank_runner import run_ranks  # noqa: E402

pytestmark = needs_gpu(2)


needs_ranks = pytest.mark.parametrize(
    "ranks", [pytest.param(count, marks=needs_gpu(count)) for count in (2, 4, 8)]
)


@needs_ranks
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_on_each_gpu(backend: str, ranks: int, tmp_path: Path) -> None:
    """Expects the same results on GPUs as tests/python/test_parallel.py expects on the CPU."""
    results = run_ranks(backend, tmp_path, ranks)
    for answers in results["same_answers"]:
        assert ["step", -1] in answers
        assert ["step", 0] in answers
    assert results["least_budget"] == [7, 5, 0, -1, 0]
    failed = results["one_rank_fails"]
    assert failed[2:9] == ["RankFailed 1 EIO"] * 7
    assert failed[9:14] == [12, [0, 1, 2, 3, None], 0, 0, "RankFailed 0 EIO"]
    assert results["ranks_differ"] == ["RanksDiffer  "] * 2 + [[0, 1]]
    for answers in results["shared_pages"]:
        assert any(answer[1] for call, answer in answers if call == "alloc_prefix" and answer)
        assert any(answer for call, answer in answers if call == "fork")
        assert any(answer == -1 for call, answer in answers if call == "step")
    assert results["held_back"] == [1, 0, 8]
    assert -1 in results["windows"]
    assert results["filled"][1] < 0.05 * results["filled"][2]
    for _, failing, said in results["sharing_fails"]:
        assert said in (f"RankFailed {failing} EIO", "nothing")
    assert results["swap_without_memory"][0] == "RankFailed 1 ENOMEM"
    assert results["init_fails"][:2] == ["InvalidArgument  EINVAL", "RankFailed 1 EINVAL"]


@needs_ranks
@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_random_calls(backend: str, ranks: int, tmp_path: Path) -> None:
    """Compares the contents and results of all ranks.

    Only one process group runs at a time, because collectives of several groups on the same GPUs
    wait for each other's time slices.
    """
    assert run_ranks(backend, tmp_path, ranks, 100_000, seconds=3600)["soak"] > 100_000
