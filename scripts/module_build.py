#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the patched nvidia-uvm.ko for this machine: `make module`.

The driver's source is NV_SRC=path, or the installed driver's DKMS tree, or Debian's package. The
kernel is KDIR=path (a build directory such as /lib/modules/RELEASE/build), or the running kernel,
or the newest kernel whose headers are installed. Prints the module's path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

from kernel_common import KERNEL_BUILD, KernelBuildError, locked, run, say
from kernel_headers import KernelHeaders, kernel_headers
from module_elf import KernelModule, ModuleFileError
from module_kbuild import BuildError, build_uvm, kernel_config
from module_source import DriverSource, choose_source, meeting, stage
from module_system import System

__all__ = ["build_module", "headers_for", "module_folder"]


def module_folder(version: str, release: str) -> Path:
    """Returns the output directory of the module for a driver and a kernel."""
    return KERNEL_BUILD / "module" / f"{version}-{release}"


def headers_for(system: System, kdir: str = "") -> KernelHeaders:
    """Returns the kernel to build for: KDIR, the running kernel, or the newest with headers."""
    if kdir:
        return kernel_headers(Path(kdir))
    running = system.root / "lib/modules" / system.release() / "build"
    if running.is_dir():
        return kernel_headers(running)
    found = [path for path in (system.root / "lib/modules").glob("*/build") if path.is_dir()]
    found += (system.root / "usr/src").glob("linux-headers-*")
    built = [path for path in found if (path / "include/generated/autoconf.h").is_file()]
    if not built:
        raise KernelBuildError(
            f"no headers of kernel {system.release()} (or of any): install them, or give KDIR=path"
        )
    kernels = [kernel_headers(path) for path in built]
    newest = max(kernels, key=lambda kernel: [int(n) for n in re.findall(r"\d+", kernel.release)])
    say(f"the running kernel {system.release()} has no headers here; for {newest.release}")
    return newest


def about_versions(nvidia: KernelModule | None, modversions: bool, release: str) -> str:
    """Returns the message about nvidia.ko's symbol versions."""
    if nvidia is not None and modversions:
        return f"linked against the symbol versions of {nvidia.path}"
    if nvidia is not None:
        return (
            f"kernel {release} has no symbol versions (CONFIG_MODVERSIONS): it will not notice a "
            "differing nvidia.ko by itself; `make load` compares the drivers' versions"
        )
    return (
        f"NO nvidia.ko of this driver is installed for kernel {release}, so its symbol versions "
        "are unknown. The module only shows that everything compiles: it cannot be loaded, and "
        "`make load` refuses it. Install the driver first, or give NVIDIA_KO=path."
    )


def sign(module: Path, kernel: KernelHeaders, key: str, certificate: str) -> None:
    """Signs a module for a kernel that requires signatures."""
    tool = kernel.build / "scripts" / "sign-file"
    if not tool.is_file():
        raise KernelBuildError(f"{tool} is not there: the module cannot be signed")
    run(tool, "sha256", key, certificate, module)
    say(f"signed with {key}")


def build_module(
    system: System,
    source: DriverSource,
    kernel: KernelHeaders,
    nvidia: KernelModule | None,
    *,
    jobs: int,
    signer: tuple[str, str] | None = None,
) -> Path:
    """Builds nvidia-uvm.ko and returns its path; records its inputs in module.json beside it."""
    folder = module_folder(source.version, kernel.release)
    modversions = kernel_config(kernel.build).get("CONFIG_MODVERSIONS") == "y"
    with locked(folder.parent / f".{folder.name}.lock"):
        tree = folder / "tree"
        stage(source, tree)
        built = build_uvm(tree, kernel.build, kernel.source, nvidia, jobs=jobs)
        module = folder / "nvidia-uvm.ko"
        new = folder / ".nvidia-uvm.ko.new"
        run("strip", "--strip-debug", "-o", new, built)
        if signer:
            sign(new, kernel, *signer)
        new.rename(module)
        facts = {
            "driver": source.version,
            "source": str(source.tree),
            "origin": source.origin,
            "kernel": kernel.release,
            "symbol_versions": str(nvidia.path) if nvidia and modversions else None,
            "nvidia_srcversion": nvidia.first("srcversion") if nvidia else None,
        }
        (folder / "module.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return module


def main() -> int:
    """Builds the module for the driver and kernel given as options, or else for this machine's."""
    parser = argparse.ArgumentParser(description=__doc__)
    environment = os.environ.get
    parser.add_argument("--nv-src", default=environment("NV_SRC", ""), help="a driver source")
    parser.add_argument(
        "--kdir", default=environment("KDIR", ""), help="a kernel's build directory"
    )
    parser.add_argument(
        "--nvidia-ko", default=environment("NVIDIA_KO", ""), help="the nvidia.ko to build for"
    )
    parser.add_argument("--version", default=environment("NV_VERSION", ""), help="driver version")
    parser.add_argument("--sign-key", default=environment("SIGN_KEY", ""))
    parser.add_argument("--sign-cert", default=environment("SIGN_CERT", ""))
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--sysroot", type=Path, default=Path("/"), help="root directory of the machine to build for"
    )
    options = parser.parse_args()
    if bool(options.sign_key) != bool(options.sign_cert):
        parser.error("SIGN_KEY and SIGN_CERT go together")
    system = System(options.sysroot)
    try:
        kernel = headers_for(system, options.kdir)
        source = choose_source(system, kernel.release, options.nv_src, options.version)
        say(f"driver {source.version} from {source.tree} ({source.origin})")
        say(f"for kernel {kernel.release} ({kernel.build})")
        nvidia = meeting(system, kernel.release, source.version, options.nvidia_ko)
        modversions = kernel_config(kernel.build).get("CONFIG_MODVERSIONS") == "y"
        signer = (options.sign_key, options.sign_cert) if options.sign_key else None
        module = build_module(system, source, kernel, nvidia, jobs=options.jobs, signer=signer)
        say(about_versions(nvidia, modversions, kernel.release))
        print(module)
    except (KernelBuildError, BuildError, ModuleFileError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
