# SPDX-License-Identifier: MIT
"""Common code for the scripts that generate tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Result = dict[str, Any]


def load_run(path: Path, root: Path = ROOT) -> Result:
    """Loads a committed run; its field `file` is the path relative to `root`, for links."""
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    result["file"] = path.relative_to(root).as_posix()
    return result


def rows(result: Result) -> dict[str, Result]:
    """Returns all rows of a run, by id."""
    return {row["id"]: row for part in result["parts"].values() for row in part["rows"]}


def number(value: float, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits and without a positive exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def title(result: Result) -> str:
    """Returns text that names a run's machine and links to its file."""
    machine = result["machine"]
    return f"{machine['gpu']}, driver {machine['driver']} ([raw]({result['file']}))"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """Formats a Markdown table; the first column and columns without digits are left-aligned."""
    columns = zip(*body, strict=True)
    counts = [any(character.isdigit() for character in "".join(column)) for column in columns]
    rule = ["---"] + ["---:" if count else "---" for count in counts[1:]]
    return ["| " + " | ".join(line) + " |" for line in [head, rule, *body]]
