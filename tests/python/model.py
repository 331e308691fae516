# SPDX-License-Identifier: MIT
"""A plain model of a context: its mappings, the owners of its pages, and the pages' contents.

It predicts the class of a batch's first error; if there is none, it changes its own state as the
batch should change the context. Lengths are in granules. A granule's contents are four quarters,
each filled with a single byte value, or None if unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyvmem

QUARTERS = 4


@dataclass(eq=False)
class Phys:
    """A granule of physical memory."""

    content: list[int | None]


@dataclass(eq=False)
class Handle:
    """A handle, with the granules that it refers to."""

    pages: list[Phys]
    page_size: int  # granules
    real: pyvmem.Pages
    live: bool = True


@dataclass
class Pte:
    """The state of a granule of a reservation."""

    phys: Phys
    handle: Handle | None
    start: bool
    readonly: bool


@dataclass
class Op:
    """One operation of a batch, in granules, relative to a reservation."""

    kind: str  # map, populate, unmap, fill
    space: int
    at: int
    size: int
    count: int = 1
    stride: int = 0
    handle: Handle | None = None
    offset: int = 0
    readonly: bool = False
    consume: bool = False
    dirty: bool = False
    holes: bool = False
    value: int = 0
    found: list[int] = field(
        default_factory=list
    )  # unmap, fill: what was mapped when the operation was checked

    def pieces(self) -> list[int]:
        return [self.at + i * self.stride for i in range(self.count)]


class Refused(Exception):
    """Raised with the error that the batch must report."""

    def __init__(self, error: type[pyvmem.VMemError]) -> None:
        super().__init__(error.__name__)
        self.error = error


@dataclass
class Model:
    """The expected state of a context."""

    sizes: list[int]  # granules of each reservation
    spaces: list[dict[int, Pte]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    lost: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spaces = [{} for _ in self.sizes]
        self.lost = [set() for _ in self.sizes]

    # ---- expected statistics ---

    def mapped(self) -> int:
        return sum(len(space) for space in self.spaces)

    def used(self) -> set[Phys]:
        pages = {pte.phys for space in self.spaces for pte in space.values()}
        return pages | {phys for handle in self.live() for phys in handle.pages}

    def live(self) -> list[Handle]:
        return [handle for handle in self.handles if handle.live]

    def mappings(self, handle: Handle) -> list[tuple[int, int, int]]:
        """Returns (space, first, last + 1) for each live mapping made with a handle."""
        found: list[tuple[int, int, int]] = []
        for number, space in enumerate(self.spaces):
            for at in sorted(space):
                if space[at].handle is not handle:
                    continue
                if space[at].start:
                    found.append((number, at, at + 1))
                else:
                    number_, first, last = found.pop()
                    assert (number_, last) == (number, at)
                    found.append((number, first, at + 1))
        return found

    # ---- batches

    def new_pages(self, ops: list[Op]) -> int:
        """Returns the number of granules that a batch allocates from the pool."""
        return sum(op.size * op.count for op in ops if op.kind == "populate")

    def check(self, ops: list[Op]) -> None:
        """Raises Refused with the first error that the batch must report; applies nothing."""
        busy: set[tuple[int, int]] = set()
        going: set[int] = set()  # handles consumed by earlier operations
        for op in ops:  # first check the arguments of all operations
            self._check_arguments(op)
        for op in ops:
            op.found = []
            if op.kind == "map" and id(op.handle) in going:
                raise Refused(pyvmem.Busy)
            for first in op.pieces():
                for at in range(first, first + op.size):
                    self._check_granule(op, at, busy)
            if op.consume:
                going.add(id(op.handle))

    def _check_arguments(self, op: Op) -> None:
        """Checks only the arguments, not the pages: the handle, then the operation's bounds."""
        if op.kind == "map":
            self._check_handle(op)
        if max(op.pieces()) + op.size > self.sizes[op.space]:
            raise Refused(pyvmem.NotReserved)

    def argument_error(self, ops: list[Op]) -> type[pyvmem.VMemError] | None:
        """Returns the error of the first operation with invalid arguments."""
        for op in ops:
            try:
                self._check_arguments(op)
            except Refused as refused:
                return refused.error
        return None

    def _check_handle(self, op: Op) -> None:
        assert op.handle is not None
        if not op.handle.live:
            raise Refused(pyvmem.BadHandle)
        if op.offset + op.size * op.count > len(op.handle.pages):
            raise Refused(pyvmem.OutOfRange)

    def _check_granule(self, op: Op, at: int, busy: set[tuple[int, int]]) -> None:
        pte = self.spaces[op.space].get(at)
        key = (op.space, at)
        if at in self.lost[op.space]:
            raise Refused(pyvmem.NotRecoverable)
        if op.kind in ("map", "populate"):
            if pte is not None:
                raise Refused(pyvmem.AlreadyMapped)
            if key in busy:
                raise Refused(pyvmem.Busy)
        elif key in busy:
            raise Refused(pyvmem.Busy)
        elif pte is None:
            if not op.holes:
                raise Refused(pyvmem.NotMapped)
            return
        elif op.kind == "fill" and pte.readonly:
            raise Refused(pyvmem.ReadOnly)
        else:
            op.found.append(at)
        busy.add(key)

    def apply(self, ops: list[Op]) -> None:
        """Applies a batch that `check` has passed: maps, fills and unmaps in vmem_batch's order."""
        for op in ops:
            if op.kind in ("map", "populate"):
                self._map(op)
        filled: dict[Phys, int] = {}
        for op in ops:
            if op.kind == "fill":
                self._fill(op, filled)
        for op in ops:
            if op.kind == "unmap":
                for at in op.found:
                    self.unmap(op.space, at, at + 1)
            if op.consume and op.handle is not None:
                op.handle.live = False

    def _map(self, op: Op) -> None:
        offset = op.offset
        for first in op.pieces():
            for at in range(first, first + op.size):
                if op.kind == "map":
                    assert op.handle is not None
                    phys = op.handle.pages[offset]
                    offset += 1
                else:
                    phys = Phys([None if op.dirty else 0] * QUARTERS)
                pte = Pte(phys, op.handle, at == first, op.readonly)
                self.spaces[op.space][at] = pte

    def _fill(self, op: Op, filled: dict[Phys, int]) -> None:
        for at in op.found:
            phys = self.spaces[op.space][at].phys
            # If two fills write one page through two addresses, their order is unspecified.
            same = filled.setdefault(phys, op.value) == op.value
            phys.content[:] = [op.value if same else None] * QUARTERS

    def unmap(self, space: int, first: int, last: int) -> None:
        for at in range(first, last):
            self.spaces[space].pop(at, None)
        rest = self.spaces[space].get(last)
        if rest is not None:
            rest.start = True  # it now starts a mapping, even if it was inside one before

    def forget_fills(self, ops: list[Op]) -> None:
        """Marks the target of each fill as unknown: a batch that failed while running may have
        written it."""
        for op in ops:
            if op.kind == "fill":
                for first in op.pieces():
                    for at in range(first, first + op.size):
                        pte = self.spaces[op.space].get(at)
                        if pte is not None:
                            pte.phys.content[:] = [None] * QUARTERS
