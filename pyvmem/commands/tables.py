# SPDX-License-Identifier: MIT
"""Numbers and tables of plain text, as the commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["number", "table"]


def number(value: Any) -> str:
    """A number with three or four significant digits; "-" for None."""
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Text in columns; the first `left` columns are flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
