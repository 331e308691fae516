# SPDX-License-Identifier: MIT
"""Our kernel copies scattered pages between plain addresses and host memory.

Needs a CUDA device, torch and Triton; skipped otherwise. CUDA's own copy functions do
not accept plain addresses, so the tests write and compare the contents with kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_helpers import contexts, needs_gpu

from pyvmem import Context
from pyvmem.elastic.geometry import Run
from pyvmem.elastic.memory import KVMemory
from pyvmem.memory.host_copies import HostMemory, Pieces, StreamCopies

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = needs_gpu()
context = contexts()

BLOCKS = 256
SLEEP = 100_000_000  # GPU clock cycles, about 60 ms


@pytest.fixture
def memory(context: Context) -> Iterator[KVMemory]:
    """Yields memory with one tensor of one-page blocks, all of which are mapped."""
    page = context.info.granule
    made = KVMemory(context, BLOCKS, [BLOCKS * page])
    made.grow([Run(0, 0, BLOCKS)])
    made.step_begins(torch.cuda.current_stream())
    yield made
    torch.cuda.synchronize()
    made.drop([Run(0, 0, BLOCKS)])


def both(memory: KVMemory) -> tuple[Any, StreamCopies, StreamCopies]:
    """Returns the tensor as 8-byte words, and the objects that copy out of it and into it.

    The memory waits for these copies before it unmaps pages.
    """
    page = memory.geometry.page_size
    kv = memory.tensor(BLOCKS * page).view(torch.int64).view(BLOCKS, page // 8)
    out, into = (StreamCopies(memory.context, way, kv.device) for way in (True, False))
    out.load()
    into.load()
    memory.copies = [out, into]
    return kv, out, into


def fill(kv: Any) -> Any:
    """Fills the tensor with random words; returns an ordinary tensor with the same contents."""
    kv.random_()
    return kv + 0


def pieces(kv: Any, host: HostMemory, blocks: list[int], size: int, shift: int = 0) -> Pieces:
    page = kv.stride(0) * 8
    return Pieces(
        kv.data_ptr() + np.array(blocks, dtype=np.int64) * page + shift,
        host.addr + np.arange(len(blocks), dtype=np.int64) * page + shift,
        np.full(len(blocks), size, dtype=np.int64),
    )


@pytest.mark.parametrize(("cut", "shift"), [(0, 0), (16, 0), (16, 16), (1, 0), (4099, 1)])
def test_scattered_blocks_come_back(memory: KVMemory, cut: int, shift: int) -> None:
    """Copies whole pages, pieces aligned to 16 bytes, and pieces of odd sizes."""
    page = memory.geometry.page_size
    kv, out, into = both(memory)
    host = HostMemory(BLOCKS * page, locked=True)
    before = fill(kv)
    blocks = random.Random(cut).sample(range(BLOCKS), BLOCKS)
    there = pieces(kv, host, blocks, page - cut - shift, shift)
    copy = out.start(there)
    copy.wait()
    assert copy.ready()
    assert copy.seconds() > 0
    kv.bitwise_and_(0)  # zero_ is a memset, which fails on plain addresses
    into.start(there).wait()
    found = (kv + 0).view(torch.int8).view(BLOCKS, page)
    wanted = before.view(torch.int8).view(BLOCKS, page)
    middle = slice(shift, page - cut)
    assert torch.equal(found[:, middle], wanted[:, middle])
    assert not found[:, :shift].any()
    assert not found[:, page - cut :].any()
    host.close()


def test_a_copy_follows_the_steps_before_it(memory: KVMemory) -> None:
    page = memory.geometry.page_size
    kv, out, into = both(memory)
    host = HostMemory(BLOCKS * page, locked=True)
    fill(kv)
    torch.cuda._sleep(SLEEP)
    kv.fill_(7)
    there = pieces(kv, host, list(range(BLOCKS)), page)
    out.start(there).wait()
    kv.fill_(1)
    into.start(there).wait()
    assert bool((kv == 7).all())
    host.close()


def test_pages_stay_until_their_copy_has_ended(memory: KVMemory) -> None:
    """Releases pages while their copy is queued; the copy would fault if they were unmapped."""
    page = memory.geometry.page_size
    kv, out, into = both(memory)
    host = HostMemory(BLOCKS * page, locked=True)
    before = fill(kv)
    torch.cuda.synchronize()
    with torch.cuda.stream(out.stream):
        torch.cuda._sleep(SLEEP)
    there = pieces(kv, host, list(range(1, BLOCKS)), page)
    copy = out.start(there)
    memory.release(1, [Run(0, 1, BLOCKS - 1)], after_step=0)
    assert memory.finished() == {}, "unmapped before the copy has started"
    copy.wait()
    while not memory.finished():
        time.sleep(0.001)
    memory.grow([Run(0, 1, BLOCKS - 1)])
    assert not bool((kv[1:] != 0).any()), "new pages must be zero"
    into.start(there).wait()
    assert torch.equal(kv[1:] + 0, before[1:])
    host.close()


def test_a_kernel_that_cannot_be_launched(
    memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libvmem makes the copies instead, after any steps launched before them."""
    page = memory.geometry.page_size
    kv, out, into = both(memory)
    host = HostMemory(BLOCKS * page, locked=True)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the descriptors")

    monkeypatch.setattr(StreamCopies, "_launch", refuse)
    there = pieces(kv, host, [3, 200, 17], page)
    torch.cuda._sleep(SLEEP)
    kv.fill_(9)
    out.start(there).wait()
    kv.fill_(1)
    into.start(there).wait()
    assert bool((kv[[3, 200, 17]] == 9).all())
    assert int((kv == 9).sum()) == 3 * page // 8
    host.close()
