# SPDX-License-Identifier: MIT
"""The attention function that an unmodified transformers model calls.

Registered under the name "vmem" with transformers' public `AttentionInterface`; a name without a
mask function of its own gets no mask. The step comes with the call, as the keyword `vmem_step` that
transformers hands through to the attention function: no state is kept here.

A slot of a virtual tensor is contiguous in virtual memory, so ``[:length]`` of it is an ordinary
tensor and the kernel is torch's own: nothing is gathered, and no row past the length is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["NAME", "AttentionStep", "Span", "attention_forward", "register"]

NAME = "vmem"


@dataclass(frozen=True)
class Span:
    """One request's part of a step: tokens [start, end) of the flattened batch.

    Attributes:
        slot: the KV cache's request id.
        length: rows of the slot that are valid after this step's rows are written.
    """

    slot: int
    start: int
    end: int
    length: int


@dataclass(frozen=True)
class AttentionStep:
    """What the attention function needs to know of a step; the same for all layers.

    Attributes:
        k, v: per layer, the KV cache's view ``[max_batch, max_seq_len, num_kv_heads, head_dim]``.
        slots, positions: for each of the step's T tokens, where its row goes; int64 ``[T]``.
        spans: the requests of the step, in the order of their tokens.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    slots: torch.Tensor
    positions: torch.Tensor
    spans: Sequence[Span]


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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the step's keys and values into the cache and attends, request by request.

    Args:
        query: ``[1, num_heads, T, head_dim]``, the requests' tokens one after the other.
        key, value: ``[1, num_kv_heads, T, head_dim]``.
        attention_mask: must be None; what a token sees follows from its request and position.

    Returns:
        ``[1, T, num_heads, head_dim]``, and None for the weights that are never made.

    Raises:
        ValueError: called without a step, or with a mask or dropout.
    """
    if vmem_step is None:
        raise ValueError(
            'attention "vmem" needs the keyword argument vmem_step; use pyvmem.serve.Engine'
        )
    if attention_mask is not None or dropout:
        raise ValueError('attention "vmem" takes neither a mask nor dropout')
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int that nn.Module's __getattr__ hides
    k, v = vmem_step.k[layer], vmem_step.v[layer]
    where = (vmem_step.slots, vmem_step.positions)
    k[where] = key[0].transpose(0, 1)
    v[where] = value[0].transpose(0, 1)

    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for span in vmem_step.spans:
        rows = span.end - span.start
        mask = None
        if (
            1 < rows < span.length
        ):  # a later chunk of a prompt: is_causal would align at the upper left
            mask = query.new_ones((rows, span.length), dtype=torch.bool).tril(span.length - rows)
        output = scaled_dot_product_attention(
            query[:, :, span.start : span.end],
            k[span.slot, : span.length].transpose(0, 1).unsqueeze(0),
            v[span.slot, : span.length].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=rows > 1 and mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def register() -> None:
    """Makes ``attn_implementation="vmem"`` known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
