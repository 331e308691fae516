# SPDX-License-Identifier: MIT
"""Computes the cost of a layout: layers per tensor, page size, and pages mapped per call.

A running request holds its prompt and the tokens generated so far: in iteration k (from 0),
``context + k`` tokens. Means are over all iterations of all requests of the workload, so each
request is weighted by how long it holds memory. With M bytes for keys and values, and m bytes held
by an average request, M / m requests run concurrently in the long run (Little's law).

Costs are summed over the layer groups. Layers with a window hold the whole prompt in the first
iteration, as after a prefill in one step; from then on, they hold the window at the end of the last
whole block, `KVCacheConfig.window_tile` rows before it, and whatever else their first page
contains. Layers with a state hold the state from the first iteration to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.entries import LARGE_ENTRY, attention_time
from pyvmem.layouts.shapes import ModelShape
from pyvmem.layouts.workload import Request
from pyvmem.plumbing.validation import invalid

__all__ = ["Choice", "Cost", "Held", "cost", "held_by", "layouts_of", "page_table_bytes"]

_KB64 = 64 << 10
_MAX_RUN = 1 << 12
_MAPPING_BYTES = (
    2360  # kernel bytes per mapping of `stock` (driver 580.159.04; benchmarks/api, "decode")
)


@dataclass(frozen=True)
class Choice:
    """A layout.

    Attributes:
        group_size: layers that share one K and one V tensor; divides the number of layers of each
            kind.
        page_size: page size in bytes, a power of two.
        run: pages mapped with one call when a request grows, and wasted until the request fills
            them; a power of two. 1 stands for the growth of `KVCache`: up to
            `KVCacheConfig.growth_fraction` of a request's pages, reclaimed when memory runs low.
    """

    group_size: int
    page_size: int
    run: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.run <= _MAX_RUN or self.run & (self.run - 1):
            raise invalid(
                f"run is {self.run}; it must be a power of two up to {_MAX_RUN}", op="cost"
            )
        if self.page_size < 1:
            raise invalid(f"page_size is {self.page_size}; it must be positive", op="cost")

    @property
    def step_bytes(self) -> int:
        """Bytes by which a request grows in one tensor."""
        return self.page_size * self.run


@dataclass(frozen=True)
class Held:
    """The average memory of a running request, in bytes.

    Attributes:
        mapped: physical memory.
        used: memory of rows that hold tokens; with a window, of rows that the next token can see.
        large: the part of `mapped` in whole 2 MB blocks, mapped by large entries; 0 with a
            window, which unmaps parts of its blocks.
    """

    mapped: float
    used: float
    large: float


@dataclass(frozen=True)
class Cost:
    """The cost of a layout for a model and a workload. Bytes, tokens and calls are per rank.

    Attributes:
        choice: the layout.
        tensors: number of virtual tensors; each growth step maps pages in all of them.
        held: average memory of a running request.
        waste_bound: upper bound on the bytes that a request wastes: a growth step, and the rows
            that a kernel may read past its length; with a window also a page, the rows before the
            window and a block.
        tokens_per_growth: tokens that fit in a growth step, on average.
        calls_per_token: map calls per token on a back end that maps a run with one call (`stock`,
            `cuda`, `host`), not counting unmaps behind a window. `uvm` maps everything that a step
            needs with one call.
        sharing_unit: tokens per block, the granularity of sharing: row and page boundaries coincide
            only at multiples of it. 0 if a layer has a state, since states are not shared.
        page_table_bytes: bytes that an average request takes in the last level of the GPU's page
            table.
        books_bytes: upper bound on the kernel memory that `stock` needs for an average request,
            reached if every growth step is mapped separately; it needs much less if the prompt is
            mapped in runs. `uvm` needs about 28 bytes per page.
        batch: number of concurrent requests in the given memory.
        attention: decode attention time once that memory is full, with whole blocks of 2 MB mapped
            by large entries, relative to cudaMalloc memory with a tensor per layer; see
            `pyvmem.layouts.entries`.
    """

    choice: Choice
    tensors: int
    held: Held
    waste_bound: int
    tokens_per_growth: float
    calls_per_token: float
    sharing_unit: int
    page_table_bytes: float
    books_bytes: float
    batch: float
    attention: float

    @property
    def waste(self) -> float:
        """Average bytes that a running request wastes."""
        return self.held.mapped - self.held.used

    @property
    def calls_per_growth(self) -> int:
        """Map calls each time a request outgrows its pages, counted as for `calls_per_token`."""
        return self.tensors


def page_table_bytes(page_size: int) -> int:
    """Returns how many bytes one page takes in the GPU's page table.

    An entry takes 8 bytes. Pages of 128 and 256 KB take two and four adjacent entries of 64 KB; a
    page of 2 MB takes one entry of the level above, which the hardware reads as 16 bytes.
    """
    if page_size >= 2 << 20:
        return 16 * (page_size // (2 << 20))
    return 8 * max(1, page_size // _KB64)


def layouts_of(
    shape: ModelShape, choice: Choice, longest: int, overread_rows: int = 0
) -> list[Layout]:
    """Returns the cache's `Layout` for each layer group, with requests of up to `longest` tokens.

    Their page size is the size of a run, since requests grow by runs. `overread_rows` rows are
    mapped past the request's prompt.
    """
    configs = shape.configs(
        max_batch=1,
        max_seq_len=longest + overread_rows,
        group_size=choice.group_size,
        overread_rows=overread_rows,
    )
    return [Layout(config, choice.step_bytes) for config in configs]


def held_by(layout: Layout, page_size: int, unit: int, requests: Sequence[Request]) -> Held:
    """Returns the average memory of a running request; see the top of this module.

    Args:
        layout: a layout whose pages are a request's growth steps.
        page_size: size, in bytes, of the pages that are unmapped behind a window.
        unit: tokens per block; the window advances by whole blocks.
        requests: the workload.
    """
    each = list(map(layout.pages_for, range(layout.max_rows + 1)))
    pages = list(accumulate(each))
    block = 0 if layout.config.window else max(1, LARGE_ENTRY // layout.page_size)
    full_blocks = list(accumulate(_whole(n, block) for n in each))
    gone = list(accumulate(_gone(layout, page_size, unit, n) for n in range(layout.max_rows + 1)))
    window = 1 if layout.state else layout.config.window or layout.max_rows
    seen = list(accumulate(min(n, window) for n in range(layout.max_rows + 1)))
    grown = large = left = iterations = tokens = 0
    for request in requests:
        begun = layout.pages_for_step(0, request.context)
        full = min(layout.capacity(begun), request.longest)  # tokens at which its pages are full
        grown += begun * (full - request.context + 1) + pages[request.longest] - pages[full]
        large += _whole(begun, block) * (full - request.context + 1)
        large += full_blocks[request.longest] - full_blocks[full]
        left += gone[request.longest] - gone[request.context]
        iterations += request.output
        begun_rows = min(request.context, 1) if layout.state else request.context
        tokens += begun_rows + seen[request.longest] - seen[request.context]
    mapped = grown * layout.page_size - left * page_size
    return Held(
        mapped=mapped * layout.num_tensors / iterations,
        used=tokens * layout.num_tensors * layout.row_bytes / iterations,
        large=large * layout.page_size * layout.num_tensors / iterations,
    )


def _whole(pages: int, block: int) -> int:
    """Rounds `pages` down to a multiple of `block`; returns 0 if `block` is 0."""
    return pages // block * block if block else 0


def _gone(layout: Layout, page_size: int, unit: int, tokens: int) -> int:
    """Counts the pages unmapped behind the window when a request decodes the last of `tokens`."""
    config = layout.config
    if not config.window:
        return 0
    end = max(0, tokens - 1) // unit * unit
    return max(0, end - config.window - config.window_tile) * layout.row_bytes // page_size


def _longest_run(each: float, choice: Choice) -> int:
    """Returns the maximum number of pages by which a request with `each` bytes per tensor grows.

    The memory is assumed to be full to `KVCacheConfig.low_watermark`: the cache then uses half of
    the free memory for surplus pages, and a run is 2 MB at most.
    """
    if choice.run > 1:
        return 1  # the layouts' pages are already runs
    free = each * KVCacheConfig.low_watermark / 2
    return _floor_power(int(min(free, LARGE_ENTRY)) // choice.page_size)


def _calls(layout: Layout, longest_run: int, requests: Sequence[Request]) -> float:
    """Returns the average number of map calls per generated token, summed over all tensors."""
    fraction = KVCacheConfig.growth_fraction
    runs = (
        min(longest_run, _floor_power(int(pages * fraction))) for pages in range(layout.slot_pages)
    )
    calls = list(accumulate((1 / run for run in runs), initial=0.0))
    made = 0.0
    for request in requests:
        begun = layout.pages_for_step(0, request.context)
        made += calls[max(begun, layout.pages_for(request.longest))] - calls[begun]
    return made * layout.num_tensors / sum(request.output for request in requests)


def _floor_power(value: int) -> int:
    """Returns the greatest power of two not above `value`, but at least 1."""
    return 1 << max(1, value).bit_length() - 1


def _most_waste(layout: Layout, choice: Choice, unit: int) -> int:
    """Returns one layer group's part of `Cost.waste_bound`, in bytes."""
    config = layout.config
    if layout.state:
        return (layout.slot_pages * layout.page_size - layout.row_bytes) * layout.num_tensors
    waste = choice.step_bytes + config.overread_rows * layout.row_bytes
    if config.window:
        waste += choice.page_size + (config.window_tile + unit) * layout.row_bytes
    return waste * layout.num_tensors


def cost(
    shape: ModelShape,
    choice: Choice,
    requests: Sequence[Request],
    memory_bytes: int,
    overread_rows: int = 0,
) -> Cost:
    """Computes the cost of a layout for a model and a workload.

    Args:
        shape: the model, on one rank.
        choice: the layout.
        requests: the workload, at least one request.
        memory_bytes: bytes for keys and values, on this rank.
        overread_rows: as in `KVCacheConfig`; rows that a request has not filled count as waste.

    Raises:
        InvalidArgument: the group size does not divide the layers, or there are no requests or no
            memory.
    """
    if not requests:
        raise invalid("a workload must have at least one request", op="cost")
    if memory_bytes < 1:
        raise invalid(f"{memory_bytes} bytes of memory are left for keys and values", op="cost")
    longest = max(request.longest for request in requests)
    layouts = layouts_of(shape, choice, longest, overread_rows)
    grows = [layout for layout in layouts if not layout.state]
    units = [choice.page_size // gcd(choice.page_size, layout.row_bytes) for layout in grows]
    unit = lcm(*units)
    kept = unit if grows == layouts else 1  # stateful models do not cache prefixes
    each = [held_by(layout, choice.page_size, kept, requests) for layout in layouts]
    held = Held(
        mapped=sum(one.mapped for one in each),
        used=sum(one.used for one in each),
        large=sum(one.large for one in each),
    )
    pages = held.mapped / choice.page_size
    tensors = sum(layout.num_tensors for layout in layouts)
    steps = sum(layout.num_tensors * layout.row_bytes for layout in grows) / choice.step_bytes
    longest_run = _longest_run(held.mapped / sum(one.num_tensors for one in grows), choice)
    return Cost(
        choice=choice,
        tensors=tensors,
        held=held,
        waste_bound=sum(_most_waste(layout, choice, kept) for layout in layouts),
        tokens_per_growth=sum(layout.num_tensors for layout in grows) / steps,
        calls_per_token=sum(_calls(layout, longest_run, requests) for layout in grows),
        sharing_unit=unit if grows == layouts else 0,
        page_table_bytes=pages * page_table_bytes(choice.page_size),
        books_bytes=pages / choice.run * _MAPPING_BYTES,
        batch=memory_bytes / held.mapped,
        attention=attention_time(
            choice.page_size,
            choice.group_size,
            shape.num_layers,
            memory_bytes,
            held.large / held.mapped,
        ),
    )
