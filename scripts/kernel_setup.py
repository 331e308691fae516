#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Sets up the tests of the kernel module; cheap when up to date.

Missing Debian packages are listed and installed, as in environment.py. The guest boots the kernel
that matches the newest installed headers: Debian's package is unpacked into build/kernel/image, not
installed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from apt_area import AptArea
from kernel_common import KERNEL_BUILD, KernelBuildError, locked, replace_folder, run, say
from kernel_headers import default_headers
from system_packages import install_debian_packages

__all__ = ["IMAGE", "kernel_image", "missing_packages"]

IMAGE = KERNEL_BUILD / "image"

# Maps a program to the package that contains it. If the program exists, the package counts as
# installed.
PROGRAMS = {
    "dkms": "dkms",
    "gpg": "gnupg",
    "qemu-system-x86_64": "qemu-system-x86",
    "mke2fs": "e2fsprogs",
    "modinfo": "kmod",
    "patch": "patch",
    "sparse": "sparse",
    "strip": "binutils",
    "xz": "xz-utils",
    "zstd": "zstd",
}
# Also needed to build a kernel with sanitizers, and to build for newer releases.
PROGRAMS_LONG = {"bc": "bc", "bison": "bison", "flex": "flex", "patchelf": "patchelf"}
FILES_LONG = {
    "/usr/include/gelf.h": "libelf-dev",
    "/usr/include/openssl/ssl.h": "libssl-dev",
    "/usr/src/linux-source-6.1.tar.xz": "linux-source-6.1",
}
HEADERS = "linux-headers-cloud-amd64"


def is_static(program: str) -> bool:
    """Returns whether a program is statically linked; the guest has no shared libraries."""
    content = Path(program).resolve().read_bytes()
    return content[:4] == b"\x7fELF" and b"/ld-linux" not in content[:4096]


def missing_packages(*, long: bool = False) -> list[str]:
    """Returns the missing Debian packages; with `long`, also those that test-long needs."""
    wanted = {**PROGRAMS, **(PROGRAMS_LONG if long else {})}
    # An ordinary user's PATH may not include the sbin directories.
    path = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
    missing = [name for program, name in wanted.items() if not shutil.which(program, path=path)]
    busybox = shutil.which("busybox", path=path)
    if not busybox or not is_static(busybox):
        missing.append("busybox-static")
    if long:
        missing += [name for file, name in FILES_LONG.items() if not Path(file).exists()]
    try:
        default_headers()
    except KernelBuildError:
        missing.append(HEADERS)
    return missing


def download(package: str, folder: Path) -> Path:
    """Downloads a package from the system's archives, with private lists if apt's own fail."""
    try:
        run("apt-get", "download", package, cwd=folder)
    except KernelBuildError:
        area = AptArea(None)
        area.update()
        run("apt-get", *area.options(), "download", package, cwd=folder)
    (found,) = folder.glob("*.deb")
    return found


def kernel_image(release: str) -> None:
    """Unpacks a release's kernel and modules into build/kernel/image."""
    with locked(KERNEL_BUILD / ".image.lock"):
        if (IMAGE / "boot" / f"vmlinuz-{release}").is_file() and not IMAGE.is_symlink():
            return
        say(f"the guest's kernel: linux-image-{release}")
        with tempfile.TemporaryDirectory(dir=KERNEL_BUILD, prefix=".image-") as name:
            package = download(f"linux-image-{release}", Path(name))
            new = Path(name) / "image"
            run("dpkg-deb", "-x", package, new)
            if not (new / "boot" / f"vmlinuz-{release}").is_file():
                raise KernelBuildError(f"{package.name} contains no boot/vmlinuz-{release}")
            if IMAGE.is_symlink():
                IMAGE.unlink()
            replace_folder(new, IMAGE)


def main() -> int:
    """Brings everything up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="also set up the kernel of test-long")
    options = parser.parse_args()
    try:
        packages = missing_packages(long=options.long)
        if packages:
            install_debian_packages(packages)
        try:
            kernel_image(default_headers().release)
        except KernelBuildError as error:
            # The archive has only the newest kernel, and the installed headers are older.
            say(f"{error}\nnewer headers are needed")
            install_debian_packages([HEADERS])
            kernel_image(default_headers().release)
    except KernelBuildError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
