# SPDX-License-Identifier: MIT
"""VMemCache passes transformers' tests of its own caches.

The cases are those in transformers' tests/utils/test_cache_utils.py: head counts, single layers,
padding, reused prompts, comparison with static caches, early initialization, and calls before the
first keys. torch.export is left out: the views grow, so `is_compileable` is False.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from kvcache_helpers import full_queue
from serve_helpers import one_thread, tiny_model
from test_hf_cache import DIM, HEADS, LAYERS, device_of, make, prompts
from transformers import (
    DynamicCache,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    LlamaConfig,
    StaticCache,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import pyvmem
from pyvmem import InvalidArgument
from pyvmem.hf import VMemCache
from pyvmem.hf.keyword import CACHE

__all__ = ["one_thread"]
pytestmark = pytest.mark.needs_tensors

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(LAYERS).model


@pytest.mark.parametrize("heads", [8, 4, 1])
def test_any_number_of_heads(context: pyvmem.Context, heads: int) -> None:
    """Checks multi-head, grouped-query and multi-query attention, one layer at a time."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=heads, num_hidden_layers=2
    )
    ours, dynamic = make(context, config, 2, 10), DynamicCache(config=config)
    device = device_of(context)
    with ours:
        for layer, new in ((1, 3), (0, 2), (0, 1), (1, 1), (0, 7)):
            keys = torch.randn(2, heads, new, 8, device=device)
            got = ours.update(keys, -keys, layer)
            want = dynamic.update(keys, -keys, layer)
            assert got[0].shape == want[0].shape
            assert all(map(torch.equal, got, want))
        assert [ours.get_seq_length(layer) for layer in range(2)] == [10, 4]
        with pytest.raises(InvalidArgument, match="max_cache_len 10"):
            ours.update(keys, keys, 0)
        del got


def test_calls_before_the_first_keys_do_nothing(model: Any, host: pyvmem.Context) -> None:
    with make(host, model.config) as cache:
        dynamic = DynamicCache(config=model.config)
        for one in (dynamic, cache):
            one.reset()
            one.reorder_cache(torch.tensor([1, 0]))
            one.batch_repeat_interleave(3)
            one.batch_select_indices(torch.tensor([0]))
            one.activate_past_recording()
            assert one.get_query_offset() == 0
            assert one.get_mask_sizes(4, 0) == (4, 0)
            assert one.batch_size == -1
            with pytest.raises(ValueError, match="LinearAttention"):
                one.has_previous_state()
            # not every version has all of these names
            for name in ("is_sliding", "is_linear", "is_dummy"):
                assert not any(getattr(one, name, ()))
        cache.crop(-3)  # 5.17's DynamicCache fails here
        cache.crop(0)
        assert cache.kvcache is None


def test_nothing_is_left_after_a_full_crop(model: Any, host: pyvmem.Context) -> None:
    states = torch.randn(2, HEADS, 7, DIM)
    with make(host, model.config) as cache:
        dynamic = DynamicCache(config=model.config)
        for one in (dynamic, cache):
            for removed in (7, 9):
                for layer in range(LAYERS):
                    one.update(states, -states, layer)
                one.crop(-removed)
                assert one.get_seq_length() == 0
            for layer in range(LAYERS):
                keys, values = one.update(states[:, :, :2], states[:, :, 2:4], layer)
                assert torch.equal(keys, states[:, :, :2])
                assert torch.equal(values, states[:, :, 2:4])
            assert one.get_query_offset() == 2
        del keys, values


def test_tokens_match_a_static_cache_and_the_same_object_is_returned(
    model: Any, host: pyvmem.Context
) -> None:
    inputs = prompts(3, 11, torch.device("cpu"))
    static = StaticCache(config=model.config, max_cache_len=40)
    want = model.generate(**inputs, **{CACHE: static}, disable_compile=True, **GREEDY)
    with make(host, model.config) as cache:
        out = model.generate(**inputs, **{CACHE: cache}, return_dict_in_generate=True, **GREEDY)
        assert out[CACHE] is cache
        assert torch.equal(out.sequences, want)


def test_padding_does_not_change_the_answer(model: Any, host: pyvmem.Context) -> None:
    inputs = prompts(2, 9, torch.device("cpu"))
    answers = []
    for more in (0, 23):
        padded = {name: torch.nn.functional.pad(one, (more, 0)) for name, one in inputs.items()}
        with make(host, model.config) as cache:
            answers.append(model.generate(**padded, **{CACHE: cache}, **GREEDY)[:, more:])
    assert torch.equal(*answers)


def test_a_prompt_is_computed_once_and_copied(model: Any, context: pyvmem.Context) -> None:
    """Reuses a prompt as transformers recommends: each question gets a deep copy of the prompt's
    cache.
    """
    device = device_of(context)
    model = model.to(device)
    prompt, dice = torch.randint(1, 99, (1, 40), device=device), torch.Generator().manual_seed(4)
    try:
        with make(context, model.config) as cache, torch.no_grad():
            model(prompt, **{CACHE: cache})
            held = cache.kvcache.stats().mapped_bytes
            for _ in range(3):
                question = torch.randint(1, 99, (1, 5), generator=dice).to(device)
                ids = torch.cat([prompt, question], 1)
                with copy.deepcopy(cache) as mine:
                    got = model.generate(ids, **{CACHE: mine}, **GREEDY)
                assert torch.equal(got, model.generate(ids, **GREEDY))
            assert cache.get_seq_length() == 40
            assert cache.kvcache.stats().mapped_bytes == held
    finally:
        model.to("cpu")


def test_early_initialisation_then_generate(model: Any, host: pyvmem.Context) -> None:
    ids = prompts(1, 12, torch.device("cpu"))["input_ids"]
    want = model.generate(ids, **GREEDY)
    with make(host, model.config) as cache:
        heads, widths = [HEADS] * LAYERS, [DIM] * LAYERS
        cache.early_initialization(1, heads, widths, torch.float32, torch.device("cpu"))
        assert torch.equal(model.generate(ids, **{CACHE: cache}, **GREEDY), want)
    with (
        make(host, model.config) as cache,
        pytest.raises(InvalidArgument, match="this cache has 2 heads of 24"),
    ):
        cache.early_initialization(1, [2, 1, 2], DIM, torch.float32, torch.device("cpu"))


def test_a_prompt_in_chunks_and_answers_from_the_prompt(model: Any, host: pyvmem.Context) -> None:
    ids = prompts(1, 30, torch.device("cpu"))["input_ids"]
    want = model.generate(ids, **GREEDY)
    for way in ({"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}):
        with make(host, model.config) as cache:
            assert torch.equal(model.generate(ids, **{CACHE: cache}, **GREEDY, **way), want)


def test_a_full_queue_delays_mapping_ahead(model: Any, host: pyvmem.Context) -> None:
    states = torch.randn(1, HEADS, 22, DIM)  # 21 tokens fill a 4 KB page
    with make(host, model.config) as cache, full_queue(host):
        cache.update(states[:, :, :21], states[:, :, :21], 0)
        assert torch.equal(cache.update(states[:, :, 21:], states[:, :, 21:], 0)[0], states)


@pytest.mark.parametrize("modes", list(itertools.permutations(MODES, 2)))
def test_a_cache_continues_in_another_grad_mode(
    model: Any, host: pyvmem.Context, modes: tuple[str, str]
) -> None:
    ids = prompts(1, 30, torch.device("cpu"))["input_ids"]
    with torch.no_grad():
        want = model(ids).logits[:, 20:]
    with make(host, model.config) as cache:
        with MODES[modes[0]]():
            model(ids[:, :20], **{CACHE: cache})
        with MODES[modes[1]]():
            got = model(ids[:, 20:], **{CACHE: cache}).logits
        assert torch.allclose(got, want, atol=1e-4)
        del got


def test_copies_and_reset_caches_have_no_autograd_graph(model: Any, host: pyvmem.Context) -> None:
    ids = prompts(1, 30, torch.device("cpu"))["input_ids"]
    with make(host, model.config) as cache:
        model(ids, **{CACHE: cache})
        assert all(tensor.requires_grad for tensor in cache.kvcache.tensors)
        with copy.deepcopy(cache) as other:
            assert not any(tensor.requires_grad for tensor in other.kvcache.tensors)
        cache.reset()
        assert not any(tensor.requires_grad for tensor in cache.kvcache.tensors)


@pytest.mark.parametrize("rows", [1, 2])
def test_models_that_call_view_on_cached_keys(host: pyvmem.Context, rows: int) -> None:
    config = GPTNeoXJapaneseConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = GPTNeoXJapaneseForCausalLM(config).eval()
    ids = torch.arange(1, 9).reshape(2, 4)[:rows]
    way = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "pad_token_id": 0}
    want = model.generate(ids, **way)
    with VMemCache(config, 2, 32, context=host) as cache:
        assert model.generate(ids, **way, **{CACHE: cache}).equal(want)
        copied = copy.deepcopy(cache)
        assert copied._rows.settings.contiguous
        copied.close()
    with VMemCache(config, 2, 32, context=host, contiguous=False) as cache:
        if rows == 1:  # a single row is a view
            assert model.generate(ids, **way, **{CACHE: cache}).equal(want)
        keys, values = torch.randn(2, rows, 4, 5, 8)
        cache.reset()
        shown = cache.update(keys, values, 0)
        assert shown[0].data_ptr() == cache.layers[0].keys.data_ptr()
        del shown


def test_code_from_the_hub_gets_copies_by_default(
    host: pyvmem.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads a model and configuration that bring their own code, as ``trust_remote_code`` does."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "code").mkdir()
    for part, base in (
        ("Config", "GPTNeoXJapaneseConfig"),
        ("Model", "GPTNeoXJapaneseForCausalLM"),
    ):
        text = f"from transformers import {base}\n\nclass {part}({base}):\n    model_type = 'hub'\n"
        (tmp_path / "code" / f"{part.lower()}.py").write_text(text)
    Config, Model = (
        get_class_from_dynamic_module(name, str(tmp_path / "code"))
        for name in ("config.Config", "model.Model")
    )
    config = Config(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    model, ids = Model(config).eval(), torch.arange(1, 9).reshape(2, 4)
    way = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "pad_token_id": 0}
    want = model.generate(ids, **way)
    with VMemCache(config, 2, 32, context=host) as cache:
        assert model.generate(ids, **way, **{CACHE: cache}).equal(want)
    with VMemCache(config, 2, 32, context=host, contiguous=False) as cache:
        assert not cache._rows.settings.contiguous


def test_contiguous_is_true_false_or_none() -> None:
    config = LlamaConfig()
    with pytest.raises(
        pyvmem.InvalidArgument, match="contiguous = 1; expected True, False or None"
    ):
        VMemCache(config, 2, 32, contiguous=1)
