#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the Debian packages: lintian, and a new Debian system that installs, uses and purges them.

The driver's source comes from Debian's contrib, nvidia.ko from the build of the driver's tests. A
virtual machine with a software GPU then boots from the same system, and loads, uses and purges the
module that DKMS built. The virtual machine does not compile the module again, as its processor is
emulated and slow. The exit status is 77 if this machine cannot create a Debian system.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deb import PACKAGES, install_tools, make_twice
from debian_system import CANNOT, DebianSystem, copy_in, in_system, system_mode
from dist import PYTHON, DistError, copy_tracked, run
from driver_debian import PACKAGE
from environment import read_pins
from kernel_common import KERNEL_BUILD, KernelBuildError
from kernel_headers import KernelHeaders, default_headers
from kernel_setup import IMAGE
from kernel_tree import Tree, build_tree
from module_source import DEFAULT_VERSION
from vmem_header import ROOT

__all__ = ["GUEST_SECONDS", "deb_system", "guest_command", "lint"]

SUITE = "bookworm"  # the release whose driver package has DEFAULT_VERSION
SUITE_PYTHON = "3.11"
PACKAGING = ROOT / "packaging"
KERNEL_TESTS = ROOT / "tests" / "kernel"
# Includes vmem-dkms's dependencies, so that any files left after a purge are vmem-dkms's.
INCLUDE = ("dkms", "gcc", "kmod", "libc6-dev", "make", "patch", "pkgconf", "python3", "xz-utils")
# Timeout for the emulated machine on a busy host.
GUEST_SECONDS = 1800


def lint(changes: Path) -> None:
    """Runs lintian on the packages; raises DistError if it reports errors or warnings."""
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", str(changes)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "E: " in done.stdout or "W: " in done.stdout:
        raise DistError(f"lintian {changes.name}\n{done.stdout}{done.stderr}")


def deb_system(debs: Path, kernel: str, image: Path | None) -> DebianSystem:
    """Returns a system that tests the packages in `debs` with the headers of a kernel release."""
    scripts = [PACKAGING / name for name in ("check_lib.sh", "check_deb.sh", "check_guest.sh")]
    return DebianSystem(
        suite=SUITE,
        components=("main", "contrib"),
        include=(*INCLUDE, f"linux-headers-{kernel}", PACKAGE),
        hooks=(copy_in(debs, *scripts), in_system(f"sh /check_deb.sh {kernel}")),
        image=image,
    )


def give_driver(tree: Path, given: Path) -> None:
    """Copies a tree's stock driver into a directory."""
    given.mkdir()
    for name in ("nvidia.ko", "nvidia-uvm.ko"):
        shutil.copyfile(tree / name, given / name)


def give_tests(given: Path) -> None:
    """Copies pyvmem to a directory, with the extension that can read the software GPU's memory."""
    run(sys.executable, KERNEL_TESTS / "lib" / "build.py")
    with tempfile.TemporaryDirectory(prefix="vmem-source-") as name:
        copy_tracked(Path(name))
        shutil.copytree(Path(name) / "pyvmem", given / "python" / "pyvmem")
    shutil.copy(KERNEL_BUILD / "lib" / "_vmem.abi3.so", given / "python" / "pyvmem")
    pins = read_pins("build")
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    options += [f"--python-version={SUITE_PYTHON}", "--target", str(given / "python")]
    wanted = [f"{name}=={pins[name]}" for name in ("cffi", "tqdm")]
    run(PYTHON, "-m", "pip", "install", *options, *wanted)


def guest_command(image: Path, debs: Path, headers: KernelHeaders) -> list[str]:
    """Returns the command that boots the guest from the disk, with the packages copied in."""
    kernel = IMAGE / "boot" / f"vmlinuz-{headers.release}"
    words = [str(PYTHON), str(KERNEL_TESTS / "run.py"), "--name", "deb", "--image", str(image)]
    words += ["--kernel", str(kernel), "--memory", "4096", "--timeout", str(GUEST_SECONDS)]
    return [*words, f"--file={debs}:/debs", "--", "sh", "/check_guest.sh"]


def check(folder: Path, *, guest: bool) -> int:
    """Builds, lints and installs the packages; returns the exit status."""
    debs, image = folder / "debs", folder / "image" / "disk.ext2"
    made = make_twice(debs)
    print("two builds gave identical packages", flush=True)
    (changes,) = [path for path in made if path.suffix == ".changes"]
    lint(changes)
    print(f"lintian finds no problem in {', '.join(PACKAGES)}", flush=True)
    headers = default_headers()
    tree = build_tree(Tree(version=DEFAULT_VERSION, headers=headers, patched=False))
    give_driver(tree, debs / "given")
    mode = system_mode()
    if mode is None:
        print("neither root nor a user namespace: cannot make a Debian system", flush=True)
        return CANNOT
    image.parent.mkdir()
    print("in a new Debian system:", flush=True)
    deb_system(debs, headers.release, image if guest else None).make(mode)
    if guest:
        give_tests(debs / "given")
        print("in a virtual machine:", flush=True)
        command = guest_command(image, debs, headers)
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if status:
            raise DistError(f"exit status {status}: {' '.join(command[:4])} ...")
    return 0


def main() -> int:
    """Parses the command line and runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-guest", action="store_true", help="skip the virtual machine")
    options = parser.parse_args()
    try:
        install_tools({"/usr/bin/lintian": "lintian"})
        with tempfile.TemporaryDirectory(prefix="vmem-deb-check-") as name:
            return check(Path(name), guest=not options.no_guest)
    except (DistError, KernelBuildError) as error:
        print(f"check_deb: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
