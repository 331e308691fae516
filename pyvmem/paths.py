# SPDX-License-Identifier: MIT
"""Paths given on the command line, refused while the words are read, before any work is done."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["existing", "existing_folder", "picture_file", "replaced", "written"]


def existing(text: str) -> Path:
    """A path at which there is something."""
    path = Path(text)
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text}: {why}") from None
    return path


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    path = existing(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def replaced(text: str) -> Path:
    """A file that is made beside its place and moved there: its folder must be writable."""
    path = Path(text)
    if not os.access(existing_folder(str(path.parent)), os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: {path.parent} cannot be written to")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def written(text: str) -> Path:
    """A file that is made, or written in place where it is there, such as /dev/stdout."""
    path = Path(text)
    if "\0" in text or path.is_dir() or not path.exists():
        return replaced(text)
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written to")
    return path


def picture_file(text: str) -> Path:
    """A file for a picture, of a kind that matplotlib draws from its name's end."""
    path = written(text)
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name in .svg, .png or .pdf")
    return path
