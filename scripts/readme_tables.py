#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the measured parts of the README and of the documentation, from benchmarks/results.

A part is between `<!-- measured NAME -->` and `<!-- /measured NAME -->`. All text there is
generated, as is the text after `<!-- features -->` and `<!-- metrics -->`, which comes from the
package. Every part is in one file, the headline also on the site's home page; links are relative to
that file. The table of branches comes from libvmem. The script also writes patches/kernels.json
and the pictures of benchmarks/vllm. `--check` changes nothing and fails if a file is out of date.
Parts of readme_cache.py are required only if a result for them exists.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import readme_branches
import readme_drivers
import readme_features
import readme_index
import readme_metrics
import readme_summary
from readme_cache import CACHE_PARTS
from readme_engines import PARTS as ENGINE_PARTS
from readme_engines import pictures
from readme_format import RESULTS, ROOT, Result, load_run, number, rows, table, title

from vmem_bench.vllm import picture

README = ROOT / "README.md"
FOLDERS = ("docs/**/*.md", "benchmarks/*/*.md")
FORMAT = "vmem-bench-api/1"
AGAIN = "run scripts/readme_tables.py"
NOTHING = "Not measured yet: `benchmarks/results/` has no run on a GPU."

OPERATIONS = [
    ("reserve addresses", "reserve", False),
    ("create a page", "create", True),
    ("map a page, access enabled", "map_access", True),
    ("unmap it", "unmap", True),
    ("release it", "release", True),
    ("free the addresses", "free", False),
]
COLUMNS = [
    ("stock", "64K"),
    ("stock", "128K"),
    ("stock", "256K"),
    ("stock", "2M"),
    ("cumem", "2M"),
]
SYSTEMS = {"cumem": "CUDA (cuMem*)"}
PAGES = {"64K": "64 KB", "128K": "128 KB", "256K": "256 KB", "2M": "2 MB"}


def load() -> list[Result]:
    """Returns, for each GPU and driver, the newest run that measured the calls."""
    return newest_with("calls")


def newest_with(part: str) -> list[Result]:
    """Returns, for each GPU and driver, the newest run that has a part; sorted by GPU."""
    newest: dict[tuple[str, str], Result] = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = load_run(path)
        if result.get("format") != FORMAT or result["options"].get("quick"):
            continue
        machine = result["machine"]
        if not machine.get("gpu") or part not in result["parts"]:
            continue
        key = (machine["gpu"], machine["driver"])
        if key not in newest or newest[key]["started"] < result["started"]:
            newest[key] = result
    return [newest[key] for key in sorted(newest)]


def time_of(row: Result | None) -> str:
    """Formats the median and 99th percentile of a row of times, in microseconds."""
    if row is None:
        return ""
    return f"{number(row['median'])} ({number(row['p99'])})"


def part_calls(results: list[Result]) -> list[str]:
    """Returns a table of microseconds per call for each GPU."""
    lines = []
    for result in results:
        found = rows(result)
        body = []
        for what, operation, by_page in OPERATIONS:
            cells = []
            for system, page in COLUMNS:
                name = f"calls/{operation}/{system}" + (f"/{page}" if by_page else "")
                shown = by_page or page == "64K" or system == "cumem"
                cells.append(time_of(found.get(name)) if shown else "")
            if any(cells):
                body.append([what, *cells])
        head = [f"{SYSTEMS.get(system, system)} {PAGES[page]}" for system, page in COLUMNS]
        lines += [
            f"Microseconds per call, median (99th percentile), {title(result)}:",
            "",
            *table(["", *head], body),
            "",
        ]
    return lines[:-1]


SLOTS = (
    ("`alloc_reqid`", "alloc"),
    ("`free_reqid`", "free"),
    ("`can_admit`", "can_admit"),
    ("a step in which no request needs a page", "idle"),
    ("a step that returns -1", "short"),
    ("a step, per growing request (one in 32), without the driver", "grow"),
)
SLOT_COUNTS = (256, 1024, 4096)


def part_slots(_: list[Result]) -> list[str]:
    """Returns, for each GPU, a table of cache call times by number of slots."""
    lines: list[str] = []
    for result in newest_with("slots"):
        found = rows(result)
        machine, backend = result["machine"], result["options"]["backend"]
        changes = " with changes" if machine["dirty"] else ""
        body = [
            [name, *(time_of(found.get(f"slots/{key}/{backend}/{n}")) for n in SLOT_COUNTS)]
            for name, key in SLOTS
        ]
        apart = [
            f"{words} {time_of(found.get(f'slots/{key}/{backend}'))}"
            for words, key in (("after a pause", "async_cold"), ("back to back", "async_warm"))
        ]
        lines += [
            f"Microseconds per call, median (99th percentile), `{backend}`, {title(result)}, "
            f"commit {machine['commit'][:7]}{changes}:",
            "",
            *table(["slots", *(f"{n:,}" for n in SLOT_COUNTS)], body),
            "",
            f"`step_async` for 8 requests x 64 tensors: {', '.join(apart)}.",
            "",
        ]
    return lines[:-1] or [NOTHING]


def part_aims(results: list[Result]) -> list[str]:
    """Returns the table of the project's targets and the measured values."""
    names: dict[str, str] = {}
    for result in results:
        names |= {aim["id"]: aim["what"] for aim in result["aims"] if aim["applies"]}
    body = []
    not_run = []
    for name, what in names.items():
        aims = [next((a for a in r["aims"] if a["id"] == name), None) for r in results]
        measured = [aim for aim in aims if aim and aim["value"] is not None]
        if not measured:
            not_run.append(what)
            continue
        first = measured[0]
        sign = {"<=": "≤ ", ">=": "≥ "}.get(first["op"])
        goal = f"{sign}{first['aim']:g}{unit_of(first)}" if sign else ""
        body.append([what, goal, *map(aim_value, aims)])
    lines = table(["what", "aim", *map(title, results)], body)
    return lines + (["", "Not run: " + "; ".join(not_run) + "."] if not_run else [])


def unit_of(aim: Result) -> str:
    """Returns the unit to append to a number, or "" for a ratio."""
    return {"x": "", "us": " µs"}.get(aim["unit"], f" {aim['unit']}")


def aim_value(aim: Result | None) -> str:
    """Formats a measured value, with a mark if it misses the target."""
    if aim is None or aim["value"] is None:
        return "not run"
    digits = 4 if aim["unit"] == "x" else 3
    missed = " **missed**" if aim["pass"] is False else ""
    return f"{number(aim['value'], digits)}{unit_of(aim)}{missed}"


def part_verified(results: list[Result]) -> list[str]:
    """Returns the table of the GPUs and drivers that the runs used."""
    body = [[r["machine"]["gpu"], r["machine"]["driver"]] for r in results]
    return table(["verified on", "driver"], body)


COUNTS = [
    ("a page added to each of 64 tensors", "grow 64 tensors, tables there"),
    ("page added to 64 tensors, `stock`'s calls", "stock path: grow 64 tensors, tables there"),
    ("page added in 64 slots never used before", "grow 64 tensors, first touch of 64 slots"),
    ("page added in 64 new slots, `stock`'s calls", "stock path: grow 64 tensors, first touch"),
    ("a page removed from each of 64 tensors", "unmap one page of 64 tensors"),
    ("page removed from 64 tensors, `stock`'s calls", "stock path: unmap one page of 64 tensors"),
    ("page added with 100,000 live pages", "grow 64 tensors beside 100,000 live pages"),
    ("growing from 0 to 8K tokens in 256 steps", "grow from 0 to 8K tokens, 256 steps"),
    ("unmapping the 8K tokens", "unmap a request of 8K tokens"),
]
GIGABYTE = [
    ("mapped for the first time, 64 KB entries", "map 1 GB by entries of 64 KB"),
    ("mapped for the first time, 2 MB entries", "map 1 GB by entries of 2 MB"),
    ("unmapped, 64 KB entries", "unmap 1 GB by entries of 64 KB"),
    ("unmapped, 2 MB entries", "unmap 1 GB by entries of 2 MB"),
    ("mapped again, 64 KB entries", "map 1 GB by entries of 64 KB, again"),
    ("mapped again, 2 MB entries", "map 1 GB by entries of 2 MB, again"),
    ("a page of each 2 MB entry unmapped, which splits the entry", "split 512 entries"),
    ("entries split with the tables in place", "split 512 entries, tables there"),
    ("those pages mapped again and the 2 MB entries joined", "join 512 entries"),
]
COUNTED = [
    ("ioctls", "ioctls"),
    ("pushes", "pushes"),
    ("PTE writes", "pte_writes"),
    ("PDE writes", "pde_writes"),
    ("TLB invalidates", "invalidates"),
    ("waits for tables", "table_waits"),
]


def part_counts(_: list[Result]) -> list[str]:
    """Returns tables of the patched driver's work per operation, as counted by the software GPU."""
    path = RESULTS / "softgpu-counts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases = {line["case"]: line for line in lines[1:]}
    body, gigabyte = (
        [[what, *(f"{cases[case][field]:,}" for _, field in COUNTED)] for what, case in rows]
        for rows in (COUNTS, GIGABYTE)
    )
    full = cases["100000 live pages in full slots"]["per_page"]
    alone = cases["2000 slots with one page each"]["per_slot"]
    return [
        f"Llama-3-8B's shape, 64 KB pages, nvidia-uvm {lines[0]['driver']} on the software GPU "
        f"({lines[0]['architecture']}; [raw]({path.relative_to(ROOT).as_posix()})):",
        "",
        *table(["", *(name for name, _ in COUNTED)], body),
        "",
        *table(["1 GB", *(name for name, _ in COUNTED)], gigabyte),
        "",
        "PTE writes do not include entries written to a table before it is in use: 32 for each "
        "2 MB entry that is split.",
        "",
        f"Kernel memory: {number(full)} bytes per page, with 100,000 live pages in full slots of "
        f"2 MB; {number(alone)} bytes for a slot with one page. UVM's page tables are not counted.",
    ]


WORKLOADS = [
    ("growth", "{requests} requests grow to {tokens:,} tokens, a token per step"),
    ("prefix", "a request starts with a prefix of {prefix:,} tokens"),
    ("prefix ends", "the request with the prefix is freed"),
    ("move", "a request's {tokens:,} tokens move, page by page"),
    ("promotion", "a request's pages become 2 MB pages"),
    ("a request ends", "a request of {tokens:,} tokens is freed"),
]
WORKED = [
    ("ioctls", "ioctls"),
    ("pushes", "pushes"),
    ("invalidates", "TLB invalidates"),
    ("entries", "entries"),
    ("tables", "tables created"),
]


def part_workloads(_: list[Result]) -> list[str]:
    """Returns a table of operation counts per workload, on the patched and the stock driver."""
    path = RESULTS / "softgpu-workloads.jsonl"
    head, *found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cases = {(line["tensors"], line["case"], line["way"]): line for line in found}
    body = []
    for tensors in dict.fromkeys(line["tensors"] for line in found):
        for case, what in WORKLOADS:
            uvm, stock = cases[tensors, case, "uvm"], cases[tensors, case, "stock"]
            cells = [f"{uvm[field]:,} / {stock[field]:,}" for field, _ in WORKED]
            body.append([what.format(prefix=head["prefix_tokens"], **uvm), str(tensors), *cells])
    return [
        f"Counts for `uvm` / `stock` for the same work: {head['model']}'s rows, 64 KB pages "
        f"mapped one by one, nvidia-uvm {head['driver']} on the software GPU "
        f"({head['architecture']}; [raw]({path.relative_to(ROOT).as_posix()})):",
        "",
        *table(["", "tensors", *(name for name, _ in WORKED)], body),
    ]


LAYOUTS = ["g1/64K", "g1/256K", "g1/2M", "g4/64K", "g4/2M", "blocks/16", "blocks/256"]


def layout_name(layout: str) -> str:
    """Returns a layout's heading: g4/2M means four layers per tensor and pages of 2 MB."""
    how, _, size = layout.partition("/")
    if how == "blocks":
        return f"paged, {size} tokens"
    return PAGES.get(size, size.replace("K", " KB")) + (
        "" if how == "g1" else f", groups of {how[1:]}"
    )


def part_capacity(_: list[Result]) -> list[str]:
    """Returns the table of concurrent requests, and memory wasted per request, by layout."""
    run = load_run(RESULTS / "capacity.json")
    found = rows(run)
    body = []
    for part, data in run["parts"].items():
        models = {r["id"].split("/")[1]: r["what"].rpartition(", ")[0] for r in data["rows"]}
        for model, name in models.items():
            cells = [found[f"{part}/{model}/{layout}"] for layout in LAYOUTS]
            shown = [f"{number(c['value'])} ({number(c['wasted_bytes'] / 2**20)})" for c in cells]
            body.append([f"{name}; {part}", *shown])
    memory = run["options"]["memory"] >> 30
    return [
        f"Concurrent requests in {memory} GB (and MB wasted per request), from a trace replay "
        f"([raw]({run['file']})):",
        "",
        *table(["", *map(layout_name, LAYOUTS)], body),
    ]


def part_prefixes(_: list[Result]) -> list[str]:
    """Returns a table of hit rates for the prefix tree and for hashed blocks, by budget."""
    run = load_run(RESULTS / "prefixes.json")
    found = rows(run)
    hits = [row for row in run["parts"]["hits"]["rows"] if "budget_bytes" in row]
    budgets = list(dict.fromkeys(row["id"].rpartition("/")[2] for row in hits))
    systems = {row["id"].rpartition("/")[0]: row["what"].rpartition(", ")[0] for row in hits}
    body = [
        [what, *(f"{number(found[f'{system}/{budget}']['value'])}%" for budget in budgets)]
        for system, what in systems.items()
    ]
    bound = found["hits/bound"]["value"]
    return [
        f"Prompt tokens found in the cache, {run['options']['trace'] or 'synthetic'}, keys and "
        f"values of {run['options']['model']} ([raw]({run['file']})); "
        f"{number(bound)}% with unlimited memory:",
        "",
        *table(["", *(budget.replace("G", " GB") for budget in budgets)], body),
    ]


def part_sharing(_: list[Result]) -> list[str]:
    """Returns a table that shows how much memory forks save for samples and beams."""
    run = load_run(RESULTS / "sharing.json")
    found = rows(run)
    systems = {"g1/64K": "64 KB", "g8/64K": "64 KB, groups of 8", "g1/2M": "2 MB"}
    systems["blocks/16"] = "paged, 16 tokens"
    body = []
    for way, words in (("sampling", "samples"), ("beams", "beams")):
        for load, name in (("alpaca", "Alpaca"), ("sharegpt", "ShareGPT")):
            for model in ("OPT-13B", "Llama-3-8B"):
                ids = [
                    [f"{way}/{load}/{model}/{width}/{system}" for width in (2, 4, 6)]
                    for system in systems
                ]
                if not all(one in found for each in ids for one in each):
                    continue
                cells = [" / ".join(f"{found[one]['value']:.0f}" for one in each) for each in ids]
                body.append([f"{words}; {name}'s means; {model}", *cells])
    return [
        "Memory saved by sharing, in % of the memory without sharing, for 2 / 4 / 6 samples or "
        f"beams, computed ([raw]({run['file']})):",
        "",
        *table(["", *systems.values()], body),
    ]


def part_turns(_: list[Result]) -> list[str]:
    """Returns a table that shows, by budget, what fraction of prefix hits was still mapped."""
    run = load_run(RESULTS / "prefix-turns.json")
    found = rows(run)
    budgets = list(dict.fromkeys(name.rpartition("/")[2] for name in found))
    body = []
    for kind, what in (
        ("hits", "prefix hits"),
        ("next", "of which next turns"),
        ("tokens", "hit tokens"),
    ):
        cells = [found[f"turns/{kind}/{budget}"] for budget in budgets]
        shown = [f"{number(cell['value'])}% of {cell['of']:,}" for cell in cells]
        body.append([what, *shown])
    note = run["parts"]["turns"]["notes"][0]
    return [
        f"Hits that were still mapped in a free slot, so that no driver call was needed, "
        f"{run['options']['trace'] or 'synthetic'}, keys and values of {run['options']['model']} "
        f"({note}; [raw]({run['file']})):",
        "",
        *table(["", *(budget.replace("G", " GB") for budget in budgets)], body),
    ]


def part_windows(_: list[Result]) -> list[str]:
    """Returns a table of a sliding-window model's hit rates, with windows and with all rows."""
    run = load_run(RESULTS / "prefix-windows.json")
    found = rows(run)
    budgets = list(dict.fromkeys(name.rpartition("/")[2] for name in found))
    body = [
        [what, *(f"{number(found[f'windows/{kind}/{budget}']['value'])}%" for budget in budgets)]
        for kind, what in (("full", "all rows kept"), ("windows", "windows"))
    ]
    note = run["parts"]["windows"]["notes"][0]
    return [
        f"Prompt tokens found in the cache, {run['options']['trace'] or 'synthetic'}, keys and "
        f"values of {note} ([raw]({run['file']})):",
        "",
        *table(["", *(budget.replace("G", " GB") for budget in budgets)], body),
    ]


PARTS: dict[str, Callable[[list[Result]], list[str]]] = {
    "counts": part_counts,
    "workloads": part_workloads,
    "branches": lambda _: readme_branches.part(),
    "drivers": lambda _: readme_drivers.part(),
    "runs": lambda _: readme_drivers.part_runs(),
    "linux": lambda _: readme_drivers.part_kernels(),
    "capacity": part_capacity,
    "prefixes": part_prefixes,
    "sharing": part_sharing,
    "prefix-turns": part_turns,
    "prefix-windows": part_windows,
    "calls": part_calls,
    "slots": part_slots,
    "aims": part_aims,
    "verified": part_verified,
    "features": lambda _: readme_features.part(),
    "metrics": lambda _: readme_metrics.part(),
    "results": lambda _: readme_index.part(),
    "logs": lambda _: readme_index.part_logs(),
    "summary": readme_summary.part,
    "headline": lambda _: readme_summary.headline(),
}


OF_PACKAGE = {"features", "metrics"}  # parts generated from the package
OF_GPU = {"calls", "aims", "verified"}  # parts generated from the runs that measured calls
MARKER = re.compile(r"<!-- (measured [a-z-]+|features|metrics) -->.*?<!-- /\1 -->", re.S)


def files() -> list[Path]:
    """Returns the files that may contain parts."""
    return [README, *sorted(path for folder in FOLDERS for path in ROOT.glob(folder))]


def relative(line: str, path: Path) -> str:
    """Returns a part's line with its links made relative to a file instead of the root."""
    here = os.path.relpath(path.parent, ROOT)

    def link(match: re.Match[str]) -> str:
        return f"]({os.path.relpath(match[1], here)})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", link, line)


def render(texts: dict[Path, str], results: list[Result]) -> dict[Path, str]:
    """Returns the files' texts with regenerated parts."""
    optional = {name: part for name, part in {**CACHE_PARTS, **ENGINE_PARTS}.items() if part([])}
    parts = {
        name if name in OF_PACKAGE else f"measured {name}": (name, part)
        for name, part in {**PARTS, **optional}.items()
    }
    found = [match[1] for text in texts.values() for match in MARKER.finditer(text)]
    for label in parts:
        wanted = 2 if label == "measured headline" else 1
        if found.count(label) != wanted:
            sys.exit(f"'<!-- {label} -->' is in {found.count(label)} places, not in {wanted}")

    def written(path: Path, match: re.Match[str]) -> str:
        label = match[1]
        if label not in parts:
            return match[0]  # no result for this part
        name, part = parts[label]
        lines = part(results) if results or name not in OF_GPU else [NOTHING]
        shown = [relative(line, path) for line in lines]
        return "\n".join([f"<!-- {label} -->", *shown, f"<!-- /{label} -->"])

    return {
        path: MARKER.sub(lambda match, path=path: written(path, match), text)  # type: ignore[misc]
        for path, text in texts.items()
    }


def main() -> int:
    """Writes the files, or checks that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    made = {**render(texts, load()), readme_drivers.KERNELS: readme_drivers.kernels_text()}
    status = 0
    for path, wanted in made.items():
        if path.is_file() and wanted == path.read_text(encoding="utf-8"):
            continue
        if check:
            name = path.relative_to(ROOT)
            print(f"{name} does not show benchmarks/results: {AGAIN}")
            status = 1
        else:
            path.write_text(wanted, encoding="utf-8")
    for path, run in pictures().items():
        if path.is_file() and picture.digest(run) in path.read_text(encoding="utf-8"):
            continue
        if check:
            print(f"{path.relative_to(ROOT)} does not show {run['file']}: {AGAIN}")
            status = 1
        else:
            path.write_text(picture.draw(run), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
