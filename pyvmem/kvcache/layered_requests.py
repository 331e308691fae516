# SPDX-License-Identifier: MIT
"""The calls of `LayeredCache` for requests: each is done in all classes, or in none."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.kvcache import admission, idle, swap, truncate
from pyvmem.kvcache.base import Closing
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.events import record
from pyvmem.kvcache.joint import fork_all
from pyvmem.streams import check

if TYPE_CHECKING:
    from pyvmem.context import Context
    from pyvmem.kvcache.cache import KVCache
    from pyvmem.kvcache.journal import Journal
    from pyvmem.kvcache.leases import PrefixMatch
    from pyvmem.kvcache.swap import SwappedRequest
    from pyvmem.kvcache.turns import Turns

__all__ = ["LayeredRequests"]


class LayeredRequests(Closing):
    """Requests, forks, prefixes, preemption, admission. Part of `LayeredCache`.

    Where layers have a sliding window, what shares or swaps rows is refused with NotSupported, as
    by a `KVCache` with one.
    """

    _lock: Turns
    _journal: Journal
    _owned: Context | None
    caches: tuple[KVCache, ...]

    def _open(self) -> list[Core]:
        """The classes, for a call that holds the lock."""
        raise NotImplementedError

    # ---- requests --------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """As `KVCache.alloc_reqid`; the slot fits the class of the first layer best."""
        with self._lock, self._journal:
            return _alloc(_agreed(self._open()), seq_len)

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """As `KVCache.free_reqid`; with `tokens`, all classes record the request's rows."""
        with self._lock, self._journal:
            cores = self._open()
            slots = [core.slot(reqid) for core in cores]
            event = record(stream, cores[0].device)
            if tokens is not None:
                cores[0].prefixes.record_last(slots[0], tokens, event, namespace)
            for core, slot in zip(cores, slots, strict=True):
                core.mover.abandon(slot)
            for core, slot in zip(cores, slots, strict=True):
                core.release(slot, event)
            for core in cores:
                core.prepare()
                core.tidy()

    def truncate(self, reqid: int, length: int, stream: Any = None) -> int:
        """As `KVCache.truncate`, in all classes or in none."""
        with self._lock, self._journal:
            return truncate.truncate(self._open(), reqid, length, stream)

    # ---- forks -----------------------------------------------------------------------------------

    def fork(self, reqid: int, length: int | None = None, stream: Any = None) -> int | None:
        """As `KVCache.fork`: in every class the full pages are shared, and the last one copied."""
        forked = self.fork_many(reqid, 1, length, stream)
        return None if forked is None else forked[0]

    def fork_many(
        self, reqid: int, count: int, length: int | None = None, stream: Any = None
    ) -> list[int] | None:
        """`fork` for `count` new requests: all of them, in all classes, or none.

        Where a class fails, the others have given up what they forked; the parent's full pages may
        be read-only already.
        """
        check(stream)
        with self._lock, self._journal:
            cores = _agreed(self._open())
            forked = fork_all(cores, reqid, operator.index(count), length, stream)
            for core in cores:
                core.prepare()
            return forked

    # ---- prefixes --------------------------------------------------------------------------------

    @property
    def sharing_unit(self) -> int:
        """As `KVCache.sharing_unit`: the fewest tokens that fill whole pages in every class."""
        return self.caches[0].sharing_unit

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """As `KVCache.record`. After a failure, pages of the request may be read-only already."""
        check(stream)
        with self._lock, self._journal:
            core = self._open()[0]
            return core.prefixes.record(core.slot(reqid), tokens, stream, namespace)

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """As `KVCache.match`."""
        with self._lock, self._journal:
            return self._open()[0].prefixes.match(tokens, leave, namespace)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """As `KVCache.alloc_prefix`."""
        check(stream)
        with self._lock, self._journal:
            cores = _agreed(self._open())
            prefixes = cores[0].prefixes
            match, length = prefixes.wanted(tokens, leave, namespace)
            try:
                begins = prefixes.can_begin(match)
                if begins:
                    reqid = prefixes.alloc(match, stream)
                    for core in cores:
                        core.prepare()
                else:
                    reqid = _alloc(cores, length)
            finally:
                if match is not tokens:
                    match.release()
            return None if reqid is None else (reqid, match.length if begins else 0)

    # ---- preemption and admission ----------------------------------------------------------------

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """As `KVCache.swap_out`."""
        check(stream)
        with self._lock, self._journal:
            cores = self._open()
            return swap.swap_out(cores, reqid, stream)

    def swap_in(self, swapped: SwappedRequest, stream: Any = None) -> int | None:
        """As `KVCache.swap_in`; the slot fits the class of the first layer best."""
        check(stream)
        with self._lock, self._journal:
            return swap.swap_in(_agreed(self._open()), swapped, stream)

    def can_admit(
        self, seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None = None
    ) -> bool:
        """As `KVCache.can_admit`."""
        with self._lock, self._journal:
            return admission.can_admit(self._open(), seq_lens, matches)

    def trim(self, prefixes: bool = False, compact: bool = False, stream: Any = None) -> int:
        """As `KVCache.trim`; returns the bytes given back to the device."""
        check(stream)
        with self._lock, self._journal:
            cores = self._open()
            before = cores[0].context.stats().slab_bytes
            for cache in self.caches:
                cache.trim(prefixes)
            if compact:
                idle.compact(cores[0], stream, owned=self._owned is not None)
            return max(0, before - cores[0].context.stats().slab_bytes)


def _agreed(cores: list[Core]) -> list[Core]:
    """The same, with the same free slots: one that a failure broke in one class is none's."""
    for core in cores:
        core.reclaimer.poll()
        core.pager.poll()
    if len({len(core.table.free) for core in cores}) > 1:
        broken = {slot.index for core in cores for slot in core.table if slot.broken}
        for core in cores:
            for index in broken:
                core.table.condemn(core.table[index])
    return cores


def _alloc(cores: list[Core], seq_len: int) -> int | None:
    """Takes the slot that fits the first class best, in all of them."""
    found = cores[0].fit(seq_len)
    if found is None:
        return None
    for core in cores:
        core.take(core.table[found.index])
    for core in cores:
        core.prepare()
    return found.index
