#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/vllm: vLLM for the CPU, on top of build/venv. Exit status 77: it cannot be had here.

An environment of its own, because vLLM asks for versions of its own; what it shares with build/venv
(torch alone is most of 1 GB) it takes from there. Packages are installed without their
dependencies: requirements/vllm.txt names what is imported, a third of what vLLM asks for.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "build" / "venv"
VENV = ROOT / "build" / "vllm"
PINS = ROOT / "scripts" / "requirements" / "vllm.txt"
SKIP = 77


def main() -> int:
    """Brings the environment up to date."""
    stamp = VENV / "installed"
    wanted = f"{sys.version}\n{ROOT}\n{PINS.read_text(encoding='utf-8')}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    print("setup: making build/vllm (1 GB, mostly vLLM)", flush=True)
    python = VENV / "bin" / "python"
    if subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", VENV], check=False
    ).returncode:
        return 1
    site = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
    base = sysconfig.get_path("purelib", vars={"base": str(BASE), "platbase": str(BASE)})
    # pyvmem too: build/venv has it as a link to this tree, which a path file does not follow.
    (site / "base.pth").write_text(f"{base}\n{ROOT}\n", encoding="utf-8")
    pip = [BASE / "bin" / "python", "-m", "pip", "--python", python, "install", "--no-deps"]
    pip += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    done = subprocess.run(
        [*map(str, pip), "-r", str(PINS)],
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


if __name__ == "__main__":
    sys.exit(main())
