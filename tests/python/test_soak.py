# SPDX-License-Identifier: MIT
"""Runs random engines of every kind over one context (soak.py)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from soak import Soak

pytestmark = pytest.mark.needs_tensors


def soaked(soak: Soak, steps: int = 0, seconds: float = 0.0) -> None:
    try:
        soak.run(steps, seconds)
    except BaseException:
        print(f"seed {soak.seed}, step {soak.done}, interrupts {soak.interrupts}")
        raise
    print(soak.told())


def test_a_minute_of_random_engines(backend: str) -> None:
    """Uses a new seed each time and prints it on failure."""
    soaked(Soak(backend, random.randrange(1 << 30)), seconds=20)


@pytest.mark.parametrize("seed", range(3))
def test_random_engines_of_known_seeds(backend: str, seed: int) -> None:
    soaked(Soak(backend, seed), steps=6000, seconds=60)


def test_interrupted_random_engines(backend: str) -> None:
    soak = Soak(backend, 5, interrupts=True)
    soaked(soak, seconds=12)
    assert soak.interrupted


def test_a_failure_prints_the_state_of_the_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Any, models: list[Any], late: Any) -> None:
        raise AssertionError("the model and the cache differ")

    monkeypatch.setattr(Soak, "_drive", fails)
    with pytest.raises(AssertionError, match="differ"):
        Soak("host", 1).run(steps=1)
    said = capsys.readouterr().out
    for text in ("round 0, <Context host", "MemoryInfo(free_bytes=", "KVCacheConfig(",
                 "slot 5: 0 rows", "leased: []", "CacheStats(", "are obtainable"):  # fmt: skip
        assert text in said


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_million_steps(backend: str, interrupts: bool) -> None:
    soaked(Soak(backend, 11, interrupts=interrupts), steps=1_000_000)
