# SPDX-License-Identifier: MIT
"""Generates the README's measured tables: three headline numbers, and a row for each question."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

from readme_cache import footprint_times, runs
from readme_format import RESULTS, Result, number, rows

__all__ = ["headline", "part"]

NOT_MEASURED = "not measured yet"


def spread(values: Sequence[float], form: str) -> str:
    """Formats the range of some numbers, or a single number if all format the same."""
    shown = [format(value, form) for value in sorted(values)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def aims(results: list[Result], wanted: Callable[[str], bool]) -> list[float]:
    """Returns the values, on all machines, of the aims whose id satisfies `wanted`."""
    return [
        aim["value"]
        for result in results
        for aim in result["aims"]
        if wanted(aim["id"]) and aim["value"] is not None
    ]


def machines(results: list[Result]) -> str:
    """Returns the names of the GPUs on which the given results were measured."""
    names = dict.fromkeys(result["machine"]["gpu"] for result in results)
    return ", ".join(name.removeprefix("NVIDIA ").partition(" ")[0] for name in names)


def capacity() -> tuple[str, str]:
    """Returns how many times more requests fit with 64 KB pages than with 2 MB, and the source."""
    run: Result = json.loads((RESULTS / "capacity.json").read_text(encoding="utf-8"))
    found = [
        aim["value"]
        for aim in run["aims"]
        if aim["id"].startswith("azure") and aim["id"].endswith("g1/2M")
    ]
    return f"{spread(found, '.2f')} times as many", "replay of Azure's 2023 trace"


def overlap() -> tuple[str, str]:
    """Returns the p99 time of decode iterations that map in the background, and the machines.

    The time is relative to iterations whose memory was mapped beforehand.
    """
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
    """Returns the decode time on a kind of memory, and the machines and cache sizes.

    The time is relative to cudaMalloc memory, at each run's largest footprint.
    """
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


def shorter() -> tuple[list[float], list[Result]]:
    """Returns the factors by which sharing shortens p99 time to first token, and their runs."""
    found = []
    where: list[Result] = []
    for run in runs("vllm"):
        times = rows(run)
        if "share/first/static" in times:
            shared, static = (times[f"share/first/{arm}"]["p99"] for arm in ("shared", "static"))
            found.append(static / shared)
            where.append(run)
    return found, where


def sharing() -> tuple[str, str]:
    """Returns the range of factors from `shorter`, and the machines."""
    found, where = shorter()
    if not found:
        return NOT_MEASURED, ""
    return f"{number(min(found), 2)} to {number(max(found))} times shorter", machines(where)


def vllm() -> tuple[str, str]:
    """Returns the elastic engine's throughput, and the machines.

    The throughput is relative to the mean of the stock engines at each rate.
    """
    found = []
    where: list[Result] = []
    for run in runs("vllm"):
        times = rows(run)
        for name, row in times.items():
            if name.startswith("load/rate/") and name.endswith("/elastic"):
                stock = name.replace("elastic", "stock")
                both = [times[key]["value"] for key in (stock, f"{stock} again") if key in times]
                found.append(row["value"] / statistics.mean(both))
                where.append(run)
    if not found:
        return NOT_MEASURED, ""
    return f"{spread(found, '.3f')} times", machines(where)


def at_rest() -> tuple[float, float, float, list[Result]]:
    """Returns the memory mapped at the peak and when idle, the seconds in between, and the run.

    The sizes are in bytes. They come from the run with the highest peak.
    """
    most = 0.0, 0.0, 0.0
    where: list[Result] = []
    for run in runs("vllm"):
        times = rows(run)
        if "load/rest/mapped" in times:
            ids = ("load/peak", "load/rest/mapped", "load/rest/seconds")
            here = tuple(times[name]["value"] for name in ids)
            if here[0] > most[0]:
                most, where = (here[0], here[1], here[2]), [run]
    return *most, where


def full_runs() -> list[tuple[Result, Result]]:
    """Returns the runs of vLLM on a full GPU, each with its throughput relative to stock."""
    over = [(run, rows(run).get("full/over/rate/elastic")) for run in runs("vllm")]
    return [(run, row) for run, row in over if row is not None]


def vllm_full() -> tuple[str, str]:
    """Returns each run's throughput on a full GPU relative to stock, and the machines."""
    found = full_runs()
    if not found:
        return NOT_MEASURED, ""
    shown = [f"{row['value']:.3f} ± {row['half_width']:.3f}" for _, row in found]
    return f"{' and '.join(shown)} times", machines([run for run, _ in found])


def headline() -> list[str]:
    """Returns the headline table: the gain from sharing, the memory freed when idle, the cost."""
    found, shared = shorter()
    peak, rest, seconds, idle = at_rest()
    full = full_runs()
    if not (found and peak and full):
        return [NOT_MEASURED]
    kept = spread([row["value"] for _, row in full], ".1%")
    engines = max(run["options"]["engines"] for run in shared)
    page = "benchmarks/vllm/README.md"
    given_back = f"{peak / 1e9:.1f} GB → {rest / 2**20:.0f} MiB"
    return [
        f"| **up to {number(max(found))} times sooner** | **{given_back}** | **{kept}** |",
        "| --- | --- | --- |",
        f"| [first tokens]({page}) (p99) of {engines} vLLM servers that share memory, versus "
        f"servers with a fixed equal share each; {number(min(found), 2)} times at heavier load "
        f"({machines(shared)}) | of KV cache stay [mapped]({page}) {seconds:.1f} s after the last "
        f"request ({machines(idle)}) | of stock vLLM's [tokens/s]({page}) with 48 GiB of keys "
        f"and values ({machines([run for run, _ in full])}) |",
    ]


def counts() -> tuple[str, str]:
    """Returns how many driver calls it takes to add a page to each of 64 tensors, and the machine.

    The count is given for the patched and the stock driver.
    """
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
    """Returns the table with a row for each question."""
    where = machines(results)
    attention = aims(results, lambda name: name.startswith("fa3_") and name.endswith("_random"))
    calls = aims(results, lambda name: name == "map_64K")
    body = [
        (
            "Requests that fit in 80 GB: 64 KB pages relative to 2 MB pages",
            capacity(),
            "benchmarks/capacity/README.md",
        ),
        (
            "Time to map a 64 KB page, relative to CUDA's time for a 2 MB page",
            (f"{spread(calls, '.2f')} times", where) if calls else (NOT_MEASURED, ""),
            "benchmarks/api/README.md",
        ),
        (
            "FlashAttention-3 on scattered 64 KB pages: time relative to cudaMalloc memory, up to "
            "4 GiB of keys and values",
            (f"{spread(attention, '.3f')} times", where) if attention else (NOT_MEASURED, ""),
            "benchmarks/api/README.md",
        ),
        (
            "FlashAttention-3 decoding on a full GPU, 64 KB pages: time relative to cudaMalloc "
            "memory, by layout",
            full_card("64K", ".2f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "FlashAttention-3 decoding on a full GPU, 64 KB pages with 2 MB page-table entries: "
            "time relative to cudaMalloc memory",
            full_card("entries", ".3f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "FlashAttention-3 decoding on a full GPU, 2 MB pages: time relative to cudaMalloc "
            "memory",
            full_card("2M", ".3f"),
            "benchmarks/kernels/README.md",
        ),
        (
            "p99 of decode iterations: memory mapped in the background, relative to all memory "
            "mapped beforehand",
            overlap(),
            "benchmarks/overlap/README.md",
        ),
        (
            "64 tensors grow by a page each with the patched driver: number of system calls, "
            "submissions to the GPU and TLB invalidates",
            counts(),
            "docs/driver/evidence.md",
        ),
        (
            "vLLM with the plug-in: tokens/s relative to stock vLLM",
            vllm(),
            "benchmarks/vllm/README.md",
        ),
        (
            "vLLM with the plug-in and 48 GiB of keys and values, one engine at a time: tokens/s "
            "relative to stock vLLM",
            vllm_full(),
            "benchmarks/vllm/README.md",
        ),
        (
            "Several vLLM servers that share a GPU's memory: p99 time to first token, versus "
            "servers with a fixed equal share each",
            sharing(),
            "benchmarks/vllm/README.md",
        ),
    ]
    lines = ["| question | answer | measured on |", "| --- | --- | --- |"]
    return lines + [
        f"| [{question}]({page}) | {answer} | {place} |" for question, (answer, place), page in body
    ]
