# SPDX-License-Identifier: MIT
"""`vmem bench paper`: generates the page that compares the papers' numbers with ours.

The page is generated from ``benchmarks/results`` alone, so that no numbers are entered by hand.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vmem_bench.paper.driver import section
from vmem_bench.paper.pictures import available, digest, draw
from vmem_bench.paper.results import NotMeasured, Results
from vmem_bench.paper.rows import PAPERS, ROWS, SOURCES, Row

__all__ = ["NOT_MEASURED", "add_parser", "page", "run", "stale"]

NOT_MEASURED = "not run"
_RESULTS, _PAGE, _FOLDER = Path("benchmarks/results"), Path("docs/reproduction.md"), "reproduction"
_HEAD = """---
hide: [toc]  # the tables are wide
---

<!-- Made by `vmem bench paper --write` from benchmarks/results. Do not edit. -->

# The papers' evaluation, and ours

Each table and figure of the three papers has a row: the paper's number, ours, the command that
measures ours, and the reason for the difference. The papers' numbers were measured on one or more
80 GB A100s; ours were measured on the GPU that the row names, or computed. "A relative to B, 1.2x"
means that A is 1.2 times B. "not run" is followed by the missing result, "cannot be shown here" by
the reason. The letter in brackets names
[the source of the paper's number](#where-the-papers-numbers-come-from). vAttention's figures are
numbered as in arXiv's third version; from figure 7 on, the numbers in its artifact are lower by
one.

AZURE, ARXIV and MOONCAKE stand for the traces described in
[benchmarks/README.md](../benchmarks/README.md), FILE for FlashAttention-3's shared object. The
ratio "again" compares two runs of the same arm: it shows how much identical runs differ. The
results are also drawn [as in the papers](reproduction/pictures.md)."""
_PICTURES = "pictures.md"
_PICTURES_HEAD = """---
hide: [toc]
---

<!-- Made by `vmem bench paper --write` from benchmarks/results. Do not edit. -->

# The papers' figures, from our results

Drawn as in the papers. For the numbers, see [the papers' evaluation](../reproduction.md)."""


def _ours(row: Row, results: Results) -> str:
    if row.cannot:
        return f"cannot be shown here: {row.cannot}"
    assert row.ours is not None, f"{row.number} has neither a number nor a reason"
    try:
        text = row.ours(results)
        return f"{text} ({results[row.file].hardware})" if row.file else text
    except NotMeasured as error:
        return f"{NOT_MEASURED}: needs an H100 or H200; there is no {error}"


def _table(paper: str, results: Results) -> list[str]:
    lines = [
        f"## {paper}",
        "",
        PAPERS[paper] + ".",
        "",
        "| in the paper | what | theirs | ours | command | why they differ |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if row.paper == paper:
            command = f"`{row.command}`" if row.command else ""
            theirs = f"{row.theirs} [{row.source}]"
            cells = (row.number, row.what, theirs, _ours(row, results), command, row.why)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(results: Results) -> str:
    """Returns the text of the tables page."""
    lines = [_HEAD]
    for paper in PAPERS:
        lines += ["", *_table(paper, results)]
    if found := section(results):
        lines += ["", *found]
    used = dict.fromkeys(row.source for row in ROWS)
    lines += ["", "## Where the papers' numbers come from", ""]
    lines += [f"- [{key}] {text}" for key, text in SOURCES.items() if key in used]
    return "\n".join(lines) + "\n"


def pictures_page(results: Results) -> str:
    """Returns the text of the pictures page."""
    lines = [_PICTURES_HEAD]
    for picture, _ in available(results):
        lines += ["", f"![{picture.title}]({picture.name}.svg)"]
    return "\n".join(lines) + "\n"


def stale(results: Results, target: Path) -> list[Path]:
    """Returns the pages and pictures that are out of date."""
    folder = target.parent / _FOLDER
    pages = {target: page(results), folder / _PICTURES: pictures_page(results)}
    found = [
        path
        for path, text in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    wanted = {f"{picture.name}.svg": digest(picture, data) for picture, data in available(results)}
    for name, mark in wanted.items():
        path = folder / name
        if not path.exists() or mark not in path.read_text(encoding="utf-8"):
            found.append(path)
    return found + [path for path in sorted(folder.glob("*.svg")) if path.name not in wanted]


def _write(results: Results, target: Path) -> None:
    folder = target.parent / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path in stale(results, target):
        path.unlink(missing_ok=True)
    for picture, data in available(results):
        path = folder / f"{picture.name}.svg"
        if not path.exists():
            path.write_text(draw(picture, data), encoding="utf-8")
    target.write_text(page(results), encoding="utf-8")
    (folder / _PICTURES).write_text(pictures_page(results), encoding="utf-8")


def add_parser(which: Any) -> None:
    """Adds ``paper`` to the benchmarks."""
    parser = which.add_parser(
        "paper",
        help="the papers' tables and figures compared with our committed results",
        description="Prints the text of docs/reproduction.md, generated from benchmarks/results; "
        "runs no benchmark.",
    )
    add = parser.add_argument
    add("--results", type=Path, default=_RESULTS, metavar="FOLDER", help=f"({_RESULTS})")
    add(
        "--page",
        type=Path,
        default=_PAGE,
        metavar="FILE",
        help=f"({_PAGE}); pictures go to {_FOLDER}/ next to it",
    )
    add("--write", action="store_true", help="write the page and the pictures (needs matplotlib)")
    add("--check", action="store_true", help="fail if the page or a picture is out of date")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0 on success, 1 if ``--check`` finds a stale page or picture, or 2 if there is no
    results directory.
    """
    if not args.results.is_dir():
        print(f"vmem bench: {args.results} is not a directory of results", file=sys.stderr)
        return 2
    results = Results(args.results)
    if args.write:
        _write(results, args.page)
    elif args.check:
        found = stale(results, args.page)
        for path in found:
            print(f"{path} is out of date with {args.results}: run vmem bench paper --write")
        return int(bool(found))
    else:
        print(page(results), end="")
    return 0
