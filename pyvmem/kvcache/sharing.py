# SPDX-License-Identifier: MIT
"""Shares pages: turns a slot's pages into shared pages and maps them in other slots."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from pyvmem.errors import DriverError, NotRecoverable, OutOfMemory, TooManyBatches, TooManyMappings
from pyvmem.features import Feature
from pyvmem.kvcache.events import order_after, prune
from pyvmem.kvcache.growth import Pager
from pyvmem.kvcache.mapper import Scratch
from pyvmem.kvcache.pages import DEVICE, Block, Part, Span
from pyvmem.kvcache.slots import Slot
from pyvmem.memory.info import ContextInfo
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.streams import Work

__all__ = ["Sharing"]


class Sharing:
    """Maps pages in several slots, read-only in each: a write to them faults.

    Attributes:
        unit_pages: number of pages per tensor in a sharing unit of the cache.
    """

    def __init__(self, pager: Pager, scratch: Scratch, unit_pages: int) -> None:
        self.pager = pager
        self.scratch = scratch
        self.reclaimer = pager.reclaimer
        self.mapper = pager.mapper
        self.table = pager.reclaimer.table
        self.layout = pager.layout
        self.unit_pages = unit_pages
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

    def gather(
        self, slot: Slot, low: int, high: int, events: Sequence[Any] = (), *, holders: int = 1
    ) -> tuple[Part, ...]:
        """Returns a slot's pages [low, high) as new blocks, one for each stretch in a single tier.

        For `events` and `holders`, see `Block`. The blocks' handles are released when the current
        call ends, unless edits of `SharedPages.use_edits` record them.
        """
        layout, size, tier_map, found = self.layout, self.layout.page_size, slot.tier_map, []
        stretches = tier_map.stretches(low, high) if tier_map.noted else ((low, high, DEVICE),)
        for first, last, tier in stretches if low < high else ():
            pages = last - first
            handle = self.mapper.gather(
                slot.addr + first * size, pages * size, layout.num_tensors, layout.tensor_bytes
            )
            block = Block(handle, pages, list(events), tier, holders=holders)
            found.append(Part(block, 0, pages))
        return tuple(found)

    def share(self, slot: Slot, pages: int) -> None:
        """Turns a running request's pages below page `pages` into shared pages.

        They are remapped read-only in place. No GPU work may be touching the slot, and no batch may
        be in flight on it.

        Raises:
            NotRecoverable: the pages could be mapped neither read-only nor as before; the request
                has lost its rows. VMemError: nothing has changed.
        """
        if pages <= slot.shared:
            return
        own = self.gather(slot, slot.shared, pages)
        ops = OpBatch(len(own))
        self.map_parts(ops, slot, own, slot.shared, replace=True)
        try:
            self.mapper.commit(self.adopt_edits(slot, own), ops)
        except NotRecoverable as error:
            raise self.table.lose(slot, error) from error

    def adopt_edits(self, slot: Slot, own: tuple[Part, ...]) -> list[list[Any]]:
        """Returns the edits that make `own`, the pages after the slot's shared ones, shared too.

        They are enough if the request is about to be freed: its own mapping then need not become
        read-only. Other requests that map the pages wait for the events of `own` (`gather`).
        """
        span, low = Span(slot.span.parts + own, self.unit_pages), slot.head + slot.span.pages
        # Remapping in fewer calls may have created large entries.
        large_end = slot.large_end_with(low, slot.head + span.pages, slot.large_end)
        return [
            [slot, "span", span],
            [slot, "large_end", large_end],
            [self.reclaimer, "own_off_device", None],
            *self.reclaimer.shared.use_edits({}, new=own),
        ]

    # ---- mapping shared pages in more slots ------------------------------------------------------

    def empty(self, slot: Slot) -> None:
        """Unmaps all pages of a free slot, after the GPU work on them; waits for both.

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
        several ranks, only one of them may be short of that memory, so the failure is an error.
        """
        short = isinstance(error, (OutOfMemory, TooManyBatches, TooManyMappings))
        return short and not self.table.lockstep

    def map_parts(
        self, ops: OpBatch, slot: Slot, parts: Sequence[Part], page: int, *, replace: bool = False
    ) -> None:
        """Adds operations to `ops` that map shared pages read-only in a slot, from `page` on.

        `replace` is True if the same pages are already mapped there.
        """
        address, stride = slot.addr + page * self.layout.page_size, self.layout.tensor_bytes
        self.map_at(ops, address, stride, parts, replace=replace)

    def map_at(
        self, ops: OpBatch, address: int, stride: int, parts: Sequence[Part], replace: bool = False
    ) -> None:
        """Like `map_parts`, but at any address.

        `stride` is the distance between tensors in bytes.
        """
        size, tensors = self.layout.page_size, self.layout.num_tensors
        for block, low, high in parts:
            ops.map(
                address, (high - low) * size, block.handle, low * size, tensors, stride, True,
                replace=replace, split=replace,
                offset_stride=size * block.pages,  # distance between two tensors in the handle
            )  # fmt: skip
            address += (high - low) * size

    def begins(self, slot: Slot, span: Span, length: int) -> bool:
        """Returns whether a kept slot without a batch in flight begins with pages of a span.

        The span holds the pages of a prefix of `length` tokens, or only those in the window.
        """
        own, head = slot.span, self.layout.window_page(length)
        return (
            slot.kept
            and slot.job is None
            and not slot.broken
            and not slot.rows_lost
            and slot.head == head
            and 0 < own.pages == slot.mapped - head <= span.pages
            and span.slice(0, own.pages).parts == own.parts
        )

    def order_after_writers(self, span: Span, reader: Work) -> None:
        """Makes `reader` wait for the GPU work that wrote the pages."""
        for block, *_ in span.parts:
            if block.events:
                # Not an edit, since pruning remains valid even if the call fails.
                block.events = prune(block.events)
                for event in block.events:
                    order_after(event, reader, self.pager.mover.device)
