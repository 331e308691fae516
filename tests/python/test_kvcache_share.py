# SPDX-License-Identifier: MIT
"""Tests forks of a request: pages are shared or copied, and no row is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest
from conftest import open_context
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    grown,
    lens,
    pending,
    rows_are,
    rows_are_zero,
    small_cache,
    started,
    state,
    without,
)

from pyvmem import (
    Caps,
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    NotRecoverable,
    NotSupported,
    ReadOnly,
)

TENSORS = 2 * LAYERS


# ---- pages of a fork -----------------------------------------------------------------------------


def test_a_fork_shares_full_pages_and_copies_the_last(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, 2 * ROWS + 3)
        before = cache.stats()
        child = cache.fork(parent)
        assert child is not None
        assert child != parent
        now = cache.stats()
        assert now.active_pages == before.active_pages + TENSORS, "one copied page in each tensor"
        assert now.shared_pages == 2 * TENSORS
        assert now.used_bytes - before.used_bytes == 3 * TENSORS * cache.layout.row_bytes
        info = cache.snapshot()[child]
        assert (info.seq_len, info.shared_pages, info.granted_pages) == (2 * ROWS + 3, 2, 3)
        assert rows_are(cache, child, 0, 2 * ROWS + 3, 1.0)
        grown(cache, parent, 2 * ROWS + 3, 3 * ROWS, 2.0)
        assert rows_are_zero(cache, child, 2 * ROWS + 3, 3 * ROWS)
        grown(cache, child, 2 * ROWS + 3, 4 * ROWS, 3.0)
        assert rows_are(cache, parent, 2 * ROWS + 3, 3 * ROWS, 2.0)
        assert rows_are(cache, parent, 0, 2 * ROWS + 3, 1.0)
        assert rows_are(cache, child, 0, 2 * ROWS + 3, 1.0)


def test_a_fork_onto_named_slots(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, ROWS + 3)
        cache.free_reqid(started(cache, 2 * ROWS, 9.0))  # its pages are still mapped in the slot
        assert cache.fork(parent, into=3) == 3
        assert cache.fork_many(parent, 2, ROWS + 1, into=[2, 1]) == [2, 1]
        for child, length in ((1, ROWS + 1), (2, ROWS + 1), (3, ROWS + 3)):
            assert cache.snapshot()[child].seq_len == length
            assert rows_are(cache, child, 0, length, 1.0)
        grown(cache, 1, ROWS + 1, 2 * ROWS, 2.0)
        assert rows_are(cache, 2, 0, ROWS + 1, 1.0)
        cache.free_reqid(2)
        eventually(lambda: not cache.snapshot()[2].in_flight)
        before = state(cache)
        for into, text in (
            ([3], "reqid 3 is taken"),
            ([4], "reqid 4 is not between 0 and 3"),
            ([-1], "reqid -1 is not between"),
            ([2, 2], r"len\(into\) is 2; it must be count, 1"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                cache.fork_many(parent, 1, into=into)
        with pytest.raises(InvalidArgument, match=r"into names a slot twice: \[2, 2\]"):
            cache.fork_many(parent, 2, into=[2, 2])
        with pytest.raises(InvalidArgument, match="reqid 0 is taken"):
            cache.fork(parent, into=parent)
        assert state(cache) == before


def test_a_shorter_fork(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, 3 * ROWS)
        for length in (0, 1, ROWS, ROWS + 1, 3 * ROWS):
            child = cache.fork(parent, length)
            assert child is not None
            assert cache.snapshot()[child].seq_len == length
            assert cache.snapshot()[child].shared_pages == length // ROWS
            assert rows_are(cache, child, 0, length, 1.0)
            grown(cache, child, length, 5 * ROWS, 4.0)
            assert rows_are(cache, child, length, 5 * ROWS, 4.0)
            assert rows_are(cache, parent, 0, 3 * ROWS, 1.0)
            cache.check_integrity()
            cache.free_reqid(child)


def test_parallel_samples_are_independent_and_outlive_the_parent(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, ROWS + 2)
        forked = cache.fork_many(parent, 3)
        assert forked is not None
        assert len({parent, *forked}) == 4
        assert cache.stats().active_pages == (1 + 4) * TENSORS
        cache.free_reqid(parent)
        for tag, child in enumerate(forked, 10):
            grown(cache, child, ROWS + 2, 2 * ROWS + 1, float(tag))
        for tag, child in enumerate(forked, 10):
            assert rows_are(cache, child, 0, ROWS + 2, 1.0)
            assert rows_are(cache, child, ROWS + 2, 2 * ROWS + 1, float(tag))
        for child in forked:
            cache.free_reqid(child)
        eventually(lambda: cache.stats().shared_pages == 0)


def test_a_beam_forks_at_every_token(context: Context) -> None:
    with small_cache(context, max_batch=3) as cache:
        beam = started(cache, 1, 0.0)
        for length in range(2, 4 * ROWS):
            child = cache.fork(beam)
            assert child is not None
            cache.free_reqid(beam)
            beam = child
            grown(cache, beam, length - 1, length, float(length))
            cache.check_integrity()
        assert all(rows_are(cache, beam, n - 1, n, float(n)) for n in range(2, 4 * ROWS))
        assert cache.snapshot()[beam].shared_pages == 3


def test_a_row_across_two_pages(context: Context) -> None:
    """Forks after the row that crosses the first page boundary: part of that row is shared, the
    rest is copied.
    """
    page = context.info.granule
    shape = {"num_kv_heads": 3, "head_dim": 32, "max_seq_len": 3 * page // 384}
    with small_cache(context, **shape) as cache:
        assert page % cache.layout.row_bytes
        rows = page // 384 + 1
        parent = started(cache, rows, 7.0)
        child = cache.fork(parent)
        assert child is not None
        assert cache.snapshot()[child].shared_pages == 1
        grown(cache, child, rows, rows + 2, 8.0)
        assert rows_are(cache, child, 0, rows, 7.0)
        assert rows_are(cache, child, rows, rows + 2, 8.0)
        assert rows_are(cache, parent, 0, rows, 7.0)


def test_pages_of_several_granules(context: Context) -> None:
    sizes = [size for size in context.info.page_sizes if size <= 2 << 20]
    size = sizes[min(1, len(sizes) - 1)]
    shape = {"page_size": size, "num_kv_heads": size // (ROWS * 256)}
    with small_cache(context, memory_limit=64 * TENSORS * size, **shape) as cache:
        parent = started(cache, 2 * ROWS + 1)
        child = cache.fork(parent)
        assert child is not None
        assert cache.snapshot()[child].shared_pages == 2
        cache.record(parent, range(2 * ROWS))
        cache.free_reqid(parent)
        assert rows_are(cache, child, 0, 2 * ROWS + 1, 1.0)
        cache.free_reqid(child)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


# ---- read-only -----------------------------------------------------------------------------------


def test_a_write_to_a_shared_page_is_an_error(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, ROWS + 1)
        child = cache.fork(parent)
        assert child is not None
        for reqid in (parent, child):
            offset = cache.layout.offset(reqid, 0, 1)
            with pytest.raises(ReadOnly):
                cache.reservation.write(offset, b"x")
            cache.reservation.write(offset + cache.layout.page_size, b"x")
        assert rows_are(cache, child, 0, ROWS, 1.0)


FAULT = """
from pyvmem import KVCache, KVCacheConfig
config = KVCacheConfig(1, 1, 128, "float32", 2, 32, page_size=4096, memory_limit=1 << 20)
cache = KVCache(config, backend="host")
parent = cache.alloc_reqid(9)
cache.step([9, 0])
child = cache.fork(parent)
memory = cache.reservation.buffer()
memory[cache.layout.offset(child, 1)] = 1
print("own page written", flush=True)
memory[cache.layout.offset({where}, 0)] = 1
print("shared page written", flush=True)
"""


@pytest.mark.parametrize("where", ["parent", "child"])
def test_a_cpu_write_to_a_shared_page_crashes_the_process(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULT.format(where=where)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "own page written\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


# ---- freeing -------------------------------------------------------------------------------------


def test_shared_pages_stay_until_their_last_request_and_its_work(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        parent = started(cache, 2 * ROWS)
        child = cache.fork(parent)
        assert child is not None
        cache.free_reqid(parent)
        eventually(lambda: cache.snapshot()[parent].mapped_pages == 0)
        assert cache.stats().shared_pages == 2 * TENSORS
        cache.free_reqid(child, work)
        assert cache.stats().active_pages == 0
        assert cache.stats().shared_pages == 2 * TENSORS
        cache.check_integrity()
        work.set()
        eventually(lambda: cache.stats().mapped_bytes == 0)


@pytest.mark.needs_tensors  # the library rejects its own reads while a batch is in flight
def test_nothing_is_unmapped_under_running_work(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        parent = started(cache, 2 * ROWS)
        child = cache.fork(parent)
        assert child is not None
        cache.free_reqid(parent)
        cache.free_reqid(child, work)
        for _ in range(10):
            assert rows_are(cache, child, 0, 2 * ROWS, 1.0)
        work.set()


def test_a_fork_waits_for_the_work_that_writes_the_rows(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        parent = started(cache, ROWS + 1)
        with firing_later(work) as fired:
            assert cache.fork(parent, stream=work) is not None
            assert fired


def test_the_next_owner_of_a_slot_sees_nothing_of_a_fork(context: Context) -> None:
    with small_cache(context, max_batch=2) as cache:
        parent = started(cache, 3 * ROWS, 9.0)
        child = cache.fork(parent)
        assert child is not None
        cache.free_reqid(child)
        other = cache.alloc_reqid(3 * ROWS)
        assert other == child
        assert cache.step(lens(cache, **{f"r{parent}": 3 * ROWS, f"r{other}": 3 * ROWS})) == 0
        assert rows_are_zero(cache, other, 0, 3 * ROWS)
        assert rows_are(cache, parent, 0, 3 * ROWS, 9.0)


def test_a_slot_whose_shared_pages_could_not_be_unmapped(context: Context) -> None:
    with small_cache(context, max_batch=2) as cache:
        parent = started(cache, 2 * ROWS, 9.0)
        child = cache.fork(parent)
        assert child is not None
        context.inject(Inject.UNMAP)
        cache.free_reqid(child)
        eventually(lambda: not cache.snapshot()[child].in_flight)
        context.inject(Inject.UNMAP, count=0)
        cache.check_integrity()
        other = cache.alloc_reqid()
        assert other == child
        want = lens(cache, **{f"r{parent}": 2 * ROWS, f"r{other}": 2 * ROWS})
        with pytest.raises(DriverError):
            cache.step(want)
        assert cache.step(want) == 0
        assert rows_are_zero(cache, other, 0, 2 * ROWS)
        assert rows_are(cache, parent, 0, 2 * ROWS, 9.0)


# ---- no memory, bad input, failures --------------------------------------------------------------


def test_without_a_slot_or_memory_nothing_changes(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, max_batch=3, memory_limit=limit) as cache:
        parent = started(cache, 3 * ROWS + 1)
        before = state(cache)
        assert cache.fork(parent) is None, "there is no page for the copy"
        assert cache.fork_many(parent, 3, 0) is None, "only two slots are free"
        assert state(cache) == before
        assert cache.fork(parent, 3 * ROWS) is not None, "a fork at a page boundary needs no page"


def test_memory_of_free_slots_is_reclaimed_for_a_fork(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, max_batch=3, memory_limit=limit) as cache:
        parent = started(cache, ROWS + 1)
        other = started(cache, 2 * ROWS, 5.0)
        cache.free_reqid(other)
        child = cache.fork(parent)
        assert child is not None
        assert rows_are(cache, child, 0, ROWS + 1, 1.0)


def test_bad_forks(context: Context) -> None:
    with small_cache(context) as cache:
        parent = started(cache, ROWS)
        before = state(cache)
        for reqid in (-1, 1, 4, 99):
            with pytest.raises(InvalidArgument, match=f"reqid {reqid} is not"):
                cache.fork(reqid)
        for length in (-1, ROWS + 1):
            with pytest.raises(InvalidArgument, match=f"length {length}: reqid 0 holds {ROWS}"):
                cache.fork(parent, length)
        for count in (0, -1, 5):
            with pytest.raises(InvalidArgument, match=f"fork of {count} requests"):
                cache.fork_many(parent, count)
        for bad in ("1", 1.0):
            with pytest.raises(TypeError):
                cache.fork(parent, bad)  # type: ignore[arg-type]
        for bad in (None, "1", 1.0):  # for `fork`, None means all rows
            with pytest.raises(TypeError):
                cache.truncate(parent, bad)  # type: ignore[arg-type]
        assert state(cache) == before


def test_every_driver_call_of_a_fork_may_fail(context: Context) -> None:
    kinds = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL
    with small_cache(context) as cache:
        parent = started(cache, 2 * ROWS + 1)
        for skip in range(200):
            context.inject(kinds, skip=skip)
            try:
                child = cache.fork(parent)
            except DriverError:
                child = -1
            context.inject(kinds, count=0)
            cache.check_integrity()
            assert rows_are(cache, parent, 0, 2 * ROWS + 1, 1.0)
            assert [slot.state for slot in cache.snapshot()].count("active") == 1 + (child != -1)
            if child != -1:
                break
        assert skip > 2
        assert child is not None
        assert rows_are(cache, child, 0, 2 * ROWS + 1, 1.0)
        grown(cache, parent, 2 * ROWS + 1, 3 * ROWS, 2.0)
        grown(cache, child, 2 * ROWS + 1, 3 * ROWS, 3.0)


def test_a_request_whose_rows_are_lost_is_named(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        if Caps.ONE_CALL in context.info.caps:
            pytest.skip("a batch is one driver call: there is nothing to roll back")
        parent = started(cache, 2 * ROWS + 1)
        other = started(cache, ROWS, 5.0)
        for skip in range(64):  # new mappings are created first, so a failure there loses nothing
            context.inject(Inject.MAP, skip=skip, count=64)
            with pytest.raises((DriverError, NotRecoverable)) as failed:
                cache.fork(parent)
            context.inject(Inject.MAP, count=0)
            cache.check_integrity()
            if failed.type is NotRecoverable:
                break
            assert rows_are(cache, parent, 0, 2 * ROWS + 1, 1.0)
        assert skip > 0
        assert failed.match(f"reqid {parent} has lost its rows")
        cache.free_reqid(parent)
        assert cache.snapshot()[parent].state == "broken"
        cache.check_integrity()
        child = cache.fork(other)
        assert child is not None
        assert rows_are(cache, child, 0, ROWS, 5.0)
        cache.trim(prefixes=True)


def test_a_fork_of_a_quarantined_page_raises(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The back end refuses a handle to the page, so the fork's batch is never complete."""

    def refuse(*_: object) -> None:
        raise NotRecoverable("quarantined", errno=errno.ENOTRECOVERABLE, op="vmem_gather")

    with small_cache(context) as cache:
        parent = started(cache, 2 * ROWS + 1)
        monkeypatch.setattr(cache.context, "gather", refuse)
        with pytest.raises(NotRecoverable, match="quarantined"):
            cache.fork(parent)
        monkeypatch.undo()
        cache.check_integrity()
        assert rows_are(cache, parent, 0, 2 * ROWS + 1, 1.0)
        assert cache.fork(parent) is not None


def test_a_truncation_that_loses_rows_leaves_no_copies_behind(backend: str) -> None:
    with open_context(backend) as context, small_cache(context) as cache:
        if Caps.ONE_CALL in context.info.caps:
            pytest.skip("a batch is one driver call: there is nothing to roll back")
        parent = started(cache, 2 * ROWS + 1)
        for skip in range(64):
            child = cache.fork(parent)
            assert child is not None
            context.inject(Inject.MAP, skip=skip, count=64)
            try:
                cache.truncate(child, ROWS + 1)
            except (DriverError, NotRecoverable) as error:
                failed = error
            context.inject(Inject.MAP, count=0)
            cache.check_integrity()
            cache.free_reqid(child)
            if isinstance(failed, NotRecoverable):
                break
        assert isinstance(failed, NotRecoverable)
        assert rows_are(cache, parent, 0, 2 * ROWS + 1, 1.0)
        cache.trim(prefixes=True)


def test_a_back_end_without_read_only_mappings_says_so(host: Context) -> None:
    with small_cache(host) as cache:
        parent = started(cache, ROWS)
        without(host, Caps.READONLY)
        with pytest.raises(NotSupported, match="has no VMEM_CAP_READONLY"):
            cache.fork(parent)
        with pytest.raises(NotSupported, match="has no VMEM_CAP_READONLY"):
            cache.record(parent, range(ROWS))
        assert cache.snapshot()[parent].shared_pages == 0
