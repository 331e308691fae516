# SPDX-License-Identifier: MIT
"""Tests sliding windows: pages before the window are unmapped while a request runs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from kvcache_helpers import (
    LAYERS,
    ROWS,
    eventually,
    firing_later,
    lens,
    pending,
    small_cache,
    state,
)
from share_helpers import read_rows, write_rows

from pyvmem import (
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    NotMapped,
    OutOfMemory,
)
from pyvmem.kvcache import EmptyShape, LayeredCache, LayerShape, StateShape, layer_shapes, steps
from pyvmem.kvcache.window import slide

TENSORS = 2 * LAYERS
WINDOW = {"window": 8, "window_tile": 4, "max_seq_len": 12 * ROWS}


def mapped(cache: KVCache, reqid: int = 0) -> int:
    """Waits until no unmap is in flight; returns the number of mapped pages per tensor."""
    eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
    return cache.snapshot()[reqid].mapped_pages


def decode(cache: KVCache, low: int, high: int, reqid: int = 0, first: int = 1) -> None:
    """Appends rows to a request, one at a time; row n holds ``first + n``."""
    for length in range(low + 1, high + 1):
        assert cache.step(lens(cache, **{f"r{reqid}": length})) == 0
        write_rows(cache, reqid, length - 1, [first + length - 1])


def rows_are_there(cache: KVCache, low: int, high: int) -> bool:
    return read_rows(cache, 0, low, list(range(low + 1, high + 1)))


@pytest.mark.parametrize("call", ["truncate", "fork", "fork_many"])
def test_pages_unmapped_by_an_interrupted_step_stay_unmapped(
    call: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is rolled back except for the pages before the window, in which no request may
    start.
    """

    def interrupted(*args: Any) -> None:
        slide(*args)
        raise KeyboardInterrupt

    with small_cache(context, **WINDOW) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step(lens(cache, r0=10 * ROWS)) == 0
        with monkeypatch.context() as patched:
            patched.setattr(steps, "slide", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.step(lens(cache, r0=10 * ROWS + 1))
        (first,) = cache.slots.first_rows([0])
        assert first > ROWS
        for length in (1, first, first + WINDOW["window"] - 1):
            arguments = (0, 2, length) if call == "fork_many" else (0, length)
            with pytest.raises(InvalidArgument, match="unmapped rows"):
                getattr(cache, call)(*arguments)
        cache.check_integrity()
        assert cache.step(lens(cache, r0=10 * ROWS + 1)) == 0
        cache.free_reqid(0)


def test_a_request_keeps_its_window_and_a_tile(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        assert cache.alloc_reqid() == 0
        for length in range(1, 12 * ROWS + 1):
            decode(cache, length - 1, length)
            low = max(0, length - 1 - 12)  # the step to `length` does not read earlier rows
            assert rows_are_there(cache, low, length)
            assert mapped(cache) <= 12 // ROWS + 3
            cache.check_integrity()
        now = cache.stats()
        assert now.active_pages == mapped(cache) * TENSORS
        assert 0 < now.used_bytes <= now.active_pages * cache.layout.page_size
        with pytest.raises(NotMapped):
            read_rows(cache, 0, 0, [1])
        cache.free_reqid(0)


def test_a_page_is_unmapped_once_no_kernel_reads_its_rows(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        for length in (20, 21, 24):  # kernels that start at rows 0 to 15 need all of these
            assert cache.step(lens(cache, r0=length)) == 0
            assert mapped(cache) == 3
        # row 24 sees rows 17 to 24, and its tile starts at 12
        assert cache.step(lens(cache, r0=25)) == 0
        assert mapped(cache) == 4 - 1
        assert cache.slots.first_rows([0]) == [ROWS]


def test_a_request_is_unaffected_by_the_window_of_an_earlier_one(context: Context) -> None:
    """A request gets a slot in which pages that left the earlier window are being unmapped."""
    with small_cache(context, **WINDOW, max_batch=1) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 24)
        with pending() as event:
            assert cache.step(lens(cache, r0=25), event) == 0
            assert cache.snapshot()[0].in_flight
            assert cache.slots.first_rows([0]) == [ROWS]
            cache.free_reqid(0)
            assert cache.alloc_reqid() == 0
            assert cache.slots.first_rows([0]) == [0]
            with firing_later(event):
                decode(cache, 0, 1, first=7)
        assert cache.slots.first_rows([0]) == [0]
        assert read_rows(cache, 0, 0, [7])
        cache.check_integrity()


def test_the_same_length_again_moves_nothing(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        for _ in range(3):  # a prefill, whose work is launched after the last of these steps
            assert cache.step(lens(cache, r0=40)) == 0
        assert mapped(cache) == 5
        write_rows(cache, 0, 0, list(range(1, 41)))
        assert cache.step(lens(cache, r0=41)) == 0
        assert mapped(cache) == 3
        assert rows_are_there(cache, 28, 40)


def test_pages_are_unmapped_after_the_work_that_read_them(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 24)
        with pending() as event:
            assert cache.step(lens(cache, r0=25), event) == 0
            assert cache.snapshot()[0].in_flight
            for tensor in range(TENSORS):
                offset = cache.layout.offset(0, 0, tensor)
                assert cache.reservation.query(offset).mapped
            assert rows_are_there(cache, 8, 24)
            cache.check_integrity()
            with firing_later(event) as fired:
                # the step maps one more page, and waits for the work so that the unmap can start
                assert cache.step(lens(cache, r0=33)) == 0
                assert fired
        assert mapped(cache) == 4


def test_a_request_freed_while_pages_are_being_unmapped(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 24)
        with pending() as event:
            assert cache.step(lens(cache, r0=25), event) == 0
            cache.free_reqid(0)
            cache.check_integrity()
            event.set()
        cache.trim()
        assert cache.stats().mapped_bytes == 0


def test_the_next_request_finds_zeros_everywhere(context: Context) -> None:
    with small_cache(context, max_batch=1, **WINDOW) as cache:
        for _ in range(3):
            assert cache.alloc_reqid() == 0
            decode(cache, 0, 50)
            cache.free_reqid(0)
            assert cache.alloc_reqid() == 0
            assert cache.step([60]) == 0
            size = cache.layout.row_bytes
            for tensor in range(TENSORS):
                at = cache.layout.offset(0, 0, tensor)
                assert cache.reservation.read(at, 60 * size) == bytes(60 * size)
            cache.check_integrity()
            cache.free_reqid(0)


def test_a_long_request_fits_into_little_memory(context: Context) -> None:
    page = context.info.granule
    with small_cache(context, memory_limit=5 * TENSORS * page, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 12 * ROWS)
        assert cache.stats().short == 0
        other = cache.alloc_reqid()
        assert other == 1
        before = state(cache)[0]
        assert cache.step(lens(cache, r0=12 * ROWS, r1=4 * ROWS)) == -1
        assert state(cache)[0] == before
        assert rows_are_there(cache, 12 * ROWS - 12, 12 * ROWS)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_failed_slide_is_rolled_back_and_reported(context: Context, place: str) -> None:
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 24)
        cache.move(0, place)
        away = cache.snapshot()[0].away_pages
        assert bool(away) == (place == "host")
        context.inject(Inject.UNMAP)
        assert cache.step(lens(cache, r0=25)) == 0
        eventually(lambda: not cache.snapshot()[0].in_flight)
        context.inject(Inject.UNMAP, 0, 0)
        assert mapped(cache) == 4
        assert cache.snapshot()[0].away_pages == away
        assert rows_are_there(cache, 0, 24)
        cache.check_integrity()
        with pytest.raises(DriverError):
            cache.step(lens(cache, r0=26))
        decode(cache, 24, 40)
        assert mapped(cache) <= 4
        assert rows_are_there(cache, 28, 40)


def test_calls_that_a_window_does_not_allow(context: Context) -> None:
    for change, text in (
        ({"window": -1}, "window is -1; it must be between 0"),
        ({"window_tile": 70000}, "window_tile is 70000; it must be between 0 and 65536"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            KVCacheConfig(1, 1, 64, **change)
    with small_cache(context, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, 41)
        with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
            cache.truncate(0, 20)
        assert cache.step(lens(cache, r0=31)) == 0
        assert cache.snapshot()[0].seq_len == 41
        assert cache.truncate(0, 37) == 0  # takes back four tokens
        assert rows_are_there(cache, 37 - 8, 37)
        assert cache.alloc_prefix([1, 2, 3]) == (1, 0)


@pytest.mark.parametrize("length", [5, 8 + 4 + 3 * ROWS + 1, 12 * ROWS - 3])
def test_swapping_copies_the_rows_in_the_window(context: Context, length: int) -> None:
    """Rows outside the window are not copied, and their pages are unmapped again; the rows inside
    it are intact.
    """
    with small_cache(context, max_batch=1, **WINDOW) as cache:
        cache.alloc_reqid()
        decode(cache, 0, length)
        had = mapped(cache)
        (first,) = cache.slots.first_rows([0])
        with cache.swap_out(0) as swapped:
            assert swapped.nbytes == (length - first) * cache.layout.row_bytes * TENSORS
            assert cache.alloc_reqid() == 0
            assert cache.step(lens(cache, r0=3)) == 0  # writes other rows to its pages
            write_rows(cache, 0, 0, [90, 91, 92])
            cache.free_reqid(0)
            assert cache.swap_in(swapped) == 0
        assert cache.slots.first_rows([0]) == [first]
        assert mapped(cache) == had
        assert rows_are_there(cache, first, length)
        cache.check_integrity()
        if first:
            with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
                cache.truncate(0, first + 7)
        decode(cache, length, length + 3)
        assert rows_are_there(cache, max(first, length - 8), length + 3)
        assert cache.slots.first_rows([0])[0] >= first
        cache.check_integrity()


def test_a_request_that_could_not_be_swapped_in_is_not_swapped_out(context: Context) -> None:
    """A swap-in briefly needs pages for all of a request's tokens."""
    page = context.info.granule
    with small_cache(context, memory_limit=6 * TENSORS * page, **WINDOW) as cache:
        assert cache.alloc_reqid() == 0
        decode(cache, 0, 12 * ROWS - 1)
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        before = cache.snapshot()
        with pytest.raises(OutOfMemory, match=r"reqid 0 .* tokens temporarily needs 48"):
            cache.swap_out(0)
        assert cache.snapshot() == before
        decode(cache, 12 * ROWS - 1, 12 * ROWS)
        cache.check_integrity()


@pytest.mark.parametrize("policy", [{}, {"zero_fill": False}, {"eager_pages": 2, "limit": 24}])
@pytest.mark.parametrize("seed", range(2))
def test_random_engine(context: Context, policy: dict[str, Any], seed: int) -> None:
    """Every row that a kernel may read keeps its contents, regardless of the calls in between."""
    choose = random.Random(seed)
    options = dict(policy)
    limit = options.pop("limit", 40) * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, **WINDOW, **options) as cache:
        rows: dict[int, list[int]] = {}
        seen: dict[int, int] = {}  # each request's length before the last step
        for tag in range(1, 250):
            pick = choose.random()
            if pick < 0.1:
                reqid = cache.alloc_reqid()
                if reqid is not None:
                    rows[reqid], seen[reqid] = [], 0
            elif pick < 0.95:
                want = [0] * 4
                for reqid in rows:
                    more = choose.choice((0, 1, 1, 3, 17))
                    want[reqid] = min(len(rows[reqid]) + more, 12 * ROWS)
                if choose.random() < 0.5:
                    cache.step_async(want)
                if cache.step(want) == -1:
                    gone = max(rows, key=lambda reqid: len(rows[reqid]))
                    cache.free_reqid(gone)
                    del rows[gone], seen[gone]
                    continue
                for reqid, held in rows.items():
                    if want[reqid] > len(held):
                        seen[reqid] = len(held)
                    write_rows(cache, reqid, len(held), [tag] * (want[reqid] - len(held)))
                    held.extend([tag] * (want[reqid] - len(held)))
            elif rows:
                gone = choose.choice(list(rows))
                cache.free_reqid(gone)
                del rows[gone], seen[gone]
            for reqid, held in rows.items():
                low = max(0, seen[reqid] - 12)
                assert read_rows(cache, reqid, low, held[low:])
            if tag % 10 == 0:
                cache.check_integrity()


# ---- forks ---------------------------------------------------------------------------------------


def decoded(cache: KVCache, rows: int) -> int:
    """Starts a request and computes `rows` rows, one per step."""
    reqid = cache.alloc_reqid()
    assert reqid is not None
    decode(cache, 0, rows, reqid)
    return reqid


@pytest.mark.parametrize("rows", [3, ROWS, 20, 41, 5 * ROWS])
def test_a_fork_shares_the_pages_in_the_window(context: Context, rows: int) -> None:
    with small_cache(context, max_batch=6, **WINDOW) as cache:
        parent = decoded(cache, rows)
        (first,) = cache.slots.first_rows([parent])
        before = cache.stats()
        children = cache.fork_many(parent, 2)
        assert children is not None
        whole = rows // ROWS - first // ROWS
        for one in cache.snapshot():
            if one.reqid in (parent, *children):
                assert (one.shared_pages, one.seq_len) == (whole, rows)
                assert one.mapped_pages == mapped(cache, parent)
        assert cache.slots.first_rows(children) == [first] * 2
        now = cache.stats()
        assert now.active_pages - before.active_pages == 2 * bool(rows % ROWS) * TENSORS
        assert now.used_bytes <= now.active_pages * cache.layout.page_size
        cache.check_integrity()
        for tag, reqid in enumerate((parent, *children), 1):
            assert read_rows(cache, reqid, first, list(range(first + 1, rows + 1)))
            decode(cache, rows, rows + 24, reqid, 1000 * tag)
            cache.check_integrity()
        low = rows + 24 - 13  # the last step did not read earlier rows
        for tag, reqid in enumerate((parent, *children), 1):
            tags = [n + (1000 * tag if n >= rows else 1) for n in range(low, rows + 24)]
            assert read_rows(cache, reqid, low, tags)
            assert cache.slots.first_rows([reqid])[0] > first
        cache.check_integrity()
        cache.free_reqid(parent)
        assert read_rows(cache, children[0], low, [n + 2000 for n in range(low, rows + 24)][-13:])
        for child in children:
            cache.free_reqid(child)
        cache.trim()
        assert cache.stats().mapped_bytes == 0
        cache.check_integrity()


def test_shared_pages_are_unmapped_after_the_last_window_has_left_them(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        parent = decoded(cache, 3 * ROWS)
        child = cache.fork(parent)
        assert child is not None
        assert cache.stats().shared_pages == 3 * TENSORS
        with pending() as event:
            decode(cache, 3 * ROWS, 60, parent)
            want = lens(cache, **{f"r{child}": 3 * ROWS + 20})
            assert cache.step(want) == 0
            assert mapped(cache, child) == 6 - 1
            want[child] += 1
            # the request's first pages are unmapped once the work has completed
            assert cache.step(want, event) == 0
            assert cache.stats().shared_pages == 2 * TENSORS
            cache.check_integrity()
            event.set()
        assert mapped(cache, child) < 6
        assert cache.stats().shared_pages == 0
        cache.check_integrity()


def test_a_fork_needs_its_window_mapped(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        parent = decoded(cache, 41)
        (first,) = cache.slots.first_rows([parent])
        assert mapped(cache, parent) == 6 - first // ROWS
        before = state(cache)
        for length in (0, first, first + 7):
            with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
                cache.fork(parent, length)
        assert state(cache) == before
        child = cache.fork(parent, first + 8)
        assert child is not None
        assert read_rows(cache, child, first, list(range(first + 1, first + 9)))
        with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
            cache.truncate(child, first + 7)
        decode(cache, first + 8, first + 40, child, 500)
        assert read_rows(cache, parent, first, list(range(first + 1, 42)))
        cache.check_integrity()


def test_rows_of_a_forked_window_are_truncated(context: Context) -> None:
    """A page shared by both requests is copied for the one that is truncated."""
    with small_cache(context, **WINDOW) as cache:
        parent = decoded(cache, 5 * ROWS)
        child = cache.fork(parent)
        assert child is not None
        (first,) = cache.slots.first_rows([child])
        assert cache.truncate(child, 4 * ROWS + 3) == 0
        assert cache.snapshot()[child].shared_pages == 4 - first // ROWS
        assert read_rows(cache, child, first, list(range(first + 1, 4 * ROWS + 4)))
        decode(cache, 4 * ROWS + 3, 5 * ROWS, child, 900)
        assert read_rows(cache, parent, first, list(range(first + 1, 5 * ROWS + 1)))
        cache.check_integrity()


def test_a_failed_slide_of_shared_pages_is_rolled_back(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        parent = decoded(cache, 24)
        child = cache.fork(parent)
        assert child is not None
        context.inject(Inject.UNMAP)
        assert cache.step(lens(cache, **{f"r{child}": 25})) == 0
        eventually(lambda: not cache.snapshot()[child].in_flight)
        context.inject(Inject.UNMAP, 0, 0)
        assert (mapped(cache, child), cache.snapshot()[child].shared_pages) == (4, 3)
        assert read_rows(cache, child, 0, list(range(1, 25)))
        cache.check_integrity()
        with pytest.raises(DriverError):
            cache.step(lens(cache, **{f"r{child}": 26}))
        decode(cache, 24, 40, child)
        assert cache.stats().shared_pages == 3 * TENSORS  # the pages shared with the parent
        cache.check_integrity()


def test_a_forked_window_is_moved_and_swapped(context: Context) -> None:
    with small_cache(context, **WINDOW) as cache:
        parent = decoded(cache, 41)
        child = cache.fork(parent)
        assert child is not None
        (first,) = cache.slots.first_rows([child])
        moved = cache.move(child, "host")
        assert (moved.pages, moved.shared) == (TENSORS, (41 // ROWS - first // ROWS) * TENSORS)
        swapped = cache.swap_out(child)
        back = cache.swap_in(swapped)
        assert back is not None
        for reqid in (parent, back):
            assert read_rows(cache, reqid, first, list(range(first + 1, 42)))
        cache.check_integrity()


@pytest.mark.parametrize("pages", [8, 9])
def test_a_fork_that_could_not_be_swapped_in_is_not_swapped_out(
    context: Context, pages: int
) -> None:
    """Swapping the fork out frees one page; the parent keeps the shared pages."""
    limit = pages * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit, **WINDOW) as cache:
        parent = decoded(cache, 41)
        child = cache.fork(parent)
        assert child is not None
        assert mapped(cache, child) == 3
        assert cache.stats().active_pages == 4 * TENSORS
        if pages == 8:
            with pytest.raises(
                OutOfMemory, match="tokens temporarily needs 24, and only 20 are obtainable"
            ):
                cache.swap_out(child)
        else:
            again = cache.swap_in(cache.swap_out(child))
            assert again is not None
            child = again
        cache.free_reqid(parent)
        back = cache.swap_in(cache.swap_out(child))
        assert back is not None
        (first,) = cache.slots.first_rows([back])
        assert read_rows(cache, back, first, list(range(first + 1, 42)))


# ---- models with sliding and full layers ---------------------------------------------------------


def test_sliding_and_full_layers(context: Context) -> None:
    page = context.info.granule
    heads = page // (ROWS * 64 * 4)
    layers = [LayerShape(heads, 64, window=8), LayerShape(heads, 64)]
    policy = {"dtype": "float32", "max_batch": 2, "max_seq_len": 96, "page_size": page}
    with LayeredCache(layers, context, window_tile=4, memory_limit=64 * page, **policy) as cache:
        slides, keeps = cache.caches
        assert cache.alloc_reqid() == 0
        for length in range(1, 97):
            assert cache.step_async([length, 0]) == 0
            assert cache.step([length, 0]) == 0
            for one in cache.caches:
                write_rows(one, 0, length - 1, [length])
        assert mapped(keeps) == 12
        assert mapped(slides) <= 4
        assert rows_are_there(keeps, 0, 96)
        assert rows_are_there(slides, 96 - 12, 96)
        cache.check_integrity()


def model(**values: Any) -> SimpleNamespace:
    text = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "dtype": "bfloat16",
        "max_position_embeddings": 512,
    }
    return SimpleNamespace(**{**text, **values})


def test_layers_of_a_transformers_model() -> None:
    sliding, full = "sliding_attention", "full_attention"
    every = LayerShape(2, 32, window=128)
    whole = LayerShape(2, 32)
    assert layer_shapes(model(sliding_window=128)) == [every] * 4
    assert KVCacheConfig.from_hf(model(sliding_window=128)).window == 128
    assert KVCacheConfig.from_hf(model(sliding_window=128), window=0).window == 0
    assert layer_shapes(model(sliding_window=128, use_sliding_window=False)) == [whole] * 4
    mixed = model(sliding_window=128, layer_types=[sliding, full, sliding, "chunked_attention"])
    assert layer_shapes(mixed) == [every, whole, every, whole]
    mixed.attention_chunk_size = 64  # no token attends to more than 64 tokens
    assert layer_shapes(mixed) == [every, whole, every, LayerShape(2, 32, window=64)]
    assert KVCacheConfig.from_hf(mixed).window == 0
    mixed.per_layer_config = {1: {"head_dim": 64, "num_key_value_heads": 1}}
    assert layer_shapes(mixed)[1] == LayerShape(1, 64)
    # as read from a file
    mixed.per_layer_config = {"01": {"head_dim": 64, "num_key_value_heads": 1}}
    assert layer_shapes(mixed)[1] == LayerShape(1, 64)
    shared = model(num_kv_shared_layers=1)
    assert layer_shapes(shared) == [whole] * 3 + [EmptyShape()]
    assert layer_shapes(model(v_head_dim=16))[0] == LayerShape(2, 32, 16)
    latent = model(kv_lora_rank=512, qk_rope_head_dim=64)
    assert layer_shapes(latent) == [LayerShape(1, 576, 0)] * 4
    config = KVCacheConfig.from_hf(latent)
    assert (config.num_kv_heads, config.head_dim, config.tensors_per_layer) == (1, 576, 1)
    assert KVCacheConfig.from_hf(latent, head_dim=192).tensors_per_layer == 2


def test_unsupported_layers_are_rejected() -> None:
    for values, text in (
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but the model has 4"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer 0 is linear_attention: the state's description in its configuration",
        ),
        (
            {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            "layer 1 is sliding_attention, but sliding_window is None",
        ),
        ({"kv_lora_rank": 512}, "no qk_rope_head_dim"),
        (
            {"layers_block_type": ["attention", *["recurrent"] * 3]},
            "layer 1 is recurrent: this kind",
        ),
    ):
        with pytest.raises(InvalidArgument, match=text):
            layer_shapes(model(**values))


def test_layers_of_real_configurations() -> None:
    transformers = pytest.importorskip("transformers")
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=64)
    windows = [shape.window for shape in layer_shapes(gemma)]
    assert windows == [64] * 5 + [0]
    deepseek = transformers.DeepseekV3Config(num_hidden_layers=2)
    assert layer_shapes(deepseek) == [LayerShape(1, 576, 0)] * 2


@pytest.mark.parametrize("stateful", [False, True])
def test_no_row_is_kept_if_no_prefix_can_be_recorded(host: Context, stateful: bool) -> None:
    """Sixteen rows of 768 bytes fill whole pages; if prefixes can be recorded, all 16 rows stay
    mapped.
    """
    shapes: list[LayerShape | StateShape] = [
        LayerShape(num_kv_heads=3, head_dim=64, window=8),
        StateShape(conv=(40, 4), recurrent=(4, 20, 20))
        if stateful
        else LayerShape(num_kv_heads=3, head_dim=64),
    ]
    with LayeredCache(
        shapes, host, dtype="float32", max_batch=1, max_seq_len=64, page_size=4096, window_tile=0
    ) as cache:
        assert cache.alloc_reqid() == 0
        for rows in range(1, 17):
            assert cache.step([rows]) == 0
        first = cache.caches[0].first_rows([0])[0]
        assert first == (6 if stateful else 0), "15 rows less a window of 8 begin on page 1"
        cache.check_integrity()
