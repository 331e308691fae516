#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds nvidia-uvm.ko (patched) and the software GPU's nvidia.ko; prints the directory with both.

The build is incremental, in build/kernel/work/NAME. build/kernel/trees/NAME receives the two
modules, without debug information, and links to the headers; each module is replaced atomically.
Concurrent runs for the same tree wait for each other.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from driver_edits import edits
from driver_patches import apply_patch, kernel_files, series_digest, series_for
from driver_source import BUILD_PARTS, driver_source
from kernel_common import (
    KERNEL_BUILD,
    ROOT,
    KernelBuildError,
    branch_of,
    locked,
    replace_folder,
    run,
    say,
    tree_digest,
    tree_files,
    write_if_changed,
)
from kernel_debian import KERNEL_SUITES, debian_headers
from kernel_headers import KernelHeaders, default_headers, kernel_headers
from kernel_reuse import copy_build, keep_conftests, take_conftests

__all__ = ["Tree", "build_tree", "headers_of"]

MODULES = ("nvidia", "nvidia-uvm")
LOCK_CLASSES = ROOT / "tests" / "kernel" / "guest" / "lockdep_classes.h"

# Replaces nvidia/nvidia.Kbuild: builds the software GPU and lists the driver's conftests.
SOFTGPU_KBUILD = """\
obj-m += nvidia.o
{objects}
nvidia-y := $(SOFTGPU_OBJECTS)
$(call ASSIGN_PER_OBJ_CFLAGS, $(SOFTGPU_OBJECTS), -O2 -I$(src)/nvidia -I$(src)/nvidia/softgpu \\
 -DSOFTGPU_BRANCH={branch} -DSOFTGPU_VERSION=\\"{version}\\" $(SOFTGPU_CFLAGS))
NV_OBJECTS_DEPEND_ON_CONFTEST += $(SOFTGPU_OBJECTS)
{conftests}
"""

# Features of a version's UVM interface: SG_HAS_NAME is 1 if the version's headers contain this
# string. Version numbers do not determine the features: versions within a branch can differ.
INTERFACE = ("nv_uvm_interface.h", "nv_uvm_types.h")
FEATURES = {
    "ACCESS_BITS": "nvUvmInterfaceAccessBitsBufAlloc(",
    "ACCESS_COUNT": "accessCntrBufferCount",
    "CONST_CONFIG": "const UvmGpuAccessCntrConfig *pAccessCntrConfig",
    "ATS_ARGUMENT": "NvBool enableAts",
    "EVENTS": "nvUvmInterfaceRegisterUvmEvents(",
    "KEY_NOTIFIER": "keyRotationNotifier",
    "KEY_ROTATION": "nvUvmInterfaceCslRotateKey(",
    "NVLINK_5": "UVM_LINK_TYPE_NVLINK_5",
    "NVLINK_INFO": "nvUvmInterfaceGetNvlinkInfo(",
    "PDB_DMA": "NvU64 *dmaAddress",
}


@dataclass(frozen=True)
class Tree:
    """A build, defined by the driver's version, the kernel, and the kind of build."""

    version: str
    headers: KernelHeaders
    type: str = "release"
    patched: bool = True
    mutant: str | None = None
    own_kernel: bool = False  # a self-checking kernel instead of the guest's usual kernel
    suite: str = ""  # the kernel's Debian suite, or "" for the guest's usual kernel
    patches: int | None = None  # apply only the first n patches, to check that each builds

    @property
    def base(self) -> str:
        """The name of the work directory, which all mutants of one kind of tree share."""
        name = f"{self.version}-{self.type}" + ("" if self.patched else "-unpatched")
        if self.own_kernel:
            name += f"-{self.headers.release}"
        if self.suite:
            name += f"-{self.suite}"
        if self.patches is not None:
            name += "-steps"
        return name + ("-mutants" if self.mutant else "")

    @property
    def name(self) -> str:
        """The name of the directory with the modules."""
        return self.base.removesuffix("s") + f"-{self.mutant}" if self.mutant else self.base

    @property
    def work(self) -> Path:
        """The build directory."""
        return KERNEL_BUILD / "work" / self.base

    @property
    def lock(self) -> Path:
        """The lock held during the build."""
        return KERNEL_BUILD / "work" / f".{self.base}.lock"

    @property
    def out(self) -> Path:
        """The output directory."""
        return KERNEL_BUILD / "trees" / self.name


def softgpu_folder() -> Path:
    """Returns the directory with the software GPU's sources."""
    return Path(os.environ.get("VMEM_SOFTGPU_DIR", ROOT / "tests" / "kernel" / "softgpu"))


def patched_source(version: str, patches: int | None) -> Path:
    """Returns a version's patched sources; recreates them if the driver or patches changed."""
    pristine = driver_source(version)
    wanted = f"{tree_digest(pristine, BUILD_PARTS)} {series_digest(version)} {patches}\n"
    final = KERNEL_BUILD / "patched" / (version if patches is None else f"{version}-{patches}")
    stamp = final.with_name(f"{final.name}.stamp")
    with locked(final.with_name(f".{final.name}.lock")):
        if final.is_dir() and stamp.is_file() and stamp.read_text("utf-8") == wanted:
            return final
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as name:
            new = Path(name) / version
            shutil.copytree(pristine, new)
            for patch in series_for(version)[:patches]:
                apply_patch(patch, new)
            replace_folder(new, final)
        stamp.write_text(wanted, encoding="utf-8")
    return final


def softgpu_files(version: str, source: Path) -> dict[str, bytes]:
    """Returns the software GPU's files for nvidia/, including generated files."""
    folder = softgpu_folder()
    sources = [path for path in sorted(folder.glob("*.c")) if path.name != "softgpu_user.c"]
    if not sources:
        raise KernelBuildError(f"no software GPU in {folder}")
    files = {f"softgpu/{p.name}": p.read_bytes() for p in (*sources, *folder.glob("*.h"))}
    fragment = folder / "softgpu.Kbuild"
    if fragment.is_file():
        files["softgpu/softgpu.Kbuild"] = fragment.read_bytes()
        objects = "include $(src)/nvidia/softgpu/softgpu.Kbuild"
    else:
        listed = " ".join(f"nvidia/softgpu/{path.stem}.o" for path in sources)
        objects = f"SOFTGPU_OBJECTS := {listed}"
    original = (source / "nvidia" / "nvidia.Kbuild").read_text(encoding="utf-8")
    conftests = [line for line in original.splitlines() if line.startswith("NV_CONFTEST")]
    kbuild = SOFTGPU_KBUILD.format(
        objects=objects,
        branch=branch_of(version),
        version=version,
        conftests="\n".join(conftests),
    )
    files["nvidia.Kbuild"] = kbuild.encode()
    files["softgpu/softgpu_exports.h"] = exports(folder, source).encode()
    files["softgpu/softgpu_features.h"] = features(source).encode()
    return files


def features(source: Path) -> str:
    """Returns C code that defines the software GPU's feature macros as 1 or 0."""
    headers = [source / "common" / "inc" / name for name in INTERFACE]
    text = "".join(path.read_text("utf-8", "replace") for path in headers if path.is_file())
    return "".join(f"#define SG_HAS_{name} {int(FEATURES[name] in text)}\n" for name in FEATURES)


def exports(folder: Path, source: Path) -> str:
    """Returns an EXPORT_SYMBOL for each function of nvidia.ko that this version of UVM calls.

    If the software GPU's directory contains exports.txt, only the names in it are exported.
    """
    called: set[str] = set()
    for path in (source / "nvidia-uvm").glob("*.c"):
        text = path.read_text(encoding="utf-8", errors="replace")
        called.update(re.findall(r"\b(nvUvmInterface[A-Za-z0-9]+) *\(", text))
    known = folder / "exports.txt"
    if known.is_file():
        called &= set(known.read_text(encoding="utf-8").split())
    return "".join(f"EXPORT_SYMBOL({name});\n" for name in sorted(called))


def wanted_files(tree: Tree) -> dict[str, bytes]:
    """Returns the path and content of each source file in the work directory."""
    if tree.patched:
        source = patched_source(tree.version, tree.patches)
    else:
        source = driver_source(tree.version)
    parts = [part for part in BUILD_PARTS if (source / part).exists()]
    files = {path.as_posix(): (source / path).read_bytes() for path in tree_files(source, parts)}
    files |= edits(files, tree.headers.source)
    # Omit debug information, because it is not loaded. The KCFLAGS in make() cannot do this, since
    # they precede these flags.
    kbuild = files["nvidia-uvm/nvidia-uvm.Kbuild"]
    files["nvidia-uvm/nvidia-uvm.Kbuild"] = kbuild.replace(b"-DDEBUG -O1 -g\n", b"-DDEBUG -O1\n")
    if tree.own_kernel:
        add_lock_classes(files)
    for header in sorted((source / "nvidia").glob("*.h")):
        files[f"nvidia/{header.name}"] = header.read_bytes()
    for name, content in softgpu_files(tree.version, source).items():
        files[f"nvidia/{name}"] = content
    if tree.patched:
        for name, content in kernel_files(tree.mutant).items():
            files[f"nvidia-uvm/{name}"] = content
    return files


def add_lock_classes(files: dict[str, bytes]) -> None:
    """Gives UVM's locks separate lockdep classes; see lockdep_classes.h."""
    files["nvidia-uvm/lockdep_classes.h"] = LOCK_CLASSES.read_bytes()
    flag = b"NVIDIA_UVM_CFLAGS += -DNVIDIA_UVM_ENABLED\n"
    kbuild = files["nvidia-uvm/nvidia-uvm.Kbuild"]
    if flag not in kbuild:
        raise KernelBuildError("nvidia-uvm.Kbuild: no place for lockdep_classes.h")
    include = b"NVIDIA_UVM_CFLAGS += -include $(src)/nvidia-uvm/lockdep_classes.h\n"
    files["nvidia-uvm/nvidia-uvm.Kbuild"] = kbuild.replace(flag, flag + include)


def update_work(tree: Tree) -> None:
    """Writes changed files into the work directory and removes deleted sources."""
    files = wanted_files(tree)
    listing = tree.work / ".sources"
    if listing.is_file():
        for name in set(listing.read_text(encoding="utf-8").split("\n")) - set(files):
            if name:
                (tree.work / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_if_changed(tree.work / name, content)
    listing.write_text("\n".join(sorted(files)), encoding="utf-8")


def make(tree: Tree, jobs: int) -> None:
    """Runs the driver's Makefile on the work directory."""
    # The modules must not contain paths, which would differ between machines. Debug information is
    # not loaded.
    flags = f"-g0 -ffile-prefix-map={tree.work}/= -ffile-prefix-map={tree.headers.source}/=linux/"
    tools = tree.headers.tools
    own = [f"CC={tree.headers.compiler()}", "LD=x86_64-linux-gnu-ld"] if tools else []
    command = tree.headers.with_tools(
        "make",
        f"-j{jobs}",
        "modules",
        *own,
        f"SYSSRC={tree.headers.source}",
        f"SYSOUT={tree.headers.build}",
        f"NV_KERNEL_MODULES={' '.join(MODULES)}",
        f"UVM_BUILD_TYPE={tree.type}",
        f"KCFLAGS={flags}",
        "CONFIG_DEBUG_INFO_BTF_MODULES=",
    )
    run(*command, cwd=tree.work, log=tree.work / "build.log")


def publish(tree: Tree) -> None:
    """Copies the stripped modules into the output directory, and links the headers there."""
    tree.out.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        built = tree.work / f"{module}.ko"
        final = tree.out / f"{module}.ko"
        if final.is_file() and final.stat().st_mtime_ns >= built.stat().st_mtime_ns:
            continue
        new = tree.out / f".{module}.ko.new"
        run("strip", "--strip-debug", "-o", new, built)
        new.rename(final)
    for name in ("common", "nvidia", "nvidia-uvm"):
        link = tree.out / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(tree.work / name, tree.out))


def build_tree(tree: Tree, jobs: int = 2) -> Path:
    """Builds a tree incrementally and returns the directory with the modules."""
    with locked(tree.lock):
        if tree.mutant and not tree.work.is_dir():
            unchanged = replace(tree, mutant=None)
            build_tree(unchanged, jobs)
            with locked(unchanged.lock):
                copy_build(unchanged.work, tree.work)
        tree.work.mkdir(parents=True, exist_ok=True)
        update_work(tree)
        take_conftests(tree.work, tree.headers)
        make(tree, jobs)
        keep_conftests(tree.work, tree.headers)
        if tree.mutant:
            # The work directory may contain modules of a different mutant or of an older build.
            for module in MODULES:
                (tree.out / f"{module}.ko").unlink(missing_ok=True)
        publish(tree)
    return tree.out


def headers_of(suite: str | None) -> KernelHeaders:
    """Returns the headers of a Debian suite's kernel, or of the guest's usual kernel if None."""
    return debian_headers(suite) if suite else default_headers()


def main() -> int:
    """Builds the tree given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="a driver version, for example 535.261.03")
    parser.add_argument("--type", choices=("release", "debug"), default="release")
    parser.add_argument("--unpatched", action="store_true", help="build UVM without our patches")
    parser.add_argument("--mutant", metavar="NAME", help="apply tests/kernel/mutants/NAME.patch")
    parser.add_argument(
        "--kernel-headers", metavar="DIR", type=Path, help="a kernel's build directory"
    )
    parser.add_argument(
        "--suite", choices=KERNEL_SUITES, help="build for this Debian suite's kernel"
    )
    parser.add_argument("--jobs", "-j", type=int, default=2)
    options = parser.parse_args()
    if options.suite and options.kernel_headers:
        parser.error("--suite and --kernel-headers exclude each other")
    if options.mutant and options.unpatched:
        parser.error("a mutant is a change to the patched driver")
    try:
        given = options.kernel_headers
        tree = Tree(
            version=options.version,
            headers=kernel_headers(given) if given else headers_of(options.suite),
            type=options.type,
            patched=not options.unpatched,
            mutant=options.mutant,
            own_kernel=given is not None,
            suite=options.suite or "",
        )
        print(build_tree(tree, options.jobs))
    except KernelBuildError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
