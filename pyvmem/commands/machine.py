# SPDX-License-Identifier: MIT
"""Describes the measurement environment: machine, GPU, driver, commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["commit", "describe", "driver_version", "meminfo"]

_GPU_FIELDS = (
    "name,uuid,driver_version,memory.total,memory.used,persistence_mode,mig.mode.current,"
    "clocks.current.sm,clocks.current.memory,clocks.max.sm,power.limit,temperature.gpu"
)


def _run(*command: str) -> str | None:
    """Returns the output of a short command; None if it fails or is not installed."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def meminfo() -> dict[str, int]:
    """Returns the entries of /proc/meminfo that have a unit, in bytes."""
    values = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            found = re.match(r"(\S+):\s+(\d+) kB$", line)
            if found:
                values[found.group(1)] = int(found.group(2)) * 1024
    return values


def driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel driver; None if it is not loaded."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def commit() -> tuple[str | None, bool | None]:
    """Returns the commit of this package's source tree, and whether the tree is dirty.

    The variable VMEM_COMMIT overrides the commit, for sources without git history.
    """
    named = os.environ.get("VMEM_COMMIT")
    if named:
        return named, None
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        head = _run("git", "-C", str(root), "rev-parse", "HEAD")
        status = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
        if head is not None:
            return head, None if status is None else bool(status)
    return None, None


def _gpu() -> dict[str, str] | None:
    """Reads the first GPU's properties from nvidia-smi."""
    line = _run("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader", "--id=0")
    if not line:
        return None
    values = [v.strip() for v in line.splitlines()[0].split(",")]
    names = _GPU_FIELDS.split(",")
    return dict(zip(names, values, strict=False)) if len(values) == len(names) else None


def describe() -> dict[str, Any]:
    """Returns the description of the machine for a result file."""
    head, dirty = commit()
    gpu = _gpu()
    return {
        "gpu": gpu["name"] if gpu else None,
        "gpu_state": {k: v for k, v in gpu.items() if k != "uuid"} if gpu else None,
        "driver": driver_version() or (gpu["driver_version"] if gpu else None),
        "commit": head,
        "dirty": dirty,
        "kernel": platform.release(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "cuda_bindings": _version("cuda-bindings"),
        "cffi": _version("cffi"),
        "user": "root" if os.geteuid() == 0 else "ordinary user",
    }
