# SPDX-License-Identifier: MIT
"""What the parts of the public class `KVCache` have in common."""

from __future__ import annotations

import errno
import warnings
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyvmem.errors import BadHandle, Busy
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.journal import Journal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheBase", "Closing", "half_closed"]


def half_closed(name: str) -> BadHandle:
    """What calls of a cache raise whose `close` was ended by an exception."""
    return BadHandle(
        f"the {name} is half closed: an exception ended its close, call that again",
        errno=errno.EBADF,
        op=name,
    )


class Closing:
    """A context manager that closes, and a warning where nobody did."""

    _closed: bool

    def close(self) -> None:
        """Gives everything back."""
        raise NotImplementedError

    def _gone(self) -> bool:
        """Whether there is nothing left to close."""
        return getattr(self, "_closed", True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Busy:
            if error is None:
                raise  # else the traceback keeps tensors alive, and that error matters more

    def __del__(self) -> None:
        if not self._gone():
            name = type(self).__name__
            warnings.warn(f"{name} was not closed", ResourceWarning, stacklevel=2, source=self)


class CacheBase(Closing):
    """A core behind a lock."""

    _core: Core
    _closing: bool
    _lock: AbstractContextManager[Any]
    _journal: Journal

    def _gone(self) -> bool:
        return super()._gone() or not self._core.context.is_open

    def _open_core(self) -> Core:
        """The core, for a call that holds the lock.

        Raises:
            BadHandle: the cache or its context is closed. ForkedProcess: it is the parent's.
        """
        core = self._core
        if self._closed:
            raise BadHandle("the KVCache is closed", errno=errno.EBADF, op="KVCache")
        if self._closing:
            raise half_closed("KVCache")
        if not core.context.is_open:
            core.context.stats()  # raises what is wrong: closed, or of the parent of a fork
        return core
