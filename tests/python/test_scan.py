# SPDX-License-Identifier: MIT
"""Numbers against limits, in C, against the same in Python."""

from __future__ import annotations

import random
from array import array

import pytest

from pyvmem import InvalidArgument, KVCache, KVCacheConfig
from pyvmem._native import Limits


@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_places_above_their_limit(count: int) -> None:
    rng = random.Random(count)
    limits = Limits(count)
    for most in (0, 1, 1 << 40, (1 << 64) - 1):
        for place in range(count):
            limits.values[place] = rng.randint(0, most)
        numbers = array("Q", [rng.randint(0, most) for _ in range(count)])
        wanted = [i for i in range(count) if numbers[i] > limits.values[i]]
        assert limits.exceeded(numbers) == wanted
    assert limits.exceeded(limits.values) == []


def test_every_place_may_be_above() -> None:
    limits = Limits(3)
    assert limits.exceeded(array("Q", [1, 2, 3])) == [0, 1, 2]


def test_as_many_numbers_as_limits() -> None:
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match=f"{count} numbers for 3 limits"):
            Limits(3).exceeded(array("Q", [1] * count))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (-1, r"seq_lens\[1\] is -1; it must not be negative"),
        (-(1 << 70), r"seq_lens\[1\] is -1180591620717411303424; it must not be negative"),
        (65, r"seq_lens\[1\] is 65; max_seq_len is 64"),
        (1 << 64, r"seq_lens\[1\] is 18446744073709551616; max_seq_len is 64"),
    ],
)
def test_numbers_that_a_step_refuses(number: int, text: str) -> None:
    config = KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16", max_batch=2, max_seq_len=64
    )
    with KVCache(config, backend="host") as cache:
        assert [cache.alloc_reqid() for _ in range(2)] == [0, 1]
        assert cache.step([8, 8]) == 0
        for call in (cache.step, cache.step_async):
            with pytest.raises(InvalidArgument, match=text):
                call([64, number])
        assert [slot.seq_len for slot in cache.snapshot()] == [8, 8]
        cache.check_integrity()
