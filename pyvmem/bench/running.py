# SPDX-License-Identifier: MIT
"""Runs a benchmark's parts and computes the command's exit status."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyvmem.bench import report
from pyvmem.bench.merge import MergeError
from pyvmem.bench.record import Part, Record
from pyvmem.commands.probe import probe

__all__ = ["NOT_MEASURED", "backends", "conducted", "ended", "now", "put_together", "said"]

NOT_MEASURED = 3
"""Exit status of a benchmark that measured nothing."""


def now() -> str:
    """Returns the current time in the format that records use."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def backends(device: int) -> list[dict[str, Any]]:
    """Probes all back ends; returns the results."""
    names = ("usable", "reason", "driver", "device_name")
    return [
        {"name": result.backend, **{name: getattr(result, name) for name in names}}
        for result in probe(device)
    ]


@contextmanager
def conducted(part: Part) -> Iterator[None]:
    """Records how a part ended and how long it took; an error fails only the part, not the run.

    While it runs, the part is marked partial in case the process is killed.
    """
    part.started, began = now(), time.monotonic()
    part.status, part.why = "partial", "it was interrupted"
    try:
        yield
        part.why = ""
        part.status = "not run" if not part.rows else "partial" if part.missing else "done"
        if not part.rows and part.missing:
            part.why = part.missing[0]["why"]
    except Exception as error:
        part.status, part.why = "failed", f"{type(error).__name__}: {error}"
        part.notes += traceback.format_exc().strip().splitlines()[-6:]
    part.seconds = time.monotonic() - began


def said(record: Record, args: argparse.Namespace, text: Callable[[], str] | None = None) -> int:
    """Prints a record as JSON (``--json``) or as text; returns the exit status from `ended`."""
    if args.json:
        print(json.dumps(record.document(raw=False), indent=1))
    else:
        print(report.document(record) if text is None else text())
    return ended(record)


def ended(record: Record) -> int:
    """Computes the exit status of a benchmark.

    Returns:
        1 if a part failed, 3 if nothing was measured (the reason goes to stderr), otherwise 0.
    """
    parts = [part for name, part in record.parts.items() if name != "noop"]
    if any(part.status == "failed" for part in record.parts.values()):
        return 1
    if not parts or any(part.rows for part in parts):
        return 0
    why = "; ".join(dict.fromkeys(part.why for part in parts))
    print(f"vmem bench: nothing was measured: {why}", file=sys.stderr)
    return NOT_MEASURED


def put_together(joining: Callable[[Sequence[Path]], Record], args: argparse.Namespace) -> int:
    """Runs ``--merge``: merges results and prints them. Returns 0, or 2 if they do not match."""
    try:
        record = joining(args.merge)
    except MergeError as error:
        print(f"vmem bench: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        record.write(args.out)
    print(
        json.dumps(record.document(raw=False), indent=1) if args.json else report.document(record)
    )
    return 0
