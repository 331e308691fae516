# SPDX-License-Identifier: MIT
"""Committed results, by file and row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["NotMeasured", "Result", "Results"]


class NotMeasured(LookupError):
    """Raised when a result file or row that a value needs does not exist."""


class Result:
    """One file of ``benchmarks/results``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def data(self) -> dict[str, Any]:
        """The file's JSON document. NotMeasured: there is no such file."""
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotMeasured(self.path.name) from None
        return found

    @cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for part in self.data["parts"].values() for row in part["rows"]}

    def row(self, name: str) -> dict[str, Any]:
        """The row with id `name`. NotMeasured: there is no such row."""
        try:
            return self._rows[name]
        except KeyError:
            raise NotMeasured(f"{self.path.name}: {name}") from None

    def value(self, name: str, field: str = "") -> float:
        """A number of a row: `field`, or by default its value or median."""
        row = self.row(name)
        if field:
            return float(row[field])
        return float(row["value"] if "value" in row else row["median"])

    def median(self, names: Sequence[str]) -> float:
        """The median over rows that repeat one measurement on several buffers."""
        return statistics.median(self.value(name) for name in names)

    def aim(self, name: str) -> float:
        """An aim's value. NotMeasured: there is no such aim, or it has no value."""
        for aim in self.data["aims"]:
            if aim["id"] == name and aim["value"] is not None:
                return float(aim["value"])
        raise NotMeasured(f"{self.path.name}: {name}")

    @property
    def hardware(self) -> str:
        """The GPU in a few words; "arithmetic" for a result that needs none."""
        gpu = self.data["machine"]["gpu"]
        if not gpu:
            return "arithmetic"
        return str(gpu).removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


class Results:
    """The results directory; `results["h100"]` is ``h100.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Result] = {}

    def __getitem__(self, name: str) -> Result:
        return self._open.setdefault(name, Result(self.folder / f"{name}.json"))
