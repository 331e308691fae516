# SPDX-License-Identifier: MIT
"""The groups of layers of a cache, and the lock and the journal of its calls.

A cache of equal layers has one group. Each call takes the `Manager`'s lock and journal, asks it for
the groups and hands them to a function that does it in all of them or in none: `requests`, `steps`,
`admission`, `forks`, `prefix_alloc`, `truncation`, `tiers`, `swap`, `trim`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import Any

from pyvmem.errors import BadHandle, Busy, NotSupported
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.group import Group, make_parts, open_context, pool_low, prepare
from pyvmem.kvcache.growth import OPS
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.prefix_cache import PrefixCache
from pyvmem.kvcache.slots import SlotTable
from pyvmem.memory.context import Context
from pyvmem.memory.ops import OpBatch
from pyvmem.plumbing.reentry import call_part, reentrant_lock
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import expect

__all__ = ["Manager", "check_memory"]


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
        self._opens = partial(open_context, self._configs, backend, device=device)
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
                self.journal.on_abort(self._give_back)
                self._give_back()

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
        ops = OpBatch(OPS * sum(config.max_batch for config in configs))
        for place, (config, one) in enumerate(zip(configs, parts, strict=True)):
            group = Group(config, one, journal, table, prefixes, place, ops)
            journal.change([[self, "groups", (*self.groups, group)]])
        if budget is not None:
            for group in self.groups:
                call_part(partial(budget.join, group.pager, group.config.memory_floor))
        prepare(self.groups)

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

    def only(self, what: str, alone: str = "") -> Group:
        """The group of equal layers, where there is one.

        Raises:
            NotSupported: there are more; or the cache is one of several ranks, which have agreed
                on what `alone` names.
        """
        reason = ""
        if len(self.groups) > 1:
            reason = f"the layers are in {len(self.groups)} groups; see caches"
        elif alone and self.groups[0].table.lockstep:
            reason = f"the ranks have agreed on their {alone}"
        if reason:
            raise NotSupported(f"{what}: {reason}", errno=errno.EOPNOTSUPP, op="KVCache")
        return self.groups[0]

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
                f"the cache has {counted(count, 'live tensor')}: drop every tensor and view, then "
                "close it (a notebook keeps what a cell displayed)",
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
        for group in self.groups[:1]:
            group.prefixes.close()
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
