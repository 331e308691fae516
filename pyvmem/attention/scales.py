# SPDX-License-Identifier: MIT
"""Keys and values of 8 bits: what an element is multiplied with, and how rows are made.

A stored element times its scale is the number. Scales are a layer's, one for each KV head or one
for all, fixed when `Attention` is made, as engines take them from a checkpoint. Those of queries
are found in each call, without the host: the largest element becomes the type's largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyvmem.kvcache.config import invalid

__all__ = ["FP8", "Scales", "quantised", "scales_of"]

FP8 = "float8_e4m3fn"
_LARGEST = 448.0


@dataclass(frozen=True)
class Scales:
    """Of one layer; float32, ``[num_kv_heads]``, on the cache's device."""

    key: torch.Tensor
    value: torch.Tensor

    def of_queries(self, q: torch.Tensor) -> torch.Tensor:
        """One for all of ``[tokens, heads, head_dim]``; float32, ``[1]``, on their device."""
        largest = q.abs().amax().float().clamp(min=1e-12)
        return (largest / _LARGEST).reshape(1)


def quantised(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows ``[tokens, heads, head_dim]`` in 8 bits; what is out of range becomes the largest."""
    found = rows.float() / scale.reshape(-1, 1)
    return found.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def scales_of(
    given: Sequence[tuple[object, object]] | None, heads: Sequence[int], device: torch.device
) -> list[Scales]:
    """Checks the scales of all layers.

    Args:
        given: for each layer, of its keys and of its values: a number, or one for each KV head;
            None: 1 everywhere.
        heads: KV heads of each layer.
        device: where they shall be.

    Raises:
        InvalidArgument: too few, or not positive numbers.
    """
    pairs = [(1.0, 1.0)] * len(heads) if given is None else list(given)
    if len(pairs) != len(heads):
        raise invalid(f"scales of {len(pairs)} layers, the cache has {len(heads)}")
    found = []
    for layer, (pair, count) in enumerate(zip(pairs, heads, strict=True)):
        both = []
        for one in pair:
            scale = torch.as_tensor(one, dtype=torch.float32).flatten()
            if scale.numel() not in (1, count):
                raise invalid(
                    f"layer {layer}: {scale.numel()} scales; wanted one, or one for each of "
                    f"{count} KV heads"
                )
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise invalid(f"layer {layer}: a scale of {scale.min().item()} is not positive")
            both.append(scale.expand(count).contiguous().to(device))
        found.append(Scales(*both))
    return found
