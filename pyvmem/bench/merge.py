# SPDX-License-Identifier: MIT
"""Merges several runs, each with some of the parts, into one file.

This is meant for machines that are available for only a few minutes at a time. Only runs with the
same GPU, driver and commit can be merged, and a quick run cannot be merged with a full one. A row
and its baseline still come from one process, because a part is never split. If two runs have the
same part, the more complete one is used or, if both are equally complete, the later one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyvmem.bench.aims import compute
from pyvmem.bench.record import FORMAT, Part, Record

__all__ = ["MergeError", "load_together", "merge"]

_SAME = ("gpu", "driver", "commit")
_STATES = ("not run", "failed", "partial", "done")


class MergeError(ValueError):
    """The files do not match, or one is not a result; the message says which and why."""


def _load(path: Path, kind: str) -> dict[str, Any]:
    """Loads a result, with its samples if raw/ has a file of the same name."""
    raw = path.parent / "raw" / path.name
    try:
        data = json.loads((raw if raw.exists() else path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MergeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise MergeError(f"{path} is not JSON") from error
    if not isinstance(data, dict) or data.get("format") != kind:
        raise MergeError(f"{path} is not a result of format {kind}")
    return data


def _identity(data: dict[str, Any]) -> dict[str, Any]:
    found = {name: data["machine"].get(name) for name in _SAME}
    return {**found, "backend": data["options"]["backend"], "quick": data["options"]["quick"]}


def _rank(part: Part) -> tuple[int, int]:
    return _STATES.index(part.status), len(part.rows)


def load_together(paths: Sequence[Path], kind: str) -> list[dict[str, Any]]:
    """Loads matching results of the format `kind`, in the order in which their runs started.

    Raises:
        MergeError: the files do not match, or one is not a result.
    """
    loaded = sorted((_load(path, kind) for path in paths), key=lambda data: str(data["started"]))
    first = loaded[0]
    for data in loaded[1:]:
        if _identity(data) != _identity(first):
            raise MergeError(f"these runs differ: {_identity(first)} and {_identity(data)}")
    return loaded


def merge(paths: Sequence[Path]) -> Record:
    """Merges all parts into one record; machine and method come from the first run.

    Raises:
        MergeError: the files do not match, or one is not a result.
    """
    loaded = load_together(paths, FORMAT)
    first = loaded[0]
    parts: dict[str, Part] = {}
    for data in loaded:
        for name, fields in data["parts"].items():
            part = Part(**fields)
            if name not in parts or _rank(part) >= _rank(parts[name]):
                parts[name] = part
    record = Record(
        machine=first["machine"],
        options={**first["options"], "only": [name for name in parts if name != "noop"]},
        backends=first["backends"],
        method={**first["method"], "runs": [data["started"] for data in loaded]},
        parts=parts,
        started=first["started"],
        seconds=sum(float(data["seconds"]) for data in loaded),
    )
    record.aims = compute(record, first["options"]["backend"])
    return record
