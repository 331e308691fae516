# SPDX-License-Identifier: MIT
"""Pages of a running request that are replaced under their addresses.

A *move* has two phases. First new pages appear at scratch addresses and the old ones are copied to
them, after the work that writes the rows; the GPU may read the old ones meanwhile. Then, when no
work is under way, one batch replaces the old pages by the new ones:

    slot      | old | old | old |          | new | new | new |
                 copy                ->       replaces the old ones, which go to their pool
    scratch   | new | new | new |          |     |     |     |

In the scratch addresses the tensors follow one another, each with the slot's pages from `first` on.
Until the second phase is over both count as memory of the cache.

*Promotion* moves a part to large pages: `KVCacheConfig.large_page_size` bytes of every tensor, at a
multiple of that. Once its last row is written a part is only read, so its pages may change. Pages
that are one physical run already (growing slots prefer 2 MiB of their own) are mapped again in one
piece instead, where that saves mappings.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from pyvmem.errors import NotRecoverable, OutOfMemory, TooManyBatches, VMemError
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import PriorWork, record, wait_for
from pyvmem.kvcache.mapper import Scratch
from pyvmem.kvcache.pages import DEVICE, PLAIN, Kind, Tier
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Move, QuietTicket, Slot, Unmap
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.reservation import Reservation

__all__ = ["Mover", "Promoter"]

_NEVER = 1 << 62

_log = logging.getLogger(__name__)


class Mover:
    """The moves of a cache, one for a slot at a time.

    Attributes:
        moves: by slot; begun, and not swapped yet.
        cancelled: moves without a slot; their scratch pages go when the copies are over.
        joined: by slot number, first pages of the runs that were mapped in one piece and are as
            they were then.
        device: CUDA ordinal; None where pages are the CPU's.
    """

    def __init__(self, reclaimer: Reclaimer, scratch: Scratch, device: int | None) -> None:
        self._reclaimer = reclaimer
        self._scratch = scratch
        self._mapper = reclaimer.mapper
        self._journal = reclaimer.mapper.journal
        self._layout = reclaimer.layout
        self._table = reclaimer.table
        self._counters = reclaimer.counters
        self.device = device
        self._plan = MovePlanner(reclaimer)
        self.moves: dict[Slot, Move] = {}
        self.cancelled: list[Move] = []
        self.joined: dict[int, set[int]] = {}

    # ---- the first phase -------------------------------------------------------------------------

    def begin(self, move: Move, after: Sequence[Any], *, background: bool) -> None:
        """Takes the new pages and copies to them, or lets the worker do so.

        Memory is the caller's to check first; the slot has no other move.

        Raises:
            OutOfMemory: of the back end; nothing changed. VMemError: the driver failed; likewise.
        """
        if not move.stretches:
            self._note(move)
            return
        move.addresses = self._scratch.take(self._plan.place(move))
        ops = self._plan.copies(move)
        try:
            with self._mapper.transaction() as change:
                move.ticket = change.ticket if background else None
                self._note(move)
                self._count(move, 1)
                if background:
                    change.submit(ops, after)
                else:
                    change.run(ops, after, self._counters.waits)
        except VMemError:
            addresses, move.addresses, move.ticket = move.addresses, None, None
            self._scratch.give(addresses)
            raise

    def _note(self, move: Move) -> None:
        self._journal.keep_dict(self.moves)
        self.moves[move.slot] = move

    def _remove(self, move: Move) -> None:
        self._journal.keep_dict(self.moves)
        del self.moves[move.slot]

    def _count(self, move: Move, sign: int) -> None:
        """Counts scratch pages as memory of the cache, or no longer."""
        reclaimer, tensors = self._reclaimer, self._layout.num_tensors
        reclaimer.held += sign * move.here() * tensors
        counters = self._counters
        counters.peak_mapped = max(counters.peak_mapped, reclaimer.held)
        if move.away():
            reclaimer.away = reclaimer.away.copy()
        for tier, pages in move.away().items():
            reclaimer.away[tier] += sign * pages * tensors

    # ---- the second phase ------------------------------------------------------------------------

    def finish(self, slot: Slot, work: PriorWork) -> None:
        """Ends a slot's move, if it has one: waits for the copies and for the work.

        Raises:
            NotRecoverable: the request has lost its rows. VMemError: the pages are as before.
        """
        move = self.moves.get(slot)
        if move is not None:
            with self._counters.waiting():
                self._end(move, [work.record()])

    def step(self, stream: Any) -> None:
        """Ends the moves whose copies are over, after the work on `stream`; failures are noted."""
        if self.cancelled:
            self.sweep()
        ready = [move for move in self.moves.values() if move.done()]
        if not ready:
            return
        event = record(stream, self.device)
        with self._counters.waiting():
            for move in ready:
                try:
                    self._end(move, [event])
                except VMemError as error:
                    self._reclaimer.errors.append(error)

    def _end(self, move: Move, events: list[Any]) -> None:
        after = [event for event in events if event is not None]
        try:
            if move.ticket is not None:
                move.ticket.wait()
                self._journal.keep(move, "ticket")
                move.ticket = None
        except VMemError:
            self._remove(move)
            self._forget(move)
            raise
        try:
            if move.stretches:
                self._swap(move, after)
            else:
                self._remove(move)
            if move.runs:
                self._join(move, [] if move.stretches else after)
            if move.promotes:
                self._counters.promoted += move.pages * self._layout.num_tensors
        except VMemError as error:
            if self.moves.get(move.slot) is move:
                self._remove(move)
            if move.addresses is not None:
                self._drop(move)
            if isinstance(error, NotRecoverable):
                raise self._table.lose(move.slot, error) from error
            raise

    def _swap(self, move: Move, after: list[Any]) -> None:
        """One batch: the new pages replace the old ones, the scratch addresses are empty again."""
        layout, slot = self._layout, move.slot
        ops = self._plan.swap(move)
        with self._mapper.transaction() as change:
            self._remove(move)
            for low, high, kind in move.stretches:  # the old ones are gone
                away = slot.places.away(low, high)
                self._reclaimer.count_freed(high - low - sum(away.values()), away, reclaimed=False)
                slot.places.put(low, high, kind)
                self.part(slot, low, high)
            addresses = self._take_addresses(move)
            change.run(ops, after)
        self._scratch.give(addresses)
        self._counters.moved += sum(high - low for low, high, _ in move.stretches) * (
            layout.num_tensors
        )

    def _join(self, move: Move, after: list[Any]) -> None:
        """Maps each run in one piece."""
        layout = self._layout
        for event in after:
            wait_for(event)
        for low, high in move.runs:
            for tensor in range(layout.num_tensors):
                at = move.slot.addr + layout.offset(0, low, tensor)
                self._mapper.join(at, (high - low) * layout.page_size)
        self._journal.keep_dict(self.joined)
        index, runs = move.slot.index, {low for low, _ in move.runs}
        self.joined[index] = self.joined.get(index, set()) | runs

    def part(self, slot: Slot, low: int, high: int) -> None:
        """Forgets what was joined in [low, high), whose pages are replaced now or soon."""
        joined, unit = self.joined.get(slot.index), self._layout.large_pages
        if joined:
            self._journal.keep_dict(self.joined)
            kept = {first for first in joined if first + unit <= low or first >= high}
            if kept:
                self.joined[slot.index] = kept
            else:
                del self.joined[slot.index]

    # ---- cancelling ------------------------------------------------------------------------------

    def abandon(self, slot: Slot) -> None:
        """Cancels a slot's move; does not wait, unless another batch is in flight over the slot.

        Until the copies are over no page of the slot can be unmapped: an unmap of no
        pages marks that.
        """
        move = self.moves.get(slot)
        if move is None:
            return
        self._remove(move)
        if move.ticket is not None:
            unmap = Unmap(
                slot, slot.mapped, slot.mapped, slot.dirty, QuietTicket(move.ticket), slot.head
            )
            if slot.job is None:
                slot.job = unmap
                self._journal.keep_list(self._reclaimer.unmaps)
                self._reclaimer.unmaps.append(unmap)
            else:
                unmap.ticket.wait()
        if move.addresses is not None:
            self._cancel(move)
            self.sweep()

    def _cancel(self, move: Move) -> None:
        self._journal.keep_list(self.cancelled)
        self.cancelled.append(move)

    def make_way(self, slot: Slot, page: int) -> bool:
        """Cancels what changes pages below this one; whether nothing is under way there."""
        move = self.moves.get(slot)
        if move is not None and move.begins_before(page):
            self.abandon(slot)
            return slot.job is None
        return True

    def shorten(self, slot: Slot, page: int, work: PriorWork) -> None:
        """Ends what changes pages from this one on: their rows may be written again.

        A promotion is cancelled; another move is finished, which waits for it.
        """
        move = self.moves.get(slot)
        if move is None or not move.ends_after(page):
            return
        if move.promotes:
            self.abandon(slot)
        else:
            self.finish(slot, work)

    def promoting(self) -> int:
        """Pages per tensor of the device behind the copies that `stop_promoting` cancels."""
        return sum(move.here() for move in self.moves.values() if move.promotes)

    def stop_promoting(self, *, wait: bool = True) -> bool:
        """Cancels promotions; whether there were any.

        `wait`: for the copies: their memory is back, their slots can grow. Otherwise moves of slots
        with another batch in flight go on.
        """
        slots = [slot for slot, move in self.moves.items() if move.promotes]
        found = bool(slots or self.cancelled)
        for slot in slots:
            if wait or slot.job is None:
                self.abandon(slot)
        for move in self.cancelled if wait else ():
            if move.ticket is not None:
                QuietTicket(move.ticket).wait()
        self.sweep()
        self._reclaimer.poll()  # the unmaps that marked the copies
        return found

    def sweep(self) -> None:
        """Takes back the scratch pages of cancelled moves whose copies are over."""
        self._scratch.retry()
        for move in [move for move in self.cancelled if move.done()]:
            self._journal.keep_list(self.cancelled)
            self.cancelled.remove(move)
            try:
                if move.ticket is not None:
                    move.ticket.wait()
                    self._journal.keep(move, "ticket")
                    move.ticket = None
            except VMemError:  # nothing was mapped
                self._forget(move)
            else:
                self._drop(move)

    def _drop(self, move: Move) -> None:
        """Unmaps the scratch pages; where that fails, the next sweep tries again."""
        try:
            with self._mapper.transaction() as change:
                addresses = self._uncount(move)
                change.run(self._plan.unmaps(move, addresses))
        except NotRecoverable:
            self._uncount(move).leave()  # quarantined
        except VMemError:
            self._cancel(move)
        else:
            self._scratch.give(addresses)

    def _take_addresses(self, move: Move) -> Reservation:
        """Takes a move's scratch addresses from it."""
        assert move.addresses is not None
        addresses, journal = move.addresses, self._journal
        journal.held.append(addresses)
        journal.keep(move, "addresses")
        move.addresses = None
        return addresses

    def _uncount(self, move: Move) -> Reservation:
        self._count(move, -1)
        return self._take_addresses(move)

    def _forget(self, move: Move) -> None:
        """Gives back the scratch addresses of a move, with nothing mapped there."""
        if move.addresses is not None:
            self._scratch.give(self._uncount(move))

    def owns(self, held: object) -> bool:
        """Whether a move has this reservation."""
        return any(held is move.addresses for move in (*self.moves.values(), *self.cancelled))

    def close(self) -> None:
        """Cancels every move, and waits."""
        for slot in list(self.moves):
            self.abandon(slot)
        for move in self.cancelled:
            if move.ticket is not None:
                QuietTicket(move.ticket).wait()
        self.sweep()
        for move in self.cancelled:
            if move.addresses is not None:
                with suppress(VMemError):
                    move.addresses.close(unmap=True)
                move.addresses.leave()

    def moving(self, slot: Slot) -> int:
        """Pages per tensor of a slot that the end of its move changes."""
        move = self.moves.get(slot)
        if move is None:
            return 0
        return move.pages

    def pages(self) -> tuple[int, dict[Tier, int]]:
        """Scratch pages per tensor: of the device, and by tier."""
        here = 0
        away: dict[Tier, int] = {}
        for move in (*self.moves.values(), *self.cancelled):
            here += move.here()
            for tier, pages in move.away().items():
                away[tier] = away.get(tier, 0) + pages
        return here, away


class MovePlanner:
    """Writes the batches of a `Move`."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        self._mapper = reclaimer.mapper
        self._layout = reclaimer.layout

    def place(self, move: Move) -> int:
        """Places the pages in the scratch addresses; returns the bytes that they need."""
        layout = self._layout
        unit = max(1, layout.large_pages)
        move.first = move.stretches[0][0] // unit * unit
        pages = -(-move.stretches[-1][1] // unit) * unit - move.first
        move.stride = pages * layout.page_size
        return move.stride * layout.num_tensors

    def copies(self, move: Move) -> OpBatch:
        """New pages at the scratch addresses, with what the slot has."""
        layout, ops = self._layout, OpBatch(len(move.stretches))
        for low, high, kind in move.stretches:
            ops.populate(
                self._scratch(move, low),
                (high - low) * layout.page_size,
                layout.num_tensors,
                move.stride,
                kind.unit * layout.page_size,
                location=int(kind.tier.location),
                device=kind.tier.device,
                copy_from=self._own(move, low),
                copy_stride=layout.tensor_bytes,
            )
        return ops

    def swap(self, move: Move) -> OpBatch:
        """The new pages replace the old ones, and the scratch addresses are empty again.

        The copies are over. A handle is made for each stretch, which the batch consumes.
        """
        layout, ops = self._layout, OpBatch(2 * len(move.stretches))
        tensors = layout.num_tensors
        for low, high, _ in move.stretches:
            scratch, nbytes = self._scratch(move, low), (high - low) * layout.page_size
            handle = self._mapper.gather(scratch, nbytes, tensors, move.stride)
            ops.map(
                self._own(move, low),
                nbytes,
                handle,
                0,
                tensors,
                layout.tensor_bytes,
                consume=True,
                replace=True,
            )
            ops.unmap(scratch, nbytes, tensors, move.stride)
        return ops

    def unmaps(self, move: Move, addresses: Reservation) -> OpBatch:
        """The scratch addresses of a move are empty again."""
        layout, ops = self._layout, OpBatch(len(move.stretches))
        for low, high, _ in move.stretches:
            nbytes = (high - low) * layout.page_size
            at = addresses.addr + (low - move.first) * layout.page_size
            ops.unmap(at, nbytes, layout.num_tensors, move.stride, holes=True)
        return ops

    def _own(self, move: Move, page: int) -> int:
        """A page's address in tensor 0."""
        return move.slot.addr + page * self._layout.page_size

    def _scratch(self, move: Move, page: int) -> int:
        """Where its new page lies."""
        assert move.addresses is not None
        return move.addresses.addr + (page - move.first) * self._layout.page_size


class Promoter:
    """Finds what to promote."""

    def __init__(self, reclaimer: Reclaimer, mover: Mover, config: KVCacheConfig) -> None:
        self._mover = mover
        self._reclaimer = reclaimer
        self._mapper = reclaimer.mapper
        self._journal = reclaimer.mapper.journal
        self._layout = layout = reclaimer.layout
        self._unit = layout.large_pages
        self._large = Kind(self._unit, DEVICE)
        self._kept = config.window_tile
        self._from = max(config.promote_tokens or _NEVER, self._kept)
        # By slot: the length at which a part more may be promoted.
        self._next = [self._from] * config.max_batch
        # By slot whose last look found something: the length at which it may find a part more.
        self._parts_at: dict[int, int] = {}

    def forget(self, slot: Slot) -> None:
        """Ends a request."""
        self._parts_at.pop(slot.index, None)
        self._journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        self._next[slot.index] = self._from
        self._mover.part(slot, 0, self._layout.slot_pages)

    def shorten(self, slot: Slot, page: int) -> None:
        """Notes that pages from this one on may be replaced from now on."""
        self._mover.part(slot, page, self._layout.slot_pages)
        self._journal.undo(self._next.__setitem__, slot.index, self._next[slot.index])
        rows = -(-page * self._layout.page_size // self._layout.row_bytes)
        self._next[slot.index] = min(self._next[slot.index], max(self._from, rows + self._kept))

    def step(self, lens: Sequence[int], stream: Any) -> None:
        """Begins to promote what is long enough, of requests that the step to `lens` lengthens.

        That a request grows says that the work for its rows so far was launched. The last of them
        may be taken back and written again (`KVCacheConfig.window_tile`); they are left alone.
        """
        table = self._reclaimer.table
        rows, size = self._layout.row_bytes, self._layout.page_size
        old = table.columns.held
        for index in compress(range(len(table)), map(operator.ge, old, self._next)):
            slot = table[index]
            if lens[index] > old[index] and slot not in self._mover.moves:
                whole = self._parts_at.get(index, 0)
                if old[index] < whole and not self._room():
                    continue
                held = old[index] - self._kept
                runs, copies = self._parts(slot, held)
                self._begin(slot, runs, copies, PriorWork(stream, self._mover.device))
                page, part = (
                    -(-(held * rows // unit + 1) * unit // rows) + self._kept
                    for unit in (size, self._unit * size)
                )
                # What begins may be given up, and what finds no memory does not begin: both are
                # looked at again a page later, if there is memory then.
                if runs or copies:
                    self._parts_at[index] = part
                else:
                    self._parts_at.pop(index, None)
                self._next[index] = max(self._from, page if runs or copies else part)

    def _room(self) -> int:
        """Parts that there is memory for, beyond the watermark."""
        need = self._unit * self._layout.num_tensors
        return max(0, (self._reclaimer.free - self._reclaimer.low_pages) // need)

    def promote(self, slot: Slot, held: int, work: PriorWork, *, wait: bool) -> int:
        """See `KVCache.promote`; of the first `held` rows."""
        if slot in self._mover.moves:
            move = self._mover.moves[slot]
            if wait:
                self._mover.finish(slot, work)
            return move.pages // self._unit
        parts = self._begin(slot, *self._parts(slot, held), work)
        if wait:
            self._mover.finish(slot, work)
        return parts

    def _begin(self, slot: Slot, runs: list[int], copies: list[int], work: PriorWork) -> int:
        """Begins to promote parts, given by first pages; returns how many.

        Of those that are copied only as many as there is memory for, beyond the watermark.
        """
        large = [(low, low + self._unit, self._large) for low in copies[: self._room()]]
        move = Move(slot, large, [(low, low + self._unit) for low in runs], promotes=True)
        if not move.stretches and not move.runs:
            return 0
        event = work.record()
        try:
            self._mover.begin(move, [] if event is None else [event], background=True)
        except (OutOfMemory, TooManyBatches):  # they stay as they are
            move.stretches = []
            if not move.runs:
                return 0
            self._mover.begin(move, [], background=True)
        copied = len(move.stretches)
        _log.debug(
            "promotion of reqid %d: %d parts joined, %d copied", slot.index, len(runs), copied
        )
        return len(runs) + copied

    def _parts(self, slot: Slot, held: int) -> tuple[list[int], list[int]]:
        """First pages of full parts of small pages: of those in one run, and of the others."""
        layout, unit = self._layout, self._unit
        joined = self._mover.joined.get(slot.index, ())
        runs: list[int] = []
        copies: list[int] = []
        first = -(-slot.shared // unit)
        full = min(held * layout.row_bytes // layout.page_size, slot.granted)
        for low in range(first * unit, full // unit * unit, unit):
            if low in joined or list(slot.places.stretches(low, low + unit)) != [
                (low, low + unit, PLAIN)
            ]:
                continue
            if self._is_run(slot, low):
                if Caps.JOIN in self._mapper.context.info.caps:
                    runs.append(low)
            else:
                copies.append(low)
        return runs, copies

    def _is_run(self, slot: Slot, low: int) -> bool:
        """Whether the pages of a part are one physical run, in every tensor."""
        layout = self._layout
        size = self._unit * layout.page_size
        query = self._mapper.query
        return all(
            query(slot.addr + layout.offset(0, low, tensor)).run_bytes >= size
            for tensor in range(layout.num_tensors)
        )
