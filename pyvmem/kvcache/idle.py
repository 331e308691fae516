# SPDX-License-Identifier: MIT
"""The thread that trims a cache while no call is made."""

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

IDLE_SECONDS = 0.5  # `KVCacheConfig.idle_seconds` of None, where the context is the cache's own
_LOOKS = 4  # within idle_seconds, so that what is idle is trimmed a quarter late at most
_PAUSE_S = 0.001  # between two pieces of it, so that a waiting call gets the lock


def _activity(manager: Manager) -> list[tuple[int, int, int, int]]:
    """Differs after every call that takes, frees or steps a request."""
    return [group.activity() for group in manager.groups]


class IdleThread:
    """Trims a cache once for every time that it is idle for so long; ends with the cache.

    An idle engine makes no calls, so its calls cannot notice that it is. A thread looks a few times
    within `idle_seconds` whether a request was taken, given back or stepped, which costs those
    calls nothing. What lives moves together slab by slab (`Context.compact`), and the lock is free
    between two: a call that comes in waits for one, half of whose pages at most are copied and
    mapped again, and ends it.

    What is no failure of the cache's own, such as an error of torch for an event, is logged the
    first time; the next look tries again.

    Args:
        manager: of the cache that is trimmed.
        seconds: how long it is idle first.

    Attributes:
        running: it was started, and has not ended.
    """

    def __init__(self, manager: Manager, seconds: float) -> None:
        self.running = False
        self._manager = weakref.ref(manager)
        self._period = seconds / _LOOKS
        self._ended = Flag()
        self._seen: list[tuple[int, int, int, int]] = []
        self._quiet = 0  # looks in a row that saw the same
        self._trimmed = False
        self._failed = False

    def start(self) -> None:
        """Starts it; the process does not wait for its end."""
        self.running = True
        start_new_thread(self._watch, ())

    def end(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    _log.exception("an idle cache could not be trimmed; it will be tried again")
                self._failed = True
        self.running = False

    def _look(self) -> None:
        """Trims when nothing happened in the last looks. Keeps no reference to the cache."""
        manager = self._manager()
        if manager is None:
            self.end()
            return
        now = _activity(manager)
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            pieces = (self._store, self._trim, self._compact)
            self._trimmed = all(self._run(manager, piece) for piece in pieces)

    def _run(self, manager: Manager, piece: Callable[[Manager], bool | None]) -> bool:
        """Repeats a piece of work, each time with the lock, until it has no more to do.

        Returns:
            Whether it is complete, or will not be; False: the next look goes on.
        """
        more: bool | None = True
        while more:
            with manager.lock, manager.journal:
                if self._ended.is_set() or manager.closed or not manager.context.is_open:
                    return True
                if _activity(manager) != self._seen:
                    return False
                try:
                    more = piece(manager)
                except VMemError as error:
                    manager.groups[0].reclaimer.errors.append(error)  # the next step raises it
                    return True
            self._ended.wait(_PAUSE_S)
        return more is not None

    @staticmethod
    def _store(manager: Manager) -> bool | None:
        """Evicts prefixes to host memory. True: there may be more. None: work goes on."""
        config, prefixes = manager.groups[0].config, manager.groups[0].prefixes
        if not config.host_prefixes or not config.idle_prefixes:
            return False
        if last_work(manager.groups):
            return None
        return prefixes.evict_units(prefixes.host.step) is not None

    @staticmethod
    def _trim(manager: Manager) -> bool | None:
        """Unmaps, and gives empty slabs back. False: done. None: some must wait."""
        groups, prefixes = manager.groups, manager.groups[0].config.idle_prefixes
        how = "host" if prefixes else False
        done = [begin_trim(group, how, kept=prefixes) for group in groups]  # in each
        if not all(done):
            return None
        manager.context.trim(0)
        _log.debug("idle: trimmed, %d pages stay", sum(one.reclaimer.held for one in groups))
        return False

    @staticmethod
    def _compact(manager: Manager) -> bool | None:
        """Empties one slab, where that is safe. True: there may be more. None: work goes on."""
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
