# SPDX-License-Identifier: MIT
"""Computes the key figures from the rows and compares each with its aim.

The aims apply to the `stock` back end on an H100 or H200. A value is computed whenever its rows
exist; `applies` says whether it may be compared with the aim. Ratios of single calls use `net`
times, which subtract an estimate of an empty call's cost that favors the baseline
(setting.Overheads); absolute times are as measured from Python.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pyvmem.bench.attention import CASES
from pyvmem.bench.buffers import malloc_names, vmem_names
from pyvmem.bench.record import Record

__all__ = ["Aims", "compute"]

_GPUS = ("H100", "H200")


def compute(record: Record, system: str) -> list[dict[str, Any]]:
    """Computes all aims; an aim with missing rows has no value and names the first missing row."""
    aims = Aims(record, system)
    _single_pages(aims)
    _steps(aims)
    _slots(aims)
    _live(aims)
    _attention(aims)
    return aims.found


class Aims:
    """The aims of a record; `applies` is true if there are aims for its machine and back end."""

    def __init__(self, record: Record, system: str) -> None:
        self.record, self.system = record, system
        self.found: list[dict[str, Any]] = []
        gpu = record.machine.get("gpu") or ""
        self.applies = system == "stock" and any(name in gpu for name in _GPUS)
        self.quick = bool(record.options.get("quick"))

    def add(
        self,
        name: str,
        what: str,
        rows: list[str],
        value: Callable[..., float],
        *,
        unit: str = "x",
        op: str | None = None,
        aim: float | None = None,
        unless: str = "",
        **more: Any,
    ) -> None:
        """Adds an aim whose value is `value(*rows)`.

        If `op` is None, there is no target. `unless` says why the rows cannot be compared; it is ""
        if they can.
        """
        found = [self.record.row(r) for r in rows]
        missing = [r for r, row in zip(rows, found, strict=True) if row is None]
        number = None if missing or unless else value(*found)
        passed = None
        if number is not None and aim is not None and op is not None:
            passed = number <= aim if op == "<=" else number >= aim
        self.found.append(
            {
                "id": name,
                "what": what,
                "value": number,
                "unit": unit,
                "op": op,
                "aim": aim,
                "pass": passed,
                "applies": self.applies and not self.quick,
                "rows": rows,
                "why": _not_measured(missing) or unless,
                **more,
            }
        )


def _not_measured(missing: list[str]) -> str:
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"not measured: {missing[0]}{more}"


def _net(over: str = "net") -> Callable[[Any, Any], float]:
    return lambda a, b: float(a[over]) / float(b[over])


def _single_pages(aims: Aims) -> None:
    s = aims.system
    small, big = f"calls/map_access/{s}/64K", "calls/map_access/cumem/2M"
    what = "one 64 KB page mapped with access, over one 2 MB page by cuMemMap + cuMemSetAccess"
    aims.add("map_64K", what, [small, big], _net(), op="<=", aim=0.75)
    aims.add("map_64K_raw", what + ", Python included", [small, big], _net("median"))
    aims.add(
        "map_2M",
        "one 2 MB page mapped with access, over the same",
        [f"calls/map_access/{s}/2M", big],
        _net(),
    )
    unmaps = [f"calls/unmap/{s}/64K", "calls/unmap/cumem/2M"]
    aims.add(
        "unmap_64K", "one 64 KB page unmapped, over one 2 MB page by cuMemUnmap", unmaps, _net()
    )
    for row, what in (
        ("singles", "2 MB as 32 maps of 64 KB, over one cuMem page of 2 MB"),
        ("run_aligned", "2 MB as one run on a 2 MB boundary, over one cuMem page"),
        ("run_offset", "2 MB as one run off the boundary, over one cuMem page"),
    ):
        aims.add(f"bytes_{row}", what, [f"bytes/{row}/{s}", "bytes/page/cumem"], _net())
    pages = [f"bandwidth/single/{s}/64K", "bandwidth/single/cumem/2M"]
    aims.add(
        "bandwidth_64K",
        "allocation bandwidth in pages of 64 KB, over cuMem* pages of 2 MB",
        pages,
        lambda a, b: float(a["gb_per_s"]) / float(b["gb_per_s"]),
    )
    busy = [f"busy/kernel/{s}/64K", f"busy/idle/{s}/64K"]
    aims.add("busy_64K", "mapping while a kernel fills the GPU, over an idle GPU", busy, _net())
    aims.add(
        "create",
        "vMemCreate from a warm pool",
        [f"pool/create/{s}/64K"],
        lambda row: float(row["median"]),
        unit="us",
        op="<=",
        aim=1.0,
    )
    aims.add(
        "run_1024",
        "a run of 1,024 pages of 64 KB, off a 2 MB boundary",
        [f"pool/run/{s}"],
        lambda row: float(row["gb_per_s"]),
        unit="GB/s",
        op=">=",
        aim=200.0,
    )


def _steps(aims: Aims) -> None:
    s = aims.system

    def median(row: Any) -> float:
        return float(row["median"])

    aims.add(
        "step_none",
        "step of 256 requests, none of which needs a page",
        [f"step/none/{s}"],
        median,
        unit="us",
        op="<=",
        aim=20.0,
    )
    aims.add(
        "step_async",
        "step_async, 8 of 256 need a page in each of 64 tensors: the caller's side",
        [f"step/async/{s}"],
        median,
        unit="us",
        op="<=",
        aim=30.0,
    )
    for tail, what in (("", ""), ("_dirty", ", without zeroing")):
        rows = [f"step/sync{tail}/{s}", f"step/maps512{tail}/{s}"]
        aims.add(
            f"step_sync{tail}", "the same step, over 512 single maps" + what, rows, _net("median")
        )


def _slots(aims: Aims) -> None:
    s = aims.system

    def median(row: Any) -> float:
        return float(row["median"])

    for call, what, most in (
        ("alloc", "alloc_reqid", 50.0),
        ("free", "free_reqid", 50.0),
        ("can_admit", "can_admit", 50.0),
        ("short", "a step that says -1", 50.0),
        ("idle", "a step in which no request needs a page", 140.0),
        ("grow", "a request that grows without a driver call", 3.0),
    ):
        name = f"slots_{call}"
        rows = [f"slots/{call}/{s}/4096"]
        aims.add(name, f"{what}, 4,096 slots", rows, median, unit="us", op="<=", aim=most)
    aims.add(
        "slots_async",
        "step_async, 8 requests x 64 tensors, after a pause: the caller's side",
        [f"slots/async_cold/{s}"],
        median,
        unit="us",
        op="<=",
        aim=30.0,
    )


def _live(aims: Aims) -> None:
    s = aims.system

    def value(row: Any) -> float:
        return float(row["value"])

    spread = "decode_spread_consolidated"
    for name, pattern, level, column, unit, op, aim in (
        ("live_runs", "runs", "1M", "kernel_bytes", "bytes", "<=", 300.0),
        ("live_spread", spread, "1M", "kernel_bytes_after", "bytes", None, None),
        ("live_decode", "decode", "400k", "kernel_bytes", "bytes", None, None),
        ("live_runs_teardown", "runs", "1M", "teardown_page", "us", None, None),
        ("live_spread_teardown", spread, "1M", "teardown_page", "us", None, None),
        ("live_decode_teardown", "decode", "400k", "teardown_page", "us", None, None),
    ):
        what = "teardown" if column == "teardown_page" else "kernel memory"
        aims.add(
            name,
            f"{what} per page at {level} live pages, {pattern}",
            [f"live/{pattern}/{s}/{level}/{column}"],
            value,
            unit=unit,
            op=op,
            aim=aim,
        )
    for name, what, column in (
        (
            "recovered_bytes",
            "kernel memory that spread and consolidation recover",
            "kernel_bytes_after",
        ),
        ("recovered_teardown", "teardown time that spread and consolidation recover", "teardown"),
    ):
        plain = column.removesuffix("_after")
        aims.add(
            name,
            f"{what}, in pattern decode at 400k",
            [f"live/{spread}/{s}/400k/{column}", f"live/decode/{s}/400k/{plain}"],
            lambda a, b: 100.0 * (1.0 - float(a["value"]) / float(b["value"])),
            unit="%",
        )


def _attention(aims: Aims) -> None:
    where = "small" if aims.quick or aims.system == "host" else "full"
    targets = [
        (f"{kernel}_{case.name}", f"{kernel}, {case.what}", f"attention/{kernel}/{case.name}")
        for kernel in ("sdpa", "fa3")
        for case in CASES
        if case.where == where
    ]
    targets.append(("readbw", "every byte read once", "readbw"))
    for name, what, prefix in targets:
        for kind in ("random", "runs"):
            ours = [f"{prefix}/{n}" for n in vmem_names() if n.startswith(kind)]
            theirs = [f"{prefix}/{n}" for n in malloc_names()]
            plain = "malloc" if aims.system == "host" else "cudaMalloc"
            order = {"random": "pages in random order", "runs": "one run"}[kind]
            medians = [row["median"] for row in map(aims.record.row, theirs) if row]
            spread = (max(medians) - min(medians)) / statistics.median(medians) if medians else None
            aims.add(
                f"{name}_{kind}",
                f"{what}: 64 KB pages ({order}) over {plain}, time",
                [*ours, *theirs],
                _over_baselines(len(ours)),
                op="<=" if kind == "random" else None,
                aim=1.015 if kind == "random" else None,
                baselines=len(theirs),
                baseline_spread=spread,
            )


def _over_baselines(ours: int) -> Callable[..., float]:
    """Returns a function that divides the vmem buffers' median by the baselines' median.

    The function takes one row per buffer, the first `ours` of them for vmem buffers, and takes the
    median of the row medians in each group.
    """

    def value(*rows: Any) -> float:
        medians = [float(row["median"]) for row in rows]
        return statistics.median(medians[:ours]) / statistics.median(medians[ours:])

    return value
