# SPDX-License-Identifier: MIT
"""What a cache stands on: context, layout, reservation, and how much memory it may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem._native import Outcome
from pyvmem.context import Context
from pyvmem.features import require_page_size
from pyvmem.features.table import SPARSE
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.layout import Layout
from pyvmem.reservation import Reservation

if TYPE_CHECKING:
    from pyvmem.kvcache.budget import Budget
    from pyvmem.kvcache.journal import Journal

__all__ = ["Parts", "available_bytes", "make", "pool_low"]

_DEFAULT_GRANULE = 64 << 10
_MAX_READY = 256 << 20


@dataclass(frozen=True)
class Parts:
    """What `make` made.

    Attributes:
        context: given, or opened here.
        owns_context: the context is closed with the cache.
        layout: where everything lies.
        reservation: all tensors.
        limit_pages: physical pages that the cache may have.
        cuda_device: CUDA ordinal; None where pages are the CPU's.
    """

    context: Context
    owns_context: bool
    layout: Layout
    reservation: Reservation
    limit_pages: int
    cuda_device: int | None


def make(
    config: KVCacheConfig,
    context: Context | None,
    backend: str,
    device: Any,
    journal: Journal,
    budget: Budget | None = None,
) -> Parts:
    """Opens what is missing, which the journal gives back where no cache comes of it."""
    context = _context_of(config, context, budget)
    owned = context is None
    if context is None:
        context = Context(
            backend,
            device=device,
            granule=config.page_size,
            pool_low=pool_low(config),
            max_mappings=config.max_mappings,
        )
        journal.hold(context)
    info = context.info
    page_size = config.page_size or info.granule
    large = config.large_page_size
    require_page_size(info, page_size)
    if large:
        require_page_size(info, large, "large_page_size")
    layout = Layout(config, page_size)
    cuda_device = context.cuda_device
    limit = _limit_pages(config, layout, cuda_device, budget)
    if config.sparse:
        SPARSE.require(info, f"sparse, with pages of {info.granule} bytes")
    # Pages of more than 2 MiB (the default alignment) need addresses aligned to them.
    reservation = Reservation(context, Outcome())
    journal.hold(reservation)
    context.reserve(
        layout.total_bytes,
        into=reservation,
        sparse=config.sparse,
        align=max(page_size, large, 2 << 20),
        large=bool(large),
    )
    return Parts(context, owned, layout, reservation, limit, cuda_device)


def pool_low(config: KVCacheConfig) -> int:
    """Free bytes that the worker of an owned context keeps ready, so that no step meets the driver.

    A page in every tensor for an eighth of the slots, but at most 256 MiB and a sixteenth of the
    memory limit: what lies ready is memory that the cache does not use.
    """
    page_size = config.page_size or _DEFAULT_GRANULE
    tensors = config.tensors_per_layer * (config.num_layers // config.group_size)
    growth = config.max_batch * tensors * page_size // 8
    return min(growth, _MAX_READY, config.memory_limit // 16 or _MAX_READY)


def _context_of(
    config: KVCacheConfig, context: Context | None, budget: Budget | None
) -> Context | None:
    """The context to use; None: one is to be opened."""
    if config.max_mappings and (context is not None or budget is not None):
        raise invalid(f"max_mappings {config.max_mappings}: the context is given, and has its own")
    if budget is None:
        if config.memory_floor:
            raise invalid(f"memory_floor {config.memory_floor}: the cache has no budget")
        return context
    if context is not None and context is not budget.context:
        raise invalid(f"{context!r} is not the budget's context, {budget.context!r}")
    return budget.context


def _limit_pages(
    config: KVCacheConfig, layout: Layout, cuda_device: int | None, budget: Budget | None
) -> int:
    everything = layout.slot_pages * layout.num_tensors * config.max_batch
    if not config.memory_limit:
        unknown = everything * layout.page_size
        available = available_bytes(cuda_device, unknown) if budget is None else budget.total_bytes
        return min(everything, available // layout.page_size)
    least = layout.page_size * layout.num_tensors
    if config.memory_limit < least:
        raise invalid(
            f"memory_limit {config.memory_limit} is less than one page of {layout.page_size} "
            f"bytes in each of {layout.num_tensors} tensors ({least} bytes)",
            size=config.memory_limit,
            limit=least,
        )
    return config.memory_limit // layout.page_size


def available_bytes(cuda_device: int | None, unknown: int) -> int:
    """Memory that is free now on the device; `unknown` where nothing tells."""
    if cuda_device is not None:
        try:
            import torch
        except ImportError:
            return unknown
        if not torch.cuda.is_available():
            return unknown
        return int(torch.cuda.mem_get_info(cuda_device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return unknown
