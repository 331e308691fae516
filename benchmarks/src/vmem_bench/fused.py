# SPDX-License-Identifier: MIT
"""Operations that engines fuse around attention: rotary embedding and writing the new rows.

Each operation is one Triton kernel on a GPU and plain torch elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["rotary_table", "rotate", "write_rows"]


@functools.cache
def _kernels() -> Any:
    from torch.utils._triton import has_triton

    if not has_triton():
        return None
    from vmem_bench import fused_kernels

    return fused_kernels


def _on_gpu(tensor: torch.Tensor) -> Any:
    """Returns the module of Triton kernels, or None if they cannot be used for this tensor."""
    return _kernels() if tensor.is_cuda else None


def rotary_table(longest: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Returns the cosines and sines of every position, float32 ``[longest, 2, head_dim / 2]``."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    place = torch.arange(longest, dtype=torch.float64, device=device)
    angle = place[:, None] * theta**-exponent
    return torch.stack((angle.cos(), angle.sin()), dim=1).float()


def rotate(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotates `heads`, ``[tokens, heads, head_dim]``, in place by the tokens' positions."""
    tokens, count, width = heads.shape
    kernels = _on_gpu(heads)
    if kernels is not None:
        kernels.rotate[(tokens, count)](
            heads, positions, table, heads.stride(0), heads.stride(1), HALF=width // 2, num_warps=1
        )
        return
    cos, sin = table[positions.long()].unsqueeze(2).unbind(1)
    first, second = heads[..., : width // 2].float(), heads[..., width // 2 :].float()
    heads[..., : width // 2] = first * cos - second * sin
    heads[..., width // 2 :] = second * cos + first * sin


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Stores each token's key and value ``[tokens, kv_heads, head_dim]`` at ``[row, place]``.

    `keys` and `values` are ``[N, places, kv_heads, head_dim]`` with the same strides; each row is
    contiguous.
    """
    tokens, count, width = key.shape
    kernels = _on_gpu(key)
    if kernels is not None:
        kernels.write_rows[(tokens, count)](
            key,
            value,
            keys.data_ptr(),  # an integer, since Triton rejects tensors that CUDA did not allocate
            values.data_ptr(),
            rows,
            places,
            key.stride(0),
            value.stride(0),
            key.stride(1),
            keys.stride(0),
            keys.stride(1),
            keys.stride(2),
            WIDTH=width,
            num_warps=1,
        )
        return
    where = (rows.long(), places.long())
    keys[where] = key
    values[where] = value
