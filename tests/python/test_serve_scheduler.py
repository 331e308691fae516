# SPDX-License-Identifier: MIT
"""Who runs, who waits, who goes back: the scheduler's decisions, without a model."""

from __future__ import annotations

import pytest

from pyvmem.serve.request import FinishReason, Request, Sequence
from pyvmem.serve.scheduler import Scheduler


class PageCount:
    """Stands for a cache of `pages` pages of `rows` tokens: slots and a shortage, no memory."""

    def __init__(self, slots: int, pages: int, rows: int = 10) -> None:
        self.free = list(range(slots))
        self.pages, self.rows = pages, rows
        self.seen: list[tuple[str, list[int]]] = []

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        return self.free.pop(0) if self.free else None

    def free_reqid(self, reqid: int) -> None:
        assert reqid not in self.free
        self.free.append(reqid)

    def _take(self, name: str, lens: list[int]) -> int:
        assert not any(lens[slot] for slot in self.free)
        self.seen.append((name, list(lens)))
        return 0 if sum(-(-n // self.rows) for n in lens) <= self.pages else -1

    def step(self, seq_lens: list[int]) -> int:
        return self._take("step", seq_lens)

    def step_async(self, seq_lens: list[int]) -> int:
        return self._take("step_async", seq_lens)


def request(name: int, prompt: int, new: int = 100) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), new)


def names(batch: list[Sequence]) -> list[int]:
    return [sequence.request.request_id for sequence in batch]


def compute(batch: list[Sequence]) -> None:
    """What the engine does to the sequences of a step, with token 1 for every choice."""
    for sequence in batch:
        sequence.cached += sequence.chunk
        sequence.chunk = 0
        if not sequence.pending:
            sequence.accept(1, 0, 1000)


def test_requests_join_in_order_as_far_as_there_are_slots() -> None:
    scheduler = Scheduler(PageCount(2, 100), 2, 100)
    for i in range(4):
        scheduler.add(request(i, 5))
    batch, failed = scheduler.begin()
    assert (names(batch), failed) == ([0, 1], None)
    assert [s.request.request_id for s in scheduler.waiting] == [2, 3]
    compute(batch)
    scheduler.finish(batch[0])
    batch, _ = scheduler.begin()
    assert names(batch) == [1, 2]
    assert [s.chunk for s in batch] == [1, 5]


def test_a_shortage_undoes_the_latest_joiner_first_and_stops_joining() -> None:
    cache = PageCount(4, 3)
    scheduler = Scheduler(cache, 4, 100)
    for i in range(4):
        scheduler.add(request(i, 10))
    batch, _ = scheduler.begin()
    assert names(batch) == [0, 1, 2]  # 3 pages
    assert scheduler.preemptions == 0  # request 3 had computed nothing
    compute(batch)
    batch, _ = scheduler.begin()  # each needs a second page: only one fits with another's first
    assert names(batch) == [0]
    assert scheduler.preemptions == 2
    assert scheduler.recomputed == 20
    assert names(list(scheduler.waiting)) == [1, 2, 3]
    compute(batch)
    batch, _ = scheduler.begin()
    assert names(batch) == [0]  # nobody joins before somebody leaves
    scheduler.finish(batch[0])
    batch, _ = scheduler.begin()
    assert names(batch) == [1]
    assert batch[0].chunk == 11  # the prompt and the token that it had


def test_who_never_fits_is_handed_out_and_the_next_one_runs() -> None:
    scheduler = Scheduler(PageCount(2, 2), 2, 100)
    scheduler.add(request(0, 30))
    scheduler.add(request(1, 5))
    batch, failed = scheduler.begin()
    assert batch == []
    assert failed is not None
    assert failed.request.request_id == 0
    batch, failed = scheduler.begin()
    assert (names(batch), failed) == ([1], None)


def test_look_ahead_asks_for_the_next_token_and_for_new_prompts() -> None:
    cache = PageCount(3, 100)
    scheduler = Scheduler(cache, 3, 12)
    scheduler.add(request(0, 5))
    batch, _ = scheduler.begin()
    scheduler.add(request(1, 12))
    scheduler.look_ahead()
    assert cache.seen[-1] == ("step_async", [6, 12, 0])
    compute(batch)
    batch, _ = scheduler.begin()
    assert cache.seen[-1] == ("step", [6, 12, 0])
    assert names(batch) == [0, 1]
    scheduler.look_ahead()
    assert cache.seen[-1] == ("step_async", [7, 12, 0])  # never above the slot


def test_look_ahead_can_be_switched_off() -> None:
    cache = PageCount(3, 100)
    scheduler = Scheduler(cache, 3, 100, background=False)
    scheduler.add(request(0, 5))
    scheduler.begin()
    scheduler.look_ahead()
    assert [name for name, _ in cache.seen] == ["step"]


def test_prompts_go_in_chunks() -> None:
    cache = PageCount(1, 100)
    scheduler = Scheduler(cache, 1, 100, prefill_chunk=4)
    scheduler.add(request(0, 10))
    chunks = []
    for _ in range(4):
        batch, _ = scheduler.begin()
        chunks.append(batch[0].chunk)
        scheduler.look_ahead()
        compute(batch)
    assert chunks == [4, 4, 2, 1]
    assert [lens for name, lens in cache.seen if name == "step"] == [[4], [8], [10], [11]]
    assert [lens for name, lens in cache.seen if name == "step_async"] == [[8], [10], [11], [12]]


def test_bad_requests_are_refused_by_name() -> None:
    scheduler = Scheduler(PageCount(1, 100), 1, 20)
    with pytest.raises(ValueError, match="21 tokens, a slot holds 20"):
        scheduler.add(request(0, 21))
    scheduler.add(request(0, 20))
    with pytest.raises(ValueError, match="request id 0 belongs to an unfinished request"):
        scheduler.add(request(0, 3))
    with pytest.raises(ValueError, match="request 3: the prompt is empty"):
        Request(3, (), 1)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        Request(3, (1,), 0)
    assert len(scheduler.waiting) == 1


def test_clear_gives_every_slot_back() -> None:
    cache = PageCount(2, 100)
    scheduler = Scheduler(cache, 2, 100)
    for i in range(3):
        scheduler.add(request(i, 5))
    scheduler.begin()
    scheduler.clear()
    assert sorted(cache.free) == [0, 1]
    assert not scheduler.waiting


@pytest.mark.parametrize(
    ("eos", "limit", "slot", "reason"),
    [
        ({9}, 5, 50, FinishReason.EOS),
        (set(), 1, 50, FinishReason.LENGTH),
        (set(), 5, 3, FinishReason.SLOT_FULL),
    ],
)
def test_why_a_request_ends(eos: set[int], limit: int, slot: int, reason: FinishReason) -> None:
    sequence = Sequence.of(Request(0, (1, 2, 3), limit, frozenset(eos)))
    assert sequence.accept(9, 4, slot) is reason
    completion = sequence.completion(reason)
    assert completion.tokens == completion.predictions == (9,)
    assert (completion.first_step, completion.last_step) == (4, 4)


def test_forced_tokens_replace_the_choice_and_the_choice_is_kept() -> None:
    sequence = Sequence.of(Request(0, (1,), 3, frozenset({7}), forced=(5, 6)))
    assert sequence.accept(7, 0, 50) is None
    assert sequence.accept(6, 1, 50) is None
    assert sequence.accept(7, 2, 50) is FinishReason.EOS
    assert sequence.answer == [5, 6, 7]
    assert sequence.predictions == [7, 6, 7]
