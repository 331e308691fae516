# SPDX-License-Identifier: MIT
"""Requests reach the mapping limit, and their runs are joined while kernels run.

Needs a CUDA device, torch and the back end stock; skipped otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest

import pyvmem
from pyvmem import Context, KVCache, KVCacheConfig

torch = pytest.importorskip("torch")
STOCK = any(one.usable for one in pyvmem.probe() if one.backend == "stock")
pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not STOCK, reason="stock is not usable here"),
]

ROWS = 8  # rows per page
PAGE = 64 << 10
SLEEP = 100_000_000  # GPU clock cycles, about 60 ms


def make(context: Context, slots: int, pages: int, **policy: Any) -> KVCache:
    config = KVCacheConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=PAGE // ROWS // 2,
        dtype="float16",
        max_batch=slots,
        max_seq_len=1 << 12,
        page_size=PAGE,
        memory_limit=4 * pages * PAGE,
        **policy,
    )
    return KVCache(config, context)


def test_joining_waits_for_kernels_of_every_stream_and_keeps_the_rows() -> None:
    """A kernel on another stream is reading the rows when a step joins their runs."""
    beside = torch.cuda.Stream()
    with Context("stock", granule=PAGE, max_mappings=4 * 64) as context:
        context.warm(4 * 256 * PAGE)
        with make(context, 2, 256, growth_fraction=0) as cache:
            for _ in range(2):
                cache.alloc_reqid()
            k, joined, sums = cache.k(0), 0, []
            for page in range(110):
                length = page * ROWS + 1
                before = context.stats().mappings
                assert cache.step([length, length]) == 0
                joined += context.stats().mappings < before
                k[:, length - 1] = page % 50
                torch.cuda.synchronize()
                with torch.cuda.stream(beside):
                    torch.cuda._sleep(SLEEP // 20)
                    sums.append(k[:, :length:ROWS, 0, 0].double().sum())
            torch.cuda.synchronize()
            assert joined
            want = 0
            for page, found in enumerate(sums):
                want += 2 * (page % 50)
                assert int(found) == want
            cache.check_integrity()
            del k
        context.check()


@pytest.mark.parametrize("ahead", [False, True], ids=["step", "step_async"])
def test_a_small_share_of_mappings_fills_the_memory(ahead: bool) -> None:
    """Scales an 80 GB GPU with 64 tensors to 2 GB and 4, with about as many mappings per GB."""
    slots, pages = 32, 8000
    with (
        Context("stock", granule=PAGE, max_mappings=4 * 1600) as context,
        make(context, slots, pages) as cache,
    ):
        for _ in range(slots):
            cache.alloc_reqid()
        length = 0
        while True:
            length += ROWS - 1
            lens = [length + 3 * reqid for reqid in range(slots)]
            if ahead and cache.step_async(lens):
                break
            if cache.step(lens):
                break
        now = cache.stats()
        assert now.active_pages >= 0.98 * now.total_pages
        assert now.mappings < 4 * 1600
        cache.check_integrity()


def test_the_default_leaves_mappings_for_others() -> None:
    with Context("stock", granule=PAGE) as context:
        assert context.info.max_mappings == 237_568
    with pytest.raises(pyvmem.InvalidArgument, match="max_mappings"):
        Context("stock", granule=PAGE, max_mappings=475_137)
