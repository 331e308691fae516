# SPDX-License-Identifier: MIT
"""Asynchronous exceptions, at every point of every call, leave a cache consistent.

A signal handler may raise anywhere (Ctrl-C, a server's timeout). Each scenario below prepares a
cache and yields a call; the call is interrupted at one point (interrupts_helpers.py defines them),
and sometimes again while the first exception is being handled. Afterwards, the exception must have
reached the caller, the records must be consistent and all rows intact, the call can be repeated,
ordinary work continues, and `close` releases everything.

By default, only a sample of the points is tested. ``--points=all`` or VMEM_INTERRUPT_POINTS=all,
which `make test-long` uses, tests every point, some of them followed by a second one.
``--points=N`` tests N points of each scenario:

    pytest tests/python/test_interrupts.py -k fork --points=all
"""

from __future__ import annotations

import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from conftest import open_context
from interrupts_helpers import (
    PACKAGE,
    Call,
    Engine,
    Interrupted,
    Interrupts,
    NotHere,
    Outcome,
    Scenario,
    Steps,
    again,
    alarms,
    ended,
    holds,
    lens,
    measure,
    parts,
    run_after,
    run_at,
)
from kvcache_helpers import LAYERS, ROWS, eventually, small_config
from move_helpers import PART, scatter
from move_helpers import UNIT as UNIT_PAGES
from share_helpers import is_zero, write_rows
from test_kvcache_layers import uneven

import pyvmem.compat.vattention as vattention
from pyvmem import BadHandle, Caps, Context, Inject, InvalidArgument, KVCache
from pyvmem.compat._manager import Manager, close_retired
from pyvmem.engine import Request, RequestCache, State
from pyvmem.hf.named import NamedRequests
from pyvmem.kv_events import KVEvents
from pyvmem.kvcache import (
    Budget,
    LayeredCache,
    LayerShape,
    PrefixEvicted,
    StateShape,
    migration,
)
from pyvmem.kvcache.budget import FairLock
from pyvmem.kvcache.journal import Journal

SAMPLE = 36  # points per scenario in `make test`
PAIRS = 8  # number of these points that are followed by a second one
FEW = 4  # points per slow scenario, which spends 80 ms per run on its rows
MORE_PAIRS = 100  # used instead of `PAIRS` with ``--points``
TENSORS = 2 * LAYERS
UNIT = 16  # rows that fill whole pages in every group of a layered cache


def _gives(value: Any, function: Callable[..., Any], *args: Any) -> Call:
    """Returns a callable that asserts that the function returns `value`."""

    def call() -> None:
        assert function(*args) == value

    return call


# ---- allocating and freeing slots ----------------------------------------------------------------


def _allocating(engine: Engine, cache: Any) -> Steps:
    made = yield from again(partial(cache.alloc_reqid, ROWS))
    engine.take(cache, made, [])


def _named_slot(
    engine: Engine, cache: Any, reqid: int, call: Callable[[], Any], rows: list[int]
) -> Steps:
    """Interrupts a call that takes a slot chosen by the caller.

    The caller can therefore free the slot if the interrupted call took it.
    """
    yield call
    if cache.slots.is_taken(reqid):
        cache.free_reqid(reqid)
    call()
    engine.take(cache, reqid, rows)


def claim(engine: Engine) -> Steps:
    cache = _with_another(engine)
    return _named_slot(engine, cache, 2, lambda: cache.slots.claim(2), [])


def _freeing(engine: Engine, cache: Any, reqid: int) -> Steps:
    engine.leaves(cache, reqid)
    yield lambda: cache.free_reqid(reqid)
    engine.free(cache, reqid)


def _free_recording(engine: Engine, cache: Any, reqid: int) -> Steps:
    """Interrupts a free that records a prefix; a recorded prefix must hold the request's rows."""
    tags = engine.held[cache, reqid]
    tokens = list(range(len(tags)))
    engine.leaves(cache, reqid)
    yield lambda: cache.free_reqid(reqid, tokens=tokens)
    engine.free(cache, reqid, tokens=tokens)
    _begins(engine, cache, tokens, tags, some=True)


# ---- steps ---------------------------------------------------------------------------------------


def _growing(engine: Engine, cache: Any, more: dict[int, int]) -> Steps:
    """Interrupts a step that has enough memory; new rows must be zero."""
    want = lens(cache, more)
    yield _gives(0, cache.step, want)
    _grown(engine, cache, want, more)


def _grown(engine: Engine, cache: Any, want: list[int], more: dict[int, int]) -> None:
    assert cache.step(want) == 0
    for reqid, rows in more.items():
        held = len(engine.held[cache, reqid])
        for part in parts(cache):
            assert is_zero(part, reqid, held, rows - held), "new rows are not zero"
        engine.write(cache, reqid, rows)


def step_starts(engine: Engine) -> Steps:
    """Grows into an earlier owner's pages, which must be zeroed."""
    cache = engine.cache(max_batch=2)
    engine.start(cache, 3)
    engine.free(cache, engine.start(cache, 2 * ROWS))
    reqid = cache.alloc_reqid(2 * ROWS)
    assert reqid is not None
    engine.take(cache, reqid, [])
    return _growing(engine, cache, {reqid: 3 * ROWS})


def _reclaiming(engine: Engine, *, recorded: bool = False) -> tuple[KVCache, int]:
    """Starts a request that can only grow by taking the pages of a free slot, or those of a prefix
    if `recorded` is true.
    """
    cache = engine.cache(pages=4)
    reqid = engine.start(cache, 3)
    tokens = list(range(3 * ROWS)) if recorded else None
    engine.free(cache, engine.start(cache, 3 * ROWS), tokens=tokens)
    return cache, reqid


def _short(
    engine: Engine, cache: Any, reqid: int, rows: int, fitting: int, name: str = "step"
) -> Steps:
    """Interrupts a step that fails because memory is short; a step with fewer rows succeeds."""
    want, step = lens(cache, {reqid: rows}), getattr(cache, name)

    yield from again(_gives(-1, step, want))
    engine.grow(cache, reqid, fitting)


def _ahead(engine: Engine, cache: Any, more: dict[int, int]) -> Steps:
    want = lens(cache, more)
    yield from again(_gives(0, cache.step_async, want))
    _grown(engine, cache, want, more)


def step_after_step_async(engine: Engine) -> Steps:
    cache = engine.cache()
    more = {engine.start(cache, 3): 3 * ROWS, engine.start(cache, 1): 2 * ROWS}
    assert cache.step_async(lens(cache, more)) == 0
    return _growing(engine, cache, more)


def step_slides_moved_pages(engine: Engine) -> Steps:
    _needs_host_pages(engine)
    cache, reqid = _windowed(engine, 5 * ROWS, host_limit=0)
    cache.move(reqid, "host")
    return _growing(engine, cache, {reqid: 6 * ROWS})


def step_without_some(engine: Engine) -> Steps:
    """Requests left out of the step keep their rows."""
    cache = engine.cache()
    engine.start(cache, 2 * ROWS)
    more = {engine.start(cache, 3): 3 * ROWS}
    want = lens(cache, more)
    yield _gives(0, cache.step, [more.get(slot, 0) for slot in range(4)])
    _grown(engine, cache, want, more)


def _surplus(engine: Engine) -> tuple[KVCache, int]:
    """Starts a request whose next pages are mapped as a run of four."""
    cache = engine.cache(pages=16, growth_fraction=1.0, max_seq_len=16 * ROWS)
    reqid = engine.start(cache, 4 * ROWS)
    return cache, reqid


def step_maps_a_surplus(engine: Engine) -> Steps:
    cache, reqid = _surplus(engine)
    yield from _growing(engine, cache, {reqid: 5 * ROWS})
    assert cache.snapshot()[reqid].mapped_pages == 8, "no surplus"


def step_takes_a_surplus(engine: Engine) -> Steps:
    """One request needs another's surplus pages."""
    cache, reqid = _surplus(engine)
    other = engine.start(cache, 6 * ROWS)
    engine.grow(cache, reqid, 5 * ROWS)
    return _growing(engine, cache, {other: 11 * ROWS})


def step_refuses_a_surplus(engine: Engine) -> Steps:
    """The first attempt, which includes the surplus, runs out of memory."""
    cache, reqid = _surplus(engine)
    engine.context.inject(Inject.HEAP, count=1)
    return _growing(engine, cache, {reqid: 5 * ROWS})


def step_joins(engine: Engine) -> Steps:
    """No mapping is free until a request's mappings are joined."""
    cache = engine.cache(growth_fraction=0.0, join_at=1.0, max_seq_len=9 * ROWS)
    reqid = engine.start(cache, ROWS)
    for pages in range(2, 9):
        engine.grow(cache, reqid, pages * ROWS)
    other = engine.start(cache, ROWS)
    engine.grow(cache, other, 2 * ROWS)
    assert engine.context.stats().mappings == 10 * TENSORS
    return _growing(engine, cache, {other: 3 * ROWS})


step_joins.context = {"max_mappings": 10 * TENSORS}  # type: ignore[attr-defined]


# ---- truncated rows ------------------------------------------------------------------------------


def _truncating(engine: Engine, cache: Any, reqid: int, length: int) -> Steps:
    """Interrupts a truncation; afterwards the rows from `length` on are either intact or gone, and
    all groups agree.
    """
    tags = engine.held[cache, reqid]
    engine.held[cache, reqid] = tags[:length]

    call = _gives(0, cache.truncate, reqid, length)
    yield call
    held = {part.snapshot()[reqid].seq_len for part in parts(cache)}
    assert held in ({length}, {len(tags)}), f"the groups hold different numbers of rows: {held}"
    if held != {length}:
        assert holds(cache, reqid, tags), "all rows"
    call()
    engine.grow(cache, reqid, len(tags))


def _truncatable(engine: Engine) -> tuple[KVCache, int]:
    """Starts a request whose first pages are recorded as a prefix and shared with a fork."""
    cache, reqid = _forkable(engine, 3 * ROWS + 3)
    engine.fork(cache, reqid)
    cache.record(reqid, list(range(3 * ROWS)))
    return cache, reqid


def truncate_short(engine: Engine) -> Steps:
    """Memory is short, so a shared page cannot be copied."""
    cache = engine.cache(pages=4)
    reqid = engine.start(cache, 2 * ROWS)
    cache.record(reqid, list(range(2 * ROWS)))
    other = engine.start(cache, 2 * ROWS)

    yield from again(_gives(-1, cache.truncate, reqid, ROWS + 3))
    engine.free(cache, other)
    steps = _truncating(engine, cache, reqid, ROWS + 3)
    next(steps)
    ended(steps)


# ---- shared pages --------------------------------------------------------------------------------


def _forking(engine: Engine, cache: Any, parent: int, length: int | None, count: int = 1) -> Steps:
    tags = engine.held[cache, parent][:length]

    children = yield from again(partial(cache.fork_many, parent, count, length))
    assert children is not None, "the call returned None"
    for child in children:
        engine.take(cache, child, tags)
    engine.grow(cache, children[0], len(tags) + 2)


def _needs_host_pages(engine: Engine) -> None:
    if Caps.HOST_PAGES not in engine.context.info.caps:
        raise NotHere("no pages in host memory")


def _needs_sharing(engine: Engine) -> None:
    if Caps.ALIAS | Caps.READONLY not in engine.context.info.caps:
        raise NotHere("requests cannot share pages")


def _forkable(engine: Engine, rows: int) -> tuple[KVCache, int]:
    cache = engine.cache(max_batch=6)
    _needs_sharing(engine)
    engine.start(cache, 3)
    return cache, engine.start(cache, rows)


def fork_of_a_fork(engine: Engine) -> Steps:
    cache, parent = _forkable(engine, 2 * ROWS + 3)
    child = engine.fork(cache, parent)
    engine.grow(cache, child, 3 * ROWS + 1)
    return _forking(engine, cache, child, 2 * ROWS + 5)


def fork_into_used_slots(engine: Engine) -> Steps:
    cache, parent = _forkable(engine, ROWS + 3)
    for reqid in [engine.start(cache, 2 * ROWS) for _ in range(4)]:
        engine.free(cache, reqid)
    return _forking(engine, cache, parent, None)


def fork_into(engine: Engine) -> Steps:
    cache, parent = _forkable(engine, ROWS + 3)
    rows = engine.held[cache, parent]
    return _named_slot(engine, cache, 4, lambda: cache.fork(parent, into=4), rows)


def _windowed(engine: Engine, rows: int, **changes: Any) -> tuple[KVCache, int]:
    """Starts a request whose first pages have left its window."""
    _needs_sharing(engine)
    policy = {"window": 8, "window_tile": 4, "max_seq_len": 12 * ROWS, "max_batch": 6, **changes}
    cache = engine.cache(**policy)
    engine.start(cache, 3)
    return cache, _slid(engine, cache, rows)


def _slid(engine: Engine, cache: Any, rows: int) -> int:
    """Starts a request of `rows` rows, some of which have left the window."""
    reqid = engine.start(cache, rows - 3)
    engine.grow(cache, reqid, rows)
    eventually(lambda: not any(s.in_flight for part in parts(cache) for s in part.snapshot()))
    assert cache.slots.first_rows([reqid])[0]
    return reqid


def step_slides_a_forked_window(engine: Engine) -> Steps:
    """Pages that leave one request's window are still in another request's window."""
    cache, parent = _windowed(engine, 5 * ROWS + 3)
    child = engine.fork(cache, parent)
    engine.grow(cache, child, 7 * ROWS)
    return _growing(engine, cache, {child: 8 * ROWS})


def _recording(engine: Engine, cache: Any, reqid: int, whole: int) -> Steps:
    tags = engine.held[cache, reqid]
    tokens = list(range(len(tags)))

    assert (yield from again(partial(cache.record, reqid, tokens))) == whole
    _begins(engine, cache, tokens, tags[:whole])


def record_more(engine: Engine) -> Steps:
    """Part of the prompt is already recorded with another continuation."""
    cache, reqid = _forkable(engine, 3 * ROWS)
    cache.record(reqid, [*range(ROWS), *range(500, 500 + ROWS)])
    return _recording(engine, cache, reqid, 3 * ROWS)


Recorded = tuple[Any, list[int], list[int]]


def _record_last(engine: Engine, cache: Any, reqid: int, then: Any = None) -> Recorded:
    """Frees a request and records its rows; returns the cache, the prefix's tokens and its rows'
    contents.
    """
    tags = engine.held[cache, reqid]
    tokens = list(range(len(tags)))
    engine.free(cache, reqid, tokens=tokens)
    if then is not None:
        then(cache)
    return cache, tokens, tags


def _recorded(engine: Engine, rows: int = 2 * ROWS + 3, then: Any = None) -> Recorded:
    return _record_last(engine, *_forkable(engine, rows), then)


def match(engine: Engine) -> Steps:
    cache, tokens, _ = _recorded(engine)
    assert (yield from again(lambda: cache.match(tokens).length == 2 * ROWS))


def match_is_released(engine: Engine) -> Steps:
    """A prefix can be evicted once the last reference to its match is gone."""
    cache, tokens, _ = _recorded(engine)

    def call() -> None:
        with cache.match(tokens[: ROWS + 1]) as match:
            assert match.length == ROWS
        cache.can_admit([ROWS])

    yield from again(call)
    cache.trim(prefixes=True)
    assert cache.stats().prefix_pages == 0, "prefixes are left"


def _telling(engine: Engine, tell: Callable[[KVCache], Callable[[], list[Any]]]) -> Steps:
    """Checks that an event is delivered exactly once: by the call, or by the next call if the
    result was lost.
    """
    cache, reqid = _forkable(engine, 2 * ROWS)
    told, poll = [], tell(cache)
    poll()
    cache.record(reqid, list(range(2 * ROWS)))

    def call() -> None:
        told.append(poll())

    yield from again(call)
    assert [bool(found) for found in told] == [True, False][: len(told)]
    assert not poll()


def _leased(engine: Engine) -> tuple[KVCache, int, Any, list[int]]:
    """Starts a request alongside a prefix that holds all other pages.

    Returns:
        The cache, the request, a match of the prefix's first block, and the contents of that block.
    """
    cache = engine.cache(pages=4)
    reqid = engine.start(cache, 3)
    _, tokens, tags = _record_last(engine, cache, engine.start(cache, 3 * ROWS))
    return cache, reqid, cache.match(tokens[: ROWS + 1]), tags[:ROWS]


def _begins(
    engine: Engine, cache: Any, prompt: Any, tags: list[int], *, leave: int = 0, some: bool = False
) -> int:
    """Starts a request from a cached prefix or a match; it must get exactly the given rows, or some
    of them if `some` is true.
    """
    taken = cache.alloc_prefix(prompt, leave)
    assert taken is not None, "alloc_prefix returned None"
    reqid, length = taken
    assert length <= len(tags) if some else length == len(tags)
    engine.take(cache, reqid, tags[:length])
    return int(reqid)


def step_evicts_but_for_a_match(engine: Engine) -> Steps:
    cache, reqid, match, tags = _leased(engine)
    yield from _growing(engine, cache, {reqid: 3 * ROWS})
    _begins(engine, cache, match, tags)


def free_records_beside_a_match(engine: Engine) -> Steps:
    """A partly matched prefix is recorded again with another continuation."""
    cache, reqid, match, tags = _leased(engine)
    engine.free(cache, reqid)
    taken = _begins(engine, cache, match, tags)
    engine.grow(cache, taken, 2 * ROWS)
    tokens = [*range(ROWS), *range(500, 500 + ROWS)]
    again_held = cache.match(tokens)
    engine.leaves(cache, taken)
    yield lambda: cache.free_reqid(taken, tokens=tokens)
    engine.free(cache, taken, tokens=tokens)
    _begins(engine, cache, again_held, tags)


def _trimming(cache: Any, match: Any) -> Steps:
    yield from again(lambda: cache.trim(prefixes=True))
    assert cache.stats().prefix_pages == 0
    with pytest.raises(PrefixEvicted):
        cache.alloc_prefix(match)


def layered_trim_takes_a_match(engine: Engine) -> Steps:
    cache = _layered(engine)
    _, tokens, _ = _record_last(engine, cache, engine.start(cache, UNIT + 3))
    return _trimming(cache, cache.match(tokens))


def trim_takes_a_match(engine: Engine) -> Steps:
    cache, _, match, _ = _leased(engine)
    return _trimming(cache, match)


def can_admit_a_match_again(engine: Engine) -> Steps:
    """`can_admit` renews a match's lost lease on the part that a running request still holds."""
    cache, reqid = _forkable(engine, 2 * ROWS)
    tags, tokens = engine.held[cache, reqid], list(range(2 * ROWS))
    cache.record(reqid, tokens)
    match = cache.match(tokens)
    cache.trim(prefixes=True)

    def call() -> None:
        assert cache.can_admit([2 * ROWS], [match])

    yield from again(call)
    engine.free(cache, reqid)
    cache._groups[0].prefixes.evict(0, 64)
    _begins(engine, cache, match, tags[:ROWS])


def _prefixed(engine: Engine, cache: Any, prompt: Any, tags: list[int], leave: int = 1) -> Steps:
    taken = yield from again(partial(cache.alloc_prefix, prompt, leave))
    assert taken is not None, "the call returned None"
    assert taken[1] == len(tags)
    engine.take(cache, taken[0], tags)
    engine.grow(cache, taken[0], len(tags) + 2)


def _prompted(
    engine: Engine, found: Recorded, more: list[int], rows: int, begins: int | None = None
) -> Steps:
    """Interrupts an allocation for a prompt that starts with the first tokens of a cached
    prefix.
    """
    cache, tokens, tags = found
    return _prefixed(engine, cache, [*tokens[:begins], *more], tags[:rows])


def alloc_prefix_of_a_match(engine: Engine) -> Steps:
    cache, tokens, tags = _recorded(engine)
    return _prefixed(engine, cache, cache.match([*tokens, 7]), tags[: 2 * ROWS])


def _settled(cache: KVCache) -> None:
    eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))


def alloc_prefix_where_some_is_mapped(engine: Engine) -> Steps:
    cache, first = _forkable(engine, 2 * ROWS)
    tokens = list(range(4 * ROWS))
    tags = engine.held[cache, first]
    cache.record(first, tokens[: 2 * ROWS])
    taken = _begins(engine, cache, tokens, tags)
    engine.grow(cache, taken, 4 * ROWS)
    cache.record(taken, tokens)
    engine.free(cache, first, tokens=tokens[: 2 * ROWS])
    _settled(cache)
    return _prefixed(engine, cache, [*tokens, 7], engine.held[cache, taken][: 4 * ROWS])


# ---- prefixes in host memory ---------------------------------------------------------------------


def _to_host(engine: Engine, **changes: Any) -> Recorded:
    """Creates a cache that moves evicted prefixes to host memory; returns it with a recorded
    prefix.
    """
    _needs_sharing(engine)
    cache = engine.cache(**{"host_prefixes": 8 * TENSORS * engine.page, **changes})
    engine.start(cache, 3)
    return _record_last(engine, cache, engine.start(cache, 3 * ROWS))


def _begins_with_some(engine: Engine, cache: Any, tokens: list[int], tags: list[int]) -> None:
    """Starts a request from whatever part of a prefix an interrupted call left, and grows it."""
    reqid = _begins(engine, cache, tokens, tags, some=True)
    engine.grow(cache, reqid, len(engine.held[cache, reqid]) + 2)


def trim_to_host(engine: Engine) -> Steps:
    cache, tokens, tags = _to_host(engine)

    def call() -> None:
        cache.trim(prefixes="host")

    yield from again(call)
    assert cache.stats().prefix_pages == 0
    _begins_with_some(engine, cache, tokens, tags)


def step_evicts_to_host(engine: Engine) -> Steps:
    """The least recently used prefix is evicted while host memory is also short."""
    cache, tokens, tags = _to_host(engine, pages=4, host_prefixes=2 * TENSORS * engine.page)
    yield from _growing(engine, cache, {0: 3 * ROWS})
    engine.free(cache, 0)
    _begins_with_some(engine, cache, tokens, tags)


def _from_host(engine: Engine, found: Recorded, *, trims: bool = True) -> Steps:
    """Interrupts the reload of a prefix; afterwards any part of it may be on the device, and the
    rest in host memory.
    """
    cache, tokens, tags = found
    if trims:
        cache.trim(prefixes="host")

    def call() -> None:
        taken = cache.alloc_prefix(tokens, leave=0)
        assert taken is not None
        assert taken[1] == len(tags)

    yield call
    _begins_with_some(engine, cache, tokens, tags)


def alloc_prefix_with_the_rest_from_host(engine: Engine) -> Steps:
    """Reloads a prefix in a call that also moves another prefix to host memory."""
    cache, tokens, tags = _to_host(engine, pages=5)
    cache.trim(prefixes="host")
    _begins(engine, cache, tokens[:ROWS], tags[:ROWS])
    engine.free(cache, engine.start(cache, 2 * ROWS), tokens=list(range(500, 500 + 2 * ROWS)))
    return _from_host(engine, (cache, tokens, tags), trims=False)


# ---- prefixes of layers with a window ------------------------------------------------------------


def record_fills_in_a_window(engine: Engine) -> Steps:
    """The second request records the window before the branch."""
    cache, first = _windowed(engine, 5 * ROWS)
    tokens = list(range(5 * ROWS))
    engine.free(cache, first, tokens=[*tokens[: 2 * ROWS], *[900] * (3 * ROWS)])
    reqid = engine.start(cache, 5 * ROWS)
    tags = engine.held[cache, reqid]
    yield from _recording(engine, cache, reqid, 5 * ROWS)
    _begins(engine, cache, [*tokens[: 2 * ROWS], 901], tags[: 2 * ROWS])


def _window_recorded(engine: Engine, **changes: Any) -> Recorded:
    """Like `_recorded`, but for a request of which only the window is still mapped."""
    return _record_last(engine, *_windowed(engine, 5 * ROWS + 3, **changes), _settled)


def step_evicts_a_window(engine: Engine) -> Steps:
    cache, _, _ = _window_recorded(engine, pages=8)
    cache.trim()
    reqid = engine.start(cache, 3)
    yield from _growing(engine, cache, {reqid: 6 * ROWS})
    assert cache.stats().prefix_pages == 0


# ---- preemption, admission, reports --------------------------------------------------------------


def _swapped(engine: Engine, call: Callable[[], None]) -> bool:
    """Returns true if the engine got a swapped request, from the interrupted call or a second one.

    Returns false if the result was lost and the second call therefore fails. This may only happen
    if the interrupt comes after the call changed the records but before the caller had the result.
    """
    if not engine.swapped:
        try:
            call()
        except InvalidArgument:
            assert engine.place.startswith(
                ("kvcache/journal.py", "kvcache/cache.py", "kvcache/waits.py", "after ")
            )
            return False
    return True


def _swapping_out(engine: Engine, cache: Any, reqid: int) -> Steps:
    tags = engine.held[cache, reqid]
    engine.leaves(cache, reqid)

    def call() -> None:
        engine.swapped.append(cache.swap_out(reqid))

    yield call
    engine.leaving.clear()
    out = _swapped(engine, call)
    del engine.held[cache, reqid]
    if out:
        engine.take(cache, cache.swap_in(engine.swapped[0]), tags)


def swap_out_with_a_window(engine: Engine) -> Steps:
    """Swaps a request out while pages are leaving its window."""
    cache, reqid = _windowed(engine, 5 * ROWS)
    engine.grow(cache, reqid, 6 * ROWS)
    return _swapping_out(engine, cache, reqid)


def swap_out_shared(engine: Engine) -> Steps:
    cache, parent = _forkable(engine, 2 * ROWS + 3)
    engine.fork(cache, parent)
    return _swapping_out(engine, cache, parent)


def _swapping_in(engine: Engine, cache: Any, reqid: int, *, alone: bool = False) -> Steps:
    """Interrupts a swap-in.

    If `alone` is true, ordinary work runs before the call is repeated. It checks that new rows read
    as zeros, and may free all other requests.
    """
    tags = engine.held.pop((cache, reqid))
    swapped = cache.swap_out(reqid)
    engine.swapped.append(swapped)

    call = partial(cache.swap_in, swapped)
    yield call
    # If the request is already swapped in, some slot holds its rows.
    if swapped.is_open:
        if alone:
            engine.ordinary()
        engine.take(cache, call(), tags)
        return
    with pytest.raises(BadHandle):
        call()
    length = len(tags)
    found = [r for r in engine.unknown(cache) if lens(cache)[r] == length]
    assert found, "the request is neither swapped out nor swapped in"
    engine.take(cache, found[0], tags)


def swap_in_over_clean_pages(engine: Engine) -> Steps:
    """Swaps in over pages that are already mapped and zero; the interrupted call may have written
    some of them.
    """
    cache = engine.cache(eager_pages=3)
    steps = _swapping_in(engine, cache, engine.start(cache, 2 * ROWS + 3), alone=True)
    call = next(steps)
    cache.memory.reclaim_free(wait=True)
    cache.free_reqid(cache.alloc_reqid())
    eventually(lambda: any(slot.mapped_pages == 3 for slot in cache.snapshot()))
    cache.step(lens(cache))
    yield call
    ended(steps)


def swap_in_short(engine: Engine) -> Steps:
    cache = engine.cache(pages=4)
    reqid = engine.start(cache, 3 * ROWS)
    tags = engine.held.pop((cache, reqid))
    swapped = cache.swap_out(reqid)
    engine.swapped.append(swapped)
    other = engine.start(cache, 2 * ROWS)

    yield from again(_gives(None, cache.swap_in, swapped))
    engine.free(cache, other)
    engine.take(cache, cache.swap_in(swapped), tags)


def reports(engine: Engine) -> Steps:
    cache, _ = _reclaiming(engine)

    def call() -> bool:
        cache.check_integrity()
        counts = cache.stats().active_slots, len(cache.snapshot()), cache.memory.num_free_pages
        return counts == (1, 4, 0)

    assert (yield from again(call))


def set_limit(engine: Engine) -> Steps:
    cache, reqid = _reclaiming(engine)
    yield from again(lambda: cache.memory.set_limit(5 * TENSORS))
    assert cache.stats().total_pages == 5 * TENSORS
    engine.grow(cache, reqid, 5 * ROWS)


def reclaim_free(engine: Engine) -> Steps:
    cache, _ = _reclaiming(engine)
    yield from again(lambda: cache.memory.reclaim_free(wait=True))
    assert cache.stats().cached_pages == 0


def trim_moves_pages_together(engine: Engine) -> Steps:
    """Compacts slabs with few live pages, in a context that the cache owns."""
    backend = engine.context.info.backend
    engine.context.close()
    engine.context = open_context(backend, slab_size=16 * engine.page)
    cache = engine.cache(max_batch=8)
    reqids = [engine.start(cache, ROWS) for _ in range(8)]
    for reqid in reqids[::2]:
        engine.free(cache, reqid)
    assert cache.step([0] * cache.config.max_batch) == 0

    def call() -> None:
        cache._manager.owns_context = True  # only during the call: the engine closes the context
        try:
            cache.trim()
        finally:
            cache._manager.owns_context = False

    yield from again(call)
    assert engine.context.stats().slab_bytes == 16 * engine.page


def trim_prefixes(engine: Engine) -> Steps:
    cache, _, _ = _recorded(engine)
    yield from again(lambda: cache.trim(prefixes=True))
    assert cache.stats().cached_pages == 0
    assert cache.stats().prefix_pages == 0


# ---- places --------------------------------------------------------------------------------------


def _in_small_pages(engine: Engine, **changes: Any) -> tuple[KVCache, int]:
    """Starts a request that grew page by page, alternating with another, so that it has no runs."""
    options = {"max_seq_len": 6 * ROWS, "host_limit": 0, **changes}
    cache = engine.cache(**options)
    one, two = engine.start(cache, ROWS), engine.start(cache, ROWS)
    for rows in range(2 * ROWS, 4 * ROWS + 1, ROWS):
        engine.grow(cache, one, rows)
        engine.grow(cache, two, rows)
    return cache, one


def _moving(
    engine: Engine, cache: Any, reqid: int, place: str, *, tokens: Any = None, wait: bool = True
) -> Steps:
    _needs_host_pages(engine)
    if place == "device":
        cache.move(reqid, "host")
    yield lambda: cache.move(reqid, place, tokens=tokens, wait=wait)
    cache.move(reqid, place, tokens=tokens)
    away = 0 if place == "device" else 4 if tokens is None else 1
    assert cache.snapshot()[reqid].away_pages == away
    engine.grow(cache, reqid, len(engine.held[cache, reqid]) + 2)


def _moving_pages(engine: Engine) -> tuple[KVCache, int]:
    """Starts a request whose pages are being moved to host memory."""
    _needs_host_pages(engine)
    cache, reqid = _in_small_pages(engine)
    cache.move(reqid, "host", wait=False)
    return cache, reqid


# ---- entries of 2 MiB ----------------------------------------------------------------------------


def _in_blocks(engine: Engine, pages: int = 64, **changes: Any) -> KVCache:
    """Creates a one-layer cache whose slots consist of two 2 MiB blocks of `UNIT_PAGES` pages."""
    if Caps.LARGE_ENTRIES not in engine.context.info.caps:
        raise NotHere("no large entries of small pages")
    return engine.cache(
        pages=pages, num_layers=1, max_batch=3, max_seq_len=2 * PART, host_limit=0, **changes
    )


def entries(make: Scenario) -> Scenario:
    """Runs a scenario in a context with 2 MiB entries, each covering only a few pages."""
    make.sample = (FEW, 1)  # type: ignore[attr-defined]
    make.context = {"granule": (2 << 20) // UNIT_PAGES, "large_entries": True}  # type: ignore[attr-defined]
    return make


def _whole(engine: Engine, cache: Any) -> tuple[Any, int]:
    """Starts a request whose full block has a 2 MiB entry in every tensor."""
    reqid = engine.start(cache, PART)
    blocks = 3 if len(parts(cache)) > 1 else 1
    assert cache.snapshot()[reqid].large_pages == blocks * UNIT_PAGES
    return cache, reqid


def _by_pages(engine: Engine, cache: Any, *, scattered: bool, begun: int = 0) -> tuple[Any, int]:
    """Starts a request with a full block that grew page by page.

    If `scattered` is true, its pages are not adjacent. `begun` is the number of blocks whose
    promotion has already started.
    """
    reqid = engine.start(cache, ROWS)
    for rows in range(2 * ROWS, PART + 1, ROWS):
        engine.grow(cache, reqid, rows)
    if scattered:
        scatter(cache, reqid)
    assert cache.snapshot()[reqid].large_pages == 0
    if begun:
        assert cache.promote(reqid) == begun
    return cache, reqid


def _promoting_step(
    engine: Engine, cache: Any, reqid: int, blocks: int = 1, *, settled: bool = False
) -> Steps:
    """Interrupts a step in a cache larger than the TLB's reach; afterwards all full blocks are
    promoted.
    """
    if settled:
        _settled(cache)
    steps = _growing(engine, cache, {reqid: PART + 2})
    call = next(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "REACH", 0)
        yield call
    ended(steps)
    cache.promote(reqid, wait=True)
    assert cache.snapshot()[reqid].large_pages == blocks * UNIT_PAGES


def _promoting(engine: Engine, *, scattered: bool, wait: bool) -> Steps:
    cache, reqid = _by_pages(engine, _in_blocks(engine), scattered=scattered)
    yield lambda: cache.promote(reqid, wait=wait)
    cache.promote(reqid, wait=True)
    assert cache.snapshot()[reqid].large_pages == UNIT_PAGES
    engine.grow(cache, reqid, PART + 2)


def _cutting(engine: Engine, cache: Any, more: dict[int, int]) -> Steps:
    """Interrupts a step that splits large entries in all groups."""
    yield from _growing(engine, cache, more)
    assert engine.context.stats().splits > 0


def _beside_a_free_block(engine: Engine, cache: Any, rows: int = 3 * ROWS) -> tuple[Any, Any]:
    """Starts a request that can only grow by taking pages from the end of a free slot's block."""
    reqid = engine.start(cache, ROWS)
    engine.free(*_whole(engine, cache))
    return cache, {reqid: rows}


def _beside_a_loose_block(engine: Engine) -> tuple[KVCache, dict[int, int]]:
    """Starts a request that can only grow by taking pages from another request's large entry, past
    the end of that request's rows.
    """
    cache = _in_blocks(engine, pages=UNIT_PAGES + 2)
    reqid, (_, other) = engine.start(cache, ROWS), _whole(engine, cache)
    assert cache.truncate(other, ROWS + 3) == 0
    del engine.held[cache, other][ROWS + 3 :]
    return cache, {reqid: 3 * ROWS}


# ---- pages common to all slots -------------------------------------------------------------------


def _common(engine: Engine, **changes: Any) -> KVCache:
    _needs_sharing(engine)
    return engine.cache(**changes)


def _read_common(engine: Engine, cache: KVCache) -> list[int]:
    """Starts a request in every slot, writes rows through the first slot, and returns their
    contents.
    """
    tags = engine.tags(ROWS)
    assert cache.step([ROWS] * cache.config.max_batch) == 0
    write_rows(cache, 0, 0, tags)
    for reqid in range(cache.config.max_batch):
        engine.take(cache, reqid, tags)
    return tags


def map_common_pages(engine: Engine) -> Steps:
    """After the interruption, either all slots are taken or none are; any taken slots are freed."""
    cache = _common(engine)

    call = partial(cache.slots.map_common_pages, ROWS)
    yield call
    assert len(engine.unknown(cache)) in (0, cache.config.max_batch)
    engine.free_unknown()
    call()
    _read_common(engine, cache)


def _renewing(engine: Engine, cache: KVCache, reqid: int) -> Steps:
    """Interrupts the renewal of a request that has grown beyond the common rows; the next request
    starts with only these rows.
    """
    common = cache.slots.map_common_pages(ROWS)
    common.idle.clear()
    tags = _read_common(engine, cache)
    engine.grow(cache, reqid, 2 * ROWS)
    rows = engine.held.pop((cache, reqid))
    yield lambda: common.renew(reqid)
    held = lens(cache)[reqid]
    assert held in (0, len(rows))
    assert not held or holds(cache, reqid, rows), "all rows"
    common.renew(reqid)
    assert common.idle == {reqid}
    assert cache.step(lens(cache, {reqid: ROWS})) == 0
    engine.take(cache, reqid, tags)
    engine.grow(cache, reqid, 2 * ROWS)


# ---- the vAttention module -----------------------------------------------------------------------


_COMMON = list(range(ROWS))


def _vattention(engine: Engine, *, common: bool = False) -> Manager:
    """Creates the module's `Manager`; the engine checks and closes its context and cache."""
    backend, page = engine.context.info.backend, engine.page
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    if common:
        _needs_sharing(engine)
    engine.context.close()
    close_retired()  # closes managers of earlier runs
    manager = Manager(
        backend=backend, device=0, page_size=page, megacache=False, max_batch=4,
        max_seq_len=4 * ROWS, **shape,
    )  # fmt: skip
    engine.context = manager.cache.context
    engine.caches.append(manager.cache)
    manager.reserve(64 * 4 * page)
    if common:
        manager.map_common(ROWS)
        write_rows(manager.cache, 0, 0, _COMMON)
    return manager


def _ids(
    engine: Engine, call: Callable[[Manager], Any], *lengths: int, common: bool = False
) -> Steps:
    """Interrupts a call that takes or frees ids; afterwards, all ids are free, and requests start
    with the common rows, if any.
    """
    manager = _vattention(engine, common=common)
    if lengths:
        manager.step(list(lengths))
    yield from again(partial(call, manager))
    manager.step([0] * 4)
    assert not any(manager.lengths)
    rows = [2 * ROWS] * 4
    assert sorted(manager.alloc(2 * ROWS) for _ in rows) == [0, 1, 2, 3]
    assert manager.alloc(1) == -1
    manager.step(rows)
    common = [] if manager.common is None else _COMMON
    assert all(holds(manager.cache, reqid, common) for reqid in range(4)), (
        "the common rows are wrong"
    )
    manager.end()
    assert engine.context.stats().used_bytes == 0


def vattention_cleanup(engine: Engine) -> Steps:
    """Memory is freed even though the program still holds the tensors."""
    manager = _vattention(engine)
    manager.step([ROWS, 3 * ROWS, 0, 0])
    tensors, vattention._manager = manager.tensors(), manager
    yield from again(vattention.cleanup)
    assert engine.context.stats().used_bytes == 0
    tensors.clear()


# ---- VMemCache for transformers ------------------------------------------------------------------


def _tokens(rows: int, seed: int) -> Any:
    import torch

    return torch.randn(rows, 2, 2 * ROWS, 16, generator=torch.Generator().manual_seed(seed))


def _appended(cache: Any, new: Any) -> None:
    """Appends the same keys and values to all layers."""
    for layer in range(2):
        cache.update(new, new, layer)


def _hf(engine: Engine, call: Callable[[Any], Any]) -> Steps:
    """Interrupts a call to a `VMemCache` with two rows; afterwards it can be reset and reused."""
    try:
        from transformers import LlamaConfig

        from pyvmem.hf import VMemCache
    except ImportError:
        raise NotHere("transformers is not installed") from None
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    cache = VMemCache(config, 4, 8 * ROWS, context=engine.context, page_size=engine.page)
    _appended(cache, _tokens(2, 1))
    yield lambda: call(cache)
    cache.kvcache.check_integrity()
    call(cache)
    cache.reset()
    assert cache.kvcache.stats().active_slots == 0
    for rows in (3, 4):
        cache.reset()
        _appended(cache, _tokens(rows, rows))
        for layer in cache.layers:
            assert bool((layer.keys == _tokens(rows, rows)).all())
    cache.kvcache.check_integrity()
    cache.close()


def hf_repeat_rows(engine: Engine) -> Steps:
    def call(cache: Any) -> None:
        for layer in cache.layers:
            if layer.batch_size == 2:
                layer.batch_repeat_interleave(2)

    return _hf(engine, call)


def _named(engine: Engine, call: Callable[[NamedRequests], Any], names: int) -> Steps:
    """Interrupts a call to `NamedRequests`; afterwards there are `names` requests."""
    cache = engine.cache()
    named = NamedRequests(cache, "sdpa")
    assert named.hold("one", 3)
    assert named.hold("two", 2 * ROWS)
    yield from again(lambda: call(named))
    assert len(named) == names
    known = {one.request for one in named._requests.values()}
    for request in set(named._cache.requests) - known:
        assert engine.place, "a request has no name"
        named._cache.release(request)
    assert cache.stats().active_slots == names
    named.close()


def named_drop(engine: Engine) -> Steps:
    """A dropped request keeps its name until it has ended, so that every request has a name."""

    def call(named: NamedRequests) -> None:
        named.drop("two", record=False)
        assert len(named._cache.requests) == len(named)

    return _named(engine, call, 1)


# ---- cuda.core buffers ---------------------------------------------------------------------------


def _resource(engine: Engine) -> Any:
    """Creates a resource that returns plain addresses as buffers, because cuda.core's buffers hide
    exceptions.
    """
    try:
        from pyvmem.memory_resource import VMemResource
    except ImportError:
        raise NotHere("cuda-core is not installed") from None

    class Resource(VMemResource):
        def _buffer(self, addr: int, size: int, stream: Any) -> int:
            return addr

    return Resource(engine.context)


def _buffers(engine: Engine, resource: Any, call: Callable[[], Any]) -> Steps:
    """Interrupts a call, then allocates buffers, each with its own pages, and frees all of them."""
    page = engine.page
    yield from again(call)
    for addr in list(resource._live):  # the calls allocate buffers, but free none
        resource.deallocate(addr, page)
    made = [resource.allocate(page) for _ in range(3)]
    assert resource.live_buffers == len(set(made)) == 3
    for addr in made:
        engine.context.write(addr, b"x")
        resource.deallocate(addr, page)
    resource.close()


def resource_allocate(engine: Engine) -> Steps:
    resource = _resource(engine)
    steps = _buffers(engine, resource, lambda: resource.allocate(engine.page))
    yield next(steps)
    if engine.place and not engine.place.startswith("after ") and not engine.twice:
        assert resource.live_buffers == 0, "a buffer was lost"
    ended(steps)


def resource_allocate_again(engine: Engine) -> Steps:
    """Allocates at the address of an earlier buffer."""
    resource = _resource(engine)
    resource.deallocate(resource.allocate(engine.page), engine.page)
    eventually(lambda: resource._going[0].unmapping.done())
    return _buffers(engine, resource, lambda: resource.allocate(engine.page))


def resource_deallocate(engine: Engine) -> Steps:
    resource = _resource(engine)
    addr = resource.allocate(engine.page)

    def call() -> None:
        if resource.live_buffers:
            resource.deallocate(addr, engine.page)

    return _buffers(engine, resource, call)


def resource_close(engine: Engine) -> Steps:
    resource = _resource(engine)
    for addr in [resource.allocate(engine.page) for _ in range(2)]:
        resource.deallocate(addr, engine.page)
    yield from again(resource.close)


# ---- several caches ------------------------------------------------------------------------------


def _two(engine: Engine, pages: int, **changes: Any) -> tuple[KVCache, KVCache]:
    """Creates two caches that share a budget of `pages` pages per tensor."""
    budget = Budget(engine.context, pages * TENSORS * engine.page)
    return (
        engine.cache(budget, pages, memory_limit=0),
        engine.cache(budget, pages, memory_limit=0, **changes),
    )


def _beside_pages(engine: Engine) -> tuple[KVCache, int]:
    """Starts a request in each of two caches that share a budget of four pages."""
    one, other = _two(engine, 4)
    engine.start(other, 2 * ROWS)
    return one, engine.start(one, 3)


def _beside_idle_pages(
    engine: Engine, recorded: int = 0, idle: int = 3, wanted: int = 3, **changes: Any
) -> tuple[KVCache, dict[int, int]]:
    """Starts a request that can only grow by taking idle pages of another cache in its budget.

    `recorded` is the number of idle pages that hold a prefix.
    """
    one, other = _two(engine, 4, **changes)
    reqid = engine.start(one, 3)
    tokens = list(range(recorded * ROWS)) if recorded else None
    engine.free(other, engine.start(other, idle * ROWS), tokens=tokens)
    return one, {reqid: wanted * ROWS}


def budget_takes_prefixes_to_host(engine: Engine) -> Steps:
    _needs_sharing(engine)
    kept = 8 * TENSORS * engine.page
    return _growing(engine, *_beside_idle_pages(engine, recorded=3, host_prefixes=kept))


def _idle_pages(engine: Engine) -> Budget:
    """Creates a budget with two caches; one has a request, the other has idle pages."""
    one, other = _two(engine, 6)
    engine.start(one, 3)
    engine.free(other, engine.start(other, 3 * ROWS))
    budget: Budget = one._manager.budget
    return budget


def budget_set_limit(engine: Engine) -> Steps:
    budget = _idle_pages(engine)
    total = 7 * TENSORS * engine.page
    yield from again(lambda: budget.set_limit(total))
    assert budget.stats().total_bytes == total


def budget_reclaim(engine: Engine) -> Steps:
    budget = _idle_pages(engine)
    left = TENSORS * engine.page
    yield from again(lambda: budget.reclaim(left))
    eventually(lambda: budget.stats().used_bytes == left)


# ---- unequal layers ------------------------------------------------------------------------------


def _layered(engine: Engine, pages: int = 600, shapes: Any = (), **changes: Any) -> LayeredCache:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_batch": 4,
        "max_seq_len": 4 * UNIT,
        "page_size": engine.page,
        "memory_limit": pages * engine.page,
        "low_watermark": 0.0,
        **changes,
    }
    cache = LayeredCache(shapes or uneven(engine.page), engine.context, **options)
    engine.caches.append(cache)
    return cache


def layered_step_short(engine: Engine) -> Steps:
    """Memory runs out at the last group, after the first groups have grown."""
    cache = _layered(engine, pages=110)
    reqid = engine.start(cache, 3)
    engine.free(cache, engine.start(cache, UNIT))
    engine.start(cache, UNIT)
    return _short(engine, cache, reqid, 4 * UNIT, UNIT)


def layered_step_tidies(engine: Engine) -> Steps:
    """Every group unmaps pages of a freed slot in the same step."""
    cache = _layered(engine, reclaim_steps=1)
    reqid = engine.start(cache, 3)
    engine.free(cache, engine.start(cache, UNIT))
    return _growing(engine, cache, {reqid: UNIT})


def _layers_in_blocks(engine: Engine, pages: int = 100, **changes: Any) -> LayeredCache:
    """Creates a cache in which `PART` rows fill one 2 MiB block per tensor in one group, and two in
    the other.
    """
    if Caps.LARGE_ENTRIES not in engine.context.info.caps:
        raise NotHere("no large entries of small pages")
    heads = engine.page // (ROWS * 64 * 4)
    shapes = [LayerShape(heads, 64), LayerShape(2 * heads, 64)]
    return _layered(engine, pages, shapes, max_batch=3, max_seq_len=2 * PART, **changes)


def layered_truncate_shared(engine: Engine) -> Steps:
    cache = _layered(engine)
    reqid = engine.start(cache, 2 * UNIT + 3)
    cache.record(reqid, list(range(2 * UNIT)))
    return _truncating(engine, cache, reqid, UNIT + 1)


STATE = StateShape(conv=(40, 4), recurrent=(4, 20, 20))
_TOLD = 7.0


def _with_state(engine: Engine) -> tuple[LayeredCache, int]:
    """Creates a cache whose last layer has a state; returns it with a request whose state is
    `_TOLD`.
    """
    cache = _layered(engine, shapes=(*uneven(engine.page), STATE))
    engine.start(cache, 3)
    reqid = engine.start(cache, UNIT + 3)
    for rows in cache.states(len(cache.layers) - 1).values():
        rows[reqid] = _TOLD
    return cache, reqid


def _and_states(engine: Engine, steps: Callable[..., Steps], *args: Any) -> Steps:
    """Runs the steps for a request with a state, then checks the states of all long requests."""
    cache, reqid = _with_state(engine)
    yield from steps(engine, cache, reqid, *args)
    long = [reqid for (_, reqid), tags in engine.held.items() if len(tags) > UNIT]
    for rows in cache.states(len(cache.layers) - 1).values():
        assert bool((rows[long] == _TOLD).all()), "states"


def layered_can_admit(engine: Engine) -> Steps:
    cache = _layered(engine)
    engine.start(cache, 3)

    assert (yield from again(lambda: cache.can_admit([UNIT])))


def layered_trim(engine: Engine) -> Steps:
    cache = _layered(engine)
    engine.free(cache, engine.start(cache, UNIT))
    yield from again(cache.trim)
    assert cache.stats().cached_pages == 0


# ---- open and close ------------------------------------------------------------------------------


def _closing(engine: Engine, cache: Any) -> Steps:
    for owner, reqid in engine.held:
        if owner is cache:
            engine.leaves(cache, reqid)
    yield from again(cache.close)


def close(engine: Engine) -> Steps:
    """Closes a cache with a request, pages of a free slot, shared pages and a recorded prefix."""
    cache, parent = _forkable(engine, 2 * ROWS + 3)
    engine.fork(cache, parent)
    engine.free(cache, engine.start(cache, ROWS))
    cache.record(parent, list(range(ROWS)))
    return _closing(engine, cache)


def close_one_of_a_budget(engine: Engine) -> Steps:
    one, other = _two(engine, 6)
    engine.start(one, 3)
    engine.start(other, 2 * ROWS)
    return _closing(engine, other)


def _layered_moving(engine: Engine, *, wait: bool) -> Steps:
    """Once a step has completed any move in flight, either all layers have moved or none have."""
    _needs_host_pages(engine)
    cache = _layered(engine)
    engine.start(cache, 3)
    reqid = engine.start(cache, UNIT)

    def settled() -> bool:
        assert cache.step(lens(cache)) == 0
        return not any(part.snapshot()[reqid].moving_pages for part in parts(cache))

    yield lambda: cache.move(reqid, "host", wait=wait)
    eventually(settled)
    slots = [part.snapshot()[reqid] for part in parts(cache)]
    away = [slot.away_pages for slot in slots]
    assert away in ([0] * len(slots), [slot.mapped_pages for slot in slots]), away
    cache.move(reqid, "host")
    assert all(part.snapshot()[reqid].away_pages for part in parts(cache))
    engine.grow(cache, reqid, UNIT + 1)


def _layered_windows(engine: Engine, rows: int) -> tuple[LayeredCache, int]:
    """Creates a cache with a sliding and a full layer; some of its request's rows have left the
    window.
    """
    heads = engine.page // (ROWS * 64 * 4)
    shapes = [LayerShape(heads, 64, window=8), LayerShape(2 * heads, 64)]
    cache = _layered(engine, shapes=shapes, max_batch=6, max_seq_len=12 * ROWS, window_tile=4)
    return cache, _slid(engine, cache, rows)


def layered_step_slides(engine: Engine) -> Steps:
    """The windows of two requests slide in one batch, and all groups grow in another."""
    cache, first = _layered_windows(engine, 5 * ROWS)
    both = first, _slid(engine, cache, 5 * ROWS)
    return _growing(engine, cache, dict.fromkeys(both, 5 * ROWS + 1))


def _nobody_told() -> frozenset[str]:
    """Returns the lines of the constructors at which the cache already exists but the caller does
    not have it yet.
    """
    places = set()
    for function in (KVCache.__init__, LayeredCache.__init__):
        lines, first = inspect.getsourcelines(function)
        file = function.__code__.co_filename.removeprefix(PACKAGE)
        skip = next(at for at, line in enumerate(lines) if "self._begin(Manager(" in line)
        places |= {f"{file}:{first + at}" for at in range(skip, len(lines))}
    return frozenset(places)


NOBODY_TOLD = _nobody_told()


def _opening(
    engine: Engine, make: Callable[[], Any], groups: int = 1, budget: Budget | None = None
) -> Steps:
    """Interrupts the opening and closing of a cache: a constructor must release what it has
    allocated, and a close can be repeated.
    """
    made: list[Any] = []
    before = engine.context.stats().reservations

    def call() -> None:
        made.append(make())
        made[-1].close()

    yield call
    # No reservation is left unless the caller did not receive the cache: the exception came after
    # its creation, which a warning reports, or a second exception interrupted the cleanup.
    if budget is not None:
        budget.stats()  # resumes an interrupted rollback
    told = made or (engine.place not in NOBODY_TOLD and not engine.place.startswith("after "))
    if not told or (not made and engine.twice):
        engine.forgotten = engine.context.stats().reservations - before
        some = range(groups + 1) if engine.twice else (0, groups)
        assert engine.forgotten in some, "only some reservations of the cache are left"
    for cache in made:
        cache.close()
    if budget is not None:
        shares, left = len(budget.stats().caches), engine.context.stats().reservations
        assert shares == left, f"a budget of {shares} caches, which have {left} reservations"
    call()
    left = engine.context.stats().reservations - before
    assert left == engine.forgotten, "a reservation was leaked"


def open_and_close(engine: Engine) -> Steps:
    config = small_config(engine.page, eager_pages=2)
    return _opening(engine, lambda: KVCache(config, engine.context))


def layered_open_and_close(engine: Engine) -> Steps:
    def make() -> LayeredCache:
        cache = _layered(engine)
        engine.caches.pop()
        return cache

    return _opening(engine, make, groups=4)


def open_and_close_in_a_budget(engine: Engine) -> Steps:
    """Another cache of the budget keeps working; the new cache's floor is reserved only while it
    exists.
    """
    one, _ = _two(engine, 8)
    engine.start(one, 3)
    budget = one._manager.budget
    config = small_config(engine.page, memory_floor=2 * TENSORS * engine.page)
    return _opening(engine, lambda: KVCache(config, budget=budget), budget=budget)


# ---- requests of an engine -----------------------------------------------------------------------


class Served:
    """A `RequestCache` with two requests: one that the call uses, and one that it must not change.

    Attributes:
        one: the request that the call uses.
        rows: the expected contents of each request's rows, whatever the call does.
        ends: requests that the call may end.
    """

    def __init__(self, engine: Engine, make: Any = None, **changes: Any) -> None:
        self.engine = engine
        self.cache = make(engine) if make else engine.cache(**changes)
        self.requests = RequestCache(self.cache)
        self.rows: dict[Request, list[int]] = {}
        self.ends: set[Request] = set()
        self._gate, self._queued = threading.Event(), False
        self.begin(3)
        self.one = self.begin(2 * ROWS + 3)

    def begin(self, rows: int) -> Request:
        """Starts a request that holds `rows` rows."""
        made = self.requests.begin(rows)
        assert isinstance(made, Request)
        assert self.requests.extend({made: rows}) is None
        self.engine.write(self.cache, made.slot, rows)
        self.rows[made] = self.engine.held.pop((self.cache, made.slot))
        return made

    def queued(self, begin: Callable[..., Any], *args: Any) -> Call:
        """Returns a callable that queues work, which does not run until `finish`."""
        self.requests._background.begin(lambda: self._gate.wait(8))
        self._queued = True
        return partial(begin, *args)

    def finish(self) -> None:
        """Waits for all queued work."""
        if self._queued:
            self._gate.set()
            self.requests._background.begin(lambda: None).result(8)

    def forked(self, made: Any) -> None:
        """Records the result of a fork of the request."""
        assert isinstance(made, list)
        assert len(made) == 2
        self.rows.update((request, self.rows[self.one]) for request in made)

    def check(self) -> None:
        """Checks that requests and slots refer to each other and that no rows were lost."""
        infos = parts(self.cache)[0].snapshot()
        for request in self.requests.requests:
            assert request.state in (State.RUNNING, State.SWAPPED), f"{request!r}"
        running = [one for one in self.requests.requests if one.state is State.RUNNING]
        taken = {info.reqid: info.seq_len for info in infos if info.state == "active"}
        assert len(running) == len(taken), "requests and slots"
        assert {one.slot: one.length for one in running} == taken, "requests and slots"
        for request, rows in self.rows.items():
            if request.state is State.RUNNING:
                assert holds(self.cache, request.slot, rows[: request.length]), f"{request!r}"
            elif request.state is State.ENDED:
                assert request in self.ends, f"{request!r}"
            else:
                assert request.rows is not None, f"{request!r} without rows"
                assert request.rows.is_open, f"{request!r} without rows"


def served(make: Callable[..., Steps]) -> Callable[..., Steps]:
    """Decorates the steps of a `Served` scenario; adds checks before and after the second call."""

    def steps(served: Served, *args: Any) -> Steps:
        inner = make(served, *args)
        yield next(inner)
        served.finish()
        served.check()
        for request in served.requests.requests:
            if request not in served.rows:
                # created by the interrupted call, whose result was lost
                served.requests.release(request)
        ended(inner)
        served.check()
        served.requests.close()
        assert not served.requests.requests
        left = [info.reqid for info in served.cache.snapshot() if info.state == "active"]
        assert not left, f"slots {left} after the close"

    return steps


@served
def _beginning(served: Served, call: Call, rows: list[int]) -> Steps:
    """Interrupts a call that creates a request with the given rows."""
    made = yield from again(call)
    assert isinstance(made, Request)
    assert made.length == len(rows)
    served.rows[made] = rows


def _served_recorded(engine: Engine, make: Any = None) -> tuple[Served, list[int]]:
    """Creates a `Served` and records the first rows of its request; returns both."""
    served = Served(engine, make)
    recorded = served.requests.record(served.one, list(range(served.one.length)))
    assert recorded
    return served, served.rows[served.one][:recorded]


def _begin(served: Served) -> Steps:
    return _beginning(served, lambda: served.requests.begin(2 * ROWS), [])


def _admitting(served: Served, rows: list[int], tokens: int) -> Steps:
    return _beginning(served, lambda: served.requests.admit(list(range(tokens))), rows)


def engine_begin_with_a_prefix(engine: Engine) -> Steps:
    served, rows = _served_recorded(engine)

    def call() -> Any:
        with served.requests.match(list(range(4 * ROWS))) as prefix:
            return served.requests.begin(prefix)

    return _beginning(served, call, rows)


@served
def _admitting_async(served: Served) -> Steps:
    call = served.queued(served.requests.admit_async, list(range(2 * ROWS)))
    yield call
    made = call().result(8)
    assert isinstance(made, Request)
    served.rows[made] = []


@served
def _served_matching(served: Served, rows: list[int]) -> Steps:
    def call() -> bool:
        with served.requests.match(list(range(4 * ROWS))) as prefix:
            return prefix.length == len(rows)

    assert (yield from again(call))


@served
def _served_recording(served: Served) -> Steps:
    tokens = list(range(served.one.length))
    assert (yield from again(lambda: served.requests.record(served.one, tokens) == 2 * ROWS))


@served
def _forking_async(served: Served) -> Steps:
    made = yield from again(served.queued(served.requests.fork_async, served.one, 2))
    served.forked(made.result(8))


@served
def _preparing(served: Served) -> Steps:
    yield from again(_gives(None, served.requests.prepare, {served.one: 4 * ROWS}))
    assert served.requests.extend({served.one: 4 * ROWS}) is None


@served
def _extending(served: Served) -> Steps:
    call = _gives(None, served.requests.extend, {served.one: 4 * ROWS})
    yield call
    held = len(served.rows[served.one])
    call()
    assert served.one.length == 4 * ROWS
    assert is_zero(served.cache, served.one.slot, held, 4 * ROWS - held)


@served
def _served_truncating(served: Served) -> Steps:
    yield from again(_gives(None, served.requests.truncate, served.one, ROWS + 3))
    assert served.one.length == ROWS + 3


@served
def _served_forking(served: Served) -> Steps:
    made = yield from again(partial(served.requests.fork, served.one, 2))
    served.forked(made)


@served
def _releasing(served: Served, tokens: list[int] | None = None) -> Steps:
    """Interrupts a release: the request has ended, or it continues and can be released again."""
    call = partial(served.requests.release, served.one, tokens)
    served.ends.add(served.one)
    yield call
    if served.one.state is not State.ENDED:
        call()
    assert served.one.state is State.ENDED
    after = served.begin(ROWS)  # in the same slot
    with pytest.raises(BadHandle, match="ended"):
        call()
    assert after.state is State.RUNNING


@served
def _served_swapping_out(served: Served, queued: bool = False) -> Steps:
    """Interrupts a swap-out: the request is swapped out, or it is unchanged and not left busy."""
    call = partial(served.requests.swap_out, served.one)
    yield served.queued(served.requests.swap_out_async, served.one) if queued else call
    if served.one.state is State.RUNNING:
        call()
    assert served.one.state is State.SWAPPED
    assert served.requests.swap_in(served.one) is None


@served
def _served_swapping_in(served: Served, queued: bool = False) -> Steps:
    served.requests.swap_out(served.one)
    call = partial(served.requests.swap_in, served.one)
    if queued:
        call = served.queued(served.requests.swap_in_async, served.one)
    yield call
    if served.one.state is State.SWAPPED:
        found = call()
        assert (found.result(8) if queued else found) is None
    assert served.one.state is State.RUNNING


@served
def _served_closing(served: Served) -> Steps:
    served.requests.swap_out(served.begin(ROWS))
    served.ends.update(served.rows)
    yield from again(served.requests.close)


# ---- building blocks: a cache, a request and a call ----------------------------------------------


def _with_another(engine: Engine, make: Any = Engine.cache, **options: Any) -> Any:
    """Creates a cache with a request that the call does not touch."""
    cache = make(engine, **options)
    engine.start(cache, 3)
    return cache


def _first(engine: Engine, rows: int, make: Any, **options: Any) -> tuple[Any, int]:
    """Creates a cache with a single request."""
    cache = make(engine, **options)
    return cache, engine.start(cache, rows)


def _request(
    engine: Engine, rows: int, make: Any = Engine.cache, **options: Any
) -> tuple[Any, int]:
    """Creates a cache with two requests; returns the second."""
    cache = _with_another(engine, make, **options)
    return cache, engine.start(cache, rows)


def _forked(engine: Engine, cache: Any, parent: int) -> tuple[Any, int]:
    return cache, engine.fork(cache, parent)


def _longer(
    engine: Engine, lengths: dict[int, int], make: Any = Engine.cache, **options: Any
) -> tuple[Any, dict[int, int]]:
    """Starts a request for each item in `lengths`, which maps initial lengths to new lengths.

    Returns:
        The cache, and the new length of each request by reqid.
    """
    cache = make(engine, **options)
    return cache, {engine.start(cache, rows): more for rows, more in lengths.items()}


def _to(rows: int, cache: Any, reqid: int) -> tuple[Any, dict[int, int]]:
    return cache, {reqid: rows}


AHEAD = {"ahead_tokens": 3, "growth_fraction": 0.0}

SCENARIOS: dict[str, Scenario] = {
    name: make
    for name, make in list(globals().items())
    if getattr(make, "__annotations__", {}).get("return") == "Steps" and not name.startswith("_")
}
SCENARIOS |= {
    "alloc": lambda e: _allocating(e, _with_another(e)),
    "alloc_eager": lambda e: _allocating(e, _with_another(e, eager_pages=2)),
    "layered_alloc": lambda e: _allocating(e, _with_another(e, _layered)),
    "layered_alloc_eager": lambda e: _allocating(e, _with_another(e, _layered, eager_pages=2)),
    "free": lambda e: _freeing(e, *_request(e, 2 * ROWS)),
    "free_nothing_kept": lambda e: _freeing(e, *_request(e, 2 * ROWS, deferred_reclaim=False)),
    "free_below_the_watermark": lambda e: _freeing(
        e, *_request(e, 2 * ROWS, low_watermark=0.9, pages=8)
    ),
    "free_shared": lambda e: _freeing(e, *_forked(e, *_request(e, 2 * ROWS + 3))),
    "free_a_forked_window": lambda e: _freeing(e, *_forked(e, *_windowed(e, 5 * ROWS + 3))),
    "layered_free": lambda e: _freeing(e, *_request(e, UNIT, _layered, deferred_reclaim=False)),
    "free_with_tokens": lambda e: _free_recording(e, *_request(e, 2 * ROWS + 3)),
    "free_recording_ends_a_move": lambda e: _free_recording(e, *_moving_pages(e)),
    "layered_free_with_tokens": lambda e: _free_recording(e, *_first(e, UNIT + 3, _layered)),
    "layered_free_with_tokens_of_a_window": lambda e: _free_recording(
        e, *_layered_windows(e, 5 * ROWS + 3)
    ),
    "step_replaces_moved_pages": lambda e: _growing(e, *_to(5 * ROWS, *_moving_pages(e))),
    "step_grows": lambda e: _growing(e, *_longer(e, {3: 3 * ROWS, 1: 2})),
    "step_idle": lambda e: _growing(e, *_longer(e, {3: 4})),
    "step_reclaims": lambda e: _growing(e, *_to(4 * ROWS, *_reclaiming(e))),
    "budget_short": lambda e: _short(e, *_beside_pages(e), 3 * ROWS, 2 * ROWS),
    "step_short": lambda e: _short(e, *_reclaiming(e), 6 * ROWS, 4 * ROWS),
    "step_async": lambda e: _ahead(e, *_longer(e, {3: 3 * ROWS, 1: 2})),
    "step_evicts": lambda e: _growing(e, *_to(3 * ROWS, *_reclaiming(e, recorded=True))),
    "step_async_evicts": lambda e: _ahead(e, *_to(4 * ROWS, *_reclaiming(e, recorded=True))),
    "step_async_takes_from_another_cache": lambda e: _ahead(
        e, *_beside_idle_pages(e, recorded=1, idle=2, wanted=4)
    ),
    "step_async_reclaims": lambda e: _ahead(e, *_to(4 * ROWS, *_reclaiming(e))),
    "step_async_short": lambda e: _short(e, *_reclaiming(e), 6 * ROWS, 4 * ROWS, "step_async"),
    "step_maps_ahead": lambda e: _growing(e, *_longer(e, {3: ROWS, 1: ROWS - 1}, **AHEAD)),
    "step_after_mapping_ahead": lambda e: _growing(e, *_longer(e, {ROWS: 2 * ROWS, 1: 2}, **AHEAD)),
    "step_slides_the_window": lambda e: _growing(e, *_to(6 * ROWS, *_windowed(e, 5 * ROWS))),
    "layered_step": lambda e: _growing(e, *_longer(e, {3: UNIT}, _layered)),
    "layered_step_async": lambda e: _ahead(e, *_longer(e, {3: UNIT}, _layered)),
    "layered_step_maps_ahead": lambda e: _growing(
        e, *_longer(e, {3: UNIT}, _layered, ahead_tokens=3)
    ),
    "truncate": lambda e: _truncating(e, *_request(e, 3 * ROWS + 3), ROWS + 1),
    "truncate_nothing_kept": lambda e: _truncating(
        e, *_request(e, 3 * ROWS + 3, deferred_reclaim=False), ROWS + 1
    ),
    "truncate_shared": lambda e: _truncating(e, *_truncatable(e), ROWS),
    "truncate_in_a_shared_page": lambda e: _truncating(e, *_truncatable(e), ROWS + 3),
    "truncate_a_forked_window": lambda e: _truncating(
        e, *_forked(e, *_windowed(e, 5 * ROWS + 3)), 4 * ROWS + 3
    ),
    "layered_truncate": lambda e: _truncating(
        e, *_request(e, 2 * UNIT, _layered, deferred_reclaim=False), 5
    ),
    "fork": lambda e: _forking(e, *_forkable(e, 2 * ROWS + 3), None),
    "fork_whole_pages": lambda e: _forking(e, *_forkable(e, 2 * ROWS), None),
    "fork_many": lambda e: _forking(e, *_forkable(e, ROWS + 3), None, count=2),
    "fork_a_window": lambda e: _forking(e, *_windowed(e, 5 * ROWS + 3), None, count=2),
    "layered_fork": lambda e: _forking(e, *_request(e, UNIT + 3, _layered), None),
    "layered_fork_a_window": lambda e: _forking(e, *_layered_windows(e, 5 * ROWS + 3), None),
    "record": lambda e: _recording(e, *_forkable(e, 2 * ROWS + 3), 2 * ROWS),
    "record_a_window": lambda e: _recording(e, *_windowed(e, 5 * ROWS + 3), 5 * ROWS),
    "states_fork": lambda e: _and_states(e, _forking, None),
    "states_swap_out": lambda e: _and_states(e, _swapping_out),
    "states_swap_in": lambda e: _and_states(e, _swapping_in),
    "layered_record": lambda e: _recording(e, *_request(e, UNIT + 3, _layered), UNIT),
    "alloc_prefix": lambda e: _prompted(e, _recorded(e), [7, 7], 2 * ROWS),
    "alloc_prefix_in_part": lambda e: _prompted(e, _recorded(e, 3 * ROWS), [999] * 4, ROWS, ROWS),
    "alloc_prefix_misses": lambda e: _prompted(e, _recorded(e), [999] * 4, 0, 0),
    "alloc_prefix_where_it_is_mapped": lambda e: _prompted(
        e, _recorded(e, then=_settled), [7, 7], 2 * ROWS
    ),
    "alloc_prefix_of_a_window_where_it_is_mapped": lambda e: _prompted(
        e, _window_recorded(e), [7], 5 * ROWS
    ),
    "alloc_prefix_from_host": lambda e: _from_host(e, _to_host(e)),
    "layered_alloc_prefix": lambda e: _prompted(
        e, _record_last(e, *_first(e, UNIT + 3, _layered)), [], UNIT
    ),
    "layered_alloc_prefix_from_host": lambda e: _from_host(
        e, _record_last(e, *_first(e, UNIT, _layered, host_prefixes=400 * e.page))
    ),
    "layered_alloc_prefix_of_a_window": lambda e: _prompted(
        e, _record_last(e, *_layered_windows(e, 5 * ROWS + 3), KVCache.trim), [7], 5 * ROWS
    ),
    "budget_takes_from_free_slots": lambda e: _growing(e, *_beside_idle_pages(e)),
    "budget_finishes_anothers_cuts": lambda e: _growing(
        e, *_beside_idle_pages(e, deferred_reclaim=False)
    ),
    "prefix_changes": lambda e: _telling(e, lambda cache: cache.internals.prefix_changes),
    "kv_events": lambda e: _telling(e, lambda cache: KVEvents(cache).poll),
    "swap_out": lambda e: _swapping_out(e, *_request(e, 2 * ROWS + 3)),
    "layered_swap_out": lambda e: _swapping_out(e, *_request(e, UNIT + 3, _layered)),
    "swap_in": lambda e: _swapping_in(e, *_request(e, 2 * ROWS + 3)),
    "move_to_the_host": lambda e: _moving(e, *_in_small_pages(e), "host"),
    "move_in_the_background": lambda e: _moving(e, *_in_small_pages(e), "host", wait=False),
    "move_back": lambda e: _moving(e, *_in_small_pages(e), "device"),
    "layered_move": lambda e: _layered_moving(e, wait=True),
    "layered_move_in_the_background": lambda e: _layered_moving(e, wait=False),
    "renew_common_pages": lambda e: _renewing(e, _common(e), 1),
    "renew_the_only_common_pages": lambda e: _renewing(e, _common(e, max_batch=1), 0),
    "vattention_step": lambda e: _ids(
        e, lambda manager: manager.step([0, ROWS + 1, ROWS, 0]), ROWS, 3 * ROWS, 0, 0
    ),
    "vattention_free_common": lambda e: _ids(
        e, lambda manager: manager.free(2), 2 * ROWS, 0, 2 * ROWS, 0, common=True
    ),
    "vattention_alloc_common": lambda e: _ids(
        e, lambda manager: manager.alloc(2 * ROWS), common=True
    ),
    "hf_append": lambda e: _hf(e, lambda cache: _appended(cache, _tokens(2, 2))),
    "hf_reset": lambda e: _hf(e, lambda cache: cache.reset()),
    "named_hold": lambda e: _named(e, lambda named: named.hold("three", ROWS), 3),
    "engine_begin": lambda e: _begin(Served(e)),
    "engine_admit": lambda e: _admitting(Served(e), [], 2 * ROWS),
    "engine_admit_with_a_prefix": lambda e: _admitting(*_served_recorded(e), 4 * ROWS),
    "engine_admit_layered": lambda e: _admitting(*_served_recorded(e, _layered), 2 * ROWS + 7),
    "engine_admit_async": lambda e: _admitting_async(Served(e)),
    "engine_match": lambda e: _served_matching(*_served_recorded(e)),
    "engine_record": lambda e: _served_recording(Served(e)),
    "engine_prepare": lambda e: _preparing(Served(e)),
    "engine_extend": lambda e: _extending(Served(e)),
    "engine_truncate": lambda e: _served_truncating(Served(e)),
    "engine_truncate_shared": lambda e: _served_truncating(_served_recorded(e)[0]),
    "engine_fork": lambda e: _served_forking(Served(e)),
    "engine_fork_async": lambda e: _forking_async(Served(e)),
    "engine_fork_layered": lambda e: _served_forking(Served(e, _layered)),
    "engine_release": lambda e: _releasing(Served(e)),
    "engine_release_nothing_kept": lambda e: _releasing(Served(e, deferred_reclaim=False)),
    "engine_release_with_tokens": lambda e: _releasing(Served(e), list(range(2 * ROWS + 3))),
    "engine_release_with_tokens_nothing_kept": lambda e: _releasing(
        Served(e, deferred_reclaim=False), list(range(2 * ROWS + 3))
    ),
    "engine_release_layered": lambda e: _releasing(Served(e, _layered), list(range(2 * ROWS + 3))),
    "engine_swap_out": lambda e: _served_swapping_out(Served(e)),
    "engine_swap_out_nothing_kept": lambda e: _served_swapping_out(
        Served(e, deferred_reclaim=False)
    ),
    "engine_swap_out_layered": lambda e: _served_swapping_out(Served(e, _layered)),
    "engine_swap_out_async": lambda e: _served_swapping_out(Served(e), True),
    "engine_swap_in": lambda e: _served_swapping_in(Served(e)),
    "engine_swap_in_async": lambda e: _served_swapping_in(Served(e), True),
    "engine_close": lambda e: _served_closing(Served(e)),
}


SCENARIOS |= {
    name: entries(make)
    for name, make in {
        "step_begins_to_copy_a_block": lambda e: _promoting_step(
            e, *_by_pages(e, _in_blocks(e, window_tile=0), scattered=True)
        ),
        "step_replaces_a_copied_block": lambda e: _promoting_step(
            e, *_by_pages(e, _in_blocks(e), scattered=True, begun=1), settled=True
        ),
        "promote_a_run": lambda e: _promoting(e, scattered=False, wait=True),
        "promote_by_a_copy": lambda e: _promoting(e, scattered=True, wait=True),
        "promote_in_the_background": lambda e: _promoting(e, scattered=True, wait=False),
        "free_ends_a_promotion": lambda e: _freeing(
            e, *_by_pages(e, _in_blocks(e), scattered=True, begun=1)
        ),
        "fork_cuts_an_entry": lambda e: _forking(e, *_whole(e, _in_blocks(e)), 2 * ROWS + 3),
        "truncate_in_a_shared_block": lambda e: _truncating(
            e, *_forked(e, *_whole(e, _in_blocks(e))), ROWS + 3
        ),
        "move_cuts_an_entry": lambda e: _moving(
            e, *_whole(e, _in_blocks(e)), "host", tokens=range(ROWS, 2 * ROWS)
        ),
        "move_of_a_part_in_the_background": lambda e: _moving(
            e, *_whole(e, _in_blocks(e)), "host", tokens=range(ROWS, 2 * ROWS), wait=False
        ),
        "step_cuts_a_free_entry": lambda e: _growing(
            e, *_beside_a_free_block(e, _in_blocks(e, UNIT_PAGES + 2))
        ),
        "step_async_cuts_a_free_entry": lambda e: _ahead(
            e, *_beside_a_free_block(e, _in_blocks(e, UNIT_PAGES + 2))
        ),
        "step_cuts_a_loose_entry": lambda e: _growing(e, *_beside_a_loose_block(e)),
        "step_async_leaves_a_loose_entry_to_the_step": lambda e: _ahead(
            e, *_beside_a_loose_block(e)
        ),
        "layered_step_begins_to_join_blocks": lambda e: _promoting_step(
            e, *_by_pages(e, _layers_in_blocks(e, window_tile=0), scattered=False), 3
        ),
        "layered_step_joins_blocks": lambda e: _promoting_step(
            e, *_by_pages(e, _layers_in_blocks(e), scattered=False, begun=3), 3
        ),
        "layered_step_cuts_free_entries": lambda e: _cutting(
            e, *_beside_a_free_block(e, _layers_in_blocks(e, 50), 5 * ROWS)
        ),
    }.items()
}


# ---- the tests -----------------------------------------------------------------------------------


def sample(count: int, want: int, rng: random.Random) -> list[int]:
    """Returns `want` evenly spaced numbers from 1 to `count`, with a random start, or all of them
    if `want` is 0.
    """
    if not want or want >= count:
        return list(range(1, count + 1))
    step = count / want
    first = rng.random() * step
    return [int(first + at * step) + 1 for at in range(want)]


Seen = list[tuple[tuple[int, ...], Outcome]]


def fail_with(name: str, count: int, seen: Seen) -> None:
    """Fails if any run broke a check; the message lists these checks and their points."""
    broken = [(at, one) for at, one in seen if one.broken]
    orphans = sum(bool(one.orphans) for _, one in seen)
    if orphans:
        print(
            f"{name}: {orphans} of {len(seen)} runs left a slot taken without returning its reqid"
        )
    if not broken:
        return
    kinds = Counter(one.broken for _, one in broken)
    lines = [
        f"{name}, {'+'.join(map(str, at))} of {count}, {' then '.join(one.places)}: {one.broken}"
        for at, one in broken[:40]
    ]
    if len(broken) > len(lines):
        lines.append(f"... and {len(broken) - len(lines)} more")
    lines += [f"{times} times: {what}" for what, times in kinds.most_common(8)]
    lines.append(f"{len(broken)} of {len(seen)} interruptions broke something")
    pytest.fail("\n".join(lines), pytrace=False)


def runs(make: Scenario, where: list[tuple[int, ...]], alarm: Any, backend: str) -> Seen:
    """Runs the scenario once per point, interrupted there; stops early if calls hang."""
    seen: Seen = []
    for at in where:
        seen.append((at, run_at(make, at, alarm, backend)))
        if sum(one.stuck for _, one in seen) == 2:
            break
    return seen


def measured(make: Scenario, alarm: Any, backend: str) -> int:
    try:
        return measure(make, alarm, backend)
    except NotHere as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", SCENARIOS)
def test_interruptions(name: str, points: int | None) -> None:
    """Interrupts at one point, then also at a second one while the first exception is handled."""
    make, rng = SCENARIOS[name], random.Random(name)
    singles, pairs_of = getattr(make, "sample", (SAMPLE, PAIRS))
    with alarms() as alarm:
        count = measured(make, alarm, "host")
        at = [(n,) for n in sample(count, singles if points is None else points, rng)]
        seen = runs(make, at, alarm, "host")
        firsts = sample(len(seen), pairs_of if points is None else MORE_PAIRS, rng)
        pairs = [
            (*at, rng.randint(1, one.count))
            for at, one in (seen[n - 1] for n in firsts)
            if one.count
        ]
        fail_with(name, count, seen + runs(make, pairs, alarm, "host"))


def test_signals() -> None:
    """Sends real signals at random moments, wherever the interpreter is, including outside the
    package.
    """
    rng = random.Random(4)
    seen: Seen = []
    names = [name for name in SCENARIOS if not name.startswith("layered")]
    with alarms() as alarm:
        for name in names:
            try:
                _, took = run_after(SCENARIOS[name], 10, alarm)
            except NotHere:
                continue
            for _ in range(4):
                outcome, _ = run_after(SCENARIOS[name], max(2e-6, took * rng.random()), alarm)
                outcome.places.insert(0, name)
                seen.append(((1,), outcome))
    fail_with("signals", len(seen), seen)


def test_an_exception_on_entry_releases_the_lock() -> None:
    """Also covers a thread that already holds the lock: every acquisition is released."""
    lock = FairLock()

    def call() -> None:
        with lock, lock:
            pass

    counter = Interrupts()
    counter.run(call)
    assert counter.count
    for at in range(1, counter.count + 1):
        with pytest.raises(Interrupted):
            Interrupts(at).run(call)
        assert not lock._is_owned(), f"point {at}"  # type: ignore[attr-defined]


def test_an_interrupted_rollback_is_resumed() -> None:
    """The next call resumes an interrupted rollback, even if it has nothing of its own to undo."""

    class Made:
        given = 0

        def abandon(self) -> None:
            self.given += 1
            if self.given < 3:
                raise Interrupted

    made, journal = Made(), Journal()

    def call(error: type[BaseException] | None = None) -> None:
        with journal:
            if error is not None:
                journal.unrecorded[made] = None
                raise error

    for error in (Interrupted, None):
        with pytest.raises(Interrupted):
            call(error)
    for _ in range(2):
        call()
    assert made.given == 3


# ---- the tracer itself ---------------------------------------------------------------------------


def test_points_of_a_function() -> None:
    """There is a point after each call and each backward jump, except where an exception would skip
    the call's own handler.
    """
    here = __file__
    seen: list[str] = []

    class Held:
        def __enter__(self) -> None:
            seen.append("taken")

        def __exit__(self, *exc: object) -> None:
            seen.append("let go")

    def call() -> int:
        with Held():
            for number in range(3):
                seen.append(str(number))
            return len(seen)

    counter = Interrupts(package=here)
    assert counter.run(call) == 4
    whole, count = list(seen), counter.count
    assert whole == ["taken", "0", "1", "2", "let go"]
    assert count >= 3 * 2
    endings = set()
    for at in range(1, count + 1):
        seen.clear()
        interrupts = Interrupts(at, package=here)
        with pytest.raises(Interrupted):
            interrupts.run(call)
        assert len(interrupts.places) == 1
        endings.add(tuple(seen))
    skipped = {one for one in endings if "taken" in one and "let go" not in one}
    assert skipped == {("taken",), tuple(whole[:-1])}, (
        "the only gaps are in __enter__ and before __exit__ runs"
    )
    assert ("taken", "0", "1", "let go") in endings


def test_no_point_where_an_exception_enters_a_generator() -> None:
    """An exception would be lost there: a dropped generator has no caller to raise it in."""
    here = __file__
    ended = False

    def numbers() -> Iterator[int]:
        nonlocal ended
        try:
            yield 0
            yield 1
        finally:
            ended = True

    def call() -> bool:
        for _ in numbers():
            break
        return any(number == 2 for number in (1, 2, 3))

    counter = Interrupts(package=here)
    assert counter.run(call)
    assert ended
    for at in range(1, counter.count + 1):
        with pytest.raises(Interrupted):
            Interrupts(at, package=here).run(call)


def test_points_continue_after_an_interruption() -> None:
    """The second exception is raised in the handler of the first."""
    here = __file__
    seen: list[str] = []

    def undo() -> None:
        seen.append("undo")
        seen.append("undone")

    def call() -> None:
        try:
            seen.append("do")
        except BaseException:
            undo()
            raise

    first = next(
        at for at in range(1, 9) if "undone" in _seen_of(seen, Interrupts(at, package=here), call)
    )
    interrupts = Interrupts(first, package=here)
    _seen_of(seen, interrupts, call)
    assert interrupts.count >= 2, "points of `undo`"
    both = [
        _seen_of(seen, Interrupts(first, at, package=here), call)
        for at in range(1, interrupts.count + 1)
    ]
    assert ["do", "undo"] in both


def _seen_of(seen: list[str], interrupts: Interrupts, call: Callable[[], None]) -> list[str]:
    seen.clear()
    with pytest.raises(Interrupted):
        interrupts.run(call)
    return list(seen)


def test_the_helpers_close_their_context() -> None:
    """The tests' own helpers leave no context behind."""
    engine = Engine("host")
    context: Context = engine.context
    engine.start(engine.cache(), 3)
    engine.abandon()
    assert not context.is_open
