# SPDX-License-Identifier: MIT
"""Physical pages: their tiers, and the refcounts of shared pages.

Most of a slot's pages are in device memory. Off-device pages are recorded as intervals [low, high):

    0 ........... 32 ............ 96 ........... mapped
    | on the host | on the device | on a peer
                    (not recorded)

A *block* is the set of pages shared by one call: consecutive pages of a slot, in every tensor,
behind one handle. The handle contains them tensor by tensor:

    | tensor 0: page 0 ... pages - 1 | tensor 1: page 0 ... pages - 1 | ...

A *span* refers to pages of one or more blocks. It is a value: slicing it changes no refcount. A
holder of a span has a reference to each of its pages (`SharedPages.hold`). Holders are slots that
map the pages, batches that unmap them, and recorded prefixes. A page returns to the pool when its
last reference is dropped, even from the middle of a block.

All pages of a block are in the same tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import add
from typing import Any, NamedTuple, TypeAlias

from pyvmem.errors import VMemError
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.mapper import Mapper
from pyvmem.memory.info import Location
from pyvmem.memory.pages import Pages

__all__ = [
    "Block",
    "DEVICE",
    "EMPTY",
    "ALL_ON_DEVICE",
    "Part",
    "TierMap",
    "SharedPages",
    "Span",
    "Stretch",
    "Tier",
    "pages_by_tier",
]


class Tier(NamedTuple):
    """Where pages are: a location and, for a peer, its CUDA ordinal (otherwise 0)."""

    location: Location
    device: int = 0

    def __str__(self) -> str:
        if self.location is Location.PEER:
            return f"peer {self.device}"
        return "the host" if self.location is Location.HOST else "the device"


DEVICE = Tier(Location.DEVICE)


Stretch: TypeAlias = tuple[int, int, Tier]
"""Pages [low, high) in every tensor, all in the same tier."""


def pages_by_tier(stretches: Iterable[Stretch]) -> Counter[Tier]:
    """Counts the pages of these stretches, by tier."""
    found: Counter[Tier] = Counter()
    for low, high, tier in stretches:
        found[tier] += high - low
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TierMap:
    """The intervals of a slot's off-device pages, in order. Immutable.

    Attributes:
        noted: the intervals, each with its tier.
    """

    noted: Sequence[Stretch] = ()

    def put(self, *stretches: Stretch) -> TierMap:
        """Returns a copy in which the pages of each stretch are in the stretch's tier."""
        noted = self.noted
        for low, high, tier in stretches:
            noted = TierMap(noted).without(low, high).noted
            if tier != DEVICE and low < high:
                joined: list[Stretch] = []
                for start, end, one in sorted([*noted, (low, high, tier)]):
                    if joined and joined[-1][1:] == (start, one):
                        joined[-1] = (joined[-1][0], end, one)
                    else:
                        joined.append((start, end, one))
                noted = joined
        return TierMap(noted)

    def without(self, low: int, high: int) -> TierMap:
        """Returns a copy without the entries in [low, high)."""
        left = [
            (start, end, tier)
            for first, last, tier in self.noted
            for start, end in ((first, min(last, low)), (max(first, high), last))
            if start < end
        ]
        return TierMap(left)

    def within(self, low: int, high: int) -> TierMap:
        """Returns a copy with only the entries in [low, high)."""
        if not self.noted:
            return self
        return TierMap([one for one in self.stretches(low, high) if one[2] != DEVICE])

    def stretches(self, low: int, high: int) -> Iterator[Stretch]:
        """Yields [low, high) as stretches of one tier each, including device memory."""
        for first, last, tier in self.noted:
            if last <= low:
                continue
            if first >= high or low >= high:
                break
            if low < first:
                yield low, first, DEVICE
                low = first
            yield low, min(last, high), tier
            low = min(last, high)
        if low < high:
            yield low, high, DEVICE

    def off_device(self, low: int, high: int) -> Counter[Tier]:
        """Counts the off-device pages in [low, high), by tier."""
        return pages_by_tier(self.within(low, high).noted)

    @property
    def off_device_end(self) -> int:
        """The end of the last off-device page; 0 if all pages are on the device."""
        return self.noted[-1][1] if self.noted else 0


ALL_ON_DEVICE = TierMap()


class Block:
    """Pages shared by one call, with a refcount for each page.

    Attributes:
        handle: handle to all pages, of every tensor.
        pages: pages per tensor.
        refs: for each page, the number of held spans that include it.
        users: for each page, how many of these holders are requests.
        events: GPU work that wrote the pages and may not be complete.
        tier: the tier that the pages are in.
        off_device: True if `tier` is not device memory.
        gone: for each page, whether it has been returned to the pool.

    `holders` is the number of requests that initially hold and use all pages.
    """

    __slots__ = ("events", "gone", "handle", "off_device", "pages", "refs", "tier", "users")

    def __init__(
        self, handle: Pages, pages: int, events: list[Any], tier: Tier = DEVICE, *, holders: int = 1
    ) -> None:
        self.handle = handle
        self.tier = tier
        self.off_device = tier != DEVICE
        self.pages = pages
        self.gone = [False] * pages
        self.refs = [holders] * pages
        self.users = [holders] * pages
        self.events = events

    @property
    def live(self) -> int:
        """The number of pages per tensor that have not been returned to the pool yet."""
        return self.pages - sum(self.gone)


class Part(NamedTuple):
    """Pages [low, high) of a block, in every tensor."""

    block: Block
    low: int
    high: int


class Span:
    """Pages of one or more blocks, in the order in which a slot maps them. Immutable.

    Attributes:
        parts: the parts, each of consecutive pages of one block.
        pages: number of pages per tensor in all parts together.
        unit_pages: number of pages per tensor in a sharing unit.
    """

    __slots__ = ("pages", "parts", "unit_pages")

    def __init__(self, parts: tuple[Part, ...], unit_pages: int = 1) -> None:
        self.parts = parts
        pages = 0
        for _, low, high in parts:
            pages += high - low
        self.pages = pages
        self.unit_pages = unit_pages

    def slice(self, first: int, last: int) -> Span:
        """Returns pages [first, last) of this span.

        Returns the span itself if these are all of its pages, so equal spans may be the same
        object.
        """
        if first <= 0 and last >= self.pages:
            return self
        parts = []
        at = 0
        for block, low, high in self.parts:
            begin, end = max(first - at, 0), min(last - at, high - low)
            if begin < end:
                parts.append(Part(block, low + begin, low + end))
            at += high - low
        return Span(tuple(parts), self.unit_pages)

    def part(self, page: int) -> tuple[Span, Span]:
        """Splits the span before `page`."""
        return self.slice(0, page), self.slice(page, self.pages)

    def split(self, units: int, missing: int = 0) -> tuple[Span, Span]:
        """Splits the span after the first `units` sharing units; called by `PrefixTree`.

        `missing` is how many of the first pages this span lacks because they have left a sliding
        window.
        """
        return self.part(max(0, units * self.unit_pages - missing))

    def __add__(self, other: Span) -> Span:
        """Concatenates two spans."""
        parts, more = self.parts, other.parts
        if parts and more and parts[-1].block is more[0].block and parts[-1].high == more[0].low:
            joined = Part(more[0].block, parts[-1].low, more[0].high)
            parts, more = parts[:-1], (joined, *more[1:])
        return Span(parts + more, other.unit_pages)

    def stretches(self, first: int = 0) -> list[Stretch]:
        """Returns the span's stretches in a slot that maps it from page `first` on."""
        found, at = [], first
        for block, low, high in self.parts:
            found.append((at, at + high - low, block.tier))
            at += high - low
        return found

    def __repr__(self) -> str:
        return f"<Span of {self.pages} pages in {len(self.parts)} parts>"


EMPTY = Span(())


class SharedPages:
    """Refcounts of a group's shared pages; all counts are pages per tensor.

    Attributes:
        pages: shared device pages, each counted once.
        used: shared device pages used by at least one request.
        uses: the same pages, counted once per request that uses them.
        off_device_uses: shared off-device pages, counted once per request that uses them.
        blocks: blocks with at least one page that has not been returned to the pool.
        lent: pages kept alive by `Reclaimer.lend`, in addition to slots, unmaps and prefixes.
        unheld: pages without a reference, still to be returned to the pool.
    """

    def __init__(self, layout: Layout, mapper: Mapper) -> None:
        self.layout = layout
        self._mapper = mapper
        self.pages = self.used = self.uses = self.off_device_uses = 0
        self.blocks: set[Block] = set()
        self.lent = EMPTY
        self.unheld: dict[Part, None] = {}

    def use_edits(
        self, uses: Mapping[Span, int], holds: Mapping[Span, int] = {}, new: Sequence[Part] = ()
    ) -> list[list[Any]]:
        """Returns the edits for requests that start or stop using shared pages.

        Args:
            uses: for each span, the change in the number of requests that use its pages; the spans
                must be held.
            holds: for each span, the change in the number of its holders. Pages whose count drops
                to 0 become `unheld`.
            new: new blocks, each as a part; this object owns their handles from now on.
        """
        edits: list[list[Any]] = []
        pages, used, total, off_device = self.pages, self.used, self.uses, self.off_device_uses
        for name, spans in (("users", uses), ("refs", holds)):
            copies: dict[Block, list[int]] = {}
            for span, count in spans.items():
                for block, low, high in span.parts:
                    numbers = getattr(block, name)
                    alone = len(spans) == len(span.parts) == 1
                    if not alone:  # the spans' parts may overlap, so count in a copy
                        numbers = copies[block] = copies.get(block) or numbers[:]
                    before = numbers[low:high]
                    after = list(map(add, before, repeat(count)))
                    if alone:
                        edits.append([numbers, slice(low, high), after])
                    else:
                        numbers[low:high] = after
                    if name == "refs":
                        if 0 in after:  # a page's count can drop to 0 only once
                            for part in _unheld(block, low, after):
                                edits.append([self.unheld, part, None])
                    elif block.off_device:
                        off_device += (high - low) * count
                    else:
                        total += (high - low) * count
                        used += before.count(0) - after.count(0)
            for block, numbers in copies.items():
                edits.append([getattr(block, name), slice(None), numbers])
        for block, *_ in new:
            edits.append([self.blocks, block, None])
            edits.append([self._mapper.journal.unrecorded, block.handle, ...])
            if block.off_device:
                off_device += sum(block.users)
            else:
                pages, used = pages + block.pages, used + block.pages
                total += sum(block.users)
        if uses or new:
            edits += (
                [self, "pages", pages],
                [self, "used", used],
                [self, "uses", total],
                [self, "off_device_uses", off_device],
            )
        return edits

    def hold(self, span: Span) -> None:
        """Adds a reference to each page of the span."""
        self._mapper.journal.change(self.use_edits({}, {span: 1}))

    def idle(self, span: Span, users: int = 0) -> int:
        """Counts the span's device pages that exactly `users` requests use."""
        found = 0
        for block, low, high in span.parts:
            if not block.off_device:
                found += block.users[low:high].count(users)
        return found

    def kept(self, spans: Iterable[Span]) -> int:
        """Counts the device pages in these spans that no request uses, each page once."""
        named: dict[Block, list[tuple[int, int]]] = {}
        for block, low, high in (part for span in spans for part in span.parts):
            if not block.off_device:
                named.setdefault(block, []).append((low, high))
        found = 0
        for block, ranges in named.items():
            end = 0
            for low, high in sorted(ranges):
                found += block.users[max(low, end) : high].count(0)
                end = max(end, high)
        return found

    def leaving(self, spans: Sequence[Span]) -> int:
        """Counts the device pages that only these spans hold.

        Dropping the spans frees these pages.
        """
        held: dict[Block, list[int]] = {}
        for block, low, high in (part for span in spans for part in span.parts):
            if not block.off_device:
                counts = held.setdefault(block, [0] * block.pages)
                counts[low:high] = map(add, counts[low:high], repeat(1))
        found = 0
        for block, counts in held.items():
            found += sum(0 < held == refs for held, refs in zip(counts, block.refs, strict=True))
        return found

    def drop(self, part: Part, edits: list[list[Any]]) -> None:
        """Returns unheld pages to the pool and applies `edits`.

        Raises:
            OutOfMemory: there is no heap memory for the handle's bookkeeping; nothing has changed.
        """
        block, low, high = part
        journal, pages = self._mapper.journal, high - low
        edits += (
            [block.gone, slice(low, high), [True] * pages],
            [self, "pages", self.pages - (0 if block.off_device else pages)],
            [self.unheld, part, ...],
        )
        last = pages == block.live
        if last:
            edits += ([self.blocks, block, ...], [journal.unrecorded, block.handle, None])
        size, tensors = self.layout.page_size, self.layout.num_tensors
        self._mapper.drop_range(
            edits, block.handle, low * size, pages * size, tensors, block.pages * size
        )
        if last:  # release it now, since an exception at the end of the call cannot undo the drop
            with suppress(VMemError):
                block.handle.abandon()
            journal.unrecorded.pop(block.handle, None)

    def close(self) -> None:
        """Drops every remaining handle, even if its pages are held."""
        journal = self._mapper.journal
        for block in list(self.blocks):
            journal.change([[self.blocks, block, ...], [journal.unrecorded, block.handle, None]])
        self.unheld = {}
        self.pages = self.used = self.uses = self.off_device_uses = 0

    def check(self, held: list[Span], used: list[Span]) -> list[str]:
        """Compares the counts with the spans that are held and used.

        Returns a description of each contradiction.
        """
        found = []
        for name, spans in (("refs", [*held, self.lent]), ("users", used)):
            want: dict[Block, list[int]] = {block: [0] * block.pages for block in self.blocks}
            for block, low, high in (part for span in spans for part in span.parts):
                if block not in want:
                    found.append(f"a span refers to a freed block of {block.pages} pages")
                    continue
                for page in range(low, high):
                    want[block][page] += 1
            for block, counts in want.items():
                if getattr(block, name) != counts:
                    found.append(f"block {name}: recorded {getattr(block, name)}, counted {counts}")
        late = sum(part.high - part.low for part in self.unheld)
        live = sum(sum(map(bool, block.refs)) for block in self.blocks) + late
        if live != sum(block.live for block in self.blocks):
            found.append(f"counted {live} shared pages per tensor, not as many as are live")
        here = [block for block in self.blocks if not block.off_device]
        if self.pages != sum(block.live for block in here):
            found.append(f"recorded {self.pages} shared pages per tensor, not as many as are live")
        parts = [part for span in used for part in span.parts]
        for name, off_device in (("uses", False), ("off_device_uses", True)):
            uses = sum(high - low for block, low, high in parts if block.off_device == off_device)
            if getattr(self, name) != uses:
                found.append(f"shared {name}: recorded {getattr(self, name)}, counted {uses}")
        busy = sum(sum(map(bool, block.users)) for block in here)
        if busy != self.used:
            found.append(f"shared pages in use per tensor: recorded {self.used}, counted {busy}")
        return found

    def off_device(self) -> Counter[Tier]:
        """Returns the number of shared off-device pages per tensor, by tier."""
        return pages_by_tier((0, one.live, one.tier) for one in self.blocks if one.off_device)


def _unheld(block: Block, low: int, refs: Sequence[int]) -> list[Part]:
    """Returns the maximal ranges of zeros in `refs`, the refcounts of pages from `low` on."""
    found = []
    for held, run in groupby(refs, bool):
        high = low + len(list(run))
        if not held:
            found.append(Part(block, low, high))
        low = high
    return found
