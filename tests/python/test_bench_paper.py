# SPDX-License-Identifier: MIT
"""The page that puts the papers' numbers beside ours is what the kept results say."""

from __future__ import annotations

import argparse
import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pyvmem.bench import cli
from pyvmem.bench.paper import command
from pyvmem.bench.paper.pictures import PICTURES, available, digest, draw
from pyvmem.bench.paper.results import NotMeasured, Results
from pyvmem.bench.paper.rows import PAPERS, ROWS, SOURCES, block_tokens, slot_tokens, waste
from pyvmem.cli import main

ROOT = Path(__file__).parents[2]
KEPT, PAGE = ROOT / "benchmarks/results", ROOT / "docs/reproduction.md"
K, M = 1 << 10, 1 << 20


def test_the_page_and_the_pictures_show_the_kept_results() -> None:
    assert command.stale(Results(KEPT), PAGE) == [], "run: vmem bench paper --write"


def test_every_picture_can_be_drawn_from_kept_results() -> None:
    pytest.importorskip("matplotlib")
    found = available(Results(KEPT))
    assert len(found) >= len(PICTURES) - 1  # the one that needs a run under arrivals
    for picture, data in found:
        text = draw(picture, data)
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert digest(picture, data) in text
        for name in data.get("groups", ()):
            assert all(part in text for part in name.split("\n"))


def test_a_changed_result_is_noticed(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(KEPT, results, ignore=shutil.ignore_patterns("logs", "driver-*"))
    assert command.stale(Results(results), PAGE) == []
    path = results / "capacity.json"
    data = json.loads(path.read_text())
    for row in data["parts"]["azure_2023_conv"]["rows"]:
        row["value"] += 1
    path.write_text(json.dumps(data))
    stale = {one.name for one in command.stale(Results(results), PAGE)}
    assert stale == {"reproduction.md", "batch.svg"}
    words = ["bench", "paper", "--results", str(results), "--page", str(PAGE), "--check"]
    assert main(words) == 1


def test_writing_makes_everything_and_removes_what_is_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction/old.svg").write_text("<svg/>")
    words = ["bench", "paper", "--results", str(KEPT), "--page", str(page)]
    assert main([*words, "--check"]) == 1
    assert main([*words, "--write"]) == 0
    assert main([*words, "--check"]) == 0
    assert not (tmp_path / "reproduction/old.svg").exists()


def test_without_results_every_measured_row_says_so(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured = [row for row in ROWS if row.file]
    assert measured
    for row in measured:
        assert row.ours is not None
        with pytest.raises(NotMeasured):
            row.ours(results)
    assert available(results) == []
    assert command.page(results).count(f"| {command.NOT_MEASURED} |") >= len(measured)
    assert main(["bench", "paper", "--results", str(tmp_path / "none")]) == 2


def test_rows_are_whole() -> None:
    """Each has a source, one of ours or a reason, and a command that there is."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    for row in ROWS:
        assert row.paper in PAPERS
        assert row.source in SOURCES
        assert "|" not in row.theirs + row.what + row.why
        assert not (row.cannot and row.ours)
        assert bool(row.command) == (row.ours is not None), row.number
        if row.command:
            words = row.command.replace("FILE", "x").split()[1:]
            parser.parse_args(words)  # SystemExit: no such command or option
    assert {row.paper for row in ROWS} == set(PAPERS)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_blocks_and_waste_are_those_of_the_paper() -> None:
    """vAttention's table of blocks: tokens in a page, and what a request wastes at most."""
    tokens = [block_tokens(m, r, 64 * K) for m in ("Yi-6B", "Llama-3-8B", "Yi-34B") for r in (1, 2)]
    assert tokens == [64, 128, 32, 64, 32, 64]
    pages = (64 * K, 128 * K, 256 * K, 2 * M)
    assert [waste("Llama-3-8B", page) for page in pages] == [4, 8, 16, 128]
    assert [2 * waste("Yi-34B", page) for page in pages] == [15, 30, 60, 480]


def test_room_for_tokens_is_that_of_the_paper() -> None:
    """PagedAttention's table 1: OPT-13B, 12 GB for keys and values."""
    assert round(slot_tokens(12 * (1 << 30), 40, 5120) / 1e3, 1) == 15.7
