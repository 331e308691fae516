# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow.

The modules, each of which imports only from those before it:

    config, layout          the model's shape and the policy; where everything lies
    events                  the caller's GPU work
    journal, mapper         the undo log; every call of the context for pages, a transaction
    pages, slots, metrics   the books: kinds and references of pages, slots and batches, counts
    reclaim, moves, growth  pages taken back, replaced under their addresses, given to requests
    migration, sharing      promotion and sliding windows; one page in several slots
    prefix_tree             a radix tree over token ids
    prefix_cache            recorded prefixes and the leases on them
    on_ledger               a participant of the ledger that several processes share
    budget                  memory that several caches share
    group                   one group of equal layers, of all the above
    integrity               statistics and the check of the books
    manager                 a cache's groups; steps, forks, admission, tiers: in all or in none
    swap, truncate, idle    preemption, fewer rows, memory given back
    common                  pages that every slot has
    cache                   KVCache: the lock and the documentation
    layered, distributed    layers that differ; several ranks that agree
"""

from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import GroupView, KVCache
from pyvmem.kvcache.config import KVCacheConfig, LayerShape, StateShape, layer_shapes
from pyvmem.kvcache.integrity import IntegrityError
from pyvmem.kvcache.layered import LayeredCache
from pyvmem.kvcache.manager import Moved
from pyvmem.kvcache.metrics import CacheStats, SlotInfo
from pyvmem.kvcache.prefix_cache import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds
from pyvmem.kvcache.swap import SwappedRequest

__all__ = [
    "Budget",
    "BudgetStats",
    "CacheStats",
    "GroupView",
    "IntegrityError",
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
]
