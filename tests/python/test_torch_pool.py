# SPDX-License-Identifier: MIT
"""Tests torch's allocator interface through the C symbols that torch calls, without a GPU.

On a GPU back end, these tests use plain addresses; tests/gpu tests torch itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pyvmem
from pyvmem import Inject, _vmem
from pyvmem._native import torch_alloc
from pyvmem.torch_pool.host import HostMemory
from pyvmem.torch_pool.pool import VMemPool

SEGMENT = 20 << 20  # torch requests this for tensors of 1 MiB or more


class Torch:
    """Calls the two symbols with the signatures that torch uses."""

    def __init__(self, device: int) -> None:
        library = ctypes.CDLL(_vmem.__file__)
        self._malloc, self._free = library.vmem_malloc, library.vmem_free
        self._malloc.restype = ctypes.c_void_p
        self._malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.restype = None
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.device = device

    def malloc(self, size: int, device: int | None = None) -> int | None:
        where = self.device if device is None else device
        address: int | None = self._malloc(size, where, None)
        return address

    def free(self, address: int | None, size: int = 0) -> None:
        self._free(address, size, self.device, None)


@pytest.fixture
def pool(context: pyvmem.Context) -> Iterator[VMemPool]:
    one = VMemPool(context)
    yield one
    one.close()
    stats = context.stats()
    assert (stats.mapped_bytes, stats.used_bytes, stats.reservations) == (0, 0, 0)


@pytest.fixture
def torch(pool: VMemPool) -> Torch:
    return Torch(pool._device)


def test_memory_is_zeroed_and_freed(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    first, second = torch.malloc(3 * page - 5), torch.malloc(SEGMENT)
    assert first is not None
    assert second is not None
    assert context.read(first, 3 * page) == bytes(3 * page)
    assert context.query(first).nbytes == 3 * page
    context.write(first, b"first")
    context.write(second, b"other")
    now = pool.stats()
    assert (now.blocks, now.mapped_bytes, now.mallocs) == (2, 3 * page + SEGMENT, 2)
    assert context.stats().mapped_bytes == 3 * page + SEGMENT
    torch.free(first)
    assert context.read(second, 5) == b"other"
    torch.free(second)
    again = torch.malloc(3 * page)
    assert again is not None
    assert context.read(again, 5) == bytes(5)
    torch.free(again)
    now = pool.stats()
    assert (now.blocks, now.mapped_bytes, now.frees, now.failures) == (0, 0, 3, 0)


def test_invalid_frees_are_counted_and_change_nothing(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    block = torch.malloc(2 * page)
    assert block is not None
    torch.free(None)  # does nothing, like free(NULL)
    torch.free(block + page, 7)
    now = pool.stats()
    assert now.failures == 1
    assert f"{block + page:#x}, 7 bytes" in now.last_error
    assert "no block begins there" in now.last_error
    torch.free(block)
    torch.free(block)
    now = pool.stats()
    assert (now.failures, now.frees) == (2, 1)
    assert "freed before" in now.last_error
    context.check()


class Primary:
    """Stands in for a device's primary context and CUDA's functions; `current` is the thread's
    context.
    """

    handle = 77

    def __init__(self) -> None:
        self.current = threading.local()
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.functions = {
            "cuCtxPushCurrent_v2": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.push),
            "cuCtxSynchronize": ctypes.CFUNCTYPE(ctypes.c_int)(self.synchronize),
            "cuCtxPopCurrent_v2": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.pop),
        }

    def address(self, function: str) -> int:
        return ctypes.cast(self.functions[function], ctypes.c_void_p).value or 0

    def push(self, context: int) -> int:
        self.calls.append("push")
        if "push" not in self.fails:
            self.current.context = context
        return self.fails.get("push", 0)

    def synchronize(self) -> int:
        self.calls.append("synchronize")
        current = getattr(self.current, "context", None)
        return self.fails.get("synchronize", 0) if current == self.handle else 201

    def pop(self, _: int) -> int:
        self.calls.append("pop")
        self.current.context = None
        return 0


def test_a_free_in_a_thread_without_a_current_context(host: pyvmem.Context) -> None:
    """Simulates a thread that made no CUDA calls and drops the last reference to a tensor."""
    primary, page = Primary(), host.info.granule
    torch_alloc.open(0, host.handle, page, 0, primary)
    try:
        torch = Torch(0)
        block = torch.malloc(page)
        for what, code in (("push", 2), ("synchronize", 700)):
            primary.fails = {what: code}
            torch.free(block)
            said = _vmem.ffi.string(torch_alloc.stats(0, torch_alloc.ALL).error).decode()
            assert f"returned {code}; the memory stays mapped" in said
            assert host.stats().mapped_bytes == page
        primary.fails.clear()
        primary.calls.clear()
        thread = threading.Thread(target=torch.free, args=(block,))
        thread.start()
        thread.join()
        assert primary.calls == ["push", "synchronize", "pop"]
        assert host.stats().mapped_bytes == 0
    finally:
        torch_alloc.close(0)


@pytest.mark.parametrize("again", ["malloc", "free", "pause", "resume", "close"])
def test_a_failed_free_is_retried(context: pyvmem.Context, page: int, again: str) -> None:
    """torch frees a block only once, so the pool must retry."""
    pool = VMemPool(context)
    torch = Torch(pool._device)
    with pool._allocating("a"):
        lost, other = torch.malloc(page), torch.malloc(page)
    context.inject(Inject.HEAP)
    torch.free(lost)
    context.inject(Inject.HEAP, count=0)
    assert pool.stats().failures == 1
    assert context.stats().mapped_bytes == 2 * page
    if again == "malloc":
        torch.free(torch.malloc(page))
    elif again == "pause":
        pool.pause("a")
    elif again == "resume":
        pool.resume("a")
    torch.free(other)
    pool.close()
    assert (context.stats().mapped_bytes, context.stats().reservations) == (0, 0)


def test_exhaustion_returns_null_and_logs_why(backend: str, page: int) -> None:
    context = pyvmem.Context(backend, granule=page, mem_limit=4 * SEGMENT)
    with context, VMemPool(context) as pool:
        torch = Torch(pool._device)
        blocks = []
        while (block := torch.malloc(SEGMENT)) is not None:
            blocks.append(block)
            assert len(blocks) <= 4
        assert blocks
        now = pool.stats()
        assert now.failures == 1
        assert f"vmem_malloc(0, {SEGMENT} bytes)" in now.last_error
        assert "limit" in now.last_error
        torch.free(blocks.pop())
        blocks.append(torch.malloc(SEGMENT))
        assert blocks[-1] is not None
        for block in blocks:
            torch.free(block)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "size"), (-1, "size"), ((1 << 63) - 1, "size"), (1 << 60, "")]
)
def test_impossible_sizes(pool: VMemPool, torch: Torch, size: int, text: str) -> None:
    assert torch.malloc(size) is None
    assert pool.stats().failures == 1
    assert text in pool.stats().last_error.split("):", 1)[1]


def test_devices_without_a_pool(context: pyvmem.Context, pool: VMemPool, torch: Torch) -> None:
    for device in (-1, 16, 15):
        assert torch.malloc(SEGMENT, device) is None
    assert "no VMemPool is open" in pyvmem._native.text_of(
        torch_alloc.stats(15, torch_alloc.ALL).error
    )
    with pytest.raises(pyvmem.Busy, match="open VMemPool already"):
        VMemPool(context)
    assert pool.stats().failures == 0
    with pytest.raises(pyvmem.InvalidArgument, match="device 16"):
        torch_alloc.stats(16, 0)


@pytest.mark.parametrize("keep", [True, False])
def test_pause_and_resume_keep_addresses(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int, keep: bool
) -> None:
    with pool._allocating("weights"):
        weights = [torch.malloc(SEGMENT), torch.malloc(5 * page)]
    with pool._allocating("cache"):
        cache = torch.malloc(SEGMENT)
    for number, block in enumerate([*weights, cache]):
        assert block is not None
        context.fill(block, 5 * page, number + 1)
    slabs = context.stats().slab_bytes
    given = pool.pause("weights", keep=keep)
    assert given == slabs - context.stats().slab_bytes
    assert pool.paused == {"weights"}
    now = pool.stats("weights")
    assert (now.blocks, now.mapped_bytes) == (2, 0)
    assert now.paused_bytes == SEGMENT + 5 * page
    assert now.saved_bytes == (now.paused_bytes if keep else 0)
    assert context.stats().used_bytes == SEGMENT
    for block in weights:
        with pytest.raises(pyvmem.NotMapped):
            context.read(block, 1)
    assert context.read(cache, page) == b"\3" * page
    with pytest.raises(pyvmem.Busy, match="'weights' is paused"):
        pool._allocating("weights").__enter__()
    other = context.create(SEGMENT)  # another owner uses the memory in between
    scratch = context.reserve(SEGMENT)
    scratch.map(0, other)
    scratch.fill(0, SEGMENT, 9)
    other.release()
    scratch.close()
    assert pool.resume("weights") == SEGMENT + 5 * page
    assert pool.paused == frozenset()
    assert pool.stats().paused_bytes == pool.stats().saved_bytes == 0
    for number, block in enumerate(weights):
        want = number + 1 if keep else 0
        assert context.read(block, 5 * page) == bytes([want]) * (5 * page)
    assert context.read(weights[0] + SEGMENT - page, page) == bytes(page)
    for block in [*weights, cache]:
        torch.free(block)


def test_all_tags_and_repeated_calls(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    assert pool.pause() == 0
    blocks = {}
    for tag in ("a", "b"):
        with pool._allocating(tag):
            blocks[tag] = torch.malloc(page)
            context.write(blocks[tag], tag.encode())
    pool.pause("a")
    pool.pause()
    pool.pause()  # nothing is left to pause
    assert pool.paused == {"a", "b"}
    assert pool.stats().saved_bytes == 2 * page
    assert pool.resume() == 2 * page
    assert pool.resume() == 0
    for tag, block in blocks.items():
        assert context.read(block, 2) == tag.encode() + b"\0"
        torch.free(block)


def test_several_tags_with_their_own_keep(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    blocks = {}
    for tag in ("a", "b", "c"):
        with pool._allocating(tag):
            blocks[tag] = torch.malloc(page)
            context.write(blocks[tag], tag.encode())
    wrong: Any
    for wrong in ({"a": False, "none": True}, {None: False}, ["a"], 5, b"a"):
        with pytest.raises(
            pyvmem.InvalidArgument, match="was never used; existing tags: 'a', 'b', 'c'"
        ):
            pool.pause(wrong)
    assert pool.pause({}) == 0
    assert pool.paused == set()
    pool.pause({"a": True, "b": False})
    assert pool.paused == {"a", "b"}
    assert pool.resume() == 2 * page
    for tag, kept in (("a", b"a"), ("b", b"\0"), ("c", b"c")):
        assert context.read(blocks[tag], 1) == kept
        torch.free(blocks[tag])


def test_a_block_freed_while_paused_stays_freed(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    with pool._allocating("t"):
        first, second = torch.malloc(page), torch.malloc(page)
    context.write(second, b"kept")
    pool.pause("t")
    torch.free(first)
    assert pool.stats("t").saved_bytes == page
    assert pool.resume("t") == page
    assert context.read(second, 4) == b"kept"
    torch.free(second)
    assert pool.stats().failures == 0


def test_blocks_added_by_another_thread_are_paused_too(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int, monkeypatch: Any
) -> None:
    """If a segment appears between counting and pausing, the host buffer is allocated again."""
    with pool._allocating("t"):
        blocks = [torch.malloc(page)]
    real = torch_alloc.pause

    def late(device: int, tag: int, save: Any, *rest: Any) -> None:
        if len(blocks) == 1:
            before = torch_alloc.set_tag(tag)
            blocks.append(torch.malloc(page))
            torch_alloc.set_tag(before)
            context.write(blocks[1], b"late")
        real(device, tag, save)

    monkeypatch.setattr(torch_alloc, "pause", late)
    pool.pause("t")
    assert pool.stats("t").saved_bytes == 2 * page
    pool.resume("t")
    assert context.read(blocks[1], 4) == b"late"
    for block in blocks:
        torch.free(block)


def test_tags_are_per_thread(pool: VMemPool, torch: Torch, page: int) -> None:
    blocks: list[int | None] = []
    with pool._allocating("outer"):
        thread = threading.Thread(target=lambda: blocks.append(torch.malloc(page)))
        thread.start()
        thread.join()
        with pool._allocating("inner"):
            blocks.append(torch.malloc(page))
        blocks.append(torch.malloc(page))
    assert pool.stats("inner").blocks == pool.stats("outer").blocks == 1
    assert pool.stats().blocks == 3
    for block in blocks:
        torch.free(block)


def test_pause_within_a_block_is_rejected(pool: VMemPool, torch: Torch, page: int) -> None:
    with pool._allocating("t"):
        block = torch.malloc(page)
        with pytest.raises(pyvmem.Busy, match="'t' has a `use` block"):
            pool.pause()
        with pytest.raises(pyvmem.Busy, match="`use` block is active"):
            pool.close()
    torch.free(block)
    for call in (pool.pause, pool.resume, pool.stats):
        with pytest.raises(
            pyvmem.InvalidArgument, match=r"'none' was never used; existing tags: 't'"
        ):
            call("none")


def test_a_failed_pause_or_resume_changes_nothing(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    with pool._allocating("t"):
        blocks = [torch.malloc(page) for _ in range(3)]
    for number, block in enumerate(blocks):
        context.fill(block, page, number + 1)
    context.inject(Inject.UNMAP, skip=1)
    with pytest.raises(pyvmem.DriverError):
        pool.pause("t")
    context.inject(Inject.UNMAP, count=0)
    assert pool.paused == frozenset()
    assert pool.stats().mapped_bytes == 3 * page
    assert [context.read(block, 1)[0] for block in blocks] == [1, 2, 3]
    pool.pause("t")
    context.inject(Inject.MAP, skip=1)
    with pytest.raises(pyvmem.DriverError):
        pool.resume("t")
    context.inject(Inject.MAP, count=0)
    assert pool.paused == {"t"}
    assert pool.stats().saved_bytes == 3 * page
    assert context.stats().mapped_bytes == 0
    pool.resume("t")
    assert [context.read(block, 1)[0] for block in blocks] == [1, 2, 3]
    for block in blocks:
        torch.free(block)


def test_resume_without_memory_can_be_retried(backend: str, page: int) -> None:
    context = pyvmem.Context(backend, granule=page, mem_limit=4 * SEGMENT)
    with context, VMemPool(context) as pool:
        torch = Torch(pool._device)
        with pool._allocating("t"):
            block = torch.malloc(2 * SEGMENT)
        context.write(block, b"kept")
        pool.pause()
        rest = []
        while True:
            try:
                rest.append(context.create(SEGMENT))
            except pyvmem.OutOfMemory:
                break
        with pytest.raises(pyvmem.OutOfMemory):
            pool.resume()
        assert pool.paused == {"t"}
        for pages in rest:
            pages.release()
        pool.resume()
        assert context.read(block, 4) == b"kept"
        torch.free(block)


def test_host_memory_that_does_not_exist(
    pool: VMemPool, torch: Torch, page: int, monkeypatch: Any
) -> None:
    with pool._allocating("t"):
        block = torch.malloc(page)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refuse)
        with pytest.raises(pyvmem.OutOfMemory, match=f"no host memory for {page} bytes"):
            pool.pause()
    assert pool.stats().mapped_bytes == page
    torch.free(block)


def test_close(context: pyvmem.Context, page: int) -> None:
    pool = VMemPool(context)
    torch = Torch(pool._device)
    block = torch.malloc(page)
    with pytest.raises(pyvmem.Busy, match=f"1 blocks of the pool .{page} bytes"):
        pool.close()
    with pytest.raises(pyvmem.Busy, match="alive"):
        context.close()
    torch.free(block)
    pool.close()
    pool.close()
    for call in (pool.pause, pool.resume, pool.stats):
        with pytest.raises(pyvmem.BadHandle, match="VMemPool is closed"):
            call()
    assert torch.malloc(page) is None
    with VMemPool(context) as again:  # the device accepts another pool
        assert again.stats().mallocs == 0
    assert context.stats().reservations == 0


def test_a_dropped_pool_warns(context: pyvmem.Context) -> None:
    pool = VMemPool(context)
    with pytest.warns(ResourceWarning, match="VMemPool was not closed"):
        pool.__del__()
    pool.close()


def test_use_needs_a_gpu(host: pyvmem.Context) -> None:
    with VMemPool(host) as pool:
        block = pool.use("t")
        with pytest.raises(pyvmem.NotSupported, match="CPU allocator"):
            block.__enter__()


def test_random_segments_against_a_model(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    """Random mallocs, frees, pauses and resumes; every block must have the contents that the model
    predicts."""
    chance = random.Random(5)
    tags = ("a", "b", "c")
    blocks: dict[int, tuple[str, int, int]] = {}  # address: tag, pages, byte
    for _ in range(300):
        pick, tag = chance.random(), chance.choice(tags)
        if pick < 0.4 and tag not in pool.paused:
            with pool._allocating(tag):
                count = chance.randint(1, 4)
                block = torch.malloc(count * page)
            assert block is not None
            assert context.read(block, count * page) == bytes(count * page)
            value = chance.randint(1, 255)
            context.fill(block, count * page, value)
            blocks[block] = (tag, count, value)
        elif pick < 0.6 and blocks:
            block = chance.choice(list(blocks))
            torch.free(block)
            del blocks[block]
        elif pick < 0.8 and any(tag == one for one, _, _ in blocks.values()):
            keep = chance.random() < 0.6
            live = tag not in pool.paused
            pool.pause(tag, keep=keep)
            if live and not keep:
                for block, (one, count, _) in blocks.items():
                    if one == tag:
                        blocks[block] = (one, count, 0)
        elif pool.paused:
            pool.resume(chance.choice(sorted(pool.paused)))
        for block, (one, count, value) in blocks.items():
            if one not in pool.paused:
                assert context.read(block, count * page) == bytes([value]) * (count * page)
    pool.resume()
    for block in blocks:
        torch.free(block)
    assert pool.stats().failures == 0


def test_saved_contents_can_be_read(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    with pool._allocating("kept"):
        first, second = torch.malloc(page), torch.malloc(3 * page)
    with pool._allocating("lost"):
        lost = torch.malloc(page)
    assert first is not None
    assert second is not None
    assert lost is not None
    context.write(first, b"first")
    context.write(second + page, b"second")
    assert pool.saved(first, page) is None, "no memory is paused"
    pool.pause("kept")
    pool.pause("lost", keep=False)
    assert pool.saved(lost, page) is None
    assert pool.saved(first, 4 * page) is None, "the range is larger than the segment"
    view = pool.saved(second + page, 6)
    assert view is not None
    assert bytes(view) == b"second"
    view[:6] = b"SECOND"
    pool.resume()
    assert context.read(second + page, 6) == b"SECOND"
    assert context.read(first, 5) == b"first"
    assert pool.saved(first, page) is None
    assert bytes(view) == b"SECOND", "the view outlives the saved contents"
    for block in (first, second, lost):
        torch.free(block)


def allocated(torch: Torch, pool: VMemPool, tag: str, size: int) -> int:
    with pool._allocating(tag):
        block = torch.malloc(size)
    assert block is not None
    return block


def saved_at(pool: VMemPool, block: int) -> int:
    at = torch_alloc.saved(pool._device, block, 1)
    assert at
    return at


def test_host_memory_is_kept_for_the_next_pause(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    block = allocated(torch, pool, "t", 3 * page)
    places = set()
    for value in range(1, 4):
        context.fill(block, 3 * page, value)
        pool.pause()
        places.add(saved_at(pool, block))
        assert pool.stats().host_bytes == 3 * page
        assert pool.drop_host() == 0, "saved contents are not spare memory"
        pool.resume()
        assert context.read(block, 3 * page) == bytes([value]) * (3 * page)
        assert pool.stats().host_bytes == 3 * page
    assert len(places) == 1
    assert pool.drop_host() == 3 * page
    assert pool.drop_host() == pool.stats().host_bytes == 0
    torch.free(block)


def test_host_memory_is_as_large_as_the_largest_save(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    small, large = allocated(torch, pool, "s", page), allocated(torch, pool, "l", 4 * page)
    context.write(small, b"small")
    context.write(large, b"large")
    for tags, held in (("s", 1), ("l", 4), ("s", 4), ("ls", 5), ("sl", 5), ("l", 5)):
        for tag in tags:
            pool.pause(tag)
        pool.resume()
        assert pool.stats().host_bytes == held * page
        assert context.read(small, 5) == b"small"
        assert context.read(large, 5) == b"large"
    for block in (small, large):
        torch.free(block)


def test_viewed_host_memory_is_not_reused(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    block = allocated(torch, pool, "t", page)
    context.write(block, b"old")
    pool.pause()
    view = pool.saved(block, page)
    assert view is not None
    part, first = view[1:3], saved_at(pool, block)
    del view
    pool.resume()
    assert pool.stats().host_bytes == 0
    context.write(block, b"new")
    pool.pause()
    assert saved_at(pool, block) != first
    assert bytes(part) == b"ld"
    pool.resume()
    del part
    assert pool.stats().host_bytes == page
    torch.free(block)


def test_a_failed_pause_keeps_its_host_memory(
    context: pyvmem.Context, pool: VMemPool, torch: Torch, page: int
) -> None:
    block = allocated(torch, pool, "t", page)
    context.inject(Inject.UNMAP)
    with pytest.raises(pyvmem.DriverError):
        pool.pause()
    assert pool.stats().host_bytes == page
    pool.pause()
    assert pool.stats().host_bytes == page
    pool.resume()
    torch.free(block)
    pool.close()
    assert pool._host.bytes == 0


class Libcuda:
    """Stands in for libcuda's calls that lock host memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.locked: dict[int, int] = {}
        self.current: int | None = 7  # another owner's context
        self.retained = 0

    def cuDeviceGet(self, number: Any, ordinal: int) -> int:
        number._obj.value = ordinal + 40
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        assert number.value == 40
        self.retained += 1
        context._obj.value = 140
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, number: Any) -> int:
        self.retained -= 1
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        assert (self.current, self.retained) == (140, 1)
        assert flags.value == 3
        if self.code == 0:
            self.locked[address.value] = size.value
        return self.code

    def cuMemHostUnregister(self, address: Any) -> int:
        assert (self.current, self.retained) == (140, 1)
        del self.locked[address.value]
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_locked_blocks(monkeypatch: Any, caplog: Any, code: int) -> None:
    """Blocks that cannot be locked must still be usable."""
    cuda = Libcuda(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    host = HostMemory(0)
    first = host.take(8192)
    assert cuda.locked == ({first.address: 8192} if code == 0 else {})
    assert host.locked_bytes == (8192 if code == 0 else 0)
    assert ("cuMemHostRegister_v2 returned 2" in caplog.text) == (code == 2)
    # Log records may be kept forever, and an error in a record would keep its callers' frames and
    # their tensors alive.
    kept = [one for record in caplog.records for one in record.args or ()]
    assert not any(isinstance(one, BaseException) for one in kept)
    view = first.view(8, 4)
    view[:] = b"abcd"
    assert first.memory[8:12] == b"abcd"
    host.give(first)
    assert not cuda.locked, "a viewed block must be unlocked, although its memory lives on"
    del first
    assert bytes(view) == b"abcd"
    second = host.take(4096)
    host.give(second)
    third = host.take(8192)
    del second
    assert list(cuda.locked) == ([third.address] if code == 0 else [])
    assert host.bytes == 8192
    monkeypatch.setattr(os, "getpid", lambda: -1)
    third.unlock()  # unlocks nothing, as in a forked child
    assert bool(cuda.locked) == (code == 0)
    assert (cuda.current, cuda.retained) == (7, 0)
