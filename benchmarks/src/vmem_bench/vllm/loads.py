# SPDX-License-Identifier: MIT
"""Loads for the engines of `vmem bench vllm`, and statistics of their answers.

A load is a set of requests with their arrival times. Rates follow a trace: its arrivals are
stretched or compressed, so that the gaps between requests stay in proportion.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyvmem.bench.timing import percentile
from pyvmem.layouts.workload import Arrival, Request, generate, poisson, read_arrivals
from pyvmem.plumbing.validation import invalid

__all__ = [
    "Heard",
    "Load",
    "arrivals",
    "at_rate",
    "climb",
    "idle_footprint",
    "in_turns",
    "later",
    "tiny",
]

_SEED = 5
_CALM = 0.1  # the rate between bursts, relative to the rate in a burst


@dataclass(frozen=True)
class Load:
    """Requests for one engine.

    Attributes:
        prompts: token ids of each request's prompt.
        tokens: number of tokens that each request generates.
        at: arrival times, in seconds since the start.
        most: maximum number of requests in flight; 0 for no limit.
    """

    prompts: list[list[int]]
    tokens: list[int]
    at: list[float]
    most: int = 0

    @classmethod
    def of(cls, found: Sequence[Arrival], vocabulary: int, seed: int) -> Load:
        """Creates prompts of random tokens for the given requests; no two share a prefix."""
        draw = random.Random(seed)
        prompts = [
            [draw.randrange(3, vocabulary) for _ in range(one.request.context)] for one in found
        ]
        return cls(prompts, [one.request.output for one in found], [one.at for one in found])

    def order(self, begin: float = 0.0) -> dict[str, Any]:
        """Returns the arguments for `Engine.send`.

        begin: the load's start as a monotonic time; 0 to start when the command arrives.
        """
        return {
            "load": self.prompts,
            "tokens": self.tokens,
            "at": self.at,
            "most": self.most,
            "begin": begin,
        }


@dataclass(frozen=True)
class Heard:
    """An engine's answer to a load.

    Attributes:
        answers: token ids of each request's answer.
        first: seconds from each request's due time to its first token.
        gaps: seconds between successive tokens, across all requests.
        rate: new tokens per second, from the first request's due time to the last token.
        seconds: seconds from the start to the last token.
    """

    answers: list[list[int]]
    first: list[float]
    gaps: list[float]
    rate: float
    seconds: float

    @classmethod
    def of(cls, load: Load, answer: dict[str, Any]) -> Heard:
        """Evaluates an engine's answer to the load."""
        due = answer["added"] if load.most else load.at
        times: list[list[float]] = answer["times"]
        first = [one[0] - at for one, at in zip(times, due, strict=True)]
        gaps = [b - a for one in times for a, b in itertools.pairwise(one)]
        end = max(one[-1] for one in times)
        made = sum(map(len, answer["answers"]))
        return cls(answer["answers"], first, gaps, made / (end - min(load.at)), end)

    def p(self, fraction: float) -> float:
        """Returns a percentile of `first`, such as 0.99."""
        return percentile(sorted(self.first), fraction)


def arrivals(trace: Path | None, count: int, longest: int) -> list[Arrival]:
    """Returns the first `count` trace requests that fit `longest`, or Azure-like synthetic ones.

    On average, one request arrives per second.

    Raises:
        InvalidArgument: no request fits, or the trace cannot be read.
    """
    if trace is None:
        found = poisson(generate(16 * count, _SEED), 1.0, _SEED)
    else:
        found = read_arrivals(trace)
    found = [one for one in found if one.request.context + one.request.output <= longest][:count]
    if not found:
        raise invalid(
            f"no request of at most {longest} tokens in {trace or 'the synthetic requests'}",
            op="vmem bench",
        )
    return at_rate(found, 1.0)


def tiny(count: int) -> list[Arrival]:
    """Returns requests for a tiny model, with prompts of 17 to 82 tokens and 9 to 14 new tokens.

    On average, one request arrives per second.
    """
    requests = [Request(17 + 13 * (i % 6), 9 + i % 6) for i in range(count)]
    return at_rate(poisson(requests, 1.0, _SEED), 1.0)


def at_rate(found: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Returns the same requests at `rate` per second on average; 0 puts them all at the start."""
    begin, end = found[0].at, found[-1].at
    each = (end - begin) / max(1, len(found) - 1) * rate
    return [_moved(one, (one.at - begin) / each if each > 0 else 0.0) for one in found]


def _moved(one: Arrival, at: float) -> Arrival:
    """Returns the same request with a different arrival time."""
    return one._replace(at=round(at, 6))


def later(found: Sequence[Arrival], seconds: float) -> list[Arrival]:
    """Returns the same requests, moved by `seconds` (to earlier times if negative)."""
    return [_moved(one, one.at + seconds) for one in found]


def in_turns(
    found: Sequence[Arrival], engines: int, rate: float, seconds: float, period: float
) -> list[list[Arrival]]:
    """Returns `seconds` of requests for each engine; the engines' bursts follow one another.

    A burst lasts `period` / `engines` seconds. During a burst, `rate` requests arrive per second,
    spaced as in the trace; between bursts they arrive at a tenth of that rate. Each engine gets a
    different part of the trace.
    """
    share = len(found) // engines
    loads: list[list[Arrival]] = []
    for engine in range(engines):
        draw = random.Random(_SEED + engine)
        own = at_rate(found[engine * share : (engine + 1) * share], rate)
        kept = []
        for one in own:
            if one.at >= seconds:
                break
            turn = int(one.at % period / period * engines)
            if turn == engine or draw.random() < _CALM:
                kept.append(one)
        loads.append(kept or own[:1])
    return loads


def climb(engines: int, peak: float, output: int, prompt: int = 256) -> list[list[Arrival]]:
    """Returns kvcached's ramps: the rate rises by 1/s every second up to `peak`, then falls.

    The engines start two and a quarter ramps apart, so that their peaks do not coincide.
    """
    ramp: list[Arrival] = []
    at, owed, step = 0.0, 0.0, 0.01
    while at < 2 * peak:
        owed += min(at, 2 * peak - at) * step
        if owed >= 1.0:
            ramp.append(Arrival(at, Request(prompt, output)))
            owed -= 1.0
        at += step
    return [later(ramp, k * 2.25 * peak) for k in range(engines)]


def idle_footprint(count: int, vocabulary: int, most: int, scale: float = 1.0) -> Load:
    """Returns kvcached's workload for an engine that becomes idle, from its published numbers.

    Of 10 prompts, 3 are hot: they start with one of 16 prefixes of 128 tokens and end with a suffix
    of 64. Cold prompts have 192 to 1,024 tokens. Answers have 16 to 256 tokens. `scale` multiplies
    all lengths.
    """
    draw = random.Random(1234)

    def some(tokens: float) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(max(1, round(tokens * scale)))]

    hot = [some(128) for _ in range(16)]
    prompts, tokens = [], []
    for _ in range(count):
        if draw.random() < 0.3:
            prompts.append(draw.choice(hot) + some(64))
        else:
            prompts.append(some(draw.randint(192, 1024)))
        tokens.append(max(1, round(draw.randint(16, 256) * scale)))
    return Load(prompts, tokens, [0.0] * count, most)
