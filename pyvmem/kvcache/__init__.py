# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped as they grow."""

from pyvmem.kvcache.budget import Budget, BudgetStats, ShareInfo
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.hf_shapes import layer_shapes
from pyvmem.kvcache.layered import LayeredCache
from pyvmem.kvcache.leases import PrefixEvicted, PrefixMatch
from pyvmem.kvcache.report import IntegrityError
from pyvmem.kvcache.shapes import LayerShape
from pyvmem.kvcache.stats import CacheStats, SlotInfo
from pyvmem.kvcache.swap import SwappedRequest
from pyvmem.kvcache.tiers import Moved
from pyvmem.kvcache.token_ids import TokenIds

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
