# SPDX-License-Identifier: MIT
"""Common code for the scripts that build kernel modules: directories, locks, files, versions."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = [
    "KERNEL_BUILD",
    "ROOT",
    "KernelBuildError",
    "branch_of",
    "check_version",
    "is_version",
    "locked",
    "replace_folder",
    "run",
    "say",
    "tree_digest",
    "tree_files",
    "version_key",
    "write_if_changed",
]

ROOT = Path(__file__).resolve().parent.parent
# Tests set another directory to get a separate build.
KERNEL_BUILD = Path(os.environ.get("VMEM_KERNEL_BUILD", ROOT / "build" / "kernel")).resolve()

VERSION = re.compile(r"[0-9]{3}\.[0-9]{2,3}(\.[0-9]{2})?")


class KernelBuildError(Exception):
    """An error whose message is shown to the user without a traceback."""


def say(text: str) -> None:
    """Prints a line to standard error and flushes it; standard output is for results."""
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr, flush=True)


def is_version(text: str) -> bool:
    """True if a text looks like a version of NVIDIA's driver (535.261.03, 580.142)."""
    return VERSION.fullmatch(text) is not None


def check_version(version: str) -> str:
    """Returns the version, or raises KernelBuildError if it is not well-formed."""
    if not is_version(version):
        raise KernelBuildError(f"not a driver version: {version!r}")
    return version


def version_key(version: str) -> list[int]:
    """Returns a key that sorts versions numerically: 535.98 before 535.104.05."""
    return [int(number) for number in version.split(".")]


def branch_of(version: str) -> int:
    """Returns the branch of a version: 535 for 535.261.03."""
    return int(check_version(version).split(".")[0])


def run(*command: str | Path, cwd: Path | None = None, log: Path | None = None) -> str:
    """Runs a command and returns its output, which also goes to `log`.

    Raises KernelBuildError with the last lines of the output unless the command succeeds.
    """
    words = [str(word) for word in command]
    # Do not inherit settings from a calling make.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**env, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if log is not None:
        log.write_text(done.stdout, encoding="utf-8")
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-40:])
        place = f" (all of it: {log})" if log else ""
        raise KernelBuildError(
            f"{last}\nexit status {done.returncode}: {' '.join(words[:6])} ...{place}"
        )
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; waits for the current holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tree_files(folder: Path, names: Sequence[str] = (".",)) -> list[Path]:
    """Returns all regular files under the named parts of a directory, as sorted relative paths."""
    found: list[Path] = []
    for name in names:
        top = folder / name
        inside = [top] if top.is_file() else sorted(top.rglob("*"))
        found += [path.relative_to(folder) for path in inside if path.is_file()]
    return found


def tree_digest(folder: Path, names: Sequence[str] = (".",)) -> str:
    """Returns a SHA-256 over the names and contents of a directory's files, without timestamps."""
    digest = hashlib.sha256()
    for path in tree_files(folder, names):
        content = hashlib.sha256((folder / path).read_bytes()).hexdigest()
        digest.update(f"{content}  {path.as_posix()}\n".encode())
    return digest.hexdigest()


def write_if_changed(path: Path, content: bytes) -> bool:
    """Writes a file unless its content is unchanged, so that make rebuilds only what changed.

    Shell scripts are made executable, because the makefiles of newer drivers run them by name.
    """
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if path.suffix == ".sh":
        path.chmod(0o755)
    return True


def replace_folder(new: Path, final: Path) -> None:
    """Moves a finished directory into place; an incomplete directory is never visible there."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    final.parent.mkdir(parents=True, exist_ok=True)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
