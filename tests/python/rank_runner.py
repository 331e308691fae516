# SPDX-License-Identifier: MIT
"""Starts the processes of parallel_ranks.py, on the CPU or on a GPU each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("parallel_ranks.py")


def run_ranks(
    backend: str, folder: Path, size: int = 2, *calls: int, seconds: float = 240
) -> dict[str, Any]:
    """What every scenario, or that of `calls`, returned: the same on all ranks."""
    words = [str(size), str(folder / "store"), backend, *map(str, calls)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        done = [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, done, strict=True):
        assert rank.returncode == 0, errors
    first, *others = (json.loads(out.splitlines()[-1]) for out, _ in done)
    for other in others:
        assert other == first
    return dict(first)
