# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow.

The modules, each of which imports only from those before it:

    config, layout          the model's shape and the policy; where everything lies
    events                  the caller's GPU work
    journal, mapper         the undo log; every call of the context for pages
    pages, slots, metrics   the records: kinds and references of pages, slots and batches, counts
    reclaim                 pages taken back: victims, unmapping in the background
    migration, window       pages replaced under their addresses; sliding windows
    runs, growth            how far ahead growth maps; pages given to requests
    sharing                 one page in several slots
    prefix_tree             a radix tree over token ids
    prefix_cache            recorded prefixes and the leases on them
    budget                  memory that several caches share, of one process or of several
    group                   one group of equal layers, of all the above
    integrity               statistics and the check of the records
    manager                 a cache's groups and their lock
    requests, mappings      slots given and taken back; a report of who holds driver mappings
    steps, admission        pages for the next tokens; whether requests fit
    truncation, forks       fewer rows; rows that several requests begin with
    tiers, swap             pages in other memory; rows in host memory
    prefix_alloc            requests that begin with a recorded prefix
    trim, idle              memory given back, by a call or by a thread
    common_pages            pages that every slot has
    waits                   what a call waits for before it takes the lock
    facets                  what KVCache keeps behind memory, slots and internals
    cache                   KVCache and LayeredCache: the lock and the documentation
    distributed             several ranks that agree
"""

from pyvmem.kvcache import waits
from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import GroupView, KVCache, LayeredCache
from pyvmem.kvcache.common_pages import CommonPages
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.integrity import IntegrityError
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.metrics import CacheStats, SlotInfo
from pyvmem.kvcache.prefix_cache import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.prefix_tree import TokenIds
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
