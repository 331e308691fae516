# SPDX-License-Identifier: MIT
"""The README's one table: a row for each question, its number, and the page that has the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from readme_cache import footprint_times, runs
from readme_format import RESULTS, Result, rows

__all__ = ["part"]

NOT_MEASURED = "not measured yet"


def spread(values: Sequence[float], form: str) -> str:
    """One number, or the least and the greatest of several."""
    shown = [format(value, form) for value in sorted(values)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def aims(results: list[Result], wanted: Callable[[str], bool]) -> list[float]:
    """The values of all aims of some ids, of all machines."""
    return [
        aim["value"]
        for result in results
        for aim in result["aims"]
        if wanted(aim["id"]) and aim["value"] is not None
    ]


def machines(results: list[Result]) -> str:
    """The GPUs of some results."""
    names = dict.fromkeys(result["machine"]["gpu"] for result in results)
    return ", ".join(name.removeprefix("NVIDIA ").partition(" ")[0] for name in names)


def capacity() -> tuple[str, str]:
    """Requests at a time on Azure's trace, 64 KB pages over 2 MB pages."""
    run: Result = json.loads((RESULTS / "capacity.json").read_text(encoding="utf-8"))
    found = [
        aim["value"]
        for aim in run["aims"]
        if aim["id"].startswith("azure") and aim["id"].endswith("g1/2M")
    ]
    return f"{spread(found, '.2f')} times as many", "replay of Azure's 2023 trace"


def overlap() -> tuple[str, str]:
    """The 99th percentile of decoding iterations, mapped in the background over mapped before."""
    found = []
    where: list[Result] = []
    for run in runs("overlap"):
        times = rows(run)
        base, ours = (times.get(f"iterations/time/{mode}") for mode in ("mapped", "async"))
        if base and ours:
            found.append(ours["p99"] / base["p99"])
            where.append(run)
    if not found:
        return NOT_MEASURED, ""
    return f"{spread(found, '.3f')} times", machines(where)


def full_card(kind: str, form: str) -> tuple[str, str]:
    """Decoding over one kind of memory at each run's largest footprint, over cudaMalloc memory."""
    found: list[float] = []
    where: list[Result] = []
    for run in runs("kernels"):
        if "footprint" not in run["options"]:
            continue
        size = f"{max(run['options']['footprint']) >> 30}G"
        times = footprint_times(run, kind)
        found += [by[size] for name, by in times.items() if "/decode_" in name]
        where += [run] * bool(times)
    if not found:
        return NOT_MEASURED, ""
    sizes = [max(run["options"]["footprint"]) >> 30 for run in where]
    return f"{spread(found, form)} times", f"{machines(where)}, {spread(sizes, 'd')} GiB"


def vllm() -> tuple[tuple[str, str], tuple[str, str]]:
    """Throughput of the elastic engine over stock's at each rate; sharing engines' first token."""
    found, shared = [], []
    where: list[Result] = []
    beside: list[Result] = []
    equal = answers = 0
    for run in runs("vllm"):
        times = rows(run)
        if "share/first/static" in times:
            late = (times[f"share/first/{arm}"]["p99"] for arm in ("shared", "static"))
            shared.append(next(late) / next(late))
            beside.append(run)
        for name, row in times.items():
            if name.startswith("load/rate/") and name.endswith("/elastic"):
                same = times[name.replace("/rate/", "/same/")]
                equal, answers = equal + same["value"], answers + same["of"]
                found.append(row["value"] / times[name.replace("elastic", "stock")]["value"])
                where.append(run)
    same_words = "every answer" if equal == answers else f"{equal:,} of {answers:,} answers"
    alone = f"{spread(found, '.3f')} times, {same_words} the same" if found else NOT_MEASURED
    together = f"{spread(shared, '.2g')} times" if shared else NOT_MEASURED
    return (alone, machines(where)), (together, machines(beside))


def counts() -> tuple[str, str]:
    """Driver calls for a page more in each of 64 tensors, patched and stock."""
    path = RESULTS / "softgpu-counts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases = {line["case"]: line for line in lines[1:]}
    ours, theirs = (
        cases[f"{prefix}grow 64 tensors, tables there"] for prefix in ("", "stock path: ")
    )
    text = f"{ours['ioctls']} of each; with `stock` {theirs['ioctls']} of each"
    for one in (ours, theirs):
        assert one["ioctls"] == one["pushes"] == one["invalidates"]
    return text, f"software GPU, driver {lines[0]['driver']}"


def part(results: list[Result]) -> list[str]:
    """A row for each question."""
    where = machines(results)
    alone, together = vllm()
    attention = aims(results, lambda name: name.startswith("fa3_") and name.endswith("_random"))
    calls = aims(results, lambda name: name == "map_64K")
    body = [
        (
            "Requests that fit in 80 GB, 64 KB pages over 2 MB pages",
            capacity(),
            "benchmarks/capacity/README.md",
        ),
        (
            "Mapping a 64 KB page, over CUDA's time for a 2 MB page",
            (f"{spread(calls, '.2f')} times", where) if calls else (NOT_MEASURED, ""),
            "benchmarks/api/README.md",
        ),
        (
            "FlashAttention-3 over scattered 64 KB pages, over cudaMalloc memory, up to 4 GiB of "
            "keys and values",
            (f"{spread(attention, '.3f')} times", where) if attention else (NOT_MEASURED, ""),
            "benchmarks/api/README.md",
        ),
        (
            "The same on a full card, decoding, by layout: 64 KB pages",
            full_card("64K", ".2f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "64 KB pages with page-table entries of 2 MB",
            full_card("entries", ".3f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "2 MB pages",
            full_card("2M", ".3f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "99th percentile of decoding, mapped in the background, over all mapped before",
            overlap(),
            "benchmarks/overlap/README.md",
        ),
        (
            "64 tensors grow by a page each with the patched driver: system calls, submissions to "
            "the GPU, TLB invalidates (counted)",
            counts(),
            "docs/driver/evidence.md",
        ),
        (
            "vLLM with the plug-in: tokens a second over those without it",
            alone,
            "benchmarks/vllm/README.md",
        ),
        (
            "Several vLLM servers that share a GPU's memory: 99th percentile of the time to the "
            "first token, over servers with an equal part each",
            together,
            "benchmarks/vllm/README.md",
        ),
    ]
    lines = ["| question | answer | measured on |", "| --- | --- | --- |"]
    return lines + [
        f"| [{question}]({page}) | {answer} | {place} |" for question, (answer, place), page in body
    ]
