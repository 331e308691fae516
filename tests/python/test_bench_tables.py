# SPDX-License-Identifier: MIT
"""Checks the tables of the cache and attention benchmarks, from quick runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import readme_cache
import readme_index
import readme_tables

from pyvmem.bench import record
from pyvmem.commands.cli import main
from vmem_bench.vllm import picture

pytest.importorskip("torch")
COMMANDS = {
    "overlap": ["--iterations", "20"],
    "deferred": [],
    "kernels": ["--kernels", "sdpa", "--page", "128K"],
    "prefix-map": [],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs every benchmark in its quick form; writes each result twice, once marked as a full
    run.
    """
    folder = tmp_path_factory.mktemp("results")
    for name, options in COMMANDS.items():
        out = folder / f"{name}.json"
        words = ["bench", name, "--quick", "--backend", "host", "--out", str(out), *options]
        words += ["--deadline", "9000"]  # so that a slow machine does not fail the test
        assert main(words) == 0
        data = json.loads(out.read_text())
        (folder / f"{name}-quick.json").write_text(json.dumps(data))
        data["options"]["quick"] = False
        data["machine"]["gpu"], data["machine"]["driver"] = "a GPU", "1.2"
        if name == "kernels":
            text = json.dumps(data["parts"].pop("sdpa"))
            data["parts"]["fa3"] = json.loads(text.replace("sdpa/", "fa3/"))
            peak = {"id": "fa3/peak", "what": "of the card", "value": 3.0, "unit": "GB/s"}
            data["parts"]["fa3"]["rows"].append(peak)
        out.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_one_table_per_result(name: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_cache, "RESULTS", results)
    monkeypatch.setattr(readme_cache, "ROOT", results)
    lines = readme_cache.CACHE_PARTS[name]([])
    assert f"a GPU, driver 1.2 ([raw]({name}.json))" in lines[0]
    pages = {"overlap": "4 KB", "deferred": "4 KB", "kernels": "128 KB", "prefix-map": ""}
    assert pages[name] in lines[0]
    body = [line for line in lines if line.startswith("| ")]
    rows = {"overlap": 3, "deferred": 4, "kernels": 4, "prefix-map": 3}[name]
    assert len(body) == 2 + rows
    assert len({line.count("|") for line in body}) == 1
    assert not any("None" in line or "nan" in line for line in body)


def test_a_missing_place_for_a_result_is_an_error(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in readme_tables.files()}
    measured = readme_tables.load()
    monkeypatch.setattr(readme_cache, "RESULTS", results)
    monkeypatch.setattr(readme_cache, "ROOT", results)
    bare = {path: text.replace("<!-- measured overlap -->", "") for path, text in texts.items()}
    with pytest.raises(SystemExit, match=r"measured overlap.*0 places"):
        readme_tables.render(bare, measured)
    other = "<!-- measured overlap -->\n<!-- /measured overlap -->"
    with pytest.raises(SystemExit, match="in 2 places"):
        readme_tables.render({**texts, Path("other.md"): other}, measured)
    shown = "".join(readme_tables.render(texts, measured).values())
    assert "mapped in the background |" in shown
    assert "single 64 KB pages |" in shown


def test_a_picture_says_which_rows_it_shows() -> None:
    seen: list[list[float]] = [[-0.5, 9, 9, 9], [0.0, 9, 1, 2], [1.0, 9, 2, 2]]
    memory = {"id": "share/memory/shared", **picture.series(seen)}
    assert memory["series"] == [[0.0, 3, 1, 2], [1.0, 4, 2, 2]]
    first = {"id": "share/first/shared", "mean": 2.0, "p99": 4.0}
    rows = [memory, {"id": "share/capacity", "value": 1 << 30}, first]
    document = {"parts": {"share": {"rows": rows}}}
    shown = picture.draw(document)
    assert picture.digest(document) in shown
    assert "engine 1" in shown
    first["p99"] = 5.0
    assert picture.digest(document) not in shown
    with pytest.raises(ValueError, match="no series of memory"):
        picture.draw({"parts": {"share": {"rows": rows[1:]}}})


def test_links_of_a_part_are_relative_to_its_file() -> None:
    path = readme_tables.ROOT / "docs" / "driver" / "evidence.md"
    line = "[raw](benchmarks/results/a.json) [there](https://example.org) [here](#part)"
    shown = readme_tables.relative(line, path)
    assert (
        shown == "[raw](../../benchmarks/results/a.json) [there](https://example.org) [here](#part)"
    )


def test_a_result_has_a_line_per_row() -> None:
    rows = [{"id": f"part/{n}", "median": n / 3, "note": "x" * 200} for n in range(5)]
    document = {"format": "f", "parts": {"part": {"rows": rows, "missing": []}}, "empty": {}}
    text = record.lines(document)
    assert json.loads(text) == document
    assert sum('"id"' in line for line in text.splitlines()) == len(rows)
    assert all(line.count('"id"') <= 1 for line in text.splitlines())


def test_committed_results_have_a_line_per_row() -> None:
    for path in sorted(readme_index.RESULTS.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        if path.name.startswith("driver-"):  # written by the driver's tests, one line per test
            assert len(text.splitlines()) == len(json.loads(text)["tests"]) + 4, path.name
        else:
            assert text == record.lines(json.loads(text)) + "\n", path.name
