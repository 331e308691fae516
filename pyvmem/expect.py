# SPDX-License-Identifier: MIT
"""Arguments that are objects: one of another type is refused by the argument's name."""

from __future__ import annotations

from typing import Any

__all__ = ["expect", "shown", "unexpected"]

_MOST_BITS = 256  # of a number that is written; Python itself refuses to write one of 4,301 digits


def shown(value: Any) -> str:
    """What an error calls a value: `repr`, cut short."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an int of {value.bit_length()} bits"
    try:
        return f"{value!r:.80}"
    except ValueError:  # it has such a number in it
        return f"a {type(value).__name__} that is too long"


def unexpected(name: str, value: Any, kind: str) -> TypeError:
    """The error for an argument; for calls that are too frequent for `expect`."""
    return TypeError(f"{name}: expected {kind}, not {shown(value)}")


def expect(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raises TypeError for a value of another type; `optional`: None is taken, too."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise unexpected(name, value, kind.__name__ + " or None" * optional)
