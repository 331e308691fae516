# SPDX-License-Identifier: MIT
"""`vmem bench kernels`: the same attention kernel over contiguous and over paged memory.

The contiguous form runs over our pages, which are in random physical order, and over cudaMalloc
memory. The paged form runs over cudaMalloc memory as blocks in random order, for every block size.
All buffers hold the same values.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.buffers import Buffers
from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.bench.timing import Deadline
from pyvmem.layouts.options import page_name, sizes
from pyvmem.memory.context import Context
from vmem_bench.command import Command, WrongResult, add_common, add_page, open_command
from vmem_bench.footprint import Footprint
from vmem_bench.paged_bench import GROUP, OURS, SLOTS, THEIRS, PagedBench
from vmem_bench.paged_flashinfer import FlashInfer
from vmem_bench.paged_kernels import SETS, TINY_SETS, Case, Fa2, Fa3, Gather, Kernel

if TYPE_CHECKING:
    import torch

__all__ = ["KERNELS", "add_parser", "run"]

_OVERREAD = 192  # rows read past a request's end: FlashAttention-3 reads whole tiles
_PREFILL, _DECODE = 0.99, 0.97
# For prompts of at least _LONG tokens, FlashInfer's best paged form should take at least
# _FLASHINFER times as long as its calls over slots.
_LONG = 64 << 10
_FLASHINFER = 1.10
KERNELS = {
    "fa3": "FlashAttention-3, vLLM's op",
    "flashinfer": "FlashInfer",
    "fa2": "FlashAttention-2 of torch, which has no paged call",
    "sdpa": "torch's SDPA, after a copy of the blocks",
}
_METHOD = {
    "time": "CUDA events; for decoding, a graph of calls over different memory, divided by their "
    "number",
    "turns": "every form and memory in turn, in rotating order; the first round is discarded",
    "splits": "in tuned cases, the fastest of 0 (the kernel chooses), 1, 2, 4, 8, 16, 32, for each "
    "form and block size",
    "checked": "each output against that of the contiguous form on a copy of the rows in order, "
    "and the last token's output against float32",
}


def _make(name: str, command: Command, device: torch.device) -> Kernel:
    if name == "fa3":
        return Fa3(command.args.fa3, device)
    if name == "fa2":
        return Fa2(device)
    return FlashInfer(device) if name == "flashinfer" else Gather()


def _page(command: Command) -> int:
    """Returns our page size in bytes; unlike `Command.page`, it is the same in a quick run."""
    return int(getattr(command.args, "page", 0)) or 64 << 10


def _aims(command: Command, kernel: str, case: Case, blocks: Sequence[int]) -> None:
    """Adds our speed relative to the best paged form, each block size and the memory bandwidth."""
    pages = f"{page_name(_page(command))} pages"
    prefix = f"{kernel}/{case.name}"
    ours = [f"{prefix}/contiguous/{memory}" for memory in OURS]
    goal = _DECODE if case.decodes else _PREFILL
    # The time to decode a single request depends on the number of splits, so only the tuned case
    # has a target.
    plain = case.decodes and case.batch == 1 and not case.tuned
    over = []  # name, text, our rows, block sizes to compare with, target
    for block in (0, *blocks) if blocks else ():
        words = "the best paged form" if block == 0 else f"blocks of {block}"
        judged = block == 0 and not plain and kernel != Gather.name
        name, what = f"{block or 'best'}", f"speed of contiguous {pages} relative to {words}"
        over.append((name, what, ours, blocks if block == 0 else (block,), judged and goal))
    for how, words in SLOTS.items() if blocks and not case.tuned else ():
        mine = [f"{prefix}/{how}/{memory}" for memory in OURS]
        prompt = case.q_len == case.kv_len >= _LONG
        judged = kernel == FlashInfer.name and how == "slots" and prompt
        what = f"speed over {words}, {pages}, relative to the best paged form"
        over.append((how, what, mine, blocks, judged and _FLASHINFER))
    for name, what, mine, each, wanted in over:
        theirs = [f"{prefix}/paged{size}/{memory}" for size in each for memory in THEIRS]
        command.aims.add(
            f"{kernel}_{case.name}_{name}",
            f"{kernel}, {case.what}: {what}",
            [*mine, *theirs],
            partial(_speed, len(mine), len(THEIRS)),
            op=">=" if wanted else None,
            aim=wanted or None,
        )
    if case.decodes:
        command.aims.add(
            f"{kernel}_{case.name}_roofline",
            f"{kernel}, {case.what}: rate at which contiguous {pages} are read, relative to the "
            "memory's bandwidth",
            [*ours, f"{kernel}/peak"],
            _roofline,
        )


def _roofline(*rows: Any) -> float:
    """Returns the median rate at which keys and values are read, relative to memory bandwidth."""
    *forms, peak = rows
    return statistics.median(float(row["gb_per_s"]) for row in forms) / float(peak["value"])


def _speed(ours: int, each: int, *rows: Any) -> float:
    """Returns the fastest paged form's time divided by ours, each a median over buffers."""
    medians = [float(row["median"]) for row in rows]
    paged = medians[ours:]
    best = min(statistics.median(paged[i : i + each]) for i in range(0, len(paged), each))
    return best / statistics.median(medians[:ours])


def _kernels(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(KERNELS) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(KERNELS)}")
    return names


def add_parser(which: Any) -> None:
    """Adds ``kernels`` to the benchmarks."""
    parser = which.add_parser(
        "kernels",
        help="the same attention kernel, contiguous and paged",
        description="Times attention kernels over contiguous rows in small pages and in cudaMalloc "
        "memory, and over blocks of several sizes. Needs a GPU; without one, or with --quick, "
        "only --kernels sdpa runs, as a smoke test.",
    )
    add_common(parser, 180)
    add_page(parser)
    parser.add_argument(
        "--kernels", type=_kernels, default=["fa3", "flashinfer"], help=",".join(KERNELS)
    )
    sets = ", ".join(SETS)
    parser.add_argument(
        "--cases", metavar="NAME,...", default="base", help=f"some of the cases, or {sets} (base)"
    )
    parser.add_argument(
        "--footprint",
        type=sizes,
        default=[],
        metavar="SIZE,...",
        help="instead of the cases: attention over all layers of caches of these sizes, as "
        "8G,48G, by layout and by the size of page-table entries",
    )
    parser.set_defaults(run=run)


def _chosen(command: Command) -> list[Case]:
    tiny = command.quick or command.backend == "host"
    sets: dict[str, tuple[Case, ...]] = TINY_SETS if tiny else SETS
    wanted = command.args.cases.split(",")
    found = [case for name in wanted for case in sets.get(name, ())]
    found += [case for cases in sets.values() for case in cases if case.name in wanted]
    return list(dict.fromkeys(found))


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 for an unknown case or an unusable back end.
    """
    command = open_command(args, "kernels", _METHOD, kernels=args.kernels)
    if command is None:
        return 2
    command.record.options["page"] = _page(command)
    cases = _chosen(command)
    if not cases and not args.footprint:
        command.show(f"no case of {args.cases}")
        return 2
    parts = {name: command.record.part(name, KERNELS[name]) for name in args.kernels}
    try:
        device = command.device()
        if _page(command) not in command.page_sizes:
            raise RuntimeError(f"{command.backend} has no pages of {page_name(_page(command))}")
    except RuntimeError as error:
        for part in parts.values():
            with conducted(part):
                part.not_run("*", str(error))
        return command.finish()
    kernels: dict[str, Kernel] = {}
    for name, part in parts.items():
        with conducted(part):
            try:
                command.show(f"{name}: {KERNELS[name]}")
                kernels[name] = _make(name, command, device)
                part.notes += getattr(kernels[name], "notes", [])
            except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
                part.not_run("*", str(error).split("\n")[0])
    if args.footprint:
        command.record.options["footprint"] = args.footprint
        _run_footprints(command, parts, kernels, device)
    else:
        _run_all(command, parts, kernels, cases, device)
    return command.finish()


def _run_footprints(
    command: Command, parts: dict[str, Part], kernels: dict[str, Kernel], device: torch.device
) -> None:
    """Measures every footprint with every kernel; writes the file after each measurement."""
    for name, kernel in kernels.items():
        with conducted(parts[name]):
            for nbytes in command.args.footprint:
                command.show(f"{name}, a cache of {nbytes / 2**30:g} GiB")
                Footprint(command, parts[name], kernel, device).measure(nbytes)
                command.write()


def _run_all(
    command: Command,
    parts: dict[str, Part],
    kernels: dict[str, Kernel],
    cases: list[Case],
    device: torch.device,
) -> None:
    """Measures every case with every kernel on the same buffers; writes the file after each."""
    if not kernels:
        return
    # Restart the deadline: the kernels are compiled by now.
    deadline = Deadline(command.args.deadline)
    rows = max(case.kv_heads * case.head_dim for case in cases)
    # One layer of a prefill is small, so leave room for a tensor with several layers.
    nbytes = max(case.nbytes * (1 if case.decodes else GROUP // 2) for case in cases)
    nbytes += 2 * 2 * _OVERREAD * rows
    page = _page(command)
    nbytes = -(-nbytes // page) * page
    share = len(kernels) * len(cases)
    with Context(command.backend, device=command.args.device) as context:
        buffers = Buffers(context, nbytes, page, device)
        try:
            for name, kernel in kernels.items():
                part = parts[name]
                with conducted(part):
                    bench = PagedBench(part, kernel, buffers, command.quick)
                    _add_peak(part, device)
                    for case in cases:
                        left = Deadline(deadline.left / share)
                        share -= 1
                        command.show(f"{name}, {case.what}")
                        _one(bench, part, case, left)
                        _aims(command, name, case, kernel.blocks)
                        command.write()
                    _raise_wrong(part)
        finally:
            gc.collect()  # a failed case's frames hold views of the buffers
            buffers.close()


def _add_peak(part: Part, device: torch.device) -> None:
    """Adds the GPU's memory bandwidth, which bounds the rate at which a decode step can read."""
    import torch

    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    clock = getattr(properties, "memory_clock_rate", 0)  # in kHz, with two transfers per cycle
    width = getattr(properties, "memory_bus_width", 0)  # in bits
    if clock and width:
        what = "memory bandwidth, computed from memory clock and bus width"
        part.value("peak", what, "device", 2 * clock * 1e3 * width / 8 / 1e9, "GB/s")


def _one(bench: PagedBench, part: Part, case: Case, deadline: Deadline) -> None:
    """Measures one case. A failure is recorded, so that later cases still run."""
    try:
        bench.measure(case, deadline)
    except WrongResult as error:
        part.not_run(case.name, f"WRONG: {error}")
    except (RuntimeError, AssertionError, TypeError) as error:
        part.not_run(case.name, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _raise_wrong(part: Part) -> None:
    wrong = [item["why"] for item in part.missing if item["why"].startswith("WRONG: ")]
    if wrong:
        raise WrongResult(wrong[0].removeprefix("WRONG: "))
