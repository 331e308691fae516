# SPDX-License-Identifier: MIT
"""The self-contained page that reports a run (tables, pictures, raw data), and the
plot.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pyvmem.bench.record import Part, Record
from pyvmem.bench.timing import Samples
from pyvmem.commands import page
from pyvmem.commands.cli import main

API = ["bench", "api", "--backend", "host", "--quick", "--only", "batch"]


def samples(*values: float) -> Samples:
    found = Samples()
    found.rounds = [list(values)]
    return found


@pytest.fixture
def document() -> dict[str, Any]:
    record = Record(machine={"cpu": "a <b>", "commit": "abc", "dirty": True}, options={"quick": 1})
    record.started = "2026-11-22T10:00:00+00:00"
    part = record.part("calls", "each call")
    part.time("map", "map & unmap", "host", samples(1000, 2000, 3000), page=65536)
    part.value("count", "pages", "host", 7, "pages")
    part.not_run("gpu", "no <GPU>")
    part.status = "partial"
    return record.document(raw=True)


class Page(HTMLParser):
    """Collects the resources, scripts and texts of a page; checks that all elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.data = ""
        self.texts: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attrs:
            if value and value.startswith("data:application/json;base64,"):
                self.data = value.partition(",")[2]
            elif name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_everything_and_loads_nothing(document: dict[str, Any]) -> None:
    found = Page(page.page(document, "vmem bench api --quick", "run.json"))
    assert found.outside == []
    assert "script" not in found.count
    assert found.count["svg"] == 1
    assert json.loads(base64.b64decode(found.data)) == document
    for text in ("map & unmap", "a <b>", "no <GPU>", "vmem bench api --quick", "calls/gpu"):
        assert text in found.texts
    assert any("commit abc with changes" in text for text in found.texts)
    assert document["parts"]["calls"]["rows"][0]["samples"] == [[1.0, 2.0, 3.0]]


def test_the_page_starts_with_the_summary(document: dict[str, Any]) -> None:
    bound = {"unit": "x", "op": "<=", "aim": 0.75, "rows": ["a/b"], "id": "raw_id"}
    document["aims"] = [
        {**bound, "what": "reached", "value": 0.5, "pass": True, "applies": True},
        {**bound, "what": "not reached", "value": 0.9, "pass": False, "applies": True},
        {**bound, "what": "for another machine", "value": 0.8, "pass": False, "applies": False},
        {**bound, "what": "not measured", "value": None, "pass": None, "applies": True},
    ]
    texts = [text for text in Page(page.page(document, "vmem")).texts if text.strip()]
    assert "no GPU; a <b>" in texts
    start = texts.index("In short")
    cells = " ".join(texts[start:])
    assert "reached 0.500 x <= 0.750 met not reached 0.900 x <= 0.750 missed" in cells
    assert "for another machine 0.800 x <= 0.750 1 more comparisons need rows" in cells
    assert "raw_id" not in cells[: cells.index("Machine")]
    assert any(text.endswith("2026-11-22 10:00 UTC") for text in texts)


def test_without_matplotlib_the_page_says_so(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = Page(page.page(document, "vmem bench api"))
    assert "svg" not in found.count
    assert any("matplotlib was not installed" in text for text in found.texts)


def test_a_part_without_times_is_drawn_from_its_numbers() -> None:
    part = Part("bytes", "of nothing")
    assert page.picture([vars(part)]) is None
    part.value("count", "pages of a kind", "host", 7, "pages")
    drawn = page.picture([vars(part)])
    assert drawn is not None
    assert b"median" not in drawn
    samples = Samples()
    samples.new_round().append(1)
    part.time("map", "map", "host", samples)
    timed = page.picture([vars(part)])
    assert timed is not None
    assert timed != drawn  # times are drawn if the part has any


def test_a_series_is_drawn_as_a_line() -> None:
    part = Part("azure", "requests")
    columns = ["seconds", "mapped", "running"]
    plain = page.picture([vars(part)])
    part.value("memory/a", "over time", "a", 2, "samples", columns=columns, series=[])
    assert page.picture([vars(part)]) == plain  # a run that ended immediately
    part.value("memory/b", "over time", "b", 2, "samples", columns=columns, series=[[0, 1, 2]] * 2)
    drawn = page.picture([vars(part)])
    assert drawn is not None
    assert drawn != plain


@pytest.mark.parametrize(("name", "first"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_a_benchmark_is_drawn_and_reported(tmp_path: Path, name: str, first: bytes) -> None:
    report, plot = tmp_path / "run.html", tmp_path / name
    assert main([*API, "--report", str(report), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(first)
    found = Page(report.read_text(encoding="utf-8"))
    kept = json.loads((tmp_path / "raw" / "run.json").read_text(encoding="utf-8"))
    assert json.loads(base64.b64decode(found.data)) == kept
    assert (tmp_path / "run.json").exists()
    for row in kept["parts"]["batch"]["rows"]:
        assert row["what"] in found.texts


def test_a_run_that_measures_nothing_writes_nothing(tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    assert main([*API, "--list", "--report", str(report)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_plot_in_an_unknown_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*API, "--plot", str(tmp_path / "p.gif")])
    assert "expected a name in .svg, .png or .pdf" in capsys.readouterr().err


def test_every_benchmark_that_keeps_a_result_can_be_reported() -> None:
    from pyvmem.bench.cli import add_parser

    top = argparse.ArgumentParser()
    add_parser(top.add_subparsers())
    (bench,) = [one for one in top._actions if isinstance(one, argparse._SubParsersAction)]
    which = bench.choices["bench"]._actions[-1]
    assert isinstance(which, argparse._SubParsersAction)
    without = {
        name
        for name, parser in which.choices.items()
        if not {"report", "plot"} <= {option.dest for option in parser._actions}
    }
    assert without == {"paper"}  # `paper` measures nothing


def test_the_self_test_is_reported(tmp_path: Path) -> None:
    report, kept = tmp_path / "s.html", tmp_path / "s.json"
    words = ["selftest", "--backend", "host", "--samples", "2"]
    assert main([*words, "--report", str(report), "--out", str(kept)]) == 0
    found = Page(report.read_text(encoding="utf-8"))
    data = json.loads(kept.read_text(encoding="utf-8"))
    assert json.loads(base64.b64decode(found.data)) == data
    assert "The self-test has passed." in found.texts
    assert {one["name"] for one in data["checks"]} <= set(found.texts)


def test_a_self_test_that_failed_says_so() -> None:
    check = {"name": "a", "what": "b", "result": "failed", "detail": "<c>", "seconds": 0.1}
    text = page.page({"tool": "vmem selftest", "passed": False, "checks": [check]}, "vmem")
    assert "The self-test has failed." in text
    assert re.search(r'<td class="failed">failed</td><td>&lt;c&gt;</td>', text)
