# SPDX-License-Identifier: MIT
"""A context fragmented as in a long-running server: only single pages are free."""

from __future__ import annotations

from contextlib import suppress

from pyvmem.errors import OutOfMemory
from pyvmem.memory.context import Context
from pyvmem.memory.pages import Pages
from pyvmem.plumbing.closing import Closable

__all__ = ["Fragments"]

_SPARE = 64 << 20  # memory is allocated in whole slabs, so the limit may not be reached exactly


class Fragments(Closable):
    """Leaves free only pages whose neighbours are taken, so that mapping goes page by page.

    A context manager.

    Args:
        backend: name of the back end.
        device: CUDA ordinal.
        page: bytes.
        nbytes: free memory to leave; an equal amount is taken.

    Attributes:
        context: owned by this object.

    Raises:
        VMemError: the context cannot be opened, or the device has less memory.
    """

    def __init__(self, backend: str, device: int, page: int, nbytes: int) -> None:
        limit = 2 * nbytes + _SPARE
        self.context = Context(backend, device=device, granule=page, mem_limit=limit)
        self._kept: list[Pages] = []
        try:
            for number, pages in enumerate(self._all(page, limit)):
                if number % 2:
                    pages.release()
                else:
                    self._kept.append(pages)
        except BaseException:
            self.context.close()
            raise

    def _all(self, page: int, limit: int) -> list[Pages]:
        """Allocates every page of the context, in physical order."""
        taken: list[Pages] = []
        with suppress(OutOfMemory):
            for _ in range(limit // page):
                taken.append(self.context.create(page))
        return taken

    def close(self) -> None:
        """Frees all memory; everything must have been unmapped."""
        for pages in self._kept:
            pages.release()
        self._kept.clear()
        self.context.close()
