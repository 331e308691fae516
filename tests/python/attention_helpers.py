# SPDX-License-Identifier: MIT
"""Fills caches with random rows, followed by NaNs that kernels must not read, and computes
reference attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import pyvmem
from pyvmem import KVCache, KVCacheConfig
from pyvmem.kvcache import LayeredCache, LayerShape

LAYERS = 2


@dataclass(frozen=True)
class Case:
    """A batch: its requests in token order, each with its number of new tokens and its length.
    Together they determine which path a kernel takes.
    """

    name: str
    reqids: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


CASES = (
    Case("decode", (0, 1, 2, 3), (1, 1, 1, 1), (1, 40, 131, 300)),
    Case("decode, equal lengths", (1, 2, 3), (1, 1, 1), (77, 77, 77)),
    Case("prefill", (0, 2), (130, 5), (130, 5)),
    Case("chunked prefill", (3, 1), (20, 33), (300, 34)),
    Case("one request's chunk", (2,), (100,), (130,)),
    Case("mixed, out of order", (5, 0, 4, 1), (1, 64, 7, 1), (260, 64, 90, 2)),
)


@contextmanager
def filled(
    context: pyvmem.Context,
    case: Case,
    dtype: str = "float32",
    heads: int = 2,
    width: int = 32,
    poison: bool = True,
    **changes: Any,
) -> Iterator[KVCache]:
    """Yields a cache whose requests hold random rows; the rest of their pages hold NaN, or zeros if
    `poison` is false.
    """
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": heads,
        "head_dim": width,
        "dtype": dtype,
        "max_batch": 6,
        "max_seq_len": 512,
        **changes,
    }
    torch.manual_seed(3)
    with KVCache(KVCacheConfig(**values), context) as cache:
        lens = [0] * 6
        for _ in range(6):
            cache.alloc_reqid()
        for reqid, length in zip(case.reqids, case.kv_lens, strict=True):
            lens[reqid] = length
        assert cache.step(lens) == 0
        for layer in range(LAYERS):
            for tensor in (cache.k(layer), cache.v(layer)):
                for slot in cache.snapshot():
                    row = cache.layout.row_bytes
                    rows = min(slot.granted_pages * cache.layout.page_size // row, 512)
                    tensor[slot.reqid, :rows] = float("nan") if poison else 0.0
                    tensor[slot.reqid, : slot.seq_len].normal_()
        del tensor
        yield cache


def reference(q: torch.Tensor, cache: KVCache, layer: int, case: Case) -> torch.Tensor:
    """Computes attention request by request and token by token, in float64 on the CPU."""
    q, out, start = q.double().cpu(), [], 0
    repeat = q.shape[1] // cache.config.num_kv_heads
    for reqid, q_len, kv_len in zip(case.reqids, case.q_lens, case.kv_lens, strict=True):
        k, v = (
            tensor[reqid, :kv_len].double().cpu().repeat_interleave(repeat, 1)
            for tensor in (cache.k(layer), cache.v(layer))
        )
        for token in range(q_len):
            seen = kv_len - q_len + token + 1
            scores = torch.einsum("hd,nhd->hn", q[start + token], k[:seen]) * q.shape[2] ** -0.5
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[:seen]))
        start += q_len
    return torch.stack(out)


def queries(cache: KVCache, case: Case, repeat: int) -> torch.Tensor:
    """Returns random queries with `repeat` query heads per KV head."""
    config, device = cache.config, cache.k(0).device
    shape = (sum(case.q_lens), config.num_kv_heads * repeat, config.head_dim)
    return torch.randn(shape, dtype=getattr(torch, str(config.dtype)), device=device)


# ---- unequal layers -------------------------------------------------------------------------


def fill(cache: LayeredCache, case: Case, poison: bool = True) -> None:
    """Writes random values to the visible rows, and NaN (zeros if `poison` is false) to all other
    mapped rows.
    """
    torch.manual_seed(3)
    lens = [0] * 6
    for _ in range(6):
        cache.alloc_reqid()
    for reqid, length in zip(case.reqids, case.kv_lens, strict=True):
        lens[reqid] = length
    assert cache.step(lens) == 0
    for layer, shape in enumerate(cache.layers):
        if not isinstance(shape, LayerShape):
            continue
        for tensor in (cache.k(layer), *([cache.v(layer)] if shape.v_head_dim else [])):
            for reqid, new, length in zip(case.reqids, case.q_lens, case.kv_lens, strict=True):
                first = max(0, length - new - shape.window + 1) if shape.window else 0
                part = next(
                    one
                    for one in cache.caches
                    if one.config.head_dim == tensor.shape[3]
                    and one.config.num_kv_heads == tensor.shape[2]
                    and one.config.window == shape.window
                )
                tensor[reqid, : part.readable_rows([reqid])[0]] = float("nan") if poison else 0.0
                tensor[reqid, first:length].normal_()


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, window: int
) -> torch.Tensor:
    """Computes reference attention in float64, token by token, from whole K and V tensors."""
    out, start = [], 0
    for reqid, new, length in zip(case.reqids, case.q_lens, case.kv_lens, strict=True):
        for token in range(new):
            end = length - new + token + 1
            seen = slice(max(0, end - window) if window else 0, end)
            keys, values = (
                one[reqid, seen].double().cpu().repeat_interleave(q.shape[1] // one.shape[2], 1)
                for one in (k, v)
            )
            row = q[start + token].double().cpu()
            scores = torch.einsum("hd,nhd->hn", row, keys) * q.shape[2] ** -0.5
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
        start += new
    return torch.stack(out)
