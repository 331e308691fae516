# SPDX-License-Identifier: MIT
"""Draws a run's memory, step by step, as plain text that any terminal can show."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["chart"]

_WIDTH, _HEIGHT = 64, 8
_MIB = 1 << 20


def chart(
    steps: Sequence[tuple[int, int]], width: int = _WIDTH, height: int = _HEIGHT
) -> list[str]:
    """Returns the chart's lines, or an empty list if the run mapped nothing.

    Args:
        steps: for each step, the number of mapped bytes and how many of them held tokens.
        width: width of the chart; a column shows the largest of the steps it covers.
    """
    most = max((mapped for mapped, _ in steps), default=0)
    if not most:
        return []
    count = min(width, len(steps))
    bounds = [len(steps) * i // count for i in range(count + 1)]
    columns = [max(steps[bounds[i] : bounds[i + 1]]) for i in range(count)]
    scale = f"{most / _MIB:,.1f}"
    lines = []
    for row in range(height, 0, -1):
        level = most * (row - 0.5) / height
        marks = (
            "#" if used >= level else "." if mapped >= level else " " for mapped, used in columns
        )
        label = scale if row == height else "0" if row == 1 else ""
        lines.append(f"{label:>{len(scale)}} |{''.join(marks)}".rstrip())
    return lines
