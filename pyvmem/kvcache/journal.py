# SPDX-License-Identifier: MIT
"""An undo log that keeps a cache's records consistent if an exception occurs at any point.

Ctrl-C, any other signal handler, a test's timeout or MemoryError can raise an exception between any
two bytecode instructions. A call to the cache is then half done, both in its records and in the
context. So while a call runs, the journal holds, oldest first:

    undo    how to undo edits to the records; safe to do twice
    act     a call into the context, with its outcome; if it succeeded, C has made the edits that
            belong to it (`Mapper.commit`)
    abort   how to undo a completed part of the call, such as allocating a slot

    | undo undo ACT undo ABORT undo undo ACT undo |
                                         ^ did not happen: everything is undone back to the last
                                           ACT that did; then the aborts before it run

An interrupted call is recovered while the exception propagates, or failing that, by the next
call: `Journal.recover` may itself be interrupted at any point, and continues where it left off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from pyvmem import _native
from pyvmem._native import Outcome
from pyvmem.errors import VMemError
from pyvmem.plumbing.reentry import call_part, within

__all__ = ["Journal", "Recoverable"]


_MADE = Outcome()
"""The outcome of a context call that cannot be undone once it has begun: recovery stops there."""
_MADE.cell.called = 1


class Made(Protocol):
    """A handle or a reservation that a call has created in the context."""

    def abandon(self) -> None:
        """Releases the object, if it was created and has not been released yet."""


class Recoverable(Protocol):
    """The records of one group, which the journal recovers."""

    def failed(self, error: VMemError) -> None:
        """Records a failure for the next `step` to raise."""


class Journal:
    """The undo log of all caches that share a lock; only the lock's holder may use it.

    Use it as a context manager around each call of a cache. If a `VMemError` leaves the block, the
    code that raised it has already restored the records. After any other exception, the journal
    restores them.

    Attributes:
        entries: the log; see the module's docstring.
        unrecorded: handles and reservations that the call creates, each added before its creation
            and removed by the edits that store it in the records. Those still present when the
            call ends are released.
        recoverables: the groups whose records it recovers.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.recoverables: list[Recoverable] = []
        self.unrecorded: dict[Made, None] = {}
        self._pending: list[Callable[[], None]] = []  # aborts that `recover` must run
        self._caller: FrameType | None = None  # the frame of the outermost call

    # ---- log entries of a call -------------------------------------------------------------------

    def change(self, edits: list[list[Any]]) -> None:
        """Applies edits to the records (see `Outcome`).

        They are undone if the call is interrupted.
        """
        made: list[Any] = [False, edits]
        self.entries.append(made)
        _native.change(made)

    def made(self) -> None:
        """Commits the changes so far, because the next operation cannot be undone."""
        self.entries.append(_MADE)

    def on_abort(self, run: Callable[[], None]) -> None:
        """Registers a function that undoes part of the call; it must be safe to run twice."""
        self.entries.append(run)

    # ---- around a call ---------------------------------------------------------------------------

    def __enter__(self) -> bool:
        """Begins a section.

        Returns False if the section is nested in another one, which it then joins.

        Raises:
            Reentered: a finalizer or a signal handler made the call in the middle of another call.
        """
        if self._caller is not None:
            if within(self._caller):
                return False
            # The last section's `__exit__` was interrupted, perhaps during recovery.
            self._caller = sys._getframe(0)
            self.recover()
        self._caller = sys._getframe(1)
        return True

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._caller is not sys._getframe(1):
            return
        self._caller = sys._getframe(0)  # lets the next call detect that this one was interrupted
        if kind is None or issubclass(kind, VMemError):
            self.entries.clear()
            if self.unrecorded:
                self._give_back()
        else:
            self.recover()
        self._caller = None

    def recover(self) -> None:
        """Undoes an interrupted call, back to the last context call that succeeded."""
        entries = self.entries
        while entries:
            entry = entries[-1]
            if type(entry) is Outcome and entry.happened:
                break
            if type(entry) is list:
                _native.change_back(entry)
            elif type(entry) is tuple:
                entry[0](*entry[1:])
            entries.pop()
        if entries:
            self._pending = [*self._pending, *(one for one in entries if callable(one))]
            entries.clear()
        while self._pending:
            try:
                call_part(self._pending[-1])
            except VMemError as error:
                for owner in self.recoverables[:1]:
                    owner.failed(error)
            entries.clear()
            self._pending.pop()
        self._give_back()
        entries.clear()

    def _give_back(self) -> None:
        """Releases handles and reservations that the call created but did not record."""
        while self.unrecorded:
            made = next(reversed(self.unrecorded))
            with suppress(VMemError):  # already consumed or dropped
                made.abandon()
            self.unrecorded.pop(made, None)
