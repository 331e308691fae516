# SPDX-License-Identifier: MIT
"""Renders a run as one self-contained HTML file: machine, command, tables, pictures and raw data.

Every benchmark, and ``vmem selftest``, writes one with ``--report FILE``; ``--plot FILE`` draws
only the pictures. The page loads no other files and runs no scripts; its last link is the run's
JSON.
"""

from __future__ import annotations

import base64
import html
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyvmem.commands.tables import number
from pyvmem.plumbing.paths import replace_text

__all__ = ["page", "picture", "write_report"]

_MOST_BARS = 40  # maximum number of rows in a picture; the table lists all rows
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #1b1d22); overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto }
th, td { text-align: left; padding: .15rem .7rem .15rem 0; vertical-align: top;
  border-bottom: 1px solid light-dark(#ddd, #3a3d45); overflow-wrap: normal }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.failed, .missed { color: light-dark(#b00020, #ff8a8a); font-weight: 600 }
.passed, .met { color: light-dark(#1b6e2c, #7fd08f) }
figure { margin: 1rem 0; background: #fff } svg { max-width: 100%; height: auto }
code { font-size: .9em }
"""

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns an HTML table with escaped cells and right-aligned numbers."""
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(one)}</th>" for one in heads) + "</tr>"]
    for row in rows:
        cells = []
        for one in row:
            if isinstance(one, (int, float)) and not isinstance(one, bool):
                cells.append(f'<td class="n">{number(one)}</td>')
            else:
                kind = f' class="{one}"' if one in ("passed", "failed", "met", "missed") else ""
                cells.append(f"<td{kind}>{html.escape(_said(one))}</td>")
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """Flattens nested objects into pairs of a name and a scalar value."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name} {key}".strip())
    elif isinstance(value, (list, tuple)):
        yield name, json.dumps(value)
    else:
        yield name, value


def _size(row: Row) -> str:
    page = row.get("page")
    return "" if not page else f"{page >> 20} MB" if page >= 1 << 20 else f"{page >> 10} KB"


def _rows(rows: Sequence[Row]) -> str:
    """Returns a table with a line for each row: median and percentiles, or a single value."""
    heads = ("what", "system", "page", "unit", "median or value", "p90", "p99", "note")
    return _table(
        heads,
        (
            (
                *(row["what"], row["system"], _size(row), row["unit"]),
                row.get("median", row.get("value")),
                *(row.get("p90"), row.get("p99"), row.get("note")),
            )
            for row in rows
        ),
    )


# ---- pictures ------------------------------------------------------------------------------------


def _shown(part: Document) -> dict[str, list[Row]]:
    """Returns the rows to draw, by unit: times, or single numbers if the part has no times."""
    rows = [row for row in part["rows"] if "median" in row]
    rows = rows or [row for row in part["rows"] if "value" in row and "series" not in row]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["unit"], []).append(row)
    return {unit: rows[:_MOST_BARS] for unit, rows in found.items()}


def _bars(axes: Any, rows: Sequence[Row], title: str, unit: str) -> None:
    """Draws each row as a bar up to its median, then a line from there to its 99th percentile."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    places = range(len(rows))
    timed = "median" in rows[0]
    medians = [row["median" if timed else "value"] for row in rows]
    tails = [
        max(0.0, (row.get("p99") or 0.0) - one) for row, one in zip(rows, medians, strict=True)
    ]
    colours = [_COLOURS[systems.index(row["system"]) % len(_COLOURS)] for row in rows]
    axes.barh(places, medians, color=colours, xerr=[[0] * len(rows), tails], error_kw={"lw": 0.8})
    labels = [
        " ".join(filter(None, (r["what"], r["system"] if timed else "", _size(r)))) for r in rows
    ]
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    if medians and min(medians) > 0 and max(medians) / min(medians) > 50:
        axes.set_xscale("log")
    axes.set_title(title, fontsize=9, loc="left")
    words = f"{unit}: median, and to the 99th percentile" if timed else unit
    axes.set_xlabel(words, fontsize=8)


def _lines(axes: Any, rows: Sequence[Row], title: str, unit: str) -> None:
    """Plots each row's series, the second column against the first."""
    for place, row in enumerate(rows):
        along, values = zip(*(one[:2] for one in row["series"]), strict=True)
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(along, values, label=row["system"], color=colour, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(unit, fontsize=8)
    axes.legend(frameon=False, fontsize=7)


def picture(parts: Iterable[Document], kind: str = "svg") -> bytes | None:
    """Draws the parts' times (or single numbers) and series; returns None if there are none.

    Args:
        parts: parts of a benchmark's document.
        kind: "svg", "png" or "pdf".

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    panels: list[tuple[str, str, Sequence[Row], Callable[..., None]]] = []
    for part in parts:
        title = f"{part['name']}: {part['title']}"
        panels += [(title, unit, rows, _bars) for unit, rows in _shown(part).items()]
        if series := [row for row in part["rows"] if row.get("series")]:
            unit = f"{series[0]['columns'][1]} by {series[0]['columns'][0]}"
            panels.append((title, unit, series, _lines))
    if not panels:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "vmem",  # fixed, to make the file reproducible
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    heights = [1.0 + 0.2 * len(rows) if draw is _bars else 3.0 for _, _, rows, draw in panels]
    out = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, sum(heights)), layout="constrained")
        all_axes: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, (title, unit, rows, draw) in zip(all_axes[:, 0], panels, strict=True):
            draw(axes, rows, title, unit)
        nothing = {"Date": None, "Creator": None} if kind == "svg" else None
        figure.savefig(out, format=kind, metadata=nothing)
    return out.getvalue()


def _inline(part: Document) -> str:
    try:
        drawn = picture([part])
    except ModuleNotFoundError:
        return "<p>No picture: matplotlib was not installed when this was written.</p>"
    if drawn is None:
        return ""
    text = drawn.decode()
    return f"<figure>{text[text.index('<svg') :]}</figure>"


# ---- the page ------------------------------------------------------------------------------------


def _aim(aim: Document) -> tuple[Any, ...]:
    """Formats an aim and, if it applies to this machine, whether it was met."""
    bound = aim.get("aim")
    wanted = "" if bound is None else f"{aim['op']} {number(bound)}"
    judged = wanted and aim.get("applies") and aim.get("pass") is not None
    result = ("met" if aim["pass"] else "missed") if judged else ""
    return aim["what"], aim["value"], aim["unit"], wanted, result


def _where(machine: Document) -> str:
    """Describes the machine in one line."""
    gpu = machine.get("gpu")
    words = [f"{gpu}, driver {machine.get('driver')}" if gpu else "no GPU"]
    words += [str(machine[key]) for key in ("cpu", "kernel") if machine.get(key)]
    return "; ".join(words)


def _parts(document: Document) -> Iterable[str]:
    """Formats a benchmark's aims and parts, and the rows that were not measured."""
    aims = [one for one in document.get("aims", []) if one.get("value") is not None]
    if aims:
        yield "<h2>In short</h2>"
        yield _table(("what", "value", "unit", "aim", "result"), map(_aim, aims))
    if others := len(document.get("aims", [])) - len(aims):
        more = "more " if aims else ""
        yield f"<p>{others} {more}comparisons need rows that this run did not measure.</p>"
    for part in document.get("parts", {}).values():
        yield f"<h2>{html.escape(part['name'])}: {html.escape(part['title'])}</h2>"
        why = f": {part['why']}" if part["why"] else ""
        yield f'<p class="{html.escape(part["status"])}">{html.escape(part["status"] + why)}</p>'
        yield _inline(part)
        if part["rows"]:
            yield _rows(part["rows"])
        yield from (f"<p>{html.escape(note)}</p>" for note in part["notes"])
        if part["missing"]:
            yield "<p>Not measured:</p>"
            yield _table(("row", "why"), ((one["id"], one["why"]) for one in part["missing"]))


def _checks(document: Document) -> Iterable[str]:
    """Formats the self-test's checks and times."""
    if "not_tested" in document:
        yield f'<p class="failed">{html.escape(document["not_tested"])}</p>'
    elif "passed" in document:
        word = "passed" if document["passed"] else "failed"
        yield f'<p class="{word}">The self-test has {word}.</p>'
    if "checks" in document:
        heads = ("name", "what", "result", "detail", "seconds")
        yield "<h2>Checks</h2>"
        yield _table(heads, ([one[key] for key in heads] for one in document["checks"]))
    for title in ("tested", "probe", "times"):
        if title in document:
            yield f"<h2>{title.capitalize()}</h2>"
            yield _table(("", ""), _flat(document[title]))


def page(document: Document, command: str, name: str = "result.json") -> str:
    """Returns a run as an HTML page.

    Args:
        document: the JSON document of a benchmark or self-test run.
        command: the command line that ran it.
        name: the file name under which the page offers the JSON.
    """
    machine = document.get("machine", {})
    kind = str(document.get("tool") or document.get("format", "")).partition("/")[0]
    kind = kind.replace("vmem-bench-", "vmem bench ")
    when = str(document.get("started") or document.get("date") or "no date")
    when = f"{when[:10]} {when[11:16]} UTC" if when[10:11] == "T" else when
    commit = str(machine.get("commit") or "unknown") + (
        " with changes" if machine.get("dirty") else ""
    )
    data = base64.b64encode(json.dumps(document).encode()).decode()
    slim = {key: one for key, one in machine.items() if key != "commit"}
    title = html.escape(f"{kind}, {when}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<p>{html.escape(_where(machine))}</p>",
            f"<p><code>{html.escape(command)}</code>, commit {html.escape(commit)}</p>",
            *_checks(document),
            *_parts(document),
            "<h2>Machine</h2>",
            _table(("", ""), _flat(slim)),
            "<h2>Options</h2>",
            _table(("", ""), _flat(document.get("options", {}))),
            "<h2>Raw data</h2>",
            f'<p><a download="{html.escape(name)}" href="data:application/json;base64,{data}">'
            f"{html.escape(name)}</a>: everything above, and each sample that was kept.</p>",
            "</body></html>\n",
        ]
    )


def write_report(path: Path, document: Document) -> None:
    """Writes the page of this process's run to `path`, atomically."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    replace_text(path, page(document, shlex.join(words), path.with_suffix(".json").name))
    print(f"report: {path}", file=sys.stderr)
