# SPDX-License-Identifier: MIT
"""Tests the pages behind vLLM's blocks: their geometry, and how their use is recorded."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pyvmem.elastic.backing import Backing, Release
from pyvmem.elastic.geometry import Geometry, Run, blocks_are_outermost, runs_of
from pyvmem.elastic.idle_blocks import IdleBlocks
from pyvmem.elastic.peak import Peak
from pyvmem.elastic.quota import LocalQuota

PAGE = 64 << 10
SHAPES = {
    "a block is a page": [PAGE] * 3,
    "straddles": [24 << 10] * 2,
    "many in a page": [4 << 10] * 2,
    "several pages": [3 * PAGE],
    "two classes": [24 << 10, 64 << 10, 64 << 10, 100 << 10],
}


class Memory:
    """A model of the ranks' mappings; rejects double maps and unmaps."""

    def __init__(self) -> None:
        self.mapped: set[tuple[int, int]] = set()
        self.refuse = False

    def grow(self, runs: list[Run]) -> str | None:
        if self.refuse:
            return "refused"
        new = pages(runs)
        assert not new & self.mapped
        self.mapped |= new
        return None

    def unmap(self, runs: list[Run]) -> None:
        gone = pages(runs)
        assert gone <= self.mapped
        self.mapped -= gone


def pages(runs: list[Run]) -> set[tuple[int, int]]:
    return {(kind, first + i) for kind, first, length in runs for i in range(length)}


def geometry_of(shape: str, blocks: int = 40) -> Geometry:
    return Geometry.of(blocks, PAGE, [n * blocks for n in SHAPES[shape]])


def make(geometry: Geometry, limit: int = 1 << 40) -> tuple[Backing, Memory]:
    backing, memory = Backing(geometry, LocalQuota(limit)), Memory()
    null = backing.begin_null()
    assert memory.grow(null.runs) is None
    assert backing.finish(null) == [0]
    return backing, memory


def freed_by(backing: Backing, blocks: list[int]) -> int:
    """Returns the number of bytes that `Backing.retire` of these blocks will free."""
    total = 0
    for kind in range(len(backing.geometry.classes)):
        left: dict[int, int] = {}
        for block in blocks:
            for page in backing.geometry.pages(kind, block):
                left[page] = left.get(page, backing._users[kind][page]) - 1
        total += sum(n == 0 for n in left.values()) * backing.geometry.page_bytes(kind)
    return total


def grow(backing: Backing, memory: Memory, count: int) -> list[int]:
    growth = backing.begin(count)
    if growth is None:
        return []
    growth.run(memory)
    return backing.finish(growth)


def test_pages_of_a_block() -> None:
    geometry = geometry_of("straddles")
    assert [list(geometry.pages(0, b)) for b in range(4)] == [[0], [0], [0, 1], [1]]
    assert geometry.num_pages(0) == 15
    assert geometry.page_bytes(0) == 2 * PAGE


@pytest.mark.parametrize(
    ("shape", "strides", "good"),
    [
        ((10, 2, 16, 64), (2048, 1024, 64, 1), True),  # blocks, heads, tokens, values
        # the same shape, with tokens before heads in memory
        ((10, 2, 16, 64), (2048, 64, 128, 1), True),
        ((40, 2, 4, 64), (512, 256, 64, 1), True),  # four kernel blocks in one vLLM block
        ((2, 10, 16, 64), (10240, 1024, 64, 1), False),  # keys, then values
        # blocks spaced farther apart than their size
        ((10, 2, 16, 64), (4096, 1024, 64, 1), False),
        ((16, 10, 128), (1280, 128, 1), False),
    ],
)
def test_layouts_that_keep_blocks_together(
    shape: tuple[int, ...], strides: tuple[int, ...], good: bool
) -> None:
    geometry = Geometry.of(10, PAGE, [10 * 4096])
    assert blocks_are_outermost(shape, strides, 2, geometry) is good


def test_runs_join_neighbours() -> None:
    assert runs_of([{3, 1, 2, 7}, set(), {0}]) == [Run(0, 1, 3), Run(0, 7, 1), Run(2, 0, 1)]


def test_a_tensor_that_is_not_whole_blocks_is_rejected() -> None:
    with pytest.raises(ValueError, match="1001 bytes cannot be divided into 10 equal blocks"):
        Geometry.of(10, PAGE, [1001])


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_of_memory_for_adjacent_blocks(shape: str) -> None:
    geometry = geometry_of(shape)
    for count in (1, 2, 5):
        for first in range(40 - count):
            found = [
                {p for b in range(first, first + count) for p in geometry.pages(k, b)}
                for k in range(len(geometry.classes))
            ]
            assert geometry.run_bytes(runs_of(found)) <= geometry.most_bytes(count)
            least = geometry.first_bytes(count)
            assert geometry.run_bytes(runs_of(found)) >= least
            assert first or geometry.run_bytes(runs_of(found)) == least


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_books_agree_with_memory_under_random_use(shape: str, seed: int) -> None:
    rng = random.Random(seed)
    geometry = geometry_of(shape)
    limit = geometry.most_bytes(25)
    backing, memory = make(geometry, limit)
    mine: list[int] = []
    in_flight: list[Release] = []
    growth = None
    for _ in range(400):
        act = rng.randrange(6)
        memory.refuse = rng.random() < 0.1
        if act == 0:
            mine += grow(backing, memory, rng.randrange(1, 8))
        elif act == 1 and growth is None:
            growth = backing.begin(rng.randrange(1, 6))
        elif act == 2 and growth is not None:
            growth.run(memory)
            mine += backing.finish(growth)
            growth = None
        elif act == 3 and mine:
            rng.shuffle(mine)
            count = rng.randrange(1, len(mine) + 1)
            expected = freed_by(backing, mine[:count])
            before = backing.unmapping_bytes
            if growth is None:
                assert backing.retire(mine[:count]) == expected
                assert backing.unmapping_bytes - before == expected
            else:
                backing.retire(mine[:count])
            del mine[:count]
        elif act == 4:
            in_flight += backing.send()
        elif act == 5 and in_flight:
            release = in_flight.pop(rng.randrange(len(in_flight)))
            if rng.random() < 0.2:
                backing.confirm(release.number, "refused")
            else:
                memory.unmap(release.runs)
                backing.confirm(release.number, None)
        assert backing.check() == []
        assert backing.mapped_bytes <= limit
        assert len(set(mine)) == len(mine)
        for block in [0, *mine]:
            for kind in range(len(geometry.classes)):
                assert {(kind, p) for p in geometry.pages(kind, block)} <= memory.mapped
    if growth is not None:
        growth.run(memory)
        mine += backing.finish(growth)
    backing.retire(mine)
    while backing.outbox or in_flight:
        in_flight += backing.send()
        for release in in_flight:
            memory.unmap(release.runs)
            backing.confirm(release.number, None)
        in_flight = []
    assert backing.mapped_bytes == geometry.run_bytes(backing._null.runs)
    assert backing.quota.room() == limit - backing.mapped_bytes
    assert memory.mapped == pages(backing._null.runs)


def test_growth_is_cut_to_the_limit() -> None:
    geometry = geometry_of("a block is a page")
    backing, memory = make(geometry, 6 * 3 * PAGE)
    assert grow(backing, memory, 40) == [1, 2, 3, 4, 5]
    assert grow(backing, memory, 1) == []
    assert backing.counters.refusals == 2


def test_lowest_blocks_first_in_one_run() -> None:
    backing, _ = make(geometry_of("a block is a page"))
    growth = backing.begin(8)
    assert growth is not None
    assert growth.runs == [Run(0, 1, 8)]


def test_a_block_being_freed_is_not_backed_before_that_completes() -> None:
    backing, memory = make(geometry_of("a block is a page"))
    blocks = grow(backing, memory, 39)
    backing.retire(blocks[:1])
    assert grow(backing, memory, 1) == []
    (release,) = backing.send()
    memory.unmap(release.runs)
    backing.confirm(release.number, None)
    assert grow(backing, memory, 1) == blocks[:1]


def test_an_idle_engine_that_is_asked_again_gives_twice_as_much() -> None:
    backing, memory = make(geometry_of("a block is a page"))
    blocks, page = grow(backing, memory, 39), 3 * PAGE
    assert backing.owed(page, 10.0, True, 0) == page
    assert backing.owed(page, 10.5, True, 0) == 2 * page
    assert backing.owed(page, 10.9, True, 0) == 4 * page
    assert backing.owed(10 * page, 11.0, True, 0) == 10 * page
    assert backing.owed(page, 11.5, True, 38 * page) == 2 * page, "40 are mapped"
    assert backing.owed(page, 11.6, False, 0) == page, "it is busy"
    assert backing.owed(page, 12.7, True, 0) == page, "more than a second later"
    backing.retire(blocks[:3])
    assert backing.owed(3 * page, 12.8, True, 0) == 0, "enough is leaving"
    assert backing.owed(4 * page, 12.9, True, 0) == 2 * page


def test_null_block_beyond_the_limit() -> None:
    backing = Backing(geometry_of("several pages"), LocalQuota(PAGE))
    with pytest.raises(MemoryError, match="null block needs 196608 bytes, but 65536 are available"):
        backing.begin_null()


def test_the_null_block_stays() -> None:
    backing, _ = make(geometry_of("straddles"))
    with pytest.raises(AssertionError, match="null block"):
        backing.retire([0])


# ---- idle blocks and the pages that they share -----------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mapped_page_backs_all_its_blocks(shape: str) -> None:
    geometry = geometry_of(shape)
    backing, memory = make(geometry)
    for count in (1, 3, 9):
        grown = grow(backing, memory, count)
        assert len(grown) >= min(count, len(grown) + backing.unbacked)
        held = [{p for k, p in memory.mapped if k == kind} for kind in range(len(geometry.classes))]
        for block in range(geometry.num_blocks):
            pages = [set(geometry.pages(kind, block)) for kind in range(len(geometry.classes))]
            whole = all(mine <= those for mine, those in zip(pages, held, strict=True))
            assert backing.is_backed(block) == whole


def test_growth_maps_only_pages_that_its_blocks_need() -> None:
    geometry = geometry_of("many in a page")
    backing, memory = make(geometry, geometry.page_bytes(0) * 2)
    assert len(grow(backing, memory, 1)) == 15, "beside the null block"
    assert len(memory.mapped) == 1
    assert len(grow(backing, memory, 1)) == 16
    assert len(memory.mapped) == 2
    assert grow(backing, memory, 1) == []


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """Returns the number of calls that `run` makes to each function, builtins included."""
    found = Counter[str]()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            found[frame.f_code.co_name if event == "call" else arg.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_growth_of_more_blocks_makes_no_more_calls(shape: str) -> None:
    """A prompt loaded from a lower tier needs thousands of blocks at once."""

    def calls(count: int) -> int:
        backing, memory = make(geometry_of(shape, 8192))
        return calls_of(lambda: grow(backing, memory, count)).total()

    few = calls(64)
    assert calls(4096) < few + 64


@pytest.mark.parametrize("unit", [(1, 1), (1, 32)])
def test_idle_blocks_are_filed_by_group(unit: tuple[int, int]) -> None:
    idle = IdleBlocks(unit)
    filed = calls_of(lambda: idle.add(range(4096)))["_refile"]
    filed += calls_of(lambda: idle.take(4096))["_refile"]
    assert filed <= 4096 // 32


@pytest.mark.parametrize("shape", SHAPES)
def test_only_emptied_pages_are_freed(shape: str) -> None:
    rng = random.Random(1)
    geometry = geometry_of(shape)
    for _ in range(30):
        backing, memory = make(geometry)
        grown = grow(backing, memory, 30)
        some = rng.sample(grown, rng.randrange(len(grown)))
        emptied = backing.emptied_by(some)
        assert set(emptied) <= set(some)
        assert freed_by(backing, emptied) == freed_by(backing, some)
        for one in emptied:
            without = [other for other in emptied if other != one]
            assert freed_by(backing, without) < freed_by(backing, emptied)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_page_is_freed_with_the_blocks_that_touch_it(shape: str) -> None:
    geometry = geometry_of(shape)
    size, page = geometry.group_unit
    for group in range(1, 39 * size // page):
        backing, memory = make(geometry)
        grow(backing, memory, 39)
        touching = list(geometry.touching(group))
        assert {b for b in range(1, 40) if b * size // page == group} <= set(touching)
        if 0 not in touching and touching[-1] < 39:
            assert backing.retire(touching) >= geometry.group_bytes


@pytest.mark.parametrize("unit", [(1, 1), (1, 32), (24, 64), (72, 2048)])
def test_idle_blocks_are_taken_from_the_fullest_groups_first(unit: tuple[int, int]) -> None:
    rng = random.Random(2)
    idle, model = IdleBlocks(unit), set[int]()

    def left(group: int) -> int:
        return sum(one * unit[0] // unit[1] == group for one in model)

    for _ in range(300):
        some = rng.sample(range(400), rng.randrange(12))
        if rng.random() < 0.6:
            idle.add(some)
            model.update(some)
        elif rng.random() < 0.3:
            some = [one for one in some if one in model]
            idle.remove(some)
            model.difference_update(some)
        else:
            spare = set(rng.sample(range(400), 3)) if rng.random() < 0.5 else set()
            allowed = {one for one in model if one * unit[0] // unit[1] not in spare}
            taken = idle.take(rng.randrange(9), spare)
            assert len(taken) == len(set(taken))
            assert set(taken) <= allowed
            for one in taken:
                group = one * unit[0] // unit[1]
                fewest = min(left(b * unit[0] // unit[1]) for b in allowed)
                assert left(group) <= fewest
                model.remove(one)
                allowed.remove(one)
        assert sorted(idle) == sorted(model)
        assert len(idle) == len(model)
        assert all((one in idle) == (one in model) for one in range(400))
    with pytest.raises(KeyError):
        idle.remove([401])


def test_the_largest_number_noted_lately() -> None:
    peak = Peak(2.0)
    noted = []
    draw = random.Random(3)
    for step in range(300):
        now = step * 0.25
        noted.append((now, draw.randrange(10)))
        peak.note(*noted[-1])
        assert peak.most == max(number for at, number in noted if at >= now - 2.0)
