# SPDX-License-Identifier: MIT
"""Tests a KVCache's cached prefixes: matching, mapping, eviction and invalid input."""

from __future__ import annotations

import pytest
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
)

from pyvmem import Context, DriverError, Inject, InvalidArgument, KVCache
from pyvmem.kvcache import PrefixEvicted, PrefixMatch, TokenIds

TENSORS = 2 * LAYERS
PROMPT = list(range(100, 100 + 6 * ROWS))


def recorded(cache: KVCache, tokens: list[int], tag: float = 1.0) -> None:
    """Runs a request whose prefix is recorded when it ends."""
    cache.free_reqid(started(cache, len(tokens), tag), tokens=tokens)


# ---- sharing units -------------------------------------------------------------------------------


@pytest.mark.parametrize("row_heads", [1, 3])
def test_the_sharing_unit_fills_whole_pages(host: Context, row_heads: int) -> None:
    """With 384-byte rows, three 4 KiB pages hold 32 rows; 64 KiB pages make a unit of 512 rows."""
    shape = {"num_kv_heads": row_heads, "head_dim": 64, "dtype": "float16", "max_seq_len": 80}
    with small_cache(host, **shape) as cache:
        row = cache.layout.row_bytes
        unit = cache.sharing_unit
        assert unit * row % 4096 == 0
        assert all(rows * row % 4096 for rows in range(1, unit))
        assert unit == {128: 32, 384: 32}[row]
        recorded(cache, PROMPT[:40])
        assert cache.match(PROMPT).length == 32
        taken = cache.alloc_prefix(PROMPT[:40])
        assert taken is not None
        assert rows_are(cache, taken[0], 0, 32, 1.0)
        grown(cache, taken[0], 32, 40, 2.0)
        assert rows_are(cache, taken[0], 0, 32, 1.0)


def test_a_unit_longer_than_a_request_records_nothing(host: Context) -> None:
    with small_cache(host, num_kv_heads=3, head_dim=8, max_seq_len=30) as cache:
        assert cache.sharing_unit > 30
        assert cache.record(started(cache, 30), PROMPT[:30]) == 0
        assert cache.alloc_prefix(PROMPT[:30]) == (1, 0)


# ---- recording and matching ----------------------------------------------------------------------


def test_a_prompt_reuses_the_prefix_of_a_finished_request(context: Context) -> None:
    with small_cache(context) as cache:
        first = started(cache, 3 * ROWS + 2)
        cache.free_reqid(first, tokens=PROMPT[: 3 * ROWS + 2])
        eventually(lambda: not cache.snapshot()[first].in_flight)
        now = cache.stats()
        assert (now.prefix_pages, now.prefix_tokens) == (3 * TENSORS, 3 * ROWS)
        assert now.cached_pages == 3 * TENSORS
        assert now.mapped_bytes == 3 * TENSORS * cache.layout.page_size
        found = cache.match(PROMPT)
        assert found.length == 3 * ROWS
        taken = cache.alloc_prefix(PROMPT)
        assert taken is not None
        reqid, length = taken
        assert length == 3 * ROWS
        assert cache.snapshot()[reqid].seq_len == cache.snapshot()[reqid].shared_pages * ROWS
        assert cache.stats().active_pages == 3 * TENSORS
        assert cache.stats().used_bytes == 3 * ROWS * TENSORS * cache.layout.row_bytes
        assert rows_are(cache, reqid, 0, length, 1.0)
        grown(cache, reqid, length, 5 * ROWS, 2.0)
        assert rows_are(cache, reqid, 0, length, 1.0)


def test_the_last_tokens_are_left_to_compute(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        assert cache.match(PROMPT[: 2 * ROWS]).length == ROWS
        assert cache.match(PROMPT[: 2 * ROWS], leave=0).length == 2 * ROWS
        assert cache.match(PROMPT[: 2 * ROWS + 1]).length == 2 * ROWS
        assert cache.match(PROMPT[:3], leave=9).length == 0
        assert cache.alloc_prefix(PROMPT[: 2 * ROWS])[1] == ROWS
        assert cache.alloc_prefix(PROMPT[: 2 * ROWS], leave=0)[1] == 2 * ROWS


def test_prefixes_branch_in_the_middle(context: Context) -> None:
    """Two requests share the first two of three pages; each has its own third page."""
    with small_cache(context) as cache:
        other = PROMPT[: 2 * ROWS] + [7] * ROWS
        recorded(cache, PROMPT[: 3 * ROWS], 1.0)
        taken = cache.alloc_prefix([*other, 0])
        assert taken is not None
        assert taken[1] == 2 * ROWS
        grown(cache, taken[0], 2 * ROWS, 3 * ROWS, 2.0)
        assert cache.record(taken[0], other) == 3 * ROWS
        cache.check_integrity()
        assert cache.stats().prefix_pages == 4 * TENSORS
        third = cache.alloc_prefix([*PROMPT[: 3 * ROWS], 0])
        fourth = cache.alloc_prefix([*other, 0])
        assert third is not None
        assert fourth is not None
        assert third[1] == fourth[1] == 3 * ROWS
        assert rows_are(cache, third[0], 0, 3 * ROWS, 1.0)
        assert rows_are(cache, fourth[0], 0, 2 * ROWS, 1.0)
        assert rows_are(cache, fourth[0], 2 * ROWS, 3 * ROWS, 2.0)


def test_turns_of_a_conversation(context: Context) -> None:
    with small_cache(context) as cache:
        done = 0
        for turn in range(1, 6):
            taken = cache.alloc_prefix(PROMPT[: turn * ROWS + 1])
            assert taken is not None
            reqid, length = taken
            assert length == done
            for page in range(length // ROWS):
                assert rows_are(cache, reqid, page * ROWS, (page + 1) * ROWS, page + 1.0)
            grown(cache, reqid, length, turn * ROWS + 1, float(turn))
            cache.free_reqid(reqid, tokens=PROMPT[: turn * ROWS + 1])
            done = turn * ROWS
            cache.check_integrity()


def test_a_cached_prefix_is_not_recorded_twice(context: Context) -> None:
    with small_cache(context) as cache:
        a, b = started(cache, 2 * ROWS, 1.0), started(cache, 3 * ROWS, 2.0)
        assert cache.record(a, PROMPT[: 2 * ROWS]) == 2 * ROWS
        assert cache.record(a, PROMPT[: 2 * ROWS]) == 2 * ROWS
        assert cache.record(b, PROMPT[: 2 * ROWS]) == 2 * ROWS
        assert cache.snapshot()[b].shared_pages == 0, "nothing in it was new"
        assert cache.record(b, PROMPT[: 3 * ROWS]) == 3 * ROWS
        assert cache.stats().prefix_pages == 3 * TENSORS
        grown(cache, a, 2 * ROWS, 3 * ROWS, 3.0)
        taken = cache.alloc_prefix(PROMPT)
        assert taken is not None
        assert rows_are(cache, taken[0], 0, 2 * ROWS, 1.0)
        assert rows_are(cache, taken[0], 2 * ROWS, 3 * ROWS, 2.0)
        for reqid in (a, b, taken[0]):
            cache.free_reqid(reqid)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_reader_waits_for_the_work_that_wrote_the_rows(context: Context) -> None:
    with small_cache(context) as cache, pending() as work:
        reqid = started(cache, 2 * ROWS)
        cache.free_reqid(reqid, work, PROMPT[: 2 * ROWS])
        with firing_later(work) as fired:
            assert cache.alloc_prefix(PROMPT) is not None
            assert fired


@pytest.mark.parametrize("how", ["record", "free_reqid"])
@pytest.mark.parametrize("more", [1, 2 * ROWS])
def test_ids_without_a_row_yet_are_left_out(context: Context, how: str, more: int) -> None:
    """The last sampled token has no row yet; only the next step would compute it."""
    with small_cache(context) as cache:
        reqid = started(cache, 2 * ROWS)
        if how == "record":
            assert cache.record(reqid, PROMPT[: 2 * ROWS + more]) == 2 * ROWS
        else:
            cache.free_reqid(reqid, tokens=PROMPT[: 2 * ROWS + more])
        assert cache.match(PROMPT, leave=0).length == 2 * ROWS
        assert cache.stats().prefix_tokens == 2 * ROWS


# ---- namespaces ----------------------------------------------------------------------------------


def test_pages_recorded_for_two_namespaces_are_evicted_once_from_each(context: Context) -> None:
    with small_cache(context) as cache:
        reqid = started(cache, 2 * ROWS)
        for name in "ab":
            assert cache.record(reqid, PROMPT[: 2 * ROWS], namespace=name) == 2 * ROWS
        cache.free_reqid(reqid)
        cache.trim(prefixes=True)
        cache.check_integrity()
        assert cache.stats().mapped_bytes == 0


def test_equal_ids_of_different_namespaces_never_match(context: Context) -> None:
    names = [None, "adapter", ("tenant", 7), 0]
    with small_cache(context, max_batch=8) as cache:
        for tag, name in enumerate(names, 1):
            reqid = started(cache, 2 * ROWS + tag, float(tag))
            assert cache.match(PROMPT, namespace=name).length == 0
            if tag % 2:
                assert cache.record(reqid, PROMPT[: 2 * ROWS], namespace=name) == 2 * ROWS
                cache.free_reqid(reqid)
            else:
                cache.free_reqid(reqid, tokens=PROMPT[: 2 * ROWS], namespace=name)
            cache.check_integrity()
        assert cache.stats().prefix_tokens == 4 * 2 * ROWS
        for tag, name in enumerate(names, 1):
            for taken in (
                cache.alloc_prefix(TokenIds(PROMPT, namespace=name)),
                cache.alloc_prefix(cache.match(PROMPT, namespace=name)),
                cache.alloc_prefix(PROMPT, namespace=name),
            ):
                assert taken is not None
                assert taken[1] == 2 * ROWS
                assert rows_are(cache, taken[0], 0, 2 * ROWS, float(tag))
                cache.free_reqid(taken[0])
        assert cache.match(PROMPT, namespace="another").length == 0
        cache.trim(prefixes=True)
        assert cache.stats().prefix_pages == cache.stats().mapped_bytes == 0
        assert list(cache._groups[0].prefixes.tree.roots) == [(None,)]


def test_eviction_is_over_all_namespaces(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        for name in ("old", "new"):
            cache.free_reqid(started(cache, 2 * ROWS), tokens=PROMPT[: 2 * ROWS], namespace=name)
        started(cache, 2 * ROWS)
        assert cache.match(PROMPT, namespace="old").length == 0
        assert cache.match(PROMPT, namespace="new").length == 2 * ROWS


def test_an_invalid_namespace(context: Context) -> None:
    with small_cache(context) as cache:
        reqid = started(cache, ROWS)
        before = state(cache)
        for call in (
            lambda **of: cache.record(reqid, PROMPT[:ROWS], **of),
            lambda **of: cache.free_reqid(reqid, tokens=PROMPT[:ROWS], **of),
            lambda **of: cache.match(PROMPT, **of),
            lambda **of: cache.alloc_prefix(PROMPT, **of),
        ):
            with pytest.raises(InvalidArgument, match=r"namespace \[1\].* cannot be hashed"):
                call(namespace=[1])
        with pytest.raises(InvalidArgument, match="namespace 'b': the ids belong to 'a'"):
            cache.match(TokenIds(PROMPT, "a"), namespace="b")
        assert state(cache) == before


# ---- leases --------------------------------------------------------------------------------------


def test_a_match_keeps_its_pages_until_it_is_used_or_dropped(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        recorded(cache, PROMPT[: 2 * ROWS], 3.0)
        found = cache.match(PROMPT)
        one = cache.alloc_reqid()
        assert one is not None
        want = lens(cache, **{f"r{one}": 3 * ROWS})
        assert not cache.can_admit([3 * ROWS])
        assert cache.step(want) == -1
        cache.check_integrity()
        taken = cache.alloc_prefix(found)
        assert taken is not None
        assert taken[1] == 2 * ROWS
        assert rows_are(cache, taken[0], 0, 2 * ROWS, 3.0)
        cache.free_reqid(taken[0])
        assert cache.step(want) == 0, "the lease ended when it was used"
        cache.free_reqid(one)


@pytest.mark.parametrize("how", ["release", "with", "collected", "trim"])
def test_a_lease_ends(context: Context, how: str) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        found = cache.match(PROMPT)
        if how == "release":
            found.release()
            found.release()
        elif how == "with":
            with found:
                assert not cache.can_admit([3 * ROWS])
        elif how == "trim":
            cache.trim(prefixes=True)
        else:
            del found
        assert cache.can_admit([4 * ROWS])
        started(cache, 4 * ROWS)
        cache.check_integrity()


def test_a_lost_lease_works_while_its_prefix_is_cached(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        found = cache.match(PROMPT)
        found.release()
        first, second = cache.alloc_prefix(found), cache.alloc_prefix(found)
        assert first is not None
        assert second is not None
        assert first[1] == second[1] == 2 * ROWS
        with (
            small_cache(context) as other,
            pytest.raises(InvalidArgument, match="belongs to another cache"),
        ):
            other.alloc_prefix(found)


def test_a_match_may_outlive_its_cache(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        found = cache.match(PROMPT)
    found.release()


# ---- admission -----------------------------------------------------------------------------------


def test_admission_counts_the_cached_prefix(context: Context) -> None:
    """Otherwise, an idle cache might forever refuse a request that it could serve."""
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        running = started(cache, 3 * ROWS)
        cache.record(running, PROMPT[: 3 * ROWS])
        length = 3 * ROWS + 5
        assert not cache.can_admit([length])
        found = cache.match(PROMPT)
        assert cache.can_admit([length], [found])
        assert not cache.can_admit([length, length], [found, found])
        assert not cache.can_admit([length, 1], [found, None])
        taken = cache.alloc_prefix(found)
        assert taken is not None
        want = lens(cache, **{f"r{taken[0]}": length})
        assert cache.step(want) == 0


def test_admission_does_not_reclaim_the_requests_prefix(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        recorded(cache, PROMPT[: 3 * ROWS])
        with cache.match(PROMPT) as found:
            assert found.length == 3 * ROWS
            assert cache.can_admit([4 * ROWS], [found])
            assert not cache.can_admit([4 * ROWS + 1], [found])
            assert not cache.can_admit([4 * ROWS]), "a leased prefix must count as used"
        with cache.match(PROMPT[:ROWS] + [1] * 9) as found:
            assert found.length == ROWS
            assert cache.can_admit([4 * ROWS], [found]), (
                "only the prefix that the request uses must be kept"
            )
        assert cache.can_admit([4 * ROWS])
        with pytest.raises(
            InvalidArgument, match=r"len\(matches\) is 1; it must be len\(seq_lens\), 2"
        ):
            cache.can_admit([1, 1], [None])
        found = cache.match(PROMPT)
        with pytest.raises(InvalidArgument, match=r"matches\[0\] has 24 tokens"):
            cache.can_admit([ROWS], [found])


# ---- eviction ------------------------------------------------------------------------------------


def test_prefixes_are_evicted_least_recently_used_first(context: Context) -> None:
    limit = 6 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        old, new = PROMPT[: 2 * ROWS], [5] * (2 * ROWS)
        recorded(cache, old)
        recorded(cache, new, 2.0)
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        cache.match(old)  # makes the other prefix the least recently used
        assert cache.can_admit([6 * ROWS])
        reqid = started(cache, 3 * ROWS)
        assert cache.match(old, leave=0).length == 2 * ROWS
        assert cache.match(new, leave=0).length == ROWS, "only the needed page is evicted"
        cache.check_integrity()
        grown(cache, reqid, 3 * ROWS, 6 * ROWS, 3.0)
        assert cache.match(old, leave=0).length == 0
        assert cache.stats().free_pages == 0
        assert cache.match([1]).length == 0


def test_free_slots_are_reclaimed_before_prefixes_are_evicted(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        cache.free_reqid(started(cache, 2 * ROWS))
        started(cache, 1)
        a = cache.alloc_reqid()
        assert a is not None
        assert cache.match(PROMPT).length == 2 * ROWS


def test_a_prefix_in_use_stays(context: Context) -> None:
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        recorded(cache, PROMPT[: 2 * ROWS])
        taken = cache.alloc_prefix(PROMPT)
        assert taken is not None
        assert not cache.can_admit([3 * ROWS])
        other = cache.alloc_reqid()
        assert other is not None
        want = lens(cache, **{f"r{taken[0]}": 2 * ROWS, f"r{other}": 3 * ROWS})
        assert cache.step(want) == -1
        assert rows_are(cache, taken[0], 0, 2 * ROWS, 1.0)
        cache.free_reqid(taken[0])
        want[taken[0]] = 0
        assert cache.step(want) == 0
        assert rows_are_zero(cache, other, 0, 3 * ROWS), "no row of the prefix may be left"


def test_only_the_part_of_a_prefix_in_use_stays(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 4 * ROWS])
        taken = cache.alloc_prefix(PROMPT[: 2 * ROWS + 1])
        assert taken is not None
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 2 * TENSORS * cache.layout.page_size
        assert cache.match(PROMPT).length == 2 * ROWS
        assert rows_are(cache, taken[0], 0, 2 * ROWS, 1.0)


def test_a_prefix_is_evicted_only_after_all_idle_pages(context: Context) -> None:
    """Idle pages include those in a slot whose other pages are already being unmapped."""
    limit = 6 * TENSORS * context.info.granule
    with (
        small_cache(context, memory_limit=limit, low_watermark=0.5) as cache,
        pending() as work,
    ):
        recorded(cache, PROMPT[:ROWS])
        cache.trim()
        cache.free_reqid(started(cache, 3 * ROWS), work)
        assert any(slot.in_flight for slot in cache.snapshot()), "the watermark must unmap one page"
        first, second = cache.alloc_reqid(), cache.alloc_reqid()
        with firing_later(work):
            assert cache.step(lens(cache, **{f"r{first}": 2 * ROWS, f"r{second}": 3 * ROWS})) == 0
        assert cache.match(PROMPT).length == ROWS


def test_unowned_pages_can_be_evicted_below_a_request_too(context: Context) -> None:
    """A fork that uses the prefix's first page does not protect the other pages from eviction."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        parent = started(cache, 3 * ROWS)
        cache.record(parent, PROMPT[: 3 * ROWS])
        child = cache.fork(parent, ROWS)
        assert child is not None
        cache.free_reqid(parent)
        assert cache.can_admit([4 * ROWS])
        assert not cache.can_admit([4 * ROWS, 1])
        other = started(cache, 4 * ROWS, 2.0)
        assert rows_are(cache, child, 0, ROWS, 1.0)
        assert rows_are(cache, other, 0, 4 * ROWS, 2.0)
        cache.check_integrity()
        cache.free_reqid(other)
        cache.free_reqid(child)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_finished_request_protects_no_prefix(context: Context) -> None:
    """The prefix used first is evicted first, even though its pages are unmapped later."""
    limit = 5 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache, pending() as work:
        first, second = PROMPT[: 2 * ROWS], [5] * (2 * ROWS)
        cache.free_reqid(started(cache, 2 * ROWS), work, first)
        cache.free_reqid(started(cache, 2 * ROWS, 2.0), tokens=second)
        with firing_later(work):
            started(cache, 3 * ROWS, 3.0)
        assert cache.match(first, leave=0).length == 0, "used before the other one"
        assert cache.match(second, leave=0).length == 2 * ROWS


def test_a_match_without_a_lease_fails_once_evicted(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 3 * ROWS])
        found = cache.match(PROMPT)
        assert isinstance(found, PrefixMatch)
        cache.trim(prefixes=True)
        before = state(cache)
        with pytest.raises(PrefixEvicted, match="24 tokens has lost its lease") as caught:
            cache.alloc_prefix(found)
        assert not isinstance(caught.value, InvalidArgument)
        with pytest.raises(PrefixEvicted):
            cache.can_admit([4 * ROWS], [found])
        assert state(cache) == before
        recorded(cache, PROMPT[: 3 * ROWS])
        taken = cache.alloc_prefix(cache.match(PROMPT))
        assert taken is not None
        assert taken[1] == 3 * ROWS


def test_a_match_survives_a_split_of_its_run(context: Context) -> None:
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 3 * ROWS])
        found = cache.match(PROMPT)
        recorded(cache, PROMPT[:ROWS] + [3] * ROWS, 2.0)
        taken = cache.alloc_prefix(found)
        assert taken is not None
        assert taken[1] == 3 * ROWS
        assert rows_are(cache, taken[0], 0, 3 * ROWS, 1.0)


# ---- bad input and failures ----------------------------------------------------------------------


def test_bad_tokens_change_nothing(context: Context) -> None:
    with small_cache(context) as cache:
        reqid = started(cache, ROWS + 1)
        before = state(cache)
        with pytest.raises(InvalidArgument, match="reqid 3 is not taken"):
            cache.record(3, PROMPT[:1])
        for bad in ("text", [-1], [1 << 32], [1.5], 7, None):
            with pytest.raises(InvalidArgument):
                cache.record(reqid, bad)
            with pytest.raises(InvalidArgument):
                cache.match(bad)
            with pytest.raises(InvalidArgument):
                cache.alloc_prefix(bad)
        with pytest.raises(InvalidArgument, match="leave is -1"):
            cache.match(PROMPT, leave=-1)
        with pytest.raises(InvalidArgument, match="max_seq_len is"):
            cache.alloc_prefix(PROMPT + [1])
        assert state(cache) == before
        assert cache.record(reqid, TokenIds(PROMPT[:ROWS])) == ROWS


def test_without_a_slot_nothing_changes(context: Context) -> None:
    with small_cache(context, max_batch=2) as cache:
        recorded(cache, PROMPT[:ROWS])
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        assert cache.alloc_reqid() is not None
        assert cache.alloc_reqid() is not None
        # Pages that a slot kept for a next turn may not be fully unmapped yet.
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        before = state(cache)
        assert cache.alloc_prefix(PROMPT) is None
        assert state(cache) == before


def test_every_driver_call_of_record_and_match_may_fail(context: Context) -> None:
    kinds = Inject.MAP | Inject.UNMAP
    with small_cache(context) as cache:
        reqid = started(cache, 2 * ROWS + 1)

        def record() -> object:
            return cache.record(reqid, PROMPT[: 2 * ROWS])

        def match() -> object:
            return cache.alloc_prefix(PROMPT)

        for call, wanted in ((record, 2 * ROWS), (match, (1, 2 * ROWS))):
            failures = 0
            for skip in range(100):
                context.inject(kinds, skip=skip)
                try:
                    result = call()
                except DriverError:
                    failures += 1
                    continue
                finally:
                    context.inject(kinds, count=0)
                    cache.check_integrity()
                    assert rows_are(cache, reqid, 0, 2 * ROWS + 1, 1.0)
                assert result == wanted
                break
            assert failures
        assert rows_are(cache, 1, 0, 2 * ROWS, 1.0)


def test_short_of_heap_for_a_freed_part(context: Context) -> None:
    """Pages that cannot be freed for lack of heap memory still count as shared until they are."""
    with small_cache(context) as cache:
        recorded(cache, PROMPT[: 4 * ROWS])
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        reclaimer = cache._groups[0].reclaimer
        (span,) = cache._groups[0].prefixes.tree.evict(1)
        context.inject(Inject.HEAP, count=9, error=12)
        reclaimer.unref(span.each[0])
        context.inject(Inject.HEAP, count=0)
        assert cache.stats().shared_pages == 4 * TENSORS
        cache.check_integrity()
        recorded(cache, [4] * ROWS)
        assert cache.trim(prefixes=True) >= 0
        assert cache.stats().mapped_bytes == 0


def test_a_prefix_whose_last_user_is_being_unmapped_can_be_evicted(context: Context) -> None:
    """The prefix is in use until its slot is unmapped; a step that is short of memory waits for the
    unmap."""
    limit = 4 * TENSORS * context.info.granule
    tokens = range(2 * ROWS)
    with small_cache(context, memory_limit=limit) as cache, pending() as work:
        cache.free_reqid(started(cache, 2 * ROWS), tokens=tokens)
        found = cache.alloc_prefix(tokens, leave=0)
        assert found is not None
        assert found[1] == 2 * ROWS
        cache.free_reqid(found[0], work)
        reqid = cache.alloc_reqid()
        assert reqid is not None
        wanted = [0] * cache.config.max_batch
        wanted[reqid] = 4 * ROWS
        with firing_later(work) as fired:
            assert cache.step(wanted) == 0
            assert fired
        assert cache.stats().prefix_pages == 0
