# SPDX-License-Identifier: MIT
"""Physical pages that several places share, each counted once.

A *block* is what was shared in one go: pages of a slot that follow one another, in every tensor,
behind one handle. In the handle lies one tensor after the other:

    | tensor 0: page 0 ... pages - 1 | tensor 1: page 0 ... pages - 1 | ...

A *span* names pages of one or more blocks; it is a value, and cutting one costs and changes
nothing. Who keeps a span holds a reference to each of its pages (`SharedPages.hold`): a slot that
has them mapped, a batch that unmaps them, a recorded prefix. With its last reference a page goes
back to the pool, also out of the middle of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.errors import OutOfMemory
from pyvmem.kvcache.layout import Layout

if TYPE_CHECKING:
    from pyvmem.pages import Pages

__all__ = ["EMPTY", "Block", "Part", "SharedPages", "Span"]


class Block:
    """Pages shared in one go.

    Attributes:
        handle: all pages, of every tensor.
        pages: pages per tensor.
        refs: for each page, the spans held that name it.
        users: for each page, the requests among them.
        events: GPU work that wrote the pages, as far as it is not known to be over.
    """

    __slots__ = ("events", "handle", "live", "pages", "refs", "users")

    def __init__(self, handle: Pages, pages: int, events: list[Any]) -> None:
        self.handle = handle
        self.pages = self.live = pages
        self.refs = [0] * pages
        self.users = [0] * pages
        self.events = events


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
    """

    __slots__ = ("pages", "parts", "unit_pages")

    def __init__(self, parts: tuple[Part, ...], unit_pages: int = 1) -> None:
        self.parts = parts
        self.pages = sum(part.high - part.low for part in parts)
        self.unit_pages = unit_pages

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
        middle = units * self.unit_pages
        return self.cut(0, middle), self.cut(middle, self.pages)

    def __add__(self, other: Span) -> Span:
        return Span(self.parts + other.parts, other.unit_pages)

    def __repr__(self) -> str:
        return f"<Span of {self.pages} pages in {len(self.parts)} parts>"


EMPTY = Span(())


class SharedPages:
    """The references to shared pages; all counts are of pages per tensor.

    Attributes:
        pages: shared pages, each counted once.
        used: of these, pages that a request uses.
        uses: the same, counted once for each request.
        blocks: those that have a page left.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pages = self.used = self.uses = 0
        self.blocks: set[Block] = set()
        self._late: list[Part] = []

    def adopt(self, handle: Pages, pages: int, events: list[Any], unit_pages: int) -> Span:
        """A new block; it owns the handle. The span is not held yet."""
        block = Block(handle, pages, events)
        self.blocks.add(block)
        self.pages += pages
        return Span((Part(block, 0, pages),), unit_pages)

    def hold(self, span: Span) -> None:
        """Adds a reference to each page."""
        for block, low, high in span.parts:
            refs = block.refs
            for page in range(low, high):
                refs[page] += 1

    def use(self, span: Span) -> None:
        """Notes that a request uses the pages; whoever calls it holds the span."""
        self.uses += span.pages
        for block, low, high in span.parts:
            users = block.users
            for page in range(low, high):
                self.used += not users[page]
                users[page] += 1

    def unuse(self, span: Span) -> None:
        """Takes one `use` back."""
        self.uses -= span.pages
        for block, low, high in span.parts:
            users = block.users
            for page in range(low, high):
                users[page] -= 1
                self.used -= not users[page]

    def idle(self, span: Span) -> int:
        """Pages of the span that no request uses."""
        return sum(
            not block.users[page] for block, low, high in span.parts for page in range(low, high)
        )

    def release(self, span: Span) -> int:
        """Takes one `hold` back; returns the pages per tensor that went to the pool."""
        gone = self._late
        self._late = []
        for block, low, high in span.parts:
            refs = block.refs
            for page in range(low, high):
                refs[page] -= 1
            gone.extend(_unreferenced(block, low, high))
        return sum(self._drop(part) for part in gone)

    def _drop(self, part: Part) -> int:
        """Gives pages back that nobody refers to."""
        block, low, high = part
        size, pages = self.layout.page_size, high - low
        try:
            if pages == block.live:
                block.handle.drop()
                self.blocks.remove(block)
            else:
                block.handle.drop_range(
                    low * size, pages * size, self.layout.num_tensors, block.pages * size
                )
        except OutOfMemory:  # heap for the handle's books; the next release tries again
            self._late.append(part)
            return 0
        block.live -= pages
        self.pages -= pages
        return pages

    def close(self) -> None:
        """Drops every handle that is left, whoever holds its pages."""
        for block in self.blocks:
            block.handle.drop()
        self.blocks.clear()
        self._late.clear()
        self.pages = self.used = self.uses = 0

    def check(self, held: list[Span], used: list[Span]) -> list[str]:
        """Compares the counts with the spans that are held and used; what contradicts, in words."""
        found = []
        for name, spans in (("refs", held), ("users", used)):
            want: dict[Block, list[int]] = {block: [0] * block.pages for block in self.blocks}
            for block, low, high in (part for span in spans for part in span.parts):
                if block not in want:
                    found.append(f"a span names a block of {block.pages} pages that is gone")
                    continue
                for page in range(low, high):
                    want[block][page] += 1
            for block, counts in want.items():
                if getattr(block, name) != counts:
                    found.append(f"a block has {name} {getattr(block, name)}, counted {counts}")
        late = sum(high - low for _, low, high in self._late)
        live = sum(sum(map(bool, block.refs)) for block in self.blocks) + late
        if live != self.pages or self.pages != sum(block.live for block in self.blocks):
            found.append(f"{self.pages} shared pages per tensor, counted {live}")
        if self.uses != sum(span.pages for span in used):
            found.append(f"{self.uses} uses of shared pages, of {sum(s.pages for s in used)}")
        busy = sum(sum(map(bool, block.users)) for block in self.blocks)
        if busy != self.used:
            found.append(f"{self.used} shared pages in use per tensor, counted {busy}")
        return found


def _unreferenced(block: Block, low: int, high: int) -> Iterator[Part]:
    """The longest stretches of [low, high) that nobody refers to."""
    start = low
    for page in range(low, high + 1):
        if page < high and not block.refs[page]:
            continue
        if start < page:
            yield Part(block, start, page)
        start = page + 1
