# SPDX-License-Identifier: MIT
"""Whether UVM's page tables are written as they were when the kernel module was.

The module does two things with them that uvm_mmu.h asks its callers not to do;
kernel_module/README.md says which, and why they are harmless. That rests on a few functions of
uvm_mmu.c, each of which has had few texts: patches/contracts.json has a digest of every one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re

from driver_patches import PATCHES

__all__ = ["FILE", "contract_problems", "digest", "known_texts"]

# As a path of NVIDIA's repository.
FILE = "kernel-open/nvidia-uvm/uvm_mmu.c"


@functools.cache
def known_texts() -> dict[str, dict[str, str]]:
    """The functions; for each the digests of its texts, and the versions that have them."""
    table: dict[str, dict[str, str]]
    table = json.loads((PATCHES / "contracts.json").read_text(encoding="utf-8"))
    return table


def digest(source: str, function: str) -> str | None:
    """Of a function's text without comments and white space; None if there is no such function."""
    pattern = rf"^\w[^;{{}}\n]*\b{re.escape(function)}\([^;{{}}]*\)\n\{{\n.*?^\}}\n"
    found = re.search(pattern, source, re.MULTILINE | re.DOTALL)
    if not found:
        return None
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", found.group(), flags=re.DOTALL)
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()[:16]


def contract_problems(version: str, source: str) -> list[str]:
    """What in a version's uvm_mmu.c is not as in any version that was read."""
    return [
        f"{version}: {function} of uvm_mmu.c is not as in any version that was read; see "
        "kernel_module/README.md, Beyond the contract, then add its digest to contracts.json"
        for function, texts in known_texts().items()
        if digest(source, function) not in texts
    ]
