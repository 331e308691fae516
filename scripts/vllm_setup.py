#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/vllm: vLLM for the CPU, on top of build/venv. Exit status 77: it cannot be had here.

With the argument ``newest`` also build/vllm-newest, on top of both: the newest version that is
known. Environments of their own, because vLLM asks for versions of its own; what they share with
build/venv (torch alone is most of 1 GB) they take from there. Packages are installed without their
dependencies: requirements/vllm.txt names what is imported, a third of what vLLM asks for. Libraries
of the system that vLLM's extension is linked with come from Debian's packages, if they are missing.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import sysconfig
from pathlib import Path

from environment import install_debian_packages

__all__ = ["make", "missing_libraries"]

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BASE = BUILD / "venv"
SKIP = 77
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


def packages(environment: Path) -> Path:
    """Where an environment has its packages."""
    where = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", vars=where))


def make(name: str, *below: Path) -> int:
    """Brings build/NAME up to date, on top of other environments, the nearest first."""
    venv, pins = BUILD / name, ROOT / "scripts" / "requirements" / f"{name}.txt"
    stamp = venv / "installed"
    wanted = f"{sys.version}\n{ROOT}\n{pins.read_text(encoding='utf-8')}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"setup: making build/{name} (up to 1 GB, mostly vLLM)", flush=True)
    python = venv / "bin" / "python"
    if subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", venv], check=False
    ).returncode:
        return 1
    # pyvmem too: build/venv has it as a link to this tree, which a path file does not follow.
    paths = [*map(packages, below), ROOT]
    (packages(venv) / "base.pth").write_text("".join(f"{one}\n" for one in paths), "utf-8")
    pip = [BASE / "bin" / "python", "-m", "pip", "--python", python, "install", "--no-deps"]
    pip += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    done = subprocess.run(
        [*map(str, pip), "-r", str(pins)],
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


def main() -> int:
    """Makes one environment or both."""
    if packages := missing_libraries():
        try:
            install_debian_packages(packages)
        except SystemExit as error:
            print(error, flush=True)
            return SKIP
    status = make("vllm", BASE)
    if status == 0 and sys.argv[1:] == ["newest"]:
        status = make("vllm-newest", BUILD / "vllm", BASE)
    return status


if __name__ == "__main__":
    sys.exit(main())
