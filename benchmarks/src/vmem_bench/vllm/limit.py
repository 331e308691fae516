# SPDX-License-Identifier: MIT
"""The ``limit`` part of `vmem bench vllm`: a limit that is lowered while requests run."""

from __future__ import annotations

import time
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.layouts.workload import Arrival, Request
from pyvmem.ledger.accounts import Ledger
from pyvmem.ledger.orders import order
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import GIB, Book, count_same, kv_memory, open_fleet
from vmem_bench.vllm.engines import Plan
from vmem_bench.vllm.loads import Heard, Load, arrivals, at_rate

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """While requests run, lowers a limit on every device below the memory that they hold."""
    args = command.args
    found: dict[str, Any] = {}
    waited: dict[str, float] = {}  # seconds until each device's memory was within the limit
    later: dict[str, int] = {}  # peak bytes mapped on each device once it was within the limit

    def rows(part: Part) -> None:
        for name, (what, value, unit) in found.items():
            part.value(name, what, "elastic", value, unit)
        for n, device in enumerate(sorted(waited)):
            what = f"time until device {n} was within the limit"
            part.value(f"within/{n}", what, "elastic", waited[device], "s", device=device)
            what = f"peak from then on, on device {n}"
            part.value(f"most/{n}", what, "elastic", later[device], "bytes", device=device)

    # Only a third of the requests run at a time, so that others wait when the limit is lowered.
    most = max(2, args.requests // 3)
    with open_fleet(command, max_num_seqs=most, enable_prefix_caching=False) as fleet:
        book = Book(command, part, rows)
        fleet.start({"elastic": Plan(True, kv_memory(command, 16 * GIB))})
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
            raise WrongResult("requests never held three quarters of their peak without a limit")
        found["peak"] = "peak that requests held without a limit", float(peak), "bytes"
        found["limit"] = "of every device", float(limit), "bytes"
        found["free"] = "all requests, without a limit", free.seconds, "s"
        found["limited"] = "all requests, while the limit is lowered", said.seconds, "s"
        found["requests"] = "requests", float(len(said.answers)), "requests"
        found["same"] = (
            "answers identical to those without a limit",
            float(count_same(said.answers, free.answers)),
            "requests",
        )
        book.publish()
        state = fleet.order("elastic", state=True)
        if state["wrong"]:
            raise WrongResult(f"inconsistent records: {state['wrong'][0]}")
        missing = fleet.shares("elastic").keys() - waited.keys()
        if missing or max(later.values()) > limit:
            raise WrongResult(
                f"limit {limit}: peaks after it {later}, never met on {sorted(missing)}"
            )
