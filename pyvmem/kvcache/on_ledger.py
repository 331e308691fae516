# SPDX-License-Identifier: MIT
"""A budget's account in the ledger that the engines of several processes share.

    0 ......... used by caches, or kept by their floors ......... granted .......... limit
    | what the budget cannot give back                | headroom | the ledger's room, |
    |                                                 |          | others may take it |

Memory is taken from the ledger before a cache maps it: where a call finds too little, and ahead of
need by the keeper, a thread, so that few calls meet the file's lock. The keeper gives back what
another engine is short of, or what a lowered limit forbids, also while no cache is called.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyvmem.ledger import Account, Ledger
from pyvmem.logs import warn

if TYPE_CHECKING:
    from pyvmem.context import Context

__all__ = ["Keeper", "OnLedger"]

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_REPORT_S = 0.25
_HEADROOM = 256 << 20  # and at most a sixteenth of the budget
_UNKNOWN = 1 << 62


class OnLedger:
    """What a budget has of a device; the caller holds the budget's lock. Bytes.

    Args:
        ledger: of the context's device; closed by `close`.
        context: the budget's.
        free: tells the device's free memory; None: nothing does, and the ledger alone counts.
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
        self._context = context
        self._free = free
        page = context.info.granule
        self.headroom = max(page, min(_HEADROOM, limit // 16) // page * page)
        try:
            self.account: Account = ledger.join(
                name, floor=floor, limit=limit, least=page, virtual=limit
            )
        except BaseException:
            ledger.close()
            raise
        self._limit = limit
        self._asked = False
        self._reported = 0.0
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
        """Has so much more granted, and some headroom, or as much as there is."""
        if nbytes <= 0:
            return
        free = self._free_bytes()
        page = self._context.info.granule
        most = min(self._limit - self.granted, self.account.room(free)) // page * page
        self.account.take(min(nbytes + self.headroom, most), free=free)
        if self._asked and nbytes <= most:
            self.ask(0)

    def ask(self, nbytes: int) -> None:
        """Tells the other engines what a request is short of; 0: it is not any more."""
        account = self.account
        nbytes = min(nbytes, self._limit - self.granted, account.limit - account.used)
        if nbytes > 0 or self._asked:
            account.want(max(0, nbytes))
            self._asked = nbytes > 0

    def settle(self, used: int) -> int:
        """Says what is mapped; returns what is to be given back."""
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

    def report(self, numbers: Callable[[], dict[str, int]]) -> None:
        """What `vmem top` shows, now and then: names of `EngineInfo`."""
        now = time.monotonic()
        if now >= self._reported + _REPORT_S:
            self._reported = now
            self.account.report(handles=self._context.stats().mappings, **numbers())

    def close(self) -> None:
        """Leaves the ledger; its memory counts as free from here on. Again: nothing."""
        if not self.account.ledger.closed:
            self.account.close()


class Keeper(threading.Thread):
    """Calls a method every 50 ms for as long as its object lives; ends where that says False.

    An error is logged, and it is called again.
    """

    def __init__(self, tend: Callable[[], bool]) -> None:
        super().__init__(name="pyvmem-ledger", daemon=True)
        self._tend: Callable[[], Any] = weakref.WeakMethod(tend)
        self._ended = threading.Event()

    def end(self) -> None:
        """Lets it end; does not wait for that."""
        self._ended.set()

    def run(self) -> None:
        """Until the end."""
        while not self._ended.wait(_TICK_S):
            tend = self._tend()
            if tend is None:
                return
            try:
                if not tend():
                    return
            except Exception as error:
                warn(_log, "ledger", "a budget on its ledger: %r; it will be tried again", error)
            del tend
