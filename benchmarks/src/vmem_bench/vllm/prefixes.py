# SPDX-License-Identifier: MIT
"""The ``prefixes`` part of `vmem bench vllm`: engines take turns, and their prefixes do not fit.

Each engine has its own set of prompts, whose keys and values need as much memory as all engines
have together; with two engines, that is twice an engine's part. The engines take turns. In its
turn, an engine gets each of its prompts once, in random order and with a new tail. The first turn
computes the prompts. The tokens that later turns find in the cache, and their times to first token,
are compared between four kinds of engine, only one of which runs at a time:

    elastic+host   engines share the memory, and vLLM's offloading keeps prefixes in host memory
    elastic        engines share the memory, and drop prefixes when another engine needs it
    static+host    stock vLLM with an equal part of the memory each, and with offloading
    static         stock vLLM with an equal part of the memory each
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from pyvmem.bench.record import Part
from pyvmem.plumbing.validation import invalid
from vmem_bench.command import Command
from vmem_bench.vllm.common import GIB, MIB, Book, count_same, offloading, open_fleet, samples_of
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.loads import Heard, Load
from vmem_bench.vllm.picture import series

__all__ = ["ARMS", "measure", "turns"]

ARMS = ("elastic+host", "elastic", "static+host", "static")


class _Turns(NamedTuple):
    """The sizes of a run.

    Attributes:
        tokens: number of tokens in a prompt, without its tail.
        tail: number of tokens in the tail, which differs between requests.
        output: number of tokens that a request generates.
        rate: requests per second.
        pause: seconds between turns.
    """

    tokens: int
    tail: int
    output: int
    rate: float
    pause: float


_FULL = _Turns(3072, 64, 16, 6.0, 3.0)
_QUICK = _Turns(128, 32, 4, 32.0, 1.0)


class _Answer(NamedTuple):
    """An engine's answers.

    Attributes:
        heard: the answers of all turns.
        cached: how many tokens of each request's prompt were not computed.
    """

    heard: Heard
    cached: list[int]


def turns(engines: int, count: int, prompts: int, sizes: _Turns, vocabulary: int) -> list[Load]:
    """Returns a load per engine, with `count` turns that each contain every prompt once."""
    found = []
    period = prompts / sizes.rate + sizes.pause
    for engine in range(engines):
        draw = random.Random(engine)

        def ids(tokens: int, draw: random.Random = draw) -> list[int]:
            return [draw.randrange(3, vocabulary) for _ in range(tokens)]

        own = [ids(sizes.tokens) for _ in range(prompts)]
        requests: list[list[int]] = []
        at: list[float] = []
        for turn in range(count):
            begin = (turn * engines + engine) * period
            requests += [prompt + ids(sizes.tail) for prompt in draw.sample(own, prompts)]
            at += [round(begin + number / sizes.rate, 6) for number in range(prompts)]
        found.append(Load(requests, [sizes.output] * len(requests), at))
    return found


def measure(command: Command, part: Part) -> None:
    """Starts one kind of engine after another, and sends each the same requests."""
    args, quick = command.args, command.quick
    memory, sizes = args.kv_memory or (4 * MIB if quick else 12 * GIB), _QUICK if quick else _FULL
    answers: dict[str, list[_Answer]] = {}
    seen: dict[str, list[list[float]]] = {}
    missing: dict[str, str] = {}
    with open_fleet(command, max_num_seqs=64) as fleet:
        prompts = memory * fleet.block_size // (sizes.tokens * fleet.block_bytes)
        if prompts < 2:
            raise invalid(
                f"--kv-memory {memory} holds {prompts} prompts of {sizes.tokens} tokens: fewer "
                "than 2",
                op="vmem bench",
            )
        loads = turns(args.engines, args.rounds + 1, prompts, sizes, fleet.vocabulary)

        def rows(part: Part) -> None:
            part.value("capacity", "of all engines together", "all", memory, "bytes")
            for arm, said in answers.items():
                _add_rows(part, arm, said, next(iter(answers.values())), loads, prompts)
            for arm, line in seen.items():
                most = max(sum(one[2:]) for one in line)
                part.value(f"memory/{arm}", "most mapped", arm, most, "bytes", **series(line))
            for arm, why in missing.items():
                part.not_run(f"*/{arm}", why)

        book, slowest = Book(command, part, rows), 0.0
        for arm in args.arms or ARMS:
            began = time.monotonic()
            if arm == "static+host" and command.backend == "host":
                missing[arm] = "vLLM's own offloading needs a GPU"
            elif not command.deadline.allows(slowest):
                missing[arm] = "the deadline passed"
            else:
                answers[arm], line = _run(fleet, arm, memory, loads)
                if arm.startswith("elastic"):
                    seen[arm] = line
            slowest = max(slowest, time.monotonic() - began)
            book.publish()


def _run(
    fleet: Fleet, arm: str, memory: int, loads: Sequence[Load]
) -> tuple[list[_Answer], list[list[float]]]:
    """Starts, runs and stops engines of one kind; returns their answers and memory over time."""
    kind, _, host = arm.partition("+")
    count, args = len(loads), fleet.command.args
    options = offloading(args.offload or memory * 5 // 4) if host else {}
    if kind == "elastic":
        plan = Plan(True, memory, options, {"VMEM_CAPACITY": str(memory)})
    else:
        plan = Plan(False, memory // count, options)
    names = [f"{kind} {number}" for number in range(count)]
    fleet.start(dict.fromkeys(names, plan))
    warm = Load([[3 + n] * 32 for n in range(4)], [4] * 4, [0.0] * 4)
    fleet.together(dict.fromkeys(names, warm.order()))
    begin = time.monotonic() + 1.0  # by then all engines have read their commands
    line: list[list[float]] = []

    def look() -> None:
        booked = fleet.booked()
        plain = [name.replace(" ", "-") for name in names]
        used = [booked[name].used if name in booked else 0 for name in plain]
        line.append([round(time.monotonic() - begin, 3), fleet.free() or 0, *used])

    orders = {name: load.order(begin) for name, load in zip(names, loads, strict=True)}
    said = fleet.together(orders, look)
    fleet.stop(names)
    pairs = zip(names, loads, strict=True)
    return [_Answer(Heard.of(load, said[one]), said[one]["cached"]) for one, load in pairs], line


def _add_rows(
    part: Part,
    arm: str,
    said: Sequence[_Answer],
    base: Sequence[_Answer],
    loads: Sequence[Load],
    prompts: int,
) -> None:
    """Adds the rows for one kind of engine, over all turns except the first."""
    first = [one.heard.first[prompts:] for one in said]
    rounds = [
        [x for one in first for x in one[at : at + prompts]]
        for at in range(0, len(first[0]), prompts)
    ]
    part.time(f"first/{arm}", "first token", arm, samples_of(rounds), unit="ms")
    found = sum(sum(one.cached[prompts:]) for one in said)
    asked = sum(len(one) for load in loads for one in load.prompts[prompts:])
    what = "share of the prompts' tokens that was not computed"
    part.value(f"hits/{arm}", what, arm, 100 * found / asked, "%", tokens=found, of=asked)
    same = sum(
        count_same(a.heard.answers, b.heard.answers) for a, b in zip(said, base, strict=True)
    )
    of = sum(len(one.heard.answers) for one in said)
    part.value(f"same/{arm}", "answers identical to the first arm's", arm, same, "requests", of=of)
