# SPDX-License-Identifier: MIT
"""Makes a call into the software GPU's nvidia.ko fail once (SOFTGPU_INJECT in softgpu.h)."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["REGISTER", "failing_call"]

# The call with which UVM registers itself when it is loaded (until branch 580).
REGISTER = "RegisterUvmCallbacks"

HEADER = Path(__file__).resolve().parent.parent / "softgpu" / "softgpu.h"
DEVICE = Path("/dev/softgpu")


def constant(pattern: str) -> int:
    """Extracts a number from the header with a regular expression."""
    found = re.search(pattern, HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, pattern
    return ord(found.group(1)) if found.group(1).isalpha() else int(found.group(1), 0)


@contextmanager
def failing_call(name: str) -> Iterator[None]:
    """Makes the next call to this function within the context fail, whichever process makes it."""
    length = constant(r"^#define SOFTGPU_NAME_BYTES (\d+)")
    kind = constant(r"^#define SOFTGPU_IOCTL_TYPE '?(\w+)'?")
    number = constant(r"_IOW\(SOFTGPU_IOCTL_TYPE, (\d+), struct softgpu_inject\)")
    # struct softgpu_inject: name, flags, status (0: no memory), nth, repeat, delay_us
    rule = struct.pack(f"={length}sIIQQQ", name.encode(), 0, 0, 1, 1, 0)
    request = 1 << 30 | len(rule) << 16 | kind << 8 | number
    file = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(file, request, rule)
        yield
    finally:
        os.close(file)
