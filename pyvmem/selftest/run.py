# SPDX-License-Identifier: MIT
"""Runs all checks in order on an open context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyvmem import Context
from pyvmem.errors import VMemError
from pyvmem.selftest import books, memory
from pyvmem.selftest.check import Result, run_check

__all__ = ["CHECKS", "line", "passed", "run_checks"]

CHECKS = (*memory.CHECKS, *books.CHECKS)


def line(result: Result) -> str:
    """Formats a check's outcome."""
    return f"{result.result:<8} {result.name:<20} {result.detail}"


def _usable(context: Context) -> bool:
    """Returns true if the context still works after a failed check."""
    try:
        context.check()
    except VMemError:
        return False
    return context.stats().quarantined_bytes == 0


def run_checks(context: Context, show: Callable[[Result], None]) -> list[Result]:
    """Runs the checks until a failure breaks the context; passes each result to `show`."""
    results = []
    for check in CHECKS:
        result = run_check(check, context)
        show(result)
        results.append(result)
        if result.result == "failed" and not _usable(context):
            break
    return results


def passed(results: Sequence[Result]) -> bool:
    """Returns true if all checks ran and none failed."""
    failed = any(result.result == "failed" for result in results)
    return len(results) == len(CHECKS) and not failed
