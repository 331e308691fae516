# SPDX-License-Identifier: MIT
"""Reads the public functions and the version from libvmem/include/vmem.h."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["HEADER", "ROOT", "functions", "normal", "version"]

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "libvmem" / "include" / "vmem.h"


def normal(declaration: str) -> str:
    """Normalizes whitespace and pointers in a declaration."""
    text = re.sub(r"\s+", " ", declaration.strip())
    text = re.sub(r" ?\* ?", " *", text)
    return re.sub(r"\s*([(),])\s*", r"\1", text).replace(",", ", ")


def functions() -> dict[str, str]:
    """Returns the public declarations in the header's order, by function name.

    They do not include VMEM_API or the semicolon.
    """
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
    found = {}
    for match in re.finditer(r"^VMEM_API\s+([^;]*?\b(\w+)\s*\([^;]*\))\s*;", text, flags=re.M):
        found[match[2]] = normal(match[1])
    return found


def version() -> str:
    """Returns the value of VMEM_VERSION."""
    match = re.search(r'^#define VMEM_VERSION "(.+)"', HEADER.read_text(encoding="utf-8"), re.M)
    if not match:
        raise ValueError(f"{HEADER} has no VMEM_VERSION")
    return match[1]
