# SPDX-License-Identifier: MIT
"""Decode context parallelism on a CPU, which vLLM's CPU kernels do not support.

This is a worker extension (``--worker-extension-cls``), which vLLM imports in each worker before it
creates its process groups. Each rank computes plain attention over the tokens whose keys and values
it stores.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

__all__ = ["Nothing"]


class Nothing:
    """The extension class, which adds nothing to the worker."""


def _slots(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    *_: int,
) -> None:
    """Writes the slot of each token to `slot_mapping`, or -1 if another rank stores the token."""
    slot_mapping[:max_num_tokens] = -1
    for row, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        own = positions[begin:end]
        block, place = (
            own // (KV_CACHE_BLOCK_SIZE * TOTAL_CP_WORLD_SIZE),
            own // TOTAL_CP_WORLD_SIZE,
        )
        slots = block_table[row, block].long() * KV_CACHE_BLOCK_SIZE + place % KV_CACHE_BLOCK_SIZE
        slot_mapping[begin:end] = slots.masked_fill(own % TOTAL_CP_WORLD_SIZE != TOTAL_CP_RANK, -1)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the only head's keys and values, indexed by block and token."""
    blocks, heads, size, _ = kv_cache.shape
    assert heads == 1
    keys, values = kv_cache.view(blocks, 2 * size, -1).chunk(2, dim=1)
    return keys, values


def _update(
    self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: Any, slot_mapping: Any
) -> None:
    own = slot_mapping[: len(key)]
    which = own >= 0
    block, place = own[which] // kv_cache.shape[2], own[which] % kv_cache.shape[2]
    for half, new in zip(_halves(kv_cache), (key, value), strict=True):
        half[block, place] = new[: len(own)][which, 0]


def _forward(
    self: Any,
    layer: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    if attn_metadata is None:
        return output
    group, ranks, rank = get_dcp_group(), self.dcp_world_size, self.dcp_rank
    count = attn_metadata.num_actual_tokens
    heads = group.all_gather(query[:count].contiguous(), dim=1)
    part, weight = torch.zeros_like(heads), heads.new_full(heads.shape[:2], -torch.inf)
    keys, values = _halves(kv_cache)
    bounds = pairwise(attn_metadata.query_start_loc.tolist())
    for row, (begin, end) in enumerate(bounds):
        length = int(attn_metadata.seq_lens[row])
        tokens = torch.arange(rank, length, ranks)
        if begin == end or not len(tokens):
            continue
        block = attn_metadata.block_table[row, tokens // (kv_cache.shape[2] * ranks)].long()
        place = tokens // ranks % kv_cache.shape[2]
        scores = torch.einsum("qhd,td->qht", heads[begin:end], keys[block, place]) * self.scale
        position = torch.arange(length - (end - begin), length)
        scores.masked_fill_((tokens > position[:, None])[:, None], -torch.inf)
        weight[begin:end] = scores.logsumexp(-1)
        part[begin:end] = scores.softmax(-1).nan_to_num() @ values[block, place]
    parts = group.all_gather(part[None].contiguous(), dim=0)
    weights = group.all_gather(weight[None].contiguous(), dim=0).softmax(0)
    own = slice(rank * query.shape[1], (rank + 1) * query.shape[1])
    output[:count] = (parts * weights[..., None]).sum(0)[:, own].view_as(output[:count])
    return output


CPUAttentionBackendImpl.can_return_lse_for_decode = True
CPUAttentionBackendImpl.supports_dcp = True
CPUAttentionBackendImpl.do_kv_cache_update = _update
CPUAttentionBackendImpl.forward = _forward
register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slots})
