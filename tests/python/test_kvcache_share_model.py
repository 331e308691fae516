# SPDX-License-Identifier: MIT
"""Runs random engines that fork, record, match, swap and trim against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from kvcache_helpers import LAYERS, policy_cache
from share_helpers import ShareModel

from pyvmem import Context, KVCache

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short of memory": {"limit": 14},
    "nothing kept": {"deferred_reclaim": False, "limit": 20},
    "eager": {"eager_pages": 2, "limit": 16},
    "not zeroed": {"zero_fill": False, "low_watermark": 0.3, "limit": 16},
    "one tensor, over-read": {"group_size": LAYERS, "overread_rows": 3, "limit": 24},
    "odd rows": {"num_kv_heads": 3, "head_dim": 8, "dtype": "float16", "max_seq_len": 0},
}


def cache_of(context: Context, policy: dict[str, Any]) -> KVCache:
    more, page = {}, context.info.granule
    if policy.get("max_seq_len") == 0:  # with 48-byte rows, a sharing unit has three pages
        more["max_seq_len"] = 5 * page // 48 if page <= 4096 else 60
    return policy_cache(context, policy, 40, max_batch=6, **more)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    with cache_of(context, POLICIES[policy]) as cache:
        model = ShareModel(cache, seed)
        model.run(200)
        if policy == "plain":
            assert {"hit", "miss", "fork", "swap"} <= set(model.counts)
