# SPDX-License-Identifier: MIT
"""Moves and promotion: replacing a running request's pages while its addresses stay the same.

A *move* has two phases. First, new pages are mapped at scratch addresses and the old pages are
copied to them, after the work that writes the rows; the GPU may keep reading the old pages. Then,
when no work is running, one batch replaces the old pages with the new ones:

    slot      | old | old | old |          | new | new | new |
                 copy                ->       replaces the old pages, which are freed
    scratch   | new | new | new |          |     |     |     |

The scratch addresses hold the tensors one after another, each with the slot's pages from `first`
on. Until the second phase is complete, both copies count toward the cache's memory.

*Promotion* maps a 2 MiB block of every tensor with one entry in the GPU's page tables. Pages that
are already physically contiguous (a growing slot prefers 2 MiB chunks that it does not share) are
remapped as one piece, after the work that reads them; all other pages are moved.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from pyvmem.errors import NotRecoverable, OutOfMemory, TooManyBatches, VMemError
from pyvmem.kvcache.config import KVCacheConfig
from pyvmem.kvcache.events import PriorWork, record
from pyvmem.kvcache.layout import BLOCK_BYTES
from pyvmem.kvcache.mapper import Scratch
from pyvmem.kvcache.pages import DEVICE, Tier, pages_by_tier
from pyvmem.kvcache.reclaim import Reclaimer
from pyvmem.kvcache.slots import Move, QuietTicket, Slot, Unmap
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Ticket

__all__ = ["Mover", "Promoter"]

REACH = 8 << 30
"""Bytes that a GPU's TLBs cover with 64 KB entries (benchmarks/kernels, on a full card). In a
smaller cache, larger entries save no time, while joining costs some."""

_log = logging.getLogger(__name__)


class Mover:
    """The moves of a group, at most one per slot. The caller holds the cache's lock.

    Attributes:
        moves: for each slot, the move that has started but has not replaced the pages yet.
        cancelled: cancelled moves, whose scratch pages are freed once the copies are complete.
        joined: for each slot index, the joined blocks that have not changed since: the first page
            of each, with the number of blocks that the slot had when it was joined.
        copied: like `joined`, for blocks that a promotion copied.
        device: CUDA ordinal; None if the pages are CPU memory.
    """

    def __init__(self, reclaimer: Reclaimer, scratch: Scratch, device: int | None) -> None:
        self._reclaimer = reclaimer
        self._scratch = scratch
        self._mapper = reclaimer.mapper
        self._journal = reclaimer.mapper.journal
        self._layout = reclaimer.layout
        self._counters = reclaimer.counters
        self.device = device
        self.moves: dict[Slot, Move] = {}
        self.cancelled: list[Move] = []
        self.joined: dict[int, dict[int, int]] = {}
        self.copied: dict[int, dict[int, int]] = {}

    # ---- the first phase -------------------------------------------------------------------------

    def begin(self, move: Move, work: PriorWork, *, background: bool) -> None:
        """Allocates the new pages and copies into them, in this thread or on the worker.

        The copies run after `work`. The caller must have checked that memory is available and that
        the slot has no other move.

        Raises:
            OutOfMemory: the back end is out of memory. VMemError: the driver failed. Nothing has
                changed.
        """
        event = work.record()
        edits = [[self.moves, move.slot, move]]
        if not move.stretches:
            self._journal.change(edits)
            return
        layout, unit, size = self._layout, max(1, self._layout.block), self._layout.page_size
        move.first = move.stretches[0][0] // unit * unit
        pages = -(-move.stretches[-1][1] // unit) * unit - move.first
        move.stride = pages * size
        addresses = move.addresses = self._scratch.take(move.stride * layout.num_tensors)
        ticket = move.ticket = Ticket(self._mapper.context) if background else None
        ops = OpBatch(len(move.stretches))
        for low, high, tier in move.stretches:
            ops.populate(
                addresses.addr + (low - move.first) * size,
                (high - low) * size,
                layout.num_tensors,
                move.stride,
                size,
                location=int(tier.location),
                device=tier.device,
                copy_from=move.slot.addr + low * size,
                copy_stride=layout.tensor_bytes,
            )
        edits += [*self._counts(move, 1), [self._journal.unrecorded, addresses, ...]]
        after, waits = [] if event is None else [event], self._counters.waits
        try:
            self._mapper.commit(edits, ops, after, ticket=ticket, waits=waits)
        except VMemError:
            move.addresses = move.ticket = None
            self._journal.change(self._scratch.give_edits(addresses))
            raise

    def _counts(self, move: Move, sign: int) -> list[list[Any]]:
        """Returns the edits that add (`sign` 1) or subtract (-1) a move's scratch pages."""
        gone = {tier: -sign * pages for tier, pages in pages_by_tier(move.stretches).items()}
        here, counters = gone.pop(DEVICE, 0), self._counters
        edits = self._reclaimer.free_edits(here, gone, reclaimed=False)
        return [*edits, [counters, "peak_mapped", max(counters.peak_mapped, edits[0][2])]]

    # ---- the second phase ------------------------------------------------------------------------

    def finish(self, slot: Slot, work: PriorWork) -> None:
        """Completes a slot's move, if it has one; waits for the copies and for `work`.

        Raises:
            NotRecoverable: the request has lost its rows. VMemError: its pages are unchanged.
        """
        move = self.moves.get(slot)
        if move is not None:
            with self._counters.waiting():
                self._end(move, work.record())

    def step(self, stream: Any) -> None:
        """Completes moves whose copies are done, after the work on `stream`; records failures."""
        if self.cancelled:
            self.sweep()
        ready = [move for move in self.moves.values() if move.done()]
        if not ready:
            return
        event = record(stream, self.device)
        with self._counters.waiting():
            for move in ready:
                try:
                    self._end(move, event)
                except VMemError as error:
                    self._reclaimer.errors.append(error)

    def _end(self, move: Move, event: Any) -> None:
        """Implements `finish`; the GPU work before `event` may still use the pages."""
        after = [] if event is None else [event]
        try:
            move.wait()
        except VMemError:  # nothing was mapped
            self._remove(move)
            raise
        try:
            if move.stretches:
                self._swap(move, after)
            else:
                self._remove(move)
            if move.runs:
                self._join(move, [] if move.stretches else after)
            if move.promotes:
                self._counters.promoted_pages += move.pages * self._layout.num_tensors
        except VMemError as error:
            if self.moves.get(move.slot) is move:
                self._drop(move)
            if isinstance(error, NotRecoverable):
                raise self._reclaimer.table.lose(move.slot, error) from error
            raise

    def _swap(self, move: Move, after: list[Any]) -> None:
        """Replaces the old pages with the new ones and unmaps the scratch addresses.

        The copies must be complete.
        """
        layout, ops = self._layout, OpBatch(2 * len(move.stretches))
        slot, counters, pages, large_end = move.slot, self._counters, 0, move.slot.large_end
        off_device: Counter[Tier] = Counter()
        assert move.addresses is not None
        size, tensors = layout.page_size, layout.num_tensors
        for low, high, _ in move.stretches:
            scratch = move.addresses.addr + (low - move.first) * size, move.stride
            target = slot.addr + low * size, layout.tensor_bytes
            self._mapper.relocate(ops, (high - low) * size, tensors, scratch, target)
            pages += high - low
            off_device.update(slot.tier_map.off_device(low, high))
            large_end = slot.large_end_with(low, high, large_end)
        edits = [
            [slot, "tier_map", slot.tier_map.put(*move.stretches)],
            [slot, "large_end", large_end],
            [counters, "moved_pages", counters.moved_pages + pages * tensors],
            *self._reclaimer.free_edits(pages - off_device.total(), off_device, reclaimed=False),
        ]
        if move.promotes:
            edits += self._promoted(self.copied, slot, [low for low, *_ in move.stretches])
        self._take_out(move, edits, ops, after)

    def _join(self, move: Move, after: list[Any]) -> None:
        """Joins the pages of each run, in all tensors."""
        layout, slot, large_end = self._layout, move.slot, move.slot.large_end
        ops = OpBatch(len(move.runs))
        for low, high, _ in move.runs:
            at, nbytes = slot.addr + low * layout.page_size, (high - low) * layout.page_size
            ops.join(at, nbytes, layout.num_tensors, layout.tensor_bytes)
            large_end = slot.large_end_with(low, high, large_end)
        edits = self._promoted(self.joined, slot, [low for low, *_ in move.runs])
        self._mapper.commit([[slot, "large_end", large_end], *edits], ops, after)

    def _promoted(
        self, noted: dict[int, dict[int, int]], slot: Slot, firsts: Sequence[int]
    ) -> list[list[Any]]:
        """Returns the edit that adds blocks to `joined` or `copied`."""
        blocks = dict.fromkeys(firsts, self.blocks(slot))
        return [[noted, slot.index, noted.get(slot.index, {}) | blocks]]

    def blocks(self, slot: Slot) -> int:
        """Returns the number of full blocks that the slot's request owns."""
        return slot.granted // self._layout.block

    # ---- cancelling ------------------------------------------------------------------------------

    def abandon(self, slot: Slot) -> None:
        """Cancels a slot's move. Blocks only if another batch is in flight on the slot.

        No page of the slot may be unmapped until the copies are complete. To ensure that, the
        slot's job is set to an empty `Unmap`.
        """
        move = self.moves.get(slot)
        if move is None:
            return
        reclaimer, edits = self._reclaimer, self._cancel_edits(move)
        if move.ticket is not None:
            ticket = QuietTicket(move.ticket)
            if slot.job is None:
                unmap = Unmap(slot, slot.mapped, slot.mapped, slot.dirty, ticket, slot.head)
                edits += [[slot, "job", unmap], [reclaimer, "unmaps", [*reclaimer.unmaps, unmap]]]
            else:
                ticket.wait()
        self._journal.change(edits)
        self.sweep()

    def _cancel_edits(self, move: Move) -> list[list[Any]]:
        """Returns the edits that cancel a move; a later `sweep` frees its scratch addresses."""
        return [[self.moves, move.slot, ...], [self, "cancelled", [*self.cancelled, move]]]

    def make_way(self, slot: Slot, page: int) -> bool:
        """Cancels a move that changes pages below `page`. Returns False while its copies run."""
        move = self.moves.get(slot)
        if move is not None and move.begins_before(page):
            self.abandon(slot)
            return slot.job is None
        return True

    def shorten(self, slot: Slot, page: int, work: PriorWork) -> None:
        """Ends a move that changes pages from `page` on, since their rows may be written again.

        A promotion is cancelled; any other move is completed, which waits for its copies.
        """
        move = self.moves.get(slot)
        if move is None or not move.ends_after(page):
            return
        if move.promotes:
            self.abandon(slot)
        else:
            self.finish(slot, work)

    def promoting(self) -> int:
        """Returns how many device pages per tensor are held by copies for promotions.

        `stop_promoting` cancels these copies.
        """
        return sum(move.here() for move in self.moves.values() if move.promotes)

    def stop_promoting(self, *, wait: bool = True) -> bool:
        """Cancels promotions; returns whether there were any.

        With `wait`, this waits for their copies, so that their memory is free and their slots can
        grow. Otherwise promotions of slots with a batch in flight continue.
        """
        slots = [slot for slot, move in self.moves.items() if move.promotes]
        found = bool(slots or self.cancelled)
        for slot in slots:
            if wait or slot.job is None:
                self.abandon(slot)
        self.sweep(wait=wait)
        self._reclaimer.poll()  # completes the empty unmaps of `abandon`
        return found

    def sweep(self, *, wait: bool = False) -> None:
        """Frees the scratch pages of cancelled moves whose copies are complete.

        With `wait`, waits for the copies.
        """
        self._scratch.retry()
        for move in [move for move in self.cancelled if wait or move.done()]:
            try:
                move.wait()
            except VMemError:  # nothing was mapped
                self._remove(move)
            else:
                self._drop(move)

    def _drop(self, move: Move) -> None:
        """Unmaps the scratch pages; if that fails, the next sweep retries."""
        if move.addresses is None:
            self._remove(move)
            return
        ops = OpBatch(1)
        ops.unmap(move.addresses.addr, move.stride * self._layout.num_tensors, holes=True)
        try:
            self._take_out(move, self._counts(move, -1), ops, [])
        except NotRecoverable:
            move.addresses.leave()  # quarantined
            self._remove(move)
        except VMemError:
            if move not in self.cancelled:
                self._journal.change(self._cancel_edits(move))

    def _remove(self, move: Move) -> None:
        """Removes from the records a move that has nothing mapped at its scratch addresses."""
        self._take_out(move, self._counts(move, -1), None, [])

    def _take_out(
        self, move: Move, edits: list[list[Any]], ops: OpBatch | None, after: list[Any]
    ) -> None:
        """Removes a move from the records, in one change with `edits` and, if given, a batch."""
        addresses, slot = move.addresses, move.slot
        left = [one for one in self.cancelled if one is not move]
        edits = [*edits, [move, "addresses", None], [self, "cancelled", left]]
        if self.moves.get(slot) is move:
            edits.append([self.moves, slot, ...])
        if addresses is not None:
            made = [self._journal.unrecorded, addresses, None]
            edits += [made, *self._scratch.give_edits(addresses)]
        if ops is None:
            self._journal.change(edits)
        else:
            self._mapper.commit(edits, ops, after)

    def owns(self, made: object) -> bool:
        """Returns whether the reservation belongs to a move."""
        return any(made is move.addresses for move in (*self.moves.values(), *self.cancelled))

    def close(self) -> None:
        """Cancels every move and waits for the copies."""
        for slot in list(self.moves):
            self.abandon(slot)
        self.sweep(wait=True)
        for move in self.cancelled:
            if move.addresses is not None:
                with suppress(VMemError):
                    move.addresses.close(unmap=True)
                move.addresses.leave()

    def moving(self, slot: Slot) -> int:
        """Returns how many pages per tensor a slot's move will change."""
        move = self.moves.get(slot)
        return 0 if move is None else move.pages

    def pages(self) -> Counter[Tier]:
        """Returns the number of scratch pages per tensor, by tier."""
        moves = (*self.moves.values(), *self.cancelled)
        return pages_by_tier(one for move in moves for one in move.stretches)


class Promoter:
    """Promotes 2 MiB blocks that have grown page by page, so that one entry maps each block.

    Once its last row is written, a block is only read, so its entries may be replaced. Physically
    contiguous pages are joined, which suffices if they are aligned to 2 MiB. Other blocks, and
    those for which joining did not suffice, are copied to new pages if memory allows. If memory is
    fragmented, even the copy may not get a contiguous 2 MiB; then the block is copied again once
    the request has filled another block.
    """

    def __init__(self, reclaimer: Reclaimer, mover: Mover, config: KVCacheConfig) -> None:
        self._mover = mover
        self._reclaimer = reclaimer
        self._layout = layout = reclaimer.layout
        self._unit = layout.block
        self._kept = config.window_tile
        # For each slot, the length at which to check again. This is only a hint: a wrong length may
        # delay a promotion but not prevent it.
        self._next = [0] * config.max_batch

    def step(self, lens: Sequence[int], stream: Any) -> None:
        """Starts promoting full blocks of requests that the step to `lens` lengthens.

        By the time a caller grows a request, it has launched all work on the rows so far. The last
        `KVCacheConfig.window_tile` rows may be truncated and written again, so they are not
        promoted. Does nothing in a small cache, where entry size makes no difference.
        """
        reclaimer, layout = self._reclaimer, self._layout
        if reclaimer.device_pages * layout.page_size < REACH:
            return
        table = reclaimer.table
        old = table.columns.held_rows
        for index in compress(range(len(table)), map(operator.ge, old, self._next)):
            slot = table[index]
            if lens[index] > old[index] and slot not in self._mover.moves:
                held = old[index] - self._kept
                runs, copies = self._blocks(slot, held)
                if copied := self._mover.copied.get(index):
                    blocks = self._mover.blocks(slot)
                    copies = [low for low in copies if copied.get(low) != blocks]
                self._begin(slot, runs, copies, PriorWork(stream, self._mover.device))
                # The copy may be cancelled, and joining may not yield one entry, so check again a
                # page later.
                size = layout.page_size * (1 if runs or copies else self._unit)
                done = max(0, held) * layout.row_bytes // size + 1
                self._next[index] = -(-done * size // layout.row_bytes) + self._kept

    def forget_edits(self, slot: Slot, page: int = 0) -> list[list[Any]]:
        """Returns the edits that forget the promotion of blocks that end after `page`.

        Pages from `page` on change owner or may be rewritten.
        """
        index, last = slot.index, page - self._unit
        edits: list[list[Any]] = [[self._next, index, 0]]
        for noted in (self._mover.joined, self._mover.copied):
            if index in noted:
                left = {low: blocks for low, blocks in noted[index].items() if low <= last}
                edits.append([noted, index, left])
        return edits

    def promote(self, slot: Slot, held: int, work: PriorWork, *, wait: bool) -> int:
        """Implements `KVCache.promote` for the first `held` rows."""
        if slot in self._mover.moves:
            blocks = self._mover.moving(slot) // self._unit
            if wait:
                self._mover.finish(slot, work)
            return blocks
        runs, copies = self._blocks(slot, held)
        blocks = self._begin(slot, runs, copies, work)
        if wait:
            self._mover.finish(slot, work)
        if wait and runs:  # copy the blocks for which joining did not suffice
            self._begin(slot, [], [low for low in self._blocks(slot, held)[1] if low in runs], work)
            self._mover.finish(slot, work)
        return blocks

    def _begin(self, slot: Slot, runs: list[int], copies: list[int], work: PriorWork) -> int:
        """Starts promoting blocks, given by their first pages; returns how many.

        Copies only as many blocks as fit in the free memory above the watermark.
        """
        unit, reclaimer = self._unit, self._reclaimer
        room = (reclaimer.free - reclaimer.low_pages) // (unit * self._layout.num_tensors)
        # Ranks that must agree make no copies, since they would free them at different times.
        copies = [] if reclaimer.table.lockstep else copies[: max(0, room)]
        new = [(low, low + unit, DEVICE) for low in copies]
        move = Move(slot, new, [(low, low + unit, DEVICE) for low in runs], promotes=True)
        if not move.stretches and not move.runs:
            return 0
        try:
            self._mover.begin(move, work, background=True)
        except (OutOfMemory, TooManyBatches):  # promote without copying
            move.stretches = []
            if not move.runs:
                return 0
            self._mover.begin(move, work, background=True)
        copied = len(move.stretches)
        _log.debug(
            "promotion of reqid %d: %d blocks joined, %d copied", slot.index, len(runs), copied
        )
        return len(runs) + copied

    def _blocks(self, slot: Slot, held: int) -> tuple[list[int], list[int]]:
        """Returns the first pages of the contiguous blocks to join and of the blocks to copy."""
        layout, unit = self._layout, self._unit
        joined = self._mover.joined.get(slot.index, ())
        runs: list[int] = []
        copies: list[int] = []
        first = -(-slot.shared // unit) * unit
        full = min(held * layout.row_bytes // layout.page_size, slot.granted)
        for low in range(first, full // unit * unit, unit):
            if slot.tier_map.off_device(low, low + unit):
                continue
            at = [slot.addr + layout.offset(0, low, one) for one in range(layout.num_tensors)]
            each = list(map(self._reclaimer.mapper.context.query, at))
            if all(one.entry_bytes > layout.page_size for one in each):
                continue
            run = low not in joined and all(one.run_bytes >= BLOCK_BYTES for one in each)
            (runs if run else copies).append(low)
        return runs, copies
