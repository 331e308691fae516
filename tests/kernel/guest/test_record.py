# SPDX-License-Identifier: MIT
"""Tests the record of a driver's tests: what is counted, and how a later run changes it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import record
import suite
from builder import Builder
from manifest import Test as Entry
from manifest import branch_tests, kernel_tests
from record import add_to_record, add_to_runs, entry_of, run_of

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
    monkeypatch.setattr(record, "sources_of", lambda version, suite: sources)

    def results() -> dict[str, str]:
        read = json.loads(path.read_text(encoding="utf-8"))
        assert read["sources"] == sources
        assert read["commit"] == record.commit_of()
        assert read["date"] == record.today()
        return {one["name"]: one["result"] for one in read["tests"]}

    add_to_record(path, VERSION, [entry("two", "FAIL")])
    add_to_record(path, VERSION, [entry("one")])
    assert results() == {"one": "ok", "two": "FAIL"}
    add_to_record(path, VERSION, [entry("two")])
    assert results() == {"one": "ok", "two": "ok"}
    sources = {**sources, "module_sha256": "2"}
    add_to_record(path, VERSION, [entry("one")])
    assert results() == {"one": "ok"}


def test_a_test_that_is_interrupted_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def run_test(test: Entry, builder: Builder, show: bool) -> suite.Result:
        if test.name == "interrupts":
            raise KeyboardInterrupt
        assert ended.wait(60)
        return suite.Result(test, "FAIL", 1.0)

    monkeypatch.setattr(suite, "run_test", run_test)
    monkeypatch.setattr(suite, "end_children", ended.set)
    tests = [Entry(name=name, command=["x"], load=False) for name in ("interrupts", "runs")]
    seen: list[suite.Result] = []
    with pytest.raises(KeyboardInterrupt):
        suite.run_all(tests, Builder(jobs=1), 2, False, seen.append)
    assert seen == []


@pytest.mark.parametrize(("version", "newest"), [("565.77", "hopper"), (VERSION, "gb20x")])
def test_blackwell_is_tested_where_uvm_knows_it(version: str, newest: str) -> None:
    tests = branch_tests(version)
    for kind in ("release", "debug"):
        for program in ("builtin", "model", "fuzz", "kill"):
            archs = [t.arch for t in tests if (t.program, t.type) == (program, kind)]
            assert archs[:2] == ["ampere", "hopper"]
            assert archs[-1] == newest
            assert len(archs) == (4 if newest == "gb20x" else 2)


def test_a_record_has_a_line_for_each_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(record, "sources_of", lambda version, suite: {"driver": version})
    add_to_record(path, VERSION, [entry("two"), entry("one", output="a\nb\n")])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.partition('"name": ')[2][:5] for line in lines[3:5]] == ['"one"', '"two"']
    assert len(lines) == 6


def test_a_list_of_runs_keeps_every_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    test = Entry(name="fuzz-checked", program="fuzz", args=["CALLS=9", "SEED=3"], checked=True)
    output = "thread 0: 5 calls, 1 succeeded;\nthread 1: 4 calls, 1 succeeded;\n"
    add_to_runs(path, run_of(test, "FAIL", "", 1.6, 1.2))
    add_to_runs(path, run_of(test, "ok", output, 61.4, 40.0))
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert (first["result"], first["counts"], first["seconds"]) == ("FAIL", {}, 2)
    assert (second["result"], second["counts"], second["seconds"]) == ("ok", {"calls": 9}, 61)
    assert (second["entry"], second["arguments"]) == ("fuzz-checked", ["CALLS=9", "SEED=3"])
    assert second["checked"]
    assert len(second["module_sha256"]) == 64
    assert second["commit"]


def test_parameters_replace_those_of_the_manifest() -> None:
    test = Entry(name="fuzz", program="fuzz", args=["CALLS=1000000", "SEED=3", "-other"])
    (changed,) = suite.with_parameters([test], ["SEED=7"])
    assert changed.args == ["CALLS=1000000", "-other", "SEED=7"]
    assert list(suite.with_parameters([test], [])[0].args) == list(test.args)


@pytest.mark.parametrize(
    ("program", "word", "message"),
    [
        ("fuzz", "seed=7", "'seed=7' is not a parameter such as SEED=7"),
        ("fuzz", "SEED", "'SEED' is not a parameter such as SEED=7"),
        ("", "SEED=7", "some has no program that would take --set SEED=7"),
    ],
)
def test_a_parameter_that_would_change_nothing_is_refused(
    program: str, word: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        suite.with_parameters([Entry(name="some", program=program, command=["x"])], [word])


def test_pushes_of_the_debug_build_begin_late_but_for_uvms_own_tests() -> None:
    late = {
        test.program: "delay_us=" in test.module_args
        for test in branch_tests(VERSION)
        if test.type == "debug"
    }
    assert late.pop("builtin") is False
    assert all(late.values())
    assert not any("delay_us=" in t.module_args for t in branch_tests(VERSION) if t.type != "debug")


def test_what_runs_on_another_kernel() -> None:
    tests = kernel_tests("trixie", "550.163.01")
    assert len({test.name for test in tests}) == len(tests)
    for test in tests:
        assert (test.suite, test.version) == ("trixie", "550.163.01")
        assert test.tree[-2:] == ("--suite", "trixie")
        assert not test.mutant
    programs = {test.program for test in tests if (test.arch, test.type) == ("hopper", "release")}
    assert programs >= {"basic", "gap", "builtin", "model", "fuzz", "kill"}
