# SPDX-License-Identifier: MIT
"""Determines the shapes that the layers of a transformers model store.

Windows and differences between layers come from the configuration. The number of heads and their
sizes come from the keys and values that the model passes. These reflect tensor parallelism, and
whether a model with MLA stores its latent (passed as keys; the rotary part is passed as values) or
the keys and values computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pyvmem.errors import NotSupported
from pyvmem.kvcache import EmptyShape, LayerShape, StateShape, layer_shapes
from pyvmem.models.hf_config import plain_rows
from pyvmem.models.shapes import Shape
from pyvmem.plumbing.validation import invalid

__all__ = [
    "Handed",
    "handed_over",
    "plain_rows",
    "plain_scores",
    "row_shapes",
    "stored_shapes",
    "twice",
]

Handed = tuple[int, int, int]
"""Number of KV heads, elements per head of a key, and elements per head of a value."""


def handed_over(key: Any, value: Any) -> Handed:
    """Returns the head count and head sizes of ``[batch, num_kv_heads, any, head_dim]``.

    Raises:
        InvalidArgument: keys and values have different numbers of heads.
    """
    if key.shape[1] != value.shape[1]:
        raise invalid(
            f"keys of {key.shape[1]} heads and values of {value.shape[1]}", op="VMemCache"
        )
    return key.shape[1], key.shape[3], value.shape[3]


def plain_scores(what: str, given: Mapping[str, Any]) -> None:
    """Rejects extra arguments to an attention function if they change the scores.

    Raises:
        NotSupported: the arguments ask for capped scores, sinks or position biases, which no kernel
            for slots supports.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if given.get(name) is not None:
            raise NotSupported(f"attention {what!r} has no {name}", op=what)


def twice(layer: int) -> NotSupported:
    """Returns the error for a layer that attends twice per pass to different values (DiffLlama)."""
    return NotSupported(
        f"layer {layer} attends twice in a pass, but a layer has only one row per token",
        op="attention",
    )


def row_shapes(config: Any, what: str) -> list[LayerShape]:
    """Returns the `layer_shapes` of a model that stores keys and values in every layer.

    Raises:
        NotSupported: a layer is stateful or stores nothing; the message names `what`.
    """
    found: list[LayerShape] = []
    for layer, shape in enumerate(layer_shapes(config)):
        if not isinstance(shape, LayerShape):
            has = "has a state of its own" if isinstance(shape, StateShape) else "stores nothing"
            raise NotSupported(
                f"{what}: layer {layer} of {type(config).__name__} {has}, and no keys and values",
                op=what,
            )
        found.append(shape)
    return found


def stored_shapes(
    text: Any, layer: int, given: Handed | None
) -> tuple[list[Shape], list[Handed | None]]:
    """Returns the shapes each layer stores and is passed, given the first layer that receives keys.

    Args:
        text: the language model's configuration.
        layer: index of that layer.
        given: the shape of the data passed to it; None: the layer is stateful, and the other layers
            follow the configuration.

    Raises:
        InvalidArgument: the configuration's layers differ, and this layer does not match any of
            them.
        NotSupported: the model has both a latent and states.
    """
    told = layer_shapes(text)
    rows = [one for one in told if isinstance(one, LayerShape)]
    if any(isinstance(one, StateShape) for one in told):
        if any(not one.v_head_dim for one in rows):
            raise NotSupported("VMemCache: the model has both a latent and states", op="VMemCache")
        each = [
            (one.num_kv_heads, one.head_dim, one.v_head_dim or 0)
            if isinstance(one, LayerShape)
            else None
            for one in told
        ]
        return told, each
    mine = told[layer]
    assert given is not None
    assert isinstance(mine, LayerShape)
    store = _stored_rows(rows, layer, mine, given)
    shapes: list[Shape] = []
    handed: list[Handed | None] = []
    for one in told:
        stored = store(one) if isinstance(one, LayerShape) else None
        shapes.append(EmptyShape() if stored is None else stored[0])
        handed.append(None if stored is None else stored[1])
    return shapes, handed


def _stored_rows(
    rows: list[LayerShape], layer: int, mine: LayerShape, given: Handed
) -> Callable[[LayerShape], tuple[LayerShape, Handed]]:
    """Returns a function that maps a configured shape to the shapes stored and passed.

    Args:
        rows: the shapes of all layers with keys and values.
        layer, mine, given: index of a layer, its shape in the configuration, and the shape of the
            data that the model passes to it.
    """
    heads, wide, values = given
    latent = mine.v_head_dim == 0
    alike = len({(one.num_kv_heads, one.head_dim, one.v_head_dim) for one in rows}) == 1
    if latent and heads == 1 and wide + values == mine.head_dim:
        return lambda one: (one, (1, one.head_dim - values, values))  # the rotary part comes last
    if alike:
        return lambda one: (LayerShape(*given, one.window), given)
    if (mine.head_dim, mine.v_head_dim) != (wide, values) or mine.num_kv_heads % heads:
        raise invalid(
            f"layer {layer}: keys of {heads} heads of {wide} and values of {values}; the "
            f"configuration says {mine.num_kv_heads} of {mine.head_dim} and {mine.v_head_dim}",
            op="VMemCache",
        )
    ranks = mine.num_kv_heads // heads

    def part(one: LayerShape) -> tuple[LayerShape, Handed]:
        count = max(1, one.num_kv_heads // ranks)
        return replace(one, num_kv_heads=count), (count, one.head_dim, one.v_head_dim or 0)

    return part
