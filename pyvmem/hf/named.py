# SPDX-License-Identifier: MIT
"""`NamedRequests`: manages requests by name, on top of the interface for serving engines.

It provides the cache operations of continuous batching: map pages for a request's tokens, free a
request, share a prefix, fork, and attend over the current batch. It does not depend on
transformers; the modules beside it adapt it to each version.

A step of the engine:

    hold(name, tokens)           gives a request in the next batch a slot and pages, if available
    queue(name, past, new)       adds a request to the batch
    attend(layer, q, k, v)       in every layer; the first call after `queue` steps the cache and
                                 starts mapping memory for the next token
    computed(name, new, tokens)  after the batch has run: allows these rows to be recorded
    drop(name)                   frees a finished request

Call it from one thread at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pyvmem.attention import Attention, UpProjections
from pyvmem.engine import Namespace, Prefix, Request, RequestCache, Shortage, State
from pyvmem.errors import VMemError
from pyvmem.features.table import FORK
from pyvmem.hf.next_batch import NextBatch, close_quietly
from pyvmem.kvcache import KVCache
from pyvmem.plumbing.reentry import when_collected
from pyvmem.plumbing.validation import invalid

__all__ = ["NamedRequests"]


def _no_tokens() -> list[int]:
    return []


def _no_namespace() -> Hashable:
    return None


@dataclass
class _Request:
    """A request with a slot.

    Attributes:
        request: the cache's request object.
        tokens: number of tokens for which the request has pages.
        valid: number of rows whose keys and values have been computed.
        ids: a function that returns the token ids of at least the valid rows; it is called when
            rows are recorded.
        recorded: number of prompt tokens recorded so far.
    """

    request: Request
    tokens: int
    valid: int = 0
    ids: Callable[[], list[int]] = _no_tokens
    recorded: int = 0


class NamedRequests:
    """Manages requests by name on a cache that it takes over.

    If `close` is not called, memory is freed when the object is garbage-collected.

    Args:
        cache: the cache to take over; `close` closes it.
        kernel: attention kernel, see `pyvmem.attention.Attention`.
        sharing: whether to record prompts for reuse by requests that begin with the same tokens.
        windows: see `Attention`.
        v_head_dim: see `Attention`.

    Attributes:
        kvcache: the cache, for its statistics.
        parts: the cache's groups of layers.
        choice: the first layer's attention kernel, and why the others were not chosen.
        sharing: true if prompts are shared: `sharing` was set, and the back end can map a page
            twice. If layers have a window, a prefix matches only if its window's rows were
            recorded.
        stream: CUDA stream on which the model runs; None: torch's current stream.
        namespace: a function that is called when a request gets its slot. It returns a key for
            everything other than tokens that affects keys and values, such as the model's adapters.
            Prefixes are shared only within a namespace.
    """

    def __init__(
        self,
        cache: KVCache,
        kernel: str = "auto",
        sharing: bool = True,
        windows: Sequence[int] | None = None,
        v_head_dim: int = 0,
    ) -> None:
        self.kvcache = cache
        self.parts = cache.caches
        config = self.parts[0].config
        self.max_batch, self.max_seq_len = config.max_batch, config.max_seq_len
        self._page = self.parts[0].layout.page_size
        attention = Attention(cache, kernel, windows=windows, v_head_dim=v_head_dim)
        self.choice = attention.choice
        self._attention = attention
        self._cache = RequestCache(cache)
        self._next = NextBatch(self._cache, attention)
        self._finalizer = when_collected(self, partial(close_quietly, cache, attention))
        self._slides = any(part.config.window for part in self.parts)
        self.can_fork = not FORK.lacks(cache.context.info)
        self.sharing = sharing and self.can_fork
        self.stream: Any = None
        self.namespace: Callable[[], Hashable] = _no_namespace
        self._requests: dict[str, _Request] = {}
        self._new: dict[str, Prefix] = {}  # prompts not yet recorded

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    # ---- room ------------------------------------------------------------------------------------

    def hold(self, name: str, tokens: int) -> bool:
        """Maps pages for `tokens` tokens of a request, which first gets a slot if it has none.

        Returns:
            False, with nothing changed, if every slot is in use, or if there is too little memory
            even after all idle pages have been reclaimed.

        Raises:
            InvalidArgument: a slot cannot hold that many tokens.
            VMemError: as for `KVCache.step`.
        """
        cache, longest = self._cache, self.max_seq_len
        if tokens > longest:
            raise invalid(
                f"request {name}: {tokens} tokens; max_seq_len is {longest}",
                op="vmem_continuous_batching",
            )
        known = self._requests.get(name)
        if known is not None:
            return self._map(known, tokens)
        prompt = self._new.get(name)
        request = cache.begin(tokens if prompt is None else prompt, self._namespace())
        if isinstance(request, Shortage):
            return False
        new, held = _Request(request, 0), False
        try:
            held = self._map(new, tokens)
        finally:
            if not held:
                cache.release(request, stream=self.stream)
                if prompt is not None:  # `hold` will be called again
                    self.kvcache.internals.withdraw_prompt()
        if held:
            self._new.pop(name, None)
            self._requests[name] = new
        return held

    def _held(self, name: str) -> _Request:
        """Returns the request with this name; raises InvalidArgument if the request has no slot."""
        known = self._requests.get(name)
        if known is None:
            raise invalid(f"request {name} has no slot", op="vmem_continuous_batching")
        return known

    def _map(self, one: _Request, tokens: int) -> bool:
        guard = any(part.layout.guard for part in self.parts)  # mapped by a prefill's last step
        if guard or tokens > self._cache.capacity(one.request):
            wanted = max(tokens, one.request.length)
            if self._cache.extend({one.request: wanted}, self.stream) is not None:
                return False
        one.tokens = tokens
        return True

    def _namespace(self) -> Namespace | None:
        """Returns the namespace for a request that is being admitted."""
        name = self.namespace()
        return None if name is None else self._cache.namespace(name)

    def longest(self) -> int:
        """Returns the length in tokens of the longest request that fits in a slot and in memory."""
        total = self.pages()[1]
        if self._pages_of(self.max_seq_len) <= total:
            return self.max_seq_len
        return bisect_right(range(self.max_seq_len), total, key=self._pages_of) - 1

    def _pages_of(self, tokens: int) -> int:
        """Returns how many pages `tokens` tokens need, including rows that windows will drop."""
        layouts = [part.layout for part in self.parts]
        return sum(one.pages_for(tokens) * one.num_tensors for one in layouts)

    def pages(self) -> tuple[int, int]:
        """Returns how many physical pages requests can still get, and how many exist in total."""
        free, total = self.kvcache.memory.obtainable()
        return free // self._page, total // self._page

    def missing(self, name: str, tokens: int) -> int:
        """Returns the number of physical pages that the request still needs for `tokens` tokens."""
        one = self._requests.get(name)
        reqid = None if one is None else one.request.slot
        return self.kvcache.memory.for_request(reqid, tokens) // self._page

    def granted(self, name: str) -> int:
        """Returns how many pages a request has per tensor of the first group; 0 without a slot."""
        if name not in self:
            return 0
        return self.parts[0].snapshot()[self._requests[name].request.slot].granted_pages

    def room(self, name: str, tokens: int) -> bool:
        """Returns true if `hold` would succeed; changes nothing."""
        if name not in self._requests and len(self) >= self.max_batch:
            return False
        fits = tokens <= self.max_seq_len
        return fits and self.missing(name, tokens) <= self.pages()[0]

    def drop(self, name: str, record: bool = True) -> None:
        """Frees a request's slot; does nothing if the request has no slot.

        Args:
            name: the request.
            record: whether to keep its rows, until memory runs short, for requests that begin with
                the same tokens.
        """
        self._next.leave(name)
        self._new.pop(name, None)
        one = self._requests.get(name)
        if one is None:
            return
        if record and self.sharing and one.valid >= self.kvcache.sharing_unit:
            with suppress(VMemError):  # on failure, the rows are not recorded
                self._cache.release(one.request, one.ids()[: one.valid], self.stream)
        if one.request.state is not State.ENDED:
            self._cache.release(one.request, stream=self.stream)
        del self._requests[name]

    def drop_all(self, forget: bool = False) -> None:
        """Drops all requests and, with `forget`, evicts recorded prefixes and frees idle memory."""
        for name in list(self._requests):
            self.drop(name, record=not forget)
        if forget:
            self.kvcache.trim(prefixes=True)

    # ---- sharing ---------------------------------------------------------------------------------

    def match(self, name: str, prompt: list[int]) -> int:
        """Gives a request without a slot the longest recorded prefix of its prompt.

        Returns:
            The number of tokens that the request now holds, always fewer than the prompt has; 0 if
            no prefix is recorded or no slot is free.
        """
        if not self.sharing or name in self._requests:
            return 0
        with self._cache.match(prompt, self._namespace()) as found:
            request = self._cache.begin(found, stream=self.stream) if found.length else None
        self._new.pop(name, None)
        if not found.length:
            self._new[name] = found
        if request is None or isinstance(request, Shortage):
            return 0
        tokens = request.length
        self._requests[name] = _Request(request, tokens, tokens, lambda: prompt, tokens)
        return tokens

    def fork(self, name: str, child: str, tokens: int) -> bool:
        """Creates a request from a parent's first rows.

        Returns:
            False if memory or slots run out, or if the back end cannot map a page twice.

        Raises:
            InvalidArgument: the parent has no slot, the child has one, or `tokens` is more than the
                parent holds.
        """
        parent = self._held(name)
        if child in self._requests:
            raise invalid(
                f"request {child} already has a slot; a fork of {name} needs a new name",
                op="vmem_continuous_batching",
            )
        if not self.can_fork:
            return False
        forked = self._cache.fork(parent.request, 1, tokens, self.stream)
        if isinstance(forked, Shortage):
            return False
        valid = min(tokens, parent.valid)
        self._requests[child] = _Request(forked[0], tokens, valid, parent.ids, tokens)
        return True

    def computed(self, name: str, new: int, ids: Callable[[], list[int]], prompt: int) -> None:
        """Marks a request's next rows as computed, and records the prompt once it is complete.

        With windowed layers, the prompt is recorded after each chunk, since another prompt may
        diverge there, and the rows of the chunk's last window are still mapped.

        Args:
            name: the request; ignored if it has no slot.
            new: number of rows.
            ids: a function that returns the request's token ids, at least for all rows so far.
            prompt: number of tokens in the request's prompt.
        """
        one = self._requests.get(name)
        if one is None:
            return
        one.valid += new
        one.ids = ids
        end = min(one.valid, prompt)
        if not self.sharing or end == one.recorded or (end < prompt and not self._slides):
            return
        unit = self.kvcache.sharing_unit
        if end // unit > one.recorded // unit:
            self._cache.record(one.request, ids()[:end], self.stream)
        one.recorded = end

    # ---- the batch -------------------------------------------------------------------------------

    def queue(self, name: str, past: int, new: int) -> None:
        """Adds a request to the next batch, with `new` tokens after `past` tokens.

        Raises:
            InvalidArgument: the request has no slot.
        """
        self._held(name)
        self._next.queue(name, past, new)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        up: UpProjections | None = None,
    ) -> torch.Tensor:
        """Writes the batch's new rows, then computes each request's causal attention over its rows.

        Args:
            layer: index of a layer of the cache.
            q: ``[tokens, num_heads, head_dim]``; tokens beyond the batch are padding.
            k, v: ``[tokens, num_kv_heads, head_dim]``; for a latent, `v` is ignored.
            scale: scale of the scores; None: ``head_dim ** -0.5``.
            up: see `Attention`.

        Returns:
            The result of `Attention`; zeros for padding.

        Raises:
            InvalidArgument: fewer tokens are passed than were queued, or no batch was queued.
        """
        if self._next.queued:
            requests = {name: one.request for name, one in self._requests.items()}
            tokens = {one.request: one.tokens for one in self._requests.values()}
            self._next.begin(requests, tokens, self.stream)
        return self._next.attend(layer, q, k, v, scale, up)

    def window(self, layer: int) -> int:
        """Returns the layer's window in tokens; 0 for no window."""
        return self._next.window(layer)

    # ---- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees everything and closes the cache. Idempotent.

        If the cache's tensors are still in use elsewhere, it stays open, and a warning is logged.
        """
        if self._finalizer.detach() is None:
            return
        self._requests.clear()
        self._next.end()
        close_quietly(self.kvcache, self._attention, self.stream)
