# SPDX-License-Identifier: MIT
"""Schedules steps: admission by available memory, preemption by recomputation.

The scheduler owns the queue and the requests of a `pyvmem.engine.RequestCache`; it handles no
tensors. One iteration:

    begin()      sequences join while slots and memory last; the cache holds the step's rows
    look_ahead() the next step's pages are mapped in the background while the model runs
    finish()     a sequence leaves; its slot is free once the GPU work that reads it is done

When memory runs out in begin(), the sequences that joined last are preempted first: a sequence that
has computed nothing loses nothing; others are recomputed from their prompt and answer so far. After
that, no sequence joins until another has left, so that two sequences cannot preempt each other
forever.
"""

from __future__ import annotations

from collections import deque

from pyvmem.engine import Request, RequestCache, Shortage
from pyvmem.serve.job import Job, Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over a KV cache.

    Args:
        cache: the cache, used only by this scheduler; the caller closes it.
        prefill_chunk: maximum number of prompt tokens per sequence in one step; 0 means the whole
            prompt.
        background: whether to map the next step's pages while the current step is computed.

    Attributes:
        waiting: sequences without a slot, in the order in which they will join.
        running: sequences with a slot, and their requests, in the order in which they joined.
        preemptions: number of times a sequence lost computed rows.
        recomputed: total number of rows lost.
    """

    def __init__(
        self, cache: RequestCache, *, prefill_chunk: int = 0, background: bool = True
    ) -> None:
        self._cache = cache
        self._chunk = prefill_chunk or cache.max_seq_len
        self._background = background
        self._reserve = background and not prefill_chunk
        self._short = False  # memory ran out: no sequence joins until another leaves
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, Request] = {}
        self.preemptions = 0
        self.recomputed = 0

    def add(self, job: Job) -> None:
        """Queues a job.

        Raises:
            ValueError: the prompt does not fit in a slot, or the id belongs to an unfinished job.
        """
        if len(job.prompt) > self._cache.max_seq_len:
            raise ValueError(
                f"request {job.request_id}: the prompt has {len(job.prompt)} tokens, "
                f"a slot holds {self._cache.max_seq_len}"
            )
        if any(one.job.request_id == job.request_id for one in (*self.waiting, *self.running)):
            raise ValueError(f"request id {job.request_id} belongs to an unfinished request")
        self.waiting.append(Sequence.of(job))

    def begin(self) -> tuple[list[Sequence], Sequence | None]:
        """Selects the sequences for a step and maps their memory.

        Returns:
            The step's sequences, with `chunk` set and memory mapped for all their rows, and None;
            or an empty list and a sequence that was removed because it does not fit even on its
            own.

        Raises:
            RuntimeError: sequences are waiting, but the cache has no slots for them.
        """
        short = self._join()
        if short is not None and (short.never or not self.running):
            if short.slots and not short.never:
                raise RuntimeError("the KV cache has no free slot although no request is running")
            return [], self.waiting.popleft()
        for sequence in self.running:
            sequence.chunk = min(self._chunk, sequence.pending)
        while self._cache.extend(self._lengths()):
            victim, request = self.running.popitem()
            self._cache.release(request)
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
        """Starts mapping the next step's pages; `begin` handles shortages."""
        if self._background:
            self._join()
            self._cache.prepare(self._lengths(ahead=True))

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence; its slot is freed once its pending GPU work is done."""
        self._cache.release(self.running.pop(sequence))
        self._short = False

    def _join(self) -> Shortage | None:
        """Admits sequences until it runs out of slots or memory; returns the shortage, if any."""
        while self.waiting and not (self._short and self.running):
            found = self._cache.admit(self.waiting[0].tokens, room=0, reserve=self._reserve)
            if isinstance(found, Shortage):
                return found
            sequence = self.waiting.popleft()
            sequence.cached, sequence.chunk = found.length, 0
            self.running[sequence] = found
        return None

    def _lengths(self, *, ahead: bool = False) -> dict[Request, int]:
        lengths = {}
        for sequence, request in self.running.items():
            length = sequence.needed
            if ahead:
                # A sequence whose prompt is complete also needs a row for the token being computed.
                left = sequence.pending - sequence.chunk
                length += max(1, min(self._chunk, left))
            lengths[request] = min(length, self._cache.max_seq_len)
        return lengths
