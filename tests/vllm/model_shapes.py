# SPDX-License-Identifier: MIT
"""Creates draft models, adapters, and small models other than Llamas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["MADE", "SHAPES", "predict_a_token_more", "save_adapter", "save_draft"]

_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # Two layers with a Mamba2 state and two with attention, so that a region holds blocks of both.
    "granite": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        **_MAMBA2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "chunk_size": 32,
        "expand": 2,
    },
    # Gated delta nets. The CPU kernels need bfloat16 and a head dimension of 128. An attention
    # block is as large as a state: 96 tokens with a head dimension of 256.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        **_EXPERTS,
    },
    # Short convolutions.
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "conv_dim": 64,
        "conv_bias": False,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    # Only states, no attention.
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 32,
        "n_groups": 1,
        "chunk_size": 32,
        "expand": 2,
    },
    # Sliding windows and sinks.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # The last two layers read the keys and values of the first two.
    "gemma3n": {
        "model_type": "gemma3n_text",
        "tie_word_embeddings": True,
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    # Latent attention; the last layer becomes the multi-token prediction module.
    "deepseek": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,  # its kernels support only this rank and this rotary size
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        **_EXPERTS,
    },
}


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the weights in a model's folder.

    `change` modifies the weights in place or returns new ones.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(change(weights) or weights, path, metadata={"format": "pt"})


def predict_a_token_more(folder: Path) -> None:
    """Turns a model's last layer into its multi-token prediction module, as in DeepSeek V3."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        size = weights["model.embed_tokens.weight"].shape[1]
        torch.manual_seed(1)
        added = {name: torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
        added["eh_proj"] = torch.randn(size, 2 * size) * 0.1
        added["shared_head.head"] = weights["lm_head.weight"].clone()
        added["embed_tokens"] = weights["model.embed_tokens.weight"].clone()
        weights.update({f"model.layers.2.{k}.weight": v for k, v in added.items()})

    _weights(folder, change)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config), "utf-8")


def save_draft(folder: Path) -> None:
    """Turns a one-layer Llama into an EAGLE draft for a model with the same hidden size."""

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        size = weights["model.embed_tokens.weight"].shape[1]
        torch.manual_seed(1)
        layer = {
            name.removeprefix("model."): weight
            for name, weight in weights.items()
            if name.startswith("model.layers.0.") and "input_layernorm" not in name
        }
        return {**layer, "fc.weight": torch.randn(size, 2 * size) * 0.1}

    _weights(folder, change)


def save_adapter(folder: Path, layers: int = 2, size: int = 64, kv: int = 32, rank: int = 8) -> str:
    """Creates a LoRA adapter for attention; returns its folder."""
    from safetensors.torch import save_file

    torch.manual_seed(3)
    weights = {}
    for layer in range(layers):
        for name, out in (("q_proj", size), ("v_proj", kv)):
            begin = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{begin}.lora_A.weight"] = torch.randn(rank, size) * 0.3
            weights[f"{begin}.lora_B.weight"] = torch.randn(out, rank) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def _save_whisper(folder: Path) -> None:
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    config = WhisperConfig(
        vocab_size=512,
        num_mel_bins=80,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
        init_std=0.3,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)


MADE: dict[str, Callable[[Path], None]] = {"whisper": _save_whisper}
"""Functions that save the models that cannot be created as plain language models."""
