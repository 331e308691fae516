# SPDX-License-Identifier: MIT
"""``vmem selftest``: runs the checks, prints a line for each, writes the report.

Exit status: 0 if all applicable checks passed, 1 if a check failed, 2 for bad usage, 3 if nothing
was tested because the back end cannot be used on this machine.

Without --backend it tests the back end that a context uses: the first usable one.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyvmem
from pyvmem.commands.arguments import add_backend, add_device
from pyvmem.commands.machine import describe
from pyvmem.commands.page import write_report
from pyvmem.commands.probe import ProbeResult, probe
from pyvmem.features import about
from pyvmem.layouts.options import MOST, whole
from pyvmem.plumbing.paths import replaced, write_text, written
from pyvmem.selftest.run import line, passed, run_checks
from pyvmem.selftest.timing import measure

__all__ = ["FORMAT", "NOT_TESTED", "add_parser", "run"]

FORMAT = 1
"""Version of the report's format."""

NOT_TESTED = 3
"""Exit status if the back end cannot be used on this machine, which does not count as a failure."""

_PARAMETERS = Path("/sys/module/nvidia_uvm/parameters")  # where the patched module adds parameters


def add_parser(sub: Any) -> None:
    """Adds ``vmem selftest``."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "selftest",
        help="check, on the GPU itself, that fine-grained memory works on this machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_backend(parser, "back end to test; auto: the one that a context uses")
    add_device(parser)
    add("--json", action="store_true", help="print the report as JSON and nothing else")
    add("--out", type=written, metavar="FILE", help="write the JSON to this file")
    add("--report", type=replaced, metavar="FILE", help="write one HTML file with everything")
    add(
        "--samples",
        type=_samples,
        default=200,
        help="samples per timed operation, 2 or more (default: 200); 0: time nothing",
    )
    parser.set_defaults(run=run)


def _samples(text: str) -> int:
    """Parses the number of samples: 0, or at least 2, since one sample has no quartiles."""
    value = whole(text)
    if value and not 2 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor between 2 and {MOST}")
    return value


def _tested(backend: str, results: list[ProbeResult]) -> ProbeResult:
    """Returns the probe result of the back end to test.

    For "auto", this is the first usable back end, or the last one if none is usable.
    """
    if backend == "auto":
        return next((one for one in results if one.used), results[-1])
    return next(one for one in results if one.backend == backend)


def _passed_over(found: ProbeResult, results: list[ProbeResult]) -> dict[str, str]:
    """Explains why the back ends tried earlier are not used."""
    return {one.backend: one.reason for one in results[: results.index(found)]}


def _why_not(found: ProbeResult, others: list[str]) -> str:
    """Explains, in one line, why nothing is tested and which back ends could be tested."""
    missing = found.backend == "uvm" and not any(_PARAMETERS.glob("uvm_vmem_*"))
    what = "the patched driver is not loaded" if missing else f"{found.backend} cannot be used here"
    could = " or ".join(f"--backend {name}" for name in others) or "no other back end"
    return f"not tested: {what} ({found.reason}); {could} can be tested on this machine"


def _report(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the checks and returns the report; "not_tested" says why none ran."""
    report: dict[str, Any] = {
        "format": FORMAT,
        "tool": "vmem selftest",
        "version": pyvmem.__version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe(),
        "passed": False,
    }
    results = probe(args.device)
    found = _tested(args.backend, results)
    report["probe"] = {"usable": found.usable, "error": found.error_name, "reason": found.reason}
    report["passed_over"] = {} if args.backend != "auto" else _passed_over(found, results)
    if found.error in (errno.ENODEV, errno.EACCES):
        report["not_tested"] = _why_not(found, [one.backend for one in results if one.usable])
        return report
    device = " ".join(part for part in (found.device_name, found.driver) if part)
    say(": ".join(part for part in (found.backend, device, found.reason) if part))
    if not found.usable:
        return report
    for name, reason in report["passed_over"].items():
        say(f"passed over: {name}: {reason}")
    with pyvmem.Context(found.backend, device=args.device, pool_high=1) as context:
        report["tested"] = about(context.info)
        checks = run_checks(context, lambda result: say(line(result)))
        report["checks"] = [asdict(result) for result in checks]
        report["passed"] = passed(checks)
        if report["passed"] and args.samples > 1:
            report["times"] = measure(context, args.samples)
            _show(report["times"], say)
    return report


def _show(times: dict[str, Any], say: Callable[[str], None]) -> None:
    for name in times:
        if name == "tensors":
            continue
        if "not measured" in times[name]:
            say(f"times    {name}: not measured: {times[name]['not measured']}")
            continue
        for what in ("map", "unmap"):
            one = times[name][what]
            text = (
                f"times    {name}: {what} {times['tensors']} pages of {times[name]['page_bytes']}"
            )
            spread = f"{one['quartile_1_us']:.0f} to {one['quartile_3_us']:.0f}"
            say(f"{text} bytes: {one['median_us']:.0f} us (middle half {spread})")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status described at the top of this module."""
    report = _report(args, _quiet if args.json else _say)
    text = json.dumps(report, indent=2)
    if args.out:
        write_text(args.out, text + "\n")
    if args.report:
        write_report(args.report, report)
    if args.json:
        print(text)
    elif args.out:
        print(f"report: {args.out}")
    if "not_tested" in report:
        print(f"vmem selftest: {report['not_tested']}", file=sys.stderr)
        return NOT_TESTED
    if not args.json:
        print("passed" if report["passed"] else "FAILED")
    return 0 if report["passed"] else 1


def _say(text: str) -> None:
    print(text, flush=True)


def _quiet(_: str) -> None:
    pass
