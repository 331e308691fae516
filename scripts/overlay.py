# SPDX-License-Identifier: MIT
"""Environments on top of build/venv, for packages that ask for versions of their own.

What they share with build/venv (torch alone is most of 1 GB) they take from there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["BASE", "BUILD", "ROOT", "SKIP", "make"]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BASE = BUILD / "venv"
SKIP = 77  # as an exit status: it cannot be had here


def _packages(environment: Path) -> Path:
    """Where an environment has its packages."""
    where = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", vars=where))


def make(name: str, wanted: str, install: Sequence[str | Path], *below: Path) -> int:
    """Brings build/NAME up to date.

    Args:
        name: of the environment.
        wanted: what decides what is installed; the same text: there is nothing to do.
        install: arguments of ``pip install``.
        below: the environments that it is on top of, the nearest first.

    Returns:
        An exit status: 0, 1, or `SKIP`.
    """
    venv = BUILD / name
    stamp = venv / "installed"
    wanted = f"{sys.version}\n{ROOT}\n{wanted}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"setup: making build/{name}", flush=True)
    python = venv / "bin" / "python"
    if subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", venv], check=False
    ).returncode:
        return 1
    # pyvmem too: build/venv has it as a link to this tree, which a path file does not follow.
    paths = [*map(_packages, below), ROOT]
    (_packages(venv) / "base.pth").write_text("".join(f"{one}\n" for one in paths), "utf-8")
    pip = [BASE / "bin" / "python", "-m", "pip", "--python", python, "install"]
    pip += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    done = subprocess.run(
        [*map(str, pip), *map(str, install)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        print("\n".join(lines[-5:]), flush=True)
        return SKIP
    stamp.write_text(wanted, encoding="utf-8")
    return 0
