# SPDX-License-Identifier: MIT
"""The lengths of a step, read in C, against the same in Python."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy
import pytest

from pyvmem import InvalidArgument, KVCache, KVCacheConfig
from pyvmem._native import Lengths


@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_a_scan_is_what_python_would_find(count: int) -> None:
    rng = random.Random(count)
    lengths = Lengths(count)
    held = [0] * count
    for most in (0, 1, 1 << 40, 1 << 30, (1 << 64) - 1):
        for place in range(count):
            lengths.capacity[place] = rng.randint(0, most)
        numbers = [rng.randint(0, most) for _ in range(count)]
        found = lengths.scan(numbers)
        assert isinstance(found, tuple)
        rows, total, beyond = found
        assert list(rows) == list(map(max, numbers, held))
        assert total == sum(rows) % (1 << 64)
        assert beyond == [i for i in range(count) if numbers[i] > lengths.capacity[i]]
        assert list(lengths.held) == held
        if most < 1 << 40:  # every second scan is committed
            lengths.held, held = rows, list(rows)


def test_every_place_may_be_beyond() -> None:
    assert Lengths(3).scan([1, 2, 3]) == (array("Q", [1, 2, 3]), 6, [0, 1, 2])


def test_as_many_lengths_as_slots() -> None:
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match=f"{count} lengths for 3 slots"):
            Lengths(3).scan([1] * count)


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1.0, "1", None, numpy.int64(1)])
def test_the_first_that_is_no_length_is_named(bad: Any) -> None:
    lengths = Lengths(4)
    assert lengths.scan([1, True, bad, bad]) == 2
    assert list(lengths.held) == [0, 0, 0, 0]
    assert lengths.scan([1, 0, 0, 0]) == (array("Q", [1, 0, 0, 0]), 1, [0])


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
