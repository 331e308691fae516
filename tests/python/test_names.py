# SPDX-License-Identifier: MIT
"""Tests the names that tab completion shows for pyvmem, and the repr of the main objects."""

from __future__ import annotations

from pathlib import Path

import pytest

import pyvmem

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pyvmem import KVCache, KVCacheConfig  # noqa: E402
from pyvmem.attention import Attention  # noqa: E402
from pyvmem.compat.torch_memory_saver import TorchMemorySaver  # noqa: E402
from pyvmem.compiled import Writer  # noqa: E402
from pyvmem.engine import RequestCache, Shortage  # noqa: E402
from pyvmem.kv_events import KVEvents  # noqa: E402
from pyvmem.kvcache import Budget, LayeredCache, LayerShape  # noqa: E402
from pyvmem.kvcache.distributed import ParallelKVCache, Ranks  # noqa: E402
from pyvmem.ledger.presence import announce  # noqa: E402
from pyvmem.telemetry import Telemetry  # noqa: E402
from pyvmem.torch_pool import VMemPool  # noqa: E402


def test_completion_finds_only_public_names() -> None:
    found = {name for name in dir(pyvmem) if not name.startswith("__")}
    assert found == {name for name in pyvmem.__all__ if not name.startswith("__")}
    assert {"KVCache", "KVCacheConfig", "announce", "watch"} <= found
    assert all(hasattr(pyvmem, name) for name in found)


def test_repr_of_a_cache() -> None:
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


def test_repr_of_a_layered_cache() -> None:
    shapes = [LayerShape(4, 64), LayerShape(2, 64), LayerShape(4, 64)]
    with LayeredCache(shapes, backend="host", max_batch=2, max_seq_len=64) as cache:
        assert repr(cache) == "<LayeredCache on host: 3 layers, 2 slots of 64 tokens, open>"


def test_repr_of_a_configuration_shows_changed_fields() -> None:
    config = KVCacheConfig(2, 4, 64, max_batch=4, window=128)
    text = "KVCacheConfig(num_layers=2, num_kv_heads=4, head_dim=64, max_batch=4, window=128)"
    assert repr(config) == text
    assert eval(text) == config


def test_repr_of_the_parts_of_a_cache() -> None:
    with pyvmem.Context(backend="host") as context, Budget(context, 32 << 20) as budget:
        assert repr(budget) == "<Budget of 32.0M for 0 caches>"
        config = KVCacheConfig(2, 4, 64, max_batch=4, max_seq_len=4096)
        with KVCache(config, budget=budget) as cache:
            assert repr(budget) == "<Budget of 32.0M for 1 cache>"
            layout = "<Layout of 4 tensors: 512 bytes per row, pages of 64.0K, 2.0M per slot>"
            assert repr(cache.layout) == layout
            assert repr(cache.caches[0]) == f"<GroupView of 2 layers: {layout}>"


def test_repr_of_a_cache_whose_creation_failed() -> None:
    assert repr(KVCache.__new__(KVCache)) == "<KVCache, closed>"


def test_repr_of_attention() -> None:
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=4), backend="host") as cache:
        attention = Attention(cache, "sdpa")
        assert repr(attention) == "<Attention of 2 layers by sdpa, sdpa decoding>"
        slot, lengths = cache.alloc_reqid(), [0] * 4
        lengths[slot] = 5
        assert cache.step(lengths) == 0
        batch = attention.batch([slot], [5], [5])
        assert repr(batch) == "<Batch of 5 tokens, 1 request, by sdpa>"
        del attention, batch


def test_repr_of_a_ranks_cache() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert repr(Ranks()) == "<Ranks: rank 0 of 1>"
        config = KVCacheConfig(2, 4, 64, max_batch=4, max_seq_len=64, memory_limit=8 << 20)
        with ParallelKVCache(config, backend="host") as cache:
            text = "<KVCache on host: 2 layers, 4 slots of 64 tokens, open>"
            assert repr(cache) == f"<ParallelKVCache of rank 0 of 1: {text}>"
        assert repr(cache) == f"<ParallelKVCache of rank 0 of 1: {text.replace('open', 'closed')}>"
        assert repr(ParallelKVCache.__new__(ParallelKVCache)) == "<ParallelKVCache, closed>"
    finally:
        dist.destroy_process_group()


def test_repr_of_objects_over_a_cache(tmp_path: Path) -> None:
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=4, max_seq_len=256), backend="host") as cache:
        common = cache.slots.map_common_pages(64)
        assert repr(common) == "<CommonPages: the first 128 rows of every slot, 4 slots idle>"
        assert repr(KVEvents(cache)) == f"<KVEvents of {cache!r}>"
        telemetry = Telemetry()
        assert repr(telemetry) == "<Telemetry of no cache>"
        telemetry.add(cache, "llama")
        assert repr(telemetry) == "<Telemetry of 'llama'>"
        with telemetry.serve() as server:
            assert repr(server) == f"<Server on port {server.port}>"
        with announce(cache, "llama", folder=tmp_path) as announced:
            assert repr(announced) == "<Announced 'llama'>"
        assert repr(announced) == "<Announced 'llama', closed>"
        writer = Writer(cache.k(0))
        assert repr(writer) == "<Writer of float16[4, 256, 4, 64]>"
        writer.close()
        del writer


def test_repr_of_a_tensor_pool() -> None:
    saver = TorchMemorySaver()
    assert repr(saver) == "<TorchMemorySaver that has no pool yet>"
    with pyvmem.Context("host") as context:
        with VMemPool(context) as pool:
            assert repr(pool) == "<VMemPool on host: no tags, open>"
        assert repr(pool) == "<VMemPool on host: no tags, closed>"
        assert repr(VMemPool.__new__(VMemPool)) == "<VMemPool, closed>"


def test_repr_of_a_memory_resource() -> None:
    pytest.importorskip("cuda.core")
    from pyvmem.memory_resource import VMemResource

    with pyvmem.Context("host") as context:
        with VMemResource(context) as resource:
            assert repr(resource) == "<VMemResource on host: pages of 64.0K, 0 buffers, open>"
        assert repr(resource) == "<VMemResource on host: pages of 64.0K, 0 buffers, closed>"


@pytest.mark.parametrize(
    ("shortage", "text"),
    [
        (Shortage(9, 64, 64, 9, slots=1), "<Shortage of slots: 1 missing;"),
        (Shortage(99, 64, 64, 9), "<Shortage of memory: 35 bytes missing;"),
        (Shortage(9, 64, 64, 9), "<Shortage of mappings or device memory;"),
    ],
)
def test_repr_of_a_shortage(shortage: Shortage, text: str) -> None:
    needed = shortage.needed
    assert repr(shortage) == f"{text} needed={needed}, available=64, limit=64, largest=9>"
