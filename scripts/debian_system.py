# SPDX-License-Identifier: MIT
"""New Debian systems for the packages' checks, made from the archive that this machine uses.

mmdebstrap makes one in a temporary folder, as root or in a user name space. Hooks do what is to be
done in it. Nothing is left of it but, where that is asked for, an image of it as a disk.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apt_area import archive_source
from deb import install_tools
from dist import DistError, run

__all__ = ["CANNOT", "DebianSystem", "copy_in", "in_system", "system_mode"]

CANNOT = 77  # exit status of the checks where no system can be made
TOOLS = {"/usr/bin/mmdebstrap": "mmdebstrap"}
IMAGE_TOOLS = {"/usr/bin/genext2fs": "genext2fs"}


def system_mode() -> str | None:
    """How mmdebstrap becomes root of a new system here; None where it cannot."""
    if run("id", "-u").strip() == "0":
        return "root"
    # Whether an ordinary user can be root of a name space of their own.
    done = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False)
    return "unshare" if done.returncode == 0 else None


def copy_in(*paths: Path) -> str:
    """The hook that copies files and folders into the system's root."""
    return "copy-in " + " ".join(f'"{path}"' for path in paths) + " /"


def in_system(command: str) -> str:
    """The hook that runs a command in the system, without this machine's environment."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return f'chroot "$1" env -i HOME=/root LC_ALL=C PATH={path} {command} </dev/null'


@dataclass(frozen=True)
class DebianSystem:
    """A system: what it consists of, and what is done in it.

    Attributes:
        suite: Debian's name of the release, as "bookworm".
        include: packages beside the essential ones.
        hooks: what is done once it is there, in this order (`copy_in`, `in_system`).
        components: of the archive.
        image: where the system is put as an ext2 file system; None: it is removed.
    """

    suite: str
    include: Sequence[str]
    hooks: Sequence[str]
    components: Sequence[str] = ("main",)
    image: Path | None = None

    def command(self, mode: str) -> list[str]:
        """The call of mmdebstrap; it checks the archive by the key that this machine has."""
        source = archive_source()
        signed = f"[signed-by={source.signed_by}] " if source.signed_by.startswith("/") else ""
        kind = "ext2" if self.image else "null"
        return [
            *("mmdebstrap", f"--mode={mode}", "--variant=minbase", f"--format={kind}", "--quiet"),
            f"--include={','.join(self.include)}",
            *(f"--customize-hook={hook}" for hook in self.hooks),
            *(self.suite, str(self.image or "/dev/null")),
            f"deb {signed}{source.uri} {self.suite} {' '.join(self.components)}",
        ]

    def make(self, mode: str) -> None:
        """Makes it and runs the hooks.

        Raises:
            DistError: a package cannot be had, or a hook failed; what it said was shown.
        """
        install_tools({**TOOLS, **(IMAGE_TOOLS if self.image else {})})
        command = self.command(mode)
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if status:
            raise DistError(f"exit status {status}: {' '.join(command[:3])} ... {self.suite}")
