# SPDX-License-Identifier: MIT
"""A KV cache whose requests are contiguous in virtual memory and mapped page by page."""

from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.report import IntegrityError
from pyvmem.kvcache.stats import CacheStats, SlotInfo

__all__ = ["CacheStats", "IntegrityError", "KVCache", "KVCacheConfig", "SlotInfo"]
