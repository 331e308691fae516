# SPDX-License-Identifier: MIT
"""The README's tables of the benchmarks of the cache and of attention, from quick runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import readme_cache
import readme_tables

from pyvmem.cli import main

pytest.importorskip("torch")
COMMANDS = {
    "overlap": ["--iterations", "20"],
    "deferred": [],
    "kernels": ["--kernels", "sdpa"],
    "prefix-map": [],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick run of each that says it was a full one, and one that does not."""
    folder = tmp_path_factory.mktemp("results")
    for name, options in COMMANDS.items():
        out = folder / f"{name}.json"
        words = ["bench", name, "--quick", "--backend", "host", "--out", str(out), *options]
        assert main(words) == 0
        data = json.loads(out.read_text())
        (folder / f"{name}-quick.json").write_text(json.dumps(data))
        data["options"]["quick"] = False
        data["machine"]["gpu"], data["machine"]["driver"] = "a GPU", "1.2"
        if name == "kernels":
            text = json.dumps(data["parts"].pop("sdpa"))
            data["parts"]["fa3"] = json.loads(text.replace("sdpa/", "fa3/"))
        out.write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_one_table_of_each(name: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_cache, "RESULTS", results)
    monkeypatch.setattr(readme_cache, "ROOT", results)
    lines = readme_cache.CACHE_PARTS[name]([])
    assert f"a GPU, driver 1.2 ([raw]({name}.json))" in lines[0]
    body = [line for line in lines if line.startswith("| ")]
    rows = {"overlap": 3, "deferred": 4, "kernels": 4, "prefix-map": 3}[name]
    assert len(body) == 2 + rows
    assert len({line.count("|") for line in body}) == 1
    assert not any("None" in line or "nan" in line for line in body)


def test_parts_are_asked_for_when_there_is_a_result(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = readme_tables.README.read_text(encoding="utf-8")
    measured = readme_tables.load()
    if not any(f"<!-- measured {name} -->" in text for name in COMMANDS):
        assert readme_tables.render(text, measured) == text
    monkeypatch.setattr(readme_cache, "RESULTS", results)
    monkeypatch.setattr(readme_cache, "ROOT", results)
    bare = text
    for name in COMMANDS:
        bare = bare.replace(f"<!-- measured {name} -->", "")
    with pytest.raises(SystemExit, match="measured overlap"):
        readme_tables.render(bare, measured)
    for name in COMMANDS:
        bare += f"\n<!-- measured {name} -->\n<!-- /measured {name} -->"
    if "<!-- measured overlap -->" not in text:
        shown = readme_tables.render(bare, measured)
        assert "mapped in the background |" in shown
        assert "single 64 KB pages |" in shown
