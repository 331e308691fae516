# SPDX-License-Identifier: MIT
"""Argument validators. Their errors name the argument, the value and the limit."""

from __future__ import annotations

import contextlib
import errno
import math
import operator
from typing import Any

from pyvmem.errors import InvalidArgument
from pyvmem.plumbing.units import parse_bytes

__all__ = ["bounded", "expect", "invalid", "real", "shown", "switched", "unexpected", "whole"]

# above this, only the size is printed: Python refuses to format more than 4,300 digits
_MOST_BITS = 256


def shown(value: Any) -> str:
    """Returns the `repr` of a value for an error message, truncated."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an int of {value.bit_length()} bits"
    try:
        return f"{value!r:.80}"
    except ValueError:  # it contains a number that is too long
        return f"a {type(value).__name__} that is too long"


def unexpected(name: str, value: Any, kind: str) -> TypeError:
    """Returns the error that `expect` raises, for hot paths that check inline."""
    return TypeError(f"{name}: expected {kind}, not {shown(value)}")


def expect(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raises TypeError unless the value is of this type or, with `optional`, None."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise unexpected(name, value, kind.__name__ + " or None" * optional)


def invalid(message: str, *, op: str, limit: int = 0, size: int = 0) -> InvalidArgument:
    """Returns an `InvalidArgument` in the same form as libvmem's.

    Args:
        op: the class or function that takes the argument.
    """
    return InvalidArgument(message, errno=errno.EINVAL, op=op, bytes=size, limit=limit)


def _number(value: Any) -> str:
    """Returns a hint to write a number instead of a string such as "64K"; "" for other values."""
    with contextlib.suppress(ValueError):
        return f": write {parse_bytes(value)}" if isinstance(value, str) else ""
    return ""


def whole(name: str, value: Any) -> int:
    """Returns the value as a whole number of any size; raises TypeError if it is not one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a whole number, not {shown(value)}{_number(value)}"
        ) from None


def bounded(name: str, value: Any, low: int, high: int, *, op: str) -> int:
    """Returns the value as a whole number; raises InvalidArgument if it is out of bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        what = shown(value) + _number(value)
        raise invalid(f"{name} must be a whole number, not {what}", op=op) from None
    if not low <= number <= high:
        raise invalid(
            f"{name} is {shown(number)}; it must be between {low} and {high}", limit=high, op=op
        )
    return number


def real(name: str, value: Any, high: int, *, op: str, positive: bool = False) -> float:
    """Returns the value as a float; raises InvalidArgument unless it is between 0 and `high`.

    With `positive`, rejects 0. Also rejects strings.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        # RuntimeError: a torch tensor with more than one element
        raise invalid(f"{name} must be a number, not {shown(value)}", op=op) from None
    if not 0.0 <= number <= high or (positive and not number):  # also rejects NaN
        bounds = "be above 0 and at most" if positive else "be between 0 and"
        what = shown(value) if math.isinf(number) else number
        raise invalid(f"{name} is {what}; it must {bounds} {high}", limit=high, op=op)
    return number


def switched(name: str, value: Any, *, op: str) -> bool:
    """Returns a bool; raises InvalidArgument for other types, since "off" is truthy."""
    if not (isinstance(value, int) and value in (0, 1)):
        raise invalid(f"{name} must be True or False, not {shown(value)}", op=op)
    return bool(value)
