# SPDX-License-Identifier: MIT
"""Reclaiming pages: choosing victims, unmapping in the background, and taking the results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from pyvmem.kvcache.metrics import Counters
from pyvmem.kvcache.pages import EMPTY, NOTHING, NOWHERE, SharedPages, Span, Tier
from pyvmem.kvcache.slots import DoneTicket, Piece, Slide, Slot, SlotTable, Unmap
from pyvmem.memory.info import RangeFlags
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket
from pyvmem.plumbing.logs import warn

if TYPE_CHECKING:
    from pyvmem.kvcache.mapper import Mapper

__all__ = ["Reclaimer", "wait_for_unmaps"]

_log = logging.getLogger(__name__)

_SLICE_S = 0.0005  # how long to wait for one of several unfinished unmaps before trying the next


class Evictable(Protocol):
    """Pages that no request uses and that are evicted when memory is short: recorded prefixes."""

    def evict(self, place: int, pages: int) -> int:
        """Evicts so many pages per tensor, or all that it can; returns how many come back."""

    def leased(self, place: int) -> int:
        """Pages per tensor that cannot be evicted."""


class Share(Protocol):
    """A cache's part of a budget that several have: what it may take, and from whom; bytes."""

    def room(self) -> int:
        """What the cache could take now, as far as the others are concerned."""

    def total(self) -> int:
        """What all caches of the budget may have together."""

    def within_reach(self) -> int:
        """`room`, once the others have given back what no request owns."""

    def others(self) -> list[Reclaimer]:
        """The reclaimers of the other caches."""

    def returning(self) -> int:
        """What is on its way back from the other caches, above their floors."""

    def finish_idle(self) -> None:
        """Waits for the other caches' growths that no request waits for."""

    def poll(self) -> None:
        """Notes which batches of the other caches are finished."""

    def stop_promoting(self, *, wait: bool = True) -> bool:
        """Cancels promotions in the other caches; whether there were any."""

    def unsettled(self, *, promoting: bool = True) -> int:
        """What the other caches would give back after a wait, above their floors."""

    def leaving(self) -> int:
        """What comes back from the other caches with prefixes that were evicted."""

    def beside(self, own: Collection[Reclaimer]) -> Share:
        """The same share, to which the caches of these are no others."""

    def begin_unmaps(self, nbytes: int, keep: Mapping[Slot, int], *, now: bool = True) -> None:
        """Makes the others begin to unmap unowned pages until so much is on its way."""

    def evict(self, nbytes: int) -> int:
        """Makes the others evict recorded prefixes of so many bytes that no request uses.

        Returns what comes back.
        """

    def beyond(self) -> int:
        """How much more the budget might get, as of the last look; a hint."""

    def take(self, nbytes: int) -> None:
        """Grows the budget by so much, as far as that can be had now."""

    def ask(self, nbytes: int) -> None:
        """Posts a shortage to other processes, where the budget cannot find so much itself."""

    def engines(self) -> list[tuple[str, int]]:
        """Other engines of the ledger, in words, and the mappings that each has."""

    def check(self) -> list[str]:
        """Contradictions in the budget's records, in words."""


class Reclaimer:
    """Unmaps pages without an owner in the background, after their last owners' GPU work.

    Attributes:
        limit: physical pages that the cache may have.
        watermark: the part of `limit` below which memory is scarce.
        held: physical pages behind the cache, shared ones once, those on their way back included.
        away: the same of pages that do not lie in the device, which `held` leaves out.
        own_away: what `Group.own_away` found; None: it may have changed since.
        shared: pages that several places may refer to.
        evict: evicts recorded prefixes of so many pages per tensor.
        leased: returns the pages per tensor that it cannot evict, though no request uses them.
        cuts: unfinished batches.
        errors: failures of finished batches that no call has raised yet.
        slid: pages per tensor that left the windows of running requests.
        coming: pages per tensor in unmaps and slides in flight.
        share: the cache's part of a budget; None: the cache has a limit of its own.
        block: pages of a 2 MiB block, where memory is placed by blocks (`Runs.provide`); else 0.
    """

    def __init__(
        self,
        mapper: Mapper,
        layout: Layout,
        table: SlotTable,
        limit: int,
        low_watermark: float,
        counters: Counters,
        prefixes: Evictable,
        place: int,
    ) -> None:
        self.mapper = mapper
        self.journal = mapper.journal
        self.layout = layout
        self.table = table
        self.limit = limit
        self.watermark = low_watermark
        self.counters = counters
        self.held = self.slid = self.coming = 0
        self.away: Counter[Tier] = Counter()
        self.own_away: tuple[int, list[Slot]] | None = None
        self.shared = SharedPages(layout, mapper)
        self._prefixes, self._place = prefixes, place
        self.unmaps: list[Unmap | Slide] = []
        self.errors: list[VMemError] = []
        self.share: Share | None = None
        self.block = 0
        self._ops = OpBatch(1)

    @property
    def low_pages(self) -> int:
        """Physical pages below which memory is scarce: see `KVCacheConfig.low_watermark`."""
        return int(self.watermark * self.limit)

    def evict(self, pages: int) -> int:
        """Evicts recorded prefixes until so many pages per tensor come back; how many do."""
        return self._prefixes.evict(self._place, pages)

    def leased(self) -> int:
        """Pages per tensor that cannot be evicted, though no request uses them."""
        return self._prefixes.leased(self._place)

    def unmap(self, slot: Slot, keep: int, now: bool = False) -> None:
        """Unmaps a slot's pages from `keep` on, after its earlier owners' GPU work; does not wait.

        Of a stale slot all pages go, since what it shares cannot be kept for a next owner. What an
        owner has of an entry of 2 MiB stays as a whole, since work may be reading it.

        Args:
            slot: without a batch in flight.
            keep: pages per tensor.
            now: the caller waits for it: where the queue is full, it is done in this thread.

        Raises:
            TooManyBatches, OutOfMemory: the batch could not be queued; nothing changed.
        """
        if slot.stale:
            keep = 0
        elif slot.granted < slot.whole and slot.active:
            keep = max(keep, slot.firm)
        low = max(keep, slot.head)
        if low >= slot.mapped:
            return
        self._ops.clear()
        self._add_unmap(self._ops, slot, low, slot.mapped)
        ticket = Ticket(self.mapper.context)
        try:
            edits = self._unmapping(slot, low, keep, ticket)
            self.mapper.commit(edits, self._ops, slot.events, ticket=ticket)
        except TooManyBatches:
            if not now:
                raise
            self._run(slot, low, keep)

    def _unmapping(
        self, slot: Slot, low: int, keep: int, ticket: Any, *, kept: bool = False
    ) -> list[list[Any]]:
        """The edits of the records for a batch that unmaps a slot's pages from `low` on.

        Args:
            slot: without a batch in flight.
            low: the first page that goes.
            keep: pages that the slot has from then on, with those before its head.
            ticket: of the batch.
            kept: the slot's shared pages stay for a request that begins with them.
        """
        places, mapped = slot.places, slot.mapped
        job = Unmap(slot, low, mapped, slot.dirty, ticket, slot.head)
        edits: list[list[Any]] = [
            [slot, "job", job],
            [slot, "kept", kept],
            [slot, "mapped", keep],
            [slot, "head", min(slot.head, keep)],
            [slot, "dirty", min(slot.dirty, keep)],
            [self, "unmaps", [*self.unmaps, job]],
        ]
        if slot.stale and not kept:
            job.span = slot.span
            edits.append([slot, "span", EMPTY])
        if places.noted:
            job.away = places.away(low + job.span.pages, mapped)
            job.places = places.within(low, mapped)
            edits.append([slot, "places", places.without(low, mapped)])
        if slot.block:
            edits.append([slot, "whole", slot.whole_below(keep)])
        return [*edits, [self, "coming", self.coming + job.pages]]

    def cut(self, slot: Slot, keep: int) -> None:
        """Unmaps a running request's pages from `keep` on, in this thread, and waits.

        No GPU work may be under way in the slot: the rest of an entry of 2 MiB is unmapped for a
        moment.
        """
        if slot.job is not None:  # what it had beyond the entry
            self.finish(slot.job)
        self._ops.clear()
        self._add_unmap(self._ops, slot, keep, slot.mapped)
        self._run(slot, keep, keep)
        if slot.job is not None:
            self.finish(slot.job)

    def _run(self, slot: Slot, low: int, keep: int) -> None:
        """The same in this thread; a failure is noted as it is after a wait."""
        try:
            edits = self._unmapping(slot, low, keep, DoneTicket())
            self.mapper.commit(edits, self._ops, slot.events)
        except OutOfMemory:
            raise
        except VMemError as error:
            self.failed(slot, error)

    def try_unmap(self, slot: Slot, keep: int, now: bool = False) -> bool:
        """`unmap`, or False where it could not be queued: the pages stay; it is tried again."""
        try:
            self.unmap(slot, keep, now)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def try_keep(self, slot: Slot, ops: OpBatch) -> bool:
        """Keeps a stale slot's shared pages where they are, and unmaps those after them.

        Args:
            slot: free, without a batch in flight, and nothing but its shared pages makes it stale.
            ops: what makes the shared pages read-only, after the slot's GPU work; with room for one
                operation more.

        Returns:
            False where it could not be queued; nothing changed.
        """
        low = slot.shared
        if low < slot.mapped:
            self._add_unmap(ops, slot, low, slot.mapped)
        if not len(ops):
            self.table.change(slot, kept=True)
            return True
        ticket = Ticket(self.mapper.context)
        try:
            edits = self._unmapping(slot, low, low, ticket, kept=True)
            self.mapper.commit(edits, ops, slot.events, ticket=ticket)
        except (TooManyBatches, OutOfMemory):
            return False
        return True

    def _add_unmap(self, ops: OpBatch, slot: Slot, low: int, high: int) -> None:
        """Adds to a batch that pages [low, high) of a slot are unmapped.

        Entries of 2 MiB that have only a part of them are split: no work may be reading the rest.
        """
        layout = self.layout
        size, stride = layout.page_size, layout.tensor_bytes
        at, nbytes = slot.addr + low * size, (high - low) * size
        ops.unmap(at, nbytes, layout.num_tensors, stride, split=True)

    def failed(self, slot: Slot | None, error: VMemError) -> None:
        """Notes that pages of a slot could not be unmapped; None: of the windows of several."""
        self.errors.append(error)
        whose = "windows" if slot is None else f"reqid {slot.index}"
        warn(_log, "unmap", "pages of %s could not be unmapped: %s", whose, error)
        if slot is not None and isinstance(error, NotRecoverable):
            self.table.mark_broken(slot)  # and its pages are no longer counted

    def poll(self) -> None:
        """Notes which unmaps are finished."""
        for unmap in [unmap for unmap in self.unmaps if unmap.done()]:
            self._finish(unmap)

    def finish(self, unmap: Unmap | Slide) -> None:
        """Waits for one unmap."""
        self._finish(unmap, None)

    def finish_all(self) -> None:
        """Waits for every unmap."""
        for unmap in list(self.unmaps):
            self._finish(unmap, None)

    def _finish(self, unmap: Unmap | Slide, timeout: float | None = 0.0) -> None:
        """Waits for an unmap and notes what came back; nothing where it is not over in time."""
        if isinstance(unmap, Slide):
            self._finish_slide(unmap, timeout)
            return
        slot, pages, span, away = unmap.slot, unmap.pages, unmap.span, unmap.away
        left = [one for one in self.unmaps if one is not unmap]
        edits: list[list[Any]] = [
            [self, "unmaps", left],
            [self, "coming", self.coming - pages],
            [slot, "job", None],
        ]
        try:
            unmap.ticket.wait(timeout)
        except Timeout:
            return
        except VMemError as error:
            self.failed(slot, error)
            if not isinstance(error, NotRecoverable):  # undone: the pages are where they were
                edits += (
                    [slot, "head", unmap.head],
                    [slot, "kept", False],
                    [slot, "places", slot.places.put(*unmap.places.noted)],
                    [slot, "mapped", unmap.high],
                    [slot, "dirty", max(slot.dirty, unmap.dirty)],  # an owner may have ended since
                    [slot, "span", span + slot.span],
                )
                if slot.block:  # as far as is known
                    edits.append([slot, "whole", unmap.high - unmap.high % slot.block])
                pages, span, away = 0, EMPTY, {}
        if span.pages:
            edits += self.shared.using({}, {span: -1})
        self.journal.change([*edits, *self.freeing(pages, away)])
        self.drop_unheld()

    def _finish_slide(self, slide: Slide, timeout: float | None) -> None:
        """The same for the pages that left the windows of slots."""
        freed, slid, span, away = slide.pages, self.slid, slide.span, Counter(slide.away)
        uses: Counter[Span] = Counter()
        edits: list[list[Any]] = [
            [self, "unmaps", [one for one in self.unmaps if one is not slide]],
            [slide.slots, "job", [None] * len(slide.slots)],
            [self, "coming", self.coming - slide.pages],
        ]
        try:
            slide.ticket.wait(timeout)
        except Timeout:
            return
        except VMemError as error:
            if not slide.quiet:
                self.failed(None, error)
            pieces = list(zip(slide.slots, slide.lows, slide.heads, strict=True))
            if isinstance(error, NotRecoverable):
                self.mark_broken(pieces)
            span = EMPTY
            for (slot, low, head), owner, share in zip(
                pieces, slide.owners, slide.shares, strict=True
            ):
                if slot.broken:
                    span = span + share
                    continue
                # Undone: the pages are where they were.
                places = slot.places.put(*slide.places.get(slot, NOWHERE).noted)
                outside = places.away(low + share.pages, head)
                away.subtract(outside)
                freed -= head - low - share.pages - sum(outside.values())
                edits += ([slot, "head", low], [slot, "places", places])
                edits.append([slot, "span", share + slot.span])
                if slot.owner == owner:
                    slid -= head - low
                    uses[share] += 1
            edits.append([self, "slid", slid])
        edits += self.shared.using(uses, {span: -1} if span.pages else NOTHING)
        self.journal.change([*edits, *self.freeing(freed, away)])
        self.drop_unheld()

    def lend(self, span: Span) -> None:
        """Keeps these pages, whoever else lets them go, and no longer those of the call before."""
        before = self.shared.lent
        self.journal.change([[self.shared, "lent", span]])
        self.shared.hold(span)
        self.unref(before)

    def unref(self, span: Span) -> None:
        """Takes a reference to shared pages back; those without another go to the pool."""
        self.journal.change(self.shared.using({}, {span: -1}))
        self.drop_unheld()

    def drop_unheld(self) -> None:
        """Gives back shared pages that nobody holds; what cannot be now, the next call does."""
        for part in list(self.shared.unheld):
            pages, away = part.high - part.low, dict[Tier, int]()
            if part.block.away:
                pages, away = 0, {part.block.tier: pages}
            with suppress(OutOfMemory):
                self.shared.drop(part, self.freeing(pages, away))

    def freeing(
        self, pages: int, away: Mapping[Tier, int], *, reclaimed: bool = True
    ) -> list[list[Any]]:
        """The edits where pages per tensor, the device's and others', are the cache's no longer."""
        tensors, counters = self.layout.num_tensors, self.counters
        edits = [[self, "held", self.held - pages * tensors], [self, "own_away", None]]
        if away:
            others = self.away.copy()
            for tier, count in away.items():
                others[tier] -= count * tensors
            edits.append([self, "away", others])
        if reclaimed:
            gone = (pages + sum(away.values())) * tensors
            edits.append([counters, "reclaimed", counters.reclaimed + gone])
        return edits

    def mark_broken(self, pieces: list[Piece]) -> None:
        """Retires a slot in which an undo failed: it is never handed out again."""
        layout = self.layout
        for slot, low, high in pieces:
            for tensor in range(layout.num_tensors):
                at = slot.addr + layout.offset(0, low, tensor)
                end = at + (high - low) * layout.page_size
                while at < end and not slot.broken:
                    info = self.mapper.query(at)
                    if RangeFlags.QUARANTINED in info.flags:
                        self.table.mark_broken(slot)
                    at += info.run_bytes

    def salvage(self, slot: Slot) -> None:
        """Unmaps what is left of a freed request that lost its rows, after its GPU work.

        Raises:
            VMemError: it could not be unmapped; nothing changed.
        """
        layout = self.layout
        runs: list[tuple[int, int]] = []
        quarantined = False
        for tensor in range(layout.num_tensors):
            at = slot.addr + layout.offset(0, 0, tensor)
            end = at + slot.mapped * layout.page_size
            while at < end:
                info = self.mapper.query(at)
                size = min(info.run_bytes, end - at)
                if info.mapped:
                    runs.append((at, size))
                quarantined |= RangeFlags.QUARANTINED in info.flags
                at += size
        ops = OpBatch(len(runs) or 1)
        for at, size in runs:
            ops.unmap(at, size, split=True)
        span, first = slot.span, slot.shared
        own, away = slot.mapped - first, slot.places.away(first, slot.mapped)
        gone = {"span": EMPTY, "mapped": 0, "whole": 0, "head": 0, "dirty": 0, "lost": False}
        edits: list[list[Any]] = [[slot, name, value] for name, value in gone.items()]
        edits += ([slot, "broken", quarantined], [slot, "places", NOWHERE])
        edits += self.freeing(own - sum(away.values()), away)
        edits += self.shared.using({}, {span: -1})
        self.mapper.commit(edits, ops, slot.events)
        self.drop_unheld()

    def raise_errors(self) -> None:
        """Raises the oldest failure of a background batch, with the others as notes."""
        if not self.errors:
            return
        first, *others = self.errors
        self.errors.clear()
        if others:
            first.args = (
                f"{first}; and {len(others)} more background batches failed",
                *first.args[1:],
            )
        raise first

    # ---- choosing what goes ----------------------------------------------------------------------

    @property
    def free(self) -> int:
        """Physical pages that the cache could take now."""
        own = self.limit - self.held
        if self.share is None:
            return own
        return min(own, self.share.room() // self.layout.page_size)

    @property
    def outlook(self) -> int:
        """`free`, with what the budget might get from outside: compared with the watermark."""
        if self.share is None:
            return self.free
        room = self.share.room() + self.share.beyond()
        return min(self.limit - self.held, room // self.layout.page_size)

    @property
    def returning(self) -> int:
        """Physical pages in unmaps in flight."""
        return self.coming * self.layout.num_tensors

    @property
    def late(self) -> int:
        """Those of them that wait for GPU work."""
        waiting = (
            one.pages
            for one in self.unmaps
            if not one.done() and (isinstance(one, Slide) or prune(one.slot.events))
        )
        return sum(waiting) * self.layout.num_tensors

    def drop_mapping_errors(self) -> None:
        """Drops notes of background growths that lacked mappings: they were undone."""
        if self.errors:
            self.errors = [one for one in self.errors if not isinstance(one, TooManyMappings)]

    def make_room(
        self, pages: int, keep: Mapping[Slot, int], own: int = 0, prefixes: bool = True
    ) -> bool:
        """Brings up to `pages` physical pages back and waits for them; False when none came.

        Pages of slots go before recorded prefixes: they save a driver call, those a computation.
        The cache's own of each go before those of other caches of its budget. A prefix goes only
        when the slots have given all that they have and it is back: so which ones are evicted does
        not depend on how far the background is.

        Args:
            pages: physical pages.
            keep: slots that are to have at least so many pages per tensor.
            own: of `pages`, those that must be the cache's own, since it is at its ceiling.
            prefixes: evict some where the slots do not have enough.
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
                lent -= share.returning()  # all of it is back before the next turn
            if not any(one.unmaps for one in reclaimers):
                break
            with self.counters.waiting():
                wait_for_unmaps(reclaimers, lambda: self.room >= goal)
            if sum(len(one.errors) for one in reclaimers) > failed:
                break  # what could not be unmapped would be retried for ever
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
        """Physical pages of evicted prefixes that come back with slots that are being emptied."""
        return self.shared.leaving(self._going()) * self.layout.num_tensors

    def _going(self) -> list[Span]:
        """The shared pages that are being unmapped, or will be as soon as that can begin."""
        stale = [slot.span for slot in self.table.stale if not slot.kept]
        return [unmap.span for unmap in self.unmaps] + stale

    def begin_unmaps(self, pages: int, keep: Mapping[Slot, int], *, now: bool = True) -> None:
        """Begins to unmap until so many physical pages are on their way back.

        `now`: see `unmap`. What a slot has beyond an unmapping under way can be unmapped only after
        that: then less has begun than is enough.
        """
        self.release_stale(now=now)
        pending = self.returning
        if now and not self.table.lockstep:  # what waits for GPU work may come late
            late = self.late
            idle = (slot for slot in self.table.victims() if not slot.events)
            pending = late + self._begin_unmaps(idle, pages, pending - late, keep, now=now)
        self._begin_unmaps(self.table.victims(), pages, pending, keep, now=now)

    def _begin_unmaps(
        self,
        slots: Iterable[Slot],
        pages: int,
        pending: int,
        keep: Mapping[Slot, int],
        *,
        now: bool,
    ) -> int:
        """Begins to unmap until `pages`, of which `pending` are, are on their way back.

        Returns:
            How many are by then.
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
        """Pages per tensor that a slot loses, of those it can spare and those that are missing.

        A free one loses what it has of a block as a whole: that is 2 MiB for another request.
        """
        take = min(spare, missing)
        if self.block and not slot.active:
            take = min(spare, take + (slot.mapped - take) % self.block)
        return take

    @property
    def room(self) -> int:
        """Bytes that rise by what comes back; the cache's ceiling in a budget is left out."""
        if self.share is None:
            return (self.limit - self.held) * self.layout.page_size
        return self.share.room()

    def spare(self, keep: Mapping[Slot, int]) -> int:
        """Pages per tensor that no request owns, without those on their way back."""
        # What a slot keeps beyond an unmap in flight can be had too, once that is over.
        spare = self.table.columns.spare
        for slot in keep:
            job = slot.job
            if self.table.slots[slot.index] is not slot:
                continue  # another group's
            if slot.mapped == slot.granted or slot.lost or not (job is None or job.takes_pages):
                continue  # not counted
            spare += slot.spare_beyond(keep[slot]) - slot.spare_beyond(0)
        return spare + self.shared.pages - self.shared.used - self.leased()

    def obtainable(self, keep: Mapping[Slot, int]) -> int:
        """Physical pages that are free, on their way back, or could be taken back."""
        own = self.limit - self.held
        if self.share is not None:
            own = min(own, self.share.within_reach() // self.layout.page_size)
        return own + self.idle(keep)

    def idle(self, keep: Mapping[Slot, int]) -> int:
        """Physical pages of the cache that no request owns, with those on their way back."""
        return self.returning + self.spare(keep) * self.layout.num_tensors

    def release_below(self, free_pages: int) -> None:
        """Starts to unmap free slots until `free_pages` pages are free or on their way back."""
        missing = free_pages - self.outlook - self.returning
        tensors = self.layout.num_tensors
        if missing <= 0:
            return
        for slot in self.table.victims(active=False):
            take = self._share_of(slot, slot.spare, -(-missing // tensors))
            if take <= 0:
                continue
            if not self.try_unmap(slot, slot.mapped - take):
                return
            missing -= take * tensors
            if missing <= 0:
                return

    def release_before(self, step: int, prepared: Slot | None, keep: int) -> bool:
        """Starts to unmap slots that became free at `step` or before; False when some must wait.

        All their pages go, but `keep` per tensor of the slot that is prepared for the next request.
        """
        complete = True
        for slot in self.table.pick(Kind.CACHED):
            if slot.freed_at > step:  # so are all that follow
                break
            rest = keep if slot is prepared and not slot.stale else 0
            if slot.mapped > rest and not slot.broken:
                complete &= slot.job is None and self.try_unmap(slot, rest)
        return complete

    def release_stale(self, now: bool = False, kept: bool = False) -> bool:
        """Starts to unmap slots that have what an earlier owner shared; False when some must wait.

        `kept`: also of those that are kept.
        """
        complete = True
        for slot in self.table.stale:
            if kept or not slot.kept:
                complete &= slot.job is None and self.try_unmap(slot, 0, now)
        return complete

    def count_evicted(self, spans: Sequence[Span]) -> None:
        """Counts evicted pages, which the tree holds no more; `drop_unheld` must follow."""
        gone = sum(span.pages for span in spans) * self.layout.num_tensors
        edits = self.shared.using({}, dict.fromkeys(spans, -1))
        self.journal.change([*edits, [self.counters, "evicted", self.counters.evicted + gone]])

    def release_kept(self, *spans: Span) -> None:
        """Begins to unmap the kept slots that have pages of these, or `release_stale` does."""
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
        """Starts to unmap kept slots, the longest free first, until so many free ones are not kept.

        So that a request of another conversation finds one that it need not empty. False where some
        must wait.
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


def wait_for_unmaps(reclaimers: Sequence[Reclaimer], enough: Callable[[], bool]) -> None:
    """Waits until it is enough, or no unmap is left."""
    while not enough():
        pending = [(one, unmap) for one in reclaimers for unmap in one.unmaps]
        if not pending:
            return
        # Their GPU work may end in any order, so none is waited for alone.
        for one, unmap in pending:
            one._finish(unmap, None if len(pending) == 1 else _SLICE_S)
            if enough():
                return
