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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pyvmem.errors import NotSupported, VMemError
from pyvmem.kvcache.events import wait_for_device

if TYPE_CHECKING:
    from pyvmem.kvcache.group import Group

__all__ = ["IdleThread", "begin_trim", "compact", "trim", "unmap_idle"]

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


def trim(group: Group, prefixes: bool, compacting: bool = False, stream: Any = None) -> int:
    """See `KVCache.trim`."""
    before = group.context.stats().slab_bytes
    unmap_idle(group, prefixes)
    group.context.trim(0)
    if compacting:
        compact(group, stream)
    group.reclaimer.raise_errors()
    back = max(0, before - group.context.stats().slab_bytes)
    _log.debug("trim: %d bytes given back to the device, %d had been taken", back, before)
    return back


def compact(group: Group, stream: Any, *, owned: bool | None = None) -> int:
    """Empties slabs that are used in part; returns the bytes given back to the device.

    `owned`: whether all of the context's pages are the caller's; None: by the cache alone.

    Raises:
        NotSupported: the context is not the cache's own.
    """
    if not (group.parts.owns_context if owned is None else owned):
        raise NotSupported(
            "compact: the context is not the cache's own, and others may be using its pages; "
            "Context.compact is for who knows them all",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    with group.counters.waiting():
        wait_for_device(stream, group.device)
        return group.context.compact()


def unmap_idle(group: Group, prefixes: bool) -> None:
    """Unmaps all pages of no request, and waits for that; failures are in `Cuts.errors`."""
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
        group: what is trimmed.
        lock: the cache's.
    """

    def __init__(self, group: Group, lock: AbstractContextManager[Any]) -> None:
        super().__init__(name="pyvmem-idle", daemon=True)
        self._group = weakref.ref(group)
        self._period = group.config.idle_seconds / _LOOKS
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
        """Trims when nothing happened in the last looks. Keeps no reference to the group."""
        group = self._group()
        if group is None:
            self.end()
            return
        now = group.activity()
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            self._trimmed = self._trim(group)

    def _trim(self, group: Group) -> bool:
        """One step of a trim that waits for nothing; True when it is complete."""
        with self._lock, group.journal:
            if self._ended.is_set() or not group.context.is_open:
                return True
            try:
                if not begin_trim(group, group.config.idle_prefixes):
                    return False
                group.context.trim(0)
                if group.config.idle_compact and group.parts.owns_context:
                    compact(group, None)
                _log.debug("idle: trimmed, %d pages stay", group.reclaimer.held)
            except VMemError as error:
                group.reclaimer.errors.append(error)  # the next step raises it
            return True
