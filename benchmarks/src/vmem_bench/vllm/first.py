# SPDX-License-Identifier: MIT
"""The ``first`` and ``cost`` parts of `vmem bench vllm`: a user's wait, and the host's work.

``first`` measures the time to first token of an idle engine. An elastic engine has freed its memory
by then, and must map memory for the prompt. Engines take turns in alternating order, each after the
same idle period; while one answers, the others are idle.

``cost`` measures the time that an elastic engine's process spends in the pool's code per decode
step, timed at the code's entry points. Comparing two engines' steps would not show this time,
because steps vary by more than that from run to run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping

from pyvmem.bench.record import Part
from pyvmem.bench.timing import Samples
from pyvmem.layouts.workload import Arrival, Request
from vmem_bench.command import Command
from vmem_bench.vllm.common import GIB, kv_memory, open_fleet, plans_of, samples_of
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.full import add_ratio, there_and_back
from vmem_bench.vllm.loads import Heard, Load

__all__ = ["PROMPTS", "REST", "measure_cost", "measure_first", "one_prompt"]

PROMPTS = (2048, 16_384, 65_536)
"""Lengths of the prompts in tokens."""

REST = 2.6
"""The idle period in seconds: VMEM_IDLE plus the time to free a GPU's memory."""

_RUNNING = (64, 256)  # the numbers of decoding requests to try


def measure_first(command: Command, part: Part) -> None:
    """Runs the ``first`` part."""
    longest = 0 if command.quick else max(PROMPTS) + 16
    plans = plans_of(command.args, kv_memory(command, 16 * GIB))
    with open_fleet(command, longest=longest, enable_prefix_caching=False) as fleet:
        _first(command, part, fleet, plans)


def _first(command: Command, part: Part, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
    """Times the first tokens of idle engines; ratios are relative to the first of `plans`."""
    rounds, prompts = (2, (64, 128)) if command.quick else (command.args.rounds, PROMPTS)
    fleet.start(plans)
    base, *others = plans
    found: dict[tuple[int, str], list[float]] = {}
    for arm in plans:  # warm-up: the first request of each size includes one-time work in torch
        for tokens in prompts:
            fleet.order(arm, **one_prompt(tokens, fleet.vocabulary, 1).order())
    seed = 2
    for tokens in prompts:
        for arm in there_and_back(list(plans), rounds):
            if not command.deadline.allows(2 * REST):
                part.not_run(f"{tokens}/{arm}", "the deadline passed")
                break
            load, seed = one_prompt(tokens, fleet.vocabulary, seed), seed + 1
            fleet.rest(REST)
            heard = Heard.of(load, fleet.order(arm, **load.order()))
            found.setdefault((tokens, arm), []).append(heard.first[0])
        part.rows.clear()
        for (size, arm), firsts in found.items():
            what = f"time to first token of a prompt of {size} tokens, after an idle period"
            samples = samples_of([[one] for one in firsts])
            part.time(f"{size}/{arm}", what, arm, samples, unit="ms")
        for size in prompts:
            for arm in others:
                pairs = zip(found.get((size, arm), []), found.get((size, base), []), strict=False)
                ratios = [mine / other for mine, other in pairs]
                if ratios:
                    what = f"time to first token relative to {base}"
                    add_ratio(part, f"over/{size}/{arm}", what, arm, ratios)
        command.write()


def one_prompt(tokens: int, vocabulary: int, seed: int) -> Load:
    """Returns a load of one request, with a prompt of `tokens` random tokens and 4 new tokens."""
    return Load.of([Arrival(0.0, Request(tokens, 4))], vocabulary, seed)


def measure_cost(command: Command, part: Part) -> None:
    """Runs the ``cost`` part."""
    with open_fleet(command, max_num_seqs=256) as fleet:
        _cost(command, part, fleet, plans_of(command.args, kv_memory(command, 16 * GIB)))


def _cost(command: Command, part: Part, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
    """Adds the time that each decode step spends in the pool's code, for every elastic engine."""
    elastic = {arm: plan for arm, plan in plans.items() if plan.elastic}
    fleet.start(elastic)
    draw = random.Random(5)
    for arm in elastic:
        for count in (4, 8) if command.quick else _RUNNING:
            prompts = [
                [draw.randrange(3, fleet.vocabulary) for _ in range(64)] for _ in range(count)
            ]
            tokens = 24 if command.quick else 256
            load = Load(prompts, [tokens] * count, [0.0] * count)
            answer = fleet.order(arm, costs=load.order())
            steps = [one["us"] for one in answer["steps"] if one["tokens"] == count]
            command.show(f"{arm}, {count} requests: median {statistics.median(steps):.1f} us")
            samples = Samples([[one * 1e3 for one in steps]])
            what = f"time per decode step in the pool's code, {count} requests"
            part.time(f"{count}/{arm}", what, arm, samples, unit="us")
            command.write()
