# SPDX-License-Identifier: MIT
"""Starts the two processes of parallel_ranks.py, on the CPU or on two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("parallel_ranks.py")


def run_ranks(backend: str, folder: Path) -> dict[str, Any]:
    """What every scenario returned, the same on both ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / "store"), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, done, strict=True):
        assert rank.returncode == 0, errors
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in done)
    assert first == second
    return dict(first)
