# SPDX-License-Identifier: MIT
"""Finds the kernel that a pair of modules was built for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from guest.machine import GuestError

__all__ = ["kernel_for", "release_of"]


def release_of(module: Path) -> str:
    """The release of the kernel that a module was built for."""
    found = re.search(rb"\0vermagic=(\S+) ", module.read_bytes())
    if found is None:
        raise GuestError(f"{module} says no release of a kernel")
    return found.group(1).decode()


def kernel_for(tree: Path | None, build: Path) -> Path:
    """The image to boot: what VMEM_GUEST_KERNEL names, else an unpacked or an installed one."""
    named = os.environ.get("VMEM_GUEST_KERNEL")
    if named:
        return Path(named)
    release = release_of(tree / "nvidia.ko") if tree else "*"
    for folder in (build / "image" / "boot", Path("/boot")):
        for image in sorted(folder.glob(f"vmlinuz-{release}"), reverse=True):
            return image
    raise GuestError(f"no kernel {release} here: see scripts/kernel_tree.py")
