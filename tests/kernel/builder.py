# SPDX-License-Identifier: MIT
"""Builds the modules, programs and kernels that the manifest's tests need, each once per run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from manifest import Test

__all__ = ["BUILD", "ROOT", "BuildError", "Builder", "child", "end_children"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = Path(os.environ.get("VMEM_KERNEL_BUILD", ROOT / "build" / "kernel")).resolve()


_CHILDREN: set[subprocess.Popen[bytes]] = set()


class BuildError(Exception):
    """Raised when a build fails; the message is the end of the command's output."""


@dataclass
class _Once:
    """Computes each value in the first thread that needs it, while other threads wait."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _locks: dict[tuple[str, ...], threading.Lock] = field(default_factory=dict)
    _made: dict[tuple[str, ...], Path | BuildError] = field(default_factory=dict)

    def get(self, key: tuple[str, ...], make: Callable[[], Path]) -> Path:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                try:
                    self._made[key] = make()
                except BuildError as error:
                    self._made[key] = error
            made = self._made[key]
        if isinstance(made, BuildError):
            raise made
        return made


class Builder:
    """Builds modules, programs and kernels for tests."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._once = _Once()

    def tree(self, test: Test) -> Path:
        """Returns the directory of the modules that a test loads, building them if necessary."""
        words = list(test.tree)
        if test.checked:
            words += ["--kernel-headers", str(self.checked_kernel() / "build")]
        script = [sys.executable, str(ROOT / "scripts" / "kernel_tree.py")]

        def make() -> Path:
            return Path(_output([*script, *words, "-j", str(self._jobs)]).splitlines()[-1])

        return self._once.get((*test.tree, str(test.checked)), make)

    def programs(self, tree: Path) -> Path:
        """Returns the directory of the C programs for a tree, building them if necessary."""
        out = BUILD / "c" / tree.name
        command = ["make", "-s", "--no-print-directory", "-C", str(HERE / "c"), f"-j{self._jobs}"]

        def make() -> Path:
            _output([*command, f"TREE={tree}", f"OUT={out}"])
            return out

        return self._once.get(("c", str(tree)), make)

    def prepare(self, command: Sequence[str]) -> None:
        """Runs a test's build command, if it has one."""
        words = [sys.executable if word == "python3" else word for word in command]

        def make() -> Path:
            _output(words)
            return ROOT

        if words:
            self._once.get(("command", *words), make)

    def checked_kernel(self) -> Path:
        """Returns the directory with the self-checking kernel's bzImage and build directory."""
        script = [sys.executable, str(HERE / "checked_kernel.py")]
        return self._once.get(("checked",), lambda: Path(_output(script).splitlines()[-1]))


def _output(command: list[str]) -> str:
    """Runs a command and returns its output; raises BuildError with the last lines on failure."""
    with child(command, stderr=subprocess.PIPE) as process:
        out, errors = (data.decode(errors="replace") for data in process.communicate())
    if process.returncode:
        last = (out + errors).splitlines()[-40:]
        last.append(f"exit status {process.returncode}: {' '.join(command)}")
        raise BuildError("\n".join(last))
    return out


@contextlib.contextmanager
def child(command: Sequence[str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process that `end_children` terminates along with all of its children."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as process:
        _CHILDREN.add(process)
        try:
            yield process
        finally:
            _CHILDREN.remove(process)


def end_children() -> None:
    """Terminates the processes that `child` started."""
    for process in list(_CHILDREN):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
