# SPDX-License-Identifier: MIT
"""``vmem features``: shows which features this machine's back ends support."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from pyvmem import _native
from pyvmem.commands.arguments import ordinal
from pyvmem.commands.machine import describe
from pyvmem.commands.tables import table
from pyvmem.errors import VMemError
from pyvmem.features.record import Probed, about
from pyvmem.features.table import FEATURES
from pyvmem.memory.context import Context
from pyvmem.plumbing.paths import write_text, written

__all__ = ["FORMAT", "add_parser", "run", "survey"]

FORMAT = 1
"""Version of the JSON format."""


def add_parser(sub: Any) -> None:
    """Adds ``vmem features``."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "features",
        help="list the features that this machine's back ends support",
        description=__doc__,
    )
    add = parser.add_argument
    text = "CUDA ordinals, separated by commas (default: 0)"
    add("--devices", type=_ordinals, default=(0,), metavar="N,...", help=text)
    add("--json", action="store_true", help="print table and back ends as JSON")
    add("--out", type=written, metavar="FILE", help="write the JSON to this file")
    parser.set_defaults(run=run)


def _ordinals(text: str) -> tuple[int, ...]:
    return tuple(map(ordinal, text.split(",")))


def survey(devices: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    """Opens a context on every back end, and returns a record for each.

    Args:
        devices: CUDA ordinals; pages are allocated on the first device.

    Returns:
        Records in the order in which ``"auto"`` tries back ends, with ``backend``, ``usable``, and
        the result of `about` if it is usable, otherwise ``reason``.
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
    """Returns a record per feature, listing the requirements that each back end does not meet."""
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
    cells = []
    for row in rows:
        answers = (row["lacks"][name] for name in names)
        words = (f"no: {', '.join(lacks)}" if lacks else "yes" for lacks in answers)
        cells.append((row["name"], row["source"], *words))
    return table(("feature", "from", *names), cells, 2 + len(names), rule=False)


def run(args: argparse.Namespace) -> int:
    """Prints the table; returns 0 if any back end is usable."""
    records = survey(args.devices)
    backends = [Probed.of(record) for record in records if record["usable"]]
    rows = _rows(backends)
    report = {
        "format": FORMAT,
        "tool": "vmem features",
        "version": _native.version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe(),
        "backends": records,
        "features": rows,
    }
    text = json.dumps(report, indent=2)
    if args.out:
        write_text(args.out, text + "\n")
    if args.json:
        print(text)
        return 0 if backends else 1
    print(_text(rows, backends))
    for record in records:
        if not record["usable"]:
            print(f"{record['backend']}: not usable here: {record['reason']}")
    if args.out:
        print(f"written: {args.out}")
    return 0 if backends else 1
