# SPDX-License-Identifier: MIT
"""A real model generates the same tokens with VMemCache as with DynamicCache.

In float32, SmolLM2-135M has rows of 768 bytes, which do not divide a page evenly.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

import pyvmem
from pyvmem.hf import VMemCache
from pyvmem.hf.keyword import CACHE
from pyvmem.serve import model as models

PROMPTS = ["The capital of France is", "Once upon a time there was a small robot who", "Two and"]


@pytest.mark.slow
@pytest.mark.needs_tensors
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_a_real_model_generates_the_same(backend: str) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    try:
        folder = models.model_folder()
    except models.ModelNotFound as error:
        pytest.skip(str(error))
    loaded = models.load(folder, device="cpu" if backend == "host" else "cuda:0")
    loaded.tokenizer.padding_side = "left"
    if loaded.tokenizer.pad_token is None:
        loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    inputs = loaded.tokenizer(PROMPTS, return_tensors="pt", padding=True).to(loaded.model.device)
    with pyvmem.Context(backend) as context:
        for way in ({"max_new_tokens": 16}, {"max_new_tokens": 6, "num_beams": 3}):
            run = {**inputs, **way, "do_sample": False}
            want = loaded.model.generate(**run, **{CACHE: DynamicCache(config=loaded.model.config)})
            with VMemCache(loaded.model.config, 9, 8192, context=context) as cache:
                got = loaded.model.generate(**run, **{CACHE: cache})
                assert cache.kvcache is not None
                cache.kvcache.check_integrity()
                assert cache.kvcache.stats().peak_mapped_bytes <= 9 * 60 * context.info.granule
            assert torch.equal(got, want)
        assert context.stats().used_bytes == 0
