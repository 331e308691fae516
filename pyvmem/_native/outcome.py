# SPDX-License-Identifier: MIT
"""The result of a call that may be interrupted by a signal handler's exception (_outcome.h)."""

from __future__ import annotations

from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["Outcome", "cell_of", "change", "change_back"]


class Outcome:
    """Memory to which a call writes its result before it returns, so that the result is never lost.

    Python runs signal handlers between two bytecode instructions, never inside C. So either the
    call was not made, or its complete result is stored here and its edits are applied.

    Args:
        edits: see `of`.

    Attributes:
        cell: a ``struct pyvmem_outcome *``.
        edits: C sets it to None after the call; the list then holds the replaced values.
    """

    __slots__ = ("cell", "edits")

    cell: Any
    edits: list[list[Any]] | None

    def __init__(self, edits: list[list[Any]] | None = None) -> None:
        self.cell = ffi.new("struct pyvmem_outcome *")
        self.edits = edits
        if edits is not None:
            self.cell.edits = id(edits)

    def of(self, edits: list[list[Any]]) -> Outcome:
        """Makes a later call apply edits before it returns, if it succeeds. Returns self.

        Args:
            edits: ``[owner, name, value]`` sets an attribute, bypassing the owner's `__setattr__`;
                ``[owners, name, values]`` sets it for each owner in a list; ``[items, key, value]``
                sets an item (the key must not be a str) or, if `items` is a set, adds the key. The
                value `...` removes the attribute, item or key. C replaces each value with the
                previous value (`...`: there was none).
        """
        self.edits = edits
        self.cell.edits = id(edits)
        return self

    @property
    def happened(self) -> bool:
        """True if the call was made and succeeded."""
        return bool(self.cell.called) and self.cell.code == 0

    @property
    def value(self) -> int:
        """The ticket, handle or address that the call created; 0 if it created none."""
        value: int = self.cell.value
        return value

    def __repr__(self) -> str:
        if not self.cell.called:
            return "<Outcome: not called>"
        return f"<Outcome: {self.cell.code}, {self.value:#x}>"


def cell_of(outcome: Outcome | None) -> Any:
    """Returns the cell of a call's outcome, or a throwaway cell for None."""
    return (outcome or Outcome()).cell


def change(made: list[Any]) -> None:
    """Applies edits (see `Outcome.of`) without making a call.

    Args:
        made: ``[False, edits]``; this call changes False to True.
    """
    lib.pyvmem_change(id(made), 0)


def change_back(made: list[Any]) -> None:
    """Undoes `change`; does nothing if the edits are already undone or were never applied."""
    lib.pyvmem_change(id(made), 1)
