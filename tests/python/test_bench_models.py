# SPDX-License-Identifier: MIT
"""Description: `vmem bench models` on a tiny model: the ways agree; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from serve_helpers import one_thread

from pyvmem import cli
from pyvmem.bench import models

__all__ = ["one_thread"]
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own


@pytest.mark.needs_tensors
def test_all_ways_of_two_kinds(tmp_path: Path, backend: str) -> None:
    out = tmp_path / "models.json"
    args = ["--quick", "--backend", backend, "--kinds", "gemma3,deepseek", "--out", str(out)]
    assert cli.main(["bench", "models", *args]) == 0
    data = json.loads(out.read_text())
    for kind in ("gemma3", "deepseek"):
        part = data["parts"][kind]
        found = {row["id"]: row for row in part["rows"]}
        missing = {row["id"]: row["why"] for row in part["missing"]}
        if backend == "host":
            assert set(missing) == {f"{kind}/decode/fp8"}, part
            assert "no kernel reads these keys and values" in missing[f"{kind}/decode/fp8"]
        ways = [way for way in models.WAYS if f"{kind}/decode/{way}" not in missing]
        assert ways[:3] == ["dynamic", "vmem", "attend"], missing
        for way in ways:
            assert found[f"{kind}/prefill/{way}"]["n"] == 2
            assert found[f"{kind}/decode/{way}"]["n"] == 3
            assert found[f"{kind}/memory/{way}"]["value"] > 0
        for way in ways[1:]:
            assert found[f"{kind}/difference/{way}"]["value"] < (0.25 if way == "fp8" else 0.1)


def test_an_unknown_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "models", "--kinds", "gemma3,rwkv"]) == 2
    assert "no kind 'rwkv'; there are qwen3, mistral, gemma3, deepseek" in capsys.readouterr().err
