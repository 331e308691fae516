# SPDX-License-Identifier: MIT
"""``vmem top``: shows the engines that share this machine's devices, live."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyvmem.commands.machine import meminfo
from pyvmem.commands.nvml import Card, Cards
from pyvmem.commands.terminal import Live, columns, has_colour
from pyvmem.commands.top_table import Device, Reading, drawn
from pyvmem.ledger.accounts import (
    Ledger,
    LedgerError,
    default_folder,
    devices,
    is_off,
    named_folder,
)
from pyvmem.plumbing.paths import existing_folder

__all__ = ["add_ledger", "add_parser", "folder_of", "run"]

_SORTS = (
    *("engine", "pid", "mapped", "in_use", "cached", "host", "host_cached"),
    *("limit", "floor", "short", "hits"),
)
MOST_SECONDS = 3600.0


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser = sub.add_parser(
        "top",
        help="show the engines of this machine and their memory, live",
        description="Shows the memory and the limit of each of this user's engines, live.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one table and exit")
    form.add_argument("--json", action="store_true", help="print one reading as JSON and exit")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="between readings (1)"
    )
    parser.add_argument(
        "--sort",
        choices=_SORTS,
        default="engine",
        metavar="COLUMN",
        help=f"the order: {', '.join(_SORTS)} (engine); the largest first",
    )
    add_ledger(parser)
    parser.set_defaults(run=run)


def add_ledger(parser: argparse.ArgumentParser) -> None:
    """Adds ``--ledger``."""
    parser.add_argument(
        "--ledger", type=existing_folder, help="folder of the ledgers (VMEM_LEDGER)"
    )


def folder_of(args: argparse.Namespace) -> Path:
    """Returns the folder that ``--ledger`` names, or the default one.

    Raises:
        LedgerError: ``VMEM_LEDGER`` names a folder that does not exist.
    """
    if args.ledger is not None:
        asked: Path = args.ledger
        return asked
    named = named_folder()
    if named is not None and not named.is_dir():
        raise LedgerError(f"VMEM_LEDGER={named}: no such folder", errno=errno.ENOENT)
    return default_folder()


def seconds(text: str) -> float:
    """Parses an interval in seconds from the command line."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= MOST_SECONDS:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0, at most an hour")


def read(folder: Path, sort: str = "engine") -> Reading:
    """Reads the engines of every device that has a ledger."""
    found: Reading = {}
    with Cards.opened() as cards:
        for device in devices(folder):
            with Ledger(device, folder=folder, create=False) as ledger:
                engines, capacity = [one.record() for one in ledger.engines()], ledger.capacity
            engines.sort(key=lambda one: one["engine"])
            if sort != "engine":
                engines.sort(key=lambda one: one[sort] or 0, reverse=sort != "pid")
            card = _host() if device == "host" else cards.card(device)
            name, memory, free = ("", None, None)
            if card is not None:
                name, memory, free = card.name, card.memory, card.free
            if capacity:
                left = max(0, capacity - sum(one["mapped"] for one in engines))
                memory, free = capacity, left if free is None else min(free, left)
            found[device] = Device(name, memory, free, engines)
    return found


def _host() -> Card | None:
    with contextlib.suppress(OSError, KeyError):  # /proc may not be mounted
        memory = meminfo()
        return Card("", memory["MemTotal"], memory["MemAvailable"])
    return None


def with_rates(now: Reading, before: Reading, passed: float) -> Reading:
    """Adds `maps_s` and `waits_s`, the rates since the previous reading."""
    old = {
        (device, one["identity"]): one for device, some in before.items() for one in some.engines
    }
    for device, some in now.items():
        for one in some.engines:
            last = old.get((device, one["identity"]))
            if last is not None and passed > 0:
                for key in ("maps", "waits"):
                    one[f"{key}_s"] = max(0, one[key] - last[key]) / passed
    return now


def _off() -> str:
    return "; VMEM_LEDGER=off: an engine with that setting joins no ledger" if is_off() else ""


def _text(reading: Reading, folder: Path, width: float, colour: bool) -> str:
    return drawn(reading, width, colour) or f"no engine in {folder}{_off()}"


def run(args: argparse.Namespace) -> int:
    """Shows the engines until interrupted, or once; returns the exit status."""
    folder, colour = folder_of(args), has_colour()
    now = read(folder, args.sort)
    if args.json:
        document = {device: {**asdict(some), "total": some.total()} for device, some in now.items()}
        print(json.dumps(document, indent=2))
        return 0
    if args.once:
        print(_text(now, folder, columns(), colour))
        return 0
    when = time.monotonic()
    with Live() as live:
        while True:
            live.show(_text(now, folder, columns(), colour))
            time.sleep(args.interval)
            before, now, moment = now, read(folder, args.sort), time.monotonic()
            with_rates(now, before, moment - when)
            when = moment
