# SPDX-License-Identifier: MIT
"""Tests the functions for plug-ins: claiming slots, changing the limit, reclaiming idle pages."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    lens,
    rows_are_zero,
    small_cache,
    small_config,
    stamp,
    state,
)

from pyvmem import BadHandle, Context, FdEvent, InvalidArgument, KVCache
from pyvmem.kvcache import Budget, LayeredCache, LayerShape

TENSORS = 2 * LAYERS


def test_a_claimed_slot_behaves_like_an_allocated_one(context: Context) -> None:
    with small_cache(context) as cache:
        cache.slots.claim(2)
        assert cache.step(lens(cache, r2=ROWS)) == 0
        stamp(cache, 2, 0, ROWS, 3.0)
        before = state(cache)
        for reqid, text in ((2, "reqid 2 is taken"), (4, "reqid 4 is not between 0 and 3")):
            with pytest.raises(InvalidArgument, match=text):
                cache.slots.claim(reqid)
        assert state(cache) == before
        assert sorted(cache.alloc_reqid() or 0 for _ in range(3)) == [0, 1, 3]
        assert cache.alloc_reqid() is None
        cache.free_reqid(2)
        cache.slots.claim(2)
        assert cache.step(lens(cache, r2=1)) == 0
        assert rows_are_zero(cache, 2, 0, 1)


def test_a_limit_can_be_changed_but_not_below_what_is_held(context: Context) -> None:
    with small_cache(context) as cache:
        cache.slots.claim(0)
        cache.memory.set_limit(2 * TENSORS)
        assert cache.memory.num_free_pages == 2 * TENSORS
        assert cache.step(lens(cache, r0=3 * ROWS)) == -1
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        with pytest.raises(InvalidArgument, match=f"a limit of {2 * TENSORS - 1} pages"):
            cache.memory.set_limit(2 * TENSORS - 1)
        for pages in (-1, 1 << 70, 7.0):
            with pytest.raises(InvalidArgument, match=r"pages is|pages must"):
                cache.memory.set_limit(pages)  # type: ignore[arg-type]
        cache.memory.set_limit(3 * TENSORS)
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0


def test_close_after_an_invalid_descriptor(context: Context) -> None:
    with small_cache(context) as cache:
        cache.slots.claim(0)
        assert cache.step(lens(cache, r0=1)) == 0
        with pytest.raises(BadHandle):
            cache.close(FdEvent(1 << 20))
        assert cache.step(lens(cache, r0=2)) == 0
        cache.check_integrity()


def test_close_needs_no_descriptor_once_the_context_is_closed(backend: str) -> None:
    context = open_context(backend)
    cache = KVCache(small_config(context.info.granule), context)
    cache.slots.claim(0)
    context.close()
    cache.close(FdEvent(1 << 20))
    assert cache.is_closed


def test_pages_of_free_slots_are_reclaimed_except_kept_ones(context: Context) -> None:
    with small_cache(context) as cache:
        for reqid in range(4):
            cache.slots.claim(reqid)
        assert cache.step([ROWS, 2 * ROWS, 3 * ROWS, ROWS]) == 0
        for reqid in range(3):
            cache.free_reqid(reqid)
        cache.memory.reclaim_free(keep=[1], wait=True)
        assert [slot.mapped_pages for slot in cache.snapshot()] == [0, 2, 0, 1]
        cache.memory.reclaim_free()
        cache.memory.reclaim_free(wait=True)
        assert [slot.mapped_pages for slot in cache.snapshot()] == [0, 0, 0, 1]


def test_a_request_is_ready_once_its_growth_in_the_background_is_over(context: Context) -> None:
    with small_cache(context) as cache:
        cache.slots.claim(1)
        assert not cache.slots.is_ready(1, 1)
        assert cache.step_async(lens(cache, r1=ROWS + 1)) == 0
        eventually(lambda: cache.slots.is_ready(1, ROWS + 1))
        assert cache.slots.capacity(1) == 0  # no step has granted the pages yet
        assert cache.slots.is_ready(1, 2 * ROWS)
        assert not cache.slots.is_ready(1, 2 * ROWS + 1)
        assert cache.step(lens(cache, r1=ROWS + 1)) == 0
        assert cache.slots.is_ready(1, 2 * ROWS)
        assert not cache.slots.is_ready(1, 2 * ROWS + 1)
        cache.free_reqid(1)
        cache.slots.claim(1)
        assert not cache.slots.is_ready(
            1, 3 * ROWS
        )  # the earlier owner's growth does not count for the next owner
        with pytest.raises(InvalidArgument, match="reqid 0 is not taken"):
            cache.slots.is_ready(0, 1)
        longest = cache.config.max_seq_len
        with pytest.raises(InvalidArgument, match=f"seq_len {longest + 1} is not between 0 and"):
            cache.slots.is_ready(1, longest + 1)


def lacking(cache: KVCache, reqid: int | None, tokens: int) -> int:
    """Returns how many more pages a request needs in order to hold `tokens` tokens."""
    return cache.memory.for_request(reqid, tokens) // cache.layout.page_size


def obtainable(cache: KVCache) -> list[int]:
    """Returns the number of pages available to requests, and the total number of pages."""
    return [size // cache.layout.page_size for size in cache.memory.obtainable()]


def test_pages_owned_and_missing(context: Context) -> None:
    with small_cache(context) as cache:
        cache.memory.set_limit(4 * TENSORS)
        cache.slots.claim(1)
        assert cache.slots.capacity(1) == 0
        assert lacking(cache, 1, ROWS + 1) == lacking(cache, None, ROWS + 1)
        assert lacking(cache, 1, ROWS + 1) == 2 * TENSORS
        assert obtainable(cache) == [4 * TENSORS, 4 * TENSORS]
        assert cache.step(lens(cache, r1=ROWS + 1)) == 0
        assert cache.slots.capacity(1) == 2 * ROWS
        assert lacking(cache, 1, 2 * ROWS) == lacking(cache, 1, 0) == 0
        assert lacking(cache, 1, 2 * ROWS + 1) == TENSORS
        assert obtainable(cache) == [2 * TENSORS, 4 * TENSORS]
        size = cache.layout.page_size
        assert (
            cache.memory.for_step(lens(cache, r1=2 * ROWS))
            == cache.memory.for_step(lens(cache))
            == 0
        )
        assert cache.memory.for_step(lens(cache, r1=4 * ROWS + 1)) == 3 * TENSORS * size
        cache.slots.claim(2)
        both = lens(cache, r1=2 * ROWS + 1, r2=ROWS)
        assert cache.memory.for_step(both) == 2 * TENSORS * size
        with pytest.raises(InvalidArgument, match="reqid 0 is not taken"):
            cache.memory.for_step(lens(cache, r0=1))
        cache.free_reqid(2)
        before = state(cache)
        for call in (
            lambda: cache.slots.capacity(0),
            lambda: lacking(cache, 0, 1),
        ):
            with pytest.raises(InvalidArgument, match="reqid 0 is not taken"):
                call()
        longest = cache.config.max_seq_len
        for length in (-1, longest + 1):
            with pytest.raises(InvalidArgument, match=f"seq_len {length} is not between 0 and"):
                lacking(cache, 1, length)
        assert state(cache) == before
        cache.free_reqid(1)  # its pages can be reclaimed
        assert obtainable(cache) == [4 * TENSORS, 4 * TENSORS]


@pytest.mark.parametrize("reqid", [-1, 4, 1 << 70])
@pytest.mark.parametrize("name", ["slots.owner", "seq_len", "slots.is_taken", "slots.capacity"])
def test_an_invalid_reqid(context: Context, name: str, reqid: int) -> None:
    with small_cache(context) as cache:
        text = f"reqid {reqid} is not between 0 and 3"
        with pytest.raises(InvalidArgument, match=text):
            attrgetter(name)(cache)(reqid)
        for several in ("owners", "readable_rows", "first_rows"):
            with pytest.raises(InvalidArgument, match=text):
                getattr(cache.slots, several)([0, reqid])


@pytest.mark.parametrize("reqid", ["0", 1.0, None])
@pytest.mark.parametrize("name", ["slots.owner", "seq_len", "slots.is_taken", "slots.capacity"])
def test_a_reqid_that_is_not_an_integer(context: Context, name: str, reqid: Any) -> None:
    text = f"'{type(reqid).__name__}' object cannot be interpreted as an integer"
    with small_cache(context) as cache:
        with pytest.raises(TypeError, match=text):
            attrgetter(name)(cache)(reqid)
        with pytest.raises(TypeError, match=text):
            cache.slots.owners([0, reqid])


def test_invalid_arguments(context: Context) -> None:
    with small_cache(context) as cache:
        cache.slots.claim(0)
        assert cache.step(lens(cache, r0=ROWS)) == 0
        calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (InvalidArgument, "length -1: reqid 0 holds", lambda: cache.memory.for_truncate(0, -1)),
            (
                InvalidArgument,
                "length 999: reqid 0 holds",
                lambda: cache.memory.for_truncate(0, 999),
            ),
            (
                InvalidArgument,
                "length 999: reqid 0 holds",
                lambda: cache.memory.for_fork(0, 1, 999),
            ),
            (InvalidArgument, "count is -1", lambda: cache.memory.for_fork(0, -1, 1)),
            (InvalidArgument, "location 7 is not one of", lambda: cache.move(0, 7)),  # type: ignore[arg-type]
            (InvalidArgument, "location None is not one of", lambda: cache.move(0, None)),  # type: ignore[arg-type]
            (
                InvalidArgument,
                "nan of type float does not equal",
                lambda: _record(cache, float("nan")),
            ),
            (TypeError, r"matches\[0\]: expected PrefixMatch", lambda: cache.can_admit([1], ["x"])),  # type: ignore[list-item]
            (TypeError, "as an integer", lambda: cache.slots.map_common_pages(None)),  # type: ignore[arg-type]
        ]
        before = state(cache)
        for kind, text, call in calls:
            with pytest.raises(kind, match=text):
                call()
        assert state(cache) == before


def _record(cache: KVCache, namespace: Any) -> None:
    cache.record(0, list(range(ROWS)), namespace=namespace)


def test_objects_of_another_type_are_named(context: Context) -> None:
    with small_cache(context) as cache:
        config = cache.config
    layers, before = [LayerShape(1, 8)], context.stats()
    wrong: Any = 3
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("config: expected KVCacheConfig, not 3", lambda: KVCache(wrong)),
        ("context: expected Context or None", lambda: KVCache(config, wrong)),
        ("budget: expected Budget or None", lambda: KVCache(config, context, budget=wrong)),
        ("backend: expected str", lambda: KVCache(config, backend=wrong)),
        ("context: expected Context or None", lambda: LayeredCache(layers, wrong)),
        ("context: expected Context, not 3", lambda: Budget(wrong)),
        ("name: expected str", lambda: Budget(context, name=wrong)),
    ]
    for text, call in calls:
        with pytest.raises(TypeError, match=text):
            call()
    for total in (-1, 1 << 63, "much"):
        with pytest.raises(InvalidArgument, match="total_bytes"):
            Budget(context, total)  # type: ignore[arg-type]
    assert context.stats() == before
