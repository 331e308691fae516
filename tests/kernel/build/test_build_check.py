# SPDX-License-Identifier: MIT
"""Tests that kernel_check reports only those warnings and findings that are in our files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kernel_check import SPARSE, WARNINGS, findings, long_lines, noted_command
from kernel_common import KernelBuildError

NOTES = (
    "savedcmd_/w/nvidia-uvm/uvm_vmem.o := gcc -Wp,-MMD,/w/nvidia-uvm/.uvm_vmem.o.d -Iinclude "
    '-DNV_VERSION_STRING=\\"535.261.03\\" -c -o /w/nvidia-uvm/uvm_vmem.o '
    "/w/nvidia-uvm/uvm_vmem.c ; ./tools/objtool/objtool /w/nvidia-uvm/uvm_vmem.o\n\n"
    "source_/w/nvidia-uvm/uvm_vmem.o := /w/nvidia-uvm/uvm_vmem.c\n"
)
OURS = [Path("uvm_vmem.c"), Path("uvm_vmem.h")]


@pytest.mark.parametrize("key", ["cmd_", "savedcmd_"])
def test_the_command_that_make_noted(tmp_path: Path, key: str) -> None:
    (tmp_path / "nvidia-uvm").mkdir()
    notes = tmp_path / "nvidia-uvm" / ".uvm_vmem.o.cmd"
    notes.write_text(NOTES.replace("savedcmd_", key))
    assert noted_command(tmp_path, Path("nvidia-uvm/uvm_vmem.c")) == [
        *("gcc", "-Iinclude", '-DNV_VERSION_STRING="535.261.03"', "/w/nvidia-uvm/uvm_vmem.c")
    ]
    notes.write_text("deps := none\n")
    with pytest.raises(KernelBuildError, match="make recorded no command"):
        noted_command(tmp_path, Path("nvidia-uvm/uvm_vmem.c"))


def compiler(source: Path) -> list[str]:
    return ["gcc", "-O2", *WARNINGS, "-c", "-o", "/dev/null", str(source)]


def test_a_warning_about_our_file_counts(tmp_path: Path) -> None:
    (tmp_path / "kernel.h").write_text("static int unused_of_the_kernel(void) { return 0; }\n")
    source = tmp_path / "uvm_vmem.c"
    source.write_text('#include "kernel.h"\nint missing_prototype(void) { return 0; }\n')
    (found,) = findings(compiler(source), tmp_path, tmp_path, OURS)
    assert found.startswith("uvm_vmem.c:2:")
    assert "-Wmissing-prototypes" in found
    assert findings(compiler(source), tmp_path, tmp_path, []) == []


def test_a_warning_in_what_is_inlined_into_ours_counts(tmp_path: Path) -> None:
    (tmp_path / "kernel.h").write_text(
        'void __attribute__((warning("too much"))) overflow(void);\n'
        "static inline __attribute__((always_inline)) void copy(void) { overflow(); }\n"
    )
    source = tmp_path / "uvm_vmem.c"
    source.write_text('#include "kernel.h"\nvoid f(void);\nvoid f(void) { copy(); }\n')
    (found,) = findings(compiler(source), tmp_path, tmp_path, OURS)
    assert "uvm_vmem.c:3" in found


def test_a_command_that_fails_counts(tmp_path: Path) -> None:
    (found, *_) = findings(compiler(tmp_path / "none.c"), tmp_path, tmp_path, OURS)
    assert found.startswith("exit status 1")


@pytest.mark.skipif(not shutil.which("sparse"), reason="no sparse here")
def test_sparse_sees_address_spaces(tmp_path: Path) -> None:
    source = tmp_path / "uvm_vmem.c"
    source.write_text(
        "static int f(int __attribute__((noderef, address_space(1))) *user)\n"
        "{\n\treturn *user;\n}\n"
        "int g(void *pointer);\nint g(void *pointer)\n{\n\treturn f(pointer);\n}\n"
    )
    found = findings([*SPARSE, str(source)], tmp_path, tmp_path, OURS)
    assert any("incorrect type in argument" in one for one in found)
    assert any("dereference of noderef" in one for one in found)


def test_wide_lines_are_found(tmp_path: Path) -> None:
    (tmp_path / "uvm_vmem.c").write_text("x" * 140 + "\n" + "x" * 141 + "\n")
    assert long_lines(tmp_path, Path("uvm_vmem.c")) == ["uvm_vmem.c:2: 141 columns"]
