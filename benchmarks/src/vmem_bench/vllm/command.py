# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: vLLM on the elastic pool beside stock vLLM, on one device.

Engines of one shape with the same random weights, each in its own process (`arm`), get the
same requests in turn. The parts:

- ``load``: throughput and latency at several rates: stock, elastic, stock again; tokens compared.
- ``idle``: the memory that an idle engine keeps from other processes, and for how long.
- ``share``: alternating bursts: engines that share memory, engines with static parts, each alone.
- ``sleep``: time to sleep and to wake, memory given back.
- ``blocks``: blocks of 16 tokens against 128.
- ``rough``: requests that arrive and are aborted at random, prefix resets, trims; tokens compared;
  with ``--offload`` prefixes come back from host memory.
- ``limit``: a limit on every device, lowered while requests run.
- ``full``: a full card, one engine at a time.
- ``first``, ``cost``: the first token after a rest; the pool's part of a step.
- ``offload``: prompts whose keys and values lie in host memory.
- ``prefixes``: engines in turns whose prefixes do not fit: shared memory, static parts, each with
  and without host memory.

A part writes the result file whenever it has something new.
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

PARTS: dict[str, tuple[str, Callable[[Command, Part], None]]] = {
    "load": ("the elastic pool beside stock vLLM", load.measure),
    "idle": ("an engine that becomes idle", idle.measure),
    "share": ("engines with bursts in turns", share.measure),
    "sleep": ("engines that sleep in turns", sleep.measure),
    "blocks": ("blocks of 16 tokens and of 128", blocks.measure),
    "rough": ("aborts, resets and trims at random", rough.measure),
    "limit": ("a limit lowered while requests run", limit.measure),
    "full": ("a full card, one engine at a time", full.measure),
    "first": ("the first token after a rest", first.measure_first),
    "cost": ("a step's time in the pool's code", first.measure_cost),
    "offload": ("prompts from host memory", offload.measure),
    "prefixes": ("engines in turns whose prefixes do not fit", prefixes.measure),
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
    """The option whose requests replace a trace's, so that the trace is not read; "" if none."""
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
        offload=args.offload,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        trace=args.trace.name if args.trace else None,
    )
    if command is None:
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
        help="vLLM on the elastic pool, beside stock vLLM",
        description="Runs vLLM engines of one shape with random weights on one device, some on "
        "the elastic pool, gives them the same requests in turns, and compares tokens, time, and "
        "memory. Needs vLLM.",
    )
    add_common(parser, 450)
    add = parser.add_argument
    shapes = [name for name in SHAPES if name != "tiny"]
    add("--part", choices=list(PARTS), default="load", help="what to measure (load)")
    add(
        "--arms",
        type=lambda text: text.split(","),
        help="of idle, share, sleep and prefixes: these alone",
    )
    add("--shape", choices=shapes, default=shapes[0], help=f"of the model ({shapes[0]})")
    add("--requests", type=int, default=0, help="of a round (96; idle 2,500, rough 10,000)")
    add("--rounds", type=int, default=4, help="after the first, which warms up (4)")
    add("--rates", type=_rates, default=[5.0, 13.0, 0.0], metavar="R,...",
        help="load: requests a second, 0: all at once (5,13,0)")  # fmt: skip
    add("--engines", type=int, default=2, help="share, sleep and prefixes: of each kind (2)")
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
    add("--offload", type=size, default=0, metavar="SIZE",
        help="rough: host memory for prefixes of the elastic engine (0: none); "
        "offload: of each engine (24G); prefixes: the same (1.25 of --kv-memory)")  # fmt: skip
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of an engine (1)")
    add("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of an engine (1)")
    add("--kv-memory", type=size, default=0, metavar="SIZE",
        help="of each engine (16G; rough 8G, blocks 40G, full 48G); share, prefixes: of all (12G)"
    )  # fmt: skip
    add("--trace", type=existing_file, metavar="FILE",
        help="load, share, blocks, limit: requests and their times from a trace")  # fmt: skip
    parser.set_defaults(run=run)
