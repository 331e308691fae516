# SPDX-License-Identifier: MIT
"""A thread event that an asynchronous exception cannot leave half set.

`threading.Event` takes its lock in Python code: an exception of a signal handler at that point
leaves it locked for ever. Starting a `threading.Thread` waits on such an event, too.
"""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Flag"]


class Flag:
    """As `threading.Event`, but every change is one C call. For a single waiter."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Sets the flag. Idempotent, also after an interrupted call."""
        self._set = True
        with suppress(RuntimeError):  # it was set before
            self._lock.release()

    def is_set(self) -> bool:
        """True if set."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Waits until set, at most `seconds`; True if set."""
        if not self._set:
            self._lock.acquire(timeout=seconds)
        return self._set
