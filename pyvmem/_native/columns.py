# SPDX-License-Identifier: MIT
"""The part of a step that looks at every slot, in C (_columns.c): an array a field, an item a slot.

found = columns.scan(lengths)                    # the slots that lack pages for these lengths
grown = columns.plan(ops)                        # writes their map calls, if that is all to be done
extend(vm, [columns], ops, n, outcome, waits)    # makes the calls and updates the arrays
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pyvmem._native.boundary import last_error
from pyvmem._native.outcome import Outcome
from pyvmem._vmem import ffi, lib

__all__ = ["Columns", "Grown", "Waiting", "Waits", "extend"]


class Waits:
    """How often and how long a cache's calls waited; C adds to the counts.

    Attributes:
        struct: ``struct pyvmem_waits``.
    """

    __slots__ = ("struct",)

    def __init__(self) -> None:
        self.struct: Any = ffi.new("struct pyvmem_waits *")

    def add(self, ns: int, driver_ns: int) -> None:
        """Counts a wait of `ns` nanoseconds, of which the driver took `driver_ns`."""
        lib.pyvmem_wait_add(self.struct, ns, driver_ns)


class Waiting:
    """Counts a wait, from construction to the end of its ``with`` block.

    A class and not a generator, for speed: every step that maps in more than one call makes one.
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
    """A planned growth. Each list has an item for each slot that grows.

    Attributes:
        slots: their numbers.
        mapped: pages per tensor before the growth.
        goals, pages: mapped and granted pages per tensor after it.
        whole: as in `kvcache.slots`, after it.
        ops: operations written.
        added: pages per tensor that it maps, over all slots.
        reused: pages per tensor that it grants and that were mapped already.
        granting: pages per tensor that it grants.
    """

    slots: list[int]
    mapped: list[int]
    goals: list[int]
    pages: list[int]
    whole: list[int]
    ops: int
    added: int
    reused: int
    granting: int


class Columns:
    """The arrays, indexed by slot: type code "Q", all items 0 at first.

    Attributes:
        held: rows that each slot holds. `scan` never writes into the array that is here.
        needs: rows that the last `scan` wanted pages for, a prefill's over-read rows included.
        capacity: rows that each slot has pages for.
        mapped, granted, head, whole: as in `kvcache.slots`; `file` writes them.
        calls, joined: as in `kvcache.runs.Runs`.
        active: 1 where a slot is a request's; `file` writes it.
        plain: 1 where growing the slot takes a map call and nothing else; `file` writes it.
        named: 1 where the last `scan` got a length above 0.
        place: struct pyvmem_place.
        runs: struct pyvmem_runs, for `plan` and `goals`.
    """

    __slots__ = (
        *("_at", "_beyond", "_growth", "_keep", "_needs", "_rows", "_total"),
        *("active", "calls", "capacity", "granted", "head", "held", "joined", "mapped", "needs"),
        *("named", "place", "plain", "runs", "whole"),
    )

    def __init__(self, count: int) -> None:
        def column() -> array[int]:
            return array("Q", bytes(8 * count))

        self.capacity, self.mapped, self.granted = column(), column(), column()
        self.head, self.calls, self.joined = column(), column(), column()
        self.whole = column()
        self.active, self.plain = bytearray(count), bytearray(count)
        self.named = bytearray(count)
        self.needs, first, second = column(), column(), column()
        self.held = first
        self._needs = _pointer(self.needs)
        self._rows = [(one, _pointer(one)) for one in (first, second)]
        self.place: Any = ffi.new("struct pyvmem_place *")
        self.runs: Any = ffi.new("struct pyvmem_runs *")
        self._keep: list[Any] = []
        self._at: Any = ffi.new("struct pyvmem_columns *")
        for name in (
            *("capacity", "mapped", "granted", "head", "whole", "calls", "joined"),
            *("active", "plain", "named"),
        ):
            self._point(self._at, name, _pointer(getattr(self, name)))
        self._growth: Any = ffi.new("struct pyvmem_growth *")
        for name in ("pages", "goal", "mapped", "head", "whole"):
            self._point(self._growth, name, ffi.new("uint64_t[]", count))
        self._beyond: Any = ffi.new("uint32_t[]", count + 1)
        self._growth.slot = self._beyond
        self._total: Any = ffi.new("uint64_t *")

    def _point(self, struct: Any, name: str, at: Any) -> None:
        self._keep.append(at)
        setattr(struct, name, at)

    def scan(self, lengths: list[int]) -> tuple[array[int], int, list[int]] | int:
        """The rows of every slot once each has its length; a shorter length takes no row away.

        Returns:
            The rows of each slot, in an array that the next `scan` overwrites unless it was put in
            `held`; their sum; and the slots that lack pages for what they need, in order. For bad
            lengths an int instead: the index of an entry that is no int from 0 to 2**64 - 1 or, if
            there is none, the number of slots plus the index of an entry that is more than any slot
            can hold or that is of a free slot.
        """
        count = len(self.capacity)
        if len(lengths) != count:
            raise ValueError(f"{len(lengths)} lengths for {count} slots")
        (first, at_first), (second, at_second) = self._rows
        swap = self.held is second
        held, rows = (at_second, at_first) if swap else (at_first, at_second)
        found = lib.pyvmem_scan(
            ffi.cast("void *", id(lengths)),
            count,
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
        """The slots whose pages end within `ahead` rows after those that they hold, for `plan`.

        Args:
            ahead: rows.
            room: pages per tensor that they may lack together.
        """
        (first, at_first), (_, at_second) = self._rows
        held = at_first if self.held is first else at_second
        count = len(self.capacity)
        found = lib.pyvmem_near(
            self.place, self._at, count, held, ahead, room, self._needs, self._beyond
        )
        self._growth.count = found
        return ffi.unpack(self._beyond, found) if found else []

    def plan(self, ops: Any) -> Grown | None:
        """Writes the map calls for the slots that the last `scan`, or `near`, found.

        Args:
            ops: struct vmem_op[], with room for one operation a slot.

        Returns:
            None if one of the slots is not plain, or if they lack more pages than are free.
        """
        growth, unpack = self._growth, ffi.unpack
        if lib.pyvmem_plan(self.runs, self.place, self._at, self._needs, growth, ops):
            return None
        count = growth.count
        return Grown(
            unpack(growth.slot, count),
            unpack(growth.mapped, count),
            unpack(growth.goal, count),
            unpack(growth.pages, count),
            unpack(growth.whole, count),
            growth.ops,
            growth.added,
            growth.reused,
            growth.lacking + growth.reused,
        )

    def unmaps(self, slots: list[int], low: list[int], high: list[int], ops: Any) -> None:
        """Writes the unmap calls for pages [low, high) of slots into ``struct vmem_op[]``."""
        new = ffi.new
        at_slots, at_low = new("uint64_t[]", slots), new("uint64_t[]", low)
        lib.pyvmem_unmaps(self.place, len(slots), at_slots, at_low, new("uint64_t[]", high), ops)

    def goals(self, pages: Sequence[int], mapped: Sequence[int], heads: Sequence[int]) -> list[int]:
        """Pages to map for requests that are to have `pages`; `plan` chooses the same."""
        goals = ffi.new("uint64_t[]", len(pages))
        new = ffi.new
        at_pages, at_mapped = new("uint64_t[]", pages), new("uint64_t[]", mapped)
        at_heads = new("uint64_t[]", heads)
        lib.pyvmem_goals(self.runs, len(pages), at_pages, at_mapped, at_heads, goals)
        found: list[int] = ffi.unpack(goals, len(pages))
        return found

    @property
    def surplus(self) -> int:
        """Pages per tensor of plain slots that can be unmapped while their owners' work runs."""
        return int(self._at.surplus)

    def file(self, fields: Iterable[tuple[int, int, int, int, int, bool, bool]]) -> None:
        """Writes slots into the arrays: index, mapped, granted, head, whole, active and plain."""
        surplus, block = 0, self.place.block
        for index, mapped, granted, head, whole, active, plain in fields:
            if self.plain[index]:
                firm = self.granted[index]
                firm += -firm % block if firm < self.whole[index] else 0
                surplus -= self.mapped[index] - firm
            if plain:
                firm = granted + -granted % block if granted < whole else granted
                surplus += mapped - firm
            self.mapped[index], self.granted[index], self.head[index] = mapped, granted, head
            self.whole[index], self.active[index], self.plain[index] = whole, active, plain
        if surplus:
            self._at.surplus += surplus

    def clear(self) -> None:
        """Marks no slot as plain until it is filed again."""
        self.plain[:] = bytes(len(self.plain))
        self._at.surplus = 0


def extend(
    vm: int, columns: Sequence[Columns], ops: Any, count: int, outcome: Outcome, waits: Waits
) -> None:
    """Makes the map calls that each has planned, one batch, and records what is mapped and granted.

    Args:
        vm: the context.
        columns: of groups of layers.
        ops: ``struct vmem_op[]``, which all have written their calls into.
        count: how many these are.
        outcome: with the edits of the other records.
        waits: the call is counted there.

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
    """A pointer to an array's items; the array cannot be resized while the pointer lives."""
    return ffi.from_buffer("uint8_t[]" if isinstance(column, bytearray) else "uint64_t[]", column)
