# SPDX-License-Identifier: MIT
"""A participant of the ledger that the engines of several processes share.

`Participant` is what all of them are: an account, and a thread that tends it: it reports numbers to
`vmem top`, follows `vmem limit`, and leaves when its owner is gone. A cache that is only announced
(`pyvmem.presence`) is no more than that. `OnLedger` is a budget's, which has no more memory than
the ledger has granted it:

    0 ......... used by caches, or kept by their floors ......... granted .......... limit
    | what the budget cannot give back                | headroom | the ledger's room, |
    |                                                 |          | others may take it |

Memory is taken from the ledger before a cache maps it: where a call finds too little, and ahead of
need by the thread, so that few calls meet the file's lock. The thread gives back what another
engine is short of, or what a lowered limit forbids, also while no cache is called.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyvmem.closing import Closable
from pyvmem.ledger import Account, Ledger, device_of
from pyvmem.logs import warn

if TYPE_CHECKING:
    from pyvmem.context import Context

__all__ = ["OnLedger", "Participant", "weakly"]

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_REPORT_S = 0.25
_HEADROOM = 256 << 20  # and at most a sixteenth of the budget


def weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """A bound method that does not keep its object alive, and returns False once that is gone."""
    known = weakref.WeakMethod(method)

    def call() -> bool:
        found = known()
        return found is not None and found()

    return call


class Participant(Closable):
    """An account, and a thread that tends it. The owner serializes all calls but `start`.

    Args:
        ledger: of the device; closed by `close`.
        name, floor, limit, least, virtual: as in `Ledger.join`.

    Attributes:
        account: in the ledger.

    Raises:
        VMemError: as `Ledger.join`; the ledger is closed.
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
        self._ended = threading.Event()

    def start(self, tend: Callable[[], bool]) -> None:
        """Calls `tend` every 50 ms in a thread, until `close` or until it returns False.

        An error is logged, and it is called again.
        """
        args = (tend, self._ended)
        threading.Thread(target=_run, args=args, name="pyvmem-ledger", daemon=True).start()

    def report(self, numbers: Callable[[], dict[str, int]], *, now: bool = False) -> None:
        """What `vmem top` shows, four times a second or `now`: names of `EngineInfo`."""
        at = time.monotonic()
        if now or at >= self._reported + _REPORT_S:
            self._reported = at
            self.account.report(**numbers())

    def close(self) -> None:
        """Leaves the ledger; its memory counts as free from here on. Idempotent."""
        self._ended.set()
        self.account.close()


def _run(tend: Callable[[], bool], ended: threading.Event) -> None:
    while not ended.wait(_TICK_S):
        try:
            if not tend():
                return
        except Exception as error:
            warn(_log, "ledger", "a participant of the ledger: %r; it will be tried again", error)


class OnLedger(Participant):
    """What a budget has of a device; the caller holds the budget's lock. Bytes.

    Args:
        ledger: of the context's device; closed by `close`.
        context: the budget's.
        free: returns the device's free memory; None: unknown, and the ledger alone counts.
        name, floor, limit: as in `Ledger.join`.

    Raises:
        VMemError: as `Ledger.join`; the ledger is closed.
    """

    def __init__(
        self,
        ledger: Ledger,
        context: Context,
        free: Callable[[], int] | None,
        name: str,
        floor: int,
        limit: int,
    ) -> None:
        info, page = context.info, context.info.granule
        device_of(info.device_name, info.uuid)
        super().__init__(ledger, name, floor=floor, limit=limit, least=page, virtual=limit)
        self._context = context
        self._free = free
        self.headroom = max(page, min(_HEADROOM, limit // 16) // page * page)
        self._limit = limit
        self._asked = False
        self.hint = 0  # the ledger's room when it was last looked at

    @property
    def granted(self) -> int:
        """What the budget may use."""
        return self.account.used

    def _free_bytes(self) -> int | None:
        if self._free is None:
            return None
        return self._free() + self._context.stats().free_bytes

    def beyond(self) -> int:
        """What the ledger would grant now."""
        self.hint = min(self._limit - self.granted, self.account.room(self._free_bytes()))
        return self.hint

    def take(self, nbytes: int) -> None:
        """Asks for so many more bytes and some headroom; gets that or as much as there is."""
        if nbytes <= 0:
            return
        free = self._free_bytes()
        page = self._context.info.granule
        most = min(self._limit - self.granted, self.account.room(free)) // page * page
        self.account.take(min(nbytes + self.headroom, most), free=free)
        if self._asked and nbytes <= most:
            self.ask(0)

    def ask(self, nbytes: int) -> None:
        """Posts what a request is short of for the other engines; 0: no longer short."""
        account = self.account
        nbytes = min(nbytes, self._limit - self.granted, account.limit - account.used)
        if nbytes > 0 or self._asked:
            account.want(max(0, nbytes))
            self._asked = nbytes > 0

    def settle(self, used: int) -> int:
        """Reports what is mapped; returns what must be given back."""
        self.account.settle(used)
        self.beyond()
        return self.account.excess(self._free_bytes())

    def give(self, nbytes: int) -> None:
        """Gives back what no cache uses and no floor of theirs keeps."""
        if nbytes > 0:
            self.account.give(nbytes)

    def balance(self, spare: int) -> None:
        """Keeps the headroom between a half and twice what it should be; `spare`: what it is."""
        if spare < self.headroom // 2:
            self.take(self.headroom // 2 - spare)
        elif spare > 2 * self.headroom:
            self.give(spare - self.headroom)
