# SPDX-License-Identifier: MIT
"""Tests that the module and tests/kernel/c cover every name in uvm_vmem_ioctl.h.

The programs in tests/kernel/c test the behavior; this file checks that no name was forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULE = ROOT / "kernel_module"
HEADER = (MODULE / "uvm_vmem_ioctl.h").read_text(encoding="utf-8")
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
PROGRAMS = ROOT / "tests" / "kernel" / "c"

# Kinds of GPU that the software GPU cannot emulate.
NOT_PLAYED = {
    "UVM_VMEM_GPU_CONFIDENTIAL",
    "UVM_VMEM_GPU_NO_64K",
}


def module_text() -> str:
    """Returns the module's sources."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(MODULE.glob("uvm_vmem*.c")))


def programs_text() -> str:
    """Returns the test programs' sources without abi.h, which names every field and command."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(PROGRAMS.glob("*.c")))


def errnos() -> set[str]:
    """Returns the errnos that the header documents."""
    listed = HEADER.split("Errors mean the same in all commands", 1)[1].split(" */", 1)[0]
    return set(re.findall(r"^ \*   (E[A-Z0-9]+) ", listed, flags=re.MULTILINE))


def structs() -> dict[str, list[str]]:
    """Maps the name of each command's struct to its fields."""
    found = {}
    for match in re.finditer(r"^struct (uvm_vmem_\w+) \{(.*?)^\};", CODE, re.DOTALL | re.MULTILINE):
        found[match[1]] = re.findall(r"(\w+)(?:\[\w+\])?;", match[2])
    return found


def test_the_module_returns_the_errnos_of_the_header() -> None:
    returned = set(re.findall(r"-(E[A-Z0-9]+)\b", re.sub(r"//.*", "", module_text())))
    assert len(errnos()) > 20
    assert returned == errnos()


def test_a_program_expects_each_errno() -> None:
    expected = re.findall(r"-(E[A-Z0-9]+)\b|, (E[A-Z0-9]+)\)", programs_text())
    assert errnos() <= {one or other for one, other in expected}


@pytest.mark.parametrize("struct", [*structs()])
def test_each_field_is_wrong_once(struct: str) -> None:
    """Every input field has a row in the matrix, except `size`, which has its own table."""
    matrix = (PROGRAMS / "abi_matrix.c").read_text(encoding="utf-8")
    rows = set(re.findall(rf"ROW\(struct {struct}, (\w+),", matrix))
    given = {field for field in structs()[struct] if not field.startswith("out_")} - {"size"}
    # Every timeout is valid.
    assert given - rows <= ({"timeout_ns"} if struct == "uvm_vmem_wait" else set())


@pytest.mark.parametrize("struct", [*structs()])
def test_each_output_is_looked_at(struct: str) -> None:
    looked_at = set(re.findall(r"\b(out_\w+)\b", programs_text()))
    assert {field for field in structs()[struct] if field.startswith("out_")} <= looked_at


def test_each_constant_is_used() -> None:
    names = set(re.findall(r"^#define (UVM_VMEM_\w+)", CODE, flags=re.MULTILINE))
    used = set(
        re.findall(r"\bUVM_VMEM_\w+\b", programs_text() + (PROGRAMS / "abi.h").read_text("utf-8"))
    )
    assert names - used - {"UVM_VMEM_IOCTL_H", "UVM_VMEM_VERSION_BYTES"} == NOT_PLAYED


def test_the_limits_are_the_modules_parameters() -> None:
    named = set(re.findall(r"\buvm_vmem_\w+_mb\b", HEADER))
    declared = set(re.findall(r"^module_param\((\w+),", module_text(), flags=re.MULTILINE))
    assert named == declared
    assert named <= set(re.findall(r"\buvm_vmem_\w+_mb\b", programs_text()))
    readme = (MODULE / "README.md").read_text(encoding="utf-8")
    assert named == set(re.findall(r"`(uvm_vmem_\w+_mb)`", readme))


def test_the_library_knows_each_refusal_and_errno() -> None:
    """Every refusal by the kernel has a message in libvmem."""
    source = (ROOT / "libvmem" / "src" / "backend" / "uvm" / "ioctl.c").read_text(encoding="utf-8")
    refusals = set(re.findall(r"\b(UVM_VMEM_GPU_\w+)\b", CODE)) - {"UVM_VMEM_GPU_OK"}
    assert refusals == set(re.findall(r"\[(UVM_VMEM_GPU_\w+)\] = ", source))
    # These come from another module, from WAIT (which the library does not call), or from calls by
    # a killed process.
    unseen = {"ENOTTY", "ETIMEDOUT", "EINTR"}
    assert errnos() - unseen == set(re.findall(r"MEANING\((E\w+),", source))
