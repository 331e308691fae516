# SPDX-License-Identifier: MIT
"""Hybrid models: linear attention, state spaces and convolutions in one cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
from kinds_helpers import STATES, model_of
from serve_helpers import VOCABULARY, one_thread
from transformers import DynamicCache, MambaConfig

import pyvmem
from pyvmem import InvalidArgument, NotSupported
from pyvmem.engine import Model, Policy, RequestCache
from pyvmem.hf import VMemCache
from pyvmem.hf.keyword import CACHE
from pyvmem.kvcache import LayeredCache, StateShape, layer_shapes

__all__ = ["one_thread"]
pytestmark = [pytest.mark.needs_tensors, pytest.mark.filterwarnings("default")]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 40},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12},
    "beams": {"do_sample": False, "num_beams": 3, "max_new_tokens": 12},
}


def prompts(rows: int, length: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(5)
    return torch.randint(1, VOCABULARY, (rows, length), generator=dice)


@pytest.mark.parametrize("kind", STATES)
def test_generate_matches_dynamic_cache_with_states(host: pyvmem.Context, kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 19)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with VMemCache(model.config, 6, 128, context=host) as cache:
        for way in WAYS.values():  # reuses the cache, and with it the states in its slots
            answers = []
            for past in (DynamicCache(config=model.config), cache):
                torch.manual_seed(11)
                run = {"input_ids": ids * mask, "attention_mask": mask, **way, "pad_token_id": 0}
                answers.append(model.generate(**run, **{CACHE: past}))
            assert torch.equal(*answers), way
            assert cache.kvcache is not None
            cache.kvcache.check_integrity()
            cache.reset()
            assert cache.kvcache.stats().active_pages == 0
    assert host.stats().used_bytes == 0


@pytest.mark.parametrize("kind", STATES)
def test_the_configured_shapes_match_the_models_states(kind: str) -> None:
    """Uses bfloat16, so that the two kinds of states have different types."""
    model = copy.deepcopy(model_of(kind)).to(torch.bfloat16)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts(2, 5), **{CACHE: past})
    for shape, layer in zip(layer_shapes(model.config), past.layers, strict=True):
        if not isinstance(shape, StateShape):
            assert layer.keys.shape[1:] == (shape.num_kv_heads, 5, shape.head_dim)
            continue
        conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
        assert (tuple(conv.shape[1:]), conv.dtype) == (shape.conv, torch.bfloat16)
        if shape.recurrent:
            assert tuple(recurrent.shape[1:]) == shape.recurrent
            assert recurrent.dtype == torch.float32
        else:
            assert recurrent is None


def test_states_are_in_the_cache_and_do_not_grow(host: pyvmem.Context) -> None:
    model, ids = model_of("qwen3next"), prompts(2, 60)
    with torch.no_grad(), VMemCache(model.config, 2, 512, context=host) as cache:
        pages = []
        for new in ids.split(12, 1):
            model(new, **{CACHE: cache})
            found = cache.kvcache
            assert isinstance(found, LayeredCache)
            states = [part for part in found.caches if part.config.state]
            pages.append([part.stats().active_pages for part in states])
        assert pages == [[6, 6]] * 5  # one page for each of three layers and two requests
        held = found.states(0)["recurrent"][:2]
        assert torch.equal(held, cache.layers[0].recurrent_states[0])
        assert bool(held.any())
        del held


@pytest.mark.parametrize("kind", STATES)
def test_states_made_in_inference_mode_are_writable_outside(
    host: pyvmem.Context, kind: str
) -> None:
    model = model_of(kind)
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]])

    def step(past: Any) -> torch.Tensor:
        return model(input_ids=ids[:, :1], **{CACHE: past}).logits

    with torch.no_grad():
        past = DynamicCache(config=model.config)
        model(input_ids=ids, **{CACHE: past})
        want = step(past)
    with VMemCache(model.config, 4, 64, context=host) as cache:
        with torch.inference_mode():
            model(input_ids=ids, **{CACHE: cache})
        with torch.no_grad():
            torch.testing.assert_close(step(cache), want)


def test_the_storage_of_a_state_has_no_holes(host: pyvmem.Context) -> None:
    model = model_of("lfm2")
    with VMemCache(model.config, 4, 64, context=host) as cache, torch.no_grad():
        model(input_ids=torch.tensor([[5, 6], [8, 9]]), **{CACHE: cache})
        state = cache.layers[0].conv_states[0]
        storage = state.untyped_storage()
        assert storage.nbytes() < state.stride(0) * state.element_size() * 2
        copied = storage.clone()  # would crash the process if it read a hole
        assert torch.empty(0).set_(copied, 0, state.shape, state.stride()).equal(state)
        del state, storage, copied


@pytest.mark.parametrize("kind", STATES)
def test_a_deep_copy_continues_with_its_states(host: pyvmem.Context, kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 40)
    with torch.no_grad(), VMemCache(model.config, 2, 128, context=host) as cache:
        for new in ids[:, :38].split(19, 1):
            model(new, **{CACHE: cache})
        with copy.deepcopy(cache) as other:
            answers = [model(ids[:, 38:], **{CACHE: one}).logits for one in (cache, other)]
            assert torch.equal(*answers)


def test_a_state_cannot_be_rolled_back(host: pyvmem.Context) -> None:
    model, ids = model_of("jamba"), prompts(1, 20)
    run = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), VMemCache(model.config, 1, 128, context=host) as cache:
        model(ids, **{CACHE: cache})
        assert not cache.is_croppable
        with pytest.raises(InvalidArgument, match="the state of layer 0 cannot be rolled back"):
            cache.crop(-1)
        with pytest.raises(InvalidArgument, match="the state of layer 0 cannot be rolled back"):
            cache.layers[1].crop(-1)  # an attention layer
        with pytest.raises(InvalidArgument, match="0 tokens: the state of layer 0 cannot"):
            cache.layers[1].crop(-20)
        assert cache.get_seq_length() == 20
        with pytest.raises(NotSupported, match="cannot be used in assisted generation"):
            cache.activate_past_recording()
        cache.reset()
        draft = {"assistant_model": model_of("qwen3"), CACHE: cache}
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(ids, **run, **draft)


def test_rows_outside_the_batch_are_rejected(host: pyvmem.Context) -> None:
    model = model_of("jamba")
    with torch.no_grad(), VMemCache(model.config, 2, 16, context=host) as cache:
        cache.reorder_cache(torch.tensor([1, 0]))  # the batch has no rows yet: this does nothing
        model(prompts(2, 3), **{CACHE: cache})
        for row in (-1, 2):
            with pytest.raises(InvalidArgument, match=f"row {row} is not between 0 and 1"):
                cache.reorder_cache(torch.tensor([0, row]))
        with pytest.raises(InvalidArgument, match=r"rows \[7\] of a batch of 2: index 7 is out of"):
            cache.batch_select_indices(torch.tensor([7]))
        with pytest.raises(InvalidArgument, match="no rows remain"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        assert {layer.batch_size for layer in cache.layers} == {2}


def test_states_of_other_shapes_are_rejected(host: pyvmem.Context) -> None:
    model = model_of("jamba")
    wrong = copy.deepcopy(model.config)
    wrong.mamba_d_state = 16
    with (
        VMemCache(wrong, 1, 64, context=host) as cache,
        pytest.raises(InvalidArgument, match=r"a recurrent state of \(96, 8\), float32 on cpu"),
    ):
        model(prompts(1, 4), **{CACHE: cache})
    alone = MambaConfig(num_hidden_layers=2)
    with pytest.raises(InvalidArgument, match="layer 0 is linear_attention: the state's"):
        VMemCache(alone, 1, 8)


def test_a_convolution_rejects_assisted_generation(host: pyvmem.Context) -> None:
    """To roll back a convolution, transformers keeps more tokens; a slot keeps only the latest."""
    model, ids = model_of("lfm2"), prompts(1, 20)
    run = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with (
        torch.no_grad(),
        VMemCache(model.config, 1, 128, context=host) as cache,
        pytest.raises(NotSupported, match="cannot be used in assisted generation"),
    ):
        model.generate(ids, **run, assistant_model=model_of("qwen3"), **{CACHE: cache})


def test_the_engine_runs_models_with_states(backend: str) -> None:
    """Admits, grows, forks and swaps requests with a state, and checks that their prefixes are
    never shared.
    """
    shape = Model.of(model_of("qwen3next").config, "float32")
    policy = Policy(max_batch=4, max_seq_len=256, memory=64 << 20)
    prompt = list(range(1, 200))
    with RequestCache.open(shape, policy, backend) as cache:
        first = cache.admit(prompt)
        assert not cache.extend({first: 199})
        cache.cache.states(0)["recurrent"][first.slot] = 3.0
        (other,) = cache.fork(first)
        assert bool((cache.cache.states(0)["recurrent"][other.slot] == 3.0).all())
        cache.swap_out(first)
        assert not cache.swap_in(first)
        assert bool((cache.cache.states(0)["recurrent"][first.slot] == 3.0).all())
        with pytest.raises(InvalidArgument, match=r"the state of reqid .*, of 199 tokens"):
            cache.truncate(first, 10)
        cache.release(first, tokens=prompt)
        with cache.match(prompt) as prefix:
            assert prefix.length == 0
        cache.release(other)
        cache.cache.check_integrity()
