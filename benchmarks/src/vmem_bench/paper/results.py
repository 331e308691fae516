# SPDX-License-Identifier: MIT
"""Access to the committed results by file and row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["NotMeasured", "Result", "Results"]


class NotMeasured(LookupError):
    """A result file, row or aim that a value needs does not exist."""


class Result:
    """A file in ``benchmarks/results``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def data(self) -> dict[str, Any]:
        """The file's JSON document.

        Raises:
            NotMeasured: there is no such file.
        """
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotMeasured(self.path.name) from None
        return found

    @cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for part in self.data["parts"].values() for row in part["rows"]}

    def row(self, name: str) -> dict[str, Any]:
        """Returns the row with id `name`.

        Raises:
            NotMeasured: there is no such file or row.
        """
        try:
            return self._rows[name]
        except KeyError:
            raise NotMeasured(f"{self.path.name}: {name}") from None

    def value(self, name: str, field: str = "") -> float:
        """Returns a row's `field`; by default its value, or its median if it has no value."""
        row = self.row(name)
        if field:
            return float(row[field])
        return float(row["value"] if "value" in row else row["median"])

    def median(self, names: Sequence[str]) -> float:
        """Returns the median over rows that repeat one measurement on several buffers."""
        return statistics.median(self.value(name) for name in names)

    def aim(self, name: str) -> float:
        """Returns the value of an aim.

        Raises:
            NotMeasured: there is no such aim, or it has no value.
        """
        for aim in self.data["aims"]:
            if aim["id"] == name and aim["value"] is not None:
                return float(aim["value"])
        raise NotMeasured(f"{self.path.name}: {name}")

    @property
    def hardware(self) -> str:
        """The GPU's short name, or "arithmetic" if no GPU was used."""
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
