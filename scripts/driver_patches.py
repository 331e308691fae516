# SPDX-License-Identifier: MIT
"""Finds and applies the patch series of a driver version.

patches/series.json lists each directory's versions: `built` are the versions that the project
builds and tests; `applies` are the versions in NVIDIA's public repository to which each hunk
applies in exactly one place without fuzz.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from kernel_common import ROOT, KernelBuildError, branch_of, check_version, run, version_key

__all__ = [
    "KERNEL_MODULE",
    "PATCHES",
    "ambiguous_hunks",
    "apply_patch",
    "apply_series",
    "built_versions",
    "changed_files",
    "changed_lines",
    "kernel_files",
    "patch_tree",
    "patches_in",
    "series_digest",
    "series_folder",
    "series_for",
    "series_table",
]

PATCHES = ROOT / "patches"
KERNEL_MODULE = ROOT / "kernel_module"
MUTANTS = ROOT / "tests" / "kernel" / "mutants"

# The patches use the paths of NVIDIA's repository, such as kernel-open/nvidia-uvm/uvm.c.
STRIP = 2
FILE = re.compile(r"^--- a/(\S+)$", re.MULTILINE)
HUNK = re.compile(r"^@@ [^@]* @@.*\n", re.MULTILINE)


@functools.cache
def series_table() -> dict[str, dict[str, list[str]]]:
    """Returns the contents of series.json, by directory."""
    table: dict[str, dict[str, list[str]]]
    table = json.loads((PATCHES / "series.json").read_text(encoding="utf-8"))
    return table


def built_versions() -> dict[str, str]:
    """Returns each version that the project builds, with the directory of its series."""
    return {v: folder for folder, known in series_table().items() for v in known["built"]}


def series_folder(version: str) -> Path:
    """Returns the directory of the series for a version.

    For an untested version this is the series of the closest older version, from the same branch if
    possible; if the branch has only newer versions, it is the series of the oldest. Applying it
    either succeeds or fails and names the hunks that do not fit.
    """
    check_version(version)
    listed = {
        one: folder
        for folder, known in series_table().items()
        for one in {*known["built"], *known["applies"]}
    }
    if version in listed:
        return PATCHES / listed[version]
    branch = [one for one in listed if branch_of(one) == branch_of(version)]
    near = sorted(
        branch or (v for v in listed if branch_of(v) < branch_of(version)), key=version_key
    )
    if not near:
        oldest = min(listed, key=version_key)
        raise KernelBuildError(f"no patches for driver {version}: the oldest supported is {oldest}")
    older = [one for one in near if version_key(one) < version_key(version)]
    return PATCHES / listed[older[-1] if older else near[0]]


def patches_in(folder: Path) -> list[Path]:
    """Returns the patches in a directory in order, without the cover letter."""
    patches = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
    return [path for path in patches if not path.name.startswith("0000-")]


def series_for(version: str) -> list[Path]:
    """Returns the patches for a version in order, without the cover letter."""
    return patches_in(series_folder(version))


def series_digest(version: str) -> str:
    """Returns a SHA-256 over the patches for a version."""
    digest = hashlib.sha256()
    for path in series_for(version):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def changed_files(patch: Path) -> list[str]:
    """Returns the files that a patch changes, as paths in NVIDIA's repository."""
    return FILE.findall(patch.read_text(encoding="utf-8"))


def changed_lines(patch: Path) -> int:
    """Returns how many lines a patch removes and adds in total."""
    body = patch.read_text(encoding="utf-8").split("\ndiff --git ", 1)[1]
    return len(re.findall(r"^(?:\+(?!\+\+ b/)|-(?!-- a/)).*$", body, re.MULTILINE))


def ambiguous_hunks(patch: Path, tree: Path) -> list[str]:
    """Reports hunks of a patch whose old lines do not occur exactly once in the tree's file.

    A missing file is reported instead of its hunks.
    """
    found = []
    text = patch.read_text(encoding="utf-8")
    for part in re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)[1:]:
        named = FILE.search(part)
        if named is None:
            raise KernelBuildError(f"{patch.name} adds or removes a file; only hooks are allowed")
        name = "/".join(named.group(1).split("/")[STRIP - 1 :])
        try:
            content = (tree / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            found.append(f"{patch.name}: {name} does not exist")
            continue
        for number, hunk in enumerate(HUNK.split(part)[1:], 1):
            lines = [line[1:] for line in hunk.split("\n") if line[:1] in (" ", "-")]
            places = content.count("\n".join(lines) + "\n")
            if places != 1:
                where = f"{places} places" if places else "no place"
                found.append(f"{patch.name}: {name}, hunk {number} fits {where}")
    return found


def apply_patch(patch: Path, tree: Path, *, reverse: bool = False) -> None:
    """Applies a patch to a tree without fuzz."""
    if not shutil.which("patch"):
        raise KernelBuildError("the program patch is not installed (Debian: the package patch)")
    options = ["--fuzz=0", "--batch", "--no-backup-if-mismatch", "--reject-file=-", "--quiet"]
    direction = "--reverse" if reverse else "--forward"
    try:
        run("patch", f"-p{STRIP}", *options, direction, "-d", tree, "-i", patch)
    except KernelBuildError as error:
        name = f"{patch.parent.name}/{patch.name}"
        raise KernelBuildError(f"{name} does not apply to {tree}:\n{error}") from error


def apply_series(version: str, tree: Path) -> None:
    """Applies all patches for a version to a pristine kernel-open tree.

    For a version that series.json does not list, each hunk must fit in exactly one place.
    """
    folder = series_folder(version)
    known = series_table()[folder.name]
    for patch in patches_in(folder):
        if version not in known["applies"] + known["built"]:
            doubtful = "".join(f"\n    {hunk}" for hunk in ambiguous_hunks(patch, tree))
            if doubtful:
                raise KernelBuildError(
                    f"driver {version} is not supported: no series was made for it (patches/"
                    f"series.json), and that of the nearest older version, {folder.name}, does not "
                    f"fit:{doubtful}"
                )
        apply_patch(patch, tree)


def kernel_files(mutant: str | None = None) -> dict[str, bytes]:
    """Returns the files to copy from kernel_module/ to nvidia-uvm/; `mutant` names a bug to add."""
    names = [*KERNEL_MODULE.glob("uvm_vmem*.[ch]"), *KERNEL_MODULE.glob("uvm_vmem*.Kbuild")]
    if mutant is None:
        return {path.name: path.read_bytes() for path in sorted(names)}
    patch = MUTANTS / f"{mutant}.patch"
    if not patch.is_file():
        raise KernelBuildError(f"no such mutant: {patch}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in names:
            shutil.copy(path, folder)
        apply_patch(patch, folder)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def patch_tree(tree: Path, version: str) -> None:
    """Patches a pristine kernel-open tree: adds our files, then the hooks in NVIDIA's files."""
    for name, content in kernel_files().items():
        (tree / "nvidia-uvm" / name).write_bytes(content)
    apply_series(version, tree)
