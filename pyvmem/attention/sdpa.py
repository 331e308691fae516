# SPDX-License-Identifier: MIT
"""torch's scaled_dot_product_attention over views of the valid rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch

__all__ = ["sdpa"]


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """One call for requests in neighbouring slots with equal lengths, so mostly one a request."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for run in batch.runs:
        end = run.start + run.count * run.q_len
        slots = slice(run.slot, run.slot + run.count)
        mask = None
        if 1 < run.q_len < run.kv_len:  # a later chunk: is_causal would align at the upper left
            mask = q.new_ones((run.q_len, run.kv_len), dtype=torch.bool)
            mask = mask.tril(run.kv_len - run.q_len)
        shape = (run.count, run.q_len, *q.shape[1:])
        rows = q[run.start : end].reshape(shape)
        found = scaled_dot_product_attention(
            rows.transpose(1, 2),
            k[slots, : run.kv_len].transpose(1, 2),
            v[slots, : run.kv_len].transpose(1, 2),
            attn_mask=mask,
            is_causal=run.q_len > 1 and mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[2],
        )
        out[run.start : end].view(shape).copy_(found.transpose(1, 2))
    return out
