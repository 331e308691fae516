# SPDX-License-Identifier: MIT
"""Tests layers with a state per request, combined with layers with a row per token."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import pyvmem
from pyvmem import InvalidArgument, KVCache, KVCacheConfig, NotSupported
from pyvmem.kvcache import LayeredCache, LayerShape, StateShape

pytestmark = pytest.mark.needs_tensors

PAGE = 4096
# 640 and 6,400 bytes: one page and two pages
STATE = StateShape(conv=(40, 4), recurrent=(4, 20, 20))
ROWS = LayerShape(2, 16)  # 128 bytes per token and tensor
LAYERS = (STATE, STATE, ROWS, STATE)


def hybrid(context: pyvmem.Context, **policy: Any) -> LayeredCache:
    values = {"dtype": "float32", "max_batch": 4, "max_seq_len": 512, "low_watermark": 0.0}
    return LayeredCache(LAYERS, context, **{**values, **policy})


def put(cache: LayeredCache, reqid: int, number: float) -> None:
    for layer, shape in enumerate(LAYERS):
        if isinstance(shape, StateShape):
            for name, rows in cache.states(layer).items():
                rows[reqid] = number + layer + (0.5 if name == "conv" else 0.0)


def check(cache: LayeredCache, reqid: int, number: float | None) -> None:
    """Checks the contents written by `put`, or zeros if `number` is None."""
    for layer, shape in enumerate(LAYERS):
        if not isinstance(shape, StateShape):
            continue
        for name, rows in cache.states(layer).items():
            want = 0.0 if number is None else number + layer + (0.5 if name == "conv" else 0.0)
            assert bool((rows[reqid] == want).all()), (layer, name)


def state_pages(cache: LayeredCache) -> int:
    """Returns the number of pages that requests own in the groups with a state."""
    return sum(one.stats().active_pages for one in cache.caches if one.config.state)


def test_the_tensors_are_a_row_for_each_request(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        found = {name: (tuple(one.shape), one.dtype) for name, one in cache.states(1).items()}
        assert found == {
            "conv": ((4, 40, 4), torch.float32),
            "recurrent": ((4, 4, 20, 20), torch.float32),
        }
        assert [part.config.state for part in cache.caches] == [False, True, True]
        assert cache.k(2).shape == (4, 512, 2, 16)
        with pytest.raises(InvalidArgument, match="layer 0 has a state; see states"):
            cache.k(0)
        with pytest.raises(InvalidArgument, match="layer 2 has keys and values, not a state"):
            cache.states(2)
        with pytest.raises(InvalidArgument, match="layer 4 is not between 0 and 3"):
            cache.states(4)


def test_the_recurrent_state_is_float32_beside_rows_of_half_precision(host: pyvmem.Context) -> None:
    with hybrid(host, dtype="bfloat16") as cache:
        assert cache.states(0)["conv"].dtype == cache.k(2).dtype == torch.bfloat16
        assert cache.states(0)["recurrent"].dtype == torch.float32


def test_a_state_does_not_grow(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert (
            cache.memory.for_request(0, 100) // cache.caches[0].layout.page_size
            == 2 * 4 + 3 * 1 + 3 * 2
        )
        for length in (1, 2, 32, 33, 512):
            assert cache.step([length, 0, 0, 0]) == 0
            assert state_pages(cache) == 3 * 1 + 3 * 2
            cache.check_integrity()
        parts = cache.caches
        assert [part.readable_rows([0, 1]) for part in parts[1:]] == [[512, 0]] * 2
        assert cache.slots.capacity(0) == 512
        used = sum(part.stats().used_bytes for part in parts)
        assert used == 512 * 2 * 128 + 3 * 640 + 3 * 6400
        cache.free_reqid(0)
        assert state_pages(cache) == 0


def test_a_new_request_has_zeros(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        for number in (1.0, 2.0):
            assert cache.alloc_reqid() == 0
            assert cache.step([5, 0, 0, 0]) == 0
            check(cache, 0, None)
            put(cache, 0, number)
            assert cache.step([6, 0, 0, 0]) == 0
            check(cache, 0, number)
            cache.free_reqid(0)


def test_background_growth_maps_the_state_once(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step_async([40, 0, 0, 0]) == 0
        assert cache.step([40, 0, 0, 0]) == 0
        put(cache, 0, 3.0)
        assert cache.step_async([200, 0, 0, 0]) == 0
        assert cache.step([200, 0, 0, 0]) == 0
        check(cache, 0, 3.0)
        assert state_pages(cache) == 9
        cache.check_integrity()


def test_a_fork_copies_the_state(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([70, 0, 0, 0]) == 0
        put(cache, 0, 1.0)
        cache.k(2)[0, :70] = 7.0
        forked = cache.fork_many(0, 2)
        assert forked is not None
        for number, reqid in enumerate(forked, 2):
            check(cache, reqid, 1.0)
            assert bool((cache.k(2)[reqid, :70] == 7.0).all())
            put(cache, reqid, float(number))
        check(cache, 0, 1.0)
        put(cache, 0, 9.0)
        assert cache.step([71] * 3 + [0]) == 0
        for number, reqid in enumerate(forked, 2):
            check(cache, reqid, float(number))
        assert state_pages(cache) == 3 * 9
        cache.check_integrity()


def test_a_truncation_of_a_state_is_rejected_without_effect(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([70, 0, 0, 0]) == 0
        put(cache, 0, 1.0)
        before = cache.stats()
        for call in (cache.truncate, cache.fork):
            with pytest.raises(
                InvalidArgument, match=r"the state of reqid .*, of 70 tokens, cannot be"
            ):
                call(0, 69)
        assert cache.stats() == before
        assert cache.truncate(0, 70) == 0
        forked = cache.fork(0, 0)  # starts without rows, and so without a state
        assert forked is not None
        assert cache.step([70, 3, 0, 0]) == 0
        check(cache, forked, None)
        assert cache.truncate(0, 0) == 0
        assert cache.step([4, 3, 0, 0]) == 0
        check(cache, 0, None)
        cache.check_integrity()


def test_swap_in_restores_the_state(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([70, 0, 0, 0]) == 0
        put(cache, 0, 4.0)
        with cache.swap_out(0) as swapped:
            assert swapped.nbytes == 70 * 2 * 128 + 3 * (640 + 6400)
            assert cache.alloc_reqid() is not None
            assert cache.step([9, 0, 0, 0]) == 0
            put(cache, 0, 5.0)
            back = cache.swap_in(swapped)
        assert back is not None
        check(cache, back, 4.0)
        check(cache, 0, 5.0)
        cache.check_integrity()


def test_prefixes_are_not_matched_past_a_state(host: pyvmem.Context) -> None:
    tokens = list(range(1, 129))
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([128, 0, 0, 0]) == 0
        assert cache.record(0, tokens) == 0
        cache.free_reqid(0, tokens=tokens)
        with cache.match([*tokens, 5]) as match:
            assert match.length == 0
            assert cache.can_admit([130], [match])
            assert cache.alloc_prefix(match) == (0, 0)
        assert cache.stats().prefix_pages == 0
        cache.check_integrity()


def test_no_group_grows_if_one_is_short(host: pyvmem.Context) -> None:
    """There is enough memory for the rows of two requests, but for the state of only one."""
    with hybrid(host, memory_limit=(2 * 2 + 9 + 8) * PAGE) as cache:
        for _ in range(2):
            cache.alloc_reqid()
        assert cache.can_admit([10])
        assert not cache.can_admit([10, 10])
        assert cache.step([10, 0, 0, 0]) == 0
        put(cache, 0, 1.0)
        assert cache.step([10, 10, 0, 0]) == -1
        assert cache.fork(0) is None
        cache.check_integrity()
        cache.free_reqid(0)
        assert cache.step([0, 10, 0, 0]) == 0
        check(cache, 1, None)


def test_move_includes_the_state(host: pyvmem.Context) -> None:
    with hybrid(host) as cache:
        assert cache.alloc_reqid() == 0
        assert cache.step([70, 0, 0, 0]) == 0
        put(cache, 0, 2.0)
        moved = cache.move(0, "host")
        assert moved.pages == 2 * 3 + 9
        check(cache, 0, 2.0)
        assert cache.step([71, 0, 0, 0]) == 0
        put(cache, 0, 3.0)
        # in the background, only pages that are not being written are moved
        assert cache.move(0, "device", wait=False).pages == 2 * 2
        assert cache.step([72, 0, 0, 0]) == 0
        assert cache.move(0, "device").pages == 2 * 1 + 9
        check(cache, 0, 3.0)
        cache.check_integrity()


def test_use_and_waste_exclude_host_pages(host: pyvmem.Context) -> None:
    """The bytes of a request in host memory do not count as used; a state only partly fills its
    pages.
    """
    with hybrid(host) as cache:
        for length in (70, 90):
            reqid = cache.alloc_reqid() or 0
            assert cache.step([length if one == reqid else 0 for one in range(4)]) == 0
        states = 3 * 640 + 3 * 6400
        assert cache.stats().used_bytes == (70 + 90) * 2 * 128 + 2 * states
        assert cache.move(0, "host").pages == 2 * 3 + 9
        assert cache.stats().used_bytes == 90 * 2 * 128 + states
        assert cache.stats().wasted_bytes == (2 * 3 + 9) * PAGE - cache.stats().used_bytes
        assert cache.step([73, 0, 0, 0]) == 0  # grows into the last page, which is in host memory
        assert cache.stats().used_bytes == 90 * 2 * 128 + states
        assert cache.step([100, 0, 0, 0]) == 0  # four rows are in a new page on the device
        assert cache.stats().used_bytes == (90 + 4) * 2 * 128 + states
        cache.check_integrity()


def test_a_model_with_only_states(host: pyvmem.Context) -> None:
    config = KVCacheConfig(
        2, 4, 64, "float32", max_batch=3, max_seq_len=100, tensors_per_layer=1, state=True
    )
    with KVCache(config, host) as cache:
        assert cache.k(1).shape == (3, 1, 4, 64)
        assert cache.alloc_reqid() == 0
        assert cache.step([100, 0, 0]) == 0
        assert cache.stats().active_pages == 2
        assert cache.trim() is not None
        with pytest.raises(NotSupported, match="map_common_pages: the layers have a state"):
            cache.slots.map_common_pages(10)
        cache.check_integrity()


def test_bad_shapes_are_rejected() -> None:
    for make, text in (
        (lambda: StateShape(), "needs a conv or a recurrent state"),
        (lambda: StateShape(conv=(4,)), r"conv is \(4,\); it must have two sizes or more"),
        (lambda: StateShape(recurrent=(4, 0)), "recurrent is 0; it must be between 1 and 65536"),
        (lambda: StateShape(conv=(4, 300, 300)), "elements of a conv channel is 90000"),
        (
            lambda: KVCacheConfig(1, 1, 8, state=True, tensors_per_layer=1, window=5),
            "state requires window=0 and tensors_per_layer=1, not window=5",
        ),
        (
            lambda: KVCacheConfig(1, 1, 8, state=True),
            "state requires .* window=0 and tensors_per_layer=2",
        ),
    ):
        with pytest.raises(InvalidArgument, match=text):
            make()


@pytest.mark.parametrize("seed", range(4))
def test_against_a_model(host: pyvmem.Context, seed: int) -> None:
    """Requests are allocated, grown, forked, swapped and freed at random; each keeps its own
    state.
    """
    print("seed", seed)
    dice = random.Random(seed)
    with hybrid(host, max_batch=6, memory_limit=80 * PAGE) as cache:
        lengths: dict[int, int] = {}
        numbers: dict[int, float | None] = {}
        asleep: list[tuple[Any, float | None]] = []
        for turn in range(120):
            what = dice.choice(["new", "grow", "grow", "fork", "free", "out", "in", "empty"])
            some = dice.choice(list(lengths)) if lengths else None
            if what == "new":
                reqid = cache.alloc_reqid()
                if reqid is not None:
                    lengths[reqid], numbers[reqid] = 0, None
            elif what == "in" and asleep:
                swapped, number = asleep[-1]
                reqid = cache.swap_in(swapped)
                if reqid is not None:
                    asleep.pop()
                    lengths[reqid], numbers[reqid] = swapped.seq_len, number
            elif some is None:
                continue
            elif what == "grow":
                want = min(512, lengths[some] + dice.randrange(1, 90))
                asked = {**lengths, some: want}
                if cache.step([asked.get(one, 0) for one in range(6)]) == 0:
                    lengths[some] = want
                    check(cache, some, numbers[some])
                    numbers[some] = float(turn)
                    put(cache, some, numbers[some])
            elif what == "fork":
                reqid = cache.fork(some)
                if reqid is not None:
                    lengths[reqid], numbers[reqid] = lengths[some], numbers[some]
            elif what == "free":
                cache.free_reqid(some)
                del lengths[some], numbers[some]
            elif what == "out":
                asleep.append((cache.swap_out(some), numbers.pop(some)))
                del lengths[some]
            elif what == "empty" and cache.truncate(some, 0) == 0:
                lengths[some], numbers[some] = 0, None
            for reqid, length in lengths.items():
                if length:
                    check(cache, reqid, numbers[reqid])
            cache.check_integrity()
        for swapped, _ in asleep:
            swapped.close()
