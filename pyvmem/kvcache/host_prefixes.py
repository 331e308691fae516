# SPDX-License-Identifier: MIT
"""Keeps the rows of evicted prefixes in host memory, one sharing unit per cell.

A *cell* holds the rows of one unit in all tensors of all groups. All cells have the same size, so
any cell can be reused for any unit. A unit's key is a digest of all tokens up to its end, so a
prefix is found unit by unit, without a tree:

    tokens   | unit 0     | unit 1     | unit 2     | unit 3     |
    device   | recorded   | recorded   |
    host     |            | cell 7     | cell 2     |            |   match: 2 units, in_host: 1

A unit stays in its cell after its rows are loaded, so another eviction need not copy them again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from pyvmem.errors import VMemError
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import prune
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_tree import ID_BYTES, TokenIds
from pyvmem.memory.ops import OpBatch
from pyvmem.plumbing.logs import warn

if TYPE_CHECKING:
    from pyvmem.kvcache.layout import Layout
    from pyvmem.kvcache.sharing import Sharing
    from pyvmem.kvcache.slots import Slot
    from pyvmem.memory.host_copies import HostMemory

__all__ = ["FAILURES", "HostPrefixes", "Key", "unit_keys"]

_log = logging.getLogger(__name__)

_SLAB = 64 << 20  # bytes allocated and page-locked at a time; takes about 20 ms
_DIGEST = 16  # bytes per digest

FAILURES = (VMemError, MemoryError, OSError, RuntimeError)
"""Errors that copying or allocating host memory may raise; the rows are then not kept or loaded."""

Key: TypeAlias = tuple[Hashable, bytes]
"""A namespace, and the digest of all tokens up to the end of a unit."""


def unit_keys(ids: TokenIds, unit: int, first: int, last: int) -> list[Key]:
    """Returns the keys of units [first, last) of a prompt.

    `unit` is the number of tokens per unit.
    """
    width, data, digest, found = unit * ID_BYTES, ids.data, b"", []
    for at in range(last if first < last else 0):
        digest = blake2b(digest + data[at * width : (at + 1) * width], digest_size=_DIGEST).digest()
        if at >= first:
            found.append((ids.namespace, digest))
    return found


class HostPrefixes:
    """The cells of a cache and their contents. The caller holds the cache's lock.

    A cell is never written while a key refers to it, so an exception at any point loses only the
    units that were being copied.

    Args:
        layouts: layouts of the groups.
        unit_pages: for each group, the number of pages per tensor in a unit.
        groups: list of the groups, to which the caller appends each group that it creates.

    Attributes:
        cell: size of a cell in bytes.
        limit: maximum size of all cells in bytes; 0: prefixes are not kept in host memory.
        step: number of units to allocate cells for, or for an idle cache to store, at a time.
        stored, loaded: bytes copied to and from host memory so far.
        dropped: bytes of rows that were lost because their cell was reused or because they could
            not be stored.

    Raises:
        InvalidArgument: the limit is less than the size of a cell, or numpy is missing.
    """

    def __init__(
        self, layouts: Sequence[Layout], unit_pages: Sequence[int], groups: Sequence[Sharing]
    ) -> None:
        self.limit = limit = layouts[0].config.host_prefixes
        each = zip(layouts, unit_pages, strict=True)
        sizes = [one.page_bytes * pages for one, pages in each]
        self._ends = list(accumulate(sizes, initial=0))
        self.cell = size = self._ends[-1] or 1  # the sum is 0 if all layers have a state
        if 0 < limit < size:
            raise invalid(
                f"host_prefixes {limit} is less than the rows of a sharing unit, {size} bytes",
                size=limit,
                limit=size,
            )
        if limit and find_spec("numpy") is None:
            raise invalid(f"host_prefixes {limit} needs numpy, which is not installed", size=limit)
        self._most, self.step = limit // size, max(1, _SLAB // size)
        self._groups = groups
        self._slabs: list[HostMemory] = []
        self._cells: list[memoryview] = []
        self._free: list[int] = []
        self._rows: OrderedDict[Key, int] = OrderedDict()  # key -> cell, least recently used first
        self.stored = self.loaded = self.dropped = 0

    @property
    def nbytes(self) -> int:
        """Size of the kept rows in bytes."""
        return len(self._rows) * self.cell

    # ---- storing ---------------------------------------------------------------------------------

    def store(self, going: Iterable[tuple[Sequence[Span], Sequence[Key]]]) -> None:
        """Copies the rows of as many evicted units as fit to cells.

        Units that cannot be copied right away are lost, since this does not wait for GPU work that
        may still be writing their pages.

        Args:
            going: the pages of evicted units, one span per group, and the units' keys, least
                recently used first.
        """
        for each, keys in going:
            new = [at for at, key in enumerate(keys) if key not in self._rows][: self._most]
            parts = (part for span in each for part in span.parts)
            if new and not any(prune(part.block.events) for part in parts):
                self._store(each, keys, new)
            # Record the units in reverse order, so that the cells of a prompt's last units are
            # reused first.
            for key in reversed(keys):
                if key in self._rows:
                    self._rows.move_to_end(key)
                else:
                    self.dropped += self.cell

    def _store(self, each: Sequence[Span], keys: Sequence[Key], units: list[int]) -> None:
        """Copies units to cells, in order, until one cannot be copied."""
        cells = self._take(len(units))
        units = units[: len(cells)]
        try:
            for place, span in enumerate(each if cells else ()):
                self._copy_out(place, span, units, cells)
        except FAILURES as error:
            warn(_log, "prefixes", "an evicted prefix is not kept in host memory: %s", error)
            self._free += cells
        else:
            self._rows.update((keys[at], cell) for at, cell in zip(units, cells, strict=True))
            self.stored += len(cells) * self.cell

    def _copy_out(self, place: int, span: Span, units: list[int], cells: list[int]) -> None:
        """Copies units of a span to cells, through a temporary mapping."""
        group = self._groups[place]
        stride = span.pages * group.layout.page_size
        nbytes = stride * group.layout.num_tensors
        ops, addresses = OpBatch(len(span.parts)), group.scratch.take(nbytes)
        group.map_at(ops, addresses.addr, stride, span.parts)
        try:
            group.mapper.commit([], ops)
            self._copy(place, addresses.addr, stride, units, cells, out=True)
        finally:
            group.scratch.give_mapped(addresses, nbytes)

    # ---- loading ---------------------------------------------------------------------------------

    def find(self, ids: TokenIds, unit: int, begin: int, end: int) -> list[Key]:
        """Returns the keys of the consecutive units kept from token `begin` on.

        Marks them as used. No unit extends beyond token `end`.
        """
        keys = unit_keys(ids, unit, begin // unit, end // unit) if self._rows else ()
        found = list(takewhile(self._rows.__contains__, keys))
        for key in reversed(found):
            self._rows.move_to_end(key)
        return found

    def drop(self, keys: Sequence[Key]) -> None:
        """Drops the units whose keys `find` returned."""
        self._free += map(self._rows.pop, keys)

    def load(self, slots: Sequence[Slot], first: int, keys: Sequence[Key]) -> None:
        """Copies kept units to pages that a request owns.

        Args:
            slots: the request's slot in each group.
            first: index of the first unit.
            keys: keys of the units.
        """
        cells, units = [self._rows[key] for key in keys], range(first, first + len(keys))
        for place, group in enumerate(self._groups):
            self._copy(place, slots[place].addr, group.layout.tensor_bytes, units, cells, out=False)
        self.loaded += len(cells) * self.cell

    # ---- cells -----------------------------------------------------------------------------------

    def _copy(
        self, place: int, addr: int, stride: int, units: Sequence[int], cells: list[int], out: bool
    ) -> None:
        """Copies one group's rows between cells and tensors, unit by unit.

        Args:
            place: index of the group.
            addr: address of unit 0 in the first tensor.
            stride: bytes from one tensor to the next.
            units: indices of the units; a long prefix may have 100,000 of them.
            cells: the cell of each unit, which holds the unit's rows tensor by tensor.
            out: copy to the cells instead of from them.
        """
        import numpy as np

        group, begin, end = self._groups[place], *self._ends[place : place + 2]
        size = group.unit_pages * group.layout.page_size
        starts = addr + np.array(units, dtype=np.int64) * size
        tensors = np.arange(group.layout.num_tensors, dtype=np.int64) * stride
        pieces: Any = np.add.outer(starts, tensors).ravel()
        group.mapper.copy(size, pieces, [self._cells[one][begin:end] for one in cells], out=out)

    def _take(self, count: int) -> list[int]:
        """Returns up to `count` cells that no key refers to.

        If too few are unused and none can be added, the least recently used cells lose their rows.
        """
        # An interrupted call may have lost track of some cells.
        if len(self._free) + len(self._rows) < len(self._cells):
            self._free = self._unused()
        found: list[int] = []
        while len(found) < count:
            if not self._free and len(self._cells) < self._most:
                self._add_slab()
            if self._free:
                found.append(self._free.pop())
            elif self._rows:
                found.append(self._rows.popitem(last=False)[1])
                self.dropped += self.cell
            else:
                break
        return found

    def _add_slab(self) -> None:
        """Allocates memory for more cells; after a failure, no more cells are ever added."""
        from pyvmem.memory.host_copies import HostMemory, has_kernel

        count = min(self.step, self._most - len(self._cells))
        try:
            locked = has_kernel(self._groups[0].mapper.context)
            self._slabs.append(HostMemory(count * self.cell, locked))
        except FAILURES as error:
            warn(_log, "prefixes", "no host memory for more prefixes: %s", error)
            self._most = len(self._cells)
            return
        view, first = memoryview(self._slabs[-1].memory), len(self._cells)
        self._cells += [view[at * self.cell : (at + 1) * self.cell] for at in range(count)]
        self._free += range(first, first + count)

    def _unused(self) -> list[int]:
        """Returns the cells that no key refers to."""
        return list(set(range(len(self._cells))).difference(self._rows.values()))

    def clear(self) -> None:
        """Drops all rows; keeps the cells."""
        self._rows.clear()
        self._free = self._unused()

    def close(self) -> None:
        """Releases the host memory. Idempotent."""
        self._most = 0
        self._rows.clear()
        self._free, self._cells = [], []
        while self._slabs:
            self._slabs[-1].close()
            self._slabs.pop()

    def check(self) -> list[str]:
        """Returns a description of each inconsistency between the cells and the keys."""
        free = set(self._free)
        if len(free) < len(self._free) or not free.issubset(self._unused()):
            return ["a cell of host memory is both used and free, or free twice"]
        return []
