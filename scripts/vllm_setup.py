#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/vllm: vLLM for the CPU, on top of build/venv. Exit status 77: it cannot be had here.

With the argument ``newest`` also build/vllm-newest, on top of both: the newest version that is
known. Environments of their own, because vLLM asks for versions of its own; what they share with
build/venv (torch alone is most of 1 GB) they take from there. Packages are installed without their
dependencies: requirements/vllm.txt names what is imported, a third of what vLLM asks for.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BASE = BUILD / "venv"
SKIP = 77


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
    status = make("vllm", BASE)
    if status == 0 and sys.argv[1:] == ["newest"]:
        status = make("vllm-newest", BUILD / "vllm", BASE)
    return status


if __name__ == "__main__":
    sys.exit(main())
