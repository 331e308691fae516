# SPDX-License-Identifier: MIT
"""One group of layers: its components, and how its slots are allocated, freed and shared."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from pyvmem._native import Kind, Outcome
from pyvmem.errors import NotRecoverable, NotSupported, OutOfMemory, TooManyBatches, VMemError
from pyvmem.features import require_page_size
from pyvmem.features.table import SPARSE
from pyvmem.kvcache.budget import Budget, available_bytes
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import prune, record
from pyvmem.kvcache.growth import Pager, grow
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.layout import BLOCK_BYTES, Layout
from pyvmem.kvcache.mapper import Mapper, Scratch
from pyvmem.kvcache.migration import Mover, Promoter
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_cache import PrefixCache
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.sharing import Sharing
from pyvmem.kvcache.slots import Growth, Piece, Slot, SlotTable
from pyvmem.kvcache.stats import Counters
from pyvmem.kvcache.window import Window
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.reservation import Reservation

__all__ = [
    "Group",
    "Loan",
    "free_on_abort",
    "lend",
    "make_layout",
    "open_context",
    "pool_low",
    "prepare",
]

_DEFAULT_GRANULE = 64 << 10
_MAX_READY = 256 << 20
_NEWCOMERS = 8  # one in this many slots keeps no prefix, so that new prompts find an empty slot


def make_layout(config: KVCacheConfig, context: Context) -> Layout:
    """Returns the layout of a group with this configuration, after checking the page size."""
    info = context.info
    page_size = config.page_size or info.granule
    require_page_size(info, page_size)
    return Layout(config, page_size, Caps.LARGE_ENTRIES in info.caps)


def open_context(configs: Sequence[KVCacheConfig], backend: str, **options: Any) -> Context:
    """Opens a context for groups of layers, with 2 MiB entries for small pages if possible.

    Args:
        configs: configurations of the groups.
        backend: name of the back end.
        options: further options of `Context`.
    """
    page_size = configs[0].page_size
    packed = [one for one in configs if one.packed_slots and not one.state]
    if not any(one.max_seq_len * one.row_bytes % BLOCK_BYTES for one in packed):
        with suppress(NotSupported):  # the back end may not support large entries
            return Context(backend, granule=page_size, large_entries=True, **options)
    return Context(backend, granule=page_size, **options)


def pool_low(config: KVCacheConfig) -> int:
    """Returns how many bytes the worker of an owned context keeps free in the pool.

    Free bytes in the pool save driver calls. The result is one page per tensor for an eighth of the
    slots, but at most 256 MiB and at most a sixteenth of the memory limit, since the memory is idle
    until a step needs it.
    """
    page_size = config.page_size or _DEFAULT_GRANULE
    tensors = config.tensors_per_layer * (config.num_layers // config.group_size)
    growth = config.max_batch * tensors * page_size // 8
    return min(growth, _MAX_READY, config.memory_limit // 16 or _MAX_READY)


def _limit_pages(layout: Layout, context: Context, budget: Budget | None) -> int:
    """Returns the maximum number of physical pages that a group may have."""
    config = layout.config
    everything = layout.slot_pages * layout.num_tensors * config.max_batch
    if not config.memory_limit:
        available = available_bytes(context) if budget is None else budget.total_bytes
        return min(everything, available // layout.page_size)
    if config.memory_limit < layout.page_bytes:
        raise invalid(
            f"memory_limit {config.memory_limit} is less than one page of {layout.page_size} "
            f"bytes in each of {layout.num_tensors} tensors ({layout.page_bytes} bytes)",
            size=config.memory_limit,
            limit=layout.page_bytes,
        )
    return config.memory_limit // layout.page_size


class Group:
    """One group of a cache's layers, all of the same shape.

    Not thread-safe: the caller holds the cache's lock.

    Attributes:
        layout: offsets of slots, tensors and rows.
        context: allocates the pages.
        reservation: addresses of all tensors.
        device: CUDA ordinal; None if the pages are CPU memory.
        used_tokens: number of rows that all slots together hold.
        token_bytes, page_bytes: size in bytes of one token's rows and of one page, over all
            tensors.
        clock: number of completed steps.
        mover: replaces pages with copies, possibly in other memory, at the same addresses.
        prefixes: recorded prefixes, shared by all groups of the cache.
        place: index of the group in the cache.
        promoter: copies pages into 2 MiB blocks; None if the layout has no such blocks, or if the
            layers have a window or a state.
        window: unmaps pages that leave the sliding window; None: no window.
        reclaim_due: True if the next step must call `reclaim_idle`.
        unprepared: True if the next step must call `prepare`.
        named: True if any length in the last step was above 0, so that GPU work may be using a
            request; set only in the first group.
        idle_step_work: if not `named`, events of earlier GPU work that may still be running.
    """

    def __init__(
        self,
        layout: Layout,
        context: Context,
        journal: Journal,
        budget: Budget | None,
        table: type[SlotTable],
        prefixes: PrefixCache,
        place: int,
        ops: OpBatch,
    ) -> None:
        self.config = config = layout.config
        self.layout = layout
        self.context = context
        self.journal = journal
        limit = _limit_pages(layout, context, budget)
        if config.sparse:
            SPARSE.require(context.info, f"sparse, with pages of {context.info.granule} bytes")
        self.reservation = reservation = Reservation(context, Outcome())
        journal.unrecorded[reservation] = None
        # The default alignment is 2 MiB; larger pages need more.
        align = max(layout.page_size, BLOCK_BYTES)
        context.reserve(layout.total_bytes, into=reservation, sparse=config.sparse, align=align)
        self.mapper = Mapper(context, journal)
        self.device = context.cuda_device
        self.counters = Counters(context)
        base, stride = reservation.addr, layout.slot_bytes
        self.table = table(config.max_batch, journal, base, stride, layout.block)
        self.reclaimer = Reclaimer(
            self.mapper,
            layout,
            self.table,
            limit,
            self.counters,
            partial(prefixes.evict, place),
            partial(prefixes.leased, place),
        )
        self.scratch = Scratch(self.mapper, layout.page_size)
        self.mover = Mover(self.reclaimer, self.scratch, self.device)
        self.pager = Pager(self.reclaimer, self.mover, config, ops)
        self.sharing = Sharing(self.pager, self.scratch, prefixes.unit_pages[place])
        self.promoter = self.window = None
        if layout.block and not (layout.state or config.window):
            self.promoter = Promoter(self.reclaimer, self.mover, config)
        if config.window:
            release = self.pager.release
            unit = prefixes.unit if prefixes.records else 1
            self.window = Window(self.reclaimer, self.mover, config, unit, release, ops)
        self.prefixes, self.place = prefixes, place
        prefixes.join(self.sharing, self.window)
        # For each slot, its owner and the number of pages per tensor that `step_async` left for a
        # later call.
        self.left: dict[Slot, tuple[int, int]] = {}
        self.named = False
        self.idle_step_work: list[Any] = []
        self.used_tokens = 0
        self.clock = 0
        self.reclaim_due = config.reclaim_steps > 0
        self.unprepared = False
        self.token_bytes = layout.row_bytes * layout.num_tensors
        self.page_bytes = layout.page_bytes
        self._eager_pages = min(config.eager_pages, layout.slot_pages)
        self._newcomers = max(1, config.max_batch // _NEWCOMERS)
        self._prepared: Slot | None = None
        made = [journal.unrecorded, reservation, ...]
        journal.change([made, [journal, "recoverables", [*journal.recoverables, self]]])

    # ---- recovery after an asynchronous exception ------------------------------------------------

    def owns(self, made: object) -> bool:
        """Returns whether a reservation belongs to the group."""
        return made is self.reservation or self.scratch.owns(made) or self.mover.owns(made)

    def failed(self, error: VMemError) -> None:
        """See `Recoverable.failed`."""
        self.reclaimer.errors.append(error)

    # ---- callers' arguments ----------------------------------------------------------------------

    def slot(self, reqid: int, *, taken: bool = True) -> Slot:
        """Returns the slot `reqid`.

        Raises InvalidArgument if there is no such slot or, with `taken`, if it is free.
        """
        slots, index = self.table.slots, operator.index(reqid)
        if not 0 <= index < len(slots):
            last = len(slots) - 1
            raise invalid(f"reqid {index} is not between 0 and {last}", limit=last)
        slot = slots[index]
        if taken and not slot.active:
            raise invalid(f"reqid {index} is not taken")
        return slot

    def free_slot(self, reqid: int) -> Slot:
        """Returns the slot `reqid`; raises InvalidArgument unless it is free."""
        slot = self.slot(reqid, taken=False)
        if slot.active:
            raise invalid(f"reqid {slot.index} is taken")
        if slot.broken:
            raise invalid(f"reqid {slot.index} is retired: a failed batch was not rolled back")
        return slot

    def fit(self, seq_len: int) -> Slot | None:
        """Returns a free slot for a request of `seq_len` tokens (0: unknown), or None."""
        length, longest = operator.index(seq_len), self.config.max_seq_len
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_len {length} is not between 0 and max_seq_len {longest}", limit=longest
            )
        pages = self.layout.pages_for_step(0, length)
        return self.table.best_fit(pages or max(1, self._eager_pages))

    def check_back(self, slot: Slot, length: int) -> None:
        """Raises InvalidArgument if a request cannot be truncated to `length` tokens."""
        if self.window is not None:
            self.window.check(slot, length)
        held = self.pager.columns.held_rows[slot.index]
        if self.layout.state and 0 < length < held:
            raise invalid(
                f"length {length}: the state of reqid {slot.index}, of {held} tokens, cannot be "
                "truncated; recompute the request from its first token",
                limit=held,
            )

    def take(self, slot: Slot) -> None:
        """Gives a free slot to a new owner; the slot is freed again if the current call fails."""
        free_on_abort([(self, slot, slot.owner)])
        self.table.take(slot)

    def activity(self) -> tuple[int, int, int, int]:
        """Returns a value that changes with every call that allocates, frees or steps a request."""
        counters = self.counters
        return self.clock, counters.steps_async, counters.short, self.table.changes

    def record_idle_step(self, stream: Any) -> None:
        """Records that no length in the last step was above 0.

        `stream` is the stream of the GPU work before that step.
        """
        event = record(stream, self.device) if any(slot.active for slot in self.table) else None
        self.idle_step_work = [] if event is None else [event]
        self.named = False

    def release(self, slot: Slot, event: Any) -> None:
        """Frees a slot, without unmapping its pages; `reclaim_idle` does that.

        `event` is the GPU work that may still touch the slot, or None if that is complete.
        """
        if self.mover.moves:
            self.mover.abandon(slot)
        edits = [*self.enter_edits(slot, 0), [self.reclaimer, "own_off_device", None]]
        if slot.pins:
            edits += self.prefixes.slot_pin_edits(slot, [])
        if self.promoter is not None:
            edits += self.promoter.forget_edits(slot)
        if slot.granted:
            edits += self.pager.grant_edits([(slot, 0)])
        if self.window is not None:
            edits += self.window.forget_edits(slot)
        if slot.span.pages and not slot.stale:
            edits += self.reclaimer.shared.use_edits({slot.span: -1})
        stale = (slot.span.pages or slot.head or slot.tier_map.noted) and not slot.rows_lost
        if stale or not self.config.deferred_reclaim:
            edits.append([self, "reclaim_due", True])
        self.table.give_back(slot, event, self.clock, edits)

    def enter_edits(self, slot: Slot, length: int) -> list[list[Any]]:
        """Returns the edits that set a slot's row count to `length` outside a `step`."""
        rows, index = self.pager.columns.held_rows, slot.index
        used = self.used_tokens + length - rows[index]
        return [[self, "used_tokens", used], [rows, index, length]]

    def enter(self, slot: Slot, length: int) -> None:
        """Sets a slot's row count to `length` outside a `step`."""
        self.journal.change(self.enter_edits(slot, length))

    def disown_edits(
        self, slot: Slot, keep: int, event: Any, *, written: bool = True
    ) -> list[list[Any]]:
        """Returns the edits that reduce a request to its first `keep` pages; all stay mapped.

        Args:
            slot: the request's slot.
            keep: number of pages per tensor to keep.
            event: GPU work that may still touch the other pages; None if complete.
            written: mark the other pages as dirty.
        """
        edits = [*self.pager.grant_edits([(slot, keep)]), [self.reclaimer, "own_off_device", None]]
        if written:
            edits.append([slot, "dirty", max(slot.dirty, slot.granted)])
        if event is not None:
            edits.append([slot, "events", [*prune(slot.events), event]])
        return edits

    def disown_beyond(self, slot: Slot, length: int, event: Any) -> None:
        """Reduces a request to its first `length` rows and their pages.

        `event` is the GPU work that may still touch the other pages. The slot must have no batch in
        flight.
        """
        pages = -(-self.layout.bytes_for(length) // self.layout.page_size)
        keep, edits = max(pages, slot.shared), self.enter_edits(slot, length)
        if slot.granted > keep:
            edits += self.disown_edits(slot, keep, event)
        self.journal.change(edits)

    @property
    def rows(self) -> array[int]:
        """The number of rows (in tokens) that each slot holds; 0 for free slots.

        A request starts with the rows of its prefix, parent or swapped request, if any. Only steps
        add rows; apart from undone calls, only `truncate` and the end of the request remove them.
        """
        return self.pager.columns.held_rows

    def readable_rows(self, reqids: Sequence[int]) -> list[int]:
        """See `CacheSlots.readable_rows`."""
        size, row, most = self.layout.page_size, self.layout.row_bytes, self.layout.max_rows
        if self.layout.state:
            return [self.layout.capacity(slot.granted) for slot in self._slots(reqids)]
        return [min(slot.granted * size // row, most) for slot in self._slots(reqids)]

    def first_rows(self, reqids: Sequence[int]) -> list[int]:
        """See `CacheSlots.first_rows`."""
        size, row = self.layout.page_size, self.layout.row_bytes
        # A head beyond the granted pages belonged to an earlier owner, whose pages are unmapped
        # before this owner gets its first row.
        heads = [slot.head if slot.head <= slot.granted else 0 for slot in self._slots(reqids)]
        return [-(-head * size // row) for head in heads]

    def _slots(self, reqids: Sequence[int]) -> list[Slot]:
        """Returns slots by index; raises InvalidArgument for a reqid that does not exist."""
        return [self.slot(reqid, taken=False) for reqid in reqids]

    # ---- totals over the records -----------------------------------------------------------------

    def note_use(self) -> tuple[int, int]:
        """Updates peak use and peak waste, and returns how much requests use now.

        Returns:
            The number of physical device pages that requests own, and the size in bytes of the rows
            in these pages. Shared rows count once; rows that left a window do not count.
        """
        reclaimer, shared, layout = self.reclaimer, self.reclaimer.shared, self.layout
        off_device, elsewhere = 0, 0
        if any(reclaimer.off_device.values()):
            if reclaimer.own_off_device is None:  # rebuild the list only if it may have changed
                reclaimer.own_off_device = self.own_off_device()
            for slot, low, high in reclaimer.own_off_device:
                off_device += high - low
                start, end = low * layout.page_size, layout.bytes_for(self.rows[slot.index])
                elsewhere += max(0, min(high * layout.page_size, end) - start)
        # Shared pages count once; pages that are off the device or before a window do not count.
        less = reclaimer.slid + shared.uses + shared.off_device_uses - shared.used
        pages = self.pager.granted_pages - less - off_device
        # Rows of all requests: one per token or, with a state, one per request.
        rows = sum(map(bool, self.rows)) if layout.state else self.used_tokens
        away = elsewhere * layout.num_tensors + less * self.page_bytes
        used = max(0, rows * self.token_bytes - away)
        if shared.used or shared.off_device_uses:
            used = min(used, pages * self.page_bytes)
        counters, wasted = self.counters, pages * self.page_bytes - used
        if used > counters.peak_used:
            counters.peak_used = used
        if wasted > counters.peak_wasted:
            counters.peak_wasted = wasted
        return pages * layout.num_tensors, used

    def own_off_device(self) -> list[Piece]:
        """Returns the unshared off-device pages that requests own."""
        return [
            (slot, low, high)
            for slot in self.table
            if slot.active and slot.tier_map.noted
            for low, high, _ in slot.tier_map.within(slot.shared, slot.granted).noted
        ]

    # ---- mapping shared pages in more slots ------------------------------------------------------

    def lend_edits(self, loans: Sequence[Loan]) -> list[list[Any]]:
        """Returns the edits that start a request in each loan's slot, with its shared pages."""
        reclaimer, table, pager = self.reclaimer, self.table, self.pager
        uses: dict[Span, int] = {}
        holds: dict[Span, int] = {}
        granted, slid = pager.granted_pages, reclaimer.slid
        edits: list[list[Any]] = []
        for _, slot, span, head in loans:
            have, end = slot.span.pages, head + span.pages
            more = span.slice(have, span.pages) if have else span
            uses[span] = uses.get(span, 0) + 1
            holds[more] = holds.get(more, 0) + 1
            granted += end
            if head and self.window is not None:
                edits += self.window.begin_edits(slot, head)
            slid += head
            edits += (
                [slot, "active", True],
                [slot, "kept", False],
                [slot, "owner", slot.owner + 1],
                [slot, "span", span],
                [slot, "mapped", end],
                [slot, "granted", end],
                [slot, "dirty", 0],
                [slot, "head", head],
            )
            if slot.block:
                edits.append([slot, "large_end", slot.large_end_with(head, end, slot.large_end)])
            for block, *_ in span.parts:
                if slot.tier_map.noted or block.off_device:
                    edits.append([slot, "tier_map", slot.tier_map.put(*span.stretches(head))])
                    break
            edits.append([pager.capacity, slot.index, self.layout.capacity(end)])
        table.changes += len(loans)
        return [
            *edits,
            [pager, "granted_pages", granted],
            [reclaimer, "slid", slid],
            *reclaimer.shared.use_edits(uses, holds),
        ]

    def keep(self, slot: Slot, first: int) -> None:
        """Keeps a freed slot's shared pages mapped, read-only, for a later request.

        That request must begin with the rows that these pages hold. Does nothing with several
        ranks, whose timing differs; if `deferred_reclaim` or `keep_mapped` is off; if the slot has
        a batch in flight, lost rows or off-device pages; or if more than half of the mappings are
        in use.

        Args:
            slot: a slot freed in this call, whose shared pages are recorded.
            first: index of the first page that was unshared until now and is still writable.
        """
        runs, span = self.pager.runs, slot.span
        if (
            self.table.lockstep
            or not self.config.deferred_reclaim
            or not self.config.keep_mapped
            or slot.job is not None
            or slot.rows_lost
            or not span.pages
            or slot.tier_map.noted
            or (runs.limit and 2 * runs.used > runs.limit)
        ):
            return
        own = span.slice(first - slot.head, span.pages)
        ops = OpBatch(len(own.parts) + 1)
        self.sharing.map_parts(ops, slot, own.parts, first, replace=True)
        self.reclaimer.try_keep(slot, ops)

    # ---- housekeeping ----------------------------------------------------------------------------

    def reclaim_idle(self) -> None:
        """Starts unmapping pages of free slots that the policy (`KVCacheConfig`) does not keep."""
        reclaimer, config = self.reclaimer, self.config
        self.reclaim_due = True  # in case an exception interrupts this call
        due = not reclaimer.release_stale()
        if config.reclaim_steps or not config.deferred_reclaim:
            age = config.reclaim_steps if config.deferred_reclaim else 0
            before, pages = self.clock - age, self._eager_pages
            complete = reclaimer.release_before(before, self._prepared, pages)
            due = due or age > 0 or not complete
        self.reclaim_due = due
        left = reclaimer.limit - reclaimer.device_pages
        if reclaimer.share is not None or left < reclaimer.watermark * reclaimer.limit:
            reclaimer.keep_watermark()

    def close(self, stream: Any) -> None:
        """Waits for all batches, then frees the pages and the reservation; may be called again."""
        event = record(stream, self.device) if any(slot.active for slot in self.table) else None
        self.mover.close()
        for slot in self.table:
            with suppress(VMemError):  # the growth failed and was rolled back
                self.pager.release(slot)
            if slot.active:
                self.release(slot, event)
        # Submit one batch per slot; the worker runs each of them after that slot's GPU work.
        for slot in self.table:
            if slot.mapped and not slot.rows_lost and not self.reclaimer.try_unmap(slot, 0):
                self.reclaimer.finish_all()
                self.reclaimer.try_unmap(slot, 0)
        self.reclaimer.finish_all()
        self.reclaimer.shared.close()
        self.scratch.close()
        try:
            self.reservation.abandon()
        except NotRecoverable:
            # Quarantined pages occupy their addresses until the context is closed.
            self.reservation.leave()
        if self in self.journal.recoverables:
            self.journal.recoverables.remove(self)


def prepare(groups: Sequence[Group]) -> None:
    """Keeps slots ready for new requests.

    While memory is ample, this maps `eager_pages` pages per tensor in one slot. Growth that
    requests wait for has priority, except with several ranks, whose results must not depend on the
    progress of background batches.
    """
    wants, taken = [], 0
    for group in groups:
        table, reclaimer, pages = group.table, group.reclaimer, group._eager_pages
        group.unprepared = True  # in case an exception interrupts this call
        # Slots with kept prefixes are also stale.
        stale = table.columns.count(Kind.STALE, Kind.ROWS_LOST)
        few = stale and table.free_count < group._newcomers + stale
        waits = bool(few) and not reclaimer.spare_slots(group._newcomers)
        if pages:
            group.pager.poll()
            group._prepared = slot = table.to_prepare(pages)
            if slot is not None and slot.mapped < pages:
                new, size = taken + (pages - slot.mapped) * group.page_bytes, group.layout.page_size
                if group.pager.growths and not table.lockstep:
                    waits = True
                elif reclaimer.projected_free - new // size >= reclaimer.low_pages:
                    wants.append((group.pager, [(slot, pages)]))
                    taken = new
        group.unprepared = waits
    if wants:
        try:
            grow(wants, background=True, reclaim=False)
        except (TooManyBatches, OutOfMemory):  # the next call retries
            pass
        except VMemError as error:  # raised by the next step: the caller already has its slots
            groups[0].reclaimer.errors.append(error)


class Loan(NamedTuple):
    """Shared pages that a new request will begin with.

    Attributes:
        group: the slot's group.
        slot: a free slot without pages, or with the first pages of `span` mapped.
        span: the shared pages.
        head: page of the slot at which `span` begins.
    """

    group: Group
    slot: Slot
    span: Span
    head: int


def free_on_abort(taken: Sequence[tuple[Group, Slot, int]]) -> None:
    """Makes the journal free the slots that the current call is about to allocate, should it fail.

    Freeing waits for the slots' batches. `taken` lists the slots, each with its owner number before
    the call.
    """

    def free() -> None:
        found = [one for one in taken if one[1].active and one[1].owner == one[2] + 1]
        for group, slot, _ in found:
            if isinstance(slot.job, Growth):
                with suppress(VMemError):
                    group.pager.release(slot)
            group.release(slot, None)
        for group, slot, _ in found:
            with suppress(VMemError):
                group.pager.release(slot)

    taken[0][0].journal.on_abort(free)


def lend(loans: Sequence[Loan]) -> None:
    """Allocates slots and maps shared pages in them, in one all-or-nothing batch for all groups.

    Raises:
        NotRecoverable: a rollback failed. VMemError: nothing has changed.
    """
    first, parts = loans[0].group, 1
    missing, taken = [], []
    for group, slot, span, head in loans:
        have = slot.span.pages
        taken.append((group, slot, slot.owner))
        if have < span.pages:
            more = span.slice(have, span.pages) if have else span
            missing.append((group, slot, more, head + have))
            parts += len(more.parts)
    ops = OpBatch(parts)
    for group, slot, more, page in missing:
        group.sharing.map_parts(ops, slot, more.parts, page)
    edits: list[list[Any]] = []
    by_group: dict[Group, list[Loan]] = {}
    for loan in loans:
        by_group.setdefault(loan.group, []).append(loan)
    free_on_abort(taken)
    for group, own in by_group.items():
        edits += group.lend_edits(own)
    try:
        if missing:
            first.mapper.commit(edits, ops)
        else:
            first.journal.change(edits)
    except NotRecoverable:
        for group, slot, more, page in missing:
            group.reclaimer.mark_broken([(slot, page, page + more.pages)])
        raise
