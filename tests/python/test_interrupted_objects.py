# SPDX-License-Identifier: MIT
"""Description: an exception from outside, at every point, costs no context, pool, saver or manager.

As test_interrupts.py, for what has no cache, or opens and closes one: each case prepares something
and names a call, which is interrupted at one point, or at two. Then what the caller has can be
closed, what he does not have is closed already, contents are intact, and the call can be made
again. ``--points`` as there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from interrupts_helpers import LIMIT, Interrupted, Interrupts, Stuck, alarms
from kvcache_helpers import small_config
from test_interrupts import MORE_PAIRS, PAIRS, sample
from test_torch_pool import Libcuda, Torch

import pyvmem._native.objects as objects
from pyvmem import BadHandle, Busy, Context, KVCache
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
SAMPLE = 40  # points of a case in `make test`


# ---- what is open --------------------------------------------------------------------------------


class Opened:
    """Calls of libvmem, of which it notes the contexts."""

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
        """Those that are not closed."""
        stats = ffi.new("struct vmem_stats *")
        stats.size = ffi.sizeof(stats[0])
        return [one for one in self.handles if lib.vmem_get_stats(one, stats) == 0]


def is_pool_open() -> bool:
    """Whether torch's allocations on device 0 come from some pool."""
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
    vattention._manager = None  # after a failure, the next test begins anew
    _manager._retired.clear()
    lib.pyvmem_torch_tag(0)
    if is_pool_open():
        lib.pyvmem_torch_close(ffi.new("struct pyvmem_outcome *"), 0)
    gc.collect()
    for handle in opened.left():
        lib.vmem_close(handle)


# ---- cases ---------------------------------------------------------------------------------------


class Case:
    """Prepares something when it is made."""

    def call(self) -> None:
        """What is interrupted."""
        raise NotImplementedError

    def after(self) -> None:
        """Interrupted or not: makes it again, checks contents, closes what the caller has."""
        raise NotImplementedError


CASES: dict[str, type[Case]] = {}


def case(cls: type[Case]) -> type[Case]:
    CASES[cls.__name__] = cls
    return cls


@case
class ContextOpen(Case):
    def __init__(self) -> None:
        self.made: list[Context] = []

    def call(self) -> None:
        self.made.append(Context("host", granule=PAGE))

    def after(self) -> None:
        for one in self.made:
            one.close()


class WithContext(Case):
    def __init__(self) -> None:
        self.context = Context("host", granule=PAGE)

    def end(self, known: bool = True) -> None:
        """Closes the context, in which nothing is left but what the caller was not told of."""
        gc.collect()
        stats = self.context.stats()
        left = (stats.reservations, stats.handles, stats.used_bytes, stats.pending)
        assert left == (0, 0, 0, 0) or not known
        self.context.check()
        self.context.close()


@case
class ContextClose(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.reservation = self.context.reserve(BLOCK)
        self.pages = self.context.create(BLOCK)
        self.reservation.map(0, self.pages)

    def call(self) -> None:
        self.context.close()

    def after(self) -> None:
        self.context.close()
        assert not self.context.is_open


@case
class ContextBlock(Case):
    context: Context | None = None

    def call(self) -> None:
        with Context("host", granule=PAGE) as self.context:
            pass

    def after(self) -> None:
        if self.context is not None:
            self.context.close()


@case
class ReserveAndClose(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def call(self) -> None:
        self.made.append(self.context.reserve(BLOCK))
        self.made[0].close(unmap=True)

    def after(self) -> None:
        known = bool(self.made)
        for one in self.made:
            one.close(unmap=True)
        self.made.clear()
        self.end(known)


@case
class CreateAndRelease(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def call(self) -> None:
        self.made.append(self.context.create(BLOCK))
        self.made[0].release()

    def after(self) -> None:
        known = bool(self.made)
        for one in self.made:
            with contextlib.suppress(BadHandle):
                one.release()
        self.made.clear()
        self.end(known)


@case
class PagesBlock(WithContext):
    pages: Any = None

    def call(self) -> None:
        with self.context.create(BLOCK) as self.pages:
            pass

    def after(self) -> None:
        known = self.pages is not None
        if known:
            self.pages.abandon()
        self.pages = None
        self.end(known)


@case
class Retain(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.reservation = self.context.reserve(BLOCK)
        pages = self.context.create(BLOCK)
        self.reservation.map(0, pages)
        pages.drop()

    def call(self) -> None:
        self.made.append(self.context.retain(self.reservation.addr, BLOCK))
        self.made[0].drop()

    def after(self) -> None:
        known = bool(self.made)
        for one in self.made:
            one.abandon()
        self.made.clear()
        self.reservation.close(unmap=True)
        self.end(known)


@case
class SubmitAndWait(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.reservation = self.context.reserve(BLOCK)
        self.ticket: Ticket | None = None

    def call(self) -> None:
        batch = OpBatch(1)
        batch.populate(self.reservation.addr, BLOCK, page_size=PAGE)
        self.ticket = Ticket(self.context)
        self.context.submit(batch, ticket=self.ticket)
        self.ticket.wait()
        self.ticket.close()

    def after(self) -> None:
        if self.ticket is not None and self.ticket.sent:
            with contextlib.suppress(BadHandle):  # it is closed, and was over before
                self.ticket.wait()
            self.ticket.close()
        self.reservation.close(unmap=True)
        self.end()


@case
class OwnContextOpen(Case):
    """A cache that opens its context."""

    def __init__(self) -> None:
        self.made: list[KVCache] = []

    def call(self) -> None:
        self.made.append(KVCache(small_config(PAGE), backend="host"))

    def after(self) -> None:
        for one in self.made:
            one.close()


@case
class OwnContextClose(Case):
    def __init__(self) -> None:
        self.cache = KVCache(small_config(PAGE), backend="host")

    def call(self) -> None:
        self.cache.close()

    def after(self) -> None:
        self.cache.close()


@case
class ResourceOpen(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[VMemResource] = []

    def call(self) -> None:
        self.made.append(VMemResource(self.context))

    def after(self) -> None:
        with VMemResource(self.context) as resource:
            resource.allocate(PAGE).close()
        for one in self.made:
            one.close()
        self.end()


@case
class ResourceClose(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.resource = VMemResource(self.context)
        for block in [self.resource.allocate(size) for size in (PAGE, PAGE, BLOCK)]:
            block.close()

    def call(self) -> None:
        self.resource.close()

    def after(self) -> None:
        self.resource.close()
        self.end()


# ---- torch's pool --------------------------------------------------------------------------------


@case
class PoolOpen(WithContext):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[VMemPool] = []

    def call(self) -> None:
        self.made.append(VMemPool(self.context))

    def after(self) -> None:
        known = bool(self.made)
        for one in self.made:
            one.close()
        self.made.clear()
        gc.collect()
        VMemPool(self.context).close()  # not Busy
        self.end(known)


@case
class PoolBlock(PoolOpen):
    def call(self) -> None:
        with VMemPool(self.context) as one:
            self.made.append(one)


class WithBlock(WithContext):
    """A pool with a block of the tag "a"; other pages have their contents too."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.torch = VMemPool(self.context), Torch(0)
        with self.pool._allocating("a"):
            self.block = self.torch.malloc(BLOCK) or 0
        with self.pool._allocating("b"):
            self.other = self.torch.malloc(PAGE) or 0
        ctypes.memset(self.block, 7, BLOCK)
        ctypes.memset(self.other, 9, PAGE)

    def check(self, kept: int = 7) -> None:
        self.pool.resume()
        assert self.context.read(self.block, BLOCK) == bytes([kept]) * BLOCK
        assert self.context.read(self.other, PAGE) == bytes([9]) * PAGE

    def after(self) -> None:
        self.pool.pause("b")  # would overwrite what the interrupted call saved and lost sight of
        self.pool.drop_host()
        self.check()
        with self.pool._allocating("new"):
            new = self.torch.malloc(PAGE)
        assert new
        for _ in range(2):
            self.pool.pause("a")
            assert "a" in self.pool.paused
            self.check()
        assert not self.pool._host._used, "host memory that nobody uses"
        for block in (self.block, self.other, new):
            self.torch.free(block)
        self.pool.close()
        assert lib.pyvmem_torch_tag(0) == 0, "what this thread allocates is still a tag's"
        self.end()


@case
class PoolUse(WithBlock):
    def call(self) -> None:
        with self.pool._allocating("new"):
            pass


@case
class PoolPause(WithBlock):
    def call(self) -> None:
        self.pool.pause("a")


@case
class PoolPauseAndForget(WithBlock):
    """The contents may be gone; the memory is there again."""

    def call(self) -> None:
        self.pool.pause("a", keep=False)

    def after(self) -> None:
        self.pool.resume()
        ctypes.memset(self.block, 7, BLOCK)
        super().after()


@case
class PoolResume(WithBlock):
    def __init__(self) -> None:
        super().__init__()
        self.pool.pause("a")

    def call(self) -> None:
        self.pool.resume("a")


@case
class PoolDropHost(WithBlock):
    def __init__(self) -> None:
        super().__init__()
        self.pool.pause("a")
        self.pool.resume("a")

    def call(self) -> None:
        self.pool.drop_host()


@case
class PoolSaved(WithBlock):
    def __init__(self) -> None:
        super().__init__()
        self.pool.pause("a")

    def call(self) -> None:
        self.pool.saved(self.block, PAGE)


@case
class PoolClose(WithBlock):
    def __init__(self) -> None:
        super().__init__()
        self.pool.pause()
        self.check()
        self.torch.free(self.block)
        self.torch.free(self.other)

    def call(self) -> None:
        self.pool.close()

    def after(self) -> None:
        self.pool.close()
        assert not is_pool_open()
        VMemPool(self.context).close()
        self.end()


@case
class Primary(Case):
    """A device's primary context: given back once, and the thread has the one it had."""

    def __init__(self) -> None:
        self.cuda = Libcuda(0)

    def call(self) -> None:
        library, ctypes.CDLL = ctypes.CDLL, lambda name: self.cuda  # type: ignore[misc,assignment]
        try:
            with cuda_primary.PrimaryContext(0) as primary:
                primary.call("cuMemHostRegister_v2", *map(ctypes.c_size_t, (PAGE, PAGE, 3)))
        finally:
            ctypes.CDLL = library  # type: ignore[misc]

    def after(self) -> None:
        gc.collect()
        assert self.cuda.current == 7
        assert self.cuda.retained >= 0
        kept, self.cuda.retained = self.cuda.retained, 0
        assert kept <= 1
        self.call()
        assert (self.cuda.current, self.cuda.retained) == (7, 0)


# ---- torch_memory_saver --------------------------------------------------------------------------


class WithSaver(Case):
    """Of one that opens its own context."""

    def __init__(self) -> None:
        self.saver, self.torch = savers.TorchMemorySaver(), Torch(0)

    def region(self, tag: str, size: int, backup: bool = True) -> int:
        with self.saver.region(tag, backup):
            return self.torch.malloc(size) or 0

    def end(self) -> None:
        """It closes, and can be opened again."""
        self.saver.close()
        assert not is_pool_open()
        self.torch.free(self.region("z", PAGE))
        self.saver.close()
        self.saver.close()
        assert not is_pool_open()


@case
class SaverRegion(WithSaver):
    def call(self) -> None:
        with self.saver.region("a", True):
            pass

    def after(self) -> None:
        block = self.region("a", BLOCK)
        ctypes.memset(block, 7, BLOCK)
        self.saver.pause("a")
        self.saver.resume("a")
        assert ctypes.string_at(block, BLOCK) == bytes([7]) * BLOCK
        self.torch.free(block)
        self.end()


@case
class SaverRegionThenClose(SaverRegion):
    def after(self) -> None:
        self.end()


@case
class SaverConfigure(WithSaver):
    def __init__(self) -> None:
        super().__init__()
        self.context = Context("host", granule=PAGE)

    def call(self) -> None:
        self.saver.configure(self.context)

    def after(self) -> None:
        self.saver.configure(self.context)
        self.torch.free(self.region("a", PAGE))
        self.saver.close()
        assert not self.context.stats().reservations
        self.context.close()


class WithRegions(WithSaver):
    """A tag's two regions, with a backup and without."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.lost = self.region("a", BLOCK), self.region("a", BLOCK, backup=False)
        ctypes.memset(self.kept, 7, BLOCK)

    def after(self) -> None:
        self.saver.pause("a")
        assert not self.saver._pools[0]._context.stats().mapped_bytes
        self.saver.resume("a")
        assert ctypes.string_at(self.kept, BLOCK) == bytes([7]) * BLOCK
        assert ctypes.string_at(self.lost, BLOCK) == bytes(BLOCK)
        self.free()
        self.end()

    def free(self) -> None:
        self.torch.free(self.kept)
        self.torch.free(self.lost)


@case
class SaverRegionAgain(WithRegions):
    def call(self) -> None:
        with self.saver.region("a", True):
            pass


@case
class SaverPause(WithRegions):
    def call(self) -> None:
        self.saver.pause("a")


@case
class SaverResume(WithRegions):
    def __init__(self) -> None:
        super().__init__()
        self.saver.pause()

    def call(self) -> None:
        self.saver.resume()

    def after(self) -> None:
        self.saver.resume()
        super().after()


@case
class SaverBackup(SaverResume):
    def __init__(self) -> None:
        super().__init__()
        memory = (ctypes.c_char * BLOCK).from_address(self.kept)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def call(self) -> None:
        self.saver.get_cpu_backup(self.tensor)


@case
class SaverClose(WithRegions):
    def __init__(self) -> None:
        super().__init__()
        self.free()

    def call(self) -> None:
        self.saver.close()

    def after(self) -> None:
        self.end()


# ---- vAttention's functions ----------------------------------------------------------------------

SHAPE = (2, 2, 64, 4, 64, 0, torch.float32, PAGE)  # of init_kvcache


@case
class InitKVCache(Case):
    def __init__(self) -> None:
        vattention.configure("host")
        self.tensors: Any = None

    def call(self) -> None:
        self.tensors = vattention.init_kvcache(*SHAPE)

    def after(self) -> None:
        self.tensors = None
        vattention.cleanup()
        self.tensors = vattention.init_kvcache(*SHAPE)
        vattention.reserve_physical_pages(64 * PAGE)
        vattention.step([4, 0, 0, 0], False)
        self.tensors = None
        vattention.cleanup()


class WithManager(Case):
    def __init__(self) -> None:
        vattention.configure("host")
        self.tensors: Any = vattention.init_kvcache(*SHAPE)
        vattention.reserve_physical_pages(128 * PAGE)

    def after(self) -> None:
        vattention.reserve_physical_pages(128 * PAGE)
        vattention.step([20, 20, 0, 0], False)
        for reqid in range(4):
            vattention.free_batch_idx(reqid)
        vattention.step([0, 0, 0, 0], True)
        assert sorted(vattention.alloc_new_batch_idx(5) for _ in range(4)) == [0, 1, 2, 3]
        self.tensors = None
        vattention.cleanup()


@case
class ReservePhysicalPages(WithManager):
    def call(self) -> None:
        vattention.reserve_physical_pages(96 * PAGE)


@case
class AllocNewBatchIdx(WithManager):
    def call(self) -> None:
        vattention.alloc_new_batch_idx(5)


@case
class StepAsync(WithManager):
    def __init__(self) -> None:
        super().__init__()
        vattention.step([8, 8, 0, 0], False)

    def call(self) -> None:
        vattention.step_async([16, 0, 8, 0])


@case
class MapCommonPages(WithManager):
    def call(self) -> None:
        vattention.map_common_pages(8)

    def after(self) -> None:
        manager = vattention._manager
        assert manager is not None
        if manager.common is None:
            self.call()
        super().after()


@case
class Cleanup(WithManager):
    """No tensor is alive: the context closes, too."""

    def __init__(self) -> None:
        super().__init__()
        vattention.step([8, 8, 0, 0], False)
        self.tensors = None

    def call(self) -> None:
        vattention.cleanup()

    def after(self) -> None:
        vattention.cleanup()
        assert not _manager._retired


@case
class CloseRetired(WithManager):
    """A tensor was alive when its manager ended."""

    def __init__(self) -> None:
        super().__init__()
        vattention.cleanup()
        self.tensors = None

    def call(self) -> None:
        _manager.close_retired()

    def after(self) -> None:
        _manager.close_retired()
        assert not _manager._retired


# ---- the tests -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has no place for a pool on the CPU: a region is one of vmem_malloc's callers."""
    monkeypatch.setattr(savers, "Context", lambda *_: Context("host", granule=PAGE))
    monkeypatch.setattr(VMemPool, "use", VMemPool._allocating)


@contextlib.contextmanager
def lost_exceptions() -> Iterator[list[str]]:
    """What finalizers could raise to nobody; what they warn of is known."""
    lost: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda one: lost.append(repr(one.exc_value))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield lost
            gc.collect()
    finally:
        sys.unraisablehook = hook


def run(make: type[Case], at: tuple[int, ...], alarm: Any, opened: Opened) -> Interrupts:
    """Fails if something is lost that way."""
    with lost_exceptions() as lost:
        one, interrupts = make(), Interrupts(*at)
        alarm.set(LIMIT, Stuck)
        try:
            interrupts.run(one.call)
            reached = not interrupts.places
        except Interrupted:
            reached = True
        where = f"interrupted at {at}, {' then '.join(interrupts.places)}"
        assert reached, f"{where}: the exception did not reach the caller"
        alarm.set(LIMIT, Stuck)
        try:
            one.after()
        except (Exception, Stuck) as error:
            print(where, error)
            raise
        finally:
            alarm.stop()
        del one
    Context("host", granule=PAGE).close()  # ends what nobody has
    assert not opened.left(), f"{where}: a context is open"
    assert not is_pool_open(), f"{where}: torch's pool is open"
    assert not lost, f"{where}: {lost}"
    opened.handles.clear()
    return interrupts


def counted(make: type[Case], alarm: Any, opened: Opened) -> int:
    """The points of a call that nobody interrupts."""
    for _ in range(2):  # the first loads modules and fills caches
        count = run(make, (), alarm, opened).count
    return count


@pytest.mark.parametrize("name", CASES)
def test_interruptions(name: str, points: int | None, opened: Opened) -> None:
    """One; then two, the second in what the first one set off."""
    rng = random.Random(name)
    with alarms() as alarm:
        count = counted(CASES[name], alarm, opened)
        assert count
        at = sample(count, SAMPLE if points is None else points, rng)
        more = [run(CASES[name], (n,), alarm, opened).count for n in at]
        for n in sample(len(at), PAIRS if points is None else MORE_PAIRS, rng):
            if more[n - 1]:
                run(CASES[name], (at[n - 1], rng.randint(1, more[n - 1])), alarm, opened)


def test_torch_empties_its_cache_though_a_close_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The segments would stay torch's, over addresses that are free."""
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


def test_what_a_case_loses_is_found(opened: Opened) -> None:
    """The checks themselves."""

    class Careless(Case):
        def call(self) -> None:
            self.context = Context("host", granule=PAGE)
            opened.handles.append(self.context.handle)
            self.context.reserve(PAGE).leave()

        def after(self) -> None:
            self.context._closed = True
            with contextlib.suppress(Busy):
                raise Busy("nothing is closed", errno=0, op="")

    with alarms() as alarm, pytest.raises(AssertionError, match="a context is open"):
        run(Careless, (), alarm, opened)
