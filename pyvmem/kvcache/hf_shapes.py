# SPDX-License-Identifier: MIT
"""What the layers of a transformers model keep, read from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyvmem.kvcache.config import KVCacheConfig, invalid, text_config
from pyvmem.kvcache.shapes import LayerShape

__all__ = ["layer_shapes"]

_FULL = ("full_attention", "attention", "chunked_attention")  # chunks are kept whole
_SLIDING = "sliding_attention"


def layer_shapes(config: Any) -> list[LayerShape]:
    """What `LayeredCache` takes, for every layer of a transformers model.

    Sliding layers (``layer_types``; without it, ``sliding_window`` is every layer's) have a window.
    MLA (``kv_lora_rank``) has one latent tensor, as an engine that absorbs the up-projections
    stores it; transformers itself stores keys and values.

    Args:
        config: a ``PreTrainedConfig``, or anything with its attributes; of a multi-modal model the
            part that ``get_text_config`` names.

    Raises:
        InvalidArgument: an attribute is missing, or a layer has no keys and values, such as linear
            attention.
    """
    text = text_config(config)
    same = KVCacheConfig.from_hf(config, dtype="uint8", max_seq_len=1)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [_shape(text, same, layer, same.window) for layer in range(same.num_layers)]
    if len(kinds) != same.num_layers:
        raise invalid(f"layer_types names {len(kinds)} layers, the model has {same.num_layers}")
    shapes = []
    for layer, kind in enumerate(kinds):
        if kind == _SLIDING:
            window = getattr(text, "sliding_window", None)
            if not window:
                raise invalid(f"layer {layer} is {kind}, but sliding_window is {window}")
            shapes.append(_shape(text, same, layer, window))
        elif kind in _FULL:
            shapes.append(_shape(text, same, layer, 0))
        else:
            raise invalid(f"layer {layer} is {kind}: it keeps no keys and values for each token")
    return shapes


def _shape(text: Any, same: KVCacheConfig, layer: int, window: int) -> LayerShape:
    """A layer's shape, with what ``per_layer_config`` has instead (Gemma 4)."""
    own = getattr(text, "per_layer_config", None) or {}
    one = own.get(layer, own.get(str(layer), {})) if isinstance(own, Mapping) else own[layer]

    def get(name: str) -> Any:
        return one.get(name) if isinstance(one, Mapping) else getattr(one, name, None)

    if same.tensors_per_layer == 1:
        return LayerShape(same.num_kv_heads, same.head_dim, 0, window)
    heads = get("num_key_value_heads") or same.num_kv_heads
    return LayerShape(heads, get("head_dim") or same.head_dim, None, window)
