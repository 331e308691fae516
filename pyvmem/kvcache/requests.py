# SPDX-License-Identifier: MIT
"""The calls of `KVCache` for what requests share, and for memory that is short or idle."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

from pyvmem.kvcache import admission, fork, idle, swap
from pyvmem.kvcache.base import CacheBase
from pyvmem.kvcache.leases import PrefixMatch
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.streams import check

__all__ = ["RequestCalls"]


class RequestCalls(CacheBase):
    """Forks, prefixes, preemption, admission. Part of `KVCache`."""

    # ---- forks -----------------------------------------------------------------------------------

    def fork(
        self,
        reqid: int,
        length: int | None = None,
        stream: Any = None,
        into: int | None = None,
    ) -> int | None:
        """A new request that begins with the rows of another, for sampling or beam search.

        Both share the pages that are full below `length`, read-only from then on: a write to one
        faults. Only the last, partly filled page is copied, in every tensor. So neither may write
        rows below `length` again, and each may append as if it were alone. (Who must write them
        again gives them up first: `truncate`.)

        Waits for the GPU work on `stream` where pages were written since the last fork.

        Args:
            reqid: the parent; it goes on as before.
            length: tokens that the new request begins with; None: all that the parent holds.
            stream: the stream (or event) of the parent's last work, as in `free_reqid`.
            into: the reqid that the new request shall have; None: any that is free.

        Returns:
            The new reqid, which holds `length` tokens; None when no slot is free or memory is
            short. Then nothing changed, except that pages of no request may have been reclaimed
            and that the parent's full pages may be read-only already.

        Raises:
            InvalidArgument: no such reqid, not taken, or it holds fewer tokens than `length`;
                `into` is not free.
            NotSupported: the back end cannot map pages twice, or read-only; the cache has a window.
            NotRecoverable: undoing failed, and the text names the reqid that must be freed.
            VMemError: the driver failed; as for None.
        """
        forked = self.fork_many(reqid, 1, length, stream, None if into is None else [into])
        return None if forked is None else forked[0]

    def fork_many(
        self,
        reqid: int,
        count: int,
        length: int | None = None,
        stream: Any = None,
        into: Sequence[int] | None = None,
    ) -> list[int] | None:
        """`fork` for `count` new requests, with one batch for all: all of them or none.

        `into` names as many different free reqids, in the order of what is returned.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            forked = fork.fork(core, reqid, operator.index(count), length, stream, into)
            core.prepare()
            return forked

    # ---- prefixes --------------------------------------------------------------------------------

    @property
    def sharing_unit(self) -> int:
        """Tokens that prefixes are recorded and matched in: the fewest that fill whole pages.

        ``lcm(row_bytes, page_size) / row_bytes``, since the row that crosses a page's end would
        have to be written into a page that others share.
        """
        return self._core.prefixes.tree.unit

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """Records the rows of a running request under their tokens, for later ones to begin with.

        Their pages become read-only. For a finished request `free_reqid` with `tokens` does the
        same without mapping anything again. What is recorded stays until memory is short or `trim`
        asks for it: least recently used first, and only when no page of a free slot is left.

        Waits for the GPU work on `stream` where something new is recorded.

        Args:
            reqid: the request.
            tokens: the ids whose keys and values its first rows hold (`TokenIds` says in which
                forms). Those behind the rows that it holds, such as a last token that was not
                computed yet, are left out, and those behind the last whole `sharing_unit`.
            stream: as in `free_reqid`.
            namespace: what the rows depend on beside the ids, such as an adapter, an image or a
                tenant; only matches with the same one find them.

        Returns:
            The tokens, from the first on, that are recorded now.

        Raises:
            InvalidArgument: bad tokens or namespace, or a reqid that is not taken.
            NotSupported, NotRecoverable, VMemError: as `fork`.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            return core.prefixes.record(core.slot(reqid), tokens, stream, namespace)

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """How much of a prompt is recorded, as a lease: what matches is kept from eviction.

        The lease ends when `alloc_prefix` has used the match, when it is released or collected, and
        with ``trim(prefixes=True)``; memory that it keeps counts as no request's, but nobody gets
        it. Counts as a use of the prefix.

        Args:
            tokens: the prompt.
            leave: tokens at its end that are not matched: an engine must compute the last one.
            namespace: as in `record`.

        Raises:
            InvalidArgument: bad tokens or namespace, or a negative `leave`.
        """
        with self._lock, self._journal:
            return self._open_core().prefixes.match(tokens, leave, namespace)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """Takes a slot for a prompt, with the longest recorded prefix mapped there, read-only.

        Args:
            tokens: the prompt, or what `match` returned for it.
            leave: as in `match`; not used with a match.
            stream: the stream that will read the rows; it is made to wait for the work that wrote
                them.
            namespace: as in `record`; not used with a match.

        Returns:
            The reqid and the tokens that it holds already; 0 where nothing is recorded, or where no
            slot could be emptied without a wait for GPU work of its earlier owner; None, with
            nothing changed, when every slot is taken or memory is short. With 0 and None a match
            keeps its lease.

        Raises:
            InvalidArgument: bad tokens or namespace, more tokens than `max_seq_len`, or another
                cache's match.
            PrefixEvicted: the match has lost its lease, and the prefix is not recorded any more.
            NotSupported: as `fork`. VMemError: the driver failed; nothing changed.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            match, length = core.prefixes.wanted(tokens, leave, namespace)
            try:
                if not core.prefixes.can_begin(match):
                    reqid = core.alloc(length)
                    return None if reqid is None else (reqid, 0)
                reqid = core.prefixes.alloc(match, stream)
            finally:
                if match is not tokens:
                    match.release()
            core.prepare()
            return None if reqid is None else (reqid, match.length)

    # ---- preemption and admission ----------------------------------------------------------------

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """Copies a request's rows to host memory and frees it, for `swap_in` later.

        Waits for the GPU work on `stream`, then for the copy. (To preempt by computing again,
        `free_reqid` is all there is to do.)

        Args:
            reqid: the request; free afterwards.
            stream: as in `free_reqid`.

        Raises:
            InvalidArgument: no such reqid, or it is not taken.
            NotSupported: the cache has a window.
            MemoryError: no host memory; nothing changed. VMemError: as `step`; nothing changed.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            return swap.swap_out([core], reqid, stream)

    def swap_in(self, swapped: SwappedRequest, stream: Any = None) -> int | None:
        """Brings a swapped request back, into any slot.

        Args:
            swapped: of this cache; closed afterwards.
            stream: the stream that will use the rows. Waits for it, and for the copy.

        Returns:
            The reqid, which holds the request's tokens; None when no slot is free or memory is
            short although all of no request was reclaimed: then `swapped` is as before.

        Raises:
            InvalidArgument: another cache's. BadHandle: closed, or swapped in before.
            VMemError: the driver failed; `swapped` is as before.
        """
        check(stream)
        with self._lock, self._journal:
            return swap.swap_in([self._open_core()], swapped, stream)

    def can_admit(
        self, seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None = None
    ) -> bool:
        """Whether new requests of so many tokens would all fit now, beside the present ones.

        Counts free slots, mappings that the context may still make, and all that is free or could
        be reclaimed, recorded prefixes that no request uses and no match leases included. Says
        nothing of memory that others take from the device. Waits for fills that are in flight.

        Args:
            seq_lens: tokens of each request, with those of its prefix.
            matches: for each request, the match that it will begin with, or None: the pages of that
                are there, and need not be found. None: no request has one. A lease that was lost is
                taken again. An engine that asks with the match is never refused for ever by an idle
                cache that could serve the request.

        Raises:
            InvalidArgument: a length that is negative or above `max_seq_len`; not one match, or
                None, for each; a match longer than its request, or another cache's.
            PrefixEvicted: as in `alloc_prefix`.
        """
        with self._lock, self._journal:
            return admission.can_admit([self._open_core()], seq_lens, matches)

    def trim(self, prefixes: bool = False, compact: bool = False, stream: Any = None) -> int:
        """Unmaps all pages of no request and gives the pool's free memory back to the device.

        Waits for the GPU work on freed slots.

        Args:
            prefixes: evict the recorded prefixes that no request uses, too.
            compact: also move pages of running requests and recorded prefixes together, so that the
                memory between them goes back (`Context.compact`). Waits for all work of the device;
                none may be launched on the cache until this returns.
            stream: with `compact`, the stream of the last work on running requests, as in `step`.

        Returns:
            Bytes that the context has given back to the device meanwhile.

        Raises:
            NotSupported: `compact` in a context that is not the cache's own.
            VMemError: a batch failed; its pages are still there, the cache is consistent.
        """
        check(stream)
        with self._lock, self._journal:
            return idle.trim(self._open_core(), prefixes, compact, stream)
