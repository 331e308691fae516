# SPDX-License-Identifier: MIT
"""A ledger account with a thread that reports statistics and applies `vmem limit`."""

from __future__ import annotations

import logging
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable

from pyvmem.ledger.accounts import Account, Ledger
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.flag import Flag
from pyvmem.plumbing.logs import warn

__all__ = ["Participant", "weakly"]

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_REPORT_S = 0.25


def weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """Wraps a bound method in a function that holds only a weak reference to the object.

    The function returns False once the object is gone.
    """
    known = weakref.WeakMethod(method)

    def call() -> bool:
        found = known()
        return found is not None and found()

    return call


class Participant(Closable):
    """An account, and the thread that reports its statistics and applies `vmem limit`.

    An announced cache (`pyvmem.ledger.presence`) has no other connection to the ledger. The owner
    must serialize all calls except `start`.

    Args:
        ledger: the device's ledger; closed by `close`.
        name, floor, limit, least, virtual: as in `Ledger.join`.

    Attributes:
        account: the account in the ledger.

    Raises:
        VMemError: as for `Ledger.join`; the ledger is closed.
    """

    def __init__(
        self, ledger: Ledger, name: str, *, floor: int, limit: int, least: int, virtual: int
    ) -> None:
        try:
            self.account: Account = ledger.join(
                name, floor=floor, limit=limit, least=least, virtual=virtual
            )
        except BaseException:
            ledger.close()
            raise
        self._reported = 0.0
        self._ended = Flag()

    def start(self, tend: Callable[[], bool]) -> None:
        """Calls `tend` every 50 ms in a thread, until `close` or until it returns False.

        Errors are logged, and the calls continue.
        """
        start_new_thread(_run, (tend, self._ended))

    def report(self, numbers: Callable[[], dict[str, int]], *, now: bool = False) -> None:
        """Reports `EngineInfo` statistics for `vmem top`.

        Does so at most four times a second, unless `now` is set.
        """
        at = time.monotonic()
        if now or at >= self._reported + _REPORT_S:
            self._reported = at
            self.account.report(**numbers())

    def close(self) -> None:
        """Leaves the ledger, which from then on counts its memory as free. Idempotent."""
        self._ended.set()
        self.account.close()


def _run(tend: Callable[[], bool], ended: Flag) -> None:
    while not ended.wait(_TICK_S):
        try:
            if not tend():
                return
        except Exception as error:
            warn(
                _log,
                "ledger",
                "the ledger thread failed and will retry: %s",
                repr(error),
            )
