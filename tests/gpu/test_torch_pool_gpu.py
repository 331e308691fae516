# SPDX-License-Identifier: MIT
"""Torch tensors in a VMemPool: kernels, pause and resume, CUDA graphs, exhaustion.

Needs a CUDA device, torch, and a back end (cuda, stock) that passes its probe; skipped otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import pyvmem
from pyvmem.torch_pool import host as torch_host
from pyvmem.torch_pool.pool import VMemPool

torch = pytest.importorskip("torch")
from gpu_helpers import BACKENDS, contexts, needs_gpu  # noqa: E402

pytestmark = needs_gpu()
context = contexts(pool_high=0)

MIB = 1 << 20


@pytest.fixture
def pool(context: pyvmem.Context) -> Iterator[VMemPool]:
    one = VMemPool(context)
    yield one
    gc.collect()
    torch.cuda.synchronize()
    one.close()
    assert context.stats().used_bytes == 0


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def matrix(size: int = 1024) -> Any:
    """Returns a matrix of small integers, so that products are exact."""
    return torch.randint(-4, 5, (size, size), device="cuda").float()


def test_tensors_of_the_pool_compute(context: pyvmem.Context, pool: VMemPool) -> None:
    left, right = matrix(), matrix()
    with pool.use("t"):
        a, b = left.clone(), right.clone()
        small = torch.arange(1000, device="cuda")
        out = a @ b
    assert not pool.owns(left)
    for tensor in (a, b, small, out):
        assert pool.owns(tensor)
    assert torch.equal(out.cpu(), (left @ right).cpu())
    assert small.sum().item() == 499500
    assert pool.stats("t").blocks > 0
    assert context.stats().mapped_bytes == pool.stats().mapped_bytes
    outside = torch.ones(1000, device="cuda")
    assert not pool.owns(outside)


@pytest.mark.parametrize("keep", [True, False])
def test_pause_gives_memory_to_the_device(
    context: pyvmem.Context, pool: VMemPool, keep: bool
) -> None:
    with pool.use("weights"):
        weights = [matrix(4096) for _ in range(8)]  # 512 MiB
    with pool.use("cache"):
        cache = torch.full((MIB,), 7, device="cuda", dtype=torch.int32)
    wanted = [one.cpu() for one in weights]
    where = [one.data_ptr() for one in weights]
    before = free_bytes()
    given = pool.pause("weights", keep=keep)
    assert given >= 512 * MIB
    assert free_bytes() - before >= 500 * MIB
    assert bool((cache == 7).all())
    with pytest.raises(pyvmem.Busy), pool.use("weights"):
        pass
    filler = torch.full((400 * MIB,), 0x55, device="cuda", dtype=torch.uint8)
    assert int(filler[-1].item()) == 0x55
    del filler
    torch.cuda.empty_cache()
    pool.resume("weights")
    assert [one.data_ptr() for one in weights] == where
    for one, want in zip(weights, wanted, strict=True):
        assert torch.equal(one.cpu(), want if keep else torch.zeros_like(want))
    product = weights[0] @ weights[1]
    want = wanted[0].cuda() @ wanted[1].cuda() if keep else torch.zeros_like(product)
    assert torch.equal(product, want)


def test_pause_waits_for_running_kernels(pool: VMemPool) -> None:
    side = torch.cuda.Stream()
    with pool.use("t"):
        a = matrix(4096)
        b = torch.zeros_like(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(200):
            torch.mul(a, 3, out=b)
    pool.pause("t")
    pool.resume("t")
    assert torch.equal(b, a * 3)


def test_a_graph_replays_after_resume(pool: VMemPool) -> None:
    with pool.use("t"):
        a, b = matrix(), matrix()
        out = torch.zeros(1024, 1024, device="cuda")
    torch.matmul(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(a, b, out=out)
    for round_ in range(3):
        a.fill_(round_ + 1)
        graph.replay()
        assert torch.equal(out, a @ b)
        pool.pause("t")
        pool.resume("t")
        out.zero_()
        graph.replay()
        assert torch.equal(out, a @ b)
    torch.cuda.synchronize()
    del graph


def test_freed_segments_come_back(context: pyvmem.Context, pool: VMemPool) -> None:
    """Work is in flight when the segment is freed. vmem_free waits for it, as cudaFree does."""
    with pool.use("t"):
        a = matrix(4096)
        for _ in range(100):
            a.mul_(1)
    used = context.stats().used_bytes
    assert used >= 64 * MIB
    del a
    pool._tags["t"].pool = None  # the MemPool keeps its segments for as long as it exists
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert context.stats().used_bytes == 0
    assert pool.stats().failures == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_exhaustion_is_torchs_own_error(backend: str) -> None:
    with pyvmem.Context(backend, mem_limit=64 * MIB) as context, VMemPool(context) as pool:
        with pytest.raises(torch.OutOfMemoryError), pool.use("t"):
            torch.empty(256 * MIB, device="cuda", dtype=torch.uint8)
        assert "limit" in pool.stats().last_error
        with pool.use("t"):
            small = torch.ones(MIB, device="cuda", dtype=torch.uint8)
        assert int(small.sum().item()) == MIB
        del small


def test_close_with_live_tensors_is_refused(context: pyvmem.Context) -> None:
    pool = VMemPool(context)
    with pool.use("t"):
        a = torch.ones(10, device="cuda")
    with pytest.raises(pyvmem.Busy, match="torch holds 1 blocks"):
        pool.close()
    assert a.sum().item() == 10
    with pool.use("t"):  # creates a new MemPool
        b = a + 1
    assert pool.owns(b)
    del a, b
    torch.cuda.synchronize()
    pool.close()


EXPANDABLE = """
import torch, pyvmem
from pyvmem.torch_pool import VMemPool
with pyvmem.Context(%r) as context, VMemPool(context) as pool:
    with pool.use("t"):
        a = torch.ones(1 << 20, device="cuda")
    outside = torch.ones(1 << 20, device="cuda")
    assert pool.owns(a), "torch took an expandable segment"
    assert not pool.owns(outside)
    where = a.data_ptr()
    pool.pause()
    pool.resume()
    assert a.data_ptr() == where and bool((a == 1).all())
    del a
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_expandable_segments(backend: str) -> None:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    settings["PYTORCH_ALLOC_CONF"] = settings["PYTORCH_CUDA_ALLOC_CONF"]
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE % backend],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_second_pause_takes_no_host_memory(pool: VMemPool) -> None:
    """The first pause allocates pinned memory, and the second reuses it; contents survive both."""
    with pool.use("weights"):
        weights = [matrix(4096) for _ in range(8)]
    torch.cuda.synchronize()
    views, held = set(), set()
    for round_ in range(3):
        for one in weights:
            one.add_(round_)
        wanted = [one.cpu() for one in weights]
        pool.pause("weights")
        view = pool.saved(weights[0].data_ptr(), 4096)
        assert view is not None
        assert bytes(view) == bytes(wanted[0].view(-1)[:1024].numpy())
        views.add(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        del view
        now = pool.stats()
        assert now.locked_bytes == now.host_bytes >= now.saved_bytes >= 512 * MIB
        held.add(now.host_bytes)
        pool.resume("weights")
        for one, want in zip(weights, wanted, strict=True):
            assert torch.equal(one.cpu(), want)
    assert len(views) == len(held) == 1
    assert pool.drop_host() == held.pop()
    assert pool.stats().host_bytes == 0
    pool.pause("weights")
    pool.resume("weights")
    for one, want in zip(weights, wanted, strict=True):
        assert torch.equal(one.cpu(), want)


def test_contents_without_locked_memory(pool: VMemPool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch_host, "_HOST_REGISTER", 1 << 30)  # a flag that CUDA rejects
    with pool.use("weights"):
        weights = matrix(4096)
    wanted = weights.cpu()
    pool.pause("weights")
    assert pool.stats().locked_bytes == 0
    pool.resume("weights")
    assert torch.equal(weights.cpu(), wanted)
    product = weights @ weights  # would fail if CUDA's error had not been cleared
    torch.cuda.synchronize()
    assert torch.equal(product, wanted.cuda() @ wanted.cuda())


@pytest.mark.parametrize("memory", ["registered", "torch's", "pageable"])
def test_reads_and_writes_of_host_memory(context: pyvmem.Context, memory: str) -> None:
    """Uses odd alignments, and lengths that exceed one copy and the staging buffer."""
    size = 40 * MIB
    chance = random.Random(3)
    if memory == "registered":
        block = torch_host.HostBlock(size, 0)
        assert block.locked
        host = block.view(0, size)
    else:
        pinned = memory == "torch's"
        host = memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy())
    model = bytearray(chance.randbytes(size))
    space = context.reserve(size)
    pages = context.create(size)
    space.map(0, pages)
    at = space.addr
    host[:] = model
    context.write(at, host)
    host[:] = bytes(size)
    context.read_into(at, host)
    assert host == model
    for number in range(120):
        length = chance.randrange(20 * MIB if number % 8 == 0 else 70000)
        there, here = chance.randrange(size - length), chance.randrange(size - length)
        if number % 3 == 0:
            here = there
        if number & 1:
            model[there : there + length] = host[here : here + length]
            context.write(at + there, host[here : here + length])
        else:
            before = host[here - 1] if here else 0
            after = host[here + length]
            context.read_into(at + there, host[here : here + length])
            assert host[here : here + length] == model[there : there + length]
            assert host[here + length] == after
            assert not here or host[here - 1] == before
    assert context.read(at, size) == model
    del host
    space.unmap(0, size)
    pages.release()
    space.close()
