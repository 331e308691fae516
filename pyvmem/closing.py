# SPDX-License-Identifier: MIT
"""The context manager that most objects of this package are: the end of the block closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closable"]


class Closable:
    """``with`` gives the object itself, and `close` is called at the block's end."""

    __slots__ = ()

    def close(self) -> None:
        """Gives back what the object has; again: nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
