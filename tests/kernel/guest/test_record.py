# SPDX-License-Identifier: MIT
"""The record of a driver's tests: what is counted, and what a later run does to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import record
from manifest import Test as Entry
from manifest import branch_tests
from record import add_to_record, entry_of

VERSION = "570.211.01"


def entry(name: str, word: str = "ok", output: str = "") -> dict[str, Any]:
    return entry_of(Entry(name=name, program="basic", arch="blackwell"), word, output)


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("RESULT UVM_TEST_A 0x0\nRESULT UVM_TEST_B 0x0\nRESULT UVM_TEST_C 0x56\n", 2),
        ("RESULT UVM_TEST_A 0x56\n", None),
        ("", None),
    ],
)
def test_only_results_that_are_ok_are_counted(output: str, counts: int | None) -> None:
    assert entry("builtin", output=output)["counts"].get("results_of_uvm") == counts


def test_what_programs_have_done_is_counted() -> None:
    output = (
        "SEED=6 PROCS=2 THREADS=2 OPS=1500 DELAY_US=200\nthread 0: 9990 calls, 12 succeeded;\n"
        "thread 1: 10010 calls, 9 succeeded;\n3 passed, 0 failed, 1 skipped\n"
        "exit status 0, 12.0 s, log: build/kernel/logs/x.log\n"
    )
    found = entry("all", output=output)
    assert found["counts"] == {"passed": 3, "calls": 20000, "operations": 6000}
    assert found["output"] == output.splitlines()[:-1]
    assert (found["architecture"], found["build"], found["result"]) == (
        "blackwell",
        "release",
        "ok",
    )


def test_a_record_grows_and_begins_anew_with_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    sources = {"driver": VERSION, "module_sha256": "1"}
    monkeypatch.setattr(record, "sources_of", lambda version: sources)

    def results() -> dict[str, str]:
        read = json.loads(path.read_text(encoding="utf-8"))
        assert read["sources"] == sources
        return {one["name"]: one["result"] for one in read["tests"]}

    add_to_record(path, VERSION, [entry("two", "FAIL")])
    add_to_record(path, VERSION, [entry("one")])
    assert results() == {"one": "ok", "two": "FAIL"}
    add_to_record(path, VERSION, [entry("two")])
    assert results() == {"one": "ok", "two": "ok"}
    sources = {**sources, "module_sha256": "2"}
    add_to_record(path, VERSION, [entry("one")])
    assert results() == {"one": "ok"}


@pytest.mark.parametrize(("version", "newest"), [("565.77", "hopper"), (VERSION, "gb20x")])
def test_blackwell_is_tested_where_uvm_knows_it(version: str, newest: str) -> None:
    tests = branch_tests(version)
    for kind in ("release", "debug"):
        for program in ("builtin", "model", "fuzz", "kill"):
            archs = [t.arch for t in tests if (t.program, t.type) == (program, kind)]
            assert archs[:2] == ["ampere", "hopper"]
            assert archs[-1] == newest
            assert len(archs) == (4 if newest == "gb20x" else 2)
