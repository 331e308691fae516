# SPDX-License-Identifier: MIT
"""Fetches the kernels of other Debian suites: headers, image and the compiler that they need.

The packages are unpacked into build/kernel/debian, not installed; root is not needed. The compiler
and kbuild's programs need a newer C library than this system's, so patchelf makes them use the C
library that was unpacked with the compiler.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from apt_area import AptArea
from kernel_common import KERNEL_BUILD, KernelBuildError, locked, replace_folder, run, say
from kernel_headers import KernelHeaders, kernel_headers

__all__ = ["KERNEL_SUITES", "debian_headers"]

# The suites whose kernels are tested, each with the suite that provides its compiler.
KERNEL_SUITES = {"trixie": "trixie", "trixie-backports": "trixie"}
FOLDER = KERNEL_BUILD / "debian"
FLAVOUR = "cloud-amd64"
LOADER = "/lib64/ld-linux-x86-64.so.2"
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")


def unpack(packages: list[Path], root: Path) -> None:
    """Unpacks packages into a directory."""
    for package in packages:
        run("dpkg-deb", "-x", package, root)


def use_libraries(root: Path, libraries: Path) -> None:
    """Makes all programs under `root` use the C library in `libraries`."""
    programs = []
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file() or not path.stat().st_mode & 0o100:
            continue
        with path.open("rb") as file:
            start = file.read(4096)
        if start[:4] == b"\x7fELF" and LOADER.encode() in start:
            programs.append(path)
    if not programs:
        raise KernelBuildError(f"{root} holds no programs")
    loader = libraries / Path(LOADER).name
    options = ("--set-interpreter", loader, "--force-rpath", "--set-rpath", libraries)
    run("patchelf", *options, *programs)


def compiler_folder(suite: str, compiler: str) -> Path:
    """Returns the directory with a suite's compiler; creates it if missing."""
    final = FOLDER / f"{suite}-{compiler}"
    with locked(FOLDER / f".{final.name}.lock"):
        if final.is_dir():
            return final
        area = AptArea(suite, ["main"])
        say(f"{compiler} of Debian {suite}")
        area.update()
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".new-") as name:
            new = Path(name) / "root"
            # kbuild's objtool and resolve_btfids need libelf.
            wanted = [compiler, "binutils", "libelf1t64"]
            unpack(area.download_closure(wanted, Path(name) / "packages"), new)
            use_libraries(new, final / LIBRARIES)
            replace_folder(new, final)
    return final


def kernel_packages(area: AptArea, release: str) -> list[str]:
    """Returns the names of the packages with a release's headers, image and modules."""
    version = release.removesuffix(f"-{FLAVOUR}")
    names = [f"linux-headers-{release}", f"linux-headers-{version}-common"]
    names += [f"linux-kbuild-{version}", f"linux-image-{release}"]
    # If linux-image is a metapackage, these packages contain the image and the modules.
    parts = (f"linux-binary-{release}", f"linux-modules-{release}")
    return [*names, *(name for name in parts if area.versions(name))]


def newest_release(area: AptArea) -> str:
    """Returns the release of a suite's newest kernel."""
    meta = f"linux-headers-{FLAVOUR}"
    shown = run("apt-cache", *area.options(), "show", "--no-all-versions", meta)
    found = re.search(rf"\blinux-headers-(\d\S*-{FLAVOUR})\b", shown)
    if found is None:
        raise KernelBuildError(f"Debian {area.suite}: {meta} names no kernel")
    return found.group(1)


def fetch_kernel(suite: str, final: Path) -> None:
    """Unpacks the newest kernel of a suite."""
    area = AptArea(suite, ["main"])
    area.update()
    release = newest_release(area)
    say(f"Linux {release} of Debian {suite}")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".new-") as name:
        packages = [
            area.download(package, area.versions(package)[0], Path(name))
            for package in kernel_packages(area, release)
        ]
        new = Path(name) / "root"
        unpack(packages, new)
        build = new / "usr" / "src" / f"linux-headers-{release}"
        makefile = build / "Makefile"
        text = makefile.read_text(encoding="utf-8")
        makefile.write_text(text.replace("/usr/src/", f"{final}/usr/src/"), encoding="utf-8")
        variables = (build / ".kernelvariables").read_text(encoding="utf-8")
        compiler = re.search(r"\bgcc-\d+\b", variables)
        if compiler is None:
            raise KernelBuildError(f"Linux {release}: its headers name no compiler")
        programs = compiler_folder(KERNEL_SUITES[suite], compiler.group())
        (kbuild,) = (new / "usr" / "lib").glob("linux-kbuild-*")
        use_libraries(kbuild, programs / LIBRARIES)
        (new / "compiler").symlink_to(Path("..") / programs.name)
        # Move the image and its modules to where older packages have them.
        image = new / "usr" / "lib" / "modules" / release / "vmlinuz"
        if image.is_file():
            (new / "boot").mkdir()
            image.rename(new / "boot" / f"vmlinuz-{release}")
        if not (new / "lib").exists():
            (new / "lib").symlink_to("usr/lib")
        replace_folder(new, final)


def debian_headers(suite: str) -> KernelHeaders:
    """Returns the headers of a suite's kernel; fetches the kernel and its compiler if missing.

    An unpacked kernel is kept, even if its suite has a newer kernel.
    """
    if suite not in KERNEL_SUITES:
        raise KernelBuildError(f"no kernel of Debian {suite!r}, only {', '.join(KERNEL_SUITES)}")
    final = FOLDER / suite
    with locked(FOLDER / f".{suite}.lock"):
        if not final.is_dir():
            fetch_kernel(suite, final)
    (build,) = final.glob(f"usr/src/linux-headers-*-{FLAVOUR}")
    return replace(kernel_headers(build), tools=(final / "compiler").resolve() / "usr" / "bin")
