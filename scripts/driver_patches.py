# SPDX-License-Identifier: MIT
"""The patch series of a driver version, and how it is applied."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kernel_common import ROOT, KernelBuildError, branch_of, run

__all__ = ["PATCHES", "apply_patch", "apply_series", "series_digest", "series_for"]

PATCHES = ROOT / "patches"


def series_folder(version: str) -> Path:
    """The folder whose series is for a version: its own, or the one that series.json names."""
    table = PATCHES / "series.json"
    served: dict[str, list[str]] = {}
    if table.is_file():
        served = json.loads(table.read_text(encoding="utf-8"))
    for folder, versions in served.items():
        if version in (folder, *versions):
            return PATCHES / folder
    if (PATCHES / version).is_dir():
        return PATCHES / version
    # A version that was never tried: the series of its branch either applies or says where not.
    branch = sorted(name for name in served if branch_of(name) == branch_of(version))
    if branch:
        return PATCHES / branch[-1]
    raise KernelBuildError(f"no patches for driver {version} in {PATCHES}")


def series_for(version: str) -> list[Path]:
    """The patches of a version in their order, without the cover letter."""
    patches = sorted(series_folder(version).glob("[0-9][0-9][0-9][0-9]-*.patch"))
    return [path for path in patches if not path.name.startswith("0000-")]


def series_digest(version: str) -> str:
    """SHA-256 over the patches of a version."""
    digest = hashlib.sha256()
    for path in series_for(version):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def apply_patch(patch: Path, tree: Path, *, strip: int = 2, reverse: bool = False) -> None:
    """Applies one patch to a tree; a context that fits only nearly is refused."""
    options = ["--fuzz=0", "--batch", "--no-backup-if-mismatch", "--reject-file=-", "--quiet"]
    direction = "--reverse" if reverse else "--forward"
    try:
        run("patch", f"-p{strip}", *options, direction, "-d", tree, "-i", patch)
    except KernelBuildError as error:
        name = f"{patch.parent.name}/{patch.name}"
        raise KernelBuildError(f"{name} does not apply to {tree}:\n{error}") from error


def apply_series(version: str, tree: Path) -> None:
    """Applies all patches of a version to a pristine kernel-open tree."""
    for patch in series_for(version):
        apply_patch(patch, tree)
