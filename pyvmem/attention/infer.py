# SPDX-License-Identifier: MIT
"""FlashInfer: a call per request in a prefill, a paged call with the trivial block table otherwise.

Written for flashinfer-python 0.6.14, whose wheel includes its headers; a kernel is compiled on its
first call, which needs nvcc, a C++ compiler and ninja. Its batched call for contiguous rows
(ragged) requires requests without gaps between them. Slots have gaps, so this call is used only for
a step that consists of one long prompt.

Both calls for contiguous rows are passed a view that ends with the request, so they never read past
it.
The paged call (``fa2`` kernels) checks each row it loads against the length.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from pyvmem.attention.flash import why_not_blocks
from pyvmem.attention.reads import BLOCK, Blocks
from pyvmem.kvcache.config import PREFILL_TOKENS

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch
    from pyvmem.attention.layers import Form

__all__ = ["flashinfer", "why_not"]

_WORKSPACE = 256 << 20
_HEAD_DIMS = (64, 128, 256)
# A single prompt of at least this many new tokens uses the ragged call, which is 1.08 times as fast
# at that length on an H200. At 2K or 8K it is 0.98 to 1.03 times as fast, and planning it costs
# more than it gains.
_LONG = 65536


def why_not(form: Form, device: torch.device) -> str:
    """Returns why FlashInfer cannot be used; "" if it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "it needs compute capability 8.0"
    if form.dtype not in ("float16", "bfloat16"):
        return f"it has no {form.dtype}"
    if form.head_dim not in _HEAD_DIMS or form.v_head_dim != form.head_dim:
        return f"head_dim must be one of {', '.join(map(str, _HEAD_DIMS))}, not {form.head_dim}"
    return why_not_blocks(form)


def flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int = 0
) -> torch.Tensor:
    """Makes one call for the batch, or one per request if the step is a prefill.

    A step is a prefill if a request has more than `PREFILL_TOKENS` new tokens.
    """
    if batch.max_q <= PREFILL_TOKENS:
        return _paged(q, k, v, batch, scale, window)
    if len(batch.reqids) == 1 and batch.max_q >= _LONG and not window:
        return _ragged(q, k, v, batch, scale)
    call: Any = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for reqid, q_len, kv_len in zip(batch.reqids, batch.q_lens, batch.kv_lens, strict=True):
        new, seen = slice(start, start + q_len), slice(max(0, kv_len - q_len - window + 1), kv_len)
        seen = seen if window else slice(kv_len)
        out[new] = call(
            q[new],
            k[reqid, seen],
            v[reqid, seen],
            causal=True,
            kv_layout="NHD",
            sm_scale=scale,
            window_left=window - 1,
        )
        start += q_len
    return out


class _Wrapper:
    """FlashInfer's wrapper for batched calls; replanned when the batch's lengths change."""

    def __init__(self, kind: str, backend: str, device: torch.device) -> None:
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        prefill: Any = importlib.import_module("flashinfer.prefill")
        self.it = getattr(prefill, kind)(workspace, "NHD", backend=backend)
        # the last planned batch's `made` dictionary; planning a batch with other lengths
        # replaces it
        self.planned: Any = None


@functools.cache
def _wrapper(kind: str, backend: str, device: torch.device, key: tuple[Any, ...]) -> _Wrapper:
    """Returns the wrapper for a layer shape; a plan is valid for only one shape."""
    return _Wrapper(kind, backend, device)


def _ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """Runs the batched call for contiguous rows on a batch of one request."""
    [reqid], [kv_len] = batch.reqids, batch.kv_lens
    shape = (q.shape[1], k.shape[2], q.shape[2])
    kind = "BatchPrefillWithRaggedKVCacheWrapper"
    wrapper = _wrapper(kind, "auto", q.device, (*shape, scale, q.dtype))
    if wrapper.planned is not batch.made:
        wrapper.it.plan(
            _sums(batch.q_lens),
            _sums(batch.kv_lens),
            *shape,
            causal=True,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        wrapper.planned = batch.made
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    found: torch.Tensor = wrapper.it.run(q, k[reqid, :kv_len], v[reqid, :kv_len], out=out)
    return found


def _paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float, window: int
) -> torch.Tensor:
    blocks = Blocks.of(k.shape[1], k.stride(0), k.stride(1))
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    kind = "BatchPrefillWithPagedKVCacheWrapper"
    key = (heads, kv_heads, dim, blocks, scale, window, q.dtype)
    wrapper = _wrapper(kind, "fa2", q.device, key)
    if wrapper.planned is not batch.made:
        _plan(wrapper.it, batch, blocks, (heads, kv_heads, dim), scale, window, q.dtype)
        wrapper.planned = batch.made
    out: torch.Tensor = wrapper.it.run(q, (blocks.view(k), blocks.view(v)), out=torch.empty_like(q))
    return out


def _plan(
    wrapper: Any,
    batch: Batch,
    blocks: Blocks,
    shape: tuple[int, int, int],
    scale: float,
    window: int,
    dtype: torch.dtype,
) -> None:
    """Plans a call, with the lengths in blocks on the CPU and the block numbers on the device."""
    counts = [-(-length // BLOCK) for length in batch.kv_lens]
    last = [
        length - (count - 1) * BLOCK for length, count in zip(batch.kv_lens, counts, strict=True)
    ]
    wide = torch.arange(blocks.per_slot, device=batch.device)
    used = wide[None] < torch.tensor(counts, device=batch.device)[:, None]
    wrapper.plan(
        _sums(batch.q_lens),
        _sums(counts),
        batch.block_table(blocks)[used],
        torch.tensor(last, dtype=torch.int32),
        *shape,
        BLOCK,
        causal=True,
        sm_scale=scale,
        window_left=window - 1,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


def _sums(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
