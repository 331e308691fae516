#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the self-checking kernel (KASAN, lockdep, kmemleak, UBSAN, fault injection).

The source is Debian's package linux-source-6.1, or the directory that LINUX_SRC names, and the
configuration is guest/checked.config. Prints the path of a directory that contains `bzImage` and
`build`, against which modules are built.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from apt_area import AptArea  # noqa: E402
from kernel_common import KERNEL_BUILD, KernelBuildError, locked, run, say  # noqa: E402

__all__ = ["main"]

CONFIG = HERE / "guest" / "checked.config"
PACKAGE = "linux-source-6.1"
INSTALLED = Path(f"/usr/src/{PACKAGE}.tar.xz")
PARTS = ("bzImage", "modules")  # `modules` creates Module.symvers
JOBS = os.cpu_count() or 1


def fetched_archive(folder: Path) -> Path:
    """Returns the source archive from Debian's package, which is downloaded but not installed."""
    area = AptArea(None)
    if not area.versions(PACKAGE):
        area.update()
    versions = area.versions(PACKAGE)
    if not versions:
        raise KernelBuildError(f"package {PACKAGE} not found: set LINUX_SRC to a source of Linux")
    package = area.download(PACKAGE, versions[0], folder)
    run("dpkg-deb", "-x", package, folder / "package")
    return folder / "package" / INSTALLED.relative_to("/")


def unpacked_source(folder: Path) -> Path:
    """Returns the kernel's source: LINUX_SRC, or Debian's, which is fetched and unpacked once."""
    given = os.environ.get("LINUX_SRC")
    if given:
        return Path(given).resolve()
    source = folder / PACKAGE
    if source.is_dir():
        return source
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        new = Path(name)
        archive = INSTALLED if INSTALLED.exists() else fetched_archive(new)
        say(f"unpacking {archive.name}")
        run("tar", "-xf", archive, "-C", new)
        (new / PACKAGE).rename(source)
    return source


def configure(source: Path, build: Path) -> None:
    """Regenerates .config if checked.config has changed; checks that all options were accepted."""
    stamp = build / ".wanted"
    wanted = f"{source}\n{CONFIG.read_text(encoding='utf-8')}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    build.mkdir(parents=True, exist_ok=True)
    command = ["make", "-s", "-C", str(source), f"O={build}", f"KCONFIG_ALLCONFIG={CONFIG}"]
    run(*command, "allnoconfig")
    made = set((build / ".config").read_text(encoding="utf-8").splitlines())
    asked = re.findall(r"^CONFIG_\w+=[ym\d].*$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE)
    lost = [line for line in asked if line not in made]
    if lost:
        raise KernelBuildError(f"this kernel does not accept: {', '.join(lost)}")
    stamp.write_text(wanted, encoding="utf-8")


def main() -> int:
    """Builds the parts of the kernel that are missing or out of date."""
    folder = KERNEL_BUILD / "checked"
    try:
        for tool in ("flex", "bison", "bc"):
            if not shutil.which(tool):
                raise KernelBuildError(f"{tool} not found: run scripts/kernel_setup.py --long")
        with locked(folder / ".lock"):
            build = folder / "build"
            source = unpacked_source(folder)
            configure(source, build)
            if not (build / ".done").exists():
                say(f"building the kernel with {JOBS} jobs")
            run("nice", "make", "-C", source, f"O={build}", f"-j{JOBS}", *PARTS)
            (build / ".done").touch()
            image = folder / "bzImage"
            image.unlink(missing_ok=True)
            image.symlink_to("build/arch/x86/boot/bzImage")
    except KernelBuildError as error:
        say(str(error))
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
