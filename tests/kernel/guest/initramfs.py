# SPDX-License-Identifier: MIT
"""Writes the guest's initramfs, a cpio archive in the kernel's "newc" format.

Linux describes the format in Documentation/driver-api/early-userspace/buffer-format.rst. Writing it
here needs no external program, no staging directory, and no root privileges for device nodes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

__all__ = ["Initramfs"]

MAGIC = b"070701"
TRAILER = "TRAILER!!!"


class Initramfs:
    """An archive of entries, named by their paths in the guest; parent directories come first."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, Path | bytes, int]] = {}

    def folder(self, name: str) -> None:
        """Adds a directory and any missing parents."""
        for path in reversed((PurePosixPath(name), *PurePosixPath(name).parents)):
            if str(path) != "/":
                self._entries.setdefault(str(path), (stat.S_IFDIR | 0o755, b"", 0))

    def text(self, name: str, content: str, mode: int = 0o644) -> None:
        """Adds a file with the given content."""
        self._put(name, (stat.S_IFREG | mode, content.encode(), 0))

    def file(self, name: str, source: Path) -> None:
        """Adds a copy of a host file, with its permissions."""
        mode = source.stat().st_mode & 0o777
        self._put(name, (stat.S_IFREG | mode, source, 0))

    def tree(self, name: str, source: Path) -> None:
        """Adds a copy of everything below a host directory; links remain links."""
        self.folder(name)
        for parent, folders, files in os.walk(source):
            inside = PurePosixPath(name) / Path(parent).relative_to(source).as_posix()
            for one in sorted(folders + files):
                path = Path(parent, one)
                if path.is_symlink():
                    self.link(str(inside / one), os.readlink(path))
                elif path.is_dir():
                    self.folder(str(inside / one))
                elif path.is_file():
                    self.file(str(inside / one), path)

    def link(self, name: str, target: str) -> None:
        """Adds a symbolic link."""
        self._put(name, (stat.S_IFLNK | 0o777, target.encode(), 0))

    def device(self, name: str, major: int, minor: int) -> None:
        """Adds a character device."""
        self._put(name, (stat.S_IFCHR | 0o600, b"", os.makedev(major, minor)))

    def write(self, path: Path) -> None:
        """Writes the archive."""
        with open(path, "wb") as out:
            for inode, (name, entry) in enumerate(self._entries.items(), start=1):
                self._entry(out, inode, name.lstrip("/"), *entry)
            self._entry(out, 0, TRAILER, 0, b"", 0)

    def _put(self, name: str, entry: tuple[int, Path | bytes, int]) -> None:
        self.folder(str(PurePosixPath(name).parent))
        self._entries[name] = entry

    @staticmethod
    def _entry(
        out: BinaryIO, inode: int, name: str, mode: int, content: Path | bytes, device: int
    ) -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        encoded = name.encode() + b"\0"
        owner = modified = major = minor = checksum = 0
        fields = (inode, mode, owner, owner, 1, modified, len(data), major, minor)
        name_fields = (os.major(device), os.minor(device), len(encoded), checksum)
        head = MAGIC + b"".join(b"%08X" % value for value in fields + name_fields) + encoded
        out.write(head + bytes(-len(head) % 4))
        out.write(data)
        out.write(bytes(-len(data) % 4))
