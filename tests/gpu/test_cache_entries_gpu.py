# SPDX-License-Identifier: MIT
"""A cache under ordinary serving load, with 2 MiB entries for 64 KB pages.

Requests are prefilled, decoded, truncated, forked and freed, and memory sometimes runs short. On
every step, kernels read each request's rows: no read may fault, and the rows must hold what was
written. Prints what fraction of the mapped memory 2 MiB entries cover.

Needs a CUDA device, torch and the back end stock; skipped otherwise.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import pyvmem
from pyvmem import Caps, KVCache, KVCacheConfig
from pyvmem.kvcache import migration

torch = pytest.importorskip("torch")
STOCK = any(one.usable for one in pyvmem.probe() if one.backend == "stock")
pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not STOCK, reason="stock is not usable here"),
]

LONGEST = 8192
SLOTS = 24
STEPS = 1500
LAYERS = 4
MEMORY = 1536 << 20  # half of what the slots would need if they were all full


class Engine:
    """Serves random requests; row `n` of a request holds `seed + n` in every layer."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.rows: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.counts: dict[str, int] = {}
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.shares: list[float] = []

    def values(self, reqid: int, low: int, high: int) -> Any:
        rows = torch.arange(low, high, device="cuda") + self.seeds[reqid]
        return (rows % 2039).to(torch.bfloat16)[:, None, None]

    def write(self, reqid: int, low: int, high: int) -> None:
        for layer in range(LAYERS):
            for view in (self.cache.k(layer), self.cache.v(layer)):
                view[reqid, low:high] = self.values(reqid, low, high)

    def read(self, reqid: int) -> None:
        """Starts kernels that read all of a request's rows, as attention does, and check them."""
        want = self.values(reqid, 0, self.rows[reqid])
        for layer in range(LAYERS):
            for view in (self.cache.k(layer), self.cache.v(layer)):
                self.wrong += (view[reqid, : self.rows[reqid]] != want).sum()

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def start(self) -> None:
        rows = self.random.randint(1, LONGEST // 2)
        reqid = self.cache.alloc_reqid(rows)
        if reqid is None:
            return
        self.seeds[reqid], self.rows[reqid] = self.random.randint(1, 1 << 20), 0
        if self.step({reqid: rows}):
            self.count("prefill")

    def end(self, reqid: int) -> None:
        self.cache.free_reqid(reqid)
        del self.rows[reqid]
        self.count("free")

    def step(self, more: dict[int, int]) -> bool:
        """Adds rows to requests; if memory is short, frees the longest one and returns False."""
        lens = [0] * SLOTS
        for reqid, rows in self.rows.items():
            lens[reqid] = min(LONGEST, rows + more.get(reqid, 0))
        if self.random.random() < 0.5:
            self.cache.step_async(lens)
        if self.cache.step(lens) == -1:
            self.count("short")
            self.end(max(self.rows, key=self.rows.__getitem__))
            return False
        for reqid, rows in self.rows.items():
            if lens[reqid] > rows:
                self.write(reqid, rows, lens[reqid])
                self.rows[reqid] = lens[reqid]
        return True

    def turn(self) -> None:
        pick, running = self.random.random(), list(self.rows)
        if not running or pick < 0.03:
            self.start()
        elif pick < 0.05:
            self.end(self.random.choice(running))
        elif pick < 0.07:
            reqid = self.random.choice(running)
            length = self.random.randint(1, self.rows[reqid])
            if self.cache.truncate(reqid, length) == 0:
                self.rows[reqid] = length
                self.count("truncate")
        elif pick < 0.09:
            reqid = self.random.choice(running)
            length = self.random.randint(1, self.rows[reqid])
            child = self.cache.fork(reqid, length=length)
            if child is not None:
                self.seeds[child], self.rows[child] = self.seeds[reqid], length
                self.count("fork")
        self.step(dict.fromkeys(self.rows, self.random.choice((1, 1, 1, 33))))
        for reqid in self.rows:
            self.read(reqid)


@pytest.mark.parametrize("together", [1, LAYERS])
def test_an_ordinary_serving_pattern(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "REACH", 0)
    config = KVCacheConfig(
        num_layers=LAYERS,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        max_batch=SLOTS,
        max_seq_len=LONGEST,
        page_size=64 << 10,
        group_size=together,
        memory_limit=MEMORY,
    )
    with KVCache(config, backend="stock") as cache:
        assert Caps.LARGE_ENTRIES in cache.context.info.caps
        engine = Engine(cache, together)
        for turn in range(STEPS):
            engine.turn()
            if turn % 100 == 0:
                now = cache.stats()
                mapped = cache.context.stats().mapped_bytes
                engine.shares.append((now.large_entries << 21) / max(1, mapped))
            if turn % 500 == 0:
                assert int(engine.wrong) == 0
                cache.check_integrity()
        assert int(engine.wrong) == 0
        cache.check_integrity()
        now = cache.context.stats()
        last = engine.shares[len(engine.shares) // 2 :]
        print(
            f"{together} layers in a tensor: entries of 2 MiB map "
            f"{100 * sum(last) / len(last):.0f}% of the memory; {now.map_calls} map calls, "
            f"{now.splits} splits, {now.joins} joins, {engine.counts}"
        )
        assert {"prefill", "free", "truncate", "fork", "short"} <= set(engine.counts)
        # With four times as many tensors, runs are too short to be joined.
        if together == LAYERS:
            assert now.joins > 0
        assert now.splits > 0
        for reqid in list(engine.rows):
            engine.end(reqid)
    torch.cuda.synchronize()
