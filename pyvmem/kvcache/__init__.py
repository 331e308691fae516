# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow.

The modules in import order; each imports only from those above it:

    config, layout          the model's shape and the policy; offsets in the reservation
    events                  the caller's GPU work
    journal, mapper         the undo log; all mapping calls to the context
    pages, slots, stats     the records: refcounts of pages, slots and batches, counters
    reclaim                 victims, and unmapping in the background
    migration, window       replacing the pages behind an address; sliding windows
    runs, growth            run lengths; mapping pages for requests
    sharing                 pages mapped in several slots
    prefix_tree             a radix tree over token ids
    prefix_cache            recorded prefixes and the leases on them
    budget                  memory that caches share, in one process or across processes
    group                   one group of layers of the same shape, built from all of the above
    integrity               statistics and consistency checks
    manager                 a cache's groups and their lock
    requests, mappings      allocating and releasing slots; a report of who holds driver mappings
    steps, admission        pages for the next tokens; whether requests would fit
    truncation, forks       dropping rows; requests that start from another's rows
    tiers, swap             moving pages between tiers; swapping rows to host memory
    prefix_alloc            requests that start from a recorded prefix
    trim, idle              returning memory, in a call or from a thread
    common_pages            pages mapped in every slot
    waits                   blockers that a call waits for before it takes the lock
    facets                  KVCache's attributes memory, slots and internals
    cache                   KVCache: the documented interface, which takes the lock
    layered_cache           LayeredCache: layers with different shapes
    distributed             the same cache on several ranks
"""

from pyvmem.kvcache import waits
from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import GroupView, KVCache
from pyvmem.kvcache.common_pages import CommonPages
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.integrity import IntegrityError
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.layered_cache import LayeredCache
from pyvmem.kvcache.prefix_cache import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds
from pyvmem.kvcache.stats import CacheStats, SlotInfo
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.kvcache.tiers import Moved
from pyvmem.models.hf_config import layer_shapes
from pyvmem.models.shapes import EmptyShape, LayerShape, StateShape

__all__ = [
    "Budget",
    "BudgetStats",
    "CacheStats",
    "CommonPages",
    "EmptyShape",
    "GroupView",
    "IntegrityError",
    "Journal",
    "KVCache",
    "KVCacheConfig",
    "LayerShape",
    "LayeredCache",
    "Moved",
    "PrefixEvicted",
    "PrefixMatch",
    "ShareInfo",
    "SlotInfo",
    "StateShape",
    "SwappedRequest",
    "TokenIds",
    "layer_shapes",
    "waits",
]
