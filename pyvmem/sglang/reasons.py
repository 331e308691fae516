# SPDX-License-Identifier: MIT
"""Finds configurations, KV pools and allocators of SGLang that the pool does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["CannotWork", "reasons_against", "reason_against_allocator", "reason_against_pool"]

_PREFIX = "VMEM_SGLANG=1 does not work with "
_APART = "the schedulers of its ranks are in different rounds, but must make the same decisions"
_COPIES = "registers or copies entire KV tensors, most of which have no memory"

_POOLS = {
    "DSA": "latent attention with an index: it has other buffers",
    "SWA": "sliding windows: two pools and an allocator that couples them; start it with "
    "--disable-hybrid-swa-memory, which keeps all layers' tokens in one",
    "Hybrid": "a hybrid model: attention's pool and the states are inside another pool",
    "Mamba": "states, which have no pages",
    "FP4": "a quantized cache: scales and workspaces in other buffers",
    "MXFP8": "a quantized cache: scales in other buffers",
    "PageMajor": "the layers of a page are together in a single buffer",
    "PageInterleave": "a cache sharded over ranks",
    "Unified": "one buffer for several pools, which moves pages itself",
    "KOnly": "only keys",
    "DeepSeekV4": "it has other buffers",
    "NoOp": "no KV cache",
}


class CannotWork(ValueError):
    """The pool does not support this configuration of SGLang."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(_PREFIX + "; ".join(reasons))


def reasons_against(arguments: Any) -> Iterator[str]:
    """Yields each SGLang argument that the pool does not support, with the reason."""

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
            "use the target's page numbers: a page would need memory in both at the same time)"
        )
    if option("enable_hierarchical_cache") and option("hicache_io_backend") == "direct":
        yield (
            "hicache_io_backend=direct (it uses cudaMemcpyAsync, which rejects addresses that "
            "CUDA did not map; use kernel)"
        )
    for name, why in (
        ("enable_lmcache", _COPIES),
        ("enable_flexkv", _COPIES),
        ("enable_dp_attention", "ranks of one group have different requests"),
        ("enable_hisparse", "it has another allocator"),
        ("enable_kv_cache_sharding", _POOLS["PageInterleave"]),
        ("enable_unified_memory", _POOLS["Unified"]),
        ("enable_pdmux", "it launches work on several streams at once"),
    ):
        if option(name):
            yield f"{name} ({why})"


def reason_against_pool(pool: Any) -> str | None:
    """Returns why a KV pool is not supported, or None if it is supported."""
    name = type(pool).__name__
    if name not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        known = (why for part, why in _POOLS.items() if part in name)
        return f"the KV pool {name} ({next(known, 'it has other buffers')})"
    if getattr(pool, "post_capture_active", False):
        return "KV sizing after graph capture (SGLang maps memory itself, in steps of 2 MB)"
    if getattr(pool, "enable_custom_mem_pool", False):
        return "SGLANG_MOONCAKE_CUSTOM_MEM_POOL (SGLang allocates KV tensors itself)"
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in ("nhd", "hnd"):
        return f"the KV layout {layout}"
    if pool.page_size == 1:
        return (
            "page_size=1 (SGLang's allocator without pages uses token slots round-robin, so all "
            "memory is soon mapped); start it with --page-size 16 or more"
        )
    return None


def reason_against_allocator(allocator: Any, known: type) -> str | None:
    """Returns why an allocator is not supported, or None if it is an instance of `known`."""
    if isinstance(allocator, known):
        return None
    return f"the allocator {type(allocator).__name__} (it allocates pages differently)"
