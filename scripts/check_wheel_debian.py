#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the wheel in new Debian systems that have neither a compiler nor CUDA.

In each system, pip installs the same wheel into an environment of the system's Python. The wheel's
requirements for that Python are downloaded beforehand. The exit status is 77 if this machine cannot
create a Debian system.
"""

from __future__ import annotations

import sys
from pathlib import Path

from debian_system import CANNOT, DebianSystem, conduct, copy_in, in_system, system_mode
from dist import PYTHON, build, epoch, run
from vmem_header import ROOT

__all__ = ["PYTHONS", "wheel_system"]

# The Python version of each Debian release.
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
CHECKS = (ROOT / "packaging" / "check_wheel.sh", ROOT / "scripts" / "check_wheel.py")


def fetch(wheel: Path, python: str, folder: Path) -> None:
    """Puts the wheel and its requirements for a Python version into a directory."""
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux2014")]
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    options += [f"--python-version={python}", *platforms, f"--platform={wheel.stem.split('-')[-1]}"]
    run(PYTHON, "-m", "pip", "download", *options, "--dest", folder, wheel)


def wheel_system(suite: str, wheels: Path) -> DebianSystem:
    """Returns a system of a Debian release that tests the wheels in a directory."""
    return DebianSystem(
        suite=suite,
        include=("python3", "python3-venv"),
        hooks=(
            copy_in(wheels, *CHECKS),
            in_system(f"sh /{CHECKS[0].name} {PYTHONS[suite]}"),
        ),
    )


def check(folder: Path) -> int:
    """Builds the wheel and tests it in each system; returns the exit status."""
    mode = system_mode()
    if mode is None:
        print("neither root nor a user namespace: cannot make a Debian system", flush=True)
        return CANNOT
    (folder / "dist").mkdir()
    (wheel,) = [path for path in build(folder / "dist", epoch()) if "-abi3-" in path.name]
    for suite, python in PYTHONS.items():
        wheels = folder / suite / "wheels"
        fetch(wheel, python, wheels)
        print(f"Debian {suite}, {wheel.name}", flush=True)
        wheel_system(suite, wheels).make(mode)
    return 0


if __name__ == "__main__":
    sys.exit(conduct("check_wheel_debian", __doc__, check))
