#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds only nvidia-uvm.ko from a patched driver tree, for use with the installed nvidia.ko.

A kernel with symbol versions (CONFIG_MODVERSIONS) rejects a module that was built against different
versions of another module's symbols. nvidia.ko is not built here, so the versions are read from the
nvidia.ko installed for that kernel. This script is also part of the DKMS package, so it imports
only module_elf.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from module_elf import KernelModule, ModuleFileError, read_module, symvers_text

__all__ = [
    "NEEDS_OPEN",
    "BuildError",
    "build_uvm",
    "conftests_only",
    "find_nvidia",
    "flavour_refusal",
    "installed_nvidia",
    "kernel_config",
    "tree_version",
]

VERSION = re.compile(r'NV_VERSION_STRING=\\"([0-9.]+)\\"')


# MODULE_LICENSE of the proprietary nvidia.ko, and why our module cannot be used with it.
PROPRIETARY = "NVIDIA"
NEEDS_OPEN = (
    "of NVIDIA's proprietary flavour: since Linux 5.9 a module that uses such a module's symbols "
    "gets no GPL-only symbols of the kernel, and the patched nvidia-uvm needs some (RCU, "
    "tracepoints, the memory descriptor of a process). Install the driver's open kernel modules, "
    "which support GPUs from Turing on; without them use the back end stock"
)


class BuildError(Exception):
    """Raised when the build fails; the message is for the user."""


def tree_version(tree: Path) -> str:
    """Returns the driver version of a kernel-open tree, or "" for any other directory."""
    kbuild = tree / "Kbuild"
    if not kbuild.is_file() or not (tree / "nvidia-uvm").is_dir():
        return ""
    found = VERSION.search(kbuild.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else ""


def kernel_config(build: Path) -> dict[str, str]:
    """Returns the configuration of the kernel with this build directory."""
    path = build / "include" / "config" / "auto.conf"
    if not path.is_file():
        raise BuildError(f"{build} is not the build directory of a configured kernel")
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line.startswith("CONFIG_"))
    return {name: value for name, _equals, value in pairs}


def installed_nvidia(modules: Path) -> list[KernelModule]:
    """Returns all files under /lib/modules/RELEASE that contain NVIDIA's main module.

    Debian renames the file (nvidia-current.ko), but the module's name is always `nvidia`.
    """
    found: list[KernelModule] = []
    # os.walk does not follow links such as /lib/modules/RELEASE/build.
    for folder, _folders, names in os.walk(modules):
        for name in sorted(names):
            if not re.fullmatch(r"nvidia.*\.ko(\.(xz|zst|gz))?", name):
                continue
            try:
                found.append(read_module(Path(folder) / name, "nvidia"))
            except ModuleFileError:
                continue
    return found


def find_nvidia(modules: Path, version: str, srcversion: str = "") -> KernelModule | None:
    """Finds the installed nvidia.ko of a driver version; prefers the loaded module's file."""
    right = [module for module in installed_nvidia(modules) if module.version == version]
    loaded = [module for module in right if module.first("srcversion") == srcversion]
    return next(iter(loaded or right), None)


def flavour_refusal(nvidia: KernelModule | None) -> str:
    """Returns why our module cannot be used with this nvidia.ko, or "" if no reason is known."""
    if nvidia is None or nvidia.first("license") != PROPRIETARY:
        return ""
    return f"{nvidia.path} is {NEEDS_OPEN}"


def conftests_only(tree: Path) -> None:
    """Reduces nvidia.ko's build file to its conftests.

    The headers that UVM includes from nvidia/ and common/ need the conftests' results. nvidia.ko
    itself is not needed, and some versions do not compile on every kernel on which UVM compiles.
    """
    path = tree / "nvidia" / "nvidia.Kbuild"
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.startswith("NV_CONFTEST")]
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")


def run_make(tree: Path, variables: dict[str, str], jobs: int) -> None:
    """Runs the driver's Makefile; its output goes to build.log."""
    command = ["make", f"-j{jobs}", "modules"]
    command += [f"{name}={value}" for name, value in variables.items()]
    # Do not inherit settings from DKMS or make that would change the build.
    dropped = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "KERNELRELEASE")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    log = tree / "build.log"
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**environment, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        raise BuildError("\n".join([*last, f"the build failed; its full output is in {log}"]))


def check_versions(built: KernelModule, nvidia: KernelModule, modversions: bool) -> None:
    """Checks the symbol versions that the kernel compares when it loads the module."""
    for name, demanded in built.imports.items():
        export = nvidia.exports.get(name)
        if export is None:
            if name.startswith("nvUvmInterface"):
                raise BuildError(f"{nvidia.path} does not export {name}")
            continue
        if modversions and (demanded is None or demanded != export.crc):
            raise BuildError(f"{name}: the module does not require nvidia.ko's version")


def build_uvm(
    tree: Path,
    build: Path,
    source: Path,
    nvidia: KernelModule | None,
    *,
    jobs: int = 2,
) -> Path:
    """Builds nvidia-uvm.ko in a tree that conftests_only() was called on; returns its path.

    `build` and `source` are the kernel's build directory and sources. If there is no nvidia.ko, the
    module compiles but has no symbol versions, and must not be loaded.
    """
    refusal = flavour_refusal(nvidia)
    if refusal:
        raise BuildError(refusal)
    modversions = kernel_config(build).get("CONFIG_MODVERSIONS") == "y"
    symvers = tree / "nvidia.symvers"
    # The module must not contain paths, which would differ between machines. Nothing reads debug
    # information.
    flags = f"-g0 -ffile-prefix-map={tree}/= -ffile-prefix-map={source}/=linux/"
    variables = {
        "SYSSRC": str(source),
        "SYSOUT": str(build),
        "NV_KERNEL_MODULES": "nvidia nvidia-uvm",
        "KCFLAGS": flags,
        # Otherwise make generates BTF from debug information if the headers include a vmlinux.
        "CONFIG_DEBUG_INFO_BTF_MODULES": "",
    }
    if nvidia is None:
        symvers.unlink(missing_ok=True)
        variables["KBUILD_MODPOST_WARN"] = "1"
    else:
        if modversions and any(export.crc is None for export in nvidia.exports.values()):
            raise BuildError(f"{nvidia.path} has no symbol versions, unlike this kernel's modules")
        symvers.write_text(symvers_text(nvidia), encoding="utf-8")
        variables["KBUILD_EXTRA_SYMBOLS"] = str(symvers)
    module = tree / "nvidia-uvm.ko"
    # Otherwise modpost would not rerun if only symbol versions changed.
    for left in (module, tree / "nvidia-uvm.mod.c", tree / "Module.symvers"):
        left.unlink(missing_ok=True)
    run_make(tree, variables, jobs)
    built = read_module(module)
    if nvidia is not None:
        check_versions(built, nvidia, modversions)
    return module


def main() -> int:
    """Builds the tree that contains this script; run by DKMS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", required=True, metavar="RELEASE", help="uname -r")
    parser.add_argument("--headers", required=True, type=Path, help="the kernel's build directory")
    default = Path(os.environ.get("VMEM_MODULES_DIR", "/lib/modules"))
    parser.add_argument(
        "--modules", type=Path, default=default, help="directory of installed modules"
    )
    options = parser.parse_args()
    tree = Path(__file__).resolve().parent
    version = tree_version(tree)
    try:
        nvidia = find_nvidia(options.modules / options.kernel, version)
        if nvidia is None:
            others = {module.version for module in installed_nvidia(options.modules)}
            raise BuildError(
                f"this is the module for driver {version}; nvidia.ko of that version is not "
                f"installed for kernel {options.kernel}"
                + (f" (installed: {', '.join(sorted(others))})" if others else "")
            )
        build = options.headers.resolve()
        source = source_folder(build)
        print(build_uvm(tree, build, source, nvidia, jobs=os.cpu_count() or 1))
    except (BuildError, ModuleFileError) as error:
        print(f"nvidia-uvm: {error}", file=sys.stderr)
        return 1
    return 0


def source_folder(build: Path) -> Path:
    """Returns the kernel's sources, which some distributions separate from the build directory."""
    text = (build / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^include (/\S+)/Makefile$", text, re.MULTILINE)
    return Path(found.group(1)) if found else build


if __name__ == "__main__":
    sys.exit(main())
