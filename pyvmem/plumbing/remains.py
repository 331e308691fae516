# SPDX-License-Identifier: MIT
"""Cleans up libvmem objects whose Python owners were lost.

An asynchronous exception (Ctrl-C) may be raised just after an object was created, before its caller
has a reference, or while it is being closed. Then no caller can close it. A finalizer cannot
either: it may run between a failed C call and the query of its error, and an exception in it would
be ignored. So the libvmem objects that an object creates are recorded separately, and the creation
of the next object of its kind frees those of lost objects.
"""

from __future__ import annotations

import weakref
from contextlib import suppress

from pyvmem.errors import VMemError

__all__ = ["Remains", "end_lost", "forget_all"]

_all: dict[int, Remains] = {}


class Remains:
    """A record of what an object has created in libvmem; outlives the object.

    A subclass stores what `end` needs, and must not refer to anything that refers to the object.
    """

    def __init__(self, owner: object) -> None:
        self.owner = weakref.ref(owner)
        _all[id(self)] = self

    def end(self) -> None:
        """Frees what the object has created, as far as possible. Idempotent."""
        raise NotImplementedError


def end_lost() -> None:
    """Frees what lost objects have created, newest first: it may be inside an older one's range."""
    for key, one in reversed(list(_all.items())):
        if one.owner() is None:
            with suppress(VMemError):  # already closed, or cannot be freed now
                one.end()
            _all.pop(key, None)


def forget_all() -> None:
    """Drops all records in a forked child: the objects belong to the parent."""
    _all.clear()
