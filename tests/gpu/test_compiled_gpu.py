# SPDX-License-Identifier: MIT
"""Compiled models that use caches on a GPU, with inductor and its CUDA graphs.

Runs the cases of tests/python/compiled_cases.py, which use a GPU if there is one. Needs a
CUDA device, torch with Triton, transformers, and a back end (cuda, stock) that passes its probe.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")
from gpu_helpers import needs_gpu

pytestmark = [*needs_gpu(), pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).resolve().parent.parent / "python" / "compiled_cases.py"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "reduce-overhead"])
@pytest.mark.parametrize("case", ["small", "large", "states", "attention", "writer", "example"])
def test_compiled(backend: str, case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), backend, "auto", case],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, [case]), done.stderr[-3000:]
