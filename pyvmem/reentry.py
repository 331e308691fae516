# SPDX-License-Identifier: MIT
"""Calls in the midst of another call of the same thread: of finalizers and of signal handlers.

Python runs both between any two of its instructions. So a lock that is taken may be this thread's
own, and what it guards may be half changed: a lock here is re-entrant, what it guards is made for
that, and the records of a cache, which cannot be, refuse such a call (`within`).
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import RLock, start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import Any

from pyvmem.errors import Reentered

__all__ = ["RLock", "free_in_children", "reentrant_lock", "when_collected", "within"]

_RECORDS = "pyvmem.kvcache."
_CALLS = ("pyvmem.", "contextlib.")  # what a call of ours consists of

_locks: weakref.WeakSet[RLock] = weakref.WeakSet()


def _forked() -> None:
    """Resets the locks in a child process, where the threads that held them do not exist."""
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forked)


def free_in_children(lock: RLock) -> None:
    """Makes a lock free in a forked child, whichever thread held it."""
    _locks.add(lock)


def reentrant_lock() -> RLock:
    """A re-entrant lock that is free in a forked child, whichever thread held it."""
    lock = RLock()
    free_in_children(lock)
    return lock


def within(section: FrameType) -> bool:
    """Whether the caller's caller is called, directly or not, within a frame.

    Raises:
        Reentered: in the midst of a call that changes a cache's records, which a finalizer or a
            signal handler has interrupted.
    """
    frame: FrameType | None = sys._getframe(2)
    op = sys._getframe(2).f_code.co_name
    stranger, interrupted = False, ""
    while frame is not None:
        name = _module(frame)
        if not name.startswith(_CALLS):
            stranger = True
        elif stranger and name.startswith(_RECORDS):  # which calls no functions of others
            interrupted = frame.f_code.co_name
        if frame is section:
            if interrupted:
                raise Reentered(op, interrupted)
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> str:
    name: str | None = frame.f_globals.get("__name__")
    return f"{name}."


def when_collected(owner: object, end: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Has `end` called when an object is collected; not at the end of the process.

    Where that is in the midst of a call of this package, a thread of its own makes the call: this
    one may hold locks, or be about to ask why its last call of C failed.
    """
    finalizer = weakref.finalize(owner, _end, end)
    finalizer.atexit = False
    return finalizer


def _end(end: Callable[[], object]) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _module(frame).startswith("pyvmem."):
        frame = frame.f_back
    if frame is None:
        end()
    else:
        start_new_thread(_end_there, (end, _streams()))


def _end_there(end: Callable[[], object], streams: list[Any]) -> None:
    for stream in streams:  # what `end` waits for is the work of the thread that had the object
        sys.modules["torch"].cuda.set_stream(stream)
    end()


def _streams() -> list[Any]:
    """torch's current streams, that of the current device last."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    now = cuda.current_device()
    order = sorted(range(cuda.device_count()), key=lambda device: device == now)
    return [cuda.current_stream(device) for device in order]
