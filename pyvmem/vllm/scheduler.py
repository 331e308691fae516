# SPDX-License-Identifier: MIT
"""The scheduler: vLLM's own, over blocks that may have no memory.

vLLM's pool works as usual, but its free queue holds only backed free blocks. Before vLLM compares a
request's demand with the free blocks, `Demand` backs as many as it can; so a shortage of memory is
vLLM's own "cannot allocate", and vLLM waits or preempts as usual.

`ElasticEngine.lock` is held whenever vLLM's scheduler runs; the engine's keeper takes it, too.
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
    """The attribute ``vmem`` of a `SchedulerOutput`, sent to the workers.

    Attributes:
        step: its number; 1 is the first.
        releases: numbers and runs of pages that this and later steps do not touch.
        dropped: stores to host memory that must not begin.
        moves: blocks to copy before the step, from and to.
    """

    step: int
    releases: list[tuple[int, list[Run]]]
    dropped: list[int]
    moves: list[tuple[int, int]] = field(default_factory=list)


def _let_blocks_be_bare(pool: Any, elastic: ElasticEngine) -> None:
    """Makes vLLM's pool account for blocks that are neither used nor in its free queue.

    Methods of the object are replaced, not its class: Python looks attributes up more slowly in an
    object whose class was changed, and vLLM does so for every request of every step.
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
    """Overrides for a vLLM scheduler, the next class in the MRO."""

    elastic: ElasticEngine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own scheduler, for a model without a KV cache, such as an encoder."""
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
        _let_blocks_be_bare(manager.block_pool, self.elastic)
        self._demand = Demand(self, self.elastic)
        self.elastic.publish_events = self._publish_events
        self.elastic.start()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the output carries the step's number, its releases and its moves."""
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
        """vLLM's; counts the step as over."""
        with self.elastic.lock:
            result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            self.elastic.end_transfers(model_runner_output.kv_connector_output)
            orders = getattr(scheduler_output, "vmem", None)
            if orders is not None:  # else an empty step of vLLM's own
                self.elastic.end_step(orders.step)
            return result

    def _publish_events(self) -> None:
        """Does what vLLM does at the end of a step."""
        events = self.kv_cache_manager.take_events()  # type: ignore[attr-defined]
        if events:
            batch = KVEventBatch(ts=time.time(), events=events)
            self.kv_event_publisher.publish(batch)  # type: ignore[attr-defined]

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        with self.elastic.lock:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; also called before sleep: memory is freed when it returns."""
        with self.elastic.lock:
            result = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self.elastic.give_back_at_rest()
        return result

    def reset_connector_cache(self) -> bool:
        """vLLM's: host memory forgets its prefixes."""
        with self.elastic.lock:
            self.elastic.holds.forget()
            return bool(super().reset_connector_cache())  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any) -> None:
        """vLLM's; a paused engine needs no idle memory."""
        with self.elastic.lock:
            super().set_pause_state(pause_state)  # type: ignore[misc]
            self.elastic.rest(pause_state.name != "UNPAUSED")

    def shutdown(self) -> None:
        """vLLM's, and the end of the keeper."""
        self.elastic.stop()
        super().shutdown()  # type: ignore[misc]


class ElasticScheduler(_Elastic, Scheduler):  # type: ignore[misc]
    """The scheduler without async scheduling."""


class ElasticAsyncScheduler(_Elastic, AsyncScheduler):  # type: ignore[misc]
    """The scheduler with async scheduling."""
