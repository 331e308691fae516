# SPDX-License-Identifier: MIT
"""Formats numbers and plain-text tables for the commands' output."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from pyvmem.commands.terminal import columns

__all__ = ["number", "table"]

_LEAST = 16  # minimum width of a column whose text is wrapped


def number(value: Any) -> str:
    """Formats a number with three or four significant digits; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    width: float | None = None,
    rule: bool = True,
) -> str:
    """Formats rows as a table; the first `left` columns are left-aligned, the rest right-aligned.

    Args:
        width: the output's width; None for the terminal's, if standard output is a terminal. If the
            table is wider, text is wrapped within its column, the widest column first; if that is
            not enough, the columns are printed in several blocks, one below the other, each
            starting with the first column.
        rule: whether to draw a line below the header.
    """
    room = columns() if width is None else width
    lines = [header, *rows]
    widths = _narrowed(lines, left, room)
    return "\n\n".join(
        _block([[line[i] for i in block] for line in lines], block, widths, left, rule)
        for block in _blocks(widths, room)
    )


def _narrowed(lines: Sequence[Sequence[str]], left: int, room: float) -> list[int]:
    """Returns the columns' widths; text columns shrink if the lines are too long."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = [max(_LEAST, *(len(line[i].split(" ")[0]) for line in lines)) for i in range(left)]
    while sum(widths) + 2 * (len(widths) - 1) > room:
        wide = [i for i in range(left) if widths[i] > words[i]]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _blocks(widths: list[int], room: float) -> list[list[int]]:
    """Groups the columns that fit side by side."""
    blocks = [[0]]
    for i in range(1, len(widths)):
        if len(blocks[-1]) > 1 and sum(widths[k] + 2 for k in [*blocks[-1], i]) - 2 > room:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks


def _block(
    lines: list[list[str]], block: list[int], widths: list[int], left: int, rule: bool
) -> str:
    shown = []
    for line in lines:
        cells = [
            textwrap.wrap(cell, widths[i]) if i < left and len(cell) > widths[i] else [cell]
            for i, cell in zip(block, line, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = [
                part.ljust(widths[i]) if i < left else part.rjust(widths[i])
                for i, part in zip(block, parts, strict=True)
            ]
            shown.append("  ".join(aligned).rstrip())
    if rule:
        shown.insert(1, "  ".join("-" * widths[i] for i in block))
    return "\n".join(shown)
