# SPDX-License-Identifier: MIT
"""The table of features, with their requirements.

The cache consults it to decide which calls to reject. libvmem rejects context calls (create, map,
retain) based on the same capabilities; a test checks every row against the actual behavior.
"""

from __future__ import annotations

from pyvmem.features.feature import Feature
from pyvmem.memory.info import Caps

__all__ = ["FEATURES", "FORK", "HOST_PAGES", "OVERREAD", "PEER_PAGES", "PREFIXES", "SWAP"]

_SHARED = Caps.ALIAS | Caps.READONLY
_KB, _MB = 1 << 10, 1 << 20

PREFIXES = Feature(
    "prefixes",
    "Prefix record and match: radix tree, LRU eviction, multi-turn chat",
    "vTensor",
    "record, match, alloc_prefix, free_reqid(tokens=)",
    caps=_SHARED,
)
FORK = Feature(
    "fork",
    "Fork and copy-on-write: parallel sampling, beam search",
    "PagedAttention",
    "fork, fork_many",
    caps=_SHARED,
)
SWAP = Feature(
    "swap",
    "Preemption by swapping to host memory",
    "PagedAttention",
    "swap_out, swap_in",
)
SPARSE = Feature(
    "sparse",
    "Rows without memory read as zeros",
    "vmem",
    "KVCacheConfig(sparse=True)",
    caps=Caps.SPARSE,
)
OVERREAD = Feature(
    "overread",
    "Safe over-read while memory grows: rows past the end read as zeros",
    "vmem",
    "KVCacheConfig(sparse=True)",
    caps=Caps.SPARSE | Caps.SPARSE_ATOMIC,
)

HOST_PAGES = Feature(
    "host_pages",
    "Tiers: pages moved to host memory and back under an unchanged address",
    "vmem",
    "KVCache.move, KVCacheConfig(host_limit=)",
    caps=Caps.HOST_PAGES,
)
PEER_PAGES = Feature(
    "peer_pages",
    "Tiers: pages moved to a peer GPU and back under an unchanged address",
    "vmem",
    "KVCache.move, KVCacheConfig(peer_limit=)",
    caps=Caps.PEER,
    devices=2,
)

FEATURES: tuple[Feature, ...] = (
    Feature(
        "demand",
        "Pages on demand under contiguous tensors, mapped while the model runs",
        "vAttention",
        "alloc_reqid, step, step_async, free_reqid, KVCacheConfig(ahead_tokens=)",
    ),
    Feature(
        "small_pages",
        "Pages of 64 KB",
        "vAttention",
        "KVCacheConfig(page_size=65536)",
        page_sizes=(64 * _KB,),
    ),
    Feature(
        "reclaim",
        "Deferred reclamation, eager allocation, zero-fill between requests",
        "vAttention",
        "KVCacheConfig(deferred_reclaim=, eager_pages=, zero_fill=)",
    ),
    Feature(
        "parallel",
        "Tensor parallelism: a cache on each rank, in lockstep",
        "vAttention",
        "ParallelKVCache",
        packages=("torch",),
    ),
    Feature(
        "aliases",
        "Create, Extend, Release: reference-counted pages at several addresses",
        "vTensor",
        "Context.create, Context.retain, Reservation.map, Pages.release",
        caps=Caps.ALIAS,
    ),
    PREFIXES,
    Feature(
        "trim",
        "Idle memory returned to the device",
        "vTensor",
        "trim, KVCacheConfig(idle_seconds=)",
    ),
    FORK,
    SWAP,
    Feature(
        "recompute",
        "Preemption by recomputation, admission by free pages",
        "PagedAttention",
        "free_reqid, can_admit",
    ),
    Feature(
        "layouts",
        "Layouts: layers in a tensor x page size, and an adviser",
        "vmem",
        "KVCacheConfig(group_size=, page_size=), vmem layouts",
    ),
    Feature(
        "large_entries",
        "Page-table entries of 2 MB over pages of 64 KB, split and joined in place",
        "vmem",
        "KVCache, promote; Context(large_entries=True)",
        page_sizes=(64 * _KB, 2 * _MB),
    ),
    HOST_PAGES,
    PEER_PAGES,
    Feature(
        "readonly",
        "Read-only pages: a write to a shared page faults",
        "vmem",
        "Reservation.map(readonly=True)",
        caps=Caps.READONLY,
    ),
    OVERREAD,
    Feature(
        "budget",
        "Several caches in one budget, with a floor and a ceiling each",
        "vmem",
        "Budget, KVCache(budget=)",
    ),
    Feature(
        "uneven",
        "Layers that differ in heads and head size, MLA's latent",
        "vmem",
        "LayeredCache, KVCacheConfig(tensors_per_layer=1)",
    ),
    Feature(
        "window",
        "Sliding windows: pages before the window are unmapped",
        "vmem",
        "KVCacheConfig(window=)",
    ),
)
"""All features, in table order."""
