# SPDX-License-Identifier: MIT
"""`vmem bench models` on a tiny model: the methods agree, and invalid input is
rejected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from serve_helpers import one_thread

from pyvmem.commands import cli
from pyvmem.kvcache import KVCache
from vmem_bench import models

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own warnings


@pytest.mark.needs_tensors
def test_all_methods_on_three_kinds(tmp_path: Path, backend: str) -> None:
    out = tmp_path / "models.json"
    args = [
        "--quick",
        "--backend",
        backend,
        "--kinds",
        "gemma3,deepseek,qwen3next",
        "--out",
        str(out),
    ]
    assert cli.main(["bench", "models", *args]) == 0
    data = json.loads(out.read_text())
    for kind in ("gemma3", "deepseek", "qwen3next"):
        part = data["parts"][kind]
        found = {row["id"]: row for row in part["rows"]}
        missing = {row["id"]: row["why"] for row in part["missing"]}
        ways = [way for way in models.WAYS if f"{kind}/decode/{way}" not in missing]
        if kind == "qwen3next":
            assert ways == ["dynamic", "vmem"], part
            assert "layer 0 of Qwen3NextConfig has a state" in missing[f"{kind}/decode/attend"]
        else:
            assert ways[:3] == ["dynamic", "vmem", "attend"], missing
            if backend == "host":
                assert "no kernel reads these keys and values" in missing[f"{kind}/decode/fp8"]
        for way in ways:
            assert found[f"{kind}/prefill/{way}"]["n"] == 2
            assert found[f"{kind}/decode/{way}"]["n"] == 3
            assert found[f"{kind}/memory/{way}"]["value"] > 0
        for way in ways[1:]:
            assert found[f"{kind}/difference/{way}"]["value"] < (0.5 if way == "fp8" else 0.1)


def test_a_failed_method_is_reported_and_its_memory_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's traceback holds cache tensors; the memory must still be freed."""
    caches: list[KVCache] = []
    begin = models._Attend.open

    def watch(self: Any, stack: Any) -> None:
        begin(self, stack)
        caches.append(self.cache)

    def fail(module: Any, *_: Any, **__: Any) -> None:
        held = caches[-1].k(module.layer_idx)
        try:
            raise KeyError("a cause")
        except KeyError as cause:
            raise RuntimeError(f"no kernel of {held.ndim} dimensions") from cause

    monkeypatch.setattr(models._Attend, "open", watch)
    monkeypatch.setattr(models, "_attention", fail)
    out = tmp_path / "models.json"
    kinds = ["--kinds", "deepseek", "--out", str(out)]
    assert cli.main(["bench", "models", "--quick", "--backend", "host", *kinds]) == 0
    missing = json.loads(out.read_text())["parts"]["deepseek"]["missing"]
    why = {row["id"]: row["why"] for row in missing}
    assert why["deepseek/decode/attend"] == "no kernel of 4 dimensions"
    assert [cache.is_closed for cache in caches] == [True]


def test_the_tolerance_of_8_bits_grows_with_their_step() -> None:
    limit = models.largest_difference
    assert [limit(way, True, {}) for way in ("vmem", "attend")] == [0.1, 0.1]
    assert limit("vmem", False, {}) == 1e-3
    assert limit("fp8", True, {"attend": 0.01}) == pytest.approx(0.16)
    assert limit("fp8", True, {"attend": 0.09}) == 0.5


def test_an_unknown_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "models", "--kinds", "gemma3,rwkv"]) == 2
    assert (
        "unknown kind 'rwkv'; known: qwen3, mistral, gemma3, deepseek, qwen3next, kernels"
        in capsys.readouterr().err
    )


@pytest.mark.needs_tensors
def test_the_kernels_side_by_side(tmp_path: Path, backend: str) -> None:
    """For each phase, head size and type, each kernel has a time, or the table says why not."""
    out = tmp_path / "kernels.json"
    args = ["--quick", "--backend", backend, "--kinds", "kernels", "--out", str(out)]
    assert cli.main(["bench", "models", *args]) == 0
    part = json.loads(out.read_text())["parts"]["kernels"]
    found = {row["id"]: row for row in part["rows"]}
    for phase in ("prefill", "decode"):
        for case in ("float32/32", "float32/48"):
            row = found[f"kernels/sdpa/{phase}/{case}"]
            assert row["n"] == 20
            assert (row["past"], row["before"], row["latent"]) == (0, 0, case.endswith("48"))
    missing = {row["id"]: row["why"] for row in part["missing"]}
    assert "it has no float8_e4m3fn" in missing["kernels/sdpa/float8_e4m3fn/32"]
    if backend == "host":
        assert missing["kernels/fa3/float32/32"] == "it needs a GPU"
