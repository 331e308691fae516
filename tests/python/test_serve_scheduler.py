# SPDX-License-Identifier: MIT
"""Tests the scheduler's decisions (run, wait, preempt) without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from kvcache_helpers import LAYERS, ROWS, small_cache

from pyvmem import Context
from pyvmem.engine import Request, RequestCache, Shortage
from pyvmem.serve.job import FinishReason, Job, Sequence
from pyvmem.serve.scheduler import Scheduler


class Watched(RequestCache):
    """Records the requested lengths, in the order in which requests joined."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.seen: list[tuple[str, list[int]]] = []

    def extend(self, lengths: Mapping[Request, int], stream: Any = None) -> Shortage | None:
        self.seen.append(("extend", list(lengths.values())))
        return super().extend(lengths, stream)

    def prepare(self, lengths: Mapping[Request, int]) -> Shortage | None:
        self.seen.append(("prepare", list(lengths.values())))
        return super().prepare(lengths)

    def lengths(self, name: str) -> list[list[int]]:
        return [lengths for call, lengths in self.seen if call == name]


@contextmanager
def make(host: Context, slots: int, pages: int, longest: int = 100) -> Iterator[Watched]:
    """Yields a cache with `slots` slots and `pages` pages of `ROWS` tokens."""
    limit = pages * 2 * LAYERS * host.info.granule
    options = {"max_batch": slots, "max_seq_len": longest, "memory_limit": limit}
    with small_cache(host, growth_fraction=0, **options) as cache, Watched(cache) as found:
        yield found


def job(name: int, prompt: int, new: int = 100) -> Job:
    return Job(name, tuple(range(1, prompt + 1)), new)


def names(batch: list[Sequence]) -> list[int]:
    return [sequence.job.request_id for sequence in batch]


def compute(batch: list[Sequence]) -> None:
    """Applies the effect of a step to the sequences; every sampled token is 1."""
    for sequence in batch:
        sequence.cached += sequence.chunk
        sequence.chunk = 0
        if not sequence.pending:
            sequence.accept(1, 0, 1000)


def test_jobs_join_in_order_as_far_as_there_are_slots(host: Context) -> None:
    with make(host, slots=2, pages=100) as cache:
        scheduler = Scheduler(cache)
        for i in range(4):
            scheduler.add(job(i, 5))
        batch, failed = scheduler.begin()
        assert (names(batch), failed) == ([0, 1], None)
        assert names(list(scheduler.waiting)) == [2, 3]
        compute(batch)
        scheduler.finish(batch[0])
        batch, _ = scheduler.begin()
        assert names(batch) == [1, 2]
        assert [s.chunk for s in batch] == [1, 5]


@pytest.mark.parametrize("background", [True, False])
def test_a_shortage_undoes_the_latest_joiner_first_and_stops_joining(
    host: Context, background: bool
) -> None:
    with make(host, slots=4, pages=3) as cache:
        scheduler = Scheduler(cache, background=background)
        for i in range(4):
            scheduler.add(job(i, ROWS))
        batch, _ = scheduler.begin()
        assert names(batch) == [0, 1, 2]  # all 3 pages are taken
        assert scheduler.preemptions == 0  # job 3 had computed nothing yet
        compute(batch)
        # each job needs a second page; one job fits if another job's first page is freed
        batch, _ = scheduler.begin()
        assert names(batch) == [0]
        assert scheduler.preemptions == 2
        assert scheduler.recomputed == 2 * ROWS
        assert names(list(scheduler.waiting)) == [1, 2, 3]
        compute(batch)
        batch, _ = scheduler.begin()
        assert names(batch) == [0]  # no job joins until another leaves
        scheduler.finish(batch[0])
        batch, _ = scheduler.begin()
        assert names(batch) == [1]
        assert batch[0].chunk == ROWS + 1  # the prompt and the generated token


def test_a_job_that_never_fits_is_returned_and_the_next_one_runs(host: Context) -> None:
    with make(host, slots=2, pages=2) as cache:
        scheduler = Scheduler(cache)
        scheduler.add(job(0, 3 * ROWS))
        scheduler.add(job(1, 5))
        batch, failed = scheduler.begin()
        assert batch == []
        assert failed is not None
        assert failed.job.request_id == 0
        batch, failed = scheduler.begin()
        assert (names(batch), failed) == ([1], None)


def test_a_job_that_outgrows_memory_is_returned_when_alone(host: Context) -> None:
    with make(host, slots=2, pages=2) as cache:
        scheduler = Scheduler(cache)
        scheduler.add(job(0, 2 * ROWS))
        compute(scheduler.begin()[0])
        batch, failed = scheduler.begin()
        assert batch == []
        assert failed is not None
        assert failed.job.request_id == 0
        assert len(failed.answer) == 1
        assert cache.requests == []


def test_a_cache_whose_slots_are_all_taken_by_others_is_an_error(host: Context) -> None:
    with make(host, slots=1, pages=9) as cache:
        cache.admit([1, 2, 3])
        scheduler = Scheduler(cache)
        scheduler.add(job(0, 5))
        with pytest.raises(RuntimeError, match="no free slot although no request is running"):
            scheduler.begin()


def test_look_ahead_requests_the_next_token_and_new_prompts(host: Context) -> None:
    with make(host, slots=3, pages=100, longest=12) as cache:
        scheduler = Scheduler(cache)
        scheduler.add(job(0, 5))
        batch, _ = scheduler.begin()
        scheduler.add(job(1, 12))
        scheduler.look_ahead()
        assert cache.seen[-1] == ("prepare", [6, 12])
        compute(batch)
        batch, _ = scheduler.begin()
        assert cache.seen[-1] == ("extend", [6, 12])
        assert names(batch) == [0, 1]
        scheduler.look_ahead()
        assert cache.seen[-1] == ("prepare", [7, 12])  # no more than the slot can hold


def test_look_ahead_can_be_switched_off(host: Context) -> None:
    with make(host, slots=3, pages=100) as cache:
        scheduler = Scheduler(cache, background=False)
        scheduler.add(job(0, 5))
        scheduler.begin()
        scheduler.look_ahead()
        assert cache.seen == [("extend", [5])]
        assert cache.cache.stats().steps_async == 0


def test_prompts_are_split_into_chunks(host: Context) -> None:
    with make(host, slots=1, pages=100) as cache:
        scheduler = Scheduler(cache, prefill_chunk=4)
        scheduler.add(job(0, 10))
        chunks = []
        for _ in range(4):
            batch, _ = scheduler.begin()
            chunks.append(batch[0].chunk)
            scheduler.look_ahead()
            compute(batch)
        assert chunks == [4, 4, 2, 1]
        assert cache.lengths("extend") == [[4], [8], [10], [11]]
        assert cache.lengths("prepare") == [[8], [10], [11], [12]]


def test_a_prompt_reuses_a_cached_prefix(host: Context) -> None:
    """Another user of the cache has recorded the prefix's rows."""
    with make(host, slots=2, pages=100) as cache:
        prompt = job(0, 3 * ROWS + 2).prompt
        other = cache.admit(prompt)
        assert isinstance(other, Request)
        cache.extend({other: len(prompt)})
        cache.release(other, tokens=prompt)
        scheduler = Scheduler(cache)
        scheduler.add(job(0, 3 * ROWS + 2))
        batch, _ = scheduler.begin()
        assert (batch[0].cached, batch[0].chunk) == (3 * ROWS, 2)


def test_bad_jobs_are_rejected_by_name(host: Context) -> None:
    with make(host, slots=1, pages=100, longest=20) as cache:
        scheduler = Scheduler(cache)
        with pytest.raises(ValueError, match="21 tokens, a slot holds 20"):
            scheduler.add(job(0, 21))
        scheduler.add(job(0, 20))
        with pytest.raises(ValueError, match="request id 0 belongs to an unfinished request"):
            scheduler.add(job(0, 3))
        assert len(scheduler.waiting) == 1
    with pytest.raises(ValueError, match="request 3: the prompt is empty"):
        Job(3, (), 1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        Job(3, (1,), 0)


@pytest.mark.parametrize(
    ("eos", "limit", "slot", "reason"),
    [
        ({9}, 5, 50, FinishReason.EOS),
        (set(), 1, 50, FinishReason.LENGTH),
        (set(), 5, 3, FinishReason.SLOT_FULL),
    ],
)
def test_why_a_request_ends(eos: set[int], limit: int, slot: int, reason: FinishReason) -> None:
    sequence = Sequence.of(Job(0, (1, 2, 3), limit, frozenset(eos)))
    assert sequence.accept(9, 4, slot) is reason
    completion = sequence.completion(reason)
    assert completion.tokens == completion.predictions == (9,)
    assert (completion.first_step, completion.last_step) == (4, 4)


def test_forced_tokens_replace_the_choice_and_the_choice_is_kept() -> None:
    sequence = Sequence.of(Job(0, (1,), 3, frozenset({7}), forced=(5, 6)))
    assert sequence.accept(7, 0, 50) is None
    assert sequence.accept(6, 1, 50) is None
    assert sequence.accept(7, 2, 50) is FinishReason.EOS
    assert sequence.answer == [5, 6, 7]
    assert sequence.predictions == [7, 6, 7]
