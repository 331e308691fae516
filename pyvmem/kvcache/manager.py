# SPDX-License-Identifier: MIT
"""The groups of layers of a cache, and what is done for requests in all of them or in none.

A cache of equal layers has one group. Each call takes the `Manager`'s lock and journal, asks it for
the groups and hands them to a function below.
"""

from __future__ import annotations

import errno
import logging
import operator
import weakref
from _thread import start_new_thread
from array import array
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.closing import Closable
from pyvmem.context import Context
from pyvmem.errors import (
    BadHandle,
    Busy,
    NotRecoverable,
    NotSupported,
    OutOfMemory,
    TooManyBatches,
    TooManyMappings,
    VMemError,
)
from pyvmem.expect import expect
from pyvmem.features.table import FORK, HOST_PAGES, PEER_PAGES, SWAP
from pyvmem.flag import Flag
from pyvmem.info import Location
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.events import PriorWork, prune, record, wait_for, wait_for_device
from pyvmem.kvcache.group import Group, make_parts, pool_low
from pyvmem.kvcache.growth import Planner, extend
from pyvmem.kvcache.journal import Journal, put
from pyvmem.kvcache.pages import DEVICE, EMPTY, Kind, Span, Stretch, Tier
from pyvmem.kvcache.prefix_cache import PrefixCache, PrefixMatch
from pyvmem.kvcache.reclaim import Share
from pyvmem.kvcache.slots import Growth, Move, Slot, SlotTable
from pyvmem.kvcache.window import slide
from pyvmem.logs import warn
from pyvmem.ops import OpBatch
from pyvmem.reentry import call_part, reentrant_lock
from pyvmem.streams import Work, device_ordinal

if TYPE_CHECKING:
    from pyvmem.reservation import Reservation

__all__ = [
    "IDLE_SECONDS",
    "CommonPages",
    "IdleThread",
    "Manager",
    "Moved",
    "SwappedRequest",
    "Truncation",
    "alloc",
    "alloc_prefix",
    "begin_trim",
    "bring_back",
    "can_admit",
    "can_compact",
    "claim",
    "empty_slots",
    "fork_all",
    "forked",
    "free",
    "free_pages",
    "grow",
    "is_ready",
    "kept_slots",
    "last_work",
    "make_free_alike",
    "missing",
    "move",
    "obtainable",
    "promote",
    "reclaim_free",
    "step",
    "step_async",
    "swap_in",
    "swap_out",
    "tier_of",
    "trim",
    "truncate",
    "unmap_idle",
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
        context: of all groups, from `make` on.
        groups: empty before `make`.
        lock: to be held by a call, and
        journal: entered, in this order.
        owns_context: it is closed with the cache.
        closed: for good.
    """

    context: Context

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
        expect("config", whole, KVCacheConfig)
        expect("context", context, Context, optional=True)
        expect("budget", budget, Budget, optional=True)
        check_memory(whole, configs is not None, context, budget)
        self.closed = self._closing = False
        self._name = name
        self._whole = whole
        self._configs = [whole] if configs is None else list(configs)
        self._shares = configs is not None  # the groups have one budget
        self._table = table
        self.owns_context = context is None and budget is None
        if budget is not None:
            self.context = budget.context
        elif context is not None:
            self.context = context
        self._opens = partial(Context, backend, device=device)
        self._use(budget)
        self.groups: tuple[Group, ...] = ()

    def _use(self, budget: Budget | None) -> None:
        """Takes the lock and the journal of a budget, or its own."""
        self.budget = budget
        self.lock = reentrant_lock() if budget is None else budget.lock
        self.journal = Journal() if budget is None else budget.journal

    def make(self) -> None:
        """Opens the context where none was given, and makes the groups.

        After an exception call `abandon`.
        """
        if self.owns_context:
            self.context = self._opens(
                granule=self._whole.page_size,
                pool_low=sum(map(pool_low, self._configs)),
                max_mappings=self._whole.max_mappings,
            )
            self.context.remains.unclaimed = True  # until the first call
        if self._shares and self.budget is None:
            self._use(Budget(self.context, self._whole.memory_limit))
        with self.lock, self.journal:
            self.journal.on_abort(self._give_back)
            self._make(self._configs, self._table)

    def abandon(self) -> None:
        """Gives back what `make` has made, after an exception."""
        if hasattr(self, "context"):
            with self.lock, self.journal:
                self.journal.must(self._give_back)

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
        ops = OpBatch(Planner.OPS * sum(config.max_batch for config in configs))
        for place, (config, one) in enumerate(zip(configs, parts, strict=True)):
            journal.keep(self, "groups")
            self.groups += (Group(config, one, journal, table, prefixes, place, ops),)
        if budget is not None:
            for group in self.groups:
                call_part(partial(budget.join, group.pager, group.config.memory_floor))
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
        self.context.remains.unclaimed = False
        return self.groups

    def close(self, stream: Any = None) -> None:
        """Gives everything back, for a call that holds the lock. Idempotent.

        Raises:
            Busy: tensors live. BadHandle: the descriptor of `stream` is closed. Nothing changed.
        """
        if self.closed:
            return
        work = PriorWork(stream, self.context.cuda_device)
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
        if self.context.is_open and any(slot.active for one in self.groups for slot in one.table):
            work.record()
        self._closing = True
        self._give_back(work)
        self.closed = True

    def _give_back(self, work: PriorWork | None = None) -> None:
        """May be repeated."""
        if self.context.is_open:  # else everything went with it, or is the parent's
            for group in self.groups:
                group.close(work)
        if self.budget is not None:
            for group in self.groups:
                call_part(partial(self.budget.leave, group.pager))
        if self.owns_context and self.context.is_open:
            self.context.close()


def check_memory(
    whole: KVCacheConfig, several: bool, context: Context | None, budget: Budget | None
) -> None:
    """Raises InvalidArgument for memory limits that conflict or have no effect."""
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
    """Polls what is in flight, and retires a slot in all groups once it is broken in one."""
    for group in groups:
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
        if group.pager.growths:
            group.pager.poll()
    if len(groups) > 1 and len({len(group.table.free) for group in groups}) > 1:
        broken = {slot.index for group in groups for slot in group.table if slot.broken}
        for group in groups:
            for index in broken:
                group.table.mark_broken(group.table[index])


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
    goes_on = False
    if tokens is not None:
        owner = slots[0].owner

        def finish() -> None:  # what is recorded may not be written to any more
            if slots[0].active and slots[0].owner == owner:
                _release(groups, slots, event)

        groups[0].journal.on_abort(finish)
        goes_on = groups[0].prefixes.record_last(slots[0], tokens, event, namespace)
    _release(groups, slots, event)
    if goes_on:
        for group, slot, pages in zip(groups, slots, first, strict=True):
            group.keep(slot, pages)
    for group in groups:
        group.prepare()
        group.reclaim_idle()


def _release(groups: Sequence[Group], slots: Sequence[Slot], event: Any) -> None:
    """`Group.release` in all groups: what calls the context comes before the first."""
    for group, slot in zip(groups, slots, strict=True):
        group.mover.abandon(slot)
    for group, slot in zip(groups, slots, strict=True):
        group.release(slot, event)


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
                group.reclaimer.try_unmap(slot, 0, now=wait)
    if wait:
        for group in groups:
            group.reclaimer.finish_all()
        for group in groups:
            group.reclaimer.raise_errors()


# ---- steps ---------------------------------------------------------------------------------------


def step(groups: Sequence[Group], seq_lens: Sequence[int], stream: Any) -> int:
    """`KVCache.step` of groups with the same requests: all of them or none."""
    begun, growing = [], []
    try:
        for group in groups:
            rows, total, short = _begin(group, seq_lens, stream)
            begun.append((group, rows, total, short))
            if short:
                growing.append(group.pager)
        names = any(seq_lens)
        if names:
            groups[0].named = True
        if growing:
            if not extend(growing, background=False) and not _grow_for(begun, stream):
                _note_short(groups)
                return -1
            own = groups[0].reclaimer
            if own.share is not None or own.limit - own.held < own.watermark * own.limit:
                _keep_watermarks(groups)
    except TooManyMappings as error:
        if groups[0].table.lockstep:  # the other ranks do not know
            error.args = (f"{error}; {who_has_mappings(groups)}", *error.args[1:])
            raise
        _note_crowded(groups, error)
        return -1
    # What calls the context comes before or after the rows of all groups: an interruption after a
    # call in between would leave some groups with the new rows and some with the old.
    windows = []
    for group, rows, _, _ in begun:
        if group.window is not None:
            windows.append((group.window, rows))
        if group.config.promote_tokens and group.promoter is not None:
            group.promoter.step(rows, stream)
        runs = group.pager.runs
        if runs.joins and runs.used > runs.join_at:
            runs.join(stream)
    if windows:
        slide(windows, stream)
    if not names and groups[0].named:
        groups[0].rest(stream)
    for group, rows, total, _ in begun:
        _commit(group, rows, total)
    for group in groups:
        if names and group.pager.ahead:
            group.pager.grow_ahead()
        if group.table.lockstep:
            group.prefixes.leases.end_all()  # a collector must not decide when they end
        if group.reclaim_due:
            group.reclaim_idle()
        if group.unprepared:
            group.prepare()
    return 0


def step_async(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """`KVCache.step_async` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    for group in groups:
        _, _, short = group.pager.scan(seq_lens)
        if group.reclaimer.unmaps:
            group.reclaimer.poll()
        if group.mover.cancelled:
            group.mover.sweep()
        begun.append((group, short))
        lacking = lacking or bool(short)
    if lacking and not _begin_growing(begun):
        _note_short(groups)
        return -1
    if lacking:
        _keep_watermarks(groups)
    for group in groups:
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
    if group.mover.moves or group.mover.cancelled:
        group.mover.step(stream)
    if reclaimer.unmaps:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, short


def _keep_watermarks(groups: Sequence[Group]) -> None:
    """`Group.keep_watermark` of each, which have one budget."""
    share = groups[0].reclaimer.share
    room = 0 if share is None else share.room() + share.beyond()
    for group in groups:
        own = group.reclaimer
        left = own.limit - own.held
        if share is not None:
            left = min(left, room // group.layout.page_size)
        if left < own.watermark * own.limit:
            group.keep_watermark()


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
    for group, _ in begun:
        if group.pager.growths or group.reclaimer.unmaps or group.left:
            break
    else:
        if extend([group.pager for group, short in begun if short], background=True):
            return True
    group = begun[0][0]
    wants = [(group, _not_promised(group, group.pager.wants(short))) for group, short in begun]
    if group.table.lockstep:
        return grow(wants, background=True)
    return _grow_or_leave(wants)


def _grow_or_leave(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """Grows without a wait what can grow now; what brings the other pages back is begun.

    A later call begins with the rest, or the `step` waits for it. False where the pages cannot
    come, as far as the records tell.
    """
    now: list[tuple[Group, _Want]] = []
    for group, want in wants:
        now.append((group, [one for one in want if not group.pager.is_held_up(one[0])]))
    before = [(group, _left_to_a_step(group, want)) for group, want in wants]
    ready = _joined(now, before)
    everything = _joined(wants, before)
    if not _fit(everything) and not (_can_come(everything) and _begin_to_reclaim(everything)):
        return False
    fits = _fit(ready)
    if not fits:  # the others have what comes back
        now = _what_fits(now)
    if _grow_each(_prompt(now, slow=False), True, wait=False):
        _grow_each(_prompt(now, slow=True), True, wait=False)
    elif fits and _fit(
        ready
    ):  # the driver has less than the records say; perhaps enough comes back
        first = wants[0][0].reclaimer
        if not _begin_to_reclaim(everything, more=first.room):
            return False
    for group, want in wants:
        group.pager.runs.refused = ""
        left = [(slot, (slot.owner, pages)) for slot, pages in want if slot.grows_from < pages]
        group.left.update(left)
    return True


def _joined(
    wants: Sequence[tuple[Group, _Want]], more: Sequence[tuple[Group, _Want]]
) -> list[tuple[Group, _Want]]:
    return [(group, want + others) for (group, want), (_, others) in zip(wants, more, strict=True)]


def _prompt(wants: Sequence[tuple[Group, _Want]], *, slow: bool) -> list[tuple[Group, _Want]]:
    """Those that GPU work of an earlier owner holds up, or those that it does not.

    A growth ends as a whole, so that these are to have one of their own.
    """
    return [
        (group, [one for one in want if group.pager.is_slow(one[0]) == slow])
        for group, want in wants
    ]


def _bytes_lacking(wants: Sequence[tuple[Group, _Want]]) -> int:
    return sum(_lacking(group, want) * group.layout.page_size for group, want in wants)


def _fit(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """Whether all pages that are to be mapped are free."""
    return _bytes_lacking(wants) <= wants[0][0].reclaimer.room and all(
        _lacking(group, want) <= group.reclaimer.limit - group.reclaimer.held
        for group, want in wants
    )


def _what_fits(wants: Sequence[tuple[Group, _Want]]) -> list[tuple[Group, _Want]]:
    """The slots whose pages are free, together and in all groups; those that lack least come first.

    So a request that decodes does not wait until there is memory for another one's prompt.
    """
    lacking: dict[int, int] = {}
    for group, want in wants:
        for slot, pages in want:
            more = max(0, pages - slot.grows_from) * group.page_bytes
            lacking[slot.index] = lacking.get(slot.index, 0) + more
    room = wants[0][0].reclaimer.room
    chosen = set[int]()
    for index in sorted(lacking, key=lacking.__getitem__):
        room -= lacking[index]
        if room < 0:
            break
        chosen.add(index)
    some = [(group, [one for one in want if one[0].index in chosen]) for group, want in wants]
    return some if _fit(some) else [(group, []) for group, _ in wants]  # a group is at its ceiling


def _can_come(wants: Sequence[tuple[Group, _Want]]) -> bool:
    """Whether they could be, once all that belongs to no request is back."""
    need, own = _bytes_lacking(wants), 0
    for group, want in wants:
        reclaimer, keep = group.reclaimer, dict(want)
        back = reclaimer.returning + reclaimer.spare(keep) * group.layout.num_tensors
        back += group.pager.unsettled(keep)
        if _lacking(group, want) > reclaimer.limit - reclaimer.held + back:
            return False
        own += back * group.layout.page_size
    first = wants[0][0].reclaimer
    if first.share is None or need <= first.room + own:
        return need <= first.room + own
    others = first.share.beside([group.reclaimer for group, _ in wants])
    if need <= others.within_reach() + others.unsettled() + own:
        return True
    first.share.ask(need - own)
    return False


def _begin_to_reclaim(wants: Sequence[tuple[Group, _Want]], more: int = 0) -> bool:
    """Begins what brings back pages that slots lack; waits for nothing.

    In the order of `Reclaimer.make_room`: pages of slots, then recorded prefixes, each the cache's
    own before those of others of its budget; then promotions are given up.

    Args:
        wants: the slots, and the pages per tensor that each is to have.
        more: bytes beside these.

    Returns:
        False where that is not enough, and nothing is under way that more can be begun after.
    """
    first = wants[0][0].reclaimer
    others = None if first.share is None else first.share.beside([g.reclaimer for g, _ in wants])
    givers = [group.reclaimer for group, _ in wants]
    givers += [] if others is None else others.others()
    while True:
        for group, _ in wants:
            group.pager.poll()
        if others is not None:
            others.poll()
        under_way = any(one.unmaps for one in givers)
        missing = _begin_what_comes_back(wants, others, more)
        if missing <= 0 or any(one.unmaps for one in givers):
            return True
        if not under_way:
            return False
        # It ended meanwhile, so that what else its slots have can be begun.


def _begin_what_comes_back(
    wants: Sequence[tuple[Group, _Want]], others: Share | None, more: int
) -> int:
    """Begins what can be begun now; the bytes that are missing beyond that."""
    first = wants[0][0].reclaimer
    if others is not None:
        others.take(_bytes_lacking(wants) + more - first.room)
    for group, want in wants:
        own, size = group.reclaimer, group.layout.page_size
        rest = _missing(wants, more) + own.returning * size
        pages = max(_lacking(group, want) - (own.limit - own.held), -(-rest // size))
        if pages > 0:
            own.begin_unmaps(pages, dict(want), now=False)
    missing = _missing(wants, more)
    if others is not None and missing > 0:
        others.begin_unmaps(missing, now=False)
        missing -= others.returning() + others.leaving() + others.unsettled(promoting=False)
    for group, want in wants:
        own, size, tensors = group.reclaimer, group.layout.page_size, group.layout.num_tensors
        coming = own.leaving + group.pager.unsettled(dict(want), promoting=False)
        above = _lacking(group, want) - (own.limit - own.held) - own.returning - coming
        missing -= coming * size
        if above > 0:
            missing -= own.evict(-(-above // tensors)) * tensors * size
    if missing > 0:
        column = wants[0][0].page_bytes
        missing -= first.evict(-(-missing // column)) * column
    if others is not None and missing > 0:
        missing -= others.evict(missing)
    if missing > 0:
        for group, _ in wants:
            missing -= group.mover.promoting() * group.page_bytes
            group.mover.stop_promoting(wait=False)
        if others is not None:
            missing -= others.unsettled() - others.unsettled(promoting=False)
            others.stop_promoting(wait=False)
    for group, _ in wants:
        group.reclaim_due = True
    return missing


def _missing(wants: Sequence[tuple[Group, _Want]], more: int) -> int:
    """Bytes that slots lack beyond those that are free or that slots of their cache give back."""
    back = sum(group.reclaimer.returning * group.layout.page_size for group, _ in wants)
    return _bytes_lacking(wants) + more - wants[0][0].reclaimer.room - back


def _left_to_a_step(group: Group, want: _Want) -> _Want:
    """What earlier calls of other slots said would be there, and is not yet."""
    if not group.left:
        return []
    for slot, (owner, pages) in list(group.left.items()):
        if slot.owner != owner or not slot.active or slot.grows_from >= pages:
            del group.left[slot]
    named = {slot for slot, _ in want}
    return [(slot, pages) for slot, (_, pages) in group.left.items() if slot not in named]


def _lacking(group: Group, want: _Want) -> int:
    """Physical pages that are to be mapped."""
    pages = sum([max(0, count - slot.grows_from) for slot, count in want])
    return pages * group.layout.num_tensors


def _not_promised(group: Group, want: _Want) -> _Want:
    """What no growth under way will give."""
    pager = group.pager
    if want and pager.growths:
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return want


def _grow(
    group: Group, want: _Want, *, background: bool, tentative: bool = False, wait: bool = True
) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them.

    `wait`: for pages of no request, where it takes them. Without it nothing is in flight there.
    """
    pager, reclaimer = group.pager, group.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = _lacking(group, want)
    if lacking > reclaimer.free and not (wait and pager.can_have(lacking, dict(want))):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative, reclaim=wait)


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
    found = [_unmap_surplus(group, want) for group, want in wants]
    return any(found) and _grow_each(wants, background)


def _note_short(groups: Sequence[Group]) -> None:
    for group in groups:  # in the journal: a call that is interrupted has not returned -1
        counters, short = group.counters, group.counters.short
        group.journal.entries.append((put, counters, "short", short))
        counters.short = short + 1
    if any(group.pager.runs.refused for group in groups):
        _warn_crowded(groups)
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


def _note_crowded(groups: Sequence[Group], error: TooManyMappings) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    groups[0].pager.runs.refused = str(error)
    _note_short(groups)
    for group in groups:
        group.pager.runs.relieve()


def _warn_crowded(groups: Sequence[Group]) -> None:
    """Says why a step found no mapping, and who has some."""
    reasons = [group.pager.runs.refused for group in groups if group.pager.runs.refused]
    for group in groups:
        group.pager.runs.refused = ""
    warn(
        _log,
        "mappings",
        "no mapping is left, so requests cannot grow until some end: %s; %s; larger pages or "
        "promote_tokens need fewer",
        reasons[0],
        who_has_mappings(groups),
    )


def who_has_mappings(groups: Sequence[Group]) -> str:
    """Who could give mappings back, as far as context, budget and ledger tell.

    Mappings of a cache are counted by its calls, so that the numbers are a little high. Where the
    driver has no limit of its own on them, but the machine has, they are not counted.
    """
    context, journal = groups[0].context, groups[0].journal
    total, known, texts = context.stats().mappings, 0, []
    if not context.info.max_mappings:
        return f"{total} are the context's"
    caches: dict[PrefixCache, list[Group]] = {}  # the groups of a cache have one
    for one in journal.recoverables:
        if isinstance(one, Group) and one.context is context:
            caches.setdefault(one.prefixes, []).append(one)
    for number, parts in enumerate(caches.values(), 1):
        taken, idle = map(sum, zip(*[one.pager.runs.holders() for one in parts], strict=True))
        own = parts[0].prefixes is groups[0].prefixes
        name = "this cache" if own else f"cache {number} of the budget"
        texts.append(f"{name} has about {taken} for requests and {idle} for unowned pages")
        known += taken + idle
    if total > known:
        texts.append(f"{total - known} are others' in the context, or of recorded prefixes")
    share = groups[0].reclaimer.share
    engines = [] if share is None else share.engines()
    texts += [f"{name} has {count}" for name, count in sorted(engines, key=lambda one: -one[1])]
    if len(caches) == 1 and not engines:
        texts.append("no other holder is known")
    return f"of {total} in the context, " + ", ".join(texts)


def _grow_each(
    wants: Sequence[tuple[Group, _Want]], background: bool, *, wait: bool = True
) -> bool:
    grown: list[tuple[Group, _Want]] = []
    tentative = len(wants) > 1

    def disown() -> None:
        for group, want in grown:
            _disown(group, want)

    try:
        for group, want in wants:
            if want:
                group.journal.on_abort(partial(_disown, group, want))
                if not _grow(group, want, background=background, tentative=tentative, wait=wait):
                    disown()
                    return False
                grown.append((group, want))
    except VMemError:
        disown()
        raise
    return True


def _unmap_surplus(group: Group, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        group.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= group.reclaimer.try_unmap(slot, keep)
    return found


def _disown(group: Group, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            group.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    group.pager.poll()


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
    if reclaimer.shared.blocks or reclaimer.away or reclaimer.slid or group.layout.state:
        group.note_peaks()
    else:  # the same, where all pages of requests are their own, and here
        used = total * group.token_bytes
        wasted = group.pager.granted_pages * group.page_bytes - used
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
    work: PriorWork,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing, pager = group.layout, group.sharing, group.pager
    parent = group.slot(reqid)
    held = pager.columns.held[parent.index]
    rows = held if length is None else operator.index(length)
    if not 1 <= count <= len(group.table.slots):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(group.table)}",
            limit=len(group.table),
        )
    chosen = None if into is None else _chosen(group, count, into)
    if group.mover.moves:
        group.mover.finish(parent, work)
    if parent.job is not None or parent.mapped > parent.granted:
        pager.release(parent)
    nbytes, full, pages = _forked(group, parent, rows)
    new_pages = (pages - full) * count * layout.num_tensors
    try:
        slots = sharing.make_empty(count, chosen)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    if slots is None or not (new_pages <= group.reclaimer.free or pager.have(new_pages)):
        return None
    if not work.over and nbytes > (parent.head + parent.span.pages) * layout.page_size:
        work.wait()
    ahead, large = True, layout.large_pages > 0
    while True:
        try:
            group.fork(parent, slots, full, pages, nbytes, ahead=ahead, large=large)
            break
        except (OutOfMemory, TooManyBatches, TooManyMappings) as error:
            if ahead:  # perhaps it wanted more than it must have
                ahead = False
                continue
            if group.table.lockstep:
                raise
            if large and isinstance(error, OutOfMemory):
                large = False  # small pages may fit where no large one does
                continue
            if isinstance(error, TooManyMappings):
                more = pager.fewer_mappings(new_pages, {})
            else:
                more = new_pages > 0 and group.reclaimer.make_room(new_pages, {})
            if not more:
                group.reclaimer.raise_errors()
                return None
    pins = parent.pins
    for slot in slots:
        if pins and slot.span.pages:
            slot.pins = group.prefixes.pin_again(pins)
        group.enter(slot, rows)
    group.note_peaks()
    return list(map(attrgetter("index"), slots))


def _forked(group: Group, parent: Slot, rows: int) -> tuple[int, int, int]:
    """Of a fork with so many rows, per tensor: bytes, pages that it shares, and all its pages."""
    layout = group.layout
    nbytes = layout.bytes_for(rows)
    # A state is written again with every token, and cannot be shared.
    full = 0 if layout.state else nbytes // layout.page_size
    if parent.places.noted:
        full = parent.places.floor(full)
    return nbytes, full, layout.pages_for(rows)


def forked(groups: Sequence[Group], reqid: int, count: int, length: int) -> int:
    """See `KVCache.forked_bytes`."""
    slot = groups[0].slot(reqid)
    _check_kept(length, slot.index, max(group.rows[slot.index] for group in groups))
    if count < 0:
        raise invalid(f"count is {count}; it must not be negative")
    found = 0
    for group in groups:
        _, full, pages = _forked(group, group.slot(reqid), length)
        found += (pages - full) * count * group.page_bytes
    return found


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
    new = [group.pager.could_have(need) for group, need in zip(groups, pages, strict=True)]
    if None in new:
        return False
    if len(groups) > 1 and not _fit_together(groups, pages):
        return False
    return not any(new) or _context_has(groups, pages, new[0] or 0)


def _matches(
    group: Group, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    for place, one in enumerate(found):
        expect(f"matches[{place}]", one, PrefixMatch, optional=True)
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
    """Physical pages that requests of so many pages each need beyond their prefixes'."""
    kept = group.prefixes.kept_pages
    pages = sum(each) - sum(kept(group.place, match) for match in matches if match is not None)
    return pages * group.layout.num_tensors


def _find_mappings(groups: Sequence[Group], each: list[list[int]]) -> bool:
    """Whether the context has mappings for requests of so many pages in each group."""
    need = sum(group.pager.runs.needed(pages) for group, pages in zip(groups, each, strict=True))
    runs = groups[0].pager.runs
    if not need or (len(groups) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(group.pager.runs.obtainable() for group in groups)


def _fit_together(groups: Sequence[Group], pages: list[int]) -> bool:
    """Whether the groups' budget has room for all of them at once, not only for each alone."""
    share = groups[0].reclaimer.share
    assert share is not None
    need = sum(count * group.layout.page_size for group, count in zip(groups, pages, strict=True))
    if need <= _reach(groups):
        return True
    share.ask(need - _unshared(groups[0]))
    return False


def _context_has(groups: Sequence[Group], pages: list[int], new: int) -> bool:
    """True if the context's pool and its device have what no cache of the budget could give up.

    `new`: of the pages of the first group, those that are not its own yet.
    """
    first = groups[0]
    share, context = first.reclaimer.share, first.context
    need = new * first.layout.page_size
    if share is not None:
        each = [count * group.layout.page_size for group, count in zip(groups, pages, strict=True)]
        own = _unshared(first) + first.pager.unsettled({}) * first.layout.page_size
        others = share.within_reach() - share.beyond() - share.room() + share.unsettled()
        need = sum(each) - own - others
    need -= context.stats().free_bytes
    return need <= 0 or need <= context.memory().free_bytes


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


def missing(
    groups: Sequence[Group], reqid: int | None, seq_len: int, match: PrefixMatch | None
) -> int:
    """See `KVCache.missing_pages`."""
    pages, length = 0, _length(groups[0], seq_len)
    for group in groups:
        held, have = 0, 0
        if reqid is not None:
            slot = group.slot(reqid)
            held, have = group.rows[slot.index], slot.granted
        elif match is not None:
            held, have = match.length, group.prefixes.kept_pages(group.place, match)
        need = group.layout.pages_for_step(held, length)
        pages += max(0, need - have) * group.layout.num_tensors
    return pages


def lacking(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """See `KVCache.lacking_bytes`."""
    pages = 0
    for group in groups:
        *_, short = group.pager.scan(seq_lens)
        wants = group.pager.wants(short)
        pages += sum([need - slot.granted for slot, need in wants]) * group.layout.num_tensors
    return pages * groups[0].layout.page_size


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
    return group.reclaimer.idle({}) * group.layout.page_size


def fork_all(
    groups: Sequence[Group],
    reqid: int,
    count: int,
    length: int | None,
    work: PriorWork,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """`fork` in every group or in none; the first one chooses the slots, unless `into` does."""
    make_free_alike(groups)
    for group in groups:
        group.sharing.require(FORK, "fork")
        if length is not None:
            slot = group.slot(reqid)
            _check_kept(operator.index(length), reqid, group.rows[slot.index])
            group.check_back(slot, operator.index(length))
    done: list[Group] = []
    forked: list[int] | None = None

    def detach() -> None:
        for group in done:
            group.detach([group.table[index] for index in into or ()])

    try:
        for group in groups:
            forked = fork(group, reqid, count, length, work, into)
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
    place = names.get(location) if isinstance(location, str) else None
    if isinstance(location, int) and location in names.values():
        place = Location(location)
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


def promote(groups: Sequence[Group], reqid: int, work: PriorWork, *, wait: bool) -> int:
    """See `KVCache.promote`."""
    done = 0
    slots = [group.slot(reqid) for group in groups]
    if all(group.promoter is None for group in groups):
        raise invalid("promote: the cache has no large_page_size")
    for group, slot in zip(groups, slots, strict=True):
        if group.promoter is None:  # a state: it is written all the time
            continue
        group.mover.sweep()
        done += group.promoter.promote(slot, group.rows[slot.index], work, wait=wait)
    return done


def move(
    groups: Sequence[Group],
    reqid: int,
    tier: Tier,
    tokens: Sequence[int] | None,
    work: PriorWork,
    *,
    wait: bool,
) -> Moved:
    """See `KVCache.move`: new pages in all groups or in none, before any is put in place."""
    both = [(group, group.slot(reqid)) for group in groups]
    for group, slot in both:
        group.mover.sweep()
        group.mover.finish(slot, work)
        group.pager.release(slot)
    begun: list[tuple[Group, Slot]] = []

    def cancel() -> None:
        for group, slot in begun:
            group.mover.abandon(slot)

    groups[0].journal.on_abort(cancel)
    moved = []
    try:
        for group, slot in both:
            begun.append((group, slot))
            moved.append(_begin_move(groups, group, slot, tier, tokens, work, wait=wait))
    except VMemError:
        cancel()
        raise
    begun.clear()  # from here on an interruption leaves the rest to the next step
    if wait:
        try:
            for group, slot in both:
                group.mover.finish(slot, work)
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
    work: PriorWork,
    *,
    wait: bool,
) -> Moved:
    """The first phase of `move` in one group, of a slot over which nothing is in flight."""
    low, high = _pages_of(group, slot, tokens, wait)
    tensors = group.layout.num_tensors
    shared = max(0, min(high, slot.shared) - max(low, slot.head)) * tensors
    low = max(low, slot.shared)
    wanted: list[Stretch] = [
        (first, last, Kind(kind.unit, tier))
        for first, last, kind in slot.places.stretches(low, high)
        if kind.tier != tier
    ]
    if not wanted:
        return Moved(0, shared)
    pages = sum(last - first for first, last, _ in wanted) * tensors
    _make_tier_room(groups, group, tier, pages)
    event = work.record()
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
    """The pages that hold only rows of these tokens; no large page is split."""
    layout, held = group.layout, group.rows[slot.index]
    first, last = 0, held
    if tokens is not None:
        try:
            first, last = (tokens.start, tokens.stop) if isinstance(tokens, range) else tokens
            first, last = operator.index(first), operator.index(last)
        except (TypeError, ValueError):
            raise invalid(f"tokens must be a range or (first, last), not {tokens!r:.80}") from None
        if isinstance(tokens, range) and tokens.step != 1:
            raise invalid(f"tokens is {tokens}; the step of a range must be 1")
        if not 0 <= first <= last <= held:
            raise invalid(
                f"tokens {first} to {last}: reqid {slot.index} holds {held} tokens", limit=held
            )
    if layout.state:  # as a whole, and not while it is written
        whole = wait and (first, last) == (0, held)
        return 0, slot.places.floor(slot.granted) if whole else 0
    low = slot.places.ceil(-(-first * layout.row_bytes // layout.page_size))
    high = last * layout.row_bytes // layout.page_size
    if wait and last == held:  # nothing is written meanwhile, so the last page can go, too
        high = slot.places.ceil(-(-last * layout.row_bytes // layout.page_size))
    high = slot.places.floor(min(high, slot.granted))
    return min(low, high), high


def _make_tier_room(groups: Sequence[Group], group: Group, tier: Tier, pages: int) -> None:
    """Makes room for pages of a group in a tier; raises OutOfMemory where there is too little."""
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
    groups: Sequence[Group], tokens: Any, leave: int, reader: Work, namespace: Hashable
) -> tuple[int, int] | None:
    """See `KVCache.alloc_prefix`."""
    make_free_alike(groups)
    prefixes = groups[0].prefixes
    match, length = prefixes.wanted(tokens, leave, namespace)
    reqid = slots = resumed = None
    try:
        if match.length:
            spans = [prefixes.span(group.place, match) for group in groups]
            kept = kept_slots(groups, spans, match.length)
            if kept is None:
                prefixes.require("alloc_prefix")
            slots = kept or empty_slots(groups)
        if slots is None:
            reqid = alloc(groups, length)
        else:
            resumed = _begin_with(groups, match, spans, slots, reader, goes_on=kept is not None)
            if resumed is not None:
                reqid = slots[0].index
                for group in groups:
                    group.prepare()
    finally:
        if match is not tokens and (reqid is None or slots is None):
            match.release()
    if reqid is None:
        return None
    held = 0 if slots is None else match.length
    _count_prompt(groups[0], (length, held, bool(resumed)), 1)
    return reqid, held


def _count_prompt(group: Group, prompt: tuple[int, int, bool], by: int) -> None:
    """Counts a prompt: its tokens, those found recorded, and whether they were still mapped.

    Last of all, and in the journal: a call that is interrupted counts nothing.
    """
    counters, (asked, held, resumed) = group.counters, prompt
    counters.last_prompt = prompt
    counters.count(
        group.journal.entries,
        queries=by,
        query_tokens=asked * by,
        hits=(held > 0) * by,
        hit_tokens=held * by,
        resumed=resumed * by,
    )


def withdraw(groups: Sequence[Group]) -> None:
    """See `KVCache.withdraw_prompt`."""
    counters = groups[0].counters
    if counters.last_prompt is not None:
        _count_prompt(groups[0], counters.last_prompt, -1)
        counters.last_prompt = None


def _begin_with(
    groups: Sequence[Group],
    match: PrefixMatch,
    spans: Sequence[Span],
    slots: Sequence[Slot],
    reader: Work,
    *,
    goes_on: bool,
) -> bool | None:
    """Lets a request begin with a match, which is leased, in every group or in none.

    Args:
        groups: of the cache.
        match: the match.
        spans: its pages in each group.
        slots: those that the request gets in each.
        reader: the work that will read the pages.
        goes_on: the slots have the first of these pages, or all.

    Returns:
        Whether all of the pages were still mapped there. None where memory is short; nothing
        changed.
    """
    prefixes, resumed = groups[0].prefixes, goes_on
    taken: list[tuple[Group, Slot]] = []

    def detach() -> None:
        for group, slot in taken:
            group.detach([slot])

    try:
        for group, slot, span in zip(groups, slots, spans, strict=True):
            group.sharing.order_after_writers(span, reader)
            if goes_on:
                resumed &= slot.span.pages == span.pages
                group.resume(slot, span)
            else:
                group.sharing.make_empty(1, [slot])
                if not group.attach_copy(slot, span, match.length):
                    break
            taken.append((group, slot))
    except VMemError as error:
        detach()
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    if len(taken) < len(groups):
        detach()
        return None
    prefixes.hand_over(match, slots[0])
    for group, slot in taken:
        group.enter(slot, match.length)
        group.note_peaks()
    return resumed


def kept_slots(groups: Sequence[Group], spans: Sequence[Span], length: int) -> list[Slot] | None:
    """The free slot that has the most of a prefix mapped, in every group; None: there is none."""
    stale = groups[0].table.index.stale
    if not stale.entries:
        return None
    for span in spans:
        if span.floor(span.pages) != span.pages:
            return None  # the rest of a large page is to be copied
    heads = [group.layout.window_page(length) for group in groups]
    best: list[Slot] | None = None
    for slot in stale:
        if not slot.kept or (best is not None and slot.mapped <= best[0].mapped):
            continue
        each = []
        for group, span, head in zip(groups, spans, heads, strict=True):
            one = group.table.slots[slot.index]
            if not group.sharing.begins(one, span, head):
                break
            each.append(one)
        else:
            best = each
    return best


def empty_slots(groups: Sequence[Group]) -> list[Slot] | None:
    """The free slot that is soonest without a page, in every group; None: there is none.

    None, too, where it would have to wait for an earlier owner's GPU work. Ranks do wait, since the
    progress of that work may differ between them.
    """
    found = groups[0].table.emptiest(1)
    if not found:
        return None
    slots = [group.table.slots[found[0].index] for group in groups]
    if not groups[0].table.lockstep:
        for slot in slots:
            if (slot.job is not None or slot.mapped) and prune(slot.events):
                return None
    return slots


# ---- preemption: rows in host memory -------------------------------------------------------------


class SwappedRequest(Closable):
    """A swapped-out request; the cache's `swap_in` brings it back, once.

    It holds no page: all rows that were there were copied, those in shared pages too, and when it
    comes back all its pages are its own. Rows that had left a window are zero then, and go again.

    Holds host memory (pinned where torch has CUDA) until it is swapped in or closed, whether its
    cache is open or not. A context manager.

    Attributes:
        seq_len: tokens of the request.
        nbytes: host memory that was taken.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        seq_len: int,
        rows: Sequence[memoryview],
        heads: Sequence[int],
    ) -> None:
        self.seq_len = seq_len
        self.nbytes = sum(one.nbytes for one in rows)
        self._groups = tuple(groups)
        self._heads = tuple(heads)  # pages that had left the window, by group
        self._rows: Sequence[memoryview] | None = rows

    @property
    def is_open(self) -> bool:
        """Whether it can still be swapped in."""
        return self._rows is not None

    def close(self, journal: Journal | None = None) -> None:
        """Drops the request and its host memory. Idempotent.

        `journal`: of the calls that this is one with, and undone with (`KVCache.journal`).
        """
        if journal is not None:
            journal.keep(self, "_rows")
        self._rows = None

    def __repr__(self) -> str:
        state = f"{self.nbytes} bytes" if self.is_open else "closed"
        return f"<SwappedRequest: {self.seq_len} tokens, {state}>"


def _host_memory(size: int, device: int | None) -> memoryview:
    """Host memory, pinned where there is a GPU."""
    if device is not None and size:
        import torch

        if torch.cuda.is_available():
            pinned: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return memoryview(pinned)
    return memoryview(bytearray(size))


def _pieces(group: Group, slot: Slot, head: int, length: int) -> tuple[int, list[int]]:
    """Bytes of the first `length` rows from page `head` on, and where they begin in each tensor."""
    layout = group.layout
    size = max(0, layout.bytes_for(length) - head * layout.page_size)
    tensors = range(layout.num_tensors if size else 0)
    return size, [slot.addr + layout.offset(0, head, one) for one in tensors]


def swap_out(groups: Sequence[Group], reqid: int, work: PriorWork) -> SwappedRequest:
    """See `KVCache.swap_out`; of several caches with the same requests, all or none."""
    for group in groups:
        group.sharing.require(SWAP, "swap_out")
    slots = [group.slot(reqid) for group in groups]
    length = groups[0].rows[slots[0].index]
    for group, slot in zip(groups, slots, strict=True):
        group.pager.release(slot)
    heads = [slot.head for slot in slots]
    if any(heads):
        _check_return(groups, slots, length)
    pieces = [
        _pieces(group, slot, head, length)
        for group, slot, head in zip(groups, slots, heads, strict=True)
    ]
    rows = [
        _host_memory(size * group.layout.num_tensors, group.device)
        for group, (size, _) in zip(groups, pieces, strict=True)
    ]
    work.wait()
    for group, (size, addresses), held in zip(groups, pieces, rows, strict=True):
        for tensor, address in enumerate(addresses):
            group.context.read_into(address, held[tensor * size : (tensor + 1) * size])
    swapped = SwappedRequest(groups, length, rows, heads)
    _release(groups, slots, None)  # the work is over
    groups[0].journal.on_abort(partial(bring_back, groups, swapped, slots[0].index))
    for group in groups:
        group.reclaim_idle()
    return swapped


def _check_return(groups: Sequence[Group], slots: Sequence[Slot], length: int) -> None:
    """Raises OutOfMemory if a request could never come back: that takes all its pages at once."""
    needed = held = 0  # what is held comes back, if no other request uses it
    for group, slot in zip(groups, slots, strict=True):
        tensors = group.layout.num_tensors
        own = slot.granted - slot.shared - sum(slot.places.away(slot.shared, slot.granted).values())
        needed += group.layout.pages_for(length) * tensors
        held += (own + group.reclaimer.shared.idle(slot.span, users=1)) * tensors
    if not groups[0].pager.can_have(needed - held, {}):
        reclaimer = groups[0].reclaimer
        room = held + reclaimer.obtainable({})
        raise OutOfMemory(
            f"reqid {slots[0].index}: {held} pages are its alone, but to be swapped in its "
            f"{length} tokens need {needed} for a moment, and {room} can be had; free it and "
            "compute it again",
            errno=errno.ENOMEM,
            op="KVCache.swap_out",
            limit=room,
        )


def bring_back(groups: Sequence[Group], swapped: SwappedRequest, reqid: int) -> None:
    """Undoes a `swap_out` whose result its caller never got. Idempotent."""
    slot = groups[0].table[reqid]
    if swapped.is_open and not slot.active:
        swap_in(groups, swapped, None, into=reqid)


def swap_in(
    groups: Sequence[Group], swapped: SwappedRequest, stream: Any, into: int | None = None
) -> int | None:
    """See `KVCache.swap_in`; into several caches with the same requests, all or none.

    `into`: the reqid that it shall have, which is free; None: any.
    """
    if not isinstance(swapped, SwappedRequest):
        raise TypeError(f"expected a SwappedRequest, not {swapped!r:.80}")
    if swapped._rows is None:
        raise BadHandle(
            f"{swapped!r} was closed or swapped in before", errno=errno.EBADF, op="KVCache.swap_in"
        )
    if swapped._groups != tuple(groups):
        raise invalid(f"{swapped!r} is another cache's")
    length = swapped.seq_len
    if into is None:
        make_free_alike(groups)
        found = groups[0].fit(length)
    else:
        found = groups[0].table[into]
    if found is None:
        return None
    slots = [group.table[found.index] for group in groups]
    for group, slot in zip(groups, slots, strict=True):
        group.pager.release(slot)
    for group, slot in zip(groups, slots, strict=True):
        group.take(slot)

    def give_back() -> None:
        for group, slot in zip(groups, slots, strict=True):
            group.release(slot, None)

    try:
        want = [
            (group, [(slot, group.layout.pages_for(length))] if length else [])
            for group, slot in zip(groups, slots, strict=True)
        ]
        if not grow(want, background=False):
            give_back()
            return None
        for group in groups:
            group.pager.settle(stream)
        # Zero-fills, and earlier owners' work where nothing is filled: ordered before it just now.
        wait_for(record(stream, groups[0].device))
        groups[0].journal.checkpoint()  # what is granted is written: its pages are never clean
        both = zip(groups, slots, swapped._heads, swapped._rows, strict=True)
        for group, slot, head, rows in both:
            size, addresses = _pieces(group, slot, head, length)
            for tensor, address in enumerate(addresses):
                group.context.write(address, rows[tensor * size : (tensor + 1) * size])
    except VMemError:
        give_back()
        raise
    for group, slot, head in zip(groups, slots, swapped._heads, strict=True):
        group.enter(slot, length)
        if group.window is not None and head:
            group.window.resume(slot, head)
        group.note_peaks()
    swapped.close(groups[0].journal)
    return found.index


# ---- fewer rows ----------------------------------------------------------------------------------


def _check_kept(length: int, reqid: int, held: int) -> None:
    """Raises InvalidArgument unless a request that holds so many tokens can keep `length`."""
    if not 0 <= length <= held:
        raise invalid(f"length {length}: reqid {reqid} holds {held} tokens", limit=held)


def truncate(groups: Sequence[Group], reqid: int, length: int, work: PriorWork) -> int:
    """See `KVCache.truncate`; of several caches with the same requests, all or none."""
    slots = [group.slot(reqid) for group in groups]
    rows, held = operator.index(length), max(group.rows[slots[0].index] for group in groups)
    _check_kept(rows, slots[0].index, held)
    for group, slot in zip(groups, slots, strict=True):
        group.check_back(slot, rows)
    if rows == held:
        _give_back_overread(list(zip(groups, slots, strict=True)), rows, work)
        return 0
    for group, slot in zip(groups, slots, strict=True):
        page = group.layout.bytes_for(rows) // group.layout.page_size
        group.mover.shorten(slot, page, work)
    each = [Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)]
    if any(one.unmaps for one in each):
        for one in each:
            one.group.pager.release(one.slot)
        each = [Truncation.of(one.group, one.slot, rows) for one in each]
        work.wait()
        if not _unmap_all(each, partial(_complete, groups, reqid, slots[0].owner, rows, work)):
            return -1
    _shorten(each, work)
    return 0


def copied(groups: Sequence[Group], reqid: int, length: int) -> int:
    """See `KVCache.copied_bytes`."""
    slots = [group.slot(reqid) for group in groups]
    _check_kept(length, slots[0].index, max(group.rows[slots[0].index] for group in groups))
    each = [Truncation.of(group, slot, length) for group, slot in zip(groups, slots, strict=True)]
    return sum(one.new_pages for one in each) * groups[0].layout.page_size


def _shorten(each: Sequence[Truncation], work: PriorWork) -> None:
    """Notes the truncation in the records of every group, then unmaps what policy does not keep.

    `work`: the last work on the rows.
    """
    disowned = [one for one in each if not one.unmaps and one.keep < one.slot.granted]
    event = work.record() if disowned else None
    for one in disowned:
        group, slot = one.group, one.slot
        group.pager.shrink(slot, one.keep)
        group.reclaimer.own_away = None
        slot.events = [*prune(slot.events), *(() if event is None else (event,))]
    for one in each:
        group, slot = one.group, one.slot
        if group.promoter is not None:
            group.promoter.shorten(slot, one.first)
        group.prefixes.shorten(slot, one.rows)
        group.enter(slot, one.rows)
        group.table.changes += 1
    for one in disowned:
        if not one.group.config.deferred_reclaim and one.slot.job is None:
            one.group.reclaimer.try_unmap(one.slot, one.keep)


def _give_back_overread(both: Sequence[tuple[Group, Slot]], rows: int, work: PriorWork) -> None:
    """Takes back the pages that a prefill's kernel might read past the request's rows.

    They were never written, so the request may get them again as they are.
    """
    each = []
    for group, slot in both:
        places = slot.places
        keep = max(places.whole_away(group.layout.pages_for(rows)), places.away_end, slot.shared)
        if keep < slot.granted and slot not in group.mover.moves:
            each.append((group, slot, keep))
    event = work.record() if each else None
    for group, slot, keep in each:
        group.pager.shrink(slot, keep, written=False)
        group.reclaimer.own_away = None
        group.table.changes += 1
        if event is not None:
            slot.events = [*prune(slot.events), event]
        if not group.config.deferred_reclaim and slot.job is None:
            group.reclaimer.try_unmap(slot, keep)


def _complete(groups: Sequence[Group], reqid: int, owner: int, rows: int, work: PriorWork) -> None:
    """Completes a truncation that an exception ended after pages had been unmapped.

    Raises:
        NotRecoverable: it could not; the request has lost rows, and the text names it.
    """
    slots = [group.table[reqid] for group in groups]
    if slots[0].owner != owner or any(slot.lost for slot in slots):
        return
    try:
        done = truncate(groups, reqid, rows, work) == 0
    except VMemError as error:
        raise groups[0].table.lose(slots[0], error) from error
    if not done:
        short = "memory is short for its last page"
        raise groups[0].table.lose(
            slots[0], OutOfMemory(short, errno=errno.ENOMEM, op="KVCache.truncate")
        )
    _shorten(
        [Truncation.of(group, slot, rows) for group, slot in zip(groups, slots, strict=True)], work
    )


@dataclass
class Truncation:
    """The plan for a slot's pages.

        0 ......... length ......... granted ......... mapped
        | rows kept | dropped        |                 |
        | pages kept   | no owner from here on         |

    Pages of the request's own stay mapped, as those of a freed slot do: the request may have them
    again, zeroed, and whoever is short may take them. Pages that a request shares or that lie
    outside the device cannot stay without an owner. They are unmapped at once, and of a
    shared page that is kept in part the request gets a copy of its own, since it may write past
    its last row.

    Attributes:
        rows: tokens that are kept.
        first: the page that the first dropped row begins in.
        keep: pages that the request keeps; a large one outside the device as a whole.
        shared: of these, shared ones.
        copied: end of the pages, from `shared` on, that copies take the place of.
        end: pages from here on go where pages are unmapped at once.
        unmaps: they are.
        addresses: where the copies are before they take their place.
    """

    group: Group
    slot: Slot
    rows: int
    first: int
    keep: int
    shared: int
    copied: int
    end: int
    unmaps: bool
    addresses: Reservation | None = None

    @classmethod
    def of(cls, group: Group, slot: Slot, rows: int) -> Truncation:
        """The slot is the request's, without a move under way past its rows."""
        layout, places = group.layout, slot.places
        first, rest = divmod(layout.bytes_for(rows), layout.page_size)
        keep = min(places.whole_away(layout.pages_for(rows)), slot.granted)
        shared = min(slot.shared, places.floor(first))
        copied = shared
        if shared < slot.shared:
            if rest or shared < first:
                copied = min(places.ceil(keep), slot.shared)
            else:
                keep = shared  # what a kernel may over-read comes with the next step
        unmaps = shared < slot.shared or places.away_end > keep
        end = max(places.ceil(keep), copied)
        return cls(group, slot, rows, first, keep, shared, copied, end, unmaps)

    @property
    def stride(self) -> int:
        """Bytes of the copies in each tensor."""
        return (self.copied - self.shared) * self.group.layout.page_size

    @property
    def new_pages(self) -> int:
        """Physical pages that the copies take."""
        return (self.copied - self.shared) * self.group.layout.num_tensors

    def copy(self) -> bool:
        """Copies what is kept of shared pages; False where memory is short.

        The request's own work is over; that of others who wrote the shared pages may not be.
        """
        group, slot, layout = self.group, self.slot, self.group.layout
        if not self.new_pages:
            return True
        if not group.pager.have(self.new_pages):
            return False
        for block, *_ in slot.shared_part(self.shared, self.copied).parts:
            for event in prune(block.events):
                wait_for(event)
        nbytes = layout.bytes_for(self.rows) - self.shared * layout.page_size
        ops = OpBatch(1)
        addresses = group.scratch.take(self.stride * layout.num_tensors)
        ops.populate(
            addresses.addr,
            self.stride,
            layout.num_tensors,
            self.stride,
            layout.page_size,
            copy_from=slot.addr + self.shared * layout.page_size,
            copy_stride=layout.tensor_bytes,
            copy_bytes=nbytes,
        )
        try:
            with group.mapper.transaction() as change:
                group.reclaimer.held += self.new_pages
                change.run(ops, waits=group.counters.waits)
        except VMemError as error:
            group.scratch.give(addresses)
            if group.sharing.is_shortage(error):
                return False
            raise
        self.addresses = addresses
        group.counters.grown += self.new_pages
        return True

    def drop_copy(self) -> None:
        """Undoes `copy`."""
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            self.group.scratch.give_mapped(addresses, self.stride * self.group.layout.num_tensors)
            self.group.reclaimer.held -= self.new_pages
            self.group.counters.reclaimed += self.new_pages

    def unmap(self) -> None:
        """Maps the copies over shared pages, unmaps what follows: one batch, all or nothing."""
        group, slot, layout = self.group, self.slot, self.group.layout
        tensors = layout.num_tensors
        ops = OpBatch(3)
        if self.addresses is not None:
            scratch, size = self.addresses.addr, self.stride
            ops.map(
                slot.addr + self.shared * layout.page_size,
                size,
                group.mapper.gather(scratch, size, tensors, size),
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
            )
            ops.unmap(scratch, size, tensors, size)
        if self.end < slot.mapped:
            ops.unmap(
                slot.addr + self.end * layout.page_size,
                (slot.mapped - self.end) * layout.page_size,
                tensors,
                layout.tensor_bytes,
            )
        try:
            with group.mapper.transaction() as change:
                tail = self._note()
                change.run(ops, slot.events, group.counters.waits)
        except NotRecoverable as error:
            raise group.table.lose(slot, error) from error
        group.reclaimer.unref(tail)
        if self.addresses is not None:
            addresses, self.addresses = self.addresses, None
            group.scratch.give(addresses)

    def _note(self) -> Span:
        """What `unmap` does, in the records; returns the shared pages that go."""
        group, slot, places = self.group, self.slot, self.slot.places
        own = max(self.end, slot.shared)
        away = places.away(own, slot.mapped)
        gone = max(0, slot.mapped - own) - sum(away.values())
        tail = slot.shared_part(self.shared, slot.shared)
        places.forget(self.shared, self.copied)
        places.forget(self.end, slot.mapped)
        mapped, granted = min(slot.mapped, self.end), max(self.keep, places.away_end)
        group.pager.replace(slot, slot.shared_part(0, self.shared), mapped, granted)
        group.reclaimer.shared.use(tail, end=True)
        group.reclaimer.count_freed(gone, away)
        group.enter(slot, self.rows)
        return tail


def _unmap_all(each: Sequence[Truncation], complete: Callable[[], None]) -> bool:
    """Unmaps at once what cannot stay, in every group; False, and nothing changed: memory is short.

    `complete`: does the rest, if an exception from outside comes after the first unmap.

    Raises:
        NotRecoverable: the request has lost rows; the text names it. VMemError: nothing changed.
    """
    begun = [one for one in each if one.unmaps]
    done: list[Truncation] = []
    try:
        if not all(one.copy() for one in begun):
            _drop_copies(begun)
            return False
        begun[0].group.journal.on_abort(complete)
        for one in begun:
            one.unmap()
            done.append(one)
    except VMemError as error:
        _drop_copies(begun)
        if done and not isinstance(error, NotRecoverable):
            one = begun[len(done)]
            raise one.group.table.lose(one.slot, error) from error
        raise
    return True


def _drop_copies(begun: Sequence[Truncation]) -> None:
    for one in begun:
        one.drop_copy()


# ---- memory given back ---------------------------------------------------------------------------


IDLE_SECONDS = 0.5  # `KVCacheConfig.idle_seconds` of None, where the context is the cache's own
_LOOKS = 4  # within idle_seconds, so that what is idle is trimmed a quarter late at most
_PAUSE_S = 0.001  # between two pieces of it, so that a waiting call gets the lock


def begin_trim(group: Group, prefixes: bool, leased: bool = False, kept: bool = True) -> bool:
    """Begins to unmap all pages that no request owns; True when no unmap is in flight.

    `kept`: of kept slots, too. That gives no memory back, since what they map is recorded.
    """
    group.pager.poll()
    group.reclaimer.poll()
    group.mover.sweep()
    if prefixes:
        group.prefixes.evict_all(leased)
    group.reclaimer.release_stale(kept=kept)
    for slot in group.table.victims():
        if kept or not slot.kept:
            group.reclaimer.try_unmap(slot, slot.granted)
    return not group.reclaimer.unmaps


def trim(manager: Manager, prefixes: bool, compact: bool | None, stream: Any, before: int) -> int:
    """See `KVCache.trim`; `before`: what the context had taken from the device."""
    groups, context = manager.groups, manager.context
    unmap_idle(groups, prefixes)
    context.trim(0)
    if compact:
        _compact(manager, stream)
    elif compact is None and can_compact(manager):
        with groups[0].counters.waiting():
            for event in last_work(groups):
                wait_for(event)
            context.compact()
    for group in groups:
        group.reclaimer.raise_errors()
    back = max(0, before - context.stats().slab_bytes)
    _log.debug("trim: %d bytes given back to the device, %d had been taken", back, before)
    return back


def _compact(manager: Manager, stream: Any) -> None:
    """Empties slabs that are used in part.

    Raises:
        NotSupported: the context is not the cache's own.
    """
    if not manager.owns_context:
        raise NotSupported(
            "compact: the context is not the cache's own, and others may be using its pages; "
            "Context.compact is for whoever knows them all",
            errno=errno.EOPNOTSUPP,
            op="KVCache.trim",
        )
    first = manager.groups[0]
    with first.counters.waiting():
        wait_for_device(stream, first.device)
        manager.context.compact()


def can_compact(manager: Manager) -> bool:
    """Whether no GPU work can be using live pages, once the work in `last_work` is over.

    Compaction replaces pages under their addresses, so no GPU work may touch them, and a cache does
    not see what an engine launches. It only knows which requests that work may use: those that the
    last `step` named, and, in a context of others, any.
    """
    groups = manager.groups
    if not manager.owns_context:
        return False
    if groups[0].named and any(slot.active for slot in groups[0].table):
        return False
    return all(
        any(group.owns(found) for group in groups) for found in manager.context.reservations()
    )


def last_work(groups: Sequence[Group]) -> list[Any]:
    """The GPU work that is not known to be over, where the last `step` named no request."""
    events: list[Any] = []
    for group in groups:
        group.rested = prune(group.rested)
        events += group.rested
        for slot in group.table:
            slot.events = prune(slot.events)
            events += slot.events
        for block in group.reclaimer.shared.blocks:
            block.events = prune(block.events)
            events += block.events
    return events


def unmap_idle(groups: Sequence[Group], prefixes: bool) -> None:
    """Unmaps all pages that no request owns, and waits; failures are in `Reclaimer.errors`."""
    for group in groups:
        group.pager.finish_idle()
        with group.counters.waiting():
            while not begin_trim(group, prefixes, leased=True):
                group.reclaimer.finish_all()
                if group.reclaimer.errors:
                    break


def _activity(manager: Manager) -> list[tuple[int, int, int, int]]:
    """Differs after every call that takes, frees or steps a request."""
    return [group.activity() for group in manager.groups]


class IdleThread:
    """Trims a cache once for every time that it is idle for so long; ends with the cache.

    An idle engine makes no calls, so its calls cannot notice that it is. A thread looks a few times
    within `idle_seconds` whether a request was taken, given back or stepped, which costs those
    calls nothing. What lives moves together slab by slab (`Context.compact`), and the lock is free
    between two: a call that comes in waits for one, half of whose pages at most are copied and
    mapped again, and ends it.

    What is no failure of the cache's own, such as an error of torch for an event, is logged the
    first time; the next look tries again.

    Args:
        manager: of the cache that is trimmed.
        seconds: how long it is idle first.

    Attributes:
        running: it was started, and has not ended.
    """

    def __init__(self, manager: Manager, seconds: float) -> None:
        self.running = False
        self._manager = weakref.ref(manager)
        self._period = seconds / _LOOKS
        self._ended = Flag()
        self._seen: list[tuple[int, int, int, int]] = []
        self._quiet = 0  # looks in a row that saw the same
        self._trimmed = False
        self._failed = False

    def start(self) -> None:
        """Starts it; the process does not wait for its end."""
        self.running = True
        start_new_thread(self._watch, ())

    def end(self) -> None:
        """Lets the thread end; does not wait for it."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            try:
                self._look()
            except Exception:
                if not self._failed:
                    _log.exception("an idle cache could not be trimmed; it will be tried again")
                self._failed = True
        self.running = False

    def _look(self) -> None:
        """Trims when nothing happened in the last looks. Keeps no reference to the cache."""
        manager = self._manager()
        if manager is None:
            self.end()
            return
        now = _activity(manager)
        if now != self._seen:
            self._seen, self._quiet, self._trimmed = now, 0, False
            return
        self._quiet += 1
        if self._quiet >= _LOOKS and not self._trimmed:
            pieces = (self._trim, self._compact)
            self._trimmed = all(self._run(manager, piece) for piece in pieces)

    def _run(self, manager: Manager, piece: Callable[[Manager], bool | None]) -> bool:
        """Repeats a piece of work, each time with the lock, until it has no more to do.

        Returns:
            Whether it is complete, or will not be; False: the next look goes on.
        """
        more: bool | None = True
        while more:
            with manager.lock, manager.journal:
                if self._ended.is_set() or manager.closed or not manager.context.is_open:
                    return True
                if _activity(manager) != self._seen:
                    return False
                try:
                    more = piece(manager)
                except VMemError as error:
                    manager.groups[0].reclaimer.errors.append(error)  # the next step raises it
                    return True
            self._ended.wait(_PAUSE_S)
        return more is not None

    @staticmethod
    def _trim(manager: Manager) -> bool | None:
        """Unmaps, and gives empty slabs back. False: done. None: some must wait."""
        groups, prefixes = manager.groups, manager.groups[0].config.idle_prefixes
        done = [begin_trim(group, prefixes, kept=prefixes) for group in groups]  # in each
        if not all(done):
            return None
        manager.context.trim(0)
        _log.debug("idle: trimmed, %d pages stay", sum(one.reclaimer.held for one in groups))
        return False

    @staticmethod
    def _compact(manager: Manager) -> bool | None:
        """Empties one slab, where that is safe. True: there may be more. None: work goes on."""
        wanted = manager.groups[0].config.idle_compact
        if wanted is False or not manager.owns_context:
            return False
        if wanted:
            wait_for_device(None, manager.groups[0].device)
        elif not can_compact(manager):
            return False
        elif last_work(manager.groups):
            return None
        return manager.context.compact(1) > 0


# ---- pages that every slot has -------------------------------------------------------------------


_WRITER = 0


class CommonPages:
    """What `KVCache.map_common_pages` returns: the first pages of all slots, which it has taken.

        reqid 0   | common, writable  | its own ...
        reqid 1   | common, read-only | its own ...

    vAttention's artifact maps them writable everywhere, only to show that several requests can have
    the same page. Here a write through a second reqid is a fault, never another's rows.

    A slot is given back with `renew`, and has the common pages again.

    Attributes:
        pages: common pages per tensor.
        rows: what they hold.
        idle: slots that no request has.
    """

    def __init__(self, owner: Manager, tokens: int) -> None:
        groups = (group,) = owner.groups
        config, layout = group.config, group.layout
        tokens = operator.index(tokens)
        if not 0 < tokens <= config.max_seq_len:
            raise invalid(
                f"map_common_pages({tokens}): not between 0 and {config.max_seq_len}",
                limit=config.max_seq_len,
            )
        self._owner = owner
        with owner.lock, owner.journal:
            owner.open()
            group.sharing.require(FORK, "map_common_pages")
            if layout.state or group.window is not None:
                what = "have a state, which requests write all the time"
                if group.window is not None:
                    what = "have a window, which common pages would leave"
                raise NotSupported(
                    f"map_common_pages: the layers {what}", errno=errno.EOPNOTSUPP, op="KVCache"
                )
            unit = group.prefixes.unit_pages[0]
            self.pages = min(-(-layout.pages_for(tokens) // unit) * unit, layout.slot_pages)
            lengths = [0] * config.max_batch
            self.rows = lengths[_WRITER] = layout.capacity(self.pages)
            claim(groups, _WRITER)
            slot = group.table[_WRITER]
            try:
                if step(groups, lengths, None) == -1:
                    raise OutOfMemory(
                        f"map_common_pages({tokens}) needs {self.pages} pages in every tensor",
                        errno=errno.ENOMEM,
                        op="map_common_pages",
                        bytes=self.pages * layout.num_tensors * layout.page_size,
                    )
                group.enter(slot, 0)
                group.pager.release(slot)
                handle = group.sharing.gather(slot, self.pages)
                group.sharing.donate(slot, self.pages, handle, None, unit)
                slot.writer = True
                self._span = slot.span
                others = group.sharing.make_empty(config.max_batch - 1)
                if others is None:
                    raise invalid(f"map_common_pages({tokens}): a slot is broken or taken")
                if others:
                    group.attach(others, self._span)
            except VMemError:  # after anything else the journal takes all of it back
                free(groups, _WRITER, None, None, None)
                raise
            self.idle = set(range(config.max_batch))

    def renew(self, reqid: int) -> None:
        """Ends a request; its slot has the common pages and nothing else. Waits for its GPU work.

        Does the same for a slot that is free, as after a call that failed.

        Raises:
            VMemError: the slot could not be emptied or mapped again; it is free, and has none.
        """
        owner = self._owner
        with owner.lock, owner.journal:
            groups = (group,) = owner.open()
            slot = group.slot(reqid, taken=False)
            group.reclaimer.lend(self._span)  # where the slot's reference is the last one
            if slot.active:
                free(groups, reqid, None, None, None)
            group.sharing.empty(slot)
            group.attach([slot], self._span)
            group.reclaimer.lend(EMPTY)
        self.idle.add(reqid)
