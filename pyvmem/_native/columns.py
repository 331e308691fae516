# SPDX-License-Identifier: MIT
"""Finds and grows the slots that need pages, in C (_columns.c).

found = columns.scan(lengths)                    # slots short of pages for these lengths
grown = columns.plan(ops)                        # writes their map operations, or returns None
extend(vm, [columns], ops, n, outcome, waits)    # runs the batch and updates the slots
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem._native.boundary import constant, last_error
from pyvmem._native.outcome import Outcome
from pyvmem._vmem import ffi, lib

__all__ = ["Columns", "Grown", "Kind", "Planned", "Row", "Waiting", "Waits", "extend"]

if TYPE_CHECKING:

    class Row:
        """The attributes of a slot that C reads and writes; see `kvcache.slots.Slot`."""

        index: int
        addr: int
        mapped: int
        granted: int
        large_end: int
        block: int
        head: int
        dirty: int
        owner: int
        freed_at: int
        freed_order: int
        job: Any
        span: Any
        tier_map: Any
        active: bool
        broken: bool
        writer: bool
        rows_lost: bool
        kept: bool

        @property
        def stale(self) -> bool: ...

else:  # use ctypes, since cffi would release the GIL
    _type = ctypes.PYFUNCTYPE(ctypes.py_object)
    Row = _type(int(ffi.cast("uintptr_t", ffi.addressof(lib, "pyvmem_row_type"))))()


class Kind:
    """Bits that describe a slot, for `Columns.pick`; see _columns.h for what each one means."""

    FREE = constant("PYVMEM_FREE")
    STALE = constant("PYVMEM_STALE")
    LOSING = constant("PYVMEM_LOSING")
    BUSY = constant("PYVMEM_BUSY")
    CACHED = constant("PYVMEM_CACHED")
    LEFT = constant("PYVMEM_LEFT")
    ROWS_LOST = constant("PYVMEM_ROWS_LOST")


class Waits:
    """Counts the waits in a cache's calls and adds up their durations, in C.

    Attributes:
        struct: ``struct pyvmem_waits``.
    """

    __slots__ = ("struct",)

    def __init__(self) -> None:
        self.struct: Any = ffi.new("struct pyvmem_waits *")

    def add(self, ns: int, driver_ns: int) -> None:
        """Counts a wait of `ns` nanoseconds, of which `driver_ns` were spent in the driver."""
        lib.pyvmem_wait_add(self.struct, ns, driver_ns)


class Waiting:
    """Counts the time from construction to the end of the ``with`` block as a wait.

    It is a class rather than a generator, for speed: every step that needs several map calls
    creates one.
    """

    __slots__ = ("_vm", "_wait", "_waits")

    def __init__(self, waits: Waits, vm: int) -> None:
        self._waits, self._vm = waits.struct, vm
        self._wait: Any = ffi.new("struct pyvmem_wait *")
        lib.pyvmem_wait_begin(self._wait, vm)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        lib.pyvmem_wait_end(self._waits, self._wait, self._vm)


class Grown(NamedTuple):
    """The totals of a planned grow operation.

    Attributes:
        ops: number of operations written.
        added: pages per tensor that the operation maps, summed over all slots.
        reused: the part of `granting` that is already mapped.
        granting: pages per tensor that the operation grants, summed over all slots.
    """

    ops: int
    added: int
    reused: int
    granting: int


class Planned(NamedTuple):
    """The slots that the last `plan` grows; each list has one item per slot.

    Attributes:
        slots: indices of the slots.
        mapped: pages per tensor before growing.
        goals, pages: mapped and granted pages per tensor after growing.
        large_end: `Slot.large_end` after growing.
    """

    slots: list[int]
    mapped: list[int]
    goals: list[int]
    pages: list[int]
    large_end: list[int]


class Columns:
    """A group's slot records and per-slot arrays, as C reads them. Arrays have type code "Q".

    Args:
        rows: the slots, which this object keeps alive.

    Attributes:
        held_rows: number of rows that each slot holds. `scan` never writes to the array assigned
            here.
        needs: number of rows for which each slot needed pages in the last `scan`, including a
            prefill's over-read rows.
        capacity: number of rows that fit in each slot's granted pages.
        calls, joined: see `kvcache.runs.Runs`.
        named: 1 if the last `scan` was passed a length above 0 for the slot.
        place: struct pyvmem_place.
        runs: struct pyvmem_runs, for `plan` and `goals`.
    """

    __slots__ = (
        *("_at", "_beyond", "_growth", "_keep", "_needs", "_rows", "_total"),
        *("calls", "capacity", "held_rows", "joined", "named", "needs", "place", "runs"),
    )

    def __init__(self, rows: Sequence[Row]) -> None:
        count = len(rows)

        def column() -> array[int]:
            return array("Q", bytes(8 * count))

        self.capacity, self.calls, self.joined = column(), column(), column()
        self.named = bytearray(count)
        self.needs, first, second = column(), column(), column()
        self.held_rows = first
        self._needs = _pointer(self.needs)
        self._rows = [(one, _pointer(one)) for one in (first, second)]
        self.place: Any = ffi.new("struct pyvmem_place *")
        self.runs: Any = ffi.new("struct pyvmem_runs *")
        self._keep: list[Any] = [rows]
        self._at: Any = ffi.new("struct pyvmem_columns *", {"count": count})
        for name in ("capacity", "calls", "joined", "named"):
            self._point(self._at, name, _pointer(getattr(self, name)))
        self._point(self._at, "row", ffi.new("void *[]", [ffi.cast("void *", id(r)) for r in rows]))
        self._point(self._at, "found", ffi.new("void *[]", count))
        self._growth: Any = ffi.new("struct pyvmem_growth *")
        for name in ("pages", "goal", "mapped", "head", "large_end"):
            self._point(self._growth, name, ffi.new("uint64_t[]", count))
        self._beyond: Any = ffi.new("uint32_t[]", count + 1)
        self._growth.slot = self._beyond
        self._total: Any = ffi.new("uint64_t *")

    def _point(self, struct: Any, name: str, at: Any) -> None:
        self._keep.append(at)
        setattr(struct, name, at)

    def scan(self, lengths: list[int]) -> tuple[array[int], int, list[int]] | int:
        """Computes each slot's number of rows after a step, and finds the slots short of pages.

        A slot whose length is below its number of rows keeps its rows.

        Returns:
            The number of rows of each slot, in an array that the next `scan` overwrites unless it
            is assigned to `held_rows`; their sum; and the indices of the slots that are short of
            pages, in ascending order. If a length is invalid, an int instead: the index of an entry
            that is not an int from 0 to 2**64 - 1; or the number of slots plus the index of an
            entry that exceeds the slot's limit or is above 0 for a free slot.
        """
        count = len(self.capacity)
        if len(lengths) != count:
            raise ValueError(f"{len(lengths)} lengths for {count} slots")
        (first, at_first), (second, at_second) = self._rows
        swap = self.held_rows is second
        held, rows = (at_second, at_first) if swap else (at_first, at_second)
        found = lib.pyvmem_scan(
            ffi.cast("void *", id(lengths)),
            self.place,
            self._at,
            held,
            rows,
            self._needs,
            self._beyond,
            self._total,
        )
        if found < 0:
            return -1 - int(found)
        self._growth.count = found
        places: list[int] = ffi.unpack(self._beyond, found) if found else []
        return first if swap else second, self._total[0], places

    def near(self, ahead: int, room: int) -> list[int]:
        """Returns the slots in use that have pages for fewer than `ahead` more rows.

        The next `plan` grows these slots.

        Args:
            ahead: number of rows.
            room: maximum number of pages per tensor that these slots may need in total.
        """
        (first, at_first), (_, at_second) = self._rows
        held = at_first if self.held_rows is first else at_second
        found = lib.pyvmem_near(self.place, self._at, held, ahead, room, self._needs, self._beyond)
        self._growth.count = found
        return ffi.unpack(self._beyond, found) if found else []

    def plan(self, ops: Any) -> Grown | None:
        """Writes the map operations for the slots returned by the last `scan` or `near`.

        Args:
            ops: ``struct vmem_op[]``, with room for one operation per slot.

        Returns:
            None if a slot needs more than one map operation, or if too few pages are free.
        """
        growth = self._growth
        if lib.pyvmem_plan(self.runs, self.place, self._at, self._needs, growth, ops):
            return None
        lacking, reused = growth.lacking, growth.reused
        return Grown(growth.ops, growth.added, reused, lacking + reused)

    @property
    def planned(self) -> Planned:
        """The slots of the last `plan`."""
        one, count, unpack = self._growth, self._growth.count, ffi.unpack
        return Planned(
            unpack(one.slot, count),
            unpack(one.mapped, count),
            unpack(one.goal, count),
            unpack(one.pages, count),
            unpack(one.large_end, count),
        )

    def unmaps(self, slots: list[int], low: list[int], high: list[int], ops: Any) -> None:
        """Writes the unmap operations for pages [low, high) of slots into ``struct vmem_op[]``."""
        new = ffi.new
        at_slots, at_low = new("uint64_t[]", slots), new("uint64_t[]", low)
        lib.pyvmem_unmaps(self.place, len(slots), at_slots, at_low, new("uint64_t[]", high), ops)

    def goals(self, pages: Sequence[int], mapped: Sequence[int], heads: Sequence[int]) -> list[int]:
        """Returns how many pages `plan` would map for requests that need `pages` pages."""
        goals = ffi.new("uint64_t[]", len(pages))
        new = ffi.new
        at_pages, at_mapped = new("uint64_t[]", pages), new("uint64_t[]", mapped)
        at_heads = new("uint64_t[]", heads)
        lib.pyvmem_goals(self.runs, self._at, len(pages), at_pages, at_mapped, at_heads, goals)
        found: list[int] = ffi.unpack(goals, len(pages))
        return found

    def pick(self, every: int, none: int = 0) -> list[int]:
        """Returns slots with all flags in `every` and none in `none`, least recently used first."""
        found = ffi.new("uint32_t[]", len(self.capacity))
        slots: list[int] = ffi.unpack(found, lib.pyvmem_pick(self._at, every, none, found))
        return slots

    def count(self, every: int, none: int = 0) -> int:
        """Returns the number of slots that `pick` would return."""
        return int(lib.pyvmem_pick(self._at, every, none, ffi.NULL))

    def fit(self, pages: int, every: int, none: int = 0) -> int | None:
        """Picks the slot with the fewest mapped pages among those that have at least `pages`.

        Considers the slots that `pick` returns. If none of them has that many pages, picks the one
        with the most. Ties go to the least recently used slot. Returns None if there is no slot.
        """
        found: int = lib.pyvmem_fit(self._at, every, none, pages)
        return found if found < len(self.capacity) else None

    @property
    def spare(self) -> int:
        """The number of device pages per tensor that slots can give up or are already unmapping.

        Excludes slots that lost rows or are still being grown.
        """
        return int(lib.pyvmem_spare(self._at))


def extend(
    vm: int, columns: Sequence[Columns], ops: Any, count: int, outcome: Outcome, waits: Waits
) -> None:
    """Runs the map operations planned for several groups as one batch, and records the result.

    Args:
        vm: the context.
        columns: the `Columns` of each group of layers.
        ops: ``struct vmem_op[]`` with the operations of all groups.
        count: number of operations.
        outcome: receives the result; it also holds the edits to the other records.
        waits: the counter to which the call's time is added.

    Raises:
        VMemError: the batch failed; nothing changed.
    """
    groups = ffi.new("struct pyvmem_grown[]", len(columns))
    for group, one in zip(groups, columns, strict=True):
        group.place, group.columns, group.growth = one.place, one._at, one._growth
    wait: Any = ffi.new("struct pyvmem_wait *")
    struct = waits.struct
    code = lib.pyvmem_extend(outcome.cell, vm, groups, len(columns), ops, count, struct, wait)
    if code:
        error = last_error(code, "vmem_batch")
        lib.pyvmem_wait_end(struct, wait, vm)
        raise error


def _pointer(column: array[int] | bytearray) -> Any:
    """Returns a pointer to an array's items; while it lives, the array cannot be resized."""
    return ffi.from_buffer("uint8_t[]" if isinstance(column, bytearray) else "uint64_t[]", column)
