# SPDX-License-Identifier: MIT
"""Tests prefixes of layers with a window: a match ends where the window is mapped."""

from __future__ import annotations

from typing import Any

import pytest
from kvcache_helpers import LAYERS, ROWS, eventually, lens, small_cache
from share_helpers import WindowModel, read_rows, write_rows

from pyvmem import Context, Inject, KVCache, VMemError
from pyvmem.kvcache import LayeredCache, LayerShape

TENSORS = 2 * LAYERS
WINDOW: dict[str, Any] = {"window": 8, "window_tile": 4, "max_seq_len": 12 * ROWS}
KEPT = 12  # rows that must be mapped before the next token


def ids(*runs: tuple[int, int]) -> list[int]:
    """Returns a prompt's tokens, given as (family, count) pairs."""
    return [1000 * family + place for family, count in runs for place in range(count)]


def tag(token: int) -> int:
    return token % 100 + 1 + token // 1000


def prefill(cache: KVCache, tokens: list[int]) -> int:
    """Starts a request and computes these tokens' rows in one step, so that all are mapped."""
    reqid = cache.alloc_reqid(len(tokens))
    assert reqid is not None
    extend(cache, reqid, 0, tokens)
    return reqid


def extend(cache: KVCache, reqid: int, low: int, tokens: list[int], by: int = 0) -> None:
    """Appends the rows of the tokens from index `low` on, `by` tokens per step."""
    for end in [*range(low + by, len(tokens), by), len(tokens)] if by else [len(tokens)]:
        want = [slot.seq_len for slot in cache.caches[0].snapshot()]
        want[reqid] = end
        assert cache.step(want) == 0
        for part in cache.caches:
            write_rows(part, reqid, low, [tag(token) for token in tokens[low:end]])
        low = end


def decoded(cache: KVCache, tokens: list[int]) -> int:
    """Starts a request and computes these tokens' rows one by one; only its window stays mapped."""
    reqid = cache.alloc_reqid(len(tokens))
    assert reqid is not None
    extend(cache, reqid, 0, tokens, by=1)
    return reqid


def settle(cache: KVCache) -> None:
    eventually(lambda: not any(s.in_flight for one in cache.caches for s in one.snapshot()))


def begins(cache: KVCache, prompt: list[int], length: int) -> int:
    """Starts a request that finds `length` tokens of its prompt cached, and checks their rows."""
    with cache.match(prompt) as match:
        assert match.length == length
    taken = cache.alloc_prefix(prompt)
    assert taken is not None
    reqid, held = taken
    assert held == length
    for part in cache.caches:
        (first,) = part.first_rows([reqid])
        kept = part.config.window + part.config.window_tile
        if part.config.window:
            assert first <= max(0, length - kept)
        assert read_rows(part, reqid, first, [tag(token) for token in prompt[first:length]])
    cache.check_integrity()
    return reqid


def test_a_match_ends_where_a_request_was_recorded(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        tokens = ids((1, 5 * ROWS + 3))
        first = decoded(cache, tokens)
        cache.free_reqid(first, tokens=tokens)
        settle(cache)
        end = 5 * ROWS
        window = [page for page in range(5) if page >= (end - KEPT) // ROWS]
        assert cache.stats().prefix_pages == len(window) * TENSORS
        assert cache.stats().mapped_bytes == len(window) * TENSORS * cache.layout.page_size
        for length in (0, ROWS, 4 * ROWS, end - 1):
            assert cache.match(tokens[:length], leave=0).length == 0
        reqid = begins(cache, [*tokens, 7], end)
        assert cache.slots.first_rows([reqid]) == [window[0] * ROWS]
        assert cache.snapshot()[reqid].shared_pages == len(window)
        extend(cache, reqid, end, [*tokens[:end], *ids((2, 20))], by=1)
        settle(cache)
        assert cache.stats().prefix_pages == len(window) * TENSORS
        assert begins(cache, [*tokens[:end], *ids((3, 5))], end) != reqid
        cache.free_reqid(reqid, tokens=[*tokens[:end], *ids((2, 20))])
        assert cache.match([*tokens[:end], *ids((2, 20))], leave=0).length == 7 * ROWS
        # The window before token 48 spans two nodes, recorded by the first and the second request.
        assert cache.match([*tokens[:end], *ids((2, 9))], leave=0).length == end + ROWS
        assert cache.match([*tokens[:end], *ids((2, 7))], leave=0).length == end
        cache.check_integrity()


def test_a_running_request_is_recorded_and_slides_on(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        tokens = ids((1, 9 * ROWS))
        first = decoded(cache, tokens[: 3 * ROWS + 1])
        assert cache.record(first, tokens[: 3 * ROWS + 1]) == 3 * ROWS
        extend(cache, first, 3 * ROWS + 1, tokens, by=1)
        settle(cache)
        assert cache.slots.first_rows([first])[0] > 3 * ROWS
        assert cache.record(first, tokens[: 3 * ROWS + 1]) == 3 * ROWS  # already recorded
        # the window before that end is unmapped
        assert cache.record(first, tokens[: 5 * ROWS]) == 3 * ROWS
        assert cache.record(first, tokens) == 9 * ROWS
        other = begins(cache, [*tokens[: 4 * ROWS], 9], 3 * ROWS)
        assert cache.match(tokens, leave=0).length == 9 * ROWS
        cache.free_reqid(first)
        extend(cache, other, 3 * ROWS, ids((1, 3 * ROWS), (4, 30)))
        cache.check_integrity()


def test_a_third_request_starts_at_the_branch(context: Context) -> None:
    """The first request leaves only its last window; the second has all rows mapped, and records
    the window before the branch.
    """
    with small_cache(context, max_batch=6, **WINDOW) as cache:
        prompts = [ids((1, 3 * ROWS), (family, 4 * ROWS)) for family in (2, 3, 4)]
        for place, prompt in enumerate(prompts):
            length = 3 * ROWS if place == 2 else 0
            reqid = begins(cache, prompt, length)
            extend(cache, reqid, length, prompt)
            cache.free_reqid(reqid, tokens=prompt)
            settle(cache)
            assert cache.match(prompt, leave=0).length == 7 * ROWS
        begins(cache, ids((1, 3 * ROWS), (5, 3)), 3 * ROWS)
        begins(cache, ids((1, 2 * ROWS), (5, 3)), 0)
        cache.check_integrity()


def test_a_prefix_of_a_longer_one_is_recorded_by_itself(context: Context) -> None:
    with small_cache(context, max_batch=6, **WINDOW) as cache:
        tokens = ids((1, 8 * ROWS))
        cache.free_reqid(decoded(cache, tokens), tokens=tokens)
        short = prefill(cache, tokens[: 4 * ROWS])
        assert cache.match(tokens[: 4 * ROWS], leave=0).length == 0
        cache.free_reqid(short, tokens=tokens[: 4 * ROWS])
        begins(cache, [*tokens[: 5 * ROWS], 9], 4 * ROWS)
        begins(cache, [*tokens, 9], 8 * ROWS)


def test_leaves_are_evicted_whole(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=12 * TENSORS * page, **WINDOW) as cache:
        old, new = ids((1, 6 * ROWS)), ids((2, 6 * ROWS))
        for tokens in (old, new):
            cache.free_reqid(decoded(cache, tokens), tokens=tokens)
            settle(cache)
        kept = cache.stats().prefix_pages // TENSORS // 2
        reqid = cache.alloc_reqid()
        assert reqid is not None
        want = lens(cache, **{f"r{reqid}": (12 - 2 * kept + 1) * ROWS})
        assert cache.step(want) == 0
        assert cache.match([*old, 9]).length == 0
        assert cache.match([*new, 9]).length == 6 * ROWS
        assert cache.stats().prefix_pages == kept * TENSORS
        cache.check_integrity()


def test_admission_counts_the_window_of_a_match(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=8 * TENSORS * page, **WINDOW) as cache:
        tokens = ids((1, 8 * ROWS))
        first = cache.alloc_reqid()
        assert first is not None
        extend(cache, first, 0, tokens, by=8)
        cache.free_reqid(first, tokens=tokens)
        settle(cache)
        with cache.match([*tokens, 9]) as match:
            assert match.length == 8 * ROWS
            assert not cache.can_admit([12 * ROWS])
            assert cache.can_admit([12 * ROWS], [match])
            taken = cache.alloc_prefix(match)
        assert taken is not None
        assert taken[1] == 8 * ROWS
        assert cache.step(lens(cache, **{f"r{taken[0]}": 12 * ROWS})) == 0
        cache.check_integrity()


@pytest.mark.parametrize("more", [0, 11])
def test_a_next_turn_resumes_where_its_window_is_mapped(context: Context, more: int) -> None:
    with small_cache(context, max_batch=8, **WINDOW) as cache:
        tokens = ids((1, 5 * ROWS + 3 + more))
        first = decoded(cache, tokens)
        cache.free_reqid(first, tokens=tokens)
        settle(cache)
        calls = context.stats().map_calls
        reqid = begins(cache, [*tokens, 9], len(tokens) // ROWS * ROWS)
        assert (reqid, cache.stats().prefix_resumed) == (first, 1)
        assert context.stats().map_calls == calls
        extend(cache, reqid, len(tokens) // ROWS * ROWS, [*tokens, *ids((2, 20))], by=1)
        cache.check_integrity()
        cache.free_reqid(reqid)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_refilled_window_keeps_no_old_pages_mapped(context: Context) -> None:
    """The old pages no longer belong to a prefix, so a request short of memory must be able to get
    them.
    """
    page = context.info.granule
    with small_cache(context, max_batch=8, memory_limit=12 * TENSORS * page, **WINDOW) as cache:
        branch, other = ids((1, 2 * ROWS), (2, 3 * ROWS)), ids((1, 2 * ROWS), (3, ROWS))
        whole = ids((1, 2 * ROWS), (4, 2 * ROWS))
        cache.free_reqid(decoded(cache, branch), tokens=branch)
        # this request keeps the second page of the common prefix, but not the first
        kept = decoded(cache, other)
        extend(cache, kept, 3 * ROWS, [*other, 9])
        cache.free_reqid(kept, tokens=other)
        settle(cache)
        assert cache.snapshot()[kept].mapped_pages == 2
        cache.free_reqid(prefill(cache, whole), tokens=whole)
        with cache.match([*other, 9]) as match:
            assert match.length == 3 * ROWS
            reqid = cache.alloc_reqid()
            assert cache.step(lens(cache, **{f"r{reqid}": 9 * ROWS})) == 0
            cache.check_integrity()


def test_a_swapped_request_records_the_rows_that_returned(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        tokens = ids((1, 5 * ROWS + 3))
        reqid = cache.swap_in(cache.swap_out(decoded(cache, tokens)))
        assert reqid is not None
        cache.free_reqid(reqid, tokens=tokens)
        begins(cache, [*tokens, 7], 5 * ROWS)


# ---- together with full layers -------------------------------------------------------------------


def gemma_like(context: Context, pages: int = 4000, **changes: Any) -> LayeredCache:
    """Creates a cache with three sliding layers and a full layer, whose rows are twice as large."""
    page = context.info.granule
    heads = page // (ROWS * 64 * 4)
    slides = LayerShape(heads, 64, window=8)
    layers = [slides, slides, slides, LayerShape(2 * heads, 64)]
    policy = {"dtype": "float32", "max_batch": 6, "max_seq_len": 96, "page_size": page}
    policy |= {"window_tile": 4, "memory_limit": pages * page, "low_watermark": 0.0, **changes}
    return LayeredCache(layers, context, **policy)


def test_full_layers_have_all_rows_and_sliding_ones_their_window(context: Context) -> None:
    with gemma_like(context) as cache:
        slides, full = cache.caches
        tokens = ids((1, 45))
        first = decoded(cache, tokens)
        cache.free_reqid(first, tokens=tokens)
        settle(cache)
        assert cache.sharing_unit == ROWS
        assert full.stats().prefix_pages == 2 * 5 * 2
        assert slides.stats().prefix_pages == 6 * 2
        reqid = begins(cache, [*tokens, 9], 40)
        assert [one.first_rows([reqid])[0] for one in cache.caches] == [3 * ROWS, 0]
        extend(cache, reqid, 40, [*tokens[:40], *ids((2, 30))], by=3)
        cache.record(reqid, [*tokens[:40], *ids((2, 30))])
        begins(cache, [*tokens[:40], *ids((2, 24)), 9], 64)
        begins(cache, [*tokens[:40], *ids((2, 23)), 9], 40)
        child = cache.fork(reqid)
        assert child is not None
        cache.free_reqid(reqid)
        cache.free_reqid(child)
        cache.check_integrity()


def test_every_driver_call_may_fail(context: Context) -> None:
    """Fails the first map or unmap of the call, then the second, and so on, until the call
    succeeds."""
    tokens = ids((1, 3 * ROWS), (2, 3 * ROWS + 1))

    def record(cache: LayeredCache, reqid: int) -> bool:
        return cache.record(reqid, tokens) == 6 * ROWS

    def free(cache: LayeredCache, reqid: int) -> bool:
        cache.free_reqid(reqid, tokens=tokens)
        return True

    def begin(cache: LayeredCache, reqid: int) -> bool:
        return cache.alloc_prefix(ids((1, 3 * ROWS), (3, 3 * ROWS), (4, 3))) is not None

    def fork(cache: LayeredCache, reqid: int) -> bool:
        return cache.fork_many(reqid, 2) is not None

    for call in (record, free, begin, fork):
        for kind in (Inject.MAP, Inject.UNMAP, Inject.HEAP):
            for skip in range(200):
                with gemma_like(context) as cache:
                    other = decoded(cache, ids((1, 3 * ROWS), (3, 3 * ROWS)))
                    cache.free_reqid(other, tokens=ids((1, 3 * ROWS), (3, 3 * ROWS)))
                    settle(cache)
                    reqid = prefill(cache, tokens)
                    context.inject(kind, skip=skip, count=1)
                    try:
                        done = call(cache, reqid)
                    except VMemError:
                        done = False
                    finally:
                        context.inject(kind, count=0)
                    cache.check_integrity()
                    if done:
                        break
                    for part in cache.caches:
                        assert read_rows(part, reqid, 0, [tag(token) for token in tokens])
                    assert call(cache, reqid)
                    cache.check_integrity()
            else:
                pytest.fail("the call never succeeded")


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short of memory": {"pages": 130},
    "nothing kept": {"pages": 300, "deferred_reclaim": False},
    "eager": {"pages": 250, "eager_pages": 2, "low_watermark": 0.2},
    "not zeroed": {"pages": 250, "zero_fill": False},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    """Random forks, records, matches, swaps and trims, compared with a plain model of every row."""
    with gemma_like(context, **POLICIES[policy]) as cache:
        model = WindowModel(cache, seed)
        model.run(200)
        if policy == "plain":
            wanted = {"hit", "miss", "fork", "swap", "recorded", "window gone"}
            assert wanted <= set(model.counts), model.counts


@pytest.mark.parametrize("seed", range(3))
def test_random_engine_of_sliding_layers_alone(context: Context, seed: int) -> None:
    limit = 30 * TENSORS * context.info.granule
    with small_cache(context, max_batch=6, memory_limit=limit, **WINDOW) as cache:
        model = WindowModel(cache, seed)
        for count in range(200):
            model.any_step()
            if count % 8 == 0:
                model.check()
        model.end()
        assert {"hit", "fork", "recorded"} <= set(model.counts), model.counts
