# SPDX-License-Identifier: MIT
"""Physical pages that several places share, each counted once.

A *block* is what was shared in one go: pages of a slot that follow one another, in every tensor,
behind one handle. In the handle lies one tensor after the other:

    | tensor 0: page 0 ... pages - 1 | tensor 1: page 0 ... pages - 1 | ...

A *span* names pages of one or more blocks; it is a value, and cutting one costs and changes
nothing. Who keeps a span holds a reference to each of its pages (`SharedPages.hold`, shared.py): a
slot that has them mapped, a batch that unmaps them, a recorded prefix. With its last reference a
page goes back to the pool, also out of the middle of a block.

The pages of a block are of one kind (places.py). Large ones are counted as the small pages that
they stand for, and a recorded prefix may name a part of one; but they are mapped as a whole, and go
back when none of their parts is referred to. A prefix that begins in the middle of a large page has
a *lead*: the pages of its own from the last border on, so that the way to it can be mapped without
the part that another prefix has:

    | large page of X: units 0 ... 511 |             recorded first
    | 0 1 2 | 3 ... small pages of Z                 recorded second, agrees in units 0 to 2
      lead    what the tree's node stands for
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.kvcache.places import PLAIN, Kind, Stretch

if TYPE_CHECKING:
    from pyvmem.pages import Pages

__all__ = ["EMPTY", "Block", "Part", "Span"]


class Block:
    """Pages shared in one go.

    Attributes:
        handle: all pages, of every tensor.
        pages: pages per tensor.
        refs: for each page, the spans held that name it.
        users: for each page, the requests among them.
        events: GPU work that wrote the pages, as far as it is not known to be over.
        kind: of all its pages.
        gone: for each page, whether it has gone back.
    """

    __slots__ = ("events", "gone", "handle", "kind", "pages", "refs", "users")

    def __init__(self, handle: Pages, pages: int, events: list[Any], kind: Kind = PLAIN) -> None:
        self.handle = handle
        self.kind = kind
        self.pages = pages
        self.gone = [False] * pages
        self.refs = [0] * pages
        self.users = [0] * pages
        self.events = events

    @property
    def live(self) -> int:
        """Pages that have not gone back."""
        return self.pages - sum(self.gone)


class Part(NamedTuple):
    """Pages [low, high) of a block, in every tensor."""

    block: Block
    low: int
    high: int


class Span:
    """Pages of blocks, in the order in which a slot has them. Immutable.

    Attributes:
        parts: of one block each.
        pages: of all parts together, per tensor.
        unit_pages: pages per tensor of a sharing unit, what `split` counts in.
        lead: the first pages that are not counted by `split`.
    """

    __slots__ = ("lead", "pages", "parts", "unit_pages")

    def __init__(self, parts: tuple[Part, ...], unit_pages: int = 1, lead: int = 0) -> None:
        self.parts = parts
        self.pages = sum(part.high - part.low for part in parts)
        self.unit_pages = unit_pages
        self.lead = lead

    def cut(self, first: int, last: int) -> Span:
        """Pages [first, last) of this span."""
        parts = []
        at = 0
        for block, low, high in self.parts:
            begin, end = max(first - at, 0), min(last - at, high - low)
            if begin < end:
                parts.append(Part(block, low + begin, low + end))
            at += high - low
        return Span(tuple(parts), self.unit_pages)

    def split(self, units: int) -> tuple[Span, Span]:
        """The first `units` sharing units, and the rest: what `PrefixTree` asks of a span."""
        middle = self.lead + units * self.unit_pages
        first = self.cut(0, middle)
        first.lead = self.lead
        return first, self.cut(middle, self.pages)

    def __add__(self, other: Span) -> Span:
        """This span up to the other's lead, then the other."""
        parts, more = self.parts, other.parts
        if other.lead:
            parts = self.cut(0, self.pages - other.lead).parts
        if parts and more and parts[-1].block is more[0].block and parts[-1].high == more[0].low:
            joined = Part(more[0].block, parts[-1].low, more[0].high)
            parts, more = parts[:-1], (joined, *more[1:])
        return Span(parts + more, other.unit_pages)

    def stretches(self) -> list[Stretch]:
        """Its pages by kind, as a slot that begins with it has them."""
        found, at = [], 0
        for block, low, high in self.parts:
            found.append((at, at + high - low, block.kind))
            at += high - low
        return found

    def floor(self, pages: int) -> int:
        """The last place up to `pages` where no physical page is cut; the span begins a slot."""
        at = 0
        for block, low, high in self.parts:
            if at < pages < at + high - low:
                return pages - (low + pages - at) % block.kind.unit
            at += high - low
        # The end of the span may lie within a page that another prefix has the rest of.
        if self.parts and pages == self.pages:
            return pages - self.parts[-1].high % self.parts[-1].block.kind.unit
        return pages

    def __repr__(self) -> str:
        return f"<Span of {self.pages} pages in {len(self.parts)} parts>"


EMPTY = Span(())
