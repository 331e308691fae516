# SPDX-License-Identifier: MIT
"""Tests the test runner: progress, remaining time, and the stage to resume from."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import run_tests
from kvcache_helpers import eventually


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """Returns a function that runs `run_tests` with made-up stages and returns its status and the
    stages that ran.
    """
    ran = []

    def stage(name, action=lambda: None):
        def run(session):
            ran.append(name)
            action()

        run.__doc__ = f"Runs {name}."  # printed as the stage's description
        return run

    def fail():
        raise run_tests.Failed("exit status 1: a command")

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(run_tests, "TIMES", tmp_path / "times.json")
    stages = {name: stage(name) for name in ("one", "two", "three", "gpu")}
    monkeypatch.setattr(run_tests, "STAGES", stages)

    def call(*words, fails=(), interrupted=()):
        ran.clear()
        for name in stages:
            action = fail if name in fails else interrupt if name in interrupted else lambda: None
            stages[name] = stage(name, action)
        monkeypatch.setattr(sys, "argv", ["run_tests.py", *words])
        return run_tests.main(), list(ran)

    call.times = tmp_path / "times.json"
    return call


def test_all_stages_but_gpu(runner, capsys):
    assert runner() == (0, ["one", "two", "three"])
    said = capsys.readouterr().out
    assert "#### one (stage 1 of 3, time left unknown): Runs one." in said
    assert "3 of 3 stages passed" in said
    assert "FROM=" not in said
    assert sorted(json.loads(runner.times.read_text())["short"]) == ["one", "three", "two"]


def test_time_left_is_that_of_the_last_run(runner, capsys):
    runner.times.write_text('{"short": {"two": 100.0, "three": 200.0}, "long": {"one": 9000.0}}')
    runner()
    said = capsys.readouterr().out
    assert "#### one (stage 1 of 3, about 5 min left, not counting 1 without a time)" in said
    assert "#### three (stage 3 of 3, about 3 min left)" in said
    runner("--long", "one")
    assert "#### one (stage 1 of 1, about 150 min left)" in capsys.readouterr().out


def test_a_broken_record_is_ignored(runner, capsys):
    runner.times.write_text("{")
    assert runner("two") == (0, ["two"])
    assert "time left unknown" in capsys.readouterr().out


def test_resumes_from_a_stage(runner, capsys):
    assert runner(fails=("two",)) == (1, ["one", "two", "three"])
    said = capsys.readouterr().out
    assert "two            FAILED" in said
    assert "2 of 3 stages passed" in said
    assert said.endswith("to continue: make test FROM=two\n")
    assert "two" not in json.loads(runner.times.read_text())["short"]
    assert runner("--from", "two") == (0, ["two", "three"])


def test_stages_that_were_named_are_named_again(runner, capsys):
    """`make check` has a stage that `make test` lacks."""
    assert runner("two", "one", fails=("one",)) == (1, ["two", "one"])
    said = capsys.readouterr().out
    assert said.endswith("to run again: build/venv/bin/python scripts/run_tests.py one\n")


def test_an_interrupt_ends_with_the_summary(runner, capsys):
    assert runner("--long", interrupted=("two",)) == (1, ["one", "two"])
    said = capsys.readouterr().out
    assert "two            interrupted" in said
    assert said.endswith("to continue: make test-long FROM=two\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--from", "four"], "no such stage: four"),
        (["four"], "no such stage: four"),
        (["one", "--from", "two"], "--from two: not among one"),
        (["--from", "gpu"], "--from gpu: not among one, two, three"),
    ],
)
def test_unknown_stages_are_rejected(runner, capsys, words, text):
    with pytest.raises(SystemExit) as caught:
        runner(*words)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_a_command_that_fails_is_named_in_a_line(monkeypatch, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        status = 1 if "ruff" in command or "clang-format" in command[0] else 0
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(run_tests.subprocess, "run", run)
    with pytest.raises(run_tests.Failed) as caught:
        run_tests.lint(run_tests.Session())
    assert max(map(len, commands)) > 100, "there are more than 100 C files"
    first, second, third = str(caught.value).split("; ")
    files = "pyvmem pyvmem_sglang pyvmem_vllm benchmarks scripts tests setup.py"
    assert first == f"ruff check {files}: exit status 1"
    assert second == f"ruff format --check {files}: exit status 1"
    assert re.fullmatch(
        r"clang-format --dry-run -Werror( \w+/\S+\.[ch]){9} and \d+ more: exit status 1", third
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([run_tests.PYTHON, run_tests.ROOT / "scripts" / "x.py", "--a"], "scripts/x.py --a"),
        (["/usr/bin/python3", "-m", "pytest", "-m", "not long"], "pytest -m 'not long'"),
        (["make", *map(str, range(12))], "make " + " ".join(map(str, range(12)))),
        (["make", *map(str, range(13))], "make 0 1 2 3 4 5 6 7 8 9 10 and 2 more"),
    ],
)
def test_a_command_in_a_line(command, text):
    assert run_tests.shown(command) == text


def test_the_other_pythons(monkeypatch, capsys):
    """Tests every Python except the one in build/venv: a missing Python is reported, and a failure
    does not stop the others.
    """
    found = {one: f"/usr/bin/python{one}" for one in ("3.11", "3.12", "3.13", "3.14")}
    made, tested = [], []

    def make(venv, groups, python, size):
        made.append((venv.name, python))
        return run_tests.CANNOT if python.endswith("3.14") else 0

    def suite(backend, python, marks, what):
        tested.append(python.parent.parent.name)
        assert (backend, marks, what) == ("host", "not long", "tests/python")
        if python.parent.parent.name.endswith("3.12"):
            raise run_tests.Failed("exit status 1")

    monkeypatch.setattr(run_tests, "answer", lambda *words: "3.11")
    monkeypatch.setattr(run_tests, "interpreters", lambda: (found, ["3.10"]))
    monkeypatch.setattr(run_tests.extra_environment, "make", make)
    monkeypatch.setattr(run_tests, "pytest_on", suite)
    session = run_tests.Session(long=True)
    with pytest.raises(run_tests.Failed, match=r"the Python tests on 3\.12$"):
        run_tests.other_pythons(session)
    names = ["python-3.12", "python-3.13", "python-3.14"]
    assert made == [(one, f"/usr/bin/{one.replace('-', '')}") for one in names]
    assert tested == ["python-3.12", "python-3.13"]
    assert session.not_run == [
        "the Python tests on 3.10: no such interpreter here",
        "the Python tests on 3.14: requirements unavailable (see above)",
    ]


@pytest.fixture
def gpu_calls(monkeypatch):
    """Returns a function that runs the stage `gpu`, records its calls and their environments, and
    makes the calls with the given numbers fail.
    """
    calls, fails = [], set()

    def call(*words, **env):
        calls.append((words, env))
        if len(calls) in fails:
            raise run_tests.Failed("exit status 1")

    monkeypatch.setattr(run_tests, "call", call)
    monkeypatch.setattr(run_tests.os, "sched_getaffinity", lambda pid: range(64))

    def stage(*failing):
        fails.update(failing)
        run_tests.gpu_tests(run_tests.Session(backends=["stock", "cuda"]))

    stage.calls = calls
    return stage


def test_the_back_ends_of_a_gpu(gpu_calls):
    """The suite runs on each back end in several processes; tests of the whole device run alone."""
    gpu_calls()
    (_, *suites, (alone, env)) = gpu_calls.calls
    assert [env["VMEM_TEST_BACKEND"] for _, env in suites] == ["stock", "cuda"]
    assert all(words[words.index("-n") + 1] == "8" for words, _ in suites)
    assert "-n" not in alone
    assert "tests/gpu" in alone
    assert env["VMEM_TEST_BACKEND"] == "stock,cuda"


def test_a_failed_back_end_stops_no_other(gpu_calls):
    with pytest.raises(run_tests.Failed, match=r"^tests/python on stock, tests/gpu$"):
        gpu_calls(2, 4)
    assert len(gpu_calls.calls) == 4


def test_a_run_on_a_gpu_that_is_cut_short_has_named_what_failed(gpu_calls, tmp_path, monkeypatch):
    monkeypatch.setattr(run_tests.os, "sched_getaffinity", lambda pid: range(1))
    gpu_calls()
    _, (suite, _), _, (alone, _) = gpu_calls.calls
    gate, out = tmp_path / "gate", tmp_path / "out"
    (tmp_path / "test_wrong.py").write_text("def test_one():\n    assert 0\n")
    (tmp_path / "test_wrong_later.py").write_text(
        "import time, pathlib\n"
        "def test_two():\n"
        f"    while not pathlib.Path({str(gate)!r}).exists():\n"
        "        time.sleep(0.01)\n"
    )
    for words in (suite, alone):
        command = [sys.executable, *words[1:-1], "-p", "no:cacheprovider", "."]
        with out.open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        try:
            eventually(lambda: "FAILED" in out.read_text())
        finally:
            run.kill()
            run.wait()
            gate.touch()
        (said,) = [line for line in out.read_text().splitlines() if "FAILED" in line]
        assert "test_wrong.py::test_one" in said
        gate.unlink()


@pytest.mark.parametrize("folder", run_tests.LONGEST)
def test_the_longest_files_run_first_and_none_is_omitted(folder):
    option, *paths = run_tests.longest_first(folder)
    assert option == "--no-loadscope-reorder", "else pytest-xdist orders them by number of tests"
    longest = [f"{folder}/test_{name}.py" for name in run_tests.LONGEST[folder]]
    assert paths[: len(longest)] == longest
    every = [f"{folder}/{one.name}" for one in (run_tests.ROOT / folder).glob("test_*.py")]
    assert sorted(paths) == sorted(every)


def test_pytest_enters_every_folder_that_has_tests(pytestconfig):
    skipped = pytestconfig.getini("norecursedirs")
    tests = (run_tests.ROOT / "tests").rglob("test_*.py")
    parts = {part for one in tests for part in one.relative_to(run_tests.ROOT).parent.parts}
    assert "build" in parts
    assert not {part for part in parts for pattern in skipped if fnmatch(part, pattern)}
