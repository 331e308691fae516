# SPDX-License-Identifier: MIT
"""Description: what completion finds in pyvmem, and what the main objects print as."""

from __future__ import annotations

import pytest

import pyvmem

torch = pytest.importorskip("torch")

from pyvmem import KVCache, KVCacheConfig  # noqa: E402
from pyvmem.attention import Attention  # noqa: E402
from pyvmem.engine import RequestCache  # noqa: E402
from pyvmem.kvcache import Budget, LayeredCache, LayerShape  # noqa: E402


def test_completion_finds_the_public_names_alone() -> None:
    found = {name for name in dir(pyvmem) if not name.startswith("__")}
    assert found == {name for name in pyvmem.__all__ if not name.startswith("__")}
    assert {"KVCache", "KVCacheConfig", "announce", "watch"} <= found
    assert all(hasattr(pyvmem, name) for name in found)


def test_a_cache_says_what_it_is() -> None:
    cache = KVCache(KVCacheConfig(2, 4, 64, max_batch=4, max_seq_len=4096), backend="host")
    assert repr(cache) == "<KVCache on host: 2 layers, 4 slots of 4096 tokens, open>"
    requests = RequestCache(cache)
    assert requests.admit(list(range(8)))
    assert repr(requests) == f"<RequestCache of 1 request in {cache!r}>"
    requests.close()
    cache.close()
    assert repr(cache) == "<KVCache on host: 2 layers, 4 slots of 4096 tokens, closed>"


def test_rare_names_of_a_cache_are_behind_three_attributes() -> None:
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=4), backend="host") as cache:
        names = {name for name in dir(cache) if not name.startswith("_")}
        assert {"memory", "slots", "internals", "alloc_reqid", "step", "k", "stats"} <= names
        assert len(names) <= 38
        for part, some in (
            (cache.memory, ("for_request", "obtainable", "set_limit")),
            (cache.slots, ("claim", "is_taken", "num_free")),
            (cache.internals, ("lock", "journal", "wait_before")),
        ):
            assert all(hasattr(part, name) and not hasattr(cache, name) for name in some)
        assert repr(cache.slots).startswith("<CacheSlots: claim, is_taken, num_free, ")


def test_a_cache_of_layers_that_differ_counts_them_all() -> None:
    shapes = [LayerShape(4, 64), LayerShape(2, 64), LayerShape(4, 64)]
    with LayeredCache(shapes, backend="host", max_batch=2, max_seq_len=64) as cache:
        assert repr(cache) == "<LayeredCache on host: 3 layers, 2 slots of 64 tokens, open>"


def test_a_configuration_shows_what_differs_from_the_defaults() -> None:
    config = KVCacheConfig(2, 4, 64, max_batch=4, window=128)
    text = "KVCacheConfig(num_layers=2, num_kv_heads=4, head_dim=64, max_batch=4, window=128)"
    assert repr(config) == text
    assert eval(text) == config


def test_the_parts_of_a_cache_say_what_they_are() -> None:
    with pyvmem.Context(backend="host") as context, Budget(context, 32 << 20) as budget:
        assert repr(budget) == "<Budget of 32.0M for 0 caches>"
        config = KVCacheConfig(2, 4, 64, max_batch=4, max_seq_len=4096)
        with KVCache(config, budget=budget) as cache:
            assert repr(budget) == "<Budget of 32.0M for 1 cache>"
            layout = "<Layout of 4 tensors: 512 bytes a row, pages of 64.0K, 2.0M a slot>"
            assert repr(cache.layout) == layout
            assert repr(cache.caches[0]) == f"<GroupView of 2 layers: {layout}>"


def test_a_cache_that_could_not_be_made_says_so() -> None:
    assert repr(KVCache.__new__(KVCache)) == "<KVCache, closed>"


def test_attention_says_its_kernels() -> None:
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=4), backend="host") as cache:
        attention = Attention(cache, "sdpa")
        assert repr(attention) == "<Attention of 2 layers by sdpa, sdpa decoding>"
        slot, lengths = cache.alloc_reqid(), [0] * 4
        lengths[slot] = 5
        assert cache.step(lengths) == 0
        batch = attention.batch([slot], [5], [5])
        assert repr(batch) == "<Batch of 5 tokens, 1 request, by sdpa>"
        del attention, batch
