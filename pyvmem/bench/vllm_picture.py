# SPDX-License-Identifier: MIT
"""Memory over time of engines that share it: ``python -m pyvmem.bench.vllm_picture RAW OUT.svg``.

RAW is the raw file of ``vmem bench vllm --part share``. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["draw", "main"]

_PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
_GB = 1 << 30


def draw(document: dict[str, Any], out: Path) -> None:
    """Draws what each engine has mapped, stacked, in the first round of the arm ``shared``.

    Raises:
        ValueError: the document has no such samples.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = {row["id"]: row for row in document.get("parts", {}).get("share", {}).get("rows", ())}
    seen = rows.get("share/memory/shared", {}).get("samples")
    if not seen:
        raise ValueError("no samples of share/memory/shared: a raw file of --part share has them")
    at = [one[0] for one in seen]
    engines = [[one[2 + k] / _GB for one in seen] for k in range(len(seen[0]) - 2)]
    capacity = rows["share/capacity"]["value"] / _GB
    pyplot.rcParams["svg.fonttype"] = "none"  # keep text as text
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    names = [f"engine {k}" for k in range(len(engines))]
    axes.stackplot(at, engines, labels=names, colors=_PALETTE[: len(engines)], linewidth=0)
    axes.axhline(capacity, color="black", linewidth=1, label="all engines together")
    static = capacity / len(engines)
    axes.axhline(static, color="black", linewidth=1, linestyle=":", label="a static part")
    axes.set(xlabel="seconds", ylabel="GiB mapped", xlim=(0, max(at)), ylim=(0, capacity * 1.1))
    axes.legend(loc="upper right", ncols=2, fontsize="small", frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "vmem"}):
        figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.raw.read_text(encoding="utf-8")), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
