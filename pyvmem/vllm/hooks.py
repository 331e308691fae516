# SPDX-License-Identifier: MIT
"""Everything of vLLM that the pool uses besides options: names, how they are used, and why.

    replaced     a function of vLLM, or a method of a vLLM object, is replaced by ours
    overridden   by a method of our worker or scheduler, which calls vLLM's
    called       by the pool
    read         an attribute

`pyvmem.elastic.hooks` looks for them in vLLM's source, so that an unknown version can be tried;
`scripts/vllm_hooks.py` compares a release with the previous release.
"""

from __future__ import annotations

from pyvmem.elastic.hooks import Hook

__all__ = ["HOOKS"]

_POOL, _MANAGER = "v1.core.block_pool", "v1.core.kv_cache_manager"
_BLOCKS, _SCHEDULER = "v1.core.kv_cache_utils", "v1.core.sched.scheduler"
_WORKER, _SLEEP = "v1.worker.gpu_worker", "device_allocator.sleep_mode_backend"
_TENSORS = "v1.kv_cache_interface"
_CONNECTORS = "distributed.kv_transfer.kv_connector.v1"
_OFFLOAD, _HOST = "v1.kv_offload.base", "v1.kv_offload.cpu.spec"


def _members(module: str, owner: str, use: str, why: str, *names: str) -> list[Hook]:
    return [Hook(module, f"{owner}.{name}", use, why) for name in names]


HOOKS = (
    # ---- how an engine gets the pool
    Hook(
        *("engine.arg_utils", "EngineArgs.create_engine_config", "replaced"),
        "no option says that a configuration is to be checked and completed",
    ),
    Hook(
        *("v1.executor.abstract", "Executor.__init__", "replaced"),
        "a configuration made by hand passes here, before any worker starts",
        takes=("vllm_config",),
    ),
    Hook("config.parallel", "ParallelConfig.worker_cls", "read", "the option of our worker"),
    Hook("config.scheduler", "SchedulerConfig.scheduler_cls", "read", "that of our scheduler"),
    Hook("config.scheduler", "SchedulerConfig.async_scheduling", "read", "which of the two"),
    Hook("config.vllm", "VllmConfig.instance_id", "read", "by which the executor is found"),
    Hook(
        *("config.parallel", "ParallelConfig.data_parallel_index", "read"),
        "each rank of data parallelism is an engine of its own",
    ),
    Hook(
        *("v1.executor.abstract", "Executor.collective_rpc", "called"),
        "the scheduler asks its ranks where they are",
        takes=("method", "args"),
    ),
    Hook(
        *("config.parallel", "ParallelConfig._api_process_rank", "read"),
        "one of several API servers, or the process that starts them",
    ),
    Hook("config.parallel", "ParallelConfig._api_process_count", "read", "how many there are"),
    Hook("utils.network_utils", "get_ip", "called", "where a rank of another machine listens"),
    # ---- the worker
    Hook(
        *(_WORKER, "Worker.init_device", "overridden"),
        "it demands that memory of the whole cache's size be free",
    ),
    Hook(
        *(_WORKER, "Worker.determine_available_memory", "overridden"),
        "it takes for its own use what other engines do",
    ),
    *_members(
        *("utils.mem_utils", "MemorySnapshot", "read", "the same"),
        *("free_memory", "cuda_memory", "non_torch_memory"),
    ),
    Hook(
        *(_WORKER, "Worker.initialize_from_config", "overridden"),
        "KV tensors are placed",
        takes=("kv_cache_config",),
        calls=("self._maybe_get_memory_pool_context",),
    ),
    Hook(
        *(_WORKER, "Worker._maybe_get_memory_pool_context", "overridden"),
        "KV tensors and weights are allocated in the context that it returns",
        takes=("tag",),
    ),
    Hook(_WORKER, "Worker.compile_or_warm_up_model", "overridden", "its blocks are lent memory"),
    Hook(
        *(_WORKER, "Worker.execute_model", "overridden"),
        "a step brings its number and releases",
        takes=("scheduler_output",),
    ),
    Hook(_WORKER, "Worker.sample_tokens", "overridden", "the end of a step's launch"),
    Hook(
        *(_WORKER, "Worker.execute_dummy_batch", "overridden"),
        "a step of no request names no block that may have no memory",
    ),
    Hook("v1.worker.gpu.block_table", "BlockTables.input_block_tables", "read", "its blocks"),
    Hook(
        *(_WORKER, "Worker.sleep", "overridden", "memory goes back, whoever calls it"),
        takes=("level",),
    ),
    Hook(_WORKER, "Worker.shutdown", "overridden", "memory goes back"),
    Hook("v1.worker.cpu_worker", "CPUWorker", "overridden", "the same on a CPU"),
    *_members(
        *(_TENSORS, "KVCacheConfig", "read", "which tensors there are to place"),
        *("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    ),
    *_members(_TENSORS, "KVCacheTensor", "read", "how blocks lie in it", "size", "block_stride"),
    Hook(_TENSORS, "KVCacheGroupSpec.layer_names", "read", "which layers have them"),
    Hook(
        *("model_executor.layers.attention_layer_base", "AttentionLayerBase.get_attn_backend"),
        *("called", "whose kernels read them"),
    ),
    Hook(
        *("config.compilation", "CompilationConfig.static_forward_context", "read"),
        "the layers by name",
    ),
    # ---- the scheduler
    *_members(
        *(_SCHEDULER, "Scheduler", "overridden"),
        "to hold the keeper's lock, number steps, and see what they take",
        *("schedule", "update_from_output", "finish_requests", "reset_prefix_cache"),
    ),
    Hook(_SCHEDULER, "Scheduler.set_pause_state", "overridden", "a paused engine keeps no reserve"),
    Hook(_SCHEDULER, "Scheduler.shutdown", "overridden", "the keeper ends"),
    Hook("v1.core.sched.async_scheduler", "AsyncScheduler", "overridden", "the same, ahead"),
    *_members(
        *(_SCHEDULER, "Scheduler", "read", "what the next step may take"),
        *("running", "waiting", "max_num_scheduled_tokens", "max_num_running_reqs"),
        *("get_num_unfinished_requests", "kv_cache_manager"),
    ),
    *_members(
        *(_SCHEDULER, "Scheduler", "called"),
        "prefixes that are evicted while no step comes are published",
        "kv_event_publisher",
    ),
    *_members(
        *("v1.core.sched.output", "SchedulerOutput", "read", "what a step computes"),
        *("total_num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"),
    ),
    *_members("v1.request", "Request", "read", "what it takes", "is_prefill_chunk", "num_tokens"),
    # ---- blocks
    Hook(
        *(_POOL, "BlockPool.get_new_blocks", "replaced"),
        "blocks have memory before they are taken",
        takes=("num_blocks",),
    ),
    Hook(
        *(_POOL, "BlockPool.get_num_free_blocks", "replaced"),
        "in a step with few free blocks the answer is ours",
    ),
    Hook(_POOL, "BlockPool.reset_prefix_cache", "replaced", "blocks without memory are not in use"),
    Hook(
        *(_POOL, "BlockPool.get_usage", "replaced"),
        "a part of what can be had, not of what can be addressed",
    ),
    Hook(
        *(_POOL, "BlockPool.free_blocks", "replaced"),
        "which blocks become idle",
        takes=("ordered_blocks",),
    ),
    Hook(
        *(_POOL, "BlockPool.evict_blocks", "replaced"),
        "which blocks lose their prefixes",
        takes=("block_ids",),
    ),
    Hook(_POOL, "BlockPool.move_block_hashes", "called", "a prefix moves to another block"),
    Hook(
        *(_POOL, "BlockPool._maybe_evict_cached_block", "called"),
        "a prefix is given up",
        takes=("block",),
    ),
    *_members(
        *(_POOL, "BlockPool", "read", "blocks by number, and which are free"),
        *("blocks", "num_gpu_blocks", "free_block_queue"),
    ),
    *_members(
        *(_BLOCKS, "FreeKVCacheBlockQueue", "called"),
        "blocks without memory leave it, those that have some return",
        *("popleft", "remove", "prepend_n"),
    ),
    *_members(
        *(_BLOCKS, "FreeKVCacheBlockQueue", "read", "idle blocks are at its head"),
        *("num_free_blocks", "fake_free_list_head", "fake_free_list_tail"),
    ),
    *_members(
        *(_BLOCKS, "KVCacheBlock", "read", "whether a block is used, cached or idle"),
        *("block_id", "ref_cnt", "is_null", "block_hash", "next_free_block"),
    ),
    Hook(
        *(_MANAGER, "KVCacheManager.get_computed_blocks", "replaced"),
        "vLLM is about to admit a request",
    ),
    Hook(
        *(_MANAGER, "KVCacheManager.allocate_slots", "replaced"),
        "which request takes blocks",
        takes=("request", "num_new_computed_tokens"),
        calls=("self.coordinator.get_num_blocks_to_allocate",),
    ),
    Hook(
        *("v1.core.kv_cache_coordinator", "KVCacheCoordinator.get_num_blocks_to_allocate"),
        "replaced",
        "how many it takes",
        takes=("request_id", "num_tokens", "new_computed_blocks"),
    ),
    Hook(
        *("v1.core.kv_cache_coordinator", "KVCacheCoordinator.single_type_managers", "read"),
        "one for each group of layers",
    ),
    Hook(
        *("v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.block_size", "read"),
        "tokens of a block, on all ranks of context parallelism together",
    ),
    Hook(_MANAGER, "KVCacheManager.take_events", "called", "for the publisher"),
    # ---- offloading
    *_members(
        *("config.kv_transfer", "KVTransferConfig", "read", "which connector there is"),
        *("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config"),
    ),
    *_members(
        *(f"{_CONNECTORS}.offloading_connector", "OffloadingConnector", "read", "its two halves"),
        *("connector_scheduler", "connector_worker"),
    ),
    Hook(
        *(f"{_CONNECTORS}.offloading.scheduler", "OffloadingConnectorScheduler.manager"),
        *("read", "what is asked of it"),
    ),
    Hook(
        *(f"{_CONNECTORS}.offloading.worker", "OffloadingConnectorWorker.worker", "read"),
        "it is told which stores were dropped",
    ),
    *_members(
        *(f"{_CONNECTORS}.offloading.common", "OffloadingConnectorMetadata", "read"),
        "whose blocks a step stores and loads",
        *("load_jobs", "store_jobs"),
    ),
    Hook(
        *(f"{_CONNECTORS}.offloading.common", "OffloadingWorkerMetadata.completed_jobs", "read"),
        "which transfers have ended",
    ),
    Hook(
        *("distributed.kv_transfer.kv_transfer_state", "ensure_kv_transfer_shutdown", "called"),
        "a failed start leaves a connector",
    ),
    Hook("v1.outputs", "ModelRunnerOutput.kv_connector_output", "read", "that comes with it"),
    Hook(_SCHEDULER, "Scheduler.connector", "read", "the scheduler's half"),
    Hook(_SCHEDULER, "Scheduler.reset_connector_cache", "overridden", "stores are forgotten"),
    Hook(_OFFLOAD, "OffloadingManager.prepare_store", "replaced", "what a store is known by"),
    Hook(
        *(_OFFLOAD, "OffloadingManager.complete_store", "replaced", "a dropped store has failed"),
        takes=("keys", "req_context", "success"),
    ),
    Hook(_OFFLOAD, "OffloadingManager.get_stats", "replaced", "our numbers beside its own"),
    Hook(
        *(_OFFLOAD, "OffloadingWorker.submit_store", "overridden", "our copies"),
        takes=("job_id", "src_spec", "dst_spec"),
    ),
    Hook(
        *(_OFFLOAD, "OffloadingWorker.submit_load", "overridden", "our copies"),
        takes=("job_id", "src_spec", "dst_spec"),
    ),
    *_members(
        *(_OFFLOAD, "OffloadingWorker", "overridden", "our copies"),
        *("get_finished", "wait", "shutdown"),
    ),
    *_members(
        *(_OFFLOAD, "GPULoadStoreSpec", "read", "which blocks"), *("group_sizes", "block_indices")
    ),
    Hook(_OFFLOAD, "BlockIDsLoadStoreSpec.block_ids", "read", "which blocks, and which chunks"),
    *_members(
        *(_OFFLOAD, "CanonicalKVCaches", "read", "how blocks lie in KV tensors"),
        *("tensors", "group_data_refs"),
    ),
    *_members(
        *(_HOST, "CPUOffloadingSpec", "overridden", "vLLM's manager with our copies"),
        *("build_metric_definitions", "get_worker"),
    ),
    *_members(
        *(_HOST, "CPUOffloadingSpec", "read", "how much host memory there is"),
        *("blocks_per_chunk", "kv_bytes_per_chunk", "cpu_page_size_per_worker"),
    ),
    Hook(
        *("v1.kv_offload.tiering.spec", "TieringOffloadingSpec.get_manager", "overridden"),
        "host memory loses its name",
    ),
    Hook(
        *("v1.kv_offload.tiering.manager", "TieringOffloadingManager.primary_tier", "read"),
        "what lower tiers bring to host memory",
    ),
    *_members(
        *("v1.kv_offload.tiering.manager", "CPUPrimaryTierOffloadingManager", "replaced"),
        "the same",
        *("prepare_write", "complete_write"),
    ),
    *_members(
        *("v1.kv_offload.cpu.shared_offload_region", "SharedOffloadRegion", "read"),
        "host memory that ranks share",
        *("mmap_obj", "mmap_path", "cleanup"),
    ),
    # ---- sleep
    Hook(
        *(_SLEEP, "SleepModeBackendFactory.register_backend", "called"),
        "weights sleep by ours",
        takes=("name", "module_path", "class_name"),
    ),
    Hook(_SLEEP, "SleepModeBackend.suspend", "overridden", "the same", takes=("level",)),
    Hook(_SLEEP, "SleepModeBackend.resume", "overridden", "the same", takes=("tags",)),
)
