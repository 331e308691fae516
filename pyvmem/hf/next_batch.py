# SPDX-License-Identifier: MIT
"""Builds a batch request by request, and runs its attention in every layer."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from pyvmem.attention import Attention, Batch, UpProjections
from pyvmem.engine import Request, RequestCache
from pyvmem.errors import Busy, OutOfMemory, TooManyBatches
from pyvmem.hf.shapes import twice
from pyvmem.kvcache import KVCache
from pyvmem.plumbing.validation import invalid

__all__ = ["NextBatch", "close_quietly"]

_log = logging.getLogger("pyvmem.hf")


class NextBatch:
    """Collects requests for `NamedRequests` by name, then turns them into a batch of slots.

    Attributes:
        queued: the name of each request, with its numbers of past and new tokens; `begin` empties
            the list.
    """

    def __init__(self, cache: RequestCache, attention: Attention) -> None:
        self._cache = cache
        self._attention = attention
        self._batch: Batch | None = None
        self._seen: set[int] = set()  # layers whose rows have been written
        self.queued: list[tuple[str, int, int]] = []

    def queue(self, name: str, past: int, new: int) -> None:
        """See `NamedRequests.queue`."""
        self.queued.append((name, past, new))

    def leave(self, name: str) -> None:
        """Removes a request from the queue."""
        self.queued = [one for one in self.queued if one[0] != name]

    def begin(
        self, requests: Mapping[str, Request], tokens: Mapping[Request, int], stream: Any
    ) -> None:
        """Steps the cache, and makes the queued requests the current batch.

        Starts mapping pages for one more token per queued request in the background.

        Args:
            requests: the requests by name.
            tokens: number of tokens for which each request has pages, whether queued or not.
            stream: the stream on which the model runs.

        Raises:
            OutOfMemory: too few pages are free.
            VMemError: as for `RequestCache.extend`.
        """
        cache = self._cache
        # A forked prompt's last token is computed by each answer, so the prompt itself may have no
        # token in this batch.
        queued, self.queued = [one for one in self.queued if one[2]], []
        lengths = {one: max(count, one.length) for one, count in tokens.items()}
        if cache.extend(lengths, stream) is not None:
            raise OutOfMemory(
                "pages that `hold` mapped are no longer mapped", errno=errno.ENOMEM, op="attend"
            )
        batch = [requests[name] for name, _, _ in queued]
        new = [count for _, _, count in queued]
        kv_lens = [past + count for _, past, count in queued]
        self._seen = set()
        self._batch = self._attention.batch([one.slot for one in batch], new, kv_lens)
        ahead = {one: min(one.length + 1, cache.max_seq_len) for one in batch}
        with suppress(TooManyBatches):  # the next `hold` maps the pages
            cache.prepare(ahead)  # the next `hold` reports a shortage of memory

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        up: UpProjections | None,
    ) -> torch.Tensor:
        """See `NamedRequests.attend`."""
        batch = self._batch
        if batch is None:
            raise invalid("attend without a batch", op="vmem_continuous_batching")
        count = batch.tokens
        if q.shape[0] < count:
            raise invalid(
                f"{q.shape[0]} tokens; the batch has {count}", op="vmem_continuous_batching"
            )
        if layer in self._seen:
            raise twice(layer)
        self._seen.add(layer)
        latent = self._attention.is_latent(layer)
        self._attention.write(layer, k[:count], None if latent else v[:count], batch)
        out = self._attention(q[:count], layer, batch, scale=scale, up=up)
        if q.shape[0] > count:
            out = torch.cat([out, out.new_zeros((q.shape[0] - count, *out.shape[1:]))])
        return out

    def window(self, layer: int) -> int:
        """Returns the layer's window in tokens; 0 for no window."""
        return self._attention.window(layer)

    def end(self) -> None:
        """Drops the batch and the queued requests."""
        self._batch = None
        self.queued = []


def close_quietly(cache: KVCache, attention: Attention, stream: Any = None) -> None:
    """Closes the attention and the cache; logs a warning if live tensors keep it open."""
    attention.close()
    cache.internals.users.clear()
    try:
        cache.close(stream)
    except Busy:
        gc.collect()  # tracebacks and compilers keep tensors in reference cycles
        try:
            cache.close(stream)
        except Busy as error:
            _log.warning("the KV cache stays open: %s", str(error))
