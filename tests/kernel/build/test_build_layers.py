# SPDX-License-Identifier: MIT
"""Tests that the files of the kernel module do not call each other in a cycle."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_common import ROOT


def without_comments(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def calls(folder: Path) -> dict[str, set[str]]:
    """Maps each file to the other files whose functions it calls."""
    texts = {path.name: without_comments(path) for path in sorted(folder.glob("uvm_vmem*.c"))}
    defined = re.compile(r"^(?!static)\w[^;{}\n=]*?\b(uvm_vmem_\w+)\([^;{}]*\)\n\{", re.MULTILINE)
    owner = {name: file for file, text in texts.items() for name in defined.findall(text)}
    return {
        file: {owner[n] for n in re.findall(r"\buvm_vmem_\w+\b", text) if n in owner} - {file}
        for file, text in texts.items()
    }


def circle(files: dict[str, set[str]]) -> set[str]:
    """Returns the files that are in a cycle of calls, and the files that call into a cycle."""
    left = dict(files)
    while done := [file for file, others in left.items() if not others & set(left)]:
        for file in done:
            del left[file]
    return set(left)


def test_no_circle_of_files() -> None:
    files = calls(ROOT / "kernel_module")
    assert "uvm_vmem_object.c" in files["uvm_vmem_bind.c"]  # make sure the scan finds calls
    assert circle(files) == set()


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "uvm_vmem_a.c").write_text("int uvm_vmem_a(void)\n{\n    uvm_vmem_b();\n}\n")
    b = tmp_path / "uvm_vmem_b.c"
    b.write_text("int uvm_vmem_b(void)\n{\n    return 0; // uvm_vmem_a()\n}\n")
    (tmp_path / "uvm_vmem_c.c").write_text("static int c(void)\n{\n    uvm_vmem_a();\n}\n")
    assert circle(calls(tmp_path)) == set()
    b.write_text("int uvm_vmem_b(void)\n{\n    return uvm_vmem_a();\n}\n")
    assert circle(calls(tmp_path)) == {"uvm_vmem_a.c", "uvm_vmem_b.c", "uvm_vmem_c.c"}
