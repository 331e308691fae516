# SPDX-License-Identifier: MIT
"""A cache's groups of layers, and the lock and journal that its calls use.

A cache whose layers all have the same shape has one group. Each call enters the `Manager`'s lock
and journal, gets the groups from the manager and passes them to a function that acts on all of them
or none: `requests`, `steps`, `admission`, `forks`, `prefix_alloc`, `truncation`, `tiers`, `swap`,
`trim`.
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
from pyvmem.kvcache.group import Group, make_layout, open_context, pool_low, prepare
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
    """A cache's groups of layers, which share their requests, and their lock.

    Args:
        name: name of the cache's class, for errors.
        whole: the policy, with the memory limits for all groups together.
        configs: one per group, without memory limits, since the groups share a budget. None: a
            single group with configuration `whole`.
        context: the context to use; None: the budget's context or, without a budget, a new context
            that the manager owns.
        backend: back end of an owned context.
        device: device of an owned context.
        budget: memory to share with other caches; None: several groups share a new budget.

    Attributes:
        table: class of the tables that choose slots.
        context: the context of all groups; set by `make` if not set earlier.
        groups: the groups; empty before `make`.
        lock, journal: entered by every call, in this order.
        owns_context: True if the context is closed with the cache.
        closed: True once the cache is closed.
    """

    table: type[SlotTable] = SlotTable
    context: Context

    def __init__(
        self,
        name: str,
        whole: KVCacheConfig,
        configs: Sequence[KVCacheConfig] | None = None,
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
    ) -> None:
        expect("config", whole, KVCacheConfig)
        expect("context", context, Context, optional=True)
        expect("budget", budget, Budget, optional=True)
        check_memory(whole, configs is not None, context, budget)
        self.closed = self._closing = False
        self._name = name
        self._whole = whole
        self._configs = [whole] if configs is None else list(configs)
        self._shares = configs is not None  # several groups share a budget
        self.owns_context = context is None and budget is None
        if budget is not None:
            self.context = budget.context
        elif context is not None:
            self.context = context
        self._opens = partial(open_context, self._configs, backend, device=device)
        self._use(budget)
        self.groups: tuple[Group, ...] = ()

    def _use(self, budget: Budget | None) -> None:
        """Adopts a budget's lock and journal, or creates new ones."""
        self.budget = budget
        self.lock = reentrant_lock() if budget is None else budget.lock
        self.journal = Journal() if budget is None else budget.journal

    def make(self) -> None:
        """Opens the context if none was passed in, and creates the groups.

        If it raises, call `abandon`.
        """
        if self.owns_context:
            self.context = self._opens(
                pool_low=sum(map(pool_low, self._configs)), max_mappings=self._whole.max_mappings
            )
            self.context.remains.unclaimed = True  # reset by the first call
        if self._shares and self.budget is None:
            self._use(Budget(self.context, self._whole.memory_limit))
        budget, journal, table = self.budget, self.journal, self.table
        with self.lock, journal:
            journal.on_abort(self._give_back)
            layouts = [make_layout(config, self.context) for config in self._configs]
            least = sum(one.page_bytes for one in layouts)
            if budget is not None and len(layouts) > 1 and budget.total_bytes < least:
                raise invalid(
                    f"{budget.total_bytes} bytes are less than one page in every tensor, {least}",
                    size=budget.total_bytes,
                    limit=least,
                )
            prefixes = PrefixCache(layouts, journal, lockstep=table.lockstep)
            ops = OpBatch(OPS * self._whole.max_batch * len(layouts))
            for place, layout in enumerate(layouts):
                group = Group(layout, self.context, journal, budget, table, prefixes, place, ops)
                journal.change([[self, "groups", (*self.groups, group)]])
            if budget is not None:
                for group in self.groups:
                    call_part(partial(budget.join, group.pager, group.config.memory_floor))
            prepare(self.groups)

    def abandon(self) -> None:
        """Cleans up after an exception in `make`."""
        if hasattr(self, "context"):
            with self.lock, self.journal:
                self.journal.on_abort(self._give_back)
                self.journal.made()
                self._give_back()

    def open(self) -> tuple[Group, ...]:
        """Returns the groups, for a call that holds the lock.

        Raises:
            BadHandle: the cache or its context is closed. ForkedProcess: the cache belongs to the
                parent process.
        """
        if self.closed or self._closing:
            state = "closed"
            if not self.closed:
                state = "half closed: an exception interrupted close; call close again"
            raise BadHandle(f"the {self._name} is {state}", errno=errno.EBADF, op=self._name)
        if not self.context.is_open:
            self.context.stats()  # raises if closed, or in a forked child
        self.context.remains.unclaimed = False
        return self.groups

    def only(self, what: str, alone: str = "") -> Group:
        """Returns the cache's only group.

        Raises:
            NotSupported: there are several groups; or there are several ranks, and `alone` names
                something that they have agreed on.
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
        """Releases everything, for a call that holds the lock. Idempotent.

        Raises:
            Busy: tensors are alive. BadHandle: the file descriptor of `stream` is closed. Nothing
                has changed.
        """
        if self.closed:
            return
        work = PriorWork(stream, self.context.cuda_device)
        living = [one.reservation for one in self.groups if one.reservation.live_arrays]
        if living and self.context.is_open:
            count = sum(one.live_arrays for one in living)
            raise Busy(
                f"the cache has {counted(count, 'live tensor')}: drop every tensor and view, then "
                "close it (a notebook keeps what a cell displayed)",
                errno=errno.EBUSY,
                op=f"{self._name}.close",
                addr=living[0].addr,
                bytes=living[0].nbytes,
            )
        if self.context.is_open and any(slot.active for one in self.groups for slot in one.table):
            work.record()
        self._closing = True
        self._give_back(work)
        self.closed = True

    def _give_back(self, work: PriorWork | None = None) -> None:
        """Closes the groups and the owned context; safe to call again."""
        # The memory of a closed context is already freed, or belongs to the parent process.
        if self.context.is_open:
            for group in self.groups:
                group.close(work)
        for group in self.groups[:1]:
            group.prefixes.host.close()
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
        raise invalid(f"max_mappings {whole.max_mappings}: the given context has its own limit")
    if budget is None:
        if whole.memory_floor:
            raise invalid(f"memory_floor {whole.memory_floor}: the cache has no budget")
        return
    if several and (whole.memory_limit or whole.memory_floor):
        raise invalid("memory_limit and memory_floor have no effect with a given budget")
    if context is not None and context is not budget.context:
        raise invalid(f"{context!r} is not the budget's context, {budget.context!r}")
