# SPDX-License-Identifier: MIT
"""Puts a cache in the ledger: `vmem top` shows it, and `vmem limit` sets its limit.

    announced = pyvmem.announce(cache, "my-engine")     # from now on, until the cache is closed

A cache does not join automatically, because a library should not write files unasked. The ledger is
shared with vLLM's engines (`pyvmem.ledger`), which then count the cache's memory as another
engine's. A thread writes the statistics four times a second. It holds only a weak reference to the
cache, and stops when the cache is gone.

An announced cache allocates memory without asking the ledger. A `Budget` created with a ledger asks
first, and is shown by `vmem top` without `announce`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyvmem.errors import BadHandle, ForkedProcess, InvalidArgument, NotSupported
from pyvmem.kvcache import Budget, KVCache
from pyvmem.ledger.accounts import Ledger, device_of, engine_name
from pyvmem.ledger.participant import Participant
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.logs import warn
from pyvmem.plumbing.reentry import reentrant_lock

__all__ = ["Announced", "announce"]

_log = logging.getLogger(__name__)


class Announced(Closable):
    """The entry of a cache or budget in the ledger. Leaving a ``with`` block removes it.

    Attributes:
        name: the name shown by `vmem top`.
    """

    def __init__(self, what: KVCache | Budget, participant: Participant, name: str) -> None:
        self.name = name
        self._what = weakref.ref(what)
        self._participant = participant
        self._followed = participant.account.limit
        self._lock = reentrant_lock()
        self._left = False
        self.report()
        participant.start(partial(self._tend, now=False))

    def __repr__(self) -> str:
        return f"<Announced {self.name!r}{', closed' * self._left}>"

    def report(self) -> bool:
        """Writes the statistics and applies a new limit.

        Returns false once the cache is closed or gone.
        """
        return self._tend(now=True)

    def _tend(self, *, now: bool) -> bool:
        with self._lock:
            what = self._what()
            try:
                if what is not None and not self._left and what.context.is_open:
                    self._follow(what)
                    self._participant.report(partial(_numbers, what), now=now)
                    return True
            except (BadHandle, ForkedProcess):  # the cache is closed, or this is a forked child
                pass
            self._leave()
            return False

    def _follow(self, what: KVCache | Budget) -> None:
        """Applies a new limit, or logs why the old limit is kept."""
        account = self._participant.account
        limit = account.limit
        if limit == self._followed:
            return
        try:
            if _follow(what, limit):
                self._followed = limit
        except NotSupported as error:
            account.decline()
            warn(_log, "limit", "%s keeps its limit of %d: %s", self.name, self._followed, error)

    def _leave(self) -> None:
        self._left = True
        self._participant.close()

    def close(self) -> None:
        """Removes the cache from the ledger. Idempotent."""
        with self._lock:
            self._leave()


def _follow(what: KVCache | Budget, limit: int) -> bool:
    """Sets a limit. If requests hold more, frees all other pages, and blocks growth until they end.

    Returns:
        True if the limit is set; otherwise the caller retries as requests end.
    """
    if isinstance(what, Budget):
        if what.stats().used_bytes > limit:
            what.reclaim(limit)
        return _lower(what.set_limit, limit)
    pages, stats = limit // what.layout.page_size, what.stats()
    if not what.lockstep and stats.active_pages + stats.cached_pages > pages:
        what.trim()
    return _lower(what.memory.set_limit, pages)


def _lower(set_limit: Callable[[int], None], wanted: int) -> bool:
    """Sets the wanted limit or, failing that, the lowest limit that is possible now.

    Returns True if the wanted limit was set.
    """
    try:
        set_limit(wanted)
        return True
    except InvalidArgument as error:
        with contextlib.suppress(InvalidArgument):  # the cache may have grown in the meantime
            set_limit(error.limit)
        return False


def _numbers(what: KVCache | Budget) -> dict[str, int]:
    """Returns the statistics for `vmem top`, named as in `EngineInfo`."""
    if isinstance(what, Budget):
        return what.numbers() | {"used": what.stats().used_bytes}
    stats, page = what.stats(), what.layout.page_size
    return {
        "used": stats.mapped_bytes,
        "in_use": stats.active_pages * page,
        "cached": stats.cached_pages * page,
        "handles": stats.mappings,
        "maps": what.context.stats().map_calls,
        "waits": stats.waits,
        "hits": stats.prefix_hit_tokens,
        "queries": stats.prefix_query_tokens,
        "host": what.config.host_prefixes,
        "host_cached": stats.prefix_host_bytes,
    }


def announce(what: KVCache | Budget, name: str = "", folder: Path | None = None) -> Announced:
    """Shows a cache in `vmem top`, and lets `vmem limit` set its limit.

    A limit below what requests hold takes effect when they end; until then, no request grows. The
    ranks of a `ParallelKVCache` have agreed on a limit, so they keep it and log a warning. Caches
    that share a `Budget` are shown as a single row: announce the budget.

    Args:
        what: a `KVCache`, a rank's `ParallelKVCache`, or a `Budget`, such as that of a
            `LayeredCache`.
        name: unique among the device's living engines; "": the program's name and process id.
        folder: directory of the ledgers; None: ``VMEM_LEDGER`` or, if that is not set,
            ``/dev/shm/vmem-UID``.

    Raises:
        InvalidArgument: the name is in use; the cache shares a budget, or the budget already has a
            ledger.
        AccessDenied: the directory belongs to another user.
        LedgerError: the ledger cannot be created or used.
        BadHandle: the cache is closed.
        NotSupported: the GPU is in MIG mode.
    """
    name = name or engine_name(Path(sys.argv[0]).stem or "python", f"-{os.getpid()}")
    if isinstance(what, Budget):
        if what.on_ledger:
            raise _refused(f"{name!r}: the Budget is already in a ledger")
        limit = most = what.total_bytes
        floor, least = 0, what.least_bytes
    else:
        if what.budget is not None:
            raise _refused(f"{name!r}: the cache shares a Budget; announce the Budget instead")
        layout = what.layout
        limit = what.stats().total_pages * layout.page_size
        most, floor = max(limit, layout.total_bytes), 0
        least = layout.page_size * layout.num_tensors
    info = what.context.info
    ledger = Ledger(device_of(info.device_name, info.uuid), 0, folder)
    participant = Participant(ledger, name, floor=floor, limit=limit, least=least, virtual=most)
    return Announced(what, participant, name)


def _refused(text: str) -> InvalidArgument:
    return InvalidArgument(text, errno=errno.EINVAL, op="announce")
