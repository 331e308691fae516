# SPDX-License-Identifier: MIT
"""Giving memory back: on request, and from a thread while an engine is idle.

An idle engine makes no calls, so its calls cannot notice that it is: that takes a thread. It looks
a few times within `idle_seconds` whether a request was taken, given back or stepped, which costs
those calls nothing.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotSupported, VMemError
from pyvmem.kvcache.events import wait_for_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyvmem.kvcache.group import Group
    from pyvmem.kvcache.manager import Manager

__all__ = ["IdleThread", "begin_trim", "trim", "unmap_idle"]

_log = logging.getLogger(__name__)
_LOOKS = 4  # within idle_seconds, so that what is idle is trimmed a quarter late at most


def begin_trim(group: Group, prefixes: bool, leased: bool = False) -> bool:
    """Begins to unmap all pages of no request; True when none is on its way any more."""
    group.pager.poll()
    group.reclaimer.poll()
    group.mover.sweep()
    if prefixes:
        group.prefixes.evict_all(leased)
    group.reclaimer.release_stale(kept=True)
    for slot in group.table.victims():
        group.reclaimer.try_cut(slot, slot.granted)
    return not group.reclaimer.cuts


def trim(manager: Manager, prefixes: bool, compact: bool, stream: Any) -> int:
    """See `KVCache.trim`."""
    groups, context = manager.open(), manager.context
    before = context.stats().slab_bytes
    unmap_idle(groups, prefixes)
    context.trim(0)
    if compact:
        _compact(manager, stream)
    for group in groups:
        group.reclaimer.raise_errors()
    back = max(0, before - context.stats().slab_bytes)
    _log.debug("trim: %d bytes given back to the device, %d had been taken", back, before)
    return back


def _compact(manager: Manager, stream: Any) -> None:
    """Empties slabs that are used in part.

    Raises:
        NotSupported: the context is not the cache's own.
    """
    if not manager.owns_context:
        raise NotSupported(
            "compact: the context is not the cache's own, and others may be using its pages; "
            "Context.compact is for who knows them all",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    first = manager.groups[0]
    with first.counters.waiting():
        wait_for_device(stream, first.device)
        manager.context.compact()


def unmap_idle(groups: Sequence[Group], prefixes: bool) -> None:
    """Unmaps all pages of no request, and waits for that; failures are in `Reclaimer.errors`."""
    for group in groups:
        group.pager.finish_idle()
        with group.counters.waiting():
            while not begin_trim(group, prefixes, leased=True):
                group.reclaimer.finish_all()
                if group.reclaimer.errors:
                    break


class IdleThread(threading.Thread):
    """Trims a cache once for every time that it is idle for so long; ends with the cache.

    What is no failure of the cache's own, such as an error of torch for an event, is logged the
    first time; the next look tries again.

    Args:
        manager: of the cache that is trimmed.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(name="pyvmem-idle", daemon=True)
        self._manager = weakref.ref(manager)
        self._period = manager.groups[0].config.idle_seconds / _LOOKS
        self._ended = threading.Event()
        self._seen: list[tuple[int, int, int, int]] = []
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
        """Trims when nothing happened in the last looks. Keeps no reference to the cache."""
        manager = self._manager()
        if manager is None:
            self.end()
            return
        now = [group.activity() for group in manager.groups]
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            self._trimmed = self._trim(manager)

    def _trim(self, manager: Manager) -> bool:
        """One step of a trim that waits for nothing; True when it is complete."""
        groups, config = manager.groups, manager.groups[0].config
        with manager.lock, manager.journal:
            if self._ended.is_set() or not manager.context.is_open:
                return True
            try:
                done = [begin_trim(group, config.idle_prefixes) for group in groups]
                if not all(done):
                    return False
                manager.context.trim(0)
                if config.idle_compact and manager.owns_context:
                    _compact(manager, None)
                held = sum(group.reclaimer.held for group in groups)
                _log.debug("idle: trimmed, %d pages stay", held)
            except VMemError as error:
                groups[0].reclaimer.errors.append(error)  # the next step raises it
            return True
