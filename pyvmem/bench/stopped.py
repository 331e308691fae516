# SPDX-License-Identifier: MIT
"""A benchmark that Ctrl-C stops: the file that it has written says that it is not whole."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyvmem.bench.record import mark_interrupted

__all__ = ["stoppable"]


def stoppable(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """The benchmark `run`, which has ``--out``, with a mark in its file if it is interrupted."""

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
