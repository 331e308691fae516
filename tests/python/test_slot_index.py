# SPDX-License-Identifier: MIT
"""Compares the C code's choice of slots with a scan of all slots."""

from __future__ import annotations

import random
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem.kvcache.distributed import LockstepTable
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.pages import DEVICE, EMPTY, Span, Tier
from pyvmem.kvcache.slots import Slot, SlotTable
from pyvmem.memory.info import Location

COUNT = 12


class Event:
    """GPU work that a test completes, with the interface of a torch event."""

    cuda_event = 1

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def _span(pages: int) -> Span:
    span = Span((), 1)
    span.pages = pages
    return span


def _stale(slot: Slot) -> bool:
    return max(slot.span.pages, slot.head, slot.tier_map.off_device_end) > slot.granted


def _losing(slot: Slot) -> bool:
    return _stale(slot) or (slot.job is not None and slot.job.takes_pages)


_age = attrgetter("freed_order", "index")


def _free(table: SlotTable) -> list[Slot]:
    found = [slot for slot in table if not slot.active and not slot.broken]
    return sorted(found, key=_age)


def _spare(slot: Slot) -> int:
    if slot.rows_lost or not (slot.job is None or slot.job.takes_pages):
        return 0
    return slot.spare_beyond(0)


def _change(table: SlotTable, rng: random.Random) -> None:
    """Makes a random change to a slot."""
    slot = rng.choice(table.slots)
    what = rng.randrange(10)
    if what == 0 and not slot.active and not slot.broken:
        table.take(slot)
    elif what == 1 and slot.active:
        table.give_back(slot, Event() if rng.random() < 0.5 else None, rng.randrange(100))
    elif what == 2 and rng.random() < 0.1:
        table.mark_broken(slot)
    else:
        if what == 3:
            slot.mapped = rng.randrange(slot.job is not None, 6)
            slot.granted, slot.head = min(slot.granted, slot.mapped), min(slot.head, slot.mapped)
            slot.span = EMPTY
            slot.tier_map = slot.tier_map.without(slot.mapped, 8)
        elif what == 4 and slot.active:
            slot.granted = rng.randrange(slot.mapped + 1)
        elif what == 5:
            pages = rng.randrange(3)
            growth, cut = (SimpleNamespace(takes_pages=takes, pages=pages) for takes in (0, 1))
            jobs: list[Any] = [None, cut, growth] if slot.mapped else [None, cut]
            slot.job = rng.choice(jobs)
        elif what == 6:
            slot.span = _span(rng.randrange(slot.mapped + 1)) if rng.random() < 0.3 else EMPTY
        elif what == 7:
            slot.head = rng.randrange(slot.mapped + 1) if rng.random() < 0.3 else 0
        elif what == 8 and slot.mapped >= 2:
            slot.tier_map = slot.tier_map.put((0, 2, rng.choice([DEVICE, Tier(Location.HOST)])))
        elif what == 9:
            slot.large_end = rng.randrange(slot.mapped + 1) // 2 * 2
    for one in table:
        for event in one.events:
            event.over |= rng.random() < 0.1


def _best_fit(table: SlotTable, pages: int) -> Slot | None:
    return min(
        _free(table),
        key=lambda s: (_losing(s), s.mapped < pages, abs(s.mapped - pages)),
        default=None,
    )


def _emptiest(table: SlotTable, count: int) -> list[Slot]:
    def key(slot: Slot) -> tuple[bool, bool, int]:
        busy = slot.job is not None and slot.job.takes_pages
        waits = any(not event.over for event in slot.events)
        return (busy or bool(slot.mapped), waits, slot.mapped)

    return sorted(_free(table), key=key)[:count]


def _victims(table: SlotTable) -> list[Slot]:
    found = [s for s in table if s.job is None and s.mapped > s.granted and not s.rows_lost]
    waits = {slot: any(not event.over for event in slot.events) for slot in found}
    return sorted(found, key=lambda s: (s.active, waits[s], s.freed_order, s.index))


def _to_prepare(table: SlotTable, pages: int) -> Slot | None:
    free = [slot for slot in _free(table) if not _stale(slot)]
    ready = [slot for slot in free if slot.mapped >= pages]
    if ready:
        return min(ready, key=lambda slot: slot.mapped)
    return max((s for s in free if s.job is None), key=lambda s: s.mapped, default=None)


@pytest.mark.parametrize("seed", range(6))
def test_c_agrees_with_a_scan_of_every_slot(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(COUNT, Journal(), block=2)
    for _ in range(3000):
        for _ in range(rng.choice([1, 1, 1, 5])):
            _change(table, rng)
        pages = rng.randrange(8)
        assert table.free == _free(table)
        assert table.free_count == len(table.free)
        assert table.stale == sorted(filter(_stale, table), key=_age)
        assert table.stale == sorted(filter(attrgetter("stale"), table), key=_age)
        assert table.best_fit(pages) is _best_fit(table, pages)
        assert table.to_prepare(pages) is _to_prepare(table, pages)
        assert table.emptiest(pages) == _emptiest(table, pages)
        assert list(table.victims()) == _victims(table)
        assert list(table.victims(active=False)) == [s for s in _victims(table) if not s.active]
        assert table.columns.spare == sum(map(_spare, table))


def test_among_equal_fits_the_slot_free_longest_is_chosen() -> None:
    table = SlotTable(4, Journal())
    for slot in table:
        table.take(slot)
    for index in (2, 0, 3, 1):
        table.change(table[index], mapped=2)
        table.give_back(table[index], None, 0)
    for index in (2, 0, 3, 1):
        found = table.best_fit(1)
        assert found is table[index]
        table.take(found)
        table.give_back(found, None, 0)
    table.change(table[3], mapped=1)
    assert table.best_fit(1) is table[3], "the best fit comes first"
    assert table.best_fit(3) is table[2], (
        "without a fit, the largest slot comes first, and of equal slots the one free for longest"
    )


def test_ranks_choose_the_slot_freed_last() -> None:
    table = LockstepTable(3, Journal())
    assert table.best_fit(1) is table[0], (
        "slots that were never taken come in order of their numbers"
    )
    for slot in table:
        table.take(slot)
    assert table.best_fit(1) is None
    for index in (1, 2, 0):
        table.give_back(table[index], None, 0)
    assert table.best_fit(1) is table[0]
    assert table.emptiest(2) == [table[1], table[2]]
    table.reset_order()
    assert list(table.free) == [table[0], table[1], table[2]]
    assert table.best_fit(1) is table[0]


def test_victims_may_shrink_during_iteration() -> None:
    table = SlotTable(3, Journal())
    for slot in table:
        table.change(slot, mapped=2)
    seen = []
    for slot in table.victims():
        seen.append(slot)
        for one in table:
            table.change(one, job=SimpleNamespace(takes_pages=True, pages=2))
    assert seen == [table[0]]


def test_pages_that_can_be_unmapped() -> None:
    journal = Journal()
    table = SlotTable(3, journal, block=4)
    assert table.columns.spare == 0
    table.change(table[1], mapped=3)
    assert table.columns.spare == 3
    journal.change([[[table[0], table[2]], "mapped", [4, 5]]])
    assert table.columns.spare == 12
    table.change(table[2], large_end=4)
    table.change(table[2], active=True, granted=1)
    assert table.columns.spare == 8, "an entry of 2 MiB that its owner has a part of"
