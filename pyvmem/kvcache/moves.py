# SPDX-License-Identifier: MIT
"""Replacing pages under their addresses: copying to new ones, swapping them in, giving up.

A *move* has two phases. First new pages appear at scratch addresses and the old ones are copied to
them, after the work that writes the rows; the GPU may read the old ones meanwhile. Then, when no
work is under way, one batch puts the new pages in the place of the old ones:

    slot      | old | old | old |          | new | new | new |
                 copy                ->       replaces the old ones, which go to their pool
    scratch   | new | new | new |          |     |     |     |

In the scratch addresses the tensors follow one another, each with the slot's pages from `first` on.
Until the second phase is over both are behind the cache, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.mapper import Scratch
from pyvmem.kvcache.pages import Tier
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Cut, Move, Quiet, Slot
from pyvmem.ops import OpBatch
from pyvmem.reservation import Reservation

__all__ = ["Mover"]


class Mover:
    """The moves of a cache, one for a slot at a time.

    Attributes:
        moves: by slot; begun, and not swapped yet.
        given_up: their slots go without; the scratch pages go when the copies are over.
    """

    def __init__(self, reclaimer: Reclaimer, scratch: Scratch, device: int | None) -> None:
        self._reclaimer = reclaimer
        self._scratch = scratch
        self._mapper = reclaimer.mapper
        self._journal = reclaimer.mapper.journal
        self._layout = reclaimer.layout
        self._table = reclaimer.table
        self._counters = reclaimer.counters
        self._device = device
        self._plan = MovePlanner(reclaimer)
        self.moves: dict[Slot, Move] = {}
        self.given_up: list[Move] = []

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
                    with self._counters.waiting():
                        change.run(ops, after)
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
        """Counts scratch pages as behind the cache, or no longer."""
        reclaimer, tensors = self._reclaimer, self._layout.num_tensors
        reclaimer.held += sign * move.here() * tensors
        counters = self._counters
        counters.peak_mapped = max(counters.peak_mapped, reclaimer.held)
        if move.away():
            reclaimer.away = reclaimer.away.copy()
        for tier, pages in move.away().items():
            reclaimer.away[tier] += sign * pages * tensors

    # ---- the second phase ------------------------------------------------------------------------

    def finish(self, slot: Slot, stream: Any) -> None:
        """Ends a slot's move, if it has one: waits for the copies and for the work on `stream`.

        Raises:
            NotRecoverable: the request has lost its rows. VMemError: the pages are as before.
        """
        move = self.moves.get(slot)
        if move is not None:
            with self._counters.waiting():
                self._end(move, [record(stream, self._device)])

    def step(self, stream: Any) -> None:
        """Ends the moves whose copies are over, after the work on `stream`; failures are noted."""
        if self.given_up:
            self.sweep()
        ready = [move for move in self.moves.values() if move.done()]
        if not ready:
            return
        event = record(stream, self._device)
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
        except VMemError as error:
            if self.moves.get(move.slot) is move:
                self._remove(move)
            if move.addresses is not None:
                self._drop(move)
            if isinstance(error, NotRecoverable):
                self._lose(move.slot, error)
            raise

    def _swap(self, move: Move, after: list[Any]) -> None:
        """One batch: the new pages replace the old ones, the scratch addresses are empty again."""
        layout, slot = self._layout, move.slot
        ops = self._plan.swap(move)
        with self._mapper.transaction() as change:
            self._remove(move)
            for low, high, kind in move.stretches:  # the old ones are gone
                away = slot.places.away(low, high)
                self._reclaimer.came_back(high - low - sum(away.values()), away, reclaimed=False)
                slot.places.put(low, high, kind)
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
                at = self._reclaimer.base + layout.offset(move.slot.index, low, tensor)
                self._mapper.consolidate(at, (high - low) * layout.page_size)

    def _lose(self, slot: Slot, error: VMemError) -> None:
        self._table.condemn(slot)
        slot.lost = True
        raise NotRecoverable(
            f"reqid {slot.index} has lost its rows, free it: {error}",
            errno=error.errno,
            op="KVCache",
        ) from error

    # ---- giving up -------------------------------------------------------------------------------

    def abandon(self, slot: Slot) -> None:
        """Gives a slot's move up; does not wait, unless another batch is in flight over the slot.

        Until the copies are over no page of the slot can be unmapped: a cut of no
        pages marks that.
        """
        move = self.moves.get(slot)
        if move is None:
            return
        self._remove(move)
        if move.ticket is not None:
            cut = Cut(slot, slot.mapped, slot.mapped, slot.dirty, Quiet(move.ticket), slot.head)
            if slot.job is None:
                slot.job = cut
                self._journal.keep_list(self._reclaimer.cuts)
                self._reclaimer.cuts.append(cut)
            else:
                cut.ticket.wait()
        if move.addresses is not None:
            self._give_up(move)
            self.sweep()

    def _give_up(self, move: Move) -> None:
        self._journal.keep_list(self.given_up)
        self.given_up.append(move)

    def make_way(self, slot: Slot, page: int) -> bool:
        """Gives up what changes pages below this one; whether nothing is under way there."""
        move = self.moves.get(slot)
        if move is not None and move.begins_before(page):
            self.abandon(slot)
            return slot.job is None
        return True

    def shorten(self, slot: Slot, page: int, stream: Any) -> None:
        """Ends what changes pages from this one on: their rows may be written again.

        What makes larger pages is given up; another move is finished, which waits for it.
        """
        move = self.moves.get(slot)
        if move is None or not move.ends_after(page):
            return
        if move.promotes:
            self.abandon(slot)
        else:
            self.finish(slot, stream)

    def promoting(self) -> int:
        """Pages per tensor of the device that `stop_promoting` would bring back."""
        return sum(move.here() for move in self.moves.values() if move.promotes)

    def stop_promoting(self) -> bool:
        """Gives up what makes larger pages, and waits: its memory is back, its slots can grow."""
        slots = [slot for slot, move in self.moves.items() if move.promotes]
        for slot in slots:
            self.abandon(slot)
        for move in self.given_up:
            if move.ticket is not None:
                Quiet(move.ticket).wait()
        self.sweep()
        self._reclaimer.poll()  # the cuts that marked the copies
        return bool(slots)

    def sweep(self) -> None:
        """Takes back the scratch pages of moves that were given up, and whose copies are over."""
        self._scratch.retry()
        for move in [move for move in self.given_up if move.done()]:
            self._journal.keep_list(self.given_up)
            self.given_up.remove(move)
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
            self._give_up(move)
        else:
            self._scratch.give(addresses)

    def _take_addresses(self, move: Move) -> Reservation:
        """A move's scratch, which it has no longer."""
        assert move.addresses is not None
        addresses, journal = move.addresses, self._journal
        journal.hold(addresses)
        journal.keep(move, "addresses")
        move.addresses = None
        return addresses

    def _uncount(self, move: Move) -> Reservation:
        self._count(move, -1)
        return self._take_addresses(move)

    def _forget(self, move: Move) -> None:
        """Takes a move whose scratch is empty out of the books."""
        if move.addresses is not None:
            self._scratch.give(self._uncount(move))

    def owns(self, held: object) -> bool:
        """Whether a move has this reservation."""
        return any(held is move.addresses for move in (*self.moves.values(), *self.given_up))

    def close(self) -> None:
        """Gives every move up, and waits."""
        for slot in list(self.moves):
            self.abandon(slot)
        for move in self.given_up:
            if move.ticket is not None:
                Quiet(move.ticket).wait()
        self.sweep()
        for move in self.given_up:
            if move.addresses is not None:
                with suppress(VMemError):
                    move.addresses.close(unmap=True)
                move.addresses.leave()

    def moving(self, slot: Slot) -> int:
        """Pages per tensor of a slot that the end of its move changes."""
        move = self.moves.get(slot)
        if move is None:
            return 0
        runs = sum(high - low for low, high in move.runs)
        return runs + sum(high - low for low, high, _ in move.stretches)

    def pages(self) -> tuple[int, dict[Tier, int]]:
        """Scratch pages per tensor: of the device, and by tier."""
        here = 0
        away: dict[Tier, int] = {}
        for move in (*self.moves.values(), *self.given_up):
            here += move.here()
            for tier, pages in move.away().items():
                away[tier] = away.get(tier, 0) + pages
        return here, away


class MovePlanner:
    """Writes the batches of a `Move`."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        self._mapper = reclaimer.mapper
        self._base = reclaimer.base
        self._layout = reclaimer.layout

    def place(self, move: Move) -> int:
        """Settles where in scratch addresses the pages go; returns the bytes that they need."""
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
        return self._base + self._layout.offset(move.slot.index, page)

    def _scratch(self, move: Move, page: int) -> int:
        """Where its successor lies."""
        assert move.addresses is not None
        return move.addresses.addr + (page - move.first) * self._layout.page_size
