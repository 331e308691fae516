# SPDX-License-Identifier: MIT
"""Checks that the demo's model generates the same tokens through the KV cache as `generate`.

Decoding is greedy in float32; `pyvmem.serve.verify` states the rule. If there is a GPU, both sides
run on it.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import pyvmem
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.serve import Completion, Engine, FinishReason, Job, prompts
from pyvmem.serve import model as models
from pyvmem.serve.verify import compare, references

NEW_TOKENS = 32


@pytest.fixture(scope="module")
def folder() -> object:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    try:
        return models.model_folder()
    except models.ModelNotFound as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.needs_tensors
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # transformers issues its own warnings
@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.long)])
def test_answers_match_generate(backend: str, folder: object, count: int) -> None:
    device = "cpu" if backend == "host" else "cuda:0"
    loaded = models.load(str(folder), dtype="float32", device=device)
    texts = prompts.load(count=count)
    assert len(set(texts)) == count
    requests = [
        Job(i, models.encode(loaded.tokenizer, text), NEW_TOKENS, loaded.eos_token_ids)
        for i, text in enumerate(texts)
    ]
    expected = dict(enumerate(references(loaded, requests)))
    done: list[Completion] = []
    with pyvmem.Context(backend) as context:
        # There are too few slots and too little memory for all prompts, so requests join, leave,
        # grow in the background, reuse slots and are preempted. With 2 MiB pages (cuda), no request
        # needs a second page, and memory runs short before any request is computed.
        page = context.info.granule
        small = page == 64 << 10
        slots = 3 * count // 8
        config = KVCacheConfig.from_hf(
            loaded.model.config,
            dtype="float32",
            max_batch=slots,
            max_seq_len=1024,
            memory_limit=(7 * slots // 6 if small else 2 * slots // 3) * 60 * page,
        )
        assert page % (config.num_kv_heads * config.head_dim * 4) != 0  # rows cross page boundaries
        with KVCache(config, context) as cache:
            with Engine(loaded.model, cache) as engine:
                for event in engine.run(requests):
                    if event.completion is not None:
                        done.append(event.completion)
                stats = engine.stats
            verdict = compare(loaded, cache, done, expected)
            cache.check_integrity()
            memory = cache.stats()
    assert verdict.requests == count
    assert verdict.passed, verdict
    assert {completion.reason for completion in done} <= {FinishReason.EOS, FinishReason.LENGTH}
    assert stats.peak_running > 1
    assert (stats.preemptions > 0) == small
    assert memory.short > 0
    assert memory.steps_async > 0
    assert memory.reused_pages > 0
    assert memory.grown_pages > 0
