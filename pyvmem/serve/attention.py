# SPDX-License-Identifier: MIT
"""The attention function that an unmodified transformers model calls.

It is registered under the name "vmem" with transformers' public `AttentionInterface`. Since there
is no mask function of that name, transformers does not create a mask. The step is passed with each
call, as the keyword argument `vmem_step`, which transformers forwards to the attention function, so
this module keeps no state. The kernels come from `pyvmem.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pyvmem.attention import Attention, Batch
from pyvmem.hf.latent import UP
from pyvmem.hf.shapes import plain_scores, twice

__all__ = ["NAME", "AttentionStep", "attention_forward", "register"]

NAME = "vmem"


@dataclass(frozen=True)
class AttentionStep:
    """A step's input to the attention function, the same for all layers.

    Attributes:
        seen: layers that have called the function in this step.
    """

    attention: Attention
    batch: Batch
    seen: set[int] = field(default_factory=set)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    vmem_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the step's keys and values into the cache and attends.

    Args:
        query: ``[rows, num_heads, T, head_dim]``, with all requests' tokens concatenated in one
            row, or one row per request.
        key, value: ``[rows, num_kv_heads, T, head_dim]``.
        attention_mask: must be None; the mask follows from each token's request and position.

    Returns:
        ``[rows, T, num_heads, head_dim]``, and None for the attention weights, which are not
        computed.

    Raises:
        ValueError: called without a step, or with a mask or dropout.
        NotSupported: the scores are modified (capped, or with sinks), or a layer attends twice.
    """
    if vmem_step is None:
        raise ValueError(
            'attention "vmem" needs the keyword argument vmem_step; use pyvmem.serve.Engine'
        )
    if attention_mask is not None or dropout:
        raise ValueError('attention "vmem" takes neither a mask nor dropout')
    plain_scores(NAME, others)
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # typed as nn.Module's __getattr__
    attend, batch = vmem_step.attention, vmem_step.batch
    if layer in vmem_step.seen:
        raise twice(layer)
    vmem_step.seen.add(layer)
    attend.write(layer, _flat(key), None if attend.is_latent(layer) else _flat(value), batch)
    output = attend(_flat(query), layer, batch, scale=scaling, up=others.get(UP))
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Reshapes ``[rows, heads, T, dim]`` to ``[tokens, heads, dim]``."""
    return rows.transpose(1, 2).flatten(0, 1)


def register() -> None:
    """Registers ``attn_implementation="vmem"`` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
