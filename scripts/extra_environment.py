# SPDX-License-Identifier: MIT
"""Environments beside build/venv, for what asks for versions, or for a Python, of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environment import BENCHMARKS, REQUIREMENTS, ROOT, VENV, WITHOUT_DEPENDENCIES, packages

__all__ = ["CANNOT", "make"]

CANNOT = 77  # the packages cannot be had here


def ask(python: str | Path, program: str) -> str:
    """What a Python prints."""
    return subprocess.check_output([python, "-c", program], text=True).strip()


def make(
    venv: Path,
    groups: Sequence[str],
    below: Sequence[Path] = (),
    python: str = sys.executable,
    more: Sequence[str] = (),
    *,
    size: str,
) -> int:
    """Brings an environment up to date; 0, or an exit status (`CANNOT`).

    Args:
        groups: files of scripts/requirements.
        below: environments that it sees the packages of, the nearest first.
        more: requirements, with what they ask for.
        size: of what is installed, which a person is told before.
    """
    stamp = venv / "installed"
    pins = [REQUIREMENTS / f"{group}.txt" for group in groups]
    version = ask(python, "import sys; print(sys.version)")
    read = [one.read_text(encoding="utf-8") for one in pins]
    own = [str(ROOT), str(BENCHMARKS / "src")]
    wanted = "\n".join([version, *own, *read, *more])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"setup: making {venv.relative_to(ROOT)} ({size})", flush=True)
    command = [python, "-m", "venv", "--without-pip", "--clear", str(venv)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        return 1
    # pyvmem too: build/venv has it as a link to this tree, which a path file does not follow.
    paths = [*map(packages, below), *own]
    (packages(venv) / "base.pth").write_text("".join(f"{one}\n" for one in paths), "utf-8")
    pip = [VENV / "bin" / "python", "-m", "pip", "--python", venv / "bin" / "python", "install"]
    pip += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    steps = [
        [*(["--no-deps"] if group in WITHOUT_DEPENDENCIES else []), "-r", str(file)]
        for group, file in zip(groups, pins, strict=True)
    ]
    for step in [*steps, [*more]] if more else steps:
        done = subprocess.run(
            [*map(str, pip), *step],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stdout.strip().splitlines()
            print("\n".join(lines[-5:]), flush=True)
            return CANNOT
    stamp.write_text(wanted, encoding="utf-8")
    return 0
