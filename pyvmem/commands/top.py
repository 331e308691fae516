# SPDX-License-Identifier: MIT
"""``vmem top``: the engines of this machine that share devices, live."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyvmem.ledger.accounts import (
    EngineInfo,
    LedgerError,
    default_folder,
    engines_in,
    is_off,
    named_folder,
)
from pyvmem.plumbing.paths import existing_folder
from pyvmem.plumbing.units import format_bytes

__all__ = ["add_ledger", "add_parser", "folder_of", "run"]

_HEADINGS = (
    "device", "engine", "pid", "mapped", "in use", "cached", "limit", "floor", "short", "hits",
    "maps/s", "waits/s",
)  # fmt: skip

# Columns that a narrow terminal leaves out, in this order.
_LEFT_OUT = ("floor", "waits/s", "maps/s", "hits", "device", "cached", "pid", "short", "in use")
MOST_SECONDS = 3600.0

Reading = dict[str, list[EngineInfo]]


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser = sub.add_parser(
        "top",
        help="the engines of this machine and their memory, live",
        description="Shows what each engine of this user holds and may have, until interrupted.",
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="print one reading as JSON and end")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between readings (1)"
    )
    add_ledger(parser)
    parser.set_defaults(run=run)


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ledger``."""
    parser.add_argument(
        "--ledger", type=existing_folder, help="folder of the ledgers (VMEM_LEDGER)"
    )


def folder_of(args: argparse.Namespace) -> Path:
    """The folder of ``--ledger``, or else the default.

    Raises:
        LedgerError: ``VMEM_LEDGER`` names one that is not there.
    """
    if args.ledger is not None:
        asked: Path = args.ledger
        return asked
    named = named_folder()
    if named is not None and not named.is_dir():
        raise LedgerError(f"VMEM_LEDGER={named}: no such folder", errno=errno.ENOENT)
    return default_folder()


def seconds(text: str) -> float:
    """Parses an interval given on the command line."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= MOST_SECONDS:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0, at most an hour")


def rows(now: Reading, before: Reading, passed: float) -> list[tuple[str, ...]]:
    """The table's rows; rates are since the reading before."""
    old = {(device, one.name): one for device, some in before.items() for one in some}
    found = []
    for device, engines in now.items():
        for one in engines:
            last = old.get((device, one.name))
            rates = ["", ""]
            if last is not None and passed > 0:
                changes = (one.maps - last.maps, one.waits - last.waits)
                rates = [f"{max(0, change) / passed:.1f}" for change in changes]
            found.append(
                (
                    device,
                    one.name,
                    str(one.pid),
                    *map(
                        format_bytes,
                        (one.used, one.in_use, one.cached, one.limit, one.floor, one.want),
                    ),
                    f"{one.hits / one.queries:.0%}" if one.queries else "",
                    *rates,
                )
            )
    return found


def plain(table: list[tuple[str, ...]], width: float = math.inf) -> str:
    """The table as text, with as many of its columns as there is room for."""
    lines = [_HEADINGS, *table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    kept = set(range(len(widths)))
    for heading in _LEFT_OUT:
        if sum(widths[i] + 2 for i in kept) - 2 <= width:
            break
        kept.remove(_HEADINGS.index(heading))
    return "\n".join(
        "  ".join(
            line[i].ljust(widths[i]) if i < 2 else line[i].rjust(widths[i]) for i in sorted(kept)
        ).rstrip()
        for line in lines
    )


def _off() -> str:
    return "; VMEM_LEDGER=off: an engine with that setting is in none" if is_off() else ""


def run(args: argparse.Namespace) -> int:
    """Shows them until interrupted, or once."""
    folder = folder_of(args)
    if args.json:
        reading = {device: [asdict(e) for e in some] for device, some in engines_in(folder).items()}
        print(json.dumps(reading, indent=2))
        return 0
    if args.once:
        found = rows(engines_in(folder), {}, 0)
        print(plain(found) if found else f"no engine in {folder}{_off()}")
        return 0
    from rich.live import Live
    from rich.text import Text

    before, when, passed = engines_in(folder), time.monotonic(), 0.0
    now = before
    with Live(auto_refresh=False) as live:
        while True:
            table = plain(rows(now, before, passed), live.console.width)
            live.update(Text(table, no_wrap=True), refresh=True)
            before = now
            time.sleep(args.interval)
            now, moment = engines_in(folder), time.monotonic()
            passed, when = moment - when, moment
