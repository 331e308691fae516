# SPDX-License-Identifier: MIT
"""Description: the demonstration's engine and command with windows, MLA and layers that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from kinds_helpers import KINDS, WINDOW, model_of
from serve_helpers import expected, make_requests, one_thread

import pyvmem
from pyvmem import NotSupported
from pyvmem.hf.shapes import row_shapes
from pyvmem.kvcache.cache import cache_of
from pyvmem.serve import Engine
from pyvmem.serve.model import LoadedModel
from pyvmem.serve.trace import Recorder
from pyvmem.serve.verify import compare

__all__ = ["one_thread"]
pytestmark = [pytest.mark.needs_tensors, pytest.mark.filterwarnings("default")]


def loaded_of(kind: str) -> LoadedModel:
    return LoadedModel(model_of(kind), None, Path("random"), kind, frozenset())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [0, 16])
def test_answers_are_those_of_generate(host: pyvmem.Context, kind: str, chunk: int) -> None:
    """Requests longer than the window join and leave, and some lose their memory meanwhile."""
    loaded = loaded_of(kind)
    requests = make_requests(6, longest=90, new_tokens=(5, 30))
    wanted = expected(loaded, requests)
    shapes = row_shapes(loaded.model.config, "a test")
    policy = {"dtype": "float32", "max_batch": 4, "max_seq_len": 256, "window_tile": 16}
    with cache_of(shapes, host, "host", 0, **policy, memory_limit=40 * 4096) as cache:
        recorder = Recorder(cache, 4096)
        with Engine(loaded.model, cache, prefill_chunk=chunk, observer=recorder) as engine:
            done = [one.completion for one in engine.run(requests) if one.completion is not None]
            assert engine.stats.peak_running > 1
        verdict = compare(loaded, cache, done, wanted)
        cache.check_integrity()
        assert cache.stats().mapped_bytes <= 40 * 4096
    assert verdict.passed, verdict
    assert verdict.identical >= 5
    assert recorder.own.footprint().num_tensors == sum(
        part.layout.num_tensors for part in cache.caches
    )
    assert loaded.model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(one) for one in loaded.model.modules())


def test_a_window_is_seen_over_a_cache_that_keeps_all_rows(host: pyvmem.Context) -> None:
    from dataclasses import replace

    loaded = loaded_of("mistral")
    requests = make_requests(2, shortest=3 * WINDOW, longest=4 * WINDOW, new_tokens=(8, 9))
    shapes = [replace(one, window=0) for one in row_shapes(loaded.model.config, "a test")]
    policy = {"dtype": "float32", "max_batch": 2, "max_seq_len": 256}
    with cache_of(shapes, host, "host", 0, **policy) as cache:
        with Engine(loaded.model, cache) as engine:
            done = [one.completion for one in engine.run(requests) if one.completion is not None]
        assert compare(loaded, cache, done, expected(loaded, requests)).identical == 2


def test_layers_with_a_state_are_refused(host: pyvmem.Context) -> None:
    model = model_of("jamba")
    with (
        cache_of(
            row_shapes(model_of("qwen3").config, "a test"),
            host,
            "host",
            0,
            dtype="float32",
            max_batch=1,
            max_seq_len=64,
        ) as cache,
        pytest.raises(NotSupported, match="the engine: layer 0 of JambaConfig has a state"),
    ):
        Engine(model, cache)


@pytest.mark.slow
def test_the_command_serves_layers_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyvmem import cli
    from pyvmem.serve import model as models

    class Words:
        chat_template = None

        def __call__(self, text: str) -> dict[str, Any]:
            return {"input_ids": [1 + ord(one) % 190 for one in text]}

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, ids))

    loaded = LoadedModel(model_of("gemma3"), Words(), tmp_path, "gemma3", frozenset())
    monkeypatch.setattr(models, "load", lambda *_, **__: loaded)
    prompts = tmp_path / "prompts.txt"
    long = "a prompt that is longer than the window of twenty-four tokens"
    prompts.write_text(f"{long}\n---\nshort\n")
    words = ["serve-demo", "--backend", "host", "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert cli.main([*words, "--json", "--verify", "--max-seq-len", "256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verify"]["requests"] == 2
    assert found["verify"]["passed"]
