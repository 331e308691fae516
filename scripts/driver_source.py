#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/kernel/src/VERSION, the kernel-open tree of a driver version, and prints its path.

The tree is copied from the first of these places that has the version: NV_SRC (a driver source
tree), the directory VMEM_DRIVER_SRC_DIR (kernel-open trees named by version), the installed
driver's DKMS tree, Debian's package (installed or downloaded).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import driver_debian
from kernel_common import (
    KERNEL_BUILD,
    KernelBuildError,
    check_version,
    locked,
    replace_folder,
    say,
    tree_digest,
)

__all__ = ["BUILD_PARTS", "driver_source", "kernel_open_below", "version_of"]

# The parts of a kernel-open tree that a build copies unchanged. From nvidia/ it takes only the
# headers and the list of conftests.
BUILD_PARTS = (
    "Kbuild",
    "Makefile",
    "conftest.sh",
    "pahole.sh",
    "header-presence-tests.mk",
    "common",
    "nvidia-uvm",
)


def version_of(tree: Path) -> str | None:
    """Returns the version in a kernel-open tree's Kbuild file, or None for any other directory."""
    kbuild = tree / "Kbuild"
    if not kbuild.is_file() or not (tree / "nvidia-uvm" / "uvm.c").is_file():
        return None
    text = kbuild.read_text(encoding="utf-8", errors="replace")
    found = re.search(r'NV_VERSION_STRING=\\"([0-9.]+)\\"', text)
    return found.group(1) if found else None


def kernel_open_below(path: Path) -> Path | None:
    """Returns the kernel-open tree at a path or in kernel-open/ or kernel/ under it, or None."""
    for tree in (path, path / "kernel-open", path / "kernel"):
        if version_of(tree):
            return tree
    return None


def candidates(version: str) -> list[tuple[str, Path]]:
    """Returns places on this machine that may have a version, best first, with descriptions."""
    found: list[tuple[str, Path]] = []
    given = os.environ.get("NV_SRC")
    if given:
        found.append(("NV_SRC", Path(given)))
    folder = os.environ.get("VMEM_DRIVER_SRC_DIR")
    if folder:
        found.append(("VMEM_DRIVER_SRC_DIR", Path(folder) / version))
    for name in (f"nvidia-{version}", f"nvidia-open-{version}"):
        found.append(("DKMS", Path("/usr/src") / name))
    return found


def find(version: str) -> tuple[str, Path] | None:
    """Returns the first place on this machine that has exactly this version, or None."""
    for origin, path in candidates(version):
        tree = kernel_open_below(path)
        if tree is None:
            if origin == "NV_SRC":
                raise KernelBuildError(f"NV_SRC={path} holds no driver sources")
            continue
        if version_of(tree) == version:
            return origin, tree
        if origin == "NV_SRC":
            raise KernelBuildError(f"NV_SRC={path} is driver {version_of(tree)}, not {version}")
    return None


def debian_source(version: str, folder: Path, download: bool) -> Path:
    """Returns a version's tree from Debian's package, installed or downloaded."""
    archive = driver_debian.installed()
    other = ""
    if archive is not None:
        tree = driver_debian.unpack(archive, folder / "installed")
        if version_of(tree) == version:
            return tree
        other = f" ({archive} is driver {version_of(tree)})"
    if not download:
        raise KernelBuildError(
            f"the package {driver_debian.PACKAGE} of that version is not installed{other}"
        )
    tree = driver_debian.fetch(version, folder / "deb")
    if version_of(tree) != version:
        raise KernelBuildError(f"Debian's package is driver {version_of(tree)}")
    return tree


def driver_source(version: str, *, download: bool = True) -> Path:
    """Returns the directory with a version's pristine sources; creates it if missing.

    An existing directory is kept, unless NV_SRC now names a different source. If `download` is
    false, it is an error if the version is not on this machine.
    """
    check_version(version)
    final = KERNEL_BUILD / "src" / version
    stamp = KERNEL_BUILD / "src" / f"{version}.json"
    with locked(KERNEL_BUILD / "src" / f".{version}.lock"):
        here = find(version)
        if final.is_dir() and stamp.is_file():
            facts = json.loads(stamp.read_text(encoding="utf-8"))
            if here is None or here[0] != "NV_SRC" or facts["from"] == str(here[1]):
                return final
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as name:
            new = Path(name) / version
            if here:
                origin, tree = here
                say(f"driver {version} from {tree} ({origin})")
                shutil.copytree(tree, new, ignore=shutil.ignore_patterns("*.o", "*.o_binary"))
            else:
                origin, tree = "Debian", debian_source(version, Path(name), download)
                tree.rename(new)
            replace_folder(new, final)
        place = str(tree) if here else driver_debian.PACKAGE
        facts = {"version": version, "origin": origin, "from": place, "sha256": tree_digest(final)}
        stamp.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return final


def main() -> int:
    """Prints the path of one version's sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a driver version, for example 535.261.03")
    options = parser.parse_args()
    try:
        print(driver_source(options.version))
    except KernelBuildError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
