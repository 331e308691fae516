# SPDX-License-Identifier: MIT
"""Checks `vmem bench sglang --part share` without engines: the requests, the rows and the table."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import readme_engines

from pyvmem.bench.record import Part
from pyvmem.commands.cli import main
from vmem_bench.sglang.share import ENGINES, Found, bursts
from vmem_bench.sglang.tables import shared
from vmem_bench.vllm.loads import Heard, tiny


def test_bursts_alternate() -> None:
    """A burst has the requested length, and no two engines have a burst at the same time."""
    loads = bursts(tiny(20), 700, 3, 8.0)
    assert sorted(loads) == sorted(ENGINES)
    for place, engine in enumerate(ENGINES):
        load = loads[engine]
        assert [one.at for one in load] == sorted(one.at for one in load)
        for number in range(3):
            begin = number * 8.0 + place * 4.0
            burst = [one.request for one in load if begin <= one.at < begin + 0.5]
            tokens = [one.context + one.output for one in burst]
            assert sum(tokens[:-1]) < 700 <= sum(tokens)
            assert [one.at for one in load if begin + 0.5 <= one.at < begin + 8.0] == [
                begin + 4.0 + k for k in range(4)
            ]
    # each engine gets a different part of the trace
    assert loads["vllm"][0].request != loads["sglang"][0].request


def heard(first: list[float], tokens: int, seconds: float) -> Heard:
    answers = [[7] * tokens for _ in first]
    return Heard(answers, first, [], len(first) * tokens / seconds, seconds)


def rows_of(found: Found) -> dict[str, dict[str, Any]]:
    part = Part("share", "")
    found.rows(part)
    return {row["id"].removeprefix("share/"): row for row in part.rows}


def test_rows_and_table() -> None:
    found = Found(1 << 30)
    for scale in (1.0, 3.0):
        slow = {"vllm": heard([0.1 * scale, 0.4 * scale], 50, 2.0)}
        slow["sglang"] = heard([0.2 * scale, 0.2 * scale], 50, 4.0)
        found.heard["static"].append(slow)
        fast = {"vllm": heard([0.1 * scale, 0.1 * scale], 50, 1.0)}
        fast["sglang"] = heard([0.1 * scale, 0.3 * scale], 50, 2.0)
        found.heard["elastic"].append(fast)
    found.most = {"vllm": 700 << 20, "sglang": 800 << 20, "both": 1 << 30}
    rows = rows_of(found)
    assert rows["p99/vllm/static"]["rounds"] == pytest.approx([400, 1200], rel=0.01)
    assert rows["p99/vllm/static"]["value"] == pytest.approx(800, rel=0.01)
    assert rows["over/p99/vllm"]["value"] == pytest.approx(0.25, rel=0.02)
    assert rows["over/p99/vllm"]["half_width"] == pytest.approx(0.0, abs=1e-6)
    assert rows["p50/both/static"]["rounds"] == pytest.approx([200, 600])
    assert rows["rate/vllm/elastic"]["value"] == 100
    assert rows["rate/both/static"]["value"] == 50  # 200 tokens divided by the slower engine's time
    assert rows["requests/sglang/elastic"]["value"] == 4
    assert rows["most/vllm/static"]["value"] == 1 << 29
    assert rows["most/both/elastic"]["value"] == 1 << 30
    lines = {line[0]: line[1:] for line in shared(rows)}
    assert lines["time to first token of vLLM, p99, ms"][2].startswith("0.25")
    assert lines["GB of keys and values of both, peak"] == ["1.074", "1.074", ""]
    assert not any("idle" in title or "device" in title for title in lines)  # not measured yet


def test_the_results_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept run appears on the SGLang results page, with its description and table."""
    found = Found(3 << 30)
    for arm in ("static", "elastic"):
        found.heard[arm].append({name: heard([0.1, 0.3], 5, 1.0) for name in ENGINES})
    part = Part("share", "")
    found.rows(part)
    options = {"vllm": "0.33.0", "sglang": "0.5.23", "shape": "1b", "burst": 0.8, "period": 8.0}
    run = {
        "options": {**options, "bursts": 3, "prefixes": True, "backend": "stock"},
        "parts": {"share": {"rows": part.rows, "missing": [{"id": "share/rest", "why": "late"}]}},
        "machine": {"commit": "0123456789", "gpus": [], "gpu": "H100"},
    }
    monkeypatch.setattr(readme_engines, "runs", lambda name: [run])
    monkeypatch.setattr(readme_engines, "title", lambda run: "H100")
    text = "\n".join(readme_engines.part_sglang([]))
    assert "vLLM 0.33.0 and SGLang 0.5.23 on one GPU, shape 1b, 3.2 GB" in text
    assert "| time to first token of SGLang, p99, ms |" in text
    assert text.endswith("Not run: rest (late).")


def test_an_arm_that_was_not_measured() -> None:
    found = Found(1 << 30)
    found.heard["static"].append({name: heard([0.1], 5, 1.0) for name in ENGINES})
    rows = rows_of(found)
    assert rows["p99/vllm/static"]["value"] == pytest.approx(100)
    assert "p99/vllm/elastic" not in rows
    assert "over/p99/vllm" not in rows


def test_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert main(["bench", "sglang", "--backend", "host"]) == 3
    assert "nothing was measured: sglang cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--shape", "mla"], "--part share has no --shape mla"),
        (["--burst", "0"], "'0': expected a number above 0"),
        (["--rounds", "0"], "0 is not between 1"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", "sglang", "--part", "share", "--backend", "host", *words])
    except SystemExit as ended:
        status = cast("int", ended.code)
    assert status == 2
    assert text in capsys.readouterr().err
