# SPDX-License-Identifier: MIT
"""Draws each request's pages over time: ``python -m pyvmem.serve.picture TRACE OUT``.

TRACE is a file written by ``vmem serve-demo --trace-out``; the extension of OUT (.svg, .png, .pdf)
selects its format. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyvmem.plumbing.paths import existing_file, picture_file
from pyvmem.plumbing.units import counted
from pyvmem.serve.trace import TRACE_FORMAT

__all__ = ["draw", "main"]

_MIB = 1 << 20
_KEPT = "0.85"  # gray, for pages that no request owns
_Box = tuple[float, float, float, float]  # x, y, width, height


def _runs(values: list[int]) -> Iterator[tuple[int, int, int]]:
    """Run-length encodes values as (first, end, value)."""
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[first]:
            yield first, i, values[first]
            first = i


def _blocks(trace: dict[str, Any], lane: float) -> tuple[dict[int, list[_Box]], list[_Box]]:
    """Returns a box per page, spanning the steps in which a request or a free slot holds it."""
    steps = trace["steps"]
    owned: dict[int, list[_Box]] = {}
    kept: list[_Box] = []
    for slot in range(trace["max_batch"]):
        rows = [next((r for r in step["requests"] if r[1] == slot), None) for step in steps]
        names = [row[0] if row else -1 for row in rows]
        pages = [row[3] if row else 0 for row in rows]
        for first, end, name in _runs(names):
            for start, stop, count in _runs(pages[first:end]):
                boxes = owned.setdefault(name, []) if count else []
                boxes += [(first + start, slot * lane + i, stop - start, 1) for i in range(count)]
        spare = [step["slots"][slot] - own for step, own in zip(steps, pages, strict=True)]
        for start, stop, count in _runs([0 if n <= 0 else n for n in spare]):
            if count:
                low = slot * lane + pages[start]
                kept += [(start, low + i, stop - start, 1) for i in range(count)]
    return owned, kept


def draw(trace: dict[str, Any], out: str | Path) -> None:
    """Writes the picture of a trace.

    Raises:
        ValueError: the trace is in another format or has no steps.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if trace.get("format") != TRACE_FORMAT:
        raise ValueError(
            f"the trace has format {trace.get('format')!r}; this program reads {TRACE_FORMAT}"
        )
    if not trace["steps"]:
        raise ValueError("the trace has no step")
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "vmem",  # fixed, to make the file reproducible
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 7), layout="constrained")
        lanes, total = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.3])
        _draw_lanes(lanes, trace)
        _draw_total(total, trace)
        is_svg = Path(out).suffix.lower() == ".svg"
        figure.savefig(out, dpi=150, metadata={"Date": None} if is_svg else None)


def _draw_lanes(axes: Any, trace: dict[str, Any]) -> None:
    """Draws a lane per slot, with a block for each page of the slot's request."""
    import matplotlib
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    lane = max(max(step["slots"]) for step in trace["steps"]) + 1.0
    owned, kept = _blocks(trace, lane)
    tab20 = matplotlib.colormaps["tab20"]
    palette = [tab20(i) for i in range(20) if i not in (14, 15)]  # 14 and 15 are grays
    groups = [(palette[name % len(palette)], boxes) for name, boxes in sorted(owned.items())]
    for colour, boxes in [(_KEPT, kept), *groups]:
        patches = [Rectangle((x, y), width, height) for x, y, width, height in boxes]
        axes.add_collection(
            PatchCollection(patches, facecolor=colour, edgecolor="white", linewidth=0.4)
        )
    for name, boxes in owned.items():
        x, y = min((box[0], box[1]) for box in boxes)
        axes.text(x + 0.4, y + 0.12, str(name), fontsize=6, color="black", va="bottom")
    slots = trace["max_batch"]
    axes.set_ylim(-0.5, slots * lane)
    axes.set_yticks([i * lane + 0.5 for i in range(slots)], [str(i) for i in range(slots)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("slot")
    axes.set_title(
        f"{counted(len(owned), 'request')} in {counted(slots, 'slot')}. "
        f"A block is a page of {trace['page_size'] >> 10} KiB in each of "
        f"{trace['num_tensors']} tensors;\n"
        "a colour and number is a request, grey pages are kept for the next one.",
        fontsize=10,
    )


def _draw_total(axes: Any, trace: dict[str, Any]) -> None:
    """Draws the total over all slots, and the memory that other layouts would need."""
    steps = trace["steps"]
    x = [step["step"] for step in steps] + [steps[-1]["step"] + 1]

    def line(values: list[float], label: str, **style: Any) -> None:
        mib = [value / _MIB for value in values]
        axes.step(x, [*mib, mib[-1]], where="post", label=label, **style)

    unit = trace["page_size"] * trace["num_tensors"]
    line([s["used_bytes"] for s in steps], "tokens", color="black", linewidth=1.4)
    owned = [unit * sum(row[3] for row in s["requests"]) for s in steps]
    line(owned, f"{trace['page_size'] >> 10} KiB pages of the requests", color="tab:blue")
    line([s["mapped_bytes"] for s in steps], "with those kept", color="0.6", linestyle=":")
    for i, name in enumerate(trace["others"]):
        line([s["other_bytes"][i] for s in steps], name, linewidth=1.0, color=f"C{i + 1}")
    axes.set_yscale("log")
    axes.set_ylabel("MiB")
    axes.set_xlabel("step (one token for every running request)")
    axes.set_xlim(x[0], x[-1])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, fontsize=8, frameon=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pyvmem.serve.picture", description="Draws a run."
    )
    parser.add_argument("trace", type=existing_file, help="file from vmem serve-demo --trace-out")
    parser.add_argument("out", type=picture_file, help="the picture, .svg, .png or .pdf")
    args = parser.parse_args(argv)
    try:
        draw(json.loads(args.trace.read_text(encoding="utf-8")), args.out)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
