# SPDX-License-Identifier: MIT
"""Arguments that are objects: one of another type is refused by the argument's name."""

from __future__ import annotations

from typing import Any

__all__ = ["expect", "unexpected"]


def unexpected(name: str, value: Any, kind: str) -> TypeError:
    """The error for an argument; for calls that are too frequent for `expect`."""
    return TypeError(f"{name}: expected {kind}, not {value!r:.80}")


def expect(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raises TypeError for a value of another type; `optional`: None is taken, too."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise unexpected(name, value, kind.__name__ + " or None" * optional)
