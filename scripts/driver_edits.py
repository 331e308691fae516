# SPDX-License-Identifier: MIT
"""Edits NVIDIA's published files as newer kernels require.

Only the tests need this: a user of such a kernel has a driver that was written or patched for it,
and `make module` builds that source unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["edits"]


@dataclass(frozen=True)
class Gone:
    """An API removed from Linux, and the driver's code that uses it.

    Attributes:
        header: the kernel header that declared it.
        shown: text that the header contains if the API exists.
        file: the driver's file that uses the API.
        old: the driver's code that uses the API.
        new: the code that replaces it.
    """

    header: str
    shown: str
    file: str
    old: bytes
    new: bytes

    def lacks(self, linux: Path) -> bool:
        """True if a kernel's sources no longer have the API."""
        path = linux / "include" / "linux" / self.header
        return not path.is_file() or self.shown not in path.read_text("utf-8", "replace")


GONE = (
    Gone("of_gpio.h", "", "common/inc/nv-linux.h", b"#include <linux/of_gpio.h>\n", b""),
    # The name fits its buffer, and the zeros that strncpy pads it with are never read.
    Gone("string.h", "strncpy(char", "nvidia-uvm/uvm_pmm_gpu.c", b"strncpy(", b"strscpy("),
    # A debug build with HMM reads past the GPU's last page and faults. Debian's first kernels with
    # HMM are also its first kernels without this callback.
    Gone(
        "memremap.h",
        "(*page_free)",
        "nvidia-uvm/uvm_pmm_gpu.c",
        b"pfn <= __phys_to_pfn(devmem_end)",
        b"pfn < __phys_to_pfn(devmem_end)",
    ),
)


def edits(files: Mapping[str, bytes], linux: Path) -> dict[str, bytes]:
    """Returns the new contents of the driver's files that must change for these Linux sources."""
    changed: dict[str, bytes] = {}
    for one in GONE:
        content = changed.get(one.file, files.get(one.file, b""))
        if one.old in content and one.lacks(linux):
            changed[one.file] = content.replace(one.old, one.new)
    return changed
