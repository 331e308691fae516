# SPDX-License-Identifier: MIT
"""A cache created from a model's shape and a policy gets the adviser's layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem import Context, InvalidArgument, KVCache
from pyvmem.engine import Model, Policy, Request, RequestCache
from pyvmem.engine.config import advised
from pyvmem.kvcache import LayeredCache, LayerShape
from pyvmem.layouts import (
    CALL_US,
    PAGE_SIZES,
    Choice,
    Limits,
    ModelShape,
    advise,
    choices,
    generate,
)

MIB = 1 << 20


def config(**changes: Any) -> SimpleNamespace:
    """Returns Llama-3-8B's shape as a transformers configuration."""
    values = {
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }
    return SimpleNamespace(**values | changes)


def test_the_shape_of_a_model() -> None:
    model = Model.of(config())
    assert model == Model((LayerShape(8, 128),) * 32, "bfloat16", 8192)
    assert Model.of(config(), dtype="float32").dtype == "float32"
    mixed = Model.of(
        config(
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
        )
    )
    assert [layer.window for layer in mixed.layers] == [64, 0]


@pytest.mark.parametrize(
    ("layers", "dtype", "length", "text"),
    [
        ([], "float16", 1, "at least one layer"),
        ([LayerShape(1, 8)], "float11", 1, "float11"),
        ([LayerShape(1, 8)], "float16", 0, "max_seq_len is 0"),
    ],
)
def test_bad_models(layers: list[LayerShape], dtype: str, length: int, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Model(tuple(layers), dtype, length)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_seq_len": -1}, "max_seq_len is -1"),
        ({"memory_share": 0}, "memory_share is 0"),
        ({"memory_share": 1.5}, "memory_share is 1.5"),
        ({"memory_share": "much"}, "'much'"),
        ({"memory_share": "0.5"}, "memory_share must be a number, not '0.5'"),
        ({"memory_share": b"0.5"}, "memory_share must be a number"),
        ({"memory_share": 10**400}, "memory_share is an int of 1329 bits; it must be above 0"),
        ({"memory_share": float("nan")}, "memory_share is nan"),
        ({"max_batch": 10**5000}, "max_batch is an int of 16610 bits"),
        ({"options": {"wrong": 1}}, "'wrong' is not an option; options: ahead_tokens, "),
        ({"options": {"window": 8}}, "window is set by the layers"),
        ({"options": {"reclaim_steps": -1}}, "reclaim_steps is -1"),
        ({"options": {"group_size": 0}}, "group_size is 0"),
    ],
)
def test_bad_policies(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Policy(**changes)


def test_a_policy_keeps_plain_numbers() -> None:
    policy = Policy(max_batch=True, memory_share=1)
    assert repr((policy.max_batch, policy.memory_share)) == "(1, 1.0)"


def test_the_layout_is_the_one_advised(host: Context) -> None:
    """Checks the layout for the dimensions of a real model."""
    model, policy = Model.of(config()), Policy(max_seq_len=2048)
    requests = [one for one in generate(200, 1) if one.longest <= 2048]
    shape = ModelShape("x", 32, 8, 128)
    sizes = [size for size in PAGE_SIZES if size in host.info.page_sizes]
    wanted = advise(shape, requests, 8 << 30, choices(shape, sizes), Limits(CALL_US["stock"]))
    found = advised(model, policy, host.info, 8 << 30)
    assert found.best == wanted.best
    assert found.best.choice != Choice(1, 2 * MIB)
    one = advised(model, Policy(page_size=2 * MIB), host.info, 8 << 30)
    assert one.best.choice.page_size == 2 * MIB
    all_in_one = advised(model, Policy(layers_per_tensor=32), host.info, 8 << 30)
    assert all_in_one.best.choice.group_size == 32
    with pytest.raises(InvalidArgument, match="layers_per_tensor 5 does not divide 32"):
        advised(model, Policy(layers_per_tensor=5), host.info, 8 << 30)
    short = advised(model, Policy(max_seq_len=4), host.info, 8 << 30)  # shorter than any request
    assert short.best.held.used > 0


def test_a_cache_is_opened_with_the_advised_layout() -> None:
    policy = Policy(max_batch=4, max_seq_len=2048, memory=512 * MIB)
    with RequestCache.open(Model.of(config()), policy, backend="host") as cache:
        kv = cache.cache
        assert isinstance(kv, KVCache)
        with Context("host") as plain:
            wanted = advised(Model.of(config()), policy, plain.info, 512 * MIB).best.choice
        assert kv.config.group_size == wanted.group_size
        assert kv.layout.page_size == wanted.page_size
        assert kv.config.memory_limit == 512 * MIB
        assert kv.config.max_seq_len == 2048
        request = cache.admit(list(range(20)))
        assert isinstance(request, Request)
    assert kv.is_closed
    cache.close()  # a second close does nothing


def test_memory_is_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyvmem.engine.config.free_bytes", lambda *_: 1000 * MIB)
    model = Model((LayerShape(2, 64),) * 2, "float16", 1024)
    policy = Policy(max_batch=2, memory_share=0.25)
    with RequestCache.open(model, policy, backend="host") as cache:
        assert isinstance(cache.cache, KVCache)
        assert cache.cache.config.memory_limit == 250 * MIB


def test_a_model_with_unequal_layers() -> None:
    model = Model((LayerShape(2, 64), LayerShape(1, 64), LayerShape(2, 64)), "float16", 256)
    policy = Policy(max_batch=2, memory=64 * MIB)
    with RequestCache.open(model, policy, backend="host") as cache:
        assert isinstance(cache.cache, LayeredCache)
        request = cache.admit(list(range(20)))
        assert isinstance(request, Request)
        assert cache.cache.k(1)[request.slot].shape == (256, 1, 64)


def test_unequal_layers_get_the_advised_layout(host: Context) -> None:
    """Layers with a window need less memory, so more requests fit; a tensor holds layers of only
    one kind.
    """
    kinds = [LayerShape(8, 128, window=512)] * 4 + [LayerShape(8, 128)] * 2
    model = Model(tuple(kinds), "float16", 4096)
    whole = Model((LayerShape(8, 128),) * 6, "float16", 4096)
    policy = Policy(max_batch=2, memory=512 * MIB)
    found, kept = (advised(one, policy, host.info, 512 * MIB).best for one in (model, whole))
    assert found.batch > kept.batch
    with RequestCache.open(model, policy, backend="host") as cache:
        parts = cache.cache.caches
        assert {part.config.group_size for part in parts} == {found.choice.group_size}
        assert {part.layout.page_size for part in parts} == {found.choice.page_size}
    with pytest.raises(InvalidArgument, match="layers_per_tensor 4 does not divide 4 and 2 layers"):
        advised(model, replace(policy, layers_per_tensor=4), host.info, 512 * MIB)
    latent = Model((LayerShape(1, 576, 0),) * 4, "float16", 4096)
    one = advised(latent, policy, host.info, 512 * MIB).best
    assert one.tensors == 4 // one.choice.group_size, "no values"


def test_close_while_a_tensor_lives_can_be_repeated() -> None:
    from pyvmem import Busy

    model = Model((LayerShape(2, 64),) * 2, "float16", 256)
    cache = RequestCache.open(model, Policy(max_batch=2, memory=64 * MIB), backend="host")
    assert isinstance(cache.cache, KVCache)
    view = cache.cache.k(0)
    with pytest.raises(Busy, match="live tensor"):
        cache.close()
    del view
    cache.close()
    assert cache.cache.is_closed
