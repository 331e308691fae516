# SPDX-License-Identifier: MIT
"""Test records, stored in benchmarks/results and shown in docs/driver.

A driver's record grows: the tests of a later run are added to those of an earlier one if both have
the same sources; otherwise the record starts over. A list of runs has a line for each run, whatever
its result.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from driver_edits import edits  # noqa: E402
from driver_patches import kernel_files, series_digest, series_folder  # noqa: E402
from driver_source import driver_source  # noqa: E402
from kernel_common import run, tree_digest, tree_files  # noqa: E402
from kernel_tree import headers_of  # noqa: E402
from manifest import Test  # noqa: E402

__all__ = ["FORMAT", "add_to_record", "add_to_runs", "entry_of", "run_of"]

FORMAT = "vmem-driver-tests/1"
TESTED = ("kernel_module", "patches", "libvmem", "pyvmem", "tests/kernel")
# Patterns of the lines in which the programs of tests/kernel/c report their work. A line counts as
# the product of its numbers, or as 1 if it has none.
COUNTS = {
    "passed": r"^(\d+) passed, \d+ failed, \d+ skipped$",
    "results_of_uvm": r"^RESULT \w+ 0x0$",
    "calls": r"^thread \d+: (\d+) calls,",
    "operations": r"^SEED=\d+ PROCS=(\d+) THREADS=(\d+) OPS=(\d+)",
    "kills": r"^SEED=\d+ KILLS=(\d+)$",
}


def counts_of(output: str) -> dict[str, int]:
    """Returns the amounts of work that a test's output reports."""
    found = {}
    for name, pattern in COUNTS.items():
        lines = list(re.finditer(pattern, output, re.MULTILINE))
        if lines:
            found[name] = sum(math.prod(map(int, line.groups())) for line in lines)
    return found


def entry_of(test: Test, word: str, output: str) -> dict[str, Any]:
    """Returns a test's entry in a record: program, GPU, result and output."""
    # Leave out times, which depend on the machine and differ from run to run.
    of_time = re.compile(r"exit status | +[\d.]+ s$")
    lines = [line for line in output.splitlines() if not of_time.match(line)]
    return {
        "name": test.name,
        "program": test.program,
        "arguments": list(test.args),
        "architecture": test.arch,
        "build": test.type,
        "gpus": test.gpus,
        "result": word,
        "counts": counts_of(output),
        "output": lines,
    }


def module_digest() -> str:
    """Returns a SHA-256 digest of the files in kernel_module that are compiled."""
    module = hashlib.sha256()
    for name, content in kernel_files().items():
        module.update(f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode())
    return module.hexdigest()


def commit_of() -> str:
    """Returns this checkout's commit, with a + if tests or tested files have changed since."""
    commit = run("git", "-C", ROOT, "rev-parse", "--short=7", "HEAD").strip()
    changed = run("git", "-C", ROOT, "status", "--porcelain", "-uno", "--", *TESTED).strip()
    return commit + ("+" if changed else "")


def today() -> str:
    """Returns the date in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def run_of(
    test: Test, word: str, output: str, seconds: float, processor_seconds: float
) -> dict[str, Any]:
    """Returns a run's entry in a list of runs: test, GPU, duration and work done."""
    return {
        "entry": test.name,
        "driver": test.version,
        "architecture": test.arch,
        "build": test.type,
        "patched": test.patched,
        "checked": test.checked,
        "arguments": list(test.args),
        "result": word,
        "seconds": round(seconds),
        "processor_seconds": round(processor_seconds),
        "counts": counts_of(output),
        "date": today(),
        "commit": commit_of(),
        "module_sha256": module_digest() if test.patched else "",
    }


def add_to_runs(path: Path, line: dict[str, Any]) -> None:
    """Appends a run to a list of runs."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def sources_of(version: str, suite: str | None) -> dict[str, str]:
    """Returns the modules' sources, the kernel they are built for, and the compiler used.

    Includes the names of driver files that had to be edited for that kernel.
    """
    headers = headers_of(suite)
    compiler = run(*headers.with_tools(headers.compiler(), "--version"))
    source = driver_source(version)
    files = {
        path.as_posix(): (source / path).read_bytes()
        for path in tree_files(source, ("nvidia-uvm", "common"))
    }
    edited = sorted(edits(files, headers.source))
    return {
        "driver": version,
        "driver_sha256": tree_digest(source, ("nvidia-uvm", "common")),
        **({"edited": ", ".join(edited)} if edited else {}),
        "series": series_folder(version).name,
        "series_sha256": series_digest(version),
        "module_sha256": module_digest(),
        "kernel": headers.release,
        "compiler": compiler.splitlines()[0],
    }


def add_to_record(
    path: Path, version: str, entries: Sequence[dict[str, Any]], suite: str | None = None
) -> None:
    """Writes a run's entries into a record; each replaces any older entry with the same name.

    The record's commit and date are those of its last run. Each entry is on its own line, so that a
    diff of two records shows the tests that differ.
    """
    sources = sources_of(version, suite)
    kept: dict[str, dict[str, Any]] = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["format"] == FORMAT and before["sources"] == sources:
            kept = {entry["name"]: entry for entry in before["tests"]}
    kept |= {entry["name"]: entry for entry in entries}
    tests = ",\n".join(json.dumps(kept[name]) for name in sorted(kept))
    made = {"format": FORMAT, "commit": commit_of(), "date": today()}
    head = f'{json.dumps(made)[:-1]},\n"sources": {json.dumps(sources)},\n'
    path.write_text(f'{head}"tests": [\n{tests}\n]}}\n', encoding="utf-8")
