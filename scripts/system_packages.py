# SPDX-License-Identifier: MIT
"""Installs the parts of the system that setup needs.

Each package manager has a row with its install command and its package for each part. The first
available manager is used. Its sources and keys are never changed.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

__all__ = [
    "MANAGERS",
    "PARTS",
    "Manager",
    "fail",
    "has_probes",
    "install",
    "install_debian_packages",
    "manager",
    "missing",
    "quiet",
    "say",
]

# Descriptions of the parts that packages provide.
PARTS = {
    "compiler": "gcc",
    "make": "make",
    "libc": "the C library's headers (stdio.h)",
    "pip": "Python's module ensurepip, or pip",
    "python": "Python's headers (Python.h)",
    "probes": "the header of USDT probes (sys/sdt.h)",
}


def say(text: str) -> None:
    """Prints a line and flushes it, so that it is not delayed in a pipe."""
    print(f"setup: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Exits the program with a message."""
    sys.exit(f"setup: {text}")


def quiet(command: Sequence[str], *, show: bool) -> bool:
    """Runs a command; returns True if it succeeds. With `show`, prints its output if it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        text=True,
        check=False,
    )
    if done.returncode and show:
        print(done.stdout, flush=True)
    return done.returncode == 0


@dataclass(frozen=True)
class Manager:
    """A package manager.

    Attributes:
        install: the install command, to which the packages' names are appended.
        names: the package for each part. {python} stands for "python3" or, if the running Python is
            not the system's python3, for a name such as "python3.12"; {minor} then stands for 12.
        refresh: the command that fetches package lists, if the install command does not.
    """

    install: tuple[str, ...]
    names: dict[str, str]
    refresh: tuple[str, ...] = ()

    def packages(self, parts: Sequence[str]) -> list[str]:
        """Returns the packages that provide `parts`, for the Python that runs this script."""
        minor = sys.version_info[1]
        of_system = Path("/usr/bin/python3").resolve().name == f"python3.{minor}"
        python = "python3" if of_system else f"python3.{minor}"
        names = [self.names[part].format(python=python, minor=minor) for part in parts]
        return list(dict.fromkeys(names))


APT = Manager(
    ("apt-get", "install", "-y", "--no-install-recommends"),
    {
        "compiler": "gcc",
        "make": "make",
        "libc": "libc6-dev",
        "pip": "{python}-venv",
        "python": "{python}-dev",
        "probes": "systemtap-sdt-dev",
    },
    ("apt-get", "update"),
)
MANAGERS = (
    APT,
    Manager(
        ("dnf", "install", "-y", "--setopt=install_weak_deps=False"),
        {
            "compiler": "gcc",
            "make": "make",
            "libc": "glibc-devel",
            "pip": "{python}-libs",
            "python": "{python}-devel",
            "probes": "systemtap-sdt-devel",
        },
    ),
    Manager(
        ("zypper", "--non-interactive", "install", "--no-recommends"),
        {
            "compiler": "gcc",
            "make": "make",
            "libc": "glibc-devel",
            "pip": "python3{minor}-base",
            "python": "python3{minor}-devel",
            "probes": "systemtap-sdt-devel",
        },
    ),
    Manager(
        ("pacman", "-S", "--needed", "--noconfirm"),
        {
            "compiler": "gcc",
            "make": "make",
            "libc": "glibc",
            "pip": "python",
            "python": "python",
            "probes": "systemtap",
        },
    ),
)


def manager() -> Manager | None:
    """Returns this system's package manager, or None if it is unknown."""
    return next((one for one in MANAGERS if shutil.which(one.install[0])), None)


def missing() -> list[str]:
    """Returns the required parts that are missing."""
    found = [] if shutil.which("gcc") else ["compiler"]
    found += [] if shutil.which("make") else ["make"]
    found += [] if Path("/usr/include/stdio.h").exists() else ["libc"]
    of_python = []
    if not any(map(importlib.util.find_spec, ("ensurepip", "pip"))):
        of_python.append("pip")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        of_python.append("python")
    if of_python and sysconfig.get_config_var("prefix") != "/usr":
        what = " and ".join(PARTS[part] for part in of_python)
        fail(
            f"{sys.executable} lacks {what}, which the system's packages cannot add to this Python"
        )
    return found + of_python


def has_probes() -> bool:
    """True if the header for USDT probes exists; otherwise the library is built without probes."""
    folders = (Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu"))
    return any((folder / "sys" / "sdt.h").exists() for folder in folders)


def privileged(command: Sequence[str], *, ask: bool) -> list[str] | None:
    """Returns a command line that runs a command as root, or None if that is impossible.

    Args:
        command: the command.
        ask: whether the user may be asked for a password.
    """
    if os.geteuid() == 0:
        return list(command)
    if not shutil.which("sudo"):
        return None
    # The command can ask for a password only on a terminal.
    if ask and sys.stdin.isatty():
        return ["sudo", *command]
    return ["sudo", "-n", *command] if quiet(["sudo", "-n", "true"], show=False) else None


def install_packages(tool: Manager, packages: Sequence[str], *, useful: bool = False) -> bool:
    """Installs packages; returns True on success.

    Args:
        tool: the package manager.
        packages: the packages' names.
        useful: true if the packages are optional. In that case no password is requested, and False
            is returned if they cannot be installed; otherwise, a failure exits with a message.
    """
    say(f"missing packages: {' '.join(packages)}")
    wanted = [*tool.install, *packages]
    command = privileged(wanted, ask=not useful)
    if command is None:
        if useful:
            return False
        fail(f"not root. Run this as root, then this script again:\n  {shlex.join(wanted)}")
    say("installing them")
    if quiet(command, show=not (useful or tool.refresh)):
        return True
    if tool.refresh:
        say("that failed; retrying with fresh package lists")
        refresh = privileged(tool.refresh, ask=not useful) or tool.refresh
        if quiet(refresh, show=not useful) and quiet(command, show=not useful):
            return True
    if not useful:
        fail(f"packages could not be installed: {' '.join(packages)}")
    return False


def install(parts: Sequence[str], *, useful: bool = False) -> bool:
    """Installs the packages that provide parts of the system, as `install_packages` does."""
    tool = manager()
    if tool is not None:
        return install_packages(tool, tool.packages(parts), useful=useful)
    if useful:
        return False
    known = ", ".join(one.install[0] for one in MANAGERS)
    what = "; ".join(PARTS[part] for part in parts)
    fail(f"this system has none of {known}: install {what}; then run this again")


def install_debian_packages(packages: Sequence[str]) -> None:
    """Installs tools for tests and packaging, whose package names are known only for Debian."""
    if not shutil.which(APT.install[0]):
        names = " ".join(packages)
        fail(f"no apt-get here: install what Debian calls {names}, then run this again")
    install_packages(APT, packages)
