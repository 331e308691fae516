# SPDX-License-Identifier: MIT
"""Moves prefixes between blocks so that whole pages become free; part of the scheduler.

Pages that hold few prefixes and no requests' blocks are *victims*. Their contents move to idle
blocks of fuller pages: the ranks copy them before a step, or right away if no step is due. Each
prefix then has a new block, at the same position in the eviction order, and requests can still hit
it.

    choose          selects victims whose contents fit elsewhere, those with the least to copy first
    pick            returns the next copies, for the ranks to make
    done, undo      records them in vLLM's pool, or reverts `pick`

A victim's pages then hold only idle blocks and are freed like any other idle page.
"""

from __future__ import annotations

from typing import Any

from pyvmem.elastic.backing import Backing
from pyvmem.elastic.idle_blocks import IdleBlocks
from pyvmem.vllm.offload_holds import Holds

__all__ = ["MOST", "Mover"]

MOST = 64  # blocks copied at a time: 150 MB if a block has 64 KB in each of 36 layers


class Mover:
    """Moves the prefixes of one engine. The caller holds the engine's lock.

    Args:
        pool: vLLM's block pool.
        backing: records which blocks have memory.
        idle: the idle blocks.
        holds: blocks that an offload store is still reading.

    Attributes:
        victims: groups to empty, in this order.
        moved: number of blocks moved so far.
    """

    def __init__(self, pool: Any, backing: Backing, idle: IdleBlocks, holds: Holds) -> None:
        self.pool = pool
        self.backing = backing
        self.idle = idle
        self.holds = holds
        self.victims: list[int] = []
        self.moved = 0
        self._spare: set[int] = set()  # groups that must not receive copies

    def _contents(self, group: int) -> list[int]:
        """Returns the used and cached blocks that touch a group's page."""
        idle, backed = self.idle, self.backing.is_backed
        return [b for b in self.backing.geometry.touching(group) if backed(b) and b not in idle]

    def _may_move(self, blocks: list[int]) -> bool:
        if any(one in self.holds for one in blocks):
            return False
        found = [self.pool.blocks[one] for one in blocks]
        return all(one.block_hash is not None and not one.ref_cnt for one in found)

    def forget(self) -> None:
        """Cancels all moves."""
        self.victims, self._spare = [], set()

    def choose(self, groups: int) -> int:
        """Selects up to `groups` victims; returns the bytes that they will free.

        Full and empty groups are not considered.
        """
        self.forget()
        if self.idle.one_block:
            return 0
        candidates: list[tuple[int, int]] = []
        places = 0
        for group in self.idle.groups():
            contents = self._contents(group)
            if not contents:
                self._spare.add(group)
                continue
            places += len(self.idle.group(group))
            if self._may_move(contents):
                candidates.append((len(contents), group))
        for copies, group in sorted(candidates):
            places -= len(self.idle.group(group)) + copies
            if places < 0 or len(self.victims) >= groups:
                break
            self.victims.append(group)
        self._spare.update(self.victims)
        return len(self.victims) * self.backing.geometry.group_bytes

    def pick(self) -> list[tuple[int, int]]:
        """Returns up to `MOST` copies, as (source, destination) pairs of blocks.

        The destinations are removed from the idle blocks.
        """
        found: list[tuple[int, int]] = []
        leaving: set[int] = set()
        while self.victims and len(found) < MOST:
            contents = [one for one in self._contents(self.victims[0]) if one not in leaving]
            if self._may_move(contents):
                sources = contents[: MOST - len(found)]
                places = self.idle.take(len(sources), self._spare)
                if len(places) < len(sources):  # vLLM has taken some since `choose`
                    self.idle.add(places)
                    self.victims.clear()
                    break
                found += zip(sources, places, strict=True)
                leaving.update(sources)
                if len(sources) < len(contents):
                    break
            self.victims.pop(0)
        return found

    def done(self, copies: list[tuple[int, int]]) -> None:
        """Records copies that the ranks will make before any other access to the blocks."""
        queue, blocks = self.pool.free_block_queue, self.pool.blocks
        for source, place in copies:
            src, dst = blocks[source], blocks[place]
            queue.remove(dst)
            # The destination takes over the source's position in the eviction order.
            dst.prev_free_block, dst.next_free_block = src.prev_free_block, src.next_free_block
            dst.prev_free_block.next_free_block = dst
            dst.next_free_block.prev_free_block = dst
            self.pool.move_block_hashes(src, dst)
            queue.prepend_n([src])
        self.holds.overwrite(place for _, place in copies)
        self.idle.add(source for source, _ in copies)
        self.moved += len(copies)

    def undo(self, copies: list[tuple[int, int]]) -> None:
        """Reverts `pick` if the ranks did not make the copies."""
        self.idle.add(place for _, place in copies)
        self.forget()
