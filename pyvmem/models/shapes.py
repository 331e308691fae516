# SPDX-License-Identifier: MIT
"""Shapes of layers (rows for tokens, a state, or nothing), and the classes they form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyvmem.plumbing.validation import bounded, invalid

__all__ = [
    "DTYPE_BYTES",
    "EmptyShape",
    "LayerClass",
    "LayerShape",
    "Place",
    "Shape",
    "StateShape",
    "classes_of",
]

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class LayerShape:
    """Data that a layer stores per token. Checked on construction.

    Attributes:
        num_kv_heads: number of the layer's KV heads on this device.
        head_dim: elements per head of a key. MLA: elements of the latent, including the rotary
            part, which counts as one head.
        v_head_dim: elements per head of a value; None means `head_dim`, 0 means no values (MLA).
        window: number of tokens that a token attends to, including itself; 0 means all.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int = 0

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name, low, high in (
            ("num_kv_heads", 1, 1 << 16),
            ("head_dim", 1, 1 << 16),
            ("v_head_dim", 0, 1 << 16),
            ("window", 0, 1 << 30),
        ):
            object.__setattr__(
                self, name, bounded(name, getattr(self, name), low, high, op="LayerShape")
            )


@dataclass(frozen=True)
class StateShape:
    """Data that a layer stores per request instead of rows per token. Checked on construction.

    Used by linear attention (Qwen3-Next), state-space layers (Jamba, Mamba-2) and short
    convolutions (LFM2). Sizes are per device.

    Attributes:
        conv: channels and tokens of the convolution's input; () if the layer has no convolution.
        recurrent: shape of the recurrent state, which is always float32 because it accumulates over
            all tokens; () if the layer has no recurrent state.
        dtype: dtype of `conv`; "" means the cache's.
    """

    conv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        for name in ("conv", "recurrent"):
            if not isinstance(getattr(self, name), Sequence):
                raise invalid(
                    f"{name} is {getattr(self, name)!r:.80}; it must be a tuple of sizes",
                    op="StateShape",
                )
        if not self.conv and not self.recurrent:
            raise invalid("a StateShape needs a conv or a recurrent state", op="StateShape")
        if self.dtype not in ("", *DTYPE_BYTES):
            raise invalid(
                f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}", op="StateShape"
            )
        for name in ("conv", "recurrent"):
            sizes = tuple(getattr(self, name))
            if len(sizes) == 1:
                raise invalid(f"{name} is {sizes}; it must have two sizes or more", op="StateShape")
            sizes = tuple(bounded(name, size, 1, 1 << 16, op="StateShape") for size in sizes)
            bounded(
                f"elements of a {name} channel", math.prod(sizes[1:]), 1, 1 << 16, op="StateShape"
            )
            object.__setattr__(self, name, sizes)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the layer's tensors."""
        return tuple(one for one in (self.conv, self.recurrent) if one)


@dataclass(frozen=True)
class EmptyShape:
    """The shape of a layer that stores nothing.

    The layer has no attention (Nemotron-H), or attends to another layer's keys and values (the last
    layers of Gemma 3n).
    """


Shape = LayerShape | StateShape | EmptyShape
"""The shape of one layer's data."""


class LayerClass(NamedTuple):
    """A class of tensors that share a row size and a window; one `KVCache` holds them."""

    num_kv_heads: int
    head_dim: int
    tensors_per_layer: int
    window: int
    state: bool = False
    dtype: str = ""

    def fields(self) -> dict[str, Any]:
        """Returns the `KVCacheConfig` fields, omitting the number of layers and an empty dtype."""
        fields = self._asdict()
        return fields if self.dtype else {k: v for k, v in fields.items() if k != "dtype"}


class Place(NamedTuple):
    """Locates a layer's keys or values: class, index within the class, K (0) or V (1).

    For a `StateShape`, the first of the two places locates its first state.
    """

    part: int
    member: int
    which: int


def classes_of(
    layers: Sequence[Shape],
) -> tuple[dict[LayerClass, int], list[tuple[Place, Place | None] | None]]:
    """Sorts layers into classes.

    Keys and values of the same size share a class; otherwise keys and values have separate classes.
    Classes with a state come last.

    Returns:
        Each class with its number of layers; and, for each layer, the places of its keys and values
        (None for no values) or of its first and second states, or None if the layer stores nothing.
    """
    counts: dict[LayerClass, int] = {}
    order: dict[LayerClass, int] = {}

    def put(*fields: Any) -> tuple[int, int]:
        key = LayerClass(*fields)
        member = counts.get(key, 0)
        counts[key] = member + 1
        return order.setdefault(key, len(order)), member

    places: dict[int, tuple[Place, Place | None] | None] = {}
    # Classes with rows come first, since the first group represents the entire cache.
    for layer, shape in sorted(enumerate(layers), key=lambda one: isinstance(one[1], StateShape)):
        if isinstance(shape, EmptyShape):
            places[layer] = None
            continue
        if isinstance(shape, StateShape):
            found = [
                Place(*put(sizes[0], math.prod(sizes[1:]), 1, 0, True, dtype), 0)
                for sizes, dtype in ((shape.conv, shape.dtype), (shape.recurrent, "float32"))
                if sizes
            ]
            places[layer] = (found[0], found[1] if len(found) > 1 else None)
            continue
        if not isinstance(shape, LayerShape):
            raise invalid(
                f"layer {layer} is {shape!r:.80}; "
                "it must be a LayerShape, StateShape or EmptyShape",
                op="LayeredCache",
            )
        heads, dim, values, window = (
            shape.num_kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            shape.window,
        )
        if values == dim:
            both = put(heads, dim, 2, window)
            places[layer] = (Place(*both, 0), Place(*both, 1))
            continue
        keys = Place(*put(heads, dim, 1, window), 0)
        places[layer] = (keys, Place(*put(heads, values, 1, window), 0) if values else None)
    return counts, [places[layer] for layer in range(len(layers))]
