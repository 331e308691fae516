# SPDX-License-Identifier: MIT
"""What requests have, and what of it holds tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyvmem.kvcache.layout import Layout
    from pyvmem.kvcache.pager import Pager
    from pyvmem.kvcache.reclaim import Reclaimer
    from pyvmem.kvcache.slots import SlotTable
    from pyvmem.kvcache.stats import Counters
    from pyvmem.kvcache.window import Window

__all__ = ["Accounts"]


class Accounts:
    """The sums of a cache's books. Part of `Core`."""

    layout: Layout
    table: SlotTable
    pager: Pager
    reclaimer: Reclaimer
    counters: Counters
    window: Window | None
    used_tokens: int
    token_bytes: int

    @property
    def active_pages(self) -> int:
        """Physical pages of the device that requests own, shared ones once."""
        pages = self.pager.active_pages - self.reclaimer.slid + self.reclaimer.shared.used
        return (pages - self._away()) * self.layout.num_tensors

    def _away(self) -> int:
        """`count_away`, counted again only when it may have changed: every `step` asks for it."""
        reclaimer = self.reclaimer
        if not any(reclaimer.away.values()):
            return 0
        if reclaimer.own_away is None:
            reclaimer.own_away = self.count_away()
        return reclaimer.own_away

    def count_away(self) -> int:
        """Pages per tensor that requests own alone, and that do not lie in the device."""
        return sum(
            sum(slot.places.away(max(slot.shared, slot.head), slot.granted).values())
            for slot in self.table
            if slot.active and slot.places
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of rows in the device that hold tokens; shared ones once, those that slid not."""
        used, shared = self.used_tokens * self.token_bytes, self.reclaimer.shared
        gone = self._away() + shared.away_uses
        if self.window is not None:
            gone += self.reclaimer.slid
        if gone or shared.used:
            size = self.layout.page_size * self.layout.num_tensors
            used -= (gone + shared.uses - shared.used) * size
            used = max(0, used)
        if shared.used or shared.away_uses:
            used = min(used, self.active_pages * self.layout.page_size)
        return used

    def note_peaks(self) -> None:
        """Keeps the highest use and waste so far."""
        used = self.used_bytes
        wasted = self.active_pages * self.layout.page_size - used
        counters = self.counters
        if used > counters.peak_used:
            counters.peak_used = used
        if wasted > counters.peak_wasted:
            counters.peak_wasted = wasted
