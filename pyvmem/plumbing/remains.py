# SPDX-License-Identifier: MIT
"""Cleans up libvmem objects whose Python owners were lost.

An exception from outside (Ctrl-C) can come just after an object was made, before its caller has it,
or while it is being closed; then nobody can close it. A finalizer cannot either: it may run between
a failed C call and the query of its error, and an exception in it would be ignored. So a record of
what the object made is kept separately, and the next object of its kind frees what lost objects
left.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

from pyvmem.errors import VMemError

__all__ = ["Remains", "end_lost", "forget_all"]

_all: dict[int, Remains] = {}


class Remains:
    """Records what an object has created in libvmem, independently of the object's life.

    A subclass notes here what `end` needs, and refers to nothing that refers to the object.
    """

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)
        _all[id(self)] = self

    def end(self) -> None:
        """Frees what the object left, as far as possible. Idempotent."""
        raise NotImplementedError


def end_lost() -> None:
    """Frees what lost objects left, newest first: it may be inside an older object's range."""
    for key, one in reversed(list(_all.items())):
        if one.owner() is None:
            with suppress(VMemError):  # closed, or cannot be freed now
                one.end()
            _all.pop(key, None)


def forget_all() -> None:
    """Drops all records in a forked child: everything belongs to the parent."""
    _all.clear()
