# SPDX-License-Identifier: MIT
"""Asks the loaded nvidia-uvm whether it is the patched one: UVM_VMEM_QUERY, with no library."""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUERY", "Answer", "query"]

# _IO(0xB7, 0x80) and struct uvm_vmem_query of kernel_module/uvm_vmem_ioctl.h.
QUERY = 0xB780
STRUCT = struct.Struct("=II16sIIQQIIIIIIQ32s")


@dataclass(frozen=True)
class Answer:
    """What the patched driver says of itself."""

    abi: int
    driver: str


def query(node: Path) -> Answer:
    """The answer of the driver behind a device node; OSError from one that knows no QUERY."""
    buffer = bytearray(STRUCT.size)
    STRUCT.pack_into(buffer, 0, STRUCT.size, 0, b"", *([0] * 11), b"")
    file = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, QUERY, buffer)
    finally:
        os.close(file)
    fields = STRUCT.unpack(buffer)
    return Answer(abi=fields[3], driver=fields[-1].split(b"\0")[0].decode("ascii", "replace"))
