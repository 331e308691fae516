# SPDX-License-Identifier: MIT
"""All checks in their order, on an open context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyvmem import Context
from pyvmem.errors import VMemError
from pyvmem.selftest import books, memory
from pyvmem.selftest.check import Result, run_check

__all__ = ["CHECKS", "line", "passed", "run_checks"]

CHECKS = (*memory.CHECKS, *books.CHECKS)


def line(result: Result) -> str:
    """A check's outcome, for a person."""
    return f"{result.result:<8} {result.name:<20} {result.detail}"


def _usable(context: Context) -> bool:
    """True if more checks make sense: one that failed has left nothing broken behind."""
    try:
        context.check()
    except VMemError:
        return False
    return context.stats().quarantined_bytes == 0


def run_checks(context: Context, show: Callable[[Result], None]) -> list[Result]:
    """Runs them, up to one that leaves something broken; `show` gets each result as it comes."""
    results = []
    for check in CHECKS:
        result = run_check(check, context)
        show(result)
        results.append(result)
        if result.result == "failed" and not _usable(context):
            break
    return results


def passed(results: Sequence[Result]) -> bool:
    """True if all were run, and none has failed."""
    failed = any(result.result == "failed" for result in results)
    return len(results) == len(CHECKS) and not failed
