# SPDX-License-Identifier: MIT
"""Wraps the functions of _holes.h for the reads of holes that the SIGSEGV handler has recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["again", "conceal", "taken"]

again: Callable[[], None] = lib.pyvmem_holes_again
"""Makes the interpreter call `pyvmem.memory.holes.tell` again soon."""

conceal: Callable[[], None] = lib.pyvmem_holes_conceal
"""Unmaps the memory at holes that were read, so that the next read faults again."""


def taken() -> Iterator[Any]:
    """Yields and removes the reads recorded since the last call, each a struct pyvmem_hole."""
    while True:
        hole = ffi.new("struct pyvmem_hole *")
        if not lib.pyvmem_holes_take(hole):
            return
        yield hole
