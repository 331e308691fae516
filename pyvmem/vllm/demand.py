# SPDX-License-Identifier: MIT
"""Backs the blocks that vLLM is about to take before vLLM compares its demand with the free blocks.

In most steps, most requests take no blocks, so a call per request would dominate the pool's cost. A
request that computes its next token takes at most `most` blocks: while that many are free, vLLM's
comparison cannot fail, and blocks are backed when they are taken. So a step starts in one of three
modes:

    unwatched    if `most` blocks are free for every running request
    checked      if fewer are free: we answer vLLM's query for the number of free blocks
    watched      if fewer than `most` are free, a running request has more to compute than its next
                 token, or the last step did not reach a waiting request

A step becomes watched when the check finds fewer than `most` free blocks, or when vLLM looks up a
request's prefix to admit it. In a watched step, each request's demand is computed before vLLM's
comparison.

vLLM admits a request if its whole prompt fits, and then computes it in chunks. The pool also
requires memory for the whole prompt, but backs only the first chunk, since backing a long prompt
would delay the step.

vLLM's functions are replaced once; only the target of the replacement changes from step to step. A
`partial` adds almost no overhead to a call and does not conflict with other tools' patches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from vllm.v1.request import RequestStatus

from pyvmem.vllm.engine import ElasticEngine

__all__ = ["Demand"]


def _redirect(call: partial[Any], to: Callable[..., Any]) -> None:
    """Makes the partial `call` call the function `to`."""
    call.__setstate__((to, (), {}, None))  # type: ignore[attr-defined]


def _copies(spec: Any) -> int:
    """Returns how many extra blocks a request takes in a group whose states are cached as prefixes.

    The state is copied to a block before it changes; checkpoints within a prompt take more blocks.
    """
    if getattr(spec, "mamba_cache_mode", "none") != "align":
        return 0
    return 1 + int(getattr(spec, "num_prefill_checkpoint_blocks", 0))


class Demand:
    """Replaces methods of a scheduler's block pool and KV manager to learn its block demand.

    The caller holds the engine's lock (`ElasticEngine.lock`).

    Args:
        scheduler: vLLM's scheduler.
        elastic: the engine that backs its blocks.

    Attributes:
        most: the most blocks that a request can take in a step that computes its next token.
    """

    def __init__(self, scheduler: Any, elastic: ElasticEngine) -> None:
        self.scheduler = scheduler
        self.elastic = elastic
        self.manager = manager = scheduler.kv_cache_manager
        self.pool = manager.block_pool
        speculative = scheduler.vllm_config.speculative_config
        tokens = 1 + 2 * (speculative.num_speculative_tokens if speculative else 0)
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        # Context parallelism splits a block's tokens across the ranks.
        managers = manager.coordinator.single_type_managers
        self._block_sizes = [one.block_size for one in managers]
        self.most = self._blocks(tokens) + sum(map(_copies, specs))
        config = scheduler.vllm_config
        self._most_blocks = [
            -(-one.max_memory_usage_bytes(config) // one.page_size_bytes) for one in specs
        ]
        elastic.count_waiting, elastic.count_queued = self._count_waiting, self._count_queued
        self._count_blocks = manager.coordinator.get_num_blocks_to_allocate
        self._allocate_slots = manager.allocate_slots
        self._get_num_free_blocks = self.pool.get_num_free_blocks
        self._look_up = manager.get_computed_blocks
        self._get_new_blocks = self.pool.get_new_blocks
        self._margin = 0  # blocks that vLLM keeps free when it admits a request
        self._checking = self._watching = self._looked_up = self._queue_unreached = False
        self._computing: dict[str, Any] = {}  # running requests in prefill, by id
        manager.get_computed_blocks = self._watched_lookup
        self.pool.get_new_blocks = self._hand_out if elastic.holds.on else self._take
        self._counts, self._allocates, self._frees = (
            partial(self._count_blocks),
            partial(self._allocate_slots),
            partial(self._get_num_free_blocks),
        )
        manager.coordinator.get_num_blocks_to_allocate = self._counts
        manager.allocate_slots = self._allocates
        self.pool.get_num_free_blocks = self._frees

    def _blocks(self, tokens: int) -> int:
        return sum(-(-tokens // size) for size in self._block_sizes)

    def _count_waiting(self) -> int:
        scheduler, blocks = self.scheduler, 0
        left, places = scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs
        for request in islice(scheduler.waiting, max(0, places - len(scheduler.running))):
            tokens = min(left, request.num_tokens)
            blocks += self._blocks(tokens)
            left -= tokens
            if not left:
                break
        return blocks

    def _count_queued(self) -> int:
        scheduler = self.scheduler
        places = scheduler.max_num_running_reqs - len(scheduler.running)
        return sum(
            min(-(-(request.num_tokens + 1) // size), most)
            for request in islice(scheduler.waiting, max(0, places))
            for size, most in zip(self._block_sizes, self._most_blocks, strict=True)
        )

    def begin(self) -> None:
        """Chooses a step's mode; called before vLLM schedules the step."""
        self._looked_up = False
        free = self.pool.free_block_queue.num_free_blocks
        if free < self.most or self._computing or self._queue_unreached:
            self._watch()
        elif free < self.most * len(self.scheduler.running):
            self._checking = True
            _redirect(self._frees, self._check)

    def end(self) -> None:
        """Resets the mode; called after vLLM has scheduled the step or failed to."""
        self._checking = False
        _redirect(self._frees, self._get_num_free_blocks)
        if self._watching:
            self._watching = False
            _redirect(self._counts, self._count_blocks)
            _redirect(self._allocates, self._allocate_slots)
        if self._computing:
            self._computing = {
                name: one
                for name, one in self._computing.items()
                if one.status is RequestStatus.RUNNING and one.is_prefill_chunk
            }
        scheduler = self.scheduler
        running = len(scheduler.running)
        if running:
            self.elastic.may_gather = True
        elif request := next(iter(scheduler.waiting), None):
            self.elastic.gather(self._blocks(request.num_tokens + 1))
        self._queue_unreached = (
            not self._looked_up
            and running < scheduler.max_num_running_reqs
            and scheduler.get_num_unfinished_requests() > running
        )

    def _watch(self) -> None:
        if self._checking:
            self._checking = False
            _redirect(self._frees, self._get_num_free_blocks)
        if not self._watching:
            self._watching = True
            _redirect(self._counts, self._count)
            _redirect(self._allocates, self._allocate)

    # ---- replacements of vLLM's methods ----------------------------------------------------------

    def _take(self, num_blocks: int) -> Any:
        self.elastic.take(num_blocks)
        return self._get_new_blocks(num_blocks)

    def _hand_out(self, num_blocks: int) -> Any:
        blocks = self._take(num_blocks)
        self.elastic.holds.hand_out(one.block_id for one in blocks)
        return blocks

    def _check(self) -> int:
        free: int = self.pool.free_block_queue.num_free_blocks
        if free < self.most:  # the free blocks may not be enough for this request
            self._watch()
            self.elastic.prepare(self.most)
            free = self.pool.free_block_queue.num_free_blocks
        return free

    def _watched_lookup(self, *args: Any, **kwargs: Any) -> Any:
        self._looked_up = True
        self._watch()
        return self._look_up(*args, **kwargs)

    def _count(self, *args: Any, **kwargs: Any) -> int:
        count: int = self._count_blocks(*args, **kwargs)
        # vLLM returns a count this high to make a request wait for a state computed in this step.
        if count > self.pool.num_gpu_blocks:
            return count
        if count or self._margin:  # otherwise the request takes no blocks
            # Unused blocks of a prefix hit also leave the free queue; they are already backed.
            hit = kwargs.get("new_computed_blocks", args[2] if len(args) > 2 else ())
            held = sum(not b.ref_cnt and not b.is_null for group in hit for b in group)
            whole = kwargs.get("apply_admission_cap", False)
            if not (whole and self._fits(count + self._margin)):
                self.elastic.prepare(count - held + self._margin)
        return count

    def _fits(self, count: int) -> bool:
        """Returns true if `count` blocks are free or could be backed.

        If blocks have to be backed first, vLLM's next query for free blocks returns `count`.
        """
        free: int = self.pool.free_block_queue.num_free_blocks
        if free >= count:
            return True
        if not self.elastic.could_back(count - free):
            return False

        def once() -> int:
            _redirect(self._frees, self._get_num_free_blocks)
            return count

        _redirect(self._frees, once)
        return True

    def _allocate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        running = request.status is RequestStatus.RUNNING
        again = request.status is RequestStatus.PREEMPTED
        if not running or request.is_prefill_chunk:
            self._computing[request.request_id] = request
        if running:
            return self._allocate_slots(request, *args, **kwargs)
        if self.elastic.asleep or (self.elastic.has_more and self.scheduler.running):
            return None
        watermark = getattr(self.manager, "watermark_blocks", 0)
        self._margin = watermark + kwargs.get("reserved_blocks", 0)
        try:
            result = self._allocate_slots(request, *args, **kwargs)
        finally:
            self._margin = 0
        if result is not None and not again:  # after a preemption, a request hits its own blocks
            self.elastic.hits += kwargs.get("num_new_computed_tokens", 0)
            self.elastic.queries += request.num_tokens
        return result
