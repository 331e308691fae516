# SPDX-License-Identifier: MIT
"""Description: an exception from outside at one place of calls that test_interrupts.py lacks.

Each puts a KeyboardInterrupt where CPython can run a signal's handler: at the entry of a function
that the call makes, or just after a call of C has returned. Afterwards nothing is lost: the call
can be made again, `close` closes, and contents are what they were.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
from conftest import open_context

import pyvmem
from pyvmem import Context, _native
from pyvmem import context as context_module
from pyvmem._vmem import ffi, lib

pytest.importorskip("torch")
PAGE = 4096


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def interrupted_after(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with an exception just after it has returned."""

    def called(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        raise KeyboardInterrupt

    return called


def is_open(handle: int) -> bool:
    """Whether libvmem knows a context."""
    stats = ffi.new("struct vmem_stats *")
    stats.size = ffi.sizeof(stats[0])
    return lib.vmem_get_stats(handle, stats) == 0  # type: ignore[no-any-return]


# ---- contexts ------------------------------------------------------------------------------------


def test_a_context_that_nobody_got_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = _native.open

    def noted(*args: Any, **kwargs: Any) -> int:
        opened.append(real(*args, **kwargs))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(_native, "open", noted)
        patch.setattr(_native, "query", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Context("host")
    assert len(opened) == 1
    assert not is_open(opened[0])


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_interrupted_close_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    context = Context("host")
    with monkeypatch.context() as patch:
        if place == "before":
            patch.setattr(context_module._native, "close", interrupt)
        else:
            patch.setattr(context_module._native, "close", interrupted_after(_native.close))
        with pytest.raises(KeyboardInterrupt):
            context.close()
    assert is_open(context.handle) == context.is_open == (place == "before")
    context.close()
    assert not is_open(context.handle)
    assert not context.is_open


# ---- torch's pool --------------------------------------------------------------------------------


@pytest.fixture
def malloc() -> Callable[..., int]:
    """What torch calls for a block."""
    call = ctypes.CDLL(pyvmem._vmem.__file__).vmem_malloc
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return call


def test_an_interrupted_pool_can_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyvmem import torch_pool

    with open_context("host", granule=PAGE) as context:
        with monkeypatch.context() as patch:
            real = torch_pool.torch_alloc.open
            patch.setattr(torch_pool.torch_alloc, "open", interrupted_after(real))
            with pytest.raises(KeyboardInterrupt):
                torch_pool.VMemPool(context)
        gc.collect()
        torch_pool.VMemPool(context).close()


def test_an_interrupted_use_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyvmem import torch_pool

    with open_context("host", granule=PAGE) as context, torch_pool.VMemPool(context) as pool:
        with monkeypatch.context() as patch:
            real = torch_pool.torch_alloc.set_tag
            answers = [interrupt]
            patch.setattr(
                torch_pool.torch_alloc, "set_tag", lambda tag: (answers or [real]).pop()(tag)
            )
            with pytest.raises(KeyboardInterrupt), pool._allocating("a"):
                pass
        assert pool.pause("a") == 0
        pool.resume("a")


def test_an_interrupted_close_of_a_pool_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyvmem import torch_pool

    with open_context("host", granule=PAGE) as context:
        pool = torch_pool.VMemPool(context)
        with monkeypatch.context() as patch:
            patch.setattr(torch_pool.HostMemory, "drop", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.close()
        with pytest.raises(pyvmem.BadHandle, match="closed"):
            pool.pause("a")
        pool.close()
        context.close()  # not Busy
        assert not is_open(context.handle)


def test_what_an_interrupted_pause_saved_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, malloc: Callable[..., int]
) -> None:
    from pyvmem import torch_pool, torch_tags

    with open_context("host", granule=PAGE) as context:
        pool = torch_pool.VMemPool(context)
        blocks = {}
        for tag, byte in (("weights", 7), ("kv", 9)):
            with pool._allocating(tag):
                blocks[tag] = malloc(PAGE, 0, None)
            ctypes.memset(blocks[tag], byte, PAGE)
        with monkeypatch.context() as patch:
            real = torch_tags.torch_alloc.pause
            patch.setattr(torch_tags.torch_alloc, "pause", interrupted_after(real))
            with pytest.raises(KeyboardInterrupt):
                pool.pause("weights")
        assert "weights" in pool.paused
        pool.pause("kv")
        pool.drop_host()
        pool.resume("kv")
        pool.resume("weights")
        assert context.read(blocks["weights"], PAGE) == bytes([7]) * PAGE
        assert context.read(blocks["kv"], PAGE) == bytes([9]) * PAGE
        free = ctypes.CDLL(pyvmem._vmem.__file__).vmem_free
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        for block in blocks.values():
            free(block, PAGE, 0, None)
        pool.close()


def test_an_interrupted_saver_closes_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyvmem.compat import torch_memory_saver as module

    made: list[Context] = []
    real = module.Context

    def opened(*_: Any) -> Context:
        made.append(real("host"))
        return made[-1]

    monkeypatch.setattr(module, "Context", opened)
    monkeypatch.setattr(module.VMemPool, "use", module.VMemPool._allocating)
    saver = module.TorchMemorySaver()
    with saver.region():
        pass
    with monkeypatch.context() as patch:
        patch.setattr(module.TorchMemorySaver, "_close_own", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.close()
    saver.close()
    assert [one.is_open for one in made] == [False]
    with saver.region():
        pass
    saver.close()
    assert [one.is_open for one in made] == [False, False]


# ---- vAttention's functions ----------------------------------------------------------------------


def test_an_interrupted_init_kvcache_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from pyvmem.compat import _manager, vattention

    arguments = (2, 2, 64, 4, 64, 0, torch.float32, PAGE)
    made: list[Context] = []
    real = _manager.Context

    def opened(*args: Any, **kwargs: Any) -> Context:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(_manager, "Context", opened)
    vattention.configure("host")
    with monkeypatch.context() as patch:
        patch.setattr(_manager.Manager, "tensors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            vattention.init_kvcache(*arguments)
    _manager.close_retired()
    assert [one.is_open for one in made] == [False]
    tensors = vattention.init_kvcache(*arguments)
    assert tensors
    del tensors
    vattention.cleanup()
    assert [one.is_open for one in made] == [False, False]


def test_interrupted_common_pages_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from pyvmem.compat import _manager, vattention

    vattention.configure("host")
    tensors = vattention.init_kvcache(2, 2, 64, 4, 64, 0, torch.float32, PAGE)
    vattention.reserve_physical_pages(1 << 20)
    with monkeypatch.context() as patch:
        real = _manager.KVCache.map_common_pages
        patch.setattr(_manager.KVCache, "map_common_pages", interrupted_after(real))
        with pytest.raises(KeyboardInterrupt):
            vattention.map_common_pages(8)
    vattention.map_common_pages(8)
    assert vattention.alloc_new_batch_idx(5) >= 0
    del tensors
    vattention.cleanup()
