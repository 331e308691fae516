# SPDX-License-Identifier: MIT
"""The ``rough`` part of `vmem bench vllm`: random requests, aborts, resets and trims."""

from __future__ import annotations

from typing import Any

from pyvmem.bench.record import Part
from vmem_bench.command import Command, WrongResult
from vmem_bench.vllm.common import ARMS, GIB, Book, kv_memory, offloading, open_fleet
from vmem_bench.vllm.engines import Plan

__all__ = ["measure"]


def measure(command: Command, part: Part) -> None:
    """Runs the same random scripts on all arms; stock arms run only the first few."""
    args, quick = command.args, command.quick
    memory = kv_memory(command, 8 * GIB)
    piece = 24 if quick else 500
    pieces = max(1, -(-args.requests // piece)) if not quick else 2
    compared = 1 if quick else 4
    sums = {arm: dict.fromkeys(_COUNTS, 0) for arm in ARMS}
    host = offloading(args.offload) if args.offload else {}
    moved: dict[str, int] = {}
    finished, same, of = dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0)

    def rows(part: Part) -> None:
        for arm in ARMS:
            if finished[arm]:
                counts: dict[str, Any] = dict(sums[arm])
                row, what = f"finished/{arm}", "requests answered"
                part.value(row, what, arm, finished[arm], "requests", **counts)
            if of[arm]:
                row, what = f"same/{arm}", "answers identical to stock's"
                part.value(row, what, arm, same[arm], "requests", of=of[arm])
        for how, blocks in moved.items():
            part.value(f"blocks/{how}", f"blocks of host memory {how}", "elastic", blocks, "blocks")

    with open_fleet(command, max_num_seqs=64) as fleet:
        book = Book(command, part, rows)
        fleet.start(
            {
                "stock": Plan(False, memory),
                "elastic": Plan(True, memory, host, {"VMEM_IDLE": "0.05"}),
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
                raise WrongResult(
                    f"inconsistent records after piece {number + 1}: {state['wrong'][0]}"
                )
            moved = state.get("blocks", {})
            if host and not number and not moved["stored"]:
                raise WrongResult("nothing was stored in host memory")
            book.publish()
            if not command.deadline.allows():
                break


_COUNTS = ("aborted", "resets", "trims", "steps")
