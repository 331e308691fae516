# SPDX-License-Identifier: MIT
"""The state of a cache, and what it does on the side: checks, watermark, eager allocation."""

from __future__ import annotations

import errno
import operator
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pyvmem.errors import (
    Busy,
    InvalidArgument,
    NotRecoverable,
    OutOfMemory,
    TooManyBatches,
    VMemError,
)
from pyvmem.kvcache.accounts import Accounts
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.events import record
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.mapper import Mapper
from pyvmem.kvcache.moves import Mover
from pyvmem.kvcache.pager import Pager
from pyvmem.kvcache.prefixes import Prefixes
from pyvmem.kvcache.promote import Promoter
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.runs import Runs
from pyvmem.kvcache.scratch import Scratch
from pyvmem.kvcache.setup import Parts
from pyvmem.kvcache.sharing import Sharing
from pyvmem.kvcache.slots import Slot, SlotTable
from pyvmem.kvcache.stats import Counters
from pyvmem.kvcache.window import Window

__all__ = ["Core"]


class Core(Accounts):
    """What `KVCache` and its reports work on; not thread-safe by itself.

    Attributes:
        used_tokens: the sum of `rows`.
        clock: steps so far.
        mover: other pages under the same addresses.
        promoter: None: there are no large pages.
        runs: how long the runs are that requests grow by.
        window: what slides; None: every row is kept.
        untidy: `tidy` is to be called by the next step.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        parts: Parts,
        journal: Journal,
        table: type[SlotTable] = SlotTable,
    ) -> None:
        self.config = config
        self.parts = parts
        self.context = parts.context
        self.journal = journal
        self.mapper = Mapper(parts.context, journal)
        self.layout = layout = parts.layout
        self.device = parts.cuda_device
        self.counters = Counters(parts.context)
        self.table = table(config.max_batch, journal)
        base = parts.reservation.addr
        self.reclaimer = Reclaimer(
            self.mapper, base, layout, self.table, parts.limit_pages, self.counters
        )
        self.pager = Pager(self.reclaimer, zero_fill=config.zero_fill, device=parts.cuda_device)
        large = layout.large_pages * layout.page_size
        self.scratch = Scratch(self.mapper, max(large, layout.page_size))
        self.sharing = Sharing(self)
        self.prefixes = Prefixes(self)
        self.mover = Mover(self)
        self.pager.stop_promoting = self.mover.stop_promoting
        self.pager.promoting = self.mover.promoting
        self.runs = Runs(self)
        self.pager.goals, self.pager.grown = self.runs.goals, self.runs.grown
        self.pager.relieve = self.runs.relieve
        self.promoter = Promoter(self) if layout.large_pages else None
        self.window = Window(self) if config.window else None
        self.indices = range(config.max_batch)
        self.used_tokens = 0
        self.clock = 0
        self.untidy = config.reclaim_steps > 0
        self.token_bytes = layout.row_bytes * layout.num_tensors
        self._low_pages = int(config.low_watermark * parts.limit_pages)
        self._eager_pages = min(config.eager_pages, layout.slot_pages)
        self._prepared: Slot | None = None
        journal.keep_list(journal.books)
        journal.books.append(self)

    # ---- after an exception from outside ---------------------------------------------------------

    def rebuild(self) -> None:
        """See `Books.rebuild`."""
        self.table.rebuild()
        self.prefixes.rebuild()
        reclaimer = self.reclaimer
        reclaimer.shared.rebuild(
            [one.span for one in (*self.table, *reclaimer.cuts)] + self.prefixes.spans(),
            [slot.span for slot in self.table if slot.active and not slot.stale],
        )
        self.pager.rebuild()
        reclaimer.rebuild(*self.mover.pages())
        self.used_tokens = sum(self.rows)
        self.untidy = True

    def undone(self) -> None:
        """See `Books.undone`."""
        self.table.rebuild()

    def owns(self, held: object) -> bool:
        """See `Books.owns`."""
        blocks = self.reclaimer.shared.blocks
        return (
            held is self.parts.reservation
            or (held is self.context and self.parts.owns_context)
            or self.scratch.owns(held)
            or self.mover.owns(held)
            or any(held is block.handle for block in blocks)
        )

    def failed(self, error: VMemError) -> None:
        """See `Books.failed`."""
        self.reclaimer.errors.append(error)

    # ---- numbers from outside --------------------------------------------------------------------

    def scan(self, seq_lens: Sequence[int]) -> tuple[array[int], int, list[tuple[Slot, int]]]:
        """What a step to these numbers comes to.

        A number below the rows held, 0 among them, asks for nothing: the rows stay.

        Returns:
            The rows that every slot holds afterwards, their sum, and the slots that lack pages for
            theirs, with the pages per tensor that they need.
        """
        lens = seq_lens if type(seq_lens) is list else list(seq_lens)
        count = len(self.table)
        if len(lens) != count:
            raise invalid(
                f"seq_lens has {len(lens)} entries; the cache has {count} slots", limit=count
            )
        lengths = self.pager.lengths
        found = lengths.scan(lens)
        if isinstance(found, int):
            try:  # numpy's or torch's integers, or what is no number of tokens
                lens = [operator.index(value) for value in lens]
            except TypeError:
                raise invalid(f"seq_lens must hold whole numbers, not {lens!r:.80}") from None
            found = lengths.scan(lens)
        if isinstance(found, int):
            raise self._bad_length(found, lens[found])
        rows, total, short = found
        if not short:
            return rows, total, []
        want = []
        longest = self.config.max_seq_len
        slots, pages_for = self.table.slots, self.layout.pages_for
        # Capacity is 0 for free slots, so whatever is wrong with a single number shows up here too.
        for index in short:
            slot, length = slots[index], rows[index]
            if not slot.active:
                raise invalid(f"seq_lens[{index}] is {length}, but reqid {index} is not taken")
            if length > longest:
                raise self._bad_length(index, length)
            want.append((slot, pages_for(length)))
        return rows, total, want

    def _bad_length(self, index: int, length: int) -> InvalidArgument:
        """The error for a number that no slot can hold."""
        longest = self.config.max_seq_len
        bound = "it must not be negative" if length < 0 else f"max_seq_len is {longest}"
        return invalid(f"seq_lens[{index}] is {length}; {bound}", limit=longest)

    def slot(self, reqid: int) -> Slot:
        """The slot of a taken reqid."""
        index = operator.index(reqid)
        last = len(self.table) - 1
        if not 0 <= index <= last:
            raise invalid(f"reqid {index} is not between 0 and {last}", limit=last)
        slot = self.table[index]
        if not slot.active:
            raise invalid(f"reqid {index} is not taken")
        return slot

    def free_slot(self, reqid: int) -> Slot:
        """A free slot by its number; raises InvalidArgument where it cannot be taken."""
        index, last = operator.index(reqid), len(self.table) - 1
        if not 0 <= index <= last:
            raise invalid(f"reqid {index} is not between 0 and {last}", limit=last)
        slot = self.table[index]
        if slot.active:
            raise invalid(f"reqid {index} is taken")
        if slot.broken:
            raise invalid(f"reqid {index} is broken: a failed batch could not be undone there")
        return slot

    def fit(self, seq_len: int) -> Slot | None:
        """The free slot for a request of so many tokens (0: not known)."""
        length, longest = operator.index(seq_len), self.config.max_seq_len
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_len {length} is not between 0 and max_seq_len {longest}", limit=longest
            )
        return self.table.best_fit(self.layout.pages_for(length) or max(1, self._eager_pages))

    def alloc(self, seq_len: int) -> int | None:
        """See `KVCache.alloc_reqid`."""
        self.reclaimer.poll()
        self.pager.poll()
        slot = self.fit(seq_len)
        if slot is None:
            return None
        self.take(slot)
        self.prepare()
        return slot.index

    def take(self, slot: Slot) -> None:
        """Gives a free slot to a new owner; free again if the call is not completed."""
        owner = slot.owner + 1

        def free() -> None:
            if slot.active and slot.owner == owner:
                self.release(slot, None)

        self.journal.on_abort(free)
        self.table.take(slot)

    def activity(self) -> tuple[int, int, int, int]:
        """Something else after every call that takes, gives back or steps a request."""
        counters = self.counters
        return self.clock, counters.steps_async, counters.short, self.table.changes

    def release(self, slot: Slot, event: Any) -> None:
        """Ends an ownership; `event`: the GPU work that may still touch the slot.

        Nothing is unmapped: `tidy` does that.
        """
        self.mover.abandon(slot)
        if self.promoter is not None:
            self.promoter.forget(slot)
        self.pager.revoke(slot)
        if self.window is not None:
            self.window.forget(slot)
        if slot.shared and not slot.stale:
            self.reclaimer.shared.unuse(slot.span)
        self.prefixes.unpin(slot)
        self.table.give_back(slot, event, self.clock)
        self.reclaimer.own_away = None
        self.enter(slot, 0)
        if slot.stale and not slot.lost:
            self.untidy = True

    def enter(self, slot: Slot, length: int) -> None:
        """Notes that a slot holds so many rows, whatever `step` said."""
        rows, index = self.rows, slot.index
        self.journal.keep(self, "used_tokens")
        self.journal.undo(rows.__setitem__, index, rows[index])
        self.used_tokens += length - rows[index]
        rows[index] = length

    @property
    def rows(self) -> array[int]:
        """Tokens whose rows every slot holds; 0 for free slots.

        They grow with `step`, and shrink only where the request gives them up: `truncate`, the end
        of the request.
        """
        return self.pager.lengths.held

    @property
    def low_pages(self) -> int:
        """Physical pages below which memory is scarce: see `KVCacheConfig.low_watermark`."""
        return self._low_pages

    # ---- on the side -----------------------------------------------------------------------------

    def keep_watermark(self) -> None:
        """With too little memory free, begins to unmap pages of free slots."""
        reclaimer = self.reclaimer
        if reclaimer.free < self._low_pages:
            reclaimer.release_below(self._low_pages)

    def tidy(self) -> None:
        """Begins to unmap what policy does not keep: see `KVCacheConfig`."""
        self.reclaimer.poll()
        config = self.config
        stale = not self.reclaimer.release_stale()
        if config.reclaim_steps or not config.deferred_reclaim:
            age = config.reclaim_steps if config.deferred_reclaim else 0
            complete = self.reclaimer.release_before(
                self.clock - age, self._prepared, self._eager_pages
            )
            self.untidy = bool(age) or not complete or stale
        else:
            self.untidy = stale
        self.keep_watermark()

    def prepare(self) -> None:
        """Sees to it that, with ample memory, one free slot has or will have `eager_pages`."""
        pages = self._eager_pages
        if not pages:
            return
        self.pager.poll()
        self._prepared = slot = self.table.to_prepare(pages)
        reclaimer = self.reclaimer
        if slot is None or slot.mapped >= pages:
            return
        new_pages = (pages - slot.mapped) * self.layout.num_tensors
        if reclaimer.free - new_pages < self._low_pages:
            return
        with suppress(TooManyBatches, OutOfMemory):  # the next call tries again
            self.pager.grow([(slot, pages)], background=True, reclaim=False)

    def check_no_tensors(self) -> None:
        """Raises Busy where tensors of the cache live."""
        reservation = self.parts.reservation
        living = reservation.live_arrays
        if living:
            raise Busy(
                f"{living} tensors of the cache live; drop them before it is closed",
                errno=errno.EBUSY,
                op="KVCache.close",
                addr=reservation.addr,
                bytes=reservation.nbytes,
            )

    def close(self, stream: Any) -> None:
        """Waits for everything, then gives pages, reservation and an owned context back."""
        reservation = self.parts.reservation
        event = record(stream, self.device) if any(slot.active for slot in self.table) else None
        self.mover.close()
        for slot in self.table:
            with suppress(VMemError):  # undone: its pages are as before
                self.pager.release(slot)
            if slot.active:
                self.release(slot, event)
        # Slot by slot, each after its own GPU work, which the worker waits for.
        for slot in self.table:
            if slot.lost:
                continue
            if slot.mapped and not self.reclaimer.try_cut(slot, 0):
                self.reclaimer.finish_all()
                self.reclaimer.try_cut(slot, 0)
        self.reclaimer.finish_all()
        self.reclaimer.shared.close()
        self.scratch.close()
        try:
            self.mapper.close(reservation)
        except NotRecoverable:
            # Quarantined pages keep their addresses; both go when the context is closed.
            reservation._closed = True
        if self.parts.owns_context:
            self.context.close()
        if self in self.journal.books:
            self.journal.books.remove(self)
