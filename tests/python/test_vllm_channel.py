# SPDX-License-Identifier: MIT
"""Tests the scheduler's calls to ranks over a socket: made in parallel, all or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyvmem.elastic.geometry import Run
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.vllm.channel import LocalRank, RankLost, Ranks, Server, SocketRank

torch = pytest.importorskip("torch")
PAGE, BLOCKS = 64 << 10, 64


class Rank:
    """A rank that returns canned answers; a `lost` rank does not answer."""

    def __init__(self, log: list[str], name: str, lost: str = "", **answers: Any) -> None:
        self.log, self.name, self.lost, self.answers = log, name, lost, answers

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        self.log.append(f"ask {self.name} {name}")
        if self.lost == "ask":
            raise RankLost(self.name)

        def answer() -> Any:
            self.log.append(f"hear {self.name}")
            if self.lost == "hear":
                raise RankLost(self.name)
            return self.answers.get(name)

        return answer


def ranks_of(*ranks: Any) -> Ranks:
    return Ranks(list(ranks))


def test_all_ranks_are_asked_before_one_is_waited_for() -> None:
    log: list[str] = []
    ranks = ranks_of(*(Rank(log, name, compact=n) for n, name in enumerate("abc")))
    assert ranks.compact(1, 2) == 2
    assert log == ["ask a compact", "ask b compact", "ask c compact", "hear a", "hear b", "hear c"]


@pytest.mark.parametrize("lost", ["ask", "hear"])
def test_a_lost_rank_does_not_hide_the_others_answers(lost: str) -> None:
    log: list[str] = []
    ranks = ranks_of(Rank(log, "a"), Rank(log, "b", lost), Rank(log, "c"))
    with pytest.raises(RankLost, match="b"):
        ranks.release(1, [Run(0, 1, 1)], 3)
    assert {one[4] for one in log if one.startswith("ask")} - {"b"} == {
        one[5] for one in log if one.startswith("hear")
    } - {"b"}


def test_growth_on_all_ranks_or_none() -> None:
    log: list[str] = []
    a, b, c = (Rank(log, name, grow=(None, 9)) for name in "abc")
    ranks = ranks_of(a, b, c)
    assert ranks.grow([Run(0, 1, 1)]) is None
    b.answers["grow"] = ("OutOfMemory: no", 3)
    log.clear()
    assert ranks.grow([Run(0, 1, 1)]) == "OutOfMemory: no"
    assert [one for one in log if "drop" in one] == ["ask a drop", "ask c drop"]


def test_free_memory_comes_from_the_last_answer() -> None:
    log: list[str] = []
    a = Rank(log, "a", poll=([], 100, 5, False), grow=(None, 70))
    b = Rank(log, "b", poll=([], 80, 7, False), grow=(None, 75))
    ranks = ranks_of(a, b)
    assert ranks.free() == 80
    assert ranks.mappings == 7
    count = len(log)
    assert ranks.free() == 80
    assert len(log) == count, "no rank is asked again"
    assert ranks.grow([Run(0, 1, 1)]) is None
    assert ranks.free() == 70
    ranks.poll()
    assert ranks.free() == 80
    asked = a.ask

    def growing(name: str, argument: Any = None) -> Callable[[], Any]:
        """Simulates growth by another thread right after the ranks have been asked."""
        answer = asked(name, argument)
        if name == "poll":
            assert ranks.grow([Run(0, 2, 1)]) is None
        return answer

    a.ask = growing  # type: ignore[method-assign]
    ranks.poll()
    assert ranks.free() == 70
    a.answers["poll"] = b.answers["poll"] = ([], None, 1, False)
    a.ask = asked  # type: ignore[method-assign]
    ranks.poll()
    assert ranks.free() is None


def test_a_release_completes_with_the_last_rank() -> None:
    log: list[str] = []
    a, b = (
        Rank(log, "a", poll=([(1, ""), (2, "")], None, 0, False)),
        Rank(log, "b", poll=([], None, 0, False)),
    )
    ranks = ranks_of(a, b)
    assert ranks.finished() == {}
    ranks.poll()
    assert ranks.finished() == {}
    a.answers["poll"], b.answers["poll"] = (
        ([], None, 0, False),
        ([(2, "Busy: no"), (1, "")], None, 0, False),
    )
    ranks.poll()
    assert ranks.finished() == {1: None, 2: "Busy: no"}
    assert ranks.finished() == {}


@pytest.fixture
def memory() -> Iterator[KVMemory]:
    """Yields memory with two groups of tensors: in one, a block fills a page; in the other, five
    blocks take two pages.
    """
    context = open_context("host", 0, PAGE, 1 << 20)
    found = KVMemory(context, BLOCKS, [BLOCKS * PAGE, BLOCKS * PAGE, BLOCKS * 26_212])
    yield found
    found.close()


@pytest.fixture(params=["here", "socket"])
def rank(request: pytest.FixtureRequest, memory: KVMemory, tmp_path: Path) -> Iterator[Any]:
    if request.param == "here":
        yield LocalRank(memory)
        return
    interval = sys.getswitchinterval()
    server = Server(str(tmp_path / "a.sock"), memory)
    assert sys.getswitchinterval() <= 0.0005, "the switch interval must let a busy rank answer soon"
    found = SocketRank(server.address)
    yield found
    found.close()
    server.close()
    sys.setswitchinterval(interval)


def test_blocks_move_after_the_last_step_is_launched(rank: Any, memory: KVMemory) -> None:
    ranks = ranks_of(rank)
    geometry = memory.geometry
    runs = [Run(kind, 0, geometry.num_pages(kind)) for kind in range(2)]
    assert ranks.grow(runs) is None
    tensors = [memory.tensor(BLOCKS * n) for n in (PAGE, PAGE, 26_212)]
    views = [one.view(BLOCKS, -1) for one in tensors]
    for number, view in enumerate(views):
        view[:] = (torch.arange(BLOCKS) + number).to(torch.int8)[:, None]
    before = [view.clone() for view in views]
    copies = [(3, 40), (7, 2), (63, 1)]
    assert ranks.move(copies, 1) is False
    assert all(bool((view == old).all()) for view, old in zip(views, before, strict=True))
    memory.step_begins(None)
    memory.step_ends(1)
    assert ranks.move(copies, 1) is True
    for view, old in zip(views, before, strict=True):
        for source, place in copies:
            old[place] = old[source]
        assert bool((view == old).all())
    del tensors, views, view


def test_a_release_by_call(rank: Any, memory: KVMemory) -> None:
    ranks = ranks_of(rank)
    assert ranks.grow([Run(1, 0, 4)]) is None
    ranks.release(5, [Run(1, 1, 2)], 0)
    done: dict[int, str | None] = {}
    end = time.monotonic() + 20
    while not done and time.monotonic() < end:
        time.sleep(0.002)
        ranks.poll()
        done |= ranks.finished()
    assert done == {5: None}
    assert ranks.stats()[0]["mapped_bytes"] == 2 * 2 * PAGE
    assert ranks.mappings > 0
    assert ranks.free() is None, "the free memory of a CPU is unknown"
