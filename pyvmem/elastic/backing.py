# SPDX-License-Identifier: MIT
"""Tracks which blocks of an engine have memory. Runs in the engine's scheduler.

A block is *backed* if all of its pages are mapped on every rank, and *unbacked* otherwise. The
engine's free list contains only backed blocks. A page shared by several blocks has a reference
count and is unmapped once the last of those blocks is retired.

    unbacked -- begin, run, finish --> backed -- retire, sent, confirm --> unbacked

Growing takes three calls so that the mapping can run without the lock:

    growth = backing.begin(count)       # picks blocks and reserves their bytes in the quota
    growth.run(workers)                 # maps on every rank, all or nothing
    backed = backing.finish(growth)     # the blocks now backed; empty if mapping failed

The caller holds the scheduler's lock, except during `Growth.run`. Only `Growth.run` and
`Backing.back_null` block. All byte counts are per rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pyvmem.elastic.geometry import Geometry, Run, runs_of

__all__ = ["Backing", "Growth", "Quota", "Release", "Workers"]

_NONE, _MAPPED, _MAPPING, _UNMAPPING = range(4)  # page states
_UNBACKED, _GROWING, _BACKED = range(3)  # block states
_POLL = 0.05  # seconds between attempts to reserve the null block's memory
_AGAIN = 1.0  # if asked again within this many seconds, an idle engine frees twice as much


class Quota(Protocol):
    """A limit on the bytes that an engine maps on each device; see `pyvmem.elastic.quota`."""

    def room(self) -> int:
        """Returns the number of bytes that `take` would grant now."""

    def take(self, nbytes: int, handles: int) -> bool:
        """Reserves `nbytes` more bytes, in `handles` driver mappings. Returns false if denied."""

    def end_pending(self, nbytes: int) -> None:
        """See `Account.end_pending`."""

    def give(self, nbytes: int) -> None:
        """Gives the bytes of unmapped pages back to the quota."""

    def want(self, nbytes: int) -> None:
        """Asks other engines to free `nbytes` bytes; 0 withdraws the request."""

    def close(self) -> None:
        """Closes the quota; `take` must not be called afterwards."""


class Workers(Protocol):
    """Maps pages on all ranks of the engine; see `Growth.run`."""

    def grow(self, runs: list[Run]) -> str | None:
        """Maps runs on every rank or on none; returns the error message, or None."""


@dataclass(eq=False)
class Growth:
    """A set of blocks being backed.

    Attributes:
        blocks: ids of the blocks.
        runs: pages to map; empty if all of the blocks' pages are already mapped.
        nbytes: size of these pages in bytes.
        failure: why mapping failed; None once it succeeded.
    """

    blocks: list[int]
    runs: list[Run]
    nbytes: int
    failure: str | None = "interrupted before it was mapped"

    def run(self, workers: Workers) -> None:
        """Maps the pages on all ranks. Blocks until the driver is done."""
        self.failure = workers.grow(self.runs) if self.runs else None


@dataclass(eq=False)
class Release:
    """A set of pages to unmap once no launched work can access them.

    Attributes:
        number: identifies the release in `Backing.confirm`.
        runs: the pages.
        nbytes: size of these pages in bytes.
    """

    number: int
    runs: list[Run]
    nbytes: int


@dataclass
class Counters:
    """Totals since the engine started.

    Attributes:
        grown_blocks, grown_bytes, growths: blocks backed, bytes mapped, and grow operations
            completed.
        retired_blocks, retired_bytes, releases: blocks retired, bytes unmapped, and releases sent.
        refusals: grow operations that the quota reduced or denied.
        failures: grow operations and releases that failed in the driver.
        last_failure: message of the last failure.
    """

    grown_blocks: int = 0
    grown_bytes: int = 0
    growths: int = 0
    retired_blocks: int = 0
    retired_bytes: int = 0
    releases: int = 0
    refusals: int = 0
    failures: int = 0
    last_failure: str = ""


@dataclass(eq=False)
class Backing:
    """Tracks the state of each page and block of an engine.

    Block 0 (vLLM's null block, SGLang's padding page) is always backed. A single request may need
    thousands of blocks, so growing avoids Python loops over blocks.

    Attributes:
        geometry: the engine's geometry.
        quota: the quota that grants bytes before they are mapped.
        unbacked: number of unbacked blocks, not counting those being backed.
        mapped_bytes: bytes mapped, including those being mapped or unmapped.
        unmapping_bytes: the part of `mapped_bytes` that is being unmapped.
        outbox: releases not yet sent to any rank.
        counters: totals since the start.
    """

    geometry: Geometry
    quota: Quota
    mapped_bytes: int = 0
    unmapping_bytes: int = 0
    outbox: list[Release] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        kinds = range(len(self.geometry.classes))
        pages = [self.geometry.num_pages(kind) for kind in kinds]
        self._state = [np.zeros(count, dtype=np.uint8) for count in pages]
        # For each page, the number of backed or growing blocks that touch it.
        self._users = [np.zeros(count, dtype=np.int64) for count in pages]
        self._blocks = bytearray(self.geometry.num_blocks)  # the state of each block
        self._blocks[0] = _GROWING
        self._block_states = np.frombuffer(self._blocks, dtype=np.uint8)  # a view of `_blocks`
        self.unbacked = self.geometry.num_blocks - 1
        self._asked, self._asked_at = 0, -_AGAIN  # the last result of `owed` and its time
        self._sent: dict[int, Release] = {}
        self._last = 0
        self._null = Growth([0], runs_of([self.geometry.pages(kind, 0) for kind in kinds]), 0)
        self._null.nbytes = self.geometry.run_bytes(self._null.runs)

    # ---- growth ----------------------------------------------------------------------------------

    def begin_null(self) -> Growth:
        """Begins backing the null block, which the ranks have already mapped.

        Raises:
            MemoryError: the quota does not have enough room.
        """
        if not self.quota.take(self._null.nbytes, self._handles(self._null)):
            raise MemoryError(
                f"the null block needs {self._null.nbytes} bytes, "
                f"but {self.quota.room()} are available (VMEM_LIMIT, or the memory of the GPU)"
            )
        self._reserve(self._null)
        self._null.failure = None
        return self._null

    def back_null(self, patience: float) -> None:
        """Waits for other engines to leave room for the null block, then records it as backed.

        Raises:
            MemoryError: there was still no room after `patience` seconds; the quota is closed.
        """
        end = time.monotonic() + patience
        while True:
            try:
                growth = self.begin_null()
                break
            except MemoryError:
                if time.monotonic() > end:
                    self.quota.close()
                    raise
                self.quota.want(self._null.nbytes)
                time.sleep(_POLL)
        self.quota.want(0)
        self.finish(growth)

    def begin(self, count: int) -> Growth | None:
        """Picks up to `count` unbacked blocks, lowest first, within the quota.

        Starting from the lowest addresses keeps the number of runs small. Blocks beyond `count`
        that fit on the same pages are added as well, since they need no extra memory.

        Returns:
            The `Growth` to run and finish; None if no block can be backed now.
        """
        growth, more = self._pick(count, self.quota.room())
        if len(growth.blocks) < count and more:
            self.counters.refusals += 1
        if not growth.blocks:
            return None
        if growth.nbytes and not self.quota.take(growth.nbytes, self._handles(growth)):
            self.counters.refusals += 1
            return None
        self._reserve(growth)
        return growth

    def _pick(self, count: int, room: int) -> tuple[Growth, bool]:
        """Picks blocks for `begin`; also returns whether `room` or `count` excluded candidates."""
        geometry, kinds = self.geometry, range(len(self.geometry.classes))
        sharing = geometry.page_size // min(one.block_bytes for one in geometry.classes)
        changing = [int(np.count_nonzero(state >= _MAPPING)) for state in self._state]
        unbacked = np.flatnonzero(self._block_states == _UNBACKED)
        # Blocks on pages that are being mapped or unmapped are dropped below. At most
        # `sharing` + 2 blocks touch a page, so enough candidates remain.
        most = count + sharing + (sharing + 2) * sum(changing)
        blocks = unbacked[:most]
        for kind in filter(changing.__getitem__, kinds):
            pages, which = self._pages(kind, blocks)
            blocks = np.delete(blocks, which[self._state[kind][pages] >= _MAPPING])
        blocks = blocks[: count + sharing]
        costs, found = np.zeros(len(blocks), dtype=np.int64), []
        for kind in kinds:
            pages, which = self._pages(kind, blocks)
            new = self._state[kind][pages] == _NONE
            new[1:] &= pages[1:] != pages[:-1]
            pages, which = pages[new], which[new]
            costs += np.bincount(which, minlength=len(blocks)) * geometry.page_bytes(kind)
            found.append((pages, which))
        excluded = np.cumsum(costs) > room
        excluded[count:] |= costs[count:] > 0
        picked = int(np.argmax(excluded)) if excluded.any() else len(blocks)
        runs = runs_of([pages[which < picked].tolist() for pages, which in found])
        growth = Growth(blocks[:picked].tolist(), runs, int(costs[:picked].sum()))
        return growth, picked < len(blocks)

    def _pages(self, kind: int, blocks: Any) -> tuple[Any, Any]:
        """Returns the pages that `blocks` touch in a class, and the index of each page's block.

        This is a vectorized `Geometry.pages`. Pages are listed block by block, so they are in
        ascending order if the blocks are.
        """
        size, page = self.geometry.classes[kind].block_bytes, self.geometry.page_size
        first, end = blocks * size // page, ((blocks + 1) * size - 1) // page + 1
        counts = end - first
        which = np.repeat(np.arange(len(blocks)), counts)
        begins = np.cumsum(counts) - counts
        return np.arange(len(which)) + (first - begins)[which], which

    def _handles(self, growth: Growth) -> int:
        classes = self.geometry.classes
        return sum(classes[run.kind].tensors for run in growth.runs)

    def _mark(self, runs: Iterable[Run], state: int) -> None:
        for kind, first, count in runs:
            self._state[kind][first : first + count] = state

    def _count(self, blocks: Sequence[int], by: int) -> list[list[int]]:
        """Adds `by` to the user counts of the blocks' pages; returns those left without users."""
        unused: list[list[int]] = []
        for kind, users in enumerate(self._users):
            pages, _ = self._pages(kind, np.asarray(blocks, dtype=np.int64))
            np.add.at(users, pages, by)
            unused.append(sorted(set(pages[users[pages] == 0].tolist())))
        return unused

    def _reserve(self, growth: Growth) -> None:
        if growth is not self._null:
            self._block_states[growth.blocks] = _GROWING
            self.unbacked -= len(growth.blocks)
        # Count users before mapping, so that retiring a neighboring block does not free a
        # shared page.
        self._count(growth.blocks, 1)
        self._mark(growth.runs, _MAPPING)
        self.mapped_bytes += growth.nbytes

    def finish(self, growth: Growth) -> list[int]:
        """Records the result of a grow operation; returns its blocks, or [] if it failed."""
        if growth.nbytes:
            self.quota.end_pending(growth.nbytes)
        if growth.failure is None:
            self._mark(growth.runs, _MAPPED)
            self._block_states[growth.blocks] = _BACKED
            self.counters.growths += 1
            self.counters.grown_blocks += len(growth.blocks)
            self.counters.grown_bytes += growth.nbytes
            return growth.blocks
        self.counters.failures += 1
        self.counters.last_failure = growth.failure
        self._mark(growth.runs, _NONE)
        unused = self._count(growth.blocks, -1)
        self.mapped_bytes -= growth.nbytes
        self.quota.give(growth.nbytes)
        self._block_states[growth.blocks] = _UNBACKED
        self.unbacked += len(growth.blocks)
        # These pages were mapped before. Their other blocks have been retired since, but this
        # growth kept the pages from being unmapped.
        self._release([[p for p in pages if self._state[k][p] == _MAPPED]
                     for k, pages in enumerate(unused)])  # fmt: skip
        return []

    # ---- releasing -------------------------------------------------------------------------------

    def retire(self, blocks: list[int]) -> int:
        """Marks backed blocks as unbacked; they must already be off the engine's free list.

        Adds a release of the pages that no other block uses to `outbox`.

        Returns:
            The size of these pages in bytes.

        Raises:
            AssertionError: a block is not backed, or is the null block.
        """
        for block in blocks:
            if not self.is_backed(block) or not block:
                raise AssertionError(f"block {block} is not backed, or the null block")
            self._blocks[block] = _UNBACKED
        unused = self._count(blocks, -1)
        self.unbacked += len(blocks)
        self.counters.retired_blocks += len(blocks)
        return self._release(unused)

    def emptied_by(self, blocks: Iterable[int]) -> list[int]:
        """Returns the members of `blocks` whose retirement would free a page.

        Each of them touches a page that no backed block outside `blocks` uses.
        """
        each = np.fromiter(blocks, dtype=np.int64)
        found = np.zeros(len(each), dtype=bool)
        for kind, users in enumerate(self._users):
            pages, which = self._pages(kind, each)
            every, place, counts = np.unique(pages, return_inverse=True, return_counts=True)
            found[which[(counts == users[every])[place]]] = True
        worth: list[int] = each[found].tolist()
        return worth

    def emptied_first(
        self, blocks: Iterable[int], most: int, *, at_least: bool = False
    ) -> list[int]:
        """Returns up to `most` blocks from `emptied_by`, in whole groups, highest addresses first.

        Growth takes the lowest addresses first, so this keeps used memory contiguous.

        Args:
            blocks: candidates, such as all idle blocks.
            most: maximum number of blocks.
            at_least: include the last group even if that exceeds `most`.
        """
        size, page = self.geometry.group_unit
        groups: dict[int, list[int]] = {}
        for block in sorted(self.emptied_by(blocks), reverse=True):
            groups.setdefault(block * size // page, []).append(block)
        found: list[int] = []
        for group in groups.values():
            left = most - len(found)
            if len(group) <= left or (at_least and left > 0):
                found += group
        return found

    def _release(self, pages: list[list[int]]) -> int:
        runs = runs_of(pages)
        if not runs:
            return 0
        self._last += 1
        release = Release(self._last, runs, self.geometry.run_bytes(runs))
        self._mark(runs, _UNMAPPING)
        self.unmapping_bytes += release.nbytes
        self.outbox.append(release)
        return release.nbytes

    def send(self) -> list[Release]:
        """Empties `outbox` and returns its releases, which the caller must send to all ranks."""
        sent, self.outbox = self.outbox, []
        self._sent.update((one.number, one) for one in sent)
        self.counters.releases += len(sent)
        return sent

    def confirm(self, number: int, failure: str | None) -> None:
        """Records that all ranks have handled a release; requeues it if any of them failed."""
        release = self._sent.pop(number)
        if failure is not None:
            self.counters.failures += 1
            self.counters.last_failure = failure
            self.outbox.append(release)
            return
        self._mark(release.runs, _NONE)
        self.mapped_bytes -= release.nbytes
        self.unmapping_bytes -= release.nbytes
        self.counters.retired_bytes += release.nbytes
        self.quota.give(release.nbytes)

    def owed(self, excess: int, now: float, idle: bool, floor: int) -> int:
        """Returns the bytes to free now, given the `excess` that the quota reports.

        An idle engine that is asked again within a second frees twice as much as before. If it
        freed only what was asked for, every request on the other engine would wait for memory.

        Args:
            excess: bytes to free, including those already being unmapped.
            now: the current time in seconds.
            idle: whether the engine is idle.
            floor: bytes that the engine keeps, unless `excess` requires them.
        """
        owed = excess - self.unmapping_bytes
        if owed <= 0:
            return 0
        if idle and now < self._asked_at + _AGAIN:
            spare = self.mapped_bytes - self.unmapping_bytes - floor
            owed = max(owed, min(2 * self._asked, spare))
        self._asked, self._asked_at = owed, now
        return owed

    @property
    def unconfirmed(self) -> bool:
        """True if a release has been sent but not yet confirmed."""
        return bool(self._sent)

    # ---- queries ---------------------------------------------------------------------------------

    def is_backed(self, block: int) -> bool:
        """Returns true if a block has memory on every rank."""
        return self._blocks[block] == _BACKED

    def live_bytes(self, blocks: Iterable[int]) -> int:
        """Returns the total size in bytes of the pages that these blocks touch."""
        total = 0
        for kind in range(len(self.geometry.classes)):
            pages = {page for block in blocks for page in self.geometry.pages(kind, block)}
            total += len(pages) * self.geometry.page_bytes(kind)
        return total

    def check(self) -> list[str]:
        """Checks the records and returns a message for each inconsistency. Slow."""
        wrong: list[str] = []
        mapped = 0
        if self.unbacked != (unbacked := self._blocks.count(_UNBACKED)):
            wrong.append(f"{unbacked} blocks are unbacked, but the records say {self.unbacked}")
        for kind in range(len(self.geometry.classes)):
            users = [0] * self.geometry.num_pages(kind)
            for block in range(self.geometry.num_blocks):
                if self.is_backed(block):
                    for page in self.geometry.pages(kind, block):
                        users[page] += 1
            for page, state in enumerate(self._state[kind].tolist()):
                mapped += (state != _NONE) * self.geometry.page_bytes(kind)
                if state == _MAPPED and not self._users[kind][page]:
                    wrong.append(f"page {page} of class {kind} is mapped but unused")
                if state in (_NONE, _UNMAPPING) and users[page]:
                    wrong.append(f"page {page} of class {kind} is used but not mapped")
                if users[page] > self._users[kind][page]:
                    wrong.append(f"page {page} of class {kind}: {users[page]} users not counted")
        if mapped != self.mapped_bytes:
            wrong.append(f"{mapped} bytes are mapped, but the records say {self.mapped_bytes}")
        return wrong
