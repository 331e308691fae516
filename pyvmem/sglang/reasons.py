# SPDX-License-Identifier: MIT
"""Configurations, KV pools and allocators of SGLang that the pool does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["CannotWork", "reasons_against", "reason_against_allocator", "reason_against_pool"]

_PREFIX = "VMEM_SGLANG=1 does not work with "
_APART = "the schedulers of its ranks are in different rounds, but must make the same decisions"
_COPIES = "registers or copies whole KV tensors, most of which has no memory"

_POOLS = {
    "DSA": "latent attention with an index: buffers of its own",
    "SWA": "sliding windows: two pools and an allocator that couples them; start it with "
    "--disable-hybrid-swa-memory, which keeps all layers' tokens in one",
    "Hybrid": "a hybrid model: attention's pool and states inside another pool",
    "Mamba": "states, which have no pages",
    "FP4": "a quantized cache: scales and workspaces in other buffers",
    "MXFP8": "a quantized cache: scales in other buffers",
    "PageMajor": "all layers of a page together, in a buffer of its own",
    "PageInterleave": "a cache sharded over ranks",
    "Unified": "one buffer for several pools, which moves pages itself",
    "KOnly": "keys alone",
    "DeepSeekV4": "buffers of its own",
    "NoOp": "no KV cache",
}


class CannotWork(ValueError):
    """The pool does not support this configuration of SGLang."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(_PREFIX + "; ".join(reasons))


def reasons_against(arguments: Any) -> Iterator[str]:
    """Yields each of SGLang's arguments that excludes the pool, with the reason."""

    def option(name: str) -> Any:
        return getattr(arguments, name, None)

    for name, why in (
        ("pp_size", _APART),
        ("attn_cp_size", _POOLS["PageInterleave"]),
        ("dcp_size", _POOLS["PageInterleave"]),
    ):
        if (option(name) or 1) > 1:
            yield f"{name}={option(name)} ({why})"
    if option("disaggregation_mode") not in (None, "null"):
        yield f"disaggregation_mode={option('disaggregation_mode')} ({_COPIES})"
    if option("speculative_algorithm"):
        yield (
            f"speculative_algorithm={option('speculative_algorithm')} (a draft model's KV tensors "
            "have the page numbers of the target's: a page would need memory in both at once)"
        )
    if option("enable_hierarchical_cache") and option("hicache_io_backend") == "direct":
        yield (
            "hicache_io_backend=direct (it copies by cudaMemcpyAsync, which refuses addresses that "
            "CUDA did not map; kernel does not)"
        )
    for name, why in (
        ("enable_lmcache", _COPIES),
        ("enable_flexkv", _COPIES),
        ("enable_dp_attention", "ranks of one group have different requests"),
        ("enable_hisparse", "an allocator of its own"),
        ("enable_kv_cache_sharding", _POOLS["PageInterleave"]),
        ("enable_unified_memory", _POOLS["Unified"]),
        ("enable_pdmux", "several streams launch at once"),
    ):
        if option(name):
            yield f"{name} ({why})"


def reason_against_pool(pool: Any) -> str | None:
    """Returns the reason why a KV pool is not supported; None if it is."""
    name = type(pool).__name__
    if name not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        known = (why for part, why in _POOLS.items() if part in name)
        return f"the KV pool {name} ({next(known, 'buffers of its own')})"
    if getattr(pool, "post_capture_active", False):
        return "KV sizing after graph capture (SGLang maps memory itself, in steps of 2 MB)"
    if getattr(pool, "enable_custom_mem_pool", False):
        return "SGLANG_MOONCAKE_CUSTOM_MEM_POOL (SGLang allocates KV tensors itself)"
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in ("nhd", "hnd"):
        return f"the KV layout {layout}"
    if pool.page_size == 1:
        return (
            "page_size=1 (SGLang's allocator without pages takes each token in turn, so that all "
            "memory is soon in use); start it with --page-size 16 or more"
        )
    return None


def reason_against_allocator(allocator: Any, known: type) -> str | None:
    """Returns the reason why an allocator is not supported; None if it is a `known`."""
    if isinstance(allocator, known):
        return None
    return f"the allocator {type(allocator).__name__} (it allocates pages in another way)"
