# SPDX-License-Identifier: MIT
"""Shares pages: turns a slot's pages into shared pages and maps them in other slots."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, TypeAlias

from pyvmem.errors import (
    DriverError,
    NotRecoverable,
    OutOfMemory,
    TooManyBatches,
    TooManyMappings,
)
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import order_after, prune
from pyvmem.kvcache.growth import Pager
from pyvmem.kvcache.pages import DEVICE, Block, Part, Span, Tier
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.features import Feature
    from pyvmem.memory.info import ContextInfo
    from pyvmem.memory.pages import Pages
    from pyvmem.memory.streams import Work

__all__ = ["Held", "Sharing"]

Held: TypeAlias = "tuple[Pages, int, int, Tier]"
"""A handle to pages [low, high) of a slot, all in the same tier."""


class Sharing:
    """Maps pages in several slots, read-only in each: a write to them faults."""

    def __init__(self, pager: Pager, config: KVCacheConfig) -> None:
        self.pager = pager
        self.mover = pager.mover
        self.reclaimer = pager.reclaimer
        self.mapper = pager.mapper
        self.table = pager.reclaimer.table
        self.layout = pager.layout
        self.device = pager.mover.device
        self.config = config
        self._allowed: dict[Feature, ContextInfo] = {}  # the context's info at the last check

    def require(self, feature: Feature, what: str) -> None:
        """Raises NotSupported if the context lacks a feature.

        `what` names the call in the error.
        """
        info = self.mapper.context.info
        if self._allowed.get(feature) is not info:
            feature.require(info, what)
            self._allowed[feature] = info

    # ---- making a slot's pages shared ------------------------------------------------------------

    def share(self, slot: Slot, pages: int, unit_pages: int) -> None:
        """Turns a running request's pages below page `pages` into shared pages.

        Remaps them read-only in place.

        No GPU work may touch the slot, and no batch may be in flight on it. For `unit_pages`, see
        `Span`.

        Raises:
            NotRecoverable: the pages could be mapped neither read-only nor as before; the request
                has lost its rows. VMemError: nothing has changed.
        """
        low = slot.shared
        if pages <= low:
            return
        pieces = self.handles(slot, low, pages)
        ops = OpBatch(len(pieces))
        self.map_pieces(ops, slot, pieces, replace=True)
        try:
            self.mapper.commit(self._adopt_edits(slot, pieces, [], unit_pages), ops)
        except NotRecoverable as error:
            raise self.table.lose(slot, error) from error

    def adopt(self, slot: Slot, pieces: list[Held], events: list[Any], unit_pages: int) -> None:
        """Records that a request's pages, past those it already shares, are now shared.

        Used when the request is about to be freed, since its own mapping then need not become
        read-only. Other requests that map the pages wait for `events`, the GPU work that writes
        them.
        """
        self.mapper.journal.change(self._adopt_edits(slot, pieces, events, unit_pages))

    def _adopt_edits(
        self, slot: Slot, pieces: list[Held], events: list[Any], unit_pages: int
    ) -> list[list[Any]]:
        """Returns the edits for `adopt`."""
        parts, new, large_end = list(slot.span.parts), [], slot.large_end
        for handle, low, high, tier in pieces:
            new.append(Block(handle, high - low, list(events), tier))
            parts.append(Part(new[-1], 0, high - low))
            # Remapping in fewer calls may have created large entries.
            large_end = slot.large_end_with(low, high, large_end)
        return [
            [slot, "span", Span(tuple(parts), unit_pages)],
            [slot, "large_end", large_end],
            [self.reclaimer, "own_off_device", None],
            *self.reclaimer.shared.use_edits({}, new=new),
        ]

    def handles(self, slot: Slot, low: int, high: int) -> list[Held]:
        """Returns handles to pages [low, high) of a slot, one per stretch of the same tier."""
        layout, tier_map, found = self.layout, slot.tier_map, []
        stretches = tier_map.stretches(low, high) if tier_map.noted else ((low, high, DEVICE),)
        for first, last, tier in stretches if low < high else ():
            handle = self.mapper.gather(
                slot.addr + first * layout.page_size,
                (last - first) * layout.page_size,
                layout.num_tensors,
                layout.tensor_bytes,
            )
            found.append((handle, first, last, tier))
        return found

    def map_pieces(
        self, ops: OpBatch, slot: Slot, pieces: list[Held], *, replace: bool = False
    ) -> None:
        """Adds operations to `ops` that map `pieces` read-only at their page numbers in a slot."""
        layout = self.layout
        for handle, low, high, _ in pieces:
            ops.map(
                slot.addr + low * layout.page_size,
                (high - low) * layout.page_size,
                handle,
                0,
                layout.num_tensors,
                layout.tensor_bytes,
                True,
                replace=replace,
                split=replace,
            )

    # ---- mapping shared pages in more slots ------------------------------------------------------

    def empty(self, slot: Slot) -> None:
        """Unmaps all pages of a free slot; waits for that and for the GPU work on them.

        Raises:
            OutOfMemory: an unmap could not be started. VMemError: an unmap failed; see
                `is_shortage`.
        """
        if slot.job is not None or slot.mapped:
            self.pager.release(slot)
        if slot.mapped:
            self.reclaimer.unmap(slot, 0, now=True)
            self.pager.release(slot)
        if slot.mapped or slot.broken:
            self.reclaimer.raise_errors()
            raise DriverError(f"slot {slot.index} could not be emptied", errno=errno.EIO)

    def is_shortage(self, error: BaseException) -> bool:
        """Returns whether a failure of `empty` or of `lend` counts as a shortage of memory.

        Neither takes memory from the cache; both need only memory for records and page tables. With
        several ranks, perhaps only one of them is short of such memory, so the failure is an error.
        """
        short = isinstance(error, (OutOfMemory, TooManyBatches, TooManyMappings))
        return short and not self.table.lockstep

    def map_span(
        self, ops: OpBatch, slot: Slot, span: Span, page: int = 0, *, replace: bool = False
    ) -> None:
        """Adds operations to `ops` that map a span read-only in a slot, from `page` on.

        `replace` is True if the same pages are already mapped there.
        """
        size = self.layout.page_size
        self.map_at(ops, slot.addr + page * size, self.layout.tensor_bytes, span, replace=replace)

    def map_at(
        self, ops: OpBatch, address: int, stride: int, span: Span, *, replace: bool = False
    ) -> None:
        """Like `map_span`, but at any address.

        `stride` is the distance between tensors in bytes.
        """
        size, tensors = self.layout.page_size, self.layout.num_tensors
        for block, low, high in span.parts:
            ops.map(
                address, (high - low) * size, block.handle, low * size, tensors, stride, True,
                replace=replace, split=replace,
                offset_stride=size * block.pages,  # distance between two tensors in the handle
            )  # fmt: skip
            address += (high - low) * size

    def begins(self, slot: Slot, span: Span, head: int) -> bool:
        """Returns whether a kept slot without a batch in flight begins with pages of a span.

        The span must begin at page `head` of the slot.
        """
        own = slot.span
        return (
            slot.kept
            and slot.job is None
            and not slot.broken
            and not slot.rows_lost
            and slot.head == head
            and 0 < own.pages == slot.mapped - head <= span.pages
            and (own.parts == span.parts or span.slice(0, own.pages).parts == own.parts)
        )

    def order_after_writers(self, span: Span, reader: Work) -> None:
        """Makes `reader` wait for the GPU work that wrote the pages."""
        for block, *_ in span.parts:
            if block.events:
                # This need not be an edit, since pruning stays valid if the call fails.
                block.events = prune(block.events)
                for event in block.events:
                    order_after(event, reader, self.device)
