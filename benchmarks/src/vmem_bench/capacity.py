# SPDX-License-Identifier: MIT
"""`vmem bench capacity`: how many requests fit in a GPU's memory at once, by memory layout.

Follows figure 12 of the vAttention paper (ASPLOS'25), which gives the largest batch with 64 KB and
with 2 MB pages on a different trace (OpenChat); the paper's artifact has no script for that figure.
Here:

- The memory for keys and values is the GPU's memory minus a tenth (activations, CUDA's context and
  libraries; engines use 0.9 of a GPU by default) and minus the bfloat16 weights, whose count
  follows from the model's public configuration. Yi-34B runs on two ranks, each with half of the
  heads and weights, because on one GPU its weights leave too little memory for the long trace.
  Numbers are per rank.
- The batch size is the mean number of running requests while memory is the limit; each row also
  records the largest batch of any iteration. `vmem_bench.replay` defines an iteration.
- PagedAttention allocates blocks of 16 or 256 tokens, for all layers at once. Its block tables are
  not counted.
- Pages that a request has mapped ahead of need (`KVCacheConfig.growth_fraction`) are not counted,
  because they are unmapped for other requests when memory is the limit.

The benchmark needs no GPU. It uses the cache's own arithmetic (`Layout.pages_for_step`), and a test
runs the same replay through a `KVCache` with real pages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pyvmem.bench.record import Part, Record
from pyvmem.bench.running import now, said
from pyvmem.commands.machine import describe
from pyvmem.commands.tables import number, table
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.cli import RESERVE, budget
from pyvmem.layouts.options import (
    add_dtype,
    add_output,
    add_overread,
    add_workload,
    counts,
    page_name,
    page_sizes,
    size,
)
from pyvmem.layouts.shapes import ModelShape, shape_of
from pyvmem.layouts.workload import Request, generate, read_trace
from pyvmem.plumbing.units import counted

__all__ = ["FORMAT", "System", "add_parser", "aims", "measure", "run", "systems"]

FORMAT = "vmem-bench-capacity/1"
MODELS = "Yi-6B,Llama-3-8B,Yi-34B:2"
_MB = 1 << 20
_AGAINST_2M = {"Yi-6B": 1.7, "Llama-3-8B": 1.5, "Yi-34B": 1.5}  # targets for the Azure trace
_AGAINST_BLOCKS = 0.97


@dataclass(frozen=True)
class System:
    """A way to store keys and values.

    Attributes:
        name: e.g. ``g1/64K`` (one tensor per layer, 64 KB pages), ``blocks/16`` (PagedAttention).
        group_size: layers per tensor.
        page_size: page size in bytes; 0 for blocks.
        block: tokens per block; 0 for pages.
        overread_rows: rows past a prompt's end that a kernel may read because it reads whole tiles;
            0 for blocks.
    """

    name: str
    group_size: int
    page_size: int
    block: int = 0
    overread_rows: int = 0

    def layout(self, shape: ModelShape, longest: int) -> Layout:
        """Returns the cache's layout for requests of up to `longest` tokens."""
        config = shape.config(
            max_batch=1,
            max_seq_len=longest + self.overread_rows,
            group_size=self.group_size,
            overread_rows=self.overread_rows,
        )
        row = Layout(config, 2 * _MB).row_bytes
        return Layout(config, self.page_size or self.block * row)


def systems(
    shape: ModelShape,
    page_sizes: list[int],
    groups: list[int],
    blocks: list[int],
    overread_rows: int = 0,
) -> Iterator[System]:
    """Yields the systems to compare.

    Args:
        shape: the model.
        page_sizes: page sizes in bytes.
        groups: layers per tensor, 0 for all. Sizes that do not divide the number of layers are
            skipped.
        blocks: tokens per block of PagedAttention.
        overread_rows: as in `KVCacheConfig`.
    """
    wanted = dict.fromkeys(group or shape.num_layers for group in groups)
    for group in wanted:
        if shape.num_layers % group == 0:
            for page in page_sizes:
                yield System(f"g{group}/{page_name(page)}", group, page, 0, overread_rows)
    for block in blocks:
        yield System(f"blocks/{block}", 1, 0, block)


def measure(
    part: Part,
    shape: ModelShape,
    model: str,
    requests: list[Request],
    memory: int,
    compared: list[System],
) -> None:
    """Adds a row for each system, with the mean batch size and the other `Outcome` fields."""
    from vmem_bench.replay import Pages, replay  # needs numpy, unlike the rest of this module

    longest = max(request.longest for request in requests)
    part.notes.append(
        f"{shape.name}: {shape.weight_bytes / 1e9:.1f} GB of weights, {memory / 2**30:.1f} GiB for "
        f"keys and values, {shape.token_bytes:,} bytes per token"
    )
    for system in compared:
        layout = system.layout(shape, longest)
        found = replay(requests, Pages(layout, memory), shape.token_bytes)
        words = f"blocks of {system.block} tokens" if system.block else system.name
        more = {key: value for key, value in asdict(found).items() if key != "mean_batch"}
        part.value(
            f"{model}/{system.name}",
            f"{shape.name}, {words}: requests at a time",
            "paged" if system.block else "pages",
            found.mean_batch,
            "requests",
            page=system.page_size,
            tensors=layout.num_tensors,
            overread_rows=system.overread_rows,
            memory_bytes=memory,
            **more,
        )


def aims(record: Record) -> list[dict[str, Any]]:
    """Compares 64 KB pages with one tensor per layer to other layouts, by batch size.

    Each value is a ratio of two batch sizes. Only the Azure trace has targets.
    """
    found = []
    for part in record.parts.values():
        azure = part.name.startswith("azure")
        models = dict.fromkeys(row["id"].split("/")[1] for row in part.rows)
        for model in models:
            for other, words, goal in (
                ("g1/2M", "2 MB pages, a tensor per layer", _AGAINST_2M.get(model)),
                ("blocks/16", "blocks of 16 tokens", _AGAINST_BLOCKS),
            ):
                ours, theirs = part.find(f"{model}/g1/64K"), part.find(f"{model}/{other}")
                if ours is None or theirs is None:
                    continue
                value = ours["value"] / theirs["value"]
                goal = goal if azure else None
                found.append(
                    {
                        "id": f"{part.name}/{model}/{other}",
                        "what": f"{part.name}: {model}, batch with 64 KB pages relative to {words}",
                        "value": value,
                        "unit": "x",
                        "op": ">=" if goal else None,
                        "aim": goal,
                        "pass": value >= goal if goal else None,
                        "applies": goal is not None,
                        "rows": [ours["id"], theirs["id"]],
                        "why": "" if goal else "no target for this trace",
                    }
                )
    return found


def _models(text: str) -> list[tuple[str, int]]:
    out = []
    for item in text.split(","):
        model, _, ranks = item.partition(":")
        if ranks and not ranks.isdecimal():
            raise argparse.ArgumentTypeError(f"{item!r}: expected MODEL or MODEL:RANKS")
        out.append((model, int(ranks or 1)))
    return out


def add_parser(which: Any) -> None:
    """Adds ``capacity`` to the benchmarks."""
    parser = which.add_parser(
        "capacity",
        help="concurrent requests by memory layout, for a trace",
        description="Replays traces against a GPU's memory and counts concurrent requests, by page "
        "size and group size, and for PagedAttention. Needs no GPU.",
    )
    add = parser.add_argument
    traces = "Azure's or vAttention's CSV, Mooncake's JSONL"
    add_workload(parser, traces, "requests", 10000, nargs="+", default=[])
    add("--models", type=_models, default=_models(MODELS), help=f"MODEL[:RANKS],... ({MODELS})")
    add("--memory", type=size, default=80 << 30, help="memory of each GPU (80G)")
    add(
        "--pages",
        type=page_sizes,
        default=page_sizes("64K,256K,2M"),
        help="page sizes (64K,256K,2M)",
    )
    groups = partial(counts, all_is=0)
    add("--groups", type=groups, default=[1, 4, 0], help="layers per tensor (1,4,all)")
    add(
        "--blocks",
        type=counts,
        default=[16, 256],
        help="tokens per block of PagedAttention (16,256)",
    )
    add_overread(parser)
    add_dtype(parser)
    add_output(parser, "write JSON here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    start = time.monotonic()
    record = Record(
        machine=describe(),
        options={
            "traces": [path.name for path in args.trace],
            "seed": None if args.trace else args.seed,
            "memory": args.memory,
            "reserve": RESERVE,
            "overread_rows": args.overread,
            "kv_dtype": args.kv_dtype or "the model's",
        },
        method={
            "batch": "mean number of running requests, over iterations in which memory is the limit"
        },
        started=now(),
        format=FORMAT,
    )
    workloads = {path.stem: read_trace(path) for path in args.trace}
    if not workloads:
        workloads = {"generated": generate(args.requests, args.seed)}
    for name, requests in workloads.items():
        part = record.part(name, counted(len(requests), "request"))
        part.started, began = now(), time.monotonic()
        for model, ranks in args.models:
            shape = shape_of(model, args.kv_dtype).on_ranks(ranks).stored_as(args.kv_dtype)
            compared = list(systems(shape, args.pages, args.groups, args.blocks, args.overread))
            print(f"{name}: {shape.name}, {len(compared)} layouts", file=sys.stderr, flush=True)
            measure(part, shape, model, requests, budget(shape, args.memory), compared)
        part.status, part.seconds = "done", time.monotonic() - began
    record.aims = aims(record)
    record.seconds = time.monotonic() - start
    if args.out is not None:
        record.write_one(args.out)
    return said(record, args, lambda: _text(record))


def _text(record: Record) -> str:
    lines = ["\n\n".join(map(_table, record.parts.values())), ""]
    for aim in record.aims:
        verdict = {True: "pass", False: "MISS", None: ""}[aim["pass"]]
        wanted = f", wanted {aim['aim']}: {verdict}" if aim["applies"] else ""
        lines.append(f"{aim['what']}: {aim['value']:.3f}{wanted}")
    return "\n".join(lines)


def _table(part: Part) -> str:
    header = ["layout", "batch", "most", "wasted MB a request", "preempted"]
    body = [
        [
            row["id"].partition("/")[2],
            number(row["value"]),
            number(row["max_batch"]),
            number(row["wasted_bytes"] / _MB),
            number(row["preemptions"]),
        ]
        for row in part.rows
    ]
    return "\n".join([f"== {part.name}: {part.title}", *part.notes, table(header, body, 1)])
