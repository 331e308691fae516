# SPDX-License-Identifier: MIT
"""A re-entrant lock that goes to a thread that waits before the one that had it has it again.

Several engines share a budget, each in a thread that calls again as soon as its call returns. With
`threading.RLock` the one that has just let go takes it again before another has woken up: measured
on two cores, a call that maps nothing waited for a thousand of another cache's calls.
"""

from __future__ import annotations

import threading
from _thread import RLock

__all__ = ["Turns"]


class Turns(RLock):  # type: ignore[misc]  # final for the checkers alone
    """A lock for `with` blocks. Who waits first holds the gate, and the others wait for that.

    So it goes to the first that waits; behind the gate the order is the operating system's. Both
    locks are re-entrant, since Python's collector may run a finalizer at any line, and that
    may close a cache and come here again. Leaving the block is C's, where no signal comes between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.RLock()

    def __enter__(self) -> bool:  # type: ignore[override]
        taken: list[bool] = []
        try:
            if self._is_owned():  # type: ignore[attr-defined]
                # One call of C's takes it and notes that: no exception from outside comes between.
                taken.extend(map(self.acquire, (True,)))
            else:
                with self._gate:
                    taken.extend(map(self.acquire, (True,)))
            return True
        except BaseException:  # from outside: who does not get into the block has no lock
            if taken:
                self.release()
            raise
