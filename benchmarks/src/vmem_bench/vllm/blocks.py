# SPDX-License-Identifier: MIT
"""The ``blocks`` part of `vmem bench vllm`: 16-token blocks compared with 128-token blocks."""

from __future__ import annotations

import time

from pyvmem.bench.record import Part
from pyvmem.layouts.workload import Arrival, Request
from vmem_bench.command import Command
from vmem_bench.vllm.common import GIB, Book, kv_memory, open_fleet, requests_of, samples_of
from vmem_bench.vllm.engines import LONGEST, Plan
from vmem_bench.vllm.loads import Heard, Load, at_rate

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Runs prompts of three lengths, long requests that decode, and a trace.

    All of a load's requests arrive when it starts.
    """
    args, quick = command.args, command.quick
    sizes = (32, 128) if command.backend == "host" else (16, 128)
    memory = kv_memory(command, 40 * GIB)
    found: dict[tuple[str, int], list[Heard]] = {}
    held: dict[int, dict[str, float]] = {size: {} for size in sizes}
    whole = 256 if quick else 32 << 10  # number of tokens in the longest prompt
    loads = {f"prompts/{n}x{whole // n * 2}": (n, whole // n * 2, 1) for n in (2, 8, 32)}
    many, context, steps = (4, 64, 8) if quick else (64, 4096, 64)
    loads[f"decode/{many}x{context}"] = (many, context, steps)

    def rows(part: Part) -> None:
        for (name, size), heard in found.items():
            row, arm = f"{name}/{size}", f"blocks of {size}"
            if name.startswith("prompts/"):
                count, length, _ = loads[name]
                rates = [round(count * length / one.seconds, 1) for one in heard]
                what = "prompt tokens per second"
            else:
                rates = [round(one.rate, 1) for one in heard]
                what = "new tokens per second"
                gaps = samples_of([one.gaps for one in heard])
                part.time(f"gap/{row}", "between tokens", arm, gaps, unit="ms")
                first = samples_of([one.first for one in heard])
                part.time(f"first/{row}", "first token", arm, first, unit="ms")
            middle = sorted(rates)[len(rates) // 2]
            part.value(f"rate/{row}", what, arm, middle, "tokens/s", rounds=rates)
        for size in sizes:
            for name, value in held[size].items():
                part.value(f"{name}/{size}", _HELD[name], f"blocks of {size}", value, "bytes")

    with open_fleet(command, longest=whole + 64) as fleet:
        book = Book(command, part, rows)
        page = str(args.page or 64 << 10)
        fleet.start(
            {
                f"blocks {size}": Plan(True, memory, {"block_size": size}, {"VMEM_PAGE_SIZE": page})
                for size in sizes
            }
        )
        trace = at_rate(requests_of(command, args.requests, LONGEST), 0)

        def give(size: int, name: str, requests: list[Arrival], round_: int) -> None:
            """Sends a load to an engine. Round 0 is a warm-up, whose answers are dropped."""
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
    "peak": "peak that requests of the trace held",
    "mapped": "mapped after the trace, prefixes kept",
    "live": "pages in use, after the trace",
    "slabs": "allocated from the device, after the trace",
}
