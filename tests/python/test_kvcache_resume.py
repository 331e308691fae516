# SPDX-License-Identifier: MIT
"""Checks that a conversation's next turn resumes in the slot where its rows are still mapped.

The tests count driver calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    grown,
    pending,
    rows_are,
    rows_are_zero,
    small_cache,
    started,
)

from pyvmem import AccessDenied, Context, DriverError, Inject, KVCache, RangeFlags
from pyvmem.kvcache import LayeredCache, LayerShape

TENSORS = 2 * LAYERS
PROMPT = list(range(100, 100 + 6 * ROWS))
TURN = 3 * ROWS + 3  # rows of the first turn: three whole pages and part of a fourth


def settled(cache: KVCache) -> None:
    """Waits for background work."""
    eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))


def turn(cache: KVCache, rows: int = TURN, tag: float = 1.0) -> int:
    """Runs and records a request; returns its slot, which still holds the rows."""
    reqid = started(cache, rows, tag)
    cache.free_reqid(reqid, tokens=PROMPT[:rows])
    settled(cache)
    return reqid


def calls(cache: KVCache, act: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the number of driver calls that `act` causes, including those in the background, and
    its result.
    """
    before = cache.stats().driver_calls
    answer = act()
    settled(cache)
    return cache.stats().driver_calls - before, answer


def test_a_next_turn_reuses_its_slot_without_a_driver_call(host: Context) -> None:
    with small_cache(host) as cache:
        slot = turn(cache)
        cache.check_integrity()
        count, begun = calls(cache, lambda: cache.alloc_prefix(PROMPT))
        assert begun == (slot, 3 * ROWS)
        assert count == 0
        assert cache.stats().prefix_resumed == 1
        cache.check_integrity()
        assert rows_are(cache, slot, 0, 3 * ROWS, 1.0)
        grown(cache, slot, 3 * ROWS, 5 * ROWS, 2.0)
        cache.free_reqid(slot, tokens=PROMPT[: 5 * ROWS])
        settled(cache)
        cache.check_integrity()
        count, begun = calls(cache, lambda: cache.alloc_prefix(PROMPT))
        assert (count, begun) == (0, (slot, 5 * ROWS))
        assert rows_are(cache, slot, 0, 3 * ROWS, 1.0)
        assert rows_are(cache, slot, 3 * ROWS, 5 * ROWS, 2.0)
        grown(cache, slot, 5 * ROWS, 6 * ROWS, 3.0)


def test_a_prefix_is_mapped_again_if_no_slot_keeps_it(host: Context) -> None:
    with small_cache(host, keep_mapped=False) as cache:
        turn(cache)
        assert cache.stats().cached_slots == 0
        count, begun = calls(cache, lambda: cache.alloc_prefix(PROMPT))
        assert begun is not None
        assert count > 0
        assert cache.stats().prefix_resumed == 0


def test_kept_pages_are_read_only_and_others_unmapped(host: Context) -> None:
    with small_cache(host) as cache:
        slot = turn(cache)
        info = cache.snapshot()[slot]
        assert (info.state, info.mapped_pages, info.shared_pages) == ("cached", 3, 3)
        for tensor in range(TENSORS):
            at = cache.reservation.addr + cache.layout.offset(slot, 0, tensor)
            assert RangeFlags.READONLY in cache.context.query(at).flags
        begun = cache.alloc_prefix(PROMPT)
        assert begun == (slot, 3 * ROWS)
        with pytest.raises(AccessDenied):
            cache.reservation.write(cache.layout.offset(slot), b"x")
        grown(cache, slot, 3 * ROWS, 4 * ROWS, 2.0)  # it may grow like any other request


def test_only_what_is_missing_is_mapped(host: Context) -> None:
    """The slot with the shorter part of a conversation is free; the slot with the longer part is
    still in use.
    """
    with small_cache(host) as cache:
        short = started(cache, 2 * ROWS)
        cache.record(short, PROMPT[: 2 * ROWS])
        begun = cache.alloc_prefix(PROMPT)
        assert begun is not None
        longer = begun[0]
        grown(cache, longer, 2 * ROWS, 5 * ROWS, 2.0)
        cache.free_reqid(short, tokens=PROMPT[: 2 * ROWS])
        cache.record(longer, PROMPT[: 5 * ROWS])  # this request keeps running
        settled(cache)
        whole, other = calls(cache, lambda: cache.fork(longer, 5 * ROWS))
        cache.free_reqid(other)
        settled(cache)
        count, begun = calls(cache, lambda: cache.alloc_prefix(PROMPT))
        assert begun == (short, 5 * ROWS)
        assert count > 0
        assert cache.stats().prefix_resumed == 0  # not a resume, because pages were mapped
        assert rows_are(cache, short, 0, 2 * ROWS, 1.0)
        assert rows_are(cache, short, 2 * ROWS, 5 * ROWS, 2.0)
        cache.check_integrity()
        assert whole > 0


def test_another_conversation_does_not_get_the_slot_while_others_are_free(host: Context) -> None:
    with small_cache(host) as cache:
        slot = turn(cache)
        others = [started(cache, 5) for _ in range(3)]
        assert slot not in others
        last = started(cache, 9)  # the only slot left, which is emptied first
        assert last == slot
        assert rows_are_zero(cache, slot, 9, 2 * ROWS)
        cache.check_integrity()


def test_some_slots_stay_free_for_newcomers(host: Context) -> None:
    with small_cache(host) as cache:
        for number in range(4):
            reqid = started(cache, 2 * ROWS)
            cache.free_reqid(reqid, tokens=[number] * 2 * ROWS)
            settled(cache)
        eventually(lambda: cache.stats().empty_slots > 0)
        settled(cache)
        assert cache.stats().empty_slots == 1
        assert cache.stats().cached_slots == 3
        # The slot that had been free the longest was emptied.
        count, begun = calls(cache, lambda: cache.alloc_prefix([3] * 2 * ROWS, 0))
        assert (count, begun is not None and begun[1]) == (0, 2 * ROWS)
        count, _ = calls(cache, lambda: cache.alloc_prefix([0] * 2 * ROWS, 0))
        assert count > 0


def test_a_shorter_match_is_mapped_elsewhere(host: Context) -> None:
    with small_cache(host) as cache:
        slot = turn(cache)
        begun = cache.alloc_prefix(PROMPT[: 2 * ROWS], 0)
        assert begun is not None
        assert begun[0] != slot
        assert begun[1] == 2 * ROWS
        cache.check_integrity()


def test_a_kept_prefix_is_evicted_when_memory_is_short(host: Context) -> None:
    """Kept rows are a cached prefix like any other: eviction also empties its slot."""
    page = host.info.granule
    with small_cache(host, memory_limit=5 * TENSORS * page, growth_fraction=0) as cache:
        slot = turn(cache, 3 * ROWS)
        assert cache.memory.obtainable()[0] // cache.layout.page_size == 5 * TENSORS
        assert cache.can_admit([5 * ROWS])
        other = started(cache, 5 * ROWS, 4.0)
        assert other != slot
        assert cache.match(PROMPT).length == 0
        cache.check_integrity()
        assert cache.stats().evicted_pages == 3 * TENSORS


def test_a_kept_prefix_stays_while_memory_suffices(host: Context) -> None:
    page = host.info.granule
    with small_cache(host, memory_limit=6 * TENSORS * page, low_watermark=0.9) as cache:
        slot = turn(cache, 3 * ROWS)
        other = started(cache, 2 * ROWS)
        # free memory is below the watermark, so pages of other free slots are reclaimed
        cache.free_reqid(other)
        settled(cache)
        count, begun = calls(cache, lambda: cache.alloc_prefix(PROMPT))
        assert (count, begun) == (0, (slot, 3 * ROWS))


def test_trim_unmaps_a_kept_prefix(host: Context) -> None:
    with small_cache(host) as cache:
        turn(cache)
        cache.trim()
        assert cache.stats().empty_slots == 4
        assert cache.match(PROMPT).length == 3 * ROWS
        turn_again = cache.alloc_prefix(PROMPT)
        assert turn_again is not None
        cache.free_reqid(turn_again[0], tokens=PROMPT[: 3 * ROWS])
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_next_turn_before_the_work_has_completed(host: Context) -> None:
    """The CPU waits for the work that wrote the rows; then they may be mapped in any slot."""
    with pending() as event, small_cache(host) as cache:
        slot = started(cache, TURN)
        cache.free_reqid(slot, event, tokens=PROMPT[:TURN])
        with firing_later(event) as fired:
            begun = cache.alloc_prefix(PROMPT)
            assert fired
        assert begun is not None
        assert begun[1] == 3 * ROWS
        assert rows_are(cache, begun[0], 0, 3 * ROWS, 1.0)
        settled(cache)


@pytest.mark.parametrize("kind", [Inject.MAP, Inject.UNMAP])
def test_a_slot_that_cannot_be_kept_is_unmapped(host: Context, kind: Inject) -> None:
    with small_cache(host) as cache:
        slot = started(cache, TURN)
        host.inject(kind, count=1, error=5)
        cache.free_reqid(slot, tokens=PROMPT[:TURN])
        eventually(lambda: not any(one.in_flight for one in cache.snapshot()))
        host.inject(kind, count=0)
        cache.check_integrity()
        with pytest.raises(DriverError):
            cache.step([0] * 4)
        begun = cache.alloc_prefix(PROMPT)
        assert begun is not None
        assert rows_are(cache, begun[0], 0, 3 * ROWS, 1.0)
        assert cache.stats().prefix_resumed == 0


def test_a_failed_resumption_changes_nothing(host: Context) -> None:
    with small_cache(host) as cache:
        short = started(cache, 2 * ROWS)
        cache.record(short, PROMPT[: 2 * ROWS])
        begun = cache.alloc_prefix(PROMPT)
        assert begun is not None
        grown(cache, begun[0], 2 * ROWS, 4 * ROWS, 2.0)
        cache.record(begun[0], PROMPT[: 4 * ROWS])
        cache.free_reqid(short, tokens=PROMPT[: 2 * ROWS])
        settled(cache)
        host.inject(Inject.MAP, count=1, error=5)
        with pytest.raises(DriverError):
            cache.alloc_prefix(PROMPT)
        host.inject(Inject.MAP, count=0)
        cache.check_integrity()
        assert cache.stats().active_slots == 1
        again = cache.alloc_prefix(PROMPT)
        assert again is not None
        assert rows_are(cache, again[0], 2 * ROWS, 4 * ROWS, 2.0)


def test_unequal_layers_resume_together(host: Context) -> None:
    page = host.info.granule
    layers = [LayerShape(2, 64), LayerShape(1, 64)]
    policy = {"dtype": "float32", "max_batch": 3, "max_seq_len": 256, "page_size": page}
    with LayeredCache(layers, host, **policy) as cache:
        unit = cache.sharing_unit
        tokens = list(range(2 * unit))
        slot = cache.alloc_reqid(len(tokens))
        assert slot is not None
        lengths = [0, 0, 0]
        lengths[slot] = len(tokens)
        assert cache.step(lengths) == 0
        cache.k(0)[slot, : len(tokens)] = 3.0
        cache.k(1)[slot, : len(tokens)] = 4.0
        cache.free_reqid(slot, tokens=tokens)
        eventually(lambda: not any(s.in_flight for one in cache.caches for s in one.snapshot()))
        before = cache.stats().driver_calls
        assert cache.alloc_prefix([*tokens, 1]) == (slot, len(tokens))
        assert cache.stats().driver_calls == before
        assert cache.stats().prefix_resumed == 1
        assert cache.k(0)[slot, 5, 0, 0].item() == 3.0
        assert cache.k(1)[slot, len(tokens) - 1, 0, 0].item() == 4.0
        cache.check_integrity()


def test_only_slots_with_an_evicted_page_are_unmapped(host: Context) -> None:
    """The slot keeps the first two of a prefix's four pages; first the last two are evicted, then
    the middle two.
    """
    with small_cache(host, max_batch=8) as cache:
        tokens = list(range(4 * ROWS))
        parent = started(cache, 4 * ROWS)
        cache.record(parent, tokens)
        short = cache.alloc_prefix(tokens[: 2 * ROWS], 0)
        assert short is not None
        cache.free_reqid(short[0], tokens=tokens[: 2 * ROWS])
        group = cache._groups[0]
        whole = group.table[parent].span
        assert group.table[short[0]].kept
        group.reclaimer.release_kept(whole.slice(2, 4))
        assert group.table[short[0]].kept, "a slot without the evicted pages must be kept"
        group.reclaimer.release_kept(whole.slice(1, 3))
        assert not group.table[short[0]].kept
