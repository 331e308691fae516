# SPDX-License-Identifier: MIT
"""The base class of the caches for each transformers version; see cb_5_18.py."""

from __future__ import annotations

import operator
from typing import Any

import torch

from pyvmem.hf.cb_options import Options, check_model, kept_shapes, make_requests
from pyvmem.hf.named import NamedRequests

__all__ = ["FULL", "SlotCacheBase"]

FULL = "full_attention"
_MAX_BATCH_TOKENS = 8192  # transformers' own default


class SlotCacheBase:
    """Keeps requests in slots instead of transformers' blocks.

    The arguments after `options` are those of transformers' ``PagedAttentionCache``.

    Args:
        options: the installed options.
        config: configuration of the text model.
        continuous_batching_config: the resolved configuration; its ``max_requests_per_batch`` is
            lowered to the number of slots.
        device, dtype: the model's device and dtype.
        distributed_helper: describes the devices that the model is split across.
        model_supports_logits_to_keep: whether the model can compute logits for only the last token
            of each request. In transformers versions without this argument, the model computes all
            logits.
        tp_plan: not used.

    Attributes:
        block_option: this version's name for the option that sets the number of tokens per block
            (the unit of ``num_blocks``).
        block_tokens: the value of that option.
        requests: the requests and their slots.
        token_bytes: bytes per token over all tensors.
        tokens: the cache's capacity in tokens.
        max_batch_tokens: maximum number of tokens in a forward pass.
        use_prefix_sharing, allow_block_sharing: whether prompts are recorded for other requests.
        max_blocks_per_request: 0, which disables the paged kernel for decoding.
    """

    block_option = "page_size"
    max_blocks_per_request = 0

    def __init__(
        self,
        options: Options,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        model_supports_logits_to_keep: bool = False,
        tp_plan: Any = None,
    ) -> None:
        self.check(options, config, distributed_helper.tp_size)
        cb_config = continuous_batching_config
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_tokens = operator.index(getattr(cb_config, self.block_option))
        self.requests: NamedRequests = make_requests(
            options,
            config,
            cb_config,
            self.block_tokens,
            self.device,
            dtype,
            not model_supports_logits_to_keep,
        )
        parts = [part.layout for part in self.requests.parts]
        slots, page = self.requests.max_batch, parts[0].page_size
        self.token_bytes = sum(part.row_bytes * part.num_tensors for part in parts)
        tokens = self.requests.pages()[1] * page // self.token_bytes
        self.tokens = max(1, min(tokens, slots * self.requests.max_seq_len))
        cb_config.max_requests_per_batch = min(cb_config.max_requests_per_batch or slots, slots)
        self.max_batch_tokens: int = cb_config.max_batch_tokens or _MAX_BATCH_TOKENS
        self.allow_block_sharing = self.use_prefix_sharing = self.requests.sharing

    @classmethod
    def check(cls, options: Options, config: Any, tensor_parallel: int = 1) -> None:
        """Rejects models that this version does not support, before anything changes.

        Raises:
            NotSupported: see `check_model`.
            InvalidArgument: the options do not fit the model's layers.
        """
        check_model(config, tensor_parallel)
        options.check(kept_shapes(options, config))

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Maps a recorded prefix of the prompt for the request; returns its number of tokens."""
        return self.requests.match(request_id, prompt_ids)

    def note_computed(self, state: Any, new: int) -> None:
        """Records that a forward pass over a request's next `new` tokens is done."""
        if new and self.use_prefix_sharing:
            self.requests.computed(
                state.request_id,
                new,
                lambda: state.initial_tokens + state.generated_tokens,
                len(state.initial_tokens),
            )

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: Any,
        write_index: Any,
    ) -> None:
        """Adds the request to the batch; the indices stay empty."""
        self.requests.queue(request_id, past_length, query_length)
