# SPDX-License-Identifier: MIT
"""Arguments that are objects: one of another type is refused by the argument's name."""

from __future__ import annotations

from typing import Any

__all__ = ["expect"]


def expect(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Raises TypeError for a value of another type; `optional`: None is taken, too."""
    if not (isinstance(value, kind) or (optional and value is None)):
        others = " or None" if optional else ""
        raise TypeError(f"{name}: expected {kind.__name__}{others}, not {value!r:.80}")
