# SPDX-License-Identifier: MIT
"""An undo log of a cache's records: an exception at any point leaves them consistent.

An exception may come from outside between any two of Python's instructions: Ctrl-C, another
signal's handler, a test's timeout, no memory. A call of the cache is then half done, in its records
and in the context. So while a call runs, the journal holds, oldest first:

    undo    how to take edits of the records back; harmless when done twice
    act     a call of the context, with its outcome; if it succeeded, C has made the edits that go
            with it (`Mapper.commit`)
    abort   how to take back a part of the call that is complete by itself, such as a slot taken

    | undo undo ACT undo ABORT undo undo ACT undo |
                                         ^ did not happen: all is undone back to the first ACT,
                                           which did; then what the aborts before it say is done

What was interrupted is settled while the exception propagates, or else by the next call:
`Journal.recover` may itself be interrupted at any point, and then goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from pyvmem import _native
from pyvmem._native import Outcome
from pyvmem.errors import VMemError
from pyvmem.plumbing.reentry import call_part, within

__all__ = ["Journal", "Recoverable"]


class Made(Protocol):
    """Something of the context that a call has made: a handle, addresses."""

    def abandon(self) -> None:
        """Gives it back, if it was made and not given back before."""


class Recoverable(Protocol):
    """The records of one cache, which recover with a journal."""

    def failed(self, error: VMemError) -> None:
        """Notes a failure that the next `step` raises."""


class Journal:
    """The undo log of all caches behind one lock, whose holder alone may touch it.

    A context manager around a call of a cache. A `VMemError` that leaves the call has been dealt
    with where it arose; after anything else the records are recovered.

    Attributes:
        entries: see the module.
        held: handles and reservations that the call makes, each put here before it is made. The
            edits that name one in the records take it out; the others are given back at the end.
        recoverables: what recovers, one for each cache.
    """

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.recoverables: list[Recoverable] = []
        self.held: dict[Made, None] = {}
        self._pending: list[Callable[[], None]] = []  # aborts to be run by `recover`
        self._caller: FrameType | None = None  # all of a call lies in it

    # ---- what a call writes ----------------------------------------------------------------------

    def change(self, edits: list[list[Any]]) -> None:
        """Makes edits of the records (see `Outcome`), until an interruption takes them back."""
        made: list[Any] = [False, edits]
        self.entries.append(made)
        _native.change(made)

    def on_abort(self, run: Callable[[], None]) -> None:
        """Notes what takes back a part of the call; `run` must be safe to run again."""
        self.entries.append(run)

    # ---- around a call ---------------------------------------------------------------------------

    def __enter__(self) -> bool:
        """Begins a section; False within another one, which this is a part of.

        Raises:
            Reentered: by a finalizer or a signal handler, in the midst of a call.
        """
        if self._caller is not None:
            if within(self._caller):
                return False
            # Its end was interrupted, perhaps where counts were made again.
            self._caller = sys._getframe(0)
            self.recover()
        self._caller = sys._getframe(1)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._caller is not sys._getframe(1):
            return
        self._caller = sys._getframe(0)  # so that an interruption of this is seen at the next call
        if kind is None or issubclass(kind, VMemError):
            self.entries.clear()
            if self.held:
                self._give_back()
        else:
            self.recover()
        self._caller = None

    def recover(self) -> None:
        """Settles what an exception interrupted, by what the context has done."""
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
        """Drops what the call made and the records do not name."""
        while self.held:
            made = next(reversed(self.held))
            with suppress(VMemError):  # consumed or dropped before: as it should be
                made.abandon()
            self.held.pop(made, None)
