# SPDX-License-Identifier: MIT
"""Measures mapping cost per byte, and the cost of creating and mapping pages from a warm pool."""

from __future__ import annotations

from collections.abc import Callable

from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import MB, Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_block, time_each
from pyvmem.commands.cumem import CuMem

__all__ = ["run_bytes", "run_pool"]

_Turn = Callable[[], None]


def _run_turn(setting: Setting, handle: int, addr: int, size: int, samples: Samples) -> _Turn:
    """Returns a turn that maps the whole handle at `addr` in one call, several times per round."""
    n, repeats = setting.native, setting.count(8, 1)
    args = [(n.vm, addr, size, handle, 0, 0)]

    def turn() -> None:
        into = samples.new_round()
        for _ in range(repeats):
            n.check("vMemMap", time_each(n.lib.vMemMap, args, into))
            n.unmap(addr, size)

    return turn


def run_bytes(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Maps 2 MB of existing memory, including access rights, in four ways.

    It is mapped page by page; as one run on a 2 MB boundary, where the driver may use one large
    entry; as one run off that boundary, where it cannot; and as one cuMem page.
    """
    n, page, size, book = setting.native, setting.single, 2 * MB, Book(part)
    overhead, count = setting.overhead(n.system).each, size // setting.single
    handle, base = n.create(size, page), n.reserve(2 * size)
    note, repeats = f"{n.runs(handle)} physical run(s)", setting.count(8, 1)
    singles = book.samples(
        f"singles/{n.system}",
        f"2 MB as {count} maps of {label(page)}B",
        n.system,
        nbytes=size,
        calls=count,
        overhead_ns=overhead,
    )

    def turn_singles() -> None:
        args = [(n.vm, base + i * page, page, handle, i * page, 0) for i in range(count)]
        into = singles.new_round()
        for _ in range(repeats):
            each: list[float] = []
            n.check("vMemMap", time_each(n.lib.vMemMap, args, each))
            into.append(sum(each))
            n.unmap(base, size)

    turns: list[_Turn] = [turn_singles]
    for name, what, addr in (
        ("run_aligned", "2 MB as one run, on a 2 MB boundary", base),
        ("run_offset", f"2 MB as one run, {label(page)}B off the boundary", base + page),
    ):
        samples = book.samples(
            f"{name}/{n.system}", what, n.system, nbytes=size, overhead_ns=overhead, note=note
        )
        turns.append(_run_turn(setting, handle, addr, size, samples))
    m = setting.cumem
    if m is not None:
        there, block = m.reserve(size), m.create(size)
        turns.append(_cumem_page(setting, m, book, there, block, size))
    else:
        part.not_run("page/cumem", setting.cuda_why)
    with quiet():
        interleave(turns, setting.count(25, 2), deadline)
    book.close()
    n.release(handle)
    n.free(base)
    if m is not None:
        m.release(block)
        m.free(there, size)


def _cumem_page(
    setting: Setting, m: CuMem, book: Book, addr: int, block: object, size: int
) -> _Turn:
    d, costs, repeats = m.driver, setting.overhead("cumem"), setting.count(8, 1)
    samples = book.samples(
        "page/cumem",
        "2 MB as one page: map, set access",
        "cumem",
        nbytes=size,
        overhead_ns=costs.each + costs.refused,
    )
    maps, accesses = [m.map_args(addr, size, block)], [m.access_args(addr, size)]

    def turn() -> None:
        into = samples.new_round()
        for _ in range(repeats):
            each: list[float] = []
            m.check_all("cuMemMap", time_each(d.cuMemMap, maps, each))
            m.check_all("cuMemSetAccess", time_each(d.cuMemSetAccess, accesses, each))
            into.append(sum(each))
            m.unmap(addr, size)

    return turn


def run_pool(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures vMemCreate from a warm pool, and 1,024 contiguous pages mapped in one call."""
    n, page, book = setting.native, setting.single, Book(part)
    block, pages = setting.count(256, 8), setting.count(1024, 16)
    size, costs = pages * page, setting.overhead(n.system)
    n.warm(size + block * page + 64 * MB)
    opts, handles = n.create_opts(page), n.handles(block)
    run, base = n.create(size, page), n.reserve(size + 2 * MB)
    creates, releases = (
        book.samples(
            f"{name}/{n.system}/{label(page)}",
            what,
            n.system,
            page=page,
            overhead_ns=costs.block,
            note=f"a sample is the mean of {block} calls",
        )
        for name, what in (
            ("create", "vMemCreate, warm pool"),
            ("release", "vMemRelease, nothing mapped"),
        )
    )

    def turn_create() -> None:
        into, out = creates.new_round(), releases.new_round()
        for _ in range(setting.count(8, 1)):
            args = [(n.vm, page, opts, handles + i) for i in range(block)]
            n.check("vMemCreate", time_block(n.lib.vMemCreate, args, into))
            gone = [(n.vm, handles[i]) for i in range(block)]
            n.check("vMemRelease", time_block(n.lib.vMemRelease, gone, out))

    turns: list[_Turn] = [turn_create]
    what, note = f"{pages} pages of {label(page)}B, one call", f"{n.runs(run)} physical run(s)"
    for name, where, addr in (
        ("run", ", off a 2 MB boundary", base + page),
        ("run_aligned", ", on a 2 MB boundary", base),
    ):
        samples = book.samples(
            f"{name}/{n.system}",
            what + where,
            n.system,
            nbytes=size,
            overhead_ns=costs.each,
            note=note,
        )
        turns.append(_run_turn(setting, run, addr, size, samples))
    with quiet():
        interleave(turns, setting.count(25, 2), deadline)
    book.close()
    n.release(run)
    n.free(base)
