# SPDX-License-Identifier: MIT
"""What kind of physical pages a slot has where: their size, and the memory that they lie in.

A slot is counted in small pages, ``Layout.page_size`` each. Most are just that, in the device. What
is of another kind is noted here, as intervals [low, high):

    0 ............ 32 ............ 96 .............. mapped
    | large pages, | large pages,  | small pages,
    | in the host  | in the device | in the device (not noted)

A large page stands on an aligned part of ``large_page_size // page_size`` small pages and is never
cut: it is mapped, unmapped, shared and moved as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from pyvmem.info import Location
from pyvmem.kvcache.journal import Book

__all__ = ["DEVICE", "PLAIN", "Kind", "Places", "Stretch", "Tier"]


class Tier(NamedTuple):
    """Where pages lie: a location, and the CUDA ordinal of a peer (0 elsewhere)."""

    location: Location
    device: int = 0

    def __str__(self) -> str:
        if self.location is Location.PEER:
            return f"peer {self.device}"
        return "the host" if self.location is Location.HOST else "the device"


DEVICE = Tier(Location.DEVICE)


class Kind(NamedTuple):
    """Physical pages of one size in one memory.

    Attributes:
        unit: small pages that one of them stands for.
        tier: where it lies.
    """

    unit: int
    tier: Tier

    @property
    def away(self) -> bool:
        """Not in the device."""
        return self.tier != DEVICE


PLAIN = Kind(1, DEVICE)

Stretch: TypeAlias = tuple[int, int, Kind]
"""Pages [low, high), in every tensor, of one kind."""


class Places(Book):
    """The intervals of one slot that are not of the kind `PLAIN`, in order.

    Args:
        log: a journal's entries, where changes are noted.
        changed: called before a change.
    """

    __slots__ = ("_noted", "_tell")

    _tell: Callable[[], None]

    def __new__(cls, log: list[Any], changed: Callable[[], None]) -> Places:
        """No interval yet."""
        self = cls._with(log)
        object.__setattr__(self, "_tell", changed)
        return self

    def __init__(self, log: list[Any], changed: Callable[[], None]) -> None:
        self._noted: list[Stretch] = []

    def __setattr__(self, name: str, value: Any) -> None:
        self._tell()
        super().__setattr__(name, value)

    def __bool__(self) -> bool:
        return bool(self._noted)

    def put(self, low: int, high: int, kind: Kind) -> None:
        """Notes the kind of pages [low, high)."""
        if self._noted:
            self.forget(low, high)
        if kind != PLAIN and low < high:
            noted = sorted([*self._noted, (low, high, kind)])
            joined = noted[:1]
            for start, end, one in noted[1:]:
                if joined[-1][1:] == (start, one):
                    joined[-1] = (joined[-1][0], end, one)
                else:
                    joined.append((start, end, one))
            self._noted = joined

    def put_all(self, stretches: list[Stretch]) -> None:
        """Notes several, as `take` returned them."""
        for low, high, kind in stretches:
            self.put(low, high, kind)

    def forget(self, low: int, high: int) -> None:
        """Pages [low, high) are there no longer."""
        if self._noted:
            self._noted = [
                (start, end, kind)
                for first, last, kind in self._noted
                for start, end in ((first, min(last, low)), (max(first, high), last))
                if start < end
            ]

    def take(self, low: int, high: int) -> list[Stretch]:
        """`forget`, and what was noted there."""
        if not self._noted:
            return []
        taken = [(a, b, kind) for a, b, kind in self.stretches(low, high) if kind != PLAIN]
        self.forget(low, high)
        return taken

    def stretches(self, low: int, high: int) -> Iterator[Stretch]:
        """[low, high) as stretches of one kind each, those of small pages included."""
        for first, last, kind in self._noted:
            if last <= low:
                continue
            if first >= high or low >= high:
                break
            if low < first:
                yield low, first, PLAIN
                low = first
            yield low, min(last, high), kind
            low = min(last, high)
        if low < high:
            yield low, high, PLAIN

    def floor(self, page: int) -> int:
        """The last place up to `page` where no physical page is cut."""
        for first, last, kind in self._noted:
            if first < page < last:
                return page - page % kind.unit
        return page

    def ceil(self, page: int) -> int:
        """The first place from `page` on where no physical page is cut."""
        for first, last, kind in self._noted:
            if first < page < last:
                return page + -page % kind.unit
        return page

    def whole_away(self, page: int) -> int:
        """The first place from `page` on where no physical page outside the device is cut."""
        end = self.ceil(page)
        return end if end > page and self.away(page, end) else page

    def large(self, low: int, high: int) -> int:
        """Small pages of [low, high) that large ones stand for."""
        return sum(b - a for a, b, kind in self.stretches(low, high) if kind.unit > 1)

    def away(self, low: int, high: int) -> dict[Tier, int]:
        """Small pages of [low, high) that do not lie in the device, by tier."""
        found: dict[Tier, int] = {}
        if self._noted:
            for first, last, kind in self.stretches(low, high):
                if kind.away:
                    found[kind.tier] = found.get(kind.tier, 0) + last - first
        return found

    @property
    def away_end(self) -> int:
        """The end of the last page that does not lie in the device; 0: there is none."""
        return max((last for _, last, kind in self._noted if kind.away), default=0)

    def __repr__(self) -> str:
        return f"<Places {self._noted}>"
