# SPDX-License-Identifier: MIT
"""What is looked up among a cache's slots without looking at each of them.

All of it follows from the slots' attributes: a slot is filed under what they say, and filing it
again moves it to its place. So it can be filed at any time and any number of times, and an index
that may be wrong is thrown away and made anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pyvmem.kvcache.slots import Slot

__all__ = ["Ordered", "SlotIndex"]

_Key: TypeAlias = tuple[int, ...]


class Ordered:
    """Some of the slots, in the order of a key; iterating gives slots.

    Attributes:
        entries: the keys in order; the last number of each is the slot's.
    """

    __slots__ = ("_keys", "_slots", "entries")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._keys: dict[int, _Key] = {}
        self.entries: list[_Key] = []

    def put(self, index: int, key: _Key | None) -> None:
        """Gives a slot its place; None: it has none here."""
        before = self._keys.get(index)
        if before == key:
            return
        if before is not None:
            del self.entries[bisect_left(self.entries, before)]
            del self._keys[index]
        if key is not None:
            insort(self.entries, key)
            self._keys[index] = key

    def at(self, place: int) -> Slot:
        """The slot at a place of `entries`."""
        return self._slots[self.entries[place][-1]]

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, slot: Slot) -> bool:
        return slot.index in self._keys

    def __iter__(self) -> Iterator[Slot]:
        """The slots as they are in order now, whatever is filed meanwhile."""
        slots = self._slots
        return (slots[key[-1]] for key in self.entries[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Ordered {self.entries!r:.200}>"


class _Entry(NamedTuple):
    """What a slot is filed under: see `SlotIndex`."""

    free: _Key | None = None
    ready: _Key | None = None
    losing: _Key | None = None
    cached: _Key | None = None
    stale: _Key | None = None
    leftovers: _Key | None = None
    spare: int = 0
    returning: int = 0


_NOTHING = _Entry()


class SlotIndex:
    """The slots, filed.

    Attributes:
        free: those that a request may get, least recently used first.
        ready: of these, those that can grow at once, by mapped pages, then as `free`.
        losing: the other free ones, likewise: to grow one means to wait for a batch that unmaps.
        cached: those without an owner that have pages, least recently used first.
        leftovers: active ones with pages that their owner was not granted, likewise.
        stale: those without an owner whose pages must all go, by number.
        spare: pages per tensor that no request owns, and that are not on their way back; of slots
            whose batch in flight maps something none are counted.
        returning: pages per tensor on their way back.
    """

    __slots__ = ("_filed", *_Entry._fields)

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.free, self.ready, self.losing = Ordered(slots), Ordered(slots), Ordered(slots)
        self.cached, self.leftovers, self.stale = Ordered(slots), Ordered(slots), Ordered(slots)
        self.spare = self.returning = 0
        self._filed: dict[int, _Entry] = {}
        self.file_all(slots)

    def file_all(self, slots: Iterable[Slot]) -> None:
        """Files slots under what their attributes say now."""
        filed = self._filed
        for slot in slots:
            if slot.active and slot.mapped == slot.granted and slot.job is None and not slot.lost:
                if slot.index in filed:
                    self._file(slot.index, _NOTHING)
                # else nothing to do: most slots, at most times
            else:
                self._file(slot.index, _entry(slot))

    def _file(self, index: int, new: _Entry) -> None:
        filed = self._filed
        old = filed.get(index, _NOTHING)
        if new == old:
            return
        self.free.put(index, new.free)
        self.ready.put(index, new.ready)
        self.losing.put(index, new.losing)
        self.cached.put(index, new.cached)
        self.stale.put(index, new.stale)
        self.leftovers.put(index, new.leftovers)
        self.spare += new.spare - old.spare
        self.returning += new.returning - old.returning
        if new == _NOTHING:
            del filed[index]
        else:
            filed[index] = new

    def differences(self, other: SlotIndex) -> list[str]:
        """What two indexes of the same slots do not agree on, in words."""
        return [
            f"slots: {name} is {getattr(self, name)!r}, made anew {getattr(other, name)!r}"
            for name in _Entry._fields
            if getattr(self, name) != getattr(other, name)
        ]


def _entry(slot: Slot) -> _Entry:
    """What a slot's attributes say."""
    index, mapped, order, job = slot.index, slot.mapped, slot.freed_order, slot.job
    taking = job is not None and job.takes_pages
    spare = returning = 0
    if taking:
        returning = job.pages
    if (taking or job is None) and not slot.lost:
        kept = max(slot.span.pages, slot.granted, slot.head)
        spare = max(0, mapped - slot.places.ceil(kept))
    age = (order, index)
    if slot.active:
        left = mapped > slot.granted and not slot.lost
        return _Entry(leftovers=age if left else None, spare=spare, returning=returning)
    stale = slot.stale
    fit = None if slot.broken else (mapped, order, index)
    return _Entry(
        free=None if slot.broken else age,
        ready=None if stale or taking else fit,
        losing=fit if stale or taking else None,
        cached=age if mapped and not slot.lost else None,
        stale=(index,) if stale and not slot.lost else None,
        spare=spare,
        returning=returning,
    )
