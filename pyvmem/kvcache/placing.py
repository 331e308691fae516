# SPDX-License-Identifier: MIT
"""The calls of `KVCache` for where pages lie, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyvmem.info import Location
from pyvmem.kvcache import tiers
from pyvmem.kvcache.base import CacheBase
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.tiers import Moved
from pyvmem.streams import check

__all__ = ["PlaceCalls"]


class PlaceCalls(CacheBase):
    """Promotion and tiers. Part of `KVCache`."""

    def promote(self, reqid: int, wait: bool = False, stream: Any = None) -> int:
        """Gives the full parts of a request large pages; its addresses and rows stay as they are.

        For requests that grew in small pages; a prefill has large pages at once. Parts whose pages
        are one physical run are mapped in one piece, the others are copied in the background, after
        the work on `stream` so far, while the GPU goes on reading the old ones. Where the copies
        are over, the next `step` replaces the pages: it waits for the work on its stream, since
        no work may touch them in that moment. Shared pages stay as they are, and so does what
        there is no memory for.

        Args:
            reqid: the request. The work that writes its rows must have been launched, and no row of
                a full part may be written again while `SlotInfo.moving_pages` is not 0.
            wait: for all that, in this call.
            stream: as in `free_reqid`.

        Returns:
            The parts, of `large_page_size` bytes in every tensor, that are under way or done.

        Raises:
            InvalidArgument: no such reqid, not taken, or the cache has no `large_page_size`.
            NotRecoverable: undoing failed, and the text names the reqid that must be freed.
            VMemError: the driver failed; nothing changed. In the background: the next `step` raises
                it.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            slot = core.slot(reqid)
            if core.promoter is None:
                raise invalid("promote: the cache has no large_page_size")
            core.mover.sweep()
            return core.promoter.promote(slot, core.rows[slot.index], stream, wait=wait)

    def move(
        self,
        reqid: int,
        location: str | Location,
        device: Any = None,
        tokens: Sequence[int] | None = None,
        stream: Any = None,
        wait: bool = True,
    ) -> Moved:
        """Moves pages of a request to another memory; its addresses and rows stay as they are.

        All or nothing. New pages of the request always lie in the device, also after a move. Shared
        pages stay where they are. What of the request is on its way already is ended first, which
        waits (`SlotInfo.moving_pages`).

        Args:
            reqid: the request. The work that writes its rows must have been launched.
            location: "device", "host" or "peer", or a `pyvmem.Location`.
            device: of a peer: a CUDA ordinal, torch or cuda.core device.
            tokens: a range, or the first and the last + 1 token; pages move that hold nothing else.
                None: all that it holds.
            stream: the stream (or event) of the last work on the request; waited for.
            wait: False: full pages are copied in the background, after the work on `stream` so
                far, and the first `step` after that replaces them, as in `promote`; nor may their
                rows be written meanwhile.

        Returns:
            The pages that moved or are on their way, and those that stay because they are shared.

        Raises:
            InvalidArgument: no such reqid, not taken, a token beyond what it holds, an unknown
                location, or a device that is not a peer of the context.
            NotSupported: the back end has no pages in such memory.
            OutOfMemory: the tier is full (`host_limit`, `peer_limit`, the cache's own limit, or the
                machine's); nothing changed, except that pages of no request may have been
                reclaimed.
            NotRecoverable: undoing failed, and the text names the reqid that must be freed.
            VMemError: the driver failed; nothing changed. In the background: the next `step` raises
                it.
        """
        check(stream)
        with self._lock, self._journal:
            core = self._open_core()
            slot = core.slot(reqid)
            tier = tiers.tier_of(core, location, device)
            core.mover.sweep()
            return tiers.move(core, slot, tier, tokens, stream, wait=wait)
