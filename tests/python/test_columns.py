# SPDX-License-Identifier: MIT
"""Compares the C code for a step's per-slot work with a Python version."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from pyvmem import (
    Context,
    DriverError,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    OpBatch,
    _native,
)
from pyvmem._native import Columns, Outcome, Waits, extend
from pyvmem.kvcache.slots import Slot

PAGE, ROW = 4096, 100


def columns_of(count: int, slots: list[Slot] | None = None, **place: int) -> Columns:
    """Creates columns over `count` active slots and appends the slots to `slots`."""
    made = [Slot(index) for index in range(count)]
    for slot in made:
        slot.active = True
    if slots is not None:
        slots += made
    columns = Columns(made)
    layout = {"max_rows": (1 << 64) - 1, "prefill": 16, "row_bytes": ROW, "page_size": PAGE}
    for name, value in {**layout, **place}.items():
        setattr(columns.place, name, value)
    return columns


def write(slots: list[Slot], **values: Sequence[int]) -> None:
    for name, each in values.items():
        for slot, value in zip(slots, each, strict=True):
            setattr(slot, name, value)


def read(slots: list[Slot], name: str) -> list[int]:
    return [getattr(slot, name) for slot in slots]


@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_a_scan_agrees_with_python(count: int) -> None:
    rng = random.Random(count)
    columns = columns_of(count)
    held = [0] * count
    for most in (0, 1, 1 << 40, 1 << 30, (1 << 64) - 1):
        for place in range(count):
            columns.capacity[place] = rng.randint(0, most)
        numbers = [rng.randint(0, most) for _ in range(count)]
        found = columns.scan(numbers)
        assert isinstance(found, tuple)
        rows, total, beyond = found
        assert list(rows) == list(columns.needs) == list(map(max, numbers, held))
        assert total == sum(rows) % (1 << 64)
        assert beyond == [i for i in range(count) if numbers[i] > columns.capacity[i]]
        assert list(columns.held_rows) == held
        if most < 1 << 40:  # adopt the rows of some scans only
            columns.held_rows, held = rows, list(rows)


def test_every_slot_may_exceed_its_capacity() -> None:
    assert columns_of(3).scan([1, 2, 3]) == (array("Q", [1, 2, 3]), 6, [0, 1, 2])


def test_the_number_of_lengths_must_match_the_slots() -> None:
    for count in (0, 2, 4):
        with pytest.raises(ValueError, match=f"{count} lengths for 3 slots"):
            columns_of(3).scan([1] * count)


@pytest.mark.parametrize("bad", [-1, 1 << 64, 1.0, "1", None, numpy.int64(1)])
def test_the_first_invalid_length_is_reported(bad: Any) -> None:
    columns = columns_of(4)
    assert columns.scan([1, True, bad, bad]) == 2
    assert list(columns.held_rows) == [0, 0, 0, 0]
    assert columns.scan([1, 0, 0, 0]) == (array("Q", [1, 0, 0, 0]), 1, [0])


def test_too_long_lengths_and_free_slots_are_reported() -> None:
    slots: list[Slot] = []
    columns = columns_of(4, slots, max_rows=50)
    slots[2].active = False
    assert columns.scan([50, 0, 0, 50]) == (array("Q", [50, 0, 0, 50]), 100, [0, 3])
    assert columns.scan([50, 51, 1, 0]) == 4 + 1
    assert columns.scan([50, 50, 1, 51]) == 4 + 2
    assert columns.scan([51, 50, 1, "x"]) == 3  # a value that is not a number takes precedence


def test_a_prefill_needs_the_rows_that_it_may_overread() -> None:
    columns = columns_of(4, max_rows=100, guard=30, prefill=16)
    columns.capacity[:] = array("Q", [16, 17, 46, 99])
    found = columns.scan([16, 17, 17, 90])
    assert found == (array("Q", [16, 17, 17, 90]), 140, [1, 2, 3])
    assert list(columns.needs) == [16, 47, 47, 100]


def goals_by_hand(runs: Any, active: int, want: list[tuple[int, int, int]]) -> list[int]:
    """Computes the goals as growth.py's docstring describes them, in plain Python."""

    def power(number: int) -> int:
        return 1 << number.bit_length() >> 1

    pages = [most for most, *_ in want]
    need = sum(max(0, most - mapped) for most, mapped, _ in want)
    free = runs.free - need
    if not need or free <= 0:
        return pages
    least = 1
    if runs.left:
        while least * runs.left < 2 * free * runs.tensors:
            least *= 2
    share = free // max(1, active)
    longest = min(runs.longest, power(share if least > 1 else share // 2))
    goals = []
    for most, mapped, head in want:
        run = min(max(power(int((most - head) * runs.fraction)), least), longest)
        goal = most
        if most > mapped and run > 1:
            longer = min(-(-most // run) * run, runs.last)
            if longer - most <= free:
                free -= longer - most
                goal = longer
        goals.append(goal)
    return goals


def test_runs_follow_the_policy() -> None:
    rng = random.Random(5)
    longer = 0
    for _ in range(2000):
        count = rng.randint(0, 8)
        slots: list[Slot] = []
        columns = columns_of(8, slots)
        runs, active = columns.runs, rng.randint(0, 8)
        write(slots, active=[slot.index < active for slot in slots])
        runs.fraction = rng.choice([0.125, 0.5, 1.0])
        runs.longest = rng.choice([1, 2, 32])
        runs.last, runs.tensors = 200, rng.randint(1, 64)
        runs.free = rng.randint(0, 500)
        runs.left = rng.choice([0, 1, 100, 10000])
        want = []
        for _ in range(count):
            pages = rng.randint(1, 200)
            want.append((pages, rng.randint(0, 200), rng.randint(0, pages)))
        found = columns.goals(*([one[i] for one in want] for i in range(3)))
        assert found == goals_by_hand(runs, active, want)
        longer += found != [pages for pages, *_ in want]
    assert longer > 200


def test_a_plan_maps_missing_pages_and_grants_mapped_ones() -> None:
    with Context("host", granule=PAGE) as context, context.reserve(2 << 24) as addresses:
        base = addresses.addr
        slots: list[Slot] = []
        layout = {"base": base, "slot_bytes": 1 << 20, "tensor_bytes": 1 << 24, "tensors": 2}
        columns = columns_of(4, slots, **layout)
        columns.place.max_rows, columns.place.overread, columns.place.op_flags = 1000, 8, 4
        columns.runs.longest, columns.runs.free = 1, 26
        write(slots, mapped=[1, 3, 0, 5], granted=[1, 1, 0, 5])
        columns.capacity[:] = array("Q", [32, 32, 0, 196])
        columns.scan([33, 100, 1000, 196])
        ops = OpBatch(4)
        grown = columns.plan(ops.array)
        assert grown == (2, 26, 2, 28)
        assert columns.planned == ([0, 1, 2], [1, 3, 0], [2, 3, 25], [2, 3, 25], [0, 0, 0])
        first, second = ops.array[0], ops.array[1]
        found = (first.addr, first.bytes, first.count, first.stride, first.page_size, first.flags)
        assert found == (base + PAGE, PAGE, 2, 1 << 24, PAGE, 4)
        assert (second.addr, second.bytes) == (base + (2 << 20), 25 * PAGE)
        outcome, waits = Outcome(), Waits()
        context.inject(Inject.MAP)
        with pytest.raises(DriverError, match="injected"):
            extend(context.handle, [columns], ops.array, 2, outcome, waits)
        assert read(slots, "mapped") == [1, 3, 0, 5]
        assert (outcome.happened, waits.struct.count) == (False, 1)
        extend(context.handle, [columns], ops.array, 2, outcome, waits)
        assert (outcome.happened, waits.struct.count) == (True, 2)
        assert context.stats().mapped_bytes == 2 * 26 * PAGE
        assert read(slots, "mapped") == [2, 3, 25, 5]
        assert read(slots, "granted") == [2, 3, 25, 5]
        assert list(columns.capacity) == [73, 114, 1000, 196]
        assert list(columns.calls) == [1, 0, 1, 0]
        addresses.close(unmap=True)
    columns.runs.free = 0
    columns.scan([80, 0, 0, 0])
    assert columns.plan(ops.array) is None
    columns.runs.free = 2
    assert columns.plan(ops.array)
    slots[1].dirty = 9
    columns.scan([80, 120, 0, 0])
    assert columns.plan(ops.array) is None


def test_groups_that_grow_together_grow_in_one_batch() -> None:
    with Context("host", granule=PAGE) as context, context.reserve(2 << 24) as addresses:
        ops, each, slots = OpBatch(4), [], list[Slot]()
        for group in range(2):
            base = addresses.addr + (group << 24)
            layout = {"base": base, "slot_bytes": 1 << 20, "tensor_bytes": 1 << 23, "tensors": 2}
            columns = columns_of(2, slots, **layout)
            columns.place.max_rows = 1000
            columns.runs.longest, columns.runs.free = 1, 100
            columns.scan([100 * (group + 1), 50])
            assert columns.plan(ops.array + 2 * group)
            each.append(columns)
        outcome, waits = Outcome(), Waits()
        context.inject(Inject.MAP, skip=3)
        with pytest.raises(DriverError, match="injected"):
            extend(context.handle, each, ops.array, 4, outcome, waits)
        assert read(slots, "mapped") == [0, 0, 0, 0]
        assert context.stats().mapped_bytes == 0
        before = context.stats().batches
        extend(context.handle, each, ops.array, 4, outcome, waits)
        assert context.stats().batches == before + 1
        assert read(slots, "mapped") == [3, 2, 5, 2]
        assert context.stats().mapped_bytes == 2 * 12 * PAGE
        addresses.close(unmap=True)


def test_unmap_calls_of_slots() -> None:
    columns = columns_of(4, base=1 << 30, slot_bytes=1 << 20, tensor_bytes=1 << 24, tensors=3)
    ops = OpBatch(2)
    columns.unmaps([3, 1], [0, 2], [1, 7], ops.array)
    found = [(one.addr, one.bytes, one.count, one.stride) for one in ops.array]
    assert found == [
        ((1 << 30) + (3 << 20), PAGE, 3, 1 << 24),
        ((1 << 30) + (1 << 20) + 2 * PAGE, 5 * PAGE, 3, 1 << 24),
    ]


class Guarded:
    """An object that only C code can change: assignment in Python raises."""

    __slots__ = ("held",)
    held: Any

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(name)


def test_a_successful_call_applies_its_edits() -> None:
    with Context("host", granule=PAGE) as context, context.reserve(1 << 20) as addresses:
        one, two = Guarded(), Guarded()
        object.__setattr__(one, "held", first := object())
        items, table = array("Q", [1, 2]), {5: 1}
        edits: list[list[Any]] = [
            [one, "held", 5], [[one, two], "held", [6, 7]], [items, 1, 8], [table, 6, 9],
        ]  # fmt: skip
        ops, outcome = OpBatch(1), Outcome(edits)
        ops.populate(addresses.addr, PAGE)
        context.inject(Inject.MAP)
        with pytest.raises(DriverError, match="injected"):
            context.batch(ops, (), outcome)
        assert (one.held, list(items), table) == (first, [1, 2], {5: 1})
        assert not hasattr(two, "held")
        outcome.of(edits)
        context.batch(ops, (), outcome)
        assert outcome.happened
        assert (one.held, two.held, list(items), table) == (6, 7, [1, 8], {5: 1, 6: 9})
        # The edits keep the old values alive until the edits themselves are dropped.
        assert [edits[0][2], *edits[1][2], edits[2][2], edits[3][2]] == [first, 5, ..., 2, ...]
        object.__setattr__(one, "held", 1)
        ops.clear()
        ops.unmap(addresses.addr, PAGE)
        context.batch(ops, (), outcome)
        assert one.held == 1, "made once"


def test_edits_without_a_call_can_be_undone() -> None:
    one = Guarded()
    object.__setattr__(one, "held", 1)
    items, table = array("Q", [1, 2]), {5: 1, 6: 2}
    keys = [(1,), (2,), (3,)]
    chosen = set(keys[:2])
    edits: list[list[Any]] = [
        [one, "held", 2], [[one], "held", [3]], [items, slice(None), array("Q", [3, 4])],
        [table, 5, ...], [table, 7, 3], [table, 8, ...],
        [chosen, keys[0], ...], [chosen, keys[1], None], [chosen, keys[2], None],
    ]  # fmt: skip
    made: list[Any] = [False, edits]
    _native.change_back(made)
    assert (one.held, table, chosen) == (1, {5: 1, 6: 2}, set(keys[:2])), "nothing was done"
    for _ in range(2):
        _native.change(made)
        assert (one.held, list(items), table) == (3, [3, 4], {6: 2, 7: 3})
        assert chosen == set(keys[1:])
    for _ in range(2):
        _native.change_back(made)
        assert (one.held, list(items), table) == (1, [1, 2], {5: 1, 6: 2})
        assert chosen == set(keys[:2])


def test_the_rest_of_a_large_entry_is_not_spare() -> None:
    slots: list[Slot] = []
    columns = columns_of(3, slots)
    write(slots, mapped=[11, 11, 9], granted=[5, 9, 9], large_end=[8, 8, 0], block=[4, 4, 4])
    assert columns.spare == (11 - 8) + (11 - 9)
    slots[0].large_end = 4
    assert columns.spare == (11 - 5) + (11 - 9)


def test_a_plan_reports_how_far_large_entries_may_reach() -> None:
    slots: list[Slot] = []
    layout = {"block": 4, "slot_bytes": 1 << 20, "tensor_bytes": 1 << 24, "tensors": 1}
    columns = columns_of(3, slots, **layout)
    columns.runs.longest, columns.runs.free = 1, 100
    write(slots, mapped=[0, 5, 7], granted=[0, 5, 7], large_end=[0, 4, 0])
    columns.scan([PAGE // ROW * pages for pages in (9, 11, 12)])
    assert columns.plan(OpBatch(3).array)
    assert columns.planned.large_end == [8, 4, 12]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (-1, r"seq_lens\[1\] is -1; it must not be negative"),
        (-(1 << 70), r"seq_lens\[1\] is -1180591620717411303424; it must not be negative"),
        (65, r"seq_lens\[1\] is 65; max_seq_len is 64"),
        (1 << 64, r"seq_lens\[1\] is 18446744073709551616; max_seq_len is 64"),
    ],
)
def test_lengths_that_a_step_rejects(number: int, text: str) -> None:
    config = KVCacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16", max_batch=2, max_seq_len=64
    )
    with KVCache(config, backend="host") as cache:
        assert [cache.alloc_reqid() for _ in range(2)] == [0, 1]
        assert cache.step([8, 8]) == 0
        for call in (cache.step, cache.step_async):
            with pytest.raises(InvalidArgument, match=text):
                call([64, number])
        assert [slot.seq_len for slot in cache.snapshot()] == [8, 8]
        cache.check_integrity()
