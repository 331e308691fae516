# SPDX-License-Identifier: MIT
"""Allocation bandwidth (the paper's table 7): how fast memory is mapped, at every page size."""

from __future__ import annotations

from collections.abc import Callable

from pyvmem.bench.native import DIRTY, HOLES, POPULATE, UNMAP
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import MB, Setting, label
from pyvmem.bench.timing import Deadline, interleave, quiet, time_block, time_each
from pyvmem.commands.cumem import CuMem

__all__ = ["run"]

_Turn = Callable[[], None]


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Times allocating (creating and mapping) from a warm pool, page by page and in one batch."""
    n = setting.native
    total = setting.count(256 * MB, 4 * MB)
    base = n.reserve(total)
    n.warm(total)
    book = Book(part)
    turns: list[_Turn] = []
    for page in setting.pages:
        turns.append(_single(setting, book, base, total, page))
        turns.append(_batch(setting, book, base, total, page, zeroed=False))
        turns.append(_batch(setting, book, base, total, page, zeroed=True))
    m = setting.cumem
    there = m.reserve(total) if m is not None else 0
    if m is not None:
        turns.append(_cumem(setting, m, book, there, total, m.page))
        turns.append(_cumem(setting, m, book, there, total, total))
    else:
        part.not_run("*/cumem", setting.cuda_why)
    with quiet():
        interleave(turns, setting.count(10, 2), deadline)
    book.close()
    n.free(base)
    if m is not None:
        m.free(there, total)
    setting.missing_pages(part, "single")
    part.notes.append(f"{total // MB} MB in each sample; ours from a warm pool")


def _single(setting: Setting, book: Book, base: int, total: int, page: int) -> _Turn:
    n, count = setting.native, total // page
    samples = book.samples(
        f"single/{n.system}/{label(page)}",
        "create and map, page by page",
        n.system,
        page=page,
        nbytes=total,
        unit="ms",
        calls=2 * count,
        overhead_ns=setting.overhead(n.system).block,
    )
    opts, handles = n.create_opts(page), n.handles(count)
    creates = [(n.vm, page, opts, handles + i) for i in range(count)]

    def turn() -> None:
        into: list[float] = []
        n.check("vMemCreate", time_block(n.lib.vMemCreate, creates, into))
        maps = [(n.vm, base + i * page, page, handles[i], 0, 0) for i in range(count)]
        n.check("vMemMap", time_block(n.lib.vMemMap, maps, into))
        samples.new_round().append(sum(into) * count)
        n.check("vMemRelease", [n.lib.vMemRelease(n.vm, handles[i]) for i in range(count)])

    return turn


def _batch(
    setting: Setting, book: Book, base: int, total: int, page: int, *, zeroed: bool
) -> _Turn:
    n = setting.native
    samples = book.samples(
        f"{'zeroed' if zeroed else 'batch'}/{n.system}/{label(page)}",
        "create and map, one batch" + (", zeroed" if zeroed else ""),
        n.system,
        page=page,
        nbytes=total,
        unit="ms",
        overhead_ns=setting.overhead(n.system).each,
    )
    flags = 0 if zeroed else DIRTY
    ops = n.ops([{"op": POPULATE, "addr": base, "bytes": total, "page_size": page, "flags": flags}])
    clear = n.ops([{"op": UNMAP, "addr": base, "bytes": total, "flags": HOLES}])

    def turn() -> None:
        result = time_each(n.lib.vmem_batch, [n.batch_args(ops)], samples.new_round())
        n.check("vmem_batch", result)
        n.batch(clear)

    return turn


def _cumem(setting: Setting, m: CuMem, book: Book, base: int, total: int, page: int) -> _Turn:
    """Returns a turn that allocates `total` bytes in allocations of `page` bytes."""
    d, costs, count = m.driver, setting.overhead("cumem"), total // page
    one = page == total
    samples = book.samples(
        f"{'batch' if one else 'single'}/cumem/{label(m.page)}",
        "create, map, set access" + (", all in one" if one else ", page by page"),
        "cumem",
        page=m.page,
        nbytes=total,
        unit="ms",
        calls=count,
        overhead_ns=2 * costs.block + costs.refused,
    )
    addrs = [base + i * page for i in range(count)]
    accesses = [m.access_args(a, page) for a in addrs]

    def turn() -> None:
        into: list[float] = []
        handles = m.check_all(
            "cuMemCreate", time_block(d.cuMemCreate, [m.create_args(page)] * count, into)
        )
        maps = [m.map_args(a, page, h) for a, h in zip(addrs, handles, strict=True)]
        m.check_all("cuMemMap", time_block(d.cuMemMap, maps, into))
        m.check_all("cuMemSetAccess", time_block(d.cuMemSetAccess, accesses, into))
        samples.new_round().append(sum(into) * count)
        for addr, handle in zip(addrs, handles, strict=True):
            m.unmap(addr, page)
            m.release(handle)

    return turn
