# SPDX-License-Identifier: MIT
"""A call that is interrupted or fails during its cleanup loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvcache_helpers import eventually

from pyvmem import Context, DriverError, KVCache, TooManyMappings
from pyvmem.kvcache import Budget, KVCacheConfig, LayeredCache, LayerShape, growth
from pyvmem.kvcache import cache as cache_module
from pyvmem.kvcache.group import Group
from pyvmem.memory.pages import Pages
from pyvmem.memory.reservation import Reservation

LENGTH = 1024


def config(**options: Any) -> KVCacheConfig:
    return KVCacheConfig(2, 2, 64, max_batch=4, max_seq_len=4 * LENGTH, **options)


def started(cache: KVCache | LayeredCache) -> int:
    """Starts a request of `LENGTH` rows and returns its reqid."""
    reqid = cache.alloc_reqid()
    assert reqid is not None
    lens = [0] * 4
    lens[reqid] = LENGTH
    assert cache.step(lens) == 0
    return reqid


def interrupt(patch: pytest.MonkeyPatch, owner: type, name: str, at: int = 1) -> list[int]:
    """Raises KeyboardInterrupt in the `at`-th call to a method; returns a list whose only element
    counts the calls.
    """
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def method(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return original(self, *args)

    patch.setattr(owner, name, method)
    return calls


def test_swap_in_that_evicts_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts the drop of a handle's last pages, which happens when the prefix is evicted."""
    with KVCache(config(memory_limit=1 << 20), backend="host") as cache:
        reqid = started(cache)
        swapped = cache.swap_out(reqid)
        cache.free_reqid(started(cache), tokens=list(range(LENGTH)))
        with monkeypatch.context() as patch:
            calls = interrupt(patch, Pages, "abandon")
            with pytest.raises(KeyboardInterrupt):
                cache.swap_in(swapped)
        assert calls[0] > 0
        assert cache.step([0] * 4) == 0
        assert swapped.is_open
        assert not any(slot.active for slot in cache._groups[0].table)
        cache.check_integrity()
        assert cache.swap_in(swapped) is not None


def test_a_cache_whose_creation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(cache_module.IdleThread):
        def start(self) -> None:
            raise RuntimeError("no more threads")

    with Context("host") as context, Budget(context, 64 << 20) as budget:
        monkeypatch.setattr(cache_module, "IdleThread", Thread)
        interrupt(monkeypatch, Reservation, "abandon")
        with pytest.raises(KeyboardInterrupt):
            KVCache(config(idle_seconds=1.0), budget=budget)
        monkeypatch.undo()
        budget.set_limit(32 << 20)
        assert not list(context.reservations())


def test_unmaps_of_a_freed_request_that_had_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with LayeredCache(
        [LayerShape(2, 64), LayerShape(4, 64)],
        backend="host",
        max_batch=4,
        max_seq_len=4 * LENGTH,
        deferred_reclaim=False,
    ) as cache:
        reqid = started(cache)
        with monkeypatch.context() as patch:
            interrupt(patch, Group, "reclaim_idle", at=2)
            with pytest.raises(KeyboardInterrupt):
                cache.free_reqid(reqid)
        assert not any(slot.active for slot in cache._groups[0].table)
        eventually(lambda: cache.step([0] * 4) == 0 == cache.stats().mapped_bytes)


def test_a_slot_when_eager_pages_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request gets its slot; the next step raises the earlier failure."""
    with KVCache(config(eager_pages=2), backend="host") as cache:
        group = cache._groups[0]
        group.pager.settle()
        group.reclaimer.errors.append(DriverError("an earlier unmap failed", errno=5))
        with monkeypatch.context() as patch:
            patch.setattr(growth, "_begin", lambda *_, **__: TooManyMappings("full", errno=28))
            reqid = cache.alloc_reqid()
        assert reqid is not None
        with pytest.raises(DriverError, match="an earlier unmap failed"):
            cache.step([0] * 4)
        cache.free_reqid(reqid)
        assert not any(slot.active for slot in cache._groups[0].table)
