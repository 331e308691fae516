# SPDX-License-Identifier: MIT
"""A context whose free memory is fragmented into single pages, as in a long-running server."""

from __future__ import annotations

from contextlib import suppress

from pyvmem.errors import OutOfMemory
from pyvmem.memory.context import Context
from pyvmem.memory.pages import Pages
from pyvmem.plumbing.closing import Closable

__all__ = ["Fragments"]

_SPARE = 64 << 20  # memory is allocated in whole slabs, so the limit may not be reached exactly


class Fragments(Closable):
    """A context whose free pages all have neighbors in use, so pages are mapped one at a time.

    Used as a context manager.

    Args:
        backend: name of the back end.
        device: CUDA ordinal.
        page: page size in bytes.
        nbytes: bytes of memory to leave free; the same amount is taken.

    Attributes:
        context: the context, which this object owns.

    Raises:
        VMemError: the context cannot be opened, or the device has too little memory.
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
        """Frees all memory, which must already be unmapped."""
        for pages in self._kept:
            pages.release()
        self._kept.clear()
        self.context.close()
