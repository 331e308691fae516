# SPDX-License-Identifier: MIT
"""The ``idle`` part of `vmem bench vllm`: the memory an idle engine keeps, and for how long."""

from __future__ import annotations

import time
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.ledger.accounts import Ledger, devices
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import GIB, MIB, REST, Book, kv_memory, open_fleet, samples_of
from vmem_bench.vllm.engines import Fleet, Plan
from vmem_bench.vllm.loads import Heard, Load, idle_footprint

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Runs the ``idle`` part."""
    args, quick = command.args, command.quick
    with open_fleet(command) as fleet:
        cap = (8 if quick else 1000) * fleet.block_bytes
        memory = kv_memory(command, 16 * GIB)
        env = {"VMEM_PREFIX": str(cap)}
        if command.backend == "host":  # where the ledger cannot query the device's size
            env["VMEM_CAPACITY"] = str(memory)
        count = min(args.requests, 12) if quick else args.requests
        load = idle_footprint(count, fleet.vocabulary, 96, 0.1 if quick else 1.0)
        found: dict[str, Any] = {}

        def rows(part: Part) -> None:
            for arm, said in found["said"].items():
                rate = len(load.tokens) / said.seconds
                part.value(f"rate/{arm}", "requests a second", arm, rate, "requests/s")
                first = samples_of([said.first])
                part.time(f"first/{arm}", "first token", arm, first, unit="ms")
            _idle_rows(part, found, cap)

        found["said"] = {}
        book = Book(command, part, rows)
        plans = {"elastic": Plan(True, memory, env=env), "stock": Plan(False, memory)}
        arms = args.arms or list(plans)
        fleet.start({arm: plan for arm, plan in plans.items() if arm in arms})
        few = Load(load.prompts[:4], load.tokens[:4], load.at[:4])
        fleet.order("elastic", **few.order())  # a warm-up in which torch allocates its own memory
        fleet.order("elastic", forget=True)
        fleet.rest(2 if quick else 4)
        found["before"] = fleet.free(), fleet.order("elastic", state=True)
        found["said"]["elastic"] = Heard.of(load, fleet.order("elastic", **load.order()))
        found["seen"] = fleet.rest(3 if quick else REST, 0.01)
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
    part.value("cap", "limit on the memory of idle prefixes", "elastic", cap, "bytes")
    part.value("live", "pages in use", "elastic", live, "bytes")
    part.value("mapped", "mapped when idle", "elastic", after["mapped"], "bytes")
    part.value("most", "1.05 of the live bytes and a slab", "elastic", most, "bytes")
    part.value(
        "slabs", "allocated from the device", "elastic", slab, "bytes", over_live=slab / live
    )
    seen = found["seen"]
    if free is None or now is None:
        part.not_run("held", "no GPU whose memory other processes could lack")
        least = min(used for _, _, used in seen)
        at = next(at for at, _, used in seen if used == least)
        part.value("settled", "time until the last page was returned", "elastic", at, "s")
    else:
        # The slabs that the engine held before the load, for the null block and pages kept ready.
        own = before["ranks"][0]["slab_bytes"]
        torch, held = after["torch"] - before["torch"], free - now
        kv = held - torch + own
        part.value(
            "held",
            "memory that others lack, compared with before the load",
            "elastic",
            held,
            "bytes",
        )
        part.value("torch", "part of it that torch holds", "elastic", torch, "bytes")
        part.value(
            "kv", "part of it that the KV cache holds", "elastic", kv, "bytes", over_live=kv / live
        )
        at = next((at for at, left, _ in seen if left >= now - after["slab_size"]), seen[-1][0])
        part.value("settled", "time until others could allocate it", "elastic", at, "s")
    for row, (what, value, unit) in found.get("others", {}).items():
        part.value(f"others/{row}", what, "elastic", value, unit)


def _need_of_another(fleet: Fleet, capacity: int) -> dict[str, tuple[str, float, str]]:
    """Joins the ledger as an engine that needs all memory, and times the grant and the allocation.

    `capacity`: total memory of all engines, in bytes; used only if there is no GPU.
    """
    (device,) = devices(fleet.ledger)
    account = Ledger(device, folder=fleet.ledger).join(
        "other", floor=0, limit=1 << 50, least=1, virtual=1 << 50
    )
    try:
        free = fleet.free()
        # Without a GPU, request all memory except the null block's. With a GPU, leave 512 MiB for
        # torch in this process.
        have = fleet.used("elastic")
        need = capacity - MIB // 4 if free is None else free + have - 512 * MIB
        began = time.monotonic()
        while not account.take(need, 0, fleet.free()):
            if time.monotonic() - began > 20:
                raise WrongResult(f"{need} bytes were not granted within 20 s")
            account.want(need)
            time.sleep(0.005)
        granted = time.monotonic() - began
        found = {
            "bytes": ("memory that another engine requests", float(need), "bytes"),
            "granted": ("time until the ledger granted it", granted, "s"),
        }
        if free is not None:
            import torch

            taken = torch.empty(need, dtype=torch.uint8, device=fleet.command.args.device)
            torch.cuda.synchronize()
            found["usable"] = (
                "time until this process had allocated it",
                time.monotonic() - began,
                "s",
            )
            del taken
            torch.cuda.empty_cache()
        return found
    finally:
        account.close()
