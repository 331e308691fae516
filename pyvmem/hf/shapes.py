# SPDX-License-Identifier: MIT
"""What the layers of a transformers model store.

Windows and differences between layers are the configuration's. Heads and their sizes are those of
the keys and values that the model hands over: they tell what tensor parallelism left of them, and
whether a model with MLA stores its latent (transformers 5.23: as keys of the latent's rank and
values of the rotary part) or the keys and values made of it.
"""

from __future__ import annotations

from typing import Any

from pyvmem.errors import NotSupported
from pyvmem.kvcache import LayerShape, StateShape, layer_shapes
from pyvmem.kvcache.config import invalid

__all__ = ["Handed", "Shape", "handed_over", "row_shapes", "stored_shapes"]

Shape = LayerShape | StateShape

Handed = tuple[int, int, int]
"""KV heads, elements of a key's head, elements of a value's head."""


def handed_over(key: Any, value: Any) -> Handed:
    """Of keys and values ``[batch, num_kv_heads, any, head_dim]``.

    Raises:
        InvalidArgument: different numbers of heads.
    """
    if key.shape[1] != value.shape[1]:
        raise invalid(f"keys of {key.shape[1]} heads and values of {value.shape[1]}")
    return key.shape[1], key.shape[3], value.shape[3]


def row_shapes(config: Any, what: str) -> list[LayerShape]:
    """`layer_shapes` of a model that keeps keys and values in every layer.

    Raises:
        NotSupported: one has a state; the text names `what` cannot run it.
    """
    shapes = layer_shapes(config)
    found = [one for one in shapes if isinstance(one, LayerShape)]
    if len(found) < len(shapes):
        layer = next(n for n, one in enumerate(shapes) if isinstance(one, StateShape))
        raise NotSupported(
            f"{what}: layer {layer} of {type(config).__name__} has a state of its own, and no keys "
            "and values",
            op=what,
        )
    return found


def stored_shapes(
    text: Any, layer: int, given: Handed | None
) -> tuple[list[Shape], list[Handed | None]]:
    """What every layer keeps, and is handed over, as the first one that hands something over shows.

    Args:
        text: the language model's configuration.
        layer: that one.
        given: what it hands over; None: it has a state, and the others are as the configuration
            says.

    Raises:
        InvalidArgument: the configuration has layers that differ, and this one is none of them.
        NotSupported: a latent beside states.
    """
    told = layer_shapes(text)
    rows = [one for one in told if isinstance(one, LayerShape)]
    if len(rows) < len(told):
        if any(not one.v_head_dim for one in rows):
            raise NotSupported("VMemCache: the model has a latent beside states", op="VMemCache")
        each = [
            (one.num_kv_heads, one.head_dim, one.v_head_dim or 0)
            if isinstance(one, LayerShape)
            else None
            for one in told
        ]
        return told, each
    assert given is not None
    shapes, handed = _stored_rows(rows, layer, given)
    return list(shapes), list(handed)


def _stored_rows(
    told: list[LayerShape], layer: int, given: Handed
) -> tuple[list[LayerShape], list[Handed]]:
    """`stored_shapes` where every layer has keys and values."""
    heads, wide, values = given
    mine = told[layer]
    latent = mine.v_head_dim == 0
    alike = len({(one.num_kv_heads, one.head_dim, one.v_head_dim) for one in told}) == 1
    if latent and heads == 1 and wide + values == mine.head_dim:
        return [LayerShape(1, wide + values, 0, one.window) for one in told], [given] * len(told)
    if latent or alike:
        return [LayerShape(*given, one.window) for one in told], [given] * len(told)
    if mine.head_dim != wide or values != wide or mine.num_kv_heads % heads:
        raise invalid(
            f"keys of {heads} heads of {wide}; the configuration says {mine.num_kv_heads} of "
            f"{mine.head_dim} for layer {layer}"
        )
    ranks = mine.num_kv_heads // heads
    shapes = [
        LayerShape(max(1, one.num_kv_heads // ranks), one.head_dim, None, one.window)
        for one in told
    ]
    return shapes, [(one.num_kv_heads, one.head_dim, one.head_dim) for one in shapes]
