# SPDX-License-Identifier: MIT
"""Moves requests' pages between tiers on demand, and promotes blocks to 2 MiB entries."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyvmem.errors import OutOfMemory, VMemError
from pyvmem.features.table import HOST_PAGES, PEER_PAGES
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import reclaim_for
from pyvmem.kvcache.pages import DEVICE, Tier
from pyvmem.kvcache.slots import Move, Slot
from pyvmem.memory.info import Location
from pyvmem.memory.streams import device_ordinal

__all__ = ["Moved", "move", "promote", "tier_of"]


class Moved(NamedTuple):
    """The result of `KVCache.move`, counted in physical pages across all tensors.

    Attributes:
        pages: number of pages that moved or are being moved.
        shared: number of pages that are not moved because they are shared.
    """

    pages: int
    shared: int


def tier_of(group: Group, location: str | Location, device: Any) -> Tier:
    """Returns the tier named by a caller's arguments."""
    names = {one.name.lower(): one for one in Location}
    place = names.get(location) if isinstance(location, str) else None
    if isinstance(location, int) and location in names.values():
        place = Location(location)
    if place is None:
        raise invalid(f"location {location!r} is not one of {', '.join(map(repr, names))}")
    if place is not Location.PEER and device is not None:
        raise invalid(f"device {device!r}: location {place.name.lower()!r} takes no device")
    info = group.context.info
    if place is not Location.DEVICE:
        (HOST_PAGES if place is Location.HOST else PEER_PAGES).require(info, "move")
    if place is not Location.PEER:
        return Tier(place)
    if device is None:
        raise invalid("location 'peer' needs one of the context's devices")
    ordinal, peers = device_ordinal(device), list(info.devices[1:])
    if ordinal not in peers:
        raise invalid(f"device {ordinal} is not one of the context's peers, {peers}")
    return Tier(place, ordinal)


def promote(groups: Sequence[Group], reqid: int, work: PriorWork, *, wait: bool) -> int:
    """Implements `KVCache.promote`."""
    done, both = 0, [(group, group.slot(reqid)) for group in groups]
    if all(group.promoter is None for group in groups):
        raise invalid("promote: no slot has a block of 2 MiB that a large entry could map")
    for group, slot in both:
        if group.promoter is not None:
            group.mover.sweep()
            done += group.promoter.promote(slot, group.rows[slot.index], work, wait=wait)
    return done


def move(
    groups: Sequence[Group],
    reqid: int,
    tier: Tier,
    tokens: Sequence[int] | None,
    work: PriorWork,
    *,
    wait: bool,
) -> Moved:
    """Implements `KVCache.move`: copies in all groups or none, before any page is replaced."""
    both = [(group, group.slot(reqid)) for group in groups]
    for group, slot in both:
        group.mover.sweep()
        group.mover.finish(slot, work)
        group.pager.release(slot)
    to_cancel = list(both)

    def cancel() -> None:
        for group, slot in to_cancel:
            group.mover.abandon(slot)

    groups[0].journal.on_abort(cancel)
    moved = shared = 0
    try:
        for group, slot in both:
            tensors = group.layout.num_tensors
            low, high = _pages_of(group, slot, tokens, wait)
            shared += max(0, min(high, slot.shared) - max(low, slot.head)) * tensors
            now = slot.tier_map.stretches(max(low, slot.shared), high)
            wanted = [(first, last, tier) for first, last, old in now if old != tier]
            if wanted:
                pages = sum(last - first for first, last, _ in wanted) * tensors
                _make_tier_room(groups, group, tier, pages)
                group.mover.begin(Move(slot, wanted), work, background=not wait)
                moved += pages
        to_cancel.clear()  # from here on, an interrupted move is completed by the next step
        for group, slot in both if wait else ():
            group.mover.finish(slot, work)
    except VMemError:
        for group, slot in both:
            group.mover.abandon(slot)
        raise
    return Moved(moved, shared)


def _pages_of(
    group: Group, slot: Slot, tokens: Sequence[int] | None, wait: bool
) -> tuple[int, int]:
    """Returns the range of pages that hold only rows of these tokens."""
    layout, held = group.layout, group.rows[slot.index]
    first, last = 0, held
    if tokens is not None:
        try:
            first, last = (tokens.start, tokens.stop) if isinstance(tokens, range) else tokens
            first, last = operator.index(first), operator.index(last)
        except (TypeError, ValueError):
            raise invalid(f"tokens must be a range or (first, last), not {tokens!r:.80}") from None
        if isinstance(tokens, range) and tokens.step != 1:
            raise invalid(f"tokens is {tokens}; the step of a range must be 1")
        if not 0 <= first <= last <= held:
            raise invalid(
                f"tokens {first} to {last}: reqid {slot.index} holds {held} tokens", limit=held
            )
    if layout.state:  # a state moves only as a whole, and only while nothing writes to it
        whole = wait and (first, last) == (0, held)
        return 0, slot.granted if whole else 0
    low = -(-first * layout.row_bytes // layout.page_size)
    high = last * layout.row_bytes // layout.page_size
    # With `wait`, nothing is written during the move, so the last page can also move.
    if wait and last == held:
        high = -(-last * layout.row_bytes // layout.page_size)
    high = min(high, slot.granted)
    return min(low, high), high


def _make_tier_room(groups: Sequence[Group], group: Group, tier: Tier, pages: int) -> None:
    """Makes room in a tier for a group's pages; raises OutOfMemory if there is not enough."""
    size = pages * group.layout.page_size
    if tier == DEVICE:
        if reclaim_for([(group.pager, pages)], {}):
            return
        left = group.reclaimer.free * group.layout.page_size
    else:
        host = tier.location is Location.HOST
        # The limit covers all groups together.
        limit = group.config.host_limit if host else group.config.peer_limit
        taken = sum(
            count * one.layout.page_size
            for one in groups
            for at, count in one.reclaimer.off_device.items()
            if at.location is tier.location
        )
        left = max(0, limit - taken)
        if not limit or size <= left:
            return
    raise OutOfMemory(
        f"move of {pages} pages, {size} bytes: {tier} has {left} bytes left for the cache",
        errno=errno.ENOMEM,
        op="KVCache.move",
        bytes=size,
        limit=left,
    )
