# SPDX-License-Identifier: MIT
"""The interface of torch_memory_saver, over `VMemPool`: trainers put memory to sleep by it.

    from pyvmem.compat.torch_memory_saver import torch_memory_saver
    # or, for an unmodified program, before its own ``import torch_memory_saver``:
    pyvmem.compat.torch_memory_saver.install()

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = make_model()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

The names and arguments of github.com/fzyzcjy/torch_memory_saver with ``hook_mode="torch"``. What it
does by a library preloaded into the process, which sees every allocation of CUDA's, cannot be done
over torch's allocator interface and raises `NotSupported`, by name: ``hook_mode="preload"``,
`cuda_graph`, `memory_margin_bytes`, `configure_subprocess`.

What is different:

- `pause` of a tag whose region is active raises `Busy`.
- Errors of the driver raise and leave the tag as it was; nothing ends the process.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from pyvmem.context import Context
from pyvmem.errors import BadHandle, Busy, InvalidArgument, NotSupported
from pyvmem.torch_pool import VMemPool

if TYPE_CHECKING:
    import torch

__all__ = ["TorchMemorySaver", "configure_subprocess", "install", "torch_memory_saver"]

_PRELOAD = "which needs a library preloaded into the process"


def _refuse(what: str) -> NoReturn:
    raise NotSupported(
        f"torch_memory_saver: {what}, {_PRELOAD}; pyvmem has none",
        errno=errno.EOPNOTSUPP,
        op="torch_memory_saver",
    )


class TorchMemorySaver:
    """Regions of torch memory that can be paused. Thread-safe, as `VMemPool` is.

    Its pool is opened by the first call that needs one, over a context of its own, or that of
    `configure`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._own: Context | None = None
        self._pool: VMemPool | None = None
        self._tags: dict[str, set[bool]] = {}  # and whether regions of it had a backup
        self._active = threading.local()

    def configure(self, context: Context) -> None:
        """Names the context of the pages, which the caller closes after `close`.

        Raises:
            Busy: the pool is open already.
        """
        with self._lock:
            if self._pool is not None:
                raise Busy(
                    "torch_memory_saver: memory was taken already; configure it before",
                    errno=errno.EBUSY,
                    op="configure",
                )
            self._context = context

    def _opened(self) -> VMemPool:
        with self._lock:
            if self._pool is None:
                context = self._context
                if context is None:
                    context = self._own = Context()
                try:
                    self._pool = VMemPool(context)
                except BaseException:
                    self._close_own()
                    raise
            return self._pool

    def close(self) -> None:
        """Gives everything back; the next region opens a new pool. Idempotent.

        Raises:
            Busy: tensors of a region live.
        """
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None
                self._tags.clear()
                self._close_own()

    def _close_own(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()

    # ---- regions ---------------------------------------------------------------------------------

    @contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """What this thread allocates on the device in the block is paused by `tag`.

        Args:
            tag: of any number of regions.
            enable_cpu_backup: `pause` keeps the contents in host memory, page-locked if it can be;
                else they become zeros.

        Raises:
            Busy: a region inside another, or of a paused tag.
            NotSupported: a context on ``host``.
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
        """Inside a region, a block whose allocations are torch's own and are not paused.

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
        """Gives the memory of a tag's regions back, or of all; a tag without a region has none.

        Raises:
            VMemError: as `VMemPool.pause`.
        """
        for one, backup in self._regions(tag):
            self._opened().pause(_name(one, backup), keep=backup)

    def resume(self, tag: str | None = None) -> None:
        """Takes it back, at the same addresses, with the backup's contents or zeros.

        Raises:
            OutOfMemory: the device has not enough memory now; what is left stays paused.
        """
        pool = self._opened() if self._tags else None
        for one, backup in self._regions(tag):
            assert pool is not None
            if _name(one, backup) in pool.paused:
                pool.resume(_name(one, backup))

    def _regions(self, tag: str | None) -> list[tuple[str, bool]]:
        with self._lock:
            tags = list(self._tags) if tag is None else [tag]
            return [(one, backup) for one in tags for backup in sorted(self._tags.get(one, ()))]

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor:
        """A paused tensor's contents, on the CPU.

        Args:
            x: contiguous, of a region with `enable_cpu_backup`.
            zero_copy: the backup itself, which `resume` reads, and no copy of it.

        Raises:
            InvalidArgument: not contiguous, not paused, or without a backup.
            BadHandle: nothing was ever allocated in a region.
        """
        import torch

        if self._pool is None:
            raise BadHandle("no region was used", errno=errno.EBADF, op="get_cpu_backup")
        if not x.is_contiguous():
            raise InvalidArgument(
                f"a tensor of strides {x.stride()}: expected a contiguous one",
                errno=errno.EINVAL,
                op="get_cpu_backup",
            )
        view = self._pool.saved(x.data_ptr(), x.nbytes) if x.nbytes else memoryview(bytearray())
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

    # ---- settings that programs ask for ----------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> str:
        """``"torch"``."""
        return "torch"

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        """Accepts ``"torch"`` alone.

        Raises:
            NotSupported: another.
        """
        if mode != "torch":
            _refuse(f"hook_mode={mode!r}")

    @property
    def memory_margin_bytes(self) -> int:
        """0."""
        return 0

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        """Raises NotSupported: a margin for intercepted CUDA calls, of which there are none."""
        _refuse(f"memory_margin_bytes={value}")

    def cuda_graph(self, *_: Any, **__: Any) -> NoReturn:
        """Raises NotSupported; `torch.cuda.graph` over tensors of a region replays as usual."""
        _refuse("cuda_graph()")


def _name(tag: str, backup: bool) -> str:
    """The pool's tag: regions with and without a backup are paused in different ways."""
    return f"{tag}+backup" if backup else tag


def configure_subprocess() -> NoReturn:
    """Raises NotSupported."""
    _refuse("configure_subprocess()")


torch_memory_saver = TorchMemorySaver()
"""The one of this process."""


def install() -> None:
    """Makes ``import torch_memory_saver`` find this module.

    Raises:
        Busy: another module of that name is imported already.
    """
    here = sys.modules[__name__]
    if sys.modules.setdefault("torch_memory_saver", here) is not here:
        raise Busy(
            "torch_memory_saver is imported already; install() must come before",
            errno=errno.EBUSY,
            op="install",
        )
