# SPDX-License-Identifier: MIT
"""Generates tables of driver versions and long runs from the records that suite.py writes.

Also generates patches/kernels.json, which tells `make load` which combinations were tested.
"""

from __future__ import annotations

import json
from typing import Any

from driver_debian import SUITES
from driver_patches import PATCHES
from kernel_common import version_key
from module_refuse import kernel_series
from readme_format import RESULTS, ROOT, table

__all__ = ["KERNELS", "RUNS", "kernels_text", "part", "part_kernels", "part_runs"]

# Tests that a version must pass on an architecture to count as tested there.
WHOLE = ("basic", "gap", "builtin", "model", "fuzz", "kill")
ARCHITECTURES = {
    "ampere": "Ampere",
    "hopper": "Hopper",
    "blackwell": "Blackwell",
    "gb20x": "GB20x",
}
COUNTED = [
    ("UVM's own tests", "builtin", "results_of_uvm"),
    ("model, operations", "model", "operations"),
    ("fuzzed calls", "fuzz", "calls"),
    ("processes killed", "kill", "kills"),
]

RUNS = RESULTS / "softgpu-runs.jsonl"
KERNELS = PATCHES / "kernels.json"
UNITS = {
    "calls": "calls",
    "operations": "operations",
    "kills": "processes killed",
    "results_of_uvm": "tests of UVM",
    "passed": "tests",
}

Record = dict[str, Any]


def load() -> list[Record]:
    """Returns the records, ordered by driver version and then by kernel series."""
    found = []
    for path in RESULTS.glob("driver-*.json"):
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        record["file"] = path.relative_to(ROOT).as_posix()
        found.append(record)
    return sorted(
        found, key=lambda record: (version_key(record["sources"]["driver"]), series_of(record))
    )


def series_of(record: Record) -> list[int]:
    """Returns a record's kernel series as a list of numbers."""
    return version_key(kernel_series(record["sources"]["kernel"]))


def run_on(record: Record, build: str) -> str:
    """Returns the architectures on which a build passed tests, each with its missing tests."""
    words = []
    for architecture, name in ARCHITECTURES.items():
        tests = [
            test
            for test in record["tests"]
            if (test["architecture"], test["build"]) == (architecture, build)
        ]
        passed = {test["program"] for test in tests if test["result"] == "ok"}
        if passed.issuperset(WHOLE):
            words.append(name)
        elif passed:
            missing = [program for program in WHOLE if program not in passed]
            words.append(f"{name} without {', '.join(f'`{one}`' for one in missing)}")
    return "; ".join(words) or "not run"


def part() -> list[str]:
    """Returns the table of driver versions, one per row, and a line that lists the failures."""
    body = []
    failed = []
    for record in load():
        version = record["sources"]["driver"]
        passed = [test for test in record["tests"] if test["result"] == "ok"]
        failed += [f"`{test['name']}`" for test in record["tests"] if test["result"] == "FAIL"]
        cells = []
        for _, program, count in COUNTED:
            of_program = [test for test in passed if test["program"] == program]
            cells.append(f"{sum(test['counts'].get(count, 0) for test in of_program):,}")
        origin = f"Debian {SUITES[version]}" if version in SUITES else "NVIDIA's repository"
        if edited := record["sources"].get("edited"):
            origin += f", {len(edited.split(', '))} files edited"
        series = f"[{record['sources']['series']}](patches/{record['sources']['series']})"
        runs = [run_on(record, "release"), run_on(record, "debug")]
        linux = kernel_series(record["sources"]["kernel"])
        body.append([f"[{version}]({record['file']})", linux, origin, series, *runs, *cells])
    words = ["driver", "Linux", "source", "hooks", "release", "debug"]
    lines = table([*words, *(what for what, _, _ in COUNTED)], body)
    lines[1] = "| " + " | ".join(["---"] * len(words) + ["---:"] * len(COUNTED)) + " |"
    return lines + (["", f"Failed: {', '.join(failed)}."] if failed else [])


def tried(record: Record) -> bool:
    """True if a version passed all required tests on at least one architecture."""
    whole = set(run_on(record, "release").split("; ")) & set(ARCHITECTURES.values())
    return bool(whole) and all(test["result"] != "FAIL" for test in record["tests"])


def by_kernel() -> dict[str, list[Record]]:
    """Returns the records of versions that were `tried`, by kernel series."""
    found: dict[str, list[Record]] = {}
    for record in filter(tried, load()):
        found.setdefault(kernel_series(record["sources"]["kernel"]), []).append(record)
    return dict(sorted(found.items(), key=lambda one: version_key(one[0])))


def kernels_text() -> str:
    """Returns patches/kernels.json: the drivers tested on each kernel series, with the records."""
    table_of = {
        name: {record["sources"]["driver"]: record["file"] for record in records}
        for name, records in by_kernel().items()
    }
    return json.dumps(table_of, indent=2) + "\n"


def part_kernels() -> list[str]:
    """Returns the table of kernel series, one per row."""
    body = []
    for name, records in by_kernel().items():
        releases = sorted({f"`{record['sources']['kernel']}`" for record in records})
        drivers = [record["sources"]["driver"] for record in records]
        body.append([name, ", ".join(releases), ", ".join(drivers)])
    lines = table(["Linux", "kernel", "drivers that ran on it"], body)
    lines[1] = "| --- | --- | --- |"
    return lines


def done_in(runs: list[Record]) -> str:
    """Returns the total work done in some runs, in the first unit that they counted."""
    for count, unit in UNITS.items():
        if total := sum(one["counts"].get(count, 0) for one in runs):
            return f"{total:,} {unit}"
    return ""


def part_runs() -> list[str]:
    """Returns the table of long runs: a row for each test and configuration, with its total work.

    Passed runs with the same arguments count once.
    """
    lines = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in lines:
        of = (one["entry"], one["driver"], one["architecture"], one["build"], one["checked"])
        groups.setdefault(of, []).append(one)
    body = []
    for of in sorted(groups):
        entry, driver, architecture, build, checked = of
        runs = groups[of]
        passed = {tuple(one["arguments"]): one for one in runs if one["result"] == "ok"}
        failed = sum(one["result"] == "FAIL" for one in runs)
        on = f"{ARCHITECTURES[architecture]}, {build}" + (", checked kernel" if checked else "")
        commits = dict.fromkeys(one["commit"] for one in runs)
        cells = [f"{len(passed)}", f"{failed}", done_in(list(passed.values()))]
        seconds = sum(one["seconds"] for one in passed.values())
        body.append([f"`{entry}`", driver, on, *cells, f"{seconds:,}", ", ".join(commits)])
    words = ["test", "driver", "on", "passed", "failed", "did", "seconds", "commits"]
    head = table(words, body)
    head[1] = "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
    return [f"Runs by test ([raw]({RUNS.relative_to(ROOT).as_posix()})):", "", *head]
