# SPDX-License-Identifier: MIT
"""The cache for continuous batching in transformers 5.18 to 5.24.

It implements the methods of ``PagedAttentionCache`` and its allocators
(``generation/continuous_batching/cache.py``) that the scheduler, inputs, offloading and runner use;
these classes have no abstract base. Here, their blocks are pages of physical memory. Block tables,
read and write indices and trash blocks are not needed, because attention uses slots and lengths.
"""

from __future__ import annotations

from typing import Any

from pyvmem.hf.cb_common import FULL, SlotCacheBase
from pyvmem.hf.named import NamedRequests

__all__ = ["SlotCache"]


class _Allocator:
    """Replaces the allocator for full-attention layers; the cache has no other allocator."""

    index = 0
    layer_type = FULL
    supports_block_sharing = True
    supports_block_table = False
    read_trash_index = 0
    write_trash_index = 0
    blocks_per_sector = 1

    def __init__(self, requests: NamedRequests, tokens_per_page: int, bytes_per_block: int) -> None:
        self._requests = requests
        self.tokens_per_page = tokens_per_page
        self.bytes_per_block = bytes_per_block
        self.block_table: dict[str, list[int]] = {}  # stays empty

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Returns the number of physical pages needed; transformers counts blocks here."""
        return self._requests.missing(request_id, past_length + query_length)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Returns the number of keys that a request's new tokens attend to."""
        return past_length + query_length


class _Pool:
    """Replaces the sector pool, since pages need no sectors."""

    def try_to_free_sectors(self) -> None:
        """Does nothing."""


class SlotCache(SlotCacheBase):
    """The cache for 5.18 to 5.24. See `SlotCacheBase` for the arguments."""

    read_cache_limit = None
    max_decode_fast_path_length = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        block = self.block_tokens
        self.max_tokens_read = self.tokens
        self.num_blocks = max(1, self.tokens // block)
        self.bytes_per_sector = block * self.token_bytes
        self.cache_allocators = {FULL: _Allocator(self.requests, block, self.bytes_per_sector)}
        self.pool = _Pool()

    def update(
        self, key: Any, value: Any, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Passes the cache to the attention functions, which transformers 5.24 no longer does."""
        kwargs["cache"] = self
        return key, value

    # ---- scheduler and offloading ----------------------------------------------------------------

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Maps pages for the next `request_len` tokens; returns false if memory runs out.

        With `dry_run`, only returns whether the pages could be mapped.
        """
        total = state.current_len() + request_len
        if dry_run:
            return self.requests.room(state.request_id, total)
        return self.requests.hold(state.request_id, total)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Returns how many of the requests, in order, can get all the pages that they need."""
        free = self.requests.pages()[0]
        for count, needed in enumerate(list_blocks_needed):
            free -= sum(needed.values())
            if free < 0:
                return count
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Returns the memory available to requests, as a fraction of all memory or in bytes."""
        free, total = self.requests.pages()
        return free / total if relative else free * self.requests.parts[0].layout.page_size

    def evict_cached_blocks(self) -> bool:
        """Returns false, because the KV cache evicts prefixes itself when pages are needed."""
        return False

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees a request's slot; if `no_cache`, its rows are not recorded."""
        self.requests.drop(request_id, record=not no_cache)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Frees all slots; if `clear_ledgers`, also evicts the recorded prefixes."""
        self.requests.drop_all(forget=clear_ledgers)

    def reset(self) -> None:
        """Resets the cache to its initial state."""
        self.free_all_requests(clear_ledgers=True)

    # ---- prefixes and forks ----------------------------------------------------------------------

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Counts tokens, not blocks; transformers passes the counts to `mark_complete_blocks`."""
        return {FULL: request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Records that the keys and values of these tokens are computed."""
        self.note_computed(state, complete_blocks.get(FULL, 0) if complete_blocks else 0)

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Forks as many children as fit; returns their ids. `copy_src_and_dst` stays empty."""
        forked: list[str] = []
        for child in dst_req_ids:
            if not self.requests.fork(src_state.request_id, child, src_state.current_len()):
                break
            forked.append(child)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Does nothing."""
