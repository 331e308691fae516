# SPDX-License-Identifier: MIT
"""The scheduler and the block pool: vLLM's own, over blocks that may have no memory.

vLLM's pool works as always, but its free queue holds only those free blocks that are backed. Before
vLLM compares what a request needs with what is free, `ElasticEngine.prepare` backs as much of it as
can be had; so a shortage of memory is vLLM's own "cannot allocate", and it waits or preempts as
always.

`ElasticEngine.lock` is held wherever vLLM's scheduler runs; the engine's keeper takes it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pyvmem.vllm.engine import ElasticEngine
from pyvmem.vllm.geometry import Run

__all__ = ["ElasticAsyncScheduler", "ElasticBlockPool", "ElasticScheduler", "StepOrders"]


@dataclass
class StepOrders:
    """What a `SchedulerOutput` carries to the workers as its attribute ``vmem``.

    Attributes:
        step: its number; 1 is the first.
        releases: numbers and runs of pages that no step from this one on touches.
    """

    step: int
    releases: list[tuple[int, list[Run]]]


class ElasticBlockPool(BlockPool):  # type: ignore[misc]
    """vLLM's pool, some of whose blocks are neither used nor in the free queue: they are bare."""

    elastic: ElasticEngine

    def get_usage(self) -> float:
        """The part of the memory within reach that requests hold."""
        return self.elastic.usage()

    def reset_prefix_cache(self) -> bool:
        """vLLM's; blocks without memory count as free."""
        pool: Any = self
        blocks, pool.num_gpu_blocks = pool.num_gpu_blocks, self.elastic.backed_blocks()
        try:
            return bool(super().reset_prefix_cache())
        finally:
            pool.num_gpu_blocks = blocks


class _Elastic:
    """The methods that override those of a vLLM scheduler."""

    elastic: ElasticEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        pool = manager.block_pool
        pool.__class__ = ElasticBlockPool
        config, kv_cache_config = self.vllm_config, self.kv_cache_config  # type: ignore[attr-defined]
        self.elastic = pool.elastic = ElasticEngine(config, kv_cache_config, pool)
        self._wrap(manager)
        self.elastic.start()

    def _wrap(self, manager: Any) -> None:
        """Lets `prepare` see each demand before vLLM compares it with what is free."""
        elastic, coordinator = self.elastic, manager.coordinator
        count_blocks, allocate_slots = (
            coordinator.get_num_blocks_to_allocate,
            manager.allocate_slots,
        )
        watermark, margin = getattr(manager, "watermark_blocks", 0), 0

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            count: int = count_blocks(*args, **kwargs)
            if count or margin:  # otherwise it takes nothing, as in most steps of a request
                # Prefixes that are hit and unused leave the free queue too, and have memory.
                hit = kwargs.get("new_computed_blocks", args[2] if len(args) > 2 else ())
                held = sum(not b.ref_cnt and not b.is_null for group in hit for b in group)
                elastic.prepare(count - held + margin)
            return count

        def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal margin
            running = self.running  # type: ignore[attr-defined]
            if elastic.has_more and running and request.status.name != "RUNNING":
                return None
            margin = watermark + kwargs.get("reserved_blocks", 0)
            try:
                result = allocate_slots(request, *args, **kwargs)
                hits = kwargs.get("num_new_computed_tokens", 0)
                if result is not None and ("new_computed_blocks" in kwargs):
                    elastic.hits += hits
                    elastic.queries += request.num_tokens
                return result
            finally:
                margin = 0

        coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
        manager.allocate_slots = allocate

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the output carries the step's number and releases."""
        with self.elastic.lock:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            step, releases = self.elastic.begin_step(self._has_prompts())
            output.vmem = StepOrders(step, [(one.number, one.runs) for one in releases])
            return output

    def _has_prompts(self) -> bool:
        """Whether a request waits, or has not had all of its prompt computed."""
        return bool(self.waiting) or any(  # type: ignore[attr-defined]
            one.num_computed_tokens < one.num_prompt_tokens
            for one in self.running  # type: ignore[attr-defined]
        )

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; counts the step as over."""
        with self.elastic.lock:
            result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
            self.elastic.end_step(scheduler_output.vmem.step)
            return result

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        with self.elastic.lock:
            return super().finish_requests(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        with self.elastic.lock:
            return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

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
