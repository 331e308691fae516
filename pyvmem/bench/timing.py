# SPDX-License-Identifier: MIT
"""Clocks, percentiles and rounds, shared by all measurements.

A *sample* is the time of one call, or of one block of calls divided by their number, in
nanoseconds. Samples are collected in rounds; in a round every system takes its turn, and the order
of the turns rotates from round to round, so that drift in the machine's speed affects all systems
equally.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = [
    "Deadline",
    "Samples",
    "Summary",
    "interleave",
    "percentile",
    "quiet",
    "summarize",
    "time_block",
    "time_each",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """Statistics of a row's samples, in the samples' unit.

    `spread` is the interquartile range divided by the median; `round_spread` is the range of the
    rounds' medians divided by the median of all samples.
    """

    n: int
    rounds: int
    median: float
    p90: float
    p99: float
    mean: float
    min: float
    max: float
    spread: float
    round_spread: float


@dataclass
class Samples:
    """Samples of one row, one list per round."""

    rounds: list[list[float]] = field(default_factory=list)

    def new_round(self) -> list[float]:
        """Starts a round and returns its list, for the caller to append to."""
        self.rounds.append([])
        return self.rounds[-1]

    def drop_first_round(self) -> None:
        """Drops the warm-up round, unless it is the only one."""
        if len(self.rounds) > 1:
            del self.rounds[0]

    def flat(self) -> list[float]:
        """Returns the samples of all rounds."""
        return [x for r in self.rounds for x in r]

    def __len__(self) -> int:
        return sum(map(len, self.rounds))


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Returns the nearest-rank percentile of sorted, non-empty data: always one of the samples."""
    rank = math.ceil(fraction * len(ordered))
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def summarize(samples: Samples) -> Summary:
    """Summarizes samples. Raises ValueError if there are none: an empty row is a mistake."""
    data = sorted(samples.flat())
    if not data:
        raise ValueError("no samples")
    medians = [_median(sorted(r)) for r in samples.rounds if r]
    middle = _median(data)
    scale = middle if middle else 1.0
    return Summary(
        n=len(data),
        rounds=len(medians),
        median=middle,
        p90=percentile(data, 0.90),
        p99=percentile(data, 0.99),
        mean=sum(data) / len(data),
        min=data[0],
        max=data[-1],
        spread=(percentile(data, 0.75) - percentile(data, 0.25)) / scale,
        round_spread=(max(medians) - min(medians)) / scale,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Disables Python's garbage collector within a timed block."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def time_each(fn: Callable[..., T], args: Iterable[tuple[Any, ...]], into: list[float]) -> list[T]:
    """Calls `fn(*a)` for each `a`, timing each call, and returns the results.

    The samples include the cost of two clock readings and of the Python call; the `noop` rows show
    how much that is.
    """
    clock = time.perf_counter_ns
    args = list(args)
    results: list[T] = []
    for a in args:
        start = clock()
        result = fn(*a)
        into.append(clock() - start)
        results.append(result)
    return results


def time_block(fn: Callable[..., T], args: Iterable[tuple[Any, ...]], into: list[float]) -> list[T]:
    """Times all calls together and adds one sample, the mean time per call.

    Meant for calls of about 1 us, which are too short to time individually.
    """
    clock = time.perf_counter_ns
    args = list(args)
    start = clock()
    results = [fn(*a) for a in args]
    into.append((clock() - start) / len(args))
    return results


class Deadline:
    """A time budget, which parts check between rounds; nothing enforces it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.start = now()
        self.seconds = seconds

    @property
    def left(self) -> float:
        """Seconds left; negative once the budget is used up."""
        return self.start + self.seconds - self._now()

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._now() - self.start

    def allows(self, seconds: float = 0.0) -> bool:
        """Returns true if at least `seconds` are left."""
        return self.left > seconds


def interleave(
    turns: Sequence[Callable[[], None]], rounds: int, deadline: Deadline | None = None
) -> int:
    """Runs every turn once per round, with the order rotated by one each round.

    Stops before a round that would overrun the deadline if it took as long as the slowest one so
    far, but always runs at least two (a warm-up and a counted round). Returns the number of rounds
    run.
    """
    slowest = 0.0
    for i in range(rounds):
        if i >= 2 and deadline is not None and not deadline.allows(slowest):
            return i
        start = time.monotonic()
        for k in range(len(turns)):
            turns[(i + k) % len(turns)]()
        slowest = max(slowest, time.monotonic() - start)
    return rounds
