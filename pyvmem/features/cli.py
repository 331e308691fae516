# SPDX-License-Identifier: MIT
"""``vmem features``: what works on this machine's back ends, and what the others lack."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from pyvmem import _native
from pyvmem.commands.arguments import ordinal
from pyvmem.commands.machine import describe
from pyvmem.errors import VMemError
from pyvmem.features.record import Probed, about
from pyvmem.features.table import FEATURES
from pyvmem.memory.context import Context
from pyvmem.plumbing.paths import write_text, written

__all__ = ["FORMAT", "add_parser", "run", "survey"]

FORMAT = 1
"""Version of the file's layout."""


def add_parser(sub: Any) -> None:
    """Adds ``vmem features``."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "features", help="what works on the back ends of this machine", description=__doc__
    )
    add = parser.add_argument
    text = "CUDA ordinals, separated by commas (default: 0)"
    add("--devices", type=_ordinals, default=(0,), metavar="N,...", help=text)
    add("--json", type=written, metavar="FILE", help="write the table and what each back end said")
    parser.set_defaults(run=run)


def _ordinals(text: str) -> tuple[int, ...]:
    return tuple(map(ordinal, text.split(",")))


def survey(devices: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    """Opens every back end, which proves it; a record for each.

    Args:
        devices: CUDA ordinals, the first one holds the pages.

    Returns:
        In the order of ``"auto"``, ``backend``, ``usable`` and, where it is, what `about` reports;
        else ``reason``.
    """
    records = []
    for name in _native.backend_names():
        try:
            with Context(name, devices=devices) as context:
                records.append({"usable": True, **about(context.info)})
        except VMemError as error:
            reason = f"{error.errno_name}: {error}"
            records.append({"backend": name, "usable": False, "reason": reason})
    return records


def _rows(backends: list[Probed]) -> list[dict[str, Any]]:
    """The table: for each feature, by back end, what is missing."""
    return [
        {
            "key": one.key,
            "name": one.name,
            "source": one.source,
            "calls": one.calls,
            "needs": one.needs(),
            "lacks": {info.backend: one.lacks(info) + one.lacks_packages() for info in backends},
        }
        for one in FEATURES
    ]


def _text(rows: list[dict[str, Any]], backends: list[Probed]) -> str:
    names = [info.backend for info in backends]
    cells = [("feature", "from", *names)]
    for row in rows:
        answers = (row["lacks"][name] for name in names)
        words = (f"no: {', '.join(lacks)}" if lacks else "yes" for lacks in answers)
        cells.append((row["name"], row["source"], *words))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """0 if any back end is usable."""
    records = survey(args.devices)
    backends = [Probed.of(record) for record in records if record["usable"]]
    rows = _rows(backends)
    print(_text(rows, backends))
    for record in records:
        if not record["usable"]:
            print(f"{record['backend']}: not usable here: {record['reason']}")
    if args.json:
        report = {
            "format": FORMAT,
            "tool": "vmem features",
            "version": _native.version(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": describe(),
            "backends": records,
            "features": rows,
        }
        write_text(args.json, json.dumps(report, indent=2) + "\n")
        print(f"written: {args.json}")
    return 0 if backends else 1
