# SPDX-License-Identifier: MIT
"""Description: random engines over small and large pages that move, against a plain model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, small_config
from share_helpers import ShareModel
from test_kvcache_layers import layered

from pyvmem import Caps, Context, KVCache, OutOfMemory
from pyvmem.kvcache import SlotInfo

TENSORS = 2 * LAYERS
UNIT = 4  # small pages of a large one

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"host_limit": 24},
    "short of memory": {"limit": 22},
    "promoted by itself": {"promote_tokens": 1, "window_tile": 2, "limit": 44},
    "nothing kept": {"deferred_reclaim": False, "limit": 30},
    "eager": {"eager_pages": 5, "limit": 26},
    "not zeroed": {"zero_fill": False, "low_watermark": 0.3, "limit": 30},
    "one tensor, over-read": {
        "group_size": LAYERS,
        "overread_rows": 3,
        "overread_decode": True,
        "limit": 34,
    },
    "odd rows": {"num_kv_heads": 3, "head_dim": 8, "dtype": "float16", "max_seq_len": 0},
}


class MixedModel(ShareModel):
    """Records may be shorter: the end of a large page that is still written is left out."""

    def refused(self, before: tuple[Any, ...]) -> None:
        def taken(slots: list[SlotInfo]) -> list[SlotInfo]:
            # What an earlier owner left in flight may be over, and a promotion be given up.
            active = (slot for slot in slots if slot.state == "active")
            return [replace(slot, in_flight=False, moving_pages=0) for slot in active]

        assert taken(self.cache.snapshot()) == taken(before[0])
        if len(self.tokens) == self.cache.config.max_batch:
            self.count("no slot")
        else:
            self.count("no memory")  # for the part of a large page that is copied
            self.give_up()

    def record(self, reqid: int) -> None:
        self.fire()
        held = self.cache.snapshot()[reqid].seq_len
        tokens = self.tokens[reqid][:held]
        unit = self.cache.sharing_unit
        whole = len(tokens) // unit * unit
        ids, space = self.named(tokens)
        done = self.cache.record(reqid, ids, namespace=space)
        large = UNIT * self.cache.layout.page_size // self.cache.layout.row_bytes
        assert whole - large - unit < done <= whole
        assert done % unit == 0
        assert self.length_of(tokens, leave=0) == done
        if done < whole:
            self.count("record cut")

    def promote(self, reqid: int) -> None:
        wait = self.random.random() < 0.5
        if wait:
            self.fire()
        if self.cache.promote(reqid, wait=wait, stream=None if wait else self.stream()):
            self.count("promote")

    def move(self, reqid: int) -> None:
        """To the host or back, all of it or a part."""
        wait = self.random.random() < 0.5
        self.fire()
        before = self.cache.snapshot()[reqid]
        held = before.seq_len
        tokens = None
        if self.random.random() < 0.5:
            tokens = sorted((self.random.randint(0, held), self.random.randint(0, held)))
        place = "device" if before.away_pages and self.random.random() < 0.5 else "host"
        stream = None if wait or before.moving_pages else self.stream()
        try:
            moved = self.cache.move(reqid, place, tokens=tokens, wait=wait, stream=stream)
        except OutOfMemory:
            self.count(f"{place} full")
            assert self.cache.snapshot()[reqid].away_pages == before.away_pages
            return
        if moved.pages:
            self.count(f"to the {place}")

    def any_step(self) -> None:
        requests = list(self.tokens)
        pick = self.random.random()
        if requests and pick < 0.1 and Caps.HOST_PAGES in self.cache.context.info.caps:
            self.move(self.random.choice(requests))
        elif requests and pick < 0.2 and self.first.layout.large_pages:
            self.promote(self.random.choice(requests))
        else:
            super().any_step()


def cache_of(context: Context, policy: dict[str, Any]) -> KVCache:
    options = dict(policy)
    page = context.info.granule
    limit = options.pop("limit", 60) * TENSORS * page
    if options.get("max_seq_len") == 0:  # 48-byte rows: the unit is three pages of them
        options["max_seq_len"] = 11 * page // 48 if page <= 4096 else 60
    options.setdefault("max_seq_len", 11 * ROWS)
    options["host_limit"] = options.get("host_limit", 0) * TENSORS * page
    config = small_config(
        page, memory_limit=limit, max_batch=6, large_page_size=UNIT * page, **options
    )
    return KVCache(config, context)


def drive(backend: str, policy: str, seed: int, steps: int) -> MixedModel:
    """A random engine; with odd seeds over slabs so small that pages are hardly ever runs."""
    with open_context(backend) as context:
        page = context.info.granule
        if UNIT * page not in context.info.page_sizes:
            pytest.skip("no such page size")
    with open_context(backend, slab_size=16 * page if seed % 2 else 0) as context:
        with cache_of(context, POLICIES[policy]) as cache:
            model = MixedModel(cache, seed)
            model.more = 60 if seed % 4 < 2 else 12
            for count in range(steps):
                model.any_step()
                if count % 8 == 0:
                    model.check()
            model.check()
            model.end()
        context.check()
        assert context.stats().used_bytes == 0
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_random_engine(backend: str, policy: str, seed: int) -> None:
    drive(backend, policy, seed, 150)


class LayeredModel(MixedModel):
    """Of several classes: what is recorded ends where no class cuts a page."""

    def refused(self, before: tuple[Any, ...]) -> None:
        self.count("no memory")
        if len(self.tokens) < self.first.config.max_batch:
            self.give_up()

    def record(self, reqid: int) -> None:
        self.fire()
        tokens = self.tokens[reqid][: self.first.snapshot()[reqid].seq_len]
        ids, space = self.named(tokens)
        done = self.cache.record(reqid, ids, namespace=space)
        assert done <= len(tokens)
        assert done % self.cache.sharing_unit == 0
        assert self.length_of(tokens, leave=0) == done


@pytest.mark.parametrize("pages", [500, 260])
@pytest.mark.parametrize("seed", range(3))
def test_random_engine_over_layers_that_differ(backend: str, pages: int, seed: int) -> None:
    with open_context(backend) as context:
        page = context.info.granule
        if UNIT * page not in context.info.page_sizes:
            pytest.skip("no such page size")
    options = {"max_seq_len": 80, "max_batch": 6, "large_page_size": UNIT * page}
    with (
        open_context(backend, slab_size=16 * page) as context,
        layered(context, pages, promote_tokens=1, window_tile=2, **options) as cache,
    ):
        model = LayeredModel(cache, seed)
        model.more = 60 if seed else 15
        for count in range(150):
            model.any_step()
            if count % 8 == 0:
                model.check()
        model.check()
        model.end()
