# SPDX-License-Identifier: MIT
"""Measures time per call, kernel memory and teardown time with 1 k to 1 M live pages.

There are two patterns. In *runs*, as in prefill, a batch maps 64 pages in each of 4 tensors for one
request. In *decode*, 256 requests grow page by page: a batch maps one page in each of 4 tensors for
8 of the requests, in an order that is reshuffled (with a fixed seed) for each page. `spread`
asks for pages that are neighbors (VMEM_OP_SPREAD); `consolidated` calls vmem_join on everything
after every 131,072 pages, as an engine would at safe points, and before the teardown.

The driver has handles for 524,288 mappings across all processes, so a million individually mapped
pages cannot all be live; with `spread` and `consolidated` they can.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pyvmem.bench.growth import LEVELS, PATTERNS, TENSORS, Pattern, Shape
from pyvmem.bench.memory import Delta, KernelMemory
from pyvmem.bench.native import DIRTY, POPULATE, SPREAD, Native
from pyvmem.bench.record import Part
from pyvmem.bench.setting import GB, KB, Setting
from pyvmem.bench.timing import Deadline, Samples, quiet, time_each
from pyvmem.errors import VMemError

__all__ = ["LEVELS", "run"]

_NAMES = {1 << 10: "1k", 10 << 10: "10k", 100 << 10: "100k", 400 << 10: "400k", 1 << 20: "1M"}
_KEEP_ALL = (1 << 64) - 1
_SAFE_POINT = 128 << 10  # pages mapped between joins


def level_name(pages: int) -> str:
    """Formats a number of pages for use in row names: 1024 -> "1k"."""
    return _NAMES.get(pages, str(pages))


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures all patterns at all levels, smallest level first, until memory or time runs out."""
    if not Path("/proc/meminfo").exists():
        part.not_run("*", "kernel memory is read from /proc/meminfo, which does not exist")
        return
    levels = setting.live_levels or (LEVELS[:1] if setting.quick else LEVELS)
    setting.native.trim()
    per_page: dict[str, float] = {}  # seconds per page, as measured at the previous level
    for pages in levels:
        for pattern in PATTERNS:
            name = f"{pattern.name}/{setting.system}/{level_name(pages)}"
            if pages > pattern.most:
                part.not_run(name, f"no row above {level_name(pattern.most)}, to save time")
                continue
            if pattern.join and not setting.joins:
                part.not_run(name, f"vmem_join saves nothing on {setting.system}")
                continue
            expected = per_page.get(pattern.name, 0.0) * pages
            if not deadline.allows(expected):
                part.not_run(name, f"needs about {expected:.0f} s, {deadline.left:.0f} s are left")
                continue
            start = time.monotonic()
            try:
                _measure(setting, part, pattern, pages, name)
            except VMemError as error:
                part.not_run(name, f"{error.errno_name}: {error}")
            per_page[pattern.name] = (time.monotonic() - start) / pages
    part.notes.append(
        "kernel memory: the larger of two estimates by difference (Slab and similar fields; "
        "MemTotal less MemAvailable, this process and Shmem); both drift by MBs, so read it at "
        "100k and 1M"
    )
    _baseline(setting, part, deadline)


def _measure(setting: Setting, part: Part, pattern: Pattern, pages: int, name: str) -> None:
    with setting.open(pool_high=_KEEP_ALL) as context:
        n = Native(context)
        page = 64 * KB if 64 * KB in context.info.page_sizes else min(context.info.page_sizes)
        n.warm(pages * page)
        shape = Shape(pattern, pages, page)
        base = n.reserve(shape.nbytes)
        before, calls = KernelMemory.now(), n.stats()
        grow = Samples()
        spent = _Spent()
        with quiet():
            _grow(n, shape, base, pattern, grow, spent)
        made = n.stats()
        driver_calls = made["map_calls"] - calls["map_calls"] - spent.calls
        grown = KernelMemory.now().since(before)
        part.time(
            f"{name}/grow",
            f"{pattern.what}: grow, per page",
            n.system,
            grow,
            page=page,
            note=f"{pages} pages; a sample is the time of a batch of {shape.batch} pages, per page",
        )
        last = Samples([grow.rounds[-1]])
        part.time(f"{name}/grow_last", f"{pattern.what}: the last tenth", n.system, last, page=page)
        driver_ns = made["driver_ns"] - calls["driver_ns"] - spent.ns
        driver_us = driver_ns / 1e3 / max(driver_calls, 1)
        part.value(
            f"{name}/driver_us",
            f"{pattern.what}: driver time per call",
            n.system,
            driver_us,
            "us",
            driver_calls=driver_calls,
        )
        _bytes(part, f"{name}/kernel_bytes", pattern.what, n.system, grown, pages)
        part.value(
            f"{name}/segments", f"{pattern.what}: segments", n.system, made["segments"], "count"
        )
        part.value(
            f"{name}/mappings", f"{pattern.what}: mappings", n.system, made["mappings"], "count"
        )
        if pattern.join:
            _join(part, n, pattern, name, base, shape.nbytes, before, pages, spent)
        start = time.perf_counter_ns()
        n.free(base, unmap=True)
        took = time.perf_counter_ns() - start
        part.value(
            f"{name}/teardown", f"{pattern.what}: teardown", n.system, took / 1e9, "s", pages=pages
        )
        part.value(
            f"{name}/teardown_page",
            f"{pattern.what}: teardown, per page",
            n.system,
            took / 1e3 / pages,
            "us",
        )
        left = KernelMemory.now().since(before)
        _bytes(
            part, f"{name}/kernel_bytes_left", f"{pattern.what}, torn down", n.system, left, pages
        )


def _join(
    part: Part,
    n: Native,
    pattern: Pattern,
    name: str,
    base: int,
    nbytes: int,
    before: KernelMemory,
    pages: int,
    spent: _Spent,
) -> None:
    spent.join(n, base, nbytes)
    part.value(
        f"{name}/consolidate",
        f"{pattern.what}: vmem_join",
        n.system,
        spent.ns / 1e9,
        "s",
        driver_calls=spent.calls,
        safe_points=spent.times,
    )
    after = KernelMemory.now().since(before)
    _bytes(
        part,
        f"{name}/kernel_bytes_after",
        f"{pattern.what}, after vmem_join",
        n.system,
        after,
        pages,
    )


def _bytes(part: Part, row: str, what: str, system: str, delta: Delta, pages: int) -> None:
    part.value(
        row,
        f"{what}: kernel memory per page",
        system,
        delta.value / pages,
        "bytes",
        listed=delta.listed / pages,
        missing=delta.missing / pages,
        own=delta.own / pages,
        memory_added=delta.total,
    )


class _Spent:
    """Accumulates the cost of joining: vmem_join calls, driver calls, nanoseconds."""

    def __init__(self) -> None:
        self.times = self.calls = self.ns = 0

    def join(self, n: Native, base: int, nbytes: int) -> None:
        """Joins everything, as an engine would at a safe point."""
        start = time.perf_counter_ns()
        self.calls += n.join(base, nbytes)
        self.ns += time.perf_counter_ns() - start
        self.times += 1


def _grow(
    n: Native, shape: Shape, base: int, pattern: Pattern, into: Samples, spent: _Spent
) -> None:
    """Maps all pages in ten rounds; a sample is a batch's time divided by its page count."""
    every = _SAFE_POINT // shape.batch if pattern.join else 0
    op = {
        "op": POPULATE,
        "flags": DIRTY | (SPREAD if pattern.spread else 0),
        "bytes": shape.piece * shape.page,
        "count": TENSORS,
        "stride": shape.tensor_bytes,
        "page_size": shape.page,
    }
    ops: Any = n.ops([op] * shape.ops)
    batches = shape.depth * -(-shape.slots // shape.ops)
    tenth = max(batches // 10, 1)
    vmem_batch, clock = n.lib.vmem_batch, time.perf_counter_ns
    samples: list[float] = []
    for i, offsets in enumerate(shape.order()):
        if i % tenth == 0 and len(into.rounds) < 10:
            samples = into.new_round()
        for k, offset in enumerate(offsets):
            ops[k].addr = base + offset
        start = clock()
        result = vmem_batch(n.vm, ops, len(offsets), n.ffi.NULL, 0, 0)
        samples.append((clock() - start) / shape.batch)
        if result:
            n.check("vmem_batch", [result])
        if every and i % every == every - 1:
            spent.join(n, base, shape.nbytes)


def _baseline(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures 2 MB cuMem* pages at the two lowest levels, if they fit in memory."""
    m, cuda = setting.cumem, setting.cuda
    if m is None or cuda is None:
        part.not_run("cumem/*", setting.cuda_why)
        return
    for pages in (16,) if setting.quick else LEVELS[:2]:
        name = f"cumem/cumem/{level_name(pages)}"
        if pages * m.page > cuda.memory()[0] - 2 * GB:
            part.not_run(name, f"{pages * m.page >> 30} GiB are not free")
            continue
        if not deadline.allows(pages * 200e-6):
            part.not_run(name, "no time left")
            continue
        base, grow = m.reserve(pages * m.page), Samples()
        before = KernelMemory.now()
        with quiet():
            addrs, into = [base + i * m.page for i in range(pages)], list[float]()
            create, access = list[float](), list[float]()
            made = time_each(m.driver.cuMemCreate, [m.create_args(m.page)] * pages, create)
            handles = m.check_all("cuMemCreate", made)
            maps = [m.map_args(a, m.page, h) for a, h in zip(addrs, handles, strict=True)]
            m.check_all("cuMemMap", time_each(m.driver.cuMemMap, maps, into))
            accesses = [m.access_args(a, m.page) for a in addrs]
            m.check_all("cuMemSetAccess", time_each(m.driver.cuMemSetAccess, accesses, access))
        parts = zip(create, into, access, strict=True)
        grow.rounds.append([a + b + c for a, b, c in parts])
        grown = KernelMemory.now().since(before)
        part.time(f"{name}/grow", "create, map, set access, per page", "cumem", grow, page=m.page)
        _bytes(part, f"{name}/kernel_bytes", "cuMem*, 2 MB pages", "cumem", grown, pages)
        start = time.perf_counter_ns()
        for addr, handle in zip(addrs, handles, strict=True):
            m.unmap(addr, m.page)
            m.release(handle)
        took = time.perf_counter_ns() - start
        m.free(base, pages * m.page)
        part.value(f"{name}/teardown", "cuMem*: teardown", "cumem", took / 1e9, "s", pages=pages)
