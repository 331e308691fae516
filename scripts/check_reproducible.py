#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds a tree again from scratch in another directory, and compares the modules byte by byte.

The first build is the usual build, which reuses conftest results and objects of earlier builds. The
second build reuses nothing, so the comparison also shows that reuse does not change the modules.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from driver_source import driver_source
from kernel_common import ROOT, KernelBuildError, say

__all__ = ["compare"]

MODULES = ("nvidia.ko", "nvidia-uvm.ko")


def build(words: list[str], folder: Path | None, source: Path) -> Path:
    """Runs kernel_tree.py, in `folder` if given; returns the directory with the modules."""
    env = {**os.environ, "NV_SRC": str(source)} if folder else dict(os.environ)
    if folder:
        env["VMEM_KERNEL_BUILD"] = str(folder)
    command = [sys.executable, str(ROOT / "scripts" / "kernel_tree.py"), *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"exit status {done.returncode}: {' '.join(command)}")
    return Path(done.stdout.strip())


def compare(one: Path, two: Path) -> list[str]:
    """Reports the modules that differ between two directories."""
    different = []
    for name in MODULES:
        digests = [
            hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (one, two)
        ]
        say(f"{name}: {digests[0][:16]} {digests[1][:16]}")
        if digests[0] != digests[1]:
            different.append(f"{name} is not the same in {one} and {two}")
    return different


def main() -> int:
    """Compares two builds that kernel_tree.py makes with the same arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default="535.261.03")
    parser.add_argument("--type", choices=("release", "debug"), default="release")
    options = parser.parse_args()
    words = [options.version, "--type", options.type]
    try:
        source = driver_source(options.version)
        with tempfile.TemporaryDirectory(prefix="vmem-a-folder-of-another-length-") as name:
            different = compare(build(words, None, source), build(words, Path(name), source))
    except KernelBuildError as error:
        say(str(error))
        return 1
    print(*different, sep="\n", end="\n" if different else "")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
