# SPDX-License-Identifier: MIT
"""A layer of a `VMemCache`: views of the valid tokens that grow in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from pyvmem.compiled import refuse
from pyvmem.errors import NotSupported
from pyvmem.hf.ancestry import Ancestry
from pyvmem.hf.rows import Rows, TakesRows, move_rows, uncompiled
from pyvmem.plumbing.validation import invalid

__all__ = ["VMemLayer"]

# Any, so that type checkers see the same class with and without transformers.
_Layer: Any = cache_utils.CacheLayerMixin


class VMemLayer(TakesRows, _Layer):  # type: ignore[misc]  # a base that is Any
    """A layer with keys and values, created by `VMemCache`.

    `keys` and `values` are read-only views ``[batch, num_kv_heads, length, head_dim]`` of the
    virtual tensors: `reorder_cache` may lose data that other code writes to them. With a sliding
    window they hold the rows that the next token attends to, as in transformers' own sliding layer.
    """

    is_compileable = False  # the views change size
    is_croppable = True
    supports_early_init = True

    def __init__(self, rows: Rows, index: int, window: int = 0) -> None:
        super().__init__()
        self._rows = rows
        self._index = index
        self._window = window
        self.is_sliding = bool(window)
        self._length = 0
        self._copied = 0  # rows before this one were not copied to every slot
        self._ancestry = Ancestry(0)
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    @uncompiled
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates a slot for each batch row of ``[batch, num_kv_heads, any, head_dim]``."""
        self._rows.open(self._index, key_states, value_states)
        self._rows.hold(key_states.shape[0], self._rows.length)
        self._k, self._v = self._rows.tensors(self._index)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self._ancestry = Ancestry(self.batch_size)
        self.is_initialized = True
        self._show()

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends tokens ``[batch, num_kv_heads, new, head_dim]``; returns views of all tokens.

        With a sliding window, the views contain only the tokens that any new token attends to. With
        `contiguous`, copies are returned.

        Raises:
            InvalidArgument: the batch size, shape, dtype or device differs, or rows would exceed
                `max_cache_len` tokens; nothing changed.
            OutOfMemory: too few pages are free; nothing changed.
        """
        refuse("VMemCache.update", recorded=True)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, new = key_states.shape[0], key_states.shape[-2]
        if batch != self.batch_size:
            raise invalid(
                f"a batch of {batch} rows; layer {self._index} has {self.batch_size}",
                op="VMemCache",
            )
        assert self._k is not None
        assert self._v is not None
        if not (_fits(key_states, self._k) and _fits(value_states, self._v)):
            self._rows.open(self._index, key_states, value_states)  # raises InvalidArgument
        first, last = self._length, self._length + new
        self._rows.hold(batch, last)
        where = self._rows.where(first, last, key_states.device)
        self._k[:batch].index_copy_(1, where, key_states.transpose(1, 2))
        self._v[:batch].index_copy_(1, where, value_states.transpose(1, 2))
        self._length = last
        shown = self._show()
        found = self._view(self._offset(first)) if self._window else shown
        if self._rows.settings.contiguous:
            return found[0].contiguous(), found[1].contiguous()
        return found

    def _offset(self, length: int) -> int:
        """Returns the first row in the window of a token at position `length`."""
        return max(0, length - self._window + 1) if self._window else 0

    def _first(self) -> int:
        """Returns the first row that all slots still hold; earlier rows have left the window."""
        return max(self._copied, self._rows.first_row(self._index)) if self._window else 0

    def _view(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._k is not None
        assert self._v is not None
        valid = (slice(self.batch_size), slice(first, self._length))
        return self._k[valid].transpose(1, 2), self._v[valid].transpose(1, 2)

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = shown = self._view(self._offset(self._length))
        return shown

    def take_from(self, other: VMemLayer) -> None:
        """Copies a layer from another cache that has the same tokens in the same rows.

        The copy is detached. Otherwise autograd's graph would keep the other cache's tensors alive
        as long as any result computed from this layer.
        """
        if other.keys is None or other.values is None:
            return
        self.lazy_initialization(other.keys, other.values)
        length = other.get_seq_length()
        self._rows.hold(self.batch_size, length)
        self._length = length
        first = self._copied = min(max(other._first(), self._first()), length)
        keys, values = (rows.detach() for rows in other._view(first))
        where = self._rows.where(first, length, self.device)
        assert self._k is not None
        assert self._v is not None
        self._k[: self.batch_size].index_copy_(1, where, keys.transpose(1, 2))
        self._v[: self.batch_size].index_copy_(1, where, values.transpose(1, 2))
        self._show()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and offset of the keys, for the mask."""
        offset = self._offset(self._length)
        return self._length - offset + query_length, offset

    def get_seq_length(self) -> int:
        """Returns the number of tokens in each row."""
        return self._length

    @property
    def tokens(self) -> int:
        """The number of tokens per row that need pages; the same number as `get_seq_length`."""
        return self._length

    def get_max_length(self) -> int:
        """Returns the maximum number of tokens in a row."""
        return self._rows.settings.max_length

    @uncompiled
    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last ``-tokens_to_remove`` tokens; their pages remain mapped.

        Raises:
            InvalidArgument: `tokens_to_remove` is positive; in some layer, the window of the
                remaining tokens begins in freed rows (`KVCacheConfig.window_tile`); or
                other layers are stateful.
        """
        if tokens_to_remove > 0:
            raise invalid(
                f"crop({tokens_to_remove}): pass the tokens to remove as a negative number",
                op="VMemCache",
            )
        if self.is_initialized and tokens_to_remove:
            left = max(0, self._length + tokens_to_remove)
            self._rows.check_back(left)
            self._length = left
            self._ancestry.crop(self._length)
            self._settle()

    def check_back(self, length: int) -> None:
        """Raises InvalidArgument if the layer cannot be cropped to this length."""
        if self._length > length:
            self._rows.check_window(self._index, length, self._first())

    @uncompiled
    def reset(self) -> None:
        """Empties the layer.

        Once all layers are empty, the slots are free; their pages remain mapped.
        """
        self.forget()
        self._settle()

    def offload(self) -> None:
        """Raises NotSupported."""
        raise NotSupported(
            "VMemCache does not support offloading of layers", op="VMemLayer.offload"
        )

    def prefetch(self) -> None:
        """Raises NotSupported."""
        raise NotSupported(
            "VMemCache does not support offloading of layers", op="VMemLayer.prefetch"
        )

    def forget(self) -> None:
        """Drops all tensors, which returns the layer to its state before the first `update`."""
        self._k = self._v = self.keys = self.values = None
        self._length = self._copied = 0
        self.is_initialized = False
        self.__dict__.pop("batch_size", None)  # transformers checks for this attribute

    def _take(self, source: Sequence[int]) -> None:
        if not self.is_initialized:
            return
        self._check_rows(source)
        assert self._k is not None
        assert self._v is not None
        self._rows.hold(len(source), self._length)
        self._copied = self._first()
        first = max(self._copied, self._ancestry.take(source, self._length))
        move_rows(self._k, first, self._length, source)
        move_rows(self._v, first, self._length, source)
        self.batch_size = len(source)
        self._show()
        self._settle()

    def _settle(self) -> None:
        if self.is_initialized:
            self._show()
        self._rows.settle()


def _fits(new: torch.Tensor, rows: torch.Tensor) -> bool:
    """Returns true if `new` can be stored in `rows`: same heads, dtype and device."""
    same = (new.shape[1], new.shape[3]) == rows.shape[2:]
    return same and (new.dtype, new.device) == (rows.dtype, rows.device)
