# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: vLLM on the elastic pool beside stock vLLM, on one device.

Engines of one shape with the same random weights, each in its own process (`vllm_arm`), get the
same requests in turn. The parts:

- ``load``: throughput and latency at several rates: stock, elastic, stock again; tokens compared.
- ``idle``: the memory that an idle engine keeps from other processes, and for how long.
- ``share``: alternating bursts: engines that share memory, engines with static parts, each alone.
- ``sleep``: time to sleep and to wake, memory given back.
- ``blocks``: blocks of 16 tokens against 128.
- ``rough``: requests that arrive and are aborted at random, prefix resets, trims; tokens compared.
- ``limit``: a limit on every device, lowered while requests run.
- ``full``: a full card, one engine at a time (`vllm_full`).

A part writes the result file whenever it has something new.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.bench.timing import Samples, percentile
from pyvmem.layouts.options import page_name, size
from pyvmem.layouts.workload import Arrival, Request
from pyvmem.ledger.accounts import Ledger, devices
from pyvmem.ledger.orders import order
from pyvmem.plumbing.paths import existing_file
from vmem_bench.command import Command, WrongResult, add_common, open_command
from vmem_bench.vllm_engines import LONGEST, SHAPES, Fleet, Plan, TimeUp
from vmem_bench.vllm_full import measure as measure_full
from vmem_bench.vllm_loads import (
    Heard,
    Load,
    arrivals,
    at_rate,
    climb,
    idle_footprint,
    in_turns,
    later,
    tiny,
)
from vmem_bench.vllm_picture import series

__all__ = ["ARMS", "PARTS", "add_parser", "run"]

# The arms in the order of a round, with their engines; each is compared with the first.
ARMS = {"stock": "stock", "elastic": "elastic", "stock again": "stock"}

_MIB = 1 << 20
_GIB = 1 << 30
_REST = 8.0  # s that memory may take to come back
_METHOD = {
    "engines": "each its own process, alive at once on the device (full: one at a time); LLM() in "
    "it, greedy, dummy weights; requests are added when they are due, between steps",
    "rate": "requests a second on average; 0: all at once. The gaps between requests are in "
    "proportion to the trace's",
    "order": "stock, elastic, stock again, and an engine with other pages where asked for, take "
    "turns, rotated each round; warm-up is left out",
    "first": "seconds from when a request was due to its first token",
    "gap": "seconds between tokens of one request",
    "elastic": "its prefixes of the last load are forgotten when the next one begins",
    "held": "what the device lacks against before the first request, seen from outside",
}


class _Book:
    """The rows of a part, rebuilt and written whenever there is something new."""

    def __init__(self, command: Command, part: Part, rows: Callable[[Part], None]) -> None:
        self.command, self.part, self._rows = command, part, rows

    def publish(self) -> None:
        """Makes the rows and writes the file."""
        self.part.rows.clear()
        self.part.missing.clear()
        self._rows(self.part)
        self.part.status = "partial"
        self.part.seconds = self.command.deadline.used
        self.command.write()


def _samples(rounds: list[list[float]]) -> Samples:
    """Samples in nanoseconds, as rows take them, from rounds in seconds."""
    return Samples([[one * 1e9 for one in each] for each in rounds if each])


def _same(mine: list[list[int]], other: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(mine, other, strict=True))


def _requests(command: Command, count: int, longest: int) -> list[Arrival]:
    """Requests from the trace, or synthetic ones; a quick run has its own."""
    return tiny(min(count, 6)) if command.quick else arrivals(command.args.trace, count, longest)


def _kv_memory(command: Command, default: int) -> int:
    return int(command.args.kv_memory or (16 * _MIB if command.quick else default))


def _fleet(command: Command, *, max_num_seqs: int = 0, **options: Any) -> Fleet:
    """Engines of the command's shape; a quick run's are tiny."""
    args, quick = command.args, command.quick
    return Fleet(
        command,
        SHAPES["tiny" if quick else args.shape],
        ranks=args.tensor_parallel,
        block_size=args.block_size,
        max_num_seqs=0 if quick else max_num_seqs,
        **options,
    )


def _plans(args: argparse.Namespace, memory: int) -> dict[str, Plan]:
    """A stock and an elastic engine; with ``--beside`` another with pages of that size."""
    plans = {"stock": Plan(False, memory), "elastic": Plan(True, memory)}
    if args.beside:
        env = {"VMEM_PAGE_SIZE": str(args.beside)}
        plans[f"elastic {page_name(args.beside)}"] = Plan(True, memory, env=env)
    return plans


# ---- load ----------------------------------------------------------------------------------------


def _load(command: Command, part: Part) -> None:
    args = command.args
    plans = _plans(args, _kv_memory(command, 16 * _GIB))
    arms = {**ARMS, **{name: name for name in plans if name not in ARMS}}
    heard: dict[tuple[float, str], list[Heard]] = {}
    driver: dict[float, list[tuple[int, int, float]]] = {}
    end: dict[str, Any] = {}
    rates: list[float] = [0.0, 6.0] if command.quick else args.rates

    def rows(part: Part) -> None:
        for rate in rates:
            base = heard.get((rate, "stock"), [])
            for arm in arms:
                _load_rows(part, f"{rate:g}/{arm}", arm, heard.get((rate, arm), []), base)
            found = driver.get(rate, [])
            if found:
                maps, waits, seconds = (sum(one[i] for one in found) for i in range(3))
                part.value(f"maps/{rate:g}", "maps a second", "elastic", maps / seconds, "1/s")
                part.value(f"waits/{rate:g}", "steps that waited", "elastic", waits, "steps")
        _rest_rows(part, end)

    with _fleet(command) as fleet:
        book = _Book(command, part, rows)
        fleet.start(plans)
        end["empty"] = fleet.free()
        seconds = 1.0 if command.quick else args.seconds or 12.0

        def load_of(rate: float, seed: int) -> Load:
            count = max(2, int(rate * seconds)) if rate else args.requests
            found = at_rate(_requests(command, count, fleet.longest), rate)
            return Load.of(found, fleet.vocabulary, seed)

        def turn(rate: float, arm: str, number: int) -> None:
            load = load_of(rate, 1000 * number + int(10 * rate))
            fleet.order(arms[arm], forget=True)
            before = fleet.booked().get("elastic")
            said = Heard.of(load, fleet.order(arms[arm], **load.order()))
            time.sleep(0.3)  # the ledger is updated four times a second
            after = fleet.booked().get("elastic")
            command.show(
                f"{rate:g}/s {arm}: {said.rate:.0f} tokens/s, first p50 {said.p(0.5) * 1e3:.0f} "
                f"p99 {said.p(0.99) * 1e3:.0f} ms, {said.seconds:.1f} s"
            )
            heard.setdefault((rate, arm), []).append(said)
            if arm == "elastic" and before and after:
                driver.setdefault(rate, []).append(
                    (after.maps - before.maps, after.waits - before.waits, said.seconds)
                )
                end["peak"] = max(end.get("peak", 0), after.used)

        warm = Load.of(
            at_rate(_requests(command, min(args.requests, 32), fleet.longest), 0.0),
            fleet.vocabulary,
            999,
        )
        for engine in fleet.engines:
            fleet.order(engine, **warm.order())
        command.show("warmed up")
        slowest = 0.0
        for number in range(args.rounds):
            for rate in rates:
                if not command.deadline.allows(slowest + _REST + 3):
                    break
                mark = time.monotonic()
                turns = [partial(turn, rate, arm, number) for arm in arms]
                for k in range(len(turns)):
                    turns[(number + k) % len(turns)]()
                book.publish()
                slowest = max(slowest, time.monotonic() - mark)
        for other in plans.keys() - {"stock", "elastic"}:
            fleet.order(other, forget=True)
        _rest(fleet, end)
        book.publish()
        _check_ranks(end)


def _load_rows(part: Part, row: str, arm: str, found: list[Heard], base: list[Heard]) -> None:
    if not found:
        return
    part.time(f"first/{row}", "first token", arm, _samples([h.first for h in found]), unit="ms")
    part.time(f"gap/{row}", "between tokens", arm, _samples([h.gaps for h in found]), unit="ms")
    rates = sorted(one.rate for one in found)
    part.value(
        f"rate/{row}",
        "new tokens a second",
        arm,
        rates[len(rates) // 2],
        "tokens/s",
        rounds=[round(one.rate, 1) for one in found],
        first_p99_ms=[round(one.p(0.99) * 1e3, 3) for one in found],
    )
    both = list(zip(found, base, strict=False))
    if both:
        same = sum(_same(a.answers, b.answers) for a, b in both)
        of = sum(len(a.answers) for a, _ in both)
        part.value(f"same/{row}", "answers equal to stock's", arm, same, "requests", of=of)


def _rest(fleet: Fleet, end: dict[str, Any]) -> None:
    """Measures how long memory takes to be freed after the last request, and what never is."""
    end["loaded"] = fleet.free()
    end["busy"] = fleet.order("elastic", state=True)
    fleet.rest(1.5 if fleet.command.quick else 3)
    end["kept"] = fleet.order("elastic", state=True)
    fleet.order("elastic", forget=True)
    seen = fleet.rest(3 if fleet.command.quick else _REST)
    end["least"] = min(used for _, _, used in seen)
    end["after"] = next(at for at, _, used in seen if used == end["least"])
    end["free"] = fleet.free()
    end["state"] = fleet.order("elastic", state=True)


def _rest_rows(part: Part, end: dict[str, Any]) -> None:
    if "peak" in end:
        part.value("peak", "keys and values mapped after a load", "elastic", end["peak"], "bytes")
    if "state" not in end:
        return
    part.value("rest/mapped", "at rest, prefixes dropped", "elastic", end["least"], "bytes")
    part.value("rest/seconds", "until the last page was back", "elastic", end["after"], "s")
    for when in ("busy", "kept", "state"):
        for number, rank in enumerate(end[when]["ranks"]):
            row, what = f"rank/{when}/{number}", "mapped by a rank"
            mapped = rank["mapped_bytes"]
            part.value(row, what, "elastic", mapped, "bytes", maps=end[when]["maps"][number])
    if None in (end["empty"], end["loaded"], end["free"]):
        part.not_run("rest/held", "no GPU: no other process can lack its memory")
        return
    loaded, held = end["empty"] - end["loaded"], end["empty"] - end["free"]
    part.value("loaded/held", "memory that others lack after the load", "both", loaded, "bytes")
    part.value("rest/held", "memory that others lack at rest", "both", held, "bytes")


def _check_ranks(end: dict[str, Any]) -> None:
    """Checks that all ranks have mapped the same pages, and that their records are consistent."""
    for when in ("busy", "kept", "state"):
        mapped = [rank["mapped_bytes"] for rank in end[when]["ranks"]]
        if end[when]["wrong"]:
            raise WrongResult(f"the records: {end[when]['wrong'][0]}")
        # Right after a load one rank may have unmapped more than another.
        if when != "busy" and len(set(end[when]["maps"])) != 1:
            raise WrongResult(f"the ranks have mapped different pages: {mapped} bytes of them")


# ---- idle ----------------------------------------------------------------------------------------


def _idle(command: Command, part: Part) -> None:
    args, quick = command.args, command.quick
    with _fleet(command) as fleet:
        cap = (8 if quick else 1000) * fleet.block_bytes
        memory = _kv_memory(command, 16 * _GIB)
        env = {"VMEM_PREFIX": str(cap)}
        if command.backend == "host":  # give the device a size
            env["VMEM_CAPACITY"] = str(memory)
        count = min(args.requests, 12) if quick else args.requests
        load = idle_footprint(count, fleet.vocabulary, 96, 0.1 if quick else 1.0)
        found: dict[str, Any] = {}

        def rows(part: Part) -> None:
            for arm, said in found["said"].items():
                rate = len(load.tokens) / said.seconds
                part.value(f"rate/{arm}", "requests a second", arm, rate, "requests/s")
                first = _samples([said.first])
                part.time(f"first/{arm}", "first token", arm, first, unit="ms")
            _idle_rows(part, found, cap)

        found["said"] = {}
        book = _Book(command, part, rows)
        plans = {"elastic": Plan(True, memory, env=env), "stock": Plan(False, memory)}
        arms = args.arms or list(plans)
        fleet.start({arm: plan for arm, plan in plans.items() if arm in arms})
        few = Load(load.prompts[:4], load.tokens[:4], load.at[:4])
        fleet.order("elastic", **few.order())  # memory that torch allocates with the first requests
        fleet.order("elastic", forget=True)
        fleet.rest(2 if quick else 4)
        found["before"] = fleet.free(), fleet.order("elastic", state=True)
        found["said"]["elastic"] = Heard.of(load, fleet.order("elastic", **load.order()))
        found["seen"] = fleet.rest(3 if quick else _REST, 0.01)
        found["after"] = fleet.free(), fleet.order("elastic", state=True)
        book.publish()
        found["others"] = _need_of_another(fleet, memory)
        book.publish()
        if "stock" not in arms:
            return
        fleet.order("stock", **few.order())
        fleet.order("stock", forget=True)
        found["said"]["stock"] = Heard.of(load, fleet.order("stock", **load.order()))
        book.publish()


def _idle_rows(part: Part, found: dict[str, Any], cap: int) -> None:
    free, before = found["before"]
    now, after = found["after"]
    live, slab = after["live"], after["ranks"][0]["slab_bytes"]
    most = 1.05 * live + after["slab_size"]
    part.value("cap", "that idle prefixes may hold", "elastic", cap, "bytes")
    part.value("live", "pages that hold something", "elastic", live, "bytes")
    part.value("mapped", "mapped at rest", "elastic", after["mapped"], "bytes")
    part.value("most", "1.05 of the live bytes and a slab", "elastic", most, "bytes")
    part.value("slabs", "taken from the device", "elastic", slab, "bytes", over_live=slab / live)
    seen = found["seen"]
    if free is None or now is None:
        part.not_run("held", "no GPU: no other process can lack its memory")
        least = min(used for _, _, used in seen)
        at = next(at for at, _, used in seen if used == least)
        part.value("settled", "until the last page was back", "elastic", at, "s")
    else:
        # What it kept from others before: the null block, pages kept ready.
        own = before["ranks"][0]["slab_bytes"]
        torch, held = after["torch"] - before["torch"], free - now
        kv = held - torch + own
        part.value("held", "memory that others lack, against before", "elastic", held, "bytes")
        part.value("torch", "of it torch's", "elastic", torch, "bytes")
        part.value("kv", "of the KV cache", "elastic", kv, "bytes", over_live=kv / live)
        at = next((at for at, left, _ in seen if left >= now - after["slab_size"]), seen[-1][0])
        part.value("settled", "until others could have it", "elastic", at, "s")
    for row, (what, value, unit) in found.get("others", {}).items():
        part.value(f"others/{row}", what, "elastic", value, unit)


def _need_of_another(fleet: Fleet, capacity: int) -> dict[str, tuple[str, float, str]]:
    """When this process, acting as another engine that needs all memory, is granted and gets it.

    `capacity`: bytes for all engines, used without a GPU.
    """
    (device,) = devices(fleet.ledger)
    account = Ledger(device, folder=fleet.ledger).join(
        "other", floor=0, limit=1 << 50, least=1, virtual=1 << 50
    )
    try:
        free = fleet.free()
        # All except the null block's memory and what torch needs in this process.
        have = fleet.used("elastic")
        need = capacity - _MIB // 4 if free is None else free + have - 512 * _MIB
        began = time.monotonic()
        while not account.take(need, 0, fleet.free()):
            if time.monotonic() - began > 20:
                raise WrongResult(f"{need} bytes were not granted within 20 s")
            account.want(need)
            time.sleep(0.005)
        granted = time.monotonic() - began
        found = {
            "bytes": ("that another engine asks for", float(need), "bytes"),
            "granted": ("until they were granted", granted, "s"),
        }
        if free is not None:
            import torch

            taken = torch.empty(need, dtype=torch.uint8, device=fleet.command.args.device)
            torch.cuda.synchronize()
            found["usable"] = ("until they were allocated here", time.monotonic() - began, "s")
            del taken
            torch.cuda.empty_cache()
        return found
    finally:
        account.close()


# ---- share ---------------------------------------------------------------------------------------


def _share(command: Command, part: Part) -> None:
    """Elastic and stock engines; only one kind has requests at a time."""
    args, quick = command.args, command.quick
    count = args.engines
    arms = args.arms or ["shared", "static", "alone"]
    with _fleet(command, max_num_seqs=256, enable_prefix_caching=False) as fleet:
        memory = args.kv_memory or (4 * _MIB if quick else 12 * _GIB)
        if args.bursts == "climb":
            peak = 2.0 if quick else args.rate
            bursts = climb(count, peak, 8 if quick else args.output, 32 if quick else 256)
        else:
            seconds = 4.0 if quick else args.seconds or 40.0
            many = 60 if quick else int(2 * args.rate * seconds) * count
            trace = tiny(many) if quick else arrivals(args.trace, many, fleet.longest)
            rate = 4.0 if quick else args.rate
            bursts = in_turns(trace, count, rate, seconds, seconds / 2)
        found: dict[str, dict[int, list[Heard]]] = {arm: {} for arm in arms}
        memory_seen: dict[str, list[list[float]]] = {}

        def rows(part: Part) -> None:
            part.value("capacity", "of all engines together", "all", memory, "bytes")
            for arm in arms:
                _share_rows(part, arm, found[arm])
            for arm, seen in memory_seen.items():
                most = max((sum(one[2:]) for one in seen), default=0.0)
                part.value(f"memory/{arm}", "most mapped", arm, most, "bytes", **series(seen))

        book = _Book(command, part, rows)
        kinds: dict[str, dict[str, Plan]] = {}
        if "shared" in arms or "alone" in arms:
            env = {"VMEM_CAPACITY": str(memory)}
            kinds["elastic"] = {f"elastic {k}": Plan(True, memory, env=env) for k in range(count)}
        if "static" in arms:
            plan = Plan(False, memory // count)
            kinds["static"] = {f"static {k}": plan for k in range(count)}

        def start(some: list[str]) -> None:
            plans = {name: plan for kind in some for name, plan in kinds[kind].items()}
            fleet.start(plans)
            warm = Load.of(at_rate(bursts[0][:16], 0), fleet.vocabulary, 99)
            fleet.together({name: warm.order() for name in plans})

        def turn(arm: str, which: list[int], round_: int) -> None:
            kind = "static" if arm == "static" else "elastic"
            early = bursts[which[0]][0].at if arm == "alone" else 0.0  # no other engine to wait for
            loads = {
                f"{kind} {k}": Load.of(later(bursts[k], -early), fleet.vocabulary, 100 * round_ + k)
                for k in which
            }
            begin = time.monotonic() + 1.0  # by then all have read their orders
            orders = {name: load.order(begin) for name, load in loads.items()}
            seen = memory_seen.setdefault(arm, []) if round_ == 0 and arm != "alone" else []

            def look() -> None:
                booked = fleet.booked()
                names = [f"elastic-{k}" for k in range(count)]
                used = [booked[name].used if name in booked else 0 for name in names]
                now = round(time.monotonic() - begin, 3)
                seen.append([now, fleet.free() or 0, *used])

            said = fleet.together(orders, look)
            for k in which:
                name = f"{kind} {k}"
                heard = Heard.of(loads[name], said[name])
                found[arm].setdefault(k, []).append(heard)
                command.show(
                    f"{arm} {k}: {len(heard.first)} requests in {heard.seconds:.1f} s, first p50 "
                    f"{heard.p(0.5) * 1e3:.0f} p99 {heard.p(0.99) * 1e3:.0f} ms"
                )
            book.publish()

        def rounds(together: list[str], started: float, kinds_left: int) -> None:
            """As many rounds as leave each remaining kind the time to start and run one."""
            slowest = 0.0
            for round_ in range(args.rounds):
                mark = time.monotonic()
                for arm in [one for one in together if one != "alone"]:
                    turn(arm, list(range(count)), round_)
                slowest = max(slowest, time.monotonic() - mark)
                later = kinds_left * (started + slowest)
                if round_ == 0 and "alone" in together:
                    for k in range(count):
                        if command.deadline.allows(slowest + later):
                            turn("alone", [k], round_)
                if not command.deadline.allows(slowest + 2 + later):
                    break

        if args.apart:
            for number, kind in enumerate(kinds, 1):
                mark = time.monotonic()
                start([kind])
                own = [one for one in arms if (one == "static") == (kind == "static")]
                rounds(own, time.monotonic() - mark, len(kinds) - number)
                fleet.stop(kinds[kind])
        else:
            start(list(kinds))
            rounds(arms, 0.0, 0)


def _share_rows(part: Part, arm: str, found: dict[int, list[Heard]]) -> None:
    """Adds the rows of all engines together, and of each."""
    if not found:
        return
    every = [[x for one in each for x in one.first] for each in zip(*found.values(), strict=False)]
    part.time(
        f"first/{arm}",
        "first token, all engines",
        arm,
        _samples(every),
        unit="ms",
    )["p99_rounds_ms"] = [round(percentile(sorted(one), 0.99) * 1e3, 1) for one in every]
    gaps = [[x for one in each for x in one.gaps] for each in zip(*found.values(), strict=False)]
    part.time(f"gap/{arm}", "between tokens, all engines", arm, _samples(gaps), unit="ms")
    for k, heard in found.items():
        row = f"{arm}/{k}"
        part.time(f"first/{row}", "first token", arm, _samples([h.first for h in heard]), unit="ms")
        seconds = sorted(one.seconds for one in heard)[len(heard) // 2]
        done = len(heard[0].first)
        part.value(f"done/{row}", "requests finished", arm, done, "requests", seconds=seconds)


# ---- sleep ---------------------------------------------------------------------------------------


def _sleep(command: Command, part: Part) -> None:
    """Engines that sleep in turn: only one is awake at a time, so they need not fit together."""
    args = command.args
    host = command.backend == "host"
    kinds = args.arms or ["elastic", "stock"]
    taken: dict[str, list[dict[str, float]]] = {}
    equal: dict[str, tuple[int, int]] = {}
    why: dict[str, str] = {}

    def rows(part: Part) -> None:
        for kind, text in why.items():
            part.not_run(kind, text)
        for kind, each in taken.items():
            for key, what in (
                ("sleep", "sleep(1)"),
                ("wake", "wake_up()"),
                ("first", "first token after wake_up()"),
                ("settled", "until its last page was back"),
            ):
                samples = _samples([[one[key]] for one in each if key in one])
                if len(samples):
                    part.time(f"{key}/{kind}", what, kind, samples, unit="ms")
            for key, what in (("given", "given back by sleep(1)"), ("back", "taken by wake_up()")):
                values = sorted(one[key] for one in each if key in one)
                if values:
                    part.value(f"{key}/{kind}", what, kind, values[len(values) // 2], "bytes")
        for kind, (same, of) in equal.items():
            part.value(f"same/{kind}", "answers as before sleep", kind, same, "requests", of=of)

    with _fleet(command) as fleet:
        book = _Book(command, part, rows)
        load = Load.of(at_rate(tiny(4), 0), fleet.vocabulary, 1)
        memory = _kv_memory(command, 16 * _GIB)
        before: dict[str, list[list[int]]] = {}

        def seen(name: str) -> int:
            free = fleet.free()
            return -fleet.used(name.replace(" ", "-")) if free is None else free

        def down(name: str, kind: str) -> None:
            there = seen(name)
            one = {"sleep": fleet.order(name, sleep=1)["seconds"]}
            # Pages are unmapped in the background; until then others lack them.
            began, last = time.monotonic(), there
            while time.monotonic() - began < 1.0:
                if seen(name) != last:
                    last, one["settled"] = seen(name), time.monotonic() - began
                time.sleep(0.01)
            one["given"] = float(last - there)
            taken.setdefault(kind, []).append(one)

        def turns(kind: str, names: list[str], options: dict[str, Any]) -> None:
            plans = {name: Plan(kind == "elastic", memory, options) for name in names}
            if kind == "elastic":  # idle ones have no keys and values
                fleet.start(plans)
            for name in names:  # stock ones one after the other: awake together they might not fit
                if kind != "elastic":
                    fleet.start({name: plans[name]})
                before[name] = Heard.of(load, fleet.order(name, **load.order())).answers
                down(name, kind)
                book.publish()
            same = of = 0
            for _ in range(args.rounds):
                for name in names:
                    asleep = seen(name)
                    one = {"wake": fleet.order(name, wake=True)["seconds"]}
                    one["back"] = float(asleep - seen(name))
                    said = Heard.of(load, fleet.order(name, **load.order()))
                    one["first"] = min(said.first)
                    taken[kind].append(one)
                    same += _same(said.answers, before[name])
                    of += len(said.answers)
                    equal[kind] = same, of
                    command.show(
                        f"{name}: awake after {one['wake']:.3f} s, first token "
                        f"{one['first'] * 1e3:.0f} ms later, {same} of {of} answers as before"
                    )
                    down(name, kind)
                    book.publish()
                if not command.deadline.allows(10):
                    break

        for kind in kinds:
            if host and kind == "stock":
                why[kind] = "vLLM has no sleep mode on a CPU"
                book.publish()
                continue
            options = {} if host else {"enable_sleep_mode": True}
            names = [f"{kind} {k}" for k in range(args.engines)]
            try:
                turns(kind, names, options)
            except WrongResult as error:  # the other kind is still to be measured
                why[kind] = str(error)
            book.publish()
            fleet.stop([name for name in names if name in fleet.engines])
        failed = [text for kind, text in why.items() if not (host and kind == "stock")]
        if failed:
            raise WrongResult(failed[0])


# ---- blocks --------------------------------------------------------------------------------------


def _blocks(command: Command, part: Part) -> None:
    """Prompts of three lengths, long requests that decode together, and a trace, all at once."""
    args, quick = command.args, command.quick
    sizes = (32, 128) if command.backend == "host" else (16, 128)
    memory = _kv_memory(command, 40 * _GIB)
    found: dict[tuple[str, int], list[Heard]] = {}
    held: dict[int, dict[str, float]] = {size: {} for size in sizes}
    whole = 256 if quick else 32 << 10  # tokens of the longest prompt
    loads = {f"prompts/{n}x{whole // n * 2}": (n, whole // n * 2, 1) for n in (2, 8, 32)}
    many, context, steps = (4, 64, 8) if quick else (64, 4096, 64)
    loads[f"decode/{many}x{context}"] = (many, context, steps)

    def rows(part: Part) -> None:
        for (name, size), heard in found.items():
            row, arm = f"{name}/{size}", f"blocks of {size}"
            if name.startswith("prompts/"):
                count, length, _ = loads[name]
                rates = [round(count * length / one.seconds, 1) for one in heard]
                what = "tokens of prompts a second"
            else:
                rates = [round(one.rate, 1) for one in heard]
                what = "new tokens a second"
                gaps = _samples([one.gaps for one in heard])
                part.time(f"gap/{row}", "between tokens", arm, gaps, unit="ms")
                first = _samples([one.first for one in heard])
                part.time(f"first/{row}", "first token", arm, first, unit="ms")
            middle = sorted(rates)[len(rates) // 2]
            part.value(f"rate/{row}", what, arm, middle, "tokens/s", rounds=rates)
        for size in sizes:
            for name, value in held[size].items():
                part.value(f"{name}/{size}", _HELD[name], f"blocks of {size}", value, "bytes")

    with _fleet(command, longest=whole + 64) as fleet:
        book = _Book(command, part, rows)
        page = str(args.page or 64 << 10)
        fleet.start(
            {
                f"blocks {size}": Plan(True, memory, {"block_size": size}, {"VMEM_PAGE_SIZE": page})
                for size in sizes
            }
        )
        trace = at_rate(_requests(command, args.requests, LONGEST), 0)

        def give(size: int, name: str, requests: list[Arrival], round_: int) -> None:
            """Gives a load to one engine; its first is a warm-up, whose result is dropped."""
            load = Load.of(requests, fleet.vocabulary, round_)
            engine = f"blocks {size}"
            peak = 0

            def look() -> None:
                nonlocal peak
                one = fleet.booked().get(engine.replace(" ", "-"))
                peak = max(peak, one.in_use if one is not None else 0)

            said = Heard.of(load, fleet.together({engine: load.order()}, look)[engine])
            command.show(f"{engine}: {name}: {said.seconds:.2f} s, {said.rate:.0f} tokens/s")
            if round_:
                found.setdefault((name, size), []).append(said)
            if name == "trace":
                fleet.rest(1.5 if quick else 3)
                state = fleet.order(engine, state=True)
                held[size] = {
                    "peak": float(peak),
                    "mapped": float(state["mapped"]),
                    "live": float(state["live"]),
                    "slabs": float(state["ranks"][0]["slab_bytes"]),
                }
            fleet.order(engine, forget=True)

        slowest = 0.0
        for round_ in range(1 + args.rounds):
            mark = time.monotonic()
            turns = sizes if round_ % 2 else sizes[::-1]
            for name, (count, length, output) in loads.items():
                requests = [Arrival(0.0, Request(length - output, output))] * count
                for size in turns:
                    give(size, name, requests, round_)
                book.publish()
            for size in turns:
                give(size, "trace", trace, round_)
            book.publish()
            slowest = max(slowest, time.monotonic() - mark)
            if not command.deadline.allows(slowest):
                break


_HELD = {
    "peak": "most that requests of the trace held",
    "mapped": "mapped after the trace, prefixes kept",
    "live": "pages that hold something, after the trace",
    "slabs": "taken from the device, after the trace",
}


# ---- rough ---------------------------------------------------------------------------------------


def _rough(command: Command, part: Part) -> None:
    """The same script for all engines, piece by piece; stock gets only the first pieces."""
    args, quick = command.args, command.quick
    memory = _kv_memory(command, 8 * _GIB)
    piece = 24 if quick else 500
    pieces = max(1, -(-args.requests // piece)) if not quick else 2
    compared = 1 if quick else 4
    sums = {arm: dict.fromkeys(_COUNTS, 0) for arm in ARMS}
    finished, same, of = dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0)

    def rows(part: Part) -> None:
        for arm in ARMS:
            if finished[arm]:
                counts: dict[str, Any] = dict(sums[arm])
                row, what = f"finished/{arm}", "requests answered"
                part.value(row, what, arm, finished[arm], "requests", **counts)
            if of[arm]:
                row, what = f"same/{arm}", "answers equal to stock's"
                part.value(row, what, arm, same[arm], "requests", of=of[arm])

    with _fleet(command, max_num_seqs=64) as fleet:
        book = _Book(command, part, rows)
        fleet.start(
            {
                "stock": Plan(False, memory),
                "elastic": Plan(True, memory, env={"VMEM_IDLE": "0.05"}),
            }
        )
        for number in range(pieces):
            script = {
                "seed": number,
                "requests": piece,
                "vocabulary": fleet.vocabulary,
                "longest": 200 if quick else 1000,
                "output": 24 if quick else 64,
                "most": 8 if quick else 64,
                "reset": 0.1 if quick else 0.01,
            }
            answers: dict[str, dict[str, list[int]]] = {}
            for arm, engine in ARMS.items():
                if engine == "stock" and number >= compared:
                    continue
                said = fleet.order(engine, script=script)
                answers[arm] = said["answers"]
                finished[arm] += len(said["answers"])
                for name in _COUNTS:
                    sums[arm][name] += said[name]
                command.show(f"piece {number + 1} of {pieces}, {arm}: {said['seconds']:.1f} s")
            for arm, mine in answers.items():
                if "stock" in answers:
                    both = mine.keys() & answers["stock"].keys()
                    same[arm] += sum(mine[k] == answers["stock"][k] for k in both)
                    of[arm] += len(both)
            state = fleet.order("elastic", state=True)
            if state["wrong"]:
                raise WrongResult(f"the records after piece {number + 1}: {state['wrong'][0]}")
            book.publish()
            if not command.deadline.allows():
                break


_COUNTS = ("aborted", "resets", "trims", "steps")


# ---- limit ---------------------------------------------------------------------------------------


def _limit(command: Command, part: Part) -> None:
    """A limit on every device, below what requests hold, while they run."""
    args = command.args
    found: dict[str, Any] = {}
    waited: dict[str, float] = {}  # seconds until a device's memory was within the limit
    later: dict[str, int] = {}  # the most that was mapped there from then on

    def rows(part: Part) -> None:
        for name, (what, value, unit) in found.items():
            part.value(name, what, "elastic", value, unit)
        for n, device in enumerate(sorted(waited)):
            what = f"until within it, on device {n}"
            part.value(f"within/{n}", what, "elastic", waited[device], "s", device=device)
            what = f"most from then on, on device {n}"
            part.value(f"most/{n}", what, "elastic", later[device], "bytes", device=device)

    # A third of the requests at a time: others still come when the limit is lowered.
    most = max(2, args.requests // 3)
    with _fleet(command, max_num_seqs=most, enable_prefix_caching=False) as fleet:
        book = _Book(command, part, rows)
        fleet.start({"elastic": Plan(True, _kv_memory(command, 16 * _GIB))})
        if command.quick:
            asked = [Arrival(0.0, Request(300, 100))] * args.requests
        else:
            asked = at_rate(arrivals(args.trace, args.requests, fleet.longest), 0)
        load = Load.of(asked, fleet.vocabulary, 1)
        peak = 0

        def watch() -> None:
            nonlocal peak
            peak = max([peak, *(one.in_use for one in fleet.shares("elastic").values())])

        free = Heard.of(load, fleet.together({"elastic": load.order()}, watch, 0.01)["elastic"])
        command.show(f"no limit: {free.seconds:.1f} s, requests held {peak >> 20} MiB of a device")
        limit, began = 0, 0.0

        def lower() -> None:
            nonlocal limit, began
            now = fleet.shares("elastic")
            if not limit and min([one.in_use for one in now.values()] or [0]) > peak * 3 // 4:
                limit, began = peak // 2, time.monotonic()
                for device in now:
                    with Ledger(device, folder=fleet.ledger, create=False) as ledger:
                        order(ledger, "elastic", limit=limit)
            for device, one in now.items() if limit else ():
                if device in waited:
                    later[device] = max(later[device], one.used)
                elif one.used <= limit:
                    waited[device], later[device] = time.monotonic() - began, one.used

        fleet.rest(1.0)
        said = Heard.of(load, fleet.together({"elastic": load.order()}, lower, 0.01)["elastic"])
        if not limit:
            raise WrongResult("requests never held three quarters of what they did before")
        found["peak"] = "that requests held without a limit", float(peak), "bytes"
        found["limit"] = "of every device", float(limit), "bytes"
        found["free"] = "all requests, without it", free.seconds, "s"
        found["limited"] = "all requests, lowered meanwhile", said.seconds, "s"
        found["requests"] = "requests", float(len(said.answers)), "requests"
        found["same"] = (
            "answers as without it",
            float(_same(said.answers, free.answers)),
            "requests",
        )
        book.publish()
        state = fleet.order("elastic", state=True)
        if state["wrong"]:
            raise WrongResult(f"the records: {state['wrong'][0]}")
        missing = fleet.shares("elastic").keys() - waited.keys()
        if missing or max(later.values()) > limit:
            raise WrongResult(f"limit {limit}: within it on {later}, never on {sorted(missing)}")


# ---- full ----------------------------------------------------------------------------------------


def _full(command: Command, part: Part) -> None:
    args = command.args
    memory = args.kv_memory or (2 * _MIB if command.quick else 48 * _GIB)
    with _fleet(command, max_num_seqs=args.requests, enable_prefix_caching=False) as fleet:
        measure_full(command, part, fleet, _plans(args, memory))


# ---- the command ---------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[Command, Part], None]]] = {
    "load": ("the elastic pool beside stock vLLM", _load),
    "idle": ("an engine that comes to rest", _idle),
    "share": ("engines with bursts in turns", _share),
    "sleep": ("engines that sleep by turns", _sleep),
    "blocks": ("blocks of 16 tokens and of 128", _blocks),
    "rough": ("aborts, resets and trims at random", _rough),
    "limit": ("a limit lowered while requests run", _limit),
    "full": ("a full card, one engine at a time", _full),
}
_REQUESTS = {
    "load": 96,
    "idle": 2500,
    "blocks": 96,
    "rough": 10_000,
    "limit": 96,
    "full": 256,
}


_TRACED = ("load", "share", "blocks", "limit")


def _takes_no_trace(args: argparse.Namespace) -> str:
    """What has requests of its own, so that a trace would be read for nothing; "" if nothing."""
    if args.quick:
        return "--quick"
    if args.part not in _TRACED:
        return f"--part {args.part}"
    return "--bursts climb" if args.part == "share" and args.bursts == "climb" else ""


def run(args: argparse.Namespace) -> int:
    """The command. 0, 1 if it failed or vLLM is not here, 2 without a back end, or bad usage."""
    if args.trace is not None and (what := _takes_no_trace(args)):
        text = f"{what} has requests of its own: leave out --trace {args.trace}"
        print(f"vmem bench: {text}", file=sys.stderr)
        return 2
    args.requests = args.requests or _REQUESTS.get(args.part, 0)
    command = open_command(
        args,
        "vllm",
        _METHOD,
        part=args.part,
        shape="tiny" if args.quick else args.shape,
        block_size=args.block_size,
        requests=args.requests,
        rates=args.rates,
        engines=args.engines,
        bursts=args.bursts,
        output=args.output,
        apart=args.apart,
        rate=args.rate,
        seconds=args.seconds,
        kv_memory=args.kv_memory,
        tensor_parallel=args.tensor_parallel,
        trace=args.trace.name if args.trace else None,
    )
    if command is None:
        return 2
    title, measure = PARTS[args.part]
    part = command.record.part(args.part, title)
    with conducted(part):
        try:
            import vllm
        except ImportError as error:
            part.not_run("*", f"vLLM cannot be imported: {error}")
        else:
            command.record.options["vllm"] = vllm.__version__
            try:
                measure(command, part)
            except TimeUp as error:
                if not part.rows:
                    raise
                part.not_run("rest", str(error))
    return command.finish()


def _rates(text: str) -> list[float]:
    found = [float(one) for one in text.split(",")]
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected different numbers, 0 or more")
    return found


def add_parser(which: Any) -> None:
    """Adds `vllm` to the benchmarks."""
    parser = which.add_parser(
        "vllm",
        help="vLLM on the elastic pool, beside stock vLLM",
        description="Runs vLLM engines of one shape with random weights on one device, some on "
        "the elastic pool, gives them the same requests in turns, and compares tokens, time, and "
        "memory. Needs vLLM.",
    )
    add_common(parser, 450)
    add = parser.add_argument
    shapes = [name for name in SHAPES if name != "tiny"]
    add("--part", choices=list(PARTS), default="load", help="what to measure (load)")
    add("--arms", type=lambda text: text.split(","), help="of idle, share and sleep: these alone")
    add("--shape", choices=shapes, default=shapes[0], help=f"of the model ({shapes[0]})")
    add("--requests", type=int, default=0, help="of a round (96; idle 2,500, rough 10,000)")
    add("--rounds", type=int, default=4, help="after the first, which warms up (4)")
    add("--rates", type=_rates, default=[5.0, 13.0, 0.0], metavar="R,...",
        help="load: requests a second, 0: all at once (5,13,0)")  # fmt: skip
    add("--engines", type=int, default=2, help="share and sleep: of each kind (2)")
    add("--apart", action="store_true",
        help="share: start static engines when the elastic ones have ended")  # fmt: skip
    add("--output", type=int, default=256, help="share, climb: tokens of an answer (256)")
    add("--bursts", choices=("trace", "climb"), default="trace", help="share: which (trace)")
    add("--rate", type=float, default=14.0, help="share: of a burst, requests a second (14)")
    add("--seconds", type=float, default=0.0, help="of a load (12; share 40)")
    add("--block-size", type=int, default=16, help="tokens of a block of vLLM (16)")
    add("--page", type=size, default=0, metavar="SIZE", help="of the pool, as 2M (64K)")
    add("--beside", type=size, default=0, metavar="SIZE",
        help="load, full: a second elastic engine, with pages of this size")  # fmt: skip
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of an engine (1)")
    add("--kv-memory", type=size, default=0, metavar="SIZE",
        help="of each engine (16G; rough 8G, blocks 40G, full 48G); share: of all (12G)"
    )  # fmt: skip
    add("--trace", type=existing_file, metavar="FILE",
        help="load, share, blocks, limit: requests and their times from a trace")  # fmt: skip
    parser.set_defaults(run=run)
