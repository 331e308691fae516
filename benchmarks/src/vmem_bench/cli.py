# SPDX-License-Identifier: MIT
"""The benchmarks that this package adds to `vmem bench`."""

from __future__ import annotations

from typing import Any

from vmem_bench import (
    capacity,
    deferred,
    devices,
    fill,
    models,
    overlap,
    paged,
    prefix_map,
    prefixes,
    sharing,
    swapping,
)
from vmem_bench.paper import command as paper
from vmem_bench.serving import command as serve
from vmem_bench.sglang import command as sglang
from vmem_bench.vllm import command as vllm

__all__ = ["add_parsers"]

_BENCHMARKS = (
    *(capacity, prefixes, overlap, paged, deferred, prefix_map, fill, devices, serve, sharing),
    *(swapping, vllm, sglang, models, paper),
)


def add_parsers(which: Any) -> None:
    """Adds each benchmark's parser to the subparsers `which`."""
    for benchmark in _BENCHMARKS:
        benchmark.add_parser(which)
