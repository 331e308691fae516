# SPDX-License-Identifier: MIT
"""A directory lock for processes and threads, released on exit. It leaves no file behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["locked_folder"]


@contextlib.contextmanager
def locked_folder(folder: Path, patience: float) -> Iterator[bool]:
    """Holds the lock on `folder`; yields false if not acquired within `patience` seconds."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + patience
        while not (held := _take(fd)) and time.monotonic() < end:
            time.sleep(1e-3)
        yield held
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
