# SPDX-License-Identifier: MIT
"""Adds the output options (report, picture) to a benchmark, and makes it handle Ctrl-C.

After Ctrl-C, the result file says that the run is incomplete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyvmem.bench.record import mark_interrupted
from pyvmem.commands.page import picture, write_report
from pyvmem.plumbing.paths import picture_file, replaced

__all__ = ["add_options", "document_of", "stoppable", "with_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--report`` and ``--plot`` to a benchmark that has ``--out``."""
    add = parser.add_argument
    add(
        "--report",
        type=replaced,
        metavar="FILE",
        help="write an HTML page, and the JSON next to it",
    )
    add("--plot", type=picture_file, metavar="FILE", help="draw the times (.svg, .png, .pdf)")
    run: Callable[[argparse.Namespace], int] = stoppable(parser.get_default("run"))
    parser.set_defaults(run=lambda args: with_options(args, run))


def document_of(out: Path) -> dict[str, Any]:
    """Reads the document that a run wrote, with its samples if they were kept."""
    raw = out.parent / "raw" / out.name
    document: dict[str, Any] = json.loads((raw if raw.exists() else out).read_text("utf-8"))
    return document


def with_options(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Runs a benchmark, then draws and reports its result; returns its exit status."""
    wanted = args.report or args.plot
    if wanted is None:
        return run(args)
    if args.plot is not None:
        import matplotlib  # noqa: F401  # fail before the run if pictures cannot be drawn
    if args.out is None:
        args.out = wanted.with_suffix(".json")
    if args.out in (args.report, args.plot):
        print(
            f"vmem bench: {args.out}: the JSON is written there; name another file", file=sys.stderr
        )
        return 2
    before = args.out.stat().st_mtime_ns if args.out.exists() else 0
    status = run(args)
    if not args.out.exists() or args.out.stat().st_mtime_ns == before:
        return status  # nothing was measured: the user passed --list, or there is no back end
    document = document_of(args.out)
    if args.report is not None:
        write_report(args.report, document)
    if args.plot is not None:
        drawn = picture(document["parts"].values(), args.plot.suffix[1:].lower())
        if drawn is None:
            print("vmem bench: nothing was measured: nothing to draw", file=sys.stderr)
        else:
            args.plot.write_bytes(drawn)
            print(f"picture: {args.plot}", file=sys.stderr)
    return status


def stoppable(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Wraps a benchmark with ``--out`` so that an interrupted run marks its file."""

    def marked(args: argparse.Namespace) -> int:
        out: Path | None = args.out
        before = _changed(out)
        try:
            return run(args)
        except KeyboardInterrupt:
            out = args.out
            if out is None:
                raise
            what = f"nothing was written to {out}"
            if _changed(out) != before:
                mark_interrupted(out)
                parts: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["parts"]
                what = f"{out} is partial, with {', '.join(parts) or 'no part'}"
            print(f"vmem bench: interrupted: {what}", file=sys.stderr)
            return 130

    return marked


def _changed(out: Path | None) -> int:
    return out.stat().st_mtime_ns if out is not None and out.exists() else 0
