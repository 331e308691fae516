# SPDX-License-Identifier: MIT
"""Descriptions of layers for kernels: where the rows are and which rows a token attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyvmem.plumbing.validation import bounded, invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import GroupView, KVCache

__all__ = ["Form", "forms_of"]


@dataclass(frozen=True)
class Form:
    """The properties of a layer that kernels depend on. Layers with equal forms share kernels.

    Attributes:
        keys: the group of layers whose tensors hold the keys.
        values: the group whose tensors hold the values; same as `keys`, unless the value size
            differs.
        head_dim: elements per head of a key.
        v_head_dim: elements per head of a value.
        window: number of tokens a token attends to, including itself; 0: all tokens up to itself.
        latent: whether the layer has only one tensor, in which the first `v_head_dim` elements of a
            row are its values (MLA).
    """

    keys: GroupView = field(repr=False)
    values: GroupView = field(repr=False)
    head_dim: int
    v_head_dim: int
    window: int = 0
    latent: bool = False

    @property
    def dtype(self) -> str:
        """The name of the keys' and values' dtype."""
        return str(self.keys.config.dtype)

    @property
    def caches(self) -> tuple[GroupView, ...]:
        """The groups whose rows are read."""
        return (self.keys,) if self.values is self.keys else (self.keys, self.values)


def forms_of(
    cache: KVCache, windows: Sequence[int] | None = None, v_head_dim: int = 0
) -> list[Form | None]:
    """Returns the form of every layer, or None for a layer without keys and values.

    Args:
        cache: the cache whose layers to describe.
        windows: per layer, the number of tokens a token attends to, if fewer than the cache keeps;
            None: all tokens that the cache keeps. Ignored for a layer without keys.
        v_head_dim: number of leading elements of a latent that are the values.

    Raises:
        InvalidArgument: a layer has one tensor and `v_head_dim` is missing or larger than a row, or
            a window is wider than the cache keeps.
    """
    if not hasattr(cache, "layer_views"):  # not isinstance, so that a ParallelKVCache qualifies
        raise TypeError(f"cache: expected a KVCache, not {cache!r:.80}")
    pairs = cache.layer_views()
    if windows is not None and len(windows) != len(pairs):
        raise invalid(
            f"windows needs one entry per layer: {len(windows)}, but the cache has {len(pairs)}",
            op="Attention",
        )
    forms: list[Form | None] = []
    for layer, pair in enumerate(pairs):
        if pair is None:
            forms.append(None)
            continue
        keys, values = pair
        kept = keys.config.window
        window = (
            kept
            if windows is None
            else bounded("a window", windows[layer], 0, 1 << 30, op="Attention")
        )
        if kept and not 0 < window <= kept:
            raise invalid(
                f"layer {layer}: a window of {window}, but the cache keeps {kept} tokens",
                limit=kept,
                op="Attention",
            )
        wide = keys.config.head_dim
        if values is None and not 1 <= v_head_dim <= wide:
            raise invalid(
                f"layer {layer} has one tensor of {wide} elements per row; v_head_dim, the "
                f"number of leading elements that are its values, cannot be {v_head_dim}",
                limit=wide,
                op="Attention",
            )
        form = (
            Form(keys, keys, wide, v_head_dim, window, latent=True)
            if values is None
            else Form(keys, values, wide, values.config.head_dim, window)
        )
        forms.append(form)
    return forms
