#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the patch series of patches/ against the driver sources they apply to.

Each hunk must fit in exactly one place without fuzz, the series must change few lines, its messages
must be in order, and reverting it must restore the source. With --build each patch of a series is
built on top of the earlier patches. With --clone every public driver version is checked, and
patches/series.json must name the only series that fits. If the module relies on more of a UVM
function than its header promises, its source must be a reviewed text (uvm_contracts).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from driver_debian import SUITES
from driver_patches import (
    PATCHES,
    ambiguous_hunks,
    apply_patch,
    built_versions,
    changed_files,
    changed_lines,
    patches_in,
    series_folder,
    series_for,
    series_table,
)
from driver_source import driver_source, kernel_open_below, version_of
from kernel_common import (
    KernelBuildError,
    branch_of,
    is_version,
    say,
    tree_digest,
    version_key,
    write_if_changed,
)
from kernel_headers import default_headers
from kernel_tree import Tree, build_tree
from uvm_contracts import FILE, contract_problems

__all__ = [
    "Clone",
    "check_clone",
    "check_contracts",
    "check_letters",
    "check_on",
    "check_steps",
    "fitting_series",
]

# The oldest driver branch for which the project has patches.
FIRST_BRANCH = 535
MAX_LINES = 40
MAX_SUBJECT = 72


def check_letters(folder: Path) -> list[str]:
    """Checks the patch messages of a series and returns the problems."""
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


def touched_files(patches: list[Path]) -> list[str]:
    """Returns the driver's files that a series changes, as paths in NVIDIA's repository."""
    return sorted({name for patch in patches for name in changed_files(patch)})


def check_series(patches: list[Path], files: dict[str, bytes]) -> list[str]:
    """Applies and reverts a series on the files that it changes; returns the problems."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "kernel-open"
        for file, content in files.items():
            write_if_changed(Path(name) / file, content)
        before = tree_digest(tree)
        try:
            for patch in patches:
                problems += ambiguous_hunks(patch, tree)
                apply_patch(patch, tree)
            for patch in reversed(patches):
                apply_patch(patch, tree, reverse=True)
        except KernelBuildError as error:
            return [*problems, str(error)]
        if tree_digest(tree) != before:
            problems.append(f"{patches[0].parent.name}: reverting it does not restore the source")
    return problems


def check_on(source: Path, version: str) -> list[str]:
    """Checks a version's series against its kernel-open tree and returns the problems."""
    patches = series_for(version)
    files = {}
    for name in touched_files(patches):
        path = source / Path(name).relative_to("kernel-open")
        if not path.is_file():
            return [f"{source} has no {path.relative_to(source)}"]
        files[name] = path.read_bytes()
    return check_series(patches, files)


def check_contracts(source: Path, version: str) -> list[str]:
    """Checks that the UVM functions the module relies on are reviewed; returns the problems."""
    path = source / Path(FILE).relative_to("kernel-open")
    if not path.is_file():
        return [f"{source} has no {path.relative_to(source)}"]
    return contract_problems(version, path.read_text(encoding="utf-8", errors="replace"))


@dataclass(frozen=True)
class Clone:
    """A clone of NVIDIA's public repository, possibly bare."""

    path: Path

    def git(self, *words: str) -> bytes:
        """Runs a git command in the clone and returns its output."""
        done = subprocess.run(["git", "-C", self.path, *words], capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise KernelBuildError(f"{self.path} is not a clone of NVIDIA's repository: {said}")
        return done.stdout

    def versions(self) -> list[str]:
        """Returns the tags since the first supported branch, oldest first."""
        tags = [tag for tag in self.git("tag").decode().split() if is_version(tag)]
        return sorted((tag for tag in tags if branch_of(tag) >= FIRST_BRANCH), key=version_key)

    def blobs(self, version: str, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Returns the name and blob id of each named file that exists in a tag."""
        listed = self.git("ls-tree", version, "--", *names).decode().splitlines()
        return tuple((line.split("\t")[1], line.split()[2]) for line in listed)

    def contents(self, blobs: Sequence[tuple[str, str]]) -> dict[str, bytes]:
        """Returns the contents of files, by name."""
        return {name: self.git("cat-file", "blob", blob) for name, blob in blobs}


def fitting_series(clone: Clone) -> dict[str, list[str]]:
    """Returns, for each version in a clone, the directories whose series apply unambiguously.

    Versions that share identical copies of the patched files are checked once.
    """
    series = {folder: patches_in(PATCHES / folder) for folder in series_table()}
    names = touched_files([patch for patches in series.values() for patch in patches])
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    fits = {}
    for version in clone.versions():
        blobs = clone.blobs(version, names)
        if blobs not in found:
            files = clone.contents(blobs)
            found[blobs] = [
                folder
                for folder, patches in series.items()
                if set(touched_files(patches)) <= set(files) and not check_series(patches, files)
            ]
        fits[version] = found[blobs]
    return fits


def check_clone(clone: Clone) -> list[str]:
    """Checks the UVM functions of each public version, and that series.json names its series."""
    problems = [
        problem
        for version in clone.versions()
        for source in clone.contents(clone.blobs(version, [FILE])).values()
        for problem in contract_problems(version, source.decode(errors="replace"))
    ]
    fits = fitting_series(clone)
    listed = {v: folder for folder, known in series_table().items() for v in known["applies"]}
    for version, folders in fits.items():
        say(f"{version}: {', '.join(folders) or 'no series'}")
        if len(folders) > 1:
            problems.append(f"{version}: {' and '.join(folders)} fit; only one should")
        if not folders:
            problems.append(f"{version}: no series fits")
        elif listed.get(version) not in folders:
            problems.append(f"{version}: {folders[0]} fits, series.json says {listed.get(version)}")
    for version in sorted(set(listed) - set(fits), key=version_key):
        problems.append(f"{version}: in series.json, but has no public tag")
    return problems


def check_steps(version: str) -> None:
    """Builds a version with the first patch, the first two, and so on."""
    for count in range(1, len(series_for(version)) + 1):
        start = time.monotonic()
        build_tree(Tree(version, default_headers(), patches=count))
        name = series_for(version)[count - 1].name
        say(f"{version} builds with {count} ({name}), {time.monotonic() - start:.0f} s")


def sources(versions: list[str], given: list[Path]) -> list[tuple[str, Path]]:
    """Returns the sources in `given`; if empty, those of `versions`, or else all built versions."""
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
            # Versions that Debian does not package are checked on a clone of the public repository.
            if versions or version in SUITES:
                raise
            print(f"not run: the patches on driver {version}: {str(error).splitlines()[0]}")
    return found


def main() -> int:
    """Checks the versions or sources named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="version")
    parser.add_argument(
        "--tree", type=Path, action="append", default=[], help="check this source instead"
    )
    parser.add_argument(
        "--clone", type=Path, help="check every tag of a clone of NVIDIA's repository"
    )
    parser.add_argument("--build", action="store_true", help="build after each patch")
    options = parser.parse_args()
    failed = 0
    try:
        for folder in sorted(path for path in PATCHES.iterdir() if path.is_dir()):
            for problem in check_letters(folder):
                print(problem)
                failed += 1
        if options.clone:
            problems = check_clone(Clone(options.clone))
            print(*problems, sep="\n", end="\n" if problems else "")
            return 1 if problems or failed else 0
        for version, source in sources(options.versions, options.tree):
            problems = check_on(source, version) + check_contracts(source, version)
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
