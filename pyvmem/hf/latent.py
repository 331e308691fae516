# SPDX-License-Identifier: MIT
"""Attention over MLA's latent in an unmodified model.

In every layer and step, transformers computes every head's keys and values from the latents of all
earlier tokens. Here the attention function receives and caches the latents themselves: one KV head
of ``kv_lora_rank + qk_rope_head_dim`` elements, of which the first ``kv_lora_rank`` are the values.
It also receives the up-projections, and applies them either to the queries and the result or to the
rows (`pyvmem.attention.latent`). The results are the same up to rounding.

The function registered under the model's ``attn_implementation`` gets ``query [1, heads, tokens,
nope + rotary]``, ``key`` and ``value`` with one head each, and, as `UP`, the
`pyvmem.attention.UpProjections`; it returns ``[1, tokens, heads, v_head_dim]``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pyvmem.attention import UpProjections
from pyvmem.errors import NotSupported

__all__ = ["UP", "absorbed", "is_latent", "latent_rank"]

UP = "latent_up"
"""The keyword argument that passes the up-projections to the attention function."""

_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "q_lora_rank", "kv_lora_rank")


def is_latent(config: Any) -> bool:
    """Returns true if a text model's attention stores a latent (MLA)."""
    return bool(getattr(config, "kv_lora_rank", None))


def latent_rank(config: Any) -> int:
    """Returns the number of latent elements that values are computed from; 0 without MLA."""
    return int(getattr(config, "kv_lora_rank", None) or 0)


def _attentions(model: Any) -> list[Any]:
    """Finds the attention modules of a model with MLA.

    Raises:
        NotSupported: their structure differs from DeepSeek-V3's.
    """
    found = [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in _PARTS)
        and hasattr(module.config, "rope_interleave")
    ]
    count = model.config.get_text_config().num_hidden_layers
    if len(found) != count or any(not _is_plain(module.kv_b_proj) for module in found):
        raise NotSupported(
            f"{type(model).__name__}: {len(found)} of {count} layers have DeepSeek-V3's latent "
            "attention with a plain up-projection, which is absorbed; quantised ones are not",
            op="absorbed",
        )
    return found


def _is_plain(module: Any) -> bool:
    return type(module) is torch.nn.Linear and module.bias is None


@contextmanager
def absorbed(model: Any) -> Iterator[None]:
    """Makes attention run over the latent inside the ``with`` block, if the model has MLA.

    Raises:
        NotSupported: the structure of an MLA model's layers differs from DeepSeek-V3's.
    """
    if not is_latent(model.config.get_text_config()):
        yield
        return
    modules = _attentions(model)
    for module in modules:
        module.forward = functools.partial(_forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # exposes the class's method


def _forward(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces DeepSeek-V3's forward; takes ``[1, tokens, hidden]``.

    The attention function fills the cache.
    """
    from transformers import Cache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # transformers 5.24 and later, and continuous batching, pass the cache as `cache`.
    given = (kwargs.pop("past_key_values", None), kwargs.get("cache"))
    if any(isinstance(past, Cache) for past in given):
        raise NotSupported(
            "absorbed attention: only the attention function may use the cache", op="absorbed"
        )
    batch, tokens = hidden_states.shape[:-1]
    nope, rotary, rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
    if module.q_lora_rank is None:
        q = module.q_proj(hidden_states)
    else:
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    q = q.view(batch, tokens, -1, nope + rotary).transpose(1, 2)
    q_nope, q_rot = q.split([nope, rotary], -1)
    latent, k_rot = module.kv_a_proj_with_mqa(hidden_states).split([rank, rotary], -1)
    latent = module.kv_a_layernorm(latent).view(batch, 1, tokens, rank)
    k_rot = k_rot.view(batch, 1, tokens, rotary)
    source: Any = sys.modules[type(module).__module__]
    interleaved = module.config.rope_interleave
    rotate = source.apply_rotary_pos_emb_interleave if interleaved else source.apply_rotary_pos_emb
    q_rot, k_rot = rotate(q_rot, k_rot, *position_embeddings)
    up = module.kv_b_proj.weight.view(-1, nope + module.v_head_dim, rank)
    kwargs[UP] = UpProjections(*up.split([nope, module.v_head_dim], 1))
    query = torch.cat([q_nope, q_rot], -1)
    key = torch.cat([latent, k_rot], -1)

    attend: Any = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    out, _ = attend(
        module,
        query,
        key,
        key[..., :rank],
        attention_mask,
        dropout=0.0,
        scaling=module.scaling,
        **kwargs,
    )
    return module.o_proj(out.reshape(batch, tokens, -1)), None
