#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/vllm: vLLM for the CPU, on top of build/venv. Exit status 77: it cannot be had here.

Up to 1 GB. With the argument ``newest`` also build/vllm-newest, on top of both: the newest version
that is known. Packages are installed without their dependencies: requirements/vllm.txt names what
is imported, a third of what vLLM asks for. Libraries of the system that vLLM's extension is linked
with come from Debian's packages, if they are missing.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from environment import install_debian_packages
from overlay import BASE, BUILD, ROOT, SKIP, make

__all__ = ["missing_libraries", "pinned"]

# What vLLM's own extension is linked with beside libc, and Debian's package of it. Without it vLLM
# warns, goes on, and fails much later for an operation that it does not have.
LIBRARIES = {"libnuma.so.1": "libnuma1"}


def missing_libraries() -> list[str]:
    """The Debian packages of the libraries that cannot be loaded here."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def pinned(name: str, *below: Path) -> int:
    """`make` with what requirements/NAME.txt names, and nothing else."""
    pins = ROOT / "scripts" / "requirements" / f"{name}.txt"
    return make(name, pins.read_text(encoding="utf-8"), ["--no-deps", "-r", pins], *below)


def main() -> int:
    """Makes one environment or both."""
    if packages := missing_libraries():
        try:
            install_debian_packages(packages)
        except SystemExit as error:
            print(error, flush=True)
            return SKIP
    status = pinned("vllm", BASE)
    if status == 0 and sys.argv[1:] == ["newest"]:
        status = pinned("vllm-newest", BUILD / "vllm", BASE)
    return status


if __name__ == "__main__":
    sys.exit(main())
