# SPDX-License-Identifier: MIT
"""The ``share`` part of `vmem bench vllm`: alternating bursts, with shared or static memory."""

from __future__ import annotations

import time

from pyvmem.bench.record import Part
from pyvmem.bench.timing import percentile
from vmem_bench.command import Command
from vmem_bench.vllm.common import GIB, MIB, Book, open_fleet, samples_of
from vmem_bench.vllm.engines import Plan
from vmem_bench.vllm.loads import Heard, Load, arrivals, at_rate, climb, in_turns, later, tiny
from vmem_bench.vllm.picture import series

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Compares elastic and stock engines; only one kind gets requests at a time."""
    args, quick = command.args, command.quick
    count = args.engines
    arms = args.arms or ["shared", "static", "alone"]
    with open_fleet(command, max_num_seqs=256, enable_prefix_caching=False) as fleet:
        memory = args.kv_memory or (4 * MIB if quick else 12 * GIB)
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

        book = Book(command, part, rows)
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
            # An engine running alone gets its first request immediately.
            early = bursts[which[0]][0].at if arm == "alone" else 0.0
            loads = {
                f"{kind} {k}": Load.of(later(bursts[k], -early), fleet.vocabulary, 100 * round_ + k)
                for k in which
            }
            begin = time.monotonic() + 1.0  # by then all engines have read their commands
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
            """Runs rounds while time remains for every later kind to start and run a round."""
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
    """Adds the rows for all engines together and for each engine."""
    if not found:
        return
    every = [[x for one in each for x in one.first] for each in zip(*found.values(), strict=False)]
    part.time(
        f"first/{arm}",
        "time to first token, all engines",
        arm,
        samples_of(every),
        unit="ms",
    )["p99_rounds_ms"] = [round(percentile(sorted(one), 0.99) * 1e3, 1) for one in every]
    gaps = [[x for one in each for x in one.gaps] for each in zip(*found.values(), strict=False)]
    part.time(f"gap/{arm}", "inter-token latency, all engines", arm, samples_of(gaps), unit="ms")
    for k, heard in found.items():
        row = f"{arm}/{k}"
        part.time(
            f"first/{row}", "first token", arm, samples_of([h.first for h in heard]), unit="ms"
        )
        seconds = sorted(one.seconds for one in heard)[len(heard) // 2]
        done = len(heard[0].first)
        part.value(f"done/{row}", "requests finished", arm, done, "requests", seconds=seconds)
