# SPDX-License-Identifier: MIT
"""2 MiB entries through the bindings: requesting, rejecting, splitting and joining."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pyvmem
from pyvmem import Caps, Context, InvalidArgument, NotMapped, NotSupported, OpBatch, Reservation

PAGE, BLOCK = 64 << 10, 2 << 20
PAGES = BLOCK // PAGE


@pytest.fixture
def context(backend: str) -> Iterator[Context]:
    """Opens a context with large entries made of small pages, if the back end supports them."""
    try:
        opened = Context(backend, granule=PAGE, large_entries=True)
    except NotSupported:
        assert backend in ("uvm", "cuda")  # cuda has no granule below 2 MiB
        pytest.skip(f"{backend} has no large entries of small pages")
    with opened:
        yield opened
        opened.check()


@pytest.fixture
def space(context: Context) -> Iterator[Reservation]:
    with context.reserve(8 * BLOCK) as reservation:
        yield reservation


def populate(space: Reservation, offset: int, size: int, *, spread: bool = False) -> None:
    ops = OpBatch(1)
    ops.populate(space.addr + offset, size, spread=spread)
    space.context.batch(ops)


def test_large_entries_only_on_request(backend: str, context: Context) -> None:
    assert Caps.LARGE_ENTRIES in context.info.caps
    with Context(backend, granule=PAGE) as plain:
        assert Caps.LARGE_ENTRIES not in plain.info.caps
        with plain.reserve(2 * BLOCK) as space:
            populate(space, 0, 2 * BLOCK)
            assert space.query().entry_bytes == PAGE
            assert plain.stats().large_entries == 0
            space.unmap(PAGE, PAGE)


def test_a_granule_of_2_mib_has_no_large_entries(backend: str) -> None:
    with Context(backend, granule=BLOCK, large_entries=True) as context:
        assert Caps.LARGE_ENTRIES not in context.info.caps
        with context.reserve(2 * BLOCK) as space:
            populate(space, 0, BLOCK)
            assert space.query().entry_bytes == BLOCK
            assert space.query(BLOCK).entry_bytes == 0
            ops = OpBatch(1)
            ops.unmap(space.addr, BLOCK, split=True)  # `split` has no effect here
            context.batch(ops)


def test_unmapping_a_part_needs_split(context: Context, space: Reservation) -> None:
    populate(space, 0, 2 * BLOCK)
    assert context.stats().large_entries == 2
    assert space.query(PAGE).entry_bytes == BLOCK
    with pytest.raises(InvalidArgument, match=rf"{BLOCK} bytes at {space.addr:#x}.*VMEM_OP_SPLIT"):
        space.unmap(PAGE, PAGE)
    ops = OpBatch(1)
    ops.unmap(space.addr + PAGE, PAGE, holes=True)
    with pytest.raises(InvalidArgument, match="VMEM_OP_SPLIT"):
        context.batch(ops)
    assert context.stats().large_entries == 2
    assert context.stats().splits == 0


def test_split_and_joined(context: Context, space: Reservation) -> None:
    populate(space, 0, BLOCK)
    for page in range(PAGES):
        space.fill(page * PAGE, PAGE, page + 1)
    kept = context.retain(space.addr + 3 * PAGE, PAGE)
    ops = OpBatch(1)
    ops.unmap(space.addr + 3 * PAGE, PAGE, split=True)
    context.submit(ops).wait()
    assert space.query().entry_bytes == PAGE
    assert space.query(3 * PAGE).entry_bytes == 0
    ops.clear()
    ops.map(space.addr + 3 * PAGE, PAGE, kept, consume=True)
    context.batch(ops)
    assert space.query(3 * PAGE).entry_bytes == PAGE
    ops.clear()
    ops.join(space.addr, BLOCK)
    context.batch(ops)
    assert space.query().entry_bytes == BLOCK
    stats = context.stats()
    assert (stats.splits, stats.joins, stats.large_entries) == (1, 1, 1)
    assert space.join(0, BLOCK) == 0  # nothing is left to join
    for page in range(PAGES):
        assert space.read(page * PAGE, PAGE) == bytes([page + 1]) * PAGE


def test_replaced_in_part(context: Context, space: Reservation) -> None:
    populate(space, 0, BLOCK)
    populate(space, 4 * BLOCK, PAGE)
    space.fill(0, BLOCK, 1)
    space.fill(4 * BLOCK, PAGE, 2)
    pages = context.retain(space.addr + 4 * BLOCK, PAGE)
    ops = OpBatch(1)
    ops.map(space.addr + PAGE, PAGE, pages, replace=True)
    with pytest.raises(InvalidArgument, match="VMEM_OP_SPLIT"):
        context.batch(ops)
    ops.clear()
    ops.map(space.addr + PAGE, PAGE, pages, split=True)
    with pytest.raises(InvalidArgument, match="without VMEM_OP_REPLACE"):
        context.batch(ops)
    ops.clear()
    ops.map(space.addr + PAGE, PAGE, pages, consume=True, replace=True, split=True)
    context.batch(ops)
    assert space.read(0, 3 * PAGE) == bytes(PAGE * [1] + PAGE * [2] + PAGE * [1])


def test_growth_page_by_page_is_joined(context: Context, space: Reservation) -> None:
    for page in range(PAGES):
        populate(space, page * PAGE, PAGE, spread=True)
    assert context.stats().large_entries == 0
    assert space.join() == 1
    assert space.query().entry_bytes == BLOCK


def test_bad_joins(context: Context, space: Reservation) -> None:
    ops = OpBatch(1)
    ops.join(space.addr, BLOCK)
    with pytest.raises(NotMapped):
        context.batch(ops)
    ops.clear()
    ops.join(space.addr + 1, BLOCK)
    with pytest.raises(InvalidArgument):
        context.batch(ops)
    ops.clear()
    ops.join(space.addr, BLOCK, holes=True)
    context.batch(ops)
    with pytest.raises(InvalidArgument, match="the reservation has"):
        space.join(0, 9 * BLOCK)
    assert pyvmem.Caps.JOIN in context.info.caps
