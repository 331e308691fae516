# SPDX-License-Identifier: MIT
"""Reuses results between build directories.

The results of the driver's conftests (about 300 small compilations) depend only on the script, the
tests, the compiler and the kernel's headers; they are cached under a key computed from these. A
mutant's directory starts as a copy of the original build: objects contain no paths
(-ffile-prefix-map), so a build in that directory would produce the same objects.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from kernel_common import KERNEL_BUILD, run
from kernel_headers import KernelHeaders

__all__ = ["copy_build", "keep_conftests", "take_conftests"]

QUESTIONS = ("conftest.sh", "Kbuild", "header-presence-tests.mk")
KERNEL = ("include/generated/autoconf.h", "Module.symvers", ".config")


def conftest_key(work: Path, headers: KernelHeaders) -> str:
    """Returns the cache key of the conftest results."""
    compiler = run(*headers.with_tools(headers.compiler(), "--version"))
    digest = hashlib.sha256(f"{headers}\n{compiler}".encode())
    paths = [work / name for name in QUESTIONS] + [headers.build / name for name in KERNEL]
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
    for kbuild in sorted(work.glob("nvidia*/nvidia*.Kbuild")):
        lines = kbuild.read_text(encoding="utf-8").splitlines()
        asked = [line for line in lines if line.startswith("NV_CONFTEST")]
        digest.update("\n".join([kbuild.name, *asked]).encode())
    return digest.hexdigest()[:32]


def take_conftests(work: Path, headers: KernelHeaders) -> bool:
    """Copies cached results into a build directory that has none; returns whether it found any."""
    kept = KERNEL_BUILD / "conftest" / conftest_key(work, headers)
    if (work / "conftest").exists() or not kept.is_dir():
        return False
    shutil.copytree(kept, work / "conftest")
    # Give all files one timestamp, later than the script's, so that nothing looks out of date.
    now = time.time_ns()
    for path in (work / "conftest").rglob("*"):
        os.utime(path, ns=(now, now))
    return True


def keep_conftests(work: Path, headers: KernelHeaders) -> None:
    """Caches the conftest results of a finished build."""
    kept = KERNEL_BUILD / "conftest" / conftest_key(work, headers)
    if kept.is_dir() or not (work / "conftest" / "generic.h").is_file():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".new-") as name:
        new = Path(name) / "conftest"
        shutil.copytree(work / "conftest", new)
        if not kept.is_dir():
            new.rename(kept)


def copy_build(base: Path, work: Path) -> None:
    """Copies a finished build directory and updates the paths that make recorded in it."""
    # Do not match a longer name that begins with this one.
    named = re.compile(re.escape(str(base)) + r"(?![\w.-])")
    with tempfile.TemporaryDirectory(dir=work.parent, prefix=".new-") as name:
        new = Path(name) / work.name
        # Keep timestamps, so that make finds everything up to date.
        shutil.copytree(base, new, symlinks=True)
        notes = [*new.rglob(".*.cmd"), *new.rglob(".*.d"), *new.glob("*.mod")]
        for path in [*notes, new / "modules.order", new / "Module.symvers"]:
            times = path.stat()
            text = path.read_text(encoding="utf-8")
            path.write_text(named.sub(str(work), text), encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        new.rename(work)
