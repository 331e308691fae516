# SPDX-License-Identifier: MIT
"""The index of benchmarks/results: for each file the machine, the commit, the date, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from readme_drivers import RUNS
from readme_format import RESULTS, ROOT

__all__ = ["part"]

LOGS = RESULTS / "logs"
UNKNOWN = "not recorded"
# Of the logs, which have no other heading: the machines that their names begin with.
MACHINES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "h200x2": "2 x NVIDIA H200",
    "host": "no GPU",
}
OUTCOME = re.compile(r"^.*\b\d+ (?:passed|failed)\b.*$", re.M)
FAILED = re.compile(r"\b[1-9]\d* failed\b|^FAILED\b|^Traceback ", re.M)
COMMIT = re.compile(r"^(?:# )?commit\s+([0-9a-f]{7})", re.M)
DATE = re.compile(r'^(?:# )?\s*"?(?:date|started)"?:?\s+"?(\d{4}-\d\d-\d\d)', re.M)
# A log's head: "command   WORDS" in a line, or "# commit HASH, MACHINE; WORDS".
COMMAND = re.compile(r"^(?:# )?command\s+(.+)$|^# commit [^;\n]*; (.+)$", re.M)
# Of a log without one, the program by what it prints; with which options is not known then.
PROGRAMS = {
    "`make run`, `make check`": re.compile(r"^Debian .* from a clone: make run .* make check"),
    "`benchmarks/stalls/stalls.py`": re.compile(r"^pages .* slow maps", re.M),
    "`make -C libvmem check`": re.compile(r"^== \w+ \w+$", re.M),
    "`vmem bench`": re.compile(r"^== \w[\w-]*: .*\((?:done|partial)|^ *\d+ s  \w+: ", re.M),
    "`vmem serve-demo`": re.compile(r"^back end \w+; pages of ", re.M),
    "`vmem selftest`": re.compile(r'^passed   map and read|"tool": "vmem selftest"', re.M),
    "`tests/python/soak.py`": re.compile(r"^soak: ", re.M),
    "`tests/gpu/backend_check`": re.compile(r"^\w+ +ok    probe", re.M),
    "`pytest`": re.compile(r"\b\d+ passed.* in [\d.]+s", re.M),
}
PARTIAL = re.compile(r"^== (\w[\w-]*): .*\(partial", re.M)

Record = dict[str, Any]


def machine_of(machine: Record) -> str:
    """A GPU and its driver, or the processor."""
    if machine.get("gpu"):
        return f"{machine['gpu']}, driver {machine['driver']}"
    return f"no GPU, {machine['cores']} cores"


def describe(record: Record) -> tuple[str, str, str, str]:
    """Machine, commit, date and command of one record, by its kind."""
    machine = record.get("machine", {})
    kind = str(record.get("format", ""))
    commit = (machine.get("commit") or UNKNOWN)[:7] if machine.get("commit") else UNKNOWN
    if kind.startswith("vmem-bench-"):
        name = kind.removeprefix("vmem-bench-").partition("/")[0]
        return machine_of(machine), commit, record["started"][:10], f"`vmem bench {name}`"
    if kind.startswith("vmem-driver-tests"):
        driver = record["sources"]["driver"]
        return "software GPU", UNKNOWN, UNKNOWN, f"`make test-driver DRIVER={driver}`"
    if "tool" in record:
        return machine_of(machine), commit, record["date"][:10], f"`{record['tool']}`"
    if "setting" in record:
        setting = record["setting"]
        where = f"{setting['device_name']}, driver {setting['driver']}"
        return where, UNKNOWN, UNKNOWN, "`vmem serve-demo`"
    if "patterns" in record:
        return MACHINES["h100"], UNKNOWN, UNKNOWN, "`benchmarks/stalls/stalls.py`"
    return UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN


def gaps(record: Record, name: str = "name") -> str:
    """What of a record was not measured, or failed."""
    words = [
        f"`{what}` {part['status']}"
        for what, part in record.get("parts", {}).items()
        if part.get("status") in ("partial", "failed")
    ]
    tests = [one for one in record.get("tests", []) if one["result"] != "ok"]
    words += [f"`{one[name]}` {one['result']}" for one in tests]
    return ", ".join(words) or "complete"


def row(path: Path) -> str:
    """A row for one file of results."""
    text = path.read_text(encoding="utf-8")
    if path == RUNS:
        runs = [json.loads(line) for line in text.splitlines()]
        commits = ", ".join(dict.fromkeys(one["commit"] for one in runs))
        days = sorted(one["date"] for one in runs)
        date = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        command = "`tests/kernel/suite.py --runs`"
        cells = ("software GPU", commits, date, command, gaps({"tests": runs}, "entry"))
    elif path.suffix == ".jsonl":
        head = json.loads(text.splitlines()[0])
        where = f"software GPU ({head['architecture']}), driver {head['driver']}"
        cells = (where, head["commit"], UNKNOWN, f"`{head['command']}`", "complete")
    else:
        record: Record = json.loads(text)
        cells = (*describe(record), gaps(record))
    return f"| [{path.name}]({path.relative_to(ROOT).as_posix()}) | " + " | ".join(cells) + " |"


def log_row(path: Path) -> str:
    """A row for one log: its machine, how it ended, and whether anything in it failed."""
    text = path.read_text(encoding="utf-8", errors="replace")
    machine = MACHINES.get(path.stem.partition("-")[0], UNKNOWN)
    ends = OUTCOME.findall(text)
    ended = ends[-1].strip(" =").replace("|", "\\|")[:90] if ends else ""
    partial = PARTIAL.findall(text)
    notes = ["**has failures**"] if FAILED.search(text) and path.suffix != ".json" else []
    notes += [f"partial: {', '.join(f'`{one}`' for one in partial)}"] if partial else []
    name = path.relative_to(ROOT).as_posix()
    commit, date = (
        found.group(1) if (found := kind.search(text)) else UNKNOWN for kind in (COMMIT, DATE)
    )
    cells = (machine, commit, date, command_of(text), ended, ", ".join(notes))
    return f"| [{path.name}]({name}) | " + " | ".join(cells) + " |"


def command_of(text: str) -> str:
    """What a log says that was run, or the program whose output it is."""
    if found := COMMAND.search(text):
        return f"`{(found.group(1) or found.group(2)).strip()}`".replace("|", "\\|")
    for name, pattern in PROGRAMS.items():
        if pattern.search(text):
            return name
    return UNKNOWN


def part() -> list[str]:
    """Both tables.

    Raises:
        ValueError: a file that neither has a place for.
    """
    if strange := unlisted():
        raise ValueError(f"{strange[0]}: results are *.json, *.jsonl, raw/*.json and logs/*")
    files = sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")])
    raw = ", ".join(f"[{p.name}]({p.relative_to(ROOT).as_posix()})" for p in raw_files())
    return [
        "| file | machine | commit | date | command | state |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(row, files),
        "",
        f"With every sample: {raw}.",
        "",
        "| log | machine | commit | date | command | ended with | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(log_row, sorted(path for path in LOGS.iterdir() if path.is_file())),
    ]


def unlisted() -> list[Path]:
    """Files below the results that no table has."""
    listed = {*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl"), *raw_files(), *LOGS.iterdir()}
    return sorted(path for path in RESULTS.rglob("*") if path.is_file() and path not in listed)


def raw_files() -> list[Path]:
    """The runs with every sample."""
    return sorted((RESULTS / "raw").glob("*.json"))
