# SPDX-License-Identifier: MIT
"""Code shared by the parts of `vmem bench vllm`: engines, requests and rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.timing import Samples
from pyvmem.layouts.options import page_name
from pyvmem.layouts.workload import Arrival
from vmem_bench.command import Command
from vmem_bench.vllm.engines import SHAPES, Fleet, Plan
from vmem_bench.vllm.loads import arrivals, tiny

__all__ = [
    "ARMS",
    "GIB",
    "MIB",
    "REST",
    "Book",
    "kv_memory",
    "offloading",
    "open_fleet",
    "plans_of",
    "requests_of",
    "count_same",
    "samples_of",
]

ARMS = {"stock": "stock", "elastic": "elastic", "stock again": "stock"}
"""The arms in the order of a round, with each arm's engine; the first arm is the reference."""

MIB = 1 << 20
GIB = 1 << 30
REST = 8.0
"""Seconds to wait for an engine to return its memory."""


class Book:
    """The rows of a part, which are rebuilt and written whenever there are new results."""

    def __init__(self, command: Command, part: Part, rows: Callable[[Part], None]) -> None:
        self.command, self.part, self._rows = command, part, rows

    def publish(self) -> None:
        """Rebuilds the rows and writes the file."""
        self.part.rows.clear()
        self.part.missing.clear()
        self._rows(self.part)
        self.part.status = "partial"
        self.part.seconds = self.command.deadline.used
        self.command.write()


def samples_of(rounds: list[list[float]]) -> Samples:
    """Converts rounds of seconds to samples in nanoseconds, the unit that rows need."""
    return Samples([[one * 1e9 for one in each] for each in rounds if each])


def count_same(mine: list[list[int]], other: list[list[int]]) -> int:
    """Returns how many answers are equal in both lists."""
    return sum(a == b for a, b in zip(mine, other, strict=True))


def requests_of(command: Command, count: int, longest: int) -> list[Arrival]:
    """Returns requests from the trace or synthetic ones; in a quick run, tiny ones."""
    return tiny(min(count, 6)) if command.quick else arrivals(command.args.trace, count, longest)


def kv_memory(command: Command, default: int) -> int:
    """Returns the size of an engine's KV cache in bytes."""
    return int(command.args.kv_memory or (16 * MIB if command.quick else default))


def offloading(nbytes: int) -> dict[str, Any]:
    """Returns vLLM options for `nbytes` bytes of host memory for prefixes."""
    return {"kv_offloading_size": nbytes / GIB, "kv_offloading_backend": "native"}


def open_fleet(command: Command, *, max_num_seqs: int = 0, **options: Any) -> Fleet:
    """Opens a fleet of engines with the command's model shape, or tiny ones in a quick run."""
    args, quick = command.args, command.quick
    return Fleet(
        command,
        SHAPES["tiny" if quick else args.shape],
        ranks=args.tensor_parallel,
        stages=args.pipeline_parallel,
        block_size=args.block_size,
        max_num_seqs=0 if quick else max_num_seqs,
        batch_invariant=args.batch_invariant,
        **options,
    )


def plans_of(args: argparse.Namespace, memory: int) -> dict[str, Plan]:
    """Returns a stock and an elastic plan and, with ``--beside``, a plan with that page size."""
    plans = {"stock": Plan(False, memory), "elastic": Plan(True, memory)}
    if args.beside:
        env = {"VMEM_PAGE_SIZE": str(args.beside)}
        plans[f"elastic {page_name(args.beside)}"] = Plan(True, memory, env=env)
    return plans
