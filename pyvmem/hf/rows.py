# SPDX-License-Identifier: MIT
"""The rows of a `VMemCache`: slots 0 to n - 1 of a KV cache, created once its shape is known.

Row i of the batch is always slot i, so a batch is one strided view of a virtual tensor.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pyvmem.compiled import apart
from pyvmem.errors import BadHandle, Busy, OutOfMemory, TooManyBatches
from pyvmem.hf.shapes import Handed, handed_over, stored_shapes
from pyvmem.kvcache import GroupView, KVCache, LayeredCache, LayerShape, StateShape
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.config import AHEAD_TOKENS
from pyvmem.kvcache.layered_cache import cache_of
from pyvmem.memory.context import Context
from pyvmem.models.shapes import Shape, classes_of
from pyvmem.plumbing.validation import invalid

__all__ = ["GIVEN", "Rows", "Settings", "TakesRows", "move_rows", "uncompiled"]

GIVEN = ("dtype", "max_batch", "max_seq_len")
"""Fields of `KVCacheConfig` that are set from other arguments, so they are not options."""


uncompiled = apart(
    "a VMemCache maps memory when it is called, and its rows are written in place: compile the "
    "model without fullgraph=True, which leaves these calls out"
)
"""Decorator for all methods that map pages, or access tensors with holes (see `pyvmem.compiled`).
"""


@dataclass(frozen=True)
class Settings:
    """The arguments of a `VMemCache`. All other dimensions come from the first keys.

    Attributes:
        text: the language model's configuration.
        max_batch: maximum number of rows.
        max_length: maximum number of tokens per row.
        backend: as for `pyvmem.Context`; None: "host" for keys on the CPU, else "auto".
        context: a context to share; None: the cache opens its own.
        options: other fields of `KVCacheConfig`.
        budget: memory shared with other caches of the context.
        contiguous: whether `update` returns contiguous copies instead of views.
    """

    text: Any
    max_batch: int
    max_length: int
    backend: str | None
    context: Context | None
    options: dict[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    contiguous: bool = False


class TakesRows:
    """Implements transformers' methods that select rows of a batch, on top of `_take`."""

    is_initialized: bool
    batch_size: int
    _rows: Rows

    def _check_rows(self, source: Sequence[int]) -> None:
        """Raises InvalidArgument if `source` is empty or contains a row outside the batch."""
        wrong = [row for row in source if not 0 <= row < self.batch_size]
        if wrong or not source:
            raise invalid(
                f"row {wrong[0]} is not between 0 and {self.batch_size - 1}"
                if wrong
                else "no rows remain; use reset",
                limit=self.batch_size,
                op="VMemCache",
            )

    def _take(self, source: Sequence[int]) -> None:
        """Makes row i a copy of row ``source[i]``; copies only the tokens that differ."""
        raise NotImplementedError

    @uncompiled
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i a copy of row ``beam_idx[i]``."""
        self._take(beam_idx.tolist())

    @uncompiled
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, consecutively."""
        if self.is_initialized:
            self._rows.check_count(self.batch_size * operator.index(repeats))
            self._take([row for row in range(self.batch_size) for _ in range(repeats)])

    @uncompiled
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the given rows, in the given order; `indices` may be a mask."""
        if self.is_initialized:
            rows = torch.as_tensor(indices).cpu()
            try:
                chosen = torch.arange(self.batch_size)[rows].tolist()
            except IndexError as error:
                raise invalid(
                    f"rows {rows.tolist()!r:.80} of a batch of {self.batch_size}: {error}",
                    limit=self.batch_size,
                    op="VMemCache",
                ) from None
            self._take(chosen)


class Rows:
    """The KV cache behind all layers, and the number of rows and tokens that it must hold.

    Attributes:
        cache: None before `open`.
        shapes, handed: for each layer, the shapes it stores and the shapes it is passed; empty
            before `open`.
        count: number of slots in use, starting at slot 0.
        length: number of tokens for which each slot has pages.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cache: KVCache | None = None
        self.shapes: list[Shape] = []
        self.handed: list[Handed | None] = []
        self.count = 0
        self._taken = 0  # slots that may be in use: more than `count` after an interrupted call
        self.length = 0
        self._held = 0  # the rows' length in the KV cache; a crop does not reduce it
        self.layers: list[Any] = []  # the VMemCache's layers, which hold the cache's tensors
        self._closed = False
        self._where: tuple[int, int, torch.Tensor] | None = None

    def open(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KVCache:
        """Opens the cache for keys and values ``[batch, num_kv_heads, any, head_dim]``.

        Raises:
            InvalidArgument: their shape, dtype or device differs from the configuration or from the
                first keys.
            BadHandle: the cache is closed.
        """
        given = handed_over(key, value)
        cache = self._opened(layer, given, key)
        handed = self.handed[layer]
        assert handed is not None
        have, mine = (*handed, self._dtype), cache.context.cuda_device
        want = (*given, _dtype_name(key))
        if have != want or mine != _ordinal(key):
            raise invalid(
                f"layer {layer}: keys of {want[0]} heads of {want[1]} elements and values of "
                f"{want[2]}, {want[3]} on {key.device}; this cache has {have[0]} heads of "
                f"{have[1]} and {have[2]}, {have[3]} on {_name(mine)}",
                op="VMemCache",
            )
        return cache

    def open_state(self, layer: int, name: str, new: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Opens the cache for a layer's state.

        Args:
            layer: a stateful layer.
            name: "conv" or "recurrent".
            new: the first state, ``[batch, ...]``.
            sizes: shape of the state to keep.

        Raises:
            InvalidArgument: the shape, dtype or device differs from the configuration's.
            BadHandle: the cache is closed.
        """
        cache = self._opened(layer, None, new)
        shape = self.shapes[layer]
        assert isinstance(shape, StateShape)
        have = getattr(shape, name)
        dtype = "float32" if name == "recurrent" else self._dtype
        mine = cache.context.cuda_device
        if (have, dtype, mine) != (sizes, _dtype_name(new), _ordinal(new)):
            raise invalid(
                f"layer {layer}: a {name} state of {sizes}, {_dtype_name(new)} on {new.device}; "
                f"this cache has {have}, {dtype} on {_name(mine)}",
                op="VMemCache",
            )

    def _opened(self, layer: int, given: Handed | None, first: torch.Tensor) -> KVCache:
        """Returns the cache; creates it on first use, with the dtype and device of `first`."""
        if self._closed:
            raise BadHandle("the VMemCache is closed", errno=errno.EBADF, op="VMemCache")
        if self.cache is not None:
            return self.cache
        settings, device = self.settings, _ordinal(first)
        self.shapes, self.handed = stored_shapes(settings.text, layer, given)
        backend = settings.backend or ("host" if device is None else "auto")
        cache = cache_of(
            self.shapes,
            settings.context,
            backend,
            device or 0,
            settings.budget,
            dtype=first.dtype,
            max_batch=settings.max_batch,
            max_seq_len=settings.max_length,
            **{"ahead_tokens": AHEAD_TOKENS, **settings.options},
        )
        if cache.context.cuda_device != device:
            cache.close()
            raise invalid(
                f"the keys are on {first.device}, but back end {cache.context.info.backend}'s "
                f"memory is on {_name(cache.context.cuda_device)}",
                op="VMemCache",
            )
        self.cache = cache
        return cache

    @property
    def parts(self) -> tuple[GroupView, ...]:
        """The cache's groups of layers."""
        assert self.cache is not None
        return self.cache.caches

    @property
    def _dtype(self) -> str:
        return str(self.parts[0].config.dtype)

    def tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values, ``[slots, max_length, num_kv_heads, head_dim]``.

        Creates them outside inference and no_grad mode: otherwise, they could not be written to
        outside these modes.
        """
        cache = self.cache
        assert cache is not None
        with torch.inference_mode(False), torch.enable_grad():
            shape, handed = self.shapes[layer], self.handed[layer]
            assert isinstance(shape, LayerShape)
            assert handed is not None
            if shape.v_head_dim:
                return cache.k(layer), cache.v(layer)
            rows, wide = cache.k(layer), handed[1]  # MLA: the latent, the rotary part
            return rows[..., :wide], rows[..., wide:]

    def state(self, layer: int, name: str) -> torch.Tensor:
        """Returns a layer's "conv" or "recurrent" state, ``[slots, ...]``; see `tensors`."""
        assert isinstance(self.cache, LayeredCache)
        with torch.inference_mode(False), torch.enable_grad():
            return self.cache.states(layer)[name]

    def _part(self, layer: int) -> GroupView:
        """Returns the group of a layer's keys."""
        places = classes_of(self.shapes)[1][layer]
        assert places is not None
        return self.parts[places[0].part]

    def first_row(self, layer: int) -> int:
        """Returns the first row of a layer that every slot holds and that no later step will free.

        Rows before the window and its tile may still be mapped, but the next step that frees pages
        may free them, because it positions the window by the largest length so far.
        """
        part, shape = self._part(layer), self.shapes[layer]
        window = shape.window if isinstance(shape, LayerShape) else 0
        kept = self._held - window + 1 - part.config.window_tile if window else 0
        return max(kept, *part.first_rows(range(self.count)), 0)

    def check_back(self, length: int) -> None:
        """Raises InvalidArgument if any layer cannot be cropped to this length.

        All layers are checked before any is cropped, since transformers crops them one at a time.
        """
        for layer in self.layers:
            layer.check_back(length)

    def check_window(self, layer: int, length: int, first: int) -> None:
        """Raises InvalidArgument if a layer's window begins in freed rows.

        Args:
            layer: a layer with keys and values.
            length: number of remaining tokens.
            first: the layer's first row that all slots hold.
        """
        shape = self.shapes[layer]
        window = shape.window if isinstance(shape, LayerShape) else 0
        if window and max(0, length - window + 1) < first:
            raise invalid(
                f"{length} tokens: the window of {window} of layer {layer} begins in unmapped "
                f"rows, before {first}; window_tile limits how many can be removed",
                limit=self._part(layer).config.window_tile,
                op="VMemCache",
            )

    def check_count(self, count: int) -> None:
        """Raises InvalidArgument if `count` exceeds `max_batch_size`."""
        most = self.settings.max_batch
        if count > most:
            raise invalid(
                f"a batch of {count} rows; this VMemCache has max_batch_size {most}",
                limit=most,
                op="VMemCache",
            )

    def hold(self, count: int, length: int) -> None:
        """Allocates slots and maps pages for `count` rows of `length` tokens. Never shrinks.

        The pages for one more token are mapped in the background.

        Raises:
            InvalidArgument: too many rows or tokens; nothing changed.
            OutOfMemory: too few pages are free; nothing changed.
        """
        cache, settings = self.cache, self.settings
        assert cache is not None
        self.check_count(count)
        if length > settings.max_length:
            raise invalid(
                f"{length} tokens; this VMemCache has max_cache_len {settings.max_length}",
                limit=settings.max_length,
                op="VMemCache",
            )
        if count <= self.count and length <= self.length:
            return
        before = self.count
        rows, tokens = max(count, before), max(length, self.length)
        if before < self._taken:
            self._drop(before)
        try:
            self._taken = rows
            for row in range(before, rows):
                cache.slots.claim(row)
            if cache.step(self._lengths(rows, tokens)) == -1:
                raise self._short(cache, rows, tokens)
        except BaseException:
            self._drop(before)
            raise
        self.count = rows  # set only once the pages are mapped: `_drop` may be interrupted too
        self.length = tokens
        self._held = max(self._held, tokens)
        if tokens < settings.max_length:
            with suppress(TooManyBatches):
                # if this returns -1, a later `hold` reports the shortage
                cache.step_async(self._lengths(rows, tokens + 1))

    def where(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Returns positions [first, last) as an index tensor, cached for all layers.

        A copy through an index runs as a kernel. A plain copy between contiguous tensors uses
        cudaMemcpy, which rejects the addresses of plain reservations.
        """
        if self._where is None or self._where[:2] != (first, last):
            with torch.inference_mode(False):  # autograd may save this index
                self._where = (first, last, torch.arange(first, last, device=device))
        return self._where[2]

    def settle(self) -> None:
        """Frees rows that no layer still uses; a layer calls this when it may have dropped rows."""
        if self.cache is None:
            return
        layers = [layer for layer in self.layers if layer.is_initialized]
        count = max((layer.batch_size for layer in layers), default=0)
        length = max((layer.tokens for layer in layers), default=0)
        self.length = min(self.length, length) if count else 0
        if count < self._taken:
            self._drop(count)

    def _drop(self, count: int) -> None:
        """Frees slot `count` and all later ones. If interrupted, the next call finishes the job."""
        assert self.cache is not None
        self.count = count
        if not count:
            self._held = 0
            for part in self.parts:
                part.drop()  # also frees the autograd graph behind the tensors' contents
        while self._taken > count:
            if self.cache.slots.is_taken(self._taken - 1):
                self.cache.free_reqid(self._taken - 1)
            self._taken -= 1

    def _lengths(self, rows: int, tokens: int) -> list[int]:
        return [tokens] * rows + [0] * (self.settings.max_batch - rows)

    def _short(self, cache: KVCache, rows: int, tokens: int) -> OutOfMemory:
        stats, size = cache.stats(), self.parts[0].layout.page_size
        layouts = [part.layout for part in self.parts]
        need = rows * sum(one.pages_for(tokens) * one.num_tensors for one in layouts)
        return OutOfMemory(
            f"VMemCache: {rows} rows of {tokens} tokens need {need} pages of {size} "
            f"bytes; there are {stats.total_pages}",
            errno=errno.ENOMEM,
            op="VMemCache",
            bytes=need * size,
            limit=stats.total_pages * size,
        )

    def close(self) -> None:
        """Drops the layers' tensors and closes the cache. Idempotent.

        Raises:
            Busy: tensors that `update` returned are still alive. The layers are emptied regardless.
        """
        for layer in self.layers:
            layer.forget()
        if self.cache is not None:
            self.cache.close()
        self._closed = True

    def close_quietly(self) -> None:
        """Closes the cache of a garbage-collected `VMemCache`, unless tensors are still alive."""
        with suppress(Busy):
            self.close()


def _ordinal(tensor: torch.Tensor) -> int | None:
    return None if tensor.device.type == "cpu" else tensor.device.index or 0


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name(device: int | None) -> str:
    return "cpu" if device is None else f"cuda:{device}"


def move_rows(rows: torch.Tensor, first: int, last: int, source: Sequence[int]) -> None:
    """Copies tokens [first, last) of row ``source[i]`` to row i, in a layer's K or V.

    Args:
        rows: ``[slots, max_length, num_kv_heads, head_dim]``.
        source: for each new row, the old row to copy.
    """
    moved = [(new, old) for new, old in enumerate(source) if new != old]
    if not moved or first >= last:
        return
    to, of = (torch.tensor(part, device=rows.device) for part in zip(*moved, strict=True))
    valid = rows[:, first:last]
    valid[to] = valid[of]  # indexing copies the right-hand side first
