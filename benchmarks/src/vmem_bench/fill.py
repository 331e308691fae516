# SPDX-License-Identifier: MIT
"""`vmem bench fill`: requests grow until no pages are left, mapped in several ways.

Each driver call creates one mapping, and a GPU allows fewer mappings than it has pages, so its
memory cannot be filled page by page (`pyvmem.kvcache.growth`). The same requests grow in each of
these ways:

- ``default``: mapped in runs; a step joins mappings when they run low.
- ``runs``: mapped in runs, never joined.
- ``joined``: mapped page by page, joined when mappings run low.
- ``pages``: mapped page by page, never joined.

When half of the memory is in use, a request is forked, and its rows are recorded and matched by
another request.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pyvmem.bench.memory import KernelMemory
from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.bench.timing import Samples, quiet
from pyvmem.errors import TooManyMappings, VMemError
from pyvmem.kvcache import KVCache, KVCacheConfig, TokenIds
from pyvmem.kvcache.budget import available_bytes
from pyvmem.layouts.options import count, size
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.plumbing.closing import Closable
from vmem_bench.command import Command, WrongResult, add_common, open_command

__all__ = ["WAYS", "add_parser", "run"]

_LARGE = 2 << 20
_LEFT = 2 << 30  # bytes of GPU memory left for CUDA and other kernels
_QUICK = 96 << 20
_SHARES = 5  # number of forks, and of prefix matches, when memory is half full
_SEED = 11

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "runs": {"join_at": 0},
    "joined": {"growth_fraction": 0},
    "pages": {"growth_fraction": 0, "join_at": 0},
}
_METHOD = {
    "growth": "every request grows by at most a page's rows per step, each at a different pace",
    "step": "perf_counter_ns around step, from Python; one sample per step",
    "kernel memory": "the larger of two estimated differences (pyvmem.bench.memory)",
    "order": "the ways take turns, in a different order in each round",
}


@dataclass
class _Filled:
    """One run's measurements, in bytes, counts and nanoseconds."""

    steps: list[int] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    end: str = ""


class _Filling(Closable):
    """A cache that is filled once, as a context manager."""

    def __init__(self, command: Command, way: str) -> None:
        args, quick = command.args, command.quick
        self.requests = min(args.requests, 12) if quick else args.requests
        mappings = args.max_mappings
        if quick and command.backend == "host" and not mappings:
            mappings = 400  # low enough for the ways to differ
        self._stack = ExitStack()
        page = min(size for size in command.page_sizes if size >= 64 << 10)
        with ExitStack() as stack:
            context = stack.enter_context(
                Context(command.backend, device=args.device, granule=page, max_mappings=mappings)
            )
            free = available_bytes(context) - _LEFT
            memory = args.memory or (_QUICK if quick else free)
            config = KVCacheConfig(
                num_layers=2 if quick else 32,
                num_kv_heads=8,
                head_dim=128,
                dtype="bfloat16",
                max_batch=self.requests + 1,
                max_seq_len=args.max_tokens,
                page_size=page,
                memory_limit=memory,
                **WAYS[way],
            )
            self.before = KernelMemory.now()
            self.cache = stack.enter_context(KVCache(config, context))
            self._stack = stack.pop_all()
        self.rows = page // self.cache.layout.row_bytes
        draw = random.Random(_SEED)
        self._at = [draw.uniform(0, 8 * self.rows) for _ in range(self.requests)]
        self._pace = [draw.uniform(0.3, 1) * self.rows for _ in range(self.requests)]
        self.lens = [0] * config.max_batch

    def close(self) -> None:
        """Frees all memory."""
        self._stack.close()

    def fill(self, command: Command) -> _Filled:
        """Steps until pages or mappings run out, or the deadline passes."""
        cache, found = self.cache, _Filled()
        longest = cache.config.max_seq_len
        ids = [cache.alloc_reqid() for _ in range(self.requests)]
        surplus, halfway = 0, False
        while not found.end:
            self._at = [at + pace for at, pace in zip(self._at, self._pace, strict=True)]
            for reqid, at in zip(ids, self._at, strict=True):
                assert reqid is not None
                self.lens[reqid] = min(int(at) + 1, longest)
            if min(self._at) >= longest:
                raise WrongResult(f"requests of {longest} tokens do not fill the memory")
            if not command.deadline.allows():
                found.end = "the deadline"
                break
            start = time.perf_counter_ns()
            try:
                short = cache.step(self.lens)
            except TooManyMappings as error:
                found.end = str(error)
                break
            found.steps.append(time.perf_counter_ns() - start)
            now = cache.stats()
            if short:
                found.end = "-1"
            surplus = max(surplus, now.ahead_pages)
            if not halfway and 2 * now.active_pages >= now.total_pages:
                halfway = True
                self._share(found)
        self._note(found, surplus)
        return found

    def _share(self, found: _Filled) -> None:
        """Forks the longest request, then starts other requests from its recorded rows."""
        cache = self.cache
        if Caps.ALIAS | Caps.READONLY not in cache.context.info.caps:
            return
        reqid = max(range(len(self.lens)), key=self.lens.__getitem__)
        length = self.lens[reqid]
        tokens = TokenIds([(7 * i) % 128_000 for i in range(length)])
        for _ in range(_SHARES):
            start = time.perf_counter_ns()
            forked = cache.fork(reqid)
            took = time.perf_counter_ns() - start
            if forked is None:
                return
            found.forks.append(took)
            self._give_back(forked)
        cache.record(reqid, tokens)
        for _ in range(_SHARES):
            start = time.perf_counter_ns()
            taken = cache.alloc_prefix(tokens, 0)
            took = time.perf_counter_ns() - start
            if taken is None:
                return
            found.hits.append(took)
            self._give_back(taken[0])
        found.numbers["shared_tokens"] = length

    def _give_back(self, reqid: int) -> None:
        self.cache.free_reqid(reqid)
        self.cache.memory.reclaim_free(wait=True)

    def _note(self, found: _Filled, surplus: int) -> None:
        cache = self.cache
        now, low = cache.stats(), cache.context.stats()
        kernel = KernelMemory.now().since(self.before)
        page = cache.layout.page_size
        found.numbers.update(
            filled=100 * now.active_pages / now.total_pages,
            active=now.active_pages * page,
            mappings=low.mappings,
            map_calls=low.map_calls,
            unmap_calls=low.unmap_calls,
            driver=low.driver_ns,
            waited=now.critical_driver_ns,
            waste=now.peak_wasted_bytes,
            surplus=surplus * page,
            large=100 * now.large_entries * _LARGE / max(1, now.mapped_bytes),
            kernel=kernel.value,
        )


_ROWS = (
    ("filled", "memory that requests own at the end", "%", 1),
    ("active", "memory that requests own at the end, in bytes", "GB", 1e-9),
    ("mappings", "mappings at the end", "count", 1),
    ("map_calls", "map calls", "count", 1),
    ("unmap_calls", "unmap calls", "count", 1),
    ("driver", "time in driver calls", "s", 1e-9),
    ("waited", "part of that time for which a call waited", "s", 1e-9),
    ("waste", "peak of mapped memory that holds no token (internal fragmentation)", "GB", 1e-9),
    ("surplus", "peak of memory mapped ahead", "GB", 1e-9),
    ("large", "share of the mapped memory that 2 MiB entries map", "%", 1),
    ("kernel", "kernel memory", "MB", 1e-6),
)


def _add(part: Part, way: str, rounds: list[_Filled], page: int) -> None:
    """Adds a way's rows, each with the mean over all rounds and the value of every round."""
    for name, what, unit, factor in _ROWS:
        values = [one.numbers[name] * factor for one in rounds]
        part.value(
            f"{name}/{way}",
            f"{way}: {what}",
            way,
            sum(values) / len(values),
            unit,
            page=page,
            values=values,
        )
    tokens = rounds[0].numbers.get("shared_tokens", 0)
    for name, what in (
        ("steps", "step"),
        ("forks", f"fork of {tokens:,} tokens, halfway"),
        ("hits", f"a request begins with {tokens:,} recorded tokens, halfway"),
    ):
        samples = Samples()
        samples.rounds = [list(map(float, getattr(one, name))) for one in rounds]
        if all(samples.rounds):
            part.time(f"{name}/{way}", f"{way}: {what}", way, samples, unit="ms", page=page)
        else:
            part.not_run(f"{name}/{way}", "memory was never half full, or there are no aliases")
    part.notes += [f"{way}, round {k + 1}: ended by {one.end}" for k, one in enumerate(rounds)]


def _measure(command: Command, part: Part) -> None:
    rounds = 1 if command.quick else command.args.rounds
    ways = command.args.ways or list(WAYS)
    found: dict[str, list[_Filled]] = {way: [] for way in ways}
    page = 0
    for number in range(rounds):
        first = number % len(ways)
        for way in ways[first:] + ways[:first]:
            try:
                with _Filling(command, way) as filling, quiet():
                    found[way].append(filling.fill(command))
                    filling.cache.check_integrity()
                    page = filling.cache.layout.page_size
            except VMemError as error:
                part.not_run(f"*/{way}", f"{error.errno_name}: {error}")
                continue
            last = found[way][-1]
            command.show(
                f"{way}: {last.numbers['filled']:.1f}% in {last.numbers['mappings']:,} mappings, "
                f"{len(last.steps)} steps, ended by {last.end[:60]}"
            )
    for way in ways:
        if found[way]:
            _add(part, way, found[way], page)


def _add_aims(command: Command) -> None:
    command.aims.add(
        "fill_default",
        "memory filled with the default settings",
        ["fill/filled/default"],
        lambda row: float(row["value"]),
        unit="%",
        op=">=",
        aim=98.0,
    )


def add_parser(which: Any) -> None:
    """Adds ``fill`` to the benchmarks."""
    text = "requests grow until the GPU is full: mappings, waste, driver time"
    parser = which.add_parser("fill", help=text, description=text)
    add_common(parser, 300)
    add = parser.add_argument
    add("--requests", type=count, default=128, help="requests that grow together (128)")
    add("--rounds", type=count, default=2, help="rounds of all ways (2)")
    add("--ways", nargs="*", choices=list(WAYS), help="run only these ways (all)")
    add(
        "--memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="the cache's memory, such as 20G (0: free memory minus 2G)",
    )
    add(
        "--max-mappings",
        type=int,
        default=0,
        help="limit of the context's mappings (0: its default)",
    )
    add("--max-tokens", type=count, default=1 << 17, help="maximum tokens of a request (131072)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.
    """
    names = ("requests", "rounds", "memory", "max_mappings")
    options = {name: getattr(args, name) for name in names}
    command = open_command(args, "fill", _METHOD, **options)
    if command is None:
        return 2
    part = command.record.part("fill", "requests grow until no page is left")
    with conducted(part):
        _measure(command, part)
    _add_aims(command)
    return command.finish()
