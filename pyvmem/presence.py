# SPDX-License-Identifier: MIT
"""A cache in the ledger: `vmem top` shows it, and `vmem limit` sets its limit.

    announced = pyvmem.announce(cache, "my-engine")     # from now on, until the cache is closed

Nothing joins by itself: a library should write no file that nobody asked for. The ledger is that of
vLLM's engines (`pyvmem.ledger`), which then count the cache's memory as another's. A thread writes
the numbers once a second; it holds the cache weakly, and is gone with it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pyvmem.errors import VMemError
from pyvmem.ledger import Account, Ledger

if TYPE_CHECKING:
    from pyvmem.kvcache.cache import KVCache

__all__ = ["Announced", "announce"]

_INTERVAL = 1.0


class Announced:
    """A cache's place in the ledger; a context manager, which ends it.

    Attributes:
        name: what `vmem top` calls it.
    """

    def __init__(self, cache: KVCache, account: Account, name: str) -> None:
        self.name = name
        self._cache = weakref.ref(cache)
        self._account = account
        self._followed = account.limit
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._left = False
        self.report()
        self._thread = threading.Thread(target=self._run, name="pyvmem-announce", daemon=True)
        self._thread.start()

    def report(self) -> bool:
        """Writes the numbers, and takes a new limit; False once the cache is closed or gone."""
        with self._lock:
            cache = self._cache()
            if cache is None or self._left:
                return False
            try:
                self._follow(cache)
                self._write(cache)
            except VMemError:  # closed, or of the process that forked this one
                return False
            return True

    def _follow(self, cache: KVCache) -> None:
        limit = self._account.limit
        if limit == self._followed:
            return
        pages = limit // cache.layout.page_size
        stats = cache.stats()
        if stats.active_pages + stats.cached_pages > pages:
            cache.trim()
        # What requests hold goes as they end: asked again until then.
        with contextlib.suppress(ValueError):
            cache.set_limit(pages)
            self._followed = limit

    def _write(self, cache: KVCache) -> None:
        stats, page = cache.stats(), cache.layout.page_size
        self._account.report(
            used=stats.mapped_bytes,
            in_use=stats.active_pages * page,
            cached=stats.cached_pages * page,
            handles=stats.mappings,
            maps=cache.context.stats().map_calls,
            waits=stats.waits,
            hits=stats.prefix_hit_tokens,
            queries=stats.prefix_query_tokens,
        )

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL) and self.report():
            pass
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            if not self._left:
                self._left = True
                self._account.close()

    def close(self) -> None:
        """Takes the cache out of the ledger; again: nothing."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> Announced:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def announce(cache: KVCache, name: str = "", folder: Path | None = None) -> Announced:
    """Shows a cache in `vmem top`, and lets `vmem limit` set its limit.

    A limit below what requests hold is taken when they end. Of several caches on one `Budget` each
    is announced by itself.

    Args:
        cache: a `KVCache` of one device.
        name: unique among the living of a device; "": the program's name and process.
        folder: of the ledgers; None: ``VMEM_LEDGER``, else ``/dev/shm/vmem-UID``.

    Raises:
        InvalidArgument: the name is taken.
        AccessDenied: the folder is another user's.
        LedgerError: the ledger cannot be made or used.
        BadHandle: the cache is closed.
    """
    name = name or f"{Path(sys.argv[0]).stem or 'python'}-{os.getpid()}"
    stats, layout = cache.stats(), cache.layout
    limit = stats.total_pages * layout.page_size
    ledger = Ledger(cache.context.info.uuid or "host", 0, folder)
    try:
        account = ledger.join(
            name,
            floor=cache.config.memory_floor,
            limit=limit,
            least=layout.page_size,
            virtual=max(limit, layout.total_bytes),
        )
    except BaseException:
        ledger.close()
        raise
    return Announced(cache, account, name)
