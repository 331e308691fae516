# SPDX-License-Identifier: MIT
"""Several slots over the same pages: making a slot's pages shared, mapping them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyvmem.errors import (
    DriverError,
    NotRecoverable,
    OutOfMemory,
    TooManyBatches,
    VMemError,
)
from pyvmem.kvcache.events import order_after, prune
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.spans import Span
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.features import Feature
    from pyvmem.kvcache.core import Core
    from pyvmem.pages import Pages

__all__ = ["Sharing"]


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
        """Makes the first `pages` pages of a taken slot shared: maps them again, read-only.

        No GPU work may touch them, and no batch be in flight over them.

        Raises:
            NotRecoverable: they could be mapped neither read-only nor as before; the request has
                lost its rows. VMemError: nothing changed.
        """
        low = slot.shared
        if pages <= low:
            return
        handle = self._gather(slot, low, pages)
        ops = OpBatch(1)
        try:
            self._unmap(ops, slot, low, pages)
            self._core.context.batch(ops)
        except BaseException:
            handle.drop()
            raise
        try:
            self._map(ops, slot, handle, low, pages, readonly=True)
        except VMemError as error:
            try:
                self._map(ops, slot, handle, low, pages, readonly=False)
            except VMemError:
                self._core.table.condemn(slot)
                slot.lost = True
                raise NotRecoverable(
                    f"reqid {slot.index} has lost its rows, free it: {error}",
                    errno=errno.ENOTRECOVERABLE,
                    op="KVCache",
                ) from error
            finally:
                handle.drop()
            raise
        self._adopt(slot, handle, pages - low, [])
        self._core.reclaimer.shared.use(slot.span.cut(low, pages))
        self._core.pager.active_pages -= pages - low

    def gather(self, slot: Slot, pages: int) -> Pages | None:
        """What `bequeath` needs of a slot's first `pages` pages; None where all are shared."""
        return self._gather(slot, slot.shared, pages) if pages > slot.shared else None

    def bequeath(self, slot: Slot, pages: int, handle: Pages | None, event: Any) -> None:
        """Makes the pages of a slot shared that is freed next: as they are mapped goes with it.

        Args:
            slot: taken, without a batch in flight.
            pages: how many.
            handle: what `gather` returned for them.
            event: the GPU work that writes them, which those who map them wait for.
        """
        if handle is None:
            return
        low = slot.shared
        self._adopt(slot, handle, pages - low, [] if event is None else [event])
        self._core.reclaimer.shared.use(slot.span.cut(low, pages))
        self._core.pager.active_pages -= pages - low

    def _adopt(self, slot: Slot, handle: Pages, pages: int, events: list[Any]) -> None:
        shared = self._core.reclaimer.shared
        span = shared.adopt(handle, pages, events, self._core.prefixes.unit_pages)
        shared.hold(span)
        slot.span = slot.span + span

    def _gather(self, slot: Slot, low: int, high: int) -> Pages:
        core = self._core
        layout = core.layout
        return core.context.gather(
            core.pager.base + layout.offset(slot.index, low),
            (high - low) * layout.page_size,
            layout.num_tensors,
            layout.tensor_bytes,
        )

    def _unmap(self, ops: OpBatch, slot: Slot, low: int, high: int) -> None:
        core = self._core
        layout = core.layout
        ops.clear()
        ops.unmap(
            core.pager.base + layout.offset(slot.index, low),
            (high - low) * layout.page_size,
            layout.num_tensors,
            layout.tensor_bytes,
        )

    def _map(
        self, ops: OpBatch, slot: Slot, handle: Pages, low: int, high: int, readonly: bool
    ) -> None:
        core = self._core
        layout = core.layout
        ops.clear()
        ops.map(
            core.pager.base + layout.offset(slot.index, low),
            (high - low) * layout.page_size,
            handle,
            0,
            layout.num_tensors,
            layout.tensor_bytes,
            readonly,
        )
        core.context.batch(ops)

    # ---- shared pages in more slots --------------------------------------------------------------

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
            source: a slot that has them mapped first; then one operation for each slot is enough.
        """
        core = self._core
        if span.pages:
            handle = self._gather(source, 0, span.pages) if source else None
            try:
                core.context.batch(self._mapping(slots, span, handle))
            except NotRecoverable:
                core.reclaimer.condemn([(slot, 0, span.pages) for slot in slots])
                raise
            finally:
                if handle is not None:
                    handle.drop()
        for slot in slots:
            core.table.take(slot)
            core.reclaimer.shared.hold(span)
            core.reclaimer.shared.use(span)
            slot.dirty = 0
            core.pager.lend(slot, span)

    def _mapping(self, slots: Sequence[Slot], span: Span, handle: Pages | None) -> OpBatch:
        """The maps of a span in each slot: whole blocks by one operation, parts by tensor."""
        core = self._core
        layout, base = core.layout, core.pager.base
        size, tensors, stride = layout.page_size, layout.num_tensors, layout.tensor_bytes
        if handle is not None:
            ops = OpBatch(len(slots))
            for slot in slots:
                address = base + layout.offset(slot.index)
                ops.map(address, span.pages * size, handle, 0, tensors, stride, True)
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
            block.events = prune(block.events)
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
