# SPDX-License-Identifier: MIT
"""Checks the UVM page-table functions that the kernel module relies on.

The module does two things that uvm_mmu.h forbids its callers from doing; kernel_module/README.md
lists them and explains why they are harmless. Whether they are harmless depends on a few functions
of uvm_mmu.c, each of which has few variants: patches/contracts.json contains a digest of each
reviewed variant.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re

from driver_patches import PATCHES

__all__ = ["FILE", "contract_problems", "digest", "known_texts"]

# The file's path in NVIDIA's repository.
FILE = "kernel-open/nvidia-uvm/uvm_mmu.c"


@functools.cache
def known_texts() -> dict[str, dict[str, str]]:
    """Returns, for each function, the digests of its reviewed variants, with their versions."""
    table: dict[str, dict[str, str]]
    table = json.loads((PATCHES / "contracts.json").read_text(encoding="utf-8"))
    return table


def digest(source: str, function: str) -> str | None:
    """Returns a function's digest, ignoring comments and whitespace, or None if it is missing."""
    pattern = rf"^\w[^;{{}}\n]*\b{re.escape(function)}\([^;{{}}]*\)\n\{{\n.*?^\}}\n"
    found = re.search(pattern, source, re.MULTILINE | re.DOTALL)
    if not found:
        return None
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", found.group(), flags=re.DOTALL)
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def contract_problems(version: str, source: str) -> list[str]:
    """Reports the functions in a version's uvm_mmu.c that do not match a reviewed variant."""
    return [
        f"{version}: {function} of uvm_mmu.c differs from all reviewed versions; see "
        "kernel_module/README.md, Beyond the contract, then add its digest to contracts.json"
        for function, texts in known_texts().items()
        if digest(source, function) not in texts
    ]
