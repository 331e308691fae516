# SPDX-License-Identifier: MIT
"""Tests the demo's engine and command with windows, MLA and unequal layers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import transformers
from kinds_helpers import KINDS, STATES, WINDOW, model_of
from serve_helpers import expected, make_requests, one_thread

import pyvmem
from pyvmem import NotSupported
from pyvmem.hf.shapes import row_shapes
from pyvmem.kvcache import KVCache, layer_shapes
from pyvmem.kvcache.layered_cache import cache_of
from pyvmem.serve import Engine
from pyvmem.serve.model import LoadedModel
from pyvmem.serve.trace import Recorder
from pyvmem.serve.verify import compare

__all__ = ["one_thread"]
pytestmark = [pytest.mark.needs_tensors, pytest.mark.filterwarnings("default")]


MEMORY = {"qwen3next": 27, "jamba": 26, "bamba": 20, "lfm2": 14, "nemotron": 20}
"""The cache's memory in pages, for kinds that need fewer than the default of 40."""


def loaded_of(kind: str) -> LoadedModel:
    return LoadedModel(model_of(kind), None, Path("random"), kind, frozenset())


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [*product([*KINDS, *STATES, "nemotron"], [0]), ("gemma3", 16), ("deepseek", 16)],
)
def test_answers_match_generate_for_every_kind(host: pyvmem.Context, kind: str, chunk: int) -> None:
    """Requests longer than the window join and leave, and some are preempted along the way."""
    loaded = loaded_of(kind)
    requests = make_requests(6, longest=90, new_tokens=(5, 30))
    wanted = expected(loaded, requests)
    shapes = layer_shapes(loaded.model.config)
    policy = {"dtype": "float32", "max_batch": 4, "max_seq_len": 256, "window_tile": 16}
    memory = MEMORY.get(kind, 40) * 4096
    with cache_of(shapes, host, "host", 0, **policy, memory_limit=memory) as cache:
        recorder = Recorder(cache, 4096)
        with Engine(loaded.model, cache, prefill_chunk=chunk, observer=recorder) as engine:
            done = [one.completion for one in engine.run(requests) if one.completion is not None]
            assert engine.stats.peak_running > 1
            assert engine.stats.preemptions or kind in KINDS, engine.stats
        verdict = compare(loaded, cache, done, wanted)
        cache.check_integrity()
        assert cache.stats().mapped_bytes <= memory
    assert verdict.passed, verdict
    assert verdict.identical >= 5
    footprint = recorder.own.footprint()
    assert footprint.num_tensors == sum(part.layout.num_tensors for part in cache.caches)
    assert 0 < footprint.used_bytes <= footprint.mapped_bytes
    assert loaded.model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(one) for one in loaded.model.modules())


def test_a_window_applies_over_a_cache_that_keeps_all_rows(host: pyvmem.Context) -> None:
    from dataclasses import replace

    loaded = loaded_of("mistral")
    requests = make_requests(2, shortest=3 * WINDOW, longest=4 * WINDOW, new_tokens=(8, 9))
    shapes = [replace(one, window=0) for one in row_shapes(loaded.model.config, "a test")]
    policy = {"dtype": "float32", "max_batch": 2, "max_seq_len": 256}
    with cache_of(shapes, host, "host", 0, **policy) as cache:
        with Engine(loaded.model, cache) as engine:
            done = [one.completion for one in engine.run(requests) if one.completion is not None]
        assert compare(loaded, cache, done, expected(loaded, requests)).identical == 2


def small_cache(host: pyvmem.Context, shapes: Any) -> KVCache:
    policy = {"dtype": "float32", "max_batch": 1, "max_seq_len": 64}
    return cache_of(shapes, host, "host", 0, **policy)


REFUSED = {
    "gemma2": "the engine: its attention scores are capped",
    "gemma4": "the engine: 2 of its layers use other layers' keys",
    "llama4": "the engine: the model has layers of kind chunked_attention",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_attention_is_rejected(host: pyvmem.Context, kind: str) -> None:
    model = model_of(kind)
    before = model.config._attn_implementation
    with (
        small_cache(host, layer_shapes(model.config)) as cache,
        pytest.raises(NotSupported, match=REFUSED[kind]),
    ):
        Engine(model, cache)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["gptoss", "mimo"])
def test_sinks_are_rejected_before_a_token_is_chosen(host: pyvmem.Context, kind: str) -> None:
    model = model_of(kind)
    before = model.config._attn_implementation
    with small_cache(host, layer_shapes(model.config)) as cache:
        with (
            Engine(model, cache) as engine,
            pytest.raises(NotSupported, match="attention 'vmem' has no s_aux"),
        ):
            list(engine.run(make_requests(1)))
        assert model.config._attn_implementation == before


def test_states_and_rows_are_not_mistaken_for_each_other(host: pyvmem.Context) -> None:
    jamba, qwen = model_of("jamba"), model_of("qwen3")
    rows = row_shapes(qwen.config, "a test")
    with (
        small_cache(host, rows * 2) as cache,
        pytest.raises(ValueError, match="layer 0 keeps a StateShape, the cache has a LayerShape"),
    ):
        Engine(jamba, cache)
    with (
        small_cache(host, layer_shapes(jamba.config)) as cache,
        pytest.raises(ValueError, match="the model has 2 layers, the cache 4"),
    ):
        Engine(qwen, cache)
    with (
        small_cache(host, layer_shapes(jamba.config)) as cache,
        pytest.raises(NotSupported, match="prefill_chunk is 16, and the model has layers with a"),
    ):
        Engine(jamba, cache, prefill_chunk=16)


def _falcon() -> Any:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(vocab_size=199, alibi=False, multi_query=False, **sizes)
    return transformers.FalconForCausalLM(config)


def _diffllama() -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, **heads}
    return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(vocab_size=199, **sizes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_falcon, "layer 0 of FalconForCausalLM does not use"),
        (_diffllama, "layer 0 attends twice in a pass"),
    ],
)
def test_a_model_with_its_own_attention_is_rejected(
    host: pyvmem.Context, make: Any, text: str
) -> None:
    """The model's own attention would mix all requests of a step, or keep only the last values."""
    model = make()
    with small_cache(host, row_shapes(model.config, "a test")) as cache:
        with Engine(model, cache) as engine, pytest.raises(NotSupported, match=text):
            list(engine.run(make_requests(1)))
        assert cache.stats().active_pages == 0


@pytest.mark.slow
def test_the_command_serves_unequal_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyvmem.commands import cli
    from pyvmem.serve import model as models

    class Words:
        chat_template = None

        def __call__(self, text: str) -> dict[str, Any]:
            return {"input_ids": [1 + ord(one) % 190 for one in text]}

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, ids))

    loaded = LoadedModel(model_of("gemma3"), Words(), tmp_path, "gemma3", frozenset())
    loaded.model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(models, "model_folder", lambda *_: tmp_path)
    monkeypatch.setattr(models, "load", lambda *_, **__: loaded)
    prompts = tmp_path / "prompts.txt"
    long = "a prompt that is longer than the window of twenty-four tokens"
    prompts.write_text(f"{long}\n---\nshort\n")
    words = ["serve-demo", "--backend", "host", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert cli.main([*words, "--json", "--verify", "--max-seq-len", "256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verify"]["requests"] == 2
    assert found["verify"]["passed"]
