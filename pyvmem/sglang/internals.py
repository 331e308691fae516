# SPDX-License-Identifier: MIT
"""The internals of SGLang that the plug-in uses, how it uses each, and why.

`pyvmem.elastic.engine_source` checks that a version's source defines them; if so, an unknown
version is tried. Public SGLang options are not listed.
"""

from __future__ import annotations

from pyvmem.elastic.engine_source import Symbol

__all__ = ["INTERNALS"]

_POOL, _PAGED = "srt.mem_cache.memory_pool", "srt.mem_cache.allocator.paged"
_BUDGET, _SCHEDULER = "srt.mem_cache.prefill_budget", "srt.managers.scheduler"
_REGISTRY = "srt.plugins.hook_registry"


def _members(module: str, owner: str, use: str, why: str, *names: str) -> list[Symbol]:
    return [Symbol(module, f"{owner}.{name}", use, why) for name in names]


def _allocator(name: str, why: str, *takes: str) -> Symbol:
    return Symbol(_PAGED, f"PagedTokenToKVPoolAllocator.{name}", "overridden", why, takes)


INTERNALS = (
    # ---- enabling the pool
    Symbol(
        *(_REGISTRY, "HookRegistry.register", "called", "registers our hooks"),
        takes=("target", "hook", "hook_type"),
    ),
    Symbol(_REGISTRY, "HookRegistry._patched", "read", "tells which hooks SGLang has applied"),
    Symbol(
        *("srt.server_args", "ServerArgs.check_server_args", "replaced"),
        "checks the configuration before any process starts",
    ),
    Symbol(
        "srt.runtime_context",
        "get_server_args",
        "called",
        "gets the configuration in the scheduler's process",
    ),
    Symbol(
        "srt.utils.common", "add_prometheus_middleware", "replaced", "adds our metrics to /metrics"
    ),
    # ---- KV tensors
    Symbol(
        "srt.runtime_context",
        "attention_backends",
        "called",
        "backends that read KV tensors",
    ),
    Symbol(_POOL, "KVCache.__init__", "replaced", "rejects a pool before it has buffers"),
    Symbol(
        _POOL, "MHATokenToKVPool._create_buffers_normal", "replaced", "places K and V on our memory"
    ),
    Symbol(_POOL, "MLATokenToKVPool._create_buffers", "replaced", "places latent KV on our memory"),
    *_members(
        *(_POOL, "MLATokenToKVPool", "read", "shapes of the tensors to place"),
        *("size", "page_size", "layer_num", "store_dtype", "device", "kv_cache_dim"),
        "enable_custom_mem_pool",
    ),
    *_members(
        *(_POOL, "MHATokenToKVPool", "called", "shapes of the tensors to place"),
        "_kv_buffer_shapes",
    ),
    *_members(
        *(_POOL, "MHATokenToKVPool", "read", "shapes of the tensors to place"),
        *("size", "page_size", "layer_num", "store_dtype", "use_hnd", "device"),
        *("kv_cache_layout", "post_capture_active", "enable_custom_mem_pool"),
    ),
    # ---- pages
    Symbol(
        *("srt.mem_cache.kv_cache_configurator",),
        *("KVCacheConfigurator._build_token_to_kv_pool_allocator", "replaced"),
        "checks that the pool and the allocator are ours",
        takes=("token_to_kv_pool",),
    ),
    _allocator(
        *("__init__", "creates the records of pages"),
        *("size", "page_size", "dtype", "device", "kvcache", "need_sort"),
    ),
    _allocator("alloc", "backs pages before they are taken", "need_size"),
    _allocator(
        *(
            "alloc_extend",
            "backs pages before they are taken",
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
        ),
        *("seq_lens_cpu", "last_loc", "extend_num_tokens", "num_new_pages"),
    ),
    _allocator(
        "alloc_decode", "backs pages before they are taken", "seq_lens", "seq_lens_cpu", "last_loc"
    ),
    _allocator("_release_page_ids", "records freed pages"),
    _allocator("clear", "frees all pages; during sleep, unmaps them"),
    _allocator("available_size", "counts free pages"),
    _allocator("get_all_free_pages", "lists free pages"),
    _allocator(
        *(
            "set_hicache_transfer_done_event",
            "marks pages in use by copies",
            "transfer_key",
            "event",
        )
    ),
    _allocator(
        *("evict_to_free_tokens", "evicts prefixes when memory is short"),
        *("tree_cache", "num_tokens"),
    ),
    _allocator(
        *("check_decode_capacity", "retracts requests if a step has no memory"),
        *("num_tokens", "tree_cache", "requests", "spec_algorithm"),
    ),
    _allocator(
        *("create_prefill_budget", "makes requests wait for memory"),
        *("tree_cache", "num_mixed_decode_tokens"),
    ),
    _allocator(
        *("max_new_tokens_for_memory", "rejects a request that exceeds the limit"),
        *("input_tokens", "max_new_tokens", "token_capacity"),
    ),
    *_members(
        *(_PAGED, "PagedTokenToKVPoolAllocator", "read", "the list that calls take pages from"),
        *("free_pages", "num_pages"),
    ),
    Symbol("srt.utils.common", "get_num_new_pages", "called", "counts the pages that a call takes"),
    # ---- admission
    *_members(
        *(_BUDGET, "PrefillBudget", "overridden", "admits a request only with memory"),
        *("_available_and_evictable", "check_prefill", "can_allocate_prefill"),
        "available_chunk_tokens",
    ),
    *_members(
        *(_BUDGET, "PrefillBudget", "read", "tokens admitted so far"),
        *("total_offset", "current_offset", "remaining_total", "allocator", "tree_cache"),
    ),
    # ---- the scheduler
    Symbol(_SCHEDULER, "Scheduler.ingest_requests", "replaced", "releases memory in each round"),
    Symbol(
        *(_SCHEDULER, "Scheduler._poll_timeout_aborts", "replaced"),
        "sends rank 0's state to all ranks",
    ),
    Symbol(_SCHEDULER, "Scheduler.process_input_requests", "replaced", "receives rank 0's state"),
    Symbol("srt.runtime_context", "get_parallel", "called", "the ranks of the engine"),
    Symbol(
        *(_SCHEDULER, "Scheduler.run_batch", "replaced", "marks a step's launch, for unmapping"),
        takes=("batch",),
    ),
    Symbol(
        "srt.managers.schedule_batch", "ScheduleBatch.prefill_stats", "read", "counts prefix hits"
    ),
    *_members(
        *(
            "srt.managers.scheduler_components.metrics_reporter",
            "PrefillStats",
            "read",
            "counts prefix hits",
        ),
        *("log_hit_tokens", "log_input_tokens"),
        *("reprocessed_log_hit_tokens", "reprocessed_log_input_tokens"),
    ),
    *_members(
        *(_SCHEDULER, "Scheduler", "read", "allocator, prefixes and stream of a step"),
        *("token_to_kv_pool_allocator", "tree_cache", "running_batch"),
        *("enable_overlap", "forward_stream"),
    ),
    Symbol(_SCHEDULER, "Scheduler.waiting_queue", "read", "counts pages that the queue needs"),
    *_members(
        "srt.managers.schedule_batch", "Req", "read", "tokens of a request", "seqlen", "prefix_len"
    ),
    *_members(
        *("srt.mem_cache.unified_radix_cache", "UnifiedRadixCache", "called"),
        "evicts prefixes",
        *("evict_for_alloc", "evictable_size", "supports_prefix_sharing"),
    ),
)
