# SPDX-License-Identifier: MIT
"""Names all that the pool uses of SGLang beside its options, how it uses that, and why.

`pyvmem.elastic.hooks` looks for them in SGLang's source, so that an unknown version can be tried.
"""

from __future__ import annotations

from pyvmem.elastic.hooks import Hook

__all__ = ["HOOKS"]

_POOL, _PAGED = "srt.mem_cache.memory_pool", "srt.mem_cache.allocator.paged"
_BUDGET, _SCHEDULER = "srt.mem_cache.prefill_budget", "srt.managers.scheduler"
_REGISTRY = "srt.plugins.hook_registry"


def _members(module: str, owner: str, use: str, why: str, *names: str) -> list[Hook]:
    return [Hook(module, f"{owner}.{name}", use, why) for name in names]


def _allocator(name: str, why: str, *takes: str) -> Hook:
    return Hook(_PAGED, f"PagedTokenToKVPoolAllocator.{name}", "overridden", why, takes)


HOOKS = (
    # ---- how an engine gets the pool
    Hook(
        *(_REGISTRY, "HookRegistry.register", "called", "puts the hooks in place"),
        takes=("target", "hook", "hook_type"),
    ),
    Hook(_REGISTRY, "HookRegistry._patched", "read", "which of them are"),
    Hook(
        *("srt.server_args", "ServerArgs.check_server_args", "replaced"),
        "a configuration passes here, before any process starts",
    ),
    Hook("srt.runtime_context", "get_server_args", "called", "the same in the scheduler"),
    Hook("srt.utils.common", "add_prometheus_middleware", "replaced", "the numbers on /metrics"),
    # ---- KV tensors
    Hook("srt.runtime_context", "attention_backends", "called", "whose kernels read them"),
    Hook(_POOL, "KVCache.__init__", "replaced", "a pool is refused before it has buffers"),
    Hook(_POOL, "MHATokenToKVPool._create_buffers_normal", "replaced", "KV tensors are placed"),
    Hook(_POOL, "MLATokenToKVPool._create_buffers", "replaced", "the same, of latent attention"),
    *_members(
        *(_POOL, "MLATokenToKVPool", "read", "which tensors there are to place"),
        *("size", "page_size", "layer_num", "store_dtype", "device", "kv_cache_dim"),
        "enable_custom_mem_pool",
    ),
    *_members(
        *(_POOL, "MHATokenToKVPool", "called", "the same"),
        "_kv_buffer_shapes",
    ),
    *_members(
        *(_POOL, "MHATokenToKVPool", "read", "the same"),
        *("size", "page_size", "layer_num", "store_dtype", "use_hnd", "device"),
        *("kv_cache_layout", "post_capture_active", "enable_custom_mem_pool"),
    ),
    # ---- pages
    Hook(
        *("srt.mem_cache.kv_cache_configurator",),
        *("KVCacheConfigurator._build_token_to_kv_pool_allocator", "replaced"),
        "the pool and the allocator are ours",
        takes=("token_to_kv_pool",),
    ),
    _allocator(
        *("__init__", "the pages' records begin"),
        *("size", "page_size", "dtype", "device", "kvcache", "need_sort"),
    ),
    _allocator("alloc", "pages have memory before they are taken", "need_size"),
    _allocator(
        *("alloc_extend", "the same", "prefix_lens", "prefix_lens_cpu", "seq_lens"),
        *("seq_lens_cpu", "last_loc", "extend_num_tokens", "num_new_pages"),
    ),
    _allocator("alloc_decode", "the same", "seq_lens", "seq_lens_cpu", "last_loc"),
    _allocator("_release_page_ids", "pages are free"),
    _allocator("clear", "all pages are free; in sleep, their memory goes back"),
    _allocator("available_size", "free pages are counted here"),
    _allocator("get_all_free_pages", "the same, by number"),
    _allocator(
        *("set_hicache_transfer_done_event", "copies that need pages", "transfer_key", "event")
    ),
    _allocator(
        *("evict_to_free_tokens", "prefixes give way where memory lacks"),
        *("tree_cache", "num_tokens"),
    ),
    _allocator(
        *("check_decode_capacity", "a step that gets no memory retracts requests"),
        *("num_tokens", "tree_cache", "requests", "spec_algorithm"),
    ),
    _allocator(
        *("create_prefill_budget", "requests that get no memory wait"),
        *("tree_cache", "num_mixed_decode_tokens"),
    ),
    _allocator(
        *("max_new_tokens_for_memory", "a request that the limit never allows is refused"),
        *("input_tokens", "max_new_tokens", "token_capacity"),
    ),
    *_members(
        *(_PAGED, "PagedTokenToKVPoolAllocator", "read", "what its calls take from"),
        *("free_pages", "num_pages"),
    ),
    Hook("srt.utils.common", "get_num_new_pages", "called", "how many pages a call takes"),
    # ---- admission
    *_members(
        *(_BUDGET, "PrefillBudget", "overridden", "requests are admitted by what gets memory"),
        *("_available_and_evictable", "check_prefill", "can_allocate_prefill"),
        "available_chunk_tokens",
    ),
    *_members(
        *(_BUDGET, "PrefillBudget", "read", "what was admitted before"),
        *("total_offset", "current_offset", "remaining_total", "allocator", "tree_cache"),
    ),
    # ---- the scheduler
    Hook(_SCHEDULER, "Scheduler.ingest_requests", "replaced", "memory is given back here"),
    Hook(
        *(_SCHEDULER, "Scheduler._poll_timeout_aborts", "replaced"),
        "rank 0 tells the others here what all decide by",
    ),
    Hook(_SCHEDULER, "Scheduler.process_input_requests", "replaced", "they hear it here"),
    Hook("srt.runtime_context", "get_parallel", "called", "the ranks of the engine"),
    Hook(
        *(_SCHEDULER, "Scheduler.run_batch", "replaced", "a step's end, for what is unmapped"),
        takes=("batch",),
    ),
    Hook("srt.managers.schedule_batch", "ScheduleBatch.prefill_stats", "read", "hits of prefixes"),
    *_members(
        *("srt.managers.scheduler_components.metrics_reporter", "PrefillStats", "read", "the same"),
        *("log_hit_tokens", "log_input_tokens"),
        *("reprocessed_log_hit_tokens", "reprocessed_log_input_tokens"),
    ),
    *_members(
        *(_SCHEDULER, "Scheduler", "read", "what the step runs on"),
        *("token_to_kv_pool_allocator", "tree_cache", "running_batch"),
        *("enable_overlap", "forward_stream"),
    ),
    Hook(_SCHEDULER, "Scheduler.waiting_queue", "read", "what the queue lacks is asked for"),
    *_members("srt.managers.schedule_batch", "Req", "read", "the same", "seqlen", "prefix_len"),
    *_members(
        *("srt.mem_cache.unified_radix_cache", "UnifiedRadixCache", "called"),
        "prefixes are forgotten",
        *("evict_for_alloc", "evictable_size", "supports_prefix_sharing"),
    ),
)
