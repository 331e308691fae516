# SPDX-License-Identifier: MIT
"""``vmem layouts``: the cost of each layout for a model and a workload, and the best layout."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from pyvmem.commands.usage import BadUsage
from pyvmem.errors import InvalidArgument
from pyvmem.layouts.adviser import (
    CALL_US,
    PAGE_SIZES,
    Advice,
    Limits,
    advise,
    call_us,
    choices,
    name,
)
from pyvmem.layouts.entries import MEASURED_GROUPS
from pyvmem.layouts.options import (
    add_dtype,
    add_overread,
    add_workload,
    count,
    counts,
    model_shape,
    page_sizes,
    positive,
    size,
)
from pyvmem.layouts.shapes import SHAPES, ModelShape
from pyvmem.layouts.workload import Request, generate, read_trace
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import invalid

__all__ = ["RESERVE", "add_parser", "budget", "run"]

RESERVE = 0.1
"""The fraction of a GPU's memory reserved for activations, libraries and the CUDA context.

Engines reserve the same fraction by default (vLLM's ``gpu_memory_utilization`` of 0.9).
"""


def budget(shape: ModelShape, memory: int, reserve: float = RESERVE) -> int:
    """Returns the bytes for keys and values on each rank: `memory` minus the reserve and weights.

    Raises:
        InvalidArgument: nothing is left.
    """
    left = int(memory * (1 - reserve)) - shape.weight_bytes
    if left <= 0:
        raise invalid(
            f"{shape.name}: weights of {shape.weight_bytes} bytes and a reserve of "
            f"{int(memory * reserve)} use up all of {memory}; use more ranks",
            size=shape.weight_bytes,
            limit=memory,
            op="vmem layouts",
        )
    return left


def add_parser(sub: Any) -> None:
    """Adds the subcommand to ``argparse`` subparsers."""
    parser = sub.add_parser(
        "layouts",
        help="list the cost of each KV cache layout, and the best layout",
        description="Lists the cost of each layout (layers that share a tensor x page size) for a "
        "model and a workload, and picks the best. Needs no GPU.",
    )
    add = parser.add_argument
    add("--model", default="Llama-3-8B", help=f"{', '.join(SHAPES)}, or a config.json")
    add("--ranks", type=count, default=1, help="GPUs that share the heads and the weights (1)")
    add("--memory", type=size, default=80 << 30, help="of each GPU (80G)")
    add("--kv-memory", type=size, help="for keys and values alone, instead of --memory")
    add_workload(parser, "Azure's or vAttention's CSV, Mooncake's JSONL", "requests", 10000)
    add("--pages", type=page_sizes, default=list(PAGE_SIZES), help="page sizes (64K,128K,256K,2M)")
    add("--runs", type=counts, default=[1], help="pages mapped at a time, such as 1,8 (1)")
    add(
        "--backend",
        choices=sorted(CALL_US),
        default="stock",
        help="for the cost of a map call (stock)",
    )
    add("--iteration-ms", type=positive, default=25.0, help="of a decode iteration (25)")
    add(
        "--max-group",
        type=count,
        default=MEASURED_GROUPS,
        help=f"maximum layers in one tensor to advise ({MEASURED_GROUPS})",
    )
    add_overread(parser)
    add_dtype(parser)
    add("--all", action="store_true", help="also list groups between --max-group and all layers")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the costs and the best layout; returns 0.

    Raises:
        BadUsage: the model is unknown, the trace is invalid, or no layout fits.
    """
    try:
        return _run(args)
    except InvalidArgument as error:
        raise BadUsage(str(error)) from None


def _run(args: argparse.Namespace) -> int:
    shape = model_shape(args.model, args.kv_dtype).on_ranks(args.ranks).stored_as(args.kv_dtype)
    requests = read_trace(args.trace) if args.trace else generate(args.requests, args.seed)
    memory = args.kv_memory or budget(shape, args.memory)
    limits = Limits(call_us(args.backend, args.ranks), args.iteration_ms, args.max_group)
    most = shape.largest_group
    considered = [
        choice
        for choice in choices(shape, args.pages, args.runs)
        if args.all or choice.group_size <= args.max_group or choice.group_size == most
    ]
    found = advise(shape, requests, memory, considered, limits, args.overread)
    least = min(one.tensors * one.choice.page_size for one in found.costs)
    if memory < least:
        option = "--kv-memory" if args.kv_memory else "--memory"
        raise BadUsage(
            f"argument {option}: {memory} bytes for keys and values, but the smallest layout needs "
            f"{least}, a page in every tensor"
        )
    if args.json:
        print(json.dumps(_document(args, shape, memory, found), indent=1))
    else:
        print(_table(args, shape, requests, memory, found))
    return 0


def _document(
    args: argparse.Namespace, shape: ModelShape, memory: int, found: Advice
) -> dict[str, Any]:
    def entry(one: Any) -> dict[str, Any]:
        return {**asdict(one), "waste": one.waste, "calls_per_growth": one.calls_per_growth}

    return {
        "model": asdict(shape),
        "kv_memory_bytes": memory,
        "trace": str(args.trace) if args.trace else None,
        "seed": None if args.trace else args.seed,
        "overread_rows": args.overread,
        "best": entry(found.best),
        "why": found.why,
        "layouts": [entry(one) for one in found.costs],
    }


def _kinds(shape: ModelShape) -> str:
    """Describes the layer groups, for the table's header."""
    words = []
    for config in shape.configs():
        if config.state:
            words.append(f"{config.num_layers} states of {config.row_bytes:,} bytes per request")
            continue
        what = f"{config.num_kv_heads} KV heads of" if config.tensors_per_layer == 2 else "rows of"
        if config.tensors_per_layer == 1 and config.num_kv_heads > 1:
            what = f"{what} {config.num_kv_heads} x"
        window = f" with a window of {config.window}" if config.window else ""
        words.append(f"{config.num_layers} layers, {what} {config.head_dim}{window}")
    return "; ".join(words)


def _table(
    args: argparse.Namespace,
    shape: ModelShape,
    requests: list[Request],
    memory: int,
    found: Advice,
) -> str:
    from pyvmem.commands.tables import number, table

    tokens = sum((one.context + one.longest) / 2 * one.output for one in requests)
    tokens /= sum(one.output for one in requests)
    source = args.trace.name if args.trace else f"generated from seed {args.seed}"
    state = f", {shape.state_bytes:,} per request" if shape.state_bytes else ""
    lines = [
        f"{shape.name}: {_kinds(shape)}, {shape.dtype}; "
        f"{shape.token_bytes:,} bytes per token{state}",
        f"{counted(len(requests), 'request')}, {source}; "
        f"{tokens:,.0f} tokens per running request on average",
        f"{memory / 2**30:.1f} GiB for keys and values",
        *([f"{args.overread} rows past each prompt, for the kernel"] if args.overread else []),
        "",
    ]
    header = ["layout", "tensors", "waste MB", "below", "calls/token", "at once", "tokens", "share"]
    header += ["table KB", "books MB", "batch", "attention", ""]
    body = [
        [
            name(one.choice),
            str(one.tensors),
            number(one.waste / 2**20),
            number(one.waste_bound / 2**20),
            number(one.calls_per_token),
            str(one.calls_per_growth),
            number(one.tokens_per_growth),
            f"{one.sharing_unit:,}" if one.sharing_unit else "-",
            number(one.page_table_bytes / 1024),
            number(one.books_bytes / 2**20),
            f"{one.batch:,.1f}",
            f"{one.attention:.2f}",
            "<-" if one is found.best else "",
        ]
        for one in found.costs
    ]
    return "\n".join(
        [
            *lines,
            table(header, body, 1),
            "",
            "waste: of a running request, on average and at most; at once: map calls when it",
            "outgrows its pages, and the tokens that it then has room for; share: tokens in a unit",
            "that requests can share; table, books: the GPU's page table and, at most, the kernel",
            "memory of `stock`, for what a running request holds; attention: its time in decoding",
            "once the memory is full, divided by that from cudaMalloc memory (H100)",
            "",
            f"Take {found.why}",
        ]
    )
