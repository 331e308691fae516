# SPDX-License-Identifier: MIT
"""The function behind the entry point ``vllm.general_plugins``: makes vLLM use the pool.

vLLM calls `register` in every process, before it creates a configuration. With ``VMEM_VLLM=1`` each
configuration from `EngineArgs.create_engine_config` is checked and given our worker and scheduler,
as ``--worker-cls`` and ``--scheduler-cls`` would. A manually created configuration is checked when
an executor starts with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from pyvmem.elastic.metrics import publish
from pyvmem.elastic.settings import Settings
from pyvmem.vllm import offload
from pyvmem.vllm.rank_discovery import ALONE, EXECUTORS, ranks_of
from pyvmem.vllm.versions import VERSIONS

__all__ = ["CannotWork", "configure", "reasons_against", "register"]

_WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "pyvmem.vllm.worker.ElasticGPUWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": "pyvmem.vllm.worker.ElasticCPUWorker",
}
_SCHEDULERS = {
    True: "pyvmem.vllm.scheduler.ElasticAsyncScheduler",
    False: "pyvmem.vllm.scheduler.ElasticScheduler",
}


_INSTANCE = "_VMEM_INSTANCE"  # environment variable that passes the instance id to the API servers
_SLEEP = ("cumem", "vmem")  # sleep back ends: vLLM's default, and ours


class CannotWork(ValueError):
    """The pool does not support this vLLM configuration."""


def register() -> None:
    """Wraps the functions that vLLM uses to create a configuration and to start an executor.

    Does nothing unless ``VMEM_VLLM=1``. vLLM calls this in each of its processes. The wrappers
    read the variable again for each configuration.

    Raises:
        UnknownVersion: this version of vLLM is too old or lacks a symbol that the pool uses.
        ValueError: a variable VMEM_* is malformed.
    """
    if not Settings.asked("VMEM_VLLM"):
        return
    Settings.read()
    import vllm

    VERSIONS.check(vllm.__version__)
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor

    with contextlib.suppress(ValueError):  # already registered
        SleepModeBackendFactory.register_backend("vmem", "pyvmem.vllm.sleep", "VMemSleepBackend")
    _replace(EngineArgs, "create_engine_config", _configure_created)
    _replace(Executor, "__init__", _configure_at_start)


def _replace(owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Replaces a method with `instead`, whose first argument is the original method. Idempotent."""
    original = getattr(owner, name)
    if getattr(original, "_vmem", False):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    replaced._vmem = True  # type: ignore[attr-defined]
    setattr(owner, name, replaced)


def _configure_created(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    config = create(*args, **kwargs)
    _configure_if_asked(config)
    return config


def _configure_at_start(start: Callable[..., Any], executor: Any, vllm_config: Any) -> Any:
    _configure_if_asked(vllm_config)
    EXECUTORS[vllm_config.instance_id] = executor  # the scheduler, created later, looks it up
    return start(executor, vllm_config)


def _configure_if_asked(config: Any) -> None:
    if Settings.asked("VMEM_VLLM"):
        import vllm

        VERSIONS.check(vllm.__version__, warn=True)
        configure(config)


def configure(config: Any) -> None:
    """Sets our worker, scheduler, offloading spec and sleep back end in a `VllmConfig`. Idempotent.

    Raises:
        CannotWork: the configuration rules out the pool; the message lists the options that do.
    """
    against = list(reasons_against(config))
    if against:
        raise CannotWork("VMEM_VLLM=1 does not work with " + "; ".join(against))
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if scheduler.scheduler_cls in _SCHEDULERS.values():
        return
    offload.select(config)
    parallel.worker_cls = _WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    scheduler.scheduler_cls = _SCHEDULERS[bool(scheduler.async_scheduling)]
    if getattr(config.model_config, "enable_sleep_mode", False):
        config.model_config.sleep_mode_backend = "vmem"
    config.instance_id = _instance_of(config)
    index = getattr(parallel, "data_parallel_index", 0)
    size = getattr(parallel, "data_parallel_size", 1)
    publish(config.instance_id, range(max(size, index + 1)))


def _instance_of(config: Any) -> str:
    """Returns a unique instance id, since vLLM's five-digit ids may collide between engines.

    Each API server recreates the configuration and gets the id from its parent process through an
    environment variable.
    """
    rank = getattr(config.parallel_config, "_api_process_rank", 0)
    count = getattr(config.parallel_config, "_api_process_count", 1)
    if rank >= 0 and count > 1 and _INSTANCE in os.environ:
        return os.environ[_INSTANCE]
    found = f"{config.instance_id}-{secrets.token_hex(8)}"
    if rank < 0:
        os.environ[_INSTANCE] = found
    return found


def reasons_against(config: Any) -> Iterator[str]:
    """Yields each option of a `VllmConfig` that rules out the pool, with the reason."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.worker_cls not in (*_WORKERS, *_WORKERS.values()):
        yield f"worker_cls={parallel.worker_cls} (the pool has its own worker)"
    if config.scheduler_config.scheduler_cls not in (None, *_SCHEDULERS.values()):
        yield "scheduler_cls (the pool has its own scheduler)"
    yield from offload.reasons_against(config)
    if getattr(parallel, "enable_dbo", False):
        yield "enable_dbo (it launches work on several streams at once)"
    parts = getattr(parallel, "prefill_context_parallel_size", 1)
    if parts > 1:
        yield (
            f"prefill_context_parallel_size={parts} (vLLM supports it only on several GPUs, "
            "with MLA models; the pool was not tested with it)"
        )
    ranks = ranks_of(parallel)
    if parallel.distributed_executor_backend == "external_launcher" and ranks > 1:
        yield f"distributed_executor_backend=external_launcher with {ranks} ranks ({ALONE})"
    if getattr(model, "enable_sleep_mode", False):
        backend = getattr(model, "sleep_mode_backend", "none")
        if backend not in _SLEEP:
            yield f"sleep_mode_backend={backend} (the pool has its own, vmem)"
