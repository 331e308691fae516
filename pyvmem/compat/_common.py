# SPDX-License-Identifier: MIT
"""Pages that every id of the vAttention module has: written through one id, read through all.

    id 0   | common, writable  | its own ...
    id 1   | common, read-only | its own ...
    ...

The artifact maps them writable everywhere, and says that this is only to show that a physical page
can be given to several requests. Here a write through a second id is a fault, never another's rows.
"""

from __future__ import annotations

import errno

from pyvmem.errors import OutOfMemory
from pyvmem.features.table import FORK
from pyvmem.kvcache import KVCache
from pyvmem.kvcache.config import invalid

__all__ = ["CommonPages"]

_WRITER = 0


class CommonPages:
    """The first pages of all slots of a cache of which none is taken; takes them all.

    A slot is given back with `renew`, and has the common pages again.

    Args:
        cache: without a request.
        tokens: rows that are common, rounded up to whole pages that end with a row.

    Attributes:
        pages: common pages per tensor.
        rows: what they hold.
        idle: slots that no request has.

    Raises:
        InvalidArgument: `tokens` out of range. NotSupported: pages cannot be mapped twice or
            read-only here. OutOfMemory: too few pages. Nothing changed.
    """

    def __init__(self, cache: KVCache, tokens: int) -> None:
        config, layout = cache.config, cache.layout
        if not 0 < tokens <= config.max_seq_len:
            raise invalid(
                f"map_common_pages({tokens}): not between 0 and max_context_length "
                f"{config.max_seq_len}",
                limit=config.max_seq_len,
            )
        self._cache = cache
        with cache._lock, cache._journal:
            (group,) = cache._open()
            group.sharing.require(FORK, "map_common_pages")
            unit = group.prefixes.unit_pages[0]
            self.pages = min(-(-layout.pages_for(tokens) // unit) * unit, layout.slot_pages)
            lengths = [0] * config.max_batch
            self.rows = lengths[_WRITER] = layout.capacity(self.pages)
            cache.claim(_WRITER)
            slot = group.table[_WRITER]
            try:
                if cache.step(lengths) == -1:
                    raise OutOfMemory(
                        f"map_common_pages({tokens}) needs {self.pages} KV blocks",
                        errno=errno.ENOMEM,
                        op="map_common_pages",
                        bytes=self.pages * layout.num_tensors * layout.page_size,
                    )
                group.enter(slot, 0)
                group.pager.release(slot)
                handle = group.sharing.gather(slot, self.pages)
                group.sharing.bequeath(slot, self.pages, handle, None, unit)
                slot.writer = True
                self._span = slot.span
                others = group.sharing.vacate(config.max_batch - 1)
                if others is None:
                    raise invalid(f"map_common_pages({tokens}): an id is broken or taken")
                if others:
                    group.attach(others, self._span, source=slot)
            except BaseException:
                cache.free_reqid(_WRITER)
                raise
        self.idle = set(range(config.max_batch))

    def renew(self, reqid: int) -> None:
        """Ends a request; its slot has the common pages and nothing else. Waits for its GPU work.

        Raises:
            VMemError: the slot could not be emptied or mapped again; it is free, and has none.
        """
        cache = self._cache
        with cache._lock, cache._journal:
            (group,) = cache._open()
            slot, shared = group.table[reqid], group.reclaimer.shared
            shared.hold(self._span)  # where the slot's reference is the last one
            try:
                cache.free_reqid(reqid)
                group.sharing.empty(slot)
                group.attach([slot], self._span)
            finally:
                group.reclaimer.let_go(self._span)
        self.idle.add(reqid)
