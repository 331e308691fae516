# SPDX-License-Identifier: MIT
"""The cache for continuous batching in transformers 5.17.

In this version, the scheduler does its own block accounting and requests blocks as needed. Here a
block is one token, so the scheduler counts tokens; free memory is also reported in tokens, rounded
down to whole pages of every tensor. Parallel samples are not forked, because 5.17 has to know the
number of forks in advance; instead, later samples hit the prompt that the first one recorded.
"""

from __future__ import annotations

from typing import Any

import transformers

from pyvmem.errors import NotSupported
from pyvmem.hf.cb_common import FULL, SlotCacheBase
from pyvmem.hf.cb_options import Options, kept_shapes
from pyvmem.models.shapes import classes_of

__all__ = ["SlotCache"]


class SlotCache(SlotCacheBase):
    """The cache for 5.17. See `SlotCacheBase` for the arguments."""

    block_option = "block_size"
    block_size = 1
    num_groups = 1
    num_full_attention_groups = 1
    num_sliding_attention_groups = 0
    read_trash_index = 0
    write_trash_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layout = self.requests.parts[0].layout
        self._page_tokens = max(1, layout.page_size // layout.row_bytes)
        self._tensors = layout.num_tensors
        self.num_blocks = self.num_pages = self.tokens
        # transformers' offloading code reads this attribute even if offloading is switched off.
        self.num_key_value_heads = layout.config.num_kv_heads
        self.head_dim = layout.config.head_dim
        self.key_cache = [None] * layout.config.num_layers
        self.group_cache_managers: list[Any] = []

    @classmethod
    def check(cls, options: Options, config: Any, tensor_parallel: int = 1) -> None:
        """Rejects the models that `SlotCacheBase.check` rejects, and those whose layers differ.

        Raises:
            NotSupported: as in `SlotCacheBase.check`, or the layers differ in row size or window.
        """
        super().check(options, config, tensor_parallel)
        if len(classes_of(kept_shapes(options, config))[0]) > 1:
            raise NotSupported(
                f"continuous batching over virtual memory: layers that differ (rows of several "
                "sizes or windows) need transformers 5.18 or later, not "
                f"{transformers.__version__}",
                op="continuous batching",
            )

    # ---- scheduler and offloading ----------------------------------------------------------------

    def allocate_blocks(self, n_blocks: int, request_id: str, allocated_blocks: int) -> int | None:
        """Maps pages for `n_blocks` more tokens; returns None if memory runs out."""
        total = min(allocated_blocks + n_blocks, self.requests.max_seq_len)
        return n_blocks if self.requests.hold(request_id, total) else None

    def blocks_needed(self, num_requested_blocks: int, allocated_blocks: int) -> int:
        """Returns how many tokens fit in the pages that the request still needs."""
        pages_for = self.requests.parts[0].layout.pages_for
        return self._page_tokens * (
            pages_for(allocated_blocks + num_requested_blocks) - pages_for(allocated_blocks)
        )

    def blocks_in_use(self, request_id: str) -> int:
        """Returns how many tokens fit in the request's pages."""
        return self._page_tokens * self.requests.granted(request_id)

    def get_num_free_blocks(self) -> int:
        """Returns how many tokens fit in the pages that are still available to requests."""
        return self._page_tokens * (self.requests.pages()[0] // self._tensors)

    def free_blocks(self, request_id: str) -> None:
        """Frees a request's slot."""
        self.requests.drop(request_id)

    def free_all_requests(self) -> None:
        """Frees all slots."""
        self.requests.drop_all()

    # ---- prefixes and forks ----------------------------------------------------------------------

    def mark_shareable_blocks_as_complete(self, state: Any, num_complete_blocks: int) -> None:
        """Records that the keys and values of these tokens are computed."""
        self.note_computed(state, num_complete_blocks)

    def compute_max_num_forks(self, source_request_id: str) -> int:
        """Returns 0: each answer is a separate request that matches the recorded prompt."""
        return 0

    # ---- inputs ----------------------------------------------------------------------------------

    def get_seqlens_k(self, past_length: int, query_length: int) -> dict[str, int]:
        """Returns the number of keys that a request's new tokens attend to."""
        return {FULL: past_length + query_length}
