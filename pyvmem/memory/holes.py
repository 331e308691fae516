# SPDX-License-Identifier: MIT
"""Makes a read of an unmapped row on the ``host`` back end raise `NotMapped` instead of crashing.

The SIGSEGV handler (`_holes.c`) lets such a read return zeros; the interpreter then calls `tell` in
the main thread. If a Python thread has read a hole, the exception is raised in that thread, at its
next bytecode. If a native thread, such as a torch worker, has read one, the exception is raised in
a Python thread that read a hole at the same time, or else in the main thread.

With ``VMEM_HOLES=fault`` in the environment, SIGSEGV is not handled.
"""

from __future__ import annotations

import _weakrefset
import ctypes
import errno
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from pyvmem._native import arrays
from pyvmem._native import holes as _holes
from pyvmem.errors import NotMapped
from pyvmem.memory.array import VirtualArray
from pyvmem.memory.context import find_reservation

__all__ = ["tell"]

_CALLBACKS = frozenset(one.__file__ for one in (weakref, _weakrefset, arrays))
_log = logging.getLogger(__name__)


def tell() -> None:
    """Raises an error for a hole that the main thread has read.

    Makes every other Python thread that has read a hole raise its own error.

    Raises:
        NotMapped: the main thread, or a native thread, has read a hole.
    """
    if _unseen(sys._getframe(1)):
        _holes.again()
        return
    reads = list(_holes.taken())
    main = threading.main_thread().ident
    others = {read.thread: read for read in reads if read.python and read.thread != main}
    for thread, read in others.items():
        _leave(thread, read)
    mine = [read for read in reads if not others or (read.python and read.thread == main)]
    if mine:
        _holes.conceal()
        raise NotMapped(_text(mine[0]), **_fields(mine[0]))


def _unseen(frame: FrameType | None) -> bool:
    """Returns true if Python would ignore an exception in this frame, as in finalizers."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename in _CALLBACKS:
            return True
        frame = frame.f_back
    return False


def _leave(thread: int, read: Any) -> None:
    """Makes another thread raise `NotMapped`.

    That thread may still be reading, so the hole reads as zeros until the exception is raised.
    """
    text, fields = _text(read), _fields(read)

    class Later(NotMapped):
        """Python calls this without arguments in the other thread, to create a `NotMapped`."""

        def __new__(cls) -> NotMapped:  # type: ignore[misc]  # returns another class
            _holes.conceal()
            return NotMapped(text, **fields)

    found = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(Later)
    )
    if not found:
        _holes.conceal()
        _log.warning("a thread that has ended: %s", text)


def _fields(read: Any) -> dict[str, Any]:
    return {"errno": errno.EFAULT, "op": "read", "addr": int(read.addr), "bytes": int(read.bytes)}


def _text(read: Any) -> str:
    offset = read.addr - read.base
    reservation = find_reservation(read.base)
    where = "" if reservation is None else _element(reservation.arrays(), offset)
    return (
        f"a read of {read.addr:#x}, where no page is mapped: {where or 'no element of a tensor'}, "
        f"byte {offset} of the reservation at {read.base:#x}. Rows past a request's length have no "
        "memory: read cache.k(layer)[slot, :length]. The read returned zeros"
    )


def _element(arrays: Sequence[VirtualArray], offset: int) -> str:
    """Describes the element at this byte of the reservation, in the first array that contains it.

    Returns "" if no array contains it.
    """
    for array in arrays:
        index = array.index_of(offset)
        if index is not None:
            return f"element {list(index)} of a tensor {array.dtype.name}{list(array.shape)}"
    return ""
