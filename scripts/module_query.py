# SPDX-License-Identifier: MIT
"""Detects the patched nvidia-uvm with the ioctl UVM_VMEM_QUERY, without libvmem.

The struct's layout is read from the header with which the kernel module and libvmem are compiled.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from kernel_common import ROOT

__all__ = ["Answer", "Layout", "query", "query_layout"]

HEADER = ROOT / "kernel_module" / "uvm_vmem_ioctl.h"
CODES = {"__u8": "s", "__u32": "I", "__u64": "Q", "__aligned_u64": "Q"}
FIELD = re.compile(r"^\s*(__\w+)\s+(\w+)(?:\[(\w+)\])?;", re.MULTILINE)
NUMBER = re.compile(r"^#define (UVM_VMEM_\w+)\s+(0x\w+|\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """The patched driver's answer to UVM_VMEM_QUERY."""

    abi: int
    driver: str


@dataclass(frozen=True)
class Layout:
    """The ioctl's number and its struct: field names and packing format."""

    request: int
    names: tuple[str, ...]
    packing: struct.Struct


def query_layout(header: str) -> Layout:
    """Returns the layout of UVM_VMEM_QUERY, parsed from the header; the struct has no padding."""
    numbers = {
        name: int(value, 0)
        for name, value in re.findall(
            r"^#define (UVM_VMEM_\w+)\s+(0x\w+|\d+)$", header, re.MULTILINE
        )
    }
    number = re.search(r"UVM_VMEM_QUERY\s+_IO\(UVM_VMEM_IOCTL_TYPE, (\w+)\)", header)
    body = re.search(r"struct uvm_vmem_query \{(.*?)^\};", header, re.MULTILINE | re.DOTALL)
    if number is None or body is None:
        raise ValueError(f"{HEADER} does not define UVM_VMEM_QUERY")
    names, codes = [], "="
    for kind, name, count in FIELD.findall(body.group(1)):
        names.append(name)
        codes += (str(numbers[count]) if count else "") + CODES[kind]
    request = numbers["UVM_VMEM_IOCTL_TYPE"] << 8 | int(number.group(1), 0)
    return Layout(request, tuple(names), struct.Struct(codes))


def query(node: Path) -> Answer:
    """Returns the answer of a node's driver; raises OSError if it does not support QUERY."""
    layout = query_layout(HEADER.read_text(encoding="utf-8"))
    buffer = bytearray(layout.packing.size)
    struct.pack_into("=I", buffer, 0, layout.packing.size)
    file = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, layout.request, buffer)
    finally:
        os.close(file)
    values = dict(zip(layout.names, layout.packing.unpack(buffer)))  # noqa: B905 - Python 3.9
    driver = values["out_driver_version"].split(b"\0")[0].decode("ascii", "replace")
    return Answer(abi=values["out_abi_version"], driver=driver)
