# SPDX-License-Identifier: MIT
"""Kernels run at full speed while the slots that they read grow and shrink.

Every step maps pages for every request; the next step's pages are mapped in the background while
the kernel runs. When a request ends, its pages are filled with NaN, unmapped immediately, and
mapped for another request. So a kernel that reads further past a length than the cache allows reads
memory that is unmapped, being mapped, being unmapped, or owned by another request. Expects no
fault, and outputs that are finite and bitwise equal to those of the same call on a cache whose
slots are fully mapped. The exception is torch's scaled_dot_product_attention: repeated calls on the
same memory sometimes differ in the last bit of a number, so only larger differences count.

VMEM_OVERREAD_SECONDS sets how long each kernel runs on each back end (60 by default). Needs a CUDA
device, torch, and a back end (cuda, stock) that passes its probe; skipped otherwise.
FlashAttention-3 is tested if vLLM, flash_attn_interface or $VMEM_FA3 provides it.
"""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import pytest

import pyvmem
from pyvmem import Context, KVCache, KVCacheConfig

torch = pytest.importorskip("torch")
from gpu_helpers import contexts, needs_gpu  # noqa: E402

from pyvmem.attention import Attention, OverRead, overread_rows, probe  # noqa: E402

pytestmark = [
    *needs_gpu(),
    # torch's own compiler triggers this warning.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
context = contexts()

SECONDS = float(os.environ.get("VMEM_OVERREAD_SECONDS", "60"))
KERNELS = ["auto", "fa3", "fa3-paged", "fa2", "flashinfer", "flex", "sdpa"]
LAYERS = 2
SLOTS = 8
LONGEST = 8192
HEADS, KV_HEADS, WIDTH = 32, 8, 128
CHUNKS = (17, 64, 200, 512)  # tokens per prefill chunk
FIRST = 6  # untimed steps in which the kernels for decoding and chunks are compiled
CHECK = 200  # steps between checks of the result, each of which synchronizes
LAST_BIT = 2.0**-7  # upper bound on the last bit of a bfloat16, relative to its value


def make(context: Context, overread: int, **changes: Any) -> KVCache:
    config = KVCacheConfig(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        dtype="bfloat16",
        max_batch=SLOTS,
        max_seq_len=LONGEST,
        overread_rows=overread,
        low_watermark=0.0,
        **changes,
    )
    return KVCache(config, context)


class Rows:
    """Random keys and values for each layer and row number, shared by all requests."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        shape = (LAYERS, LONGEST, KV_HEADS, WIDTH)
        self.k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def write(self, cache: KVCache, reqid: int, low: int, high: int) -> None:
        for layer in range(LAYERS):
            cache.k(layer)[reqid, low:high].copy_(self.k[layer, low:high])
            cache.v(layer)[reqid, low:high].copy_(self.v[layer, low:high])


class Growing:
    """Requests that grow by a page or a chunk per step, and restart when their slot is full."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self.cache = cache
        self.rows = rows
        self.random = random.Random(3)
        self.page_rows = -(-cache.layout.page_size // cache.layout.row_bytes)
        self.lens = [0] * SLOTS
        self.next = [0] * SLOTS
        self.ended: list[int] = []
        self.new_tokens = 1
        for _ in range(SLOTS):
            assert cache.alloc_reqid() is not None
        self.plan()

    def plan(self) -> None:
        """Chooses the next step's lengths: requests grow by about a page or a chunk, or end."""
        decode = self.random.random() < 0.7
        self.new_tokens = 1 if decode else self.random.choice(CHUNKS)
        more = max(self.page_rows, self.new_tokens)
        self.ended = []
        for reqid, length in enumerate(self.lens):
            want = length + more + self.random.randrange(-3, 4) * (length > 3)
            if want > LONGEST:
                self.ended.append(reqid)
                want = length
            self.next[reqid] = want

    def step(self) -> None:
        """Grows requests to their next lengths; restarts those that have filled their slots.

        Before a restart, the old rows are filled with NaN.
        """
        cache = self.cache
        for reqid in self.ended:
            (mapped,) = cache.slots.readable_rows([reqid])
            for layer in range(LAYERS):
                cache.k(layer)[reqid, :mapped].fill_(float("nan"))
                cache.v(layer)[reqid, :mapped].fill_(float("nan"))
            cache.free_reqid(reqid)
            assert cache.alloc_reqid() == reqid  # the only free slot
            self.lens[reqid] = 0
            self.next[reqid] = self.random.randrange(self.new_tokens, self.new_tokens + 300)
        assert cache.step(self.next) == 0
        for reqid, length in enumerate(self.next):
            self.rows.write(cache, reqid, self.lens[reqid], length)
        self.lens = list(self.next)


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_do_not_depend_on_memory_past_the_lengths(context: Context, kernel: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    needed = overread_rows("fa3" if kernel == "auto" else kernel, device)
    always = kernel != "auto"  # whether kernels may also over-read during decoding
    rows, order = Rows(), list(range(SLOTS))
    tokens = SLOTS * max(CHUNKS)
    q = torch.randn(tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    bad = torch.zeros((), device="cuda", dtype=torch.int64)
    with (
        make(context, needed, overread_decode=always) as mapped,
        make(context, needed, overread_decode=always, deferred_reclaim=False) as cache,
    ):
        if kernel != "auto" and (why := probe(cache, device)[kernel]):
            pytest.skip(why)
        for _ in range(SLOTS):
            mapped.alloc_reqid()
        assert mapped.step([LONGEST] * SLOTS) == 0
        for reqid in range(SLOTS):
            rows.write(mapped, reqid, 0, LONGEST)
        growing = Growing(cache, rows)
        ours, theirs = Attention(cache, kernel), Attention(mapped, kernel)
        seen: set[str] = set()
        steps, grown, until = 0, cache.stats().grown_pages, math.inf
        while time.monotonic() < until:
            growing.step()
            news = [growing.new_tokens] * SLOTS
            one = ours.batch(order, news, growing.lens)
            other = theirs.batch(order, news, growing.lens)
            assert one.kernel == other.kernel
            seen.add(one.kernel)
            query = q[: one.tokens]
            growing.plan()
            for layer in range(LAYERS):
                out = ours(query, layer, one)
                if not layer:  # map the next step's pages while the kernels run
                    assert cache.step_async(growing.next) == 0
                want = theirs(query, layer, other)
                differ = out != want
                if kernel == "sdpa":
                    differ &= (out - want).abs() > LAST_BIT * want.abs()
                bad += (~torch.isfinite(out)).sum() + differ.sum()
            steps += 1
            if steps == FIRST:
                torch.cuda.synchronize()
                until = time.monotonic() + SECONDS
            if steps % CHECK == 0:
                assert int(bad) == 0, f"{int(bad)} elements in {steps} steps"
        torch.cuda.synchronize()
        assert int(bad) == 0, f"{int(bad)} elements in {steps} steps"
        cache.check_integrity()
        pages = cache.stats().grown_pages - grown
        print(f"\n{context.info.backend}, {kernel} ({', '.join(sorted(seen))}): {steps} steps, "
              f"{pages} pages mapped, {needed} rows past each length")  # fmt: skip
        assert pages >= steps * LAYERS
        ours.close()
        theirs.close()


def test_a_tile_reader_is_refused_where_its_rows_are_missing(context: Context) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with make(context, 191) as cache:
        if why := probe(cache, device)["fa3"]:
            pytest.skip(why)
        assert cache.alloc_reqid() == 0
        assert cache.step([100] + [0] * (SLOTS - 1)) == 0
        (mapped,) = cache.slots.readable_rows([0])
        with pytest.raises(
            pyvmem.InvalidArgument, match="whole tiles in decoding and needs overread_decode"
        ):
            Attention(cache, "fa3")
        auto = Attention(cache)
        assert auto.batch([0], [64], [100]).kernel == "fa3"
        assert auto.batch([0], [1], [100]).kernel == auto.choice.decode == "fa3-paged"
        assert auto.batch([0], [64], [mapped]).kernel == "fa3-paged"
        auto.close()
    with make(context, 191, overread_decode=True) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([100] + [0] * (SLOTS - 1)) == 0
        (mapped,) = cache.slots.readable_rows([0])
        attend = Attention(cache, "fa3")
        attend.batch([0], [64], [100])
        with pytest.raises(OverRead, match="fa3 may read up to row"):
            attend.batch([0], [64], [mapped])
        attend.close()


def test_a_sparse_cache_is_no_protection_where_a_map_unmaps_first(context: Context) -> None:
    if pyvmem.Caps.SPARSE not in context.info.caps:
        pytest.skip("no sparse reservations")
    if context.info.backend == "uvm":
        pytest.skip("uvm maps in one step")
    assert pyvmem.Caps.SPARSE_ATOMIC not in context.info.caps
    device = torch.device("cuda", torch.cuda.current_device())
    with make(context, 0, sparse=True) as cache:
        assert not cache.safe_overread
        for name, why in probe(cache, device).items():
            if overread_rows(name, device):
                assert why, name
