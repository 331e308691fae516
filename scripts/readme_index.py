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
# Of files that do not say where they come from, what the repository's history tells of it.
RECOVERED = RESULTS / "recovered.json"
MARK = "†"  # stands at what is recovered
# Of runs that did not measure all they were to: what is whole in them, for which they are kept.
KEPT = RESULTS / "kept.json"
# Of the logs, which have no other heading: the machines that their names begin with.
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
# A log's head: "command   WORDS" in a line, or "# commit HASH, MACHINE; WORDS".
COMMAND = re.compile(r"^(?:# )?command\s+(.+)$|^# commit [^;\n]*; (.+)$", re.M)
PARTIAL = re.compile(r"^== (\w[\w-]*): .*\(partial", re.M)

Record = dict[str, Any]
Origin = dict[str, str]  # commit, date, command
Kept = dict[str, str]


def machine_of(machine: Record) -> str:
    """A GPU and its driver, or the processor."""
    if machine.get("gpu"):
        return f"{machine['gpu']}, driver {machine['driver']}"
    return f"no GPU, {machine['cores']} cores"


def origin_of(path: Path, said: Origin, recovered: dict[str, Origin]) -> tuple[str, str, str]:
    """Commit, date and command: what a file says itself; what it does not say is marked.

    Raises:
        ValueError: neither the file nor RECOVERED has one of them, or both have.
    """
    name = path.relative_to(RESULTS).as_posix()
    more = recovered.get(name, {})
    if both := sorted(set(said) & set(more)):
        raise ValueError(f"{name} says its {both[0]} itself: take it out of {RECOVERED.name}")
    if missing := [one for one in ("commit", "date", "command") if one not in {**said, **more}]:
        raise ValueError(f"{name} says no {missing[0]}: see benchmarks/README.md for a log's head")
    marked = {one: f"{text} {MARK}" for one, text in more.items()}
    cells = {**said, **marked}
    command = cells["command"].removesuffix(f" {MARK}").replace("|", "\\|")
    ticks = "" if "`" in command else "`"  # one that is described in words has its own
    end = f" {MARK}" if "command" in more else ""
    return cells["commit"], cells["date"], f"{ticks}{command}{ticks}{end}"


def describe(record: Record) -> tuple[str, Origin]:
    """Machine, and what a record says of its origin, by its kind.

    Raises:
        ValueError: a kind that is not known.
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
        driver = record["sources"]["driver"]
        return "software GPU", said | {"command": f"make test-driver DRIVER={driver}"}
    if "tool" in record:
        return machine_of(machine), said | {"command": record["tool"]}
    if "setting" in record:
        setting = record["setting"]
        where = f"{setting['device_name']}, driver {setting['driver']}"
        return where, said | {"command": "vmem serve-demo"}
    if "patterns" in record:
        return MACHINES["h100"], said | {"command": "benchmarks/stalls/stalls.py"}
    raise ValueError(f"a record of an unknown kind: {', '.join(list(record)[:5])}")


def gaps(record: Record) -> str:
    """What of a record was not measured and why, or failed; nothing if it is complete."""
    words = []
    for what, part in record.get("parts", {}).items():
        if part.get("status") == "not run" and part.get("rows"):  # written as it went
            words.append(f"`{what}` broken off")
        elif part.get("status") in ("partial", "failed"):
            reasons = dict.fromkeys(one["why"] for one in part.get("missing") or [])
            why = "; ".join(short(reason) for reason in list(reasons)[:2]).replace("|", "\\|")
            words.append(f"`{what}` {part['status']}" + (f": {why}" if why else ""))
    tests = [one for one in record.get("tests", []) if one["result"] != "ok"]
    words += [f"`{one['name']}` {one['result']}" for one in tests]
    return ", ".join(words)


def state_of(path: Path, gap: str, kept: Kept) -> str:
    """A result's gap with what is whole beside it, for which it is kept.

    Raises:
        ValueError: a gap, and nothing for which the file is kept, or the other way round.
    """
    name = path.relative_to(RESULTS).as_posix()
    why = kept.get(name, "")
    if bool(gap) != bool(why):
        what = "has no gap: take it out of"
        if gap:
            what = f"is not complete ({gap}): run it again, remove it, or say what is whole in"
        raise ValueError(f"{name} {what} {KEPT.name}")
    return f"{gap}; whole: {why}" if gap else ""


def failures(runs: list[Record]) -> str:
    """The tests among runs, oldest first, that failed, and whether they passed when run again."""
    words = []
    for number, one in enumerate(runs):
        if one["result"] == "FAIL":
            later = [run for run in runs[number + 1 :] if run["entry"] == one["entry"]]
            passed = [run["commit"] for run in later if run["result"] == "ok"]
            then = f", passed at {passed[-1]}" if passed else ""
            words.append(f"`{one['entry']}` failed at {one['commit']}{then}")
    return "; ".join(words) or "complete"


def short(text: str, most: int = 90) -> str:
    """The beginning of a reason, cut at a word."""
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " ..."


def row(path: Path, recovered: dict[str, Origin], kept: Kept) -> str:
    """A row for one file of results."""
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
        state = state_of(path, gaps(record), kept) or "complete"
    cells = (machine, *origin_of(path, said, recovered), state)
    return f"| [{path.name}]({path.relative_to(ROOT).as_posix()}) | " + " | ".join(cells) + " |"


def log_row(path: Path, recovered: dict[str, Origin], kept: Kept) -> str:
    """A row for one log: its machine, its origin, and how it ended.

    Raises:
        ValueError: a log of something that failed: it is run again, or goes.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".json" and (failed := FAILED.search(text)):
        raise ValueError(f"{path.name} is the log of a failure: {failed.group(0)}")
    ends = OUTCOME.findall(text)
    ended = ends[-1].strip(" =").replace("|", "\\|")[:90] if ends else ""
    partial = PARTIAL.findall(text)
    note = state_of(path, ", ".join(f"`{one}` partial" for one in partial), kept)
    said: Origin = {
        name: (found.group(1) or found.group(2)).strip()
        for name, kind in (("commit", COMMIT), ("date", DATE), ("command", COMMAND))
        if (found := kind.search(text))
    }
    machine = MACHINES[path.stem.partition("-")[0]]
    cells = (machine, *origin_of(path, said, recovered), ended, note)
    name = path.relative_to(ROOT).as_posix()
    return f"| [{path.name}]({name}) | " + " | ".join(cells) + " |"


def part() -> list[str]:
    """Both tables.

    Raises:
        ValueError: a file that neither has a place for, that does not say where it comes from, or
            that is the log of a failure.
    """
    if strange := unlisted():
        raise ValueError(f"{strange[0]}: results are *.json, *.jsonl, raw/*.json and logs/*")
    recovered: dict[str, Origin] = json.loads(RECOVERED.read_text(encoding="utf-8"))
    kept: Kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for listing, names in ((RECOVERED, recovered), (KEPT, kept)):
        if gone := [name for name in names if not (RESULTS / name).is_file()]:
            raise ValueError(f"{listing.name} has {gone[0]}, and there is no such file")
    files = sorted({*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")} - {RECOVERED, KEPT})
    raw = ", ".join(f"[{p.name}]({p.relative_to(ROOT).as_posix()})" for p in raw_files())
    return [
        "| file | machine | commit | date | command | state |",
        "| --- | --- | --- | --- | --- | --- |",
        *(row(path, recovered, kept) for path in files),
        "",
        f"With every sample: {raw}.",
        "",
        "| log | machine | commit | date | command | ended with | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(log_row(path, recovered, kept) for path in sorted(LOGS.iterdir()) if path.is_file()),
    ]


def unlisted() -> list[Path]:
    """Files below the results that no table has."""
    listed = {*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl"), *raw_files(), *LOGS.iterdir()}
    return sorted(path for path in RESULTS.rglob("*") if path.is_file() and path not in listed)


def raw_files() -> list[Path]:
    """The runs with every sample."""
    return sorted((RESULTS / "raw").glob("*.json"))
