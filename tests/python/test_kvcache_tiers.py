# SPDX-License-Identifier: MIT
"""Description: pages that change under a request: larger ones, and ones in another memory."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, eventually, firing_later, small_cache, state
from share_helpers import grow, is_zero, read_rows, start, whole

from pyvmem import (
    Caps,
    Context,
    DriverError,
    FdEvent,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    Location,
    NotSupported,
    OutOfMemory,
    RangeFlags,
    VMemError,
)
from pyvmem.kvcache import Moved

TENSORS = 2 * LAYERS
UNIT = 4  # small pages of a large one
PART = UNIT * ROWS
MIB2 = 2 << 20
DRIVER = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL


def cache_over(context: Context, **changes: Any) -> Any:
    """Slots of up to eleven pages, four of which are a large one."""
    changes.setdefault("max_seq_len", 11 * ROWS)
    changes.setdefault("large_page_size", UNIT * context.info.granule)
    if changes["large_page_size"] not in (0, *context.info.page_sizes):
        pytest.skip("no such page size")
    return small_cache(context, **changes)


def with_tiers(backend: str, **options: Any) -> Context:
    context = open_context(backend, **options)
    if Caps.HOST_PAGES not in context.info.caps:
        context.close()
        pytest.skip("no host pages")
    return context


def in_pieces(cache: KVCache, rows: int, by: int = ROWS) -> tuple[int, int]:
    """Two requests that grew page by page in turn, so that no part of them is one run.

    The context's slabs must be small, or it prefers to keep each in a run.
    """
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    assert one is not None
    assert two is not None
    for low in range(0, rows, by):
        grow(cache, one, low, min(rows, low + by))
        grow(cache, two, low, min(rows, low + by), 500)
    at, part = cache.reservation.addr, UNIT * cache.layout.page_size
    if (
        by == ROWS
        and rows >= PART
        and cache.context.query(at + cache.layout.offset(one)).run_bytes >= part
    ):
        pytest.skip("the back end's slabs are larger than asked for: the pages are a run")
    return one, two


def in_slabs(backend: str) -> Context:
    """A context whose slabs are too small to keep the pages of a request together."""
    with open_context(backend) as probe:
        page = probe.info.granule
    return open_context(backend, slab_size=UNIT * page)


def lens(cache: KVCache) -> list[int]:
    return [slot.seq_len for slot in cache.snapshot()]


def settled(cache: KVCache, reqid: int) -> None:
    """Steps until what is under way for a request is over."""

    def over() -> bool:
        assert cache.step(lens(cache)) == 0
        return not cache.snapshot()[reqid].moving_pages

    eventually(over)


# ---- promotion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True])
def test_full_parts_become_large(backend: str, wait: bool) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        rows = 2 * PART + 3
        one, two = in_pieces(cache, rows)
        assert cache.snapshot()[one].large_pages == 0
        held = cache.stats().mapped_bytes
        assert cache.promote(one, wait=wait) == 2
        if not wait:
            assert cache.snapshot()[one].moving_pages == 2 * UNIT
            assert cache.stats().moving_pages == 2 * UNIT * TENSORS
            assert cache.promote(one) == 2, "under way"
            cache.check_integrity()
            grow(cache, one, rows, rows + ROWS)
            settled(cache, one)
        assert cache.snapshot()[one].large_pages == 2 * UNIT
        assert cache.stats().promoted_pages == cache.stats().moved_pages == 2 * UNIT * TENSORS
        cache.check_integrity()
        assert whole(cache, one, rows)
        assert whole(cache, two, rows, 500)
        cache.step(lens(cache))
        size = cache.layout.page_size * TENSORS
        assert cache.stats().mapped_bytes == held + (0 if wait else size)
        assert cache.promote(one) == 0
        grow(cache, one, rows, rows + 2 * ROWS)
        assert whole(cache, one, rows)


def test_a_promotion_follows_the_writers_and_is_swapped_after_the_readers(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context) as cache,
        FdEvent.create() as writers,
        FdEvent.create() as readers,
    ):
        one, _ = in_pieces(cache, PART)
        assert cache.promote(one, stream=writers) == 1
        for _ in range(3):
            assert cache.step(lens(cache)) == 0, "does not wait for copies"
        assert cache.snapshot()[one].moving_pages == UNIT
        writers.set()
        eventually(lambda: cache._core.mover.moves[cache._core.table[one]].done())
        with firing_later(readers) as fired:
            assert cache.step(lens(cache), readers) == 0
            assert fired, "the pages were replaced under running work"
        assert cache.snapshot()[one].large_pages == UNIT
        assert whole(cache, one, PART)


def test_a_run_is_mapped_in_one_piece(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    caps = context.info.caps | Caps.CONSOLIDATE
    monkeypatch.setattr(context, "_info", dataclasses.replace(context.info, caps=caps))
    pieces: list[tuple[int, int]] = []
    monkeypatch.setattr(Context, "consolidate", lambda self, *piece: pieces.append(piece))
    with cache_over(context) as cache:
        reqid = start(cache, 2 * PART, by=ROWS)
        assert cache.promote(reqid) == 2
        assert not pieces, "at the next step"
        assert cache.stats().moving_pages == 0, "nothing is copied"
        assert cache.step(lens(cache)) == 0
        base, size = cache.reservation.addr, UNIT * cache.layout.page_size
        assert set(pieces) == {
            (base + cache.layout.offset(reqid, page, tensor), size)
            for page in (0, UNIT)
            for tensor in range(TENSORS)
        }
        assert cache.promote(reqid) == 0, "once"
        cache.free_reqid(reqid)
        assert cache.promote(start(cache, PART, by=ROWS), wait=True) == 1, "another request's"
        assert len(pieces) == 3 * TENSORS


def test_long_requests_are_promoted_by_themselves(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, promote_tokens=PART + 2, window_tile=0) as cache,
    ):
        one, two = in_pieces(cache, PART + ROWS)
        assert cache.stats().moving_pages == 0
        grow(cache, one, PART + ROWS, PART + ROWS + 1)
        assert cache.stats().moving_pages == UNIT * TENSORS
        settled(cache, one)
        assert cache.snapshot()[one].large_pages == UNIT
        assert cache.snapshot()[two].large_pages == 0, "it does not grow"
        for low in range(PART + ROWS + 1, 2 * PART + 2 * ROWS):
            grow(cache, one, low, low + 1)
        settled(cache, one)
        assert cache.snapshot()[one].large_pages == 2 * UNIT
        assert whole(cache, one, 2 * PART)
        cache.free_reqid(one)
        short = start(cache, PART, 700, by=ROWS)
        grow(cache, short, PART, PART + 1, 700)
        assert cache.snapshot()[short].moving_pages == 0


def test_rows_that_may_be_taken_back_are_left_alone(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, promote_tokens=1, window_tile=5) as cache,
    ):
        one, _ = in_pieces(cache, PART)
        for low in range(PART, PART + 6):
            assert cache.snapshot()[one].moving_pages == 0
            grow(cache, one, low, low + 1)
        assert cache.snapshot()[one].moving_pages == UNIT


def test_a_request_that_gets_shorter_ends_what_is_under_way(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache, FdEvent.create() as work:
        one, _ = in_pieces(cache, PART + 1)
        assert cache.promote(one, stream=work) == 1
        want = lens(cache)
        want[one] = PART - 3
        with firing_later(work) as fired:
            assert cache.step(want) == 0
            assert fired
        assert cache.snapshot()[one].moving_pages == 0
        grow(cache, one, PART - 3, PART + ROWS, 900)
        assert cache.step(lens(cache)) == 0
        assert whole(cache, one, PART - 3)
        assert read_rows(cache, one, PART - 3, list(range(900 + PART - 3, 900 + PART + ROWS)))


def test_promotion_takes_what_memory_there_is(backend: str) -> None:
    with in_slabs(backend) as context:
        limit = (2 * 2 * UNIT + UNIT) * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit) as cache:
            one, two = in_pieces(cache, 2 * PART)
            assert cache.promote(one, wait=True) == 1, "there is room for one part at a time"
            assert cache.promote(one, wait=True) == 1
            assert cache.promote(two) == 1
            assert cache.num_free_pages == 0
            grow(cache, one, 2 * PART, 2 * PART + 1)
            assert cache.snapshot()[two].moving_pages == 0, "given up for a request that grows"
            assert cache.stats().moving_pages == 0
            assert whole(cache, two, 2 * PART, 500)
            assert whole(cache, one, 2 * PART + 1)


def _fork(cache: KVCache, reqid: int) -> int | None:
    return cache.fork(reqid)


def _record(cache: KVCache, reqid: int) -> int | None:
    assert cache.record(reqid, range(2 * PART)) == 2 * PART
    return reqid


def _swap(cache: KVCache, reqid: int) -> int | None:
    return cache.swap_in(cache.swap_out(reqid))


def _free(cache: KVCache, reqid: int) -> int | None:
    cache.free_reqid(reqid, tokens=range(2 * PART))
    taken = cache.alloc_prefix([*range(2 * PART), 1])
    assert taken is not None
    return taken[0]


def _move(cache: KVCache, reqid: int) -> int | None:
    cache.move(reqid, "device")
    return reqid


@pytest.mark.parametrize("what", [_fork, _record, _swap, _free, _move])
@pytest.mark.parametrize("kind", ["promote", "move"])
def test_what_is_under_way_is_ended_first(
    backend: str, kind: str, what: Callable[[KVCache, int], int | None]
) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        one, two = in_pieces(cache, 2 * PART)
        if kind == "promote":
            assert cache.promote(one) == 2
        elif Caps.HOST_PAGES in context.info.caps:
            assert cache.move(one, "host", wait=False).pages == 2 * UNIT * TENSORS
        got = what(cache, one)
        assert got is not None
        cache.check_integrity()
        assert whole(cache, got, 2 * PART)
        assert whole(cache, two, 2 * PART, 500)
        for _ in range(3):
            cache.step(lens(cache))
        cache.check_integrity()


def test_a_slot_freed_in_the_middle_is_safe_for_the_next_owner(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, max_batch=2, deferred_reclaim=False) as cache,
        FdEvent.create() as work,
    ):
        one, two = in_pieces(cache, 2 * PART)
        assert cache.promote(one, stream=work) == 2
        cache.free_reqid(one)
        assert cache.snapshot()[one].in_flight, "its pages are still read"
        cache.check_integrity()
        again = cache.alloc_reqid(PART)
        assert again == one
        with firing_later(work) as fired:
            want = lens(cache)
            want[again] = PART
            assert cache.step(want) == 0
            assert fired
        assert is_zero(cache, again, 0, PART)
        cache.step(want)
        assert cache.stats().moving_pages == 0
        assert whole(cache, two, 2 * PART, 500)


def test_a_window_takes_pages_that_are_under_way(backend: str) -> None:
    with (
        in_slabs(backend) as context,
        cache_over(context, window=ROWS, window_tile=0) as cache,
        FdEvent.create() as work,
    ):
        reqid, _ = in_pieces(cache, 2)
        want = lens(cache)
        want[reqid] = 2 * PART
        assert cache.step_async(want) == 0
        assert cache.step(want) == 0
        assert cache.promote(reqid, stream=work) >= 0
        want[reqid] += 1
        for _ in range(2):
            assert cache.step(want) == 0
        work.set()
        eventually(lambda: not cache.snapshot()[reqid].in_flight)
        want[reqid] += 1
        assert cache.step(want) == 0
        cache._core.reclaimer.finish_all()
        assert cache._core.table[reqid].head > 0
        cache.check_integrity()


# ---- tiers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True])
def test_to_the_host_and_back(backend: str, wait: bool) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        rows = PART + 2 * ROWS + 2
        reqid = start(cache, rows)
        used = cache.stats().mapped_bytes
        whole_pages = UNIT + 2 + wait  # the last one may be written meanwhile
        assert cache.move(reqid, "host", wait=wait) == Moved(whole_pages * TENSORS, 0)
        settled(cache, reqid)
        info, now = cache.snapshot()[reqid], cache.stats()
        assert (info.away_pages, info.mapped_pages) == (whole_pages, UNIT + 3)
        assert now.host_pages == whole_pages * TENSORS
        assert now.active_pages == (UNIT + 3 - whole_pages) * TENSORS
        assert now.mapped_bytes == used - whole_pages * TENSORS * cache.layout.page_size
        assert now.used_bytes <= now.active_pages * cache.layout.page_size
        assert now.free_pages + now.cached_pages + now.active_pages == now.total_pages
        cache.check_integrity()
        assert whole(cache, reqid, rows)
        assert cache.move(reqid, Location.HOST, wait=wait) == Moved(0, 0)
        grow(cache, reqid, rows, rows + 2 * ROWS)
        assert cache.snapshot()[reqid].away_pages == whole_pages, "what is new is in the device"
        assert cache.move(reqid, "device", wait=wait) == Moved(whole_pages * TENSORS, 0)
        settled(cache, reqid)
        cache.check_integrity()
        assert cache.stats().host_pages == 0
        assert cache.snapshot()[reqid].large_pages == UNIT
        assert whole(cache, reqid, rows)


def test_a_range_of_tokens(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context, large_page_size=0) as cache:
        reqid = start(cache, 6 * ROWS)
        assert cache.move(reqid, "host", tokens=range(3, 4 * ROWS - 1)) == Moved(2 * TENSORS, 0)
        assert cache.move(reqid, "host", tokens=(2 * ROWS, 2 * ROWS)) == Moved(0, 0)
        assert cache.move(reqid, "host", tokens=(5, 9)) == Moved(0, 0), "less than a page"
        assert cache.snapshot()[reqid].away_pages == 2
        assert cache.move(reqid, "device", tokens=(0, 2 * ROWS)) == Moved(TENSORS, 0)
        assert cache.move(reqid, "host") == Moved(5 * TENSORS, 0)
        assert whole(cache, reqid, 6 * ROWS)


def test_a_large_page_moves_as_a_whole(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        reqid = start(cache, 2 * PART)
        assert cache.move(reqid, "host", tokens=(1, 2 * PART)) == Moved(UNIT * TENSORS, 0)
        assert cache.snapshot()[reqid].away_pages == UNIT
        assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        assert whole(cache, reqid, 2 * PART)
        assert cache.promote(reqid) == 0


def test_what_moved_is_shared_swapped_and_given_back(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        rows = PART + 2 * ROWS + 2
        parent = start(cache, rows)
        cache.move(parent, "host", tokens=(0, PART))
        child = cache.fork(parent)
        assert child is not None
        assert cache.snapshot()[child].shared_pages == UNIT + 2
        assert cache.snapshot()[child].away_pages == UNIT
        assert cache.stats().host_pages == UNIT * TENSORS, "once"
        assert cache.move(child, "host") == Moved(TENSORS, (UNIT + 2) * TENSORS)
        assert whole(cache, child, rows)
        cache.check_integrity()
        assert cache.record(child, range(rows)) == PART + 2 * ROWS
        cache.free_reqid(parent)
        back = cache.swap_in(cache.swap_out(child))
        assert back is not None
        assert cache.snapshot()[back].away_pages == 0
        assert whole(cache, back, rows)
        cache.free_reqid(back)
        cache.trim()
        assert cache.stats().host_pages == UNIT * TENSORS, "the recorded prefix has it"
        taken = cache.alloc_prefix([*range(PART), 1])
        assert taken is not None
        assert whole(cache, *taken)
        cache.free_reqid(taken[0])
        cache.trim(prefixes=True)
        cache.check_integrity()
        assert (cache.stats().host_pages, cache.stats().mapped_bytes) == (0, 0)


def test_the_next_owner_has_pages_of_the_device(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context, max_batch=1) as cache:
        reqid = start(cache, PART + 1)
        cache.move(reqid, "host")
        cache.free_reqid(reqid)
        assert cache.alloc_reqid(PART) == reqid
        assert cache.step([PART]) == 0
        assert cache.snapshot()[reqid].away_pages == 0
        assert cache.stats().host_pages == 0
        assert is_zero(cache, reqid, 0, PART)


def test_moving_makes_room_for_others(backend: str) -> None:
    with with_tiers(backend) as context:
        limit = 6 * TENSORS * context.info.granule
        with cache_over(context, memory_limit=limit) as cache:
            one = start(cache, 5 * ROWS)
            two = cache.alloc_reqid()
            assert two is not None
            want = lens(cache)
            want[two] = 5 * ROWS
            assert cache.step(want) == -1
            cache.move(one, "host")
            assert cache.step(want) == 0
            assert is_zero(cache, two, 0, 5 * ROWS)
            before = state(cache)
            with pytest.raises(OutOfMemory, match=r"the device has \d+ bytes left") as caught:
                cache.move(one, "device")
            assert isinstance(caught.value, MemoryError)
            assert state(cache) == before
            cache.free_reqid(two)
            assert cache.move(one, "device").pages == 5 * TENSORS, "what is nobody's is reclaimed"
            assert whole(cache, one, 5 * ROWS)


def test_a_limit_on_the_host(backend: str) -> None:
    with with_tiers(backend) as context:
        page = context.info.granule
        with cache_over(context, host_limit=5 * TENSORS * page, large_page_size=0) as cache:
            one, two = start(cache, 4 * ROWS), start(cache, 3 * ROWS, 100)
            assert cache.move(one, "host").pages == 4 * TENSORS
            before = state(cache)
            with pytest.raises(OutOfMemory, match=f"the host has {TENSORS * page} bytes") as caught:
                cache.move(two, "host")
            assert caught.value.errno == errno.ENOMEM
            assert caught.value.limit == TENSORS * page
            assert state(cache) == before
            assert cache.move(two, "host", tokens=(0, ROWS)).pages == TENSORS
            cache.free_reqid(one)
            cache.trim()
            assert cache.move(two, "host").pages == 2 * TENSORS
            assert whole(cache, two, 3 * ROWS, 100)


@pytest.mark.parametrize("large", [False, True])
def test_a_tier_that_runs_full_in_the_middle(backend: str, large: bool) -> None:
    with with_tiers(backend) as probe:
        page = probe.info.granule
    slab = 4 * TENSORS * page
    with open_context(backend, slab_size=slab, mem_limit=4 * slab) as context:
        unit = UNIT * page if large else 0
        with cache_over(context, large_page_size=unit, max_batch=2) as cache:
            one = start(cache, 9 * ROWS)  # three of the four slabs
            before, stats = state(cache), context.stats()
            with pytest.raises(OutOfMemory):
                cache.move(one, "host")
            with pytest.raises(OutOfMemory):
                cache.move(one, "host", wait=False)
            assert state(cache)[:7] == before[:7]
            assert context.stats().used_bytes == stats.used_bytes
            cache.check_integrity()
            assert cache.move(one, "host", tokens=(0, 4 * ROWS)).pages == 4 * TENSORS
            assert whole(cache, one, 9 * ROWS)


def test_bad_moves(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_over(context) as cache:
        with pytest.raises(InvalidArgument, match="not taken"):
            cache.move(0, "device")
        reqid = start(cache, ROWS)
        before = state(cache)
        for arguments, text in (
            ({"location": "disk"}, "location 'disk' is not one of 'device', 'host', 'peer'"),
            ({"location": "device", "device": 0}, "a location of 'device' takes none"),
            ({"location": "device", "tokens": (0, 9)}, f"tokens 0 to 9: reqid 0 holds {ROWS}"),
            ({"location": "device", "tokens": (3, 2)}, "tokens 3 to 2"),
            ({"location": "device", "tokens": (-1, 2)}, "tokens -1 to 2"),
            ({"location": "device", "tokens": (1, 2, 3)}, "tokens must be a range"),
            ({"location": "device", "tokens": "ab"}, "tokens must be a range"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                cache.move(reqid, **arguments)  # type: ignore[arg-type]
        for location, cap in ((Location.HOST, Caps.HOST_PAGES), (Location.PEER, Caps.PEER)):
            info = dataclasses.replace(context.info, caps=context.info.caps & ~cap)
            monkeypatch.setattr(context, "_info", info)
            with pytest.raises(NotSupported, match=f"move: back end {info.backend} has no") as got:
                cache.move(reqid, location)
            assert got.value.errno == errno.EOPNOTSUPP
        devices = (context.info.devices[0], 7)
        caps = context.info.caps | Caps.PEER
        info = dataclasses.replace(context.info, caps=caps, devices=devices)
        monkeypatch.setattr(context, "_info", info)
        with pytest.raises(InvalidArgument, match="'peer' needs a device"):
            cache.move(reqid, "peer")
        for device in (context.info.devices[0], 97):
            with pytest.raises(InvalidArgument, match=f"device {device} is none of the context's"):
                cache.move(reqid, "peer", device)
        assert state(cache) == before


def test_pages_of_two_mebibytes(backend: str) -> None:
    with open_context(backend) as probe:
        page = probe.info.granule
        if page >= MIB2:
            pytest.skip("no smaller pages")
    with open_context(backend, slab_size=4 * page) as context:
        config = KVCacheConfig(
            num_layers=1,
            num_kv_heads=8,
            head_dim=128,
            dtype="float32",
            max_batch=2,
            max_seq_len=1536,  # three parts
            page_size=page,
            large_page_size=MIB2,
            memory_limit=20 * MIB2,
        )
        with KVCache(config, context) as cache:
            reqid, _ = in_pieces(cache, 1100, 100)
            assert cache.promote(reqid) == 2
            settled(cache, reqid)
            parts = 2 * MIB2 // page
            at = cache.reservation.addr + cache.layout.offset(reqid)
            if not cache._core.promoter._joined:  # type: ignore[union-attr]
                assert cache.snapshot()[reqid].large_pages == parts
                assert RangeFlags.LARGE in context.query(at + MIB2).flags
            assert whole(cache, reqid, 1100)
            if Caps.HOST_PAGES in context.info.caps:
                assert cache.move(reqid, "host", tokens=(0, 600)).pages == parts // 2 * 2
                cache.check_integrity()
                assert whole(cache, reqid, 1100)
                assert cache.move(reqid, "device").pages == parts // 2 * 2
            cache.check_integrity()
            assert whole(cache, reqid, 1100)


# ---- faults --------------------------------------------------------------------------------------


def test_a_copy_that_fails_is_raised_by_the_next_step(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache, FdEvent.create() as work:
        reqid = start(cache, 2 * PART)
        held = cache.stats().mapped_bytes
        cache.move(reqid, "host", stream=work, wait=False)
        context.inject(Inject.MAP)
        work.set()
        eventually(lambda: cache._core.mover.moves[cache._core.table[reqid]].done())
        context.inject(Inject.MAP, count=0)
        with pytest.raises(DriverError):
            cache.step(lens(cache))
        assert cache.step(lens(cache)) == 0
        assert (cache.stats().mapped_bytes, cache.stats().host_pages) == (held, 0)
        assert whole(cache, reqid, 2 * PART)
        cache.check_integrity()
        assert cache.move(reqid, "host").pages == 2 * UNIT * TENSORS
        assert whole(cache, reqid, 2 * PART)


def _engine(cache: KVCache) -> list[Callable[[], object]]:
    """Moves and promotions of two requests, waiting and not; rows of the first stay the same."""
    step = lambda: cache.step(lens(cache))  # noqa: E731
    host = Caps.HOST_PAGES in cache.context.info.caps

    def move(*arguments: Any, **options: Any) -> object:
        return cache.move(*arguments, **options) if host else 0

    def over() -> None:
        eventually(lambda: all(one.done() for one in cache._core.mover.moves.values()))

    return [
        lambda: cache.promote(0, wait=True),
        lambda: move(0, "host"),
        lambda: move(1, "host", wait=False),
        over,
        step,
        step,
        lambda: move(0, "device", tokens=(0, PART), wait=False),
        lambda: cache.promote(1),
        over,
        step,
        lambda: move(1, "device"),
        step,
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_every_driver_call_of_a_move_fails_once(backend: str, count: int) -> None:
    """The nth call and, with `count` 2, the next one too: the undo's own."""
    survived, skip = False, 0
    while not survived:
        with in_slabs(backend) as context:
            one_call = Caps.ONE_CALL in context.info.caps
            with cache_over(context, max_batch=3) as cache:
                assert in_pieces(cache, 2 * PART) == (0, 1)
                lost: set[int] = set()
                context.inject(DRIVER, skip=skip, count=count)
                survived = True
                for call in _engine(cache):
                    try:
                        survived &= call() != -1
                    except VMemError:
                        survived = False
                    lost = {slot.index for slot in cache._core.table if slot.lost}
                    cache.check_integrity()
                    for reqid in {0, 1} - lost:
                        assert whole(cache, reqid, 2 * PART, 500 if reqid else 1)
                context.inject(DRIVER, count=0)
                assert not lost or count == 2
                for _ in range(3):
                    try:
                        cache.step(lens(cache))
                    except VMemError:
                        survived = False
                for reqid in (0, 1):
                    cache.free_reqid(reqid)
                cache.trim()
                cache.check_integrity()
                again = start(cache, PART, 900)
                assert whole(cache, again, PART, 900)
            stats = context.stats()
            assert stats.used_bytes == stats.quarantined_bytes or count == 2
        skip += 1
    assert skip > (10 if one_call else 40), "the run makes more driver calls than that"
