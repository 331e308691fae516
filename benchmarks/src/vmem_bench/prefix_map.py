# SPDX-License-Identifier: MIT
"""`vmem bench prefix-map`: the time for a new request to start from a recorded prefix.

`KVCache.alloc_prefix` finds the prefix and maps its pages, read-only, in a free slot; 10,240 tokens
of Llama-3-8B's shape occupy 1.34 GB in 64 tensors. The number of driver calls depends on where the
pages are in physical memory, and therefore on how the first request allocated them:

- ``runs``: in one step, as for a prefill, so that a tensor's pages are adjacent.
- ``runs_2m``: in one step, with 2 MB pages, each of which the GPU can map with one large entry.
- ``fragmented``: from memory in which only single pages are free, so that no two are adjacent.

A conversation's next turn, whose slot still has the prefix mapped, is also timed; it makes no
driver call.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.bench.setting import label
from pyvmem.bench.timing import Deadline, Samples, quiet
from pyvmem.errors import VMemError
from pyvmem.kvcache import KVCache, KVCacheConfig, TokenIds
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.options import count
from pyvmem.plumbing.closing import Closable
from vmem_bench.command import Command, WrongResult, add_common, open_command
from vmem_bench.fragments import Fragments

__all__ = ["KINDS", "add_parser", "run"]

KINDS = {
    "runs": "recorded as runs",
    "runs_2m": "recorded as runs of 2 MB pages",
    "fragmented": "recorded in single pages",
}
_AIMS = {"runs": 6.0, "runs_2m": 2.0, "fragmented": None}
_METHOD = {
    "time": "perf_counter_ns around alloc_prefix, from Python; the first call is discarded",
    "between": "the request is freed, and its pages are unmapped before the next call",
    "resume": "like map, but the request is freed with its tokens, whose pages stay mapped",
}


class _Kind(Closable):
    """A context manager for a cache that holds the prefix, allocated as one of `KINDS`."""

    def __init__(self, name: str, command: Command, tokens: int) -> None:
        self.name = name
        quick = command.quick
        page = 2 << 20 if name == "runs_2m" else command.page
        config = KVCacheConfig(
            num_layers=2 if quick else 32,
            num_kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            max_batch=2,
            max_seq_len=tokens,
            page_size=page,
            low_watermark=0.0,
        )
        self._stack = ExitStack()
        with ExitStack() as stack:
            backend, device = command.backend, command.args.device
            context = None
            if name == "fragmented":
                layout = Layout(config, page)
                need = layout.slot_pages * layout.num_tensors * page
                context = stack.enter_context(Fragments(backend, device, page, need)).context
            cache = KVCache(config, context, backend=backend, device=device)
            self.cache = stack.enter_context(cache)
            self._stack = stack.pop_all()
        self.page, self.tokens, self.segments = page, tokens, 0
        self.ids = TokenIds([(7 * i) % 128_000 for i in range(tokens)])

    def record(self) -> None:
        """Creates the first request, marks some of its pages, then records and frees it."""
        cache = self.cache
        one = self._take()
        if cache.step([self.tokens if reqid == one else 0 for reqid in range(2)]):
            raise RuntimeError("memory is short")
        for tensor, page in self._corners():
            cache.reservation.write(self._offset(one, tensor, page), self._mark(tensor, page))
        found = cache.record(one, self.ids)
        if found != self.tokens:
            raise WrongResult(f"{found} of {self.tokens} tokens were recorded")
        cache.free_reqid(one)
        self._unmap()

    def close(self) -> None:
        """Frees all memory."""
        self._stack.close()

    def _take(self) -> int:
        reqid = self.cache.alloc_reqid()
        if reqid is None:
            raise RuntimeError("no free slot")
        return reqid

    # ---- timing ----------------------------------------------------------------------------------

    def time(self, found: Samples, matched: Samples) -> None:
        """Times matching the prefix, then starting a request from it."""
        cache = self.cache
        start = time.perf_counter_ns()
        cache.match(self.ids, 0)
        middle = time.perf_counter_ns()
        got = cache.alloc_prefix(self.ids, 0)
        end = time.perf_counter_ns()
        matched.new_round().append(middle - start)
        found.new_round().append(end - middle)
        if got is None or got[1] != self.tokens:
            raise WrongResult(f"alloc_prefix gave {got} for {self.tokens} tokens")
        self._check(got[0])
        self.segments = cache.stats().segments
        cache.free_reqid(got[0])
        self._unmap()

    def time_next_turns(self, found: Samples, rounds: int) -> None:
        """Times requests that resume in the previous request's slot.

        The first request maps the prefix and is not timed.
        """
        cache = self.cache
        for turn in range(rounds + 1):
            before = cache.stats()
            start = time.perf_counter_ns()
            got = cache.alloc_prefix(self.ids, 0)
            end = time.perf_counter_ns()
            if got is None or got[1] != self.tokens:
                raise WrongResult(f"alloc_prefix gave {got} for {self.tokens} tokens")
            self._check(got[0])
            if turn:
                after = cache.stats()
                if after.prefix_resumed == before.prefix_resumed:
                    raise WrongResult("the prefix was mapped again")
                if after.driver_calls != before.driver_calls:
                    raise WrongResult(f"{after.driver_calls - before.driver_calls} driver calls")
                found.new_round().append(end - start)
            cache.free_reqid(got[0], tokens=self.ids)

    def _check(self, reqid: int) -> None:
        for tensor, page in self._corners():
            wanted = self._mark(tensor, page)
            got = self.cache.reservation.read(self._offset(reqid, tensor, page), len(wanted))
            if got != wanted:
                raise WrongResult(f"tensor {tensor}, page {page}: {got!r}, expected {wanted!r}")

    def _corners(self) -> list[tuple[int, int]]:
        """Returns the first and last page of the first and last tensor, and a page in between."""
        layout = self.cache.layout
        tensors, pages = layout.num_tensors, layout.pages_for(self.tokens)
        middle = (tensors // 2, pages // 2)
        return [middle, *((t, p) for t in (0, tensors - 1) for p in (0, pages - 1))]

    def _offset(self, reqid: int, tensor: int, page: int) -> int:
        return self.cache.layout.offset(reqid, page, tensor)

    def _mark(self, tensor: int, page: int) -> bytes:
        return tensor.to_bytes(4, "little") + page.to_bytes(4, "little") + b"prefix.."

    def _unmap(self) -> None:
        """Unmaps a freed request's pages, so that the next request maps them again."""
        self.cache.memory.reclaim_free(wait=True)
        if self.cache.stats().empty_slots < 2:
            raise RuntimeError("pages of a freed request stay mapped")


def _measure(command: Command, part: Part, name: str, deadline: Deadline) -> None:
    """Adds the rows for a kind.

    Raises:
        VMemError: the back end does not support this kind.
    """
    tokens = min(command.args.tokens, 2048) if command.quick else command.args.tokens
    rounds = 3 if command.quick else command.args.rounds
    with _Kind(name, command, tokens) as kind:
        cache = kind.cache
        command.show(f"{name}: {KINDS[name]}")
        kind.record()
        found, matched = Samples(), Samples()
        with quiet():
            for done in range(rounds + 1):
                if done > 2 and not deadline.allows():
                    part.notes.append(f"{name}: the deadline passed after {done - 1} requests")
                    break
                kind.time(found, matched)
        resumed = Samples()
        with quiet():
            kind.time_next_turns(resumed, rounds)
        cache.check_integrity()
        nbytes = cache.layout.pages_for(tokens) * cache.layout.num_tensors * kind.page
        found.drop_first_round()
        matched.drop_first_round()
        note = f"{cache.layout.num_tensors} tensors, pages of {label(kind.page)}B"
        more: dict[str, Any] = {"page": kind.page, "note": note}
        what = f"prefix of {tokens:,} tokens, {KINDS[name]}"
        part.time(f"map/{name}", f"alloc_prefix: {what}", name, found, unit="ms", **more)
        part.time(f"match/{name}", f"match alone: {what}", name, matched, **more)
        mapped = f"next turn, whose {tokens:,} tokens are still mapped: {KINDS[name]}"
        part.time(f"resume/{name}", f"alloc_prefix: {mapped}", name, resumed, **more)
        part.value(f"bytes/{name}", f"mapped: {what}", name, nbytes, "bytes", **more)
        part.value(
            f"segments/{name}", f"contiguous mappings: {what}", name, kind.segments, "count", **more
        )


def _add_aims(command: Command) -> None:
    aims, tokens = command.aims, command.args.tokens
    rows = [command.record.row(f"prefix/map/{name}") for name in KINDS]
    fewest = min((int(row["n"]) for row in rows if row), default=0)
    aims.applies = aims.applies and tokens == 10240 and fewest >= 20
    for name, goal in _AIMS.items():
        aims.add(
            f"prefix_{name}",
            f"match and map of a prefix of {tokens:,} tokens, {KINDS[name]}",
            [f"prefix/map/{name}"],
            lambda row: float(row["median"]),
            unit="ms",
            op="<=" if goal else None,
            aim=goal,
        )


def add_parser(which: Any) -> None:
    """Adds ``prefix-map`` to the benchmarks."""
    parser = which.add_parser(
        "prefix-map",
        help="matching and mapping a recorded prefix",
        description="Times alloc_prefix for a prefix of Llama-3-8B's shape, by its pages' layout.",
    )
    add_common(parser, 90)
    add = parser.add_argument
    add("--tokens", type=count, default=10240, help="tokens of the prefix (10240)")
    add("--rounds", type=count, default=30, help="timed requests (30)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.
    """
    command = open_command(args, "prefix-map", _METHOD, tokens=args.tokens)
    if command is None:
        return 2
    part = command.record.part("prefix", "start of a request with a recorded prefix")
    with conducted(part):
        for number, name in enumerate(KINDS):
            left = Deadline(command.deadline.left / (len(KINDS) - number))
            try:
                _measure(command, part, name, left)
            except VMemError as error:
                part.not_run(f"map/{name}", str(error))
            command.write()
    _add_aims(command)
    return command.finish()
