# SPDX-License-Identifier: MIT
"""torch's scaled_dot_product_attention over views of the valid rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch

__all__ = ["causal", "sdpa"]

_SCORES = 1 << 26  # of a block of tokens, where all of them are kept


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int = 0
) -> torch.Tensor:
    """One call for requests in neighbouring slots with equal lengths, so mostly one a request."""
    out = q.new_empty((*q.shape[:2], v.shape[3]))
    for run in batch.runs:
        end = run.start + run.count * run.q_len
        slots = slice(run.slot, run.slot + run.count)
        shape = (run.count, run.q_len, q.shape[1])
        rows = q[run.start : end].reshape((*shape, q.shape[2]))
        first = run.first(window)
        seen = (slots, slice(first, run.kv_len))
        found = causal(rows, k[seen], v[seen], scale, window)
        out[run.start : end].view((*shape, v.shape[3])).copy_(found)
    return out


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0
) -> torch.Tensor:
    """Of ``[requests, tokens, heads, dim]``, the last tokens of ``[requests, rows, ...]``.

    A token sees the last `window` rows up to its own; 0: all of them.
    """
    new, rows, heads = q.shape[1], k.shape[1], q.shape[2]
    if new == 1 and k.shape[2] == 1:
        # One KV head: the query heads are rows of one attention, which needs no copy of the keys.
        found = scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), scale=scale)
        return found.reshape(q.shape[0], 1, heads, v.shape[3])
    mask = None
    narrow = window and rows > window
    if 1 < new < rows or (narrow and new > 1):
        # A later chunk, where is_causal would align at the upper left, or a window.
        mask = q.new_ones((new, rows), dtype=torch.bool).tril(rows - new)
        if narrow:
            mask = mask.triu(rows - new - window + 1)
    if mask is not None and q.device.type == "cuda" and v.shape[3] != q.shape[3]:
        return _masked_blocks(q, k, v, mask, scale)
    grouped = heads != k.shape[2]
    if grouped and v.shape[3] != q.shape[3]:  # of the fast kernels none takes both
        k, v = (
            one.repeat_interleave(heads // one.shape[2], 2)
            if one.shape[2] > 1
            else one.expand(-1, -1, heads, -1)
            for one in (k, v)
        )
        grouped = False
    return scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=new > 1 and mask is None,
        scale=scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


def _masked_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention by products of matrices, a block of tokens at a time.

    For values narrower than keys under a mask: torch 2.11's memory-efficient kernel gave a wrong
    token behind the first 32 of a chunk on an H100 (keys of 576 elements, values of 512).
    """
    requests, new, heads = q.shape[:3]
    block = max(1, _SCORES // (requests * heads * k.shape[1]))
    with sdpa_kernel(SDPBackend.MATH):
        found = [
            scaled_dot_product_attention(
                q[:, at : at + block].transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask[at : at + block],
                scale=scale,
                enable_gqa=heads != k.shape[2],
            ).transpose(1, 2)
            for at in range(0, new, block)
        ]
    return found[0] if len(found) == 1 else torch.cat(found, 1)
