#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the modules for the guest's cases: nvidia.ko, stock.ko and ours.ko in build/kernel/load.

The software GPU's nvidia.ko is the installed driver, the unpatched nvidia-uvm.ko the stock module.
Ours is built as `make module` builds it for that nvidia.ko, by the same program and options.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from kernel_common import KERNEL_BUILD, KernelBuildError, say  # noqa: E402
from kernel_headers import default_headers  # noqa: E402
from kernel_tree import Tree, build_tree  # noqa: E402
from module_elf import ModuleFileError, read_module  # noqa: E402
from module_source import DEFAULT_VERSION  # noqa: E402

__all__ = ["prepare"]


def prepare(version: str, jobs: int) -> Path:
    """Builds the three modules and returns their directory."""
    headers = default_headers()
    tree = build_tree(Tree(version=version, headers=headers, patched=False), jobs)
    command = [sys.executable, str(ROOT / "scripts" / "module_build.py"), "-j", str(jobs)]
    command += ["--kdir", str(headers.build), "--nvidia-ko", str(tree / "nvidia.ko")]
    command += ["--version", version]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise KernelBuildError("make module failed")
    folder = KERNEL_BUILD / "load"
    folder.mkdir(parents=True, exist_ok=True)
    ours = Path(done.stdout.strip())
    for name, path in (
        ("nvidia.ko", tree / "nvidia.ko"),
        ("stock.ko", tree / "nvidia-uvm.ko"),
        ("ours.ko", ours),
    ):
        shutil.copyfile(path, folder / name)
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Checks that our module has the driver's symbol versions and our parameters."""
    nvidia, ours = read_module(folder / "nvidia.ko"), read_module(folder / "ours.ko")
    wanted = {name: crc for name, crc in ours.imports.items() if name.startswith("nvUvm")}
    if not wanted or any(nvidia.exports[name].crc != crc for name, crc in wanted.items()):
        raise KernelBuildError("the module does not require nvidia.ko's symbol versions")
    if not any(name.startswith("uvm_vmem_") for name in ours.parameters):
        raise KernelBuildError("the module has no parameter uvm_vmem_*")


def main() -> int:
    """Builds the modules and prints their directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default=DEFAULT_VERSION)
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    try:
        print(prepare(options.version, options.jobs))
    except (KernelBuildError, ModuleFileError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
