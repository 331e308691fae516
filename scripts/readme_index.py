# SPDX-License-Identifier: MIT
"""Generates the index of benchmarks/results: each file's machine, commit, date and command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from readme_drivers import RUNS
from readme_format import RESULTS, ROOT

__all__ = ["part"]

LOGS = RESULTS / "logs"
# Maps the prefix of a log's name to a machine, since many logs do not name their machine.
MACHINES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h100x2": "2 x NVIDIA H100 80GB HBM3",
    "h100x4": "4 x NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "h200x2": "2 x NVIDIA H200",
    "host": "no GPU",
}
OUTCOME = re.compile(r"^.*\b\d+ (?:passed|failed)\b.*$", re.M)
FAILED = re.compile(r"\b[1-9]\d* failed\b|^FAILED\b|^Traceback |^status [1-9]|^rc [1-9]", re.M)
COMMIT = re.compile(r'^(?:# | *"|vmem .*, )?commit"?:?\s+"?([0-9a-f]{7})', re.M)
DATE = re.compile(r'^(?:# )?\s*"?(?:date|started)"?:?\s+"?(\d{4}-\d\d-\d\d)', re.M)
# The first line of a log: "command   WORDS", or "# commit HASH, MACHINE; WORDS".
COMMAND = re.compile(r"^(?:# )?command\s+(.+)$|^# commit [^;\n]*; (.+)$", re.M)
PARTIAL = re.compile(r"^== (\w[\w-]*): .*\(partial", re.M)

Record = dict[str, Any]
Origin = dict[str, str]  # commit (for a driver record, the digest of the module), date, command


def machine_of(machine: Record) -> str:
    """Returns the GPU and its driver, or the processor."""
    if machine.get("gpu"):
        return f"{machine['gpu']}, driver {machine['driver']}"
    return f"no GPU, {machine['cores']} cores"


def origin_of(path: Path, said: Origin) -> tuple[str, str, str]:
    """Returns the cells for commit, date and command.

    Raises:
        ValueError: the file does not name its sources and its command.
    """
    if missing := [one for one in ("commit", "command") if one not in said]:
        name = path.relative_to(RESULTS).as_posix()
        raise ValueError(
            f"{name} does not state its {missing[0]}: see benchmarks/README.md for a log's head"
        )
    command = said["command"].replace("|", "\\|")
    ticks = "" if "`" in command else "`"  # a run described in prose has its own backticks
    return said["commit"], said.get("date", ""), f"{ticks}{command}{ticks}"


def describe(record: Record) -> tuple[str, Origin]:
    """Returns a record's machine and origin, which depend on the kind of record.

    Raises:
        ValueError: the kind is unknown.
    """
    machine = record.get("machine", {})
    kind = str(record.get("format", ""))
    said: Origin = {}
    if commit := machine.get("commit") or record.get("commit"):
        said["commit"] = commit if record.get("commit") else commit[:7]
    if date := record.get("started") or record.get("date"):
        said["date"] = date[:10]
    if kind.startswith("vmem-bench-"):
        name = kind.removeprefix("vmem-bench-").partition("/")[0]
        return machine_of(machine), said | {"command": f"vmem bench {name}"}
    if kind.startswith("vmem-driver-tests"):
        sources = record["sources"]
        return "software GPU", {
            "commit": f"module {sources['module_sha256'][:7]}",
            "command": f"make test-driver DRIVER={sources['driver']}",
        }
    if "tool" in record:
        return machine_of(machine), said | {"command": record["tool"]}
    raise ValueError(f"a record of an unknown kind: {', '.join(list(record)[:5])}")


def gaps(record: Record) -> str:
    """Returns the parts of a record that were not measured or failed, with reasons.

    Raises:
        ValueError: a part was aborted or failed. Run it again, or delete the file.
    """
    words = []
    for what, part in record.get("parts", {}).items():
        reasons = dict.fromkeys(one["why"] for one in part.get("missing") or [])
        broken_off = part.get("status") == "not run" and part.get("rows")  # written incrementally
        if broken_off or part.get("status") == "failed":
            raise ValueError(f"part {what} {'was aborted' if broken_off else 'failed'}")
        if part.get("status") == "partial":
            why = "; ".join(short(reason) for reason in list(reasons)[:2]).replace("|", "\\|")
            words.append(f"`{what}` partial" + (f": {why}" if why else ""))
    tests = [one for one in record.get("tests", []) if one["result"] != "ok"]
    words += [f"`{one['name']}` {one['result']}" for one in tests]
    return ", ".join(words)


def failures(runs: list[Record]) -> str:
    """Returns the failed tests among `runs` (oldest first), and whether they passed later."""
    words = []
    for number, one in enumerate(runs):
        if one["result"] == "FAIL":
            later = [run for run in runs[number + 1 :] if run["entry"] == one["entry"]]
            passed = [run["commit"] for run in later if run["result"] == "ok"]
            then = f", passed at {passed[-1]}" if passed else ""
            words.append(f"`{one['entry']}` failed at {one['commit']}{then}")
    return "; ".join(words) or "complete"


def short(text: str, most: int = 90) -> str:
    """Returns a reason, shortened to whole words if it is too long."""
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " ..."


def row(path: Path) -> str:
    """Returns the table row for a result file."""
    text = path.read_text(encoding="utf-8")
    said: Origin
    if path == RUNS:
        runs = [json.loads(line) for line in text.splitlines()]
        days = sorted(one["date"] for one in runs)
        said = {
            "commit": ", ".join(dict.fromkeys(one["commit"] for one in runs)),
            "date": days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
            "command": "tests/kernel/suite.py --runs",
        }
        machine, state = "software GPU", failures(runs)
    elif path.suffix == ".jsonl":
        head = json.loads(text.splitlines()[0])
        machine = f"software GPU ({head['architecture']}), driver {head['driver']}"
        said = {one: head[one] for one in ("commit", "date", "command") if one in head}
        state = "complete"
    else:
        record: Record = json.loads(text)
        machine, said = describe(record)
        state = gaps(record) or "complete"
    cells = (machine, *origin_of(path, said), state)
    return f"| [{path.name}]({path.relative_to(ROOT).as_posix()}) | " + " | ".join(cells) + " |"


def log_row(path: Path) -> str:
    """Returns the table row for a log: its machine, origin and last result.

    Raises:
        ValueError: the log records a failure. Run the command again, or delete the log.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".json" and (failed := FAILED.search(text)):
        raise ValueError(f"{path.name} is the log of a failure: {failed.group(0)}")
    ends = OUTCOME.findall(text)
    ended = ends[-1].strip(" =").replace("|", "\\|")[:90] if ends else ""
    partial = PARTIAL.findall(text)
    note = ", ".join(f"`{one}` partial" for one in partial)
    said: Origin = {
        name: (found.group(1) or found.group(2)).strip()
        for name, kind in (("commit", COMMIT), ("date", DATE), ("command", COMMAND))
        if (found := kind.search(text))
    }
    machine = MACHINES[path.stem.partition("-")[0]]
    cells = (machine, *origin_of(path, said), ended, note)
    name = path.relative_to(ROOT).as_posix()
    return f"| [{path.name}]({name}) | " + " | ".join(cells) + " |"


def part() -> list[str]:
    """Returns the table of results.

    Raises:
        ValueError: a file belongs to neither table, or does not state its origin.
    """
    if strange := unlisted():
        raise ValueError(f"{strange[0]}: results are *.json, *.jsonl and logs/*")
    return [
        "| file | machine | commit | date | command | state |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(row, results()),
    ]


def part_logs() -> list[str]:
    """Returns the table of logs.

    Raises:
        ValueError: a log does not state its origin, or records a failure.
    """
    return [
        "| log | machine | commit | date | command | ended with | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(log_row, logs()),
    ]


def results() -> list[Path]:
    """Returns the result files."""
    return sorted({*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")})


def logs() -> list[Path]:
    """Returns the log files."""
    return sorted(path for path in LOGS.iterdir() if path.is_file())


def unlisted() -> list[Path]:
    """Returns the result files that no table lists, except those in raw/, which git ignores."""
    listed = {*results(), *logs(), *(RESULTS / "raw").glob("*.json")}
    return sorted(path for path in RESULTS.rglob("*") if path.is_file() and path not in listed)
