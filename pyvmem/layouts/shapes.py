# SPDX-License-Identifier: MIT
"""Models by the memory that their keys, values and weights need."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyvmem.kvcache.config import (
    KVCacheConfig,
    LayerShape,
    StateShape,
    classes_of,
    invalid,
    layer_shapes,
)

__all__ = ["SHAPES", "ModelShape", "shape_of"]


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's memory, on one rank.

    Attributes:
        name: for people.
        num_layers, num_kv_heads, head_dim, dtype: as in `KVCacheConfig`; with `layers`, heads and
            their size are the first one's.
        weight_bytes: of the weights; 0: not known.
        ranks: GPUs that share the heads and the weights (tensor parallelism).
        layers: what every layer keeps, where they differ, slide, or keep a latent or a state; ():
            all keep keys and values of every token.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    weight_bytes: int = 0
    ranks: int = 1
    layers: tuple[LayerShape | StateShape, ...] = ()

    def configs(self, **overrides: Any) -> list[KVCacheConfig]:
        """The cache's configuration for each of its groups of equal layers.

        InvalidArgument as `KVCacheConfig`.
        """
        alike = (LayerShape(self.num_kv_heads, self.head_dim),) * self.num_layers
        counts = classes_of(self.layers or alike)[0]
        return [
            KVCacheConfig(num_layers=count, **{"dtype": self.dtype, **kind.fields(), **overrides})
            for kind, count in counts.items()
        ]

    def config(self, **overrides: Any) -> KVCacheConfig:
        """The cache's configuration for this shape.

        Raises:
            InvalidArgument: as `KVCacheConfig`; or layers differ, slide or have a state.
        """
        configs = self.configs(**overrides)
        if len(configs) > 1 or configs[0].window or configs[0].state:
            raise invalid(
                f"{self.name}: its layers differ, slide or have a state, which is not computed here"
            )
        return configs[0]

    @property
    def largest_group(self) -> int:
        """Most layers that can share a tensor, in every group of equal ones."""
        return gcd(*(config.num_layers for config in self.configs()))

    @property
    def token_bytes(self) -> int:
        """What one token adds in all layers, on one rank."""
        return sum(_bytes(config) for config in self.configs() if not config.state)

    @property
    def state_bytes(self) -> int:
        """What a request has whatever its length, in all layers, on one rank."""
        return sum(_bytes(config) for config in self.configs() if config.state)

    def stored_as(self, dtype: str) -> ModelShape:
        """The same with keys and values of another type, such as 8 bits; "": as it is.

        States keep theirs.
        """
        if dtype in ("", self.dtype):
            return self
        layers = tuple(
            replace(one, dtype=one.dtype or self.dtype) if isinstance(one, StateShape) else one
            for one in self.layers
        )
        return replace(self, name=f"{self.name} in {dtype}", dtype=dtype, layers=layers)

    def on_ranks(self, ranks: int) -> ModelShape:
        """One rank's part; a latent is whole on each.

        InvalidArgument: the heads cannot be shared out evenly.
        """
        layers = self.layers or (LayerShape(self.num_kv_heads, self.head_dim),)
        for layer in layers:
            if isinstance(layer, StateShape):
                if ranks == 1:
                    continue
                raise invalid(f"{self.name}: how ranks share a state is not computed here")
            if ranks < 1 or (layer.v_head_dim and layer.num_kv_heads % ranks):
                raise invalid(
                    f"{layer.num_kv_heads} KV heads cannot be shared evenly by {ranks} ranks",
                    limit=layer.num_kv_heads,
                )
        if ranks == 1:
            return self
        parts = tuple(
            replace(one, num_kv_heads=one.num_kv_heads // ranks) if one.v_head_dim else one
            for one in layers
            if isinstance(one, LayerShape)
        )
        return replace(
            self,
            name=f"{self.name}, 1 of {ranks} ranks",
            num_kv_heads=parts[0].num_kv_heads,
            weight_bytes=self.weight_bytes // ranks,
            ranks=self.ranks * ranks,
            layers=parts if self.layers else (),
        )


def _bytes(config: KVCacheConfig) -> int:
    return config.num_layers * config.tensors_per_layer * config.row_bytes


def _llama(
    name: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    tied: bool = False,
) -> ModelShape:
    """A model of Llama's kind from its public configuration; the weights are counted."""
    dim = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * dim
    layer = attention + 3 * hidden * inner + 2 * hidden
    weights = layers * layer + (1 if tied else 2) * vocabulary * hidden + hidden
    return ModelShape(name, layers, kv_heads, dim, "bfloat16", 2 * weights)


SHAPES = {
    shape.name: shape
    for shape in (
        _llama("Yi-6B", 4096, 11008, 32, 32, 4, 64000),
        _llama("Llama-3-8B", 4096, 14336, 32, 32, 8, 128256),
        _llama("Yi-34B", 7168, 20480, 60, 56, 8, 64000),
        _llama("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, tied=True),
    )
}


def shape_of(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: one of `SHAPES` (case does not matter), or the path of a transformers
            ``config.json`` or its folder; the weights of such a model are not known.

    Raises:
        InvalidArgument: neither, or a configuration without what is needed.
    """
    for name, shape in SHAPES.items():
        if name.lower() == model.lower():
            return shape
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(SHAPES)
        raise invalid(
            f"{model!r} is none of {known}, nor a readable config.json: {error}"
        ) from None
    text = SimpleNamespace(**_text(values))
    config = KVCacheConfig.from_hf(text, max_seq_len=1)  # which we do not use
    layers = tuple(layer_shapes(text))
    first = next((one for one in layers if isinstance(one, LayerShape)), None)
    if first is None:
        raise invalid(f"{model!r}: no layer has keys and values")
    plain = LayerShape(first.num_kv_heads, first.head_dim)
    return ModelShape(
        path.resolve().parent.name,
        len(layers),
        first.num_kv_heads,
        first.head_dim,
        str(config.dtype),
        layers=() if set(layers) == {plain} else layers,
    )


def _text(values: Any) -> dict[str, Any]:
    """The language model's part of a ``config.json``, with the kind of every layer that differs.

    Files of before transformers 4.56 name a window and leave it to the model's class which layers
    have it; those of Jamba and Bamba name the layers with attention, each in its own way.
    """
    if not isinstance(values, dict):
        return {}
    text: dict[str, Any] = values.get("text_config", values)
    slides = text.get("sliding_window") and text.get("use_sliding_window", True)
    mixed = any(text.get(name) for name in ("linear_num_value_heads", "mamba_d_state"))
    if not (slides or mixed) or text.get("layer_types"):
        return text
    try:
        from transformers import AutoConfig

        whole: Any = AutoConfig
        config = whole.for_model(**values).get_text_config()
        told: dict[str, Any] = config.to_dict()
        if kinds := getattr(config, "layer_types", None):  # a property of some classes
            told["layer_types"] = kinds
    except (ImportError, ValueError, TypeError) as error:
        what = f"a sliding_window of {text['sliding_window']}" if slides else "a state"
        raise invalid(
            f"{what} without layer_types; which layers have it, transformers does not tell: {error}"
        ) from None
    return told
