# SPDX-License-Identifier: MIT
"""The tutorial's examples, run as a user would run them, without PYTHONPATH."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_example(models: Callable[[str], str], ledger: Path) -> None:
    settings = {
        "VMEM_VLLM": "1",
        "VMEM_NAME": "example",
        "VMEM_LEDGER": str(ledger),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_generate.py"), models("llama"), "t7 t8 t9"],
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "t7 t8 t9 -> " in done.stdout
    assert "host: example: " in done.stdout, "without the pool it exits with an error"


@pytest.mark.long
def test_engines_that_share(models: Callable[[str], str]) -> None:
    """Runs the example of `make run-vllm`, which fails if no engine exceeds half the memory."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [models("llama"), "--capacity", "2M", "--requests", "8", "--turns", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_share.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left answers 8 requests" in done.stdout
    assert "right: " in done.stdout
    assert "a fixed split would have given each 1.0M" in done.stdout
    tables = done.stdout.split("engine ")[1:]
    assert all(map(operator.ne, tables, tables[1:])), "a table is printed when it has changed"
