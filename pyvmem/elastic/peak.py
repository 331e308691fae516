# SPDX-License-Identifier: MIT
"""Tracks the maximum over a sliding time window."""

from __future__ import annotations

from collections import deque

__all__ = ["Peak"]


class Peak:
    """Tracks the largest number recorded in the last `seconds` seconds.

    Args:
        seconds: length of the window.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: deque[tuple[float, int]] = deque()  # (time, number), largest first

    def note(self, now: float, number: int) -> None:
        """Records a number at time `now`, in seconds; times must not decrease."""
        while self._noted and self._noted[-1][1] <= number:
            self._noted.pop()
        self._noted.append((now, number))
        while self._noted[0][0] < now - self._seconds:
            self._noted.popleft()

    @property
    def most(self) -> int:
        """The largest number in the window; `note` must have been called before."""
        return self._noted[0][1]
