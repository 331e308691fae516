# SPDX-License-Identifier: MIT
"""The ``share`` part of `vmem bench sglang`: alternating bursts for vLLM and SGLang on one device.

Four engines run at the same time: elastic vLLM and SGLang, which share memory through one ledger,
and stock vLLM and SGLang, each with half of that memory. A burst of requests needs most of the
shared memory, so a stock engine holds only part of it, and the remaining requests wait or are
recomputed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.timing import percentile
from pyvmem.layouts.workload import Arrival, Request
from vmem_bench.command import Command, WrongResult
from vmem_bench.engine_path import engine_path
from vmem_bench.sglang.tables import spread
from vmem_bench.sglang.turns import SHAPES, engine_environment, engine_options
from vmem_bench.vllm.common import MIB, REST, Book
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.loads import Heard, Load, arrivals, at_rate, tiny

__all__ = ["ARMS", "ENGINES", "METHOD", "Found", "bursts", "measure"]

ARMS = ("static", "elastic")
ENGINES = ("vllm", "sglang")

_TOKENS = 98_304  # combined size of both engines' KV caches, in tokens
_MOST = 256  # maximum concurrent requests per engine
_CALM = 4  # number of requests between two bursts

METHOD = {
    "engines": "vLLM and SGLang: an elastic pair with one ledger, and a stock pair with half of "
    "the memory each; the four processes run at the same time, and one arm has requests at a time; "
    "random weights, greedy",
    "bursts": "each engine gets one burst per period, half a period after the other engine's: "
    "within a sixteenth of the period, requests whose tokens fill the given part of the memory, "
    "then 4 requests in the second half of the period",
    "order": "the arms take turns, in alternating order; both get the same requests, which differ "
    "from round to round",
    "first": "from a request's due time to its first token; p50 and p99 of a round's requests; "
    "the row is the median of the rounds, half_width: half a 95% confidence interval",
    "rate": "new tokens per second, from the first request to the last token",
    "most": "peak memory by the ledger, sampled every 50 ms",
    "rest": "memory by the ledger after the last round, with and without prefixes (for a stock "
    "engine, all of its memory); device: memory freed when both engines of an arm exit",
}


@dataclass(frozen=True)
class _SGLangPlan(Plan):
    """A plan for an SGLang engine instead of a vLLM engine."""


class _Mixed(Fleet):
    """A fleet of vLLM and SGLang engines that run the same model."""

    def __enter__(self) -> _Mixed:
        super().__enter__()
        args = self.command.args
        self.path = engine_path(self.folder / "site-vllm", args.vllm_path)
        self._sglang_path = engine_path(self.folder / "site-sglang", args.sglang_path)
        return self

    @property
    def token_bytes(self) -> int:
        """The size of a token's keys and values across all layers, in bytes."""
        return self.block_bytes // self.block_size

    def _options(self, plan: Plan, count: int) -> dict[str, Any]:
        args = self.command.args
        if not isinstance(plan, _SGLangPlan):
            return super()._options(plan, count) | {"enable_prefix_caching": args.prefixes}
        tokens = plan.kv_memory // self.token_bytes // args.page_size * args.page_size
        found = engine_options(
            self.command,
            self.folder / "model",
            self.longest,
            tokens,
            self.max_num_seqs,
            self.max_num_seqs,
        )
        return {"disable_radix_cache": not args.prefixes} | found

    def _program(self, plan: Plan) -> tuple[list[str], dict[str, str]]:
        args = self.command.args
        words, env = super()._program(plan)
        if isinstance(plan, _SGLangPlan):
            words = [*words[:-1], "vmem_bench.sglang.arm"]
            env = engine_environment(self.command, self._sglang_path)
            env["VMEM_SGLANG"] = str(int(plan.elastic))
        page = args.page or (self.command.page if self.command.quick else 0)
        env |= {"VMEM_PAGE_SIZE": str(page)} if page else {}
        return words, env | (dict(args.env) if plan.elastic else {})

    def _check(self, name: str, plan: Plan, said: Mapping[str, Any]) -> None:
        engine = name.split()[0]
        self.command.record.options[engine] = said["version"]
        self.command.show(f"{name}: ready, version {said['version']}")
        if (name.replace(" ", "-") in self.booked()) != plan.elastic:
            raise WrongResult(f"the engine {name} is {'not ' * plan.elastic}in the ledger")


def bursts(
    found: Sequence[Arrival], tokens: int, count: int, period: float
) -> dict[str, list[Arrival]]:
    """Returns each engine's requests: bursts that alternate with the other engine's bursts.

    An engine's bursts start half a period after the other's. A few requests follow each burst.

    Args:
        found: the requests, in order; their times are not used.
        tokens: minimum total number of tokens in a burst's requests.
        count: number of bursts per engine.
        period: seconds between the starts of an engine's bursts.
    """
    requests: Iterator[Request] = itertools.cycle(one.request for one in found)
    loads: dict[str, list[Arrival]] = {engine: [] for engine in ENGINES}
    for number, (place, engine) in itertools.product(range(count), enumerate(ENGINES)):
        begin = (number + place / len(ENGINES)) * period
        burst: list[Request] = []
        while sum(one.context + one.output for one in burst) < tokens:
            burst.append(next(requests))
        apart = period / 16 / len(burst)
        loads[engine] += [Arrival(begin + k * apart, one) for k, one in enumerate(burst)]
        calm = begin + period / 2
        loads[engine] += [
            Arrival(calm + k * period / 2 / _CALM, next(requests)) for k in range(_CALM)
        ]
    return loads


def measure(command: Command, part: Part) -> None:
    """Runs rounds of both arms, then measures the memory that the engines keep when idle."""
    args, quick = command.args, command.quick
    shape = SHAPES["tiny" if quick else args.shape]
    with _Mixed(command, shape, max_num_seqs=0 if quick else _MOST) as fleet:
        memory = args.kv_memory or (4 * MIB if quick else _TOKENS * fleet.token_bytes)
        found = Found(memory)
        book = Book(command, part, found.rows)
        plans = _plans(memory)
        fleet.start({name: plan for arm in ARMS for name, plan in plans[arm].items()})
        sizes = tiny(64) if quick else arrivals(None, 4096, fleet.longest)
        tokens = int(args.burst * memory / fleet.token_bytes)
        loads = bursts(sizes, tokens, args.bursts, args.period)
        first = bursts(sizes, tokens, 1, args.period)  # a warm-up, which compiles kernels
        for arm in ARMS:
            warm = {
                name: Load.of(at_rate(first[name.split()[0]], 0), fleet.vocabulary, 99)
                for name in plans[arm]
            }
            fleet.together({name: load.order() for name, load in warm.items()})
        command.show("warm")
        slowest, number = 0.0, 0
        for number in range(args.rounds):
            mark = time.monotonic()
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                _turn(fleet, found, arm, loads, number)
                book.publish()
            slowest = max(slowest, time.monotonic() - mark)
            if not command.deadline.allows(slowest + 2 * REST + 4):
                break
        _rest(fleet, found, plans, book.publish)
    if number + 1 < args.rounds:
        part.not_run(f"rounds/{number + 1}", "the deadline passed")


def _plans(memory: int) -> dict[str, dict[str, Plan]]:
    kinds: dict[str, type[Plan]] = {"vllm": Plan, "sglang": _SGLangPlan}
    env = {"VMEM_CAPACITY": str(memory)}
    return {
        "static": {f"{name} static": kind(False, memory // 2) for name, kind in kinds.items()},
        "elastic": {f"{name} elastic": kind(True, memory, env=env) for name, kind in kinds.items()},
    }


def _turn(
    fleet: _Mixed, found: Found, arm: str, loads: Mapping[str, list[Arrival]], number: int
) -> None:
    """Runs one round of an arm, in which both engines serve their requests."""
    given = {
        engine: Load.of(loads[engine], fleet.vocabulary, 100 * number + place)
        for place, engine in enumerate(ENGINES)
    }
    begin = time.monotonic() + (
        1.0 if fleet.command.quick else 2.0
    )  # by then both engines have read their commands
    orders = {f"{engine} {arm}": load.order(begin) for engine, load in given.items()}

    def look() -> None:
        if arm == "elastic":
            used = found.used(fleet)
            found.most = {name: max(found.most.get(name, 0), used[name]) for name in used}

    said = fleet.together(orders, look)
    heard = {engine: Heard.of(load, said[f"{engine} {arm}"]) for engine, load in given.items()}
    found.heard[arm].append(heard)
    for engine, one in heard.items():
        fleet.command.show(
            f"{engine} {arm}: {len(one.first)} requests in {one.seconds:.1f} s, first p50 "
            f"{one.p(0.5) * 1e3:.0f} p99 {one.p(0.99) * 1e3:.0f} ms"
        )


def _rest(
    fleet: _Mixed,
    found: Found,
    plans: Mapping[str, Mapping[str, Plan]],
    publish: Callable[[], None],
) -> None:
    """Measures the memory that idle engines keep with and without prefixes, and free on exit."""
    seconds = 1.5 if fleet.command.quick else 3.0
    fleet.rest(seconds)
    found.rest["prefixes"] = found.used(fleet)
    for name in plans["elastic"]:
        fleet.order(name, forget=True)
    fleet.rest(seconds)
    found.rest["flushed"] = found.used(fleet)
    publish()
    for arm in reversed(ARMS):
        before = fleet.free()
        fleet.stop(plans[arm])
        if before is not None:
            time.sleep(2.0)
            found.device[arm] = (fleet.free() or before) - before
            publish()


class Found:
    """The measurements of all rounds."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.heard: dict[str, list[dict[str, Heard]]] = {arm: [] for arm in ARMS}
        self.most: dict[str, int] = {}
        self.rest: dict[str, dict[str, int]] = {}
        self.device: dict[str, int] = {}

    def used(self, fleet: Fleet) -> dict[str, int]:
        """Returns the bytes that the ledger records for each elastic engine, and their sum."""
        booked = fleet.booked()
        used = {engine: booked[f"{engine}-elastic"].used for engine in ENGINES}
        return used | {"both": sum(used.values())}

    def rows(self, part: Part) -> None:
        """Adds the rows for all measurements so far."""
        part.value("capacity", "of both engines together", "both", self.memory, "bytes")
        for engine in (*ENGINES, "both"):
            for fraction in (0.5, 0.99):
                name = f"p{100 * fraction:.0f}/{engine}"
                self._measured(part, name, f"time to first token, {name}", "ms", fraction)
            self._measured(part, f"rate/{engine}", "new tokens per second", "tokens/s", None)
        for arm in ARMS:
            for engine in ENGINES:
                if rounds := [one[engine] for one in self.heard[arm]]:
                    number = sum(len(one.first) for one in rounds)
                    row = f"requests/{engine}/{arm}"
                    part.value(row, "requests answered", arm, number, "requests")
        for name, value in self.most.items():
            part.value(f"most/{name}/elastic", "most mapped", "elastic", value, "bytes")
        for when, used in self.rest.items():
            for name, value in used.items():
                part.value(f"{when}/{name}/elastic", "mapped when idle", "elastic", value, "bytes")
        for when, name in itertools.product(("most", *self.rest), (*ENGINES, "both")):
            value = self.memory if name == "both" else self.memory // 2
            part.value(f"{when}/{name}/static", "given", "static", value, "bytes")
        for arm, value in self.device.items():
            row, what = f"device/{arm}", "memory freed when both engines exit"
            part.value(row, what, arm, value, "bytes")

    def _measured(
        self, part: Part, name: str, what: str, unit: str, fraction: float | None
    ) -> None:
        """Adds a row for each arm, and one for the mean ratio of elastic to static per round."""
        values = {
            arm: [_value(one, name.rpartition("/")[2], fraction) for one in self.heard[arm]]
            for arm in ARMS
        }
        for arm, each in values.items():
            if each:
                middle = statistics.median(each)
                part.value(f"{name}/{arm}", what, arm, middle, unit, **spread(each))
        ratios = [mine / other for other, mine in zip(*values.values(), strict=False)]
        if ratios:
            mean = statistics.fmean(ratios)
            part.value(
                f"over/{name}",
                f"{what}, relative to static",
                "elastic",
                mean,
                "x",
                **spread(ratios),
            )


def _value(heard: Mapping[str, Heard], engine: str, fraction: float | None) -> float:
    """Returns a percentile of the times to first token in ms, or the new tokens per second.

    `engine`: an engine's name, or "both".
    """
    each = list(heard.values()) if engine == "both" else [heard[engine]]
    if fraction is None and engine != "both":
        return heard[engine].rate
    if fraction is None:
        return sum(sum(map(len, one.answers)) for one in each) / max(one.seconds for one in each)
    first = sorted(itertools.chain.from_iterable(one.first for one in each))
    return 1e3 * percentile(first, fraction)
