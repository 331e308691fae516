# SPDX-License-Identifier: MIT
"""Checks what each layer stores, for every language model in the installed transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
import transformers
from transformers.models.auto import modeling_auto

from pyvmem import InvalidArgument, VMemError
from pyvmem.engine import Model
from pyvmem.hf.keyword import CACHE
from pyvmem.kvcache import EmptyShape, LayerShape, StateShape, layer_shapes
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.layouts import Request, advise, shape_of

pytestmark = [
    pytest.mark.filterwarnings("default"),  # transformers issues its own warnings
]

CONFIGS: Any = transformers.CONFIG_MAPPING
LANGUAGE = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
)
NOT_MADE = {"gemma4_assistant", "musicgen", "musicgen_melody", "vision-encoder-decoder"}
"""Models whose default configuration is rejected by some version of transformers."""

REFUSED = {
    "bart": "a decoder that attends to an encoder also stores the encoder's rows",
    "deepseek_v32": r"layer 0 is (indexed|deepseek_sparse)_attention: this kind of layer is not",
    "falcon_h1": "layer 0 is hybrid: a layer with both keys and values and a state",
    "mamba": "layer 0 is linear_attention: the state's description in its configuration",
    "minimax": "layer 1 is linear_attention: the state's description in its configuration",
    "mllama": "layer 3 attends only to an image",
    "musicgen": "Multiple valid text configs",
    "recurrent_gemma": "layer 0 is (linear_attention: the state|recurrent: this kind of layer)",
    "zamba2": "layer 6 is hybrid: a layer with both keys and values and a state",
}
# fmt: off
ANSWERED = [
    "afmoe", "bailing_hybrid", "cohere2", "deepseek_v2", "deepseek_v3", "falcon", "gemma2",
    "gemma3", "gemma3_text", "gemma3n", "gemma4", "glm", "glm4", "gpt_oss", "jamba",
    "kimi_linear", "lfm2", "llama", "llama4", "minimax_m2", "mistral", "mistral3", "mixtral",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "phi", "phi3", "phi4_multimodal",
    "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_vl", "smollm3",
    "starcoder2",
]
# fmt: on


def written(config: Any, folder: Path) -> str:
    """Saves a ``config.json`` without defaults, as a model's publisher does; returns its path."""
    values = {**config.to_diff_dict(), "torch_dtype": "bfloat16"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return str(folder)


def test_every_model_has_shapes_or_a_listed_error(tmp_path: Path) -> None:
    """Models in ANSWERED have shapes, even if their configuration is read from a file; those in
    REFUSED raise the listed error. Any other model may have shapes or raise a pyvmem error.
    """
    answers: dict[str, str] = {}
    requests = [Request(60, 4)]
    for name in LANGUAGE:
        try:
            config = CONFIGS[name]()
        except Exception:  # each class raises its own errors
            assert name in NOT_MADE
            continue
        try:
            layers = layer_shapes(config)
        except VMemError as error:
            answers[name] = str(error)
            if name in REFUSED:
                with pytest.raises(InvalidArgument):
                    shape_of(written(config, tmp_path / name))
            continue
        answers[name] = ""
        if name not in ANSWERED:
            continue
        shape = shape_of(written(config, tmp_path / name))
        plain = LayerShape(shape.num_kv_heads, shape.head_dim)
        assert (shape.layers or (plain,) * shape.num_layers) == tuple(layers), name
        assert advise(shape, requests, 64 << 30).best.batch > 0
    here = [name for name in ANSWERED if name in CONFIGS]
    assert {name: answers[name] for name in here} == dict.fromkeys(here, "")
    for name in answers.keys() & REFUSED.keys():
        assert re.search(REFUSED[name], answers[name]), name


SMALL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 6},
    "cohere2": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 2},
    "falcon": {"num_hidden_layers": 2},
    "falcon, 40B": {
        "num_hidden_layers": 2,
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
        "num_attention_heads": 128,
        "hidden_size": 8192,
    },
    "gemma3n_text": {},
    "gemma4_text": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 2},
    "kimi_linear": {"num_hidden_layers": 5},
    "llama4_text": {"num_hidden_layers": 4},
    "mimo_v2_flash": {"num_hidden_layers": 3},
    "mistral": {"num_hidden_layers": 2},
    "nemotron_h": {},
    "olmo_hybrid": {"num_hidden_layers": 4},
    "phi3": {"num_hidden_layers": 2, "sliding_window": 2047},
    "qwen3_next": {"num_hidden_layers": 4},
}


def kept(config: Any) -> list[Any]:
    """Returns the contents of transformers' own cache after a pass that computes only shapes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # some models' experts support no other dtype
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
        past = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(torch.zeros(1, 5, dtype=torch.long, device="meta"), **{CACHE: past})
    finally:
        torch.set_default_dtype(before)
    found: list[Any] = []
    for layer in past.layers:
        states = [getattr(layer, f"{name}_states", {}).get(0) for name in ("conv", "recurrent")]
        if all(one is not None for one in states):
            found.append(StateShape(*(tuple(one.shape[1:]) for one in states)))
        elif getattr(layer, "keys", None) is None:
            found.append(EmptyShape())
        else:
            _, heads, _, wide = layer.keys.shape
            window = getattr(layer, "sliding_window", 0)
            found.append(LayerShape(heads, wide, layer.values.shape[3], window))
    # In versions up to 5.22, layers that reuse another layer's keys are missing from the cache.
    return found + [EmptyShape()] * (config.num_hidden_layers - len(found))


@pytest.mark.parametrize("name", SMALL)
def test_the_shapes_match_the_models_cache(name: str) -> None:
    kind = name.split(",")[0]
    if kind not in CONFIGS:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = CONFIGS[kind](**SMALL[name])
    told: list[Any] = layer_shapes(config)
    rank = getattr(config, "kv_lora_rank", None)
    if rank:  # transformers calls the latent a key and its rotary part a value
        told = [
            LayerShape(1, rank, one.head_dim - rank) if isinstance(one, LayerShape) else one
            for one in told
        ]
    if name == "falcon, 40B":  # transformers stores each KV head once per query head
        assert {one.num_kv_heads for one in told} == {8}
        told = [LayerShape(config.num_attention_heads, one.head_dim) for one in told]
    assert told == kept(config)


def test_a_nested_configuration_inherits_the_outer_dtype(tmp_path: Path) -> None:
    """As in Gemma 3's file, the text model is a nested section, and the dtype is outside of it."""
    text = {"num_hidden_layers": 6, "model_type": "gemma3_text", "sliding_window": 64}
    values = {"model_type": "gemma3", "text_config": text, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = shape_of(str(tmp_path))
    assert shape.dtype == "float16"
    assert [getattr(one, "window", None) for one in shape.layers] == [64] * 5 + [0]
    del values["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        InvalidArgument, match="it does not name a dtype; pass the dtype of keys and values"
    ):
        shape_of(str(tmp_path))
    assert shape_of(str(tmp_path), "float8_e4m3fn").dtype == "float8_e4m3fn"
    values["text_config"] = {**text, "num_hidden_layers": "six"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match="transformers rejects this configuration: "):
        shape_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [1]}),
        ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}),
        ("jamba", {}),
        ("nemotron_h", {}),
    ],
)
@pytest.mark.parametrize("diff", [True, False])
def test_a_file_that_transformers_saved_is_read(
    tmp_path: Path, name: str, more: dict[str, Any], diff: bool
) -> None:
    """The file includes all defaults; infinite values are written as objects."""
    config = CONFIGS[name](dtype="bfloat16", **more)
    config.to_json_file(tmp_path / "config.json", use_diff=diff)
    shape = shape_of(str(tmp_path))
    plain = LayerShape(shape.num_kv_heads, shape.head_dim)
    assert (shape.layers or (plain,) * shape.num_layers) == tuple(layer_shapes(config))


def test_models_of_unequal_layers_are_rejected_by_a_plain_cache() -> None:
    jamba, gemma = CONFIGS["jamba"](dtype="bfloat16"), CONFIGS["gemma4_text"](dtype="bfloat16")
    with pytest.raises(InvalidArgument, match="has layers of kind linear_attention, which"):
        KVCacheConfig.from_hf(jamba)
    with pytest.raises(InvalidArgument, match="its layers differ in head_dim; use layer_shapes"):
        KVCacheConfig.from_hf(gemma)
    found = Model.of(gemma)
    assert {(one.head_dim, one.window) for one in found.layers} == {(256, 512), (512, 0)}
