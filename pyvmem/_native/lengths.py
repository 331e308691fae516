# SPDX-License-Identifier: MIT
"""The lengths of all slots, compared in one pass (_lengths.c)."""

from __future__ import annotations

from array import array
from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["Lengths"]


class Lengths:
    """The rows that each slot holds and those that it has room for; arrays of type code "Q".

    Attributes:
        held: rows of each slot, all 0 at first. `scan` never writes into the array that is here.
        capacity: the limit of each slot, all 0 at first.
    """

    __slots__ = ("_arrays", "_beyond", "_capacity", "_total", "capacity", "held")

    def __init__(self, count: int) -> None:
        first, second, self.capacity = (array("Q", bytes(8 * count)) for _ in range(3))
        self.held = first
        self._arrays = [(one, ffi.from_buffer("uint64_t[]", one)) for one in (first, second)]
        self._capacity: Any = ffi.from_buffer("uint64_t[]", self.capacity)
        self._beyond: Any = ffi.new("uint32_t[]", count + 1)
        self._total: Any = ffi.new("uint64_t *")

    def scan(self, lengths: list[int]) -> tuple[array[int], int, list[int]] | int:
        """What every slot holds once each has its length; one that is shorter takes no row away.

        Returns:
            The rows of each slot, in an array that the next `scan` writes again unless it was put
            in `held`; their sum; and the slots whose length is above their capacity, in order. Or
            the place of an entry that is no int from 0 to 2**64 - 1.
        """
        count = len(self.capacity)
        if len(lengths) != count:
            raise ValueError(f"{len(lengths)} lengths for {count} slots")
        (first, at_first), (second, at_second) = self._arrays
        swap = self.held is second
        held, rows = (at_second, at_first) if swap else (at_first, at_second)
        found = lib.pyvmem_lengths(
            ffi.cast("void *", id(lengths)),
            count,
            held,
            self._capacity,
            rows,
            self._beyond,
            self._total,
        )
        if found < 0:
            return -1 - int(found)
        places: list[int] = ffi.unpack(self._beyond, found) if found else []
        return first if swap else second, self._total[0], places
