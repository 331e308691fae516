# SPDX-License-Identifier: MIT
"""The entry point ``sglang.srt.plugins``: registers the plug-in's hooks.

SGLang calls `register` in every process and applies the hooks afterwards. It only logs errors in
either step, so the first hook that runs checks that all of them were applied. To exit with a single
line of output, we raise `SystemExit`, which SGLang does not catch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from pyvmem.elastic.metrics import publish
from pyvmem.elastic.settings import Settings
from pyvmem.elastic.versions import UnknownVersion
from pyvmem.errors import VMemError
from pyvmem.sglang.ranks import RoundState
from pyvmem.sglang.reasons import (
    CannotWork,
    reason_against_allocator,
    reason_against_pool,
    reasons_against,
)
from pyvmem.sglang.versions import VERSIONS

__all__ = ["SWITCH", "register"]

SWITCH = "VMEM_SGLANG"
_ALLOCATOR = "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_MARGIN = 512 << 20  # bytes of GPU memory kept free for activations beyond their peak so far

log = logging.getLogger("sglang.vmem")

_hooks: dict[str, Any] = {}
_checked: list[bool] = []


def _around(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for hooks around `target`, which get the original as first argument."""

    def keep(hook: Callable[..., Any]) -> Callable[..., Any]:
        def checked(original: Any, *args: Any, **kwargs: Any) -> Any:
            if not _checked:
                _check_hooks()
                _checked.append(True)
            return hook(original, *args, **kwargs)

        _hooks[f"sglang.srt.{target}"] = checked
        return hook

    return keep


def _refuse(text: str) -> NoReturn:
    raise SystemExit(text)


def register() -> None:
    """Registers the hooks; does nothing unless ``VMEM_SGLANG=1``.

    Raises:
        SystemExit: the version is not supported, or a variable is malformed.
    """
    import sglang

    try:
        if not Settings.asked(SWITCH):
            return
        Settings.read()
        VERSIONS.check(sglang.__version__)
    except (UnknownVersion, ValueError) as error:
        _refuse(str(error))
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from pyvmem.sglang.allocator import elastic_allocator

    ours = elastic_allocator(PagedTokenToKVPoolAllocator)
    HookRegistry.register(f"sglang.srt.{_ALLOCATOR}", ours, HookType.REPLACE)
    for target, hook in _hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _check_hooks() -> None:
    """Exits the process unless SGLang has applied every hook."""
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.plugins.hook_registry import HookRegistry

    lacks = {*_hooks, f"sglang.srt.{_ALLOCATOR}"} - HookRegistry._patched
    if paged.PagedTokenToKVPoolAllocator.__name__ != "ElasticTokenToKVPoolAllocator":
        lacks.add(f"sglang.srt.{_ALLOCATOR}")
    if lacks:
        _refuse(f"VMEM_SGLANG=1: SGLang did not apply the hooks {', '.join(sorted(lacks))}")


# ---- hooks ---------------------------------------------------------------------------------------


@_around("server_args.ServerArgs.check_server_args")
def _configure(original: Any, arguments: Any) -> Any:
    """Rejects arguments that the pool does not support, in the process that starts an engine.

    Raises:
        CannotWork: names all such arguments.
    """
    import sglang

    found = original(arguments)
    VERSIONS.check(sglang.__version__, warn=True)
    if reasons := list(reasons_against(arguments)):
        raise CannotWork(*reasons)
    return found


@_around("utils.common.add_prometheus_middleware")
def _show(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds the ledger's metrics for this engine's ranks and replicas to ``/metrics``."""
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if run := os.environ.get("SGLANG_RUN_ID", ""):
        publish(run, range(arguments.dp_size * arguments.tp_size))
    return original(*args, **kwargs)


@_around("mem_cache.memory_pool.KVCache.__init__")
def _begin_pool(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
    """Rejects an unsupported KV pool before it creates buffers."""
    found = original(pool, *args, **kwargs)
    if (why := reason_against_pool(pool)) is not None:
        _refuse(str(CannotWork(why)))
    return found


@_around("mem_cache.memory_pool.MLATokenToKVPool._create_buffers")
@_around("mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal")
def _make_buffers(original: Any, pool: Any) -> None:
    """Creates the KV tensors on the pool's memory instead of SGLang's own memory."""
    from sglang.srt.runtime_context import attention_backends, get_server_args

    from pyvmem.sglang.buffers import place_tensors

    arguments = get_server_args()
    reasons = [
        why for why in (*reasons_against(arguments), reason_against_pool(pool)) if why is not None
    ]
    if reasons:
        _refuse(str(CannotWork(*reasons)))
    try:
        place_tensors(pool, arguments, attention_backends())
    except (ValueError, VMemError) as error:
        _refuse(f"VMEM_SGLANG=1: {error}")


@_around("mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator")
def _make_allocator(original: Any, configurator: Any, **kwargs: Any) -> Any:
    """Creates the allocator; exits the process unless it is ours."""
    from sglang.srt.mem_cache.allocator import paged

    pool = kwargs["token_to_kv_pool"]
    if (why := reason_against_pool(pool)) is not None:
        _refuse(str(CannotWork(why)))
    try:
        allocator = original(configurator, **kwargs)
    except (MemoryError, ValueError, VMemError) as error:
        _refuse(f"VMEM_SGLANG=1: {error}")
    why = reason_against_allocator(allocator, paged.PagedTokenToKVPoolAllocator)
    if why is not None:
        _refuse(str(CannotWork(why)))
    return allocator


@_around("managers.scheduler.Scheduler._poll_timeout_aborts")
def _send_state(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds a `RoundState` to the aborts that rank 0 broadcasts with the requests."""
    found = original(scheduler, *args, **kwargs)
    pool = scheduler.token_to_kv_pool_allocator.pool
    if pool.ranks.alone:
        return found
    state = pool.round_state()
    return found if state is None else [*found, state]


@_around("managers.scheduler.Scheduler.process_input_requests")
def _receive_state(original: Any, scheduler: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the `RoundState` out of the requests and applies it, on all ranks in the same round."""
    for one in requests:
        if isinstance(one, RoundState):
            scheduler.token_to_kv_pool_allocator.pool.receive(one)
    rest = [one for one in requests if not isinstance(one, RoundState)]
    return original(scheduler, rest, *args, **kwargs)


@_around("managers.scheduler.Scheduler.ingest_requests")
def _tick(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `PagePool.tick` on every iteration of the scheduler's loop, even if there is no work."""
    from pyvmem.sglang.allocator import evict

    found = original(scheduler, *args, **kwargs)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    if not allocator.serves:  # by the first iteration, all CUDA graphs have been captured
        allocator.serves = True
        allocator.pool.memory.headroom = _headroom(allocator.device)
        allocator.pool.count_waiting = partial(allocator.count_waiting, scheduler)
    again = allocator.pool.tick(
        lambda: allocator.evictable(tree), lambda pages: evict(tree, pages * allocator.page_size)
    )
    # SGLang sets this flag if a request does not fit, and admits no more until one finishes.
    if again:
        scheduler.running_batch.batch_is_full = False
    return found


def _headroom(device: Any) -> int:
    """Returns how many more bytes torch may need: up to its peak so far, plus a margin."""
    import torch

    if torch.device(device).type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    return max(0, peak - torch.cuda.memory_reserved(device)) + _MARGIN


@_around("managers.scheduler.Scheduler.run_batch")
def _run(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks a step's launch so that pages released later are unmapped after the step."""
    import torch

    allocator = scheduler.token_to_kv_pool_allocator
    stream: Any = None
    if torch.device(allocator.device).type == "cuda":
        stream = torch.cuda.current_stream()
        if scheduler.enable_overlap:
            stream = scheduler.forward_stream
    stats = batch.prefill_stats
    # A decode batch still has the stats of its prefill.
    if stats is not None and batch.forward_mode.is_extend():
        hits = stats.log_hit_tokens - stats.reprocessed_log_hit_tokens
        allocator.pool.hits += hits
        allocator.pool.queries += hits + stats.log_input_tokens - stats.reprocessed_log_input_tokens
    allocator.pool.step_begins(stream)
    found = original(scheduler, batch, *args, **kwargs)
    allocator.pool.step_ends()
    return found
