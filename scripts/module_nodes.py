# SPDX-License-Identifier: MIT
"""Recreates UVM's device nodes, whose major number can change when the module is swapped."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from module_system import System

__all__ = ["NODES", "Access", "make_nodes", "remember_nodes"]

# Names in /dev, and minor numbers. The kernel does not create these nodes.
NODES = {"nvidia-uvm": 0, "nvidia-uvm-tools": 1}


@dataclass(frozen=True)
class Access:
    """The mode and the owner of a device node."""

    mode: int = 0o666
    user: int = 0
    group: int = 0


def access_of(path: Path, otherwise: Access) -> Access:
    """Returns the permissions of a node, or a default if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return otherwise
    return Access(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def remember_nodes(system: System) -> dict[str, Access]:
    """Returns the permissions of UVM's nodes; for missing nodes, those of /dev/nvidiactl."""
    usual = access_of(system.root / "dev/nvidiactl", Access())
    return {name: access_of(system.root / "dev" / name, usual) for name in NODES}


def make_nodes(system: System, access: dict[str, Access]) -> list[Path]:
    """Creates the nodes that are missing or have the wrong number; returns those it created."""
    majors = {name: major for major, name in system.device_majors().items()}
    if "nvidia-uvm" not in majors:
        raise OSError("nvidia-uvm has no device number in /proc/devices")
    made: list[Path] = []
    for name, minor in NODES.items():
        path = system.root / "dev" / name
        device = os.makedev(majors["nvidia-uvm"], minor)
        if path.exists() and stat.S_ISCHR(path.stat().st_mode) and path.stat().st_rdev == device:
            continue
        wanted = access[name]
        new = path.with_name(f".{name}.new")
        new.unlink(missing_ok=True)
        os.mknod(new, stat.S_IFCHR | 0o600, device)
        os.chown(new, wanted.user, wanted.group)
        new.chmod(wanted.mode)
        new.rename(path)
        made.append(path)
    return made
