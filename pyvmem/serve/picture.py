# SPDX-License-Identifier: MIT
"""Draws a run: the pages of each request over time. ``python -m pyvmem.serve.picture TRACE OUT``.

TRACE is what ``vmem serve-demo --trace-out`` wrote; the format of OUT follows from its name (.svg,
.png). Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pyvmem.serve.trace import TRACE_FORMAT

__all__ = ["draw", "main"]

_MIB = 1 << 20


def _columns(trace: dict[str, Any]) -> tuple[list[int], list[list[float]]]:
    """Request ids in the order of their arrival, and for each its MiB in every step."""
    steps = trace["steps"]
    unit = trace["page_size"] * trace["num_tensors"] / _MIB
    order = list(dict.fromkeys(row[0] for step in steps for row in step["requests"]))
    owned = [{row[0]: row[3] * unit for row in step["requests"]} for step in steps]
    return order, [[step.get(name, 0.0) for step in owned] for name in order]


def draw(trace: dict[str, Any], out: str | Path) -> None:
    """Writes the picture of a trace.

    Raises:
        ValueError: the trace is of another format or has no step.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if trace.get("format") != TRACE_FORMAT:
        raise ValueError(
            f"the trace has format {trace.get('format')!r}; this program reads {TRACE_FORMAT}"
        )
    steps = trace["steps"]
    if not steps:
        raise ValueError("the trace has no step")
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "vmem"  # the same trace gives the same file
    x = [step["step"] for step in steps]
    order, columns = _columns(trace)
    palette = matplotlib.colormaps["tab20"]
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    stack, lines = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])

    stack.stackplot(
        x,
        columns,
        colors=[palette(i % 20) for i in range(len(order))],
        step="post",
        linewidth=0.3,
        edgecolor="white",
    )
    stack.step(
        x,
        [s["used_bytes"] / _MIB for s in steps],
        where="post",
        color="black",
        linewidth=1.4,
        label="rows that hold tokens",
    )
    stack.step(
        x,
        [s["mapped_bytes"] / _MIB for s in steps],
        where="post",
        color="black",
        linewidth=1,
        linestyle=":",
        label="mapped, with pages kept for the next request",
    )
    page = trace["page_size"] >> 10
    stack.set_title(
        f"{len(order)} requests, {trace['max_batch']} at a time: pages of {page} KiB behind "
        f"{trace['num_tensors']} tensors, one colour per request",
        fontsize=10,
    )
    stack.set_ylabel("KV memory, MiB")
    stack.set_ylim(bottom=0)
    stack.legend(loc="upper right", fontsize=8, frameon=False)

    owned = [sum(values) for values in zip(*columns, strict=True)]
    lines.plot(x, owned, color="tab:blue", label=f"{page} KiB pages")
    for i, name in enumerate(trace["others"]):
        lines.plot(x, [s["other_bytes"][i] / _MIB for s in steps], label=name, linewidth=1.2)
    lines.set_yscale("log")
    lines.set_ylabel("MiB")
    lines.set_xlabel("step (one token for every running request)")
    lines.set_xlim(x[0], x[-1])
    lines.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    is_svg = Path(out).suffix.lower() == ".svg"
    figure.savefig(out, dpi=150, metadata={"Date": None} if is_svg else None)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pyvmem.serve.picture", description="Draws a run."
    )
    parser.add_argument("trace", help="what vmem serve-demo --trace-out wrote")
    parser.add_argument("out", help="the picture, .svg or .png")
    args = parser.parse_args(argv)
    try:
        draw(json.loads(Path(args.trace).read_text(encoding="utf-8")), args.out)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
