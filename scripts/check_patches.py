#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the patch series of patches/ against the sources of the driver versions they are for.

Each hunk must fit in exactly one place with no fuzz, the series must change few lines, its letters
must be in order, and taking it back must leave the source as it was. With --build each patch of a
series is built upon those before it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from driver_debian import SUITES
from driver_patches import (
    PATCHES,
    ambiguous_hunks,
    apply_patch,
    built_versions,
    changed_lines,
    series_folder,
    series_for,
)
from driver_source import driver_source, kernel_open_below, version_of
from kernel_common import KernelBuildError, say, tree_digest
from kernel_headers import default_headers
from kernel_tree import PARTS, Tree, build_tree

__all__ = ["check_letters", "check_on", "check_steps"]

MAX_LINES = 40
MAX_SUBJECT = 72


def check_letters(folder: Path) -> list[str]:
    """What is wrong with the messages of a series."""
    patches = sorted(folder.glob("*.patch"))
    total = len(patches) - 1
    problems = []
    for number, path in enumerate(patches):
        if not path.name.startswith(f"{number:04}-"):
            problems.append(f"{path.name}: not number {number:04}")
        text = path.read_text(encoding="utf-8")
        head = text.split("\n\n", 1)[0]
        found = re.search(r"^Subject: \[PATCH (\d+)/(\d+)\] (.*(?:\n .*)*)", head, re.MULTILINE)
        if not found or (int(found[1]), int(found[2])) != (number, total):
            problems.append(f"{path.name}: subject without [PATCH {number}/{total}]")
        elif len(found[3].replace("\n", "")) > MAX_SUBJECT:
            problems.append(f"{path.name}: subject longer than {MAX_SUBJECT}")
        if number and "\nForwarded: " not in text:
            problems.append(f"{path.name}: no line Forwarded:")
    lines = sum(map(changed_lines, patches[1:]))
    if not 0 < lines <= MAX_LINES:
        problems.append(f"{folder.name}: {lines} changed lines, more than {MAX_LINES}")
    elif f"{lines} changed lines" not in patches[0].read_text(encoding="utf-8"):
        problems.append(f"{folder.name}: the cover letter does not say {lines} changed lines")
    return problems


def check_on(source: Path, version: str) -> list[str]:
    """What goes wrong when the series of a version meets a source of it."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        tree.mkdir()
        for part in PARTS:
            if (source / part).is_dir():
                shutil.copytree(source / part, tree / part)
            elif (source / part).is_file():
                shutil.copy(source / part, tree / part)
        before = tree_digest(tree)
        try:
            for patch in series_for(version):
                problems += ambiguous_hunks(patch, tree)
                apply_patch(patch, tree)
            for patch in reversed(series_for(version)):
                apply_patch(patch, tree, reverse=True)
        except KernelBuildError as error:
            return [*problems, str(error)]
        if tree_digest(tree) != before:
            problems.append(f"{version}: taken back, the series leaves something behind")
    return problems


def check_steps(version: str) -> None:
    """Builds a version with the first patch, the first two, and so on."""
    for count in range(1, len(series_for(version)) + 1):
        start = time.monotonic()
        build_tree(Tree(version, default_headers(), patches=count))
        name = series_for(version)[count - 1].name
        say(f"{version} builds with {count} ({name}), {time.monotonic() - start:.0f} s")


def sources(versions: list[str], given: list[Path]) -> list[tuple[str, Path]]:
    """The sources to check: those named, else those of the versions that can be had here."""
    found = []
    for path in given:
        tree = kernel_open_below(path)
        version = version_of(tree) if tree else None
        if tree is None or version is None:
            raise KernelBuildError(f"{path} holds no driver sources")
        found.append((version, tree))
    if given:
        return found
    for version in versions or built_versions():
        try:
            found.append((version, driver_source(version)))
        except KernelBuildError as error:
            # What Debian does not carry is checked outside, on a clone of the public repository.
            if versions or version in SUITES:
                raise
            print(f"not run: the patches on driver {version}: {str(error).splitlines()[0]}")
    return found


def main() -> int:
    """Checks what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="version")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="a source instead")
    parser.add_argument("--build", action="store_true", help="build after each patch")
    options = parser.parse_args()
    failed = 0
    try:
        for folder in sorted(path for path in PATCHES.iterdir() if path.is_dir()):
            for problem in check_letters(folder):
                print(problem)
                failed += 1
        for version, source in sources(options.versions, options.tree):
            problems = check_on(source, version)
            print(*problems, sep="\n", end="\n" if problems else "")
            failed += len(problems)
            verdict = "FAILED" if problems else "ok"
            say(f"{series_folder(version).name} on {version} ({source}): {verdict}")
            if options.build and not problems:
                check_steps(version)
    except KernelBuildError as error:
        print(error)
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
