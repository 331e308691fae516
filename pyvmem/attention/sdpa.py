# SPDX-License-Identifier: MIT
"""torch's scaled_dot_product_attention over views of the valid rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch

__all__ = ["causal", "sdpa"]


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """One call for requests in neighbouring slots with equal lengths, so mostly one a request."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for run in batch.runs:
        end = run.start + run.count * run.q_len
        slots = slice(run.slot, run.slot + run.count)
        shape = (run.count, run.q_len, *q.shape[1:])
        rows = q[run.start : end].reshape(shape)
        found = causal(rows, k[slots, : run.kv_len], v[slots, : run.kv_len], scale)
        out[run.start : end].view(shape).copy_(found)
    return out


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Of ``[requests, tokens, heads, dim]``, the last tokens of ``[requests, rows, ...]``."""
    new, rows = q.shape[1], k.shape[1]
    mask = None
    if 1 < new < rows:  # a later chunk: is_causal would align at the upper left
        mask = q.new_ones((new, rows), dtype=torch.bool).tril(rows - new)
    return scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=new > 1 and mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
