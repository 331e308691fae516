# SPDX-License-Identifier: MIT
"""Calls in the midst of another call of the same thread: of finalizers and of signal handlers.

Python runs both between any two of its instructions. So a lock that is taken may be this thread's
own, and what it guards may be half changed: a lock here is re-entrant, what it guards is made for
that, and the records of a cache, which cannot be, refuse such a call (`within`).
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from _thread import RLock, start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

from pyvmem.errors import Reentered

__all__ = [
    "RLock",
    "call_part",
    "free_in_children",
    "reentrant_lock",
    "when_collected",
    "within",
]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# ---- locks ---------------------------------------------------------------------------------------

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


# ---- calls within a call -------------------------------------------------------------------------

_RECORDS = "pyvmem.kvcache."
_CALLS = ("pyvmem.", "contextlib.")  # what a call of ours consists of


def within(section: FrameType) -> bool:
    """Whether the caller's caller is called, directly or not, within a frame.

    Raises:
        Reentered: in the midst of a call that changes a cache's records, or those of the package
            that the caller is of, which something else has interrupted.
    """
    called = sys._getframe(2)
    records = (_RECORDS, ".".join(_module(called).split(".")[:2]) + ".")
    frame: FrameType | None = called
    stranger, interrupted = False, ""
    while frame is not None:
        name = _module(frame)
        if frame.f_code is call_part.__code__:
            stranger = False
        elif not name.startswith(_CALLS):
            stranger = True
        elif stranger and name.startswith(records):
            interrupted = frame.f_code.co_name
        if frame is section:
            if interrupted:
                raise Reentered(called.f_code.co_name, interrupted)
            return True
        frame = frame.f_back
    return False


def call_part(run: Callable[[], _T]) -> _T:
    """Calls what is a part of a call of this package, whoever wrote it: it may call the cache."""
    return run()


def _module(frame: FrameType) -> str:
    name: str | None = frame.f_globals.get("__name__")
    return f"{name}."


# ---- what is called when an object is collected --------------------------------------------------

_ends: deque[tuple[Callable[[], object], list[Any]]] = deque()  # for another thread to make


def when_collected(owner: object, end: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Has `end` called when an object is collected; not at the end of the process.

    Where that is in the midst of a call of this package, a thread of its own makes the call: this
    one may hold locks, or be about to ask why its last call of C failed.
    """
    if _ends:
        _make_ends_elsewhere()
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
        _ends.append((end, _streams()))
        _make_ends_elsewhere()


def _make_ends_elsewhere() -> None:
    with suppress(RuntimeError):  # no more threads: the next one makes it
        start_new_thread(_make_ends, ())


def _make_ends() -> None:
    while True:
        try:
            end, streams = _ends.popleft()
        except IndexError:
            return
        try:
            for stream in streams:  # `end` waits for the work of the thread that had the object
                sys.modules["torch"].cuda.set_stream(stream)
        except Exception:
            _log.exception("vmem: a stream of a collected object cannot be waited for")
        try:
            end()
        except Exception:
            _log.exception("vmem: %r of a collected object failed", end)


def _streams() -> list[Any]:
    """torch's current streams that are not their devices' first ones, as a new thread's are."""
    with suppress(Exception):  # a GPU that has failed
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            now = cuda.current_device()
            order = sorted(range(cuda.device_count()), key=lambda device: device == now)
            used = [(cuda.current_stream(one), cuda.default_stream(one)) for one in order]
            return [current for current, first in used if current != first]
    return []
