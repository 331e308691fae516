# SPDX-License-Identifier: MIT
"""The table of a run of `vmem bench sglang`, as the command and the results page show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["HEAD", "body"]

HEAD = ["", "stock", "elastic", "elastic over stock"]
_ARMS = ("stock", "elastic")

Rows = Mapping[str, Mapping[str, Any]]


def _measured(row: Mapping[str, Any] | None, digits: int, per: float = 1.0) -> str:
    """A value and half its interval; "" where it was not measured."""
    if row is None:
        return ""
    text = f"{row['value'] / per:,.{digits}f}"
    half = row.get("half_width")
    return text if half is None else f"{text} ± {half / per:,.{digits}f}"


def body(rows: Rows) -> list[list[str]]:
    """The lines below `HEAD`.

    Args:
        rows: of the part, by name.
    """
    counts = [name.split("/")[1] for name in rows if name.startswith("rate/") and "stock" in name]
    lines = []

    def add(title: str, name: str, digits: int, per: float = 1.0) -> None:
        cells = [_measured(rows.get(f"{name}/{arm}"), digits, per) for arm in _ARMS]
        cells.append(_measured(rows.get(f"over/{name}"), 3))
        if any(cells):
            lines.append([title, *cells])

    for count in counts:
        add(f"tokens/s, {count} requests at once", f"rate/{count}", 0)
    add("first token after a rest, ms", "first/rest", 1)
    add("first token at once after another, ms", "first/again", 1)
    for name, title in (
        ("start", "started"),
        ("highest", "the most under load"),
        ("after", "1 s after the load"),
        ("rest", "at rest, with prefixes"),
        ("flushed", "without prefixes"),
        ("asleep", "asleep"),
    ):
        add(f"GB taken from the device, {title}", f"device/{name}", 2, 1e9)
        add(f"GB of keys and values mapped, {title}", f"mapped/{name}", 3, 1e9)
    add("to sleep, ms", "sleep/release", 1)
    add("to wake, ms", "sleep/resume", 1)
    for name, title in (
        ("alone", "requests alone: answers as stock's first"),
        ("again", "again, with prefixes: answers as before"),
        ("batch", "requests at once: answers as stock's first"),
        ("slept", "after sleep: answers as before"),
    ):
        found = [rows.get(f"same/{name}/{arm}") for arm in _ARMS]
        cells = [f"{one['value']} of {one['of']}" if one else "" for one in found]
        if any(cells):
            lines.append([title, *cells, ""])
    return lines
