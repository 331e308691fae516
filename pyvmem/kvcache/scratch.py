# SPDX-License-Identifier: MIT
"""Addresses for pages on their way: a large page that is read, pages that are copied to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.info import Caps
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.kvcache.mapper import Mapper
    from pyvmem.reservation import Reservation

__all__ = ["Scratch"]


class Scratch:
    """Reservations for a moment; the last one is kept, since most moves are of one size.

    They are plain where the back end has that: visible addresses are few, and nothing but libvmem
    looks at these.

    Args:
        mapper: of the cache.
        align: bytes of the largest page.
    """

    def __init__(self, mapper: Mapper, align: int) -> None:
        self._mapper = mapper
        self._align = max(align, 2 << 20)
        self._kept: Reservation | None = None
        self._full: list[Reservation] = []  # pages in them could not be unmapped

    def take(self, nbytes: int) -> Reservation:
        """Addresses with no memory behind them, at least so many bytes.

        Raises:
            VMemError: none can be had.
        """
        self.retry()
        kept = self._kept
        if kept is not None:
            self._mapper.journal.keep(self, "_kept")
            self._kept = None
            if kept.nbytes >= nbytes:
                self._mapper.journal.hold(kept)
                return kept
            self._mapper.close(kept)
        visible = False if Caps.PLAIN in self._mapper.context.info.caps else None
        return self._mapper.reserve(nbytes, self._align, visible)

    def give(self, addresses: Reservation) -> None:
        """Takes addresses back, where nothing is mapped any more."""
        if self._kept is None:
            self._mapper.journal.keep(self, "_kept")
            self._kept = addresses
        else:
            self._mapper.close(addresses)

    def give_mapped(self, addresses: Reservation, nbytes: int) -> None:
        """Takes addresses back, unmaps the first `nbytes`; where that fails, it is tried again."""
        ops = OpBatch(1)
        ops.unmap(addresses.addr, nbytes)
        try:
            self._mapper.run(ops)
        except VMemError:
            self._mapper.journal.keep_list(self._full)
            self._full.append(addresses)
        else:
            self.give(addresses)

    def retry(self) -> None:
        """Unmaps what could not be unmapped."""
        for addresses in list(self._full):
            try:
                addresses.close(unmap=True)
            except NotRecoverable:
                addresses._closed = True  # quarantined; they go with the context
            except VMemError:
                continue
            self._full.remove(addresses)

    def owns(self, held: object) -> bool:
        """Whether it keeps this reservation."""
        return held is self._kept or any(held is one for one in self._full)

    def close(self) -> None:
        """Gives all addresses back."""
        self.retry()
        for addresses in (*self._full, *(() if self._kept is None else (self._kept,))):
            try:
                addresses.close(unmap=True)
            except VMemError:
                addresses._closed = True  # they go with the context
        self._kept, self._full = None, []
