# SPDX-License-Identifier: MIT
"""Several slots over the same pages: making a slot's pages shared, mapping them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from pyvmem.errors import (
    DriverError,
    NotRecoverable,
    OutOfMemory,
    TooManyBatches,
    VMemError,
)
from pyvmem.kvcache.events import order_after, prune
from pyvmem.kvcache.places import Kind
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import Span
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.features import Feature
    from pyvmem.kvcache.core import Core
    from pyvmem.pages import Pages

__all__ = ["Sharing"]

_Held: TypeAlias = "tuple[Pages, int, int, Kind]"
"""A handle to pages [low, high) of a slot, which are of one kind."""


class Sharing:
    """Maps pages in several slots, read-only in each: a write to one faults."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def require(self, feature: Feature, what: str) -> None:
        """Raises NotSupported where the cache cannot have the feature that `what` is a call of."""
        core = self._core
        feature.require(core.context.info, what, window=core.config.window)

    # ---- a slot's own pages become shared --------------------------------------------------------

    def share(self, slot: Slot, pages: int) -> None:
        """Makes the first `pages` pages of a taken slot shared: mapped read-only in their place.

        No GPU work may touch them, and no batch be in flight over them. `pages` cuts no large page
        (`Places.floor`).

        Raises:
            NotRecoverable: they could be mapped neither read-only nor as before; the request has
                lost its rows. VMemError: nothing changed.
        """
        low = slot.shared
        if pages <= low:
            return
        pieces = self._gather(slot, low, pages)
        ops = OpBatch(len(pieces))
        self._map_pieces(ops, slot, pieces, readonly=True, replace=True)
        try:
            with self._core.mapper.transaction() as change:
                self._adopt(slot, pieces, [])
                self._core.reclaimer.shared.use(slot.span.cut(low, pages))
                self._core.pager.active_pages -= pages - low
                change.run(ops)
        except NotRecoverable as error:
            self._core.table.condemn(slot)
            slot.lost = True
            raise NotRecoverable(
                f"reqid {slot.index} has lost its rows, free it: {error}",
                errno=errno.ENOTRECOVERABLE,
                op="KVCache",
            ) from error

    def gather(self, slot: Slot, pages: int) -> list[_Held]:
        """What `bequeath` needs of a slot's first `pages` pages, beyond those that are shared."""
        return self._gather(slot, slot.shared, slot.places.ceil(pages))

    def bequeath(self, slot: Slot, pages: int, handles: list[_Held], event: Any) -> None:
        """Makes the pages of a slot shared that is freed next: as they are mapped goes with it.

        Args:
            slot: taken, without a batch in flight.
            pages: how many; of a large page all go.
            handles: what `gather` returned for them.
            event: the GPU work that writes them, which those who map them wait for.
        """
        low, pages = slot.shared, slot.places.ceil(pages)
        if pages <= low:
            return
        self._adopt(slot, handles, [] if event is None else [event])
        self._core.pager.grant(slot, pages)  # the rest of a large page is the owner's now, too
        self._core.reclaimer.shared.use(slot.span.cut(low, pages))
        self._core.pager.active_pages -= pages - low

    def _adopt(self, slot: Slot, pieces: list[_Held], events: list[Any]) -> None:
        shared = self._core.reclaimer.shared
        self._core.reclaimer.own_away = None
        for handle, low, high, kind in pieces:
            unit_pages = self._core.prefixes.unit_pages
            span = shared.adopt(handle, high - low, list(events), unit_pages, kind)
            shared.hold(span)
            slot.span = slot.span + span

    def _gather(self, slot: Slot, low: int, high: int) -> list[_Held]:
        """Handles to a slot's pages, one for each stretch of a kind."""
        core = self._core
        layout = core.layout
        return [
            (
                core.mapper.gather(
                    core.pager.base + layout.offset(slot.index, first),
                    (last - first) * layout.page_size,
                    layout.num_tensors,
                    layout.tensor_bytes,
                ),
                first,
                last,
                kind,
            )
            for first, last, kind in slot.places.stretches(low, high)
        ]

    def _map_pieces(
        self,
        ops: OpBatch,
        slot: Slot,
        pieces: list[_Held],
        *,
        readonly: bool,
        replace: bool = False,
    ) -> None:
        layout = self._core.layout
        for handle, low, high, _ in pieces:
            ops.map(
                self._core.pager.base + layout.offset(slot.index, low),
                (high - low) * layout.page_size,
                handle,
                0,
                layout.num_tensors,
                layout.tensor_bytes,
                readonly,
                replace=replace,
            )

    # ---- shared pages in more slots --------------------------------------------------------------

    def must_wait(self) -> bool:
        """Whether `vacate` of one slot would wait for GPU work of earlier owners."""
        core = self._core
        core.reclaimer.poll()
        core.pager.poll()
        best = core.table.emptiest(1)
        return bool(best and (best[0].job is not None or best[0].mapped) and prune(best[0].events))

    def vacate(self, count: int, into: Sequence[Slot] | None = None) -> Sequence[Slot] | None:
        """Free slots without a page, emptied where there is no other; None when too few are free.

        Waits for the GPU work on slots that it must empty.

        Args:
            count: how many.
            into: so many free slots; None: those that suit best.

        Raises:
            VMemError: pages of an earlier owner could not be unmapped; `is_shortage` of some.
        """
        core = self._core
        core.reclaimer.poll()
        core.pager.poll()
        slots = core.table.emptiest(count) if into is None else into
        if len(slots) < count:
            return None
        for slot in slots:
            self.empty(slot)
        return slots

    def empty(self, slot: Slot) -> None:
        """Unmaps all of a free slot, and waits for that and for the GPU work on it.

        Raises:
            OutOfMemory: it could not begin; nothing changed. VMemError: it could not be unmapped.
        """
        core = self._core
        core.pager.release(slot)
        if slot.mapped:
            core.reclaimer.cut(slot, 0, now=True)
            core.pager.release(slot)
        if slot.mapped or slot.broken:
            core.reclaimer.raise_errors()
            raise DriverError(f"slot {slot.index} could not be emptied", errno=errno.EIO)

    def is_shortage(self, error: BaseException) -> bool:
        """Whether a failure of `vacate` or `attach` is answered as a lack of memory is.

        They need none of the cache's, only some for books and page tables. So one of several ranks
        may lack it alone, and there it is an error.
        """
        return isinstance(error, (OutOfMemory, TooManyBatches)) and not self._core.table.lockstep

    def attach(self, slots: Sequence[Slot], span: Span, source: Slot | None = None) -> None:
        """Takes empty slots and maps shared pages there, in one batch; on failure takes none.

        Args:
            slots: free and without a page.
            span: the pages.
            source: a slot that has them mapped first; then one operation for each slot and kind of
                pages is enough.
        """
        core = self._core
        pieces = self._gather(source, 0, span.pages) if source and span.pages else []
        self.on_abort(slots)
        try:
            with core.mapper.transaction() as change:
                for slot in slots:
                    core.table.take(slot)
                    core.reclaimer.shared.hold(span)
                    core.reclaimer.shared.use(span)
                    slot.dirty = 0
                    core.pager.lend(slot, span)
                if span.pages:
                    change.run(self._mapping(slots, span, pieces))
        except NotRecoverable:
            core.reclaimer.condemn([(slot, 0, span.pages) for slot in slots])
            raise

    def on_abort(self, slots: Sequence[Slot]) -> None:
        """Frees slots that the call is about to take, if it is not completed."""
        taken = [(slot, slot.owner + 1) for slot in slots]

        def free() -> None:
            self.detach([slot for slot, owner in taken if slot.active and slot.owner == owner])

        self._core.mapper.journal.on_abort(free)

    def _mapping(self, slots: Sequence[Slot], span: Span, pieces: list[_Held]) -> OpBatch:
        """The maps of a span in each slot: whole blocks by one operation, parts by tensor."""
        core = self._core
        layout, base = core.layout, core.pager.base
        size, tensors, stride = layout.page_size, layout.num_tensors, layout.tensor_bytes
        if pieces:
            ops = OpBatch(len(slots) * len(pieces))
            for slot in slots:
                self._map_pieces(ops, slot, pieces, readonly=True)
            return ops
        ops = OpBatch(len(slots) * len(span.parts) * tensors)
        for slot in slots:
            page = 0
            for block, low, high in span.parts:
                address, length = base + layout.offset(slot.index, page), (high - low) * size
                if high - low == block.pages:
                    ops.map(address, length, block.handle, 0, tensors, stride, True)
                else:
                    for tensor in range(tensors):
                        offset = (tensor * block.pages + low) * size
                        at = address + tensor * stride
                        ops.map(at, length, block.handle, offset, readonly=True)
                page += high - low
        return ops

    def order_after_writers(self, span: Span, stream: Any) -> None:
        """Lets `stream` run after the GPU work that wrote the pages."""
        for block in {part.block for part in span.parts}:
            block.events = prune(block.events)  # whatever happens, those are over
            for event in block.events:
                order_after(event, stream, self._core.device)

    def detach(self, slots: Sequence[Slot]) -> None:
        """Undoes `attach`, and what was grown since: frees the slots and waits until they are."""
        core = self._core
        for slot in slots:
            with suppress(VMemError):
                core.pager.release(slot)
            core.release(slot, None)
        for slot in slots:
            with suppress(VMemError):
                core.pager.release(slot)
