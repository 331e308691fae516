# SPDX-License-Identifier: MIT
"""Attention over the slots of a `pyvmem.KVCache`, by kernels that others wrote.

    attend = Attention(cache)                       # picks a kernel; print(attend.choice)
    batch = attend.batch(reqids, q_lens, kv_lens)   # once a step, after cache.step
    for layer in range(layers):
        attend.write(layer, key, value, batch)      # the new tokens' rows
        out = attend(q, layer, batch)

A slot is contiguous in virtual memory, so these are calls of ordinary kernels, and nothing is
gathered; a paged kernel takes a slot, too, by a block table that just counts. What a kernel reads
past a request's length is known (`KERNELS`), and a call that could meet a row without memory is
refused before it is made. `attention` does the same in one call. Needs torch.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pyvmem.attention.batch import Batch, OverRead, Run
from pyvmem.attention.kernels import (
    KERNELS,
    Choice,
    choose,
    overread_rows,
    probe,
)
from pyvmem.kvcache.config import PREFILL_TOKENS, invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache

__all__ = [
    "KERNELS",
    "Attention",
    "Batch",
    "Choice",
    "OverRead",
    "Run",
    "attention",
    "choose",
    "overread_rows",
    "probe",
]


class Attention:
    """A kernel, and the tensors of a cache that it works on.

    Args:
        cache: must outlive this object, which must be closed first.
        kernel: "auto", "fa3", "fa3-paged", "fa2", "flex" or "sdpa".

    Attributes:
        choice: the kernels for prefills and for decoding, and why not another.

    Raises:
        InvalidArgument: the kernel cannot be used on this cache; the text says why.
    """

    def __init__(self, cache: KVCache, kernel: str = "auto") -> None:
        layers = range(cache.config.num_layers)
        self._cache = cache
        self._k = [cache.k(layer) for layer in layers]
        self._v = [cache.v(layer) for layer in layers]
        self._device = self._k[0].device
        self.choice = choose(cache, self._device, kernel)

    def batch(self, reqids: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Batch:
        """Checks a step's lengths; the same batch serves all layers. See `Batch`.

        Its kernel is `choice.decode` where no request has more than `PREFILL_TOKENS` new tokens,
        else `choice.name`; or `choice.decode` then, too, where that one may read rows that are not
        mapped.

        Raises:
            OverRead: both may. InvalidArgument: as `Batch`.
        """
        decode, prefill = self.choice.decode, self.choice.name
        kernel = decode if max(q_lens, default=0) <= PREFILL_TOKENS else prefill
        try:
            return self._batch(kernel, reqids, q_lens, kv_lens)
        except OverRead:
            if kernel == decode:
                raise
            return self._batch(decode, reqids, q_lens, kv_lens)

    def _batch(
        self, kernel: str, reqids: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]
    ) -> Batch:
        reads = KERNELS[kernel].reads(self._device)
        return Batch(self._cache, reqids, q_lens, kv_lens, self._device, kernel, reads)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        """Puts the new tokens' rows, ``[tokens, num_kv_heads, head_dim]``, into their slots."""
        for name, rows in (("key", key), ("value", value)):
            self._check(name, rows, batch, self._cache.config.num_kv_heads)
        where = (batch.slots, batch.positions)
        self._k[layer][where] = key
        self._v[layer][where] = value

    def __call__(
        self, q: torch.Tensor, layer: int, batch: Batch, *, scale: float | None = None
    ) -> torch.Tensor:
        """Causal attention of the new tokens over their own requests.

        Args:
            q: ``[tokens, num_heads, head_dim]``, in the cache's type; a multiple of the KV heads.
            layer: of the cache; its new rows must have been written.
            batch: of this object.
            scale: of the scores; None: ``head_dim ** -0.5``.

        Returns:
            As `q`.

        Raises:
            InvalidArgument: another shape, type or device.
        """
        self._check("q", q, batch, 0)
        k, v = self._k[layer], self._v[layer]
        if q.shape[1] % k.shape[2]:
            raise invalid(f"{q.shape[1]} heads are not a multiple of {k.shape[2]} KV heads")
        if batch.kernel not in KERNELS:
            raise invalid(f"a batch with kernel {batch.kernel!r}; take one of Attention.batch")
        run = KERNELS[batch.kernel].run
        return run(q, k, v, batch, q.shape[2] ** -0.5 if scale is None else scale)

    def close(self) -> None:
        """Lets go of the cache's tensors, so that the cache can be closed."""
        self._k, self._v = [], []
        if "flex" in (self.choice.name, self.choice.decode):
            gc.collect()  # the compiler's traces hold their inputs in cycles of references

    def _check(self, name: str, rows: torch.Tensor, batch: Batch, heads: int) -> None:
        config = self._cache.config
        want = (batch.tokens, heads or (rows.shape[1] if rows.ndim == 3 else 1), config.head_dim)
        kind = str(rows.dtype).removeprefix("torch.")
        if tuple(rows.shape) != want or kind != config.dtype or rows.device != self._device:
            raise invalid(
                f"{name} is {tuple(rows.shape)} {kind} on {rows.device}; wanted {want} "
                f"{config.dtype} on {self._device}"
            )


def attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    reqids: Sequence[int],
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    scale: float | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """`Attention` in one call, for those who need no speed: lengths are checked every time.

    Args:
        q: the requests' new tokens, one request after the other, ``[tokens, heads, head_dim]``.
        cache: whose rows, with the new tokens' already written.
        layer: of the cache.
        reqids: see `Batch`.
        q_lens: see `Batch`.
        kv_lens: see `Batch`.
        scale: see `Attention`.
        kernel: see `Attention`.
    """
    attend = Attention(cache, kernel)
    try:
        return attend(q, layer, attend.batch(reqids, q_lens, kv_lens), scale=scale)
    finally:
        attend.close()
