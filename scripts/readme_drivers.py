# SPDX-License-Identifier: MIT
"""The table of driver versions, from the records that suite.py --driver has made."""

from __future__ import annotations

import json
from typing import Any

from driver_debian import SUITES
from kernel_common import version_key
from readme_format import RESULTS, ROOT, table

__all__ = ["part"]

# What a version has to pass on an architecture to count as run there.
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

Record = dict[str, Any]


def load() -> list[Record]:
    """The records, by version."""
    found = []
    for path in RESULTS.glob("driver-*.json"):
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        record["file"] = path.relative_to(ROOT).as_posix()
        found.append(record)
    return sorted(found, key=lambda record: version_key(record["sources"]["driver"]))


def run_on(record: Record, build: str) -> str:
    """The architectures of a build; what has not passed of those that were not run whole."""
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
    """A row for each version, and what failed, if anything did."""
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
        series = f"[{record['sources']['series']}](patches/{record['sources']['series']})"
        runs = [run_on(record, "release"), run_on(record, "debug")]
        body.append([f"[{version}]({record['file']})", origin, series, *runs, *cells])
    words = ["driver", "source", "hooks", "release", "debug"]
    lines = table([*words, *(what for what, _, _ in COUNTED)], body)
    lines[1] = "| " + " | ".join(["---"] * len(words) + ["---:"] * len(COUNTED)) + " |"
    return lines + (["", f"Failed: {', '.join(failed)}."] if failed else [])
