# SPDX-License-Identifier: MIT
"""A timed loop of continuous batching with chunked prefill, for given lengths and arrivals.

A step is planned and launched while the previous one runs. It contains every request that decodes,
then chunks of prompts up to its token budget, in the order in which the requests joined. A request
joins when its prompt fits in memory together with the prompts still being computed, and these
prompts have fewer tokens left than two steps' budget. If the store maps the request's memory in the
background, the request takes part in a step only once its memory is mapped, or if the step would
otherwise be empty. When memory is short, the request that joined last is preempted: it loses its
rows and recomputes them.

Tokens are predetermined, not sampled (sampled tokens are computed and dropped), so that all stores
compute the same thing and their logits can be compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pyvmem.layouts.workload import Arrival
from vmem_bench.serving.forward import Forward, Launched, Work
from vmem_bench.serving.stores import Ints, Store

__all__ = ["Live", "Outcome", "Sample", "serve"]

_SAMPLE_S = 0.25
Observer = Callable[["list[Live]", torch.Tensor], None]


@dataclass(eq=False)
class Live:
    """A request that is being served.

    Attributes:
        number: the request's index in the workload.
        ids: tokens of the prompt and the answer.
        rows: number of rows with keys and values, as of the last planned step.
        emitted: number of the answer's tokens so far.
        fresh: true until the request's first step in its slot.
        late: whether a step was planned without the request because its memory was not ready.
        times: when each token of the answer was ready, in seconds since the start.
    """

    number: int
    at: float
    prompt: int
    output: int
    ids: Ints
    slot: int = -1
    rows: int = 0
    emitted: int = 0
    fresh: bool = False
    late: bool = False
    times: list[float] = field(default_factory=list)

    @property
    def known(self) -> int:
        """The number of tokens so far, in the prompt and the answer combined."""
        return self.prompt + self.emitted


@dataclass(frozen=True)
class Sample:
    """A sample: bytes mapped, held by requests and used by rows, and how many requests run."""

    at: float
    mapped: int
    held: int
    used: int
    running: int


@dataclass
class Outcome:
    """Measurements of a run. Times are in seconds.

    Attributes:
        finished: number of requests that finished.
        cut: true if time ran out before the last request finished.
        seconds: time from the start to the last token, or to the time limit.
        first, between: times to first token and times between tokens.
        prompt_tokens, new_tokens: number of prompt tokens computed, including recomputed ones, and
            number of answer tokens.
        late: number of requests left out of a step because their memory was not ready.
        shared: number of rows from shared prefixes that requests started with.
        steps: number of forward passes.
        batch_s: sum over all steps of the number of requests times the step's duration.
        short_s, short_batch_s: time during which requests waited for a slot or for memory, and the
            part of `batch_s` that falls within this time.
    """

    finished: int = 0
    cut: bool = False
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    largest: int = 0
    batch_s: float = 0.0
    short_s: float = 0.0
    short_batch_s: float = 0.0
    preemptions: int = 0
    late: int = 0
    recomputed: int = 0
    shared: int = 0
    host_ns: int = 0
    driver: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


@dataclass
class _Flying:
    step: Launched
    at: float
    batch: int
    emitting: list[Live]


class _Loop:
    def __init__(
        self, forward: Forward, budget: int, ahead: int, limit_s: float, observer: Observer | None
    ) -> None:
        self.forward, self.store = forward, forward.store
        self.budget, self.ahead, self.limit_s = budget, ahead, limit_s
        self.observer = observer
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []
        self.done: list[Live] = []
        self.short = False  # no request joins until another has finished
        self.out = Outcome()
        self._clock = time.perf_counter
        self._start = self._last = self._sampled = 0.0

    def now(self) -> float:
        return self._clock() - self._start

    def run(self, coming: deque[Live]) -> Outcome:
        """Serves all requests, or as many as time allows."""
        flying: _Flying | None = None
        self._start = self._clock()
        self._last = 0.0
        while coming or self.waiting or self.running or flying:
            if self.now() > self.limit_s:
                self.out.cut = True
                break
            while coming and coming[0].at <= self.now():
                self.waiting.append(coming.popleft())
            planned = self._plan()
            launched = self._launch(planned) if planned else None
            if flying is not None:
                self._land(flying)
            flying = launched
            if flying is None and not self.running and not self.waiting and coming:
                time.sleep(max(0.0, coming[0].at - self.now()))
            self._look()
        if flying is not None:
            self._land(flying)
        return self._finish()

    def _finish(self) -> Outcome:
        out = self.out
        out.seconds = self.now()
        for live in self.running:
            self.store.release(live.slot)
        for live in (*self.done, *self.running, *self.waiting):
            if live.times:
                out.first.append(live.times[0] - live.at)
                out.between += np.diff(live.times).tolist()
        out.finished = len(self.done)
        out.host_ns, out.driver = self.store.host_ns, self.store.driver()
        return out

    def _plan(self) -> list[tuple[Live, int]]:
        """Returns the next step's requests with their numbers of new tokens, fewest first.

        Maps memory for their rows, and preempts requests if memory is short.
        """
        self._announce(self._join())
        while self.running:
            chosen = self._choose()
            slots = [live.slot for live, _ in chosen]
            if self.store.hold(slots, [live.rows + count for live, count in chosen]):
                return sorted(chosen, key=lambda one: one[1])
            self._preempt()
        if self.waiting:
            raise RuntimeError(f"memory is too small for request {self.waiting[0].number} alone")
        return []

    def _choose(self) -> list[tuple[Live, int]]:
        """Chooses at least one request for the next step, and how many tokens each computes."""
        left = self.budget
        chosen: list[tuple[Live, int]] = []
        for decodes in (True, False):
            for live in self.running:
                pending = live.known - live.rows
                count = min(pending, left)
                if (pending == 1) != decodes or not count:
                    continue
                if live.fresh and chosen and not self.store.ready(live.slot, live.rows + count):
                    self.out.late += not live.late
                    live.late = True
                    continue
                chosen.append((live, count))
                left -= count
        return chosen

    def _join(self) -> list[Live]:
        """Gives slots to waiting requests while they fit; returns the requests that joined.

        Stops once the prompts that remain to be computed fill two steps, because memory for the
        second step is mapped while the first runs.
        """
        joined: list[Live] = []
        while self.waiting and not self.short:
            live = self.waiting[0]
            reading = [one for one in self.running if one.known - one.rows > 1]
            if sum(one.known - one.rows for one in reading) >= 2 * self.budget:
                break
            partial = [(one.slot, one.known) for one in reading]
            taken = None
            if self.store.fits(partial, live.known):
                taken = self.store.take(live.ids[: live.known])
            if taken is None:
                self.short = bool(self.running)
                break
            live.slot, live.rows = taken
            live.fresh = True
            self.out.shared += live.rows
            self.running.append(self.waiting.popleft())
            joined.append(live)
        return joined

    def _preempt(self) -> None:
        live = self.running.pop()
        self.store.release(live.slot)
        if live.rows:
            self.out.preemptions += 1
            self.out.recomputed += live.rows
        live.rows, live.slot, live.fresh = 0, -1, False
        self.waiting.appendleft(live)
        self.short = True

    def _launch(self, planned: list[tuple[Live, int]]) -> _Flying:
        works = [
            Work(live.slot, live.rows, live.ids[live.rows : live.rows + count])
            for live, count in planned
        ]
        at = self.now()
        step = self.forward.launch(works)
        emitting = []
        for live, count in planned:
            self.out.prompt_tokens += max(0, min(live.prompt, live.rows + count) - live.rows)
            live.rows += count
            live.fresh = False
            if live.rows == live.known:
                if count > 1:
                    self.store.prompt_ends(live.slot, live.rows)
                live.emitted += 1
                emitting.append(live)
        if self.observer is not None:
            step.wait()
            self.observer([live for live, _ in planned], step.logits)
        self.out.steps += 1
        self.out.largest = max(self.out.largest, len(planned))
        for live in emitting:
            if live.emitted == live.output:
                self.running.remove(live)
                self.store.release(live.slot, live.ids[: live.rows])
                self.done.append(live)
                self.short = False
        self._join()
        self._announce(self.running)
        return _Flying(step, at, len(planned), emitting)

    def _announce(self, lives: Sequence[Live]) -> None:
        """Tells the store what the next step is likely to need for these requests.

        Fresh requests are announced separately, so that no other request waits for their memory.
        """
        left, part = self.budget, max(1, self.ahead // 2)
        asked: dict[bool, tuple[list[int], list[int]]] = {False: ([], []), True: ([], [])}
        for live in lives:
            pending = live.known - live.rows
            if pending == 1:  # rounded down, so that requests need new pages in different steps
                length = (live.rows + max(1, self.ahead)) // part * part
            else:
                length = live.rows + min(pending, self.budget if live.fresh else left)
            left -= min(pending, left)
            slots, lengths = asked[live.fresh]
            slots.append(live.slot)
            lengths.append(min(length, self.store.longest))
        if lives:
            self.store.ahead(*(one for one in asked.values() if one[0]))

    def _land(self, flying: _Flying) -> None:
        flying.step.wait()
        now = self.now()
        seconds = now - max(self._last, flying.at)
        self.out.batch_s += flying.batch * seconds
        if self.short:
            self.out.short_s += seconds
            self.out.short_batch_s += flying.batch * seconds
        self._last = now
        self.out.new_tokens += len(flying.emitting)
        for live in flying.emitting:
            live.times.append(now)

    def _look(self) -> None:
        now = self.now()
        if self.out.samples and now - self._sampled < _SAMPLE_S:
            return
        self._sampled = now
        rows = sum(live.rows for live in self.running)
        mapped, held = self.store.held()
        used = rows * self.store.token_bytes
        self.out.samples.append(Sample(now, mapped, held, used, len(self.running)))


def serve(
    forward: Forward,
    arrivals: Sequence[Arrival],
    tokens: Callable[[int, Arrival], Ints],
    *,
    budget: int,
    ahead: int = 4,
    limit_s: float = float("inf"),
    observer: Observer | None = None,
) -> Outcome:
    """Serves a workload.

    Args:
        forward: the model over a store, all of whose slots are free.
        arrivals: the requests, sorted by time.
        tokens: returns the ids of a request's prompt and answer, given its number and its arrival.
        budget: maximum new tokens per step.
        ahead: number of tokens past a request's end that the store is told to prepare.
        limit_s: time limit in seconds.
        observer: called with every step's requests and logits; if given, steps do not overlap.

    Raises:
        ValueError: a request is longer than a slot.
        RuntimeError: memory is too small for a request.
    """
    store: Store = forward.store
    coming: deque[Live] = deque()
    for number, arrival in enumerate(arrivals):
        at, request, _ = arrival
        if request.longest > store.longest:
            raise ValueError(
                f"request {number} has {request.longest} tokens, a slot holds {store.longest}"
            )
        ids = tokens(number, arrival)
        coming.append(Live(number, at, request.context, request.output, ids))
    return _Loop(forward, budget, ahead, limit_s, observer).run(coming)
