#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the Python in README.md, and checks that the files it points at are there.

Run by the interpreter of an environment with pyvmem and torch. Prints "N passed, N failed".
"""

from __future__ import annotations

import re
import subprocess
import sys

from vmem_header import ROOT, version

README = ROOT / "README.md"


def main() -> int:
    """Prints what is wrong."""
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    problems = [f"no file {link}" for link in links if not (ROOT / link).exists()]
    if not programs:
        problems.append("no Python in it")
    if f"Version {version()}" not in text:
        problems.append(f"it does not say 'Version {version()}'")
    for program in programs:
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        if done.returncode:
            problems.append(f"its Python fails:\n{program}\n{done.stderr}")
    for problem in problems:
        print(f"README.md: {problem}")
    print(f"{len(programs) + len(links) + 1 - len(problems)} passed, {len(problems)} failed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
