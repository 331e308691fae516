# SPDX-License-Identifier: MIT
"""Starts the processes of parallel_ranks.py, on the CPU or on a GPU each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("parallel_ranks.py")
_ENDS = ("out", "err")


def run_ranks(
    backend: str, folder: Path, size: int = 2, *calls: int, seconds: float = 240
) -> dict[str, Any]:
    """What every scenario, or that of `calls`, returned: the same on all ranks."""
    words = [str(size), str(folder / "store"), backend, *map(str, calls)]
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            said = [stack.enter_context((folder / f"{rank}.{end}").open("w+")) for end in _ENDS]
            command = [sys.executable, str(WORKER), str(rank), *words]
            process = subprocess.Popen(command, stdout=said[0], stderr=said[1])
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append((process, *said))
        end = time.monotonic() + seconds
        while any(process.poll() is None for process, *_ in ranks):
            ended = [rank for rank in ranks if rank[0].poll()]
            # The others wait for one that failed. What they say then is a consequence.
            for _, _, errors in ended[:1]:
                errors.seek(0)
                raise AssertionError(errors.read())
            assert time.monotonic() < end, f"no end after {seconds} s"
            time.sleep(0.05)
        found = []
        for process, out, errors in ranks:
            for one in (out, errors):
                one.seek(0)
            assert process.returncode == 0, errors.read()
            found.append(json.loads(out.read().splitlines()[-1]))
    for other in found[1:]:
        assert other == found[0]
    return dict(found[0])
