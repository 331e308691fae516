# SPDX-License-Identifier: MIT
"""Creates extra environments for packages that need other versions or another Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environment import BENCHMARKS, REQUIREMENTS, ROOT, VENV, WITHOUT_DEPENDENCIES, packages

__all__ = ["CANNOT", "make"]

CANNOT = 77  # exit status if this machine cannot get the packages


def ask(python: str | Path, program: str) -> str:
    """Runs a program with a Python interpreter and returns its stripped output."""
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
    """Creates or updates an environment; returns an exit status: 0, 1 or `CANNOT`.

    Args:
        groups: files in scripts/requirements.
        below: environments whose packages the new one can import, nearest first.
        more: requirements that are installed with their dependencies.
        size: the download size, which is printed before the installation.
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
    # pyvmem must also be added: build/venv only links to this tree, and a .pth file does not follow
    # that link.
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
