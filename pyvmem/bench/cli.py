# SPDX-License-Identifier: MIT
"""`vmem bench api`: measures libvmem's calls and CUDA's alternately in one process.

The other benchmarks of `vmem bench` are in a separate distribution, pyvmem-bench (benchmarks/ in
the repository), which provides the package `vmem_bench`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from pyvmem.bench import (
    attention,
    bandwidth,
    batches,
    busy,
    calls,
    host_copies,
    live,
    outputs,
    report,
    sizes,
    slots,
    step,
)
from pyvmem.bench.aims import compute
from pyvmem.bench.merge import merge
from pyvmem.bench.native import Native
from pyvmem.bench.record import Part, Record
from pyvmem.bench.running import backends, conducted, ended, now, put_together
from pyvmem.bench.setting import PartFunction, Setting
from pyvmem.bench.timing import Deadline
from pyvmem.commands.arguments import add_backend, add_device
from pyvmem.commands.cumem import Cuda, CudaUnavailable, CuMem
from pyvmem.commands.machine import describe
from pyvmem.commands.usage import BadUsage
from pyvmem.errors import VMemError
from pyvmem.layouts.options import positive
from pyvmem.memory.context import Context
from pyvmem.plumbing.paths import existing_file, replaced

__all__ = ["OTHERS", "PARTS", "add_parser", "measure", "run"]

OTHERS = (
    *("capacity", "prefixes", "overlap", "kernels", "deferred", "prefix-map", "fill", "devices"),
    *("serve", "sharing", "swap", "vllm", "sglang", "models", "paper"),
)
"""The benchmarks of the package `vmem_bench`, which is not part of this distribution."""

# name: (title, function, time budget in seconds)
PARTS: dict[str, tuple[str, PartFunction, float]] = {
    "calls": ("each call, by page size", calls.run, 30),
    "bandwidth": ("allocation bandwidth", bandwidth.run, 30),
    "batch": ("batches of 64 pages", batches.run, 20),
    "busy": ("mapping while a kernel fills the GPU", busy.run, 40),
    "bytes": ("the cost per byte: 2 MB in four ways", sizes.run_bytes, 15),
    "pool": ("the warm pool, and a run of 1,024 pages", sizes.run_pool, 15),
    "step": ("steps of the KV cache", step.run, 40),
    "slots": ("calls of the cache by max_batch", slots.run, 30),
    "attention": ("attention over 64 KB pages and over cudaMalloc memory", attention.run, 60),
    "readbw": ("reading 64 KB pages and cudaMalloc memory", attention.run_read, 20),
    "hostcopy": ("scattered pages to host memory and back", host_copies.run, 30),
    "live": ("1 k to 1 M live pages", live.run, 200),
}


def _levels(text: str) -> tuple[int, ...]:
    units = {"k": 1 << 10, "M": 1 << 20}
    try:
        levels = tuple(
            int(item[:-1]) * units[item[-1]] if item[-1:] in units else int(item)
            for item in text.split(",")
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected e.g. 1k,100k,1M") from error
    smallest = live.LEVELS[0]
    if any(level < smallest or level & (smallest - 1) for level in levels):
        raise argparse.ArgumentTypeError(f"{text!r}: levels are multiples of {smallest}")
    return levels


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        known = ", ".join(PARTS)
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)!r}; parts are {known}")
    return names


def add_parser(sub: Any) -> None:
    """Adds `bench` and its benchmarks to the subparsers `sub`."""
    bench = sub.add_parser("bench", help="benchmarks")
    which = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_api(which)
    try:
        others = importlib.import_module("vmem_bench.cli")
    except ModuleNotFoundError as error:
        if error.name not in ("vmem_bench", "vmem_bench.cli"):
            raise
        for name in OTHERS:
            _add_missing(which, name)
    else:
        others.add_parsers(which)
    for parser in which.choices.values():
        if any(option.dest == "out" for option in parser._actions):
            outputs.add_options(parser)


def _add_missing(which: Any, name: str) -> None:
    """Adds a stub for a benchmark that is not installed; the stub says how to install it."""
    # Without prefix characters, options are parsed as positional arguments, so none are rejected.
    parser = which.add_parser(name, help="not installed", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=_missing)


def _missing(args: argparse.Namespace) -> int:
    raise BadUsage(
        f"{args.benchmark} is a benchmark of pyvmem-bench, which is not installed: "
        "pip install 'pyvmem[bench]', or in a clone of the repository pip install ./benchmarks"
    )


def _add_api(which: Any) -> None:
    api = which.add_parser(
        "api",
        help="compare our calls with CUDA's cuMem*",
        description="Measures this library's calls and CUDA's own (cuMem*, through "
        "cuda.bindings) in one process, alternately. Without a GPU, it measures the rows of `host` "
        "and lists the others with the reason.",
    )
    add_backend(api, "what is measured")
    add_device(api)
    api.add_argument("--only", type=_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    api.add_argument("--budget", type=positive, metavar="S", help="seconds for each part")
    api.add_argument("--quick", action="store_true", help="a few samples: a smoke test")
    api.add_argument(
        "--live", type=_levels, metavar="N,...", default=(), help="live pages, as 1k,100k,1M"
    )
    api.add_argument(
        "--fa3", type=existing_file, metavar="FILE", help="_vllm_fa3_C.abi3.so or a zip"
    )
    api.add_argument(
        "--out", type=replaced, metavar="FILE", help="write JSON here, raw samples in raw/"
    )
    api.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    api.add_argument(
        "--merge",
        type=existing_file,
        nargs="+",
        metavar="FILE",
        help="merge results instead of measuring",
    )
    api.add_argument("--list", action="store_true", help="list the parts and stop")
    api.set_defaults(run=run)


def measure(
    setting: Setting,
    record: Record,
    names: Sequence[str],
    budget: float | None,
    after: Callable[[Part], None],
) -> None:
    """Runs the parts; if one fails, records its error and continues with the next.

    `after` is called with each finished part. The cost of an empty call is always measured first.
    """
    start = time.monotonic()
    for name in ("noop", *names):
        title, function, seconds = PARTS.get(name, ("what an empty call costs", _noop, 5.0))
        part, deadline = record.part(name, title), Deadline(budget or seconds)
        with conducted(part):
            function(setting, part, deadline)
        record.seconds = time.monotonic() - start
        record.aims = compute(record, setting.system)
        after(part)


def _noop(setting: Setting, part: Part, deadline: Deadline) -> None:
    setting.measure_overheads(part)


def _method(setting: Setting) -> dict[str, Any]:
    costs = {name: vars(cost) for name, cost in setting.overheads.items()}
    return {
        "clock": "perf_counter_ns around each call, from Python; attention, readbw: GPU events",
        "bindings": "ours through cffi, cuMem* through cuda.bindings; checked after the loop",
        "rounds": "each system in turn, the order rotated every round; the first round is left out",
        "net": "median less an empty call; cuMemSetAccess: less a call that fails by its size",
        "overheads_ns": costs,
        "percentiles": "nearest rank",
    }


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the status from `ended`, or 2 if the back end cannot be opened."""
    if args.list:
        for name, (title, _, seconds) in PARTS.items():
            print(f"{name:<10} {title} (at most about {seconds:.0f} s)")
        return 0
    if args.merge is not None:
        return put_together(merge, args)
    names = args.only or list(PARTS)
    try:
        context = Context(args.backend, device=args.device)
    except VMemError as error:
        print(f"vmem bench: {error}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        stack.enter_context(context)
        setting = Setting(
            Native(context),
            quick=args.quick,
            device=args.device,
            fa3=args.fa3,
            live_levels=args.live,
        )
        try:
            setting.cuda = stack.enter_context(Cuda(args.device))
            setting.cumem = CuMem(setting.cuda)
        except CudaUnavailable as error:
            setting.cuda_why = f"no cuMem* baseline: {error}"
        record = Record(
            machine=describe(),
            options={
                "quick": args.quick,
                "only": names,
                "backend": context.info.backend,
                "asked": args.backend,
                "device": args.device,
                "budget": args.budget,
                "live": list(args.live),
                "fa3": args.fa3 is not None,
            },
            backends=backends(args.device),
            started=now(),
        )
        _measure_and_show(args, setting, record, names)
    return ended(record)


def _measure_and_show(
    args: argparse.Namespace, setting: Setting, record: Record, names: list[str]
) -> None:
    from tqdm import tqdm

    if not args.json:
        print(report.head(record), flush=True)
    with tqdm(total=len(names) + 1, unit="part", disable=None, file=sys.stderr) as bar:

        def after(part: Part) -> None:
            record.method = _method(setting)
            if args.out is not None:
                record.write(args.out)
            bar.update()
            if not args.json:
                bar.write("\n" + report.part_table(part), file=sys.stdout)
                sys.stdout.flush()

        measure(setting, record, names, args.budget, after)
    if args.json:
        print(json.dumps(record.document(raw=False), indent=1))
    else:
        if aims := report.aims_table(record):
            print(f"\n{aims}")
        if args.out is not None:
            print(f"\nwritten: {args.out} (samples in {args.out.parent / 'raw' / args.out.name})")
