# SPDX-License-Identifier: MIT
"""The transformers cache for one engine call of a model with state layers.

A state layer treats each row of a batch as one request. The engine therefore calls the model once
for all requests with one new token, each in its own row, and once for every request with more. This
object loads each row's state from its slot and saves the new state. Attention layers read slots as
usual; they get the new tokens from this object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from pyvmem.hf.empty import VMemNothing
from pyvmem.kvcache import EmptyShape, LayeredCache, StateShape

__all__ = ["StepPast"]

# Any, so that type checking gives the same result with and without transformers.
_Cache: Any = cache_utils.Cache
_Layer: Any = cache_utils.CacheLayerMixin
_State: Any = cache_utils.LinearAttentionLayer


class _New(_Layer):  # type: ignore[misc]  # a base that is Any
    """An attention layer, which only passes on the new tokens' keys and values."""

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new tokens' keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Returns how many tokens the longest request had before this call."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the size of a mask, which is never created."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: there is no maximum."""
        return -1


class StepPast(_Cache):  # type: ignore[misc]  # a base that is Any
    """The states of some slots, in transformers' own layers; `save` copies them back.

    Args:
        cache: the cache that the slots belong to.
        slots: the slot of each row of the batch, in order.
        lengths: number of tokens computed in each slot, or 0 if its states are new. Either all of
            them are 0 or none is.
    """

    def __init__(self, cache: LayeredCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        self._slots = torch.tensor(slots, device=cache.caches[0].k(0).device)
        self._places: list[tuple[Any, dict[str, torch.Tensor]]] = []
        layers: list[Any] = []
        for number, shape in enumerate(cache.layers):
            if isinstance(shape, EmptyShape):
                layers.append(VMemNothing(number))
            elif isinstance(shape, StateShape):
                layer, rows = _State(), cache.states(number)
                if any(lengths):
                    self._load(layer, rows)
                self._places.append((layer, rows))
                layers.append(layer)
            else:
                layers.append(_New(max(lengths)))
        super().__init__(layers=layers)

    def _load(self, layer: Any, rows: dict[str, torch.Tensor]) -> None:
        """Loads the states ``[slots, ...]`` of this object's slots into a layer."""
        for name, held in rows.items():
            layer.lazy_initialization(**{f"{name}_states": held[self._slots]})
            getattr(layer, f"{name}_states")[0].copy_(held[self._slots])
        layer.has_previous_state[0] = True

    def save(self) -> None:
        """Saves the model's new states into the slots."""
        for layer, rows in self._places:
            for name, held in rows.items():
                held[self._slots] = getattr(layer, f"{name}_states")[0]
        self._places = []
