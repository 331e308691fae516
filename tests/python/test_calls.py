# SPDX-License-Identifier: MIT
"""Counts the Python function calls made by one call into the cache: a machine-independent cost.

Each entry into a function of the package counts, and so does each resumption of a generator. A
function called in a loop over pages or slots counts each time, so a cost that grows with their
number shows up.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from conftest import open_context
from gpu_stand_ins import CURRENT, TORCH, gpu
from kvcache_helpers import eventually

import pyvmem
from pyvmem import Caps, Context, KVCache
from pyvmem.engine import Request, RequestCache
from pyvmem.kvcache import KVCacheConfig, LayeredCache, LayerShape
from pyvmem.memory import streams

__all__ = ["gpu"]

PACKAGE = str(Path(pyvmem.__file__).parent)
ROWS = 16  # tokens per page


class Calls(NamedTuple):
    result: Any
    functions: Counter[str]

    @property
    def count(self) -> int:
        return self.functions.total()

    @property
    def files(self) -> set[str]:
        return {name.split(":")[0] for name in self.functions}


def calls_of(call: Callable[[], Any]) -> Calls:
    """Makes a call and counts the functions of the package that run."""
    found: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}"] += 1

    gc.disable()
    sys.setprofile(enter)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Calls(result, found)


@pytest.fixture
def context(backend: str) -> Iterator[Context]:
    with open_context(backend, pool_high=pyvmem.KEEP_ALL) as opened:
        yield opened


def cache_of(context: Context, pages: int, slots: int, layers: int = 2, **options: Any) -> KVCache:
    page = context.info.granule
    return KVCache(
        KVCacheConfig(
            num_layers=layers,
            num_kv_heads=1,
            head_dim=page // ROWS // 2,
            dtype="float16",
            max_batch=slots,
            max_seq_len=pages * ROWS,
            page_size=page,
            memory_limit=2 * layers * 4 * pages * page,
            **options,
        ),
        context,
    )


@pytest.mark.parametrize("growing", [1, 100])
def test_a_step(context: Context, growing: int) -> None:
    with cache_of(context, pages=64, slots=128, layers=1) as cache:
        lens = [0] * 128
        for _ in range(growing):
            lens[cache.alloc_reqid() or 0] = ROWS // 2
        assert cache.step(lens) == 0
        # a back end with JOIN has few mappings, so the cache counts them
        joins = Caps.JOIN in context.info.caps
        idle = calls_of(lambda: cache.step(lens))
        assert idle.result == 0
        assert idle.count <= 8 + joins, idle
        assert len(idle.files) <= 6 + joins, idle
        mapped = cache.stats().mapped_bytes
        longer = [(ROWS + 1) * (length > 0) for length in lens]
        grown = calls_of(lambda: cache.step(longer))
        assert grown.result == 0
        assert cache.stats().mapped_bytes > mapped
        assert grown.count <= 13 + 2 * joins, grown
        assert len(grown.files) <= 8, grown


@pytest.mark.parametrize("growing", [1, 100])
def test_a_step_with_growth_ahead(context: Context, growing: int) -> None:
    """Checks growth ahead of need: the next pages are ready, and the step that uses them maps
    nothing.
    """
    with cache_of(context, pages=64, slots=128, layers=1, ahead_tokens=4) as cache:
        lens = [0] * 128
        for _ in range(growing):
            lens[cache.alloc_reqid() or 0] = ROWS // 2
        assert cache.step(lens) == 0
        joins = Caps.JOIN in context.info.caps
        idle = calls_of(lambda: cache.step(lens))
        assert idle.count <= 16 + joins, idle
        near = [(ROWS - 1) * (length > 0) for length in lens]
        begun = calls_of(lambda: cache.step(near))
        assert cache.stats().ahead_pages == 2 * growing
        assert begun.count <= 30 + 3 * joins, begun
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        assert cache.step(near) == 0
        grown = calls_of(lambda: cache.step([(ROWS + 1) * (length > 0) for length in lens]))
        assert cache.stats().ahead_pages == 0
        assert grown.count <= 21 + 2 * joins, grown
        assert len(grown.files) <= 9, grown


@pytest.mark.parametrize("growing", [1, 100])
def test_a_step_async(context: Context, growing: int) -> None:
    with cache_of(context, pages=64, slots=128, layers=1) as cache:
        lens = [0] * 128
        for _ in range(growing):
            lens[cache.alloc_reqid() or 0] = ROWS // 2
        assert cache.step(lens) == 0
        longer = [(ROWS + 1) * (length > 0) for length in lens]
        begun = calls_of(lambda: cache.step_async(longer))
        assert begun.result == 0
        assert begun.count <= 25 + 2 * (Caps.JOIN in context.info.caps), begun
        assert cache.step(longer) == 0
        cache.check_integrity()


WINDOW = 4 * ROWS
KINDS = {
    "two full groups": [(1, 0), (2, 0)],
    "sliding and full": [(1, WINDOW), (2, 0)],
    "three groups": [(1, WINDOW), (1, 0), (2, 0)],
}
"""The heads and window of each layer; unequal layers form separate groups."""


def layered_cache_of(context: Context, kind: str, slots: int) -> LayeredCache:
    page = context.info.granule
    shapes = [LayerShape(heads, page // ROWS // 2, window=window) for heads, window in KINDS[kind]]
    return LayeredCache(
        shapes,
        context,
        dtype="float16",
        max_batch=slots,
        max_seq_len=16 * ROWS,
        page_size=page,
        memory_limit=sum(2 * heads for heads, _ in KINDS[kind]) * 16 * slots * page,
        window_tile=ROWS,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_several_groups(context: Context, kind: str) -> None:
    with layered_cache_of(context, kind, slots=32) as cache:
        lens = [0] * 32
        for _ in range(16):
            lens[cache.alloc_reqid() or 0] = ROWS // 2
        assert cache.step(lens) == 0
        assert cache.step(lens) == 0
        mapped, batches = cache.stats().mapped_bytes, context.stats().batches
        grown = calls_of(lambda: cache.step([(ROWS + 1) * (length > 0) for length in lens]))
        assert grown.result == 0
        assert context.stats().batches == batches + 1
        assert cache.stats().mapped_bytes > mapped
        # functions that count mappings
        counts = 2 * len(cache.caches) * (Caps.JOIN in context.info.caps)
        assert grown.count <= 30 + counts, grown
        batches = context.stats().batches
        begun = calls_of(lambda: cache.step_async([(2 * ROWS + 1) * (n > 0) for n in lens]))
        assert begun.result == 0
        assert begun.count <= 50 + counts, begun
        assert cache.step([(2 * ROWS + 1) * (length > 0) for length in lens]) == 0
        assert context.stats().batches == batches + 1
        cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_several_groups_that_zeroes_is_one_batch(context: Context, kind: str) -> None:
    """A single batch, for all groups, zeroes the pages of earlier owners and maps new pages."""
    with layered_cache_of(context, kind, slots=32) as cache:
        taken = [cache.alloc_reqid() or 0 for _ in range(16)]
        assert cache.step([2 * ROWS * (one in taken) for one in range(32)]) == 0
        for one in taken:
            cache.free_reqid(one)
        taken = [cache.alloc_reqid(2 * ROWS) or 0 for _ in range(16)]
        before = context.stats().batches, cache.stats()
        lens = [(3 * ROWS + 1) * (one in taken) for one in range(32)]
        grown = calls_of(lambda: cache.step(lens))
        assert grown.result == 0
        batches, after = context.stats().batches, cache.stats()
        assert after.zeroed_pages > before[1].zeroed_pages
        assert after.grown_pages > before[1].grown_pages
        # On a GPU, the pages were freed on a stream: a second batch may have to zero them after
        # that stream's work.
        assert batches - before[0] <= 1 + (context.cuda_device is not None)
        assert grown.count <= 40 + 18 * 16 * len(cache.caches), grown
        cache.check_integrity()


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_in_which_windows_slide(context: Context, shared: bool) -> None:
    count = 64 if context.info.granule < 2 << 20 else 8  # more slots would take 6 GiB
    with layered_cache_of(context, "three groups", slots=count + 16) as cache:
        lens = [0] * (count + 16)
        first = cache.alloc_reqid() or 0
        lens[first] = WINDOW + 2 * ROWS
        assert cache.step(lens) == 0
        for _ in range(count - 1):
            lens[(cache.fork(first) if shared else cache.alloc_reqid()) or 0] = WINDOW + 2 * ROWS
        assert cache.step(lens) == 0
        assert cache.step(lens) == 0
        longer = [(n + 1) * (n > 0) for n in lens]
        batches = context.stats().batches
        slid = calls_of(lambda: cache.step(longer))  # each request also enters a new page
        assert context.stats().batches - batches <= 2
        assert slid.result == 0
        assert all(cache.slots.first_rows(range(count)))
        joins = len(cache.caches) * (Caps.JOIN in context.info.caps)
        assert slid.count <= 80 + joins, slid
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        after = calls_of(lambda: cache.step([(n + 1) * (n > 0) for n in longer]))
        assert after.count <= 80 + joins, after
        cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_pages_of_several_groups_is_one_batch(context: Context, kind: str) -> None:
    def batches(call: Callable[[], Any]) -> tuple[Any, int]:
        before = context.stats().batches
        result = call()
        return result, context.stats().batches - before

    with layered_cache_of(context, kind, slots=8) as cache:
        rows = WINDOW + 2 * ROWS
        lens, tokens = [0] * 8, list(range(rows))
        first = cache.alloc_reqid() or 0
        lens[first] = rows - 5
        assert cache.step(lens) == 0
        child, mapped = batches(lambda: cache.fork(first))
        assert mapped == 1
        lens[first] = rows
        assert cache.step(lens) == 0
        # One batch copies the kept part of a shared page, and another maps the copy in its place.
        cut, mapped = batches(lambda: cache.truncate(child, rows - ROWS - 3))
        assert (cut, mapped) == (0, 2)
        cache.check_integrity()
        assert cache.record(first, tokens) == rows
        begun, mapped = batches(lambda: cache.alloc_prefix([*tokens, 1]))
        assert begun[1] == rows
        assert mapped == 1
        cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_and_a_truncation_of_several_groups(context: Context, kind: str) -> None:
    with layered_cache_of(context, kind, slots=8) as cache:
        rows, groups = WINDOW + 2 * ROWS, len(cache.caches)
        lens = [0] * 8
        first = cache.alloc_reqid() or 0
        lens[first] = rows - 5
        assert cache.step(lens) == 0
        cache.free_reqid(cache.fork(first) or 0)  # warms up the cache
        cache.trim()
        lens[first] = rows + ROWS - 5
        assert cache.step(lens) == 0
        more = 6 * groups * (context.cuda_device is not None)
        # the first fork also shares the pages that the parent has written since
        shared = calls_of(lambda: cache.fork(first))
        forked = calls_of(lambda: cache.fork(first))
        assert shared.count <= 33 + 25 * groups + more, shared
        assert forked.count <= 35 + 12 * groups + more, forked
        cut = calls_of(lambda: cache.truncate(forked.result, rows - 3))
        assert cut.result == 0
        assert cut.count <= 36 + 49 * groups + more, cut
        cache.check_integrity()


def test_a_step_without_memory(context: Context) -> None:
    with cache_of(context, pages=64, slots=128, layers=1) as cache:
        lens = [0] * 128
        for _ in range(4):
            lens[cache.alloc_reqid() or 0] = 63 * ROWS
        assert cache.step(lens) == 0
        first = cache.alloc_reqid() or 0
        lens[first] = 4 * ROWS
        assert cache.step(lens) == 0
        lens[first] = 5 * ROWS
        refused = calls_of(lambda: cache.step(lens))
        assert refused.result == -1
        # With limited mappings, one more function counts them.
        assert refused.count <= 50 + bool(context.info.max_mappings), refused


def shared(context: Context, pages: int, layers: int) -> dict[str, int]:
    """Counts the functions run by a fork, and by requests with a cached prefix of `pages` pages."""
    found = {}
    with cache_of(context, pages=pages + 1, slots=8, layers=layers) as cache:
        lens, tokens = [0] * 8, list(range(pages * ROWS))
        first = cache.alloc_reqid() or 0
        lens[first] = pages * ROWS - 3
        assert cache.step(lens) == 0
        # Queries the back end's capabilities, as a long-running engine has already done.
        cache.free_reqid(cache.fork(first, ROWS) or 0)
        cache.trim()
        forked = calls_of(lambda: cache.fork(first))
        assert forked.result is not None
        found["fork"] = forked.count
        lens[first] = pages * ROWS
        assert cache.step(lens) == 0
        assert cache.record(first, tokens) == pages * ROWS
        begun = calls_of(lambda: cache.alloc_prefix(tokens, leave=0))
        assert begun.result[1] == pages * ROWS
        found["alloc_prefix"] = begun.count
        cache.free_reqid(begun.result[0], tokens=tokens)
        cache.memory.reclaim_free(
            keep=range(8), wait=True
        )  # so that the worker's pace does not matter
        resumed = calls_of(lambda: cache.alloc_prefix(tokens, leave=0))
        assert cache.stats().prefix_resumed == 1
        found["next turn"] = resumed.count
        cache.check_integrity()
    return found


def test_sharing_costs_the_same_for_any_length(context: Context) -> None:
    short = shared(context, 4, 1)
    assert shared(context, 200, 1) == short
    assert shared(context, 4, 16) == short, "for any number of tensors"
    assert max(short.values()) <= (81 if context.cuda_device is None else 90), short
    assert short["fork"] <= (55 if context.cuda_device is None else 64), short


def freed(context: Context, pages: int, layers: int) -> dict[str, int]:
    """Counts the functions run when a free records `pages` pages: for a prompt, for its next turn,
    and for that turn repeated.

    No batch is in flight, so the worker's pace does not matter.
    """
    found = {}
    with cache_of(context, pages=pages + 4, slots=8, layers=layers) as cache:
        prompt = list(range(pages * ROWS + 3))
        turns = {  # the first turn warms up the cache, as in a long-running engine
            "settled": list(range(1_000_000, 1_000_000 + 2 * ROWS)),
            "prompt": prompt,
            "next turn": prompt + list(range(2 * ROWS)),
            "again": prompt + list(range(2 * ROWS)),
        }
        for name, tokens in turns.items():
            begun = cache.alloc_prefix(tokens)
            assert begun is not None
            reqid, lens = begun[0], [0] * 8
            lens[reqid] = len(tokens)
            assert cache.step(lens) == 0
            cache.memory.reclaim_free(keep=range(8), wait=True)
            call = partial(cache.free_reqid, reqid, tokens=tokens)
            found[name] = calls_of(call).count
            cache.check_integrity()
            cache.memory.reclaim_free(keep=range(8), wait=True)
    return found


def test_a_free_that_records_costs_the_same_for_any_length(context: Context) -> None:
    short = freed(context, 4, 1)
    assert freed(context, 100, 1) == short
    assert freed(context, 4, 16) == short, "for any number of tensors"
    assert max(short.values()) <= (100 if context.cuda_device is None else 108), short


def truncated(context: Context, pages: int, layers: int) -> dict[str, int]:
    """Counts the functions run by truncations within a request's own pages and within shared
    pages.
    """
    found = {}
    with cache_of(context, pages=pages + 1, slots=8, layers=layers) as cache:
        lens = [0] * 8
        first = cache.alloc_reqid() or 0
        lens[first] = pages * ROWS
        assert cache.step(lens) == 0
        child = cache.fork(first, (pages - 1) * ROWS) or 0
        lens[child] = pages * ROWS
        assert cache.step(lens) == 0
        for name, rows in (
            ("settled", pages * ROWS - 1),
            ("own", (pages - 1) * ROWS),
            ("shared", (pages - 2) * ROWS),
            ("copies", (pages - 3) * ROWS + 3),
        ):
            cut = calls_of(partial(cache.truncate, child, rows))
            assert cut.result == 0
            found[name] = cut.count
        cache.check_integrity()
    return found


def test_a_truncation_costs_the_same_for_any_length(context: Context) -> None:
    short = truncated(context, 5, 1)
    assert truncated(context, 100, 1) == short
    assert truncated(context, 5, 16) == short, "for any number of tensors"
    more = context.cuda_device is not None
    assert short["own"] <= 23 + 5 * more, short
    assert short["shared"] <= 40 + 5 * more, short
    assert short["copies"] <= 80 + 5 * more, short


@pytest.mark.parametrize("name", ["none", "torch"])
def test_sharing_after_gpu_work(name: str, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the functions run by calls that share pages and must be ordered after a stream's work,
    as on every GPU.
    """

    def after_items(after: Any, device: int | None) -> Any:
        streams.after_items(after, device)
        return pyvmem._native.AFTER_NONE, []  # libvmem does not know the stand-in's events

    with open_context("host", pool_high=pyvmem.KEEP_ALL) as context:
        context.cuda_device = 0
        monkeypatch.setattr("pyvmem.memory.context.after_items", after_items)
        with cache_of(context, pages=21, slots=8, layers=16) as cache:
            lens, tokens = [0] * 8, list(range(20 * ROWS))
            first = cache.alloc_reqid() or 0
            lens[first] = 20 * ROWS - 3
            assert cache.step(lens) == 0
            gpu.over = True
            cache.free_reqid(cache.fork(first, ROWS) or 0)
            cache.trim()
            gpu.over = False
            del gpu.log[:]
            stream, number = (
                (None, CURRENT) if name == "none" else (gpu.made.TorchStream(TORCH), TORCH)
            )
            event = gpu.event_of(number)
            forked = calls_of(lambda: cache.fork(first, stream=stream))
            assert gpu.log == [("cpu", "waits for", event)], "once, for the rows that it copies"
            del gpu.log[:]
            lens[first] = 20 * ROWS
            assert cache.step(lens) == 0
            cache.free_reqid(first, stream, tokens=tokens)
            cache.memory.reclaim_free(
                keep=range(8), wait=True
            )  # so that the worker's pace does not matter
            resumed = calls_of(lambda: cache.alloc_prefix(tokens, leave=0, stream=stream))
            assert resumed.result == (first, 20 * ROWS)
            begun = calls_of(lambda: cache.alloc_prefix(tokens, leave=0, stream=stream))
            assert begun.result[1] == 20 * ROWS
            assert gpu.log == [(number, "waits for", event)] * 2
            # A fork lists what it must wait for, waits without the lock, and checks again.
            for calls in (forked, resumed, begun):
                assert calls.count <= 102, calls
            gpu.over = True
            cache.check_integrity()


@pytest.mark.parametrize("slots", [8, 1024])
def test_allocating_and_freeing_a_slot(context: Context, slots: int) -> None:
    with cache_of(context, pages=4, slots=slots, layers=1) as cache:
        for _ in range(3):  # reaches the state of a long-running engine
            cache.free_reqid(cache.alloc_reqid(ROWS) or 0)
        taken = calls_of(lambda: cache.alloc_reqid(ROWS))
        assert taken.count <= 40, taken
        freed = calls_of(lambda: cache.free_reqid(taken.result))
        assert freed.count <= 30, freed
        asked = calls_of(lambda: cache.can_admit([ROWS]))
        assert asked.result
        assert asked.count <= 60, asked  # the pool is empty, so the device's free memory is queried
        lengths = [0] * slots
        lengths[(reqid := cache.alloc_reqid() or 0)] = ROWS
        assert cache.step(lengths) == 0
        cache.free_reqid(reqid)
        asked = calls_of(lambda: cache.can_admit([ROWS]))
        assert asked.result
        assert asked.count <= 46, asked


def test_a_snapshot(context: Context) -> None:
    with cache_of(context, pages=4, slots=64, layers=1) as cache:
        lengths = [0] * 64
        lengths[cache.alloc_reqid() or 0] = ROWS
        assert cache.step(lengths) == 0
        every = calls_of(cache.snapshot)
        assert every.count <= 6 * 64 + 30, every


def test_counting_the_use_of_shared_pages(context: Context) -> None:
    """With shared pages every step counts the use, so it must not call C functions needlessly."""
    with cache_of(context, pages=4, slots=8) as cache:
        lengths = [0] * 8
        lengths[(reqid := cache.alloc_reqid() or 0)] = ROWS
        assert cache.step(lengths) == 0
        cache.record(reqid, list(range(ROWS)))
        calls: list[str] = []
        group = cache._groups[0]
        sys.setprofile(lambda _, event, arg: event == "c_call" and calls.append(arg.__name__))
        group.note_use()
        sys.setprofile(None)
        assert calls[:-1] == ["values", "any", "max", "min"]  # the last one is setprofile


def engine_calls(context: Context, requests: int) -> dict[str, Calls]:
    """Counts the functions run by one engine iteration with the given number of requests."""
    with cache_of(context, pages=2 * requests, slots=2 * requests, layers=1) as cache:
        engine = RequestCache(cache)
        running = [engine.admit(list(range(8)), room=0) for _ in range(requests)]
        assert all(isinstance(one, Request) for one in running)
        lengths = dict.fromkeys(running, ROWS)
        for _ in range(2):
            assert engine.extend(lengths) is None
        cache.memory.set_limit((requests + 1) * cache.layout.num_tensors)
        found = {
            "same": calls_of(lambda: engine.extend(lengths)),
            "prepare": calls_of(lambda: engine.prepare(lengths)),
            "one": calls_of(lambda: engine.extend({**lengths, running[-1]: 2 * ROWS})),
            "short": calls_of(lambda: engine.extend({**lengths, running[-1]: 4 * ROWS})),
        }
        assert not found["same"].result
        assert not found["one"].result
        engine.close()
    return found


def test_an_iteration_of_an_engine(context: Context) -> None:
    few, many = engine_calls(context, 4), engine_calls(context, 64)
    for name, calls in many.items():
        assert calls.count <= few[name].count, (name, calls.functions - few[name].functions)
    assert many["same"].count <= 30, many["same"]
    assert many["short"].result.missing


def test_import_without_torch() -> None:
    """`import pyvmem` does not load torch, numpy, any engine or the command line's modules."""
    script = "import sys, pyvmem; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    heavy = {"torch", "numpy", "transformers", "vllm", "cuda", "asyncio", "argparse", "json"}
    assert not loaded & heavy, loaded & heavy
