# SPDX-License-Identifier: MIT
"""Tests that docs/driver/operations.md quotes and explains the driver's messages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "driver" / "operations.md"


def test_every_word_on_a_fault_is_explained() -> None:
    """The table lists every message that `entry_text` returns, and no others."""
    source = (ROOT / "kernel_module" / "uvm_vmem_debug.c").read_text(encoding="utf-8")
    function = source[source.index("\nstatic const char *entry_text(") :].split("\n}\n", 1)[0]
    said = set(re.findall(r'"([^"]+)"', function))
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("| `there:` |", 1)[1].split("\n\n", 1)[0]
    firsts = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert set(re.findall("`([^`]+)`", " ".join(firsts))) == said


def test_the_files_that_it_names_are_made() -> None:
    """Every procfs file and limit parameter mentioned on the page exists."""
    page = PAGE.read_text(encoding="utf-8")
    sources = "".join(p.read_text("utf-8") for p in (ROOT / "kernel_module").glob("*.c"))
    for name in set(re.findall(r"/proc/driver/nvidia-uvm/(\w+)", page)):
        assert f'("{name}", S_' in sources
    for name in set(re.findall(r"\b(uvm_vmem_\w*limit\w*)\b", page)):
        assert f"module_param({name}" in sources
