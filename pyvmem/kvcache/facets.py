# SPDX-License-Identifier: MIT
"""The attributes `memory`, `slots` and `internals` of a `KVCache`.

Most engines need only the cache's own methods. These attributes are for engines that plan memory,
for programs that choose slots themselves, and for code built on the cache.
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
    """Base class of the attributes: holds a cache's manager, lock and journal."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self._open, self._groups = manager, manager.open, manager.groups
        self._lock, self._journal = manager.lock, manager.journal

    def __repr__(self) -> str:
        names = [name for name in vars(type(self)) if not name.startswith("_")]
        return f"<{type(self).__name__}: {', '.join(names)}>"


class CacheMemory(Facet):
    """`KVCache.memory`: how much memory calls need, how much is available, and the limit.

    `for_request`, `for_step`, `for_truncate` and `for_fork` return how many bytes the call would
    have to allocate; `obtainable` returns how many bytes requests could still get.
    """

    @property
    def num_free_pages(self) -> int:
        """The number of physical pages that the cache could allocate without reclaiming any.

        A request can also get `CacheStats.cached_pages`, which are reclaimed when needed. With a
        budget, this is the number of pages that the other caches currently leave free.
        """
        with self._lock, self._journal:
            return admission.free_pages(self._open())

    def for_request(self, reqid: int | None, seq_len: int, match: PrefixMatch | None = None) -> int:
        """Returns how many more bytes, in all tensors, a request needs to hold `seq_len` tokens.

        Args:
            reqid: a slot in use; None: a request that has no slot yet.
            seq_len: number of tokens that the request must hold.
            match: if `reqid` is None, a leased match that the request will begin with; its pages
                are not counted.

        Raises:
            InvalidArgument: the reqid does not exist or is free, or a length is out of range.
        """
        with self._lock, self._journal:
            pages = admission.missing(self._open(), reqid, seq_len, match)
            return pages * self._groups[0].layout.page_size

    def for_step(self, seq_lens: Sequence[int]) -> int:
        """Returns `for_request` summed over all requests, for a `step` to these lengths.

        Raises InvalidArgument for lengths that `step` rejects.
        """
        with self._lock, self._journal:
            return admission.lacking(self._open(), seq_lens)

    def for_truncate(self, reqid: int, length: int) -> int:
        """Returns the number of bytes that `truncate` to `length` tokens needs for copies.

        Raises InvalidArgument if the reqid does not exist, is free, or holds fewer than `length`
        tokens.
        """
        with self._lock, self._journal:
            return truncation.copied(self._open(), reqid, operator.index(length))

    def for_fork(self, reqid: int, count: int, length: int) -> int:
        """Returns the number of bytes that `fork_many` needs for pages that cannot be shared.

        Raises InvalidArgument if the reqid does not exist, is free, or holds fewer than `length`
        tokens.
        """
        with self._lock, self._journal:
            return forks.forked(self._open(), reqid, operator.index(count), operator.index(length))

    def obtainable(self) -> tuple[int, int]:
        """Returns how many bytes requests could still get, and the most that the cache may use.

        The first number counts free and reclaimable memory, including recorded prefixes that no
        request uses.
        """
        with self._lock, self._journal:
            return admission.obtainable(self._open())

    def set_limit(self, pages: int) -> None:
        """Changes how many physical pages the cache may use, without mapping or unmapping anything.

        Raises:
            InvalidArgument: the number is negative, less than the cache holds now, less than its
                floor, or more than 2**62 bytes.
            NotSupported: the layers form several groups, or it is a `ParallelKVCache`, whose ranks
                have agreed on a limit.
        """
        with self._lock, self._journal:
            group = self._manager.only("set_limit", alone="limit")
            group.reclaimer.poll()
            most = MOST_BYTES // group.layout.page_size
            count, held = bounded("pages", pages, 0, most), group.reclaimer.device_pages
            if count < held:
                raise invalid(f"a limit of {count} pages: the cache has {held}", limit=held)
            floor = -(-group.config.memory_floor // group.layout.page_size)
            if count < floor:
                raise invalid(f"a limit of {count} pages: the floor is {floor}", limit=floor)
            self._journal.change([[group.reclaimer, "limit", count]])

    def reclaim_free(self, keep: Collection[int] = (), *, wait: bool = False) -> None:
        """Unmaps free slots' pages in the background, once their last owners' GPU work is done.

        Args:
            keep: reqids whose pages stay mapped.
            wait: wait until this is done; otherwise slots with a batch in flight are skipped.

        Raises:
            VMemError: a background batch failed (only with `wait`); the cache is consistent.
        """
        with self._lock, self._journal:
            self._open()
        waits.when_clear(
            self._manager, waits.before_reclaim, requests.reclaim_free, keep, wait=wait
        )


class CacheSlots(Facet):
    """`KVCache.slots`: for programs that choose slots or keep their own records of slots."""

    def claim(self, reqid: int) -> None:
        """Allocates a particular free slot.

        `KVCache.alloc_reqid`, in contrast, chooses the best fit.

        Raises:
            InvalidArgument: the slot does not exist, is in use, or is retired.
        """
        with self._lock, self._journal:
            requests.claim(self._open(), reqid)

    def is_taken(self, reqid: int) -> bool:
        """Returns whether a request owns the slot.

        Raises:
            InvalidArgument: the slot does not exist.
        """
        with self._lock, self._journal:
            return self._open()[0].slot(reqid, taken=False).active

    @property
    def num_free(self) -> int:
        """The number of slots available to new requests."""
        with self._lock, self._journal:
            groups = self._open()
            requests.sync_free_slots(groups)
            return groups[0].table.free_count

    def owner(self, reqid: int) -> int | None:
        """Returns a slot's owner number, which changes with each owner; None if the slot is free.

        `owner`, `owners` and `seq_len` are for callers that keep their own records of requests:
        they only read plain fields, so they work even while the `journal` recovers an interrupted
        call.

        Raises InvalidArgument for a reqid that does not exist.
        """
        return self.owners([reqid])[0]

    def owners(self, reqids: Sequence[int]) -> list[int | None]:
        """Returns each slot's `owner`."""
        group = self._groups[0]
        slots, reqids = group.table.slots, list(map(operator.index, reqids))
        if reqids and not 0 <= min(reqids) <= max(reqids) < len(slots):
            for reqid in reqids:
                group.slot(reqid, taken=False)  # raises for the bad reqid
        return [slots[reqid].owner if slots[reqid].active else None for reqid in reqids]

    def capacity(self, reqid: int) -> int:
        """Returns the number of tokens that a slot in use has pages for.

        A `step` up to this number does not map any pages. With several groups of layers, this is
        the minimum over the groups.

        Raises:
            InvalidArgument: the reqid does not exist or is free.
        """
        with self._lock, self._journal:
            groups = self._open()
            index = groups[0].slot(reqid).index
            return min([group.pager.capacity[index] for group in groups])

    def is_ready(self, reqid: int, seq_len: int) -> bool:
        """Returns whether a `step` of a request to `seq_len` tokens would neither map nor wait.

        True once growth that `step_async` started is complete, even before a `step` grants its
        pages. Also True if that growth failed; the next `step` reports the failure.

        Args:
            reqid: a slot in use.
            seq_len: number of tokens, as in `step`.

        Raises:
            InvalidArgument: the reqid does not exist or is free, or the length is out of range.
        """
        with self._lock, self._journal:
            return admission.is_ready(self._open(), reqid, seq_len)

    def readable_rows(self, reqids: Sequence[int]) -> list[int]:
        """Returns, for each reqid, the number of rows up to the end of its pages.

        The number includes rows that have left the window (`first_rows`); it is 0 for free slots.
        With several groups of layers, this is the minimum over the groups.

        Raises InvalidArgument for a reqid that does not exist.
        """
        with self._lock:
            each = [group.readable_rows(reqids) for group in self._open()]
            return each[0] if len(each) == 1 else list(map(min, *each))

    def first_rows(self, reqids: Sequence[int]) -> list[int]:
        """Returns, for each reqid, the first mapped row; earlier rows have left the window.

        With several groups of layers, this is the maximum over the groups.

        Raises InvalidArgument for a reqid that does not exist.
        """
        with self._lock:
            each = [group.first_rows(reqids) for group in self._open()]
            return each[0] if len(each) == 1 else list(map(max, *each))

    def map_common_pages(self, tokens: int) -> CommonPages:
        """Maps the same pages at the start of every slot, read-only except for reqid 0.

        Allocates every slot. `CommonPages.renew` prepares a slot for its next request.

        Args:
            tokens: number of common rows, rounded up so that the last page ends on a row boundary.

        Raises:
            InvalidArgument: `tokens` is out of range, or a slot is in use. NotSupported: the back
                end cannot map pages twice or read-only, or the layers form several groups.
                OutOfMemory: there are too few pages. Nothing has changed.
        """
        self._manager.only("map_common_pages", alone="slots")
        return CommonPages(self._manager, tokens)


class Internals(Facet):
    """`KVCache.internals`: for code built on a cache, such as `pyvmem.engine.RequestCache`.

    Attributes:
        lock: re-entrant; held during every call. ``with internals.lock, internals.journal:`` makes
            several calls atomic: no other thread's call comes in between, and after an asynchronous
            exception (Ctrl-C) all of them are completed or all are undone.
        journal: undoes a call that did not complete. A caller that makes several calls atomic
            changes its own records through it (`Journal.change`), or registers how to undo the
            changes (`Journal.on_abort`).
        users: objects with `requests` in the cache, such as a `pyvmem.engine.RequestCache`: the
            cache cannot be closed while one of them has requests.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager)
        self.lock: AbstractContextManager[Any] = self._lock
        self.journal: Journal = self._journal
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def wait_before(self, find_blockers: waits.FindBlockers) -> None:
        """Waits, without the lock, for the blockers of a call, which `find_blockers` lists.

        A single call does this itself, but inside `lock` it would hold the lock while waiting. So a
        caller that makes several calls atomic waits first:
        ``cache.internals.wait_before(partial(waits.before_fork, ...))``; see
        `pyvmem.kvcache.waits`.
        """
        waits.clear(self._manager, find_blockers)

    def withdraw_prompt(self) -> None:
        """Removes the last `alloc_prefix` from the prompt counters.

        Call it when a request is freed because it cannot run yet, since its prompt will be looked
        up again.
        """
        with self._lock, self._journal:
            prefix_alloc.withdraw(self._open())

    def prefix_changes(self, after: int | None = None) -> list[Change]:
        """Returns the prefixes recorded and evicted since the last call, for `pyvmem.kv_events`.

        The first call reports everything recorded and starts collecting changes. The caller must
        then keep calling, or the changes accumulate.

        Args:
            after: `Change.number` of the last change that the caller has processed, -1 for none.
                Later changes are returned, even if an earlier call returned them already but the
                caller was interrupted by an exception. None: the last change that any call
                returned.
        """
        with self._lock, self._journal:
            tree = self._open()[0].prefixes.tree
            found = tree.changes_after(tree.told if after is None else operator.index(after))
        if found:
            # Set last: if this call is interrupted earlier, the next one returns them again.
            tree.told = found[-1].number
        return found
