# SPDX-License-Identifier: MIT
"""Finds the kernel that a pair of modules was built for, and that kernel's own modules."""

from __future__ import annotations

import lzma
import os
import re
from collections.abc import Iterable
from pathlib import Path

from guest.machine import GuestError

__all__ = ["kernel_for", "own_modules", "release_of"]


def release_of(module: Path) -> str:
    """Returns the release of the kernel that a module was built for."""
    found = re.search(rb"\0vermagic=(\S+) ", module.read_bytes())
    if found is None:
        raise GuestError(f"{module} names no kernel release")
    return found.group(1).decode()


def kernel_for(tree: Path | None, build: Path) -> Path:
    """Returns the kernel image to boot: $VMEM_GUEST_KERNEL, or an unpacked or installed kernel."""
    named = os.environ.get("VMEM_GUEST_KERNEL")
    if named:
        return Path(named)
    release = release_of(tree / "nvidia.ko") if tree else "*"
    suites = sorted((build / "debian").glob("*/boot"))
    for folder in (build / "image" / "boot", *suites, Path("/boot")):
        for image in sorted(folder.glob(f"vmlinuz-{release}"), reverse=True):
            return image
    raise GuestError(f"kernel {release} not found: see scripts/kernel_tree.py")


def own_modules(kernel: Path, names: Iterable[str], cache: Path) -> list[Path]:
    """Returns the named modules of a kernel and their dependencies, in the order to load them.

    Missing modules are skipped: either they are built in, or the code that needs them will fail.
    """
    release = kernel.name.removeprefix("vmlinuz-")
    folder = kernel.resolve().parent.parent / "lib" / "modules" / release / "kernel"
    files = {path.name.split(".")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    found: dict[str, Path] = {}

    def visit(name: str) -> None:
        name = name.replace("-", "_")
        if name in found or name not in files:
            return
        path = _unpacked(files[name], cache / release)
        depends = re.search(rb"\0depends=([^\0]*)\0", path.read_bytes())
        for one in depends.group(1).decode().split(",") if depends else ():
            visit(one)
        found[name] = path

    for name in names:
        visit(name)
    return list(found.values())


def _unpacked(module: Path, cache: Path) -> Path:
    """Returns the module itself, or an uncompressed copy of it."""
    if module.suffix == ".ko":
        return module
    if module.suffix != ".xz":
        raise GuestError(f"{module}: unknown compression")
    plain = cache / module.stem
    if not plain.exists():
        cache.mkdir(parents=True, exist_ok=True)
        new = plain.with_name(f"{plain.name}.{os.getpid()}")
        new.write_bytes(lzma.decompress(module.read_bytes()))
        new.rename(plain)
    return plain
