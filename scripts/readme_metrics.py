# SPDX-License-Identifier: MIT
"""Generates the table of metrics that `pyvmem.telemetry` exports for a cache.

pyvmem must be importable.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

from readme_format import ROOT

sys.path.insert(0, str(ROOT))

from pyvmem import _native
from pyvmem.kvcache.stats import CacheStats
from pyvmem.memory.info import ContextInfo, Stats
from pyvmem.telemetry import Family, Telemetry

COMMON = {"cache", "le"}  # labels of every metric, and of every histogram


def zeros(kind: Any) -> dict[str, Any]:
    """Returns a zero for each field of a dataclass, by name."""
    return {one.name: 0 for one in dataclasses.fields(kind)}


class Idle:
    """A cache with no activity."""

    context = SimpleNamespace(
        info=SimpleNamespace(**zeros(ContextInfo)),
        stats=lambda: SimpleNamespace(**zeros(Stats)),
    )

    def stats(self) -> CacheStats:
        """Returns counters that are all zero."""
        return CacheStats(
            **{**zeros(CacheStats), "wait_counts": (0,) * _native.constant("PYVMEM_WAIT_COUNTS")}
        )


def families() -> tuple[Family, ...]:
    """Returns the metric families of a cache."""
    telemetry, cache = Telemetry(), Idle()
    telemetry.add(cache)
    return telemetry.families()


def labels(family: Family) -> str:
    """Returns the labels that are specific to a family, with their values if these are fixed."""
    found: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name not in COMMON:
                found.setdefault(name, {})[str(value)] = None
    shown = []
    for name, values in found.items():
        fixed = [f"`{value}`" for value in values if value.isidentifier()]
        shown.append(f"`{name}`: {', '.join(fixed)}" if fixed else f"`{name}`")
    return "; ".join(shown)


def part() -> list[str]:
    """Returns the lines of the table."""
    rows = [["metric", "type", "labels besides `cache`", "what"], ["---"] * 4]
    for family in families():
        name = family.name + ("_total" if family.kind == "counter" else "")
        rows.append([f"`{name}`", family.kind, labels(family), family.help])
    return ["| " + " | ".join(row) + " |" for row in rows]
