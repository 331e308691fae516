# SPDX-License-Identifier: MIT
"""Replays requests with too little memory for all of them, and counts how many run.

Arrival times do not matter: the queue is never empty, so only memory limits the batch. As in an
engine with continuous batching, an iteration has these steps:

1. Every running request needs one more token than in the previous iteration. While memory is short,
the request admitted last returns to the head of the queue, with all its tokens (preemption by
recomputation). 2. Requests are admitted in queue order while the next request's tokens fit. 3. The
running requests are counted, with the bytes that they map and the bytes that their tokens need.
4. Requests that have generated their last token leave.

A request of c prompt tokens and o output tokens runs o iterations and holds c, c + 1, ...,
c + o - 1 tokens. Only iterations limited by memory count: those in which a request is still
waiting after step 2. The end of the trace, when the queue is empty, does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.workload import Request
from pyvmem.plumbing.validation import invalid

__all__ = ["Lengths", "Memory", "Outcome", "Pages", "replay"]

Lengths = NDArray[np.int64]


class Memory(Protocol):
    """The cache under test; requests are numbered in order of admission."""

    def hold(self, lengths: Lengths) -> bool:
        """Gives each request memory for its length; extra lengths at the end are new requests.

        Returns False and changes nothing if memory is short.
        """
        ...

    def leave(self, places: Sequence[int]) -> None:
        """Removes the requests at these indices; later requests move up."""
        ...

    def mapped_bytes(self) -> int:
        """Returns the physical memory that the requests occupy, as of the last `hold`."""
        ...


class Pages:
    """Memory that is only counted, with `Layout.pages_for_step`, and never mapped.

    A PagedAttention block of N tokens is a page with N rows of one layer.
    """

    def __init__(self, layout: Layout, memory_bytes: int) -> None:
        self.layout = layout
        every = range(layout.max_rows + 1)
        self._table = np.fromiter(map(layout.pages_for, every), np.int64, len(every))
        begun = (layout.pages_for_step(0, length) for length in every)
        self._begun = np.fromiter(begun, np.int64, len(every))
        self._page = layout.page_size * layout.num_tensors
        self._limit = memory_bytes // layout.page_size // layout.num_tensors
        self._held: Lengths = np.zeros(0, np.int64)

    def hold(self, lengths: Lengths) -> bool:
        """See `Memory.hold`."""
        running = len(self._held)
        # A request first grows into the rows that its prefill mapped past its length.
        grown = np.maximum(self._table[lengths[:running]], self._held)
        pages = np.concatenate([grown, self._begun[lengths[running:]]])
        if int(pages.sum()) > self._limit:
            return False
        self._held = pages
        return True

    def leave(self, places: Sequence[int]) -> None:
        """See `Memory.leave`."""
        self._held = np.delete(self._held, places)

    def mapped_bytes(self) -> int:
        """See `Memory.mapped_bytes`."""
        return int(self._held.sum()) * self._page


@dataclass(frozen=True)
class Outcome:
    """Results of a replay, over the iterations in which memory was the limit.

    Attributes:
        iterations: number of iterations in the whole trace.
        limited: number of iterations limited by memory; 0 if all requests fit together, in which
            case all iterations count.
        mean_batch: mean number of running requests.
        max_batch: largest number of running requests.
        wasted_bytes: mean bytes per running request that are mapped but hold no tokens.
        mapped_bytes: mean bytes mapped by all running requests combined.
        preemptions: number of times that a request returned to the queue, in the whole trace.
    """

    iterations: int
    limited: int
    mean_batch: float
    max_batch: int
    wasted_bytes: float
    mapped_bytes: float
    preemptions: int


class _Sums:
    """Sums of the measured quantities over iterations."""

    def __init__(self) -> None:
        self.iterations = self.requests = self.most = self.mapped = self.tokens = 0

    def add(self, lengths: Lengths, mapped: int) -> None:
        self.iterations += 1
        self.requests += len(lengths)
        self.most = max(self.most, len(lengths))
        self.mapped += mapped
        self.tokens += int(lengths.sum())


def replay(requests: Sequence[Request], memory: Memory, token_bytes: int) -> Outcome:
    """Runs all requests to completion; see the module docstring.

    Args:
        requests: the requests in order of admission.
        memory: memory that holds no requests yet.
        token_bytes: size of a token's keys and values across all layers.

    Raises:
        InvalidArgument: there are no requests, or one is too large for the memory.
    """
    if not requests:
        raise invalid("a replay needs at least one request", op="vmem bench")
    queue = deque((request.context, request.longest) for request in requests)
    # Lengths of the running requests, in order of admission.
    lengths: Lengths = np.zeros(0, np.int64)
    last: Lengths = np.zeros(0, np.int64)  # the requests' lengths in their last iteration
    every, limited = _Sums(), _Sums()
    preemptions = 0
    while queue or len(lengths):
        lengths = lengths + 1
        while len(lengths) and not memory.hold(lengths):
            if len(lengths) == 1:
                raise _too_long(int(lengths[0]))
            queue.appendleft((int(lengths[-1]), int(last[-1])))
            memory.leave([len(lengths) - 1])
            lengths, last = lengths[:-1], last[:-1]
            preemptions += 1
        while queue:
            more = np.append(lengths, queue[0][0])
            if not memory.hold(more):
                break
            lengths, last = more, np.append(last, queue.popleft()[1])
        if not len(lengths):
            raise _too_long(queue[0][0])
        mapped = memory.mapped_bytes()
        every.add(lengths, mapped)
        if queue:
            limited.add(lengths, mapped)
        over = lengths >= last
        if over.any():
            memory.leave(np.flatnonzero(over).tolist())
            lengths, last = lengths[~over], last[~over]
    sums = limited if limited.iterations else every
    return Outcome(
        iterations=every.iterations,
        limited=limited.iterations,
        mean_batch=sums.requests / sums.iterations,
        max_batch=sums.most,
        wasted_bytes=(sums.mapped - sums.tokens * token_bytes) / sums.requests,
        mapped_bytes=sums.mapped / sums.iterations,
        preemptions=preemptions,
    )


def _too_long(tokens: int) -> Exception:
    return invalid(
        f"a request of {tokens} tokens does not fit into the memory alone",
        size=tokens,
        op="vmem bench",
    )
