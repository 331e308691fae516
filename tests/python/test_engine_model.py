# SPDX-License-Identifier: MIT
"""Random engines over `RequestCache`, with background calls, against a model."""

from __future__ import annotations

import random

import pytest
from kvcache_helpers import small_config
from soak import LateEvents, SoakEngine
from test_kvcache_layers import layered
from test_kvcache_window_prefix import gemma_like

from pyvmem import Context, KVCache


def cache_of(context: Context, kind: str) -> KVCache:
    if kind == "windows":
        return gemma_like(context, 250)
    if kind == "layers":
        return layered(context, 260, max_seq_len=80, max_batch=6)
    limit = 40 * 4 * context.info.granule
    return KVCache(small_config(context.info.granule, memory_limit=limit), context)


@pytest.mark.parametrize("kind", ["alike", "layers", "windows"])
def test_random_engines(host: Context, kind: str) -> None:
    for seed in range(5):
        late = LateEvents(random.Random(seed))
        try:
            with cache_of(host, kind) as cache:
                model = SoakEngine(cache, seed)
                model.begin(late, seed)
                for count in range(400):
                    model.any_step()
                    if count % 20 == 0:
                        model.check()
                late.fire()
                model.end()
        finally:
            late.close()
