# SPDX-License-Identifier: MIT
"""Description: the tutorial's example, run as a user does, in an environment as it was made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    assert "host: example: " in done.stdout, "without the pool it ends with an error"
