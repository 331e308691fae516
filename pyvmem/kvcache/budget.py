# SPDX-License-Identifier: MIT
"""Physical memory that several caches share, each with a floor and a ceiling.

A cache that uses more than its floor (left) and one that uses less (right), in bytes:

    0 ......... floor ......... used ......... ceiling          0 .... used .... floor .... ceiling
    | reserved    | others may reclaim     |                    | used | reserved    |
    |             | unowned pages          |

The sum of ``max(used, floor)`` over the caches never exceeds the budget's total.

All caches in a budget share one lock. A cache that is short of memory can therefore inspect the
others and reclaim from them without deadlock, and whether a call gets its memory depends only on
the order of calls.

Several engines may share a budget, each making calls back to back in its own thread. With a
`threading.RLock`, the thread that has just released the lock reacquires it before a waiting thread
wakes up: in one measurement with two caches, a call that maps nothing waited behind a thousand
calls to the other cache. `FairLock` is therefore handed to the first waiter.

A call may hold the lock while it waits for GPU work, so a call to one cache may have to wait for
the GPU work on another cache's free slots. That work must therefore be able to finish without
another call to any cache in the budget. Work that has already been launched can, but an `FdEvent`
that a thread sets only after its next call would cause a deadlock.
"""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pyvmem.errors import BadHandle, Busy, OutOfMemory
from pyvmem.kvcache.checks import bounded, invalid
from pyvmem.kvcache.config import MOST_BYTES
from pyvmem.kvcache.growth import Pager
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.reclaim import Reclaimer, wait_for_unmaps
from pyvmem.kvcache.slots import Slot
from pyvmem.ledger.accounts import Ledger, device_of
from pyvmem.ledger.participant import Participant, weakly
from pyvmem.memory.context import Context
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.reentry import RLock, free_in_children, reentrant_lock, when_collected
from pyvmem.plumbing.units import counted, format_bytes
from pyvmem.plumbing.validation import expect

__all__ = [
    "Budget",
    "BudgetStats",
    "Share",
    "ShareInfo",
    "FairLock",
    "available_bytes",
    "free_bytes",
]


class FairLock(RLock):  # type: ignore[misc]  # final only for type checkers
    """A lock for `with` blocks that is handed to the first waiter, so no thread can barge in.

    The first waiter holds a gate while it waits for the lock. The other waiters queue on the gate,
    in an order that the OS chooses. Both locks are re-entrant, because a finalizer or signal
    handler can run at any line and may call a cache. Leaving the block runs only C code, which no
    signal handler can interrupt.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gate = reentrant_lock()
        free_in_children(self)

    def __enter__(self) -> bool:  # type: ignore[override]
        taken: list[bool] = []
        try:
            if self._is_owned():  # type: ignore[attr-defined]
                # One C call takes the lock and records it, so no signal handler can raise in
                # between.
                taken.extend(map(self.acquire, (True,)))
            else:
                with self._gate:
                    taken.extend(map(self.acquire, (True,)))
            return True
        # If a signal handler raised, the `with` block is never entered, so release the lock here.
        except BaseException:
            if taken:
                self.release()
            raise


# Fraction of a GPU's free memory that a cache uses by default; kernels, libraries and graphs need
# the remainder. `Policy.memory_share` is lower, since it also leaves room for activations.
_PART_OF_CARD = 0.9
_HEADROOM = 256 << 20  # bytes taken from a ledger ahead of need; at most 1/16 of the budget


@dataclass(frozen=True)
class ShareInfo:
    """One cache's part of a budget, in bytes.

    Attributes:
        floor_bytes: memory reserved for the cache (`KVCacheConfig.memory_floor`).
        ceiling_bytes: maximum memory that the cache may use (`KVCacheConfig.memory_limit`).
        used_bytes: size of the cache's physical pages.
    """

    floor_bytes: int
    ceiling_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class BudgetStats:
    """The current state of a `Budget`, in bytes.

    Attributes:
        total_bytes: size of the budget.
        used_bytes: size of its caches' physical pages.
        free_bytes: memory that is neither used by a cache nor reserved by a floor.
        caches: one entry per cache, in order of creation.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    caches: tuple[ShareInfo, ...]


class Budget(Closable):
    """One context's memory, shared by several caches: ``KVCache(config, budget=budget)``.

    A cache may use memory up to its ceiling (`KVCacheConfig.memory_limit`) as long as the other
    caches' floors (`KVCacheConfig.memory_floor`) stay free for them. If too little memory is free,
    unowned pages are reclaimed from the other caches, down to their floors: first from free slots,
    then from recorded prefixes. Pages that a request owns are never taken.

    With a ledger, the total is only a ceiling. The budget then counts as one of the ledger's
    engines, alongside those in other processes (such as vLLM), and may use the memory that the
    ledger grants it. A call that is short of memory posts the shortage in the ledger and returns -1
    or False as usual; a later call gets the memory that other engines have returned by then. When
    another engine is short, a background thread takes the lock and returns unowned pages, down to
    the caches' floors, even while no cache is being called. `vmem top` shows the budget, and
    `vmem limit` lowers its ceiling. `pyvmem.announce` registers an engine that allocates its own
    memory.

    Thread-safe. Calls to its caches run one at a time; a call that waits for GPU work may hold up
    the others.

    Args:
        context: the context that all its caches use; must outlive them.
        total_bytes: physical memory for all caches together; 0: 90% of the GPU's currently free
            memory, or all available memory on the host.
        ledger: the ledger of the context's device. The budget takes ownership of it, and may have
            closed it if this raises. None: memory is not shared with other processes.
        name: the engine's name in the ledger; "" stands for "pyvmem-" and the process id.
        floor_bytes: memory that the ledger's other engines must leave for this budget.

    Raises:
        InvalidArgument: a total that is negative or less than a page; a floor above the total or
            without a ledger; a name already used in the ledger.
        LedgerError: the ledger is full.
        NotSupported: a ledger was given for a GPU in MIG mode.
    """

    def __init__(
        self,
        context: Context,
        total_bytes: int = 0,
        *,
        ledger: Ledger | None = None,
        name: str = "",
        floor_bytes: int = 0,
    ) -> None:
        expect("context", context, Context)
        expect("name", name, str)
        total = bounded("total_bytes", total_bytes, 0, MOST_BYTES)
        least = context.info.granule
        if total and total < least:
            raise invalid(
                f"a budget of {total} bytes is less than one page ({least} bytes)",
                size=max(0, total),
                limit=least,
            )
        self.context = context
        self.total_bytes = total or available_bytes(context)
        self.lock = FairLock()
        self.journal = Journal()
        self._shares: list[Share] = []
        self._ledger: OnLedger | None = None
        self._left = False
        if not (ledger is None or isinstance(ledger, Ledger)):
            raise invalid(f"ledger must be a pyvmem.ledger.Ledger, not {ledger!r}")
        floor_bytes = operator.index(floor_bytes)
        if not 0 <= floor_bytes <= self.total_bytes or (floor_bytes and ledger is None):
            most = self.total_bytes if ledger is not None else 0
            raise invalid(
                f"floor_bytes {floor_bytes}: must be 0 to {most}, the total with a ledger",
                size=max(0, floor_bytes),
                limit=most,
            )
        if ledger is not None:
            name = name or f"pyvmem-{os.getpid()}"
            self._ledger = OnLedger(ledger, context, name, floor_bytes, self.total_bytes)
            when_collected(self, self._ledger.close).atexit = True
            self._ledger.start(weakly(self._tend))

    def __repr__(self) -> str:
        size, caches = format_bytes(self.total_bytes), counted(len(self._shares), "cache")
        return f"<Budget of {size} for {caches}{', on a ledger' * self.on_ledger}>"

    @property
    def on_ledger(self) -> bool:
        """True if the budget is an engine in a ledger, which grants it memory."""
        return self._ledger is not None

    @property
    def granted_bytes(self) -> int:
        """Bytes that all caches together may use now: the total, or the ledger's grant."""
        return self.total_bytes if self._ledger is None else self._ledger.granted

    @property
    def least_bytes(self) -> int:
        """Total size of one page in every tensor of every cache.

        With less memory than this, a request might never be able to run.
        """
        return max(self.context.info.granule, sum(share._column for share in self._shares))

    def close(self) -> None:
        """Leaves the ledger, if any. Idempotent.

        Raises:
            Busy: a cache of the budget is open; nothing has changed.
        """
        with self.lock, self.journal:
            if self._shares and self.context.is_open:
                raise Busy(
                    f"the budget has {counted(len(self._shares), 'open cache')}; close them first",
                    errno=errno.EBUSY,
                    op="Budget.close",
                )
            if self._ledger is not None:
                self._ledger.close()
                self._ledger, self.total_bytes, self._left = None, 0, True

    def set_limit(self, nbytes: int) -> None:
        """Changes the total, without mapping or unmapping anything.

        Raises:
            InvalidArgument: the total is less than a page, less than what the caches use and their
                floors reserve, or more than 2**62; or the budget is on a ledger, where `vmem limit`
                sets the limit.
        """
        with self.lock, self.journal:
            if self._ledger is not None:
                raise invalid("set_limit: the budget is on a ledger; `vmem limit` sets its limit")
            self._poll()
            total, least = bounded("nbytes", nbytes, 0, MOST_BYTES), self.context.info.granule
            if total < max(least, self._reserved()):
                raise invalid(
                    f"a budget of {total} bytes: {self._reserved()} are used or kept by floors, "
                    f"and a page is {least} bytes",
                    size=max(0, total),
                    limit=max(least, self._reserved()),
                )
            self.total_bytes = total

    def reclaim(self, limit: int) -> None:
        """Starts unmapping unowned pages to get down to `limit` bytes; does not wait.

        Memory reserved by floors and pages that requests own are kept.
        """
        with self.lock, self.journal:
            self._poll()
            self._reclaim(self._reserved() - limit)

    def stats(self) -> BudgetStats:
        """Returns the budget's state. Polls batches in flight but does not wait for them."""
        with self.lock, self.journal:
            self._poll()
            return BudgetStats(
                total_bytes=self.total_bytes,
                used_bytes=sum(share.used for share in self._shares),
                free_bytes=self.granted_bytes - self._reserved(),
                caches=tuple(
                    ShareInfo(share.floor, share.ceiling, share.used) for share in self._shares
                ),
            )

    def check(self) -> list[str]:
        """Returns a description of each mismatch in the records, for `KVCache.check_integrity`."""
        reserved, granted = self._reserved(), self.granted_bytes
        if reserved <= granted:
            return []
        return [f"{reserved} bytes are used or kept by floors; the budget has {granted}"]

    def _poll(self) -> None:
        for share in self._shares:
            share.reclaimer.poll()

    def _reserved(self) -> int:
        return sum(max(share.used, share.floor) for share in self._shares)

    # ---- caches ----------------------------------------------------------------------------------

    def join(self, pager: Pager, floor: int) -> None:
        """Adds a new cache; called by `KVCache`.

        Raises:
            BadHandle: the budget is closed.
            InvalidArgument: the floors together exceed the budget.
            OutOfMemory: requests of the other caches own memory that the floor would reserve.
        """
        with self.lock, self.journal:
            if self._left:
                raise BadHandle("the Budget is closed", errno=errno.EBADF, op="KVCache")
            kept = sum(share.floor for share in self._shares)
            if kept + floor > self.total_bytes:
                raise invalid(
                    f"memory_floor {floor}: the budget has {self.total_bytes} bytes, of which the "
                    f"floors of other caches keep {kept}",
                    size=floor,
                    limit=self.total_bytes - kept,
                )
            share = Share(self, pager, floor)
            share.take(floor - share.room())
            if floor > share.room():
                share.finish_idle()
            if share.room() < floor <= share.within_reach():
                share.begin_unmaps(floor - share.room(), {})
                share.evict(floor - share.room() - share.returning())
                wait_for_unmaps(share.others(), lambda: share.room() >= floor)
            if share.room() < floor:
                raise OutOfMemory(
                    f"memory_floor {floor}: requests of the other caches leave "
                    f"{share.within_reach()} bytes of the budget of {self.total_bytes}",
                    errno=errno.ENOMEM,
                    op="KVCache",
                    bytes=floor,
                    limit=share.within_reach(),
                )
            shares = [*self._shares, share]
            self.journal.change([[self, "_shares", shares], [pager.reclaimer, "share", share]])

    def leave(self, pager: Pager) -> None:
        """Removes a cache that has been closed."""
        with self.lock, self.journal:
            self._shares = [share for share in self._shares if share.pager is not pager]

    # ---- the ledger ------------------------------------------------------------------------------

    def _tend(self) -> bool:
        """Runs one pass of the thread: gives memory back or takes more, and reports memory use.

        Returns False to stop the thread.
        """
        with self.lock, self.journal:
            ledger = self._ledger
            if ledger is None:
                return False
            if not self.context.is_open:  # closing the context freed the caches' pages
                ledger.close()
                return False
            self._poll()
            excess = ledger.settle(sum(share.used for share in self._shares))
            if excess > 0:
                self._give_back(ledger, excess)
            else:
                ledger.balance(ledger.granted - self._reserved())
            ledger.report(self.numbers)
            return True

    def _give_back(self, ledger: OnLedger, nbytes: int) -> None:
        """Gives free memory back to the ledger; starts unmapping pages for the rest of `nbytes`."""
        self._reclaim(nbytes - (ledger.granted - self._reserved()))
        ledger.give(min(nbytes, ledger.granted - self._reserved()))
        self.context.trim(0)

    def _reclaim(self, nbytes: int) -> None:
        if nbytes > 0 and self._shares:
            # This share does not belong to a cache, so its `others` lists all caches.
            everyone = Share(self, self._shares[0].pager, 0)
            everyone.begin_unmaps(nbytes, {})
            everyone.evict(nbytes - everyone.returning())

    def numbers(self) -> dict[str, int]:
        """Returns the figures that the ledger shows for the budget, as fields of `EngineInfo`."""
        with self.lock:
            in_use = sum(share.pager.used_pages * share._column for share in self._shares)
            counters = [share.reclaimer.counters for share in self._shares]
            stats = self.context.stats()
            return {
                "least": self.least_bytes,
                "in_use": in_use,
                "cached": max(0, sum(share.used for share in self._shares) - in_use),
                "waits": sum(one.waits.struct.count for one in counters),
                "hits": sum(one.prefix_hit_tokens for one in counters),
                "queries": sum(one.prefix_query_tokens for one in counters),
                "maps": stats.map_calls,
                "handles": stats.mappings,
            }


class Share:
    """A cache's part of a budget: how much it may use and which caches it may reclaim from.

    The caller holds the lock.
    """

    def __init__(
        self, budget: Budget, pager: Pager, floor: int, own: Collection[Reclaimer] = ()
    ) -> None:
        self.budget = budget
        self.pager = pager
        self.reclaimer = pager.reclaimer
        self.layout = pager.layout
        self._column = pager.layout.page_bytes  # memory is freed in multiples of this
        self.floor = floor
        self._own = own

    @property
    def used(self) -> int:
        """Size of the cache's physical pages in bytes."""
        return self.reclaimer.device_pages * self.layout.page_size

    @property
    def ceiling(self) -> int:
        """Maximum number of bytes that the cache may use."""
        return self.reclaimer.limit * self.layout.page_size

    def room(self) -> int:
        """Returns how many bytes the cache could take now without reclaiming from others."""
        budget, taken = self.budget, 0
        for one in budget._shares:  # a plain loop, for speed: every step runs it
            used = one.reclaimer.device_pages * one.layout.page_size
            taken += used if one.pager is self.pager or used > one.floor else one.floor
        return (budget.total_bytes if budget._ledger is None else budget.granted_bytes) - taken

    def total(self) -> int:
        """Returns the size of the budget in bytes."""
        return self.budget.total_bytes

    def beyond(self) -> int:
        """Returns how many bytes the ledger could grant when last read; 0 without a ledger."""
        return 0 if self.budget._ledger is None else self.budget._ledger.hint

    def take(self, nbytes: int) -> None:
        """Asks the ledger for up to `nbytes` more bytes."""
        if self.budget._ledger is not None:
            self.budget._ledger.take(nbytes)

    def ask(self, nbytes: int) -> None:
        """Posts a shortage in the ledger if the budget cannot free `nbytes`.

        The posted amount includes the memory that the ledger still has free, since the other
        engines subtract that memory themselves.
        """
        if self.budget._ledger is not None:
            self.budget._ledger.ask(nbytes - self._inside())

    def engines(self) -> list[tuple[str, int]]:
        """Returns the other engines that hold driver mappings, and how many each of them holds."""
        return [] if self.budget._ledger is None else self.budget._ledger.others()

    def within_reach(self) -> int:
        """Returns what `room` would be if the other caches and the ledger gave all they could."""
        ledger = self.budget._ledger
        return self._inside() + (0 if ledger is None else ledger.beyond())

    def _inside(self) -> int:
        """Returns the part of `within_reach` that the ledger has already granted."""
        return self.room() + sum(one._givable() for one in self._rest())

    def others(self) -> list[Reclaimer]:
        """Returns the reclaimers of the other caches."""
        return [one.reclaimer for one in self._rest()]

    def returning(self) -> int:
        """Returns how many bytes above their floors the other caches are unmapping."""
        return sum(one._returning() for one in self._rest())

    def finish_idle(self) -> None:
        """Waits for growth in the other caches that no request is waiting for."""
        for one in self._rest():
            one.pager.finish_idle()

    def poll(self) -> None:
        """Records the results of the other caches' finished batches."""
        for one in self._rest():
            one.reclaimer.poll()
            one.pager.poll()

    def stop_promoting(self, *, wait: bool = True) -> bool:
        """Cancels promotions in the other caches; returns whether there were any."""
        stopped = [one.pager.mover.stop_promoting(wait=wait) for one in self._rest()]
        return any(stopped)

    def unsettled(self, *, promoting: bool = True) -> int:
        """Returns how many bytes above their floors the other caches would free after a wait."""
        return sum(
            min(one.pager.unsettled({}, promoting=promoting) * one.layout.page_size, one._excess())
            for one in self._rest()
        )

    def leaving(self) -> int:
        """Returns the number of bytes that evicted prefixes of the other caches will free."""
        return sum(one.reclaimer.leaving * one.layout.page_size for one in self._rest())

    def excluding(self, own: Collection[Reclaimer]) -> Share:
        """Returns a copy of the share whose `others` leaves out the reclaimers in `own`."""
        return Share(self.budget, self.pager, self.floor, own)

    def begin_unmaps(self, nbytes: int, keep: Mapping[Slot, int], *, now: bool = True) -> None:
        """Makes the other caches start unmapping enough unowned pages to free `nbytes`.

        `keep` maps slots to the pages per tensor that each must keep. For `now`, see
        `Reclaimer.unmap`.
        """
        # Begin with slots whose unmap need not wait for GPU work.
        if now and not self.pager.reclaimer.table.lockstep:
            late = sum(one.reclaimer.late * one.layout.page_size for one in self._rest())
            self._begin_unmaps(nbytes + late, keep, idle=True, now=now)
        self._begin_unmaps(nbytes, keep, idle=False, now=now)

    def _begin_unmaps(
        self, nbytes: int, keep: Mapping[Slot, int], *, idle: bool, now: bool
    ) -> None:
        for one in self._by_excess():
            reclaimer, column = one.reclaimer, one._column
            reclaimer.release_stale(now=now)
            for slot in one.reclaimer.table.victims():
                if idle and slot.events:
                    continue
                missing = nbytes - self.returning()
                spare = slot.spare_beyond(keep[slot]) if slot in keep else slot.spare
                columns = min(spare, one._excess() // column, -(-missing // column))
                # The owner may still be using part of the 2 MiB entry that maps its surplus pages.
                if not spare:
                    continue
                if columns <= 0 or not reclaimer.try_unmap(slot, slot.mapped - columns, now=now):
                    break

    def evict(self, nbytes: int) -> int:
        """Makes the other caches evict `nbytes` of recorded prefixes that no request uses.

        Returns how many bytes this frees, now or once batches in flight are complete.
        """
        back = 0
        for one in self._by_excess():
            columns = min(one._excess() // one._column, -(-(nbytes - back) // one._column))
            if columns > 0:
                back += one.reclaimer.evict(columns) * one._column
        return back

    def check(self) -> list[str]:
        """Returns a description of each inconsistency in the budget's records."""
        return self.budget.check()

    # ---- the arithmetic --------------------------------------------------------------------------

    def _rest(self) -> Iterator[Share]:
        shares = self.budget._shares
        return (one for one in shares if one is not self and one.reclaimer not in self._own)

    def _by_excess(self) -> list[Share]:
        return sorted(self._rest(), key=Share._excess, reverse=True)

    def _excess(self) -> int:
        """Returns how many bytes above its floor the cache uses, excluding those being unmapped."""
        returning = self.reclaimer.returning * self.layout.page_size
        return max(0, self.used - returning - self.floor)

    def _returning(self) -> int:
        return max(0, self.used - self.floor) - self._excess()

    def _givable(self) -> int:
        spare = self.reclaimer.spare({})
        return self._returning() + min(spare, self._excess() // self._column) * self._column


class OnLedger(Participant):
    """A budget's membership in a ledger. Sizes are in bytes; the caller holds the budget's lock.

        0 ......... used by caches, or reserved by floors ......... granted ............ limit
        | memory that the budget cannot give back         | headroom | the ledger's room, |
        |                                                 |          | others may take it |

    Memory is taken from the ledger before a cache maps it, either by a call that is short of memory
    or, ahead of need, by the budget's thread, so that few calls have to take the file lock. The
    thread gives memory back when another engine is short or the limit has been lowered, even while
    no cache is being called.

    Args:
        ledger: the ledger of the context's device; closed by `close`.
        context: the budget's context.
        name, floor, limit: as in `Ledger.join`.

    Raises:
        NotSupported: the GPU is in MIG mode; the ledger is still open.
        VMemError: as for `Ledger.join`; the ledger is closed.
    """

    def __init__(self, ledger: Ledger, context: Context, name: str, floor: int, limit: int) -> None:
        info, page = context.info, context.info.granule
        device_of(info.device_name, info.uuid)
        super().__init__(ledger, name, floor=floor, limit=limit, least=page, virtual=limit)
        self._context = context
        self.headroom = max(page, min(_HEADROOM, limit // 16) // page * page)
        self._limit = limit
        self._asked = False
        self.hint = 0  # bytes that the ledger could still grant when last read

    @property
    def granted(self) -> int:
        """Bytes that the budget may use."""
        return self.account.used

    def beyond(self) -> int:
        """Returns the number of bytes that the ledger would grant now; also updates `hint`."""
        self.hint = min(self._limit - self.granted, self.account.room(free_bytes(self._context)))
        return self.hint

    def take(self, nbytes: int) -> None:
        """Takes `nbytes` plus the headroom from the ledger, or as much of it as is available."""
        if nbytes <= 0:
            return
        free = free_bytes(self._context)
        page = self._context.info.granule
        most = min(self._limit - self.granted, self.account.room(free)) // page * page
        self.account.take(min(nbytes + self.headroom, most), free=free)
        if self._asked and nbytes <= most:
            self.ask(0)

    def ask(self, nbytes: int) -> None:
        """Posts how many bytes a request is short of, or 0 once it is no longer short."""
        account = self.account
        nbytes = min(nbytes, self._limit - self.granted, account.limit - account.used)
        if nbytes > 0 or self._asked:
            account.want(max(0, nbytes))
            self._asked = nbytes > 0

    def others(self) -> list[tuple[str, int]]:
        """Returns the other engines that hold driver mappings, and how many each of them holds."""
        account = self.account
        mine = account.ledger.word(account.slot, "identity")
        return [
            (f"engine {one.name!r} (pid {one.pid})", one.handles)
            for one in account.ledger.engines()
            if one.handles and one.identity != mine
        ]

    def settle(self, used: int) -> int:
        """Reports the mapped bytes; returns how many bytes the budget must give back."""
        self.account.settle(used)
        self.beyond()
        return self.account.excess(free_bytes(self._context))

    def give(self, nbytes: int) -> None:
        """Gives `nbytes` that no cache uses and no floor reserves back to the ledger."""
        if nbytes > 0:
            self.account.give(nbytes)

    def balance(self, spare: int) -> None:
        """Keeps the headroom between half and twice its target; `spare` is the current headroom."""
        if spare < self.headroom // 2:
            self.take(self.headroom // 2 - spare)
        elif spare > 2 * self.headroom:
            self.give(spare - self.headroom)


def available_bytes(context: Context) -> int:
    """Returns a cache's default size in bytes.

    This is the free memory in the context's pool plus 90% of the GPU's free memory (or, on the
    host, all of its free memory).
    """
    free = context.memory().free_bytes
    if context.cuda_device is not None:
        free = int(free * _PART_OF_CARD)
    return free + context.stats().free_bytes


def free_bytes(context: Context) -> int:
    """Returns how many bytes caches could get now: the free memory of the device and the pool."""
    return context.memory().free_bytes + context.stats().free_bytes
