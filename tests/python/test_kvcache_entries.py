# SPDX-License-Identifier: MIT
"""Tests 2 MiB entries over a cache's 64 KB pages, from prefill to the end of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvcache_helpers import rows_are, stamp

from pyvmem import (
    Caps,
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    NotRecoverable,
)

PAGE, BLOCK = 64 << 10, 2 << 20
PAGES = BLOCK // PAGE
ROWS = 32  # per page
FULL = ROWS * PAGES  # per block
TENSORS = 4
COLUMN = TENSORS * PAGE  # one page in every tensor


@pytest.fixture
def context(backend: str) -> Iterator[Context]:
    with Context(backend, granule=PAGE, large_entries=True) as opened:
        if Caps.LARGE_ENTRIES not in opened.info.caps:
            pytest.skip(f"{backend} has no large entries of small pages")
        yield opened


def config(**changes: Any) -> KVCacheConfig:
    """Describes two layers, four slots of four blocks, and 32 rows of 2 KiB per page."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 8,
        "head_dim": 64,
        "dtype": "float32",
        "max_batch": 4,
        "max_seq_len": 4 * FULL,
        "page_size": PAGE,
        "memory_limit": 512 * COLUMN,
        "low_watermark": 0.0,
        "growth_fraction": 0.0,
    }
    return KVCacheConfig(**{**values, **changes})


@pytest.fixture
def cache(context: Context, request: pytest.FixtureRequest) -> Iterator[KVCache]:
    with KVCache(config(**getattr(request, "param", {})), context) as made:
        yield made
        made.check_integrity()


def lens(cache: KVCache, **by_reqid: int) -> list[int]:
    out = [0] * cache.config.max_batch
    for name, value in by_reqid.items():
        out[int(name[1:])] = value
    return out


def entries(cache: KVCache, reqid: int) -> list[int]:
    """Returns, for each block of the slot in the first tensor, the size of the entry that maps its
    first page, or 0 if that page is not mapped.
    """
    at = cache.layout.offset(reqid)
    return [cache.reservation.query(at + block * BLOCK).entry_bytes for block in range(4)]


def prefill(cache: KVCache, length: int, tag: float = 1.0) -> int:
    reqid = cache.alloc_reqid(length)
    assert reqid is not None
    assert cache.step(lens(cache, **{f"r{reqid}": length})) == 0
    stamp(cache, reqid, 0, length, tag)
    return reqid


def test_a_cache_opens_its_context_with_entries(backend: str) -> None:
    with KVCache(config(), backend=backend) as cache:
        if cache.context.info.granule == PAGE:
            assert Caps.LARGE_ENTRIES in cache.context.info.caps
        assert cache.layout.slot_bytes % BLOCK == 0


def test_slots_of_two_megabytes_and_more_begin_at_whole_blocks(context: Context) -> None:
    with KVCache(config(max_seq_len=FULL + 1), context) as cache:
        assert cache.layout.slot_bytes == 2 * BLOCK
    with KVCache(config(max_seq_len=FULL - ROWS), context) as cache:
        assert cache.layout.block == 0


def test_packed_slots_that_are_not_whole_blocks(context: Context, backend: str) -> None:
    odd = config(packed_slots=True, max_seq_len=FULL + ROWS)
    with pytest.raises(InvalidArgument, match=f"packed_slots: slots of {BLOCK + PAGE} bytes"):
        KVCache(odd, context)
    with KVCache(odd, backend=backend) as cache:
        assert Caps.LARGE_ENTRIES not in cache.context.info.caps
        prefill(cache, FULL + ROWS)


def test_a_prefill_maps_whole_blocks_in_one_call_and_the_rest_in_another(cache: KVCache) -> None:
    before = cache.context.stats().map_calls
    reqid = prefill(cache, 2 * FULL + 3)
    assert cache.context.stats().map_calls - before == 2 * TENSORS
    assert entries(cache, reqid) == [BLOCK, BLOCK, PAGE, 0]
    assert rows_are(cache, reqid, 0, 2 * FULL + 3, 1.0)


def test_truncated_within_a_block_and_grown_again(cache: KVCache) -> None:
    reqid = prefill(cache, 2 * FULL)
    assert cache.truncate(reqid, FULL + 5) == 0
    assert entries(cache, reqid) == [BLOCK, BLOCK, 0, 0]  # kept, because memory is not short
    assert cache.context.stats().splits == 0
    assert cache.step(lens(cache, **{f"r{reqid}": 2 * FULL})) == 0
    assert rows_are(cache, reqid, 0, FULL + 5, 1.0)


SHORT = {"memory_limit": (2 * PAGES + 8) * COLUMN}


@pytest.mark.parametrize("cache", [SHORT], indirect=True)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_short_of_memory_splits_unused_parts(cache: KVCache, ahead: bool) -> None:
    """Another request gets the pages that `truncate` left unused in a running request's entry; no
    row is lost.
    """
    first = prefill(cache, 2 * FULL, 1.0)
    assert cache.truncate(first, FULL + 5) == 0
    second = cache.alloc_reqid()
    want = lens(cache, **{f"r{first}": FULL + 5, f"r{second}": 20 * ROWS})
    assert cache.can_admit([20 * ROWS])
    if ahead:  # nothing is split in the background, because kernels read other pages of the entry
        assert cache.step_async(want) == 0
        assert entries(cache, first)[1] == BLOCK
    assert cache.step(want) == 0
    assert entries(cache, first) == [BLOCK, PAGE, 0, 0]
    assert cache.context.stats().splits == TENSORS
    assert rows_are(cache, first, 0, FULL + 5, 1.0)
    stamp(cache, second, 0, 20 * ROWS, 2.0)
    cache.check_integrity()
    assert rows_are(cache, first, 0, FULL + 5, 1.0)


@pytest.mark.parametrize("cache", [SHORT], indirect=True)
def test_every_driver_call_of_a_split_fails_once(cache: KVCache) -> None:
    """The step raises and changes nothing; the next step succeeds."""
    first = prefill(cache, 2 * FULL, 1.0)
    assert cache.truncate(first, FULL + 5) == 0
    second = cache.alloc_reqid()
    want = lens(cache, **{f"r{first}": FULL + 5, f"r{second}": 20 * ROWS})
    failed = 0
    while True:
        cache.context.inject(Inject.MAP | Inject.UNMAP, failed)
        try:
            assert cache.step(want) == 0
            break
        except NotRecoverable:
            raise
        except DriverError:
            failed += 1
        finally:
            cache.context.inject(Inject.MAP | Inject.UNMAP, count=0)
        cache.check_integrity()
        assert cache.snapshot()[second].granted_pages == 0
        assert rows_are(cache, first, 0, FULL + 5, 1.0)
        cache.context.check()
    assert failed >= TENSORS
    assert entries(cache, first) == [BLOCK, PAGE, 0, 0]
    assert rows_are(cache, first, 0, FULL + 5, 1.0)


@pytest.mark.parametrize("cache", [SHORT], indirect=True)
def test_only_missing_pages_are_split_off(cache: KVCache) -> None:
    first = prefill(cache, FULL, 1.0)
    second = prefill(cache, FULL, 2.0)
    assert cache.truncate(first, 10 * ROWS) == 0
    assert cache.truncate(second, 20 * ROWS) == 0
    third = prefill(cache, 18 * ROWS, 3.0)
    assert entries(cache, first)[0] == PAGE
    assert entries(cache, second)[0] == BLOCK
    for reqid, pages in ((first, 10), (second, 20), (third, 18)):
        assert rows_are(cache, reqid, 0, pages * ROWS, {first: 1.0, second: 2.0, third: 3.0}[reqid])


@pytest.mark.parametrize("cache", [SHORT], indirect=True)
def test_a_request_grows_within_its_entry(cache: KVCache) -> None:
    """A growing request keeps its own part of the entry."""
    first = prefill(cache, FULL, 1.0)
    second = prefill(cache, FULL, 2.0)
    assert cache.truncate(first, 10 * ROWS) == 0
    assert cache.truncate(second, 10 * ROWS) == 0
    lengths = lens(cache, **{f"r{first}": 30 * ROWS, f"r{second}": 28 * ROWS})
    assert cache.step(lengths) == 0
    assert entries(cache, first)[0] == entries(cache, second)[0] == BLOCK
    lengths[first] = 42 * ROWS  # needs 10 more; 8 are free, and 4 in the other's entry are unused
    assert cache.step(lengths) == 0
    assert entries(cache, first)[:2] == [BLOCK, PAGE]
    assert entries(cache, second)[0] == PAGE
    assert rows_are(cache, first, 0, 10 * ROWS, 1.0)
    assert rows_are(cache, second, 0, 10 * ROWS, 2.0)


@pytest.mark.parametrize("cache", [{**SHORT, "deferred_reclaim": False}], indirect=True)
def test_the_background_never_splits_a_running_requests_entry(cache: KVCache) -> None:
    reqid = prefill(cache, 2 * FULL)
    assert cache.truncate(reqid, 5 * ROWS) == 0
    cache.trim(compact=False)
    assert entries(cache, reqid) == [BLOCK, 0, 0, 0]
    assert cache.context.stats().splits == 0
    assert rows_are(cache, reqid, 0, 5 * ROWS, 1.0)


@pytest.mark.parametrize("cache", [SHORT], indirect=True)
def test_a_free_slot_gives_a_part_of_its_entry(cache: KVCache) -> None:
    first = prefill(cache, 2 * FULL)
    cache.free_reqid(first)
    assert cache.step(lens(cache)) == 0
    second = cache.slots.claim(3)
    assert second is None
    assert cache.step(lens(cache, r3=20 * ROWS)) == 0
    assert entries(cache, first) == [BLOCK, PAGE, 0, 0]
    assert cache.snapshot()[first].mapped_pages == 2 * PAGES - 12


def test_a_fork_shares_the_block_that_it_ends_in(cache: KVCache) -> None:
    """The fork splits the parent's entry and copies only the last page."""
    reqid = prefill(cache, 2 * FULL)
    before = cache.stats().grown_pages
    child = cache.fork(reqid, length=FULL + 10 * ROWS + 3)
    assert child is not None
    assert cache.stats().grown_pages - before == TENSORS
    assert entries(cache, reqid) == [BLOCK, PAGE, 0, 0]
    assert entries(cache, child) == [BLOCK, PAGE, 0, 0]
    stamp(cache, child, FULL + 10 * ROWS + 3, FULL + 11 * ROWS, 2.0)
    assert rows_are(cache, reqid, 0, 2 * FULL, 1.0)
    assert rows_are(cache, child, 0, FULL + 10 * ROWS + 3, 1.0)
    cache.check_integrity()
    cache.free_reqid(reqid)
    assert cache.step(lens(cache, **{f"r{child}": FULL + 11 * ROWS})) == 0
    assert rows_are(cache, child, 0, FULL + 10 * ROWS + 3, 1.0)


def test_a_child_is_truncated_within_a_shared_block(cache: KVCache) -> None:
    reqid = prefill(cache, 2 * FULL)
    child = cache.fork(reqid)
    assert child is not None
    assert entries(cache, child) == [BLOCK, BLOCK, 0, 0]
    assert cache.truncate(child, FULL + 3) == 0
    assert entries(cache, child) == [BLOCK, PAGE, 0, 0]
    assert entries(cache, reqid) == [BLOCK, BLOCK, 0, 0]
    stamp(cache, child, FULL + 3, FULL + 4, 2.0)
    assert rows_are(cache, child, 0, FULL + 3, 1.0)
    assert rows_are(cache, reqid, 0, 2 * FULL, 1.0)


def test_prefixes_end_within_blocks(cache: KVCache) -> None:
    tokens = list(range(2 * FULL))
    reqid = prefill(cache, 2 * FULL)
    assert cache.record(reqid, tokens[: 40 * ROWS]) == 40 * ROWS
    assert entries(cache, reqid) == [BLOCK, PAGE, 0, 0]
    begun = cache.alloc_prefix(tokens[: 36 * ROWS], leave=0)
    assert begun is not None
    other, held = begun
    assert held == 36 * ROWS
    assert entries(cache, other) == [BLOCK, PAGE, 0, 0]
    assert rows_are(cache, other, 0, held, 1.0)
    cache.free_reqid(reqid, tokens=tokens)
    cache.free_reqid(other, tokens=tokens[:held])
    assert cache.step(lens(cache)) == 0
    again = cache.alloc_prefix(tokens, leave=0)
    assert again is not None
    assert again[1] == 2 * FULL
    assert rows_are(cache, again[0], 0, 2 * FULL, 1.0)


WINDOW = {"window": 40 * ROWS, "window_tile": 0}


@pytest.mark.parametrize("cache", [WINDOW], indirect=True)
def test_a_window_leaves_an_entry_as_a_whole(cache: KVCache) -> None:
    """An entry stays while work may read any of its pages; pages with their own entries are
    unmapped one at a time.
    """
    length = 2 * FULL
    reqid = prefill(cache, length)
    for _ in range(10 * ROWS):
        length += 1
        assert cache.step(lens(cache, **{f"r{reqid}": length})) == 0
        stamp(cache, reqid, length - 1, length, 1.0)
    cache.check_integrity()
    assert cache.context.stats().splits == 0
    assert entries(cache, reqid)[:2] == [0, BLOCK]
    assert rows_are(cache, reqid, length - 40 * ROWS, length, 1.0)
    first = cache.snapshot()[reqid]
    assert first.mapped_pages == 2 * PAGES + 10 - PAGES


def test_a_move_of_a_part_of_a_block(cache: KVCache) -> None:
    if Caps.HOST_PAGES not in cache.context.info.caps:
        pytest.skip("no pages in host memory")
    reqid = prefill(cache, 2 * FULL)
    moved = cache.move(reqid, "host", tokens=range(10 * ROWS, 20 * ROWS))
    assert moved.pages == 10 * TENSORS
    assert entries(cache, reqid) == [PAGE, BLOCK, 0, 0]
    assert rows_are(cache, reqid, 0, 2 * FULL, 1.0)
    cache.check_integrity()


def test_joins_for_want_of_mappings_are_recorded(backend: str) -> None:
    """When mappings are scarce, a step consolidates pages; the old pages stay while work reads
    them."""
    limit = 2 * TENSORS * (PAGES + 4)
    with Context(backend, granule=PAGE, large_entries=True, max_mappings=limit) as context:
        if Caps.LARGE_ENTRIES not in context.info.caps or context.info.max_mappings != limit:
            pytest.skip(f"{backend} has no large entries, or no limit on mappings that can be set")
        policy = {"join_at": 0.9, "memory_limit": (2 * PAGES + 8) * COLUMN}
        with KVCache(config(**policy), context) as cache:
            first, second = cache.alloc_reqid(), cache.alloc_reqid()
            for length in range(ROWS, FULL + 2 * ROWS, ROWS):
                want = lens(cache, **{f"r{first}": length, f"r{second}": length})
                assert cache.step(want) == 0
            stamp(cache, first, 0, FULL, 1.0)
            assert entries(cache, first)[0] == BLOCK
            cache.check_integrity()
            assert cache.snapshot()[first].large_pages == PAGES
            assert cache.truncate(first, 5 * ROWS) == 0
            want[first], want[second] = 5 * ROWS, FULL + 20 * ROWS
            assert cache.step_async(want) == 0
            assert entries(cache, first)[0] == BLOCK  # kernels read the rows that the request kept
            assert cache.step(want) == 0
            assert entries(cache, first)[0] == PAGE
            assert rows_are(cache, first, 0, 5 * ROWS, 1.0)
            cache.check_integrity()
