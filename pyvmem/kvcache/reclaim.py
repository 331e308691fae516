# SPDX-License-Identifier: MIT
"""Reclaims pages: chooses victims, unmaps them in the background, and records the results.

Callers must hold the cache's lock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from pyvmem._native import Kind
from pyvmem.errors import (
    NotRecoverable,
    OutOfMemory,
    Timeout,
    TooManyBatches,
    TooManyMappings,
    VMemError,
)
from pyvmem.kvcache.events import prune
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.pages import ALL_ON_DEVICE, EMPTY, SharedPages, Span, Tier
from pyvmem.kvcache.slots import Piece, Slide, Slot, SlotTable, Unmap
from pyvmem.kvcache.stats import Counters
from pyvmem.memory.info import RangeFlags, RangeInfo
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket
from pyvmem.plumbing.logs import warn

if TYPE_CHECKING:
    from pyvmem.kvcache.mapper import Mapper

__all__ = ["Reclaimer", "wait_for_unmaps"]

_log = logging.getLogger(__name__)

_SLICE_S = 0.0005  # seconds to wait for one of several unmaps before checking the next


class Share(Protocol):
    """A cache's part of a budget that several caches share. Sizes are in bytes."""

    def room(self) -> int:
        """Returns the number of bytes that the other caches currently leave for this cache."""

    def total(self) -> int:
        """Returns the size of the budget."""

    def within_reach(self) -> int:
        """Returns what `room` would return if the other caches gave up all their unowned pages."""

    def others(self) -> list[Reclaimer]:
        """Returns the reclaimers of the other caches."""

    def returning(self) -> int:
        """Returns how many bytes above their floors the other caches are unmapping."""

    def finish_idle(self) -> None:
        """Waits for growth in the other caches that no request is waiting for."""

    def poll(self) -> None:
        """Records the results of the other caches' finished batches."""

    def stop_promoting(self, *, wait: bool = True) -> bool:
        """Cancels promotions in the other caches; returns whether there were any."""

    def unsettled(self, *, promoting: bool = True) -> int:
        """Returns how many bytes above their floors the other caches would free after a wait."""

    def leaving(self) -> int:
        """Returns how many bytes the other caches will free by unmapping evicted prefixes."""

    def excluding(self, own: Collection[Reclaimer]) -> Share:
        """Returns a copy of the share whose `others` leaves out the reclaimers in `own`."""

    def begin_unmaps(self, nbytes: int, keep: Mapping[Slot, int], *, now: bool = True) -> None:
        """Makes the other caches start unmapping enough unowned pages to free `nbytes`."""

    def evict(self, nbytes: int) -> int:
        """Makes the other caches evict `nbytes` of recorded prefixes that no request uses.

        Returns the number of bytes freed.
        """

    def beyond(self) -> int:
        """Returns how many bytes the budget could still grow by; may be out of date."""

    def take(self, nbytes: int) -> None:
        """Grows the budget by up to `nbytes`, as much as possible without waiting."""

    def ask(self, nbytes: int) -> None:
        """Posts a shortage of `nbytes` to other processes, if the budget cannot cover it."""

    def engines(self) -> list[tuple[str, int]]:
        """Returns the other engines that hold driver mappings, and how many each of them holds."""

    def check(self) -> list[str]:
        """Returns a description of each inconsistency in the budget's records."""


class Reclaimer:
    """Unmaps unowned pages in the background, after their last owners' GPU work.

    Attributes:
        limit: maximum number of physical pages that the cache may have.
        watermark: memory is scarce while less than this fraction of `limit` is free.
        device_pages: number of the cache's physical device pages; counts shared pages once, and
            includes pages being unmapped.
        off_device: number of physical off-device pages, by tier; not in `device_pages`.
        own_off_device: cached result of `Group.own_off_device`; None: out of date.
        shared: refcounts of shared pages.
        unmaps: unmaps in flight, or finished but not yet recorded.
        errors: failures of background batches that no call has raised yet.
        slid: number of pages per tensor that have left the windows of running requests.
        coming: number of device pages per tensor that `unmaps` will free.
        share: the cache's part of a budget; None: the cache has no budget.
        evict: evicts recorded prefixes that no request uses, to free a given number of pages per
            tensor or as many as possible; returns the number freed.
        leased: returns how many pages per tensor are used by no request but protected by leases.
        block: number of pages per 2 MiB block if memory is allocated in such blocks
            (`Runs.provide`); otherwise 0.
    """

    def __init__(
        self,
        mapper: Mapper,
        layout: Layout,
        table: SlotTable,
        limit: int,
        counters: Counters,
        evict: Callable[[int], int],
        leased: Callable[[], int],
    ) -> None:
        self.mapper = mapper
        self.journal = mapper.journal
        self.layout = layout
        self.table = table
        self.limit = limit
        self.watermark = layout.config.low_watermark
        self.counters = counters
        self.device_pages = self.slid = self.coming = 0
        self.off_device: Counter[Tier] = Counter()
        self.own_off_device: list[Piece] | None = None
        self.shared = SharedPages(layout, mapper)
        self.evict, self.leased = evict, leased
        self.unmaps: list[Unmap | Slide] = []
        self.errors: list[VMemError] = []
        self.share: Share | None = None
        self.block = 0
        self._ops = OpBatch(1)

    @property
    def low_pages(self) -> int:
        """Number of free physical pages below which memory is scarce.

        See `KVCacheConfig.low_watermark`.
        """
        return int(self.watermark * self.limit)

    def unmap(self, slot: Slot, keep: int, now: bool = False) -> None:
        """Starts unmapping a slot's pages from `keep` on, after its earlier owners' GPU work.

        Unmaps all pages of a stale slot, since the next owner cannot use its shared pages. Keeps
        any 2 MiB entry that the owner partly uses, since GPU work may be reading it.

        Args:
            slot: a slot without a batch in flight.
            keep: number of pages per tensor to keep.
            now: True if the caller will wait for the unmap; it then runs in this thread if the
                queue is full.

        Raises:
            TooManyBatches, OutOfMemory: the batch could not be queued; nothing has changed.
        """
        if slot.stale:
            keep = 0
        elif slot.granted < slot.large_end and slot.active:
            keep = max(keep, slot.busy_end)
        low = max(keep, slot.head)
        if low >= slot.mapped:
            return
        try:
            self._commit(slot, low, keep, Ticket(self.mapper.context))
        except TooManyBatches:
            if not now:
                raise
            self._run(slot, low, keep)

    def _commit(
        self, slot: Slot, low: int, keep: int, ticket: Any = None, kept: OpBatch | None = None
    ) -> None:
        """Unmaps a slot's pages from `low` on, in one batch, and edits the records.

        A 2 MiB entry that is only partly in the range is split, so no GPU work may be reading any
        of its pages.

        Args:
            slot: a slot without a batch in flight.
            low: first page to unmap.
            keep: the new value of the slot's `mapped`.
            ticket: the batch's ticket; None: it runs in the calling thread.
            kept: the batch from `try_keep`, which keeps the slot's shared pages for a later
                request; the unmap is added to it. None: the slot does not keep shared pages.
        """
        ops = self._ops if kept is None else kept
        if kept is None:
            ops.clear()
        layout = self.layout
        tier_map, mapped = slot.tier_map, slot.mapped
        if low < mapped:
            at, nbytes = slot.addr + low * layout.page_size, (mapped - low) * layout.page_size
            ops.unmap(at, nbytes, layout.num_tensors, layout.tensor_bytes, split=True)
        job = Unmap(slot, low, mapped, slot.dirty, ticket, slot.head)
        edits: list[list[Any]] = [
            [slot, "job", job],
            [slot, "kept", kept is not None],
            [slot, "mapped", keep],
            [slot, "head", min(slot.head, keep)],
            [slot, "dirty", min(slot.dirty, keep)],
            [slot, "large_end", slot.large_end_below(keep)],
            [self, "unmaps", [*self.unmaps, job]],
        ]
        if slot.stale and kept is None:
            job.span = slot.span
            edits.append([slot, "span", EMPTY])
        if tier_map.noted:
            job.off_device = tier_map.off_device(low + job.span.pages, mapped)
            job.tier_map = tier_map.within(low, mapped)
            edits.append([slot, "tier_map", tier_map.without(low, mapped)])
        edits.append([self, "coming", self.coming + job.pages])
        try:
            self.mapper.commit(edits, ops, slot.events, ticket=ticket)
        except NotRecoverable:
            if ticket is None:  # drop the pages from the records, as for a background batch
                self.journal.change(edits)
            raise

    def cut(self, slot: Slot, keep: int) -> None:
        """Unmaps a running request's pages from `keep` on, in this thread.

        No GPU work may be using the slot: splitting a 2 MiB entry unmaps it briefly.
        """
        if slot.job is not None:  # the batch can only be an unmap beyond the 2 MiB entry
            self.finish(slot.job)
        self._run(slot, keep, keep)
        if slot.job is not None:
            self.finish(slot.job)

    def _run(self, slot: Slot, low: int, keep: int) -> None:
        """Unmaps in this thread; records a failure as if the batch had run in the background."""
        try:
            self._commit(slot, low, keep)
        except OutOfMemory:
            raise
        except VMemError as error:
            self.failed(slot, error)

    def try_unmap(self, slot: Slot, keep: int, now: bool = False) -> bool:
        """Calls `unmap`. Returns False, leaving the pages mapped, if the batch cannot be queued."""
        try:
            self.unmap(slot, keep, now)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def try_keep(self, slot: Slot, ops: OpBatch) -> bool:
        """Keeps a stale slot's shared pages mapped, and starts unmapping the pages after them.

        Args:
            slot: a free slot without a batch in flight that is stale only because of its shared
                pages.
            ops: a batch that makes the shared pages read-only after the slot's GPU work, with room
                for one more operation.

        Returns:
            False if the batch could not be queued; nothing has changed.
        """
        low = slot.shared
        if low >= slot.mapped and not len(ops):
            self.table.change(slot, kept=True)
            return True
        try:
            self._commit(slot, low, low, Ticket(self.mapper.context), ops)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def failed(self, slot: Slot | None, error: VMemError) -> None:
        """Records that a slot's pages could not be unmapped.

        `slot` is None for pages that have left the windows of slots.
        """
        self.errors.append(error)
        whose = "windows" if slot is None else f"reqid {slot.index}"
        warn(_log, "unmap", "pages of %s could not be unmapped: %s", whose, error)
        if slot is not None and isinstance(error, NotRecoverable):
            self.table.mark_broken(slot)  # excludes the slot's pages from the counts

    def poll(self) -> None:
        """Records the results of finished unmaps."""
        for unmap in [unmap for unmap in self.unmaps if unmap.done()]:
            self.finish(unmap)

    def finish(self, unmap: Unmap | Slide, timeout: float | None = None) -> None:
        """Waits for one unmap, up to `timeout` seconds (None: forever), and records its result."""
        slots = unmap.slots if isinstance(unmap, Slide) else [unmap.slot]
        edits: list[list[Any]] = [
            [self, "unmaps", [one for one in self.unmaps if one is not unmap]],
            [self, "coming", self.coming - unmap.pages],
            [slots, "job", [None] * len(slots)],
        ]
        pages, span, off_device = unmap.pages, unmap.span, unmap.off_device
        uses: dict[Span, int] = {}
        try:
            if unmap.ticket is not None:
                unmap.ticket.wait(timeout)
        except Timeout:
            return
        except VMemError as error:
            if isinstance(unmap, Slide):
                pages, span, off_device, uses = self._undo_slide(unmap, error, edits)
            else:
                self.failed(unmap.slot, error)
                if not isinstance(error, NotRecoverable):
                    edits += _restored(unmap)
                    pages, span, off_device = 0, EMPTY, {}
        edits += self.shared.use_edits(uses, {span: -1} if span.pages else {})
        self.journal.change([*edits, *self.free_edits(pages, off_device)])
        self.drop_unheld()

    def finish_all(self) -> None:
        """Waits for every unmap and records the results."""
        for unmap in list(self.unmaps):
            self.finish(unmap)

    def _undo_slide(
        self, slide: Slide, error: VMemError, edits: list[list[Any]]
    ) -> tuple[int, Span, Counter[Tier], Counter[Span]]:
        """Appends the edits for pages that a failed slide left mapped.

        Returns:
            The pages of broken slots, which count as freed (the pages per tensor, the shared pages
            and the off-device pages by tier), and how many requests use each span of shared pages
            again.
        """
        if not slide.quiet:
            self.failed(None, error)
        pieces = list(zip(slide.slots, slide.lows, slide.heads, strict=True))
        if isinstance(error, NotRecoverable):
            self.mark_broken(pieces)
        freed, slid, span, off_device = slide.pages, self.slid, EMPTY, Counter(slide.off_device)
        uses: Counter[Span] = Counter()
        for (slot, low, head), owner, share in zip(pieces, slide.owners, slide.shares, strict=True):
            if slot.broken:
                span = span + share
                continue
            # The unmap was rolled back: the pages are still mapped.
            tier_map = slot.tier_map.put(*slide.tier_map.get(slot, ALL_ON_DEVICE).noted)
            outside = tier_map.off_device(low + share.pages, head)
            off_device.subtract(outside)
            freed -= head - low - share.pages - sum(outside.values())
            edits += ([slot, "head", low], [slot, "tier_map", tier_map])
            edits.append([slot, "span", share + slot.span])
            if slot.owner == owner:
                slid -= head - low
                uses[share] += 1
        edits.append([self, "slid", slid])
        return freed, span, off_device, uses

    def lend(self, span: Span) -> None:
        """Holds a reference to these pages until the next call to `lend`."""
        before = self.shared.lent
        self.journal.change([[self.shared, "lent", span]])
        self.shared.hold(span)
        self.unref(before)

    def unref(self, span: Span) -> None:
        """Drops a reference to each page of the span.

        Pages without further references return to the pool.
        """
        self.journal.change(self.shared.use_edits({}, {span: -1}))
        self.drop_unheld()

    def drop_unheld(self) -> None:
        """Returns unheld shared pages to the pool; the next call retries failures."""
        for part in list(self.shared.unheld):
            pages, off_device = part.high - part.low, dict[Tier, int]()
            if part.block.off_device:
                pages, off_device = 0, {part.block.tier: pages}
            with suppress(OutOfMemory):
                self.shared.drop(part, self.free_edits(pages, off_device))

    def free_edits(
        self, pages: int, off_device: Mapping[Tier, int], *, reclaimed: bool = True
    ) -> list[list[Any]]:
        """Returns the edits for pages that leave the cache: device pages, and others by tier."""
        tensors, counters = self.layout.num_tensors, self.counters
        edits = [
            [self, "device_pages", self.device_pages - pages * tensors],
            [self, "own_off_device", None],
        ]
        if off_device:
            others = self.off_device.copy()
            others.subtract({tier: count * tensors for tier, count in off_device.items()})
            edits.append([self, "off_device", others])
        if reclaimed:
            gone = (pages + sum(off_device.values())) * tensors
            edits.append([counters, "reclaimed_pages", counters.reclaimed_pages + gone])
        return edits

    def mark_broken(self, pieces: list[Piece]) -> None:
        """Retires each slot that has a quarantined page, after a failed rollback."""
        for slot, low, high in pieces:
            runs = self._runs(slot, low, high)
            if not slot.broken and any(RangeFlags.QUARANTINED in info.flags for *_, info in runs):
                self.table.mark_broken(slot)

    def _runs(self, slot: Slot, low: int, high: int) -> Iterator[tuple[int, int, RangeInfo]]:
        """Yields the address, size and state of each run in pages [low, high) of a slot."""
        for tensor in range(self.layout.num_tensors):
            at = slot.addr + self.layout.offset(0, low, tensor)
            end = at + (high - low) * self.layout.page_size
            while at < end:
                info = self.mapper.context.query(at)
                size = min(info.run_bytes, end - at)
                yield at, size, info
                at += size

    def salvage(self, slot: Slot) -> None:
        """Unmaps the remaining pages of a freed request that lost its rows, after its GPU work.

        Raises:
            VMemError: they could not be unmapped; nothing has changed.
        """
        runs = list(self._runs(slot, 0, slot.mapped))
        quarantined = any(RangeFlags.QUARANTINED in info.flags for *_, info in runs)
        ops = OpBatch(len(runs) or 1)
        for at, size, info in runs:
            if info.mapped:
                ops.unmap(at, size, split=True)
        span, first = slot.span, slot.shared
        own, off_device = slot.mapped - first, slot.tier_map.off_device(first, slot.mapped)
        edits: list[list[Any]] = [
            *([slot, name, 0] for name in ("mapped", "large_end", "head", "dirty")),
            *([slot, "span", EMPTY], [slot, "tier_map", ALL_ON_DEVICE]),
            *([slot, "rows_lost", False], [slot, "broken", quarantined]),
        ]
        edits += self.free_edits(own - sum(off_device.values()), off_device)
        edits += self.shared.use_edits({}, {span: -1})
        self.mapper.commit(edits, ops, slot.events)
        self.drop_unheld()

    def raise_errors(self) -> None:
        """Raises the oldest failure of a background batch, if any.

        The message says how many more batches failed.
        """
        if not self.errors:
            return
        first, *others = self.errors
        self.errors.clear()
        if others:
            text = f"{first}; and {len(others)} more background batches failed"
            first.args = (text, *first.args[1:])
        raise first

    # ---- choosing victims ------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Number of physical pages that the cache could allocate now."""
        return min(self.limit - self.device_pages, self.room // self.layout.page_size)

    @property
    def projected_free(self) -> int:
        """`free` plus the pages that the budget could still get; compared with the watermark."""
        room = self.room + (0 if self.share is None else self.share.beyond())
        return min(self.limit - self.device_pages, room // self.layout.page_size)

    @property
    def returning(self) -> int:
        """Number of physical pages being unmapped."""
        return self.coming * self.layout.num_tensors

    @property
    def late(self) -> int:
        """Number of physical pages whose unmaps are waiting for GPU work."""
        waiting = (
            one.pages
            for one in self.unmaps
            if not one.done() and (isinstance(one, Slide) or prune(one.slot.events))
        )
        return sum(waiting) * self.layout.num_tensors

    def drop_mapping_errors(self) -> None:
        """Discards errors from background growth that ran out of mappings and was rolled back."""
        if self.errors:  # every call on every rank runs this
            self.errors = [one for one in self.errors if not isinstance(one, TooManyMappings)]

    def make_room(
        self, pages: int, keep: Mapping[Slot, int], own: int = 0, prefixes: bool = True
    ) -> bool:
        """Reclaims up to `pages` physical pages and waits for them. Returns False if it freed none.

        Slots' pages are reclaimed before prefixes are evicted: regaining a page costs a driver
        call, while regaining a prefix means recomputing it. In both steps, this cache comes before
        the other caches of its budget. Prefixes are evicted only once all spare pages of slots are
        back, so the choice of prefixes does not depend on the progress of background batches.

        Args:
            pages: number of physical pages to reclaim.
            keep: slots, and the pages per tensor that each must keep.
            own: how many of `pages` must come from this cache, because it is at its limit.
            prefixes: also evict prefixes if the slots do not have enough.
        """
        size, share = self.layout.page_size, self.share
        before = self.room
        goal = before + pages * size
        lent = (pages - own) * size if share is not None else 0
        reclaimers = [self] if share is None else [self, *share.others()]
        if share is not None:
            share.take(lent)
        failed = sum(len(one.errors) for one in reclaimers)
        while (missing := goal - self.room) > 0:
            self.begin_unmaps(-(-missing // size), keep)
            missing -= self.returning * size
            if share is not None and missing > 0 and lent > 0:
                share.begin_unmaps(min(missing, lent), keep)
                lent -= share.returning()  # these bytes are back by the next iteration
            if not any(one.unmaps for one in reclaimers):
                break
            with self.counters.waiting():
                wait_for_unmaps(reclaimers, lambda: self.room >= goal)
            if sum(len(one.errors) for one in reclaimers) > failed:
                break  # otherwise a failing unmap would be retried forever
        if prefixes and (missing := goal - self.room) > 0:
            back = self.evict(-(-missing // (self.layout.num_tensors * size)))
            missing = min(missing - back * self.layout.num_tensors * size, lent)
            if share is not None and missing > 0:
                share.evict(missing)
            with self.counters.waiting():
                wait_for_unmaps(reclaimers, lambda: self.room >= goal)
        back = self.room - before
        _log.debug("reclaimed %d of the %d bytes that were wanted", back, pages * size)
        return back > 0

    @property
    def leaving(self) -> int:
        """Number of physical pages of evicted prefixes that are freed once slots are unmapped."""
        stale = [slot.span for slot in self.table.stale if not slot.kept]
        going = [unmap.span for unmap in self.unmaps] + stale  # in flight or still to begin
        return self.shared.leaving(going) * self.layout.num_tensors

    def begin_unmaps(self, pages: int, keep: Mapping[Slot, int], *, now: bool = True) -> None:
        """Starts unmaps until `pages` physical pages are being unmapped.

        For `now`, see `unmap`. This may fall short of `pages`, since a slot with an unmap in flight
        cannot lose more pages until that unmap is complete.
        """
        self.release_stale(now=now)
        pending = self.returning
        if now and not self.table.lockstep:  # begin with unmaps that need not wait
            late = self.late
            idle = (slot for slot in self.table.victims() if not slot.events)
            pending = late + self._begin_unmaps(idle, pages, pending - late, keep, now=now)
        self._begin_unmaps(self.table.victims(), pages, pending, keep, now=now)

    def _begin_unmaps(
        self, slots: Iterable[Slot], pages: int, pending: int, keep: Mapping[Slot, int], now: bool
    ) -> int:
        """Starts unmapping pages of `slots` until `pages` physical pages are being unmapped.

        `pending` physical pages are already being unmapped.

        Returns:
            The number of physical pages being unmapped afterwards.
        """
        tensors = self.layout.num_tensors
        for slot in slots:
            if pending >= pages:
                break
            spare = slot.spare_beyond(keep.get(slot, 0))
            take = self._share_of(slot, spare, -(-(pages - pending) // tensors))
            if take <= 0:
                continue
            if not self.try_unmap(slot, slot.mapped - take, now=now):
                break
            pending += take * tensors
        return pending

    def _share_of(self, slot: Slot, spare: int, missing: int) -> int:
        """Returns how many of a slot's `spare` pages per tensor to unmap.

        This is at least `missing` if possible. A free slot gives up whole blocks, so that another
        request can map them with 2 MiB entries.
        """
        take = min(spare, missing)
        if self.block and not slot.active:
            take = min(spare, take + (slot.mapped - take) % self.block)
        return take

    @property
    def room(self) -> int:
        """Bytes free in the budget or, without a budget, below the cache's own limit.

        With a budget, the cache's own limit is ignored.
        """
        if self.share is None:
            return (self.limit - self.device_pages) * self.layout.page_size
        return self.share.room()

    def spare(self, keep: Mapping[Slot, int]) -> int:
        """Returns how many device pages per tensor are unowned, excluding those being unmapped."""
        # This includes the surplus of slots with an unmap in flight, which can be unmapped later.
        spare = self.table.columns.spare
        for slot, pages in keep.items():
            own = self.table.slots[slot.index] is slot  # not a slot of another group
            grows = slot.job is not None and not slot.job.takes_pages
            counted = slot.mapped != slot.granted and not (slot.rows_lost or grows)
            if own and counted:  # `columns.spare` includes this slot
                spare += slot.spare_beyond(pages) - slot.spare_beyond(0)
        return spare + self.shared.pages - self.shared.used - self.leased()

    def obtainable(self, keep: Mapping[Slot, int]) -> int:
        """Returns the number of physical pages that are free, being unmapped, or reclaimable."""
        room = self.room if self.share is None else self.share.within_reach()
        free = min(self.limit - self.device_pages, room // self.layout.page_size)
        return free + self.idle(keep)

    def idle(self, keep: Mapping[Slot, int]) -> int:
        """Returns how many physical pages no request owns, including those being unmapped."""
        return (self.coming + self.spare(keep)) * self.layout.num_tensors

    def keep_watermark(self) -> None:
        """If memory is scarce, starts unmapping free slots until it no longer will be."""
        missing = self.low_pages - self.projected_free - self.returning
        if missing > 0:
            self._begin_unmaps(self.table.victims(active=False), missing, 0, {}, now=False)

    def release_before(self, step: int, prepared: Slot | None, keep: int) -> bool:
        """Starts unmapping slots freed at `step` or earlier.

        Unmaps all of their pages, except that the slot prepared for the next request keeps `keep`
        pages per tensor. Returns False if some unmaps could not be started.
        """
        complete = True
        for slot in self.table.pick(Kind.CACHED):
            if slot.freed_at > step:  # all following slots were freed later
                break
            rest = keep if slot is prepared and not slot.stale else 0
            if slot.mapped > rest and not slot.broken:
                complete &= slot.job is None and self.try_unmap(slot, rest)
        return complete

    def release_stale(self, now: bool = False, kept: bool = False) -> bool:
        """Starts unmapping stale slots that are not kept or, with `kept`, all stale slots.

        Returns False if some unmaps could not be started.
        """
        complete = True
        for slot in self.table.stale:
            if kept or not slot.kept:
                complete &= slot.job is None and self.try_unmap(slot, 0, now)
        return complete

    def count_evicted(self, spans: Sequence[Span]) -> None:
        """Counts evicted pages and drops the prefix tree's references; call `drop_unheld` next."""
        gone = sum(span.pages for span in spans) * self.layout.num_tensors
        holds: Counter[Span] = Counter()
        holds.subtract(spans)  # two prefixes may have the same span
        edits = self.shared.use_edits({}, holds)
        evicted = self.counters.evicted_pages + gone
        self.journal.change([*edits, [self.counters, "evicted_pages", evicted]])

    def release_kept(self, *spans: Span) -> None:
        """Starts unmapping kept slots that map pages of `spans`.

        `release_stale` retries failures.
        """
        gone: dict[Any, list[tuple[int, int]]] = {}
        for block, low, high in (part for span in spans for part in span.parts):
            gone.setdefault(block, []).append((low, high))
        for slot in self.table.stale:
            if slot.kept and any(
                first < high and low < last
                for block, first, last in slot.span.parts
                for low, high in gone.get(block, ())
            ):
                self.table.change(slot, kept=False)
                if slot.job is None:
                    self.try_unmap(slot, 0)

    def spare_slots(self, count: int) -> bool:
        """Starts unmapping kept slots, longest free first, until `count` free slots are not kept.

        Requests of other conversations then find slots that need not be emptied first. Returns
        False if some unmaps could not be started.
        """
        self.poll()
        table = self.table
        kept = [slot for slot in table.pick(Kind.CACHED) if slot.kept]
        missing = min(count - (table.free_count - len(kept)), len(kept))
        for slot in kept:
            if missing <= 0:
                break
            if slot.job is None and self.try_unmap(slot, 0):
                missing -= 1
        return missing <= 0


def _restored(unmap: Unmap) -> list[list[Any]]:
    """Returns the edits for an unmap that was rolled back: the pages are still mapped."""
    slot, high = unmap.slot, unmap.high
    edits: list[list[Any]] = [
        [slot, "head", unmap.head],
        [slot, "kept", False],
        [slot, "tier_map", slot.tier_map.put(*unmap.tier_map.noted)],
        [slot, "mapped", high],
        # `dirty` may have increased since the unmap began.
        [slot, "dirty", max(slot.dirty, unmap.dirty)],
        [slot, "span", unmap.span + slot.span],
    ]
    if slot.block:  # upper bound: the entries' sizes are not known
        edits.append([slot, "large_end", high - high % slot.block])
    return edits


def wait_for_unmaps(reclaimers: Sequence[Reclaimer], enough: Callable[[], bool]) -> None:
    """Waits until `enough` returns True or no unmap is in flight."""
    while not enough():
        pending = [(one, unmap) for one in reclaimers for unmap in one.unmaps]
        if not pending:
            return
        # The unmaps may complete in any order, so wait for each only briefly.
        for one, unmap in pending:
            one.finish(unmap, None if len(pending) == 1 else _SLICE_S)
            if enough():
                return
