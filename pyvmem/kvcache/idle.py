# SPDX-License-Identifier: MIT
"""The thread that trims a cache while it is idle."""

from __future__ import annotations

import logging
import weakref
from _thread import start_new_thread
from collections.abc import Callable

from pyvmem.errors import VMemError
from pyvmem.kvcache.events import wait_for_device
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.trim import begin_trim, can_compact, last_work
from pyvmem.plumbing.flag import Flag

__all__ = ["IDLE_SECONDS", "IdleThread"]

_log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # default of `KVCacheConfig.idle_seconds` if the cache owns its context
_LOOKS = 4  # checks per idle_seconds, so a trim is late by at most idle_seconds / _LOOKS
_PAUSE_S = 0.001  # pause between two pieces of work, so that a waiting call gets the lock


class IdleThread:
    """Trims a cache once per idle period, after `seconds` of idleness.

    The thread stops when the cache is closed. An idle engine makes no calls, so calls cannot detect
    that it is idle. Instead, the thread checks a few times within `seconds` whether a request was
    allocated, freed or stepped, at no cost to those calls. Live pages are compacted slab by slab
    (`Context.compact`), with the lock released between slabs: an incoming call waits for one slab
    (at most half of its pages are copied and remapped) and stops the compaction.

    Errors from outside the cache, such as a torch error for an event, are logged the first time;
    the next check retries.

    Args:
        manager: manager of the cache to trim.
        seconds: idle time before trimming.

    Attributes:
        running: True while the thread runs.
    """

    def __init__(self, manager: Manager, seconds: float) -> None:
        self.running = False
        self._manager = weakref.ref(manager)
        self._period = seconds / _LOOKS
        self._ended = Flag()
        self._seen: list[tuple[int, int, int, int]] = []
        self._quiet = 0  # consecutive checks without activity
        self._trimmed = False
        self._failed = False

    def start(self) -> None:
        """Starts the thread, as a daemon: the process can exit while the thread runs."""
        self.running = True
        start_new_thread(self._watch, ())

    def end(self) -> None:
        """Tells the thread to stop, without waiting for it."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    _log.exception("an idle cache could not be trimmed; the next check retries")
                self._failed = True
        self.running = False

    def _look(self) -> None:
        """Trims the cache if the last few checks saw no activity.

        Keeps no reference to the cache between checks.
        """
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
            pieces = (_store, _trim, _compact)
            self._trimmed = all(self._run(manager, piece) for piece in pieces)

    def _run(self, manager: Manager, piece: Callable[[Manager], bool | None]) -> bool:
        """Repeats a piece of work, taking the lock each time, until there is nothing more to do.

        Returns:
            True if the work is complete or cannot be completed; False if the next check must
            continue it.
        """
        more: bool | None = True
        while more:
            with manager.lock, manager.journal:
                if self._ended.is_set() or manager.closed or not manager.context.is_open:
                    return True
                if [group.activity() for group in manager.groups] != self._seen:
                    return False
                try:
                    more = piece(manager)
                except VMemError as error:
                    manager.groups[0].reclaimer.errors.append(error)  # raised by the next step
                    return True
            self._ended.wait(_PAUSE_S)
        return more is not None


def _store(manager: Manager) -> bool | None:
    """Evicts prefixes to host memory.

    Returns True if more work may remain, False when done, and None while GPU work is running.
    """
    config, prefixes = manager.groups[0].config, manager.groups[0].prefixes
    if not config.host_prefixes or not config.idle_prefixes:
        return False
    if last_work(manager.groups):
        return None
    return prefixes.evict_units(prefixes.host.step) is not None


def _trim(manager: Manager) -> bool | None:
    """Unmaps idle pages and gives empty slabs back to the driver.

    Returns False when done, and None while unmaps are in flight.
    """
    groups, prefixes = manager.groups, manager.groups[0].config.idle_prefixes
    how = "host" if prefixes else False
    # Begin unmapping in every group before checking the results.
    done = [begin_trim(group, how, kept=prefixes) for group in groups]
    if not all(done):
        return None
    manager.context.trim(0)
    _log.debug("idle: trimmed, %d pages remain", sum(one.reclaimer.device_pages for one in groups))
    return False


def _compact(manager: Manager) -> bool | None:
    """Compacts a slab if that is safe.

    Returns True if more work may remain, False when done, and None while GPU work is running.
    """
    wanted = manager.groups[0].config.idle_compact
    if wanted is False or not manager.owns_context:
        return False
    if wanted:
        wait_for_device(None, manager.groups[0].device)
    elif not can_compact(manager):
        return False
    elif last_work(manager.groups):
        return None
    return manager.context.compact(1) > 0
