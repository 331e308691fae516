# SPDX-License-Identifier: MIT
"""Checks that a new object closes libvmem objects of its kind whose Python owners were lost."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
from kvcache_helpers import small_config
from test_torch_pool import Torch

from pyvmem import BadHandle, Busy, Context, KVCache, VMemError, _native
from pyvmem._native import boundary
from pyvmem.torch_pool.pool import VMemPool

PAGE = 4096


def is_open(handle: int) -> bool:
    try:
        _native.get_stats(handle)
    except BadHandle:
        return False
    return True


def lose(make: Callable[[], Context]) -> int:
    """Creates a context and drops it without closing; returns its handle."""
    handle = make().handle
    gc.collect()
    assert is_open(handle), "a finalizer must not call C"
    Context("host").close()
    return handle


@pytest.fixture(autouse=True, params=["ignore", "error"])
def warned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test with ResourceWarning ignored, and again with it raised as an error."""
    # pytest's own hook would keep the objects alive
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter(request.param, ResourceWarning)
        yield


@pytest.mark.parametrize("left", ["nothing", "a reservation", "pages"])
def test_a_context_is_closed_if_nothing_is_in_it(left: str) -> None:
    def make() -> Context:
        context = Context("host", granule=PAGE)
        if left == "a reservation":
            context.reserve(PAGE).leave()
        if left == "pages":
            context.create(PAGE)._done = True  # otherwise their finalizer warns
        return context

    handle = lose(make)
    assert is_open(handle) == (left != "nothing")
    if left != "nothing":
        _native.close(handle)


def test_any_number_of_contexts_can_be_dropped() -> None:
    for _ in range(300):
        Context("host", granule=PAGE)


@pytest.mark.parametrize("called", [False, True])
def test_an_unused_cache_ends_with_its_context(called: bool) -> None:
    """Covers a caller that was interrupted before it received the cache."""

    def make() -> Context:
        cache = KVCache(small_config(PAGE), backend="host")
        if called:
            cache.stats()
        return cache.context

    handle = lose(make)
    assert is_open(handle) == called
    if called:
        _native.close(handle)


def test_a_pool_is_closed_unless_it_was_used() -> None:
    with Context("host", granule=PAGE) as context:
        VMemPool(context)
        gc.collect()
        pool = VMemPool(context)
        assert context.stats().reservations == 1
        with pool._allocating("a"):
            block = Torch(0).malloc(PAGE)
        remains = pool._remains
        del pool
        gc.collect()
        with pytest.raises(Busy, match="open VMemPool"):
            VMemPool(context)
        Torch(0).free(block)
        remains.used = False
        remains.end()
        assert not context.stats().reservations
        VMemPool(context).close()


def test_a_failed_call_reports_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are collected between the failing call and the query for its error."""

    def failed(context: Context) -> VMemError:
        with pytest.raises(VMemError) as caught:
            context.create(1 << 30)
        return caught.value

    sized = boundary.sized

    def collecting(*args: object, **fields: object) -> object:
        gc.collect()
        return sized(*args, **fields)

    with Context("host", granule=PAGE, mem_limit=1 << 20) as context:
        right = failed(context)
        lost = Context("host", granule=PAGE), VMemPool(context)
        for one in lost:
            one.itself = one  # type: ignore[union-attr]
        del one, lost
        monkeypatch.setattr(boundary, "sized", collecting)
        wrong = failed(context)
    assert (type(wrong), str(wrong), wrong.op, wrong.bytes, wrong.limit) == (
        *(type(right), str(right), right.op, right.bytes, right.limit),
    )


def test_a_resurrected_context_can_be_closed() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        Context("host", granule=PAGE)
        gc.collect()
    (context,) = (one.source for one in seen)
    Context("host").close()
    context.close()
    context.close()
    assert not context.is_open


def test_a_forked_child_ends_no_object() -> None:
    handle = Context("host", granule=PAGE).handle
    child = os.fork()
    if not child:
        Context("host").close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert is_open(handle)
    Context("host").close()
    assert not is_open(handle)
