# SPDX-License-Identifier: MIT
"""The ``load`` part of `vmem bench vllm`: throughput and latency at several rates."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from pyvmem.bench.record import Part
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import (
    ARMS,
    GIB,
    REST,
    Book,
    count_same,
    kv_memory,
    open_fleet,
    plans_of,
    requests_of,
    samples_of,
)
from vmem_bench.vllm.engines import Fleet
from vmem_bench.vllm.loads import Heard, Load, at_rate

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Runs the ``load`` part."""
    args = command.args
    plans = plans_of(args, kv_memory(command, 16 * GIB))
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

    with open_fleet(command) as fleet:
        book = Book(command, part, rows)
        fleet.start(plans)
        end["empty"] = fleet.free()
        seconds = 1.0 if command.quick else args.seconds or 12.0

        def load_of(rate: float, seed: int) -> Load:
            count = max(2, int(rate * seconds)) if rate else args.requests
            found = at_rate(requests_of(command, count, fleet.longest), rate)
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
            at_rate(requests_of(command, min(args.requests, 32), fleet.longest), 0.0),
            fleet.vocabulary,
            999,
        )
        for engine in fleet.engines:
            fleet.order(engine, **warm.order())
        command.show("warmed up")
        slowest = 0.0
        for number in range(args.rounds):
            for rate in rates:
                if not command.deadline.allows(slowest + REST + 3):
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
    part.time(f"first/{row}", "first token", arm, samples_of([h.first for h in found]), unit="ms")
    part.time(f"gap/{row}", "between tokens", arm, samples_of([h.gaps for h in found]), unit="ms")
    rates = sorted(one.rate for one in found)
    part.value(
        f"rate/{row}",
        "new tokens per second",
        arm,
        rates[len(rates) // 2],
        "tokens/s",
        rounds=[round(one.rate, 1) for one in found],
        first_p99_ms=[round(one.p(0.99) * 1e3, 3) for one in found],
    )
    both = list(zip(found, base, strict=False))
    if both:
        same = sum(count_same(a.answers, b.answers) for a, b in both)
        of = sum(len(a.answers) for a, _ in both)
        part.value(f"same/{row}", "answers identical to stock's", arm, same, "requests", of=of)


def _rest(fleet: Fleet, end: dict[str, Any]) -> None:
    """Measures how long the idle elastic engine takes to free memory, and what stays mapped."""
    end["loaded"] = fleet.free()
    end["busy"] = fleet.order("elastic", state=True)
    fleet.rest(1.5 if fleet.command.quick else 3)
    end["kept"] = fleet.order("elastic", state=True)
    fleet.order("elastic", forget=True)
    seen = fleet.rest(3 if fleet.command.quick else REST)
    end["least"] = min(used for _, _, used in seen)
    end["after"] = next(at for at, _, used in seen if used == end["least"])
    end["free"] = fleet.free()
    end["state"] = fleet.order("elastic", state=True)


def _rest_rows(part: Part, end: dict[str, Any]) -> None:
    if "peak" in end:
        part.value("peak", "keys and values mapped after a load", "elastic", end["peak"], "bytes")
    if "state" not in end:
        return
    part.value("rest/mapped", "idle, prefixes dropped", "elastic", end["least"], "bytes")
    part.value(
        "rest/seconds", "time until the last page was returned", "elastic", end["after"], "s"
    )
    for when in ("busy", "kept", "state"):
        for number, rank in enumerate(end[when]["ranks"]):
            row, what = f"rank/{when}/{number}", "mapped by a rank"
            mapped = rank["mapped_bytes"]
            part.value(row, what, "elastic", mapped, "bytes", maps=end[when]["maps"][number])
    if None in (end["empty"], end["loaded"], end["free"]):
        part.not_run("rest/held", "no GPU whose memory other processes could lack")
        return
    loaded, held = end["empty"] - end["loaded"], end["empty"] - end["free"]
    part.value("loaded/held", "memory that others lack after the load", "both", loaded, "bytes")
    part.value("rest/held", "memory that others lack when idle", "both", held, "bytes")


def _check_ranks(end: dict[str, Any]) -> None:
    """Raises WrongResult if ranks have mapped different pages or their records are inconsistent."""
    for when in ("busy", "kept", "state"):
        mapped = [rank["mapped_bytes"] for rank in end[when]["ranks"]]
        if end[when]["wrong"]:
            raise WrongResult(f"inconsistent records: {end[when]['wrong'][0]}")
        # Right after a load, one rank may have unmapped more than another.
        if when != "busy" and len(set(end[when]["maps"])) != 1:
            raise WrongResult(f"the ranks have mapped different pages: {mapped} bytes of them")
