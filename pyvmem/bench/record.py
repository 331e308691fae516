# SPDX-License-Identifier: MIT
"""The result of a run: measured rows, rows that were not run and why, and the result file.

The format is described in benchmarks/README.md; `FORMAT` changes whenever the meaning of a file
changes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyvmem.bench.timing import Samples, summarize
from pyvmem.plumbing.paths import replace_text

__all__ = ["FORMAT", "Book", "Part", "Record", "SCALES", "lines", "mark_interrupted"]

FORMAT = "vmem-bench-api/1"

SCALES = {"us": 1e3, "ms": 1e6, "s": 1e9, "ns": 1.0}  # nanoseconds per unit of time
_DIGITS = 6
_LINE = 500  # a list or object of up to this many characters stays on one line
_MAX_RAW = 4000  # samples per row in the raw file


def _round(value: float) -> float:
    """Rounds to six significant digits: further digits are noise and would bloat the repository."""
    return float(f"{value:.{_DIGITS}g}")


@dataclass
class Part:
    """A part of the benchmark, selectable by name, with its rows."""

    name: str
    title: str
    status: str = "not run"  # "done", "partial", "not run" or "failed"
    why: str = ""
    started: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def time(
        self,
        row: str,
        what: str,
        system: str,
        samples: Samples,
        *,
        page: int = 0,
        nbytes: int = 0,
        unit: str = "us",
        overhead_ns: float = 0.0,
        calls: int = 1,
        note: str = "",
    ) -> dict[str, Any]:
        """Adds a row of times.

        Args:
            row: the row's name, unique in the part.
            what: description of the row.
            system: what was measured.
            samples: times in nanoseconds.
            page: page size in bytes, if the row has one.
            nbytes: bytes that a sample covers; if given, the row also reports GB/s at the median.
            unit: the row's unit, a key of SCALES.
            overhead_ns: time of an empty call of this system, which `net` excludes.
            calls: number of calls that one sample covers.
            note: additional information for the reader.
        """
        scale = SCALES[unit]
        entry = self._entry(row, what, system, unit, page=page, note=note)
        for key, value in asdict(summarize(samples)).items():
            keeps = key in ("n", "rounds", "spread", "round_spread")
            entry[key] = value if keeps else value / scale
        entry["overhead"] = overhead_ns * calls / scale
        entry["net"] = entry["median"] - entry["overhead"]
        entry["calls"] = calls
        if nbytes:
            entry["bytes"] = nbytes
            entry["gb_per_s"] = nbytes / (entry["median"] * scale)
        every = -(-len(samples) // _MAX_RAW)
        if every > 1:
            # the raw file keeps every n-th sample; statistics use all samples
            entry["samples_every"] = every
        entry["samples"] = [[x / scale for x in r[::every]] for r in samples.rounds]
        return self._add(entry)

    def value(
        self,
        row: str,
        what: str,
        system: str,
        value: float,
        unit: str,
        *,
        page: int = 0,
        note: str = "",
        **more: Any,
    ) -> dict[str, Any]:
        """Adds a row with a single number, such as bytes, a count or a total time."""
        entry = self._entry(row, what, system, unit, page=page, note=note)
        entry["value"] = value
        entry.update(more)
        return self._add(entry)

    def not_run(self, row: str, why: str) -> None:
        """Records that a row was not run, and why."""
        self.missing.append({"id": f"{self.name}/{row}", "why": why})

    def find(self, row: str) -> dict[str, Any] | None:
        """Returns the row with this name (not including the part's name), or None."""
        wanted = f"{self.name}/{row}"
        return next((r for r in self.rows if r["id"] == wanted), None)

    def _entry(
        self, row: str, what: str, system: str, unit: str, *, page: int, note: str
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": f"{self.name}/{row}",
            "what": what,
            "system": system,
            "unit": unit,
        }
        if page:
            entry["page"] = page
        if note:
            entry["note"] = note
        return entry

    def _add(self, entry: dict[str, Any]) -> dict[str, Any]:
        if any(r["id"] == entry["id"] for r in self.rows):
            raise ValueError(f"two rows named {entry['id']}")
        self.rows.append(_tidy(entry))
        return self.rows[-1]


class Book:
    """Rows of a part that are still being sampled."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._open: list[tuple[tuple[str, str, str], Samples, dict[str, Any]]] = []

    def samples(self, row: str, what: str, system: str, **fields: Any) -> Samples:
        """Starts a row and returns its samples, for the caller to fill in; see `Part.time`."""
        samples = Samples()
        self._open.append(((row, what, system), samples, fields))
        return samples

    def close(self) -> None:
        """Adds every row to the part, dropping its first round (the warm-up)."""
        for names, samples, fields in self._open:
            samples.drop_first_round()
            self.part.time(*names, samples, **fields)
        self._open.clear()


def _tidy(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return _round(value)
    if isinstance(value, dict):
        return {k: _tidy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tidy(v) for v in value]
    return value


@dataclass
class Record:
    """The complete result of a run."""

    machine: dict[str, Any]
    options: dict[str, Any]
    backends: list[dict[str, Any]] = field(default_factory=list)
    method: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    aims: list[dict[str, Any]] = field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    format: str = FORMAT

    def part(self, name: str, title: str) -> Part:
        """Starts a part."""
        self.parts[name] = Part(name, title)
        return self.parts[name]

    def row(self, full: str) -> dict[str, Any] | None:
        """Returns the row with this full name ("part/row"), or None."""
        part, _, row = full.partition("/")
        return self.parts[part].find(row) if part in self.parts else None

    def document(self, raw: bool) -> dict[str, Any]:
        """Returns the run as plain data, with the samples only if `raw` is true."""
        parts = {}
        for name, part in self.parts.items():
            data = asdict(part)
            if not raw:
                for row in data["rows"]:
                    row.pop("samples", None)
            parts[name] = data
        return {
            "format": self.format,
            "started": self.started,
            "seconds": _round(self.seconds),
            "options": self.options,
            "machine": self.machine,
            "backends": self.backends,
            "method": _tidy(self.method),
            "aims": _tidy(self.aims),
            "parts": parts,
        }

    def write(self, path: Path) -> Path:
        """Writes `path` without the samples, and raw/<same name> in its directory with them.

        Files are replaced atomically. Returns the path of the raw file.
        """
        raw = path.parent / "raw" / path.name
        raw.parent.mkdir(exist_ok=True)
        self.write_one(path)
        replace_text(raw, json.dumps(self.document(raw=True)) + "\n")
        return raw

    def write_one(self, path: Path) -> None:
        """Writes only `path`, without a raw file, for a run that took no samples."""
        replace_text(path, lines(self.document(raw=False)) + "\n")


def mark_interrupted(path: Path) -> None:
    """Marks a result file, and its raw file, as interrupted."""
    for file, form in ((path, lines), (path.parent / "raw" / path.name, json.dumps)):
        if file.exists():
            document = json.loads(file.read_text(encoding="utf-8"))
            head = {name: document.pop(name) for name in ("format", "started", "seconds")}
            replace_text(file, form({**head, "interrupted": True, **document}) + "\n")


def lines(value: Any, depth: int = 0) -> str:
    """Formats JSON with one line per row, so that a diff between runs shows the rows that differ.

    A list or object stays on one line if it is short or contains no other list or object.
    """
    inside = value.values() if isinstance(value, dict) else value
    whole = not isinstance(value, (dict, list)) or not any(
        isinstance(one, (dict, list)) for one in inside
    )
    text = json.dumps(value)
    if whole or len(text) <= _LINE:
        return text
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {lines(one, depth + 1)}" for key, one in value.items()]
    else:
        parts = [lines(one, depth + 1) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{pad}" + f",\n{pad}".join(parts) + f"\n{' ' * depth}{last}"
