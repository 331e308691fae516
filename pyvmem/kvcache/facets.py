# SPDX-License-Identifier: MIT
"""The attributes `memory`, `slots` and `internals` of a `KVCache`.

Everybody needs a cache's own methods; these are for engines that plan memory, for programs that
choose slots themselves, and for layers on top of the cache.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pyvmem.kvcache import admission, forks, prefix_alloc, requests, truncation, waits
from pyvmem.kvcache.checks import bounded, invalid
from pyvmem.kvcache.common_pages import CommonPages
from pyvmem.kvcache.config import MOST_BYTES
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.prefix_tree import Change

__all__ = ["CacheMemory", "CacheSlots", "Facet", "Internals"]


class Facet:
    """A cache's manager, and what its calls take from it."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._open, self._groups = manager, manager.open, manager.groups
        self._lock, self._journal = manager.lock, manager.journal

    def __repr__(self) -> str:
        names = [name for name in vars(type(self)) if not name.startswith("_")]
        return f"<{type(self).__name__}: {', '.join(names)}>"


class CacheMemory(Facet):
    """`KVCache.memory`: what calls need, what there is, and the limit.

    `for_request`, `for_step`, `for_truncate` and `for_fork` return the bytes that the call lacks;
    `obtainable` the bytes that requests could still get.
    """

    @property
    def num_free_pages(self) -> int:
        """Physical pages that the cache could take without reclaiming any.

        A request can also get `CacheStats.cached_pages`, which are reclaimed when needed. With a
        budget: what the other caches leave now.
        """
        with self._lock, self._journal:
            return admission.free_pages(self._open())

    def for_request(self, reqid: int | None, seq_len: int, match: PrefixMatch | None = None) -> int:
        """Bytes, in all tensors together, that a request lacks to hold `seq_len` tokens.

        Args:
            reqid: a taken slot; None: a request that has none yet.
            seq_len: tokens.
            match: with None, a leased match that it begins with: pages that it shares are there.

        Raises:
            InvalidArgument: no such reqid, not taken, or a length out of range.
        """
        with self._lock, self._journal:
            pages = admission.missing(self._open(), reqid, seq_len, match)
            return pages * self._groups[0].layout.page_size

    def for_step(self, seq_lens: Sequence[int]) -> int:
        """`for_request` of all requests together, for a `step` with these numbers.

        Raises InvalidArgument for what `step` refuses.
        """
        with self._lock, self._journal:
            return admission.lacking(self._open(), seq_lens)

    def for_truncate(self, reqid: int, length: int) -> int:
        """Bytes that `truncate` to so many tokens, fewer than are held, needs for its copies.

        Raises InvalidArgument for a reqid that does not exist or is not taken, and for more tokens
        than it holds.
        """
        with self._lock, self._journal:
            return truncation.copied(self._open(), reqid, operator.index(length))

    def for_fork(self, reqid: int, count: int, length: int) -> int:
        """Bytes that `fork_many` of the first tokens of a request needs: what is not shared.

        Raises InvalidArgument for a reqid that does not exist or is not taken, and for more tokens
        than it holds.
        """
        with self._lock, self._journal:
            return forks.forked(self._open(), reqid, operator.index(count), operator.index(length))

    def obtainable(self) -> tuple[int, int]:
        """Bytes that requests could still get, and all that the cache may have.

        The first number counts what is free and what could be reclaimed, recorded prefixes that no
        request uses included.
        """
        with self._lock, self._journal:
            return admission.obtainable(self._open())

    def set_limit(self, pages: int) -> None:
        """Changes how many physical pages the cache may have; nothing is mapped or unmapped.

        Raises:
            InvalidArgument: negative, less than the cache holds now or than its floor, or more than
                2**62 bytes.
            NotSupported: the layers are of several groups, or the ranks of a `ParallelKVCache` have
                agreed on their limit.
        """
        with self._lock, self._journal:
            group = self._manager.only("set_limit", alone="limit")
            group.reclaimer.poll()
            most = MOST_BYTES // group.layout.page_size
            count, held = bounded("pages", pages, 0, most), group.reclaimer.held
            if count < held:
                raise invalid(f"a limit of {count} pages: {held} are behind the cache", limit=held)
            floor = -(-group.config.memory_floor // group.layout.page_size)
            if count < floor:
                raise invalid(f"a limit of {count} pages: the floor is {floor}", limit=floor)
            self._journal.change([[group.reclaimer, "limit", count]])

    def reclaim_free(self, keep: Collection[int] = (), *, wait: bool = False) -> None:
        """Unmaps the pages of free slots in the background, each after its owners' last GPU work.

        Args:
            keep: reqids whose pages stay.
            wait: return when it is done; otherwise slots with a batch in flight are left alone.

        Raises:
            VMemError: a background batch failed (`wait` alone); the cache is consistent.
        """
        with self._lock, self._journal:
            self._open()
        waits.when_clear(
            self._manager, waits.before_reclaim, requests.reclaim_free, keep, wait=wait
        )


class CacheSlots(Facet):
    """`KVCache.slots`: for programs that choose slots themselves, or keep records of them."""

    def claim(self, reqid: int) -> None:
        """Takes one particular free slot, as `KVCache.alloc_reqid` takes the one that fits best.

        Raises:
            InvalidArgument: no such slot, it is taken, or its addresses are lost.
        """
        with self._lock, self._journal:
            requests.claim(self._open(), reqid)

    def is_taken(self, reqid: int) -> bool:
        """True if a request has the slot.

        Raises:
            InvalidArgument: no such slot.
        """
        with self._lock, self._journal:
            return self._open()[0].slot(reqid, taken=False).active

    @property
    def num_free(self) -> int:
        """Slots that a request could get."""
        with self._lock, self._journal:
            groups = self._open()
            requests.sync_free_slots(groups)
            return groups[0].table.free_count

    def owner(self, reqid: int) -> int | None:
        """The number of a slot's present owner, never used before for this slot; None: it is free.

        `owner`, `owners` and `seq_len` serve callers that keep their own records of requests: they
        only read numbers, even while the `journal` settles an interrupted call.

        Raises InvalidArgument for a reqid that does not exist.
        """
        return self.owners([reqid])[0]

    def owners(self, reqids: Sequence[int]) -> list[int | None]:
        """`owner` of several slots."""
        group = self._groups[0]
        slots, reqids = group.table.slots, list(map(operator.index, reqids))
        if reqids and not 0 <= min(reqids) <= max(reqids) < len(slots):
            for reqid in reqids:
                group.slot(reqid, taken=False)  # refuses the wrong one
        return [slots[reqid].owner if slots[reqid].active else None for reqid in reqids]

    def capacity(self, reqid: int) -> int:
        """Tokens that a taken slot has pages for; a `KVCache.step` up to there maps nothing.

        With several groups of layers, that of the group with the fewest.

        Raises:
            InvalidArgument: no such reqid, or it is not taken.
        """
        with self._lock, self._journal:
            groups = self._open()
            index = groups[0].slot(reqid).index
            return min([group.pager.capacity[index] for group in groups])

    def is_ready(self, reqid: int, seq_len: int) -> bool:
        """True if a `step` of a request to so many tokens would neither map nor wait for that.

        True once what `step_async` began has ended, even before a `step` grants it; also if it
        failed, which the next `step` raises.

        Args:
            reqid: a taken slot.
            seq_len: tokens, as in `step`.

        Raises:
            InvalidArgument: no such reqid, not taken, or a length out of range.
        """
        with self._lock, self._journal:
            return admission.is_ready(self._open(), reqid, seq_len)

    def readable_rows(self, reqids: Sequence[int]) -> list[int]:
        """For each reqid, how many rows, from the first on, have memory; 0 for free slots.

        Raises InvalidArgument for a reqid that does not exist.
        """
        with self._lock:
            each = [group.readable_rows(reqids) for group in self._open()]
            return each[0] if len(each) == 1 else list(map(min, *each))

    def first_rows(self, reqids: Sequence[int]) -> list[int]:
        """For each reqid, the first row that has memory: those before it left the window.

        With several groups of layers, the last of their first rows.

        Raises InvalidArgument for a reqid that does not exist.
        """
        with self._lock:
            each = [group.first_rows(reqids) for group in self._open()]
            return each[0] if len(each) == 1 else list(map(max, *each))

    def map_common_pages(self, tokens: int) -> CommonPages:
        """Maps the same first pages in all slots: reqid 0 may write them, the others read them.

        Takes every slot. `CommonPages.renew` gives one to its next request.

        Args:
            tokens: rows that are common, rounded up to whole pages that end with a row.

        Raises:
            InvalidArgument: `tokens` out of range, or a slot is taken. NotSupported: pages cannot
                be mapped twice or read-only here, or layers are of several groups. OutOfMemory: too
                few pages. Nothing changed.
        """
        self._manager.only("map_common_pages", alone="slots")
        return CommonPages(self._manager, tokens)


class Internals(Facet):
    """`KVCache.internals`: for layers on top of a cache, such as `pyvmem.engine.RequestCache`.

    Attributes:
        lock: held by every call. Re-entrant: ``with internals.lock, internals.journal:`` makes
            several calls one. No other thread's call comes in between, and an exception from
            outside (Ctrl-C) completes or undoes all of them together.
        journal: undoes a call that was not completed. A caller that makes several calls one
            makes changes of its own records here, too (`Journal.change`), or registers how to undo
            them (`Journal.on_abort`).
        users: objects with `requests` in the cache, such as a `pyvmem.engine.RequestCache`: while
            one of them has any, the cache is not closed.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager)
        self.lock: AbstractContextManager[Any] = self._lock
        self.journal: Journal = self._journal
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def wait_before(self, look: waits.Look) -> None:
        """Waits, without the lock, for what a call would wait for; `look`: which call.

        A single call does this by itself. Inside `lock` it would wait while holding the lock, so a
        caller that makes several calls one waits first:
        ``cache.wait_before(partial(waits.before_fork, ...))``, `pyvmem.kvcache.waits`.
        """
        waits.clear(self._manager, look)

    def withdraw_prompt(self) -> None:
        """Takes the last `alloc_prefix` out of the counters of prompts.

        For a request that is freed because it could not go on: it will be asked for again.
        """
        with self._lock, self._journal:
            prefix_alloc.withdraw(self._open())

    def prefix_changes(self, after: int | None = None) -> list[Change]:
        """The prefixes recorded and evicted since the last call, for `pyvmem.kv_events`.

        The first call reports what is recorded and starts collecting changes: keep calling, or they
        pile up.

        Args:
            after: `Change.number` of the last one that the caller has taken note of, -1 for none:
                those after it are returned, also if an earlier call returned them to somebody whom
                an exception kept from using them. None: the last one that any call returned.
        """
        with self._lock, self._journal:
            tree = self._open()[0].prefixes.tree
            found = tree.changes_after(tree.told if after is None else operator.index(after))
        if found:
            tree.told = found[-1].number  # last: until then the next call returns them again
        return found
