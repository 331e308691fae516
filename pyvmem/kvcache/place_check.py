# SPDX-License-Identifier: MIT
"""What must hold at all times of large pages, and of pages that do not lie in the device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pyvmem.info import Location
from pyvmem.kvcache.places import PLAIN, Tier

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["check_away", "check_places"]


def check_places(core: Core, slot: Slot) -> list[str]:
    """What contradicts between a slot's pages and their kinds, in words."""
    found, places, name = [], slot.places, f"slot {slot.index}"
    noted = [one for one in places.stretches(0, core.layout.slot_pages) if one[2] != PLAIN]
    for low, high, kind in noted:
        if low < slot.head or high > slot.mapped or low % kind.unit or high % kind.unit:
            found.append(f"{name}: pages {low} to {high} noted as {kind}, mapped {slot.mapped}")
        elif slot.job is None:
            found += [f"{name}: {text}" for text in _check_memory(core, slot, low, high, kind.tier)]
    for what, page in (("mapped", slot.mapped), ("shared", slot.shared), ("head", slot.head)):
        if places.floor(page) != page:
            found.append(f"{name}: {what} is {page}, in the middle of a large page")
    if _kinds(slot):
        found.append(f"{name}: its shared pages are of other kinds than noted")
    if slot.active and places.away_end > slot.granted and not slot.stale:
        found.append(f"{name}: pages up to {places.away_end} are away, {slot.granted} granted")
    return found


def _kinds(slot: Slot) -> bool:
    """Whether a slot's shared pages differ from its notes, page by page."""
    kinds = [kind for low, high, kind in slot.span.stretches() for _ in range(low, high)]
    noted = [k for low, high, k in slot.places.stretches(0, slot.shared) for _ in range(low, high)]
    return kinds != noted


def _check_memory(core: Core, slot: Slot, low: int, high: int, tier: Tier) -> list[str]:
    """Asks the context where pages lie, in every tensor."""
    found, layout = [], core.layout
    for tensor in range(layout.num_tensors):
        at = core.pager.base + layout.offset(slot.index, low, tensor)
        pages = core.mapper.gather(at, (high - low) * layout.page_size, 1, 0)
        info = pages.info
        pages.drop()
        peer = tier.location is Location.PEER
        if (info.location, info.device if peer else 0) != tier:
            found.append(f"tensor {tensor}, pages {low} to {high} lie elsewhere than in {tier}")
    return found


def check_away(core: Core) -> list[str]:
    """What contradicts in the counts of pages outside the device, in words."""
    tensors = core.layout.num_tensors
    counted: Counter[Tier] = Counter()
    for slot in core.table:
        counted.update(slot.places.away(max(slot.shared, slot.head), slot.mapped))
    for cut in core.reclaimer.cuts:
        counted.update(cut.away)
    counted.update(core.reclaimer.shared.away())
    counted.update(core.mover.pages()[1])
    found = []
    if core.reclaimer.own_away not in (None, core.count_away()):
        found.append(f"requests own {core.count_away()} pages per tensor outside the device")
    for tier in {*counted, *core.reclaimer.away}:
        if counted[tier] * tensors != core.reclaimer.away[tier]:
            found.append(
                f"{core.reclaimer.away[tier]} pages in {tier}, counted {counted[tier] * tensors}"
            )
    return found
