# SPDX-License-Identifier: MIT
"""What became of a call that an exception from outside may have interrupted (_outcome.h)."""

from __future__ import annotations

from typing import Any

from pyvmem._vmem import ffi

__all__ = ["Outcome", "cell_of"]


class Outcome:
    """Memory that a call writes before it returns, so that nothing it did is ever unknown.

    A signal's handler runs between two of Python's instructions, never inside C: so either the call
    was not made, or everything that it reported is here.
    """

    __slots__ = ("cell",)

    cell: Any
    """A ``struct pyvmem_outcome *``."""

    def __init__(self) -> None:
        self.cell = ffi.new("struct pyvmem_outcome *")

    @property
    def happened(self) -> bool:
        """The call was made and succeeded."""
        return bool(self.cell.called) and self.cell.code == 0

    @property
    def value(self) -> int:
        """What it made: a ticket, a handle, an address; 0: nothing, or not made."""
        value: int = self.cell.value
        return value

    def __repr__(self) -> str:
        if not self.cell.called:
            return "<Outcome: not called>"
        return f"<Outcome: {self.cell.code}, {self.value:#x}>"


def cell_of(outcome: Outcome | None) -> Any:
    """Where a call writes its outcome; nobody looks at that of None."""
    return (outcome or Outcome()).cell
