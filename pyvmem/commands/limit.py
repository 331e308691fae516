# SPDX-License-Identifier: MIT
"""``vmem limit``: changes the limit of a running engine."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any

from pyvmem.commands.top import add_ledger, folder_of
from pyvmem.ledger.accounts import Ledger, devices
from pyvmem.ledger.orders import order_on_all
from pyvmem.plumbing.units import format_bytes, parse_bytes

__all__ = ["add_parser", "run"]


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser = sub.add_parser(
        "limit",
        help="set the memory limit of a running engine",
        description="Limits the device memory that a running engine may use. An engine above its "
        "limit frees idle memory immediately, and the rest as requests finish. Exit status 1: no "
        "such engine runs, or the limit was rejected.",
    )
    parser.add_argument("engine", help="the engine's name, or the process id that `vmem top` shows")
    parser.add_argument("size", type=_size, help="bytes, for example 20G")
    text = "bytes that other engines leave to it even if it does not use them"
    parser.add_argument("--floor", type=_size, metavar="SIZE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_ledger(parser)
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    """Sets the engine's limit on each of its devices; returns 1 if there is no such engine."""
    folder = folder_of(args)
    there: dict[str, Ledger] = {}
    with ExitStack() as stack:
        for device in devices(folder):
            ledger = stack.enter_context(Ledger(device, folder=folder, create=False))
            if ledger.find(args.engine) is not None:
                there[device] = ledger
        changed = order_on_all(there, args.engine, limit=args.size, floor=args.floor)
    if args.json and there:
        document = {
            device: {
                "engine": one.name,
                "pid": one.pid,
                "mapped": one.used,
                "limit": args.size,
                "limit_before": one.limit,
                "floor": one.floor if args.floor is None else args.floor,
            }
            for device, one in changed.items()
        }
        print(json.dumps(document, indent=2))
        return 0
    for device, one in changed.items():
        more = max(0, one.used - args.size)
        note = f"; {format_bytes(more)} above it will be freed as requests finish" if more else ""
        sizes = f"{format_bytes(one.limit)} -> {format_bytes(args.size)}"
        print(f"{device}: {one.name}: {sizes}{note}")
    if not there:
        text = f"no engine {args.engine!r} in {folder}; `vmem top --once` lists them"
        print(f"vmem limit: {text}", file=sys.stderr)
        return 1
    return 0
