# SPDX-License-Identifier: MIT
"""Numbers against limits, in C, against the same in Python."""

from __future__ import annotations

import random
from array import array

import pytest

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
