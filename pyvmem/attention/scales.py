# SPDX-License-Identifier: MIT
"""Scales for 8-bit keys and values, and quantization of rows.

The value of a stored element is the element times its scale. Each layer has its own scales, one per
KV head or one for all, fixed when `Attention` is created: engines read them from a checkpoint.
Query scales are computed on the device in each call: the largest element maps to the dtype's
maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyvmem.plumbing.validation import invalid

__all__ = ["FP8", "Scales", "quantised", "scales_of"]

FP8 = "float8_e4m3fn"
_LARGEST = 448.0


@dataclass(frozen=True)
class Scales:
    """The scales of one layer; float32, ``[num_kv_heads]``, on the cache's device."""

    key: torch.Tensor
    value: torch.Tensor

    def of_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Returns a scale, float32 ``[1]``, for queries ``[tokens, heads, head_dim]``."""
        largest = q.abs().amax().float().clamp(min=1e-12)
        return (largest / _LARGEST).reshape(1)


def quantised(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantizes rows ``[tokens, heads, head_dim]`` to 8 bits; clamps out-of-range elements."""
    found = rows.float() / scale.reshape(-1, 1)
    return found.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def scales_of(
    given: Sequence[tuple[object, object]] | None, heads: Sequence[int], device: torch.device
) -> list[Scales]:
    """Checks the scales of all layers and puts them on the device.

    Args:
        given: for each layer, the scales of its keys and of its values, each a number or one number
            per KV head; None: all scales are 1.
        heads: number of KV heads in each layer.
        device: where to put the scales.

    Raises:
        InvalidArgument: the number of scales is wrong, or a scale is not a finite positive number.
    """
    pairs = [(1.0, 1.0)] * len(heads) if given is None else list(given)
    if len(pairs) != len(heads):
        raise invalid(
            f"scales of {len(pairs)} layers, but the cache has {len(heads)}", op="Attention"
        )
    found = []
    for layer, (pair, count) in enumerate(zip(pairs, heads, strict=True)):
        both = []
        for one in pair:
            scale = torch.as_tensor(one, dtype=torch.float32).flatten()
            if scale.numel() not in (1, count):
                raise invalid(
                    f"layer {layer}: {scale.numel()} scales; expected one, or one for each of "
                    f"{count} KV heads",
                    op="Attention",
                )
            if not bool(((scale > 0) & scale.isfinite()).all()):
                raise invalid(
                    f"layer {layer}: a scale of {scale.min().item()} is not positive",
                    op="Attention",
                )
            both.append(scale.expand(count).contiguous().to(device))
        found.append(Scales(*both))
    return found
