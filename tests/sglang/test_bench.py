# SPDX-License-Identifier: MIT
"""Quick runs of `vmem bench sglang`: a stock and an elastic engine, each in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyvmem.commands.cli import main
from vmem_bench.sglang.command import ARMS
from vmem_bench.sglang.engine import STEPS


def bench(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Runs the command; returns its exit status and the contents of its result file."""
    words = ["bench", "sglang", "--quick", "--backend", "host", "--out", str(out)]
    return main([*words, *more]), json.loads(out.read_text("utf-8"))


def test_elastic_and_stock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, data = bench(tmp_path / "sglang.json", "--turns", "1")
    part = data["parts"]["sglang"]
    assert (status, part["status"]) == (0, "done"), part["why"]
    assert data["format"] == "vmem-bench-sglang/1"
    rows = {row["id"].partition("/")[2]: row for row in part["rows"]}
    answers = ["again/stock", *(f"{name}/elastic" for name in ("alone", "again", "batch", "slept"))]
    for name in answers:
        assert rows[f"same/{name}"]["value"] == rows[f"same/{name}"]["of"] == 8
    assert "same/alone/stock" not in rows  # the others are compared with this one
    for arm in ARMS:
        assert rows[f"distinct/{arm}"]["value"] > 8
        assert rows[f"hits/{arm}"]["value"] > 600
        for name in ("rate/4", "first/rest", "first/again"):
            assert rows[f"{name}/{arm}"]["value"] > 0
            assert len(rows[f"{name}/{arm}"]["rounds"]) == 1
    assert len(rows["over/rate/4"]["rounds"]) == 1
    assert "half_width" not in rows["over/rate/4"]
    mapped = {
        name: rows[f"mapped/{name}/elastic"]["value"] for name in ("start", "highest", "rest")
    }
    assert 0 < mapped["start"] < mapped["rest"] <= mapped["highest"]
    assert rows["mapped/flushed/elastic"]["value"] == mapped["start"]
    assert rows["mapped/asleep/elastic"]["value"] == mapped["start"]
    assert not any(name.startswith(("mapped", "sleep")) and "stock" in name for name in rows)
    assert rows["maps/elastic"]["value"] > 0
    assert (tmp_path / "sglang.json").stat().st_size < 12_000
    said = capsys.readouterr().out
    assert "tokens/s, 4 requests together" in said
    assert "8 of 8" in said


def test_sharing_with_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs four engines; both arms get the same requests, and idle engines free memory."""
    status, data = bench(tmp_path / "share.json", "--part", "share", "--rounds", "1")
    part = data["parts"]["share"]
    assert (status, part["status"]) == (0, "done"), part["why"]
    assert data["options"]["sglang"]
    assert data["options"]["vllm"]
    rows = {row["id"].partition("/")[2]: row for row in part["rows"]}
    for engine in ("vllm", "sglang"):
        counts = [rows[f"requests/{engine}/{arm}"]["value"] for arm in ("static", "elastic")]
        assert counts[0] == counts[1] > 2 * 10  # the requests of two bursts
        assert len(rows[f"p99/{engine}/elastic"]["rounds"]) == 1
        assert len(rows[f"over/p99/{engine}"]["rounds"]) == 1
        assert rows[f"most/{engine}/elastic"]["value"] > rows[f"flushed/{engine}/elastic"]["value"]
        assert rows[f"flushed/{engine}/static"]["value"] == rows["capacity"]["value"] // 2
    used = [rows[f"{when}/both/elastic"]["value"] for when in ("flushed", "prefixes", "most")]
    assert 0 < used[0] < used[1] <= used[2] <= rows["capacity"]["value"]
    assert "first token of both, p99, ms" in capsys.readouterr().out


def test_a_deadline_names_what_it_skipped(tmp_path: Path) -> None:
    """One deadline ends the run during the first turn, another before any engine starts."""
    status, data = bench(tmp_path / "one.json", "--deadline", "36")
    part = data["parts"]["sglang"]
    named = [one["id"].removeprefix("sglang/turn/") for one in part["missing"]]
    skipped = ["1", "2", "3"]
    assert named[-3:] == skipped
    assert named[:-3] == [f"0/{step}" for step in STEPS[len(STEPS) - 1 - len(named[:-3]) : -1]]
    assert status == (0 if part["rows"] else 1)
    status, data = bench(tmp_path / "none.json", "--deadline", "1")
    assert [one["id"] for one in data["parts"]["sglang"]["missing"]][:1] == ["sglang/turn/0"]
    assert status == 1


def test_an_engine_that_fails(tmp_path: Path) -> None:
    status, data = bench(tmp_path / "failed.json", "--option", 'attention_backend="none-such"')
    part = data["parts"]["sglang"]
    assert (status, part["status"]) == (1, "failed")
    assert "the stock engine failed" in part["why"]
    assert "none-such" in part["why"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--requests", "64,64"], "'64,64': expected different numbers"),
        (["--requests", "0"], "0 is not between 1"),
        (["--option", "a"], "'a': expected NAME=VALUE"),
        (["--option", "a=b"], "'a=b': 'b' is not JSON"),
        (["--idle", "0"], "'0': expected a number above 0"),
        (["--shape", "70b"], "invalid choice: '70b'"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "sglang", *words])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
