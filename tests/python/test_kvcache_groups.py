# SPDX-License-Identifier: MIT
"""Checks that groups of unequal layers grow and slide their windows in a single batch."""

from __future__ import annotations

import pytest
from kvcache_helpers import eventually, pending
from test_kvcache_layers import holds, layered, state, units, write

from pyvmem import Context, DriverError, Inject, VMemError
from pyvmem.kvcache import LayeredCache, LayerShape
from pyvmem.kvcache.reclaim import Reclaimer


def both(cache: LayeredCache, lengths: int, count: int = 2) -> list[int]:
    return [lengths] * count + [0] * (4 - count)


def test_a_step_that_fails_in_one_group_changes_none(context: Context) -> None:
    with layered(context) as cache:
        assert [cache.alloc_reqid() for _ in range(2)] == [0, 1]
        assert cache.step(both(cache, 4)) == 0
        before, mapped = state(cache), cache.stats().mapped_bytes
        # the number of map calls for both requests
        calls = 2 * sum(one.layout.num_tensors for one in cache.caches)
        for skip in (0, calls // 2, calls - 1):
            context.inject(Inject.MAP, skip=skip)
            with pytest.raises(DriverError):
                cache.step(both(cache, 30))
            context.inject(Inject.MAP, 0, 0)
            assert (state(cache), cache.stats().mapped_bytes) == (before, mapped), skip
            cache.check_integrity()
        batches = context.stats().batches
        assert cache.step(both(cache, 30)) == 0
        assert context.stats().batches == batches + 1
        cache.check_integrity()


def test_a_failure_in_the_background_is_reported_once(context: Context) -> None:
    with layered(context) as cache:
        assert [cache.alloc_reqid() for _ in range(2)] == [0, 1]
        assert cache.step(both(cache, 4)) == 0
        before = state(cache)
        context.inject(Inject.MAP)
        assert cache.step_async(both(cache, 30)) == 0
        eventually(lambda: not any(one.in_flight for one in cache.snapshot()))
        context.inject(Inject.MAP, 0, 0)
        with pytest.raises(DriverError):
            cache.step(both(cache, 30))
        assert state(cache) == before
        assert cache.step(both(cache, 30)) == 0
        cache.check_integrity()


def sliding(context: Context) -> LayeredCache:
    heads = units(context.info.granule)
    shapes = [
        LayerShape(heads, 64, window=8),
        LayerShape(heads, 64, window=20),
        LayerShape(2 * heads, 64),
    ]
    return LayeredCache(
        shapes, context, dtype="float32", max_batch=4, max_seq_len=96, window_tile=4,
        page_size=context.info.granule, low_watermark=0.0,
    )  # fmt: skip


def slid(cache: LayeredCache) -> list[list[int]]:
    """Returns the first mapped row of each request, by group, once nothing is in flight."""
    eventually(lambda: not any(one.in_flight for one in cache.snapshot()))
    return [one.first_rows([0, 1]) for one in cache.caches]


def test_the_windows_of_all_groups_slide_in_one_batch(context: Context) -> None:
    with sliding(context) as cache:
        assert [cache.alloc_reqid() for _ in range(2)] == [0, 1]
        assert cache.step(both(cache, 40)) == 0
        write(cache, 0, 0, list(range(1, 41)))
        assert slid(cache) == [[0, 0]] * 3
        context.inject(Inject.UNMAP, skip=1)
        assert cache.step(both(cache, 41)) == 0
        assert slid(cache) == [[0, 0]] * 3
        context.inject(Inject.UNMAP, 0, 0)
        cache.check_integrity()
        assert holds(cache, 0, list(range(1, 41))), "the failed slide must be undone"
        with pytest.raises(DriverError):
            cache.step(both(cache, 42))
        batches = context.stats().batches
        assert cache.step(both(cache, 80)) == 0  # this step maps pages
        assert cache.step(both(cache, 81)) == 0
        (one, two), (three, four), full = slid(cache)
        assert one == two > three == four > 0
        assert full == [0, 0]
        cache.check_integrity()
        assert context.stats().batches - batches <= 4
        cache.free_reqid(0)
        cache.check_integrity()


def test_a_snapshot_agrees_with_the_records(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers pages whose unmap completes while the snapshot is being taken."""
    poll = Reclaimer.poll
    with sliding(context) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([40, 0, 0, 0]) == 0
        with pending() as event:
            assert cache.step([41, 0, 0, 0], event) == 0

            def and_then_it_ends(reclaimer: Reclaimer) -> None:
                poll(reclaimer)
                event.set()
                eventually(lambda: all(one.done() for one in reclaimer.unmaps))

            monkeypatch.setattr(Reclaimer, "poll", and_then_it_ends)
            (found, *_) = cache.caches[0].snapshot()
            monkeypatch.undo()
        assert found.in_flight
        assert slid(cache)[0][0] > 0


def test_a_request_ends_while_its_window_slides(context: Context) -> None:
    """The request's pages are unmapped after the slide, whether the slide succeeds or is rolled
    back."""
    with sliding(context) as cache:
        for fails in (False, True):
            reqid = cache.alloc_reqid()
            assert reqid is not None
            assert cache.step([40 * (slot == reqid) for slot in range(4)]) == 0
            if fails:
                context.inject(Inject.UNMAP)
            with pending() as event:
                assert cache.step([41 * (slot == reqid) for slot in range(4)], event) == 0
                cache.check_integrity()
                cache.free_reqid(reqid)
                cache.check_integrity()
                event.set()
            eventually(lambda: not any(one.in_flight for one in cache.snapshot()))
            context.inject(Inject.UNMAP, 0, 0)
            cache.check_integrity()
            if fails:
                with pytest.raises(DriverError):
                    cache.step([0] * 4)
            cache.trim()
            assert cache.stats().mapped_bytes == 0
            cache.check_integrity()


@pytest.mark.parametrize("kind", [Inject.MAP, Inject.HEAP])
def test_a_truncation_that_fails_changes_no_group(context: Context, kind: Inject) -> None:
    """Fails each of the truncation's driver calls, or heap allocations, in turn."""
    failed = 0
    for skip in range(200):
        with layered(context) as cache:
            assert cache.alloc_reqid() == 0
            assert cache.step(both(cache, 20, 1)) == 0
            tags = list(range(1, 21))
            write(cache, 0, 0, tags)
            child = cache.fork(0)
            assert child is not None
            before = state(cache)
            context.inject(kind, skip=skip)
            try:
                done = cache.truncate(child, 11) == 0  # returns -1 if memory is short
            except VMemError:
                done = False
            finally:
                context.inject(kind, 0, 0)
            cache.check_integrity()
            assert holds(cache, 0, tags)
            if done:
                assert holds(cache, child, tags[:11])
                break
            failed += 1
            assert state(cache) == before
            assert holds(cache, child, tags)
    assert failed >= (kind is Inject.MAP) * 2 * len(cache.caches)
    assert skip < 199
