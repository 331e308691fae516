# SPDX-License-Identifier: MIT
"""Starts the processes of parallel_ranks.py, on the CPU or with one GPU each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("parallel_ranks.py")


def run_ranks(
    backend: str, folder: Path, size: int = 2, *calls: int, seconds: float = 240
) -> dict[str, Any]:
    """Runs all scenarios, or random calls if `calls` gives their number and optionally a seed.

    Returns:
        The results, which must be the same on all ranks.
    """
    words = [str(size), str(folder / "store"), backend, *map(str, calls)]
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            out = stack.enter_context((folder / f"{rank}.out").open("w"))
            errors = stack.enter_context((folder / f"{rank}.err").open("w"))
            command = [sys.executable, str(WORKER), str(rank), *words]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=errors))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        end = time.monotonic() + seconds
        running = True
        while running:
            # Once a rank fails, the others wait for it in vain; their own errors are only a
            # consequence.
            running = any(one.poll() is None for one in ranks)
            for rank, one in enumerate(ranks):
                assert not one.poll(), (folder / f"{rank}.err").read_text()
            assert time.monotonic() < end, f"still running after {seconds} s"
            time.sleep(0.05)
    found = [
        json.loads((folder / f"{rank}.out").read_text().splitlines()[-1]) for rank in range(size)
    ]
    for other in found[1:]:
        assert other == found[0]
    return dict(found[0])
