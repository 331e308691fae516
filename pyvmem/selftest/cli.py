# SPDX-License-Identifier: MIT
"""``vmem selftest``: runs the checks, prints a line for each, writes the report."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyvmem
from pyvmem import _native
from pyvmem.bench.machine import describe
from pyvmem.features import about
from pyvmem.probe import probe
from pyvmem.selftest import books, memory
from pyvmem.selftest.check import Result, run_check
from pyvmem.selftest.timing import measure

__all__ = ["FORMAT", "add_parser", "run"]

FORMAT = 1
"""Version of the report's layout."""


def add_parser(sub: Any) -> None:
    """Adds ``vmem selftest``."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "selftest",
        help="check, on the GPU itself, that fine-grained memory works on this machine",
        description=__doc__,
    )
    add = parser.add_argument
    add("--backend", default="uvm", help="uvm (default: the patched driver), stock, cuda, host")
    add("--device", type=int, default=0, help="CUDA ordinal (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the report there")
    add("--samples", type=int, default=200, help="of each time (default: 200); 0: no times")
    parser.set_defaults(run=run)


def _checks(context: pyvmem.Context) -> list[Result]:
    results = []
    for check in (*memory.CHECKS, *books.CHECKS):
        result = run_check(check, context)
        print(f"{result.result:<8} {result.name:<20} {result.detail}", flush=True)
        results.append(result)
        if result.result == "failed" and not _usable(context):
            break
    return results


def _usable(context: pyvmem.Context) -> bool:
    """Whether more checks make sense: one that failed has left nothing broken behind."""
    try:
        context.check()
    except pyvmem.VMemError:
        return False
    return context.stats().quarantined_bytes == 0


def _report(args: argparse.Namespace) -> dict[str, Any]:
    """Everything; "passed" says whether all is well."""
    report: dict[str, Any] = {
        "format": FORMAT,
        "tool": "vmem selftest",
        "version": pyvmem.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe(),
        "passed": False,
    }
    (found,) = [one for one in probe(args.device) if one.backend == args.backend]
    report["probe"] = {"usable": found.usable, "error": found.error_name, "reason": found.reason}
    print(f"{found.backend}: {found.device_name} {found.driver}: {found.reason}", flush=True)
    if not found.usable:
        return report
    with pyvmem.Context(args.backend, device=args.device, pool_high=1) as context:
        report["tested"] = about(context.info)
        results = _checks(context)
        report["checks"] = [asdict(result) for result in results]
        ran = len(results) == len(memory.CHECKS) + len(books.CHECKS)
        report["passed"] = ran and not any(result.result == "failed" for result in results)
        if report["passed"] and args.samples > 1:
            report["times"] = measure(context, args.samples)
            _show(report["times"])
    return report


def _show(times: dict[str, Any]) -> None:
    for name in times:
        if name == "tensors":
            continue
        if "not measured" in times[name]:
            print(f"times    {name}: not measured: {times[name]['not measured']}")
            continue
        for what in ("map", "unmap"):
            one = times[name][what]
            text = (
                f"times    {name}: {what} {times['tensors']} pages of {times[name]['page_bytes']}"
            )
            spread = f"{one['quartile_1_us']:.0f} to {one['quartile_3_us']:.0f}"
            print(f"{text} bytes: {one['median_us']:.0f} us (middle half {spread})")


def run(args: argparse.Namespace) -> int:
    """0: every check that applies here has passed."""
    names = _native.backend_names()
    if args.backend not in names:
        print(f"vmem: no back end is called {args.backend!r}; there are {', '.join(names)}")
        return 2
    report = _report(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"report: {args.json}")
    print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1
