# SPDX-License-Identifier: MIT
"""Reads of holes, as the handler of SIGSEGV wrote them down: the functions of _holes.h."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyvmem._vmem import ffi, lib

__all__ = ["again", "conceal", "taken"]

again: Callable[[], None] = lib.pyvmem_holes_again
"""Has the interpreter call `pyvmem.memory.holes.tell` again, soon."""

conceal: Callable[[], None] = lib.pyvmem_holes_conceal
"""Makes holes that were read fault again."""


def taken() -> Iterator[Any]:
    """Takes the reads of holes since the last call, each a struct pyvmem_hole."""
    while True:
        hole = ffi.new("struct pyvmem_hole *")
        if not lib.pyvmem_holes_take(hole):
            return
        yield hole
