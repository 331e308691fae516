# SPDX-License-Identifier: MIT
"""A single buffer for all layers, which vLLM has allocated since 0.29.

CPU attention supports only a separate buffer per layer, so the test checks the views instead of
running a model.
"""

from __future__ import annotations

import pytest
import torch
import vllm
from packaging.version import Version

from pyvmem.elastic.geometry import runs_of
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.vllm.allocation import place_tensors

pytestmark = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.29"),
    reason=f"vllm {vllm.__version__} has a buffer per layer",
)

BLOCKS, PAGE = 64, 8192  # PAGE: bytes per block and layer, which vLLM calls a page


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_a_block_is_where_the_geometry_says(layout: str) -> None:
    """Block 5 is in the pages that the geometry names, and nowhere else."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    assert spec.page_size_bytes == PAGE
    outermost = layout.startswith("B")
    tensor = KVCacheTensor(
        size=2 * BLOCKS * PAGE,
        layers=["a", "b"],
        layer_stride=PAGE if outermost else BLOCKS * PAGE,
        block_stride=2 * PAGE if outermost else PAGE,
    )
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(["a", "b"], spec)])
    made: list[KVMemory] = []

    def open_memory(blocks: int, sizes: list[int]) -> KVMemory:
        made.append(KVMemory(open_context("host", 0, 4096, 1 << 20), blocks, sizes))
        return made[0]

    config, answers = place_tensors(config, open_memory)
    with answers:
        views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    answers.check()
    (memory,) = made
    (kind,) = memory.geometry.classes
    assert (kind.tensors, kind.block_bytes) == ((1, 2 * PAGE) if outermost else (2, PAGE))
    memory.grow(runs_of([memory.geometry.pages(0, 5)]))
    assert memory.context.stats().mapped_bytes == 2 * PAGE
    for value, name in enumerate("ab", 1):
        assert views[name].shape[0] == BLOCKS
        views[name][5].fill_(value)  # an unmapped page would crash the process
    assert {float(views[name][5].max()) for name in "ab"} == {1.0, 2.0}
    assert {float(views[name][5].min()) for name in "ab"} == {1.0, 2.0}
    views.clear()
    del answers
    memory.close()
