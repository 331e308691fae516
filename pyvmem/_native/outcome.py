# SPDX-License-Identifier: MIT
"""The result of a call that a signal's exception may have interrupted (_outcome.h)."""

from __future__ import annotations

from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["Outcome", "cell_of", "change", "change_back"]


class Outcome:
    """Memory that a call writes its result to before it returns, so that the result is never lost.

    Python runs a signal's handler between two bytecode instructions, never inside C: either the
    call was not made, or everything that it reported is here, and what it was to change is changed.

    Args:
        edits: see `of`.

    Attributes:
        cell: a ``struct pyvmem_outcome *``.
        edits: to be set to None after the call: they hold what was there before. C forgets them.
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
        """Has the call, which is still to be made, make edits before it returns, if it succeeds.

        Args:
            edits: ``[owner, name, value]`` sets an attribute past its owner's `__setattr__`,
                ``[owners, name, values]`` those of a list, and ``[items, key, value]`` an item,
                whose key is no str; to a set it adds the key. The value `...` removes. C replaces
                each value by the one that was there; `...`: there was none.
        """
        self.edits = edits
        self.cell.edits = id(edits)
        return self

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


def change(made: list[Any]) -> None:
    """Makes edits (see `Outcome.of`), which no call goes with.

    Args:
        made: ``[False, edits]``, where False becomes True.
    """
    lib.pyvmem_change(id(made), 0)


def change_back(made: list[Any]) -> None:
    """Takes back what `change` did, unless that is done or it did nothing."""
    lib.pyvmem_change(id(made), 1)
