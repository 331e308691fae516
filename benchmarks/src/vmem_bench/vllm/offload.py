# SPDX-License-Identifier: MIT
"""The ``offload`` part of `vmem bench vllm`: prompts whose keys and values are in host memory.

A stock and an elastic engine take turns in alternating order. Both use vLLM's offloading or, with
``--tiering``, its tiering, with a directory as the tier below host memory. A prompt is computed and
stored; then the engine drops its prefixes, idles, and gets the prompt again. An idle elastic engine
frees its memory, so its second answer waits for pages as well as for the copy. Bytes per second
count only the copies, as each connector reports them to vLLM. Both engines get the same prompts,
and their answers must be identical, separately for computed and for loaded prompts. (With bfloat16,
any engine may answer a prompt differently when it is loaded, since its last tokens are then
computed in a smaller batch.)

Afterwards, requests decode three times: with no other prompts arriving, with prompts arriving that
are loaded from host memory, and with prompts arriving that must be computed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping

from pyvmem.bench.record import Part
from pyvmem.bench.timing import percentile
from pyvmem.layouts.workload import Arrival, Request
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import GIB, MIB, kv_memory, offloading, open_fleet, samples_of
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.first import REST, one_prompt
from vmem_bench.vllm.full import add_ratio, there_and_back
from vmem_bench.vllm.loads import Heard, Load

__all__ = ["measure"]

_PREFIXES = (3072, 16_384, 65_536)  # prompt lengths in tokens
_DECODING, _ARRIVING, _GAP = (
    16,
    8,
    0.3,
)  # numbers of requests that decode and that arrive; seconds between arrivals


def measure(command: Command, part: Part) -> None:
    """Runs the ``offload`` part."""
    memory = kv_memory(command, 10 * GIB)
    longest = 0 if command.quick else max(_PREFIXES) + 16
    host = command.args.offload or (64 * MIB if command.quick else 24 * GIB)
    with open_fleet(command, longest=longest) as fleet:
        plans = {name: _plan(command, fleet, name, memory, host) for name in ("stock", "elastic")}
        if command.backend == "host":
            part.not_run("*/stock", "vLLM's own offloading needs a GPU")
            del plans["stock"]
        _compare(command, part, fleet, plans)


def _plan(command: Command, fleet: Fleet, name: str, memory: int, host: int) -> Plan:
    """Returns a plan for an engine with `host` bytes of host memory for prefixes."""
    options = offloading(host)
    if command.args.tiering:
        extra = {
            "cpu_bytes_to_use": host,
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": str(fleet.folder / f"tier-{name}")}],
        }
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        options = {"kv_transfer_config": {**connector, "kv_connector_extra_config": extra}}
    return Plan(name == "elastic", memory, options)


def _compare(command: Command, part: Part, fleet: Fleet, plans: Mapping[str, Plan]) -> None:
    quick = command.quick
    rounds, sizes = (2, (128, 256)) if quick else (command.args.rounds, _PREFIXES)
    fleet.start(plans)
    base, *others = plans
    asked: Counter[tuple[str, int]] = Counter()
    heard: dict[tuple[int, int], list[list[list[int]]]] = {}
    times: dict[tuple[str, int, str], list[float]] = {}
    mapping: dict[tuple[int, str], list[tuple[int, ...]]] = {}

    def pair(arm: str, tokens: int) -> tuple[float, float]:
        asked[arm, tokens] += 1
        seed = 1000 * tokens + asked[arm, tokens]
        computed, loaded, spent = _pair(fleet, arm, tokens, seed)
        answers = [computed.answers, loaded.answers]
        if heard.setdefault((tokens, seed), answers) != answers:
            found = f"{answers}, not {heard[tokens, seed]}"
            raise WrongResult(f"{arm}: a prompt of {tokens} tokens, computed and loaded: {found}")
        if spent:
            mapping.setdefault((tokens, arm), []).append(spent)
        return computed.first[0], loaded.first[0]

    for arm in plans:
        pair(arm, sizes[0])
    for tokens in sizes:
        for arm in there_and_back(list(plans), rounds):
            if not command.deadline.allows(3 * REST):
                part.not_run(f"{tokens}/{arm}", "the deadline passed")
                break
            computed, loaded = pair(arm, tokens)
            times.setdefault(("computed", tokens, arm), []).append(computed)
            times.setdefault(("loaded", tokens, arm), []).append(loaded)
        part.rows.clear()
        for (how, size, arm), found in times.items():
            what = f"time to first token of a prompt of {size} tokens, {how}"
            samples = samples_of([[one] for one in found])
            part.time(f"{how}/{size}/{arm}", what, arm, samples, unit="ms")
        for arm in plans:
            for how, (nbytes, seconds) in fleet.order(arm, state=True)["transfers"].items():
                if seconds:
                    rate, what = nbytes / seconds / 1e9, f"copies of blocks that were {how}"
                    part.value(f"rate/{how}/{arm}", what, arm, rate, "GB/s", bytes=int(nbytes))
        for (size, arm), spent in mapping.items():
            nanoseconds, calls = map(statistics.median, zip(*spent, strict=True))
            what = f"driver time to load a prompt of {size} tokens"
            part.value(f"driver/{size}/{arm}", what, arm, nanoseconds / 1e6, "ms", calls=calls)
        for how, size, arm in times:
            if arm in others:
                pairs = zip(times[how, size, arm], times[how, size, base], strict=False)
                ratios = [mine / other for mine, other in pairs]
                what = f"time to first token, {how}, relative to {base}"
                add_ratio(part, f"over/{how}/{size}/{arm}", what, arm, ratios)
        command.write()
    alike = sum(computed == loaded for computed, loaded in heard.values())
    what = "prompts with the same answer, computed or loaded, from every engine"
    part.value("alike", what, "all", alike, "requests", of=len(heard))
    for arm in plans:
        if not command.deadline.allows(4 * REST):
            part.not_run(f"gaps/{arm}", "the deadline passed")
            continue
        for how, gaps in _beside(fleet, arm, sizes[0], 1, quick).items():
            what = f"p99 inter-token latency of {_DECODING} requests, other prompts {how}"
            part.value(f"gap/{how}/{arm}", what, arm, 1e3 * percentile(sorted(gaps), 0.99), "ms")
        command.write()


def _pair(fleet: Fleet, arm: str, tokens: int, seed: int) -> tuple[Heard, Heard, tuple[int, ...]]:
    """Returns the answers to a prompt that is computed and then loaded, and the driver's work.

    The engine idles before the load. The driver's work is what the load adds to `_in_driver`.
    """
    load = one_prompt(tokens, fleet.vocabulary, seed)
    computed = Heard.of(load, fleet.order(arm, **load.order()))
    _forget(fleet, arm)
    before = _in_driver(fleet, arm)
    answer = fleet.order(arm, **load.order())
    if answer["cached"][0] < 0.9 * tokens:
        raise WrongResult(f"{arm}: {answer['cached'][0]} of {tokens} tokens came from host memory")
    spent = tuple(b - a for a, b in zip(before, _in_driver(fleet, arm), strict=True))
    return computed, Heard.of(load, answer), spent


def _in_driver(fleet: Fleet, arm: str) -> tuple[int, ...]:
    """Returns the nanoseconds that the first rank has spent in the driver, and its map calls."""
    ranks = fleet.order(arm, state=True).get("ranks", [])
    return tuple(ranks[0][name] for name in ("driver_ns", "map_calls")) if ranks else ()


def _forget(fleet: Fleet, arm: str) -> None:
    fleet.rest(0.2)
    fleet.order(arm, forget=True)
    fleet.rest(REST)


def _beside(fleet: Fleet, arm: str, tokens: int, seed: int, quick: bool) -> dict[str, list[float]]:
    """Returns the gaps between decoding requests' tokens, by the kind of prompt that arrives."""
    output = 48 if quick else 400

    def some(count: int, length: int, number: int) -> Load:
        found = [Arrival(0.0, Request(length, 4))] * count
        return Load.of(found, fleet.vocabulary, 1000 * seed + number)

    first = some(_ARRIVING, tokens, 0)
    fleet.order(arm, **first.order())
    others = {"none": [], "loaded": first.prompts, "computed": some(_ARRIVING, tokens, 1).prompts}
    found: dict[str, list[float]] = {}
    for how, arriving in others.items():
        _forget(fleet, arm)
        own = some(_DECODING, 64, 2 + len(found)).prompts
        load = Load(
            own + arriving,
            [output] * len(own) + [4] * len(arriving),
            [0.0] * len(own) + [_GAP * (n + 1) for n in range(len(arriving))],
        )
        times = fleet.order(arm, **load.order())["times"][: len(own)]
        found[how] = [b - a for one in times for a, b in itertools.pairwise(one)]
    return found
