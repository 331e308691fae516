# SPDX-License-Identifier: MIT
"""Finds the driver that `make module` builds for, and its source, and prepares the tree."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from driver_patches import apply_series
from driver_source import BUILD_PARTS, driver_source, kernel_open_below, version_of
from kernel_common import ROOT, KernelBuildError, tree_files, write_if_changed
from module_elf import KernelModule, ModuleFileError, read_module
from module_kbuild import NEEDS_OPEN, conftests_only, find_nvidia, installed_nvidia
from module_system import System

__all__ = ["DEFAULT_VERSION", "DriverSource", "choose_source", "meeting", "stage"]

# The version to build if no driver is installed. This is Debian 12's version.
DEFAULT_VERSION = "535.261.03"


@dataclass(frozen=True)
class DriverSource:
    """A kernel-open tree, its version, and a description of its origin."""

    tree: Path
    version: str
    origin: str


def flavour(tree: Path) -> str:
    """Describes a driver's tree; raises KernelBuildError if it is of the proprietary flavor.

    UVM's own files are open in both flavors.
    """
    interface = tree / "nvidia" / "nv.c"
    if not interface.is_file():
        return "a tree without nvidia.ko's sources"
    if "MIT" in interface.read_text(encoding="utf-8", errors="replace")[:4000]:
        return "the open tree"
    raise KernelBuildError(f"the driver source {tree} is {NEEDS_OPEN}")


def dkms_trees(version: str, root: Path) -> list[Path]:
    """Returns the directories where the various distributions put an installed driver's sources."""
    found = sorted((root / "usr/src").glob(f"nvidia*-{version}"))
    return found + sorted((root / "var/lib/dkms").glob(f"nvidia*/{version}/source"))


def installed_version(system: System, release: str) -> tuple[str, str]:
    """Returns the driver's version and where it was found, or ("", "") if none is installed."""
    loaded = system.driver_version()
    if loaded:
        return loaded, "loaded"
    versions = {m.version for m in installed_nvidia(system.root / "lib/modules" / release)}
    if len(versions) > 1:
        raise KernelBuildError(
            f"several drivers are installed for kernel {release} and none is loaded "
            f"({', '.join(sorted(versions))}): choose one with NV_SRC=path"
        )
    return (versions.pop(), f"installed for kernel {release}") if versions else ("", "")


def choose_source(
    system: System, release: str, nv_src: str = "", version: str = "", *, download: bool = True
) -> DriverSource:
    """Returns the driver source to build: NV_SRC, the installed driver's, or Debian's package.

    `download`: fetch the package if it is not installed.
    """
    if nv_src:
        tree = kernel_open_below(Path(nv_src))
        found = version_of(tree) if tree else None
        if tree is None or found is None:
            raise KernelBuildError(f"NV_SRC={nv_src} holds no driver sources")
        if version and version != found:
            raise KernelBuildError(f"NV_SRC={nv_src} is driver {found}, not {version}")
        return DriverSource(tree.resolve(), found, f"NV_SRC, {flavour(tree)}")
    installed, how = installed_version(system, release)
    if version and installed and version != installed:
        raise KernelBuildError(f"driver {installed} is {how}, not {version}")
    wanted = version or installed or DEFAULT_VERSION
    for path in dkms_trees(wanted, system.root):
        tree = kernel_open_below(path)
        if tree is not None and version_of(tree) == wanted:
            return DriverSource(tree.resolve(), wanted, f"the driver's DKMS tree, {flavour(tree)}")
    try:
        tree = driver_source(wanted, download=download)
    except KernelBuildError as error:
        reason = f"driver {wanted} is {how}; " if installed else ""
        raise KernelBuildError(
            f"{reason}its source is not in /usr/src or DKMS and not available elsewhere: {error}\n"
            "give its path with NV_SRC=path (the kernel-open directory of exactly that version)"
        ) from error
    return DriverSource(tree, wanted, "Debian's package or the directory of driver sources")


def meeting(system: System, release: str, version: str, given: str = "") -> KernelModule | None:
    """Returns the given or installed nvidia.ko for this kernel and driver, or None."""
    if not given:
        return find_nvidia(
            system.root / "lib/modules" / release, version, system.source_version("nvidia")
        )
    try:
        module = read_module(Path(given))
    except ModuleFileError as error:
        raise KernelBuildError(f"NVIDIA_KO: {error}") from error
    if module.name != "nvidia":
        raise KernelBuildError(f"NVIDIA_KO={given} is the module {module.name}, not nvidia")
    if module.version != version:
        raise KernelBuildError(f"NVIDIA_KO={given} is driver {module.version}, not {version}")
    if module.release != release:
        raise KernelBuildError(f"NVIDIA_KO={given} is for kernel {module.release}, not {release}")
    return module


def stage(source: DriverSource, destination: Path) -> None:
    """Creates or updates the tree to build, from the driver's UVM, the patches and our files.

    Only files with changed content are written, so that make rebuilds only what is necessary.
    """
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".stage-") as staging:
        new = Path(staging)
        copy_parts(source.tree, new)
        apply_series(source.version, new)
        for path in [*ROOT.glob("kernel_module/*.[ch]"), *ROOT.glob("kernel_module/*.Kbuild")]:
            shutil.copyfile(path, new / "nvidia-uvm" / path.name)
        conftests_only(new)
        files = {path.as_posix(): (new / path).read_bytes() for path in tree_files(new)}
    listing = destination / ".sources"
    before = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    for gone in set(before) - set(files):
        (destination / gone).unlink(missing_ok=True)
    for name, content in files.items():
        write_if_changed(destination / name, content)
    listing.write_text("\n".join(sorted(files)) + "\n", encoding="utf-8")


def copy_parts(tree: Path, new: Path) -> None:
    """Copies the parts of a driver source that UVM's build needs, without build products."""
    leftovers = shutil.ignore_patterns("*.o", "*.o_binary", ".*.cmd", "*.mod*", "*.ko", "conftest")
    for part in BUILD_PARTS:
        path = tree / part
        if path.is_dir():
            shutil.copytree(path, new / part, ignore=leftovers)
        elif path.is_file():
            shutil.copyfile(path, new / part)
    (new / "nvidia").mkdir()
    for path in [*(tree / "nvidia").glob("*.h"), tree / "nvidia" / "nvidia.Kbuild"]:
        shutil.copyfile(path, new / "nvidia" / path.name)
