# SPDX-License-Identifier: MIT
"""vLLM's schedulers, working on blocks that may have no memory.

vLLM's block pool works as usual, but its free queue contains only backed blocks. Before vLLM
compares a request's demand with the free blocks, `Demand` backs as many as it can. If memory
runs out, vLLM finds too few free blocks and lets requests wait or preempts them as usual.

`ElasticEngine.lock` is held whenever vLLM's scheduler runs; the keeper thread also takes it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pyvmem.elastic.geometry import Run
from pyvmem.vllm.demand import Demand
from pyvmem.vllm.engine import ElasticEngine

__all__ = ["ElasticAsyncScheduler", "ElasticScheduler", "StepOrders"]


@dataclass
class StepOrders:
    """The pool's commands for one step, sent to the workers as `SchedulerOutput.vmem`.

    Attributes:
        step: number of the step, from 1.
        releases: pages to unmap, as (number, runs) pairs; this and later steps do not access them.
        dropped: ids of stores to host memory that the worker must skip.
        moves: blocks to copy before the step, as (source, destination) pairs.
    """

    step: int
    releases: list[tuple[int, list[Run]]]
    dropped: list[int]
    moves: list[tuple[int, int]] = field(default_factory=list)


def _exclude_unbacked_blocks(pool: Any, elastic: ElasticEngine) -> None:
    """Stops vLLM's block pool from counting unbacked blocks as used.

    The pool counts every block that is not in its free queue. This function replaces methods on the
    object instead of changing its class: attribute lookup is slower on an object whose class was
    changed, and vLLM looks up attributes for every request on every step.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        blocks, pool.num_gpu_blocks = pool.num_gpu_blocks, elastic.backed_blocks()
        try:
            return bool(reset())
        finally:
            pool.num_gpu_blocks = blocks

    pool.reset_prefix_cache = reset_prefix_cache
    pool.get_usage = elastic.usage


class _Elastic:
    """A mixin that runs vLLM's scheduler, the next class in the MRO, under the engine's lock."""

    elastic: ElasticEngine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates vLLM's own scheduler for a model without a KV cache, such as an encoder."""
        kv_cache_config = kwargs["kv_cache_config"] if "kv_cache_config" in kwargs else args[1]
        if kv_cache_config.kv_cache_groups:
            return super().__new__(cls)
        stock: type = cls.__mro__[cls.__mro__.index(_Elastic) + 1]
        return stock(*args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        config, kv_cache_config = self.vllm_config, self.kv_cache_config  # type: ignore[attr-defined]
        connector = self.connector  # type: ignore[attr-defined]
        self.elastic = ElasticEngine(config, kv_cache_config, manager.block_pool, connector)
        _exclude_unbacked_blocks(manager.block_pool, self.elastic)
        self._demand = Demand(self, self.elastic)
        self.elastic.publish_events = self._publish_events
        self.elastic.start()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedules a step and attaches `StepOrders` to its output.

        Overrides `Scheduler.schedule`.
        """
        with self.elastic.lock:
            self._demand.begin()
            self.elastic.holds.scheduling = True
            try:
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            finally:
                self.elastic.holds.scheduling = False
                self._demand.end()
            step, releases = self.elastic.begin_step()
            dropped = self.elastic.order_transfers(output.kv_connector_metadata)
            output.vmem = StepOrders(step, [(one.number, one.runs) for one in releases], dropped)
            if output.total_num_scheduled_tokens:
                output.vmem.moves = self.elastic.moves()
            return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Processes a step's output and records that the step and its transfers are done.

        Overrides `Scheduler.update_from_output`.
        """
        with self.elastic.lock:
            result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            self.elastic.end_transfers(model_runner_output.kv_connector_output)
            orders = getattr(scheduler_output, "vmem", None)
            if orders is not None:  # None: an empty step that vLLM created itself
                self.elastic.end_step(orders.step)
            return result

    def _publish_events(self) -> None:
        """Publishes pending KV-cache events, as vLLM does at the end of a step."""
        events = self.kv_cache_manager.take_events()  # type: ignore[attr-defined]
        if events:
            batch = KVEventBatch(ts=time.time(), events=events)
            self.kv_event_publisher.publish(batch)  # type: ignore[attr-defined]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Finishes requests. Overrides `Scheduler.finish_requests`."""
        with self.elastic.lock:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Drops all prefixes; if the engine is paused, waits until their memory is unmapped.

        vLLM calls this before it sleeps. Overrides `Scheduler.reset_prefix_cache`.
        """
        with self.elastic.lock:
            result = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self.elastic.give_back_when_paused()
        return result

    def reset_connector_cache(self) -> bool:
        """Drops the prefixes in host memory. Overrides `Scheduler.reset_connector_cache`."""
        with self.elastic.lock:
            self.elastic.holds.forget()
            return bool(super().reset_connector_cache())  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any) -> None:
        """Pauses or resumes the engine; a paused engine frees its idle memory.

        Overrides `Scheduler.set_pause_state`.
        """
        with self.elastic.lock:
            super().set_pause_state(pause_state)  # type: ignore[misc]
            self.elastic.set_paused(pause_state.name != "UNPAUSED")

    def shutdown(self) -> None:
        """Stops the keeper, leaves the ledgers and shuts down the scheduler.

        Overrides `Scheduler.shutdown`.
        """
        self.elastic.stop()
        super().shutdown()  # type: ignore[misc]


class ElasticScheduler(_Elastic, Scheduler):  # type: ignore[misc]
    """vLLM's `Scheduler` on elastic memory."""


class ElasticAsyncScheduler(_Elastic, AsyncScheduler):  # type: ignore[misc]
    """vLLM's `AsyncScheduler`, which schedules a step ahead, on elastic memory."""
