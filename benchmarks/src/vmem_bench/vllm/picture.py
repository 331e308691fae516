# SPDX-License-Identifier: MIT
"""Draws engines that share memory: ``python -m vmem_bench.vllm.picture RESULT OUT.svg``.

RESULT is a result of ``vmem bench vllm --part share`` or ``--part prefixes``. Needs matplotlib. The
picture contains a digest of the rows that it shows, since drawings differ between versions of
matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from io import StringIO
from typing import Any

from pyvmem.plumbing.paths import existing_file, written

__all__ = ["PARTS", "digest", "draw", "main", "series"]

PARTS = ("share", "prefixes")
"""The parts of `vmem bench vllm` whose results contain memory over time."""
_PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
_GB = 1 << 30
_POINTS = 400  # maximum number of points in a line


def series(seen: list[list[float]]) -> dict[str, Any]:
    """Returns a row's fields for memory over time, with at most `_POINTS` points.

    Args:
        seen: samples, each with the seconds since the first request, the device's free bytes, and
            the bytes that each engine uses.
    """
    after = [one for one in seen if one[0] >= 0]
    points = [[one[0], sum(one[2:]), *one[2:]] for one in after[:: -(-len(after) // _POINTS) or 1]]
    engines = len(points[0]) - 2 if points else 0
    names = [f"engine {k}" for k in range(engines)]
    return {"columns": ["seconds", "bytes mapped", *names], "series": points}


def _rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the rows to draw, by name.

    Raises:
        ValueError: the document has no memory series.
    """
    parts = document.get("parts", {})
    part: dict[str, Any] = next((parts[name] for name in PARTS if parts.get(name)), {})
    found = {row["id"].partition("/")[2]: row for row in part.get("rows", ())}
    drawn = [name for name, row in found.items() if row.get("series")][:1]
    if not drawn:
        raise ValueError("no series of memory: a run of --part share or prefixes has one")
    first = [name for name in found if name.startswith("first/") and name.count("/") == 1]
    return {name: found[name] for name in [*drawn, "capacity", *first]}


def digest(document: dict[str, Any]) -> str:
    """Returns a digest of everything that a run's picture shows."""
    return hashlib.sha256(json.dumps(_rows(document)).encode()).hexdigest()


def draw(document: dict[str, Any]) -> str:
    """Returns the picture as SVG: memory over time, and the time to first token by arm.

    Memory is each engine's mapped bytes, stacked, for the first arm that shares memory.

    Raises:
        ValueError: the document has no memory series.
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows = _rows(document)
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "vmem",
        "svg.fonttype": "none",  # keep text as text, not paths
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 3), layout="constrained")
        axes: Any = figure.subplots(1, 3, width_ratios=(3.4, 1, 1))
        _memory(axes[0], rows)
        first = {
            name.removeprefix("first/"): row
            for name, row in rows.items()
            if name.startswith("first/")
        }
        for where, field in zip(axes[1:], ("mean", "p99"), strict=True):
            where.bar(list(first), [row[field] for row in first.values()], color=_PALETTE[0])
            where.set_ylabel(f"first token, {field}: ms")
            where.tick_params("x", labelsize=8)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return f"{out.getvalue().rstrip()}\n<!-- {digest(document)} -->\n"


def _memory(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    seen = next(row["series"] for row in rows.values() if row.get("series"))
    at = [one[0] for one in seen]
    engines = [[one[2 + k] / _GB for one in seen] for k in range(len(seen[0]) - 2)]
    capacity = rows["capacity"]["value"] / _GB
    names = [f"engine {k}" for k in range(len(engines))]
    axes.stackplot(at, engines, labels=names, colors=_PALETTE[: len(engines)], linewidth=0)
    axes.axhline(capacity, color="gray", linewidth=1, label="all together")
    static = capacity / len(engines)
    axes.axhline(static, color="gray", linewidth=1, linestyle=":", label="a static part")
    axes.set(xlabel="seconds", ylabel="GiB mapped", xlim=(0, max(at)), ylim=(0, capacity * 1.3))
    axes.legend(loc="upper center", ncols=len(engines) + 2, fontsize=8, frameon=False,
                columnspacing=1, handlelength=1)  # fmt: skip


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=existing_file)
    parser.add_argument("out", type=written)
    args = parser.parse_args()
    args.out.write_text(draw(json.loads(args.result.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
