# SPDX-License-Identifier: MIT
"""Tests moving a request's pages to host memory and back while their addresses stay the same."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import ROWS, eventually, state
from move_helpers import (
    PART,
    TENSORS,
    UNIT,
    cache_over,
    in_pieces,
    in_slabs,
    lens,
    settled,
    with_tiers,
)
from share_helpers import grow, is_zero, start, whole

from pyvmem import (
    Caps,
    Context,
    DriverError,
    FdEvent,
    Inject,
    InvalidArgument,
    KVCache,
    Location,
    NotSupported,
    OutOfMemory,
    VMemError,
)
from pyvmem.kvcache import Moved

DRIVER = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL

# ---- tiers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [False, True])
def test_to_the_host_and_back(backend: str, wait: bool) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        rows = PART + 2 * ROWS + 2
        reqid = start(cache, rows)
        used = cache.stats().mapped_bytes
        # without waiting, the last page stays, because it may still be written
        whole_pages = UNIT + 2 + wait
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
        assert cache.snapshot()[reqid].away_pages == whole_pages, "new pages are on the device"
        assert cache.move(reqid, "device", wait=wait) == Moved(whole_pages * TENSORS, 0)
        settled(cache, reqid)
        cache.check_integrity()
        assert cache.stats().host_pages == 0
        assert whole(cache, reqid, rows)


def test_a_range_of_tokens(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        reqid = start(cache, 6 * ROWS)
        assert cache.move(reqid, "host", tokens=range(3, 4 * ROWS - 1)) == Moved(2 * TENSORS, 0)
        assert cache.move(reqid, "host", tokens=(2 * ROWS, 2 * ROWS)) == Moved(0, 0)
        assert cache.move(reqid, "host", tokens=(5, 9)) == Moved(0, 0), "less than a page"
        assert cache.snapshot()[reqid].away_pages == 2
        assert cache.move(reqid, "device", tokens=(0, 2 * ROWS)) == Moved(TENSORS, 0)
        assert cache.move(reqid, "host") == Moved(5 * TENSORS, 0)
        assert whole(cache, reqid, 6 * ROWS)


def test_moved_pages_are_shared_swapped_and_freed(backend: str) -> None:
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
        assert cache.stats().host_pages == UNIT * TENSORS, "the recorded prefix holds it"
        taken = cache.alloc_prefix([*range(PART), 1])
        assert taken is not None
        assert whole(cache, *taken)
        cache.free_reqid(taken[0])
        cache.trim(prefixes=True)
        cache.check_integrity()
        assert (cache.stats().host_pages, cache.stats().mapped_bytes) == (0, 0)


def test_the_next_owner_gets_device_pages(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context, max_batch=1) as cache:
        reqid = start(cache, PART + 1)
        cache.move(reqid, "host")
        cache.free_reqid(reqid)
        assert cache.alloc_reqid(PART) == reqid
        assert cache.step([PART]) == 0
        assert cache.snapshot()[reqid].away_pages == 0
        assert cache.stats().host_pages == 0
        assert is_zero(cache, reqid, 0, PART)


def test_move_frees_memory_for_others(backend: str) -> None:
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
            assert cache.move(one, "device").pages == 5 * TENSORS, "unowned pages are reclaimed"
            assert whole(cache, one, 5 * ROWS)


def test_a_limit_on_the_host(backend: str) -> None:
    with with_tiers(backend) as context:
        page = context.info.granule
        with cache_over(context, host_limit=5 * TENSORS * page) as cache:
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


def test_a_tier_that_fills_up_during_a_move(backend: str) -> None:
    with with_tiers(backend) as probe:
        page = probe.info.granule
    slab = 4 * TENSORS * page
    with (
        open_context(backend, slab_size=slab, mem_limit=4 * slab) as context,
        cache_over(context, max_batch=2) as cache,
    ):
        one = start(cache, 9 * ROWS)  # fills three of the four slabs
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
            ({"location": "device", "device": 0}, "location 'device' takes no device"),
            ({"location": "device", "tokens": (0, 9)}, f"tokens 0 to 9: reqid 0 holds {ROWS}"),
            ({"location": "device", "tokens": (3, 2)}, "tokens 3 to 2"),
            ({"location": "device", "tokens": (-1, 2)}, "tokens -1 to 2"),
            ({"location": "device", "tokens": (1, 2, 3)}, "tokens must be a range"),
            ({"location": "device", "tokens": "ab"}, "tokens must be a range"),
            (
                {"location": "device", "tokens": range(0, ROWS, 2)},
                rf"tokens is range\(0, {ROWS}, 2\); the step of a range must be 1",
            ),
        ):
            with pytest.raises(InvalidArgument, match=text):
                cache.move(reqid, **arguments)  # type: ignore[arg-type]
        for location, cap in ((Location.HOST, Caps.HOST_PAGES), (Location.PEER, Caps.PEER)):
            info = dataclasses.replace(context.info, caps=context.info.caps & ~cap)
            monkeypatch.setattr(context, "info", info)
            with pytest.raises(NotSupported, match=f"move: back end {info.backend} has no") as got:
                cache.move(reqid, location)
            assert got.value.errno == errno.EOPNOTSUPP
        devices = (context.info.devices[0], 7)
        caps = context.info.caps | Caps.PEER
        info = dataclasses.replace(context.info, caps=caps, devices=devices)
        monkeypatch.setattr(context, "info", info)
        with pytest.raises(InvalidArgument, match="'peer' needs one of the context's devices"):
            cache.move(reqid, "peer")
        for device in (context.info.devices[0], 97):
            with pytest.raises(
                InvalidArgument, match=f"device {device} is not one of the context's"
            ):
                cache.move(reqid, "peer", device)
        assert state(cache) == before


def test_blocks_in_pieces_go_to_the_host_and_get_large_entries(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context, host_limit=0) as cache:
        rows = 2 * PART + 3
        reqid, _ = in_pieces(cache, rows)
        assert cache.promote(reqid) == 2
        settled(cache, reqid)
        assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        if Caps.HOST_PAGES in context.info.caps:
            moved = cache.move(reqid, "host", tokens=(ROWS, PART + ROWS))
            assert moved == Moved(UNIT * TENSORS, 0)
            assert cache.snapshot()[reqid].large_pages == 0, "part of each block is off-device"
            assert whole(cache, reqid, rows)
            assert cache.move(reqid, "device").pages == UNIT * TENSORS
        cache.check_integrity()
        assert whole(cache, reqid, rows)


# ---- faults --------------------------------------------------------------------------------------


def test_a_copy_that_fails_is_raised_by_the_next_step(backend: str) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache, FdEvent.create() as work:
        reqid = start(cache, 2 * PART)
        held = cache.stats().mapped_bytes
        cache.move(reqid, "host", stream=work, wait=False)
        context.inject(Inject.MAP)
        work.set()
        eventually(lambda: cache._groups[0].mover.moves[cache._groups[0].table[reqid]].done())
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
    """Returns calls that move and promote two requests, with and without waiting; they do not
    change the first request's rows.
    """
    step = lambda: cache.step(lens(cache))  # noqa: E731
    host = Caps.HOST_PAGES in cache.context.info.caps

    def move(*arguments: Any, **options: Any) -> object:
        return cache.move(*arguments, **options) if host else 0

    def over() -> None:
        eventually(lambda: all(one.done() for one in cache._groups[0].mover.moves.values()))

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
    """Fails the nth driver call and, if `count` is 2, also the next one, made by the rollback."""
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
                    lost = {slot.index for slot in cache._groups[0].table if slot.rows_lost}
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
        skip += 1 if context.info.granule < 1 << 20 else 61  # calls on large pages are slow
    assert skip > (10 if one_call else 30), "the run makes more driver calls than that"
