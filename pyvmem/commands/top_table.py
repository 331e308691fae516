# SPDX-License-Identifier: MIT
"""Renders the tables of ``vmem top``: each device's memory, its engines, and their sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyvmem.commands.terminal import BOLD, DIM, GREEN, RED, YELLOW, painted
from pyvmem.plumbing.units import format_bytes

__all__ = ["Device", "Reading", "drawn"]

# Columns: key in the JSON, heading. `device` is shown on a separate line above its engines.
_COLUMNS = {
    "engine": "engine", "pid": "pid", "mapped": "mapped", "in_use": "in use", "cached": "cached",
    "host": "host", "host_cached": "host cached", "limit": "limit", "floor": "floor",
    "short": "short", "hits": "hits", "maps_s": "maps/s", "waits_s": "waits/s",
}  # fmt: skip

# Columns dropped on a narrow terminal, in this order.
_LEFT_OUT = (
    *("floor", "waits_s", "maps_s", "host", "host_cached", "hits"),
    *("cached", "pid", "short", "in_use", "limit"),
)
_SUMS = ("mapped", "in_use", "cached", "host", "host_cached", "short")
_OFFLOADING = ("host", "host_cached")  # shown only if an engine has host memory
_BYTES = (*_SUMS, "limit", "floor")
_MARKS = (("#", GREEN), ("=", YELLOW), ("-", DIM))  # in use, cached, otherwise mapped
_LEAST_BAR, _MOST_BAR = 12, 40


@dataclass(frozen=True)
class Device:
    """A snapshot of a device and its engines.

    Attributes:
        card: name of the GPU; ``""`` if unknown.
        memory, free: the device's total and free memory in bytes; None if unknown.
        engines: a record for each engine, with the table's columns.
    """

    card: str
    memory: int | None
    free: int | None
    engines: list[dict[str, Any]]

    def total(self) -> dict[str, int]:
        """Returns the sums over the device's engines."""
        return {key: sum(one[key] for one in self.engines) for key in _SUMS}


Reading = dict[str, Device]


def drawn(reading: Reading, width: float = math.inf, colour: bool = False) -> str:
    """Renders the engines as a table per device, with the columns that fit."""
    engines = [one for some in reading.values() for one in some.engines]
    used = {key for one in engines for key in one if key not in _OFFLOADING or one["host"]}
    keys = [key for key in _COLUMNS if key in used]
    tables = {
        device: [[_cell(key, one.get(key)) for key in keys] for one in _rows(some)]
        for device, some in reading.items()
        if some.engines
    }
    heads = [_COLUMNS[key] for key in keys]
    every = [heads, *(row for rows in tables.values() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    kept = _fitting(keys, widths, width)
    room = width - sum(widths[i] + 2 for i in kept)
    bar = int(min(room, _MOST_BAR)) if _LEAST_BAR <= room < math.inf else 0

    def line(cells: list[str], colour: str) -> str:
        text = "  ".join(
            cells[i].rjust(widths[i]) if i else cells[i].ljust(widths[i]) for i in kept
        )
        return paint(text, colour)

    paint = painted if colour else _plain
    blocks = []
    for device, rows in tables.items():
        some = reading[device]
        text = [paint(_title(device, some, width), BOLD), line(heads, DIM).rstrip()]
        for one, cells in zip(_rows(some), rows, strict=True):
            row = line(cells, RED if one["short"] else BOLD if "pid" not in one else "")
            text.append(f"{row}  {_bar(one, some, bar, paint)}".rstrip())
        blocks.append("\n".join(text))
    return "\n\n".join(blocks)


def _rows(some: Device) -> list[dict[str, Any]]:
    """Returns a row for each engine, and one for their sum if there are several."""
    total = [{"engine": "total", **some.total()}] if len(some.engines) > 1 else []
    return [*some.engines, *total]


def _fitting(keys: list[str], widths: list[int], width: float) -> list[int]:
    """Returns the indices of the columns that fit."""
    kept = list(range(len(keys)))
    for key in _LEFT_OUT:
        if sum(widths[i] + 2 for i in kept) - 2 <= width:
            break
        kept = [i for i in kept if keys[i] != key]
    return kept


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in _BYTES:
        return format_bytes(value)
    if key == "hits":
        return f"{value:.0%}"
    return f"{value:.1f}" if key.endswith("_s") else str(value)


def _title(device: str, some: Device, width: float) -> str:
    """Returns the line for the device itself; the UUID is shortened on a narrow terminal."""
    said = [some.card] if some.card else []
    if some.memory is not None:
        said.append(format_bytes(some.memory))
    if some.free is not None:
        said.append(f"{format_bytes(some.free)} free")
    words = ", ".join(said)
    shown = device if len(device) + 2 + len(words) <= width else device[:12]
    return f"{shown}  {words}".rstrip()


def _bar(one: dict[str, Any], some: Device, width: int, paint: Callable[[str, str], str]) -> str:
    """Draws an engine's share of the device's memory: in use, cached, and other mapped memory."""
    whole = max(some.memory or 0, some.total()["mapped"])
    if not whole:
        return ""
    used = one["in_use"]
    cached = used + one["cached"]
    ends = [round(width * upto / whole) for upto in (used, cached, max(cached, one["mapped"]))]
    parts = zip(_MARKS, (0, *ends), ends, strict=False)
    return "".join(paint(mark * (end - start), shade) for (mark, shade), start, end in parts)


def _plain(text: str, _: str) -> str:
    return text
