# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow."""

from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import KVCacheConfig, LayerShape, layer_shapes
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
    "SwappedRequest",
    "TokenIds",
    "layer_shapes",
]
