# SPDX-License-Identifier: MIT
"""The results of `vmem bench serve`'s arms: rows, aims and merged runs.

A run of a few minutes has time for only some of the arms. Runs of the same workload on the same
kind of machine can be joined, because all of them include the first arm, the reference. An arm is
compared only with the reference's rounds in the same runs, so that a slower GPU in one run does not
put any arm at a disadvantage.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.bench.aims import Aims
from pyvmem.bench.merge import MergeError, load_together
from pyvmem.bench.record import Part, Record
from pyvmem.bench.timing import percentile

if TYPE_CHECKING:
    from vmem_bench.serving.loop import Outcome

__all__ = ["AGAIN", "VLLM", "add_aims", "add_rows", "figures", "join", "over"]

AGAIN = "again"  # a second run of the reference
VLLM = "vllm"  # an engine with its own loop, whose steps are not measured
_FORMAT = "vmem-bench-serve/1"
# The options that may differ between joined runs.
_FREE = ("arms", "asked", "deadline", "rounds", "limit_s")
# With limits up to this many bytes, memory is short for the Azure trace and an 8B model.
_BINDS = 20 << 30
_NOISE = 0.05  # the most that a difference between identical arms can relax a target
_SERIES = 400  # maximum number of memory samples in a row's series


def figures(outcome: Outcome) -> dict[str, tuple[str, float, str]]:
    """Returns a run's reported values by name, each as (description, value, unit)."""
    seconds = outcome.seconds
    tokens = outcome.prompt_tokens + outcome.new_tokens - outcome.recomputed
    found: dict[str, tuple[str, float, str]] = {
        "makespan": ("time until the last token", seconds, "s"),
        "tokens": ("tokens of prompts and answers", tokens / seconds, "1/s"),
        "answers": ("tokens of answers", outcome.new_tokens / seconds, "1/s"),
        "requests": ("requests finished", 60 * outcome.finished / seconds, "1/min"),
    }
    if outcome.steps:  # vLLM's steps are not measured
        found |= _of_steps(outcome)
    if outcome.short_s:
        found["full"] = (
            "requests in a step while others wait for memory or a slot, mean",
            outcome.short_batch_s / outcome.short_s,
            "requests",
        )
    for name, words, times in (
        ("first", "time to first token", outcome.first),
        ("between", "time between tokens", outcome.between),
    ):
        ordered = sorted(times)
        for percent in (50, 90, 99):
            if ordered:
                value = 1e3 * percentile(ordered, percent / 100)
                found[f"{name}{percent}"] = (f"{words}, p{percent}", value, "ms")
    for name, count in outcome.driver.items():
        words = name.replace("_", " ").removesuffix(" ns")
        timed = name.endswith("_ns")
        value = count / 1e6 if timed else count
        found[name.removesuffix("_ns")] = (words, value, "ms" if timed else "count")
    last = [s for s in outcome.samples if s.running]
    if last:
        for key, what in (("mapped", "memory mapped"), ("held", "memory of requests")):
            mean = statistics.fmean(getattr(s, key) for s in last)
            found[key] = (f"{what}, mean", mean, "bytes")
        used = statistics.fmean(s.used for s in last)
        found["used"] = ("memory that rows use, mean", used, "bytes")
        found["wasted"] = (
            "memory that requests hold without rows, mean",
            found["held"][1] - used,
            "bytes",
        )
    return found


def _of_steps(outcome: Outcome) -> dict[str, tuple[str, float, str]]:
    return {
        "batch": ("requests in a step, mean", outcome.batch_s / outcome.seconds, "requests"),
        "largest": ("requests in a step, at most", outcome.largest, "requests"),
        "preemptions": ("preemptions", outcome.preemptions, "count"),
        "late": (
            "requests left out of a step because their memory was not ready",
            outcome.late,
            "requests",
        ),
        "shared": ("tokens found in shared prefixes", outcome.shared, "count"),
        "recomputed": ("tokens computed again", outcome.recomputed, "count"),
        "steps": ("forward passes", outcome.steps, "count"),
        "host": (
            "host time per step in the cache or block manager",
            outcome.host_ns / 1e3 / outcome.steps,
            "us",
        ),
    }


def add_rows(part: Part, name: str, what: str, outcomes: Sequence[Outcome]) -> None:
    """Adds an arm's rows, with every round's value; does nothing if there are no rounds."""
    if not outcomes:
        return
    rounds = [figures(outcome) for outcome in outcomes]
    for key in rounds[0]:
        words, _, unit = rounds[0][key]
        more: dict[str, Any] = {}
        if key == "makespan":
            more["cut"] = any(outcome.cut for outcome in outcomes)
            more["finished"] = [outcome.finished for outcome in outcomes]
        values = [one[key][1] for one in rounds if key in one]
        more |= _middle(values)
        value = more.pop("value")
        part.value(f"{key}/{name}", f"{what}: {words}", name, value, unit, **more)
    samples = [list(asdict(one).values()) for one in outcomes[-1].samples]
    if not samples:
        return
    every = -(-len(samples) // _SERIES)
    part.value(
        f"memory/{name}",
        f"{what}: memory over time, of the last round",
        name,
        len(samples),
        "samples",
        columns=["seconds", "mapped", "held", "used", "running"],
        series=samples[::every],
    )


def _middle(values: Sequence[float]) -> dict[str, Any]:
    middle = statistics.median(values)
    spread = (max(values) - min(values)) / middle if middle else 0.0
    return {"value": middle, "rounds": list(values), "spread": spread}


def over(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Returns the ratio of two rows' values; in joined runs, the median over runs with both."""
    if "by_run" not in one:
        return float(one["value"]) / float(other["value"])
    mine, theirs = dict(one["by_run"]), dict(other["by_run"])
    return float(statistics.median(mine[r] / theirs[r] for r in mine.keys() & theirs.keys()))


def add_aims(aims: Aims, part: Part, names: Mapping[str, str], limit: int) -> None:
    """Adds the ratios of the reference to the other arms, with their targets if there are any.

    Args:
        aims: the aims of the record that contains the part.
        part: the part with the arms' rows.
        names: names and descriptions of the arms; the reference comes first.
        limit: requested bytes for keys and values; 0 for all free memory. The targets for larger
            batches apply only if memory was short and requests waited for it.
    """
    first, *others = names
    binds = 0 < limit <= _BINDS and part.find(f"full/{first}") is not None

    def noise(row: str) -> float:
        pair = [part.find(f"{row}/{name}") for name in (AGAIN, first)]
        return min(_NOISE, abs(over(pair[0], pair[1]) - 1)) if pair[0] and pair[1] else 0.0

    def add(name: str, row: str, what: str, op: str = "", aim: float | None = None) -> None:
        whole = [part.find(f"makespan/{one}") for one in (first, name)]
        cut = [one["system"] for one in whole if one is not None and one["cut"]]
        why = f"time ran out: {', '.join(cut)}" if cut else ""
        divisor = part.find(f"{row}/{name}")
        if divisor is not None and not divisor["value"]:
            why = f"{name} has 0"
        aims.add(
            f"{row}_{name}",
            f"{names[first]}: {what} relative to {name}",
            [f"{part.name}/{row}/{first}", f"{part.name}/{row}/{name}"],
            over,
            op=op or None,
            aim=aim,
            unless=why,
        )

    for name in others:
        none: tuple[str, float | None] = ("", None)
        speed = pause = host = batch = none
        if name.startswith("paged"):
            speed, pause = (">=", 1 - noise("tokens")), ("<=", 1 + noise("between99"))
            host = ("<=", 1.0)
        elif name == "2M" and binds:
            speed, batch = (">=", 1.2), (">=", 1.5)
        add(name, "tokens", "tokens/s", *speed)
        add(name, "between99", "p99 inter-token latency", *pause)
        if name != VLLM:
            add(name, "host", "host time in the cache manager", *host)
        if name == "2M":
            add(name, "batch", "mean batch")
            add(name, "full", "mean batch while others wait", *batch)


def join(paths: Sequence[Path]) -> Record:
    """Joins results that each contain some of the arms.

    The machine and the method are those of the first result. A run of an arm that was cut short
    counts only if no other run of that arm was complete.

    Raises:
        MergeError: a file is not a result of this benchmark, the runs differ in more than their
            arms, rounds and time limits, or their first arms differ.
    """
    loaded = load_together(paths, _FORMAT)
    first = loaded[0]
    options = [_fixed(data) for data in loaded]
    for path_options in options[1:]:
        if path_options != options[0]:
            differ = sorted(k for k, v in options[0].items() if path_options.get(k) != v)
            raise MergeError(f"these runs differ in {', '.join(differ)}")
    references = {data["options"]["arms"][0] for data in loaded}
    if len(references) > 1:
        raise MergeError(f"these runs have no reference in common: {', '.join(sorted(references))}")
    arms = list(dict.fromkeys(arm for data in loaded for arm in data["options"]["arms"]))
    record = Record(
        format=_FORMAT,
        machine=first["machine"],
        options={**first["options"], "arms": arms},
        backends=first["backends"],
        method={**first["method"], "runs": [data["started"] for data in loaded]},
        started=first["started"],
        seconds=sum(float(data["seconds"]) for data in loaded),
    )
    workload = str(first["options"]["workload"])
    parts = [data["parts"][workload] for data in loaded]
    part = record.part(workload, parts[0]["title"])
    part.started = parts[0]["started"]
    part.seconds = sum(float(one["seconds"]) for one in parts)
    part.notes = [note for one in parts for note in one["notes"]]
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    ended: dict[str, list[int]] = {}
    for run, one in enumerate(parts):
        for row in one["rows"]:
            if row.get("cut") is False:
                ended.setdefault(row["system"], []).append(run)
    for run, one in enumerate(parts):
        for row in one["rows"]:
            if run in ended.get(row["system"], [run]):
                found.setdefault(row["id"], []).append((run, row))
    order = {arm: number for number, arm in enumerate(arms)}
    for rows in sorted(found.values(), key=lambda rows: order[rows[0][1]["system"]]):
        part.rows.append(_joined(rows))
    part.missing = [one for each in parts for one in each["missing"] if one["id"] not in found]
    part.status = "not run" if not part.rows else "partial" if part.missing else "done"
    words = {arm: _words(part, arm) for arm in arms}
    aims = Aims(record, str(first["options"]["backend"]))
    add_aims(aims, part, words, int(first["options"]["limit"]))
    record.aims = aims.found
    return record


def _fixed(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data["options"].items() if name not in _FREE}


def _words(part: Part, arm: str) -> str:
    row = part.find(f"makespan/{arm}")
    return arm if row is None else str(row["what"]).partition(": ")[0]


def _joined(rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Joins a row of several runs.

    The result has the rounds of all runs; a comparison keeps the worst run, and a series the last.
    """
    last = dict(rows[-1][1])
    if "compared" in last:
        return max((row for _, row in rows), key=lambda row: float(row["value"]))
    if "rounds" not in last:
        return last
    last |= _middle([value for _, row in rows for value in row["rounds"]])
    last["by_run"] = [[run, row["value"]] for run, row in rows]
    if "cut" in last:
        last["cut"] = any(row["cut"] for _, row in rows)
        last["finished"] = [count for _, row in rows for count in row["finished"]]
    return last
