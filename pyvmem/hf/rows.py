# SPDX-License-Identifier: MIT
"""The rows of a `VMemCache`: slots 0 to n - 1 of a KV cache that is made when its shape is known.

Row i of the batch is slot i, always, so that a batch is one strided view of a virtual tensor.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pyvmem.context import Context
from pyvmem.errors import BadHandle, Busy, OutOfMemory, TooManyBatches
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.kvcache.config import invalid

__all__ = ["Rows", "Settings", "move_rows"]


@dataclass(frozen=True)
class Settings:
    """What a `VMemCache` was asked for; the rest comes with its first keys.

    Attributes:
        num_layers: layers with keys and values.
        max_batch: most rows. max_length: most tokens of a row.
        backend: None: "host" for keys on the CPU, else "auto".
        context: shared with others; None: the cache's own.
        options: other fields of `KVCacheConfig`.
    """

    num_layers: int
    max_batch: int
    max_length: int
    backend: str | None
    context: Context | None
    options: dict[str, Any] = field(default_factory=dict)


class Rows:
    """The KV cache behind all layers, and how many rows and tokens it has to hold.

    Attributes:
        cache: None before `open`.
        count: slots taken, from 0 on.
        length: tokens that pages are there for, in each of them.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache: KVCache | None = None
        self.count = 0
        self.length = 0
        self.layers: list[Any] = []  # those of the VMemCache; they hold tensors of the cache
        self._closed = False
        self._where: tuple[int, int, torch.Tensor] | None = None

    def open(self, key: torch.Tensor) -> KVCache:
        """The cache for such keys, ``[batch, num_kv_heads, any, head_dim]``.

        Raises:
            InvalidArgument: the keys have another shape, type or device than the first ones had.
            BadHandle: closed.
        """
        if self._closed:
            raise BadHandle("the VMemCache is closed", errno=errno.EBADF, op="VMemCache")
        heads, width = key.shape[1], key.shape[3]
        device = None if key.device.type == "cpu" else key.device.index or 0
        if self.cache is None:
            settings = self.settings
            config = KVCacheConfig(
                num_layers=settings.num_layers,
                num_kv_heads=heads,
                head_dim=width,
                dtype=key.dtype,
                max_batch=settings.max_batch,
                max_seq_len=settings.max_length,
                **settings.options,
            )
            backend = settings.backend or ("host" if device is None else "auto")
            cache = KVCache(config, settings.context, backend, device or 0)
            if cache.context.cuda_device != device:
                cache.close()
                raise invalid(
                    f"the keys are on {key.device}, back end {cache.context.info.backend}'s "
                    f"memory is on {_name(cache.context.cuda_device)}"
                )
            self.cache = cache
        config = self.cache.config
        have = (config.num_kv_heads, config.head_dim, str(config.dtype))
        want = (heads, width, str(key.dtype).removeprefix("torch."))
        if have != want or self.cache.context.cuda_device != device:
            raise invalid(
                f"keys of {want[0]} heads of {want[1]} {want[2]} on {key.device}; this cache has "
                f"{have[0]} heads of {have[1]} {have[2]} on {_name(self.cache.context.cuda_device)}"
            )
        return self.cache

    def hold(self, count: int, length: int) -> None:
        """Takes slots and maps pages until `count` rows of `length` tokens fit; never fewer.

        The pages for one token more are mapped in the background.

        Raises:
            InvalidArgument: more than the cache was made for; nothing changed.
            OutOfMemory: too few pages; nothing changed.
        """
        cache, settings = self.cache, self.settings
        assert cache is not None
        if count > settings.max_batch:
            raise invalid(
                f"a batch of {count} rows; this VMemCache has max_batch_size {settings.max_batch}",
                limit=settings.max_batch,
            )
        if length > settings.max_length:
            raise invalid(
                f"{length} tokens; this VMemCache has max_cache_len {settings.max_length}",
                limit=settings.max_length,
            )
        if count <= self.count and length <= self.length:
            return
        before = self.count
        rows, tokens = max(count, before), max(length, self.length)
        try:
            for row in range(before, rows):
                cache.claim(row)
                self.count = row + 1
            if cache.step(self._lengths(tokens)) == -1:
                raise self._short(cache, rows, tokens)
        except BaseException:
            self._drop(before)
            raise
        self.length = tokens
        if tokens < settings.max_length:
            with suppress(TooManyBatches):
                cache.step_async(self._lengths(tokens + 1))  # -1: a later `hold` will tell

    def where(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Positions [first, last) as an index, made once for all layers.

        Copying by an index is a kernel; a plain copy between contiguous tensors is CUDA's memcpy,
        which refuses addresses that were reserved plain.
        """
        if self._where is None or self._where[:2] != (first, last):
            self._where = (first, last, torch.arange(first, last, device=device))
        return self._where[2]

    def shrink(self, count: int, length: int) -> None:
        """Gives up rows from `count` on; `length`: what the longest layer holds now."""
        if count < self.count:
            self._drop(count)
        self.length = min(self.length, length) if count else 0

    def _drop(self, count: int) -> None:
        assert self.cache is not None
        while self.count > count:
            self.count -= 1
            self.cache.free_reqid(self.count)

    def _lengths(self, tokens: int) -> list[int]:
        return [tokens] * self.count + [0] * (self.settings.max_batch - self.count)

    def _short(self, cache: KVCache, rows: int, tokens: int) -> OutOfMemory:
        layout, stats = cache.layout, cache.stats()
        need = rows * layout.pages_for(tokens) * layout.num_tensors
        return OutOfMemory(
            f"VMemCache: {rows} rows of {tokens} tokens need {need} pages of {layout.page_size} "
            f"bytes; there are {stats.total_pages}",
            errno=errno.ENOMEM,
            op="VMemCache",
            bytes=need * layout.page_size,
            limit=stats.total_pages * layout.page_size,
        )

    def close(self) -> None:
        """Drops the layers' tensors and closes the cache; again: nothing.

        Raises:
            Busy: tensors that `update` returned live elsewhere; the layers are empty all the same.
        """
        for layer in self.layers:
            layer.forget()
        if self.cache is not None:
            self.cache.close()
        self._closed = True

    def close_quietly(self) -> None:
        """`close` when the `VMemCache` itself is gone; with tensors elsewhere the cache stays."""
        with suppress(Busy):
            self.close()


def _name(device: int | None) -> str:
    return "cpu" if device is None else f"cuda:{device}"


def move_rows(rows: torch.Tensor, first: int, last: int, source: Sequence[int]) -> None:
    """Tokens [first, last) of row i become those of row ``source[i]``, in one layer's K or V.

    Args:
        rows: ``[slots, max_length, num_kv_heads, head_dim]``.
        source: for each new row, an old one.
    """
    moved = [(new, old) for new, old in enumerate(source) if new != old]
    if not moved or first >= last:
        return
    to, of = (torch.tensor(part, device=rows.device) for part in zip(*moved, strict=True))
    valid = rows[:, first:last]
    valid[to] = valid[of]  # the right side is a copy, made first
