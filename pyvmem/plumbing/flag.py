# SPDX-License-Identifier: MIT
"""A flag between threads that an exception from outside cannot leave half set.

`threading.Event` takes its lock in Python code: after a signal's exception just then nobody lets go
of it, and whoever comes next waits for ever. Starting a `threading.Thread` waits for one, too.
"""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Flag"]


class Flag:
    """As `threading.Event`; each change is one call of C. For one thread that waits."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Idempotent; also after a call that was interrupted."""
        self._set = True
        with suppress(RuntimeError):  # it was set before
            self._lock.release()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def wait(self, seconds: float) -> bool:
        """Waits until it is set, or so long; whether it is set."""
        if not self._set:
            self._lock.acquire(timeout=seconds)
        return self._set
