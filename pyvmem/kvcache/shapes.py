# SPDX-License-Identifier: MIT
"""What the layers of a model keep for a token, where they do not all keep the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyvmem.kvcache.config import bounded

__all__ = ["LayerClass", "LayerShape", "Place", "classes_of"]


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token. Checked on construction.

    Attributes:
        num_kv_heads: key/value heads of the layer (on this device).
        head_dim: elements of a key's head. MLA: of the latent, its rotary part included, and one
            head.
        v_head_dim: elements of a value's head; None: as `head_dim`; 0: no values (MLA).
        window: tokens that the layer attends to, the present one included; 0: all.
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
            bounded(name, getattr(self, name), low, high)


class LayerClass(NamedTuple):
    """Tensors with rows of one size and one window: what one `KVCache` is made for."""

    num_kv_heads: int
    head_dim: int
    tensors_per_layer: int
    window: int

    def fields(self) -> dict[str, Any]:
        """The fields of a `KVCacheConfig`, but for the number of layers."""
        return self._asdict()


class Place(NamedTuple):
    """Where a layer's keys or values lie: the class, the layer's number there, K (0) or V (1)."""

    part: int
    member: int
    which: int


def classes_of(
    layers: Sequence[LayerShape],
) -> tuple[dict[LayerClass, int], list[tuple[Place, Place | None]]]:
    """Sorts layers into classes.

    Keys and values of one size belong together; of two sizes, they are classes of their own.

    Returns:
        Every class with the number of its layers, and for every layer where its keys and its values
        lie (None: it has none).
    """
    counts: dict[LayerClass, int] = {}
    order: dict[LayerClass, int] = {}

    def put(heads: int, dim: int, tensors: int, window: int) -> tuple[int, int]:
        key = LayerClass(heads, dim, tensors, window)
        member = counts.get(key, 0)
        counts[key] = member + 1
        return order.setdefault(key, len(order)), member

    places: list[tuple[Place, Place | None]] = []
    for shape in layers:
        heads, dim, values, window = (
            shape.num_kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            shape.window,
        )
        if values == dim:
            both = put(heads, dim, 2, window)
            places.append((Place(*both, 0), Place(*both, 1)))
            continue
        keys = Place(*put(heads, dim, 1, window), 0)
        places.append((keys, Place(*put(heads, values, 1, window), 0) if values else None))
    return counts, places
