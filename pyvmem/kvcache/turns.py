# SPDX-License-Identifier: MIT
"""A re-entrant lock that goes to a thread that waits before the one that had it has it again.

Several engines share a budget, each in a thread that calls again as soon as its call returns. With
`threading.RLock` the one that has just let go takes it again before another has woken up: measured
on two cores, a call that maps nothing waited for a thousand of another cache's calls.
"""

from __future__ import annotations

import threading

__all__ = ["Turns"]


class Turns:
    """A lock for `with` blocks. Who waits first holds the gate, and the others wait for that.

    So it goes to the first that waits; behind the gate the order is the operating system's. Both
    locks are re-entrant, since Python's collector may run a finalizer at any line, and that
    may close a cache and come here again.
    """

    def __init__(self) -> None:
        self._gate = threading.RLock()
        self._lock = threading.RLock()
        self._owner = self._depth = 0

    def __enter__(self) -> Turns:
        me = threading.get_ident()
        if self._owner == me:  # no other thread can make this true or false
            self._lock.acquire()
        else:
            with self._gate:
                self._lock.acquire()
            self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()
