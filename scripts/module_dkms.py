#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The patched module as a DKMS package: `package` creates it, `install` and `uninstall` use it.

The package's module has a different file name, nvidia-uvm-vmem.ko; a modprobe rule makes `modprobe
nvidia-uvm` load it instead of the stock module. The stock file is never touched, so removing the
rule and the package restores the stock module.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from driver_source import version_of
from kernel_common import KERNEL_BUILD, ROOT, KernelBuildError, replace_folder, run, say
from module_build import headers_for
from module_elf import ModuleFileError
from module_kbuild import BuildError
from module_refuse import PREFIX
from module_source import choose_source, meeting, stage
from module_system import UVM, System

__all__ = ["NAME", "Dkms", "make_package"]

NAME = "nvidia-uvm-vmem"
FILES = ROOT / "kernel_module" / "dkms"
BUILDERS = ("module_kbuild.py", "module_elf.py")
RULE = "etc/modprobe.d/00-nvidia-uvm-vmem.conf"
PROGRAM = "usr/local/libexec/vmem/load-uvm"


def providers(tree: Path) -> list[str]:
    """Returns the names of the DKMS packages that build nvidia.ko."""
    found: set[str] = set()
    for path in tree.glob("nvidia*/*/source/dkms.conf"):
        text = path.read_text(encoding="utf-8", errors="replace")
        name = re.search(r'^PACKAGE_NAME="?([^"\n]+)"?', text, re.MULTILINE)
        if name and name.group(1) != NAME:
            found.add(name.group(1))
    return sorted(found)


def make_package(tree: Path, folder: Path, depends: list[str]) -> Path:
    """Creates the package's source directory from a staged tree and returns it."""
    version = version_of(tree)
    if version is None:
        raise KernelBuildError(f"{tree} is not a driver source")
    final = folder / f"{NAME}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        new = Path(name) / final.name
        shutil.copytree(tree, new)
        (new / ".sources").unlink(missing_ok=True)
        for builder in BUILDERS:
            shutil.copyfile(ROOT / "scripts" / builder, new / builder)
        lines = [f'BUILD_DEPENDS[{n}]="{package}"' for n, package in enumerate(depends)]
        conf = (FILES / "dkms.conf").read_text(encoding="utf-8")
        conf = conf.replace("@VERSION@", version).replace("@BUILD_DEPENDS@", "\n".join(lines))
        (new / "dkms.conf").write_text(conf, encoding="utf-8")
        replace_folder(new, final)
    return final


@dataclass(frozen=True)
class Dkms:
    """DKMS on this machine, or in a test's directories.

    Attributes:
        own_folders: true if dkms must use the directories under `system.root`.
        packaged: true if the modprobe rule and its program belong to a distribution's package.
    """

    system: System
    own_folders: bool = False
    packaged: bool = False

    @property
    def rule(self) -> list[tuple[str, str, int]]:
        """The files that make modprobe load the module, each with source, destination and mode."""
        if self.packaged:
            return []
        return [("load-uvm", PROGRAM, 0o755), ("modprobe.conf", RULE, 0o644)]

    @property
    def sources(self) -> Path:
        """DKMS's directory of package sources."""
        return self.system.root / "usr/src"

    @property
    def tree(self) -> Path:
        """DKMS's directory of builds."""
        return self.system.root / "var/lib/dkms"

    def dkms(self, *words: str) -> str:
        """Runs dkms and returns its output."""
        if not shutil.which("dkms"):
            raise KernelBuildError("dkms is not installed (Debian's package dkms)")
        options: list[str] = []
        if self.own_folders:
            modules = self.system.root / "lib/modules"
            options = ["--dkmstree", str(self.tree), "--sourcetree", str(self.sources)]
            options += ["--installtree", str(modules), "--no-depmod"]
            os.environ["VMEM_MODULES_DIR"] = str(modules)
            # Prevent DKMS from creating or using the machine's signing keys.
            key, certificate = self.tree / "mok.key", self.tree / "mok.pub"
            os.environ.update(mok_signing_key=str(key), mok_certificate=str(certificate))
        return run("dkms", *words, *options)

    def versions(self) -> list[str]:
        """Returns the versions of our package that DKMS has registered."""
        folder = self.tree / NAME
        return sorted(path.name for path in folder.glob("*") if (path / "source").exists())

    def install(self, package: Path, release: str, headers: Path) -> None:
        """Builds and installs the package for a kernel; undoes everything if that fails."""
        version = package.name.removeprefix(f"{NAME}-")
        for old in self.versions():
            self.forget(old)
        shutil.copytree(package, self.sources / package.name)
        try:
            self.dkms("add", "-m", NAME, "-v", version)
            kernel = ["-k", release, "--kernelsourcedir", str(headers)]
            self.dkms("build", "-m", NAME, "-v", version, *kernel)
            self.dkms("install", "-m", NAME, "-v", version, *kernel)
            for name, path, mode in self.rule:
                target = self.system.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(FILES / name, target)
                target.chmod(mode)
        except (KernelBuildError, OSError):
            self.uninstall()
            raise

    def forget(self, version: str) -> None:
        """Removes a version of the package from DKMS, with its modules for all kernels."""
        self.dkms("remove", "-m", NAME, "-v", version, "--all")
        shutil.rmtree(self.sources / f"{NAME}-{version}", ignore_errors=True)

    def uninstall(self) -> list[str]:
        """Removes all parts of an installation and returns the versions that were installed."""
        # Remove the rule first, so that modprobe loads the stock module from then on.
        for _, path, _ in reversed(self.rule):
            (self.system.root / path).unlink(missing_ok=True)
        versions = self.versions()
        for version in versions:
            self.forget(version)
        for left in self.sources.glob(f"{NAME}-*"):
            shutil.rmtree(left)
        return versions


def package(system: System, options: argparse.Namespace) -> tuple[Path, str, Path]:
    """Creates the package for this machine's driver.

    Returns the package, and the kernel's release and headers.
    """
    kernel = headers_for(system, options.kdir)
    source = choose_source(
        system, kernel.release, options.nv_src, options.version, download=not options.packaged
    )
    say(f"driver {source.version} from {source.tree} ({source.origin})")
    if options.action == "install" and meeting(system, kernel.release, source.version) is None:
        raise KernelBuildError(
            f"nvidia.ko of driver {source.version} is not installed for kernel {kernel.release}: "
            "install the stock driver first; the module is linked against its symbol versions"
        )
    folder = KERNEL_BUILD / "dkms"
    staged = folder / f".tree-{source.version}"
    stage(source, staged)
    made = make_package(staged, folder, providers(system.root / "var/lib/dkms"))
    return made, kernel.release, kernel.build


def act(system: System, dkms: Dkms, options: argparse.Namespace) -> None:
    """Carries out the action given on the command line."""
    if options.action != "package" and not os.access(dkms.sources, os.W_OK):
        raise KernelBuildError(f"only root may write {dkms.sources}")
    if options.action == "uninstall":
        removed = dkms.uninstall()
        say(f"removed {', '.join(removed)}" if removed else "nothing was installed")
        if system.loaded(UVM) and system.uvm_is_ours():
            say("the patched module is still loaded: make unload, or restart the machine")
        return
    made, release, headers = package(system, options)
    if options.action == "package":
        print(made)
        return
    dkms.install(made, release, headers)
    say(f"installed for kernel {release}; `modprobe nvidia-uvm` loads it from now on")
    if system.loaded(UVM) and not system.uvm_is_ours():
        say("the stock module is still loaded: restart, or end what uses it and reload it")
    say(f"it is the patched module that has parameters {PREFIX}* in /sys/module/{UVM}")


def main() -> int:
    """Parses the command line and carries out the action."""
    parser = argparse.ArgumentParser(description=__doc__)
    environment = os.environ.get
    parser.add_argument("action", choices=("package", "install", "uninstall"))
    parser.add_argument("--nv-src", default=environment("NV_SRC", ""), help="a driver source")
    parser.add_argument(
        "--kdir", default=environment("KDIR", ""), help="a kernel's build directory"
    )
    parser.add_argument("--version", default=environment("NV_VERSION", ""), help="driver version")
    parser.add_argument(
        "--packaged",
        action="store_true",
        help="the modprobe rule belongs to a package; download nothing",
    )
    parser.add_argument(
        "--sysroot", type=Path, default=Path("/"), help="root directory of the machine"
    )
    options = parser.parse_args()
    system = System(options.sysroot)
    try:
        own = options.sysroot != Path("/")
        act(system, Dkms(system, own_folders=own, packaged=options.packaged), options)
    except (KernelBuildError, BuildError, ModuleFileError, OSError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
