# SPDX-License-Identifier: MIT
"""The cache that continuous batching of transformers 5.23 is given.

It answers what scheduler, inputs, offloading and runner ask of ``PagedAttentionCache`` and its
allocators there (``generation/continuous_batching/cache.py``), which share no abstract base. Their
blocks are counted here in pages of physical memory; there are no block tables, no read and write
indices and no trash blocks, as attention takes slots and lengths.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from pyvmem.hf.cb_options import Options, check_model, make_requests
from pyvmem.hf.named import NamedRequests

__all__ = ["SlotCache"]

_FULL = "full_attention"
_MAX_BATCH_TOKENS = 8192  # transformers' own default


class _Allocator:
    """What is asked of the one allocator, that of the layers with full attention."""

    index = 0
    layer_type = _FULL
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
        """Physical pages, where transformers counts blocks."""
        return self._requests.missing(request_id, past_length + query_length)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Keys that a request's new tokens attend to."""
        return past_length + query_length


class _Pool:
    """Sectors are not needed: pages are free or not."""

    def try_to_free_sectors(self) -> None:
        """Nothing to do."""


class SlotCache:
    """Requests in slots, where transformers has blocks. Takes `PagedAttentionCache`'s arguments.

    Attributes:
        requests: the slots.
    """

    read_cache_limit = None
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0

    def __init__(
        self,
        options: Options,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        model_supports_logits_to_keep: bool = False,
    ) -> None:
        check_model(config, distributed_helper.tp_size)
        cb_config = continuous_batching_config
        block = operator.index(cb_config.page_size)
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.requests = requests = make_requests(
            options, config, cb_config, block, self.device, dtype, not model_supports_logits_to_keep
        )
        layout, shape = requests.kvcache.layout, requests.kvcache.config
        token_bytes = layout.row_bytes * layout.num_tensors
        tokens = requests.pages()[1] * layout.page_size // token_bytes
        slots = shape.max_batch
        cb_config.max_requests_per_batch = min(cb_config.max_requests_per_batch or slots, slots)
        self.max_batch_tokens = cb_config.max_batch_tokens or _MAX_BATCH_TOKENS
        self.max_tokens_read = min(tokens, slots * shape.max_seq_len)
        self.num_blocks = max(1, tokens // block)
        self.bytes_per_sector = block * token_bytes
        self.allow_block_sharing = self.use_prefix_sharing = requests.sharing
        self.cache_allocators = {_FULL: _Allocator(requests, block, self.bytes_per_sector)}
        self.pool = _Pool()

    # ---- scheduler and offloading ----------------------------------------------------------------

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Maps what the next `request_len` tokens need, if it can be had."""
        total = state.current_len() + request_len
        if dry_run:
            return self.requests.room(state.request_id, total)
        return self.requests.hold(state.request_id, total)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """How many of the requests, in order, could have the pages that they lack."""
        free = self.requests.pages()[0]
        for count, needed in enumerate(list_blocks_needed):
            free -= sum(needed.values())
            if free < 0:
                return count
        return len(list_blocks_needed)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Pages that requests could get: a part of all, or in bytes."""
        free, total = self.requests.pages()
        return free / total if relative else free * self.requests.kvcache.layout.page_size

    def evict_cached_blocks(self) -> bool:
        """False: the KV cache itself evicts prefixes, and only when pages are needed."""
        return False

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees a request's slot; `no_cache`: what it computed is not kept."""
        self.requests.drop(request_id, record=not no_cache)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Frees all slots; `clear_ledgers`: recorded prefixes go too."""
        self.requests.drop_all(forget=clear_ledgers)

    def reset(self) -> None:
        """As new."""
        self.free_all_requests(clear_ledgers=True)

    # ---- prefixes and forks ----------------------------------------------------------------------

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Tokens of the prompt that the request has from now on, by sharing."""
        return self.requests.match(request_id, prompt_ids)

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Tokens, where transformers counts blocks; comes back by `mark_complete_blocks`."""
        return {_FULL: request_len} if self.use_prefix_sharing else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """The tokens' keys and values are computed."""
        if complete_blocks:
            self.requests.computed(
                state.request_id,
                complete_blocks[_FULL],
                lambda: state.initial_tokens + state.generated_tokens,
                len(state.initial_tokens),
            )

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Forks as many children as there is room for; nothing is left to copy."""
        forked: list[str] = []
        for child in dst_req_ids:
            if not self.requests.fork(src_state.request_id, child, src_state.current_len()):
                break
            forked.append(child)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Nothing to do."""

    # ---- inputs ----------------------------------------------------------------------------------

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: Any,
        write_index: Any,
    ) -> None:
        """Notes the request's place in the batch; the indices stay empty."""
        self.requests.queue(request_id, past_length, query_length)
