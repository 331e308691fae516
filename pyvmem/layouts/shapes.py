# SPDX-License-Identifier: MIT
"""Models by the memory that their keys, values and weights need."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyvmem.kvcache.config import KVCacheConfig, invalid

__all__ = ["SHAPES", "ModelShape", "shape_of"]


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's memory, on one rank.

    Attributes:
        name: for people.
        num_layers, num_kv_heads, head_dim, dtype: as in `KVCacheConfig`.
        weight_bytes: of the weights; 0: not known.
        ranks: GPUs that share the heads and the weights (tensor parallelism).
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    weight_bytes: int = 0
    ranks: int = 1

    def config(self, **overrides: Any) -> KVCacheConfig:
        """The cache's configuration for this shape. InvalidArgument as `KVCacheConfig`."""
        values: dict[str, Any] = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        return KVCacheConfig(**{**values, **overrides})

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers, on one rank."""
        config = self.config()
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * config.itemsize

    def on_ranks(self, ranks: int) -> ModelShape:
        """One rank's part. InvalidArgument: the heads cannot be shared out evenly."""
        if ranks < 1 or self.num_kv_heads % ranks:
            raise invalid(
                f"{self.num_kv_heads} KV heads cannot be shared evenly by {ranks} ranks",
                limit=self.num_kv_heads,
            )
        if ranks == 1:
            return self
        return replace(
            self,
            name=f"{self.name}, 1 of {ranks} ranks",
            num_kv_heads=self.num_kv_heads // ranks,
            weight_bytes=self.weight_bytes // ranks,
            ranks=self.ranks * ranks,
        )


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
    text = values.get("text_config", values) if isinstance(values, dict) else {}
    config = KVCacheConfig.from_hf(SimpleNamespace(**text), max_seq_len=1)  # which we do not use
    return ModelShape(
        path.resolve().parent.name,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        str(config.dtype),
    )
