#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the tests of tests/kernel/manifest, each in its own guest, and prints a line for each.

    suite.py                      every test but the long ones
    suite.py --long               the long ones too
    suite.py --list               lists the tests
    suite.py --show NAME          one test, with all its output as it comes
    suite.py 'bind-*' boot-ampere tests that match
    suite.py --driver 580.142     its branch's required tests on that version (source: NV_SRC=)
    suite.py --driver 580.142 --kernel trixie
                                  the tests required of a driver on that Debian suite's kernel
    suite.py fuzz-checked --set CALLS=50000 --set SEED=7 --runs FILE
                                  a part of a long run, recorded in FILE

Trees of modules and C programs are built when the first test needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "scripts")]

from builder import BUILD, ROOT, Builder, BuildError, child, end_children  # noqa: E402
from guest.machine import UP_TIME  # noqa: E402
from kernel_common import is_version  # noqa: E402
from kernel_debian import KERNEL_SUITES  # noqa: E402
from manifest import Test, all_tests, branch_tests, kernel_tests  # noqa: E402
from record import add_to_record, add_to_runs, entry_of, run_of  # noqa: E402

__all__ = ["main"]

SKIPPED = 77
# Seconds added to a test's time limit for the runner on a busy machine, and for a boot that hangs.
MARGIN = 60.0 + UP_TIME
# Factor by which every test's time limit is multiplied, for slower or busier machines.
PATIENCE = float(os.environ.get("VMEM_TEST_PATIENCE", "2"))
# How many lines of a failed test's output are shown. The log has all of them.
MOST_LINES = 300
CHECKED_MEMORY = 4096


def patience(test: Test) -> float:
    """Returns the time limit of a test, in seconds."""
    return test.timeout * PATIENCE


def guest_command(test: Test, builder: Builder) -> list[str]:
    """Builds what a test needs; returns the command line of run.py for it."""
    builder.prepare(test.build)
    words = [sys.executable, str(HERE / "run.py"), "--name", test.name]
    words += ["--arch", test.arch, "--gpus", str(test.gpus), "--timeout", str(patience(test))]
    tree = builder.tree(test) if test.load or test.program else None
    if test.load:
        words += ["--tree", str(tree)]
    if test.checked:
        words += ["--kernel", str(builder.checked_kernel() / "bzImage")]
    memory = test.memory or (CHECKED_MEMORY if test.checked else None)
    for option, value in (("--vidmem", test.vidmem), ("--memory", memory)):
        words += [option, str(value)] if value is not None else []
    words += ["--image", "python"] if test.image else []
    words += [f"--module-args={test.module_args}", f"--uvm-args={test.uvm_args}"]
    words += [f"--append={test.append}"]
    words += [f"--env={one}" for one in test.env]
    words += [f"--file={ROOT / one}" for one in test.files]
    words += [f"--allow={one}" for one in test.allow]
    if test.program:
        assert tree is not None
        return [*words, "--", str(builder.programs(tree) / test.program), *test.args]
    return [*words, "--", *test.command]


@dataclass
class Result:
    """A test's result: "ok", "FAIL" or "skip", with its duration and output."""

    test: Test
    word: str
    seconds: float
    output: str = ""
    processor_seconds: float = 0.0

    def line(self) -> str:
        """Returns the line to print."""
        reason = ""
        if self.word == "skip":
            # The last line comes from the runner.
            said = self.output.strip().splitlines()
            reason = f" ({said[-2]})" if len(said) > 1 else ""
        busy = f", {self.processor_seconds:.0f} s of a processor" if self.processor_seconds else ""
        return f"{self.word:<4} {self.test.name} {self.seconds:.1f} s{busy}{reason}"


def run_test(test: Test, builder: Builder, show: bool) -> Result:
    """Builds and runs a test; with `show`, prints its output as it arrives."""
    start = time.monotonic()
    try:
        if not test.command and not test.program:
            builder.tree(test)
            return Result(test, "ok", time.monotonic() - start)
        command = guest_command(test, builder)
    except BuildError as error:
        if show:
            print(error)
        return Result(test, "FAIL", time.monotonic() - start, str(error))
    report = BUILD / "logs" / f"{test.name}.json"
    report.unlink(missing_ok=True)
    command[2:2] = ["--report", str(report)]
    start = time.monotonic()
    output = b""
    with child(command, stderr=subprocess.STDOUT) as process:
        late = threading.Timer(patience(test) + MARGIN, process.terminate)
        late.start()
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 65536):
            output += data
            if show:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        process.wait()
        late.cancel()
    text = output.decode(errors="replace")
    found = json.loads(report.read_text("utf-8")) if report.exists() else {}
    word = verdict(test, process.returncode, found, text)
    busy = found.get("processor_seconds", 0.0)
    return Result(test, word, time.monotonic() - start, text, busy)


def verdict(test: Test, status: int, report: dict[str, Any], output: str) -> str:
    """Derives a test's result from the runner's exit status and report."""
    if test.caught:
        ran = report.get("loaded") and not report.get("late")
        failed = status not in (0, SKIPPED) and re.search(test.caught, output)
        return "ok" if ran and failed else "FAIL"
    return {0: "ok", SKIPPED: "skip"}.get(status, "FAIL")


def select(tests: list[Test], patterns: list[str], long: bool) -> list[Test]:
    """Returns the tests that match; without patterns, all tests, but long ones only if `long`."""
    if not patterns:
        return [test for test in tests if long or not test.long]
    found = [t for t in tests if any(fnmatch.fnmatch(t.name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatch.fnmatch(test.name, pattern) for test in found):
            sys.exit(f"suite.py: no test is named {pattern} (suite.py --list)")
    return found


def with_parameters(tests: list[Test], given: list[str]) -> list[Test]:
    """Returns the tests with some parameters (NAME=VALUE) of their programs overridden."""
    for word in given:
        if not re.fullmatch(r"[A-Z_]+=\d+", word):
            sys.exit(f"suite.py: --set {word!r} is not a parameter such as SEED=7")
    names = [word.partition("=")[0] for word in given]
    for test in tests if given else []:
        if not test.program:
            sys.exit(f"suite.py: {test.name} has no program that would take --set {given[0]}")
    return [
        replace(test, args=[*(a for a in test.args if a.partition("=")[0] not in names), *given])
        for test in tests
    ]


def run_all(
    tests: list[Test], builder: Builder, jobs: int, show: bool, done: Callable[[Result], None]
) -> list[Result]:
    """Runs tests in parallel, and prints a line for each test as it finishes.

    If the suite is terminated, running tests are killed and have no result.
    """
    lock = threading.Lock()
    ended = threading.Event()

    def one(test: Test) -> Result:
        result = run_test(test, builder, show)
        if ended.is_set():
            return result
        with lock:
            if result.word == "FAIL" and not show:
                lines = result.output.splitlines()
                if len(lines) > MOST_LINES:
                    print(f"    ({len(lines) - MOST_LINES} lines before these)")
                print("\n".join(f"    {line}" for line in lines[-MOST_LINES:]))
            print(result.line(), flush=True)
            done(result)
        return result

    pool = ThreadPoolExecutor(jobs)
    try:
        # If two tests waited for the same tree, a processor would sit idle. So a test is queued
        # only once its tree is built, and tests of other trees run in the meantime. Tests with the
        # longest time limits start first, so that none of them is left for the end.
        waiting: dict[tuple[tuple[str, ...], bool], list[Test]] = {}
        for test in sorted(tests, key=lambda one: -one.timeout):
            waiting.setdefault((base_tree(test), test.checked), []).append(test)

        def build(group: list[Test]) -> list[Future[Result]]:
            build_first(builder, group[0])
            return [pool.submit(one, test) for test in group]

        # Build the tree that most tests need first.
        groups = sorted(waiting.values(), key=len, reverse=True)
        built = [pool.submit(build, group) for group in groups]
        return [result.result() for tree in built for result in tree.result()]
    except BaseException:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)
        end_children()
        raise
    finally:
        pool.shutdown()


def base_tree(test: Test) -> tuple[str, ...]:
    """Returns the tree that a test loads, or that its mutant is built from; () if it needs none."""
    return replace(test, mutant="").tree if test.load or test.program else ()


def build_first(builder: Builder, test: Test) -> None:
    """Builds a test's base tree; errors are reported by the tests that need it."""
    if base_tree(test):
        with contextlib.suppress(BuildError):
            builder.tree(replace(test, mutant=""))


def tests_of(driver: str, suite: str | None) -> list[Test]:
    """Returns the tests required for a driver, optionally on a Debian suite's kernel."""
    return kernel_tests(suite, driver) if suite else branch_tests(driver)


def main() -> int:
    """Parses the command line and runs the tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tests; * and ? match")
    parser.add_argument("--long", action="store_true", help="also tests that `make test` omits")
    parser.add_argument("--list", action="store_true", help="list the tests and their commands")
    parser.add_argument("--show", action="store_true", help="one test at a time, with its output")
    parser.add_argument("--jobs", "-j", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument(
        "--driver", metavar="VERSION", help="the tests of a branch, on this version"
    )
    parser.add_argument(
        "--kernel", choices=KERNEL_SUITES, help="with --driver: on that Debian suite's kernel"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="with --driver: add the results to this record"
    )
    parser.add_argument("--runs", type=Path, metavar="FILE", help="append a line for each run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the C programs, such as SEED=7",
    )
    options = parser.parse_args()
    if options.driver is not None and not is_version(options.driver):
        parser.error(f"--driver {options.driver!r} is not a driver version such as 580.142")
    if options.kernel and not options.driver:
        parser.error("--kernel needs --driver VERSION")
    if options.record and not options.driver:
        parser.error("--record needs --driver VERSION")
    if options.record and options.set:
        parser.error("--record does not accept --set")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    known = tests_of(options.driver, options.kernel) if options.driver else all_tests()
    tests = with_parameters(select(known, options.names, options.long), options.set)
    if options.list:
        for test in tests:
            what = " ".join([test.program, *test.args, *test.command]) or "(is built)"
            print(f"{test.name:<40} {what}{'  [long]' if test.long else ''}")
        return 0
    jobs = 1 if options.show else options.jobs

    def record(result: Result) -> None:
        if options.record:
            entry = entry_of(result.test, result.word, result.output)
            add_to_record(options.record, options.driver, [entry], options.kernel)
        if options.runs:
            spent = (result.seconds, result.processor_seconds)
            add_to_runs(options.runs, run_of(result.test, result.word, result.output, *spent))

    results = run_all(tests, Builder(jobs=2 if jobs == 1 else 1), jobs, options.show, record)
    counts = {word: sum(one.word == word for one in results) for word in ("ok", "FAIL", "skip")}
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped", flush=True)
    return 1 if counts["FAIL"] or not results else 0


if __name__ == "__main__":
    sys.exit(main())
