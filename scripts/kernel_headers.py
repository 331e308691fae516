# SPDX-License-Identifier: MIT
"""Finds the headers of the kernel to build modules for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kernel_common import KernelBuildError

__all__ = ["KernelHeaders", "default_headers", "kernel_headers"]


@dataclass(frozen=True)
class KernelHeaders:
    """A kernel that modules can be built for.

    Attributes:
        build: the kernel's build directory.
        source: directory of the kernel's sources.
        release: the kernel's `uname -r`.
        tools: directory of the compiler and binutils to use; None to use the system's.
    """

    build: Path
    source: Path
    release: str
    tools: Path | None = None

    def with_tools(self, *command: str | Path) -> list[str | Path]:
        """Returns a command line that puts `tools` first in PATH."""
        if self.tools is None:
            return [*command]
        return ["env", f"PATH={self.tools}:{os.environ['PATH']}", *command]

    def compiler(self) -> str:
        """Returns the name of the compiler for this kernel."""
        if self.tools is None:
            return "gcc"
        (found,) = self.tools.glob("x86_64-linux-gnu-gcc-[0-9]*")
        return found.name


def kernel_headers(folder: Path) -> KernelHeaders:
    """Returns the kernel with this build directory (the target of /lib/modules/RELEASE/build)."""
    folder = folder.resolve()
    release_file = folder / "include" / "generated" / "utsrelease.h"
    makefile = folder / "Makefile"
    if not release_file.is_file() or not makefile.is_file():
        raise KernelBuildError(f"{folder} is not the build directory of a configured kernel")
    # include/config/kernel.release is wrong in Debian's headers: it contains the source's version.
    quoted = re.search(r'UTS_RELEASE "([^"]+)"', release_file.read_text(encoding="utf-8"))
    if quoted is None:
        raise KernelBuildError(f"{release_file} names no release")
    release = quoted.group(1)
    # A separate build directory has a one-line Makefile, which includes the sources' Makefile.
    included = re.search(r"^include (/\S+)/Makefile$", makefile.read_text("utf-8"), re.MULTILINE)
    source = Path(included.group(1)) if included else folder
    return KernelHeaders(build=folder, source=source, release=release)


def release_key(path: Path) -> tuple[int, ...]:
    """Returns a key that sorts releases numerically: 6.1.0-9 before 6.1.0-56."""
    return tuple(int(number) for number in re.findall(r"\d+", path.name)[:5])


def default_headers() -> KernelHeaders:
    """Returns the guest's kernel headers: by default, those of the newest Debian cloud kernel."""
    chosen = os.environ.get("VMEM_KERNEL_HEADERS")
    if chosen:
        return kernel_headers(Path(chosen))
    found = sorted(Path("/usr/src").glob("linux-headers-*-cloud-amd64"), key=release_key)
    if not found:
        raise KernelBuildError(
            "no linux-headers-*-cloud-amd64 in /usr/src: run scripts/kernel_setup.py"
        )
    return kernel_headers(found[-1])
