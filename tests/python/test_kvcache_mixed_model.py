# SPDX-License-Identifier: MIT
"""Runs random engines with moving pages and 2 MiB entries against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from kvcache_helpers import LAYERS, ROWS, small_config
from move_helpers import in_slabs
from share_helpers import ShareModel
from test_kvcache_layers import layered

from pyvmem import Caps, Context, KVCache, OpBatch, OutOfMemory, _native
from pyvmem.kvcache import migration

TENSORS = 2 * LAYERS
MIB2 = 2 << 20
_UNMAP = _native.constant("VMEM_OP_UNMAP")
_REPLACE = _native.constant("VMEM_OP_REPLACE")

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"host_limit": 24},
    "short of memory": {"limit": 22},
    "promoted by itself": {"window_tile": 2, "limit": 44},
    "nothing kept": {"deferred_reclaim": False, "limit": 30},
    "eager": {"eager_pages": 5, "limit": 26},
    "not zeroed": {"zero_fill": False, "low_watermark": 0.3, "limit": 30},
    "one tensor, over-read": {
        "group_size": LAYERS,
        "overread_rows": 3,
        "overread_decode": True,
        "limit": 34,
    },
    "odd rows": {"num_kv_heads": 3, "head_dim": 5 << 12, "max_seq_len": 24},
}


class MixedModel(ShareModel):
    """A model of a cache that joins, splits and copies blocks, and moves pages to the host and
    back.
    """

    def __init__(self, cache: KVCache, seed: int) -> None:
        super().__init__(cache, seed)
        self._watch(cache)

    def _watch(self, cache: KVCache) -> None:
        """Checks that no batch on the worker splits a 2 MiB entry that maps a request's rows."""
        context, submit = cache.context, cache.context.submit

        def watched(ops: OpBatch, *more: Any, **options: Any) -> Any:
            for place in range(len(ops)):
                op = ops.array[place]
                if op.op == _UNMAP or op.flags & _REPLACE:
                    for piece in range(op.count or 1):
                        self._splits_none(op.addr + piece * op.stride, op.bytes)
            return submit(ops, *more, **options)

        context.submit = watched  # type: ignore[method-assign]

    def _splits_none(self, addr: int, size: int) -> None:
        for group in self.cache._groups:
            space, layout = group.reservation, group.layout
            for end in (addr, addr + size) if layout.block else ():
                at = end - end % MIB2 - space.addr
                if end % MIB2 and 0 <= at < space.nbytes:
                    slot = group.table.slots[at % layout.tensor_bytes // layout.slot_bytes]
                    low = at % layout.slot_bytes // layout.page_size
                    large = space.query(at).entry_bytes == MIB2
                    busy = slot.active and not slot.stale and slot.head < low + layout.block
                    assert not (large and busy and slot.granted > low), (slot, low)

    def promote(self, reqid: int) -> None:
        wait = self.random.random() < 0.5
        if wait:
            self.fire()
        if self.cache.promote(reqid, wait=wait, stream=None if wait else self.stream()):
            self.count("promote")

    def move(self, reqid: int) -> None:
        """Moves a request or part of it to the host or back."""
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
        elif requests and pick < 0.2 and self.first.layout.block:
            self.promote(self.random.choice(requests))
        else:
            super().any_step()


def cache_of(context: Context, policy: dict[str, Any]) -> KVCache:
    options = dict(policy)
    page = context.info.granule
    limit = options.pop("limit", 60) * TENSORS * page
    options.setdefault("max_seq_len", 11 * ROWS)
    options["host_limit"] = options.get("host_limit", 0) * TENSORS * page
    config = small_config(page, memory_limit=limit, max_batch=6, growth_fraction=0.25, **options)
    return KVCache(config, context)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the minimum size, so that small caches behave like large ones."""
    monkeypatch.setattr(migration, "REACH", 0)


def drive(backend: str, policy: str, seed: int, steps: int) -> MixedModel:
    """Runs a random engine; with an odd seed, the context is too small for whole blocks."""
    with in_slabs(backend, mem_limit=80 * TENSORS * (MIB2 // 4) if seed % 2 else 0) as context:
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
@pytest.mark.parametrize("seed", range(3))
def test_random_engine(backend: str, policy: str, seed: int) -> None:
    drive(backend, policy, seed, 100)


class LayeredModel(MixedModel):
    """A model of a cache with several groups; prefixes end on a page boundary in every group."""

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
def test_random_engine_over_unequal_layers(backend: str, pages: int, seed: int) -> None:
    options = {"max_seq_len": 80, "max_batch": 6, "window_tile": 2}
    with in_slabs(backend) as context, layered(context, pages, **options) as cache:
        model = LayeredModel(cache, seed)
        model.more = 60 if seed else 15
        for count in range(150):
            model.any_step()
            if count % 8 == 0:
                model.check()
        model.check()
        model.end()
