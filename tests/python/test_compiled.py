# SPDX-License-Identifier: MIT
"""With torch.compile, every integration produces the uncompiled model's outputs.

Compiled code that copies a tensor with holes crashes the process, so each group of cases runs in
its own process (`compiled_cases.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

pytestmark = pytest.mark.needs_tensors

PLUGS = ["small", "large", "window", "latent", "states", "recurrent"]
OPERATORS = ["attention", "writer"]
ENGINES = ["engine", "example", "continuous"]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")


def run(compiler: str, dynamic: str, cases: list[str]) -> None:
    script = Path(__file__).with_name("compiled_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), compiler, dynamic, *cases],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, cases), done.stderr[-3000:]


def test_nothing_is_copied_by_functionalisation() -> None:
    run("aot_eager", "auto", ["large", *OPERATORS, "engine"])


@needs_compiler
def test_operators_with_inductor() -> None:
    run("inductor", "auto", ["attention"])


@pytest.mark.long
@needs_compiler
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dynamic", ["auto", "yes", "no"])
@pytest.mark.parametrize(
    "cases", [PLUGS, OPERATORS, ENGINES], ids=["plugs", "operators", "engines"]
)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_integration(compiler: str, dynamic: str, cases: list[str]) -> None:
    run(compiler, dynamic, cases)
