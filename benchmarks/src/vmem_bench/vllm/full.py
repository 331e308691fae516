# SPDX-License-Identifier: MIT
"""The ``full`` part of `vmem bench vllm`: engines that fill the GPU, one at a time.

Two identical engines that run side by side differ by several percent in every round, because
processes differ whether or not they use the pool. So each engine has the GPU to itself, serves a
load that fills its KV cache, idles, serves the load again, and is stopped. Arms alternate (stock,
elastic, elastic, stock), so that drift in the machine's speed affects both equally. At the start of
each load, the elastic engine has almost nothing mapped. The first load of a process includes
one-time work in torch and the driver, so it has separate rows. A ratio is the mean over pairs of
adjacent engines, with its confidence interval.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.layouts.workload import Arrival, Request
from pyvmem.plumbing.validation import invalid
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import GIB, MIB, open_fleet, plans_of, samples_of
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.loads import Heard, Load

__all__ = ["add_ratio", "compare", "filling", "interval", "measure", "there_and_back"]

_FILLED = 0.96  # fraction of the KV cache in use at the end of the load
_ENDING = 8.0  # seconds allowed for stopping an engine
_REST = 3.0  # seconds between the loads, in which an elastic engine frees its memory
# Student's t for 95% confidence, for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def filling(
    memory: int,
    token_bytes: int,
    count: int,
    output: int,
    longest: int,
    vocabulary: int,
    seed: int,
) -> Load:
    """Returns requests, all due at the start, that fill `memory` by the time they finish.

    Args:
        memory: size of the KV cache in bytes.
        token_bytes: size of a token's keys and values across all layers.
        count: number of requests.
        output: number of tokens that each request generates.
        longest: maximum number of tokens in a prompt and its answer.
        vocabulary: number of token ids.
        seed: random seed for the prompts and their lengths, which vary by a tenth.

    Raises:
        InvalidArgument: the memory is too small for `count` requests, or too large.
    """
    each = int(memory * _FILLED / token_bytes / count)
    prompt = each - output
    if prompt < 16:
        raise invalid(
            f"{memory} bytes have room for {each} tokens per request for {count} requests, "
            f"{output} of them for the answer; a prompt needs 16",
            size=each,
            limit=output + 16,
            op="vmem bench",
        )
    if each > longest:
        raise invalid(
            f"{count} requests need {each} tokens each to fill {memory} bytes, above the limit of "
            f"{longest}: use more requests",
            size=each,
            limit=longest,
            op="vmem bench",
        )
    draw = random.Random(seed)
    spread = min(prompt // 10, longest - each)
    half = [draw.randrange(-spread, spread + 1) for _ in range(count // 2)]
    lengths = [prompt + more for more in (*half, *(-more for more in half))]
    lengths += [prompt] * (count - len(lengths))
    return Load.of([Arrival(0.0, Request(n, output)) for n in lengths], vocabulary, seed)


def there_and_back(arms: Sequence[str], each: int) -> Iterator[str]:
    """Yields the arms in order, then in reverse order, and so on; each gets `each` turns."""
    for number in range(each):
        yield from arms if number % 2 == 0 else reversed(arms)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of the values, and half the width of its 95% confidence interval.

    The width is infinite if there is only one value.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("inf")
    t = _T95[min(len(values) - 1, len(_T95)) - 1]
    return mean, t * statistics.stdev(values) / len(values) ** 0.5


def add_ratio(part: Part, row: str, what: str, arm: str, ratios: Sequence[float]) -> None:
    """Adds a row with the mean of `ratios` and its confidence interval."""
    mean, half = interval(ratios)
    part.value(
        row,
        what,
        arm,
        mean,
        "x",
        half_width=half if half < float("inf") else None,
        rounds=[round(one, 4) for one in ratios],
    )


@dataclass(frozen=True)
class _Turn:
    """Measurements of an engine's second load, and the speed of its first.

    Attributes:
        rate: new tokens per second over the whole load.
        started: new tokens per second of the first load.
        steps: durations in seconds of the decode steps in which every request runs.
        waited: fraction of the load's time that the host spent waiting for the GPU.
        rest: bytes of KV cache mapped before the load; 0 for a stock engine.
        mapped: peak number of bytes mapped during the load; 0 for a stock engine.
        answers: token ids of both loads.
    """

    rate: float
    started: float
    steps: list[float]
    waited: float
    rest: int
    mapped: int
    answers: list[list[int]]

    @classmethod
    def of(
        cls, load: Load, first: Mapping[str, Any], answer: Mapping[str, Any], rest: int, mapped: int
    ) -> _Turn:
        heard, started = Heard.of(load, dict(answer)), Heard.of(load, dict(first))
        all_run = max(times[0] for times in answer["times"])
        ends = min(times[-1] for times in answer["times"])
        steps = sorted({t for times in answer["times"] for t in times if all_run <= t <= ends})
        gaps = [b - a for a, b in pairwise(steps)]
        if not gaps:
            raise WrongResult("the first request ended before the last request started")
        waited = answer["waited"] / answer["seconds"]
        answers = started.answers + heard.answers
        return cls(heard.rate, started.rate, gaps, waited, rest, mapped, answers)


def measure(command: Command, part: Part) -> None:
    """Runs the ``full`` part."""
    args = command.args
    memory = args.kv_memory or (2 * MIB if command.quick else 48 * GIB)
    with open_fleet(command, max_num_seqs=args.requests, enable_prefix_caching=False) as fleet:
        compare(command, part, fleet, plans_of(args, memory))


def compare(command: Command, part: Part, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
    """Runs the engines of `plans` in turn; the first plan is the reference for the others."""
    args, quick = command.args, command.quick
    memory = next(iter(plans.values())).kv_memory
    token_bytes = fleet.block_bytes // fleet.block_size
    count, output = (6, 64) if quick else (args.requests, 128)
    sizes = (fleet.longest, fleet.vocabulary)
    load = filling(memory, token_bytes, count, output, *sizes, 7)
    few = filling(memory // 16, token_bytes, max(2, count // 16), output // 2, *sizes, 8)
    turns: dict[str, list[_Turn]] = {arm: [] for arm in plans}
    slowest = 0.0
    for number, arm in enumerate(there_and_back(list(plans), 2 if quick else args.rounds)):
        if not command.deadline.allows(slowest + _ENDING):
            part.not_run(f"turn/{number}", f"{arm}: the deadline passed")
            break
        began = command.deadline.used
        fleet.start({arm: plans[arm]})
        fleet.order(arm, **few.order())
        first = fleet.order(arm, **load.order())
        fleet.rest(0.2 if quick else _REST)
        elastic = plans[arm].elastic
        rest = fleet.used(arm) if elastic else 0
        mapped = 0

        def watch(arm: str = arm) -> None:
            nonlocal mapped
            mapped = max(mapped, fleet.used(arm))

        answer = fleet.together({arm: load.order()}, watch, 0.2)[arm]
        fleet.stop([arm])
        turns[arm].append(_Turn.of(load, first, answer, rest, mapped if elastic else 0))
        slowest = max(slowest, command.deadline.used - began)
        turn = turns[arm][-1]
        command.show(
            f"{arm}: {turn.rate:.0f} tokens/s ({turn.started:.0f} at first), decode step "
            f"{statistics.median(turn.steps) * 1e3:.2f} ms, {turn.waited:.0%} of it waiting for "
            f"the GPU, {turn.rest >> 20} MiB to {turn.mapped / 2**30:.1f} GiB mapped"
        )
        part.rows.clear()
        _rows(part, turns, memory)
        command.write()
    if not any(turns.values()):
        raise WrongResult("no engine finished its load")


def _rows(part: Part, turns: Mapping[str, list[_Turn]], memory: int) -> None:
    base, *others = turns
    part.value("memory", "size of each engine's KV cache", "both", memory, "bytes")
    for arm, found in turns.items():
        if not found:
            continue
        rates = [round(one.rate, 1) for one in found]
        part.value(
            f"rate/{arm}",
            "new tokens per second",
            arm,
            statistics.median(rates),
            "tokens/s",
            rounds=rates,
        )
        started = [round(one.started, 1) for one in found]
        part.value(
            f"started/{arm}",
            "new tokens per second of an engine's first load",
            arm,
            statistics.median(started),
            "tokens/s",
            rounds=started,
        )
        steps = samples_of([one.steps for one in found])
        part.time(f"step/{arm}", "a decode step with all requests", arm, steps, unit="ms")
        waited = statistics.median(one.waited for one in found)
        part.value(
            f"waited/{arm}",
            "share of the time in which the host waits for the GPU",
            arm,
            waited,
            "share",
        )
        if any(one.mapped for one in found):
            most = max(one.mapped for one in found)
            part.value(f"mapped/{arm}", "peak of mapped memory", arm, most, "bytes")
            rest = max(one.rest for one in found)
            part.value(f"rest/{arm}", "mapped before the load", arm, rest, "bytes")
    for arm in others:
        pairs = list(zip(turns[arm], turns[base], strict=False))
        if not pairs:
            continue
        rates = [mine.rate / other.rate for mine, other in pairs]
        started = [mine.started / other.started for mine, other in pairs]
        # The inverse of the times, so that a ratio above 1 means faster, as it does for rates.
        speeds = [
            statistics.median(other.steps) / statistics.median(mine.steps) for mine, other in pairs
        ]
        for name, what, ratios in (
            ("rate", "tokens/s relative to", rates),
            ("started", "first load, tokens/s relative to", started),
            ("step", "speed of a decode step relative to", speeds),
        ):
            add_ratio(part, f"over/{name}/{arm}", f"{what} {base}", arm, ratios)
        same = sum(
            a == b
            for mine, other in pairs
            for a, b in zip(mine.answers, other.answers, strict=True)
        )
        of = sum(len(mine.answers) for mine, _ in pairs)
        part.value(f"same/{arm}", f"answers identical to {base}'s", arm, same, "requests", of=of)
