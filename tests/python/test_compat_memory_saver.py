# SPDX-License-Identifier: MIT
"""The torch_memory_saver interface over VMemPool, as far as it can be tested without a GPU.

torch's CPU allocator cannot be replaced: when a test allocates in a region, `VMemPool.use` skips
torch, and the C function that torch would call allocates the block.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from test_torch_pool import Torch

import pyvmem
from pyvmem import BadHandle, Busy, InvalidArgument, NotSupported
from pyvmem.compat import torch_memory_saver as module
from pyvmem.compat.torch_memory_saver import TorchMemorySaver, configure_subprocess, install
from pyvmem.torch_pool.pool import VMemPool

pytestmark = pytest.mark.needs_tensors
PAGE = 4096


@pytest.fixture
def host() -> Iterator[pyvmem.Context]:
    with pyvmem.Context("host", granule=PAGE) as one:
        yield one


@pytest.fixture
def saver(host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchMemorySaver]:
    monkeypatch.setattr(VMemPool, "use", VMemPool._allocating)
    one = TorchMemorySaver()
    one.configure(host)
    yield one
    one.close()
    one.close()
    assert host.stats().reservations == 0


def allocate(saver: TorchMemorySaver, tag: str, backup: bool) -> torch.Tensor:
    """Allocates a tensor of 1,024 elements in a region."""
    with saver.region(tag, enable_cpu_backup=backup):
        address = Torch(0).malloc(PAGE)
    assert address is not None
    found = torch.frombuffer((ctypes.c_char * PAGE).from_address(address), dtype=torch.float32)
    return found.copy_(torch.arange(PAGE // 4))


def free(*tensors: torch.Tensor) -> None:
    for one in tensors:
        Torch(0).free(one.data_ptr(), PAGE)


def test_a_tag_with_and_without_a_backup(host: pyvmem.Context, saver: TorchMemorySaver) -> None:
    kept, lost = allocate(saver, "weights", True), allocate(saver, "weights", False)
    other = allocate(saver, "kv_cache", False)
    saver.pause("weights")
    assert host.stats().mapped_bytes == PAGE
    assert other.tolist() == list(range(PAGE // 4))
    saver.pause("weights")
    saver.pause("nobody's")
    saver.resume("kv_cache")
    saver.resume("weights")
    assert kept.tolist() == list(range(PAGE // 4))
    assert not lost.any()
    saver.pause()
    assert host.stats().mapped_bytes == 0
    saver.resume()
    assert kept.tolist() == list(range(PAGE // 4))
    assert not other.any()
    free(kept, lost, other)


@pytest.mark.parametrize("tag", ["weights", None])
def test_an_active_region_rejects_a_pause_before_anything_is_paused(
    host: pyvmem.Context, saver: TorchMemorySaver, tag: str | None
) -> None:
    """Another thread is in a region with the same tag; memory without a backup must not be lost."""
    kept, lost = allocate(saver, "weights", True), allocate(saver, "weights", False)
    first = allocate(saver, "first", False)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with saver.region("weights", enable_cpu_backup=True):
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert inside.wait(20)
    before = host.stats().mapped_bytes
    with pytest.raises(Busy, match="has a `use` block"):
        saver.pause(tag)
    assert host.stats().mapped_bytes == before
    leave.set()
    thread.join(20)
    for one in (kept, lost, first):
        assert one.tolist() == list(range(PAGE // 4))
    free(kept, lost, first)


def test_a_pause_that_fails_loses_nothing(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backups may fail when host memory is short, so they are made before any other memory is
    released.
    """
    kept, lost = allocate(saver, "a", True), allocate(saver, "a", False)

    def fails(*_: object) -> None:
        raise pyvmem.OutOfMemory("no host memory", errno=errno.ENOMEM, op="pause")

    with monkeypatch.context() as patch:
        patch.setattr(saver._pools[0]._host, "take", fails)
        with pytest.raises(pyvmem.OutOfMemory, match="no host memory"):
            saver.pause("a")
    assert kept.tolist() == lost.tolist() == list(range(PAGE // 4))
    free(kept, lost)


def test_a_tag_never_matches_another_tag(saver: TorchMemorySaver) -> None:
    kept, lost = allocate(saver, "w", True), allocate(saver, "w+backup", False)
    saver.pause("w+backup")
    assert kept.tolist() == list(range(PAGE // 4))
    saver.resume("w+backup")
    assert kept.tolist() == list(range(PAGE // 4))
    free(kept, lost)


def test_the_backup_of_a_tensor(saver: TorchMemorySaver) -> None:
    kept, lost = allocate(saver, "a", True), allocate(saver, "b", False)
    with pytest.raises(InvalidArgument, match=r"4096 bytes at 0x[0-9a-f]+ are not paused"):
        saver.get_cpu_backup(kept)
    saver.pause()
    copy = saver.get_cpu_backup(kept.view(32, 32)[2:])
    assert copy.shape == (30, 32)
    assert copy.flatten().tolist() == list(range(64, 1024))
    with pytest.raises(InvalidArgument, match=r"strides \(1, 32\)"):
        saver.get_cpu_backup(kept.view(32, 32).T)
    with pytest.raises(InvalidArgument, match="not paused with a backup"):
        saver.get_cpu_backup(lost)
    assert saver.get_cpu_backup(kept[:0]).shape == (0,)
    saver.get_cpu_backup(kept, zero_copy=True)[3] = 33.0
    assert copy.flatten()[0] == 64.0
    saver.resume()
    assert kept[:5].tolist() == [0, 1, 2, 33, 4]
    free(kept, lost)


def test_invalid_calls(host: pyvmem.Context, saver: TorchMemorySaver) -> None:
    with pytest.raises(BadHandle, match="no region has been used"):
        saver.get_cpu_backup(torch.zeros(1))
    with pytest.raises(InvalidArgument, match=r"disable\(\) outside a region"), saver.disable():
        pass
    kept = allocate(saver, "a", True)
    with saver.region("a", True):
        with pytest.raises(Busy, match="a region inside a region"), saver.region("b"):
            pass
        with pytest.raises(Busy, match="`use` block"):
            saver.pause("a")
    with pytest.raises(Busy, match="configure it before"):
        saver.configure(host)
    with pytest.raises(Busy):
        saver.close()
    saver.pause("a")
    with pytest.raises(Busy, match="is paused"), saver.region("a", True):
        pass
    saver.resume("a")
    assert kept[5] == 5.0
    free(kept)


def test_options_that_need_preloading_are_rejected_by_name() -> None:
    saver = TorchMemorySaver()
    saver.hook_mode = "torch"
    assert (saver.enabled, saver.hook_mode, saver.memory_margin_bytes) == (True, "torch", 0)
    with pytest.raises(
        NotSupported, match="hook_mode='preload', which requires a library preloaded"
    ):
        saver.hook_mode = "preload"
    with pytest.raises(NotSupported, match="memory_margin_bytes=5"):
        saver.memory_margin_bytes = 5


def test_a_subprocess_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    before = dict(os.environ)
    with configure_subprocess():
        assert dict(os.environ) == before


def test_a_graph_is_captured_and_not_paused(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, torch captures the graph; this test only checks the arguments."""
    asked: list[object] = []

    @contextmanager
    def graph(*args: object, **named: object) -> Iterator[None]:
        asked.append((args, named))
        yield
        asked.append("captured")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    with (
        pytest.warns(
            UserWarning, match=r"pause\('graphs'\) does not free the memory of this CUDA graph"
        ),
        saver.cuda_graph("one", pool=(1, 2), stream="two", tag="graphs", enable_cpu_backup=True),
    ):
        assert len(asked) == 1
    named = {"pool": (1, 2), "stream": "two", "capture_error_mode": "global"}
    assert asked == [(("one",), named), "captured"]
    saver.pause("graphs")
    saver.resume("graphs")


def test_torch_on_host_is_rejected(host: pyvmem.Context) -> None:
    saver = TorchMemorySaver()
    saver.configure(host)
    with pytest.raises(NotSupported, match="CPU allocator cannot be replaced"), saver.region():
        pass
    saver.pause()
    saver.resume()
    saver.close()


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)
    install()
    try:
        assert importlib.import_module("torch_memory_saver") is module
        install()
        monkeypatch.setitem(sys.modules, "torch_memory_saver", sys)
        with pytest.raises(Busy, match="already imported"):
            install()
    finally:
        sys.modules.pop("torch_memory_saver", None)
