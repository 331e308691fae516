# SPDX-License-Identifier: MIT
"""A KVCache in use by kernels: order, zeroed pages and mapping under load.

Needs a CUDA device, torch, and a back end (cuda, stock) that passes its probe; skipped otherwise.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pyvmem import Context, KVCache

torch = pytest.importorskip("torch")
from gpu_helpers import LAYERS, ROWS, TENSORS, contexts, make, needs_gpu  # noqa: E402

pytestmark = needs_gpu()
context = contexts()

LONG_MS = 120.0


@functools.cache
def _reader() -> Any:
    """Compiles a kernel whose threads each read one element many times.

    The elements are volatile, so every read accesses memory.
    """
    source = """
    extern "C" __global__ void read_often(const volatile double *in, double *out, int n,
                                          int times) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      double sum = 0;
      if (i >= n) return;
      for (int k = 0; k < times; k++) sum += in[i];
      out[i] = sum;
    }
    """
    return torch.cuda._compile_kernel(source, "read_often")


def read_often(rows: Any, times: int) -> Any:
    """Launches a kernel that reads each element `times` times; returns the sums."""
    assert rows.is_contiguous()
    out = torch.empty_like(rows)
    blocks = -(-rows.numel() // 256)
    _reader()(grid=(blocks, 1, 1), block=(256, 1, 1), args=[rows, out, rows.numel(), times])
    return out


def times_for(rows: Any, stream: Any) -> int:
    """Returns how many times the kernel must read the rows to run for at least LONG_MS."""
    times = 1 << 10
    while True:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record(stream)
            read_often(rows, times)
            end.record(stream)
        end.synchronize()
        if start.elapsed_time(end) >= LONG_MS:
            return times
        times *= 2


def start_long_read(cache: KVCache, reqid: int, length: int, stream: Any) -> tuple[Any, Any]:
    """Fills a slot with known rows and starts a long kernel that reads them.

    Returns the kernel's result and the expected result.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        values = torch.arange(length, device="cuda", dtype=torch.float64)[:, None, None] + 1
        for layer in range(LAYERS):
            cache.k(layer)[reqid, :length] = values
            cache.v(layer)[reqid, :length] = -values
    stream.synchronize()
    rows = cache.v(LAYERS - 1)[reqid, :length]
    times = times_for(rows, stream)
    expected = rows.clone() * times
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        return read_often(rows, times), expected


def spoil(cache: KVCache, reqid: int, length: int) -> None:
    """Fills rows with NaN on the current stream."""
    for layer in range(LAYERS):
        cache.k(layer)[reqid, :length] = float("nan")
        cache.v(layer)[reqid, :length] = float("nan")


@pytest.mark.parametrize("deferred", [True, False])
def test_pages_are_reclaimed_and_reused_under_a_running_kernel(
    context: Context, deferred: bool
) -> None:
    """There is memory for only one request, so the next gets pages a kernel is still reading."""
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    length = 6 * ROWS
    with make(context, 6, deferred_reclaim=deferred) as cache:
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        assert (first, second) == (0, 1)
        assert cache.step([length, 0]) == 0
        result, expected = start_long_read(cache, 0, length, reader)
        cache.free_reqid(0, reader)
        with torch.cuda.stream(writer):
            assert cache.step([0, length], writer) == 0
            assert not torch.count_nonzero(cache.k(0)[1, :length])
            spoil(cache, 1, length)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
        assert cache.stats().reclaimed_pages == 6 * TENSORS
        cache.check_integrity()


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("zero_fill", [True, False])
def test_a_slot_is_handed_over_under_a_running_kernel(
    context: Context, ahead: bool, zero_fill: bool
) -> None:
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    length = 6 * ROWS
    with make(context, 8, max_batch=1, zero_fill=zero_fill) as cache:
        cache.alloc_reqid()
        assert cache.step([length]) == 0
        result, expected = start_long_read(cache, 0, length, reader)
        cache.free_reqid(0, reader)
        assert cache.alloc_reqid() == 0
        with torch.cuda.stream(writer):
            if ahead:
                assert cache.step_async([length + ROWS], writer) == 0
            assert cache.step([length + ROWS], writer) == 0
            if zero_fill:
                assert not torch.count_nonzero(cache.v(1)[0, : length + ROWS])
            spoil(cache, 0, length)
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
        cache.check_integrity()


def test_later_work_on_the_stream_does_not_hold_up_reclaim(context: Context) -> None:
    stream = torch.cuda.Stream()
    with make(context, 8) as other:
        other.alloc_reqid()
        assert other.step([8 * ROWS, 0]) == 0
        with make(context, 6) as cache:
            cache.alloc_reqid()
            cache.alloc_reqid()
            assert cache.step([6 * ROWS, 0]) == 0
            cache.free_reqid(0, stream)
            result, expected = start_long_read(other, 0, 8 * ROWS, stream)
            assert cache.step([0, 6 * ROWS]) == 0
            assert not stream.query(), "the long kernel had not started when the slot was freed"
            torch.cuda.synchronize()
            assert torch.equal(result, expected)


def test_nan_is_not_handed_on_to_an_over_reading_kernel(context: Context) -> None:
    """Weights past the length are 0, but 0 * NaN is NaN, so the tile's tail must be finite."""
    tile = 2 * ROWS
    with make(context, 8, overread_rows=tile, overread_decode=True) as cache:
        cache.alloc_reqid()
        assert cache.step([8 * ROWS, 0]) == 0
        spoil(cache, 0, 8 * ROWS)
        cache.free_reqid(0)
        for reqid in (cache.alloc_reqid(ROWS + 1), cache.alloc_reqid(ROWS + 1)):
            assert reqid is not None
            numbers = [0, 0]
            numbers[reqid] = length = ROWS + 1
            assert cache.step(numbers) == 0
            for layer in range(LAYERS):
                cache.v(layer)[reqid, :length] = 1.0
            weights = torch.zeros(length + tile, device="cuda", dtype=torch.float64)
            weights[:length] = 1.0 / length
            for layer in range(LAYERS):
                out = torch.einsum("r,rhd->hd", weights, cache.v(layer)[reqid, : length + tile])
                assert torch.allclose(out, torch.ones_like(out))
            spoil(cache, reqid, length)
            cache.free_reqid(reqid)


def test_step_async_while_the_gpu_is_busy(context: Context) -> None:
    """Requests grow one row at a time while long kernels are queued; no written row is lost."""
    busy, work = torch.cuda.Stream(), torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device="cuda")
    with make(context, 16) as cache:
        cache.alloc_reqid()
        cache.alloc_reqid()
        for length in range(1, 8 * ROWS + 1):
            with torch.cuda.stream(busy):
                for _ in range(4):
                    matrix = torch.tanh(matrix @ matrix)
            with torch.cuda.stream(work):
                assert cache.step([length, length], work) == 0
                for reqid in range(2):
                    for layer in range(LAYERS):
                        cache.k(layer)[reqid, length - 1] = length + reqid
                        cache.v(layer)[reqid, length - 1] = -length - reqid
                if length < 8 * ROWS:
                    assert cache.step_async([length + 1, length + 1], work) == 0
        torch.cuda.synchronize()
        want = torch.arange(1, 8 * ROWS + 1, device="cuda", dtype=torch.float64)[:, None, None]
        for reqid in range(2):
            for layer in range(LAYERS):
                assert bool((cache.k(layer)[reqid] == want + reqid).all())
                assert bool((cache.v(layer)[reqid] == -want - reqid).all())
        stats = cache.stats()
        assert stats.grown_pages == 2 * 8 * TENSORS
        cache.check_integrity()


def test_memory_goes_back_to_the_device(context: Context) -> None:
    with make(context, 16) as cache:
        cache.alloc_reqid()
        assert cache.step([8 * ROWS, 0]) == 0
        spoil(cache, 0, 8 * ROWS)
    assert context.stats().used_bytes == 0
