# SPDX-License-Identifier: MIT
"""Building blocks of the checks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyvmem import Caps, Context, Reservation
from pyvmem.errors import VMemError

__all__ = ["Failed", "NotRun", "Result", "expect", "pattern", "raises", "reserve", "run_check"]


class Failed(Exception):
    """A check failed: a feature does not work on this machine."""


class NotRun(Exception):
    """A check does not apply to this machine."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        name: name of the check.
        what: a sentence that describes the check.
        result: ``"passed"``, ``"failed"`` or ``"not run"``.
        detail: a summary of what was done, or the error.
        seconds: duration of the check.
    """

    name: str
    what: str
    result: str
    detail: str
    seconds: float


def pattern(seed: int, offset: int) -> bytes:
    """Returns 64 bytes that are unique to this seed and offset."""
    return hashlib.sha512(f"{seed} {offset}".encode()).digest()


def expect(condition: bool, otherwise: str) -> None:
    """Raises Failed(`otherwise`) unless `condition` is true."""
    if not condition:
        raise Failed(otherwise)


def raises(error: type[VMemError], call: Callable[[], Any]) -> None:
    """Raises Failed unless the call raises `error`."""
    try:
        call()
    except error:
        return
    except VMemError as other:
        raise Failed(f"expected {error.__name__}, got {type(other).__name__}: {other}") from other
    raise Failed(f"expected {error.__name__}, but nothing was raised")


def reserve(context: Context, size: int, *, sparse: bool = False) -> Reservation:
    """Reserves addresses that only kernels can use; those that CUDA's copies accept are limited."""
    visible = False if Caps.PLAIN in context.info.caps else None
    return context.reserve(size, visible=visible, sparse=sparse)


def run_check(check: Callable[[Context], str], context: Context) -> Result:
    """Runs a check, then the library's own invariant check; returns the result."""
    name = check.__name__.replace("_", " ")
    what = (check.__doc__ or "").strip().splitlines()[0]
    start = time.monotonic()
    try:
        detail, result = check(context), "passed"
        context.check()
    except NotRun as reason:
        detail, result = str(reason), "not run"
    except Failed as error:
        detail, result = str(error), "failed"
    except VMemError as error:
        text = f"{error.op}: {error.errno_name}: {error}"
        detail, result = text, "failed"
    return Result(name, what, result, detail, round(time.monotonic() - start, 6))
