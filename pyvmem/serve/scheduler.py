# SPDX-License-Identifier: MIT
"""Who runs in a step: admission by memory, preemption by recomputation.

The scheduler owns the queue and talks to the KV cache; it never sees a tensor. One iteration:

    begin()      requests join while slots and memory last; the cache holds every row of this step
    look_ahead() the next step's pages are mapped in the background while the model runs
    finish()     a request leaves; its slot is given back behind the GPU work that still reads it

When memory is short in begin(), those who joined last go back first: a request that has computed
nothing costs nothing, one that has is computed again from its prompt and its answer so far. After
that nobody joins until somebody has left, so that two requests cannot throw each other out in
turns.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from pyvmem.serve.request import Request, Sequence

__all__ = ["RequestCache", "Scheduler"]


class RequestCache(Protocol):
    """The part of `pyvmem.KVCache` that scheduling needs."""

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """A free slot, or None."""

    def free_reqid(self, reqid: int) -> None:
        """Gives a slot back."""

    def step(self, seq_lens: list[int]) -> int:
        """Maps what the lengths need: 0, or -1 with nothing changed."""

    def step_async(self, seq_lens: list[int]) -> int:
        """The same in the background."""


class Scheduler:
    """Continuous batching over a KV cache.

    Args:
        cache: the KV cache; used by this scheduler alone.
        max_batch: the cache's slots.
        max_seq_len: tokens that a slot can hold.
        prefill_chunk: most prompt tokens of a request in one step; 0: the whole prompt.
        background: map the next step's pages while this one is computed.

    Attributes:
        waiting: requests without a slot, the next to join first.
        running: requests with a slot, in the order in which they joined.
        preemptions: requests that lost computed rows, over all time.
        recomputed: their rows, over all time.
    """

    def __init__(
        self,
        cache: RequestCache,
        max_batch: int,
        max_seq_len: int,
        *,
        prefill_chunk: int = 0,
        background: bool = True,
    ) -> None:
        self._cache = cache
        self._max_batch = max_batch
        self._max_seq_len = max_seq_len
        self._chunk = prefill_chunk or max_seq_len
        self._background = background
        self._short = False  # memory ran out: nobody joins until somebody leaves
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.recomputed = 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: the prompt is longer than a slot, or the id belongs to an unfinished
                request.
        """
        if len(request.prompt) > self._max_seq_len:
            raise ValueError(
                f"request {request.request_id}: the prompt has {len(request.prompt)} tokens, "
                f"a slot holds {self._max_seq_len}"
            )
        for other in (*self.waiting, *self.running):
            if other.request.request_id == request.request_id:
                raise ValueError(
                    f"request id {request.request_id} belongs to an unfinished request"
                )
        self.waiting.append(Sequence.of(request))

    def begin(self) -> tuple[list[Sequence], Sequence | None]:
        """Chooses and provisions a step.

        Returns:
            The sequences of the step with their `chunk` set, all of whose rows the cache now holds;
            and, when memory is too small even for the first of the queue alone, that sequence,
            removed.
        """
        self._join()
        for sequence in self.running:
            sequence.chunk = min(self._chunk, sequence.pending)
        while self.running and self._cache.step(self._lengths(ahead=False)) != 0:
            victim = self.running[-1]
            self._leave(victim)
            if not self.running:
                return [], victim
            self._short = True
            if victim.cached:
                self.preemptions += 1
                self.recomputed += victim.cached
                victim.preemptions += 1
            victim.cached = 0
            self.waiting.appendleft(victim)
        return list(self.running), None

    def look_ahead(self) -> None:
        """Starts mapping what the next step needs if nobody leaves; a shortage is begin's."""
        if not self._background:
            return
        self._join()
        if self.running:
            self._cache.step_async(self._lengths(ahead=True))

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out; its slot becomes free behind the work that is under way."""
        self._leave(sequence)
        self._short = False

    def clear(self) -> None:
        """Drops every request."""
        while self.running:
            self._leave(self.running[-1])
        self.waiting.clear()
        self._short = False

    def _join(self) -> None:
        while self.waiting and not (self._short and self.running):
            sequence = self.waiting[0]
            slot = self._cache.alloc_reqid(min(self._chunk, sequence.pending))
            if slot is None:
                return
            sequence.slot = slot
            sequence.chunk = 0
            self.running.append(self.waiting.popleft())

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._cache.free_reqid(sequence.slot)
        sequence.slot = None

    def _lengths(self, *, ahead: bool) -> list[int]:
        lengths = [0] * self._max_batch
        for sequence in self.running:
            assert sequence.slot is not None
            length = sequence.needed
            if ahead:
                # A sequence whose prompt is complete adds the token that is being computed.
                left = sequence.pending - sequence.chunk
                length = min(length + max(1, min(self._chunk, left)), self._max_seq_len)
            lengths[sequence.slot] = length
        return lengths
