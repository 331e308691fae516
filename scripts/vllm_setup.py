#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/vllm: vLLM for the CPU, on top of build/venv. Exit status 77: it cannot be had here.

With the argument ``newest`` also build/vllm-newest, on top of both: the newest version that is
known. Environments of their own, because vLLM asks for versions of its own; what they share with
build/venv (torch alone is most of 1 GB) they take from there. Libraries of the system that vLLM's
extension is linked with come from Debian's packages, if they are missing.
"""

from __future__ import annotations

import ctypes
import sys

from environment import BUILD, VENV
from extra_environment import CANNOT, make
from system_packages import install_debian_packages

__all__ = ["missing_libraries"]

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


def main() -> int:
    """Makes one environment or both."""
    if packages := missing_libraries():
        try:
            install_debian_packages(packages)
        except SystemExit as error:
            print(error, flush=True)
            return CANNOT
    vllm, newest = BUILD / "vllm", BUILD / "vllm-newest"
    status = make(vllm, ["vllm"], [VENV], size="1 GB")
    if status == 0 and sys.argv[1:] == ["newest"]:
        status = make(newest, ["vllm-newest"], [vllm, VENV], size="520 MB")
    return status


if __name__ == "__main__":
    sys.exit(main())
