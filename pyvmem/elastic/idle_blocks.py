# SPDX-License-Identifier: MIT
"""Chooses which idle block to hand out next so that whole pages become free.

A group consists of the blocks that share pages (`Geometry.group_unit`):

    group 4   | used | used | prefix | idle |     fullest: its idle block is handed out first
    group 7   | idle | used | idle   | idle |
    group 9   | idle | idle | idle   | idle |     its pages are unused and can be unmapped

Memory can be mapped and unmapped only in whole pages, so the idle blocks of the fullest group are
handed out first: full groups stay full, and the other groups become empty. Groups are kept in
buckets by their number of idle blocks, with a bitmap of nonempty buckets, so the cost of a call
does not depend on the number of groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import filterfalse, groupby, islice

__all__ = ["IdleBlocks"]


class IdleBlocks:
    """The set of idle blocks; `take` hands out blocks from the fullest groups first.

    Args:
        unit: see `Geometry.group_unit`; block b belongs to group ``b * unit[0] // unit[1]``.
    """

    def __init__(self, unit: tuple[int, int]) -> None:
        self._size, self._page = unit
        # maps a group to its idle blocks; the inner dicts serve as ordered sets
        self._of: dict[int, dict[int, None]] = {}
        self._buckets: list[dict[int, None]] = [{} for _ in range(-(-unit[1] // unit[0]) + 1)]
        self._some = 0  # bit n is set if bucket n is not empty
        self._count = 0

    @property
    def one_block(self) -> bool:
        """True if blocks share no pages, so each group is a single block."""
        return len(self._buckets) == 2

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return block in self._of.get(block * self._size // self._page, ())

    def __iter__(self) -> Iterator[int]:
        for blocks in self._of.values():
            yield from blocks

    def group(self, group: int) -> Collection[int]:
        """Returns the idle blocks of a group."""
        return self._of.get(group, {}).keys()

    def groups(self) -> Iterable[int]:
        """Returns the groups that have idle blocks."""
        return self._of.keys()

    def _refile(self, group: int, before: int, now: int) -> None:
        buckets = self._buckets
        if before:
            del buckets[before][group]
            if not buckets[before]:
                self._some &= ~(1 << before)
        if now:
            buckets[now][group] = None
            self._some |= 1 << now
        self._count += now - before

    def add(self, blocks: Iterable[int]) -> None:
        """Adds blocks that have become idle; blocks already in the set are ignored."""
        if self.one_block:  # fast path: there may be thousands of groups
            new = {block: {block: None} for block in blocks if block not in self._of}
            self._of.update(new)
            self._buckets[1].update(dict.fromkeys(new))
            self._some |= bool(new) << 1
            self._count += len(new)
            return
        size, page = self._size, self._page
        for group, some in groupby(blocks, lambda block: block * size // page):
            own = self._of.setdefault(group, {})
            before = len(own)
            own.update(dict.fromkeys(some))
            if len(own) > before:
                self._refile(group, before, len(own))

    def remove(self, blocks: Iterable[int]) -> None:
        """Removes blocks from the set.

        Raises:
            KeyError: a block is not in the set; the blocks before it have been removed.
        """
        for block in blocks:
            group = block * self._size // self._page
            own = self._of[group]
            del own[block]
            self._refile(group, len(own) + 1, len(own))
            if not own:
                del self._of[group]

    def take(self, count: int, spare: Collection[int] = ()) -> list[int]:
        """Removes up to `count` blocks, starting with the fullest groups, and returns them.

        Args:
            count: number of blocks.
            spare: groups to skip.
        """
        found: list[int] = []
        some = self._some
        while some and len(found) < count:
            number = (some & -some).bit_length() - 1
            some &= some - 1
            bucket = self._buckets[number]
            groups = filterfalse(spare.__contains__, reversed(bucket))
            whole, rest = divmod(count - len(found), number)
            chosen = list(islice(groups, whole + (rest > 0)))
            if whole:
                for group in chosen[:whole]:
                    found += reversed(self._of.pop(group))
                    del bucket[group]
                self._count -= number * len(chosen[:whole])
                if not bucket:
                    self._some &= ~(1 << number)
            for group in chosen[whole:]:
                own = self._of[group]
                found += (own.popitem()[0] for _ in range(rest))
                self._refile(group, number, len(own))
        return found
