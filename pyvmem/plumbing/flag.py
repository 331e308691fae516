# SPDX-License-Identifier: MIT
"""A thread event that an asynchronous exception cannot leave half-set.

`threading.Event` acquires its lock in Python code: an exception from a signal handler at that point
leaves it locked forever. `threading.Thread.start` also waits on such an event.
"""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Flag"]


class Flag:
    """A `threading.Event` whose changes are single C calls. Supports only one waiting thread."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Sets the flag. Idempotent, even after an interrupted call."""
        self._set = True
        with suppress(RuntimeError):  # already set
            self._lock.release()

    def is_set(self) -> bool:
        """Returns true if the flag is set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the flag; returns true if it is set."""
        if not self._set:
            self._lock.acquire(timeout=seconds)
        return self._set
