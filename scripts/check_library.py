#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the built library: symbols, layers, man pages, and use of an installed copy.

Requires build/lib (`make lib`). Prints the problems, and then "N passed, N failed".
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import check_layers
import check_man
from vmem_header import HEADER, ROOT, functions, version

LIB = ROOT / "build" / "lib"

USER_PROGRAM = """
#include <stdio.h>
#include <string.h>
#include <vmem.h>
int main(void) {
  struct vmem_open_opts o = {.size = sizeof o, .backend = "host"};
  vmem_t vm;
  if (vmem_open(&o, &vm)) return puts(vmem_last_error()), 1;
  return vmem_close(vm) || strcmp(vmem_version(), VMEM_VERSION);
}
"""


def output(*command: str | Path) -> str:
    """Runs a command and returns its output; exits if it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def difference(what: str, found: set[str], wanted: set[str]) -> list[str]:
    """Returns a message for each missing and each extra name."""
    missing = [f"{what}: {name} is missing" for name in sorted(wanted - found)]
    return missing + [f"{what}: {name} is not in vmem.h" for name in sorted(found - wanted)]


def check_version_script() -> list[str]:
    """Checks that vmem.map lists exactly the public functions."""
    text = (ROOT / "libvmem" / "vmem.map").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return difference("vmem.map", set(re.findall(r"^\s+(\w+);", text, re.M)), set(functions()))


def check_exports() -> list[str]:
    """Checks the shared library's soname, and that it exports exactly the public functions."""
    shared = LIB / f"libvmem.so.{version()}"
    lines = output("nm", "-D", "--defined-only", shared).splitlines()
    names = {line.split()[2].split("@")[0] for line in lines if line.split()[1] == "T"}
    others = {line.split()[2].split("@")[0] for line in lines if line.split()[1] not in "TA"}
    problems = difference(shared.name, names, set(functions()))
    problems += [f"{shared.name}: exports the object {name}" for name in sorted(others)]
    if "[libvmem.so.0]" not in output("readelf", "-d", shared):
        problems.append(f"{shared.name}: the soname is not libvmem.so.0")
    return problems


def check_static_names(folder: Path = LIB) -> list[str]:
    """Checks that the static library defines exactly the public functions as global names."""
    lines = output("nm", "-g", "--defined-only", folder / "libvmem.a").splitlines()
    names = {line.split()[2] for line in lines if len(line.split()) == 3}
    return difference("libvmem.a", names, set(functions()))


def check_header() -> list[str]:
    """Checks that vmem.h compiles on its own, as strict C11 and as C++."""
    problems = []
    compilers = [("cc", "c", "c11"), ("g++", "c++", "c++17")]
    for compiler, language, standard in compilers:
        if not shutil.which(compiler):
            print(f"not run: vmem.h as {language}: no {compiler} here")
            continue
        command = [compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic"]
        done = subprocess.run(
            [*command, "-Werror", "-fsyntax-only", str(HEADER)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            problems.append(f"vmem.h as {standard}:\n{done.stderr}")
    return problems


def check_installation() -> list[str]:
    """Installs to a temporary DESTDIR, builds and runs a program there, and uninstalls."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="vmem-install-") as name:
        top = Path(name)
        prefix = "/opt/vmem"
        libdir = f"{prefix}/lib/here"
        build = top / "build"
        variables = [f"DESTDIR={top}", f"PREFIX={prefix}", f"LIBDIR={libdir}", f"BUILD={build}"]
        # Some distributions, such as Ubuntu and Fedora, build with -flto by default.
        variables += ["CFLAGS=-O1 -flto -DVMEM_CHECK_OF_USER_FLAGS"]
        make = ["make", "-s", "--no-print-directory", "-C", str(ROOT / "libvmem"), "-j2"]
        output(*make, "install", *variables)
        if "-DVMEM_CHECK_OF_USER_FLAGS" not in (build / "lib" / "flags").read_text("utf-8"):
            problems.append("install: the user's CFLAGS were not used")
        pc = (top / libdir[1:] / "pkgconfig" / "vmem.pc").read_text(encoding="utf-8")
        for line in (f"Version: {version()}", f"libdir={libdir}", f"prefix={prefix}"):
            if line not in pc.splitlines():
                problems.append(f"vmem.pc: no line '{line}'")
        if "@" in pc:
            problems.append("vmem.pc: a placeholder was left")
        pages = {p.name for p in (top / prefix[1:]).glob("share/man/man[137]/*")}
        sources = {p.name for p in (ROOT / "libvmem" / "man").iterdir()}
        problems += difference("installed man pages", pages, sources)
        problems += check_static_names(top / libdir[1:])
        problems += check_linking(top, top / libdir[1:], top / prefix[1:] / "include")
        problems += check_pkg_config(top, libdir)
        problems += check_cmake(top, libdir)
        output(*make, "uninstall", *variables)
        left = [p for p in (top / "opt").rglob("*") if not p.is_dir()]
        problems += [f"uninstall left {p.relative_to(top)}" for p in left]
    return problems


CMAKE_PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(user C)
find_package(vmem ${WANTED} REQUIRED)
add_executable(shared user.c)
target_link_libraries(shared vmem::vmem)
add_executable(static user.c)
target_link_libraries(static vmem::static)
"""


def check_linking(top: Path, libdir: Path, include: Path) -> list[str]:
    """Builds and runs a program against the installed header and each of the two libraries."""
    source = top / "user.c"
    source.write_text(USER_PROGRAM, encoding="utf-8")
    problems = []
    ways = {
        "shared": ["-L" + str(libdir), "-Wl,-rpath," + str(libdir), "-lvmem"],
        "static": [str(libdir / "libvmem.a"), "-pthread", "-ldl"],
    }
    for way, libraries in ways.items():
        program = top / f"user-{way}"
        output("cc", "-Wall", "-Werror", "-I", include, "-o", program, source, *libraries)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
        if done.returncode:
            problems.append(f"program with the {way} library: {done.stdout}{done.stderr}")
        if (way == "shared") != ("libvmem.so.0" in output("readelf", "-d", program)):
            problems.append(f"program with the {way} library: the wrong library was linked")
    return problems


def check_pkg_config(top: Path, libdir: str) -> list[str]:
    """Builds and runs a program with pkg-config's flags."""
    if not shutil.which("pkg-config"):
        print("not run: vmem.pc: no pkg-config here")
        return []
    places = [f"PKG_CONFIG_SYSROOT_DIR={top}", f"PKG_CONFIG_PATH={top}{libdir}/pkgconfig"]
    flags = output("env", *places, "pkg-config", "--cflags", "--libs", "vmem").split()
    program = top / "user-pkg-config"
    output("cc", "-o", program, top / "user.c", *flags, f"-Wl,-rpath,{top}{libdir}")
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    return [f"program with vmem.pc: {done.stdout}{done.stderr}"] if done.returncode else []


def check_cmake(top: Path, libdir: str) -> list[str]:
    """Checks that CMake finds the package, but rejects it if a project requires a newer version."""
    if not shutil.which("cmake"):
        print("not run: CMake's package: no cmake here")
        return []
    project, build = top / "project", top / "project-build"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(CMAKE_PROJECT, encoding="utf-8")
    shutil.copyfile(top / "user.c", project / "user.c")
    cmake: list[str | Path] = [
        "cmake",
        "-S",
        project,
        "-B",
        build,
        f"-Dvmem_DIR={top}{libdir}/cmake/vmem",
    ]
    output(*cmake, f"-DWANTED={version()}")
    output("cmake", "--build", build)
    problems = []
    for way in ("shared", "static"):
        done = subprocess.run([build / way], capture_output=True, text=True, check=False)
        if done.returncode:
            problems.append(f"CMake's program, {way}: {done.stdout}{done.stderr}")
    newer = subprocess.run([*cmake, "-DWANTED=999"], capture_output=True, text=True, check=False)
    if newer.returncode == 0 or "999" not in newer.stderr:
        problems.append("CMake's package claims to be version 999")
    return problems


def main() -> int:
    """Runs all checks."""
    checks = [
        check_version_script,
        check_exports,
        check_static_names,
        check_header,
        check_installation,
        *check_layers.CHECKS,
        *check_man.CHECKS,
    ]
    failed = 0
    for check in checks:
        problems = check()
        for problem in problems:
            print(f"{check.__name__}: {problem}")
        failed += bool(problems)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
