# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: vLLM on the elastic pool, compared with stock vLLM on one device.

Engines of one shape with the same random weights, each in its own process (`arm`), get the
same requests in turn. The parts:

- ``load``: throughput and latency at several rates, for stock vLLM, elastic vLLM and stock vLLM
  again. The tokens are compared.
- ``idle``: the memory that an idle engine withholds from other processes, and for how long.
- ``share``: alternating bursts for engines that share memory, engines with static parts, and each
  engine alone.
- ``sleep``: the time to sleep and to wake, and the memory that sleep frees.
- ``blocks``: 16-token blocks compared with 128-token blocks.
- ``rough``: requests that arrive and are aborted at random, prefix resets and trims. The tokens are
  compared. With ``--offload``, prefixes are loaded from host memory.
- ``limit``: a limit on every device, lowered while requests run.
- ``full``: a full GPU, with one engine at a time.
- ``first``, ``cost``: time to first token after an idle period; the pool's host time per step.
- ``offload``: prompts whose keys and values are in host memory.
- ``prefixes``: engines that take turns with prefixes that do not fit in memory, which is shared or
  divided into static parts, each with and without host memory.

A part writes the result file whenever it has new results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.layouts.options import size
from pyvmem.plumbing.paths import existing_file
from vmem_bench.command import Command, add_common, imports, open_command
from vmem_bench.vllm import (
    blocks,
    first,
    full,
    idle,
    limit,
    load,
    offload,
    prefixes,
    rough,
    share,
    sleep,
)
from vmem_bench.vllm.engines import SHAPES, until_time_up

__all__ = ["PARTS", "add_parser", "run"]

_METHOD = {
    "engines": "each in its own process, all on the device at the same time (full: one at a time); "
    "LLM(), greedy, random weights; requests are added when they are due, between steps",
    "rate": "requests per second on average; 0: all at the start. The gaps between requests are "
    "proportional to the trace's",
    "order": "stock, elastic, stock again, and, with --beside, an engine with another page size "
    "take turns, in an order that rotates each round; warm-up is discarded",
    "first": "seconds from a request's due time to its first token",
    "gap": "seconds between tokens of one request",
    "elastic": "drops its prefixes before each load",
    "held": "decrease of the device's free memory since before the first request, as seen by "
    "another process",
}

PARTS: dict[str, tuple[str, Callable[[Command, Part], None]]] = {
    "load": ("the elastic pool and stock vLLM", load.measure),
    "idle": ("an engine that becomes idle", idle.measure),
    "share": ("engines with alternating bursts", share.measure),
    "sleep": ("engines that sleep in turn", sleep.measure),
    "blocks": ("blocks of 16 tokens and of 128", blocks.measure),
    "rough": ("aborts, resets and trims at random", rough.measure),
    "limit": ("a limit lowered while requests run", limit.measure),
    "full": ("a full GPU, one engine at a time", full.measure),
    "first": ("time to first token after an idle period", first.measure_first),
    "cost": ("time per step in the pool's code", first.measure_cost),
    "offload": ("prompts from host memory", offload.measure),
    "prefixes": ("engines that take turns, with prefixes that do not fit", prefixes.measure),
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
    """Returns the option that excludes a trace, or "" if a trace may be used."""
    if args.quick:
        return "--quick"
    if args.part not in _TRACED:
        return f"--part {args.part}"
    return "--bursts climb" if args.part == "share" and args.bursts == "climb" else ""


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns 0 on success, 1 on failure, 2 for bad usage or an unusable back end, or 3 if vLLM is
    missing.
    """
    if args.trace is not None and (what := _takes_no_trace(args)):
        text = f"{what} generates its own requests: omit --trace {args.trace}"
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
        offload=args.offload,
        tiering=args.tiering,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        batch_invariant=args.batch_invariant,
        trace=args.trace.name if args.trace else None,
    )
    if command is None:
        return 2
    if args.batch_invariant and command.backend == "host":
        text = "--batch-invariant: vLLM's batch-invariant kernels need a GPU, not back end host"
        print(f"vmem bench: {text}", file=sys.stderr)
        return 2
    title, measure = PARTS[args.part]
    part = command.record.part(args.part, title)
    with conducted(part):
        if imports(command, part, "vllm"):
            with until_time_up(part):
                measure(command, part)
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
        help="vLLM on the elastic pool, compared with stock vLLM",
        description="Runs vLLM engines with the same random weights on one device, some on the "
        "elastic pool, gives them the same requests in turn, and compares tokens, time and memory. "
        "Needs vLLM.",
    )
    add_common(parser, 450)
    add = parser.add_argument
    shapes = [name for name in SHAPES if name != "tiny"]
    add("--part", choices=list(PARTS), default="load", help="what to measure (load)")
    add(
        "--arms",
        type=lambda text: text.split(","),
        help="idle, share, sleep, prefixes: run only these arms",
    )
    add("--shape", choices=shapes, default=shapes[0], help=f"model's shape ({shapes[0]})")
    add("--requests", type=int, default=0,
        help="requests per round (96; idle 2,500, rough 10,000, full 256)")  # fmt: skip
    add("--rounds", type=int, default=4, help="rounds, not counting warm-up (4)")
    add("--rates", type=_rates, default=[5.0, 13.0, 0.0], metavar="R,...",
        help="load: requests per second; 0: all at the start (5,13,0)")  # fmt: skip
    add("--engines", type=int, default=2, help="share, sleep, prefixes: engines of each kind (2)")
    add("--apart", action="store_true",
        help="share: start static engines after the elastic engines have stopped")  # fmt: skip
    add("--output", type=int, default=256, help="share with climb: tokens of an answer (256)")
    add("--bursts", choices=("trace", "climb"), default="trace",
        help="share: kind of bursts (trace)")  # fmt: skip
    add("--rate", type=float, default=14.0, help="share: requests per second in a burst (14)")
    add("--seconds", type=float, default=0.0, help="duration of a load (12; share 40)")
    add("--block-size", type=int, default=16, help="tokens of a vLLM block (16)")
    add("--page", type=size, default=0, metavar="SIZE", help="page size of the pool (64K)")
    add("--beside", type=size, default=0, metavar="SIZE",
        help="load, full: a second elastic engine, with pages of this size")  # fmt: skip
    add("--offload", type=size, default=0, metavar="SIZE",
        help="host memory for prefixes; rough: of the elastic engine (0: none); "
        "offload: of each engine (24G); prefixes: likewise (1.25 of --kv-memory)")  # fmt: skip
    add("--tiering", action="store_true",
        help="offload: use vLLM's tiering, with a folder below host memory")  # fmt: skip
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of an engine (1)")
    add("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of an engine (1)")
    add("--batch-invariant", action="store_true",
        help="use vLLM's slower kernels whose results do not depend on the batch")  # fmt: skip
    add("--kv-memory", type=size, default=0, metavar="SIZE",
        help="KV cache of each engine (16G; rough 8G, blocks 40G, full 48G); share, prefixes: of "
        "all engines together (12G)"
    )  # fmt: skip
    add("--trace", type=existing_file, metavar="FILE",
        help="load, share, blocks, limit: requests and their times from a trace")  # fmt: skip
    parser.set_defaults(run=run)
