# SPDX-License-Identifier: MIT
"""Checks, against the kept results, the page that compares published numbers with ours."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pyvmem.bench import cli
from pyvmem.commands.cli import main
from vmem_bench.paper import command
from vmem_bench.paper.driver import Check, checks, costs, section, workloads
from vmem_bench.paper.our_numbers import block_tokens, reading, slot_tokens, waste
from vmem_bench.paper.pictures import PICTURES, available, digest, draw
from vmem_bench.paper.results import NotMeasured, Results
from vmem_bench.paper.rows import PAPERS, ROWS, SOURCES

ROOT = Path(__file__).parents[2]
KEPT, PAGE = ROOT / "benchmarks/results", ROOT / "docs/reproduction.md"
K, M = 1 << 10, 1 << 20
NEEDS_RUNS = {
    "heads",
    "makespan",
    "latency",
    "memory",
}  # pictures of runs on a GPU, which may not be kept yet


def test_the_page_and_the_pictures_show_the_kept_results() -> None:
    assert command.stale(Results(KEPT), PAGE) == [], "run: vmem bench paper --write"


def test_every_picture_can_be_drawn_from_kept_results() -> None:
    pytest.importorskip("matplotlib")
    found = available(Results(KEPT))
    missing = {picture.name for picture in PICTURES} - {picture.name for picture, _ in found}
    assert missing <= NEEDS_RUNS
    for picture, data in found:
        text = draw(picture, data)
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert digest(picture, data) in text
        for name in data.get("groups", ()):
            assert all(part in text for part in name.split("\n"))


def _made_up(folder: Path) -> Results:
    """Writes runs in the benchmarks' format, with made-up numbers."""
    arms = ("contiguous", "2M", "paged16", "paged128")
    figures = ("makespan", "tokens", "first50", "first99", "between50", "between99")
    rows = [
        {"id": f"{part}/{figure}/{arm}", "value": number + 1.0}
        for part in ("offline", "azure")
        for figure in figures
        for number, arm in enumerate(arms)
    ]
    series = {
        "columns": ["seconds", "mapped", "held", "used", "running"],
        "series": [[0.0, 2 << 30, 1 << 30, 1 << 30, 1], [1.0, 3 << 30, 2 << 30, 1 << 30, 2]],
    }
    rows += [{"id": f"azure/memory/{arm}", "value": 2, **series} for arm in arms]
    aims = [
        {"id": f"fa3_{phase}_{name}_{block}", "value": 1.5}
        for phase in ("decode", "prefill")
        for name in ("mha", "llama", "yi_6b", "mqa")
        for block in (16, 128)
    ]
    document = {"parts": {"all": {"rows": rows}}, "aims": aims}
    for name in ("serve-arxiv-h200", "serve-azure-online-h200", "kernels-heads-h100"):
        (folder / f"{name}.json").write_text(json.dumps(document))
    return Results(folder)


def test_pictures_of_runs_that_are_not_kept_yet_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {picture.name: (picture, data) for picture, data in available(_made_up(tmp_path))}
    assert found.keys() == NEEDS_RUNS
    for picture, data in found.values():
        assert ElementTree.fromstring(draw(picture, data)).tag.endswith("svg")
    makespan = found["makespan"][1]["series"]
    assert makespan == {"64 KB": [1, 1], "2 MB": [2, 2], "16": [3, 3], "128": [4, 4]}
    memory = found["memory"][1]["series"]
    assert memory["64 KB pages: mapped"] == [[0.0, 2.0], [1.0, 3.0]]
    assert memory["tokens"] == [[0.0, 1.0], [1.0, 1.0]]


def test_rows_of_serving_runs_match_the_runs(tmp_path: Path) -> None:
    """All figures of an arm have the same made-up value, so the ratio between two arms is known."""
    factors = {"contiguous": 8.0, "2M": 16.0, "paged16": 4.0, "static": 32.0, "again": 8.0}
    figures = ("tokens", "requests", "first50", "batch", "largest", "mapped", "used", "shared")
    for part in ("offline", "azure", "prefixes", "chat"):
        rows = [
            {"id": f"{part}/{figure}/{arm}", "value": value}
            for arm, value in factors.items()
            for figure in figures
        ]
        rows += [{"id": f"{part}/held/{arm}", "value": 32.0} for arm in factors]
        rows += [{"id": f"{part}/full/{arm}", "value": 1.0} for arm in factors if part != "chat"]
        options = {"kv_bytes": 20 << 30, "arms": list(factors)}
        (tmp_path / f"{part}.json").write_text(
            json.dumps({"options": options, "parts": {part: {"rows": rows}}})
        )
    parts = {"online": "azure", "slow": "azure", "prefixes": "prefixes", "chat": "chat"}
    served = [row for row in ROWS if row.file.startswith("serve-")]
    for row in served:
        part = next((parts[w] for w in row.file.split("-") if w in parts), "offline")
        shutil.copy(tmp_path / f"{part}.json", tmp_path / f"{row.file}.json")
    results = Results(tmp_path)
    texts = [row.ours(results) for row in served if row.ours is not None]
    assert len(texts) == len(served) > 8
    found = "\n".join(texts)
    assert "tokens/s of contiguous relative to paged16 2.000x, again 1.000x" in found
    ratios = "largest batch 0.50x, tokens/s 0.50x"
    # From the chat workload:
    assert f"64 KB relative to 2 MB in 20 GB: batch 0.50x, {ratios}" in found
    assert f"20 GB: batch 0.50x, batch while others wait 1.00x, {ratios}" in found
    assert "-100% of the pool is not mapped" in found
    assert "share of held memory that rows use 25%, static 100%" in found


def test_the_time_model_follows_its_inputs_and_states_its_error() -> None:
    results = Results(KEPT)
    for way in ("map", "unmap"):
        cost = costs(results, way)
        apart, together = (
            results["h100"].value(f"batch/{way}_{how}/stock/64K")
            for how in ("scattered", "contiguous")
        )
        assert cost.time(64, 64) == pytest.approx(apart)
        assert cost.time(1, 64) == pytest.approx(together)
    assert Check("a page", 3.0, 2.0).error == 0.5
    tested = checks(results)
    assert len({one.what for one in tested}) == len(tested) > 8
    growth, *others = workloads(results)
    assert growth.stock_us == pytest.approx(costs(results, "map").time(33792, 32768))
    for one in (growth, *others):
        assert one.uvm["entries"] <= one.stock["entries"]
        assert one.uvm_us < one.stock_us


def test_no_time_model_without_counts(tmp_path: Path) -> None:
    shutil.copy(KEPT / "h100.json", tmp_path)
    assert section(Results(tmp_path)) == []


def test_drawing_is_deterministic() -> None:
    pytest.importorskip("matplotlib")
    picture, data = available(Results(KEPT))[0]
    assert draw(picture, data) == draw(picture, data)


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
    assert stale == {"reproduction.md", "batch.svg", "held.svg"}
    words = ["bench", "paper", "--results", str(results), "--page", str(PAGE), "--check"]
    assert main(words) == 1


def test_write_creates_everything_and_removes_stale_files(tmp_path: Path) -> None:
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
    page = command.page(results)
    assert page.count(f"| {command.NOT_MEASURED}: ") == len(measured)
    assert page.count(f"no {measured[0].file}.json") >= 1
    assert main(["bench", "paper", "--results", str(tmp_path / "none")]) == 2


def test_rows_are_complete() -> None:
    """Each row has a known source, and each row with a result of our own has a valid command."""
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    for row in ROWS:
        assert row.paper in PAPERS
        assert row.source in SOURCES
        assert "|" not in row.theirs + row.what + row.why
        assert not (row.cannot and row.ours)
        assert bool(row.command) == (row.ours is not None), row.number
        if row.command:
            words = re.sub("FILE|AZURE|ARXIV|MOONCAKE", os.devnull, row.command).split()[1:]
            parser.parse_args(words)  # SystemExit: no such command or option
    assert {row.paper for row in ROWS} == set(PAPERS)


# ---- arithmetic ----------------------------------------------------------------------------------


def test_blocks_and_waste_match_the_paper() -> None:
    """Checks vAttention's published numbers: tokens per block and the maximum waste per request."""
    tokens = [block_tokens(m, r, 64 * K) for m in ("Yi-6B", "Llama-3-8B", "Yi-34B") for r in (1, 2)]
    assert tokens == [64, 128, 32, 64, 32, 64]
    pages = (64 * K, 128 * K, 256 * K, 2 * M)
    assert [waste("Llama-3-8B", page) for page in pages] == [4, 8, 16, 128]
    assert [2 * waste("Yi-34B", page) for page in pages] == [15, 30, 60, 480]


def test_room_for_tokens_matches_the_paper() -> None:
    """Checks PagedAttention's table 1: OPT-13B with 12 GB for keys and values."""
    assert round(slot_tokens(12 * (1 << 30), 40, 5120) / 1e3, 1) == 15.7


def test_decoding_rate_counts_all_keys_and_values() -> None:
    """The case has 32 requests of 16K tokens, and 8 heads of 128 two-byte elements: 2 GiB of keys
    and values.
    """
    results = Results(KEPT)
    names = [f"fa3/decode_b32_16k/contiguous/random{i}" for i in (0, 1)]
    ms = results["kernels-h200"].median(names)
    assert reading(results, "decode_b32_16k", "contiguous") == pytest.approx(2 * 2**30 / ms / 1e6)
