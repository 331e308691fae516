# SPDX-License-Identifier: MIT
"""Validates paths from the command line or the environment before any work is done."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyvmem.errors import InvalidArgument

__all__ = [
    "existing",
    "existing_file",
    "existing_folder",
    "folder_in",
    "picture_file",
    "replace_text",
    "replaced",
    "write_text",
    "written",
]


def existing(text: str) -> Path:
    """Validates a path that must exist."""
    path = Path(text)
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        why = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text}: {why}") from None
    return path


def existing_file(text: str) -> Path:
    """Validates an existing file, or a pipe such as /dev/stdin."""
    path = existing(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def existing_folder(text: str) -> Path:
    """Validates an existing directory."""
    path = existing(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


def replaced(text: str) -> Path:
    """Validates a file to be replaced atomically, which requires a writable directory.

    Follows symbolic links. Rejects devices and pipes, which the rename would remove.
    """
    path = Path(text)
    existing_folder(str(path.parent))
    if path.is_symlink():
        path = path.resolve()
    folder = existing_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a regular file")
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError
        # os.access reports /proc as writable, but files cannot be created there
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        raise argparse.ArgumentTypeError(f"{text}: {folder} cannot be written to") from None
    return path


def written(text: str) -> Path:
    """Validates a file to be created, or written in place if it exists, such as /dev/stdout."""
    path = Path(text)
    if "\0" in text or path.is_dir() or not path.exists():
        return replaced(text)
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    if path.is_char_device():
        try:  # an empty write is harmless, and detects /dev/full
            with path.open("ab", buffering=0) as device:
                device.write(b"")
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def folder_in(variable: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the directory that `variable` names, with ``~`` expanded; None if empty or unset.

    Raises:
        InvalidArgument: the user after ``~`` does not exist.
    """
    text = environment.get(variable, "")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise InvalidArgument(
            f"{variable}={text}: {text.partition('/')[0]} is not a user's home directory; write "
            "the full path",
            errno=errno.EINVAL,
            op=variable,
        )
    return Path(path) if path else None


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Makes file-system errors in a ``with`` block name the path that the user gave."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file validated by `written`.

    Raises:
        OSError: names the file, even if the disk is full.
    """
    with _named(path):
        path.write_text(text, encoding="utf-8")


def replace_text(path: Path, text: str) -> None:
    """Atomically replaces a file validated by `replaced`.

    Raises:
        OSError: names this file, not the temporary one.
    """
    partial = path.with_name(path.name + ".part")
    with _named(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def picture_file(text: str) -> Path:
    """Validates the path of an image file, which must end in .svg, .png or .pdf."""
    path = written(text)
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name in .svg, .png or .pdf")
    return path
