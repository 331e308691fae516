# SPDX-License-Identifier: MIT
"""Creates new Debian systems to check the packages in, from the archive that this machine uses.

mmdebstrap creates a system in a temporary directory, as root or in a user namespace. Hooks run the
checks in the system. Afterwards it is deleted, or kept as a disk image on request.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from apt_area import archive_source
from deb import install_tools
from dist import DistError, run

__all__ = ["CANNOT", "DebianSystem", "conduct", "copy_in", "in_system", "system_mode"]

CANNOT = 77  # the checks' exit status if no system can be created
TOOLS = {"/usr/bin/mmdebstrap": "mmdebstrap"}
IMAGE_TOOLS = {"/usr/bin/genext2fs": "genext2fs"}


def system_mode() -> str | None:
    """Returns the mmdebstrap mode with which this user can act as root, or None."""
    if run("id", "-u").strip() == "0":
        return "root"
    # Test whether an ordinary user can become root in a user namespace.
    done = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False)
    return "unshare" if done.returncode == 0 else None


def copy_in(*paths: Path) -> str:
    """Returns the hook that copies files and directories into the system's root."""
    return "copy-in " + " ".join(f'"{path}"' for path in paths) + " /"


def in_system(command: str) -> str:
    """Returns the hook that runs a command in the system, without the caller's environment."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return f'chroot "$1" env -i HOME=/root LC_ALL=C PATH={path} {command} </dev/null'


def conduct(name: str, text: str | None, check: Callable[[Path], int]) -> int:
    """Serves as `main` for a check that takes no options; returns the exit status.

    Args:
        name: name of the check.
        text: text of ``--help``.
        check: called with a temporary directory; returns the exit status.
    """
    argparse.ArgumentParser(description=text).parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix=f"vmem-{name.replace('_', '-')}-") as folder:
            return check(Path(folder))
    except DistError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


@dataclass(frozen=True)
class DebianSystem:
    """A new Debian system: the packages it contains, and the hooks that run in it.

    Attributes:
        suite: Debian's name for the release, such as "bookworm".
        include: packages in addition to the essential ones.
        hooks: run in this order after installation (`copy_in`, `in_system`).
        components: the archive components to use.
        image: path for an ext2 image of the system; if None, the system is deleted.
    """

    suite: str
    include: Sequence[str]
    hooks: Sequence[str]
    components: Sequence[str] = ("main",)
    image: Path | None = None

    def command(self, mode: str) -> list[str]:
        """Returns the mmdebstrap command, which verifies the archive with this machine's key."""
        source = archive_source()
        signed = f"[signed-by={source.signed_by}] " if source.signed_by.startswith("/") else ""
        kind = "ext2" if self.image else "null"
        return [
            *("mmdebstrap", f"--mode={mode}", "--variant=minbase", f"--format={kind}", "--quiet"),
            *([f"--include={','.join(self.include)}"] if self.include else []),
            *(f"--customize-hook={hook}" for hook in self.hooks),
            *(self.suite, str(self.image or "/dev/null")),
            f"deb {signed}{source.uri} {self.suite} {' '.join(self.components)}",
        ]

    def make(self, mode: str) -> None:
        """Creates the system and runs the hooks.

        Raises:
            DistError: a package is unavailable, or a hook failed; its output was shown.
        """
        install_tools({**TOOLS, **(IMAGE_TOOLS if self.image else {})})
        command = self.command(mode)
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if status:
            raise DistError(f"exit status {status}: {' '.join(command[:3])} ... {self.suite}")
