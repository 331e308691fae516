# SPDX-License-Identifier: MIT
"""The largest of the numbers noted lately."""

from __future__ import annotations

from collections import deque

__all__ = ["Peak"]


class Peak:
    """A sliding maximum.

    Args:
        seconds: a number counts for so long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: deque[tuple[float, int]] = deque()  # with the time; numbers fall

    def note(self, now: float, number: int) -> None:
        """Adds a number at a time that is no earlier than the last one."""
        while self._noted and self._noted[-1][1] <= number:
            self._noted.pop()
        self._noted.append((now, number))
        while self._noted[0][0] < now - self._seconds:
            self._noted.popleft()

    @property
    def most(self) -> int:
        """The largest; there has to be one."""
        return self._noted[0][1]
