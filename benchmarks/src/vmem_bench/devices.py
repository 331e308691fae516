# SPDX-License-Identifier: MIT
"""`vmem bench devices`: the cost of using more devices, and of reading another device's memory.

- ``map``: the time to map a page for all devices of a context, by the number of devices.
- ``tiers``: a request's pages move to each peer or to the host, are read there, and move back.
- ``step``: the step time of a `ParallelKVCache` by the number of ranks, with one process and one
  device per rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.bench.memory import KernelMemory
from pyvmem.bench.native import Native
from pyvmem.bench.record import Book, Part
from pyvmem.bench.running import conducted
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet, time_each
from pyvmem.bench.torch_timer import timer
from pyvmem.errors import VMemError
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.layouts.options import count
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.plumbing.units import counted
from vmem_bench.command import Command, WrongResult, add_common, open_command

if TYPE_CHECKING:
    import torch

    from pyvmem.kvcache.distributed import ParallelKVCache

__all__ = ["add_parser", "run"]

_Call = Callable[[Sequence[int]], int]
_PAGES = 64  # pages mapped and unmapped per turn, one at a time
_ALIVE = 16384  # mappings that exist while kernel memory is measured
_STEPS = 32  # steps per turn
_MIB = 1 << 20
_METHOD = {
    "map": "vMemMap and vMemUnmap of one page, from Python; the contexts take turns",
    "kernel memory": "of mappings that exist together, the larger of two estimated differences "
    "(pyvmem.bench.memory); read once",
    "tiers": "KVCache.move of all pages of a request, until done; read: the first device sums the "
    "request's keys, timed by events",
    "step": "rank 0's time; every step maps a page in each tensor for one request; agreed: "
    "includes the all_reduce that tells every rank of a failure",
}


def _counts(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({1 << n for n in range(most.bit_length()) if 1 << n <= most} | {most})


def _opened(command: Command, devices: int) -> Context:
    """Opens a context on the first `devices` devices."""
    return Context(command.backend, devices=range(devices), granule=command.page)


# ---- map -----------------------------------------------------------------------------------------


def _map(command: Command, part: Part, devices: int) -> None:
    quick = command.quick
    with ExitStack() as stack:
        book, turns, natives = Book(part), [], []
        for number in _counts(devices):
            native = Native(stack.enter_context(_opened(command, number)))
            natives.append((number, native))
            turns.append(_mapping(command, book, number, native))
        with quiet():
            interleave(turns, 3 if quick else 20, Deadline(command.deadline.left / 4))
        book.close()
        for number, native in natives:
            _alive(command, part, number, native, 64 if quick else _ALIVE)


def _mapping(command: Command, book: Book, number: int, native: Native) -> Callable[[], None]:
    page, what = command.page, f"on {counted(number, 'device')}"
    fields: dict[str, Any] = {"page": page, "unit": "us"}
    mapped = book.samples(f"map/{number}", f"map, {what}", native.system, **fields)
    unmapped = book.samples(f"unmap/{number}", f"unmap, {what}", native.system, **fields)
    base = native.reserve(2 * _PAGES * page)
    handles = [native.create(page, page) for _ in range(_PAGES)]
    # The gaps keep mappings from being joined.
    places = [base + 2 * n * page for n in range(_PAGES)]
    maps = [(native.vm, at, page, one, 0, 0) for at, one in zip(places, handles, strict=True)]
    unmaps = [(native.vm, at, page) for at in places]

    def turn() -> None:
        native.check("vMemMap", time_each(native.lib.vMemMap, maps, mapped.new_round()))
        native.check("vMemUnmap", time_each(native.lib.vMemUnmap, unmaps, unmapped.new_round()))

    return turn


def _alive(command: Command, part: Part, number: int, native: Native, pages: int) -> None:
    page = command.page
    what = f"kernel memory of a mapping on {counted(number, 'device')}"
    if not command.deadline.allows():
        part.not_run(f"kernel/{number}", "the deadline passed first")
        return
    base, handle = native.reserve(2 * pages * page), native.create(page, page)
    made = 0
    before = KernelMemory.now()
    try:
        for made in range(pages):  # the same page at many addresses
            native.map(base + 2 * made * page, page, handle)
        made = pages
    except VMemError as error:
        part.notes.append(f"{number}: {made:,} of {pages:,} mappings: {error}")
    grown = KernelMemory.now().since(before)
    if made:
        part.value(
            f"kernel/{number}",
            what,
            native.system,
            grown.value / made,
            "bytes",
            devices=number,
            mappings=made,
            listed=grown.listed,
            missing=grown.missing,
        )
    native.free(base, unmap=True)
    native.drop(handle)


# ---- tiers ---------------------------------------------------------------------------------------


def _tiers(command: Command, part: Part, devices: int) -> None:
    try:
        device = command.device()
    except RuntimeError as error:
        part.not_run("*", str(error))
        return
    quick = command.quick
    rows = 1 << (12 if quick else 17)
    config = KVCacheConfig(
        num_layers=2,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        max_batch=1,
        max_seq_len=rows,
        page_size=command.page,
    )
    with _opened(command, devices) as context:
        peers = range(1, devices) if Caps.PEER in context.info.caps else ()
        if not peers:
            why = "the devices do not reach each other" if devices > 1 else "only one device"
            part.not_run("*/peer", why)
        if Caps.HOST_PAGES not in context.info.caps:
            part.not_run("*/host", "no pages in host memory")
        with closing(KVCache(config, context)) as cache:
            if cache.alloc_reqid(rows) != 0 or cache.step([rows]) != 0:
                raise RuntimeError("memory is short")
            for layer in range(2):
                cache.k(layer)[0].fill_(layer + 1)
            book, clock = Book(part), timer(device)
            turns = [_reading(book, cache, "device", clock)]
            turns += [_moving(book, cache, "peer", peer, clock) for peer in peers]
            if Caps.HOST_PAGES in context.info.caps:
                turns.append(_moving(book, cache, "host", None, clock))
            with quiet():
                interleave(turns, 3 if quick else 8, Deadline(command.deadline.left / 2))
            book.close()
            cache.check_integrity()


def _keys(cache: KVCache) -> list[torch.Tensor]:
    """Returns the key tensors. The cache cannot be closed while any of them is alive."""
    return [cache.k(layer)[0] for layer in range(cache.config.num_layers)]


def _means(cache: KVCache) -> list[float]:
    """Returns the mean of each layer's keys, computed from a sample of the elements."""
    return [float(one.view(-1)[:: 1 << 10].float().mean()) for one in _keys(cache)]


def _reading(
    book: Book, cache: KVCache, where: str, clock: Callable[[Callable[[], object]], float]
) -> Callable[[], None]:
    """Returns a turn that times reading the keys in place, and checks their values."""
    import torch

    wanted = [1.0, 2.0]
    size = sum(one.numel() * one.element_size() for one in _keys(cache))
    samples = book.samples(
        f"read/{where}", f"keys in {where} read", cache.context.info.backend, unit="ms", nbytes=size
    )

    def read() -> None:
        for one in _keys(cache):
            one.view(-1).view(torch.int32).sum()

    def turn() -> None:
        # Wait until returned pages have been zeroed, because zeroing would disturb the timing.
        end = time.monotonic() + 5
        while cache.context.stats().dirty_bytes and time.monotonic() < end:
            time.sleep(0.001)
        into = samples.new_round()
        for _ in range(3):
            into.append(clock(read))
        if (found := _means(cache)) != wanted:
            raise WrongResult(f"the rows in {where} read {found}, not {wanted}")

    return turn


def _moving(
    book: Book,
    cache: KVCache,
    location: str,
    device: int | None,
    clock: Callable[[Callable[[], object]], float],
) -> Callable[[], None]:
    """Returns a turn that moves the request to `location`, reads it there, and moves it back."""
    where = location if device is None else f"{location} {device}"
    size = cache.layout.pages_for(cache.config.max_seq_len) * cache.layout.num_tensors
    size *= cache.layout.page_size
    system = cache.context.info.backend
    there = book.samples(f"out/{where}", f"moved to {where}", system, unit="ms", nbytes=size)
    read = _reading(book, cache, where, clock)
    back = book.samples(f"back/{where}", f"moved from {where}", system, unit="ms", nbytes=size)

    def move(samples: Samples, *to: Any) -> None:
        start = time.perf_counter_ns()
        moved = cache.move(0, *to)
        samples.new_round().append(time.perf_counter_ns() - start)
        if moved.pages * cache.layout.page_size != size:
            raise WrongResult(f"{moved.pages} pages moved to {to[0]}, not all of the request's")

    def turn() -> None:
        move(there, location, device)
        read()
        move(back, "device")

    return turn


# ---- step ----------------------------------------------------------------------------------------


def _step(command: Command, part: Part, devices: int) -> None:
    try:
        import torch.distributed as dist
        from torch.multiprocessing.spawn import ProcessException, spawn
    except ImportError as error:
        part.not_run("*", f"torch.distributed cannot be imported: {error}")
        return
    if not dist.is_available():
        part.not_run("*", "this torch has no torch.distributed")
        return
    ranks = 2 if command.backend == "host" else devices
    if ranks < 2:
        part.not_run("*", "only one device")
        return
    with tempfile.TemporaryDirectory(prefix="vmem-ranks-") as name:
        out = Path(name, "samples.json")
        seconds = command.deadline.left / 2
        words = (ranks, command.backend, command.page, command.quick, seconds, str(out))
        try:
            spawn(_rank, words, nprocs=ranks)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise WrongResult(f"a rank failed: {str(error).strip()}") from None
        found = json.loads(out.read_text(encoding="utf-8"))
    for row, (what, rounds) in found.items():
        samples = Samples(rounds)
        samples.drop_first_round()
        part.time(row, what, command.backend, samples, unit="us")


def _rank(
    index: int, ranks: int, backend: str, page: int, quick: bool, seconds: float, out: str
) -> None:
    """Runs one rank in its own process.

    Rank 0 writes the samples to `out`, as ``{row: [description, rounds of nanoseconds]}``.
    """
    import torch
    import torch.distributed as dist

    from pyvmem.kvcache.distributed import ParallelKVCache

    host = backend == "host"
    if not host:
        torch.cuda.set_device(index)
    where = f"file://{out}.store"
    dist.init_process_group(
        "gloo" if host else "nccl", init_method=where, rank=index, world_size=ranks
    )
    control = dist.new_group(backend="gloo")
    layers, memory = (2, 64 * _MIB) if quick else (32, 8192 * _MIB)
    heads, size = 2, 128
    config = KVCacheConfig(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=size,
        dtype="bfloat16",
        max_batch=8 if quick else min(64, memory // (5 * 2 * layers * page)),
        max_seq_len=4 * (page // (heads * size * 2)),
        page_size=page,
        memory_limit=memory,
        deferred_reclaim=False,
        growth_fraction=0.0,
    )
    samples: dict[str, tuple[str, Samples]] = {}
    with ExitStack() as stack:
        turns: list[Callable[[], None]] = []

        def add(row: str, what: str, cache: KVCache | ParallelKVCache, call: _Call) -> None:
            samples[row] = (what, Samples())
            turns.append(partial(_walk, cache, call, samples[row][1]))

        device = 0 if host else index
        alone = stack.enter_context(closing(KVCache(config, backend=backend, device=device)))
        add("one", "KVCache.step, alone", alone, alone.step)
        for number in _counts(ranks):
            group = dist.new_group(range(number))
            if index >= number:
                turns += [lambda: None] * 2
                continue
            cache = ParallelKVCache(config, group, backend, device)
            stack.enter_context(closing(cache))
            ranked = counted(number, "rank")
            add(f"step/{number}", f"step, {ranked}", cache, cache.step)
            add(f"agreed/{number}", f"agreed_step, {ranked}", cache, cache.agreed_step)
        began = time.monotonic()
        with quiet():
            for number in range(3 if quick else 10):
                late = [time.monotonic() - began > seconds and number > 1]
                dist.broadcast_object_list(late, src=0, group=control)
                if late[0]:
                    break
                for place in range(len(turns)):
                    dist.barrier(control)
                    turns[(place + number) % len(turns)]()
        if index == 0:
            rows = {row: (what, one.rounds) for row, (what, one) in samples.items()}
            Path(out).write_text(json.dumps(rows), encoding="utf-8")
        dist.barrier(control)
    dist.destroy_process_group()


def _walk(cache: KVCache | ParallelKVCache, call: _Call, samples: Samples) -> None:
    """Times steps that each grow the requests so that exactly one of them outgrows its pages."""
    into = samples.new_round()
    requests, rows = cache.config.max_batch, cache.layout.page_size // cache.layout.row_bytes
    reqids = [cache.alloc_reqid() for _ in range(requests)]
    by = rows // requests
    lens = [0] * requests
    for number, reqid in enumerate(reqids):
        assert reqid is not None
        lens[reqid] = rows - by * number
    if cache.step(lens):
        raise RuntimeError("memory is short")
    before = cache.stats().active_pages
    steps = min(_STEPS, requests)
    for _ in range(steps):
        lens = [length + by for length in lens]
        start = time.perf_counter_ns()
        answer = call(lens)
        into.append(time.perf_counter_ns() - start)
        if answer:
            raise RuntimeError("memory is short")
    grown = cache.stats().active_pages - before
    if grown != steps * cache.layout.num_tensors:
        raise WrongResult(f"{steps} steps mapped {grown} pages, not one per tensor and step")
    for reqid in reqids:
        cache.free_reqid(reqid)  # type: ignore[arg-type]
    cache.trim()  # so that the next turn maps pages again


# ---- the command ---------------------------------------------------------------------------------


def add_parser(which: Any) -> None:
    """Adds ``devices`` to the benchmarks."""
    parser = which.add_parser(
        "devices",
        help="mappings on several devices, pages in peers, ranks in lockstep",
        description="Measures, with 1, 2, 4, ... of the machine's devices: mapping, moving pages "
        "to each peer and reading them there, and steps of a cache with that many ranks.",
    )
    add_common(parser, 240)
    parser.add_argument("--devices", type=count, default=0, help="maximum number of devices (all)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 for ``--device`` or an unusable back end.
    """
    if args.device:
        print(
            f"vmem bench: --device {args.device}: this benchmark starts with device 0",
            file=sys.stderr,
        )
        return 2
    command = open_command(args, "devices", _METHOD)
    if command is None:
        return 2
    devices = 1
    if command.backend != "host":
        try:
            import torch
        except ImportError:
            command.show("torch, which counts the devices, cannot be imported: using one device")
        else:
            devices = max(1, torch.cuda.device_count())
    devices = min(devices, args.devices or devices)
    command.record.options["devices"] = devices
    for name, title, work in (
        ("map", "mapping on several devices", _map),
        ("tiers", "pages in peers and in host memory", _tiers),
        ("step", "a step by ranks", _step),
    ):
        part = command.record.part(name, title)
        with conducted(part):
            work(command, part, devices)
        command.show(f"{name}: {part.status}{': ' * bool(part.why)}{part.why}")
        command.write()
    return command.finish()
