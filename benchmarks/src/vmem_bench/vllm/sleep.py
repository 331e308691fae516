# SPDX-License-Identifier: MIT
"""The ``sleep`` part of `vmem bench vllm`: the time to sleep and to wake, and the memory freed."""

from __future__ import annotations

import time
from typing import Any

from pyvmem.bench.record import Part
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import GIB, Book, count_same, kv_memory, open_fleet, samples_of
from vmem_bench.vllm.engines import Plan
from vmem_bench.vllm.loads import Heard, Load, at_rate, tiny

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Runs engines that sleep in turn. Only one is awake at a time, so they need not all fit."""
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
                ("first", "time to first token after wake_up()"),
                ("settled", "time until its last page was returned"),
            ):
                samples = samples_of([[one[key]] for one in each if key in one])
                if len(samples):
                    part.time(f"{key}/{kind}", what, kind, samples, unit="ms")
            for key, what in (
                ("given", "memory freed by sleep(1)"),
                ("back", "memory allocated by wake_up()"),
            ):
                values = sorted(one[key] for one in each if key in one)
                if values:
                    part.value(f"{key}/{kind}", what, kind, values[len(values) // 2], "bytes")
        for kind, (same, of) in equal.items():
            part.value(
                f"same/{kind}",
                "answers identical to those before sleep",
                kind,
                same,
                "requests",
                of=of,
            )

    with open_fleet(command) as fleet:
        book = Book(command, part, rows)
        load = Load.of(at_rate(tiny(4), 0), fleet.vocabulary, 1)
        memory = kv_memory(command, 16 * GIB)
        before: dict[str, list[list[int]]] = {}

        def seen(name: str) -> int:
            free = fleet.free()
            return -fleet.used(name.replace(" ", "-")) if free is None else free

        def down(name: str, kind: str) -> None:
            there = seen(name)
            one = {"sleep": fleet.order(name, sleep=1)["seconds"]}
            # Pages are unmapped in the background; until then, other processes cannot use them.
            began, last = time.monotonic(), there
            while time.monotonic() - began < 1.0:
                if seen(name) != last:
                    last, one["settled"] = seen(name), time.monotonic() - began
                time.sleep(0.01)
            one["given"] = float(last - there)
            taken.setdefault(kind, []).append(one)

        def turns(kind: str, names: list[str], options: dict[str, Any]) -> None:
            plans = {name: Plan(kind == "elastic", memory, options) for name in names}
            if kind == "elastic":  # idle engines hold no keys or values, so all fit
                fleet.start(plans)
            for (
                name
            ) in names:  # stock engines start one at a time: they might not fit if all were awake
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
                    same += count_same(said.answers, before[name])
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
            except WrongResult as error:  # still measure the other kind
                why[kind] = str(error)
            book.publish()
            fleet.stop([name for name in names if name in fleet.engines])
        failed = [text for kind, text in why.items() if not (host and kind == "stock")]
        if failed:
            raise WrongResult(failed[0])
