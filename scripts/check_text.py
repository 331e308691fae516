#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks source conventions that no other tool checks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "SPDX-License-Identifier: MIT"
SOURCES = {".c", ".h", ".py", ".pyi", ".sh", ".map", ".cu"}
MAX_C_COLUMNS = 140
LIBRARY = ROOT / "libvmem" / "src"
LIBRARY_COLUMNS = 120  # the limit in .clang-format, also applied to comments


def tracked() -> list[Path]:
    """Returns the tracked files that exist."""
    out = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def problems_of(path: Path) -> list[str]:
    """Returns the conventions that a file violates."""
    if path.suffix not in SOURCES and path.name != "Makefile":
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    problems = []
    if not any(SPDX in line for line in lines[:3]):
        problems.append(f"no '{SPDX}' at its top")
    kernel_style = path.is_relative_to(ROOT / "tests" / "kernel" / "softgpu")
    if "\t" in text and path.suffix in {".c", ".h", ".py"} and not kernel_style:
        problems.append("a tab")
    if re.search(r"[ \t]+$", text, re.M):
        problems.append("trailing whitespace")
    if path.suffix in {".c", ".h"}:
        most = LIBRARY_COLUMNS if path.is_relative_to(LIBRARY) else MAX_C_COLUMNS
        long = [n for n, line in enumerate(lines, 1) if len(line) > most]
        if long:
            problems.append(f"more than {most} columns in line {long[0]}")
    module = path.suffix == ".py" and path.is_relative_to(ROOT / "pyvmem")
    if module and "__all__" not in text and path.name != "__main__.py":
        problems.append("no __all__")
    return problems


def main() -> int:
    """Prints the problems of all files."""
    failed = 0
    for path in tracked():
        for problem in problems_of(path):
            print(f"{path.relative_to(ROOT)}: {problem}")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
