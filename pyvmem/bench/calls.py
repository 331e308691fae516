# SPDX-License-Identifier: MIT
"""Table 2 of the paper: the cost of each call at every page size, compared with cuMem*.

Every call is timed individually from Python, through cffi for vmem and through cuda.bindings for
the baseline. The times include what Python and the binding add (`overhead`, measured with an empty
call); `net` excludes it. Pages are mapped unzeroed (VMEM_CREATE_DIRTY), because cuMemMap does not
write to memory either; `map_zeroed` is our default.
"""

from __future__ import annotations

from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.setting import MB, Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_each

__all__ = ["run"]

_OPS = {
    "reserve": "reserve addresses",
    "reserve_plain": "reserve addresses, plain",
    "free": "free addresses",
    "free_plain": "free addresses, plain",
    "create": "create",
    "create_cold": "create, pool empty",
    "map": "map",
    "set_access": "set access",
    "map_access": "map with access",
    "map_zeroed": "map with access, zeroed",
    "unmap": "unmap",
    "release": "release",
    "unmap_release": "unmap and release in one call",
}
_RANGE = 64 * MB  # size of each timed reservation

_Book = dict[str, Samples]


def _page(book: _Book, op: str) -> list[float]:
    return book.setdefault(op, Samples()).new_round()


class _Ours:
    """Times libvmem's calls at one page size."""

    def __init__(self, setting: Setting, page: int) -> None:
        self.n = setting.native
        self.page = page
        self.count = setting.count(64, 4)
        self.book: _Book = {}
        self.dirty = self.n.create_opts(page)
        self.zeroed = self.n.create_opts(page, dirty=False)
        self.base = self.n.reserve(page * self.count)
        self.handles = self.n.handles(self.count)

    def _create(self, opts: Any, into: list[float]) -> None:
        n = self.n
        args = [(n.vm, self.page, opts, self.handles + i) for i in range(self.count)]
        n.check("vMemCreate", time_each(n.lib.vMemCreate, args, into))

    def _map(self, into: list[float]) -> None:
        n, page = self.n, self.page
        args = [
            (n.vm, self.base + i * page, page, self.handles[i], 0, 0) for i in range(self.count)
        ]
        n.check("vMemMap", time_each(n.lib.vMemMap, args, into))

    def _release(self, into: list[float]) -> None:
        n = self.n
        args = [(n.vm, self.handles[i]) for i in range(self.count)]
        n.check("vMemRelease", time_each(n.lib.vMemRelease, args, into))

    def turn(self) -> None:
        n, book = self.n, self.book
        n.warm(self.page * self.count)
        self._create(self.dirty, _page(book, "create"))
        self._map(_page(book, "map_access"))
        addrs = [(n.vm, self.base + i * self.page, self.page) for i in range(self.count)]
        n.check("vMemUnmap", time_each(n.lib.vMemUnmap, addrs, _page(book, "unmap")))
        self._release(_page(book, "release"))

        self._create(self.zeroed, [])
        self._map(_page(book, "map_zeroed"))
        self._release(_page(book, "unmap_release"))

    def cold_turn(self) -> None:
        """Creates a page while the pool is empty, which forces the driver to allocate a slab."""
        n = self.n
        n.trim()
        args = [(n.vm, self.page, self.dirty, self.handles)]
        n.check("vMemCreate", time_each(n.lib.vMemCreate, args, _page(self.book, "create_cold")))
        n.release(self.handles[0])

    def close(self) -> None:
        self.n.free(self.base)


class _OurRanges:
    """Times reserving and freeing addresses with libvmem."""

    def __init__(self, setting: Setting, *, plain: bool) -> None:
        self.n = setting.native
        self.count = setting.count(16, 2)
        self.opts = self.n.reserve_opts(plain=True) if plain else self.n.ffi.NULL
        self.names = ("reserve_plain", "free_plain") if plain else ("reserve", "free")
        self.addrs = self.n.handles(self.count)
        self.book: _Book = {}

    def turn(self) -> None:
        n = self.n
        args = [(n.vm, _RANGE, self.opts, self.addrs + i) for i in range(self.count)]
        into = _page(self.book, self.names[0])
        n.check("vMemReserve", time_each(n.lib.vMemReserve, args, into))
        frees = [(n.vm, self.addrs[i], 0) for i in range(self.count)]
        n.check("vMemFree", time_each(n.lib.vMemFree, frees, _page(self.book, self.names[1])))


class _Cumem:
    """Times cuMem* calls with 2 MB pages."""

    def __init__(self, setting: Setting) -> None:
        assert setting.cumem is not None
        self.m = setting.cumem
        self.page = self.m.page
        self.count = setting.count(64, 4)
        self.ranges = setting.count(16, 2)
        self.book: _Book = {}
        self.base = self.m.reserve(self.page * self.count)

    def turn(self) -> None:
        m, d, page, book = self.m, self.m.driver, self.page, self.book
        created = time_each(
            d.cuMemCreate, [m.create_args(page)] * self.count, _page(book, "create")
        )
        handles = m.check_all("cuMemCreate", created)
        addrs = [self.base + i * page for i in range(self.count)]
        maps = [m.map_args(a, page, h) for a, h in zip(addrs, handles, strict=True)]
        map_times = _page(book, "map")
        m.check_all("cuMemMap", time_each(d.cuMemMap, maps, map_times))
        accesses = [m.access_args(a, page) for a in addrs]
        access_times = _page(book, "set_access")
        m.check_all("cuMemSetAccess", time_each(d.cuMemSetAccess, accesses, access_times))
        both = zip(map_times, access_times, strict=True)
        _page(book, "map_access").extend(a + b for a, b in both)
        unmaps = [(a, page) for a in addrs]
        m.check_all("cuMemUnmap", time_each(d.cuMemUnmap, unmaps, _page(book, "unmap")))
        releases = [(h,) for h in handles]
        m.check_all("cuMemRelease", time_each(d.cuMemRelease, releases, _page(book, "release")))

    def range_turn(self) -> None:
        m, d = self.m, self.m.driver
        reserved = time_each(
            d.cuMemAddressReserve,
            [m.reserve_args(_RANGE)] * self.ranges,
            _page(self.book, "reserve"),
        )
        addrs = m.check_all("cuMemAddressReserve", reserved)
        frees = [(a, _RANGE) for a in addrs]
        m.check_all(
            "cuMemAddressFree", time_each(d.cuMemAddressFree, frees, _page(self.book, "free"))
        )

    def close(self) -> None:
        self.m.free(self.base, self.page * self.count)


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures the rows of calls/ and adds them to `part`."""
    ours = {page: _Ours(setting, page) for page in setting.pages}
    ranges = [_OurRanges(setting, plain=False), _OurRanges(setting, plain=True)]
    theirs = _Cumem(setting) if setting.cumem is not None else None
    turns = [o.turn for o in ours.values()] + [r.turn for r in ranges]
    if theirs is not None:
        turns += [theirs.turn, theirs.range_turn]
    with quiet():
        interleave(turns, setting.count(25, 2), deadline)
        interleave([o.cold_turn for o in ours.values()], setting.count(25, 2), deadline)
    overhead = setting.overhead(setting.system).each
    for page, system in ours.items():
        for op, samples in system.book.items():
            _add(part, op, setting.system, page, samples, overhead)
        system.close()
    for entry in ranges:
        for op, samples in entry.book.items():
            _add(part, op, setting.system, 0, samples, overhead)
    setting.missing_pages(part, "map_access")
    if theirs is None:
        part.not_run("*/cumem", setting.cuda_why)
        return
    costs = setting.overhead("cumem")
    for op, samples in theirs.book.items():
        # The Python overhead subtracted here makes cuMem look faster. For set_access and
        # map_access it includes converting the access descriptor, in cuMem's favor.
        cost = {"set_access": costs.refused, "map_access": costs.each + costs.refused}
        page = 0 if op in ("reserve", "free") else theirs.page
        _add(part, op, "cumem", page, samples, cost.get(op, costs.each))
    theirs.close()


def _add(part: Part, op: str, system: str, page: int, samples: Samples, overhead_ns: float) -> None:
    samples.drop_first_round()
    name = f"{op}/{system}" + (f"/{label(page)}" if page else "")
    note = f"{label(_RANGE)}B of addresses" if not page else ""
    if op == "create_cold":
        note = "takes a slab from the driver"
    part.time(name, _OPS[op], system, samples, page=page, overhead_ns=overhead_ns, note=note)
