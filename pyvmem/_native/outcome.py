# SPDX-License-Identifier: MIT
"""The result of a call that a signal's exception may have interrupted (_outcome.h)."""

from __future__ import annotations

from typing import Any

from pyvmem._vmem import ffi

__all__ = ["Outcome", "cell_of"]


class Outcome:
    """Memory that a call writes its result to before it returns, so that the result is never lost.

    Python runs a signal's handler between two bytecode instructions, never inside C: either the
    call was not made, or everything that it reported is here.
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
        """The ticket, handle or address that the call made; 0: none, or it was not made."""
        value: int = self.cell.value
        return value

    def __repr__(self) -> str:
        if not self.cell.called:
            return "<Outcome: not called>"
        return f"<Outcome: {self.cell.code}, {self.value:#x}>"


def cell_of(outcome: Outcome | None) -> Any:
    """Where a call writes its outcome; for None, a cell that nobody reads."""
    return (outcome or Outcome()).cell
