#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks our kernel files with sparse and with the compiler's warnings of `make W=1`.

Reuses the recorded commands that built the tree. Only findings in our files count, not those in the
kernel's or NVIDIA's headers.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from driver_patches import kernel_files
from kernel_common import KernelBuildError, say
from kernel_debian import KERNEL_SUITES
from kernel_tree import Tree, build_tree, headers_of, softgpu_folder

__all__ = ["check_tree"]

# Level 1 of the kernel's scripts/Makefile.extrawarn, including options that turn warnings off.
WARNINGS = shlex.split(
    "-Wextra -Wunused -Wno-unused-parameter -Wmissing-declarations -Wmissing-format-attribute "
    "-Wmissing-prototypes -Wold-style-definition -Wmissing-include-dirs "
    "-Wunused-but-set-variable -Wunused-const-variable -Wpacked-not-aligned "
    "-Wstringop-truncation -Wno-missing-field-initializers -Wno-sign-compare -Wno-type-limits "
    "-Wno-shift-negative-value"
)
# CHECKFLAGS of the kernel's Makefile for this architecture.
SPARSE = shlex.split(
    "sparse -D__linux__ -Dlinux -D__STDC__ -Dunix -D__unix__ -Wbitwise -Wno-return-void "
    "-Wno-unknown-attribute -D__CHECK_ENDIAN__ -D__x86_64__ --arch=x86 -mlittle-endian -m64"
)
COLUMNS = 140


def noted_command(work: Path, source: Path) -> list[str]:
    """Returns the command that compiled a source, without its output and dependency options."""
    notes = (work / source.parent / f".{source.stem}.o.cmd").read_text(encoding="utf-8")
    found = re.search(r"^(?:saved)?cmd_\S+ := +(.*)$", notes, re.MULTILINE)
    if found is None:
        raise KernelBuildError(f"make recorded no command for {source}")
    # A command may be followed by others, such as objtool.
    words = shlex.split(found.group(1).split(" ; ")[0])
    command = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "-o":
            skip = True
        elif word != "-c" and not word.startswith("-Wp,-MMD"):
            command.append(word)
    return command


def noted_folder(tree: Tree) -> Path:
    """Returns the directory in which the recorded commands ran.

    Since Linux 6.13 this is the module's directory; before that, it was the headers' directory.
    """
    release = re.match(r"(\d+)\.(\d+)", tree.headers.release)
    if release is None:
        raise KernelBuildError(f"{tree.headers.release} is not a Linux release")
    since = tuple(map(int, release.groups())) >= (6, 13)
    return tree.work if since else tree.headers.build


def findings(
    command: Sequence[str | Path], folder: Path, work: Path, sources: list[Path]
) -> list[str]:
    """Runs a command and returns what it reports about our files."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [line.replace(f"{work}/", "") for line in (done.stdout + done.stderr).splitlines()]
    ours = {path.name for path in sources}
    # Matches a report about a line of our source, or about kernel source inlined into it.
    named = re.compile(r"(?:\S*/)?(\w+\.[ch]):\d+:.*: |.*inlined from .* at (?:\S*/)?(\w+\.[ch]):")
    said = [
        line
        for line in lines
        if (place := named.match(line)) and (place.group(1) or place.group(2)) in ours
    ]
    if done.returncode and not said:
        said = [f"exit status {done.returncode}: {command[0]} ... {command[-1]}", *lines[-5:]]
    return said


def long_lines(work: Path, source: Path) -> list[str]:
    """Returns the lines of a file that exceed the width limit."""
    text = (work / source).read_text(encoding="utf-8").splitlines()
    return [
        f"{source}:{number}: {len(line)} columns"
        for number, line in enumerate(text, 1)
        if len(line) > COLUMNS
    ]


def check_tree(tree: Tree) -> list[str]:
    """Returns all findings in our files, for a built tree."""
    ours = [Path("nvidia-uvm") / name for name in kernel_files() if name.endswith((".c", ".h"))]
    # Both builds contain the same software GPU, so it is checked only once.
    if tree.type == "release":
        names = sorted(path.name for path in softgpu_folder().glob("*.[ch]"))
        ours += [Path("nvidia/softgpu") / name for name in names if "_user" not in name]

    def check(source: Path) -> list[str]:
        found = long_lines(tree.work, source)
        if source.suffix != ".c":
            return found
        command = noted_command(tree.work, source)
        flags = command[1:]
        # Compile instead of only parsing, because some warnings need optimization.
        warn = [command[0], *flags[:-1], *WARNINGS, "-c", "-o", "/dev/null", flags[-1]]
        folder = noted_folder(tree)
        found += findings(tree.headers.with_tools(*warn), folder, tree.work, ours)
        return found + findings([*SPARSE, *flags], folder, tree.work, ours)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [line for lines in pool.map(check, ours) for line in lines]
    return list(dict.fromkeys(found))


def main() -> int:
    """Checks the tree of one version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default="535.261.03")
    parser.add_argument("--type", choices=("release", "debug"), default="release")
    parser.add_argument(
        "--suite", choices=KERNEL_SUITES, help="check the build for this Debian suite's kernel"
    )
    options = parser.parse_args()
    try:
        headers = headers_of(options.suite)
        tree = Tree(options.version, headers, type=options.type, suite=options.suite or "")
        build_tree(tree)
        found = check_tree(tree)
    except KernelBuildError as error:
        say(str(error))
        return 1
    print(*found, sep="\n")
    say(f"driver {options.version}, {options.type}: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
