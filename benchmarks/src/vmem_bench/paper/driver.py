# SPDX-License-Identifier: MIT
"""Estimates the patched driver's times from operation counts and the stock driver's times.

The software GPU counts each driver's operations for the same work, but does not model time, and
only the stock driver was timed on a real GPU. The model combines the two. A push (one call's
commands for the GPU, including the wait for its barrier and invalidation) costs `push`, and a page
table entry costs `entry`. Both values come from two measurements of the stock driver, and the model
is checked against other measurements of that driver.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from vmem_bench.paper.results import NotMeasured, Results

__all__ = ["Check", "Costs", "Work", "checks", "costs", "section", "workloads"]

_TIMES, _COUNTS = "h100", "softgpu-workloads.jsonl"
_WORDS = (
    "The patched driver has run only on the software GPU, which counts operations but does not",
    "time them. These times come from a **model**, not from a measurement: a push costs as much as",
    "a call of the stock driver with one push, and a 64 KB entry as much as one more page in such",
    "a call. The model assumes, without a measurement, that the patched driver's calls cost no",
    "more than the stock driver's.",
)
_PAGES = 64  # pages per batch
_CASES = {
    "growth": ("{requests} requests grow to {tokens:,} tokens, a token per step", "map"),
    "prefix": ("a request starts with a prefix of {prefix:,} tokens", "map"),
    "move": ("a request's {tokens:,} tokens move, page by page", "map"),
    "a request ends": ("a request of {tokens:,} tokens is freed", "unmap"),
}


@dataclass(frozen=True)
class Costs:
    """The cost in microseconds of a push, including its call, and of a 64 KB entry."""

    push: float
    entry: float

    def __str__(self) -> str:
        return f"{self.push:.1f} µs per push, {self.entry:.2f} µs per entry"

    def time(self, pushes: int, entries: int) -> float:
        """Returns the time that the model estimates, in microseconds."""
        return pushes * self.push + entries * self.entry


@dataclass(frozen=True)
class Check:
    """A measured time of the stock driver that is not an input to the model."""

    what: str
    model: float
    measured: float

    @property
    def error(self) -> float:
        """The model's error, relative to the measured time."""
        return self.model / self.measured - 1


@dataclass(frozen=True)
class Work:
    """Each driver's operation counts for the same work, and the model's time in microseconds."""

    what: str
    stock: dict[str, Any]
    uvm: dict[str, Any]
    stock_us: float
    uvm_us: float


def costs(results: Results, way: str) -> Costs:
    """Derives the costs from the times for 64 pages, one at a time and in a single call.

    way: "map" or "unmap".
    """
    one = results[_TIMES]
    apart, together = (
        one.value(f"batch/{way}_{how}/stock/64K") for how in ("scattered", "contiguous")
    )
    entry = (together - apart / _PAGES) / (_PAGES - 1)
    return Costs(apart / _PAGES - entry, entry)


def checks(results: Results) -> list[Check]:
    """Compares the model with the other measured times of the stock driver."""
    one = results[_TIMES]
    found = []
    for way in ("map", "unmap"):
        cost = costs(results, way)
        for page, entries in (("128K", 2), ("256K", 4)):
            for how, pushes in (("contiguous", 1), ("scattered", _PAGES)):
                words = "in one call" if pushes == 1 else "one by one"
                measured = one.value(f"batch/{way}_{how}/stock/{page}")
                model = cost.time(pushes, entries * _PAGES)
                what = f"{way} {_PAGES} pages of {page.replace('K', ' KB')}, {words}"
                found.append(Check(what, model, measured))
    cost = costs(results, "map")
    for row, what, pushes, entries in (
        ("pool/run/stock", "map 1,024 pages of 64 KB, in one call", 1, 1024),
        ("bytes/singles/stock", "map 32 pages of 64 KB, one Python call per page", 32, 32),
        ("step/maps512_dirty/stock", "map 512 pages of 64 KB in 64 tensors, one by one", 512, 512),
    ):
        found.append(Check(what, cost.time(pushes, entries), one.value(row)))
    return found


def workloads(results: Results) -> list[Work]:
    """Returns the counted work with the model's time estimates.

    Raises:
        NotMeasured: no counts have been committed.
    """
    path = results.folder / _COUNTS
    if not path.exists():
        raise NotMeasured(_COUNTS)
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    found = []
    for case, (words, way) in _CASES.items():
        cost = costs(results, way)
        stock, uvm = (
            next(one for one in lines if (one["case"], one["way"]) == (case, driver))
            for driver in ("stock", "uvm")
        )
        times = [cost.time(one["pushes"], one["entries"]) for one in (stock, uvm)]
        found.append(Work(words.format(prefix=head["prefix_tokens"], **stock), stock, uvm, *times))
    return found


def _milliseconds(value: float) -> str:
    return f"{value / 1e3:,.0f}" if value >= 1e5 else f"{value / 1e3:.2g}"


def section(results: Results) -> list[str]:
    """Returns the lines of the page's section, or none if counts or times are missing."""
    try:
        inputs = {way: costs(results, way) for way in ("map", "unmap")}
        tested, counted = checks(results), workloads(results)
    except NotMeasured:
        return []
    where = results[_TIMES].hardware
    return [
        "## The patched driver: a model of time",
        "",
        *_WORDS,
        "",
        "Inputs, from 64 pages of 64 KB one by one and in one call, with the stock driver on",
        f"{where}: mapping {inputs['map']}; unmapping {inputs['unmap']}.",
        "",
        "| counted work, 2 tensors | pushes, stock | patched | entries, stock | patched "
        "| model: ms, stock | patched |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {one.what} | {one.stock['pushes']:,} | {one.uvm['pushes']:,} | "
            f"{one.stock['entries']:,} | {one.uvm['entries']:,} | {_milliseconds(one.stock_us)} | "
            f"{_milliseconds(one.uvm_us)} |"
            for one in counted
        ),
        "",
        f"Error of the model for times of the stock driver that are not its inputs, on {where}:",
        "",
        "| | model: µs | measured: µs | error |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {one.what} | {one.model:,.1f} | {one.measured:,.1f} | {100 * one.error:+.0f}% |"
            for one in tested
        ),
    ]
