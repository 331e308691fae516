# SPDX-License-Identifier: MIT
"""The scheduler's records of which blocks have memory.

A block is *backed* when all its pages are mapped on every rank, otherwise *bare*. vLLM's pool sees
only backed blocks. Pages that several blocks share are refcounted, and are unmapped with the last
block.

    bare -- begin, run, finish --> backed -- retire, sent, confirm --> bare

Growth in three calls, so that the middle one, which maps, needs no lock:

    growth = backing.begin(blocks)      # picks blocks, takes their bytes from the quota
    growth.run(workers)                 # maps on every rank, all or nothing
    backed = backing.finish(growth)     # the ids; none where it failed

Nothing here depends on an engine; only `Growth.run` and `Backing.back_null` wait. The caller holds
the scheduler's lock.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pyvmem.elastic.geometry import Geometry, Run, runs_of

__all__ = ["Backing", "Growth", "Quota", "Release", "Workers"]

_NONE, _MAPPED, _MAPPING, _LEAVING = range(4)
_LOOK = 0.05  # s between looks at the quota
_AGAIN = 1.0  # s within which an idle engine that is asked again gives twice as much


class Quota(Protocol):
    """The engine's part of the memory of each GPU."""

    def room(self) -> int:
        """Bytes that `take` would grant now."""

    def take(self, nbytes: int, handles: int) -> bool:
        """Asks for this many more bytes, mapped by this many driver calls.

        If so, they count as the engine's from now on.
        """

    def mapped(self, nbytes: int) -> None:
        """Notes that what `take` granted is mapped now, or is about to be returned."""

    def give(self, nbytes: int) -> None:
        """Takes back the bytes of unmapped pages."""

    def want(self, nbytes: int) -> None:
        """Asks other engines for so many bytes; 0 withdraws that."""

    def close(self) -> None:
        """Leaves: nothing is taken any more."""


class Workers(Protocol):
    """All ranks of the engine."""

    def grow(self, runs: list[Run]) -> str | None:
        """Maps runs on every rank or on none; returns what failed, in words."""


@dataclass(eq=False)
class Growth:
    """Blocks that are about to get memory."""

    blocks: list[int]
    runs: list[Run]
    nbytes: int
    failure: str | None = "interrupted before it was mapped"

    def run(self, workers: Workers) -> None:
        """Maps; waits for the driver."""
        self.failure = workers.grow(self.runs) if self.runs else None


@dataclass(eq=False)
class Release:
    """Pages to unmap once no work under way can touch them."""

    number: int
    runs: list[Run]
    nbytes: int


@dataclass
class Counters:
    """Since the start.

    Attributes:
        grown_blocks, grown_bytes, growths: what was mapped, in how many growths.
        retired_blocks, retired_bytes, releases: what was taken back, in how many releases.
        refusals: growths that the quota cut short or refused.
        failures: growths and releases that a driver refused.
        last_failure: the text of the last failure.
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
    """The pages of an engine. Block 0, vLLM's null block, is backed from the start.

    Attributes:
        geometry: of the engine.
        quota: asked before anything is mapped.
        mapped_bytes: bytes of one GPU that are mapped, being mapped, or being unmapped.
        leaving_bytes: the part that is being unmapped.
        outbox: releases not yet sent to any rank.
        counters: what was done.
    """

    geometry: Geometry
    quota: Quota
    mapped_bytes: int = 0
    leaving_bytes: int = 0
    outbox: list[Release] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        kinds = range(len(self.geometry.classes))
        self._state = [bytearray(self.geometry.num_pages(kind)) for kind in kinds]
        # Blocks that a page holds parts of: at most a page of one-byte blocks.
        self._users = [array("I", bytes(4 * self.geometry.num_pages(kind))) for kind in kinds]
        self._backed = bytearray(self.geometry.num_blocks)
        self._asked, self._asked_at = 0, -_AGAIN  # bytes that `owed` named last, and when
        self._bare = list(range(1, self.geometry.num_blocks))  # ascending: a heap
        self._waiting: list[int] = []  # bare, with a page that is being mapped or unmapped
        self._sent: dict[int, Release] = {}
        self._last = 0
        self._null = Growth([0], runs_of([self.geometry.pages(kind, 0) for kind in kinds]), 0)
        self._null.nbytes = self.geometry.run_bytes(self._null.runs)

    # ---- growth ----------------------------------------------------------------------------------

    def begin_null(self) -> Growth:
        """The growth of the null block: the first one, which the ranks do on their own.

        Raises:
            MemoryError: the quota is too small even for that.
        """
        if not self.quota.take(self._null.nbytes, self._handles(self._null)):
            raise MemoryError(
                f"the null block needs {self._null.nbytes} bytes, "
                f"{self.quota.room()} are available (VMEM_LIMIT, or the memory of the GPU)"
            )
        self._reserve(self._null)
        self._null.failure = None
        return self._null

    def back_null(self, patience: float) -> None:
        """Counts the null block, which the ranks have mapped, once other engines leave room for it.

        Raises:
            MemoryError: they have not within `patience` seconds; the quota is closed.
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
                time.sleep(_LOOK)
        self.quota.want(0)
        self.finish(growth)

    @property
    def bare(self) -> int:
        """Blocks without memory."""
        return len(self._bare) + len(self._waiting)

    def begin(self, count: int) -> Growth | None:
        """Picks up to `count` bare blocks, the lowest first: as many as the quota allows.

        Taking low addresses first keeps neighbours together, so that a growth has few runs. Blocks
        that lie on the same pages come along: they cost nothing.
        """
        room = self.quota.room()
        growth = self._pick(count, room)
        if len(growth.blocks) < count and self._bare:
            self.counters.refusals += 1
        if not growth.blocks:
            return None
        if growth.nbytes and not self.quota.take(growth.nbytes, self._handles(growth)):
            self.counters.refusals += 1
            self._put_back(growth.blocks)
            return None
        self._reserve(growth)
        return growth

    def _pick(self, count: int, room: int) -> Growth:
        geometry, kinds = self.geometry, range(len(self.geometry.classes))
        new: list[set[int]] = [set() for _ in kinds]
        blocks: list[int] = []
        nbytes = 0
        while self._bare:
            block = heapq.heappop(self._bare)
            cost, free = 0, True
            wanted: list[list[int]] = []
            for kind in kinds:
                state, mine = self._state[kind], []
                for page in geometry.pages(kind, block):
                    if state[page] == _NONE:
                        if page not in new[kind]:
                            mine.append(page)
                    elif state[page] != _MAPPED:
                        free = False
                wanted.append(mine)
                cost += len(mine) * geometry.page_bytes(kind)
            if not free and len(blocks) < count:
                self._waiting.append(block)
                continue
            if not free or nbytes + cost > room or (cost and len(blocks) >= count):
                heapq.heappush(self._bare, block)
                break
            for kind in kinds:
                new[kind].update(wanted[kind])
            blocks.append(block)
            nbytes += cost
        return Growth(blocks, runs_of(new), nbytes)

    def _handles(self, growth: Growth) -> int:
        classes = self.geometry.classes
        return sum(classes[run.kind].tensors for run in growth.runs)

    def _put_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._bare, block)

    def _wake(self) -> None:
        self._put_back(self._waiting)
        self._waiting.clear()

    def _mark(self, runs: Iterable[Run], state: int) -> None:
        for kind, first, count in runs:
            self._state[kind][first : first + count] = bytes([state]) * count

    def _count(self, blocks: Iterable[int], by: int) -> list[set[int]]:
        """Counts blocks in or out; returns the pages, by class, that no block uses now."""
        unused: list[set[int]] = []
        for kind in range(len(self.geometry.classes)):
            users, none = self._users[kind], set()
            for block in blocks:
                for page in self.geometry.pages(kind, block):
                    users[page] += by
                    if not users[page]:
                        none.add(page)
            unused.append(none)
        return unused

    def _reserve(self, growth: Growth) -> None:
        # Counted from here on, so that retiring a neighbour meanwhile frees no shared page.
        self._count(growth.blocks, 1)
        self._mark(growth.runs, _MAPPING)
        self.mapped_bytes += growth.nbytes

    def finish(self, growth: Growth) -> list[int]:
        """Records the result of a growth; returns the blocks that are backed now."""
        self._wake()
        if growth.nbytes:
            self.quota.mapped(growth.nbytes)
        if growth.failure is None:
            self._mark(growth.runs, _MAPPED)
            for block in growth.blocks:
                self._backed[block] = 1
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
        self._put_back(growth.blocks)
        # Pages of neighbours that were retired while this growth counted on them.
        self._leave([{p for p in pages if self._state[k][p] == _MAPPED}
                     for k, pages in enumerate(unused)])  # fmt: skip
        return []

    # ---- giving back -----------------------------------------------------------------------------

    def retire(self, blocks: list[int]) -> int:
        """Makes backed blocks bare that are no longer in vLLM's pool.

        Their pages that no other block uses go to the `outbox`; returns their bytes.
        """
        for block in blocks:
            if not self._backed[block] or not block:
                raise AssertionError(f"block {block} is not backed, or the null block")
            self._backed[block] = 0
        unused = self._count(blocks, -1)
        self._put_back(blocks)
        self.counters.retired_blocks += len(blocks)
        return self._leave(unused)

    def emptied_by(self, blocks: Iterable[int]) -> list[int]:
        """Picks the backed blocks that have a page to themselves, or share it with others given.

        To retire the rest as well would return nothing.
        """
        blocks, found = list(blocks), set[int]()
        for kind in range(len(self.geometry.classes)):
            users, of = self._users[kind], dict[int, list[int]]()
            for block in blocks:
                for page in self.geometry.pages(kind, block):
                    of.setdefault(page, []).append(block)
            for page, some in of.items():
                if len(some) == users[page]:
                    found.update(some)
        return [block for block in blocks if block in found]

    def emptied_first(
        self, blocks: Iterable[int], most: int, *, at_least: bool = False
    ) -> list[int]:
        """Picks up to `most` blocks of `emptied_by`, in whole groups, highest addresses first.

        Growth takes the lowest, so that what is used stays together. `at_least`: with so many, or
        a few more that share a page with them.
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

    def _leave(self, pages: list[set[int]]) -> int:
        runs = runs_of(pages)
        if not runs:
            return 0
        self._last += 1
        release = Release(self._last, runs, self.geometry.run_bytes(runs))
        self._mark(runs, _LEAVING)
        self.leaving_bytes += release.nbytes
        self.outbox.append(release)
        return release.nbytes

    def send(self) -> list[Release]:
        """Takes the releases to send to the ranks now."""
        sent, self.outbox = self.outbox, []
        self._sent.update((one.number, one) for one in sent)
        self.counters.releases += len(sent)
        return sent

    def confirm(self, number: int, failure: str | None) -> None:
        """Every rank has done a release; or one has failed, and the release will be retried."""
        release = self._sent.pop(number)
        if failure is not None:
            self.counters.failures += 1
            self.counters.last_failure = failure
            self.outbox.append(release)
            return
        self._mark(release.runs, _NONE)
        self.mapped_bytes -= release.nbytes
        self.leaving_bytes -= release.nbytes
        self.counters.retired_bytes += release.nbytes
        self.quota.give(release.nbytes)
        self._wake()

    def owed(self, excess: int, now: float, idle: bool, floor: int) -> int:
        """Bytes to free, since the quota or another engine asks for `excess`.

        An idle engine that is asked again soon frees twice as much as the last time. Otherwise each
        of another engine's requests, which come one after the other, would wait for memory.

        Args:
            excess: bytes, those that are leaving included.
            now: the time in seconds.
            idle: the engine is.
            floor: bytes that it keeps, unless `excess` demands them.
        """
        owed = excess - self.leaving_bytes
        if owed <= 0:
            return 0
        if idle and now < self._asked_at + _AGAIN:
            spare = self.mapped_bytes - self.leaving_bytes - floor
            owed = max(owed, min(2 * self._asked, spare))
        self._asked, self._asked_at = owed, now
        return owed

    @property
    def unconfirmed(self) -> bool:
        """True if a rank has yet to answer."""
        return bool(self._sent)

    # ---- questions -------------------------------------------------------------------------------

    def is_backed(self, block: int) -> bool:
        """Tells if a block has memory on every rank."""
        return bool(self._backed[block])

    def live_bytes(self, blocks: Iterable[int]) -> int:
        """Memory of all pages that a block of these touches."""
        total = 0
        for kind in range(len(self.geometry.classes)):
            pages = {page for block in blocks for page in self.geometry.pages(kind, block)}
            total += len(pages) * self.geometry.page_bytes(kind)
        return total

    def check(self) -> list[str]:
        """Contradictions in the records, in words; slow."""
        wrong: list[str] = []
        mapped = 0
        lists = sorted([*self._bare, *self._waiting])
        if lists != sorted(set(lists)):
            wrong.append("a block is bare twice")
        for block in lists:
            if self._backed[block]:
                wrong.append(f"block {block} is backed and among the bare")
        for kind in range(len(self.geometry.classes)):
            users = array("I", bytes(4 * self.geometry.num_pages(kind)))
            for block, backed in enumerate(self._backed):
                if backed:
                    for page in self.geometry.pages(kind, block):
                        users[page] += 1
            for page, state in enumerate(self._state[kind]):
                mapped += (state != _NONE) * self.geometry.page_bytes(kind)
                if state == _MAPPED and not self._users[kind][page]:
                    wrong.append(f"page {page} of class {kind} is mapped and unused")
                if state in (_NONE, _LEAVING) and users[page]:
                    wrong.append(f"page {page} of class {kind} is used and not mapped")
                if users[page] > self._users[kind][page]:
                    wrong.append(f"page {page} of class {kind}: {users[page]} users not counted")
        if mapped != self.mapped_bytes:
            wrong.append(f"{mapped} bytes are mapped, the records say {self.mapped_bytes}")
        return wrong
