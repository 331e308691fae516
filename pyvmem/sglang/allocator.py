# SPDX-License-Identifier: MIT
"""Makes SGLang's paged allocator handle pages that may have no memory.

SGLang takes pages, often in a kernel, from the head of `free_pages`, a tensor on the device, and
crashes if there are too few. Here, the list of free pages is on the host; before a call that takes
n pages, `free_pages` is set to a tensor of exactly n backed pages. SGLang also counts unbacked
pages as free, although memory for them may not be available, so we override the methods that decide

    which requests are admitted    the prefill budget: memory is mapped before admission
    whether a step can decode      check_decode_capacity: if it cannot, SGLang retracts requests
    what to evict                  evict_to_free_tokens

On a GPU, the ids of freed pages are known only on the device. They are copied to the host
asynchronously; only a call that needs them waits for the copy. This module runs in the scheduler's
process and thread on each rank.
"""

from __future__ import annotations

import math
import os
from itertools import islice
from typing import Any

import torch

from pyvmem.elastic.metrics import identity_of
from pyvmem.sglang.buffers import memory_of
from pyvmem.sglang.pool import PagePool, join
from pyvmem.sglang.ranks import RankGroup, Ranks, SingleRank

__all__ = ["elastic_allocator"]

_QUEUED = 1024  # maximum number of queued requests that `count_waiting` examines


class _Freed:
    """Ids of freed pages that are being copied to the host; an `Arrival`."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.count = pages.numel()
        self._host = torch.empty(self.count, dtype=pages.dtype, pin_memory=True)
        self._host.copy_(pages, non_blocking=True)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def pages(self) -> list[int]:
        self._event.synchronize()
        return list(map(int, self._host.tolist()))


class _Transfers:
    """Tracks SGLang's copies between KV pages and host memory, so that no page is unmapped early.

    Only the last event per key is kept, since the copies in each direction run on one stream.
    """

    def __init__(self) -> None:
        self._last: dict[Any, Any] = {}

    def note(self, key: Any, event: Any) -> None:
        self._last[key] = event

    def events(self) -> tuple[Any, ...]:
        self._last = {key: one for key, one in self._last.items() if not one.query()}
        return tuple(self._last.values())

    def fence(self, stream: Any) -> None:
        for one in self.events():
            stream.wait_event(one)

    def close(self) -> None:
        for one in self.events():
            one.synchronize()


def _ranks() -> tuple[Ranks, bool, int]:
    """Returns the engine's ranks, whether this rank is the first, and its identity."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    first, run = parallel.tp_rank == 0, os.environ.get("SGLANG_RUN_ID", "")
    number = (parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank
    identity = identity_of(run, number) if run else 0
    if parallel.tp_size == 1:
        return SingleRank(), first, identity
    return RankGroup(parallel.tp_group.cpu_group), first, identity


class _Allocator:
    """A mixin for SGLang's `PagedTokenToKVPoolAllocator`, which is the next class in the MRO."""

    page_size: int
    num_pages: int
    device: Any
    free_pages: torch.Tensor
    serves = False  # set on the first iteration of the scheduler's loop

    def __init__(
        self, size: int, page_size: int, dtype: Any, device: Any, kvcache: Any, need_sort: bool
    ) -> None:
        memory, settings, name, unique = memory_of(kvcache)
        ranks, first, identity = _ranks()
        quota = join(
            memory, settings, name, unique=unique, ranks=ranks, first=first, identity=identity
        )
        self.pool = PagePool(memory, quota, settings, ranks)
        self._transfers = _Transfers()
        if torch.device(device).type == "cuda":
            memory.copies = (self._transfers,)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)  # type: ignore[call-arg]
        if self.num_pages != memory.geometry.num_blocks - 1:
            raise RuntimeError(
                f"VMEM_SGLANG=1: the allocator has {self.num_pages} pages, but the KV tensors have "
                f"{memory.geometry.num_blocks - 1} without page 0"
            )

    # ---- pages -----------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Returns the number of tokens that all free pages can hold, backed or not.

        Overrides `PagedTokenToKVPoolAllocator.available_size`.
        """
        return self.pool.free * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        """Returns the ids of all free pages; SGLang's leak check calls this.

        Overrides `PagedTokenToKVPoolAllocator.get_all_free_pages`.
        """
        return torch.tensor(self.pool.free_pages(), dtype=torch.int64, device=self.device)

    def _lend(self, count: int) -> bool:
        """Sets `free_pages` to `count` backed pages; returns false if there are too few."""
        pages = self.pool.take(count)
        if pages is None:
            return False
        pinned = torch.device(self.device).type == "cuda"
        host = torch.tensor(pages, dtype=torch.int64, pin_memory=pinned)
        self.free_pages = host.to(self.device, non_blocking=True)
        return True

    def alloc(self, need_size: int) -> Any:
        """Allocates whole pages for `need_size` tokens; returns None if memory runs out.

        Overrides `PagedTokenToKVPoolAllocator.alloc`.
        """
        if not self._lend(need_size // self.page_size):
            return None
        return super().alloc(need_size)  # type: ignore[misc]

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Allocates the pages for a prefill; returns None if memory runs out.

        Overrides `PagedTokenToKVPoolAllocator.alloc_extend`.
        """
        from sglang.srt.utils import get_num_new_pages

        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._lend(int(num_new_pages)):
            return None
        lengths = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        return super().alloc_extend(  # type: ignore[misc]
            *lengths, last_loc, extend_num_tokens, num_new_pages
        )

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """Allocates the pages for a decode step; returns None if memory runs out.

        Overrides `PagedTokenToKVPoolAllocator.alloc_decode`.
        """
        from sglang.srt.utils import get_num_new_pages

        count = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._lend(int(count)):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)  # type: ignore[misc]

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for pages in page_ids:
            if pages.is_cuda:
                self.pool.give_later(_Freed(pages))
            else:
                self.pool.give(pages.tolist())

    def clear(self) -> None:
        """Frees all pages and waits until all except page 0 are unmapped.

        Overrides `PagedTokenToKVPoolAllocator.clear`.
        """
        super().clear()  # type: ignore[misc]
        self.free_pages = self.free_pages[:0]
        self.pool.clear()

    def set_hicache_transfer_done_event(self, transfer_key: Any, event: Any) -> None:
        """Keeps the pages of a copy to or from host memory mapped until `event` completes.

        Overrides `PagedTokenToKVPoolAllocator.set_hicache_transfer_done_event`.
        """
        self._transfers.note(transfer_key, event)

    # ---- SGLang's decisions ----------------------------------------------------------------------

    def evictable(self, tree_cache: Any) -> int:
        """Returns the number of pages that hold only prefixes."""
        return int(tree_cache.evictable_size()) // self.page_size

    def count_waiting(self, scheduler: Any) -> int:
        """Returns how many pages the queued requests need in addition to the evictable pages.

        A request's cached prefix needs no pages if SGLang has already looked it up.
        """
        lengths = (
            request.seqlen + 1 - request.prefix_len
            for request in islice(scheduler.waiting_queue, _QUEUED)
        )
        pages: int = sum(-(-length // self.page_size) for length in lengths)
        return pages - self.evictable(scheduler.tree_cache)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> Any:
        """Evicts prefixes if there are too few pages or too little memory for `num_tokens` tokens.

        Overrides `PagedTokenToKVPoolAllocator.evict_to_free_tokens`.
        """
        count = -(-num_tokens // self.page_size)
        if not self.pool.prepare(count):
            evict(tree_cache, (count - self.pool.ready) * self.page_size)
        return super().evict_to_free_tokens(tree_cache, num_tokens)  # type: ignore[misc]

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Backs the pages for a decode step. Returns false if pages or memory run out.

        Overrides `PagedTokenToKVPoolAllocator.check_decode_capacity`.
        """
        count = -(-num_tokens // self.page_size)
        fits = super().check_decode_capacity(  # type: ignore[misc]
            num_tokens=num_tokens,
            tree_cache=tree_cache,
            requests=requests,
            spec_algorithm=spec_algorithm,
        )
        if not fits or self.pool.prepare(count, ask=True):
            return bool(fits)
        # SGLang aborts a request that does not fit even alone, so wait for other engines first.
        return requests is not None and len(requests) == 1 and self.pool.wait_for(count)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        """Returns a prefill budget that admits a request only if memory for it can be mapped.

        Overrides `PagedTokenToKVPoolAllocator.create_prefill_budget`.
        """
        budget = _budget()(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        # SGLang reserves one token for each request decoded in the same step, but that token may
        # need a whole page.
        budget.total_offset += num_mixed_decode_tokens * (self.page_size - 1)
        budget.current_offset += num_mixed_decode_tokens * (self.page_size - 1)
        return budget

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, *, token_capacity: int, **rest: Any
    ) -> int | None:
        """Returns the number of tokens that a request may generate; None rejects the request.

        Overrides `PagedTokenToKVPoolAllocator.max_new_tokens_for_memory`.
        """
        capacity = min(token_capacity, self.pool.most() * self.page_size)
        if -(-input_tokens // self.page_size) * self.page_size + self.page_size >= capacity:
            return None
        found: int | None = super().max_new_tokens_for_memory(  # type: ignore[misc]
            input_tokens, max_new_tokens, token_capacity=capacity, **rest
        )
        return found


def evict(tree_cache: Any, tokens: int) -> None:
    """Evicts `tokens` tokens of prefixes from SGLang's cache, least recently used first."""
    if tokens > 0 and tree_cache is not None and tree_cache.supports_prefix_sharing():
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        tree_cache.evict_for_alloc(EvictParams(num_tokens=tokens))


class _Budget:
    """A mixin for SGLang's `PrefillBudget`, which is the next class in the MRO.

    SGLang creates a budget for each round in which it admits requests.
    """

    allocator: Any
    tree_cache: Any
    page_size: int
    current_offset: int
    remaining_total: float

    def _available_and_evictable(self) -> int:
        pool = self.allocator.pool
        if not pool.admits:
            return 0
        stock = int(super()._available_and_evictable())  # type: ignore[misc]
        if pool.ready < pool.free:
            stock -= (pool.free - pool.obtainable()) * self.page_size
        return stock

    def _grant(self, tokens: int) -> bool:
        """Backs pages for the admitted requests and `tokens` more tokens, as far as memory allows.

        Pages that SGLang can evict count as backed. Returns true if all pages are backed.
        """
        pool = self.allocator.pool
        count = math.ceil((self.current_offset + tokens) / self.page_size) + 1
        if pool.prepare(count):
            return True
        lacks = count - pool.ready - self.allocator.evictable(self.tree_cache)
        if lacks > 0:
            pool.ask(lacks)
        return bool(lacks <= 0)

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: float, **rest: Any
    ) -> tuple[bool, int | None]:
        """Backs a request's pages if it fits. Returns whether it fits, and SGLang's chunk limit.

        Overrides `PrefillBudget.check_prefill`.
        """
        fits, limit = super().check_prefill(  # type: ignore[misc]
            extend_input_len=extend_input_len, total_tokens=total_tokens, **rest
        )
        if fits:
            chunk = extend_input_len if limit is None else min(extend_input_len, limit)
            return (True, limit) if self._grant(chunk) else (False, None)
        pool = self.allocator.pool
        if pool.admits and pool.obtainable() < pool.free:
            # Both numbers are estimates and may be fractional.
            pool.ask(int(total_tokens - self.remaining_total) // self.page_size + 1)
        return False, None

    def can_allocate_prefill(self, *, paged_input: int, **rest: Any) -> bool:
        """Backs pages for `paged_input` tokens if they fit; returns whether they fit.

        Overrides `PrefillBudget.can_allocate_prefill`.
        """
        fits = super().can_allocate_prefill(paged_input=paged_input, **rest)  # type: ignore[misc]
        return bool(fits) and self._grant(paged_input)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Backs pages for the next chunk of a partly prefilled request; returns its token count.

        Such a request may exceed the budget. A result of None makes it wait. Overrides
        `PrefillBudget.available_chunk_tokens`.
        """
        pool = self.allocator.pool
        tokens = super().available_chunk_tokens(chunk_limit)  # type: ignore[misc]
        pages = pool.obtainable() + self.allocator.evictable(self.tree_cache) - 1
        most = pages * self.page_size - self.current_offset
        if most < self.page_size:
            pool.ask(1)
            return None
        tokens = min(tokens, most)
        return tokens if self._grant(tokens) else None


_made: dict[str, Any] = {}


def _budget() -> Any:
    if "budget" not in _made:
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        _made["budget"] = type("ElasticPrefillBudget", (_Budget, PrefillBudget), {})
    return _made["budget"]


def elastic_allocator(stock: type) -> type:
    """Returns the subclass that replaces `stock`, SGLang's `PagedTokenToKVPoolAllocator`."""
    return type("ElasticTokenToKVPoolAllocator", (_Allocator, stock), {"__module__": __name__})
