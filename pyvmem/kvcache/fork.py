# SPDX-License-Identifier: MIT
"""Forking: new requests over a request's full pages, and a copy of its last one.

A large page that is not full is copied as far as it is, into small pages where that is not whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.errors import VMemError
from pyvmem.features.table import FORK
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.plan import Source

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["fork"]


def fork(
    core: Core,
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing = core.layout, core.sharing
    sharing.require(FORK, "fork")
    parent = core.slot(reqid)
    held = core.seq_lens[parent.index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {parent.index} holds {held} tokens", limit=held)
    if not 1 <= count <= len(core.table):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(core.table)}",
            limit=len(core.table),
        )
    chosen = None if into is None else _chosen(core, count, into)
    core.mover.finish(parent, stream)
    core.pager.release(parent)
    full = parent.places.floor(rows * layout.row_bytes // layout.page_size)
    pages = layout.pages_for(rows)
    try:
        slots = sharing.vacate(count, chosen)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    if slots is None:
        return None
    new_pages = (pages - full) * count * layout.num_tensors
    if not core.pager.can_have(new_pages, {}):
        return None
    if rows * layout.row_bytes > parent.shared * layout.page_size:
        wait_for(record(stream, core.device))
    sharing.share(parent, full)
    try:
        sharing.attach(slots, parent.span.cut(0, full), parent)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    try:
        if pages > full:
            tail = Source(
                core.pager.base + layout.offset(parent.index),
                layout.tensor_bytes,
                rows * layout.row_bytes,
            )
            want = [(slot, pages) for slot in slots]
            if not core.pager.grow(want, background=False, source=tail):
                sharing.detach(slots)
                return None
            core.pager.release(slots[0])  # of one growth for all; other requests' go on
    except VMemError:
        sharing.detach(slots)
        raise
    for slot in slots:
        if slot.shared:
            slot.pins = core.prefixes.pin_again(parent.pins)
        core.enter(slot, rows)
    core.note_peaks()
    return [slot.index for slot in slots]


def _chosen(core: Core, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [core.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots
