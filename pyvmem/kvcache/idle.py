# SPDX-License-Identifier: MIT
"""Giving memory back: when asked, and by a small thread when an engine is idle.

An idle engine makes no calls, so its calls cannot notice that it is: that takes a thread. It looks
a few times within `idle_seconds` whether a request was taken, given back or stepped, which costs
those calls nothing.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotSupported, VMemError
from pyvmem.kvcache.events import wait_for_device

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Core

__all__ = ["IdleThread", "begin_trim", "compact", "trim", "unmap_idle"]

_log = logging.getLogger("pyvmem.kvcache")
_LOOKS = 4  # within idle_seconds, so that what is idle is trimmed a quarter late at most


def begin_trim(core: Core, prefixes: bool, leased: bool = False) -> bool:
    """Begins to unmap all pages of no request; True when none is on its way any more."""
    core.pager.poll()
    core.reclaimer.poll()
    core.mover.sweep()
    if prefixes:
        core.prefixes.evict_all(leased)
    core.reclaimer.release_stale()
    for slot in core.table.victims():
        core.reclaimer.try_cut(slot, slot.granted)
    return not core.reclaimer.cuts


def trim(core: Core, prefixes: bool, compacting: bool = False, stream: Any = None) -> int:
    """See `KVCache.trim`."""
    before = core.context.stats().slab_bytes
    unmap_idle(core, prefixes)
    core.context.trim(0)
    if compacting:
        compact(core, stream)
    core.reclaimer.raise_errors()
    return max(0, before - core.context.stats().slab_bytes)


def compact(core: Core, stream: Any, *, owned: bool | None = None) -> int:
    """Empties slabs that are used in part; returns the bytes given back to the device.

    `owned`: whether all of the context's pages are the caller's; None: by the cache alone.

    Raises:
        NotSupported: the context is not the cache's own.
    """
    if not (core.parts.owns_context if owned is None else owned):
        raise NotSupported(
            "compact: the context is not the cache's own, and others may be using its pages; "
            "Context.compact is for who knows them all",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    with core.counters.waiting():
        wait_for_device(stream, core.device)
        return core.context.compact()


def unmap_idle(core: Core, prefixes: bool) -> None:
    """Unmaps all pages of no request, and waits for that; failures are in `Cuts.errors`."""
    core.pager.finish_idle()
    with core.counters.waiting():
        while not begin_trim(core, prefixes, leased=True):
            core.reclaimer.finish_all()
            if core.reclaimer.errors:
                break


class IdleThread(threading.Thread):
    """Trims a cache once for every time that it is idle for so long; ends with the cache.

    What is no failure of the cache's own, such as an error of torch for an event, is logged the
    first time; the next look tries again.

    Args:
        core: what is trimmed.
        lock: the cache's.
    """

    def __init__(self, core: Core, lock: AbstractContextManager[Any]) -> None:
        super().__init__(name="pyvmem-idle", daemon=True)
        self._core = weakref.ref(core)
        self._period = core.config.idle_seconds / _LOOKS
        self._lock = lock
        self._ended = threading.Event()
        self._seen: tuple[int, ...] | None = None
        self._quiet = 0  # looks in a row that saw the same
        self._trimmed = False
        self._failed = False

    def end(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._ended.set()

    def run(self) -> None:
        """Looks, and trims."""
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    _log.exception("an idle cache could not be trimmed; it will be tried again")
                self._failed = True

    def _look(self) -> None:
        """Trims when nothing happened in the last looks. Keeps no reference to the core."""
        core = self._core()
        if core is None:
            self.end()
            return
        now = core.activity()
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            self._trimmed = self._trim(core)

    def _trim(self, core: Core) -> bool:
        """One step of a trim that waits for nothing; True when it is complete."""
        with self._lock, core.journal:
            if self._ended.is_set() or not core.context.is_open:
                return True
            try:
                if not begin_trim(core, core.config.idle_prefixes):
                    return False
                core.context.trim(0)
                if core.config.idle_compact and core.parts.owns_context:
                    compact(core, None)
            except VMemError as error:
                core.reclaimer.errors.append(error)  # the next step raises it
            return True
