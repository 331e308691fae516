# SPDX-License-Identifier: MIT
"""Description: random engines over small and large pages, against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, small_config
from share_helpers import ShareModel

from pyvmem import Context, KVCache

TENSORS = 2 * LAYERS
UNIT = 4  # small pages of a large one

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short of memory": {"limit": 22},
    "nothing kept": {"deferred_reclaim": False, "limit": 30},
    "eager": {"eager_pages": 5, "limit": 26},
    "not zeroed": {"zero_fill": False, "low_watermark": 0.3, "limit": 30},
    "one tensor, over-read": {"group_size": LAYERS, "overread_rows": 3, "limit": 34},
    "odd rows": {"num_kv_heads": 3, "head_dim": 8, "dtype": "float16", "max_seq_len": 0},
}


class MixedModel(ShareModel):
    """Records may be shorter: the end of a large page that is still written is left out."""

    def refused(self, before: tuple[Any, ...]) -> None:
        if len(self.tokens) == self.cache.config.max_batch:
            super().refused(before)
            return
        self.count("no memory")  # for the part of a large page that is copied
        taken = [slot for slot in before[0] if slot.state == "active"]
        assert [slot for slot in self.cache.snapshot() if slot.state == "active"] == taken
        self.give_up()

    def record(self, reqid: int) -> None:
        self.fire()
        held = self.cache.snapshot()[reqid].seq_len
        tokens = self.tokens[reqid][:held]
        unit = self.cache.sharing_unit
        whole = len(tokens) // unit * unit
        done = self.cache.record(reqid, tokens)
        large = UNIT * self.cache.layout.page_size // self.cache.layout.row_bytes
        assert whole - large - unit < done <= whole
        assert done % unit == 0
        assert self.cache.match(tokens, leave=0).length == done
        if done < whole:
            self.count("record cut")


def cache_of(context: Context, policy: dict[str, Any]) -> KVCache:
    options = dict(policy)
    page = context.info.granule
    limit = options.pop("limit", 60) * TENSORS * page
    if options.get("max_seq_len") == 0:  # 48-byte rows: the unit is three pages of them
        options["max_seq_len"] = 11 * page // 48 if page <= 4096 else 60
    options.setdefault("max_seq_len", 11 * ROWS)
    config = small_config(
        page, memory_limit=limit, max_batch=6, large_page_size=UNIT * page, **options
    )
    return KVCache(config, context)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    with cache_of(context, POLICIES[policy]) as cache:
        model = MixedModel(cache, seed)
        model.more = 60
        for count in range(200):
            model.any_step()
            if count % 8 == 0:
                model.check()
        model.check()
        model.end()
