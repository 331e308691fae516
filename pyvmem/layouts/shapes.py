# SPDX-License-Identifier: MIT
"""Model shapes, which determine the memory of keys, values and weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from pyvmem.errors import InvalidArgument
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.models.hf_config import config_of, dtype_name, layer_shapes, read_values
from pyvmem.models.shapes import LayerShape, Shape, StateShape, classes_of
from pyvmem.plumbing.validation import invalid

__all__ = ["SHAPES", "ModelShape", "shape_of"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine its memory, on one rank.

    Attributes:
        name: display name.
        num_layers, num_kv_heads, head_dim, dtype: as in `KVCacheConfig`; with `layers`, those of
            the first layer.
        weight_bytes: bytes of the weights; 0 if unknown.
        ranks: number of GPUs that the heads and the weights are divided among (tensor parallelism).
        layers: the shape of every layer, if layers differ or have a sliding window, a latent or a
            state; () if all layers keep keys and values for every token.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    weight_bytes: int = 0
    ranks: int = 1
    layers: tuple[Shape, ...] = ()

    def configs(self, **overrides: Any) -> list[KVCacheConfig]:
        """Returns a cache configuration for each layer group.

        Args:
            overrides: further fields of `KVCacheConfig`.

        Raises:
            InvalidArgument: from `KVCacheConfig`.
        """
        alike = (LayerShape(self.num_kv_heads, self.head_dim),) * self.num_layers
        counts = classes_of(self.layers or alike)[0]
        return [
            KVCacheConfig(num_layers=count, **{"dtype": self.dtype, **kind.fields(), **overrides})
            for kind, count in counts.items()
        ]

    def config(self, **overrides: Any) -> KVCacheConfig:
        """Returns the cache configuration of a model whose layers are all of one kind.

        Raises:
            InvalidArgument: as for `KVCacheConfig`, or layers differ or have a window or state.
        """
        configs = self.configs(**overrides)
        if len(configs) > 1 or configs[0].window or configs[0].state:
            raise invalid(
                f"{self.name}: its layers differ, slide or have a state, which is not supported",
                op="ModelShape",
            )
        return configs[0]

    @property
    def largest_group(self) -> int:
        """The largest number of layers per tensor that evenly divides every group."""
        return gcd(*(config.num_layers for config in self.configs()))

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds across all layers, on one rank."""
        return sum(_bytes(config) for config in self.configs() if not config.state)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's states on one rank, which do not depend on its length."""
        return sum(_bytes(config) for config in self.configs() if config.state)

    def stored_as(self, dtype: str) -> ModelShape:
        """Returns the shape with keys and values of type `dtype`; unchanged if that is "".

        States keep their type.
        """
        if dtype in ("", self.dtype):
            return self
        layers = tuple(
            replace(one, dtype=one.dtype or self.dtype) if isinstance(one, StateShape) else one
            for one in self.layers
        )
        return replace(self, name=f"{self.name} in {dtype}", dtype=dtype, layers=layers)

    def on_ranks(self, ranks: int) -> ModelShape:
        """Returns the shape on each of `ranks` ranks; latents are replicated.

        Raises:
            InvalidArgument: the ranks do not divide the heads, or a layer has a state.
        """
        layers = self.layers or (LayerShape(self.num_kv_heads, self.head_dim),)
        for layer in layers:
            if isinstance(layer, StateShape) and ranks > 1:
                raise invalid(
                    f"{self.name}: sharing a state between ranks is not supported", op="ModelShape"
                )
            if not isinstance(layer, LayerShape):
                continue
            if ranks < 1 or (layer.v_head_dim and layer.num_kv_heads % ranks):
                raise invalid(
                    f"{layer.num_kv_heads} KV heads cannot be shared evenly by {ranks} ranks",
                    limit=layer.num_kv_heads,
                    op="ModelShape",
                )
        if ranks == 1:
            return self
        parts = tuple(
            replace(one, num_kv_heads=one.num_kv_heads // ranks)
            if isinstance(one, LayerShape) and one.v_head_dim
            else one
            for one in layers
        )
        return replace(
            self,
            name=f"{self.name}, 1 of {ranks} ranks",
            num_kv_heads=next(one.num_kv_heads for one in parts if isinstance(one, LayerShape)),
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
    """Returns the shape of a Llama-like model, given the values of its configuration."""
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


def shape_of(model: str, dtype: str = "") -> ModelShape:
    """Returns the shape of a model.

    Args:
        model: one of `SHAPES` (case does not matter), or the path of a transformers ``config.json``
            or its folder, in which case the size of the weights is unknown.
        dtype: type of the keys and values if the file does not name one.

    Raises:
        InvalidArgument: `model` is neither, or the configuration lacks a required value.
    """
    for name, shape in SHAPES.items():
        if name.lower() == model.lower():
            return shape
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = read_values(path)
    except InvalidArgument as error:
        raise invalid(f"{path}: {error.args[0]}", op="shape_of") from None
    except (OSError, ValueError, TypeError) as error:
        known = ", ".join(SHAPES)
        why = str(error)
        if isinstance(error, OSError):
            why = f"{path}: {error.strerror}"
        elif isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            why = f"{path} is not JSON"
        raise invalid(
            f"{model!r} is neither one of {known} nor a readable config.json: {why}", op="shape_of"
        ) from None
    try:
        config = config_of(values)
        layers = tuple(layer_shapes(config))
        first = next((one for one in layers if isinstance(one, LayerShape)), None)
        if first is None:
            raise invalid("no layer has keys and values", op="shape_of")
        own = dtype_name(config, dtype)
    except InvalidArgument as error:
        raise invalid(f"{path}: {error.args[0]}", op="shape_of") from None
    plain = LayerShape(first.num_kv_heads, first.head_dim)
    return ModelShape(
        path.resolve().parent.name,
        len(layers),
        first.num_kv_heads,
        first.head_dim,
        own,
        layers=() if set(layers) == {plain} else layers,
    )
