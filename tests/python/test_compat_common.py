# SPDX-License-Identifier: MIT
"""In the vAttention module, one id writes the common pages, and all ids read them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from test_compat_vattention import BATCH, DTYPE, LAYERS, ROW, held, init, page

import pyvmem
import pyvmem.compat.vattention as vattention
from pyvmem import Busy, Caps, InvalidArgument, NotSupported
from pyvmem.compat.vattention import OutOfKVBlocks
from pyvmem.kvcache import KVCache

__all__ = ["page"]

pytestmark = pytest.mark.needs_tensors


def cache() -> KVCache:
    assert vattention._manager is not None
    return vattention._manager.cache


def common(page: int, blocks: int, **how: Any) -> list[torch.Tensor]:
    """Maps two common pages, the second for a single row, with memory for `blocks` KV blocks."""
    tensors = init(page, **how)
    layers = 2 * LAYERS
    assert vattention.reserve_physical_pages(blocks * layers * page) == blocks * layers
    if Caps.ALIAS | Caps.READONLY not in cache().context.info.caps:
        with pytest.raises(NotSupported, match="cannot share"):
            vattention.map_common_pages(1)
        cache().check_integrity()
        assert held() == 0
        pytest.skip("pages cannot be shared here")
    vattention.map_common_pages(page // ROW + 1)
    return tensors


def test_a_page_is_mapped_for_every_id(page: int) -> None:
    """Writes through one id and reads through all, as the artifact documents."""
    tensors = common(page, 4)
    rows = 2 * page // ROW
    assert held() == 2 * 2 * LAYERS
    assert vattention.num_free_kvblocks() == 2
    for number, tensor in enumerate(tensors):
        assert not tensor[:, :rows].any()
        tensor[0, :rows] = number + 1
    for number, tensor in enumerate(tensors):
        assert bool((tensor[:, :rows] == number + 1).all())
    cache().check_integrity()
    with pytest.raises(Busy, match="there are some"):
        vattention.map_common_pages(1)


@pytest.mark.parametrize("megacache", [False, True])
def test_every_request_starts_with_the_common_rows(page: int, megacache: bool) -> None:
    """Runs random requests; common and own rows keep their contents, and all memory is freed."""
    dice = random.Random(5)
    tensors = init(page, megacache)
    columns = 2 if megacache else 2 * LAYERS
    vattention.reserve_physical_pages(24 * 2 * LAYERS * page)
    if Caps.ALIAS | Caps.READONLY not in cache().context.info.caps:
        pytest.skip("pages cannot be shared here")
    vattention.map_common_pages(1)
    # the first row that is not common
    first = cache().layout.capacity(held() // columns)
    longest = tensors[0].shape[1]
    assert vattention.alloc_new_batch_idx(first) == 0
    lengths = [first, 0, 0, 0]
    vattention.step(lengths, False)
    for tensor in tensors:
        tensor[0, :first] = 7
    tags = [0.0] * BATCH
    for turn in range(60):
        reqid = dice.randrange(BATCH)
        if lengths[reqid]:
            lengths[reqid] = 0
            if dice.random() < 0.5:
                vattention.free_batch_idx(reqid)
        elif dice.random() < 0.5:
            reqid = vattention.alloc_new_batch_idx(first)
            assert lengths[reqid] == 0
            lengths[reqid] = dice.randint(first, longest)
        else:  # the artifact accepts an id that was not allocated
            lengths[reqid] = dice.randint(first, longest)
        grown = [reqid for reqid in range(BATCH) if lengths[reqid] and not tags[reqid]]
        vattention.step(lengths, dice.random() < 0.5)
        for reqid in range(BATCH):
            tags[reqid] = tags[reqid] if lengths[reqid] else 0.0
        for reqid in grown:
            for tensor in tensors:
                assert not tensor[reqid, first : lengths[reqid]].any(), "an earlier request's rows"
                tensor[reqid, first : lengths[reqid]] = turn + 1
            tags[reqid] = turn + 1
        for tensor in tensors:
            assert bool((tensor[:, :first] == 7).all())
            for reqid in range(BATCH):
                assert bool((tensor[reqid, first : lengths[reqid]] == tags[reqid]).all())
        cache().check_integrity()
    vattention.step([0] * BATCH, True)
    assert held() == columns * cache().layout.pages_for(first)


def test_memory_is_counted_once(page: int) -> None:
    common(page, 4)
    rows = page // ROW
    vattention.step([3 * rows, 3 * rows, 0, 0], False)
    assert vattention.num_free_kvblocks() == 0
    with pytest.raises(OutOfKVBlocks, match="5 KV blocks are needed, but the cache has 4"):
        vattention.step([3 * rows, 3 * rows, 3 * rows, 0], False)
    assert vattention.num_free_kvblocks() == 0
    vattention.step([2 * rows, 2 * rows, 2 * rows, 1], False)
    assert vattention.num_free_kvblocks() == 2
    assert vattention.alloc_new_batch_idx(1) == -1
    cache().check_integrity()


def test_a_failed_mapping_changes_nothing(page: int) -> None:
    tensors = init(page)
    longest = tensors[0].shape[1]
    vattention.map_common_pages(0)
    for wrong in (-1, longest + 1):
        with pytest.raises(InvalidArgument, match=rf"map_common_pages\({wrong}\)"):
            vattention.map_common_pages(wrong)
    if Caps.ALIAS | Caps.READONLY not in cache().context.info.caps:
        pytest.skip("pages cannot be shared here")
    with pytest.raises(OutOfKVBlocks, match="call reserve_physical_pages"):
        vattention.map_common_pages(1)
    vattention.reserve_physical_pages(2 * LAYERS * page)
    with pytest.raises(OutOfKVBlocks, match="2 KV blocks are needed, but the cache has 1"):
        vattention.map_common_pages(page // ROW + 1)
    cache().check_integrity()
    assert cache().stats().active_slots == 0
    vattention.step([0, 3, 0, 0], False)
    with pytest.raises(Busy, match="id 1 is taken; call it once, before the first request"):
        vattention.map_common_pages(1)
    vattention.step([0, 0, 0, 0], True)
    vattention.map_common_pages(1)
    with pytest.raises(InvalidArgument, match="seq_len"):
        vattention.alloc_new_batch_idx(longest + 1)
    assert [vattention.alloc_new_batch_idx(1) for _ in range(BATCH)] == list(range(BATCH))


def test_one_id_alone(page: int) -> None:
    tensors = common(page, 2, batch=1)
    tensors[0][0, 0] = 3
    assert vattention.alloc_new_batch_idx(1) == 0
    vattention.free_batch_idx(0)
    assert bool((tensors[0][0, 0] == 3).all())
    cache().check_integrity()


def test_rows_that_cross_the_end_of_a_page_are_whole(page: int) -> None:
    """Rows of 3 heads do not divide a page, but the common pages still end with a whole row."""
    vattention.init_kvcache(2, 3, 64, 2, 8 * page // 384, 0, DTYPE, page, False)
    vattention.reserve_physical_pages(8 * 4 * page)
    if Caps.ALIAS | Caps.READONLY not in cache().context.info.caps:
        pytest.skip("pages cannot be shared here")
    vattention.map_common_pages(1)
    assert held() == 3 * 4  # lcm(384, page) is 3 pages
    cache().check_integrity()


@pytest.mark.parametrize("reqid", [0, 1])
def test_a_write_through_a_second_id_is_a_fault(reqid: int) -> None:
    program = (
        "import torch, pyvmem.compat.vattention as v\n"
        "v.configure('host')\n"
        "t = v.init_kvcache(2, 2, 64, 2, 1024, 0, torch.float16, 65536, False)\n"
        "v.reserve_physical_pages(4 << 20); v.map_common_pages(5)\n"
        f"v.step([300, 300], False); t[0][{reqid}, 4] = 1; print(float(t[0][1, 4].sum()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    if reqid:
        assert done.returncode == -signal.SIGSEGV
    else:
        assert (done.returncode, done.stdout) == (0, "128.0\n")


def test_the_rows_outlive_their_writer(page: int) -> None:
    tensors = common(page, 4)
    assert vattention.alloc_new_batch_idx(1) == 0
    tensors[1][0, 1] = 5
    vattention.free_batch_idx(0)
    assert bool((tensors[1][:, 1] == 5).all())
    info = cache().context.query(tensors[1].data_ptr())
    assert pyvmem.RangeFlags.READONLY in info.flags
    vattention.cleanup()
