# SPDX-License-Identifier: MIT
"""torch's scaled_dot_product_attention over views of the valid rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch

__all__ = ["causal", "sdpa"]

_SCORES = 1 << 26  # maximum number of scores computed at once
# matrix product with a float32 result, in torch 2.8 and later, on GPUs only
_TO_FLOAT = hasattr(torch.ops.aten.bmm, "dtype")


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int = 0
) -> torch.Tensor:
    """Makes one call per run of consecutive slots with equal lengths, usually one per request."""
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
    """Computes causal attention of each request's queries over its rows.

    `q` is ``[requests, tokens, heads, dim]``; `k` and `v` are ``[requests, rows, ...]``, and their
    last rows are the tokens' own. A token attends to the last `window` rows up to its own, or to
    all rows up to its own if `window` is 0.
    """
    new, rows, heads = q.shape[1], k.shape[1], q.shape[2]
    if new == 1 and k.shape[2] == 1:
        # One KV head: passing the query heads as rows of a single head saves a copy of the keys.
        found = scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), scale=scale)
        return found.reshape(q.shape[0], 1, heads, v.shape[3])
    if new > 1 and v.shape[3] != q.shape[3]:
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        for i in range(q.shape[0]):
            _by_blocks(q[i], k[i], v[i], scale, window, out[i])
        return out
    mask = None
    narrow = window and rows > window
    if 1 < new < rows or (narrow and new > 1):
        # is_causal aligns the mask to the top left, which is wrong for a window or a later chunk.
        mask = q.new_ones((new, rows), dtype=torch.bool).tril(rows - new)
        if narrow:
            mask = mask.triu(rows - new - window + 1)
    grouped = heads != k.shape[2]
    # no fused kernel supports GQA if the values differ in size from the keys
    if grouped and v.shape[3] != q.shape[3]:
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


def _by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """Computes one request's attention with matrix products, one block of tokens at a time.

    Used if values are narrower than keys, as in MLA. SDPA's fast kernels do not support heads of
    576 elements, its slow kernel keeps the scores of all tokens and a copy of the rows for each
    head, and its memory-efficient kernel gave wrong results after the first 32 tokens of a masked
    chunk (torch 2.11 on an H100). Besides `out`, this needs memory for a block's scores (2 ** 26 of
    them, or one token's if more), twice in float32 and once in the values' dtype, and for the keys
    in float32 if torch cannot multiply narrower matrices to float32.
    """
    (new, heads, dim), (rows, groups) = q.shape, k.shape[:2]
    each = heads // groups
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    if not _products_to_float(k):
        keys = keys.float() if k.element_size() < 4 else keys
    at = 0
    while at < new:
        count = max(1, min(new - at, _SCORES // (heads * rows)))
        last = rows - new + at  # the row of the block's first token
        first = max(0, last - window + 1) if window else 0
        end = last + count
        some = q[at : at + count].view(count, groups, each, dim).transpose(0, 1)
        scores = _products(some.reshape(groups, -1, dim), keys[:, :, first:end]).mul_(scale)
        hidden = torch.ones(count, end - first, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(last - first + 1)
        if window:
            hidden |= torch.ones_like(hidden).tril(last - first - window)
        shaped = scores.view(groups, count, each, -1)
        shaped.masked_fill_(hidden[None, :, None], float("-inf"))
        found = torch.bmm(scores.softmax(-1).to(v.dtype), values[:, first:end])
        out[at : at + count].view(count, groups, each, -1).copy_(
            found.view(groups, count, each, -1).transpose(0, 1)
        )
        at += count


def _products_to_float(x: torch.Tensor) -> bool:
    """Returns true if torch can multiply these matrices with a float32 result."""
    return _TO_FLOAT and x.device.type == "cuda" and x.element_size() < 4


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the matrix products of a batch, as float32 or wider."""
    if _products_to_float(b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.to(b.dtype), b)
