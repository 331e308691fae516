# SPDX-License-Identifier: MIT
"""Reused pages are zero, and free memory is returned to the driver.

Pages may have been zeroed in the background.

Needs a CUDA device, torch, and a back end (cuda, stock, uvm) that passes its probe.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

import pyvmem
from pyvmem import Context, OpBatch

torch = pytest.importorskip("torch")

BACKENDS = [one.backend for one in pyvmem.probe() if one.usable and one.backend != "host"]
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not BACKENDS, reason="no GPU back end is usable here"),
]


@pytest.fixture(params=BACKENDS)
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    with Context(request.param) as made:
        yield made
        made.check()


def change(context: Context, addr: int, size: int, *, grow: bool, dirty: bool = False) -> None:
    """Maps new pages at `addr` from this thread, or unmaps them if `grow` is false."""
    ops = OpBatch(1)
    if grow:
        ops.populate(addr, size, dirty=dirty)
    else:
        ops.unmap(addr, size)
    context.batch(ops)


def clean(context: Context) -> bool:
    """Waits up to a second for free pages to be zeroed; returns whether all of them are."""
    end = time.monotonic() + 1
    while context.stats().dirty_bytes and time.monotonic() < end:
        time.sleep(0.001)
    return context.stats().dirty_bytes == 0


@pytest.mark.parametrize("busy", [False, True])
def test_pages_come_back_zero(context: Context, busy: bool) -> None:
    size = 64 * context.info.granule
    rsv = context.reserve(2 * size)
    stream = torch.cuda.Stream()
    for turn in range(50):
        if busy:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
        change(context, rsv.addr, size, grow=True, dirty=bool(turn % 2))
        if not turn % 2:
            assert rsv.read(0, size) == bytes(size)
        rsv.fill(0, size, 0xFF)
        change(context, rsv.addr, size, grow=False)
        if turn % 3 == 0 and not busy:
            assert clean(context)
            before = context.stats().fill_calls
            change(context, rsv.addr + size, size, grow=True)
            assert context.stats().fill_calls == before
        else:
            change(context, rsv.addr + size, size, grow=True)
        assert rsv.read(size, size) == bytes(size)
        change(context, rsv.addr + size, size, grow=False)
    context.check()
    torch.cuda.synchronize()
    rsv.close()


def test_free_memory_goes_back(context: Context) -> None:
    page = context.info.granule
    tensors, blocks, run = 16, 256, 8
    if page > 1 << 20:
        tensors, blocks = 8, 64
    chosen = random.Random(1)
    start = torch.cuda.mem_get_info()[0]
    ranges = [context.reserve(blocks * page) for _ in range(tensors)]
    for block in range(0, blocks, run):
        ops = OpBatch(tensors)
        for rsv in ranges:
            ops.populate(rsv.addr + block * page, run * page, spread=True)
        context.batch(ops)
    pages = [(rsv, block) for rsv in ranges for block in range(blocks)]
    chosen.shuffle(pages)
    kept = pages[: len(pages) // 10]
    for rsv, block in pages[len(kept) :]:
        rsv.unmap(block * page, page)
    for value, (rsv, block) in enumerate(kept):
        rsv.fill(block * page, page, value % 251)
    torch.cuda.synchronize()
    context.trim()
    held = context.stats().slab_bytes
    freed = context.compact()
    stats = context.stats()
    assert stats.slab_bytes == held - freed
    assert stats.used_bytes == len(kept) * page
    slab = max(context.info.slab_size, page)
    assert stats.slab_bytes <= 1.1 * stats.used_bytes + slab
    missing = start - torch.cuda.mem_get_info()[0]
    # Allow another 64 MiB for the driver's page tables.
    assert missing <= 1.1 * stats.used_bytes + slab + (64 << 20)
    for value, (rsv, block) in enumerate(kept):
        assert rsv.read(block * page, page) == bytes([value % 251]) * page
    context.check()
    for rsv in ranges:
        rsv.close(unmap=True)
    context.trim()
    assert context.stats().slab_bytes == 0
