#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds libvmem's tests for the guest, which read GPU memory through /dev/softgpu.

The results are in build/kernel/lib: the C tests that can run on a GPU, linked statically, and
pyvmem's extension module. The library consists of the same objects that users get; only
`vm_uvm_contents` is added.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("VMEM_KERNEL_BUILD", ROOT / "build" / "kernel")).resolve()
OUT = BUILD / "lib"
OBJECTS = BUILD / "cache" / "libvmem"
SOFTGPU = ROOT / "tests" / "kernel" / "softgpu"
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"]
INCLUDES = ["libvmem/include", "libvmem/src", "kernel_module", "tests/kernel/softgpu"]
ACCESSOR = [Path(__file__).resolve().parent / "contents_softgpu.c", SOFTGPU / "softgpu_user.c"]
# Tests that do not depend on the back end `host`, so they run on any back end.
TESTS = (
    "accounting",
    "async",
    "basic",
    "batch",
    "entries",
    "errors",
    "large",
    "move",
    "parts",
    "pool",
    "stress",
    "threads",
    "zeroing",
)
OWN_TESTS = ("uvm",)


def run(*words: str | Path) -> None:
    """Runs a command in the repository; shows its output if the command fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit status {done.returncode}: {' '.join(map(str, words))}")


def stale(target: Path, sources: Iterable[Path]) -> bool:
    """True if the target is missing or older than a source."""
    if not target.exists():
        return True
    return any(source.stat().st_mtime > target.stat().st_mtime for source in sources)


def compiler() -> list[str]:
    """Returns the C compiler command with the common flags."""
    return ["gcc", *FLAGS, *(f"-I{ROOT / folder}" for folder in INCLUDES)]


def library() -> list[Path]:
    """Builds libvmem's objects with its own Makefile, and returns them."""
    run("make", "-s", "-C", "libvmem", "-j2", f"BUILD={OBJECTS}", "lib")
    return sorted((OBJECTS / "lib" / "obj").rglob("*.o"))


def c_tests(objects: list[Path]) -> None:
    """Builds the C programs, linked statically because they run in the guest's initramfs."""
    tests = ROOT / "tests" / "c"
    own = Path(__file__).resolve().parent
    for name in (*TESTS, *OWN_TESTS):
        folder = own if name in OWN_TESTS else tests
        sources = [folder / f"test_{name}.c", tests / "open.c", *ACCESSOR]
        target = OUT / f"test_{name}"
        if not stale(target, [*sources, *objects, tests / "check.h", *SOFTGPU.glob("softgpu*.h")]):
            continue
        part = OUT / f".test_{name}"
        # The library looks for libcuda at run time, but the guest has none.
        run(
            *compiler(),
            "-static",
            f"-I{tests}",
            "-Wl,--no-warnings",
            "-o",
            part,
            *sources,
            *objects,
        )
        part.replace(target)


def extension(objects: list[Path]) -> None:
    """Builds pyvmem's extension module as setup.py does, except for the memory accessor."""
    target = OUT / "_vmem.abi3.so"
    script = ROOT / "pyvmem" / "_build.py"
    built = runpy.run_path(str(script))
    more = [*(ROOT / "pyvmem" / f"_{name}.c" for name in built["OWN"]), *ACCESSOR]
    if not stale(target, [*objects, *more, script, ROOT / "libvmem" / "include" / "vmem.h"]):
        return
    os.chdir(ROOT)
    source = OUT / "_vmem.c"
    built["ffibuilder"]().emit_c_code(str(source))
    part = OUT / "._vmem.so"
    include = sysconfig.get_paths()["include"]
    words = [*compiler(), "-shared", "-DPy_LIMITED_API=0x030a0000", f"-I{include}", "-Ipyvmem"]
    exports = "-Wl,--version-script=pyvmem/_vmem.map"
    run(*words, "-o", part, source, *more, *objects, exports, "-ldl")
    part.replace(target)


def main() -> None:
    """Builds everything that is out of date."""
    python = ROOT / "build" / "venv" / "bin" / "python"
    if Path(sys.prefix).resolve() != python.parent.parent.resolve():
        os.execv(python, [str(python), *sys.argv])  # the Python that has cffi
    OUT.mkdir(parents=True, exist_ok=True)
    # Tests that run in parallel may each run this script.
    with (OUT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = library()
        c_tests(objects)
        extension(objects)


if __name__ == "__main__":
    main()
