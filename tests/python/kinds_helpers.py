# SPDX-License-Identifier: MIT
"""Builds small random models of common architectures: sliding windows, MLA, unequal layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from serve_helpers import VOCABULARY

WINDOW = 24
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}


def _gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **_SMALL,
            num_hidden_layers=4,
            layer_types=kinds,
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
        )
    )


def _mistral() -> Any:
    config = transformers.MistralConfig(**_SMALL, num_hidden_layers=2, sliding_window=WINDOW)
    return transformers.MistralForCausalLM(config)


def _qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SMALL, num_hidden_layers=2))


def _deepseek() -> Any:
    small = {**_SMALL, "num_key_value_heads": 4}
    del small["head_dim"]
    config = transformers.DeepseekV3Config(
        **small,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        kv_lora_rank=24,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _qwen3next() -> Any:
    config = transformers.Qwen3NextConfig(
        **_SMALL,
        num_hidden_layers=4,  # three layers of linear attention, one of full attention
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return transformers.Qwen3NextForCausalLM(config)


def _jamba() -> Any:
    config = transformers.JambaConfig(
        **_SMALL,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    )
    return transformers.JambaForCausalLM(config)


def _bamba() -> Any:
    config = transformers.BambaConfig(
        **_SMALL,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=24,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=16,
    )
    return transformers.BambaForCausalLM(config)


def _lfm2() -> Any:
    kinds = ["conv", "full_attention", "conv"]
    config = transformers.Lfm2Config(
        **_SMALL, num_hidden_layers=3, layer_types=kinds, block_multiple_of=16
    )
    return transformers.Lfm2ForCausalLM(config)


def _gemma4() -> Any:
    """Full-attention layers have larger heads; the last two layers reuse other layers' keys."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **_SMALL,
        num_hidden_layers=5,
        layer_types=[*kinds, "sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    )
    return transformers.Gemma4ForCausalLM(config)


def _llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **_SMALL,
        num_hidden_layers=4,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=64,
        num_local_experts=2,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
    )
    return transformers.Llama4ForCausalLM(config)


def _gptoss() -> Any:
    """The scores have a sink, and every other layer has a sliding window."""
    config = transformers.GptOssConfig(
        **{**_SMALL, "attn_implementation": "eager"},
        num_hidden_layers=2,
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    return transformers.GptOssForCausalLM(config)


def _gemma2() -> Any:
    """The scores are capped, and every other layer has a sliding window."""
    config = transformers.Gemma2Config(
        **{**_SMALL, "attn_implementation": "eager"},
        num_hidden_layers=2,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
    )
    return transformers.Gemma2ForCausalLM(config)


def _mimo() -> Any:
    """Values have smaller heads than keys; sliding layers have twice as many heads, and sinks."""
    config = transformers.MiMoV2FlashConfig(
        **{**_SMALL, "attn_implementation": "eager"},
        num_hidden_layers=3,
        v_head_dim=12,
        sliding_window=WINDOW,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    return transformers.MiMoV2FlashForCausalLM(config)


def _nemotron() -> Any:
    """The layers are, in order: a recurrent state, experts without attention, attention, a plain
    layer, and another state."""
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    config = transformers.NemotronHConfig(
        **_SMALL,
        layers_block_type=kinds,
        mamba_num_heads=4,
        mamba_head_dim=24,
        n_groups=1,
        ssm_state_size=8,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    )
    return transformers.NemotronHForCausalLM(config)


STATES = {"qwen3next": _qwen3next, "jamba": _jamba, "bamba": _bamba, "lfm2": _lfm2}
"""Kinds with layers that keep a recurrent state per request."""

PARTIAL = {
    "gemma2": _gemma2,
    "gemma4": _gemma4,
    "gptoss": _gptoss,
    "llama4": _llama4,
    "mimo": _mimo,
    "nemotron": _nemotron,
}
"""Kinds that `VMemCache` supports but attention over slots does not."""

KINDS = {"gemma3": _gemma3, "mistral": _mistral, "qwen3": _qwen3, "deepseek": _deepseek}


@functools.cache
def model_of(kind: str) -> Any:
    """Returns the model of this kind in evaluation mode; every call returns the same object."""
    torch.manual_seed(7)
    return {**KINDS, **STATES, **PARTIAL}[kind]().eval()
