# SPDX-License-Identifier: MIT
"""Addresses for pages on their way: a large page that is read, pages that are copied to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.info import Caps

if TYPE_CHECKING:
    from pyvmem.context import Context
    from pyvmem.reservation import Reservation

__all__ = ["Scratch"]


class Scratch:
    """Reservations for a moment; the last one is kept, since most moves are of one size.

    They are plain where the back end has that: visible addresses are few, and nothing but libvmem
    looks at these.

    Args:
        context: of the cache.
        align: bytes of the largest page.
    """

    def __init__(self, context: Context, align: int) -> None:
        self._context = context
        self._align = max(align, 2 << 20)
        self._kept: Reservation | None = None
        self._full: list[Reservation] = []  # pages in them could not be unmapped

    def take(self, nbytes: int) -> Reservation:
        """Addresses with no memory behind them, at least so many bytes.

        Raises:
            VMemError: none can be had.
        """
        self.retry()
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.nbytes >= nbytes:
                return kept
            kept.close()
        visible = False if Caps.PLAIN in self._context.info.caps else None
        return self._context.reserve(nbytes, visible=visible, align=self._align)

    def give(self, addresses: Reservation) -> None:
        """Takes addresses back, where nothing is mapped any more."""
        if self._kept is None:
            self._kept = addresses
        else:
            addresses.close()

    def give_mapped(self, addresses: Reservation, nbytes: int) -> None:
        """Takes addresses back, unmaps the first `nbytes`; where that fails, it is tried again."""
        try:
            self._context.unmap(addresses.addr, nbytes)
        except VMemError:
            self._full.append(addresses)
        else:
            self.give(addresses)

    def retry(self) -> None:
        """Unmaps what could not be unmapped."""
        full, self._full = self._full, []
        for addresses in full:
            try:
                addresses.close(unmap=True)
            except NotRecoverable:
                addresses._closed = True  # quarantined; they go with the context
            except VMemError:
                self._full.append(addresses)

    def close(self) -> None:
        """Gives all addresses back."""
        self.retry()
        kept = [*self._full, *([] if self._kept is None else [self._kept])]
        self._kept, self._full = None, []
        for addresses in kept:
            try:
                addresses.close(unmap=True)
            except VMemError:
                addresses._closed = True  # they go with the context
