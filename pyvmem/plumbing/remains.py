# SPDX-License-Identifier: MIT
"""Cleans up libvmem objects whose Python owners were lost.

An asynchronous exception (Ctrl-C) may be raised just after an object was created, before its caller
has a reference, or while the object is being closed. Then no caller can close it. A finalizer is no
solution: it may run between a failed C call and the query of its error, and its exceptions would be
ignored. Instead, the libvmem objects that a Python object creates are recorded separately, and the
next such Python object to be created frees those of lost owners.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

from pyvmem.errors import VMemError

__all__ = ["Remains", "end_lost", "forget_all"]

_all: dict[int, Remains] = {}


class Remains:
    """Records the libvmem objects that a Python object has created; outlives that object.

    A subclass stores the data that `end` needs; none of it may refer back to the object.
    """

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)
        _all[id(self)] = self

    def end(self) -> None:
        """Frees the recorded libvmem objects, as far as possible. Idempotent."""
        raise NotImplementedError


def end_lost() -> None:
    """Frees lost owners' libvmem objects, newest first: newer ones may lie in older ranges."""
    for key, one in reversed(list(_all.items())):
        if one.owner() is None:
            with suppress(VMemError):  # already closed, or cannot be freed yet
                one.end()
            _all.pop(key, None)


def forget_all() -> None:
    """Drops all records in a forked child: the objects belong to the parent."""
    _all.clear()
