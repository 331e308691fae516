# SPDX-License-Identifier: MIT
"""Checks that a request keeps its rows until it frees all or some of them."""

from __future__ import annotations

import pytest
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    grown,
    lens,
    rows_are,
    rows_are_zero,
    small_cache,
    started,
    state,
)
from move_helpers import PART, UNIT, cache_over, in_pieces, in_slabs, settled, with_tiers
from share_helpers import grow, read_rows, start, whole, write_rows
from test_kvcache_layers import holds
from test_layered_share import UNIT as JOINT
from test_layered_share import shared as layered
from test_layered_share import started as layered_start

from pyvmem import Context, DriverError, FdEvent, Inject, InvalidArgument, VMemError

TENSORS = 2 * LAYERS
IDS = list(range(100, 100 + 6 * ROWS))


# ---- rows that a step leaves alone ---------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
def test_a_request_that_a_step_does_not_name_keeps_its_rows(context: Context, number: int) -> None:
    rows = 2 * ROWS + 3
    with small_cache(context) as cache:
        one, other = started(cache, rows, 3.0), started(cache, 4, 5.0)
        used = cache.stats().used_bytes
        want = lens(cache, **{f"r{one}": number, f"r{other}": 5})
        assert cache.step_async(want) == 0
        assert cache.step(want) == 0
        assert [cache.snapshot()[reqid].seq_len for reqid in (one, other)] == [rows, 5]
        assert cache.stats().used_bytes == used + TENSORS * cache.layout.row_bytes
        cache.check_integrity()
        child = cache.fork(one)
        assert child is not None
        assert rows_are(cache, child, 0, rows, 3.0)
        cache.free_reqid(child)
        assert cache.record(one, IDS[:rows]) == 2 * ROWS
        swapped = cache.swap_out(one)
        assert swapped.seq_len == rows
        back = cache.swap_in(swapped)
        assert back is not None
        assert rows_are(cache, back, 0, rows, 3.0)
        assert rows_are(cache, other, 0, 4, 5.0)


def test_a_step_without_a_request_maps_nothing_for_it(context: Context) -> None:
    """A prefix's rows stay mapped; the rows that a kernel reads past them are mapped once a step
    includes the request.
    """
    with small_cache(context, overread_rows=4) as cache:
        cache.free_reqid(started(cache, 2 * ROWS), tokens=IDS[: 2 * ROWS])
        taken = cache.alloc_prefix(IDS[: 2 * ROWS + 1])
        assert taken is not None
        mapped = cache.snapshot()[taken[0]].mapped_pages
        assert cache.step(lens(cache)) == 0
        assert cache.snapshot()[taken[0]].mapped_pages == mapped
        assert cache.snapshot()[taken[0]].seq_len == 2 * ROWS


def test_unequal_layers_keep_their_rows(context: Context) -> None:
    with layered(context) as cache:
        one, tags = layered_start(cache, JOINT + 3)
        other, _ = layered_start(cache, 2, 500)
        want = [0] * cache.caches[0].config.max_batch
        want[other] = 3
        assert cache.step(want) == 0
        back = cache.swap_in(cache.swap_out(one))
        assert back is not None
        assert holds(cache, back, tags)


# ---- truncation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, ROWS, ROWS + 3, 3 * ROWS + 1])
def test_truncate_frees_rows_and_whole_pages(context: Context, length: int) -> None:
    rows, kept = 3 * ROWS + 2, -(-length // ROWS)
    with small_cache(context) as cache:
        reqid = started(cache, rows)
        assert cache.truncate(reqid, length) == 0
        info, now = cache.snapshot()[reqid], cache.stats()
        assert (info.seq_len, info.granted_pages, info.mapped_pages) == (length, kept, 4)
        assert (now.active_pages, now.cached_pages) == (kept * TENSORS, (4 - kept) * TENSORS)
        assert now.used_bytes == length * TENSORS * cache.layout.row_bytes
        cache.check_integrity()
        assert rows_are(cache, reqid, 0, length, 1.0)
        assert cache.step(lens(cache, **{f"r{reqid}": rows})) == 0
        assert cache.stats().grown_pages == 4 * TENSORS, "it gets its own pages back"
        assert rows_are(cache, reqid, 0, min(rows, kept * ROWS), 1.0), (
            "the page's contents must be intact"
        )
        if kept < 4:
            assert rows_are_zero(cache, reqid, kept * ROWS, rows)
        grown(cache, reqid, length, rows, 7.0)
        assert rows_are(cache, reqid, 0, length, 1.0)
        assert rows_are(cache, reqid, length, rows, 7.0)


@pytest.mark.parametrize("zero_fill", [True, False])
def test_truncate_frees_overread_pages_of_a_prompt(context: Context, zero_fill: bool) -> None:
    """The request can get the freed pages back immediately; another request must wait for work that
    may still be reading them.
    """
    rows, limit = 2 * ROWS + 2, 6 * TENSORS * context.info.granule
    options = {"overread_rows": 2 * ROWS, "zero_fill": zero_fill, "memory_limit": limit}
    with FdEvent.create() as work, small_cache(context, **options) as cache:
        one = started(cache, rows, 3.0)
        assert cache.snapshot()[one].granted_pages == 5
        assert cache.truncate(one, rows, work) == 0
        info, now = cache.snapshot()[one], cache.stats()
        assert (info.seq_len, info.granted_pages, info.mapped_pages) == (rows, 3, 5)
        assert (now.active_pages, now.ahead_pages) == (3 * TENSORS, 2 * TENSORS)
        cache.check_integrity()
        assert cache.truncate(one, rows, work) == 0, "repeated: there is nothing to free"
        assert cache.step(lens(cache, **{f"r{one}": 3 * ROWS + 1})) == 0
        now = cache.stats()
        assert (now.grown_pages, now.zeroed_pages) == (5 * TENSORS, 0), "no one wrote to them"
        other = cache.alloc_reqid()
        with firing_later(work) as fired:
            want = lens(cache, **{f"r{one}": 3 * ROWS + 1, f"r{other}": 2 * ROWS})
            assert cache.step(want) == 0
            assert fired, "a page that the work may read was reused"
        assert cache.snapshot()[one].mapped_pages == 4
        assert rows_are(cache, one, 0, rows, 3.0)
        if zero_fill:
            assert rows_are_zero(cache, other or 0, 0, 2 * ROWS)


def test_freed_pages_are_the_next_that_another_request_gets(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=4 * TENSORS * page) as cache:
        one = started(cache, 4 * ROWS, 3.0)
        other = cache.alloc_reqid()
        assert other is not None
        want = lens(cache, **{f"r{one}": ROWS + 1, f"r{other}": 2 * ROWS})
        assert cache.step(want) == -1, "a smaller length in a step frees nothing"
        assert not cache.can_admit([2 * ROWS])
        assert cache.truncate(one, ROWS + 1) == 0
        assert cache.can_admit([2 * ROWS])
        assert cache.step(want) == 0
        assert rows_are_zero(cache, other, 0, 2 * ROWS)
        assert rows_are(cache, one, 0, ROWS + 1, 3.0)
        assert cache.step(lens(cache, **{f"r{one}": 4 * ROWS})) == -1


@pytest.mark.needs_tensors  # the library rejects its own reads of pages that are being unmapped
@pytest.mark.parametrize("deferred", [True, False])
def test_freed_pages_wait_for_the_work_on_them(context: Context, deferred: bool) -> None:
    shape = {"memory_limit": 4 * TENSORS * context.info.granule, "deferred_reclaim": deferred}
    with FdEvent.create() as work, small_cache(context, **shape) as cache:
        one = started(cache, 3 * ROWS, 3.0)
        assert cache.truncate(one, ROWS, work) == 0
        assert rows_are(cache, one, 0, 3 * ROWS, 3.0), "the rows must stay mapped for the work"
        other = cache.alloc_reqid()
        with firing_later(work) as fired:
            assert cache.step(lens(cache, **{f"r{one}": ROWS, f"r{other}": 2 * ROWS})) == 0
            assert fired
        assert rows_are_zero(cache, other or 0, 0, 2 * ROWS)


def test_reused_pages_are_zeroed_after_the_work_on_them(context: Context) -> None:
    with FdEvent.create() as work, small_cache(context) as cache:
        one = started(cache, 3 * ROWS, 3.0)
        assert cache.truncate(one, ROWS, work) == 0
        with firing_later(work) as fired:
            assert cache.step(lens(cache, **{f"r{one}": 3 * ROWS})) == 0
            assert fired
        assert rows_are_zero(cache, one, ROWS, 3 * ROWS)


def test_the_next_owner_sees_no_truncated_rows(context: Context) -> None:
    with small_cache(context, max_batch=1) as cache:
        one = started(cache, 4 * ROWS, 3.0)
        assert cache.truncate(one, ROWS) == 0
        cache.free_reqid(one)
        assert started(cache, 0) == one
        assert cache.step([4 * ROWS]) == 0
        assert rows_are_zero(cache, one, 0, 4 * ROWS)


def test_pages_promised_by_step_async_stay_promised(context: Context) -> None:
    with small_cache(context) as cache:
        one = started(cache, 2 * ROWS)
        assert cache.step_async(lens(cache, **{f"r{one}": 4 * ROWS})) == 0
        assert cache.truncate(one, ROWS - 1) == 0
        cache.check_integrity()
        assert cache.step(lens(cache, **{f"r{one}": 4 * ROWS})) == 0
        assert rows_are(cache, one, 0, ROWS, 1.0)
        stamped = cache.snapshot()[one]
        assert (stamped.seq_len, stamped.granted_pages) == (4 * ROWS, 4)


def test_speculation_rolls_back_rejected_tokens(context: Context) -> None:
    """Each step adds a token and four draft tokens, then keeps one to five of the five rows; a page
    holds eight rows.
    """
    with small_cache(context) as cache:
        one, tags = start(cache, 3), [1, 2, 3]
        for turn in range(12):
            held, kept = len(tags), 1 + turn % 5
            if held + 5 > 6 * ROWS:
                break
            grow(cache, one, held, held + 5, 1000 * (turn + 1) - held)
            tags += [1000 * (turn + 1) + n for n in range(kept)]
            assert cache.truncate(one, len(tags)) == 0
            assert cache.snapshot()[one].granted_pages == -(-len(tags) // ROWS)
            assert read_rows(cache, one, 0, tags)
        cache.check_integrity()
        assert cache.stats().grown_pages <= 6 * TENSORS


def test_invalid_truncations(context: Context) -> None:
    with small_cache(context) as cache:
        one = started(cache, ROWS + 1)
        before = state(cache)
        for reqid, length, text in (
            (one, ROWS + 2, rf"length {ROWS + 2}: reqid {one} holds {ROWS + 1} tokens"),
            (one, -1, f"length -1: reqid {one} holds"),
            (3, 0, "reqid 3 is not taken"),
            (4, 0, "reqid 4 is not between 0 and 3"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                cache.truncate(reqid, length)
        with pytest.raises(TypeError):
            cache.truncate(one, 1.5)  # type: ignore[arg-type]
        assert cache.truncate(one, ROWS + 1) == 0
        assert state(cache) == before


def test_a_window_cannot_be_truncated_into_unmapped_rows(context: Context) -> None:
    shape = {"window": 8, "window_tile": 4, "max_seq_len": 12 * ROWS}
    with small_cache(context, **shape) as cache:
        one = cache.alloc_reqid()
        assert one is not None
        for row in range(41):
            grow(cache, one, row, row + 1)
        eventually(lambda: not cache.snapshot()[one].in_flight)
        before = state(cache)
        with pytest.raises(InvalidArgument, match="length 31: with fewer than 32 tokens"):
            cache.truncate(one, 31)
        assert state(cache) == before
        assert cache.truncate(one, 37) == 0, "four tokens rolled back"
        assert read_rows(cache, one, 37 - 8, list(range(37 - 8 + 1, 38)))
        for length in range(38, 12 * ROWS):
            want = lens(cache, **{f"r{one}": length})
            assert cache.step(want) == 0


# ---- shared pages --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 3, ROWS, 2 * ROWS - 1])
def test_truncate_drops_a_reference_to_shared_pages(context: Context, length: int) -> None:
    """The prefix stays intact for others; the kept part of a shared page becomes writable."""
    with small_cache(context) as cache:
        cache.free_reqid(started(cache, 3 * ROWS, 3.0), tokens=IDS[: 3 * ROWS])
        taken = cache.alloc_prefix(IDS[: 3 * ROWS + 1])
        assert taken is not None
        one = taken[0]
        grown(cache, one, 3 * ROWS, 4 * ROWS, 5.0)
        assert cache.truncate(one, length) == 0
        info = cache.snapshot()[one]
        assert (info.shared_pages, info.granted_pages) == (length // ROWS, -(-length // ROWS))
        cache.check_integrity()
        assert rows_are(cache, one, 0, length, 3.0)
        grown(cache, one, length, 4 * ROWS, 7.0)
        assert rows_are(cache, one, 0, length, 3.0)
        assert rows_are(cache, one, length, 4 * ROWS, 7.0)
        cache.trim(prefixes=True)
        assert cache.match(IDS).length == length // ROWS * ROWS, "what it keeps alone"
        cache.free_reqid(one)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_fork_truncates_rows_that_its_parent_keeps(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, 2 * ROWS + 3, 3.0)
        child = cache.fork(parent)
        assert child is not None
        assert cache.truncate(child, ROWS + 2) == 0
        grown(cache, child, ROWS + 2, 3 * ROWS, 5.0)
        assert rows_are(cache, child, 0, ROWS + 2, 3.0)
        assert rows_are(cache, parent, 0, 2 * ROWS + 3, 3.0)
        assert cache.truncate(parent, ROWS - 1) == 0
        grown(cache, parent, ROWS - 1, 2 * ROWS, 9.0)
        assert rows_are(cache, child, 0, ROWS + 2, 3.0)
        assert rows_are(cache, parent, 0, ROWS - 1, 3.0)


def test_a_copy_that_finds_no_memory_changes_nothing(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=4 * TENSORS * page) as cache:
        parent = started(cache, 2 * ROWS, 3.0)
        child = cache.fork(parent)
        assert child is not None
        other = started(cache, 2 * ROWS, 5.0)
        before = cache.snapshot()
        assert cache.truncate(child, ROWS + 2) == -1
        assert cache.snapshot() == before
        assert cache.truncate(child, ROWS) == 0, "whole pages need no copy"
        cache.free_reqid(other)
        assert cache.truncate(parent, ROWS + 2) == 0
        grown(cache, parent, ROWS + 2, 2 * ROWS, 9.0)
        assert rows_are(cache, parent, 0, ROWS + 2, 3.0)


@pytest.mark.parametrize("skip", range(4))
def test_a_driver_that_fails_leaves_rows_as_they_are(host: Context, skip: int) -> None:
    with small_cache(host) as cache:
        parent = started(cache, 2 * ROWS, 3.0)
        child = cache.fork(parent)
        assert child is not None
        before = cache.snapshot()
        host.inject(Inject.MAP | Inject.UNMAP | Inject.FILL, skip=skip)
        try:
            answer = cache.truncate(child, ROWS + 2)
        except VMemError as error:
            assert isinstance(error, DriverError)
            assert cache.snapshot() == before
            host.inject(Inject.MAP, count=0)
            answer = cache.truncate(child, ROWS + 2)
        host.inject(Inject.MAP, count=0)
        assert answer == 0
        cache.check_integrity()
        assert rows_are(cache, child, 0, ROWS + 2, 3.0)
        assert rows_are(cache, parent, 0, 2 * ROWS, 3.0)


@pytest.mark.parametrize("length", [0, 3, JOINT, JOINT + 3, 2 * JOINT - 1])
def test_unequal_layers_are_truncated_together(context: Context, length: int) -> None:
    with layered(context) as cache:
        ids = IDS[:2] * (2 * JOINT)
        one, tags = layered_start(cache, 2 * JOINT)
        cache.free_reqid(one, tokens=ids[: 2 * JOINT])
        taken = cache.alloc_prefix(ids[: 2 * JOINT + 1])
        assert taken is not None
        one = taken[0]
        assert cache.truncate(one, length) == 0
        assert {part.snapshot()[one].seq_len for part in cache.caches} == {length}
        cache.check_integrity()
        assert holds(cache, one, tags[:length])
        want = [0] * cache.caches[0].config.max_batch
        want[one] = 2 * JOINT
        assert cache.step(want) == 0
        for part in cache.caches:
            write_rows(part, one, length, list(range(900, 900 + 2 * JOINT - length)))
        assert holds(cache, one, tags[:length])
        other = cache.alloc_prefix(ids[: 2 * JOINT + 1])
        assert other is not None
        assert holds(cache, other[0], tags[: other[1]])


# ---- large entries and tiers ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, UNIT * ROWS - 1, PART + 3])
def test_large_entries_are_kept_until_memory_is_short(backend: str, length: int) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        one, two = in_pieces(cache, 2 * PART + 3)
        assert cache.promote(one, wait=True) == 2
        assert cache.truncate(one, length) == 0
        cache.check_integrity()
        assert whole(cache, one, length)
        cache.trim()
        cache.check_integrity()
        assert whole(cache, one, length)
        assert cache.snapshot()[one].mapped_pages == -(-length // PART) * UNIT
        assert context.stats().splits == 0
        grow(cache, one, length, 2 * PART, 5000)
        assert whole(cache, one, length)
        assert whole(cache, two, 2 * PART + 3, 500)


@pytest.mark.parametrize("length", [3, PART - 2, PART, PART + 3])
def test_shared_blocks_are_split_where_a_child_ends(backend: str, length: int) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache:
        one, _ = in_pieces(cache, 2 * PART)
        assert cache.promote(one, wait=True) == 2
        child = cache.fork(one)
        assert child is not None
        assert cache.truncate(child, length) == 0
        cache.check_integrity()
        grow(cache, child, length, 2 * PART, 5000)
        assert whole(cache, child, length)
        assert whole(cache, one, 2 * PART)


def test_moves_in_flight_past_the_rows_are_stopped(backend: str) -> None:
    with in_slabs(backend) as context, cache_over(context) as cache, FdEvent.create() as work:
        one, _ = in_pieces(cache, PART + 1)
        assert cache.promote(one, stream=work) == 1
        assert cache.truncate(one, PART) == 0
        assert cache.snapshot()[one].moving_pages == UNIT, "no page of it is unmapped"
        assert cache.truncate(one, PART - 3) == 0
        assert cache.snapshot()[one].moving_pages == 0
        work.set()
        grow(cache, one, PART - 3, PART + ROWS, 900)
        assert cache.step(lens(cache)) == 0
        assert whole(cache, one, PART - 3)
        assert read_rows(cache, one, PART - 3, list(range(900 + PART - 3, 900 + PART + ROWS)))


@pytest.mark.parametrize("length", [0, ROWS, ROWS + 2, 3 * ROWS - 1])
@pytest.mark.parametrize("wait", [False, True])
def test_off_device_pages_are_freed(backend: str, length: int, wait: bool) -> None:
    with with_tiers(backend) as context, cache_over(context) as cache:
        one = start(cache, 3 * ROWS)
        cache.move(one, "host", wait=wait)
        assert cache.truncate(one, length) == 0
        settled(cache, one)
        cache.check_integrity()
        kept = -(-length // ROWS)
        assert cache.snapshot()[one].granted_pages == kept
        assert cache.stats().host_pages == kept * cache.layout.num_tensors
        assert whole(cache, one, length)
        grow(cache, one, length, 4 * ROWS, 900)
        assert whole(cache, one, length)
