# SPDX-License-Identifier: MIT
"""Generates the tables of the cache and attention benchmarks, usually one per run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from readme_format import RESULTS, ROOT, Result, load_run, number, rows, table, title

from pyvmem.plumbing.units import counted

MODES = {
    "mapped": "all memory mapped beforehand",
    "async": "mapped in the background",
    "reuse": "reused pages of an earlier request",
    "sync": "mapped on the critical path",
    "pages": "mapped on the critical path, page by page",
}
KINDS = {
    "runs": "runs of 64 KB pages",
    "runs_2m": "runs of 2 MB pages",
    "fragmented": "single 64 KB pages",
}
KERNELS = {
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "fa2": "FlashAttention-2 of torch",
}
MEMORIES = {
    "64K": "64 KB pages",
    "2M": "2 MB pages",
    "entries": "64 KB pages with 2 MB entries",
}
SLOTS = {"slots": "a cache's calls", "layered": "a cache's calls, layers in one tensor"}


def runs(name: str) -> Iterator[Result]:
    """Yields the committed full runs of a benchmark."""
    for path in sorted(RESULTS.glob("*.json")):
        result = load_run(path, ROOT)
        if result.get("format") == f"vmem-bench-{name}/1" and not result["options"]["quick"]:
            yield result


def page_words(run: Result) -> str:
    """Returns a run's page size as text; 64 KB if none is recorded."""
    size = run["options"].get("page") or 64 << 10
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def over(row: Result | None, base: Result | None, field: str = "median") -> str:
    """Returns a row's value divided by the base's, or "" for the base and for missing rows."""
    if row is None or base is None or row is base:
        return ""
    return f"{row[field] / base[field]:.3f}"


def part_overlap(_: list[Result]) -> list[str]:
    """Returns tables of decode iteration times, by when the memory is mapped."""
    lines: list[str] = []
    for run in runs("overlap"):
        found, body = rows(run), []
        base = found.get("iterations/time/mapped")
        for mode, words in MODES.items():
            row = found.get(f"iterations/time/{mode}")
            if row is None:
                continue
            spikes = found[f"iterations/spikes/{mode}"]["value"]
            times = [number(row[field], 4) for field in ("median", "p99", "max")]
            body.append([words, *times, over(row, base, "p99"), str(spikes)])
        options = run["options"]
        count = base["n"] if base else 0
        head = ["", "median ms", "p99", "longest", "p99 relative to the first row"]
        lines += [
            f"Decode iterations, Llama-3-8B's shape, {options['batch']} requests of "
            f"{options['low']:,} to {options['high']:,} tokens, {count:,} iterations per row, "
            f"{page_words(run)} pages, {title(run)}:",
            "",
            *table([*head, "iterations above 1.2 times the median"], body),
            "",
        ]
    return lines[:-1]


def part_deferred(_: list[Result]) -> list[str]:
    """Returns tables of prefill times, by when the memory is mapped."""
    lines: list[str] = []
    for run in runs("deferred"):
        found, body = rows(run), []
        base = found.get("prefill/time/mapped")
        for mode, words in MODES.items():
            row, step = (found.get(f"prefill/{what}/{mode}") for what in ("time", "step"))
            if row is None:
                continue
            of_that = number(step["median"] / 1000) if step else ""
            spread = f"{100 * row['spread']:.1f}%"
            body.append([words, number(row["median"], 4), of_that, spread, over(row, base)])
        lines += [
            f"Prefill of {run['options']['tokens']:,} tokens, Llama-3-8B's shape, medians of "
            f"{base['n'] if base else 0} prefills, {page_words(run)} pages, {title(run)}:",
            "",
            *table(["", "ms", "of which `step`", "spread", "relative to the first row"], body),
            "",
        ]
    return lines[:-1]


def part_kernels(_: list[Result]) -> list[str]:
    """Returns a table per attention kernel: its time by layout, relative to contiguous memory."""
    lines: list[str] = []
    for run in runs("kernels"):
        if "footprint" in run["options"]:
            continue
        found = rows(run)
        for kernel, name in KERNELS.items():
            part = run["parts"].get(kernel)
            if part is None or not part["rows"]:
                continue
            lines += [*_one_kernel(found, run, kernel, name), ""]
    return lines[:-1]


def _one_kernel(found: dict[str, Result], run: Result, kernel: str, name: str) -> list[str]:
    ours, theirs = ("random0", "random1"), ("malloc0", "malloc1")
    ids = [row["id"].split("/") for row in run["parts"][kernel]["rows"] if "median" in row]
    cases = list(dict.fromkeys(case for _, case, _, _ in ids))
    kinds = dict.fromkeys(form for _, _, form, _ in ids if form != "contiguous")
    forms = {form: theirs for form in kinds if form not in SLOTS}
    forms |= {form: ours for form in SLOTS if form in kinds}

    def median(case: str, form: str, memories: tuple[str, ...]) -> float | None:
        picked = [found.get(f"{kernel}/{case}/{form}/{memory}") for memory in memories]
        medians = [row["median"] for row in picked if row]
        return statistics.median(medians) if medians else None

    body = []
    for case in cases:
        base = median(case, "contiguous", ours)
        what = found[f"{kernel}/{case}/contiguous/{ours[0]}"]["what"].rpartition(":")[0]
        times = [median(case, "contiguous", theirs)]
        times += [median(case, form, memories) for form, memories in forms.items()]
        shown = [f"{time / base:.3f}" if time and base else "" for time in times]
        body.append([what, number(base or 0.0), *shown])
    blocks = [SLOTS.get(form, f"blocks of {form.removeprefix('paged')}") for form in forms]
    page = page_words(run)
    own = any("heads" in what or "KV head" in what for what, *_ in body)
    heads = "head size 128" if own else "32 query and 8 KV heads of size 128"
    head = ["", f"contiguous, {page} pages: ms", "contiguous, cudaMalloc", *blocks]
    return [
        f"{name}, bfloat16, {heads}: time relative to contiguous {page} "
        f"pages (above 1: slower), {title(run)}:",
        "",
        *table(head, body),
    ]


def footprint_times(run: Result, kind: str) -> dict[str, dict[str, float]]:
    """Returns the times for one kind of memory, relative to cudaMalloc memory.

    The outer key is the layout and the case, and the inner key is the cache's size.
    """
    found, times = rows(run), dict[str, dict[str, float]]()
    for name, row in found.items():
        kernel, size, layout, case, memory = name.split("/")
        if memory == kind:
            base = found[f"{kernel}/{size}/{layout}/{case}/malloc"]
            times.setdefault(f"{layout}/{case}", {})[size] = row["median"] / base["median"]
    return times


def part_footprint(_: list[Result]) -> list[str]:
    """Returns tables of attention times for each kind of memory, relative to cudaMalloc memory."""
    lines: list[str] = []
    for run in runs("kernels"):
        if "footprint" not in run["options"]:
            continue
        sizes = [f"{size >> 30}G" for size in run["options"]["footprint"]]
        kinds = dict.fromkeys(name.rpartition("/")[2] for name in rows(run))
        kinds.pop("malloc")
        words = " / ".join(MEMORIES[kind] for kind in kinds)
        by_kind = {kind: footprint_times(run, kind) for kind in kinds}
        body = []
        for name in next(iter(by_kind.values())):
            layout, _slash, case = name.partition("/")
            cells = [
                " / ".join(f"{times[name][size]:.2f}" for times in by_kind.values())
                if all(size in times[name] for times in by_kind.values())
                else ""
                for size in sizes
            ]
            body.append([_layout_words(layout), _case_words(case), *cells])
        lines += [
            "Attention over all layers of Llama-3-8B's shape, FlashAttention-3: time relative to "
            f"cudaMalloc memory, by size of keys and values, with {words}, {title(run)}:",
            "",
            *table(["layout", "", *(f"{size[:-1]} GiB" for size in sizes)], body),
            "",
        ]
    return lines[:-1]


def _layout_words(layout: str) -> str:
    form, together = layout.rstrip("0123456789"), layout.lstrip("abcdefghijklmnopqrstuvwxyz")
    if form == "blocks":
        return "blocks of 16" + ("" if together == "1" else ", all layers of a block together")
    return "a tensor per layer" if together == "1" else f"{together} layers in a tensor"


def _case_words(case: str) -> str:
    kind, *numbers = case.split("_")
    if kind == "decode":
        return f"decode, requests of {int(numbers[0]):,}"
    new, length = map(int, numbers)
    return f"prefill of {new:,}" if new == length else f"chunk of {new:,} at the end of {length:,}"


def part_prefix_map(_: list[Result]) -> list[str]:
    """Returns tables of the time to start a request with a cached prefix."""
    lines: list[str] = []
    for run in runs("prefix-map"):
        found, body = rows(run), []
        for kind, words in KINDS.items():
            row = found.get(f"prefix/map/{kind}")
            if row is None:
                continue
            match, pieces = (found[f"prefix/{what}/{kind}"] for what in ("match", "segments"))
            times = [number(row["median"]), number(row["p99"]), number(match["median"])]
            body.append([words, *times, f"{pieces['value']:,}"])
        where = title(run) if run["machine"]["gpu"] else f"back end `host` ([raw]({run['file']}))"
        head = ["prefix in", "median ms", "p99", "of which match, µs"]
        lines += [
            f"Time for a request to start with {run['options']['tokens']:,} recorded tokens, "
            f"Llama-3-8B's shape (64 tensors), {where}:",
            "",
            *table([*head, "contiguous mappings"], body),
            "",
        ]
    return lines[:-1]


def part_kernel_times(_: list[Result]) -> list[str]:
    """Returns a table of kernel times by phase, head size and type, with excess reads.

    The table shows the committed run with the most kernels.
    """

    def timed(run: Result) -> list[Any]:
        part = run["parts"].get("kernels", {})
        return [row for row in part.get("rows", []) if "kernel" in row]

    kept = [run for run in runs("models") if timed(run)]
    if not kept:
        return []
    run = max(kept, key=lambda run: len({row["kernel"] for row in timed(run)}))
    found = timed(run)
    cases = list(dict.fromkeys((row["dtype"], row["head_dim"]) for row in found))
    body = []
    for kernel, phase in dict.fromkeys((row["kernel"], row["phase"]) for row in found):
        mine = [row for row in found if (row["kernel"], row["phase"]) == (kernel, phase)]
        times = {(row["dtype"], row["head_dim"]): number(row["median"]) for row in mine}
        reads = [str(mine[0][name]) for name in ("past", "before")]
        body.append([f"`{kernel}`", phase, *reads, *(times.get(one, "") for one in cases)])
    head = ["kernel", "phase", "past", "before", *(f"{one[0]}, {one[1]}" for one in cases)]
    return [
        f"Median microseconds for a prefill of {found[0]['tokens']:,} tokens and for a decode step "
        "of 8 requests of that length, by type and head size; past, before: rows read past a "
        "request's end and before its window; cells are empty where a kernel cannot be used; "
        f"{title(run)}:",
        "",
        *table(head, body),
    ]


WAYS = {
    "dynamic": "`DynamicCache`",
    "vmem": "`VMemCache`",
    "attend": "`pyvmem.attention`",
    "fp8": "the same, 8 bits",
}


def part_models(_: list[Result]) -> list[str]:
    """Returns tables of time and memory per model, with transformers' cache and ours."""
    lines: list[str] = []
    for run in runs("models"):
        body = []
        for kind, part in run["parts"].items():
            found, words = rows(run), part["title"]
            for way, name in WAYS.items():
                times = [found.get(f"{kind}/{what}/{way}") for what in ("prefill", "decode")]
                if None in times:
                    continue
                memory, peak = (found[f"{kind}/{what}/{way}"] for what in ("memory", "peak"))
                off = found.get(f"{kind}/difference/{way}")
                sizes = [f"{row['value'] / 1e9:.2f}" for row in (memory, peak)]
                differs = f"{100 * off['value']:.1f}%" if off else ""
                cells = [number(row["median"]) for row in times if row]
                body.append([words, name, *cells, *sizes, differs])
                words = ""
        if not body:
            continue
        options = run["options"]
        head = ["", "", "prefill ms", "decode ms", "keys and values, GB", "torch's peak, GB"]
        lines += [
            f"A prefill of {options['tokens']:,} tokens, and a decode step of {options['batch']} "
            f"requests of that length; {title(run)}:",
            "",
            *table([*head, "logits differ by"], body),
            "",
        ]
    return lines[:-1]


def part_swap(_: list[Result]) -> list[str]:
    """Returns tables of the time to swap to host memory and back, relative to recomputation."""
    lines: list[str] = []
    for run in runs("swap"):
        found, body = rows(run), []
        names = [name.split("/") for name in found if name.endswith("/out")]
        ways = list(dict.fromkeys("/".join(name[2:-1]) for name in names))
        for way in ways:
            cells = []
            for tokens in dict.fromkeys(name[1] for name in names):
                out, back = (found[f"swap/{tokens}/{way}/{what}"] for what in ("out", "in"))
                again = found[f"swap/{tokens}/again"]
                both = out["median"] + back["median"]
                cells += [number(both), f"{both / again['median']:.2f}"]
            words = "the cache's pages" if way == "pages" else f"blocks of {way.partition('/')[2]}"
            body.append([words, *cells])
        lengths = dict.fromkeys(int(name[1]) for name in names)
        head = [one for n in lengths for one in (f"{n:,} tokens: ms", "relative to recomputation")]
        lines += [
            f"Time to swap out and back in, medians, Llama-3-8B's shape, {title(run)}:",
            "",
            *table(["", *head], body),
            "",
        ]
    return lines[:-1]


def part_devices(_: list[Result]) -> list[str]:
    """Returns tables of mapping times by device count, of tiers, and of `step` times by ranks."""
    lines: list[str] = []
    for run in runs("devices"):
        found = rows(run)

        def times(row: str, *keys: str, found: Result = found) -> list[str]:
            return [number(found[row][key]) for key in keys]

        body = [
            [
                name.rpartition("/")[2],
                *times(name, "median", "p99"),
                *times(name.replace("map/map", "map/unmap"), "median", "p99"),
                f"{found[name.replace('map/map', 'map/kernel')]['value']:,.0f}",
            ]
            for name in found
            if name.startswith("map/map/")
        ]
        size = f"{run['options']['page'] >> 10} KB pages"
        head = ["devices", "map us", "p99", "unmap us", "p99", "kernel bytes per mapping"]
        lines += [f"`{run['options']['backend']}`, {size}, {title(run)}:", "", *table(head, body)]
        places = [name.partition("out/")[2] for name in found if name.startswith("tiers/out/")]
        body = [["the device itself", "", "", *times("tiers/read/device", "gb_per_s")]]
        for where in places:
            moves = (f"tiers/{way}/{where}" for way in ("out", "back", "read"))
            body.append([where, *(times(name, "gb_per_s")[0] for name in moves)])
        lines += ["", *table(["pages in", "moved there GB/s", "back", "read GB/s"], body), ""]
        body = [["a `KVCache` in each process", *times("step/one", "median", "p90"), "", ""]]
        for name in [name for name in found if name.startswith("step/step/")]:
            ranks, agreed = name.rpartition("/")[2], name.replace("/step/", "/agreed/")
            cells = [*times(name, "median", "p90"), *times(agreed, "median", "p90")]
            body.append([counted(int(ranks), "rank"), *cells])
        lines += [*table(["", "`step` us", "p90", "`agreed_step` us", "p90"], body), ""]
    return lines[:-1]


CACHE_PARTS: dict[str, Callable[[list[Result]], list[str]]] = {
    "overlap": part_overlap,
    "deferred": part_deferred,
    "kernels": part_kernels,
    "footprint": part_footprint,
    "kernel-times": part_kernel_times,
    "prefix-map": part_prefix_map,
    "models": part_models,
    "swap": part_swap,
    "devices": part_devices,
}
