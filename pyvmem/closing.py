# SPDX-License-Identifier: MIT
"""Base of the context managers whose exit calls `close`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Closable"]


class Closable:
    """``with`` yields the object itself; leaving the block calls `close`."""

    __slots__ = ()

    def close(self) -> None:
        """Releases what the object holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
