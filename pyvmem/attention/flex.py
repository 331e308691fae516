# SPDX-License-Identifier: MIT
"""torch's FlexAttention: compiled, per batch, on a GPU; eager, per run, on the CPU."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch
    from pyvmem.attention.layers import Form

__all__ = ["BLOCK", "flex", "why_not"]

_SHAPES = 128  # maximum number of shapes compiled per process; torch raises beyond it
# limits on head_dim on a GPU, set by Triton's matrix multiply and its tiles
_NARROWEST, _WIDEST = 16, 256
BLOCK = 128  # rows per block of FlexAttention's mask; the kernel always reads whole blocks


def why_not(form: Form, device: torch.device) -> str:
    """Returns why FlexAttention cannot be used; "" if it can."""
    try:
        from torch.nn.attention import flex_attention
    except ImportError:
        return f"torch {torch.__version__} has no flex_attention"
    if not hasattr(flex_attention, "BlockMask"):
        return f"torch {torch.__version__} has no BlockMask"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "it needs Triton, which is not installed"
        if form.dtype == "float64":
            return "it has no float64"
        if max(form.head_dim, form.v_head_dim) > _WIDEST:
            return f"head_dim {form.head_dim} is above {_WIDEST}: a tile does not fit"
        if min(form.head_dim, form.v_head_dim) < _NARROWEST:
            sizes = f"keys of {form.head_dim} elements and values of {form.v_head_dim}"
            return f"{sizes}: Triton multiplies no fewer than {_NARROWEST}"
    return ""


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int = 0
) -> torch.Tensor:
    """Runs FlexAttention: compiled, over blocks of 128 rows, on a GPU; eagerly on the CPU."""
    return (_compiled if q.device.type == "cuda" else _eager)(q, k, v, batch, scale, window)


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int
) -> torch.Tensor:
    """Computes attention one run of requests at a time, over views that end at their length.

    Eager code reads every row of a view.
    """
    from torch.nn.attention.flex_attention import flex_attention

    gqa = q.shape[1] != k.shape[2]
    out = q.new_empty((*q.shape[:2], v.shape[3]))
    for run in batch.runs:
        end = run.start + run.count * run.q_len
        shape = (run.count, run.q_len, q.shape[1])
        rows = q[run.start : end].reshape((*shape, q.shape[2]))
        first = run.first(window)
        seen = (slice(run.slot, run.slot + run.count), slice(first, run.kv_len))
        found: Any = flex_attention(
            rows.transpose(1, 2),
            k[seen].transpose(1, 2),
            v[seen].transpose(1, 2),
            score_mod=_causal(run.kv_len - run.q_len - first, window or run.kv_len),
            scale=scale,
            enable_gqa=gqa,
        )
        out[run.start : end].view((*shape, v.shape[3])).copy_(found.transpose(1, 2))
    return out


def _causal(shift: int, window: int) -> Any:
    """Returns the causal or window mask, as a `score_mod` function.

    The function captures tensors, since torch 2.11 would reuse integers from earlier calls.
    """
    last, wide = torch.tensor(shift), torch.tensor(window)

    def causal(score: Any, b: Any, h: Any, row: Any, column: Any) -> Any:
        seen = (column <= row + last) & (column > row + last - wide)
        return torch.where(seen, score, -math.inf)

    return causal


@functools.cache
def _kernel() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: uncompiled code would read every row, even unmapped ones.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int
) -> torch.Tensor:
    """Makes one call over the range of slots that contains the batch. The mask skips other slots.

    All requests are padded to the largest number of queries. The mask excludes blocks past a
    request's length and, with a window, blocks before the window, so no row beyond the last block
    is read.
    """
    low, high = min(batch.reqids), max(batch.reqids) + 1
    rows = min(k.shape[1], -(-batch.max_kv // BLOCK) * BLOCK)
    padded = q.new_zeros((high - low, batch.max_q, q.shape[1], q.shape[2]))
    where = (batch.slots - low, batch.ranks)
    padded[where] = q
    mask = _mask(batch, low, high, rows, window)
    with torch._dynamo.config.patch(recompile_limit=_SHAPES):
        found = _kernel()(
            padded.transpose(1, 2),
            k[low:high, :rows].transpose(1, 2),
            v[low:high, :rows].transpose(1, 2),
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[2],
            kernel_options=_options(batch.max_q, q.shape[1] // k.shape[2]),
        )
    out: torch.Tensor = found.transpose(1, 2)[where]
    return out


def _options(rows: int, sharing: int) -> dict[str, Any]:
    """Returns kernel options for `rows` queries per request and `sharing` query heads per KV head.

    For queries shorter than a block, torch picks its decoding kernel, whose single tile holds the
    rows of all heads that share a KV head. If they exceed a block of the mask, torch 2.13 and older
    raise NoValidChoicesError (pytorch/pytorch#185349), so the other kernel is requested.
    """
    return {"FORCE_USE_FLEX_ATTENTION": True} if rows * sharing > BLOCK else {}


def _mask(batch: Batch, low: int, high: int, rows: int, window: int = 0) -> Any:
    """Computes the block mask from the lengths; the batch caches it per window."""
    if ("flex", window) in batch.made:
        return batch.made["flex", window]
    from torch.nn.attention.flex_attention import BlockMask

    count, device = high - low, batch.device
    used = torch.zeros(count, dtype=torch.int32, device=device)
    shift = torch.zeros_like(used)
    where = batch.index.long() - low
    used[where] = batch.used
    shift[where] = batch.used - batch.starts.diff()
    wide = torch.tensor(window or rows + batch.max_q, dtype=torch.int32, device=device)

    def mask_mod(b: Any, h: Any, row: Any, column: Any) -> Any:
        own = row + shift[b]
        return (column <= own) & (column > own - wide) & (column < used[b])

    q_blocks, kv_blocks = -(-batch.max_q // BLOCK), -(-rows // BLOCK)
    ends = torch.arange(1, q_blocks + 1, device=device, dtype=torch.int32) * BLOCK
    seen = torch.minimum(ends[None] + shift[:, None], used[:, None])
    first = torch.clamp(ends[None] - BLOCK + shift[:, None] - wide + 1, min=0) // BLOCK
    number = torch.clamp(-(-seen // BLOCK) - first, min=0)[:, None].contiguous()
    indices = torch.arange(kv_blocks, device=device, dtype=torch.int32)
    # Only a row's first `number` entries are used, but the others must be valid block indices too.
    indices = (first[:, None, :, None] + indices).clamp(max=kv_blocks - 1).contiguous()
    mask = BlockMask.from_kv_blocks(
        number,
        indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(batch.max_q, rows),
        compute_q_blocks=False,
    )
    batch.made["flex", window] = mask
    return mask
