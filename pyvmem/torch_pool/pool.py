# SPDX-License-Identifier: MIT
"""torch tensors on vmem pages, whose memory can be released while the tensors are alive.

    pool = VMemPool(context)
    with pool.use("weights"):
        model = make_model()            # every tensor created here is allocated in the pool
    pool.pause("weights")               # contents are saved in host memory, pages are freed
    ...                                 # another program or phase uses the memory
    pool.resume("weights")              # same addresses, same contents

torch calls the pool through two C functions without a user pointer (`CUDAPluggableAllocator`), so a
process has one pool per device. torch's caching allocator requests segments of 2 MiB, 20 MiB or
more, caches them and carves tensors out of them. Each tag has its own ``torch.cuda.MemPool``, so a
segment holds tensors of a single tag. torch's expandable segments use a different allocator: their
tensors are not in the pool, as `VMemPool.owns` reports.

If NCCL or another process has registered memory by its physical pages, it must register it again
after `VMemPool.resume`: the addresses are the same, but the pages behind them are not. CUDA graphs
may be replayed, as they hold only addresses.
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
    """Cleans up a pool that was lost without `close`, unless it was used and may hold tensors.

    Attributes:
        used: true once a `use` block has been entered.
        made, ended: state of the pool's registration with the allocator functions.
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
    """Places torch's tensors on pages of a context. Usable as a context manager.

    The caller owns the context and cannot close it before the pool. torch has no interface for such
    allocators on ``host``: `use` raises, and only C callers of ``vmem_malloc`` can use the pool.
    Thread-safe.

    Args:
        context: allocates the pages. If it has `Caps.VISIBLE`, CUDA's own copies accept the
            segments.

    Raises:
        Busy: the device already has an open pool.
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
            # Keep an array alive, so that `Context.close` raises Busy while the pool is open.
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
            # the traceback keeps the array alive; its addresses are freed when the context is
            # closed
            with suppress(Busy):
                self._remains.unregister()
                self._let_go()
            raise

    def __repr__(self) -> str:
        if not hasattr(self, "_tags"):  # the constructor failed
            return "<VMemPool, closed>"
        named = [f"{name} (paused)" if tag.paused else name for name, tag in self._tags.items()]
        state = "closed" if self._closed else "open"
        where = self._context.info.backend
        return f"<VMemPool on {where}: {', '.join(named) or 'no tags'}, {state}>"

    # ---- allocation ----------------------------------------------------------------------------

    @contextmanager
    def use(self, tag: str = "default") -> Iterator[None]:
        """Serves this thread's allocations on the device from the pool, within a ``with`` block.

        Allocate before capturing a CUDA graph, not during the capture.

        Raises:
            NotSupported: the context is on ``host``.
            Busy: the tag is paused, and torch might reuse part of a segment that has no memory.
            torch.OutOfMemoryError: (inside the block) no pages are left; `stats` gives the reason.
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
        """Returns the allocator object that all MemPools share; it must outlive them."""
        if self._allocator is None:
            from torch.cuda.memory import CUDAPluggableAllocator

            path = _vmem.__file__
            self._allocator = CUDAPluggableAllocator(path, "vmem_malloc", "vmem_free")
        return self._allocator.allocator()

    @contextmanager
    def _allocating(self, name: str) -> Iterator[Tag]:
        """Makes `vmem_malloc` use the tag for this thread's allocations in a ``with`` block."""
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
            try:  # only C calls, so an asynchronous exception cannot be raised until they are done
                torch_alloc.set_tag(before)
            finally:
                users.discard(user)

    def owns(self, tensor: Any) -> bool:
        """Returns true if a tensor's storage is in the pool, paused or not."""
        storage = tensor.untyped_storage()
        return torch_alloc.owns(self._device, storage.data_ptr(), max(1, storage.nbytes()))

    def saved(self, address: int, nbytes: int) -> memoryview | None:
        """Returns the saved contents of a paused range in host memory; None if nothing is saved.

        The result is a view, not a copy: `resume` restores data written to it. The memory lives as
        long as the view, but writes have no effect after `resume`.

        Args:
            address: address of a tensor in the pool.
            nbytes: number of bytes starting at `address`, within one segment.
        """
        with self._lock:
            self._check_open("saved")
            at = torch_alloc.saved(self._device, address, nbytes)
            found = (tag.view_of(at, nbytes) for tag in self._tags.values() if at)
            return next((view for view in found if view is not None), None)

    # ---- pause and resume ----------------------------------------------------------------------

    def pause(self, tag: str | Mapping[str, bool] | None = None, *, keep: bool = True) -> int:
        """Returns physical memory to the device. The addresses remain but must not be accessed.

        Contents are copied to host memory, page-locked if possible, so that the copy runs at bus
        speed. Page-locking takes longer than copying, so this memory is kept for the next pause, up
        to the most that was ever in use; `drop_host` and `close` free it.

        Waits for the device's work first. Each tag is paused atomically; if one fails, earlier tags
        remain paused. Pausing a tag again pauses the segments added since.

        Args:
            tag: the tag to pause; None for all tags; or a mapping from tags, paused in its order,
                to each one's `keep`.
            keep: whether to copy the contents to host memory; if not, they are zero after `resume`.

        Returns:
            Bytes that the context has returned to the device. The context keeps its other free
            memory.

        Raises:
            InvalidArgument: the tag does not exist.
            Busy: a `use` block of a tag is active; nothing changed.
            OutOfMemory: there is not enough host memory for the contents; the tag is unchanged.
            VMemError: the driver failed; the tag is unchanged.
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
        """Maps paused segments again at their addresses, with their contents or zeros.

        Each tag is resumed atomically; if one fails, it remains paused, and earlier tags remain
        resumed.

        Args:
            tag: the tag to resume; None for all paused tags, in order of first use.

        Returns:
            Bytes mapped again; 0 if nothing was paused.

        Raises:
            InvalidArgument: the tag does not exist.
            OutOfMemory: the device is short of memory; contents are kept for the next attempt.
        """
        with self._lock:
            self._check_open("resume")
            return sum(one.resume() for one in self._chosen(tag) if one.paused)

    def drop_host(self) -> int:
        """Frees host memory that holds no contents; the next `pause` has to page-lock memory again.

        Returns the bytes freed.
        """
        with self._lock:
            self._check_open("drop_host")
            return self._host.drop()

    def _chosen(self, name: str | None) -> list[Tag]:
        return list(self._tags.values()) if name is None else [self._tag(name)]

    def _tag(self, name: str) -> Tag:
        if not isinstance(name, str) or name not in self._tags:
            known = ", ".join(map(repr, self._tags)) or "none"
            text = f"tag {name!r:.80} was never used; existing tags: {known}"
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
        """Returns the current state of a tag or of all tags. The counters cover the entire pool."""
        with self._lock:
            self._check_open("stats")
            if tag is None:
                return TorchPoolStats.of(self._device, self._host)
            return self._chosen(tag)[0].stats()

    # ---- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the segments that hold no tensors and releases the context. Idempotent.

        Raises:
            Busy: tensors of the pool are alive, or a `use` block is active. The pool remains
                usable.
        """
        with self._lock:
            if self._closed:
                return
            if any(tag.users for tag in self._tags.values()):
                _native.fail(errno.EBUSY, "a `use` block is active", op="VMemPool.close")
            if not self._context.is_open:
                self._context.stats()  # raises ForkedProcess in a forked child
            self._return_segments()
            self._remains.unregister()
            for tag in self._tags.values():
                tag.forget()
            self._tags.clear()
            self._host.drop()
            self._let_go()
            self._closed = True

    def _drop_workspaces(self) -> None:
        """Makes torch drop cuBLAS's workspace, which is in the pool if allocated in a `use` block.

        Otherwise, later matrix products would use the workspace even while it is paused.
        """
        if any(tag.pool is not None for tag in self._tags.values()):
            import torch

            torch._C._cuda_clearCublasWorkspaces()

    def _return_segments(self) -> None:
        """Drops the MemPools and empties torch's cache, so that torch frees their segments."""
        if self._allocator is not None:  # if None, torch has not used the pool
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
            self._context.stats()  # raises ForkedProcess in a forked child

    def __enter__(self) -> VMemPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise  # an earlier error wins: its traceback holds the tensors

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if not getattr(self, "_closed", True) and self._context.is_open:
            _warn("VMemPool was not closed", ResourceWarning, source=self)
