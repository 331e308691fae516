# SPDX-License-Identifier: MIT
"""torch tensors on vmem pages, whose memory can be released while the tensors live.

    pool = VMemPool(context)
    with pool.use("weights"):
        model = make_model()            # every tensor made here is allocated in the pool
    pool.pause("weights")               # contents are saved in host memory, pages are freed
    ...                                 # another program, or another phase, has the memory
    pool.resume("weights")              # same addresses, same contents

torch reaches the pool by two C functions without a user pointer (`CUDAPluggableAllocator`), so a
process has one pool a device. Tensors are cut by torch's caching allocator out of segments that it
asks for and keeps: 2 MiB, 20 MiB or more each. A tag has a ``torch.cuda.MemPool`` of its own, so a
segment holds tensors of one tag. Expandable segments are another allocator of torch's: a tensor
that came from it is not in the pool, which `VMemPool.owns` reports.

Memory that NCCL or another process registered by its physical pages must be registered again after
`VMemPool.resume`: the addresses are the same, the pages behind them are not. A CUDA graph may be
replayed: it holds addresses.
"""

from __future__ import annotations

import errno
import gc
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pyvmem import _native, _vmem
from pyvmem._native import Outcome, torch_alloc
from pyvmem.errors import Busy
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.reservation import Reservation
from pyvmem.plumbing.remains import Remains, end_lost
from pyvmem.torch_pool.host import HostMemory
from pyvmem.torch_pool.primary import PrimaryContext
from pyvmem.torch_pool.tags import Tag, TorchPoolStats

__all__ = ["TorchPoolStats", "VMemPool"]

_VISIBLE = _native.constant("VMEM_RESERVE_VISIBLE")


class PoolRemains(Remains):
    """Cleans up a pool whose owner was lost, unless it was used: it may hold tensors.

    Attributes:
        used: a `use` block was entered.
        made, ended: state of its registration with the allocator functions.
    """

    def __init__(self, owner: VMemPool) -> None:
        self.used = False
        self.made, self.ended = Outcome(), Outcome()
        self._device, self._vm = owner._device, owner._context.handle
        self._anchor, self._freed = owner._anchor._outcome, owner._anchor._freed
        super().__init__(owner)

    def unregister(self) -> None:
        """Detaches torch's allocator functions from the pool. Idempotent."""
        if self.made.happened and not self.ended.happened:
            torch_alloc.close(self._device, self.ended)

    def end(self) -> None:
        if not self.used:
            self.unregister()
            if self._anchor.happened and not self._freed.happened:
                _native.free(self._vm, self._anchor.value, 0, outcome=self._freed)


class VMemPool:
    """Places torch's tensors on pages of a context. A context manager.

    The context is the caller's; it cannot be closed before the pool. On ``host`` torch has no
    interface for this: `use` raises, and only C callers of ``vmem_malloc`` reach the pool.
    Thread-safe.

    Args:
        context: where pages come from. With `Caps.VISIBLE`, segments are reserved so that CUDA's
            own copies accept them.

    Raises:
        Busy: the device has an open pool already.
        VMemError: CUDA cannot keep the device's primary context.
    """

    def __init__(self, context: Context) -> None:
        self._closed = True
        self._context = context
        self._device = context.cuda_device if context.cuda_device is not None else 0
        self._lock = threading.RLock()
        self._tags: dict[str, Tag] = {}
        self._host = HostMemory(context.cuda_device)
        self._allocator: Any = None
        visible = Caps.VISIBLE in context.info.caps
        flags = _VISIBLE if visible else 0
        self._primary: PrimaryContext | None = None
        end_lost()
        self._anchor, self._hold = Reservation(context, Outcome()), None
        self._remains = PoolRemains(self)
        try:
            # Keeps an array alive so that `Context.close` raises Busy while the pool is open.
            context.reserve(context.info.granule, into=self._anchor)
            self._hold = self._anchor.array((1,), "uint8")
            if context.cuda_device is not None:
                self._primary = PrimaryContext(self._device)
            made = self._remains.made
            torch_alloc.open(
                self._device, context.handle, context.info.granule, flags, self._primary, made
            )
            self._closed = False
        except BaseException:
            with suppress(Busy):  # the traceback keeps the array: the context frees its addresses
                self._remains.unregister()
                self._let_go()
            raise

    def __repr__(self) -> str:
        if not hasattr(self, "_tags"):  # it could not be made
            return "<VMemPool, closed>"
        named = [f"{name} (paused)" if tag.paused else name for name, tag in self._tags.items()]
        state = "closed" if self._closed else "open"
        where = self._context.info.backend
        return f"<VMemPool on {where}: {', '.join(named) or 'no tags'}, {state}>"

    # ---- allocation ----------------------------------------------------------------------------

    @contextmanager
    def use(self, tag: str = "default") -> Iterator[None]:
        """Inside the block, this thread's allocations on the device come from the pool.

        Allocate before a CUDA graph is captured, not during the capture.

        Raises:
            NotSupported: a ``host`` context.
            Busy: the tag is paused: torch might reuse a part of a segment that has no memory.
            torch.OutOfMemoryError: (inside the block) no pages; `stats` has the reason.
        """
        if self._context.cuda_device is None:
            _native.fail(errno.EOPNOTSUPP, "torch's CPU allocator cannot be replaced", op="use")
        import torch

        with self._allocating(tag) as one:
            with self._lock:
                if one.pool is None:
                    one.pool = torch.cuda.MemPool(self._torch_allocator())
            with torch.cuda.use_mem_pool(one.pool, device=self._device):
                yield

    def _torch_allocator(self) -> Any:
        """The allocator object that all MemPools share; it must outlive them."""
        if self._allocator is None:
            from torch.cuda.memory import CUDAPluggableAllocator

            path = _vmem.__file__
            self._allocator = CUDAPluggableAllocator(path, "vmem_malloc", "vmem_free")
        return self._allocator.allocator()

    @contextmanager
    def _allocating(self, name: str) -> Iterator[Tag]:
        """Inside the block, `vmem_malloc` in this thread works for the tag."""
        user, users, before = object(), set[object](), torch_alloc.tag()
        try:
            with self._lock:
                self._check_open("use")
                number = len(self._tags) + 1
                tag = self._tags.setdefault(name, Tag(name, number, self._device, self._host))
                if tag.paused:
                    _native.fail(errno.EBUSY, f"tag {name!r} is paused; resume it first", op="use")
                users = tag.users
                users.add(user)
                self._remains.used = True
            torch_alloc.set_tag(tag.number)
            yield tag
        finally:
            try:  # only C calls: an asynchronous exception can only follow them
                torch_alloc.set_tag(before)
            finally:
                users.discard(user)

    def owns(self, tensor: Any) -> bool:
        """Returns whether a tensor's storage is in the pool, paused or not."""
        storage = tensor.untyped_storage()
        return torch_alloc.owns(self._device, storage.data_ptr(), max(1, storage.nbytes()))

    def saved(self, address: int, nbytes: int) -> memoryview | None:
        """The saved contents of a paused range in host memory; None if it has none.

        A view, not a copy; `resume` restores what is written to it. The memory lives as long as
        the view, but is ignored after `resume`.

        Args:
            address: address of a tensor in the pool.
            nbytes: bytes from `address` on, within one segment.
        """
        with self._lock:
            self._check_open("saved")
            at = torch_alloc.saved(self._device, address, nbytes)
            found = (tag.view_of(at, nbytes) for tag in self._tags.values() if at)
            return next((view for view in found if view is not None), None)

    # ---- pause and resume ----------------------------------------------------------------------

    def pause(self, tag: str | Mapping[str, bool] | None = None, *, keep: bool = True) -> int:
        """Releases physical memory to the device; the addresses stay but must not be accessed.

        Contents go to host memory, which is page-locked if it can be: the device then copies at the
        speed of its bus. Getting such memory takes longer than the copy, so it is kept for the next
        pause, as much as was saved at once; `drop_host` and `close` give it back.

        Waits for the device's work first. Each tag is paused atomically; if one fails, those before
        it stay paused. Pausing again covers what was added since.

        Args:
            tag: None: every tag. A mapping: several, in its order, each with its `keep`.
            keep: copy the contents to host memory; else they are zeros after `resume`.

        Returns:
            Bytes that left the context for the device. The context's other free memory stays.

        Raises:
            InvalidArgument: no such tag.
            Busy: a `use` block of a tag is active; nothing changed.
            OutOfMemory: no host memory for the contents; the tag is as before.
            VMemError: the driver failed; the tag is as before.
        """
        with self._lock:
            self._check_open("pause")
            if isinstance(tag, Mapping):
                tags = {self._tag(name): bool(kept) for name, kept in tag.items()}
            else:
                tags = dict.fromkeys(self._chosen(tag), keep)
            for one in tags:
                if one.users:
                    _native.fail(errno.EBUSY, f"tag {one.name!r} has a `use` block", op="pause")
            before = self._context.stats()
            self._synchronize()
            self._drop_workspaces()
            for one, kept in tags.items():
                one.pause(kept)
            self._context.trim(before.free_bytes)
            return max(0, before.slab_bytes - self._context.stats().slab_bytes)

    def resume(self, tag: str | None = None) -> int:
        """Maps paused segments again, at their addresses, with their contents or with zeros.

        Each tag is resumed atomically; one that fails stays paused, those before it stay resumed.

        Args:
            tag: None: every paused tag, in the order of their first use.

        Returns:
            Bytes mapped again; 0 when nothing was paused.

        Raises:
            InvalidArgument: no such tag.
            OutOfMemory: the device has not enough memory now; contents are kept for the next try.
        """
        with self._lock:
            self._check_open("resume")
            return sum(one.resume() for one in self._chosen(tag) if one.paused)

    def drop_host(self) -> int:
        """Frees host memory that holds no contents; the next `pause` locks memory again.

        Returns: Its bytes.
        """
        with self._lock:
            self._check_open("drop_host")
            return self._host.drop()

    def _chosen(self, name: str | None) -> list[Tag]:
        return list(self._tags.values()) if name is None else [self._tag(name)]

    def _tag(self, name: str) -> Tag:
        if not isinstance(name, str) or name not in self._tags:
            known = ", ".join(map(repr, self._tags)) or "none"
            text = f"tag {name!r:.80} was never used; there are: {known}"
            _native.fail(errno.EINVAL, text, op="VMemPool")
        return self._tags[name]

    def _synchronize(self) -> None:
        if self._primary is not None:
            self._primary.call("cuCtxSynchronize")

    @property
    def paused(self) -> frozenset[str]:
        """The paused tags."""
        with self._lock:
            return frozenset(tag.name for tag in self._tags.values() if tag.paused)

    def stats(self, tag: str | None = None) -> TorchPoolStats:
        """The current state of one tag or all; the counters cover the whole pool."""
        with self._lock:
            self._check_open("stats")
            if tag is None:
                return TorchPoolStats.of(self._device, self._host)
            return self._chosen(tag)[0].stats()

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the segments that hold no tensor, and releases the context. Idempotent.

        Raises:
            Busy: tensors of the pool live, or a `use` block is active; the pool can still be used.
        """
        with self._lock:
            if self._closed:
                return
            if any(tag.users for tag in self._tags.values()):
                _native.fail(errno.EBUSY, "a `use` block is active", op="VMemPool.close")
            if not self._context.is_open:
                self._context.stats()  # raises if the pool belongs to a fork's parent
            self._return_segments()
            self._remains.unregister()
            for tag in self._tags.values():
                tag.forget()
            self._tags.clear()
            self._host.drop()
            self._let_go()
            self._closed = True

    def _drop_workspaces(self) -> None:
        """Makes torch drop cuBLAS's workspace, which lies in the pool if a `use` block allocated
        it.

        Later matrix products would use it even while paused; now they allocate a new one.
        """
        if any(tag.pool is not None for tag in self._tags.values()):
            import torch

            torch._C._cuda_clearCublasWorkspaces()

    def _return_segments(self) -> None:
        """Drops MemPools and empties torch's cache: until then torch keeps their segments."""
        if self._allocator is not None:  # otherwise torch has no workspace
            import torch

            self._drop_workspaces()
            for tag in self._tags.values():
                tag.pool = None
            gc.collect()
            torch.cuda.empty_cache()

    def _let_go(self) -> None:
        if self._primary is not None:
            self._primary.close()
        self._hold = None
        self._anchor.abandon()

    def _check_open(self, op: str) -> None:
        if self._closed or self._remains.ended.happened:
            _native.fail(errno.EBADF, "the VMemPool is closed", op=op)
        if not self._context.is_open:
            self._context.stats()  # raises the right error in a forked child

    def __enter__(self) -> VMemPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise  # else the traceback keeps tensors alive, and that error matters more

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not getattr(self, "_closed", True) and self._context.is_open:
            _warn("VMemPool was not closed", ResourceWarning, source=self)
