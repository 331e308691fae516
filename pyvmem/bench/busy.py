# SPDX-License-Identifier: MIT
"""Mapping while a kernel keeps every multiprocessor of the GPU full of threads.

A round maps and unmaps pages with the GPU idle, then again under a kernel that runs many times
longer than that takes. Each time the benchmark checks that the kernel is still running afterwards:
if not, a call waited for it, and the part's notes say so.
"""

from __future__ import annotations

from collections.abc import Callable

from pyvmem.bench.kernels import Kernels
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_each

__all__ = ["run"]


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Our pages of `Setting.single` and cuMem*'s of 2 MB; unzeroed, and created beforehand."""
    if setting.cuda is None or setting.cumem is None:
        part.not_run("*", setting.cuda_why)
        return
    kernels, book = Kernels(setting.cuda), Book(part)
    n, m, count = setting.native, setting.cumem, setting.count(64, 4)
    page = setting.single
    base, handles = n.reserve(count * page), [n.create(page, page) for _ in range(count)]
    there = m.reserve(count * m.page)
    blocks = [m.create(m.page) for _ in range(count)]
    maps = [(n.vm, base + i * page, page, h, 0, 0) for i, h in enumerate(handles)]
    unmaps = [(n.vm, base + i * page, page) for i in range(count)]
    addrs = [there + i * m.page for i in range(count)]
    cu_maps = [m.map_args(a, m.page, b) for a, b in zip(addrs, blocks, strict=True)]
    cu_accesses = [m.access_args(a, m.page) for a in addrs]
    cu_unmaps = [(a, m.page) for a in addrs]

    def map_ours(into: list[float]) -> None:
        n.check("vMemMap", time_each(n.lib.vMemMap, maps, into))

    def unmap_ours(into: list[float]) -> None:
        n.check("vMemUnmap", time_each(n.lib.vMemUnmap, unmaps, into))

    def map_theirs(into: list[float]) -> None:
        a: list[float] = []
        b: list[float] = []
        m.check_all("cuMemMap", time_each(m.driver.cuMemMap, cu_maps, a))
        m.check_all("cuMemSetAccess", time_each(m.driver.cuMemSetAccess, cu_accesses, b))
        into.extend(x + y for x, y in zip(a, b, strict=True))

    def unmap_theirs(into: list[float]) -> None:
        m.check_all("cuMemUnmap", time_each(m.driver.cuMemUnmap, cu_unmaps, into))

    costs, turns = setting.overhead("cumem"), list[_Busy]()
    for system, size, do_map, do_unmap, overhead in (
        (n.system, page, map_ours, unmap_ours, setting.overhead(n.system).each),
        ("cumem", m.page, map_theirs, unmap_theirs, costs.each + costs.refused),
    ):
        for how, what in (("idle", "GPU idle"), ("kernel", "a kernel fills the GPU")):
            where = f"{how}/{system}/{label(size)}"
            mapped = book.samples(
                where, f"map with access, {what}", system, page=size, overhead_ns=overhead
            )
            unmapped = book.samples(
                f"unmap_{where}",
                f"unmap, {what}",
                system,
                page=size,
                overhead_ns=setting.overhead(system).each,
            )
            seconds = setting.count(150, 50) / 1e3 if how == "kernel" else 0.0
            turns.append(_Busy(system, kernels, seconds, (do_map, mapped), (do_unmap, unmapped)))
    with quiet():
        interleave(turns, setting.count(15, 2), deadline)
    book.close()
    for handle in handles:
        n.release(handle)
    n.free(base)
    for block in blocks:
        m.release(block)
    m.free(there, count * m.page)
    kernels.close()
    part.notes.append(f"the kernel: {kernels.blocks} blocks of 512 threads")
    part.notes += [note for turn in turns for note in turn.notes()]


class _Busy:
    """One turn: start the kernel (or not), map, unmap."""

    def __init__(
        self,
        system: str,
        kernels: Kernels,
        seconds: float,
        mapping: tuple[Callable[[list[float]], None], Samples],
        unmapping: tuple[Callable[[list[float]], None], Samples],
    ) -> None:
        self.system = system
        self.kernels = kernels
        self.seconds = seconds
        self.calls = {"map": mapping, "unmap": unmapping}
        self.rounds = 0
        self.waited = {"map": 0, "unmap": 0}

    def __call__(self) -> None:
        self.rounds += 1
        for verb, (work, samples) in self.calls.items():
            if self.seconds:
                self.kernels.spin(self.seconds)
            work(samples.new_round())
            if self.seconds and not self.kernels.running:
                self.waited[verb] += 1
            self.kernels.wait()

    def notes(self) -> list[str]:
        if not self.seconds:
            return []
        return [
            f"{self.system} {verb}: the kernel was over before the calls were in "
            f"{self.waited[verb]} of {self.rounds} rounds"
            for verb in self.calls
        ]
