# SPDX-License-Identifier: MIT
"""Tables of `vmem bench sglang`'s results, for the command's output and the results page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vmem_bench.vllm.full import interval

__all__ = ["HEAD", "SHARED", "body", "shared", "spread"]

HEAD = ["", "stock", "elastic", "elastic relative to stock"]
SHARED = ["", "static halves", "elastic", "elastic relative to static"]

Rows = Mapping[str, Mapping[str, Any]]


def _measured(row: Mapping[str, Any] | None, digits: int, per: float = 1.0) -> str:
    """Formats a value and half its confidence interval; returns "" if it was not measured."""
    if row is None:
        return ""
    text = f"{row['value'] / per:,.{digits}f}"
    half = row.get("half_width")
    return text if half is None else f"{text} ± {half / per:,.{digits}f}"


def spread(found: list[float]) -> dict[str, Any]:
    """Returns a row's fields: all values and, if there are several, `half_width`.

    This is half the width of the mean's confidence interval.
    """
    rounds = {"rounds": [float(f"{one:.4g}") for one in found]}
    return rounds | ({"half_width": interval(found)[1]} if len(found) > 1 else {})


class _Lines:
    """The lines of a table; lines without a measured value are left out."""

    def __init__(self, rows: Rows, arms: Sequence[str]) -> None:
        self.rows, self.arms = rows, arms
        self.found: list[list[str]] = []

    def add(self, title: str, name: str, digits: int, per: float = 1.0) -> None:
        """Adds a line with each arm's row `name` and their ratio."""
        cells = [_measured(self.rows.get(f"{name}/{arm}"), digits, per) for arm in self.arms]
        self._put(title, [*cells, _measured(self.rows.get(f"over/{name}"), 3)])

    def count(self, title: str, name: str) -> None:
        """Adds a line with each arm's count, as "N of TOTAL"."""
        found = [self.rows.get(f"{name}/{arm}") for arm in self.arms]
        self._put(title, [*(f"{one['value']} of {one['of']}" if one else "" for one in found), ""])

    def _put(self, title: str, cells: list[str]) -> None:
        if any(cells):
            self.found.append([title, *cells])


def body(rows: Rows) -> list[list[str]]:
    """Returns the lines below `HEAD`.

    Args:
        rows: rows of the part, by name.
    """
    counts = [name.split("/")[1] for name in rows if name.startswith("rate/") and "stock" in name]
    lines = _Lines(rows, ("stock", "elastic"))
    for count in counts:
        lines.add(f"tokens/s, {count} requests together", f"rate/{count}", 0)
    lines.add("time to first token after an idle period, ms", "first/rest", 1)
    lines.add("time to first token right after another request, ms", "first/again", 1)
    for name, title in (
        ("start", "started"),
        ("highest", "peak under load"),
        ("after", "1 s after the load"),
        ("rest", "idle, with prefixes"),
        ("flushed", "without prefixes"),
        ("asleep", "asleep"),
    ):
        lines.add(f"GB of device memory used, {title}", f"device/{name}", 2, 1e9)
        lines.add(f"GB of keys and values mapped, {title}", f"mapped/{name}", 3, 1e9)
    lines.add("to sleep, ms", "sleep/release", 1)
    lines.add("to wake, ms", "sleep/resume", 1)
    for name, title in (
        ("alone", "single requests: answers identical to stock's first turn"),
        ("again", "repeated, with prefixes: answers identical to the first"),
        ("batch", "requests together: answers identical to stock's first turn"),
        ("slept", "after sleep: answers identical to those before"),
    ):
        lines.count(title, f"same/{name}")
    return lines.found


def shared(rows: Rows) -> list[list[str]]:
    """Returns the lines of the ``share`` part, below `SHARED`.

    Args:
        rows: rows of the part, by name.
    """
    lines = _Lines(rows, ("static", "elastic"))
    engines = (("vllm", "vLLM"), ("sglang", "SGLang"), ("both", "both"))
    for name, title in engines:
        lines.add(f"time to first token of {title}, p50, ms", f"p50/{name}", 1)
        lines.add(f"time to first token of {title}, p99, ms", f"p99/{name}", 1)
    for name, title in engines:
        lines.add(f"tokens/s of {title}", f"rate/{name}", 0)
    for when, what in (
        ("most", "peak"),
        ("prefixes", "idle, with prefixes"),
        ("flushed", "idle, without prefixes"),
    ):
        for name, title in engines:
            lines.add(f"GB of keys and values of {title}, {what}", f"{when}/{name}", 3, 1e9)
    lines.add("GB of device memory freed when both exit", "device", 2, 1e9)
    for name, title in engines[:2]:
        lines.add(f"requests answered by {title}", f"requests/{name}", 0)
    return lines.found
