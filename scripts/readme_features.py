# SPDX-License-Identifier: MIT
"""Generates the table of features from the package's list and the records of probed back ends.

A record is a file written by `vmem features --out`. pyvmem must be importable.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BACKENDS = ("host", "stock", "cuda", "uvm")

sys.path.insert(0, str(ROOT))

from pyvmem.features import FEATURES, Feature, Probed  # noqa: E402

Record = dict[str, Any]


def records() -> dict[str, Record]:
    """Returns, for each back end, the newest record among those with the most devices."""
    best: dict[str, Record] = {}
    for path in RESULTS.glob("features-*.json"):
        report: Record = json.loads(path.read_text(encoding="utf-8"))
        for record in report["backends"]:
            if not record.get("usable", True):
                continue
            record |= {"date": report["date"], "file": path.relative_to(ROOT).as_posix()}
            name = record["backend"]
            if name not in best or rank(best[name]) < rank(record):
                best[name] = record
    return best


def rank(record: Record) -> tuple[int, str]:
    """Returns a key that sorts records by number of devices, then by date."""
    return len(Probed.of(record).devices), record["date"]


def cell(feature: Feature, record: Record | None) -> str:
    """Returns a cell that says whether a back end supports a feature and, if not, what it lacks."""
    if record is None:
        return "not probed"
    info = Probed.of(record)
    lacks = feature.lacks(info)
    if lacks and info.backend != "host" and len(info.devices) < feature.devices:
        return f"not probed on {feature.devices}"
    return f"no: {', '.join(map(code, lacks))}" if lacks else "yes"


def code(text: str) -> str:
    """Formats a capability as code, and leaves other requirements as they are."""
    return f"`{text}`" if text.startswith("VMEM_") else text


def source(name: str, record: Record | None) -> str:
    """Returns text that names a column's machine and record."""
    if record is None:
        return f"`{name}`: not probed"
    driver = f", driver {record['driver']}" if record["driver"] else ""
    return f"`{name}`: {record['device']}{driver} ([raw]({record['file']}))"


def part() -> list[str]:
    """Returns the lines of the table."""
    found = records()
    head = ["feature", "known from", "calls", "needs", *(f"`{name}`" for name in BACKENDS)]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head)]]
    for one in FEATURES:
        needs = ", ".join(map(code, one.needs()))
        cells = [cell(one, found.get(name)) for name in BACKENDS]
        row = [one.name, one.source, f"`{one.calls}`", needs, *cells]
        lines.append("| " + " | ".join(row) + " |")
    sources = "; ".join(source(name, found.get(name)) for name in BACKENDS)
    return [
        "Which features work on which back end, as the back end reported when opened. A call "
        "that needs a missing capability is refused; nothing is emulated. `vmem features` prints "
        "the same for your machine.",
        "",
        *lines,
        "",
        f"{sources}.",
    ]
