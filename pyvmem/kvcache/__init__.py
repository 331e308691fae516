# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow.

The modules, each of which imports only from those before it:

    config, layout          the model's shape and the policy; where everything lies
    events                  the caller's GPU work
    journal, mapper         the undo log; every call of the context for pages, a transaction
    pages, slots, metrics   the records: kinds and references of pages, slots and batches, counts
    reclaim                 pages taken back: victims, unmapping in the background
    migration               pages replaced under their addresses; promotion, sliding windows
    growth                  pages given to requests
    sharing                 one page in several slots
    prefix_tree             a radix tree over token ids
    prefix_cache            recorded prefixes and the leases on them
    budget                  memory that several caches share, of one process or of several
    group                   one group of equal layers, of all the above
    integrity               statistics and the check of the records
    manager                 a cache's groups, and what is done in all of them or in none: steps,
                            admission, forks, prefixes, tiers, swapping, truncation, trimming
    waits                   what a call waits for before it takes the lock
    cache                   KVCache and LayeredCache: the lock and the documentation
    distributed             several ranks that agree
"""

from pyvmem.kvcache import waits
from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import GroupView, KVCache, LayeredCache
from pyvmem.kvcache.config import (
    EmptyShape,
    KVCacheConfig,
    LayerShape,
    StateShape,
    layer_shapes,
)
from pyvmem.kvcache.integrity import IntegrityError
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.manager import CommonPages, Moved, SwappedRequest
from pyvmem.kvcache.metrics import CacheStats, SlotInfo
from pyvmem.kvcache.prefix_cache import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds

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
