# SPDX-License-Identifier: MIT
"""Numbers that are compared by the thousand (_scan.c)."""

from __future__ import annotations

from array import array
from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["Limits"]


class Limits:
    """A limit for each of some places, 0 at first.

    Attributes:
        values: the limits, of type code "Q"; the length stays.
    """

    __slots__ = ("_found", "_pointer", "values")

    def __init__(self, count: int) -> None:
        self.values: array[int] = array("Q", bytes(8 * count))
        self._pointer: Any = ffi.from_buffer("uint64_t[]", self.values)
        self._found: Any = ffi.new("uint32_t[]", count + 1)

    def exceeded(self, numbers: array[int]) -> list[int]:
        """The places whose number, in an array as long and of the same type, is above the limit."""
        given, count = ffi.from_buffer("uint64_t[]", numbers), len(self.values)
        if len(given) != count:
            raise ValueError(f"{len(given)} numbers for {count} limits")
        found = lib.pyvmem_exceeding(given, self._pointer, count, self._found)
        places: list[int] = ffi.unpack(self._found, found) if found else []
        return places
