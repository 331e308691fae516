# SPDX-License-Identifier: MIT
"""Tiers: a request's pages in the device, in host memory or in a peer, under the same addresses."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.errors import OutOfMemory
from pyvmem.features.table import HOST_PAGES, PEER_PAGES
from pyvmem.info import Location
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record
from pyvmem.kvcache.jobs import Move
from pyvmem.kvcache.places import DEVICE, Kind, Stretch, Tier
from pyvmem.streams import device_ordinal

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["Moved", "move", "tier_of"]


class Moved(NamedTuple):
    """What `KVCache.move` did; physical pages of `Layout.page_size`, of all tensors together.

    Attributes:
        pages: pages that moved, or are on their way.
        shared: pages that stay where they are, since others have them too.
    """

    pages: int
    shared: int


def tier_of(core: Core, location: str | Location, device: Any) -> Tier:
    """The tier that a caller names."""
    names = {one.name.lower(): one for one in Location}
    place = names.get(location) if isinstance(location, str) else Location(location)
    if place is None:
        raise invalid(f"location {location!r} is not one of {', '.join(map(repr, names))}")
    if place is not Location.PEER and device is not None:
        raise invalid(f"device {device!r}: a location of {place.name.lower()!r} takes none")
    info = core.context.info
    if place is not Location.DEVICE:
        (HOST_PAGES if place is Location.HOST else PEER_PAGES).require(info, "move")
    if place is not Location.PEER:
        return Tier(place)
    if device is None:
        raise invalid("location 'peer' needs a device, one of the context's")
    ordinal, own = device_ordinal(device), info.devices[0]
    if ordinal == own or ordinal not in info.devices:
        peers = [one for one in info.devices if one != own]
        raise invalid(f"device {ordinal} is none of the context's peers, {peers}")
    return Tier(place, ordinal)


def move(
    core: Core, slot: Slot, tier: Tier, tokens: Sequence[int] | None, stream: Any, *, wait: bool
) -> Moved:
    """See `KVCache.move`."""
    core.mover.finish(slot, stream)
    core.pager.release(slot)
    low, high = _pages(core, slot, tokens, wait)
    tensors = core.layout.num_tensors
    shared = max(0, min(high, slot.shared) - low) * tensors
    low = max(low, slot.shared, slot.head)
    wanted: list[Stretch] = [
        (first, last, Kind(kind.unit, tier))
        for first, last, kind in slot.places.stretches(low, high)
        if kind.tier != tier
    ]
    if not wanted:
        return Moved(0, shared)
    pages = sum(last - first for first, last, _ in wanted) * tensors
    _make_room(core, tier, pages)
    event = record(stream, core.device)
    after = [] if event is None else [event]
    try:
        core.mover.begin(Move(slot, wanted), after, background=not wait)
    except OutOfMemory:
        if all(kind.unit == 1 for *_, kind in wanted):
            raise
        small = [(first, last, Kind(1, tier)) for first, last, _ in wanted]
        core.mover.begin(Move(slot, small), after, background=not wait)
    if wait:
        core.mover.finish(slot, stream)
    return Moved(pages, shared)


def _pages(core: Core, slot: Slot, tokens: Sequence[int] | None, wait: bool) -> tuple[int, int]:
    """The pages that hold rows of these tokens alone, none of them cut."""
    layout, held = core.layout, core.rows[slot.index]
    first, last = 0, held
    if tokens is not None:
        try:
            first, last = (tokens.start, tokens.stop) if isinstance(tokens, range) else tokens
            first, last = operator.index(first), operator.index(last)
        except (TypeError, ValueError):
            raise invalid(f"tokens must be a range or (first, last), not {tokens!r:.80}") from None
        if not 0 <= first <= last <= held:
            raise invalid(
                f"tokens {first} to {last}: reqid {slot.index} holds {held} tokens", limit=held
            )
    low = slot.places.ceil(-(-first * layout.row_bytes // layout.page_size))
    high = last * layout.row_bytes // layout.page_size
    if wait and last == held:  # nothing is written meanwhile, so the last page can go, too
        high = slot.places.ceil(-(-last * layout.row_bytes // layout.page_size))
    high = slot.places.floor(min(high, slot.granted))
    return min(low, high), high


def _make_room(core: Core, tier: Tier, pages: int) -> None:
    """Sees to it that a tier has room; raises OutOfMemory where it has not."""
    size = core.layout.page_size
    if tier == DEVICE:
        if not core.pager.have(pages):
            raise _full(core, tier, pages, core.reclaimer.free * size)
        return
    host = tier.location is Location.HOST
    limit = core.config.host_limit if host else core.config.peer_limit
    if not limit:
        return
    taken = sum(
        count for one, count in core.reclaimer.away.items() if one.location is tier.location
    )
    if (taken + pages) * size > limit:
        raise _full(core, tier, pages, max(0, limit - taken * size))


def _full(core: Core, tier: Tier, pages: int, left: int) -> OutOfMemory:
    size = pages * core.layout.page_size
    return OutOfMemory(
        f"move of {pages} pages, {size} bytes: {tier} has {left} bytes left for the cache",
        errno=errno.ENOMEM,
        op="KVCache.move",
        bytes=size,
        limit=left,
    )
