# SPDX-License-Identifier: MIT
"""Generates the table of driver branches that `stock` supports, from libvmem's table in abi.h."""

from __future__ import annotations

import re

from readme_format import ROOT, table

__all__ = ["branches", "part"]

ABI = ROOT / "libvmem" / "src" / "backend" / "nvidia" / "abi.h"
CLASSES = {
    "NV_RUN": "**run**",
    "NV_SOURCES": "**read**",
    "NV_TABLE": "**read in a table**",
}


def branches() -> list[tuple[int, str, str]]:
    """Returns the branch, evidence and versions of each row, in the table's order."""
    rows = re.findall(r'\{(\d+), (NV_\w+), "(.+?)"\}', ABI.read_text(encoding="utf-8"))
    found = [(int(major), evidence, versions) for major, evidence, versions in rows]
    if not found or any(evidence not in CLASSES for _, evidence, _ in found):
        raise ValueError(f"{ABI}: the table of branches cannot be read")
    return found


def part() -> list[str]:
    """Returns the lines of the table."""
    body = [[str(major), CLASSES[evidence], versions] for major, evidence, versions in branches()]
    return table(["branch", "class", "versions"], body)
