# SPDX-License-Identifier: MIT
"""The internals of vLLM that the plug-in uses, how it uses each, and why.

The four uses are those of `pyvmem.elastic.engine_source`, which checks that a version's source
defines the names, so that an unknown version can be tried. `scripts/vllm_internals.py` compares two
releases. Public vLLM options are not listed.
"""

from __future__ import annotations

from pyvmem.elastic.engine_source import Symbol

__all__ = ["INTERNALS"]

_POOL, _MANAGER = "v1.core.block_pool", "v1.core.kv_cache_manager"
_BLOCKS, _SCHEDULER = "v1.core.kv_cache_utils", "v1.core.sched.scheduler"
_WORKER, _SLEEP = "v1.worker.gpu_worker", "device_allocator.sleep_mode_backend"
_TENSORS = "v1.kv_cache_interface"
_CONNECTORS = "distributed.kv_transfer.kv_connector.v1"
_OFFLOAD, _HOST = "v1.kv_offload.base", "v1.kv_offload.cpu.spec"


def _members(module: str, owner: str, use: str, why: str, *names: str) -> list[Symbol]:
    return [Symbol(module, f"{owner}.{name}", use, why) for name in names]


INTERNALS = (
    # ---- how an engine gets the pool
    Symbol(
        *("engine.arg_utils", "EngineArgs.create_engine_config", "replaced"),
        "checks and completes each configuration",
    ),
    Symbol(
        *("v1.executor.abstract", "Executor.__init__", "replaced"),
        "checks configurations made by hand, before any worker starts",
        takes=("vllm_config",),
    ),
    Symbol("config.parallel", "ParallelConfig.worker_cls", "read", "names the worker class"),
    Symbol(
        "config.scheduler", "SchedulerConfig.scheduler_cls", "read", "names the scheduler class"
    ),
    Symbol("config.scheduler", "SchedulerConfig.async_scheduling", "read", "chooses our scheduler"),
    Symbol("config.vllm", "VllmConfig.instance_id", "read", "identifies the executor"),
    Symbol(
        *("config.parallel", "ParallelConfig.data_parallel_index", "read"),
        "each data-parallel rank is a separate engine",
    ),
    Symbol(
        *("v1.executor.abstract", "Executor.collective_rpc", "called"),
        "asks the ranks for their addresses",
        takes=("method", "args"),
    ),
    Symbol(
        *("config.parallel", "ParallelConfig._api_process_rank", "read"),
        "tells API servers from their parent process",
    ),
    Symbol("config.parallel", "ParallelConfig._api_process_count", "read", "number of API servers"),
    Symbol("utils.network_utils", "get_ip", "called", "address of a rank's TCP port"),
    # ---- the worker
    Symbol(
        *(_WORKER, "Worker.init_device", "overridden"),
        "vLLM requires the whole cache's memory to be free",
    ),
    Symbol(
        *(_WORKER, "Worker.determine_available_memory", "overridden"),
        "vLLM counts other engines' memory as its own",
    ),
    *_members(
        *("utils.mem_utils", "MemorySnapshot", "read", "corrected by other engines' memory"),
        *("free_memory", "cuda_memory", "non_torch_memory"),
    ),
    Symbol(
        *(_WORKER, "Worker.initialize_from_config", "overridden"),
        "places KV tensors on our memory",
        takes=("kv_cache_config",),
        calls=("self._maybe_get_memory_pool_context",),
    ),
    Symbol(
        *(_WORKER, "Worker._maybe_get_memory_pool_context", "overridden"),
        "KV tensors and weights are allocated in the context that it returns",
        takes=("tag",),
    ),
    Symbol(_WORKER, "Worker.compile_or_warm_up_model", "overridden", "backs warm-up blocks"),
    Symbol(
        *(_WORKER, "Worker.execute_model", "overridden"),
        "receives a step's number and releases",
        takes=("scheduler_output",),
    ),
    Symbol(_WORKER, "Worker.sample_tokens", "overridden", "end of a step's launch"),
    Symbol(
        *(_WORKER, "Worker.execute_dummy_batch", "overridden"),
        "clears block tables that may name unbacked blocks",
    ),
    Symbol(
        "v1.worker.gpu.block_table", "BlockTables.input_block_tables", "read", "tables to clear"
    ),
    Symbol(
        *(_WORKER, "Worker.sleep", "overridden", "frees KV memory"),
        takes=("level",),
    ),
    Symbol(_WORKER, "Worker.shutdown", "overridden", "frees KV memory"),
    Symbol("v1.worker.cpu_worker", "CPUWorker", "overridden", "base of our worker on a CPU"),
    *_members(
        *(_TENSORS, "KVCacheConfig", "read", "tensors to place"),
        *("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    ),
    *_members(_TENSORS, "KVCacheTensor", "read", "strides of blocks", "size", "block_stride"),
    Symbol(_TENSORS, "KVCacheGroupSpec.layer_names", "read", "layers of a group"),
    Symbol(
        *("model_executor.layers.attention_layer_base", "AttentionLayerBase.get_attn_backend"),
        *("called", "kernels that read KV tensors"),
    ),
    Symbol(
        *("config.compilation", "CompilationConfig.static_forward_context", "read"),
        "the layers by name",
    ),
    # ---- the scheduler
    *_members(
        *(_SCHEDULER, "Scheduler", "overridden"),
        "hold the engine's lock and number steps",
        *("schedule", "update_from_output", "finish_requests", "reset_prefix_cache"),
    ),
    Symbol(
        _SCHEDULER, "Scheduler.set_pause_state", "overridden", "a paused engine keeps no reserve"
    ),
    Symbol(_SCHEDULER, "Scheduler.shutdown", "overridden", "stops the keeper"),
    Symbol(
        "v1.core.sched.async_scheduler",
        "AsyncScheduler",
        "overridden",
        "base of our async scheduler",
    ),
    *_members(
        *(_SCHEDULER, "Scheduler", "read", "bounds the blocks of the next step"),
        *("running", "waiting", "max_num_scheduled_tokens", "max_num_running_reqs"),
        *("get_num_unfinished_requests", "kv_cache_manager"),
    ),
    *_members(
        *(_SCHEDULER, "Scheduler", "called"),
        "publishes evictions between steps",
        "kv_event_publisher",
    ),
    *_members(
        *("v1.core.sched.output", "SchedulerOutput", "read", "tokens and blocks of a step"),
        *("total_num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"),
    ),
    *_members(
        "v1.request", "Request", "read", "tokens of a request", "is_prefill_chunk", "num_tokens"
    ),
    # ---- blocks
    Symbol(
        *(_POOL, "BlockPool.get_new_blocks", "replaced"),
        "backs blocks before they are taken",
        takes=("num_blocks",),
    ),
    Symbol(
        *(_POOL, "BlockPool.get_num_free_blocks", "replaced"),
        "backs blocks when few are free",
    ),
    Symbol(_POOL, "BlockPool.reset_prefix_cache", "replaced", "unbacked blocks are not in use"),
    Symbol(
        *(_POOL, "BlockPool.get_usage", "replaced"),
        "relative to the limit, not to the address space",
    ),
    Symbol(
        *(_POOL, "BlockPool.free_blocks", "replaced"),
        "records idle blocks",
        takes=("ordered_blocks",),
    ),
    Symbol(
        *(_POOL, "BlockPool.evict_blocks", "replaced"),
        "records blocks without prefixes",
        takes=("block_ids",),
    ),
    Symbol(_POOL, "BlockPool.move_block_hashes", "called", "moves a prefix to another block"),
    Symbol(
        *(_POOL, "BlockPool._maybe_evict_cached_block", "called"),
        "evicts a prefix",
        takes=("block",),
    ),
    *_members(
        *(_POOL, "BlockPool", "read", "blocks by id, and the free queue"),
        *("blocks", "num_gpu_blocks", "free_block_queue"),
    ),
    *_members(
        *(_BLOCKS, "FreeKVCacheBlockQueue", "called"),
        "holds only backed blocks",
        *("popleft", "remove", "prepend_n"),
    ),
    *_members(
        *(_BLOCKS, "FreeKVCacheBlockQueue", "read", "iterates over free blocks"),
        *("num_free_blocks", "fake_free_list_head", "fake_free_list_tail"),
    ),
    *_members(
        *(_BLOCKS, "KVCacheBlock", "read", "tells used, cached and idle blocks apart"),
        *("block_id", "ref_cnt", "is_null", "block_hash", "next_free_block"),
    ),
    Symbol(
        *(_MANAGER, "KVCacheManager.get_computed_blocks", "replaced"),
        "vLLM calls it before admitting a request",
    ),
    Symbol(
        *(_MANAGER, "KVCacheManager.allocate_slots", "replaced"),
        "identifies the request that takes blocks",
        takes=("request", "num_new_computed_tokens"),
        calls=("self.coordinator.get_num_blocks_to_allocate",),
    ),
    Symbol(
        *("v1.core.kv_cache_coordinator", "KVCacheCoordinator.get_num_blocks_to_allocate"),
        "replaced",
        "counts the blocks of a request",
        takes=("request_id", "num_tokens", "new_computed_blocks"),
    ),
    Symbol(
        *("v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers", "read"),
        "a manager for each group of layers",
    ),
    Symbol(
        *("v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.block_size", "read"),
        "tokens of a block over all ranks of context parallelism",
    ),
    Symbol(_MANAGER, "KVCacheManager.take_events", "called", "events for the publisher"),
    # ---- offloading
    *_members(
        *("config.kv_transfer", "KVTransferConfig", "read", "chooses the connector"),
        *("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config"),
    ),
    *_members(
        *(
            f"{_CONNECTORS}.offloading_connector",
            "OffloadingConnector",
            "read",
            "its scheduler and worker parts",
        ),
        *("connector_scheduler", "connector_worker"),
    ),
    Symbol(
        *(f"{_CONNECTORS}.offloading.scheduler", "OffloadingConnectorScheduler.manager"),
        *("read", "its methods are wrapped"),
    ),
    Symbol(
        *(f"{_CONNECTORS}.offloading.worker", "OffloadingConnectorWorker.worker", "read"),
        "receives the stores to drop",
    ),
    *_members(
        *(f"{_CONNECTORS}.offloading.common", "OffloadingConnectorMetadata", "read"),
        "blocks that a step stores and loads",
        *("load_jobs", "store_jobs"),
    ),
    Symbol(
        *(f"{_CONNECTORS}.offloading.common", "OffloadingWorkerMetadata.completed_jobs", "read"),
        "finished transfers",
    ),
    Symbol(
        *("distributed.kv_transfer.kv_transfer_state", "ensure_kv_transfer_shutdown", "called"),
        "removes the connector of a failed start",
    ),
    Symbol(
        "v1.outputs", "ModelRunnerOutput.kv_connector_output", "read", "carries finished transfers"
    ),
    Symbol(_SCHEDULER, "Scheduler.connector", "read", "its scheduler part"),
    Symbol(
        _SCHEDULER, "Scheduler.reset_connector_cache", "overridden", "clears our records of stores"
    ),
    Symbol(_OFFLOAD, "OffloadingManager.prepare_store", "replaced", "records a store's keys"),
    Symbol(
        *(
            _OFFLOAD,
            "OffloadingManager.complete_store",
            "replaced",
            "reports dropped stores as failed",
        ),
        takes=("keys", "req_context", "success"),
    ),
    Symbol(_OFFLOAD, "OffloadingManager.get_stats", "replaced", "adds our metrics"),
    Symbol(
        *(_OFFLOAD, "OffloadingWorker.submit_store", "overridden", "our copies"),
        takes=("job_id", "src_spec", "dst_spec"),
    ),
    Symbol(
        *(_OFFLOAD, "OffloadingWorker.submit_load", "overridden", "our copies"),
        takes=("job_id", "src_spec", "dst_spec"),
    ),
    *_members(
        *(_OFFLOAD, "OffloadingWorker", "overridden", "our copies"),
        *("get_finished", "wait", "shutdown"),
    ),
    *_members(
        *(_OFFLOAD, "GPULoadStoreSpec", "read", "blocks to copy"), *("group_sizes", "block_indices")
    ),
    Symbol(_OFFLOAD, "BlockIDsLoadStoreSpec.block_ids", "read", "blocks and chunks to copy"),
    *_members(
        *(_OFFLOAD, "CanonicalKVCaches", "read", "strides of blocks"),
        *("tensors", "group_data_refs"),
    ),
    *_members(
        *(_HOST, "CPUOffloadingSpec", "overridden", "combines vLLM's manager with our copies"),
        *("build_metric_definitions", "get_worker"),
    ),
    *_members(
        *(_HOST, "CPUOffloadingSpec", "read", "size of host memory"),
        *("blocks_per_chunk", "kv_bytes_per_chunk", "cpu_page_size_per_worker"),
    ),
    Symbol(
        *("v1.kv_offload.tiering.spec", "TieringOffloadingSpec.get_manager", "overridden"),
        "unlinks the file of host memory",
    ),
    Symbol(
        *("v1.kv_offload.tiering.manager", "TieringOffloadingManager.primary_tier", "read"),
        "counts chunks that lower tiers write",
    ),
    *_members(
        *("v1.kv_offload.tiering.manager", "CPUPrimaryTierOffloadingManager", "replaced"),
        "counts chunks that lower tiers write",
        *("prepare_write", "complete_write"),
    ),
    *_members(
        *("v1.kv_offload.cpu.shared_offload_region", "SharedOffloadRegion", "read"),
        "host memory that ranks share",
        *("mmap_obj", "mmap_path", "cleanup"),
    ),
    # ---- sleep
    Symbol(
        *(_SLEEP, "SleepModeBackendFactory.register_backend", "called"),
        "registers our sleep back end",
        takes=("name", "module_path", "class_name"),
    ),
    Symbol(_SLEEP, "SleepModeBackend.suspend", "overridden", "frees the weights", takes=("level",)),
    Symbol(_SLEEP, "SleepModeBackend.resume", "overridden", "maps the weights", takes=("tags",)),
)
