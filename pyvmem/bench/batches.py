# SPDX-License-Identifier: MIT
"""Measures batches of 64 pages, as one contiguous run and as scattered pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyvmem.bench.native import MAP, UNMAP, Native
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_each
from pyvmem.commands.cumem import CuMem

__all__ = ["run"]

_PAGES = 64
_Turn = Callable[[], None]


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Times mapping and unmapping 64 existing pages; cuMem* needs at least one call per page."""
    n, book = setting.native, Book(part)
    turns: list[_Turn] = []
    held: list[tuple[int, list[int]]] = []
    for page in setting.pages:
        base = n.reserve(2 * _PAGES * page)
        run_of_all = n.create(_PAGES * page, page)
        pages = _apart(n, page)
        held.append((base, [run_of_all, *pages]))
        turns.append(_contiguous(setting, book, base, page, run_of_all))
        turns.append(_scattered(setting, book, base, page, pages))
    m = setting.cumem
    if m is not None:
        there = m.reserve(2 * _PAGES * m.page)
        blocks = [m.create(m.page) for _ in range(_PAGES)]
        turns.append(_cumem(setting, m, book, there, blocks, "contiguous", m.page))
        turns.append(_cumem(setting, m, book, there, blocks, "scattered", 2 * m.page))
    else:
        part.not_run("*/cumem", setting.cuda_why)
    with quiet():
        interleave(turns, setting.count(25, 2), deadline)
    book.close()
    for base, handles in held:
        for handle in handles:
            n.release(handle)
        n.free(base)
    if m is not None:
        for block in blocks:
            m.release(block)
        m.free(there, 2 * _PAGES * m.page)
    setting.missing_pages(part, "map_scattered")


def _apart(n: Native, page: int) -> list[int]:
    """Returns pages that are not physically adjacent: every other page of a sequence."""
    made = [n.create(page, page) for _ in range(2 * _PAGES)]
    for handle in made[1::2]:
        n.release(handle)
    return made[::2]


def _rows(setting: Setting, book: Book, how: str, page: int, note: str) -> tuple[Samples, Samples]:
    system = setting.system
    maps, unmaps = (
        book.samples(
            f"{verb}_{how}/{system}/{label(page)}",
            f"{verb} {_PAGES} pages, {how}",
            system,
            page=page,
            nbytes=_PAGES * page,
            overhead_ns=setting.overhead(system).each,
            note=note,
        )
        for verb in ("map", "unmap")
    )
    return maps, unmaps


def _driver_calls(n: Native, map_ops: Any, unmap_ops: Any) -> str:
    """Runs each of the two batches once and counts its driver calls."""
    before = n.stats()
    n.batch(map_ops)
    n.batch(unmap_ops)
    after = n.stats()
    calls = [after[name] - before[name] for name in ("map_calls", "unmap_calls")]
    return f"driver calls: {calls[0]} to map, {calls[1]} to unmap"


def _turn(setting: Setting, map_ops: Any, unmap_ops: Any, rows: tuple[Samples, Samples]) -> _Turn:
    n, repeats = setting.native, setting.count(8, 1)
    map_args, unmap_args = [n.batch_args(map_ops)], [n.batch_args(unmap_ops)]

    def turn() -> None:
        into, out = rows[0].new_round(), rows[1].new_round()
        for _ in range(repeats):
            n.check("vmem_batch", time_each(n.lib.vmem_batch, map_args, into))
            n.check("vmem_batch", time_each(n.lib.vmem_batch, unmap_args, out))

    return turn


def _contiguous(setting: Setting, book: Book, base: int, page: int, handle: int) -> _Turn:
    n, nbytes = setting.native, _PAGES * page
    map_ops = n.ops([{"op": MAP, "addr": base, "bytes": nbytes, "handle": handle}])
    unmap_ops = n.ops([{"op": UNMAP, "addr": base, "bytes": nbytes}])
    rows = _rows(setting, book, "contiguous", page, _driver_calls(n, map_ops, unmap_ops))
    return _turn(setting, map_ops, unmap_ops, rows)


def _scattered(setting: Setting, book: Book, base: int, page: int, pages: list[int]) -> _Turn:
    n = setting.native
    # The pages are not adjacent in memory, and gaps separate the addresses, so nothing can be
    # merged.
    map_ops = n.ops(
        [
            {"op": MAP, "addr": base + 2 * i * page, "bytes": page, "handle": handle}
            for i, handle in enumerate(pages)
        ]
    )
    unmap_ops = n.ops(
        [{"op": UNMAP, "addr": base, "bytes": page, "count": _PAGES, "stride": 2 * page}]
    )
    rows = _rows(setting, book, "scattered", page, _driver_calls(n, map_ops, unmap_ops))
    return _turn(setting, map_ops, unmap_ops, rows)


def _cumem(
    setting: Setting, m: CuMem, book: Book, base: int, blocks: list[Any], how: str, stride: int
) -> _Turn:
    d, page, costs = m.driver, m.page, setting.overhead("cumem")
    addrs = [base + i * stride for i in range(_PAGES)]
    maps = [m.map_args(a, page, b) for a, b in zip(addrs, blocks, strict=True)]
    # cuMemSetAccess takes a range, so adjacent pages need only one call.
    if stride == page:
        accesses = [m.access_args(base, _PAGES * page)]
    else:
        accesses = [m.access_args(a, page) for a in addrs]
    unmaps = [(a, page) for a in addrs]
    empty = {
        "map": _PAGES * costs.each + len(accesses) * costs.refused,
        "unmap": _PAGES * costs.each,
    }
    notes = {
        "map": f"{_PAGES} calls of cuMemMap, {len(accesses)} of cuMemSetAccess",
        "unmap": f"{_PAGES} calls of cuMemUnmap",
    }
    mapped, unmapped = (
        book.samples(
            f"{verb}_{how}/cumem/{label(page)}",
            f"{verb} {_PAGES} pages, {how}",
            "cumem",
            page=page,
            nbytes=_PAGES * page,
            overhead_ns=empty[verb],
            note=notes[verb],
        )
        for verb in ("map", "unmap")
    )

    def turn() -> None:
        into: list[float] = []
        m.check_all("cuMemMap", time_each(d.cuMemMap, maps, into))
        m.check_all("cuMemSetAccess", time_each(d.cuMemSetAccess, accesses, into))
        mapped.new_round().append(sum(into))
        out: list[float] = []
        m.check_all("cuMemUnmap", time_each(d.cuMemUnmap, unmaps, out))
        unmapped.new_round().append(sum(out))

    return turn
