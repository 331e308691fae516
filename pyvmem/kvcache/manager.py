# SPDX-License-Identifier: MIT
"""The groups of layers of a cache, and what is done for requests in all of them or in none.

A cache of equal layers has one group. Each call takes the `Manager`'s lock and journal, asks it for
the groups and hands them to a function, here or in swap.py, truncate.py and idle.py.
"""

from __future__ import annotations

import errno
import logging
import operator
import threading
from array import array
from collections.abc import Collection, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.context import Context
from pyvmem.errors import BadHandle, Busy, OutOfMemory, TooManyMappings, VMemError
from pyvmem.features.table import FORK, HOST_PAGES, PEER_PAGES
from pyvmem.info import Location
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.group import Group, make_parts, pool_low
from pyvmem.kvcache.growth import Source
from pyvmem.kvcache.journal import Journal, put
from pyvmem.kvcache.pages import DEVICE, Kind, Span, Stretch, Tier
from pyvmem.kvcache.prefix_cache import PrefixCache, PrefixMatch
from pyvmem.kvcache.slots import Growth, Move, Slot, SlotTable
from pyvmem.logs import warn
from pyvmem.streams import device_ordinal

if TYPE_CHECKING:
    from pyvmem.kvcache.prefix_tree import Node

__all__ = [
    "Manager",
    "Moved",
    "alloc",
    "alloc_prefix",
    "can_admit",
    "claim",
    "fork_all",
    "free",
    "free_pages",
    "grow",
    "is_ready",
    "make_free_alike",
    "missing",
    "move",
    "obtainable",
    "promote",
    "reclaim_free",
    "step",
    "step_async",
    "tier_of",
]

_Want = list[tuple[Slot, int]]

_log = logging.getLogger(__name__)


class Manager:
    """The groups of layers of one cache, which have the same requests, and their lock.

    Args:
        name: of the cache's class, for errors.
        whole: the policy, and the memory of all groups together.
        configs: one for each group, without memory of its own: they share a budget. None: there is
            one group, of `whole`.
        context: to be used; None: the budget's, or one is opened and owned.
        backend: of an owned context.
        device: of an owned context.
        budget: to be shared with other caches; None: what several groups share is made here.
        table: how slots are chosen.

    Attributes:
        groups: all share the context, the lock and the journal.
        lock: to be held by a call, and
        journal: entered, in this order.
        owns_context: it is closed with the cache.
        closed: for good.
    """

    def __init__(
        self,
        name: str,
        whole: KVCacheConfig,
        configs: Sequence[KVCacheConfig] | None,
        context: Context | None,
        backend: str,
        device: Any,
        budget: Budget | None,
        table: type[SlotTable] = SlotTable,
    ) -> None:
        _check_memory(whole, configs is not None, context, budget)
        self.closed = self._closing = False
        self._name = name
        self.owns_context = context is None and budget is None
        each = [whole] if configs is None else list(configs)
        with ExitStack() as undo:
            if budget is not None:
                context = budget.context
            elif context is None:
                context = Context(
                    backend,
                    device=device,
                    granule=whole.page_size,
                    pool_low=sum(map(pool_low, each)),
                    max_mappings=whole.max_mappings,
                )
                undo.callback(context.close)
            if budget is None and configs is not None:
                budget = Budget(context, whole.memory_limit)
            self.context, self.budget = context, budget
            self.lock: AbstractContextManager[Any] = (
                threading.RLock() if budget is None else budget.lock
            )
            self.journal = Journal() if budget is None else budget.journal
            self.groups: tuple[Group, ...] = ()
            with self.lock, self.journal:
                self.journal.on_abort(self._give_back)
                try:
                    self._make(each, table)
                except VMemError:
                    self._give_back()
                    raise
            undo.pop_all()

    def _make(self, configs: Sequence[KVCacheConfig], table: type[SlotTable]) -> None:
        budget, journal = self.budget, self.journal
        parts = [make_parts(config, self.context, journal, budget) for config in configs]
        layouts = [one.layout for one in parts]
        if budget is not None:
            least = sum(one.page_size * one.num_tensors for one in layouts)
            if len(configs) > 1 and budget.total_bytes < least:
                raise invalid(
                    f"{budget.total_bytes} bytes are less than one page in every tensor, {least}",
                    size=budget.total_bytes,
                    limit=least,
                )
        prefixes = PrefixCache(layouts, journal, lockstep=table.lockstep)
        for place, (config, one) in enumerate(zip(configs, parts, strict=True)):
            self.groups += (Group(config, one, journal, table, prefixes, place),)
        if budget is not None:
            for group in self.groups:
                budget.join(group.pager, group.config.memory_floor)
        for group in self.groups:
            group.prepare()

    def open(self) -> tuple[Group, ...]:
        """The groups, for a call that holds the lock.

        Raises:
            BadHandle: the cache or its context is closed. ForkedProcess: it is the parent's.
        """
        if self.closed or self._closing:
            state = "closed"
            if not self.closed:
                state = "half closed: an exception ended its close, call that again"
            raise BadHandle(f"the {self._name} is {state}", errno=errno.EBADF, op=self._name)
        if not self.context.is_open:
            self.context.stats()  # raises what is wrong: closed, or of the parent of a fork
        return self.groups

    def close(self, stream: Any = None) -> None:
        """Gives everything back, for a call that holds the lock; again: nothing.

        Raises:
            Busy: tensors live; nothing changed.
        """
        if self.closed:
            return
        living = [one for one in self.groups if one.parts.reservation.live_arrays]
        if living and self.context.is_open:
            reservation = living[0].parts.reservation
            count = sum(one.parts.reservation.live_arrays for one in living)
            raise Busy(
                f"{count} tensors of the cache live; drop them before it is closed",
                errno=errno.EBUSY,
                op=f"{self._name}.close",
                addr=reservation.addr,
                bytes=reservation.nbytes,
            )
        self._closing = True
        self._give_back(stream)
        self.closed = True

    def _give_back(self, stream: Any = None) -> None:
        """May be repeated."""
        if self.context.is_open:  # else everything went with it, or is the parent's
            for group in self.groups:
                group.close(stream)
        if self.budget is not None:
            for group in self.groups:
                self.budget.leave(group.pager)
        if self.owns_context and self.context.is_open:
            self.context.close()


def _check_memory(
    whole: KVCacheConfig, several: bool, context: Context | None, budget: Budget | None
) -> None:
    """Raises InvalidArgument where memory is told twice, or told of nothing."""
    if whole.max_mappings and (context is not None or budget is not None):
        raise invalid(f"max_mappings {whole.max_mappings}: the context is given, and has its own")
    if budget is None:
        if whole.memory_floor:
            raise invalid(f"memory_floor {whole.memory_floor}: the cache has no budget")
        return
    if several and (whole.memory_limit or whole.memory_floor):
        raise invalid("memory_limit and memory_floor are of the whole; the budget is given")
    if context is not None and context is not budget.context:
        raise invalid(f"{context!r} is not the budget's context, {budget.context!r}")


# ---- slots ---------------------------------------------------------------------------------------


def make_free_alike(groups: Sequence[Group]) -> None:
    """Notes what is free by now; a slot that a failure broke in one group is none's."""
    for group in groups:
        if group.reclaimer.cuts:
            group.reclaimer.poll()
        if group.pager.growths:
            group.pager.poll()
    if len(groups) > 1 and len({len(group.table.free) for group in groups}) > 1:
        broken = {slot.index for group in groups for slot in group.table if slot.broken}
        for group in groups:
            for index in broken:
                group.table.condemn(group.table[index])


def alloc(groups: Sequence[Group], seq_len: int) -> int | None:
    """See `KVCache.alloc_reqid`: the slot that fits the first group best, in all of them."""
    make_free_alike(groups)
    found = groups[0].fit(seq_len)
    if found is None:
        return None
    for group in groups:
        group.take(group.table[found.index])
    for group in groups:
        group.prepare()
    return found.index


def claim(groups: Sequence[Group], reqid: int) -> None:
    """See `KVCache.claim`."""
    make_free_alike(groups)
    for group, slot in [(group, group.free_slot(reqid)) for group in groups]:
        group.take(slot)
    for group in groups:
        group.prepare()


def free(
    groups: Sequence[Group], reqid: int, stream: Any, tokens: Any, namespace: Hashable
) -> None:
    """See `KVCache.free_reqid`."""
    slots = [group.slot(reqid) for group in groups]
    event = record(stream, groups[0].device)
    first = [slot.shared for slot in slots]
    goes_on = tokens is not None and groups[0].prefixes.record_last(
        slots[0], tokens, event, namespace
    )
    for group, slot in zip(groups, slots, strict=True):
        group.mover.abandon(slot)
    for group, slot in zip(groups, slots, strict=True):
        group.release(slot, event)
    if goes_on:
        for group, slot, pages in zip(groups, slots, first, strict=True):
            group.keep(slot, pages)
    for group in groups:
        group.prepare()
        group.tidy()


def reclaim_free(groups: Sequence[Group], keep: Collection[int], *, wait: bool) -> None:
    """See `KVCache.reclaim_free`."""
    for group in groups:
        group.reclaimer.poll()
        for slot in group.table.free:
            if slot.index in keep:
                continue
            if wait:
                group.pager.release(slot)
            if slot.mapped and slot.job is None:
                group.reclaimer.try_cut(slot, 0, now=wait)
    if wait:
        for group in groups:
            group.reclaimer.finish_all()
        for group in groups:
            group.reclaimer.raise_errors()


# ---- steps ---------------------------------------------------------------------------------------


def step(groups: Sequence[Group], seq_lens: Sequence[int], stream: Any) -> int:
    """`KVCache.step` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    try:
        for group in groups:
            rows, total, short = _begin(group, seq_lens, stream)
            begun.append((group, rows, total, short))
            lacking = lacking or bool(short)
        if lacking:
            done = len(groups) == 1 and group.pager.extend(background=False)
            if not done and not _grow_for(begun, stream):
                _note_short(groups)
                return -1
            for group in groups:
                own = group.reclaimer
                if own.share is not None or own.limit - own.held < own.watermark * own.limit:
                    group.keep_watermark()
    except TooManyMappings:
        if groups[0].table.lockstep:  # the other ranks do not know
            raise
        _note_crowded(groups)
        return -1
    # What calls the context comes before or after the rows of all groups: a call in between, and
    # an interruption behind it, would leave some groups with the new rows and some with the old.
    for group, rows, _, _ in begun:
        if group.moves_on:
            _move_on(group, rows, stream)
        if group.pager.runs.joins:
            group.pager.runs.step(stream)
    for group, rows, total, _ in begun:
        _commit(group, rows, total)
    for group in groups:
        if group.table.lockstep:
            group.prefixes.leases.end_all()  # a collector must not decide when they end
        if group.untidy:
            group.tidy()
    return 0


def step_async(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """`KVCache.step_async` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    for group in groups:
        _, _, short = group.pager.scan(seq_lens)
        if group.reclaimer.cuts:
            group.reclaimer.poll()
        begun.append((group, short))
        lacking = lacking or bool(short)
    if lacking and not _begin_growing(begun):
        _note_short(groups)
        return -1
    for group, short in begun:
        own = group.reclaimer
        scarce = own.share is not None or own.limit - own.held < own.watermark * own.limit
        if short and scarce:
            group.keep_watermark()
        group.counters.steps_async += 1
    return 0


# ---- the parts of a step -------------------------------------------------------------------------


def _begin(group: Group, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, list[int]]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and the slots that lack pages.
    """
    pager, reclaimer = group.pager, group.reclaimer
    rows, total, short = pager.scan(seq_lens)
    group.counters.waits.struct.last_ns = 0
    if pager.growths:
        _settle(group, stream)
        if short:
            rows, total, short = pager.scan(seq_lens)
    if group.mover.moves or group.mover.given_up:
        group.mover.step(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, short


def _grow_for(begun: Sequence[tuple[Group, array[int], int, list[int]]], stream: Any) -> bool:
    """Gives slots that are short their pages, in all groups or in none."""
    wants = [(group, group.pager.wants(short)) for group, *_, short in begun]
    if not grow(wants, background=False):
        return False
    for group, _ in wants:
        _settle(group, stream)
    return True


def _settle(group: Group, stream: Any) -> None:
    """Waits for the growths that the step needs; ranks wait for all, as one."""
    group.pager.settle(stream, lens=None if group.table.lockstep else group.pager.columns.needs)


def _begin_growing(begun: Sequence[tuple[Group, list[int]]]) -> bool:
    """Begins to give slots that are short their pages, in all groups or in none."""
    group = begun[0][0]
    busy = group.pager.growths or group.reclaimer.cuts
    if len(begun) == 1 and not busy and group.pager.extend(background=True):
        return True
    wants = [(group, _not_promised(group, group.pager.wants(short))) for group, short in begun]
    if len(wants) == 1 and not group.table.lockstep:
        want, reclaimer = wants[0][1], group.reclaimer
        missing = _lacking(group, want) - reclaimer.free
        if missing > 0 and reclaimer.bring_back(missing, dict(want)):
            return True  # a later call begins the growth, or `step` waits for the pages
    return grow(wants, background=True)


def _lacking(group: Group, want: _Want) -> int:
    """Physical pages that are to be mapped."""
    pages = sum([count - slot.mapped for slot, count in want if count > slot.mapped])
    return pages * group.layout.num_tensors


def _not_promised(group: Group, want: _Want) -> _Want:
    """What no growth under way will give, but for what must be waited for."""
    pager = group.pager
    if want and not group.table.lockstep:
        # What an earlier owner's GPU work holds up is left to `step`, which must wait for it.
        want = [(slot, pages) for slot, pages in want if not _is_left(group, slot)]
    if want and (pager.growths or group.reclaimer.cuts):
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return want


def _is_left(group: Group, slot: Slot) -> bool:
    """Whether a slot can only grow after a wait, be it for a map call that the request began."""
    job = slot.job
    if isinstance(job, Growth) and job.filling is None and not job.handover:
        mine = any(one is slot and owner == slot.owner for one, owner, _ in job.grants)
        return not mine and not job.done()
    return group.pager.is_held_up(slot)


def _grow(group: Group, want: _Want, *, background: bool, tentative: bool = False) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them."""
    pager, reclaimer = group.pager, group.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = _lacking(group, want)
    if lacking > reclaimer.free and not pager.can_have(lacking, dict(want)):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative)


def grow(wants: Sequence[tuple[Group, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several groups their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if len(wants) == 1:
        group, want = wants[0]
        return not want or _grow(group, want, background=background)
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another group cannot take meanwhile.
    cut = [_cut_surplus(group, want) for group, want in wants]
    return any(cut) and _grow_each(wants, background)


def _note_short(groups: Sequence[Group]) -> None:
    for group in groups:
        group.counters.short += 1
    if _log.isEnabledFor(logging.DEBUG):
        for group in groups:
            reclaimer = group.reclaimer
            _log.debug(
                "short: -1 with %d of %d pages free, %d more obtainable, %d requests running",
                reclaimer.free,
                reclaimer.limit,
                reclaimer.obtainable({}) - reclaimer.free,
                len(group.table) - len(group.table.free),
            )


def _note_crowded(groups: Sequence[Group]) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    _note_short(groups)
    runs = groups[0].pager.runs
    warn(
        _log,
        "mappings",
        "the driver has no mapping left (%d of the context's %d in use): requests cannot grow "
        "until some end; larger pages or promote_tokens need fewer",
        runs.used,
        runs.limit,
    )
    for group in groups:
        group.pager.runs.relieve()


def _grow_each(wants: Sequence[tuple[Group, _Want]], background: bool) -> bool:
    grown: list[tuple[Group, _Want]] = []

    def disown() -> None:
        for group, want in grown:
            _disown(group, want)

    try:
        for group, want in wants:
            if want:
                group.journal.on_abort(partial(_disown, group, want))
                if not _grow(group, want, background=background, tentative=True):
                    disown()
                    return False
                grown.append((group, want))
    except VMemError:
        disown()
        raise
    return True


def _cut_surplus(group: Group, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        group.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= group.reclaimer.try_cut(slot, keep)
    return found


def _disown(group: Group, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            group.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    group.pager.poll()


def _move_on(group: Group, rows: array[int], stream: Any) -> None:
    """Lets windows slide and pages be replaced, as the rows after a step allow it."""
    if group.window is not None:
        group.window.slide(rows, stream)
    if group.config.promote_tokens and group.promoter is not None:
        group.promoter.step(rows, stream)


def _commit(group: Group, rows: array[int], total: int) -> None:
    """Notes what the slots hold from now on."""
    columns, counters, reclaimer = group.pager.columns, group.counters, group.reclaimer
    group.journal.entries += (
        (put, group, "used_tokens", group.used_tokens),
        (put, group, "clock", group.clock),
        (put, columns, "held", columns.held),
    )
    columns.held = rows
    group.used_tokens = total
    group.clock += 1
    if reclaimer.shared.blocks or reclaimer.away or reclaimer.slid:
        group.note_peaks()
    else:  # the same, where all pages of requests are their own, and here
        used = total * group.token_bytes
        wasted = group.pager.active_pages * group.page_bytes - used
        if used > counters.peak_used:
            counters.peak_used = used
        if wasted > counters.peak_wasted:
            counters.peak_wasted = wasted
    counters.steps += 1


def fork(
    group: Group,
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing = group.layout, group.sharing
    sharing.require(FORK, "fork")
    parent = group.slot(reqid)
    held = group.rows[parent.index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {parent.index} holds {held} tokens", limit=held)
    if not 1 <= count <= len(group.table):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(group.table)}",
            limit=len(group.table),
        )
    chosen = None if into is None else _chosen(group, count, into)
    group.mover.finish(parent, stream)
    group.pager.release(parent)
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
    if not group.pager.can_have(new_pages, {}):
        return None
    if rows * layout.row_bytes > parent.shared * layout.page_size:
        wait_for(record(stream, group.device))
    sharing.share(parent, full, group.prefixes.unit_pages[group.place])
    try:
        group.attach(slots, parent.span.cut(0, full), parent)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    try:
        if pages > full:
            tail = Source(
                group.pager.base + layout.offset(parent.index),
                layout.tensor_bytes,
                rows * layout.row_bytes,
            )
            want = [(slot, pages) for slot in slots]
            if not group.pager.grow(want, background=False, source=tail):
                group.detach(slots)
                return None
            group.pager.release(slots[0])  # of one growth for all; other requests' go on
    except VMemError:
        group.detach(slots)
        raise
    for slot in slots:
        if slot.shared:
            slot.pins = group.prefixes.pin_again(parent.pins)
        group.enter(slot, rows)
    group.note_peaks()
    return [slot.index for slot in slots]


def _chosen(group: Group, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [group.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots


def can_admit(
    groups: Sequence[Group], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """See `KVCache.can_admit`; of several caches with the same requests, in all of them."""
    first = groups[0]
    lengths = [operator.index(length) for length in seq_lens]
    longest = first.config.max_seq_len
    for place, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_lens[{place}] is {length}; it must lie between 0 and {longest}",
                limit=longest,
            )
    found = _matches(first, lengths, matches)
    begun = [0 if match is None else match.length for match in found] or [0] * len(lengths)
    each = [list(map(group.layout.pages_for_step, begun, lengths)) for group in groups]
    pages = [_pages(group, one, found) for group, one in zip(groups, each, strict=True)]
    if len(lengths) > len(first.table.free):
        return False
    if not _find_mappings(groups, each):
        return False
    if not all(group.pager.could_have(need) for group, need in zip(groups, pages, strict=True)):
        return False
    return len(groups) == 1 or _fit_together(groups, pages)


def _matches(
    group: Group, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    if len(found) != len(lengths):
        raise invalid(f"{len(found)} matches for {len(lengths)} requests", limit=len(lengths))
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and group.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            group.prefixes.renew(match)
    return found


def _pages(group: Group, each: list[int], matches: Sequence[PrefixMatch | None]) -> int:
    """Physical pages that requests of so many each need beside those of their prefixes."""
    kept = group.prefixes.kept_pages
    pages = sum(each) - sum(kept(group.place, match) for match in matches if match is not None)
    return pages * group.layout.num_tensors


def _find_mappings(groups: Sequence[Group], each: list[list[int]]) -> bool:
    """Whether requests of so many pages in each cache find mappings of the context they share."""
    need = sum(group.pager.runs.needed(pages) for group, pages in zip(groups, each, strict=True))
    runs = groups[0].pager.runs
    if not need or (len(groups) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(group.pager.runs.obtainable() for group in groups)


def _fit_together(groups: Sequence[Group], pages: list[int]) -> bool:
    """Whether what each cache can have alone they can have at once, of their budget."""
    share = groups[0].reclaimer.share
    assert share is not None
    need = sum(count * group.layout.page_size for group, count in zip(groups, pages, strict=True))
    if need <= _reach(groups):
        return True
    share.ask(need - _unshared(groups[0]))
    return False


def _reach(groups: Sequence[Group]) -> int:
    """Bytes of their budget that requests in several groups could still get."""
    share = groups[0].reclaimer.share
    assert share is not None
    return share.within_reach() + _unshared(groups[0])


def obtainable(groups: Sequence[Group]) -> tuple[int, int]:
    """See `KVCache.obtainable_bytes`."""
    for group in groups:
        group.reclaimer.poll()
    first, page = groups[0].reclaimer, groups[0].layout.page_size
    if len(groups) == 1:
        return first.obtainable({}) * page, first.limit * page
    assert first.share is not None
    return _reach(groups), first.share.total()


def missing(groups: Sequence[Group], reqid: int | None, seq_len: int) -> int:
    """See `KVCache.missing_pages`."""
    pages, length = 0, _length(groups[0], seq_len)
    for group in groups:
        held, have = 0, 0
        if reqid is not None:
            slot = group.slot(reqid)
            held, have = group.rows[slot.index], slot.granted
        need = group.layout.pages_for_step(held, length)
        pages += max(0, need - have) * group.layout.num_tensors
    return pages


def is_ready(groups: Sequence[Group], reqid: int, seq_len: int) -> bool:
    """See `KVCache.is_ready`."""
    slots, length = [group.slot(reqid) for group in groups], _length(groups[0], seq_len)
    needs = [group.layout.pages_for_step(group.rows[slots[0].index], length) for group in groups]
    return all(
        slot.granted >= need or group.pager.is_mapped(slot, need)
        for group, slot, need in zip(groups, slots, needs, strict=True)
    )


def _length(group: Group, seq_len: int) -> int:
    """A number of tokens that a slot can hold."""
    length, longest = operator.index(seq_len), group.config.max_seq_len
    if not 0 <= length <= longest:
        raise invalid(f"seq_len {length} is not between 0 and {longest}", limit=longest)
    return length


def free_pages(groups: Sequence[Group]) -> int:
    """See `KVCache.num_free_pages`: each group sees all that the budget has."""
    for group in groups:
        group.reclaimer.poll()
    free = [group.reclaimer.free for group in groups]
    share = groups[0].reclaimer.share
    if len(groups) == 1 or share is None:
        return free[0]
    return min(share.room() // groups[0].layout.page_size, sum(free))


def _unshared(group: Group) -> int:
    """Bytes that a cache can take without asking its budget: on their way back, or held idle."""
    own, page = group.reclaimer, group.layout.page_size
    return own.returning * page + own.spare({}) * page * group.layout.num_tensors


def fork_all(
    groups: Sequence[Group],
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """`fork` in every group or in none; the first one chooses the slots, unless `into` does."""
    for group in groups:
        group.sharing.require(FORK, "fork")
    done: list[Group] = []
    forked: list[int] | None = None

    def detach() -> None:
        for group in done:
            group.detach([group.table[index] for index in into or ()])

    try:
        for group in groups:
            forked = fork(group, reqid, count, length, stream, into)
            if forked is None:
                detach()
                break
            into = forked
            done.append(group)
    except VMemError:
        detach()
        raise
    for group in groups:
        group.prepare()
    return forked


class Moved(NamedTuple):
    """What `KVCache.move` did; physical pages of `Layout.page_size`, of all tensors together.

    Attributes:
        pages: pages that moved, or are on their way.
        shared: pages that stay where they are, since others have them too.
    """

    pages: int
    shared: int


def tier_of(group: Group, location: str | Location, device: Any) -> Tier:
    """The tier that a caller names."""
    names = {one.name.lower(): one for one in Location}
    place = names.get(location) if isinstance(location, str) else Location(location)
    if place is None:
        raise invalid(f"location {location!r} is not one of {', '.join(map(repr, names))}")
    if place is not Location.PEER and device is not None:
        raise invalid(f"device {device!r}: a location of {place.name.lower()!r} takes none")
    info = group.context.info
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


def promote(groups: Sequence[Group], reqid: int, stream: Any, *, wait: bool) -> int:
    """See `KVCache.promote`."""
    done = 0
    slots = [group.slot(reqid) for group in groups]
    if any(group.promoter is None for group in groups):
        raise invalid("promote: the cache has no large_page_size")
    for group, slot in zip(groups, slots, strict=True):
        assert group.promoter is not None
        group.mover.sweep()
        done += group.promoter.promote(slot, group.rows[slot.index], stream, wait=wait)
    return done


def move(
    groups: Sequence[Group],
    reqid: int,
    tier: Tier,
    tokens: Sequence[int] | None,
    stream: Any,
    *,
    wait: bool,
) -> Moved:
    """See `KVCache.move`: new pages in all groups or in none, before any is put in place."""
    both = [(group, group.slot(reqid)) for group in groups]
    for group, slot in both:
        group.mover.sweep()
        group.mover.finish(slot, stream)
        group.pager.release(slot)
    begun: list[tuple[Group, Slot]] = []

    def give_up() -> None:
        for group, slot in begun:
            group.mover.abandon(slot)

    groups[0].journal.on_abort(give_up)
    moved = []
    try:
        for group, slot in both:
            begun.append((group, slot))
            moved.append(_begin_move(groups, group, slot, tier, tokens, stream, wait=wait))
    except VMemError:
        give_up()
        raise
    begun.clear()  # from here on an interruption leaves the rest to the next step
    if wait:
        try:
            for group, slot in both:
                group.mover.finish(slot, stream)
        except VMemError:
            for group, slot in both:
                group.mover.abandon(slot)
            raise
    return Moved(sum(one.pages for one in moved), sum(one.shared for one in moved))


def _begin_move(
    groups: Sequence[Group],
    group: Group,
    slot: Slot,
    tier: Tier,
    tokens: Sequence[int] | None,
    stream: Any,
    *,
    wait: bool,
) -> Moved:
    """The first phase of `move` in one group, of a slot over which nothing is in flight."""
    low, high = _pages_of(group, slot, tokens, wait)
    tensors = group.layout.num_tensors
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
    _make_tier_room(groups, group, tier, pages)
    event = record(stream, group.device)
    after = [] if event is None else [event]
    try:
        group.mover.begin(Move(slot, wanted), after, background=not wait)
    except OutOfMemory:
        if all(kind.unit == 1 for *_, kind in wanted):
            raise
        small = [(first, last, Kind(1, tier)) for first, last, _ in wanted]
        group.mover.begin(Move(slot, small), after, background=not wait)
    return Moved(pages, shared)


def _pages_of(
    group: Group, slot: Slot, tokens: Sequence[int] | None, wait: bool
) -> tuple[int, int]:
    """The pages that hold rows of these tokens alone, none of them cut."""
    layout, held = group.layout, group.rows[slot.index]
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


def _make_tier_room(groups: Sequence[Group], group: Group, tier: Tier, pages: int) -> None:
    """Sees to it that a tier has room for pages of a group; raises OutOfMemory where it has not."""
    size = group.layout.page_size
    if tier == DEVICE:
        if not group.pager.have(pages):
            raise _tier_full(group, tier, pages, group.reclaimer.free * size)
        return
    host = tier.location is Location.HOST
    limit = group.config.host_limit if host else group.config.peer_limit  # of all groups together
    if not limit:
        return
    taken = sum(
        count * one.layout.page_size
        for one in groups
        for at, count in one.reclaimer.away.items()
        if at.location is tier.location
    )
    if taken + pages * size > limit:
        raise _tier_full(group, tier, pages, max(0, limit - taken))


def _tier_full(group: Group, tier: Tier, pages: int, left: int) -> OutOfMemory:
    size = pages * group.layout.page_size
    return OutOfMemory(
        f"move of {pages} pages, {size} bytes: {tier} has {left} bytes left for the cache",
        errno=errno.ENOMEM,
        op="KVCache.move",
        bytes=size,
        limit=left,
    )


def alloc_prefix(
    groups: Sequence[Group], tokens: Any, leave: int, stream: Any, namespace: Hashable
) -> tuple[int, int] | None:
    """See `KVCache.alloc_prefix`."""
    make_free_alike(groups)
    prefixes = groups[0].prefixes
    match, length = prefixes.wanted(tokens, leave, namespace)
    try:
        begins = prefixes.can_begin(match)
        if begins:
            reqid = _begin_with(groups, match, stream)
            for group in groups:
                group.prepare()
        else:
            reqid = alloc(groups, length)
    finally:
        if match is not tokens:
            match.release()
    return None if reqid is None else (reqid, match.length if begins else 0)


def _begin_with(groups: Sequence[Group], match: PrefixMatch, stream: Any) -> int | None:
    """A slot that begins with a match of at least a unit, in every group or in none.

    That where the most of it is mapped, else an empty one, which the first group chooses.
    """
    prefixes = groups[0].prefixes
    prefixes.require("alloc_prefix")
    prefixes.leases.collect()
    node = prefixes.pin(match)
    taken: list[tuple[Group, Slot]] = []

    def let_be() -> None:
        for group, slot in taken:
            group.detach([slot])
        prefixes.tree.unpin(node)

    try:
        kept, whole = _kept(groups, node, match.length), True
        for group in groups:
            if kept is not None:
                slot = group.table[kept.index]
                span = prefixes.span(group.place, node, match.length)
                group.sharing.order_after_writers(span, stream)
                whole &= slot.shared == span.pages
                group.resume(slot, span)
                taken.append((group, slot))
                continue
            into = [group.table[taken[0][1].index]] if taken else None
            slots = group.sharing.vacate(1, into)
            if slots is None:
                break
            span = prefixes.span(group.place, node, match.length)
            group.sharing.order_after_writers(span, stream)
            if not group.attach_copy(slots[0], span, match.length):
                break
            taken.append((group, slots[0]))
    except VMemError as error:
        let_be()
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    if len(taken) < len(groups):
        let_be()
        return None
    groups[0].counters.resumed += kept is not None and whole
    slot = taken[0][1]
    slot.pins = [node]
    prefixes.use_up(match)
    for group, one in taken:
        group.enter(one, match.length)
        group.note_peaks()
    return slot.index


def _kept(groups: Sequence[Group], node: Node[Span], length: int) -> Slot | None:
    """The free slot that has the most of a prefix mapped, in every group; None: there is none."""
    first = groups[0]
    for group in groups:
        group.reclaimer.poll()
    kept = [slot for slot in first.table.index.stale if slot.kept]
    if not kept:
        return None
    spans = [first.prefixes.span(group.place, node, length) for group in groups]
    if any(span.floor(span.pages) != span.pages for span in spans):
        return None  # the rest of a large page is to be copied
    found = [
        slot
        for slot in kept
        if all(
            group.sharing.begins(group.table[slot.index], span)
            for group, span in zip(groups, spans, strict=True)
        )
    ]
    return max(found, key=attrgetter("mapped"), default=None)
