# SPDX-License-Identifier: MIT
"""Paths given on the command line or in the environment, refused before any work is done."""

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
    """A path at which there is something."""
    path = Path(text)
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text}: {why}") from None
    return path


def existing_file(text: str) -> Path:
    """A file that is there, or a pipe such as /dev/stdin."""
    path = existing(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    path = existing(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def replaced(text: str) -> Path:
    """A file that is made beside its place and moved there: its folder must be writable.

    Of a symbolic link, the file that it names. A device or a pipe is refused: it would be gone.
    """
    path = Path(text)
    existing_folder(str(path.parent))
    if path.is_symlink():
        path = path.resolve()
    folder = existing_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no regular file")
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError
        with tempfile.TemporaryFile(dir=folder):  # in /proc nothing can be made, whatever it says
            pass
    except OSError:
        raise argparse.ArgumentTypeError(f"{text}: {folder} cannot be written to") from None
    return path


def written(text: str) -> Path:
    """A file that is made, or written in place where it is there, such as /dev/stdout."""
    path = Path(text)
    if "\0" in text or path.is_dir() or not path.exists():
        return replaced(text)
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    if path.is_char_device():
        try:  # no bytes: what shows them shows nothing, and /dev/full is full
            with path.open("ab", buffering=0) as device:
                device.write(b"")
        except OSError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def folder_in(variable: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that a variable names, with ``~`` as a shell reads it; None: it is empty or unset.

    Raises:
        InvalidArgument: nobody has that home.
    """
    text = environment.get(variable, "")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise InvalidArgument(
            f"{variable}={text}: {text.partition('/')[0]} is the home of no user here; name the "
            "folder in full",
            errno=errno.EINVAL,
            op=variable,
        )
    return Path(path) if path else None


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the file system names this path, which the user has given."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file of `written`.

    Raises:
        OSError: with its name, also for a full disk.
    """
    with _named(path):
        path.write_text(text, encoding="utf-8")


def replace_text(path: Path, text: str) -> None:
    """Writes a file of `replaced`, whole or not at all.

    Raises:
        OSError: with its name, not that of the file beside it.
    """
    partial = path.with_name(path.name + ".part")
    with _named(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def picture_file(text: str) -> Path:
    """A file for a picture, of a kind that matplotlib draws from its name's end."""
    path = written(text)
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name in .svg, .png or .pdf")
    return path
