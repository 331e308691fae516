# SPDX-License-Identifier: MIT
"""Re-entrant calls from finalizers and signal handlers.

Python runs finalizers and signal handlers between any two bytecodes. The interrupted thread may
hold a lock that they need, and the data that the lock protects may be half-updated. The locks
created here are re-entrant, and the data that they protect tolerates such calls. A cache's records
do not, so such calls are rejected (`within`).
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
    """Resets the locks in a forked child, which lacks the threads that held them."""
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forked)


def free_in_children(lock: RLock) -> None:
    """Makes a lock free in forked children, no matter which thread held it."""
    _locks.add(lock)


def reentrant_lock() -> RLock:
    """Returns a re-entrant lock that is free in forked children, no matter which thread held it."""
    lock = RLock()
    _locks.add(lock)
    return lock


# ---- re-entrant calls ---------------------------------------------------------------------------

_RECORDS = "pyvmem.kvcache."
_CALLS = ("pyvmem.", "contextlib.")  # modules whose frames count as part of a call


def within(section: FrameType) -> bool:
    """Returns true if the frame `section` is on the call stack of the caller's caller.

    Raises:
        Reentered: the interrupted call is changing a cache's records, or records of the caller's
            own package.
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
    """Runs a callback as part of the current call, so that the callback may call the cache."""
    return run()


def _module(frame: FrameType) -> str:
    name: str | None = frame.f_globals.get("__name__")
    return f"{name}."


# ---- finalizers --------------------------------------------------

_ends: deque[tuple[Callable[[], object], list[Any]]] = deque()  # calls deferred to another thread


def when_collected(owner: object, end: Callable[[], object]) -> weakref.finalize[..., Any]:
    """Calls `end` when an object is garbage-collected, but not at interpreter exit.

    If the collection interrupts a call into this package, `end` is called in a new thread: this
    thread may hold locks or be about to query the error of its last C call.
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
    with suppress(RuntimeError):  # no thread can be started: the next collection runs it
        start_new_thread(_make_ends, ())


def _make_ends() -> None:
    while True:
        try:
            end, streams = _ends.popleft()
        except IndexError:
            return
        try:
            # `end` must wait for the GPU work of the thread in which the object was collected
            for stream in streams:
                sys.modules["torch"].cuda.set_stream(stream)
        except Exception:
            _log.exception("vmem: cannot wait for a stream of a garbage-collected object")
        try:
            end()
        except Exception:
            _log.exception("vmem: %r of a garbage-collected object failed", end)


def _streams() -> list[Any]:
    """Returns torch's current streams, except default streams, which a new thread uses anyway."""
    with suppress(Exception):  # the GPU may have failed
        cuda = sys.modules["torch"].cuda
        if cuda.is_initialized():
            now = cuda.current_device()
            order = sorted(range(cuda.device_count()), key=lambda device: device == now)
            used = [(cuda.current_stream(one), cuda.default_stream(one)) for one in order]
            return [current for current, first in used if current != first]
    return []
