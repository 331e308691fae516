# SPDX-License-Identifier: MIT
"""Formats the tables that `vmem bench api` prints."""

from __future__ import annotations

from typing import Any

from pyvmem.bench.record import Part, Record
from pyvmem.bench.setting import label
from pyvmem.commands.tables import number, table

__all__ = ["aims_table", "document", "head", "part_table"]


def head(record: Record) -> str:
    """Returns the report's header: machine, GPU, driver, commit, back ends."""
    m = record.machine
    commit = m["commit"] or "unknown"
    if m["dirty"]:
        commit += " with changes"
    versions = ", ".join(
        f"{name} {m[key]}"
        for name, key in (("torch", "torch"), ("cuda-bindings", "cuda_bindings"), ("cffi", "cffi"))
        if m[key]
    )
    lines = [
        f"machine   {m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB",
        f"kernel    {m['kernel']}, {m['user']}",
        f"GPU       {m['gpu'] or 'none'}",
        f"driver    {m['driver'] or 'none'}",
        f"python    {m['python']}" + (f", {versions}" if versions else ""),
        f"commit    {commit}",
    ]
    for backend in record.backends:
        state = "usable" if backend["usable"] else "not usable"
        reason = f": {backend['reason']}" if backend["reason"] else ""
        lines.append(f"{backend['name']:<9} {state}{reason}")
    return "\n".join(lines)


_LIVE = {  # columns of the live-pages table: the row, then its keys and their headings
    "grow": (("median", "grow us"), ("p99", "p99")),
    "grow_last": (("median", "at the end"),),
    "driver_us": (("value", "driver us"),),
    "segments": (("value", "segments"),),
    "kernel_bytes": (("value", "kernel B"),),
    "consolidate": (("value", "consolidate s"),),
    "kernel_bytes_after": (("value", "then B"),),
    "teardown": (("value", "teardown s"),),
    "teardown_page": (("value", "a page us"),),
    "kernel_bytes_left": (("value", "left B"),),
}


def _live_table(part: Part) -> str:
    """Formats the live-pages rows, with one line per page count, pattern and system."""
    lines: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in part.rows:
        _, pattern, system, pages, what = row["id"].split("/")
        lines.setdefault((pages, pattern, system), {})[what] = row
    cells = []
    for key, found in lines.items():
        columns = [
            number(found[what][field]) if what in found else ""
            for what, fields in _LIVE.items()
            for field, _ in fields
        ]
        cells.append([*key, *columns])
    headings = [heading for fields in _LIVE.values() for _, heading in fields]
    return table(["pages", "pattern", "system", *headings], cells, 3)


def part_table(part: Part) -> str:
    """Formats one part's tables: times, single numbers, and rows that were not run."""
    if part.name == "live" and part.rows:
        return "\n".join([_title(part), _live_table(part), *_rest(part)])
    blocks = [_title(part)]
    if part.why:
        blocks.append(part.why)
    times = [r for r in part.rows if "median" in r]
    if times:
        rates = any("gb_per_s" in r for r in times)
        header = ["what", "system", "page", "unit", "median", "p90", "p99", "spread", "net"]
        rows = []
        for r in times:
            cells = [r["what"], r["system"], label(r["page"]) if "page" in r else "", r["unit"]]
            cells += [number(r[k]) for k in ("median", "p90", "p99")]
            cells += [f"{r['spread']:.1%}", number(r["net"])]
            if rates:
                cells.append(number(r["gb_per_s"]) if "gb_per_s" in r else "")
            rows.append(cells)
        blocks.append(table(header + (["GB/s"] if rates else []), rows, 4))
    values = [r for r in part.rows if "value" in r]
    if values:
        rows = [
            [r["id"].partition("/")[2], r["what"], number(r["value"]), r["unit"]] for r in values
        ]
        blocks.append(table(["row", "what", "value", "unit"], rows, 2))
    return "\n".join([*blocks, *_rest(part)])


def _title(part: Part) -> str:
    return f"== {part.name}: {part.title} ({part.status}, {part.seconds:.1f} s)"


def _rest(part: Part) -> list[str]:
    missing = [f"not run: {m['id']}: {m['why']}" for m in part.missing if m["why"] != part.why]
    return [f"note: {note}" for note in part.notes] + missing


def aims_table(record: Record) -> str:
    """Returns a table of the aims' values and results; "" if no aim applies to the run."""
    if not any(aim["applies"] for aim in record.aims):
        return ""
    rows = []
    for aim in record.aims:
        target = f"{aim['op']} {aim['aim']:g}" if aim["op"] else ""
        verdict = {True: "pass", False: "MISS", None: ""}[aim["pass"]]
        value = "-" if aim["value"] is None else f"{aim['value']:.4g}"
        if aim.get("baseline_spread") is not None:
            value += f" (baselines {aim['baseline_spread']:.1%} apart)"
        rows.append([aim["what"], value, aim["unit"], target, verdict or aim["why"]])
    return table(["aim", "value", "unit", "wanted", ""], rows, 1)


def document(record: Record) -> str:
    """Returns the complete report: header, parts and aims."""
    parts = [part_table(part) for part in record.parts.values()]
    return "\n\n".join(filter(None, [head(record), *parts, aims_table(record)]))
