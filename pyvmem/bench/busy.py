# SPDX-License-Identifier: MIT
"""Measures mapping while a kernel fills every multiprocessor of the GPU with threads.

Each round maps and unmaps pages while the GPU is idle, and again while a kernel runs for many times
as long as the calls take. After the calls, the benchmark checks that the kernel is still running;
if it is not, a call waited for it, and the part's notes say so.

A cache's calls are also timed while the last kernel of a just-freed request still runs, to show
what they cost the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyvmem.bench.kernels import Kernels
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_each
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.memory.context import Context
from pyvmem.memory.info import KEEP_ALL

__all__ = ["run"]


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Times mapping existing pages without zeroing, and a cache's calls.

    Our pages are `Setting.single` bytes, cuMem's are 2 MB.
    """
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
    part.notes.append(f"the kernel: {kernels.blocks} blocks of 512 threads")
    part.notes += [note for turn in turns for note in turn.notes()]
    with setting.open(pool_high=KEEP_ALL) as context:
        _cache_calls(setting, part, context, kernels, deadline)
    kernels.close()


class _Busy:
    """One system's turn: maps, then unmaps, each while a kernel runs (none if `seconds` is 0)."""

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
            f"{self.system} {verb}: the kernel ended before the calls did in "
            f"{self.waited[verb]} of {self.rounds} rounds"
            for verb in self.calls
        ]


class _Stream:
    """Passes the kernels' stream to calls that take a stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _cache_calls(
    setting: Setting, part: Part, context: Context, kernels: Kernels, deadline: Deadline
) -> None:
    """Times a cache's calls, as their caller sees them, while a freed request's work still runs."""
    book, system, needy = Book(part), setting.system, setting.count(8, 2)
    requests, layers = setting.count(64, 8), setting.count(32, 2)
    seconds, rounds = setting.count(100, 5) / 1e2, setting.count(8, 2)
    row_bytes = 8 * 128 * 2
    config = KVCacheConfig(
        num_layers=layers,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        max_batch=requests,
        max_seq_len=(rounds + 1) * max(1, context.info.granule // row_bytes),
        growth_fraction=0.0,
    )
    note = f"{requests} requests, {2 * layers} tensors; a kernel of {seconds:g} s"
    names = {
        "alloc": "alloc_reqid",
        "can_admit": "can_admit",
        "step": f"step, {needy} requests grow, less the driver's time",
        "step_async": f"step_async, {needy} requests grow",
        "free": "free_reqid",
    }
    timed = {
        name: book.samples(f"caller/{name}/{system}", f"{what}: caller", system, note=note).rounds
        for name, what in names.items()
    }
    first, last = requests - 2, requests - 1
    stream, waited, clock = _Stream(int(kernels.stream)), 0, time.perf_counter_ns
    with KVCache(config, context) as cache:
        page_rows = cache.layout.page_size // cache.layout.row_bytes
        each = 2 * layers * cache.layout.page_size
        context.warm((requests + 2 * (rounds + 1) * needy) * each)
        lens = [page_rows] * requests
        for _ in range(requests):
            cache.alloc_reqid()
        if cache.step(lens):
            raise RuntimeError("memory is short")
        while context.stats().dirty_bytes:  # zeroing dirty memory would wait for the kernel
            time.sleep(0.001)
        with quiet():
            for number in range(rounds):
                if number and not deadline.allows(2 * seconds):
                    break
                kernels.spin(seconds)
                cache.free_reqid(first, stream=stream)
                lens[first] = 0
                at = [clock()]
                reqid = cache.alloc_reqid()
                at.append(clock())
                cache.can_admit([page_rows])
                at.append(clock())
                for i in range(needy):
                    lens[i] = (number + 2) * page_rows
                driver, before = cache.stats().critical_driver_ns, clock()
                done = cache.step(lens)
                after = clock()
                driver = cache.stats().critical_driver_ns - driver
                for i in range(needy, 2 * needy):
                    lens[i] = (number + 2) * page_rows
                start = clock()
                done = done or cache.step_async(lens)
                middle = clock()
                cache.free_reqid(last, stream=stream)
                end = clock()
                waited += not kernels.running
                kernels.wait()
                lens[last] = 0
                spans = [at[1] - at[0], at[2] - at[1], after - before - driver]
                spans += [middle - start, end - middle]
                for rows, span in zip(timed.values(), spans, strict=True):
                    rows.append([span])
                if done or reqid != first or cache.alloc_reqid() != last or cache.step(lens):
                    raise RuntimeError("memory is short")
    book.close()
    part.notes.append(f"a cache's calls: the kernel ended before the last call in {waited} rounds")
