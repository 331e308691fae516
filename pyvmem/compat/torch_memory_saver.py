# SPDX-License-Identifier: MIT
"""A drop-in replacement for torch_memory_saver, built on `VMemPool`.

Trainers use torch_memory_saver to release idle memory:

    from pyvmem.compat.torch_memory_saver import torch_memory_saver
    # or, for an unmodified program, before its own ``import torch_memory_saver``:
    pyvmem.compat.torch_memory_saver.install()

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = make_model()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

The names and arguments are those of github.com/fzyzcjy/torch_memory_saver with
``hook_mode="torch"``. Some of the original's features preload a library that intercepts every CUDA
allocation. torch's allocator interface cannot do this, so these features raise `NotSupported`:
``hook_mode="preload"`` and `memory_margin_bytes`.

Differences:

- `configure_subprocess` has no effect: there is no library to preload. A spawned process must
  call `install` itself.
- `cuda_graph` captures, but warns that the graph's own memory is not paused: torch allocates it
  during capture, when pages cannot be mapped and zeroed.
- `pause` raises `Busy` for a tag whose region is active.
- Driver errors raise exceptions and never kill the process. Contents are kept, in place or in their
  backup.
"""

from __future__ import annotations

import errno
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from pyvmem.errors import BadHandle, Busy, InvalidArgument, NotSupported
from pyvmem.memory.context import Context
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.torch_pool.pool import VMemPool

if TYPE_CHECKING:
    import torch

__all__ = ["TorchMemorySaver", "configure_subprocess", "install", "torch_memory_saver"]

_PRELOAD = "which requires a library preloaded into the process"


def _refuse(what: str) -> NoReturn:
    raise NotSupported(
        f"torch_memory_saver: {what}, {_PRELOAD}; pyvmem does not have one",
        errno=errno.EOPNOTSUPP,
        op="torch_memory_saver",
    )


class TorchMemorySaver:
    """Regions of torch memory that can be paused. Thread-safe, as `VMemPool` is.

    The first call that needs the pool opens it on the context passed to `configure`, or on a new
    context.
    """

    def __init__(self) -> None:
        self._lock = reentrant_lock()
        self._context: Context | None = None
        self._own: list[Context] = []  # at most one
        self._pools: list[VMemPool] = []  # at most one
        # for each tag, the `enable_cpu_backup` values of its regions
        self._tags: dict[str, set[bool]] = {}
        self._active = threading.local()

    def __repr__(self) -> str:
        over = f"over {self._pools[0]!r}" if self._pools else "that has no pool yet"
        return f"<TorchMemorySaver {over}>"

    def configure(self, context: Context) -> None:
        """Sets the context that pages come from. The caller closes it after calling `close`.

        Raises:
            Busy: the pool is already open.
        """
        with self._lock:
            if self._pools:
                raise Busy(
                    "torch_memory_saver: its pool is open already; configure it before the first "
                    "region",
                    errno=errno.EBUSY,
                    op="configure",
                )
            self._context = context

    def _opened(self) -> VMemPool:
        with self._lock:
            if not self._pools:
                context = self._context
                # `extend` creates and stores each object in one C call: a signal handler cannot
                # raise in between.
                try:
                    if context is None:
                        if not self._own or not self._own[0].is_open:
                            self._own[:] = map(Context, ("auto",))
                        context = self._own[0]
                    self._pools.extend(map(VMemPool, (context,)))
                except BaseException:
                    if not self._pools:
                        # the traceback holds an array; the next call reuses the context
                        with suppress(Busy):
                            self._close_own()
                    raise
            return self._pools[0]

    def close(self) -> None:
        """Frees everything; the next region opens a new pool. Idempotent.

        Raises:
            Busy: tensors of a region are alive.
        """
        with self._lock:
            if self._pools:
                self._pools[0].close()
                self._tags.clear()
                self._pools.clear()
            self._close_own()

    def _close_own(self) -> None:
        if self._own:
            self._own[0].close()
            self._own.clear()

    # ---- regions ---------------------------------------------------------------------------------

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """Tags this thread's allocations in a ``with`` block, so that `pause` can free them.

        Args:
            tag: names the region; several regions may have the same tag.
            enable_cpu_backup: make `pause` save the contents in host memory, page-locked if
                possible. Without a backup, the memory is zero after `resume`.

        Raises:
            Busy: the region is inside another, or its tag is paused.
            NotSupported: the context is on ``host``.
        """
        if getattr(self._active, "inside", False):
            raise Busy("a region inside a region", errno=errno.EBUSY, op="region")
        pool, backup = self._opened(), bool(enable_cpu_backup)
        with pool.use(_name(tag, backup)):
            with self._lock:
                self._tags.setdefault(tag, set()).add(backup)
            self._active.inside = True
            try:
                yield
            finally:
                self._active.inside = False

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Lets torch allocate memory that `pause` ignores, in a ``with`` block inside a region.

        Raises:
            InvalidArgument: no region is active in this thread.
        """
        if not getattr(self._active, "inside", False):
            raise InvalidArgument(
                "disable() outside a region", errno=errno.EINVAL, op="torch_memory_saver"
            )
        import torch

        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            self._active.inside = False
            try:
                yield
            finally:
                self._active.inside = True

    # ---- pause and resume ------------------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        """Frees the memory of a tag's regions, or of all regions; ignores an unknown tag.

        Raises:
            VMemError: `VMemPool.pause` failed; `resume` maps the regions that were already paused.
        """
        regions = {_name(one, backup): backup for one, backup in self._regions(tag)}
        if regions:
            self._opened().pause(regions)

    def resume(self, tag: str | None = None) -> None:
        """Maps the memory again at the same addresses, with the backed-up contents or zeros.

        Raises:
            OutOfMemory: the device is short of memory; regions not yet resumed stay paused.
        """
        pool = self._opened() if self._tags else None
        for one, backup in self._regions(tag):
            assert pool is not None
            if _name(one, backup) in pool.paused:
                pool.resume(_name(one, backup))

    def _regions(self, tag: str | None) -> list[tuple[str, bool]]:
        with self._lock:
            tags = list(self._tags) if tag is None else [tag]
            known = [(one, backup) for one in tags for backup in self._tags.get(one, ())]
            # regions with a backup first, since the backup may fail
            return sorted(known, key=lambda region: not region[1])

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """Returns the contents of a paused tensor, on the CPU.

        Args:
            x: contiguous, allocated in a region with `enable_cpu_backup`.
            zero_copy: return the backup itself, which `resume` reads, instead of a copy.

        Raises:
            InvalidArgument: the tensor is not contiguous, not paused, or has no backup.
            BadHandle: no region has been used yet.
        """
        import torch

        if not self._pools:
            raise BadHandle("no region has been used", errno=errno.EBADF, op="get_cpu_backup")
        if not x.is_contiguous():
            raise InvalidArgument(
                f"expected a contiguous tensor, not strides {x.stride()}",
                errno=errno.EINVAL,
                op="get_cpu_backup",
            )
        view = self._pools[0].saved(x.data_ptr(), x.nbytes) if x.nbytes else memoryview(bytearray())
        if view is None:
            raise InvalidArgument(
                f"{x.nbytes} bytes at {x.data_ptr():#x} are not paused with a backup",
                errno=errno.EINVAL,
                op="get_cpu_backup",
            )
        if not x.nbytes:
            return torch.empty(x.shape, dtype=x.dtype)
        found = torch.frombuffer(view, dtype=torch.uint8).view(x.dtype).view(x.shape)
        return found if zero_copy else found.clone()

    # ---- settings that programs read -------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """True: the pool is always enabled."""
        return True

    @property
    def hook_mode(self) -> str:
        """``"torch"``, the only mode."""
        return "torch"

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        """Accepts only ``"torch"``.

        Raises:
            NotSupported: any other mode.
        """
        if mode != "torch":
            _refuse(f"hook_mode={mode!r}")

    @property
    def memory_margin_bytes(self) -> int:
        """Always 0; cannot be set."""
        return 0

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        """Raises NotSupported: a margin requires intercepting CUDA calls."""
        _refuse(f"memory_margin_bytes={value}")

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
    ) -> Iterator[None]:
        """Captures like `torch.cuda.graph`; a replay must not use tensors in paused regions.

        Warns that the graph's own memory is not paused: `tag` and `enable_cpu_backup` have no
        effect. The other arguments are those of `torch.cuda.graph`.
        """
        import torch

        warnings.warn(
            f"torch_memory_saver: pause({tag!r}) does not free the memory of this CUDA graph",
            stacklevel=3,
        )
        with torch.cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        ):
            yield


def _name(tag: str, backup: bool) -> str:
    """Returns the pool's tag for a region. Regions with and without a backup get different tags.

    Both tags have a suffix, so that they cannot collide with a caller's tag.
    """
    return f"{tag}+backup" if backup else f"{tag}+zeros"


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Does nothing: only ``hook_mode="preload"`` needs to set up a subprocess."""
    yield


torch_memory_saver = TorchMemorySaver()
"""The only instance in the process, as in the original."""


def install() -> None:
    """Makes ``import torch_memory_saver`` find this module.

    Raises:
        Busy: another module of that name is already imported.
    """
    here = sys.modules[__name__]
    if sys.modules.setdefault("torch_memory_saver", here) is not here:
        raise Busy(
            "torch_memory_saver is already imported; call install() before anything imports it",
            errno=errno.EBUSY,
            op="install",
        )
