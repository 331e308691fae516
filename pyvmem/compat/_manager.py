# SPDX-License-Identifier: MIT
"""The cache behind `pyvmem.compat.vattention`, and the length of each id's request."""

from __future__ import annotations

import atexit
import errno
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyvmem.errors import Busy, OutOfMemory
from pyvmem.kvcache import CommonPages, KVCache, KVCacheConfig
from pyvmem.memory.context import Context
from pyvmem.memory.info import KEEP_ALL
from pyvmem.plumbing.validation import invalid

if TYPE_CHECKING:
    import torch

__all__ = ["Manager", "OutOfKVBlocks", "close_retired"]


class OutOfKVBlocks(OutOfMemory, RuntimeError):
    """A step needs more pages than the cache has. Also a RuntimeError, as in the artifact."""


# Caches that have ended and hold no memory, but whose addresses the program's tensors still use.
_retired: list[KVCache] = []


def close_retired() -> None:
    """Closes the ended caches whose tensors have been garbage-collected."""
    for cache in list(_retired):
        try:
            cache.close()
        except Busy:
            continue
        cache.context.close()
        _retired.remove(cache)


atexit.register(close_retired)


class Manager:
    """A cache that lets its caller choose ids, and whose tensors exist before it has memory.

    Attributes:
        cache: the cache; it has its own context.
        megacache: all layers share one K and one V tensor.
        lengths: number of tokens of each id, as passed to `alloc` and `step`; 0 for a free id.
        common: the pages that all ids share; None before `map_common`.
    """

    def __init__(
        self, *, backend: str, device: Any, page_size: int, megacache: bool, **shape: Any
    ) -> None:
        if not page_size:
            raise invalid("page_size is 0; it must be a power of two", op="vattention")
        group = shape["num_layers"] if megacache else 1
        config = KVCacheConfig(page_size=page_size, group_size=group, **shape)
        if not config.max_seq_len * config.row_bytes % page_size:
            config = replace(config, packed_slots=True)
        # As in the artifact, memory is returned to the driver only at the end.
        context = Context(backend, device=device, granule=page_size, pool_high=KEEP_ALL)
        context.remains.unclaimed = True
        try:
            self.cache = KVCache(config, context)
            self.cache.memory.set_limit(0)
            context.remains.unclaimed = True  # no caller has used the cache yet
            self.megacache = bool(megacache)
            self.lengths = [0] * config.max_batch
            self.common: CommonPages | None = None
        except BaseException:
            context.close()
            raise

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens whose rows fit in a page."""
        return self.cache.layout.page_size // self.cache.layout.row_bytes

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors in the artifact's order and shapes; see `vattention.init_kvcache`."""
        cache, layers = self.cache, self.cache.config.num_layers
        if self.megacache:
            return cache.tensors
        return [view(layer) for view in (cache.k, cache.v) for layer in range(layers)]

    def reserve(self, nbytes: int) -> int:
        """Raises the cache's limit to `nbytes` bytes; returns the cache's number of pages."""
        page, layers = self.cache.layout.page_size, self.cache.config.num_layers
        least = 2 * layers * page
        if nbytes < least:
            raise invalid(
                f"reserve_physical_pages({nbytes}): one page of {page} bytes for K and V of "
                f"{layers} layers is {least}",
                size=max(0, nbytes),
                limit=least,
                op="vattention",
            )
        stats = self.cache.stats()
        pages = max(nbytes // least * 2 * layers, stats.total_pages)
        self.cache.context.warm((pages - stats.total_pages + stats.free_pages) * page)
        self.cache.memory.set_limit(pages)
        return pages

    # ---- requests ------------------------------------------------------------------------------

    def alloc(self, length: int) -> int:
        """Allocates an id and returns it; -1 if none is free."""
        common, reqid = self.common, None
        if common is None:
            reqid = self.cache.alloc_reqid(length)
        else:
            self.cache.memory.for_request(None, length)  # raises if the length is out of range
            if not common.idle:
                for index in range(len(self.lengths)):
                    if not self.cache.slots.is_taken(index):  # freed by an earlier, failed call
                        common.renew(index)
            reqid = min(common.idle, default=None)
        if reqid is None:
            return -1
        if common is not None:
            common.idle.remove(reqid)
        self.lengths[reqid] = operator.index(length)
        return reqid

    def free(self, reqid: int) -> None:
        """Frees a request's id; does nothing if the id is already free."""
        index, last = operator.index(reqid), len(self.lengths) - 1
        if not 0 <= index <= last:
            raise invalid(
                f"free_batch_idx({index}): ids are 0 to {last}", limit=last, op="vattention"
            )
        if self.common is not None:
            if index not in self.common.idle:  # in use, or an earlier call failed to free it
                self.common.renew(index)
        elif self.cache.slots.is_taken(index):
            self.cache.free_reqid(index)
        self.lengths[index] = 0

    def free_blocks(self) -> int:
        """Returns how many KV blocks the requests do not need at their current lengths."""
        total = self.cache.stats().total_pages // self.cache.layout.num_tensors
        return max(0, total - self._needed(self.lengths))

    def map_common(self, tokens: int) -> None:
        """Maps the pages that all ids share; see `vattention.map_common_pages`."""
        taken = [index for index in range(len(self.lengths)) if self._taken(index)]
        if self.common is not None or taken:
            what = "there are some" if self.common is not None else f"id {taken[0]} is taken"
            raise Busy(
                f"map_common_pages({tokens}): {what}; call it once, before the first request",
                errno=errno.EBUSY,
                op="map_common_pages",
            )
        try:
            with self.cache.internals.lock, self.cache.internals.journal:
                common = self.cache.slots.map_common_pages(tokens)
                self.cache.internals.journal.change([[self, "common", common]])
        except OutOfMemory:
            raise self._short([tokens]) from None

    def _needed(self, lengths: Sequence[int]) -> int:
        """Returns the number of KV blocks needed for these lengths; common blocks count once."""
        common = 0 if self.common is None else self.common.pages
        own = (self.cache.layout.pages_for(length) - common for length in lengths)
        return common + sum(max(0, pages) for pages in own)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, seq_lens: Sequence[int]) -> None:
        """Applies new lengths: frees ids of length 0, truncates, claims new ids, and maps pages.

        Either all ids are claimed and all pages mapped, or none.
        """
        lengths = self._checked(seq_lens)
        claimed = []
        for index, length in enumerate(lengths):
            if not length:
                self.free(index)
            elif length < self.lengths[index] and self._taken(index):
                self._truncate(index, length)
        try:
            for index, length in enumerate(lengths):
                if not length or self.cache.slots.is_taken(index):
                    continue
                if self.common is not None:
                    self.common.renew(index)
                else:
                    self.cache.slots.claim(index)
                    claimed.append(index)
            if self.cache.step(lengths) == -1:
                self._give_up_ahead()
                if self.cache.step(lengths) == -1:
                    raise self._short(lengths)
        except BaseException:
            for index in claimed:
                self.cache.free_reqid(index)
            raise
        if self.common is not None:
            self.common.idle -= {index for index, length in enumerate(lengths) if length}
        self.lengths = lengths

    def _truncate(self, index: int, length: int) -> None:
        """Truncates a request; always keeps the common pages."""
        rows = length
        if self.common is not None:
            rows = max(rows, self.common.rows)
        if rows < self.cache.snapshot()[index].seq_len:
            # copies nothing, since the request's own pages are not shared
            self.cache.truncate(index, rows)
        self.lengths[index] = length

    def _give_up_ahead(self) -> None:
        """Unmaps pages that were mapped ahead of requests; `free_blocks` counts them as free."""
        least = 1 if self.common is None else self.common.rows
        for index, slot in enumerate(self.cache.snapshot()):
            if slot.seq_len >= least and self._taken(index):
                self.cache.truncate(index, slot.seq_len)

    def map_ahead(self) -> None:
        """Starts mapping room for one more token per request; the next step reports a shortage."""
        longest = self.cache.config.max_seq_len
        self.cache.step_async(
            [min(length + 1, longest) if length else 0 for length in self.lengths]
        )

    def reclaim(self, keep_next: bool) -> None:
        """Unmaps idle pages in the background, except the next slot's if `keep_next` is true."""
        keep: list[int] = []
        if keep_next:
            free = [slot for slot in self.cache.snapshot() if slot.state == "cached"]
            keep = [slot.reqid for slot in sorted(free, key=lambda slot: -slot.mapped_pages)[:1]]
        self.cache.memory.reclaim_free(keep)

    def _taken(self, index: int) -> bool:
        """Returns true if the id is in use."""
        idle = self.common is not None and index in self.common.idle
        return not idle and self.cache.slots.is_taken(index)

    def _checked(self, seq_lens: Sequence[int]) -> list[int]:
        lengths = [operator.index(length) for length in seq_lens]
        count, longest = len(self.lengths), self.cache.config.max_seq_len
        if len(lengths) != count:
            raise invalid(
                f"seq_lens has {len(lengths)} entries for {count} ids", limit=count, op="vattention"
            )
        for index, length in enumerate(lengths):
            if not 0 <= length <= longest:
                raise invalid(
                    f"seq_lens[{index}] is {length}; it must be between 0 and max_context_length "
                    f"{longest}",
                    limit=longest,
                    op="vattention",
                )
        return lengths

    def _short(self, lengths: list[int]) -> OutOfKVBlocks:
        layout = self.cache.layout
        need = self._needed(lengths)
        have = self.cache.stats().total_pages // layout.num_tensors
        if not have:
            text = "no physical pages are reserved; call reserve_physical_pages"
        else:
            text = f"{need} KV blocks are needed, but the cache has {have}; preempt a request"
        return OutOfKVBlocks(
            f"vattention: {text}",
            errno=errno.ENOMEM,
            op="step",
            bytes=need * layout.num_tensors * layout.page_size,
            limit=have * layout.num_tensors * layout.page_size,
        )

    # ---- end and reports -------------------------------------------------------------------------

    def end(self) -> None:
        """Ends all requests and frees their memory; `close_retired` closes the cache.

        May be called again if it fails.
        """
        if self.cache not in _retired:
            _retired.append(self.cache)
        self.common = None
        for index in range(len(self.lengths)):
            self.free(index)
        self.cache.memory.reclaim_free(wait=True)
        self.cache.context.trim()

    def describe(self) -> list[str]:
        """Returns the lines that `show_kvcache_config` prints."""
        config, layout = self.cache.config, self.cache.layout
        return [
            f"layers: {config.num_layers}, KV heads: {config.num_kv_heads}, "
            f"head size: {config.head_dim}, bytes per element: {config.itemsize}",
            f"batch: {config.max_batch}, context: {config.max_seq_len}, "
            f"page: {layout.page_size} bytes, {self.tokens_per_block} tokens",
            f"addresses: {layout.slot_bytes} bytes per request, {layout.tensor_bytes} per tensor",
        ]

    def picture(self) -> list[str]:
        """Returns the lines that `show_allocator_state` prints."""
        layout = self.cache.layout
        lines = [f"free: {self.free_blocks()} KV blocks", "id: tokens, mapped, required"]
        for slot in self.cache.snapshot():
            length = self.lengths[slot.reqid]
            lines.append(f"{slot.reqid}: {length}, {slot.mapped_pages}, {layout.pages_for(length)}")
        return lines
