# SPDX-License-Identifier: MIT
"""Asynchronous exceptions at any point do not lose a context, pool, saver or manager.

Like test_interrupts.py, but for calls that do not use a cache, or that open or close one. Each case
does its setup and yields a call, which is interrupted at one or two points. Afterwards the caller's
objects can be closed, all others are already closed, contents are intact, and the call can be
repeated. ``--points`` works as in that test.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from interrupts_helpers import LIMIT, Interrupted, Interrupts, Steps, Stuck, again, alarms, ended
from kvcache_helpers import small_config
from test_interrupts import MORE_PAIRS, PAIRS, sample
from test_torch_pool import Libcuda, Torch

import pyvmem._native.objects as objects
from pyvmem import BadHandle, Context, KVCache
from pyvmem._vmem import ffi, lib
from pyvmem.compat import _manager, vattention
from pyvmem.compat import torch_memory_saver as savers
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket
from pyvmem.memory_resource import VMemResource
from pyvmem.torch_pool import primary as cuda_primary
from pyvmem.torch_pool.pool import VMemPool

torch = pytest.importorskip("torch")

PAGE = 4096
BLOCK = 3 * PAGE
SAMPLE = 40  # points per case in `make test`


# ---- open objects --------------------------------------------------------------------------------


class Opened:
    """Forwards calls to libvmem and records the contexts that they open."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def pyvmem_open(self, cell: Any, opts: Any) -> int:
        code: int = lib.pyvmem_open(cell, opts)
        if code == 0:
            self.handles.append(cell.value)
        return code

    def left(self) -> list[int]:
        """Returns the contexts that are still open."""
        stats = ffi.new("struct vmem_stats *")
        stats.size = ffi.sizeof(stats[0])
        return [one for one in self.handles if lib.vmem_get_stats(one, stats) == 0]


def is_pool_open() -> bool:
    """Returns true if torch's allocations on device 0 come from a pool."""
    cell = ffi.new("struct pyvmem_outcome *")
    if lib.pyvmem_torch_open(cell, 0, 12345, PAGE, 0, ffi.NULL):
        return True
    lib.pyvmem_torch_close(cell, 0)
    return False


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    opened = Opened()
    monkeypatch.setattr(objects, "lib", opened)
    yield opened
    vattention._manager = None  # so that the next test starts clean after a failure
    _manager._retired.clear()
    lib.pyvmem_torch_tag(0)
    if is_pool_open():
        lib.pyvmem_torch_close(ffi.new("struct pyvmem_outcome *"), 0)
    gc.collect()
    for handle in opened.left():
        lib.vmem_close(handle)


# ---- cases ---------------------------------------------------------------------------------------
#
# A case does its setup and yields the call to interrupt. Whether or not the call was interrupted,
# the case then repeats it, checks contents, and closes the caller's objects.


def open_host() -> Context:
    return Context("host", granule=PAGE)


def closed(context: Context, known: bool = True) -> None:
    """Closes a context. If `known` is false, it may still hold an object that the interrupted call
    lost.
    """
    gc.collect()
    stats = context.stats()
    left = (stats.reservations, stats.handles, stats.used_bytes, stats.pending)
    assert left == (0, 0, 0, 0) or not known
    context.check()
    context.close()


def _opening(make: Callable[[], Any]) -> Steps:
    """Interrupts a constructor; only the new object has to be closed."""
    made: list[Any] = []
    yield lambda: made.append(make())
    for one in made:
        one.close()


def context_open() -> Steps:
    return _opening(open_host)


def own_context_open() -> Steps:
    """Interrupts the creation of a cache that opens its own context."""
    return _opening(lambda: KVCache(small_config(PAGE), backend="host"))


def own_context_close() -> Steps:
    cache = KVCache(small_config(PAGE), backend="host")
    yield from again(cache.close)


def context_close() -> Steps:
    context = open_host()
    reservation, pages = context.reserve(BLOCK), context.create(BLOCK)
    reservation.map(0, pages)
    yield from again(context.close)
    assert not context.is_open


def context_block() -> Steps:
    made: list[Context] = []

    def call() -> None:
        with open_host() as context:
            made.append(context)

    yield call
    for context in made:
        context.close()


def _made(
    context: Context,
    call: Callable[[list[Any]], None],
    end: Callable[[Any], None],
    last: Callable[[], None] = lambda: None,
) -> Steps:
    """Interrupts a call that creates an object or ends its life; then calls `end` on the caller's
    object, and finally `last`.
    """
    made: list[Any] = []
    yield lambda: call(made)
    known = bool(made)
    while made:
        end(made.pop())
    last()
    closed(context, known)


def reserve_and_close() -> Steps:
    context = open_host()

    def call(made: list[Any]) -> None:
        made.append(context.reserve(BLOCK))
        made[0].close(unmap=True)

    return _made(context, call, lambda one: one.close(unmap=True))


def create_and_release() -> Steps:
    context = open_host()

    def call(made: list[Any]) -> None:
        made.append(context.create(BLOCK))
        made[0].release()

    def end(one: Any) -> None:
        with contextlib.suppress(BadHandle):
            one.release()

    return _made(context, call, end)


def pages_block() -> Steps:
    context = open_host()

    def call(made: list[Any]) -> None:
        with context.create(BLOCK) as pages:
            made.append(pages)

    return _made(context, call, lambda one: one.abandon())


def retain() -> Steps:
    context = open_host()
    reservation, pages = context.reserve(BLOCK), context.create(BLOCK)
    reservation.map(0, pages)
    pages.drop()

    def call(made: list[Any]) -> None:
        made.append(context.retain(reservation.addr, BLOCK))
        made[0].drop()

    return _made(context, call, lambda one: one.abandon(), lambda: reservation.close(unmap=True))


def submit_and_wait() -> Steps:
    context = open_host()
    reservation = context.reserve(BLOCK)
    tickets: list[Ticket] = []

    def call() -> None:
        batch = OpBatch(1)
        batch.populate(reservation.addr, BLOCK, page_size=PAGE)
        tickets.append(Ticket(context))
        context.submit(batch, ticket=tickets[0])
        tickets[0].wait()
        tickets[0].close()

    yield call
    for ticket in tickets:
        if ticket.sent:
            with contextlib.suppress(BadHandle):  # already closed after it completed
                ticket.wait()
            ticket.close()
    reservation.close(unmap=True)
    closed(context)


def resource_open() -> Steps:
    context = open_host()
    made: list[VMemResource] = []
    yield lambda: made.append(VMemResource(context))
    with VMemResource(context) as resource:
        resource.allocate(PAGE).close()
    for one in made:
        one.close()
    closed(context)


def resource_close() -> Steps:
    context = open_host()
    resource = VMemResource(context)
    for block in [resource.allocate(size) for size in (PAGE, PAGE, BLOCK)]:
        block.close()
    yield from again(resource.close)
    closed(context)


# ---- torch's pool --------------------------------------------------------------------------------


def _pool_opening(call: Callable[[Context, list[Any]], None]) -> Steps:
    context = open_host()

    def last() -> None:
        gc.collect()
        VMemPool(context).close()  # must not raise Busy

    return _made(context, partial(call, context), VMemPool.close, last)


def pool_open() -> Steps:
    return _pool_opening(lambda context, made: made.append(VMemPool(context)))


def pool_block() -> Steps:
    def call(context: Context, made: list[Any]) -> None:
        with VMemPool(context) as one:
            made.append(one)

    return _pool_opening(call)


class Blocks:
    """A pool with one block tagged "a" and one tagged "b"; both hold contents."""

    def __init__(self) -> None:
        self.context = open_host()
        self.pool, self.torch = VMemPool(self.context), Torch(0)
        with self.pool._allocating("a"):
            self.block = self.torch.malloc(BLOCK) or 0
        with self.pool._allocating("b"):
            self.other = self.torch.malloc(PAGE) or 0
        ctypes.memset(self.block, 7, BLOCK)
        ctypes.memset(self.other, 9, PAGE)

    def check(self) -> None:
        self.pool.resume()
        assert self.context.read(self.block, BLOCK) == bytes([7]) * BLOCK
        assert self.context.read(self.other, PAGE) == bytes([9]) * PAGE

    def end(self) -> None:
        self.pool.pause("b")  # would overwrite a copy that the interrupted call saved and then lost
        self.pool.drop_host()
        self.check()
        with self.pool._allocating("new"):
            new = self.torch.malloc(PAGE)
        assert new
        for _ in range(2):
            self.pool.pause("a")
            assert "a" in self.pool.paused
            self.check()
        assert not self.pool._host._used, "host memory is left in use"
        for block in (self.block, self.other, new):
            self.torch.free(block)
        self.pool.close()
        assert lib.pyvmem_torch_tag(0) == 0, "this thread's allocations still have a tag"
        closed(self.context)


def _pool(call: Callable[[Blocks], Any], *before: str) -> Steps:
    """Interrupts a call to a pool, after the methods `before` have run on its first block."""
    blocks = Blocks()
    for name in before:
        getattr(blocks.pool, name)("a")
    yield lambda: call(blocks)
    blocks.end()


def pool_use() -> Steps:
    def call(blocks: Blocks) -> None:
        with blocks.pool._allocating("new"):
            pass

    return _pool(call)


def pool_pause() -> Steps:
    return _pool(lambda blocks: blocks.pool.pause("a"))


def pool_pause_and_forget() -> Steps:
    """The contents may be lost, but the memory must be mapped."""
    blocks = Blocks()
    yield lambda: blocks.pool.pause("a", keep=False)
    blocks.pool.resume()
    ctypes.memset(blocks.block, 7, BLOCK)
    blocks.end()


def pool_resume() -> Steps:
    return _pool(lambda blocks: blocks.pool.resume("a"), "pause")


def pool_drop_host() -> Steps:
    return _pool(lambda blocks: blocks.pool.drop_host(), "pause", "resume")


def pool_saved() -> Steps:
    return _pool(lambda blocks: blocks.pool.saved(blocks.block, PAGE), "pause")


def pool_close() -> Steps:
    blocks = Blocks()
    blocks.pool.pause()
    blocks.check()
    blocks.torch.free(blocks.block)
    blocks.torch.free(blocks.other)
    yield from again(blocks.pool.close)
    assert not is_pool_open()
    VMemPool(blocks.context).close()
    closed(blocks.context)


def primary() -> Steps:
    """The primary context is released once, and the thread gets its previous context back."""
    cuda = Libcuda(0)

    def call() -> None:
        library, ctypes.CDLL = ctypes.CDLL, lambda name: cuda  # type: ignore[misc,assignment]
        try:
            with cuda_primary.PrimaryContext(0) as primary:
                primary.call("cuMemHostRegister_v2", *map(ctypes.c_size_t, (PAGE, PAGE, 3)))
        finally:
            ctypes.CDLL = library  # type: ignore[misc]

    yield call
    gc.collect()
    assert cuda.current == 7
    assert cuda.retained >= 0
    kept, cuda.retained = cuda.retained, 0
    assert kept <= 1
    call()
    assert (cuda.current, cuda.retained) == (7, 0)


# ---- torch_memory_saver --------------------------------------------------------------------------


class Saver:
    """A saver that opens its own context."""

    def __init__(self) -> None:
        self.saver, self.torch = savers.TorchMemorySaver(), Torch(0)

    def region(self, tag: str, size: int, backup: bool = True) -> int:
        with self.saver.region(tag, backup):
            return self.torch.malloc(size) or 0

    def enter(self) -> None:
        with self.saver.region("a", True):
            pass

    def end(self) -> None:
        """Closes the saver, opens it again, and closes it twice."""
        self.saver.close()
        assert not is_pool_open()
        self.torch.free(self.region("z", PAGE))
        self.saver.close()
        self.saver.close()
        assert not is_pool_open()


class Regions(Saver):
    """Two regions with the same tag, one with a backup and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.lost = self.region("a", BLOCK), self.region("a", BLOCK, backup=False)
        ctypes.memset(self.kept, 7, BLOCK)

    def end(self) -> None:
        self.saver.pause("a")
        assert not self.saver._pools[0]._context.stats().mapped_bytes
        self.saver.resume("a")
        assert ctypes.string_at(self.kept, BLOCK) == bytes([7]) * BLOCK
        assert ctypes.string_at(self.lost, BLOCK) == bytes(BLOCK)
        self.free()
        super().end()

    def free(self) -> None:
        self.torch.free(self.kept)
        self.torch.free(self.lost)


def saver_region() -> Steps:
    one = Saver()
    yield one.enter
    block = one.region("a", BLOCK)
    ctypes.memset(block, 7, BLOCK)
    one.saver.pause("a")
    one.saver.resume("a")
    assert ctypes.string_at(block, BLOCK) == bytes([7]) * BLOCK
    one.torch.free(block)
    one.end()


def _entering(one: Saver) -> Steps:
    yield one.enter
    one.end()


def saver_region_then_close() -> Steps:
    return _entering(Saver())


def saver_configure() -> Steps:
    one, context = Saver(), open_host()
    yield from again(lambda: one.saver.configure(context))
    one.torch.free(one.region("a", PAGE))
    one.saver.close()
    assert not context.stats().reservations
    context.close()


def saver_region_again() -> Steps:
    return _entering(Regions())


def saver_pause() -> Steps:
    regions = Regions()
    yield lambda: regions.saver.pause("a")
    regions.end()


def _resuming(regions: Regions, call: Callable[[], Any]) -> Steps:
    regions.saver.pause()
    yield call
    regions.saver.resume()
    regions.end()


def saver_resume() -> Steps:
    regions = Regions()
    return _resuming(regions, regions.saver.resume)


def saver_backup() -> Steps:
    regions = Regions()
    memory = (ctypes.c_char * BLOCK).from_address(regions.kept)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return _resuming(regions, lambda: regions.saver.get_cpu_backup(tensor))


def saver_close() -> Steps:
    regions = Regions()
    regions.free()
    yield regions.saver.close
    Saver.end(regions)


# ---- vAttention's functions ----------------------------------------------------------------------

SHAPE = (2, 2, 64, 4, 64, 0, torch.float32, PAGE)  # arguments of init_kvcache


def init_kvcache() -> Steps:
    vattention.configure("host")
    made: list[Any] = []
    yield lambda: made.append(vattention.init_kvcache(*SHAPE))
    made.clear()
    vattention.cleanup()
    made.append(vattention.init_kvcache(*SHAPE))
    vattention.reserve_physical_pages(64 * PAGE)
    vattention.step([4, 0, 0, 0], False)
    made.clear()
    vattention.cleanup()


def _configured() -> Any:
    """Initializes a manager and returns its tensors."""
    vattention.configure("host")
    tensors = vattention.init_kvcache(*SHAPE)
    vattention.reserve_physical_pages(128 * PAGE)
    return tensors


def _managing(call: Callable[[], Any], *lengths: int) -> Steps:
    """Interrupts a call to a manager with requests of these lengths; afterwards the manager must
    still work.
    """
    tensors = _configured()
    if lengths:
        vattention.step(list(lengths), False)
    yield call
    if call == _map_common and getattr(vattention._manager, "common", None) is None:
        call()
    vattention.reserve_physical_pages(128 * PAGE)
    vattention.step([20, 20, 0, 0], False)
    for reqid in range(4):
        vattention.free_batch_idx(reqid)
    vattention.step([0, 0, 0, 0], True)
    assert sorted(vattention.alloc_new_batch_idx(5) for _ in range(4)) == [0, 1, 2, 3]
    del tensors
    vattention.cleanup()


def reserve_physical_pages() -> Steps:
    return _managing(lambda: vattention.reserve_physical_pages(96 * PAGE))


def alloc_new_batch_idx() -> Steps:
    return _managing(lambda: vattention.alloc_new_batch_idx(5))


def step_async() -> Steps:
    return _managing(lambda: vattention.step_async([16, 0, 8, 0]), 8, 8, 0, 0)


def _map_common() -> None:
    vattention.map_common_pages(8)


def map_common_pages() -> Steps:
    return _managing(_map_common)


def _ending(call: Callable[[], Any]) -> Steps:
    yield from again(call)
    assert not _manager._retired


def cleanup() -> Steps:
    """No tensors are alive, so the context is also closed."""
    _configured()
    vattention.step([8, 8, 0, 0], False)
    return _ending(vattention.cleanup)


def close_retired() -> Steps:
    """Closes a manager that was retired because a tensor was still alive at cleanup."""
    tensors = _configured()
    vattention.cleanup()
    del tensors
    return _ending(_manager.close_retired)


CASES: dict[str, Callable[[], Steps]] = {
    name: make
    for name, make in list(globals().items())
    if getattr(make, "__annotations__", {}).get("return") == "Steps" and not name.startswith("_")
}


# ---- the tests -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces torch's pools, which the CPU lacks; regions mark a thread's calls to vmem_malloc."""
    monkeypatch.setattr(savers, "Context", lambda *_: Context("host", granule=PAGE))
    monkeypatch.setattr(VMemPool, "use", VMemPool._allocating)


@contextlib.contextmanager
def lost_exceptions() -> Iterator[list[str]]:
    """Collects exceptions that finalizers raise; ignores their warnings."""
    lost: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda one: lost.append(repr(one.exc_value))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield lost
            gc.collect()
    finally:
        sys.unraisablehook = hook


def run(make: Callable[[], Steps], at: tuple[int, ...], alarm: Any, opened: Opened) -> Interrupts:
    """Runs a case, interrupted at these points; fails if an object is lost."""
    with lost_exceptions() as lost:
        steps, interrupts = make(), Interrupts(*at)
        call = next(steps)
        alarm.set(LIMIT, Stuck)
        try:
            interrupts.run(call)
            reached = not interrupts.places
        except Interrupted:
            reached = True
        where = f"interrupted at {at}, {' then '.join(interrupts.places)}"
        assert reached, f"{where}: the exception did not reach the caller"
        alarm.set(LIMIT, Stuck)
        try:
            ended(steps)
        except (Exception, Stuck) as error:
            print(where, error)
            raise
        finally:
            alarm.stop()
        del steps, call
    Context("host", granule=PAGE).close()  # closes objects whose owner was lost
    assert not opened.left(), f"{where}: a context is open"
    assert not is_pool_open(), f"{where}: torch's pool is open"
    assert not lost, f"{where}: {lost}"
    opened.handles.clear()
    return interrupts


def counted(make: Callable[[], Steps], alarm: Any, opened: Opened) -> int:
    """Counts the points in a case's call when it is not interrupted."""
    for _ in range(2):  # the first run loads modules and fills caches
        count = run(make, (), alarm, opened).count
    return count


@pytest.mark.parametrize("name", CASES)
def test_interruptions(name: str, points: int | None, opened: Opened) -> None:
    """Interrupts at one point, then at two, the second while the first is being handled."""
    rng = random.Random(name)
    with alarms() as alarm:
        count = counted(CASES[name], alarm, opened)
        assert count
        at = sample(count, SAMPLE if points is None else points, rng)
        more = [run(CASES[name], (n,), alarm, opened).count for n in at]
        for n in sample(len(at), PAIRS if points is None else MORE_PAIRS, rng):
            if more[n - 1]:
                run(CASES[name], (at[n - 1], rng.randint(1, more[n - 1])), alarm, opened)


def test_torch_empties_its_cache_after_an_interrupted_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise torch would keep segments over freed addresses."""
    emptied: list[bool] = []

    def empty_cache() -> None:
        emptied.append(True)
        if len(emptied) == 1:
            raise Interrupted

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    with Context("host", granule=PAGE) as context:
        pool = VMemPool(context)
        pool._allocator = object()
        with pool._allocating("a") as tag:
            tag.pool = object()
        with pytest.raises(Interrupted):
            pool.close()
        pool.close()
    assert len(emptied) == 2


def test_lost_objects_are_detected(opened: Opened) -> None:
    """Checks that `run` notices a context that a case leaves open."""

    def careless() -> Steps:
        context = open_host()

        def call() -> None:
            opened.handles.append(context.handle)
            context.reserve(PAGE).leave()

        yield call
        context._closed = True

    with alarms() as alarm, pytest.raises(AssertionError, match="a context is open"):
        run(careless, (), alarm, opened)
