# SPDX-License-Identifier: MIT
"""Checks of memory contents: mapping, zeroing, TLB invalidation, aliases, read-only."""

from __future__ import annotations

from pyvmem import Caps, Context, OpBatch, ReadOnly
from pyvmem.selftest.check import Failed, NotRun, expect, pattern, raises, reserve

__all__ = ["CHECKS"]

_PAGES = 64  # pages per round: more than a GPU's first-level TLBs cover


def _holds(context: Context, addr: int, seed: int, what: str) -> None:
    """Checks that the page's first, middle and last bytes match `pattern`."""
    page = context.info.granule
    for offset in (0, page // 2, page - 64):
        got = context.read(addr + offset, 64)
        if got != pattern(seed, offset):
            raise Failed(
                f"{what}: {addr + offset:#x} holds {got[:8].hex()}..., not what was written"
            )


def _put(context: Context, addr: int, seed: int) -> None:
    page = context.info.granule
    for offset in (0, page // 2, page - 64):
        context.write(addr + offset, pattern(seed, offset))


def map_and_read(context: Context) -> str:
    """Each of the pages scattered over 1 GB keeps its own contents."""
    page, stride = context.info.granule, max(16 << 20, context.info.granule)
    with reserve(context, stride * _PAGES) as range_:
        ops = OpBatch(1)
        ops.populate(range_.addr, page, _PAGES, stride)
        context.batch(ops)
        for i in range(_PAGES):
            _put(context, range_.addr + i * stride, i)
        for i in range(_PAGES):
            _holds(context, range_.addr + i * stride, i, "a page")
    return f"{_PAGES} pages of {page} bytes, {stride} apart"


def remap_elsewhere(context: Context) -> str:
    """TLB invalidation: an address that was read before shows the newly mapped page right away.

    Two sets of pages swap addresses in every round, and are read before and after.
    """
    page, rounds = context.info.granule, 16
    with (
        context.create(_PAGES * page) as one,
        context.create(_PAGES * page) as other,
        reserve(context, 2 * _PAGES * page) as range_,
    ):
        places = (range_.addr, range_.addr + _PAGES * page)
        for place, pages in enumerate((one, other)):
            context.map(places[place], _PAGES * page, pages)
            for i in range(_PAGES):
                _put(context, places[place] + i * page, 1000 * place + i)
        for turn in range(rounds):
            for place in (0, 1):
                for i in range(_PAGES):
                    seed = 1000 * ((place + turn) % 2) + i
                    _holds(context, places[place] + i * page, seed, f"round {turn}, after a remap")
            context.unmap(range_.addr, 2 * _PAGES * page)
            for place in (0, 1):
                pages = (one, other)[(place + turn + 1) % 2]
                context.map(places[place], _PAGES * page, pages)
    return f"{2 * rounds * _PAGES} reads of pages that swapped addresses"


def zeroing(context: Context) -> str:
    """New pages are zeroed, whether from the pool or the driver."""
    page, count = context.info.granule, 32
    with reserve(context, count * page) as range_:
        ops = OpBatch(1)
        for turn in range(6):
            ops.clear()
            ops.populate(range_.addr, count * page)
            context.batch(ops)
            data = context.read(range_.addr, count * page)
            if data.count(0) != len(data):
                at = next(i for i, byte in enumerate(data) if byte)
                raise Failed(f"turn {turn}: byte {at} of new pages is {data[at]:#x}")
            context.fill(range_.addr, count * page, 0xA5)
            context.unmap(range_.addr, count * page)
            if turn % 2:
                context.trim(0)  # returns the pages to the driver, which then zeroes the next ones
    return f"6 x {count} pages, every byte"


def alias(context: Context) -> str:
    """A page mapped at two addresses is the same memory."""
    page = context.info.granule
    with context.create(page) as pages, reserve(context, 4 * page) as range_:
        context.map(range_.addr, page, pages)
        context.map(range_.addr + 2 * page, page, pages)
        _put(context, range_.addr, 7)
        _holds(context, range_.addr + 2 * page, 7, "the other address")
        context.unmap(range_.addr, page)
        _holds(context, range_.addr + 2 * page, 7, "the remaining address")
        context.unmap(range_.addr + 2 * page, page)
    return "a write is seen through the other address"


def read_only(context: Context) -> str:
    """A read-only mapping can be read, and the library rejects writes through it."""
    if Caps.READONLY not in context.info.caps:
        raise NotRun("this back end has no read-only mappings")
    page = context.info.granule
    with context.create(page) as pages, reserve(context, 4 * page) as range_:
        context.map(range_.addr, page, pages)
        _put(context, range_.addr, 9)
        context.map(range_.addr + page, page, pages, readonly=True)
        _holds(context, range_.addr + page, 9, "the read-only address")
        raises(ReadOnly, lambda: context.write(range_.addr + page, b"x"))
        _holds(context, range_.addr, 9, "after a refused write")
        context.unmap(range_.addr, 2 * page)
    return "reads; see `device faults` for writes by a kernel"


def sparse(context: Context) -> str:
    """A page in a sparse reservation keeps what is written; once remapped, it is zero."""
    if Caps.SPARSE not in context.info.caps:
        raise NotRun("this back end has no sparse reservations")
    page = context.info.granule
    with reserve(context, 8 * page, sparse=True) as range_:
        ops = OpBatch(1)
        ops.populate(range_.addr + page, page)
        context.batch(ops)
        _put(context, range_.addr + page, 3)
        _holds(context, range_.addr + page, 3, "a page in a sparse reservation")
        context.unmap(range_.addr + page, page)
        context.batch(ops)
        data = context.read(range_.addr + page, page)
        expect(not any(data), "a page mapped again in a sparse reservation is not zero")
        context.unmap(range_.addr + page, page)
    return "mapped, unmapped, mapped again"


def page_sizes(context: Context) -> str:
    """Pages of every size that the back end reports work."""
    sizes = context.info.page_sizes
    for size in sizes:
        with reserve(context, 5 * max(size, 2 << 20)) as range_:
            # The reservation is only aligned to its smallest page.
            first = -(-range_.addr // size) * size
            ops = OpBatch(1)
            ops.populate(first, size, 2, 2 * size, page_size=size)
            context.batch(ops)
            for addr in (first, first + 2 * size):
                context.write(addr + size - 64, pattern(size, addr))
            for addr in (first, first + 2 * size):
                got = context.read(addr + size - 64, 64)
                expect(got == pattern(size, addr), f"a page of {size} bytes lost what was written")
            context.unmap(first, size)
            context.unmap(first + 2 * size, size)
    return ", ".join(str(size) for size in sizes)


CHECKS = (map_and_read, remap_elsewhere, zeroing, alias, read_only, sparse, page_sizes)
