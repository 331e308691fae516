# SPDX-License-Identifier: MIT
"""Gets the driver's source from Debian's package nvidia-open-kernel-source."""

from __future__ import annotations

import tempfile
from pathlib import Path

from apt_area import AptArea
from kernel_common import KERNEL_BUILD, KernelBuildError, run, say

__all__ = ["PACKAGE", "SUITES", "fetch", "installed", "unpack"]

PACKAGE = "nvidia-open-kernel-source"
ARCHIVE = "usr/src/nvidia-open-kernel.tar.xz"
# Driver versions that the project supports, and the Debian suites whose contrib has them.
SUITES = {"535.261.03": "bookworm", "550.163.01": "trixie", "555.58.02": "experimental"}


def fetch(version: str, folder: Path) -> Path:
    """Unpacks the kernel-open tree of a version into a directory and returns its path.

    The package contains a single archive, `ARCHIVE`.
    """
    if version not in SUITES:
        have = ", ".join(f"{v} ({s})" for v, s in SUITES.items())
        raise KernelBuildError(f"Debian does not have driver {version}, only {have}")
    area = AptArea(SUITES[version], ["contrib"])
    say(f"driver {version}: {PACKAGE} of Debian {area.suite}")
    area.update()
    offered = area.versions(PACKAGE)
    matching = [one for one in offered if one.split("-")[0].split(":")[-1] == version]
    if not matching:
        have = ", ".join(offered) or "none"
        raise KernelBuildError(f"Debian {area.suite} no longer has driver {version} (has: {have})")
    KERNEL_BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KERNEL_BUILD, prefix=".deb-") as name:
        package = area.download(PACKAGE, matching[0], Path(name))
        run("dpkg-deb", "-x", package, Path(name) / "root")
        archive = installed(Path(name) / "root")
        if archive is None:
            raise KernelBuildError(f"{package.name} holds no {ARCHIVE}")
        return unpack(archive, folder)


def installed(root: Path = Path("/")) -> Path | None:
    """Returns the archive of the installed package, or None if it is not installed."""
    path = root / ARCHIVE
    return path if path.is_file() else None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the kernel-open tree of the archive into a directory and returns its path.

    The two precompiled objects, for nvidia.ko and nvidia-modeset.ko, are left out; they account for
    most of the archive's size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run("tar", "-C", folder, "--no-same-owner", "--exclude=*.o_binary", "-xf", archive)
    return folder / "modules" / "nvidia-open-kernel"
