# SPDX-License-Identifier: MIT
"""Base classes for context managers and objects with `close`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from pyvmem.errors import Busy

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Closable", "MustClose", "Scoped"]


class Scoped:
    """A context manager that yields itself; leaving the block calls the subclass's `_leave`."""

    __slots__ = ()

    def _leave(self) -> None:
        """Called when the block is left."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises an error: the object cannot be copied or pickled."""
        raise TypeError(f"cannot copy or pickle {self!r:.80}: its resources have a single owner")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        except Busy:
            if error is None:
                raise  # an earlier error takes precedence: its traceback keeps tensors alive


class Closable(Scoped):
    """A `Scoped` object with a method `close`, which is called when the block is left."""

    __slots__ = ()

    def close(self) -> None:
        """Releases the object's resources. Idempotent."""
        raise NotImplementedError

    def _leave(self) -> None:
        self.close()


class MustClose(Closable):
    """A `Closable` that causes a ResourceWarning if it is garbage-collected while open.

    Its resources are then not freed, unless a subclass frees them.

    A subclass sets `_closed`, which is True while there is nothing to close.
    """

    _closed: bool

    @property
    def is_closed(self) -> bool:
        """True if the object is closed."""
        return self._closed

    def _gone(self) -> bool:
        """True if there is nothing left to close."""
        return getattr(self, "_closed", True)

    def __del__(self) -> None:
        if not self._gone():
            name = type(self).__name__
            warnings.warn(f"{name} was not closed", ResourceWarning, stacklevel=2, source=self)
